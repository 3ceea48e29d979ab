"""Adding never deletes what another caller added: owners in the catalogue decide what is deleted."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from ragblend import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion.documents import delete_precomputed
from ragblend.precompute import ingest, precompute_documents

BASALT, SLATE, CHALK = "Basalt is a volcanic rock.", "Slate splits into thin plates.", "Chalk is a soft limestone."


@pytest.fixture
def engine(tmp_path):
    with load_engine("demo", tmp_path / "store", on_miss="inline") as opened:
        yield opened


def add(engine: TransformersEngine, text: str, document_id: str, collection: str = "langchain") -> None:
    precompute_documents([Document(text)], engine, ids=[document_id], collection=collection)


def test_two_namespaces_with_one_id_in_one_collection_keep_both_documents(engine, tmp_path):
    with load_engine("demo", tmp_path / "store", namespace="tenant", on_miss="inline") as tenant:
        add(engine, BASALT, "1")
        add(tenant, SLATE, "1")
        add(engine, SLATE, "2")
        assert (engine.is_stored(BASALT), tenant.is_stored(SLATE)) == (True, True)
        assert delete_precomputed(["1"], tenant) == 1, "what another namespace has of a text is its own"
        assert (engine.is_stored(SLATE), tenant.is_stored(SLATE)) == (True, False)
        assert (SLATE in engine.known_chunks, SLATE in tenant.known_chunks) == (True, False)


def test_a_text_of_two_collections_that_leaves_one_keeps_its_kv(engine, tmp_path):
    (tmp_path / "slate.txt").write_text(SLATE)
    ingest(tmp_path / "slate.txt", engine, tmp_path / "store")
    add(engine, SLATE, "1")
    add(engine, SLATE, "1", collection="other")
    for collection in ("langchain", "other"):
        assert delete_precomputed(["1"], engine, collection=collection) == 0
        assert engine.is_stored(SLATE)
    (tmp_path / "slate.txt").write_text(CHALK)
    ingest(tmp_path / "slate.txt", engine, tmp_path / "store")
    assert [engine.is_stored(text) for text in (SLATE, CHALK)] == [False, True]
