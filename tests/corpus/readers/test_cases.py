"""The cases of document_cases.json: real-world files of which readers lost text.

Each case builds a file and says what must be read from it: `words` as \\w+ in order, `contains` and `absent` as
substrings, `error` as the class of the exception, titles, headings, pages and rows by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragblend.corpus.documents import Document, FileDocuments, read_documents
from ragblend.corpus.readers.tables import parse_table
from ragblend.errors import UnreadableDocumentError

FILE = json.loads((Path(__file__).parent / "document_cases.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in FILE["cases"]}
BUILDERS: dict[str, Any] = {}
exec(FILE["helpers"], BUILDERS)
LABELLED = {"csv", "json", "pdf"}  # their readers add names of columns and form fields to the words


def build(name: str) -> bytes:
    data: bytes = eval(CASES[name]["build"], BUILDERS)
    return data


def read(name: str) -> tuple[FileDocuments, list[Document]]:
    contents = read_documents(f"/FILE.{CASES[name]['kind']}", build(name))
    documents = list(contents.documents)
    assert contents.failure == ""
    return contents, documents


def with_expectation(*keys: str) -> pytest.MarkDecorator:
    names = [name for name, case in CASES.items() if any(key in case["expect"] for key in keys)]
    assert names
    return pytest.mark.parametrize("name", names)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def is_in_order(wanted: list[str], found: list[str]) -> bool:
    rest: Iterator[str] = iter(found)
    return all(word in rest for word in wanted)


@with_expectation("words", "contains", "absent")
def test_text(name):
    expect, text = CASES[name]["expect"], "\n\n".join(document.text for document in read(name)[1])
    assert all(part in text for part in expect.get("contains", ()))
    assert not any(part in text for part in expect.get("absent", ()))
    if "words" in expect:
        wanted, found = words(expect["words"]), words(text)
        assert is_in_order(wanted, found) if CASES[name]["kind"] in LABELLED else wanted == found


@with_expectation("title", "headings", "pages")
def test_title_headings_and_pages(name):
    expect, (document,) = CASES[name]["expect"], read(name)[1]
    assert document.metadata.get("title", "") == expect.get("title", document.metadata.get("title", ""))
    headings = [[mark.level, mark.value] for mark in document.marks if mark.kind == "heading"]
    assert headings == expect.get("headings", headings)
    assert document.metadata.get("num_pages") == expect.get("pages")
    by_page: dict[str, str] = {}
    for heading in (mark for mark in document.marks if mark.kind == "heading"):
        pages = [mark.value for mark in document.marks if mark.kind == "page" and mark.offset <= heading.offset]
        by_page[pages[-1] if pages else ""] = heading.value
    assert by_page == expect.get("headings_by_page", by_page)


@with_expectation("warn")
def test_pages_that_could_not_be_read_are_named(name):
    contents, (document,) = read(name)
    pages = [page for pages in CASES[name]["expect"]["warn"].values() for page in pages]
    assert document.metadata["num_pages_unread"] == len(pages) == len(contents.notes)
    assert all(any(f"page {page} " in note and "OCR" in note for note in contents.notes) for page in pages)


@with_expectation("rows", "words_of_row_51", "delimiter")
def test_rows(name):
    expect, (document,) = CASES[name]["expect"], read(name)[1]
    paragraphs = document.text.split("\n\n")
    if isinstance(expect.get("rows"), int):
        assert len(paragraphs) == expect["rows"]
    for row in expect["rows"] if isinstance(expect.get("rows"), list) else ():
        assert "; ".join(f"{column}: {value}" for column, value in row.items()) in paragraphs
    if "words_of_row_51" in expect:
        assert is_in_order(words(expect["words_of_row_51"]), words(paragraphs[50]))
    if "delimiter" in expect:
        table = parse_table(build(name).decode())
        assert (table.delimiter, table.names) == (expect["delimiter"], expect["columns"])


@with_expectation("documents")
def test_records(name):
    assert len(read(name)[1]) in {1, 2}


@with_expectation("error")
def test_errors(name):
    with pytest.raises(UnreadableDocumentError) as error:
        read(name)
    assert type(error.value).__name__ == CASES[name]["expect"]["error"]


def test_every_expectation_is_checked():
    checked = {"words", "contains", "absent", "title", "headings", "pages", "headings_by_page", "warn", "rows"}
    checked |= {"words_of_row_51", "delimiter", "columns", "documents", "error", "why"}
    assert len(CASES) == 25
    assert {key for case in CASES.values() for key in case["expect"]} == checked
