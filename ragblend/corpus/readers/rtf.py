"""RTF files: text in reading order with headings, tables, footnotes, equations and list labels.

Left out: hidden and deleted text, headers and footers, comments, field codes, picture data. Read `_RtfReader.read`
first. Control words are those of Microsoft's RTF specification 1.9.1.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement

from ragblend.corpus.readers.blocks import (
    ALL_ROWS,
    OpenParagraph,
    TableCell,
    TextBlocks,
    collapse_whitespace,
    table_blocks,
)
from ragblend.corpus.readers.encodings import SAMPLE_CHARS, check_is_text
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.errors import UnreadableDocumentError

RTF_MAGIC = b"{\\rtf"
_MAX_GROUP_DEPTH = 10_000
_TOKEN = re.compile(
    r"\\([a-zA-Z]{1,32})(-?\d{1,9})?[ ]?|\\'([0-9a-fA-F]{2})|\\([^a-zA-Z])|([{}])|([^\\{}\r\n]+)|[\r\n]+|\\", re.DOTALL
)
_SKIPPED_NAMES = (
    "colortbl stylesheet listtable listoverridetable revtbl rsidtbl pict objdata object nonshppict header headerl "
    "headerr headerf footer footerl footerr footerf fldinst xe tc bkmkstart bkmkend annotation atnid atnauthor "
    "themedata datastore generator xmlnstbl filetbl template private pgptbl ftnsep ftnsepc aftnsep aftnsepc fontemb "
    "falt panose author operator subject keywords doccomm company manager category comment hlinkbase mmathPr sn sv "
    "shprslt do"
)
_SKIPPED = frozenset(_SKIPPED_NAMES.split())
_CHARACTERS = {
    "line": "\n", "tab": "\t", "emdash": "\u2014", "endash": "\u2013", "emspace": " ", "enspace": " ", "qmspace": " ",
    "bullet": "\u2022", "lquote": "\u2018", "rquote": "\u2019", "ldblquote": "\u201c", "rdblquote": "\u201d",
    "~": " ", "_": "-", "{": "{", "}": "}", "\\": "\\",
}  # fmt: skip
_SCRIPTS = {"super": RAISED, "sub": LOWERED, "up": RAISED, "dn": LOWERED, "nosupersub": "", "plain": ""}
_MIN_RAISED = 6  # half points of \\up and \\dn; less only levels out a line
_EQUATION_VALUES = frozenset({"chr", "begChr", "endChr", "sepChr", "type", "pos"})  # their text is a property
_VERTICAL_MERGES = frozenset({"clvmgf", "clvmrg"})  # the first cell, and one that continues it
_SAME_EDGE = 120  # twips (2 mm)
_PARAGRAPH_ENDS = frozenset({"par", "sect", "page", "\n", "\r"})
_CHARSETS = {
    77: "mac_roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gbk", 136: "cp950", 161: "cp1253", 162: "cp1254",
    163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250",
    254: "cp437", 255: "cp850",
}  # fmt: skip


def read_rtf(data: bytes) -> ParsedRecords:
    """Read one RTF file as one document. Raises UnreadableDocumentError if `data` is not RTF."""
    start = data.find(RTF_MAGIC, 0, 1024)
    if start < 0:
        raise UnreadableDocumentError("is no RTF file: it does not begin with {\\rtf; correct its name's ending")
    reader = _RtfReader()
    reader.read(data[start:].decode("latin-1"))
    record = reader.blocks.build({"title": collapse_whitespace("".join(reader.title))})
    check_is_text(record.text[:SAMPLE_CHARS])
    yield record


@dataclass(slots=True)
class _Group:
    """Properties that a group inherits from the group around it; they end with it."""

    destination: str = "body"  # "body", "note", "title", "fonts", "equation"; "" for text that is left out
    font: str = ""
    is_hidden: bool = False
    num_fallback_chars: int = 1  # characters after a \\u to skip: they are for programs without Unicode
    script: str = ""  # the mark of raised or lowered text
    element: Element | None = None  # of an equation


class _CellDefinition(NamedTuple):
    """A cell of a row's definition: its left and right edge in twips, and its merge word or ""."""

    left: int
    right: int
    merge: str


class _Row(NamedTuple):
    """A row of a table. `definitions`: of its cells; () if they are unknown."""

    cells: list[list[str]]
    definitions: tuple[_CellDefinition, ...] = ()


class _RtfReader:
    """Builds blocks from control words and text."""

    def __init__(self) -> None:
        self.blocks = TextBlocks()
        self.title: list[str] = []
        self._groups = [_Group()]
        self._paragraphs = [OpenParagraph()]  # of the body, then of an open footnote
        self._bytes = bytearray()  # text that is not decoded yet
        self._num_to_skip = 0
        self._codec = "cp1252"
        self._font_codecs: dict[str, str] = {}
        self._num_notes = 0
        self._is_in_table = False
        self._outline_level = 0
        self._row: list[list[str]] = []
        self._rows: list[_Row] = []
        self._definitions: list[_CellDefinition] = []  # of the row's cells
        self._left, self._merge = 0, ""  # of the next definition

    def read(self, source: str) -> None:
        """Collect the blocks of a file, given as one character per byte."""
        offset = 0
        while token := _TOKEN.match(source, offset):
            offset = token.end()
            word, number, code, symbol, brace, text = token.groups()
            if text is not None:
                self._take_text(text)
            elif code is not None:
                self._take_text(chr(int(code, 16)))
            elif word == "bin":
                offset += max(int(number or 0), 0)
            else:
                self._flush_bytes()
                self._num_to_skip = 0
                if word is not None:
                    self._control(word, int(number) if number else None)
                elif brace == "{":
                    self._open_group()
                elif brace == "}" and not self._close_group():
                    break
                elif symbol is not None:
                    self._symbol(symbol)
        self._flush_bytes()
        self._end_paragraph()
        self._end_table()

    def _take_text(self, text: str) -> None:
        skipped = min(self._num_to_skip, len(text))
        self._num_to_skip -= skipped
        self._bytes += text[skipped:].encode("latin-1")

    def _flush_bytes(self) -> None:
        if self._bytes:
            codec = self._font_codecs.get(self._groups[-1].font, self._codec)
            self._add(self._bytes.decode(codec, "replace"))
            self._bytes.clear()

    def _add(self, text: str) -> None:
        group = self._groups[-1]
        if group.destination == "title":
            self.title.append(text)
        elif group.destination == "equation" and group.element is not None:
            if group.element.tag in _EQUATION_VALUES:
                group.element.set("val", text)
            else:
                SubElement(group.element, "t").text = text
        elif group.destination in ("body", "note") and not group.is_hidden:
            self._paragraphs[-1].texts.append(f"{group.script}{text}{END}" if group.script else text)

    def _open_group(self) -> None:
        if len(self._groups) > _MAX_GROUP_DEPTH:
            raise UnreadableDocumentError(f"has more than {_MAX_GROUP_DEPTH} groups inside each other; save it again")
        self._groups.append(replace(self._groups[-1]))

    def _close_group(self) -> bool:
        """Restore the properties of the outer group. Return False at the end of the document."""
        group = self._groups.pop()
        outer = self._groups[-1] if self._groups else _Group()
        if group.destination == "note" and outer.destination != "note":
            note = "\n".join(line for line in _join(self._paragraphs.pop().texts).split("\n") if line.strip()).strip()
            self._paragraphs[-1].notes.append(f"[{self._num_notes}] {note}")
        if group.destination == "equation" and outer.destination != "equation" and group.element is not None:
            self._add(read_equation(group.element))
        return len(self._groups) > 1

    def _symbol(self, symbol: str) -> None:
        if symbol == "*":  # an optional destination
            self._groups[-1].destination = ""
        elif symbol in _PARAGRAPH_ENDS:
            self._end_paragraph()
        else:
            self._add(_CHARACTERS.get(symbol, ""))

    def _control(self, word: str, number: int | None) -> None:
        group = self._groups[-1]
        if word == "u" and number is not None:
            self._add(chr(number % 0x10000))
            self._num_to_skip = group.num_fallback_chars
        elif word == "uc":
            group.num_fallback_chars = min(max(number or 0, 0), 100)
        elif word in _CHARACTERS:
            self._add(_CHARACTERS[word])
        elif word in ("v", "deleted"):
            group.is_hidden = number != 0
        elif word in _SCRIPTS:
            is_on = number != 0 if word in ("super", "sub") else abs(number or _MIN_RAISED) >= _MIN_RAISED
            group.script = _SCRIPTS[word] if is_on and number != 0 else ""
        elif word == "moMath" and len(self._groups) > 1:  # follows \\*, perhaps in \\*\\moMathPara
            group.destination, group.element = "equation", Element("oMath")
        elif group.destination == "equation":
            outer = self._groups[-2].element
            if outer is not None and group.element is outer:  # the first word of the group is the element's name
                group.element = SubElement(outer, word.removeprefix("m"))
        elif word in ("f", "fcharset", "cpg", "ansicpg", "mac", "pc", "pca"):
            self._encoding(group, word, number)
        elif word == "shpinst" and len(self._groups) > 1:  # a text box, which follows \\*
            group.destination = self._groups[-2].destination
        elif word in ("fonttbl", "info", "title", "footnote") or word in _SKIPPED:
            self._destination(group, word)
        elif group.destination == "body":
            self._layout(word, number)
        elif group.destination == "note" and word in _PARAGRAPH_ENDS:
            self._add("\n")

    def _encoding(self, group: _Group, word: str, number: int | None) -> None:
        if word == "f":
            group.font = str(number)
        elif word == "fcharset" and group.destination == "fonts" and number in _CHARSETS:
            self._font_codecs[group.font] = _CHARSETS[number]
        elif word == "cpg" and group.destination == "fonts":
            self._font_codecs[group.font] = _find_codec(number, self._codec)
        elif word == "ansicpg":
            self._codec = _find_codec(number, self._codec)
        elif word in ("mac", "pc", "pca"):
            self._codec = {"mac": "mac_roman", "pc": "cp437", "pca": "cp850"}[word]

    def _destination(self, group: _Group, word: str) -> None:
        if word == "fonttbl":
            group.destination = "fonts"
        elif word == "title" and group.destination == "info":
            group.destination = "title"
        elif word == "info":
            group.destination = "info"
        elif word == "footnote" and group.destination == "body":
            self._num_notes += 1
            self._add(f"[{self._num_notes}]")
            self._paragraphs.append(OpenParagraph())
            group.destination = "note"
        elif word != "title":
            group.destination = ""

    def _layout(self, word: str, number: int | None) -> None:
        if word in _PARAGRAPH_ENDS:
            self._end_paragraph()
        elif word == "pard":
            self._is_in_table = False
            self._outline_level = 0
        elif word == "intbl":
            self._is_in_table = True
        elif word == "outlinelevel" and number is not None and number < 9:
            self._outline_level = number + 1
        elif word in ("cell", "nestcell"):
            text, notes = self._take_paragraph()
            self._row.append([text, *notes])
        elif word in ("row", "nestrow"):
            self._rows.append(_Row(self._row, tuple(self._definitions) if word == "row" else ()))
            self._row = []
        elif word == "trowd":
            self._definitions, self._left, self._merge = [], 0, ""
        elif word == "trleft":
            self._left = number or 0
        elif word in _VERTICAL_MERGES:
            self._merge = word
        elif word == "cellx":
            right = max(number or 0, self._left)
            self._definitions.append(_CellDefinition(self._left, right, self._merge))
            self._left, self._merge = right, ""

    def _end_paragraph(self) -> None:
        if self._is_in_table:
            self._add("\n")
            return
        text, notes = self._take_paragraph()
        if not text and not notes:
            return
        self._end_table()
        if self._outline_level:
            self.blocks.add_heading(text, self._outline_level)
        else:
            self.blocks.add(text)
        self.blocks.add(*notes)

    def _take_paragraph(self) -> tuple[str, list[str]]:
        """Return the text and the footnotes of the body's paragraph, and begin another one."""
        paragraph, self._paragraphs[0] = self._paragraphs[0], OpenParagraph()
        return _join(paragraph.texts).strip(), paragraph.notes

    def _end_table(self) -> None:
        self.blocks.add(*table_blocks(_place_cells([*self._rows, _Row(self._row)])))
        self._rows, self._row = [], []


def _place_cells(rows: Sequence[_Row]) -> list[list[TableCell]]:
    """Return the cells of a table's rows. A cell spans the columns between its edges; rows need not have equal ones."""
    edges = list[int]()
    for edge in sorted({edge for row in rows for one in row.definitions for edge in (one.left, one.right)}):
        if not edges or edge > edges[-1] + _SAME_EDGE:
            edges.append(edge)

    def column(edge: int) -> int:
        return bisect_left(edges, edge - _SAME_EDGE)

    placed = []
    for row in rows:
        cells = [TableCell(paragraphs) for paragraphs in row.cells]
        if len(cells) == len(row.definitions):
            for cell, one in zip(cells, row.definitions, strict=True):
                cell.columns = column(one.right) - column(one.left)
                cell.rows = ALL_ROWS if one.merge == "clvmgf" else 1
                cell.is_covered = one.merge == "clvmrg"
            if row.cells and (num_before := column(row.definitions[0].left)):
                cells.insert(0, TableCell(columns=num_before))
        placed.append(cells)
    return placed


def _find_codec(number: int | None, default: str) -> str:
    """Return Python's codec of a Windows code page."""
    try:
        return codecs.lookup(f"cp{number}").name
    except LookupError:
        return default


def _join(parts: list[str]) -> str:
    """Return the joined parts. RTF writes characters beyond U+FFFF as two surrogates, in two parts."""
    return write_scripts("".join(parts)).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
