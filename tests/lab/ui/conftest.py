"""Servers of the page: one over two records of the sample corpus, and one over an empty store."""

from dataclasses import replace

import pytest
from ui_site import open_for, running, settings_in

from ragblend.demo.corpus import sample_corpus
from ragblend.precompute import ingest

RECORDS = ("security-review.md", "budget-workshop.md")


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """Settings of a folder into which the two records were ingested."""
    home = tmp_path_factory.mktemp("ui")
    settings, corpus = settings_in(home), sample_corpus()
    corpus.write(home / "corpus")
    engine, index = open_for(settings)
    with engine, index:
        ingest([home / "corpus" / name for name in RECORDS], engine, index)
    return settings


@pytest.fixture(scope="session")
def site(filled):
    """Server over the two records, shared by tests that do not change them."""
    with running(filled) as made:
        yield made


@pytest.fixture
def empty(tmp_path):
    """Server over an empty store, with a file size limit of 1 MiB."""
    with running(replace(settings_in(tmp_path), max_file_mib=1.0)) as made:
        yield made
