"""Code blocks, headings, tables and rows are found in any text, in linear time."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.corpus.layout import Layout, find_row_ends_between
from ragblend.corpus.readers.types import Mark


def code_of(text: str) -> list[str]:
    layout = Layout(text)
    spans = dict.fromkeys(layout.code.find(offset) for offset in range(1, len(text) + 1))
    return [text[span[0] : span[1]] for span in spans if span]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\n```py\nx\n```\nb", ["```py\nx\n```"]),
        ("~~~\n```\nx\n~~~~  \nb", ["~~~\n```\nx\n~~~~"]),  # another fence inside, a longer one closes
        ("````\n```\nx\n````", ["````\n```\nx\n````"]),
        ("  - list\n    ```\n    x\n    ```", ["    ```\n    x\n    ```"]),
        ("```inline``` text\nx", []),
        ("```\nnever closed", []),
    ],
)
def test_code_is_from_fence_to_fence(text, blocks):
    assert code_of(text) == blocks


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("# A\n\n## B\ntext", ["# A", "## B"]),
        ("#no heading\n####### none", []),
        ("```\n# a comment\n```", []),
        ("# one\n# two\nx = 1", ["# two"]),
    ],
)
def test_headings_of_markdown_are_lines(text, headings):
    layout = Layout(text)
    spans = dict.fromkeys(layout.headings.find(offset) for offset in range(1, len(text) + 1))
    assert [text[span[0] : span[1]] for span in spans if span] == headings


def test_a_marked_heading_is_its_line_and_the_rule_below():
    text = "Title\n=====\n\nx\n\nNext\ny"
    marks = (Mark(0, "heading", "Title", 1), Mark(0, "page", "1"), Mark(text.index("Next"), "heading", "Next", 2))
    layout = Layout(text, marks)
    assert layout.headings.find(5) == (0, len("Title\n====="))
    assert layout.headings.find(len(text)) is None
    assert layout.headings.find(text.index("Next") + 4) == (text.index("Next"), text.index("Next") + 4)
    assert not Layout(text, (Mark(500, "heading", "beyond the text", 1),)).headings


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("Name | Home\nDuck | Pond", "Name | Home"),
        ("| Year | 2026 |\n|:--|--:|\n| a | 1 |", "| Year | 2026 |\n|:--|--:|"),
        ("Item | 2025 | 2026\nRent | 1 | 2", "Item | 2025 | 2026"),
        ("1 | Duck\n2 | Goose", ""),
        ("INFO | start\nINFO | stop", ""),
        ("a | b | c\nd | e", ""),
        ("Name | Home", ""),
    ],
)
def test_a_header_row_is_distinguished_from_a_row_of_data(text, header):
    span = Layout(text).find_header(len(text))
    assert (text[span[0] : span[1]] if span else "") == header


def test_tables_in_code_are_code():
    text = "```\nName | Home\nDuck | Pond\n```"
    assert not Layout(text).tables


def ends_of(text: str) -> list[str]:
    return [text[: row.offset].rpartition("\n")[2] for row in find_row_ends_between(text, 0, 0, len(text))]


@pytest.mark.parametrize(
    ("rows", "separator"),
    [
        (["name: Ada; age: 36", "name: Alan; age: 41", "name: Kurt", "name: Emmy"], "\n\n"),
        (["2026-03-01 a", "2026-03-02 b", "2026-04-11 c", "2027-12-31 d"], "\n"),
        (["192.168.0.1 a", "10.0.0.12 b", "8.8.8.8 c", "1.1.1.1 d"], "\n"),
        (["a | b", "c | d", "e | f", "1 | 2"], "\n"),
        (["a: 1", "b: 2", "c.d: 3", "e: 4"], "\n"),
    ],
)
def test_rows_with_a_common_beginning_are_rows(rows, separator):
    assert ends_of(separator.join(rows)) == rows[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "- one\n- two\n- three\n- four\n- five",
        "1. one\n2. two\n3. three\n4. four",
        "The day.\n\nA night.\n\nIn between.\n\nAll that.",
        "It is a text\nof which each line\nbegins with\nanother word",
        "a: 1\nb: 2",
    ],
)
def test_lists_and_prose_are_no_rows(text):
    assert ends_of(text) == []


def test_the_rank_of_a_row_does_not_depend_on_its_position():
    rows = [f"key: {n}" for n in range(9)]
    first = {row.offset: row.rank for row in find_row_ends_between("\n".join(rows), 0, 0, 60)}
    later = {row.offset: row.rank for row in find_row_ends_between("\n".join(["key: new", *rows]), 0, 0, 60)}
    shift = len("key: new\n")
    assert len(first) > 5
    assert {offset: later[offset + shift] for offset in first if offset + shift in later}.items() <= first.items()


UNITS = ["| ", "a | b\n", "```\n", "````x\n~~~\n", "`", "# x\n", "a | b\n-- " + " " * 1500 + "x\n", " " * 2000 + "|\n"]


@pytest.mark.parametrize("unit", [*UNITS, "a\n===\n", "a | " + "b " * 5000 + "\n", "\n", "|\n"])
def test_hostile_texts_take_linear_time(unit):
    text = (unit * (200_000 // len(unit) + 1))[:200_000]
    marks = [Mark(5, "heading", "x", 1)] * 1000 + [Mark(offset, "heading", "x", 1) for offset in range(0, 200_000, 7)]
    start_s = perf_counter()
    layout = Layout(text, marks)
    find_row_ends_between(text, 0, 0, 100_000)
    assert layout.find_header(100_000) is None or layout.tables
    assert perf_counter() - start_s < 10  # a second at most on a free machine; quadratic takes minutes


@given(
    st.lists(st.sampled_from(["```", "~~~", "# a", "## b", "a | b", "|--|", "| c |", "", "text", "==="]), max_size=30)
)
def test_spans_are_whole_lines_in_order(lines):
    text = "\n".join(lines)
    layout = Layout(text)
    for spans in (layout.code, layout.headings, layout.tables, layout.table_headers):
        last = -1
        for offset in range(1, len(text) + 1):
            span = spans.find(offset)
            if span is None:
                continue
            assert span[0] < offset <= span[1] <= len(text)
            assert span[0] == 0 or text[span[0] - 1] == "\n"
            assert span[1] == len(text) or text[span[1]] == "\n"
            assert span[0] >= last
            last = span[0]
