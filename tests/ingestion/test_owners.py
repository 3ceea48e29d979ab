"""Adding never deletes what another caller added: owners in the catalogue decide what is deleted."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from ragblend import load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.stored_documents import StoredDocument, list_added
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.ingestion.documents import delete_precomputed, find_stored_documents, remove_stored_documents
from ragblend.operations.maintenance import collect_garbage
from ragblend.precompute import ingest, precompute_documents

BASALT, SLATE, CHALK = "Basalt is a volcanic rock.", "Slate splits into thin plates.", "Chalk is a soft limestone."
MARBLE = "Marble was limestone once."


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


def test_collections_with_similar_names_and_ids_are_different(engine):
    add(engine, BASALT, "c", collection="a/b")
    add(engine, SLATE, "b/c", collection="a")
    assert [engine.is_stored(text) for text in (BASALT, SLATE)] == [True, True]


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


def test_what_a_command_names_is_removed_from_one_collection(engine):
    for collection, text in (("first", BASALT), ("second", SLATE), ("second", CHALK)):
        add(engine, text, "2" if text == CHALK else "1", collection)
    ledger = open_ledger(engine.store)

    def find(name: str) -> list[StoredDocument]:
        return find_stored_documents(name, list_added(ledger), engine.namespace)

    with pytest.raises(UsageError, match="'1' is a document in the collections 'first', 'second'; name one"):
        find("1")
    assert find("unknown") == []
    assert remove_stored_documents(find("first/1"), engine, None) == (1, 1)
    assert [engine.is_stored(text) for text in (BASALT, SLATE, CHALK)] == [False, True, True]
    assert remove_stored_documents(find("second"), engine, None) == (2, 2)
    assert list_added(ledger) == []
    ledger.close()


def test_gc_of_orphans_keeps_what_documents_have(engine, tmp_path):
    (tmp_path / "slate.txt").write_text(SLATE)
    ingest(tmp_path / "slate.txt", engine, tmp_path / "store")
    add(engine, BASALT, "1")
    precompute_documents([CHALK], engine)
    engine.precompute(MARBLE)  # a chunk of no document
    for dry_run in (True, False):
        report = collect_garbage(tmp_path / "store", orphans=True, dry_run=dry_run)
        assert report.evicted == (engine.key(MARBLE),)
    stored = {*DiskStore(tmp_path / "store", create=False).keys()}  # the engine's memory has them still
    assert stored == {engine.key(text) for text in (BASALT, SLATE, CHALK)}
