"""Servers of the page for tests: one over two records of the sample corpus, one over nothing yet."""

from dataclasses import replace

import pytest
from ui_site import open_for, running, settings_in

from ragblend.demo.corpus import sample_corpus
from ragblend.precompute import ingest

RECORDS = ("security-review.md", "budget-workshop.md")


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """Settings of a place that holds the two records."""
    home = tmp_path_factory.mktemp("ui")
    settings, corpus = settings_in(home), sample_corpus()
    corpus.write(home / "corpus")
    engine, index = open_for(settings)
    with engine, index:
        ingest([home / "corpus" / name for name in RECORDS], engine, index)
    return settings


@pytest.fixture(scope="session")
def site(filled):
    """A server over the records, for tests that leave them there."""
    with running(filled) as made:
        yield made


@pytest.fixture
def empty(tmp_path):
    """A server over nothing yet, which takes files of 1 MiB."""
    with running(replace(settings_in(tmp_path), max_file_mib=1.0)) as made:
        yield made
