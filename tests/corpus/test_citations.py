"""Pages and headings of chunks, from marks to the printed line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.chunker import adapt_splitter, split
from ragblend.corpus.citations import add_pages_and_headings, citation_facts, describe_source
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.corpus.folder_scan import ReadFailure, scan_folders
from ragblend.corpus.loaders import FileReader
from ragblend.corpus.readers.formats import READERS
from ragblend.corpus.readers.types import Mark, ParsedRecord
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.sync import ChunkerConfig, SyncResult, sync_index
from ragblend.prompt.types import Chunk

TEXT = "Staff\n\nLeave\n\nThirty days a year.\n\nPay\n\nEvery month.\n\nCars\n\nNone at all."
PLACES = {words: TEXT.index(words) for words in ("Staff", "Leave", "Pay", "Cars")}
MARKS = (
    Mark(0, "page", "11"),
    Mark(PLACES["Staff"], "heading", "Staff", 1),
    Mark(PLACES["Leave"], "heading", "Leave", 2),
    Mark(PLACES["Pay"], "page", "12"),
    Mark(PLACES["Pay"], "heading", "Pay", 2),
    Mark(PLACES["Cars"], "page", "iv"),
    Mark(PLACES["Cars"], "heading", "Cars", 1),
)
HANDBOOK = Document(TEXT, "handbook.pdf", {"title": "Handbook"}, MARKS)


def count_words(text: str) -> int:
    return len(text.split())


def chunk_of(text: str) -> Chunk:
    return Chunk(text, HANDBOOK.source, TEXT.index(text), metadata=HANDBOOK.metadata)


def facts_of(text: str) -> dict[str, Any]:
    return dict(add_pages_and_headings(HANDBOOK, [chunk_of(text)])[0].metadata)


def test_a_chunk_has_its_pages_and_the_headings_above_its_beginning():
    assert facts_of("Thirty days") == {"title": "Handbook", "page": 11, "headings": ["Staff", "Leave"]}
    assert facts_of("Every month.") == {"title": "Handbook", "page": 12, "headings": ["Staff", "Pay"]}
    across = facts_of("days a year.\n\nPay\n\nEvery month.\n\nCars")
    assert across == {"title": "Handbook", "page": 11, "page_end": "iv", "headings": ["Staff", "Leave"]}


def test_a_page_that_ends_with_the_chunk_is_the_last_one():
    up_to_pay = TEXT[: PLACES["Pay"]].strip()
    assert "page_end" not in facts_of(up_to_pay)
    assert facts_of(up_to_pay + "\n\nPay")["page_end"] == 12


def test_text_before_the_first_mark_has_no_page_and_no_heading():
    later = replace(HANDBOOK, marks=MARKS[3:])
    assert add_pages_and_headings(later, [chunk_of("Thirty days")])[0].metadata == {"title": "Handbook"}
    bare, chunks = replace(HANDBOOK, marks=()), [chunk_of("Pay")]
    assert add_pages_and_headings(bare, chunks) == chunks


def test_text_position_and_metadata_of_a_splitter_are_kept():
    said = replace(chunk_of("Pay"), metadata={"page": 3, "headings": ["its own"]})
    (found,) = add_pages_and_headings(HANDBOOK, [said])
    assert (found, found.metadata) == (said, {"page": 3, "headings": ["its own"]})
    rewritten = Chunk("PAY", HANDBOOK.source, PLACES["Pay"], PLACES["Pay"], {"verbatim": False})
    (found,) = add_pages_and_headings(HANDBOOK, [rewritten])
    assert found.metadata == {"page": 12, "headings": ["Staff", "Pay"], "verbatim": False}
    assert (found.text, found.id) == ("PAY", rewritten.id)


def test_metadata_stay_small_for_any_headings():
    marks = tuple(Mark(n, "heading", f"{n} " + "very long\n" * 1000, n + 1) for n in range(40))
    (found,) = add_pages_and_headings(Document("x" * 60, "a", marks=marks), [Chunk("x", "a", 50)])
    assert len(found.metadata["headings"]) == 6
    assert all(len(heading) <= 200 and "\n" not in heading for heading in found.metadata["headings"])
    pages = (Mark(0, "page", "9" * 10_000),)
    (found,) = add_pages_and_headings(Document("x", "a", marks=pages), [Chunk("x", "a")])
    assert len(json.dumps(dict(found.metadata))) < 300


@given(
    marks=st.lists(
        st.builds(
            Mark, st.integers(0, 40), st.sampled_from(["page", "heading"]), st.text(max_size=5), st.integers(0, 7)
        ),
        max_size=12,
    ),
    spans=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=6),
)
def test_every_chunk_gets_what_a_slow_walk_over_the_marks_finds(marks, spans):
    marks = sorted(marks, key=lambda mark: mark.offset)
    chunks = [Chunk("x" * max(end - start, 0), "a", start, max(start, end)) for start, end in spans]
    for chunk, found in zip(
        chunks, add_pages_and_headings(Document("x" * 40, "a", marks=tuple(marks)), chunks), strict=True
    ):
        path: dict[int, str] = {}
        for mark in marks:
            if mark.kind == "heading" and mark.offset <= chunk.start:
                level = min(mark.level, 6)
                path = {above: words for above, words in path.items() if above < level} | {level: mark.value}
        expected = [" ".join(words.split()) for _, words in sorted(path.items()) if words.split()]
        assert found.metadata.get("headings", []) == expected
        begun = [mark.value for mark in marks if mark.kind == "page" and mark.offset <= chunk.start]
        assert str(found.metadata.get("page", "none")) == (str(_number(begun[-1])) if begun else "none")
        json.dumps(dict(found.metadata))


def _number(value: str) -> int | str:
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else value


def test_many_marks_and_chunks_take_linear_time():
    num = 40_000
    marks = tuple(Mark(n, "heading" if n % 2 else "page", str(n), n % 6 + 1) for n in range(num))
    document = Document("x" * num, "a", marks=marks)
    start_s = perf_counter()
    located = add_pages_and_headings(document, [Chunk("x", "a", n) for n in range(num)])
    assert perf_counter() - start_s < 5
    assert located[-1].metadata["page"] == num - 2


@pytest.mark.parametrize(
    ("source", "metadata", "expected"),
    [
        ("handbook.pdf", {"page": 12, "headings": ["Staff", "Leave"]}, 'handbook.pdf, p. 12, "Leave"'),
        ("handbook.pdf", {"page": 12, "page_end": 13}, "handbook.pdf, pp. 12-13"),
        ("a.html", {"title": "The Page"}, 'a.html, "The Page"'),
        ("a.html", {"title": "The Page", "headings": ["Inner"]}, 'a.html, "Inner"'),
        ("r.jsonl#3.1", {"title": None, "page": None, "headings": "x"}, "r.jsonl#3.1"),
        ("a.pdf", {"page": 0, "page_label": "1"}, "a.pdf, p. 1"),
        ("a.pdf", {"page": np.int64(3), "page_end": np.int64(4)}, "a.pdf, pp. 3-4"),
        ("", {}, "chunk"),
    ],
)
def test_a_source_is_described_by_file_page_and_heading(source, metadata, expected):
    assert describe_source(source, metadata) == expected


def test_citations_have_relative_paths_and_no_terminal_control_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described = describe_source(f"{tmp_path}/docs/a.pdf", {"page": 2, "headings": ["\x1b[2J" + "long " * 100]})
    assert described.startswith('docs/a.pdf, p. 2, "\\x1b[2Jlong long')
    assert described.isprintable()
    assert len(described) < 300


def test_facts_are_those_that_there_are():
    metadata = {"num_tokens": 3, "page": 1, "headings": ["A"], "author": "x"}
    assert citation_facts(metadata) == {"page": 1, "headings": ["A"]}


# --- through ingestion ---


@pytest.fixture
def sync(tmp_path, monkeypatch):
    """`sync(splitter)`: docs/handbook.manual, read as HANDBOOK with notes, in an index."""
    notes = ("page 3 has a picture and no text; run OCR on it",)

    def read(data: bytes, *options: Any) -> Any:
        yield ParsedRecord("#0", TEXT, {"title": "Handbook"}, MARKS, notes)
        yield ParsedRecord("#1", "Annex", {}, (), (*notes, "its attachment a.zip is left out"))

    monkeypatch.setitem(READERS, ".manual", read)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "handbook.manual").write_text("anything")

    def run(splitter: Callable[[Document], list[Chunk]]) -> tuple[SyncResult, ChunkIndex]:
        index = open_index(tmp_path / "index", HashingEmbedder(), create=True)
        found = scan_folders([tmp_path / "docs"], "*", [])
        cut = ChunkerConfig(splitter, "v")
        return sync_index(index, found, cut, lambda *_: None, reader=FileReader()), index

    return run


class Halves:
    """A splitter that is not from ragblend."""

    def split_text(self, text: str) -> list[str]:
        middle = text.find("Pay")
        return [text[:middle], text[middle:]] if middle > 0 else [text]


@pytest.mark.parametrize("custom", [False, True])
def test_chunks_of_any_splitter_are_indexed_with_page_and_headings(sync, tmp_path, custom):
    splitter = adapt_splitter(Halves()) if custom else lambda document: split(document, count_words, 6)
    _, index = sync(splitter)
    with index:
        chunks = list(index.chunks(f"{tmp_path}/docs/handbook.manual#0"))
        last = chunks[-1].metadata
        assert chunks[0].metadata["page"] == 11
        assert (last["page"], last["headings"]) == ((12, ["Staff", "Pay"]) if custom else ("iv", ["Cars"]))
        assert all(chunk.metadata["title"] == "Handbook" for chunk in chunks)
        assert all("page" not in chunk.text for chunk in chunks)


def test_a_files_note_is_reported_once_with_its_first_record(sync, tmp_path):
    result, index = sync(lambda document: split(document, count_words, 6))
    index.close()
    source = f"{tmp_path}/docs/handbook.manual"
    assert result.report.notes == [
        ReadFailure(f"{source}#0", "page 3 has a picture and no text; run OCR on it"),
        ReadFailure(f"{source}#1", "its attachment a.zip is left out"),
    ]
    assert result.report.failures == []
