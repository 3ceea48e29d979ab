"""Commands in a folder with an ingested corpus."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import CommandRunner, ingest_sample


@pytest.fixture(scope="session")
def ingested(tmp_path_factory):
    """A directory with an ingested corpus, to be copied."""
    return ingest_sample(tmp_path_factory.mktemp("ingested"))


@pytest.fixture
def home(ingested, tmp_path):
    """A copy of the directory with the ingested corpus."""
    return Path(shutil.copytree(ingested, tmp_path / "home"))


@pytest.fixture
def run(home, monkeypatch, capsys):
    """Runs commands in `home`."""
    monkeypatch.chdir(home)
    return CommandRunner(capsys)
