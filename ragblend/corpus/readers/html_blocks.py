"""Writes the blocks of a page from its elements and texts in document order.

Headings are Markdown lines with a mark, list items begin with "- ", a table's row is a line of cells, a code block has
fences. A table whose cells hold whole sections only arranges the page, so its cells are written as blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ragblend.corpus.readers.blocks import RowPlacer, TableCell, TextBlocks, collapse_whitespace, fence_code, table_row
from ragblend.corpus.readers.encodings import unify_line_breaks
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.types import ParsedRecord

_BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details"),
        *("dialog", "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1"),
        *("h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "legend", "li", "main", "menu", "nav"),
        *("ol", "optgroup", "option", "p", "pre", "search", "section", "select", "summary", "table", "tbody"),
        *("td", "textarea", "tfoot", "th", "thead", "tr", "ul"),
    }
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
# A heading ends at these, because its end tag is missing.
_END_HEADINGS = frozenset({"p", "ul", "ol", "dl", "table", "pre", "blockquote"})
_LISTS = frozenset({"ul", "ol", "menu", "dir"})
_ROW_GROUPS = frozenset({"thead", "tbody", "tfoot"})
_STRUCTURED = frozenset({*_HEADINGS, *_LISTS, *_ROW_GROUPS, "li", "dt", "dd", "pre", "table", "tr", "td", "th"})
SCRIPTS = {"sup": RAISED, "sub": LOWERED}
"""The marks of the elements that raise and lower text."""
_MAX_CELL_CHARS = 2000  # a table with a longer cell only arranges the page
_MAX_INDENTED = 8
_BLANK_LINES = re.compile(r"\n{3,}")


class _Block(NamedTuple):
    text: str
    group: int = 0  # no blank line between blocks of one group; 0: no group
    heading: int = 0


@dataclass(slots=True)
class _Cell:
    columns: int = 1  # that it spans
    rows: int = 1
    blocks: list[_Block] = field(default_factory=list)
    num_chars: int = 0
    holds_section: bool = False  # a heading, code or another table

    def add(self, block: _Block) -> None:
        self.blocks.append(block)
        self.num_chars += len(block.text)
        self.holds_section |= bool(block.heading) or block.text.startswith("```")

    @property
    def is_text(self) -> bool:
        """True if the cell fits in a row's line."""
        return not self.holds_section and self.num_chars <= _MAX_CELL_CHARS

    def extend(self, other: _Cell) -> None:
        self.blocks.extend(other.blocks)
        self.num_chars += other.num_chars
        self.holds_section |= other.holds_section


class PageWriter:
    """Builds a page's text from its elements and texts, given in document order."""

    def __init__(self) -> None:
        self._output = TextBlocks()
        self._lines: list[str] = []  # lines of the open block that a <br> has ended
        self._pieces: list[str] = []  # texts of its last line
        self._prefix = ""  # of the next block
        self._group = 0  # of the next block
        self._group_lines: list[str] = []
        self._open_group = 0
        self._num_groups = 0
        self._heading = self._num_pre = 0
        self._lists: list[int] = []  # the group of each open list
        self._term_group = 0
        self._tables: list[int] = []  # the group of each open table
        self._placers: list[RowPlacer] = []  # of each open table, for the rows of its open group of rows
        self._rows: list[list[_Cell]] = []  # the cells of each open row
        self._cells: list[_Cell] = []  # each open cell

    def add_text(self, text: str) -> None:
        """Append text to the open block."""
        if self._pieces or self._num_pre or not text.isspace():  # skips white space between two blocks
            self._pieces.append(text)

    def open(self, tag: str, columns: int = 1, rows: int = 1) -> None:
        """Begin an element. `columns`, `rows`: the numbers that a table's cell spans."""
        if tag in _BLOCKS:
            if self._num_pre:
                self._num_pre += tag == "pre"
                self._end_line()
                return
            self._end_block(tag in _END_HEADINGS)
            if tag in _STRUCTURED:
                self._begin(tag, columns, rows)
        elif tag == "br":
            self._break_line()
        elif tag in SCRIPTS:
            self._pieces.append(SCRIPTS[tag])
        elif "-" in tag:  # a custom element, which usually is a block
            self._pieces.append(" ")

    def close(self, tag: str) -> None:
        """End the element that was begun last."""
        if tag not in _BLOCKS:
            if tag in SCRIPTS:
                self._pieces.append(END)
            return
        if self._num_pre:
            self._num_pre -= tag == "pre"
            if self._num_pre or tag != "pre":
                self._end_line()
            else:
                self._write_code()
            return
        self._end_block(tag in _HEADINGS)
        if tag in _STRUCTURED:
            self._end(tag)

    def build(self, title: str) -> ParsedRecord:
        """Return the page's record."""
        self._end_block(ends_heading=True)
        self._end_group()
        return self._output.build({"title": title})

    def _begin(self, tag: str, columns: int, rows: int) -> None:
        if tag in _HEADINGS:
            self._heading = _HEADINGS[tag]
        elif tag in _LISTS:
            self._lists.append(self._lists[0] if self._lists else self._new_group())
        elif tag == "li":
            self._prefix = "  " * min(max(len(self._lists) - 1, 0), _MAX_INDENTED) + "- "
            self._group = self._lists[-1] if self._lists else self._new_group()
        elif tag == "dt":
            self._group = self._term_group = self._new_group()
        elif tag == "dd":
            self._group = self._term_group
        elif tag == "pre":
            self._num_pre = 1
        elif tag == "table":
            self._tables.append(self._new_group())
            self._placers.append(RowPlacer(holds_covered=False))
            self._prefix, self._group, self._heading = "", 0, 0
        elif tag in _ROW_GROUPS and self._placers:
            self._placers[-1] = RowPlacer(holds_covered=False)
        elif tag == "tr" and self._tables:
            self._rows.append([])
        elif tag in {"td", "th"} and len(self._rows) > len(self._cells):
            self._cells.append(_Cell(columns, rows))

    def _end(self, tag: str) -> None:
        if tag in {"li", "dd", "dt"}:
            self._prefix, self._group = "", 0
        elif tag in {"td", "th"}:
            if self._cells:
                self._rows[-1].append(self._cells.pop())
        elif tag == "tr":
            if len(self._rows) > len(self._cells):
                self._write_row(self._rows.pop())
        elif tag in _HEADINGS:
            self._heading = 0
        elif tag in _LISTS:
            self._lists.pop()
        elif tag == "table":
            self._tables.pop()
            self._placers.pop()

    def _new_group(self) -> int:
        self._num_groups += 1
        return self._num_groups

    # --- lines ---

    def _break_line(self) -> None:
        if self._num_pre:
            self._pieces.append("\n")
        else:
            self._lines.append(_join_words(self._pieces))
            self._pieces.clear()

    def _end_line(self) -> None:
        """End the last line of code if it is not empty."""
        if self._pieces and not self._pieces[-1].endswith("\n"):
            self._pieces.append("\n")

    # --- blocks ---

    def _end_block(self, ends_heading: bool) -> None:
        if not self._pieces and not self._lines:
            return
        if self._heading and not ends_heading:
            self._pieces.append(" ")
            return
        text = _join_words(self._pieces)
        self._pieces.clear()
        if self._lines:
            text = _BLANK_LINES.sub("\n\n", "\n".join([*self._lines, text]).strip("\n"))
            self._lines.clear()
        if not text:
            return
        if self._heading:
            self._emit(_Block(text.rstrip(" \n¶"), 0, self._heading))
            self._heading = 0
        else:
            self._emit(_Block(self._prefix + text, self._group))
        self._prefix, self._group = "", 0

    def _write_code(self) -> None:
        text = write_scripts(unify_line_breaks("".join(self._pieces))).strip("\n").rstrip()
        self._pieces.clear()
        if not text:
            return
        if "\n" in text:
            text = fence_code(text)
        self._emit(_Block(text))
        self._prefix, self._group = "", 0

    def _write_row(self, cells: list[_Cell]) -> None:
        """Write a row as a line, or its cells below each other if the table only arranges the page."""
        filled = [cell for cell in cells if cell.blocks]
        texts = self._placers[-1].place(
            TableCell([block.text.strip() for block in cell.blocks if cell.is_text], cell.columns, cell.rows)
            for cell in cells
        )
        has_columns = len(cells) > 1 or sum(map(bool, texts)) > 1
        if all(cell.is_text for cell in filled) and has_columns and filled:
            self._emit(_Block(table_row(texts), self._tables[-1]))
            if self._cells:
                self._cells[-1].holds_section = True
            return
        for cell in filled:
            if self._cells:
                self._cells[-1].extend(cell)
            else:
                for block in cell.blocks:
                    self._write(block)

    def _emit(self, block: _Block) -> None:
        if self._cells:
            self._cells[-1].add(block)
        else:
            self._write(block)

    def _write(self, block: _Block) -> None:
        if block.group != self._open_group or not block.group:
            self._end_group()
        if block.heading:
            self._output.add_heading(block.text, block.heading)
        elif block.group:
            self._group_lines.append(block.text)
            self._open_group = block.group
        else:
            self._output.add(block.text)

    def _end_group(self) -> None:
        if self._group_lines:
            self._output.add("\n".join(self._group_lines))
            self._group_lines.clear()
        self._open_group = 0


def _join_words(pieces: list[str]) -> str:
    """Return the pieces as one line, without soft hyphens."""
    return write_scripts(collapse_whitespace("".join(pieces).replace("\u00ad", "")))
