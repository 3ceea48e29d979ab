"""The documents of a catalogue by name, on every database."""

from __future__ import annotations

import pytest

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentFacts, DocumentKey, SentDocumentCounts, text_key
from ragblend.catalog.sent_documents import SentDocument
from ragblend.catalog.stored_documents import (
    StoredDocument,
    count_by_collection,
    list_documents,
)

A, B, Z = DocumentKey("kb", "a"), DocumentKey("kb", "b\x00"), DocumentKey("notes", "z")
THEIRS = DocumentKey("kb", "a", "tenant")


@pytest.fixture
def ledger(kept_place):
    with Ledger(kept_place) as opened:
        opened.add_texts({A: {"one": 0, "two": 0}})
        opened.add_texts({B: {"two": 0}, THEIRS: {"three": 0}})
        opened.set_facts({A: DocumentFacts("1", "a.txt"), B: DocumentFacts("", "b.txt")})
        opened.add_sent("", [SentDocument("kb", "a", "1", {"text": "one"}, {"source": "sent.txt"})])
        opened.add_sent("", [SentDocument("notes", "z", "1", {"text": "zed"}, {})])
        (waiting, *_) = opened.next_waiting(1, 1000)
        opened.record_outcome(waiting, SentDocumentCounts(), "no reason", is_stored=False)
        yield opened


def test_all_kinds_are_listed_once_in_order_and_page_by_page(ledger):
    a = StoredDocument(A, "a.txt", 2, "", "failed", "no reason")
    every = [a, StoredDocument(B, "b.txt", 1), StoredDocument(Z, "", 0, "", "pending")]
    assert list_documents(ledger, ledger, "") == every
    assert list_documents(ledger, ledger, "tenant") == [StoredDocument(THEIRS, "", 1)]
    assert {each.key for each in list_documents(ledger, ledger)} == {A, B, Z, THEIRS}
    assert list_documents(ledger, ledger, "", "notes") == every[2:]
    found, after = list[StoredDocument](), ("", "")
    while page := list_documents(ledger, ledger, "", after=after, limit=1):
        found += page
        after = page[0].key[:2]
    assert found == every
    assert count_by_collection(ledger)["kb (namespace tenant)"] == {"num_documents": 1, "num_chunks": 1}
    assert ledger.ids_beginning_with("a", "kb", "") == ["a"]


def test_an_index_of_another_folder_is_listed_without_an_id(ledger):
    ledger.add_texts({DocumentKey("index:1"): {"four": 0}})
    assert list_documents(ledger, ledger, "", "index:1") == [StoredDocument(DocumentKey("index:1"), "", 1)]
    assert "index:1" not in count_by_collection(ledger)


def test_entries_are_found_for_every_tokenizer_and_only_their_own_namespace(ledger):
    ledger.add_ids([("one", (1, 2)), ("two", (3, 4))], "first", "")
    ledger.add_ids([("one", (5,))], "second", "")
    ledger.record_entry_chunk("alone", (1, 2), "")
    ledger.record_entry_chunk("by another tokenizer", (5,), "")
    ledger.record_entry_chunk("theirs", (1, 2), "tenant")
    found = ledger.entries_of_texts([text_key("one"), text_key("two")], "")
    assert {key: sorted(entries) for key, entries in found.items()} == {
        text_key("one"): ["alone", "by another tokenizer"],
        text_key("two"): [],
    }


def test_texts_behind_an_offset_are_told_from_those_before(ledger):
    long = "x" * 100
    ledger.add_texts({Z: {long: 0, "y" * 100: 100}})
    assert ledger.texts_of(Z, before=60) == {long}
    assert ledger.texts_of(Z, before=160) == {long, "y" * 100}
    ledger.add_texts({Z: {"y" * 100: 300}})
    assert ledger.texts_of(Z, before=160) == {long}, "its offset has changed"
