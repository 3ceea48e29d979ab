"""Finds code blocks, headings, tables and rows of records in a text, which determine where the text is cut.

Works on characters and marks. Does not depend on tokens or models. Every function takes time linear in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from ragblend.corpus.readers.types import Mark

_FENCE = re.compile(r"^[ \t]*(`{3,}(?=[^`\n]*$)|~{3,})[ \t]*(.*)$", re.MULTILINE)
# Not if the next line begins in the same way: those lines are a comment in source code.
_MARKDOWN_HEADING = re.compile(r"^(#{1,6})[ \t]+\S.*$(?!\n\1[ \t])", re.MULTILINE)
_UNDERLINE = re.compile(r"\n(?:={2,}|-{2,})[ \t]*(?=\n|\Z)")  # the line below a heading
_MAX_HEADER_CHARS = 400
_MAX_ROW_CHARS = 256  # characters of a row that are compared


class Spans:
    """Spans (start, end) of a text, in order and without overlap, for lookup by offset."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def find(self, offset: int) -> tuple[int, int] | None:
        """Return the span with start < `offset` <= end; None if there is none."""
        number = bisect_left(self._starts, offset) - 1
        if number < 0 or offset > self._ends[number]:
            return None
        return self._starts[number], self._ends[number]

    def overlaps(self, start: int, end: int) -> bool:
        """Return True if a span has a character of [start, end)."""
        number = bisect_left(self._starts, end) - 1
        return number >= 0 and self._ends[number] > start


class TableSpan(NamedTuple):
    """The characters of a table: consecutive lines of cells.

    `header_end`: where the header row ends; equal to `start` if the table has no header row.
    """

    start: int
    end: int
    header_end: int


class Layout:
    """The spans of a text's code blocks (with their fences), headings (whole lines) and tables.

    `marks`: the text's marks. A heading is a line with a heading mark, or a heading of Markdown.
    """

    def __init__(self, text: str, marks: Sequence[Mark] = ()) -> None:
        code = list(_find_code(text))
        self.code = Spans(code)
        self.headings = Spans(_find_headings(text, marks, self.code))
        tables = [table for table in _find_tables(text) if not self.code.overlaps(table.start, table.end)]
        self.tables = Spans([(table.start, table.end) for table in tables])
        self.table_headers = Spans(
            [(table.start, table.header_end) for table in tables if table.header_end > table.start]
        )

    def find_header(self, offset: int) -> tuple[int, int] | None:
        """Return the span of the header row if `offset` is in a table, after its header; else None."""
        table = self.tables.find(offset)
        header = self.table_headers.find(table[0] + 1) if table is not None else None
        return header if header is not None and header[1] < offset else None


def _find_code(text: str) -> Iterator[tuple[int, int]]:
    """Yield Markdown's code blocks from fence to fence. A fence that is not closed begins no block."""
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2].strip():
            yield opening.start(), fence.end(1)
            opening = None


def _find_headings(text: str, marks: Sequence[Mark], code: Spans) -> list[tuple[int, int]]:
    """Return the lines of headings: those with a mark, and Markdown's `# x` outside of code."""
    headings = {
        line.start(): line.end() for line in _MARKDOWN_HEADING.finditer(text) if not code.find(line.start() + 1)
    }
    end = -1
    for offset in sorted({mark.offset for mark in marks if mark.kind == "heading"}):
        if max(end, 0) <= offset < len(text):  # each line is searched once
            end = _end_of_line(text, offset)
            headings[offset] = end
    spans: list[tuple[int, int]] = []
    for start, end in sorted(headings.items()):
        underline = _UNDERLINE.match(text, end)
        if not spans or start >= spans[-1][1]:
            spans.append((start, underline.end() if underline else end))
    return spans


def _end_of_line(text: str, offset: int) -> int:
    end = text.find("\n", offset)
    return end if end >= 0 else len(text)


def _find_tables(text: str) -> Iterator[TableSpan]:
    rows: list[tuple[int, int]] = []  # the first two rows of the current table, and its last
    place = text.find("|")
    while place >= 0:
        start = text.rfind("\n", 0, place) + 1
        end = _end_of_line(text, place)
        if text.find(" | ", start, end) >= 0 or not text[start:place].strip():
            if rows and start != rows[-1][1] + 1:
                yield _make_table(text, rows)
                rows = []
            del rows[2:]
            rows.append((start, end))
        place = text.find("|", end)
    if rows:
        yield _make_table(text, rows)


def _make_table(text: str, rows: list[tuple[int, int]]) -> TableSpan:
    start, end = rows[0][0], rows[-1][1]
    if len(rows) < 2 or rows[0][1] - start > _MAX_HEADER_CHARS:
        return TableSpan(start, end, start)
    first, second = (
        text[row_start : min(row_end, row_start + 4 * _MAX_HEADER_CHARS)] for row_start, row_end in rows[:2]
    )
    cells, below = _split_cells(first), _split_cells(second)
    if all("--" in cell and not cell.strip("-: ") for cell in below):  # Markdown's rule
        return TableSpan(start, end, rows[1][1])
    return TableSpan(start, end, rows[0][1] if _is_header(cells, below) else start)


def _split_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _is_header(first: list[str], second: list[str]) -> bool:
    """Return True if a table's first row names its columns: words unlike each other and those of the second row.

    A first cell with a digit is a date or a number, as in a log whose fields are separated like cells.
    """
    named = [cell for cell in first if cell]
    return (
        len(first) == len(second)
        and len(named) > 1
        and len(set(named)) == len(named)
        and not any(char.isdigit() for char in first[0])
        and not any(cell and cell == below for cell, below in zip(first, second, strict=True))
    )


# --- rows of records ------------------------------------------------------------------------------------------------


class RowEnd(NamedTuple):
    """The end of a row. Of several row ends, the one with the lowest `rank` becomes the end of a chunk.

    `rank` is a digest of the next row's text, so that rows that move in the text are cut at the same row ends.
    """

    offset: int
    rank: bytes


_MIN_ROWS, _MIN_SIMILAR = 4, 0.75
_DIGITS = re.compile(r"\d+")
_LIST_MARK = re.compile(r"\W*|0[.)]|\(0\)")


def find_row_ends_between(text: str, start: int, first_end: int, last_end: int) -> list[RowEnd]:
    """Return the row ends from offset `first_end` to offset `last_end`, if the rows of `text` are uniform; else [].

    Rows are the paragraphs of a CSV file, or the lines of a table or a log without blank lines between them. Two rows
    are similar if their first words have the same form, such as digits in the same places. The rows are uniform if
    there are at least four, and at least three in four of them are similar to the next row. This is judged from the
    text after `start`, up to three times the distance from `start` to `last_end`. Row ends between two rows that are
    not similar are left out.
    """
    size = last_end - start
    piece = text[start : last_end + 2 * size]
    for separator in ("\n\n", "\n"):
        if separator == "\n" and "\n\n" in text[first_end:last_end]:
            break
        rows = list(_split_rows(piece, separator))
        shapes = [_shape(piece[row[0] : row[0] + _MAX_ROW_CHARS]) for row in rows]
        similar = [bool(one) and one == other for one, other in pairwise(shapes)]
        if len(rows) >= _MIN_ROWS and sum(similar) >= _MIN_SIMILAR * len(similar):
            return [
                RowEnd(start + row[1], _rank(piece[following[0] : following[1]]))
                for (row, following), is_similar in zip(pairwise(rows), similar, strict=True)
                if is_similar and first_end <= start + row[1] <= last_end
            ]
    return []


def _split_rows(piece: str, separator: str) -> Iterator[tuple[int, int]]:
    offset = 0
    for row in piece.split(separator):
        if stripped := row.strip():
            first = offset + len(row) - len(row.lstrip())
            yield first, first + len(stripped)
        offset += len(row) + len(separator)


def _shape(row: str) -> str:
    """Return what the rows of one table, log or list of records have in common; "" for rows that may be prose.

    >>> _shape("name: Ada; age: 36"), _shape("2026-03-01 warm"), _shape("a | b"), _shape("- one"), _shape("1. one")
    (':', '0-0-0', '|', '', '')
    """
    if " | " in row:
        return "|"
    first = _DIGITS.sub("0", row.split(None, 1)[0])
    if first.endswith(":"):
        return ":"
    return "" if _LIST_MARK.fullmatch(first) else first


def _rank(row: str) -> bytes:
    return blake2b(row[:_MAX_ROW_CHARS].encode("utf-8", "replace"), digest_size=8).digest()
