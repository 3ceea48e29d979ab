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
_MAX_SPANNED_COLUMNS = 64
_MIN_REPEATED, _MAX_REPEATED_RATIO = 10_000, 20  # characters per table; per character of the cells' own text
_BORDER = " | "
ALL_ROWS = 1 << 16
"""The number of rows of a cell that spans the following rows until one says otherwise."""


@dataclass(slots=True)
class OpenParagraph:
    """A paragraph that is being read.

    `texts`: the pieces of its text so far. `notes`: its footnotes. `prefix`: text before its own, such as a list label.
    """

    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prefix: str = ""
    is_hidden: bool = False  # True if the open run is hidden
    script: str = ""  # the mark of the open run if it is raised or lowered


@dataclass(slots=True)
class TableCell:
    """A cell of a table that is being read.

    `columns`, `rows`: the numbers that it spans. `is_covered`: True for a cell in the file whose place belongs to the
    cell above it, if that one spans rows.
    """

    paragraphs: list[str] = field(default_factory=list)
    columns: int = 1
    rows: int = 1
    is_covered: bool = False


class RowPlacer:
    """Puts the cells of a table into columns, row by row.

    A cell that spans rows is repeated in each of them. A cell that spans columns leaves the further ones empty.
    `holds_covered`: True for formats that write a cell at every covered place, False for those that leave it out
    (HTML). The repeated text is at most a multiple of the table's own.
    """

    def __init__(self, holds_covered: bool = True) -> None:
        self._holds_covered = holds_covered
        self._spans: dict[int, tuple[str, int, int]] = {}  # column: text, rows that are left, columns
        self._num_left = _MIN_REPEATED  # characters that may still be repeated

    def place(self, cells: Iterable[TableCell]) -> list[str]:
        """Return the texts of the next row's columns; [] for a row that only repeats."""
        texts: list[str] = []
        above, self._spans = self._spans, {}
        has_text = False
        for cell in cells:
            while not self._holds_covered and self._repeat(above, texts, len(texts)):
                pass
            column = len(texts)
            if cell.is_covered and self._repeat(above, texts, column):
                continue
            text = " ".join(cell.paragraphs)
            has_text |= bool(text.strip())
            self._num_left += _MAX_REPEATED_RATIO * len(text)
            columns = min(max(cell.columns, 1), _MAX_SPANNED_COLUMNS)
            texts += [text, *[""] * (columns - 1)]
            if cell.rows > 1:
                self._spans[column] = (text, cell.rows - 1, columns)
        if not self._holds_covered:
            for column in sorted(above):
                self._repeat(above, texts, column)
        return texts if has_text else []

    def _repeat(self, above: dict[int, tuple[str, int, int]], texts: list[str], column: int) -> bool:
        """Append the cell from above that covers `column`. Return False if there is none."""
        if column not in above:
            return False
        text, rows, columns = above.pop(column)
        num_empty = column - len(texts)
        num_chars = len(_BORDER) * (num_empty + columns)
        if num_empty < 0 or num_chars > self._num_left:
            return False
        if num_chars + len(text) > self._num_left:
            text = ""
        self._num_left -= num_chars + len(text)
        if rows > 1:
            self._spans[column] = (text, rows - 1, columns)
        texts += [*[""] * num_empty, text, *[""] * (columns - 1)]
        return True


class TextBlocks:
    """Collects a document's blocks and marks in reading order. Offsets of marks are offsets in the joined text.

    `tables`: the open tables, outermost first. Each is a list of rows, and a row a list of cells. The reader adds
    paragraphs of a table to `open_cell`.
    """

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.tables: list[list[list[TableCell]]] = []
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

    def begin_cell(self, columns: int = 1, rows: int = 1, is_covered: bool = False) -> None:
        """Open a cell of the innermost table's last row, if there is one. Arguments: see `TableCell`."""
        if self.tables and self.tables[-1]:
            self.tables[-1][-1].append(TableCell([], columns, rows, is_covered))

    @property
    def open_cell(self) -> list[str] | None:
        """The paragraphs of the innermost table's last cell; None if there is none."""
        rows = self.tables[-1] if self.tables else []
        return rows[-1][-1].paragraphs if rows and rows[-1] else None

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
    return _BORDER.join(map(collapse_whitespace, cells)).rstrip(_BORDER)


def table_lines(rows: Iterable[Iterable[TableCell]]) -> str:
    """Return the lines of a table's rows, without empty rows.

    >>> table_lines([[TableCell(["EU"], rows=2), TableCell(["A"])], [TableCell(is_covered=True), TableCell(["B"])]])
    'EU | A\\nEU | B'
    """
    placer = RowPlacer()
    lines = (table_row(placer.place(row)) for row in rows)
    return "\n".join(line for line in lines if line)


def table_blocks(rows: Sequence[Sequence[TableCell]]) -> list[str]:
    """Return the blocks of a table: one block with a line per row (see `table_lines`).

    A table with a single column is a frame around text. It gives one block per paragraph.

    >>> table_blocks([[TableCell(["M8"]), TableCell(["40", "Nm"])]]), table_blocks([[TableCell(["One", "Two"])]])
    (['M8 | 40 Nm'], ['One', 'Two'])
    """
    if all(len(row) <= 1 for row in rows):
        return [paragraph for row in rows for cell in row for paragraph in cell.paragraphs]
    return [table_lines(rows)]
