"""The documents of a catalogue by name, on every database."""

from __future__ import annotations

import pytest

from ragblend.catalog import sent_documents
from ragblend.catalog.registry import ChunkRegistry
from ragblend.catalog.schema import DocumentFacts, DocumentKey, SentDocumentCounts, text_key
from ragblend.catalog.sent_documents import SentDocument
from ragblend.catalog.stored_documents import (
    StoredDocument,
    count_by_collection,
    find_entries,
    ids_beginning_with,
    list_documents,
)

A, B, Z = DocumentKey("kb", "a"), DocumentKey("kb", "b\x00"), DocumentKey("notes", "z")
THEIRS = DocumentKey("kb", "a", "tenant")


@pytest.fixture
def registry(kept_place):
    with ChunkRegistry(kept_place) as opened:
        opened.add(["one", "two"], A)
        opened.add_documents({B: {"two": 0}, THEIRS: {"three": 0}})
        opened.set_facts({A: DocumentFacts("1", "a.txt"), B: DocumentFacts("", "b.txt")})
        sent_documents.add(opened, "", [SentDocument("kb", "a", "1", {"text": "one"}, {"source": "sent.txt"})])
        sent_documents.add(opened, "", [SentDocument("notes", "z", "1", {"text": "zed"}, {})])
        (waiting, *_) = sent_documents.next_waiting(opened, 1, 1000)
        sent_documents.record_outcome(opened, waiting, SentDocumentCounts(), "no reason", is_stored=False)
        yield opened


def test_all_kinds_are_listed_once_in_order_and_page_by_page(registry):
    a = StoredDocument(A, "a.txt", 2, "", "failed", "no reason")
    every = [a, StoredDocument(B, "b.txt", 1), StoredDocument(Z, "", 0, "", "pending")]
    assert list_documents(registry, None, "") == every
    assert list_documents(registry, None, "tenant") == [StoredDocument(THEIRS, "", 1)]
    assert {each.key for each in list_documents(registry, None)} == {A, B, Z, THEIRS}
    assert list_documents(registry, None, "", "notes") == every[2:]
    found, after = list[StoredDocument](), ("", "")
    while page := list_documents(registry, None, "", after=after, limit=1):
        found += page
        after = page[0].key[:2]
    assert found == every
    assert count_by_collection(registry)["kb (namespace tenant)"] == {"num_documents": 1, "num_chunks": 1}
    assert ids_beginning_with(registry, "a", "kb", "") == ["a"]


def test_an_index_of_another_folder_is_listed_without_an_id(registry):
    registry.add(["four"], DocumentKey("index:1"))
    assert list_documents(registry, None, "", "index:1") == [StoredDocument(DocumentKey("index:1"), "", 1)]
    assert "index:1" not in count_by_collection(registry)


def test_entries_are_found_for_every_tokenizer_and_only_their_own_namespace(registry):
    registry.add_ids([("one", (1, 2)), ("two", (3, 4))], "first", "")
    registry.add_ids([("one", (5,))], "second", "")
    registry.record_entry_chunk("alone", (1, 2), "")
    registry.record_entry_chunk("by another tokenizer", (5,), "")
    registry.record_entry_chunk("theirs", (1, 2), "tenant")
    found = dict(find_entries(registry, [text_key("one"), text_key("two")], ""))
    assert {key: sorted(entries) for key, entries in found.items()} == {
        text_key("one"): ["alone", "by another tokenizer"],
        text_key("two"): [],
    }


def test_texts_behind_an_offset_are_told_from_those_before(registry):
    long = "x" * 100
    registry.add_documents({Z: {long: 0, "y" * 100: 100}})
    assert registry.texts_of(Z, before=60) == {long}
    assert registry.texts_of(Z, before=160) == {long, "y" * 100}
    registry.add_documents({Z: {"y" * 100: 300}})
    assert registry.texts_of(Z, before=160) == {long}, "its offset has changed"
