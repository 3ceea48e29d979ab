"""Random additions and releases leave what a dictionary of owners says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from, tuples
from postgres import fresh_schema

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.catalog.stored_documents import list_added
from ragblend.files.store_folder import CATALOG_FILE

TEXTS = [*(f"text {number}" for number in range(3)), "nul \x00 in it", "\x1a0 \x1a", "\x1a1 \x00"]
DOCUMENTS = [DocumentKey("a", "1"), DocumentKey("a/1", ""), DocumentKey("", "a/1"), DocumentKey("b", "1")]
OPERATIONS = tuples(
    sampled_from(["add", "release", "replace"]),
    sampled_from(DOCUMENTS),
    lists(sampled_from(TEXTS), max_size=4),
    sampled_from([0, 1]),
)


@contextmanager
def new_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, CATALOG_FILE)


@settings(max_examples=40, deadline=None)
@given(operations=lists(OPERATIONS, max_size=25))
def test_a_text_is_there_while_a_document_owns_it(operations):
    check(operations, new_file())


@settings(max_examples=10, deadline=None)
@given(operations=lists(OPERATIONS, max_size=25))
def test_a_text_is_in_postgresql_while_a_document_owns_it(postgres, operations):
    check(operations, fresh_schema(postgres))


def check(operations: list[tuple[str, DocumentKey, list[str], int]], new: AbstractContextManager[str | Path]) -> None:
    owned: dict[DocumentKey, set[str]] = {name: set() for name in DOCUMENTS}
    with new as place:
        ledgers = [Ledger(place) for _ in range(2)]
        for number, (operation, document, texts, which) in enumerate(operations):
            ledger = ledgers[which]
            before = set().union(*owned.values())
            if operation == "add":
                owned[document] |= {*texts}
                padded = dict.fromkeys((f" {text}\n" for text in texts), 0)
                assert ledger.add_texts({document: padded}) == len({*texts} - before)
            else:
                kept = {*texts} & owned[document] if operation == "replace" else owned[document] - {*texts}
                released = owned[document] - kept
                owned[document] = kept
                orphans = released - set().union(*owned.values())
                assert {*ledger.remove_texts({document: released}, "")} == orphans
            ledger.add_ids([(text, range(number)) for text in texts if text in {*ledger.texts()}], "t", "")
            other = ledgers[1 - which]
            everything = set().union(*owned.values())
            assert {*other.texts()} == everything
            assert {text for text in TEXTS if other.has_ids(text, "t", "")} <= everything
            num_texts = {each.key: each.num_chunks for each in list_added(other, with_indexes=True)}
            assert num_texts == {name: len(owned[name]) for name in DOCUMENTS if owned[name]}
            assert all(other.texts_of(name) == owned[name] for name in DOCUMENTS)
        assert ledgers[0].find_problems() == []
        for ledger in ledgers:
            ledger.close()
