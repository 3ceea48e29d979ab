"""Builds a document's text: blocks with one blank line between two, and their marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ragblend.corpus.readers.types import Mark, ParsedRecord
from ragblend.errors import UnreadableDocumentError

_LINE_BREAKS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
MAX_HEADING_LEVEL = 6
_MAX_NESTED_TABLES = 32  # each level copies the text again


@dataclass(slots=True)
class OpenParagraph:
    """A paragraph that is being read.

    `texts`: the pieces of its text so far. `notes`: its footnotes. `prefix`: text before its own, such as a list label.
    """

    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prefix: str = ""
    is_hidden: bool = False  # True if the open run is hidden


class TextBlocks:
    """Collects a document's blocks and marks in reading order. Offsets of marks are offsets in the joined text.

    `tables`: the open tables, outermost first. Each is a list of rows, a row a list of cells, and a cell a list of
    paragraphs. The reader adds paragraphs of a table to `open_cell`.
    """

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.tables: list[list[list[list[str]]]] = []
        self._blocks: list[str] = []
        self._num_chars = 0
        self._new_pages: list[str] = []

    def add(self, *blocks: str) -> None:
        """Append blocks. Blank blocks are left out."""
        for each in blocks:
            block = _LINE_BREAKS.sub("\n", each).strip("\n").rstrip()
            if block.strip():
                self._place_pages(self._next_offset())
                self._num_chars = self._next_offset() + len(block)
                self._blocks.append(block)

    def add_heading(self, words: str, level: int) -> None:
        """Append a heading as a Markdown line, with its mark. A blank heading is left out."""
        words = collapse_whitespace(words)
        if words:
            level = min(max(level, 1), MAX_HEADING_LEVEL)
            self.mark_heading(words, level)
            self.add(f"{'#' * level} {words}")

    def mark_heading(self, words: str, level: int) -> None:
        """Add a heading mark at the next block. The heading `words` need not be in the text (a mail's subject)."""
        self._place_pages(self._next_offset())
        self.marks.append(Mark(self._next_offset(), "heading", words, level))

    def add_page(self, value: str) -> None:
        """Begin the page `value`, a number or a label. The next block is its first block."""
        self._new_pages.append(value)

    def add_text(self, text: str, marks: Iterable[Mark]) -> None:
        """Append a text from another reader, with its marks."""
        if not text.strip():
            return
        start = self._next_offset()
        self._place_pages(start)
        self.marks.extend(mark._replace(offset=start + mark.offset) for mark in marks)
        self._blocks.append(text)
        self._num_chars = start + len(text)

    def begin_table(self) -> None:
        """Open a table, inside the open cell if there is one. Raises UnreadableDocumentError for too deep nesting."""
        if len(self.tables) >= _MAX_NESTED_TABLES:
            raise UnreadableDocumentError(
                f"has tables inside each other, more than the {_MAX_NESTED_TABLES} levels that are read; save it as PDF"
            )
        self.tables.append([])

    def begin_row(self) -> None:
        """Open a row of the innermost table, if there is one."""
        if self.tables:
            self.tables[-1].append([])

    def begin_cell(self) -> None:
        """Open a cell of the innermost table's last row, if there is one."""
        if self.tables and self.tables[-1]:
            self.tables[-1][-1].append([])

    @property
    def open_cell(self) -> list[str] | None:
        """The paragraphs of the innermost table's last cell; None if there is none."""
        rows = self.tables[-1] if self.tables else []
        return rows[-1][-1] if rows and rows[-1] else None

    def end_table(self) -> None:
        """Close the innermost table. Add its blocks to the open cell of the table around it, or else to the text."""
        blocks = table_blocks(self.tables.pop())
        if (cell := self.open_cell) is not None:
            cell.extend(blocks)
        else:
            self.add(*blocks)

    def build(
        self, metadata: Mapping[str, Any] = MappingProxyType({}), notes: Iterable[str] = (), key: str = ""
    ) -> ParsedRecord:
        """Return the record of the joined text, with the given `metadata`, `notes` and `key` (see `ParsedRecord`).

        Empty values of `metadata` are left out. A page without text also gets a mark, at the beginning of the next
        text, or at the end of the joined text.
        """
        self._place_pages(self._num_chars)
        filled = {name: value for name, value in metadata.items() if value}
        return ParsedRecord(key, "\n\n".join(self._blocks), filled, tuple(self.marks), tuple(notes))

    def _next_offset(self) -> int:
        return self._num_chars + 2 if self._blocks else 0

    def _place_pages(self, offset: int) -> None:
        self.marks.extend(Mark(offset, "page", value) for value in self._new_pages)
        self._new_pages.clear()


def collapse_whitespace(text: str) -> str:
    """Return `text` with every run of white space as one space, as in a heading or a table's cell.

    >>> collapse_whitespace(" Wood\\n Duck ")
    'Wood Duck'
    """
    return " ".join(text.split())


def fence_code(code: str, language: str = "") -> str:
    """Return `code` between Markdown fences that do not occur in it, with its `language`; "" for blank code."""
    if not code.strip():
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`{3,}", code)), default=2) + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def table_row(cells: Sequence[str]) -> str:
    """Return the line of a table's row, without empty cells at its end.

    >>> table_row(["M8", "", "40\\nNm", ""])
    'M8 |  | 40 Nm'
    """
    return " | ".join(map(collapse_whitespace, cells)).rstrip(" |")


def table_lines(rows: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return the lines of a table's rows, without empty rows. `rows[i][j]` is a list of a cell's paragraphs."""
    lines = (table_row([" ".join(cell) for cell in row]) for row in rows)
    return "\n".join(line for line in lines if line)


def table_blocks(rows: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Return the blocks of a table: one block with a line per row (see `table_lines`).

    A table with a single column is a frame around text. It gives one block per paragraph.

    >>> table_blocks([[["M8"], ["40", "Nm"]], [["M10"], ["70 Nm"]]]), table_blocks([[["One", "Two"]]])
    (['M8 | 40 Nm\\nM10 | 70 Nm'], ['One', 'Two'])
    """
    if all(len(row) <= 1 for row in rows):
        return [paragraph for row in rows for cell in row for paragraph in cell]
    return [table_lines(rows)]
