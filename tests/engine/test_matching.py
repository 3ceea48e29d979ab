"""KnownChunks finds the registered chunks of one tokenizer and one namespace, added by any process."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ragblend.catalog.database import delete_catalog_files
from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.engine.matching import KnownChunks, open_known_chunks
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.types import ChunkRun

Ids = tuple[int, ...]


def ids_of(number: int, length: int = 40) -> Ids:
    """The ids of the chunk of this number."""
    rng = random.Random(number)
    return tuple(rng.randrange(50_000) for _ in range(length))


def chunks_found(known: KnownChunks, count: int) -> set[int]:
    """The numbers below `count` of the chunks that are found, whole, in a prompt of all of them."""
    prompt = [token for number in range(count) for token in (1, *ids_of(number))]
    starts = {1 + 41 * number: number for number in range(count)}
    runs = known.find_runs(prompt)
    assert runs == [ChunkRun(ids_of(starts[run.start]), 0, run.start, run.start + 40) for run in runs]
    return {starts[run.start] for run in runs}


def add(known: KnownChunks, numbers: Sequence[int]) -> None:
    known.add([f"text {number}" for number in numbers], lambda text: ids_of(int(text.split()[1])))


@pytest.fixture
def path(tmp_path):
    return tmp_path / CATALOG_FILE


def test_two_objects_on_one_file_see_what_the_other_adds_and_removes(kept_place):
    one, other = (KnownChunks(Ledger(kept_place), "t", "") for _ in range(2))
    assert chunks_found(one, 3) == chunks_found(other, 3) == set()
    add(one, [0, 1])
    assert chunks_found(one, 3) == chunks_found(other, 3) == {0, 1}
    add(other, [2])
    other.remove("text 0")
    assert chunks_found(one, 3) == chunks_found(other, 3) == {1, 2}
    assert ("text 0" in one, "text 2" in one) == (False, True)
    one.add(["text 0"], lambda _: ids_of(3))  # the text again, with the ids of another tokenization
    assert chunks_found(other, 4) == {1, 2, 3}


def test_chunks_are_found_in_the_file_that_replaced_the_open_one(path):
    known = KnownChunks(Ledger(path), "t", "")
    add(known, [0, 1])
    assert chunks_found(known, 5) == {0, 1}
    delete_catalog_files(path.parent)
    assert chunks_found(known, 5) == set()
    add(known, [0])  # the removed file has its ids
    assert chunks_found(known, 5) == {0}
    assert Ledger(path).count_tokenized_texts("t", "") == 1
    with Ledger(path.parent / "other" / CATALOG_FILE) as other:
        for number in range(2, 5):
            add(KnownChunks(other, "t", ""), [number])
    delete_catalog_files(path.parent)
    (path.parent / "other" / CATALOG_FILE).replace(path)
    assert chunks_found(known, 5) == {2, 3, 4}


def test_processes_see_what_the_other_adds_and_removes(kept_place):
    known = KnownChunks(Ledger(kept_place), "t", "")
    add(known, [0, 1])
    assert chunks_found(known, 3) == {0, 1}
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from ragblend.catalog.ledger import Ledger\n"
        "from ragblend.engine.matching import KnownChunks\n"
        "from engine.test_matching import add, chunks_found\n"
        "known = KnownChunks(Ledger(sys.argv[1]), 't', '')\n"
        "assert chunks_found(known, 3) == {0, 1}; add(known, [2]); known.remove('text 0')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(kept_place), str(Path(__file__).parents[1])], check=True)
    assert chunks_found(known, 3) == {1, 2}


def test_additions_and_removals_in_any_order_are_followed(kept_place):
    """After many removals the index is built again, after few it is not; the ledger may be closed in between."""
    rng, count, expected = random.Random(0), 30, set[int]()
    writer, reader = (KnownChunks(Ledger(kept_place), "t", "") for _ in range(2))
    for _ in range(40):
        numbers = rng.sample(range(count), rng.choice([1, 2, 20]))
        if rng.random() < 0.5:
            add(writer, numbers)
            expected |= {*numbers}
        else:
            for number in numbers:
                writer.remove(f"text {number}")
            expected -= {*numbers}
        if rng.random() < 0.3:
            rng.choice([writer, reader]).close()
        if rng.random() < 0.7:
            assert chunks_found(rng.choice([writer, reader]), count) == expected
    assert chunks_found(writer, count) == chunks_found(reader, count) == expected


def test_namespaces_and_tokenizers_are_apart(any_place):
    ledger = Ledger(any_place)
    owners = [("t", ""), ("t", "a"), ("u", ""), ("u", "a")]
    known = [open_known_chunks(ledger, *owner) for owner in owners]
    for number, each in enumerate(known):
        ids = {"the same text": ids_of(number), f"text {number}": ids_of(number + 4)}
        each.add(ids, ids.__getitem__)
    for number, each in enumerate(known):
        assert chunks_found(each, 8) == {number, number + 4}
        assert [f"text {other}" in each for other in range(4)] == [other == number for other in range(4)]
    known[0].remove("the same text")
    assert [len(chunks_found(each, 8)) for each in known] == [1, 2, 2, 2]
    ledger.remove_texts({DocumentKey(): ["the same text"]}, "")  # of every namespace
    assert [chunks_found(each, 8) for each in known] == [{number + 4} for number in range(4)]


def test_ledgers_of_a_file_share_one_index_and_others_do_not(kept_place):
    one, other = (open_known_chunks(Ledger(kept_place), "t", "") for _ in range(2))
    assert one is other
    assert one is not open_known_chunks(Ledger(kept_place), "t", "a")
    ledgers = [Ledger(), Ledger()]
    first, second = (open_known_chunks(ledger, "t", "") for ledger in ledgers)
    assert first is open_known_chunks(ledgers[0], "t", "")
    add(first, [0])
    assert (chunks_found(first, 1), chunks_found(second, 1)) == ({0}, set())


DAMAGES = {
    "other ids": "UPDATE token_ids SET ids = (SELECT ids FROM token_ids WHERE number = 2) WHERE number = 1",
    "ids cut": "UPDATE token_ids SET ids = substr(ids, 1, 81) WHERE number = 1",
    "no bytes": "UPDATE token_ids SET ids = 'text' WHERE number = 1",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_indexed", [True, False])
def test_damaged_token_ids_are_never_found(damage, is_indexed, path):
    ledger = Ledger(path)
    known = KnownChunks(ledger, "t", "")
    add(known, [0, 1, 2])
    if is_indexed:
        assert chunks_found(known, 4) == {0, 1, 2}
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(DAMAGES[damage])
    assert chunks_found(known, 4) == chunks_found(KnownChunks(Ledger(path), "t", ""), 4) == {1, 2}


def test_text_that_is_no_unicode_is_not_known():
    known = KnownChunks(Ledger(), "t", "")
    ids = {"\ud800 is half a character": ids_of(0), " text 1\n": ids_of(1)}
    known.add(ids, ids.__getitem__)
    assert chunks_found(known, 2) == {1}
    assert "\ud800 is half a character" not in known
    assert "text 1" in known


def test_a_run_names_a_document_of_its_own_namespace(kept_place):
    ledger = Ledger(kept_place)
    index, second = DocumentKey("index:1"), DocumentKey("kb", "b.txt")
    owners = ([DocumentKey("kb", "a.txt")], [index, second], [DocumentKey("kb", "c.txt", "acme")], [index])
    for number, documents in enumerate(owners):
        for document in documents:
            ledger.add_texts({document: {f"text {number}": 0}})
    prompt = [token for number in range(4) for token in ids_of(number)]
    for namespace, expected in (("", ["a.txt", "b.txt", "", ""]), ("acme", ["", "", "c.txt", ""])):
        known = KnownChunks(ledger, "t", namespace)
        add(known, range(4))
        assert [run.document for run in known.find_runs(prompt)] == expected
    ledger.remove_texts({second: ["text 1"]}, "")
    assert [run.document for run in KnownChunks(ledger, "t", "").find_runs(prompt)] == ["a.txt", "", "", ""]
