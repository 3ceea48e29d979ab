"""Word files (.docx): text in reading order with headings, list labels, tables, footnotes, text boxes and charts.

Left out: deleted and hidden text, comments, headers and footers, picture data. Read `_BodyReader.read` first.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import TextBlocks, check_table_depth, table_blocks
from ragblend.corpus.readers.drawings import DRAWING_REFERENCES, read_drawing
from ragblend.corpus.readers.html import read_html
from ragblend.corpus.readers.office_xml import (
    attribute,
    child,
    find_main_part,
    parse_number,
    parse_part,
    read_properties,
    read_relationships,
    walk,
)
from ragblend.corpus.readers.rejected import OLE_MAGIC, ZIP_MAGIC, describe_ole
from ragblend.corpus.readers.rtf import RTF_MAGIC, read_rtf
from ragblend.corpus.readers.text import read_text
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords
from ragblend.corpus.readers.word_styles import ListLabels, Style, Styles, outline_level, value_of
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

# Fallback repeats Choice for older programs. rt is the reading above East Asian characters.
_LEFT_OUT = frozenset({"del", "moveFrom", "Fallback", "rt", "pPr", "rPr", "tblPr", "trPr", "tcPr", "sdtPr", "sectPr"})
_CHARACTERS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_FIRST_SURROGATE = 0xD800  # codes from this one upwards are symbols of a picture font (0xF000)


def read_docx(data: bytes) -> ParsedRecords:
    """Read one Word file as one document. Raises UnreadableDocumentError for other, damaged and encrypted files."""
    container = ZipContainer(data, "Word file")
    main = find_main_part(container, "word/document.xml")
    reader = _BodyReader(container, main)
    reader.read(parse_part(container, main))
    text, marks = reader.blocks.build()
    yield ParsedRecord("", text, read_properties(container, "docProps/core.xml"), marks)


def read_mislabeled_doc(data: bytes) -> ParsedRecords:
    """Read a .doc file that is RTF, HTML, .docx or plain text. Rejects Word's format before 2007."""
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data.startswith(OLE_MAGIC):
        raise UnreadableDocumentError(describe_ole(data, "Word file"))
    if data.startswith(ZIP_MAGIC):
        return read_docx(data)
    if RTF_MAGIC in head:
        return read_rtf(data)
    return read_html(data) if head.startswith((b"<html", b"<!doctype html")) else read_text(data)


@dataclass(slots=True)
class _Paragraph:
    """An open paragraph: its text so far, and its footnotes."""

    properties: Element | None
    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_hidden: bool = False  # True if the open run is hidden


class _BodyReader:
    """Builds blocks from the body of a document."""

    def __init__(self, container: ZipContainer, main: str) -> None:
        self.blocks = TextBlocks()
        self._container = container
        self._relationships = read_relationships(container, main)
        part_of = {one.kind: one.target for one in self._relationships.values()}
        folder = posixpath.dirname(main)
        self._styles = Styles(container, part_of.get("styles", f"{folder}/styles.xml"))
        self._labels = ListLabels(container, part_of.get("numbering", f"{folder}/numbering.xml"))
        self._notes = {
            reference: self._read_notes(part_of.get(kind, f"{folder}/{kind}.xml"))
            for reference, kind in (("footnoteReference", "footnotes"), ("endnoteReference", "endnotes"))
        }
        self._num_notes = 0
        self._paragraphs: list[_Paragraph] = []  # nested, because a text box is part of a paragraph
        self._tables: list[list[list[list[str]]]] = []  # open tables, nested: rows of cells of paragraphs
        self._pending: list[str] = []  # footnotes of a table's cells

    def read(self, root: Element) -> None:
        """Collect the blocks below `root`."""
        for begins, element, name in walk(root, _LEFT_OUT):
            if name == "p":
                self._paragraph(begins, element)
            elif name in ("tbl", "tr", "tc"):
                self._table(begins, element, name)
            elif begins and self._paragraphs:
                self._inline(self._paragraphs[-1], element, name)

    def _paragraph(self, begins: bool, element: Element) -> None:
        if begins:
            self._paragraphs.append(_Paragraph(child(element, "pPr")))
            return
        paragraph = self._paragraphs.pop()
        text = "".join(paragraph.texts).strip()
        style = self._styles.find(value_of(child(paragraph.properties, "pStyle")))
        if text:
            label = self._label(paragraph.properties, style)
            text = f"{label} {text}" if label else text
        if self._tables and self._tables[-1] and self._tables[-1][-1]:
            self._tables[-1][-1][-1].append(text)
            self._pending += paragraph.notes
            return
        if level := outline_level(paragraph.properties) or style.heading_level:
            self.blocks.add_heading(text, level)
        else:
            self.blocks.add(text)
        self._add_blocks(paragraph.notes)

    def _label(self, properties: Element | None, style: Style) -> str:
        numbering = child(properties, "numPr")
        list_id = value_of(child(numbering, "numId")) or style.list_id
        level = value_of(child(numbering, "ilvl"))
        return self._labels.next_label(list_id, parse_number(level, style.list_level)) if list_id else ""

    def _table(self, begins: bool, element: Element, name: str) -> None:
        if begins and name == "tbl":
            check_table_depth(len(self._tables))
            self._tables.append([])
        elif begins and name == "tr" and self._tables:
            self._tables[-1].append([])
        elif begins and self._tables and self._tables[-1]:
            self._tables[-1][-1].append([])
        elif not begins and name == "tr" and child(element, "trPr", "del") is not None and self._tables:
            self._tables[-1].pop()
        elif not begins and name == "tbl":
            self._end_table(self._tables.pop())

    def _end_table(self, rows: list[list[list[str]]]) -> None:
        blocks = table_blocks(rows)
        outer = self._tables[-1] if self._tables else []
        if outer and outer[-1]:
            outer[-1][-1].extend(blocks)
            return
        self._add_blocks(blocks)
        self._add_blocks(self._pending)
        self._pending.clear()

    def _add_blocks(self, blocks: list[str]) -> None:
        for block in blocks:
            self.blocks.add(block)

    def _inline(self, paragraph: _Paragraph, element: Element, name: str) -> None:
        """Add the content of a paragraph's run to the paragraph's text."""
        if name == "r":
            paragraph.is_hidden = _is_on(child(element, "rPr", "vanish"))
        elif paragraph.is_hidden:
            return
        elif name == "t":
            paragraph.texts.append(element.text or "")
        elif name in _CHARACTERS:
            paragraph.texts.append(_CHARACTERS[name])
        elif name == "sym":
            paragraph.texts.append(_symbol(attribute(element, "char")))
        elif name in self._notes:
            # Removed, so that no note is repeated.
            self._reference(paragraph, self._notes[name].pop(attribute(element, "id"), ""))
        elif name in DRAWING_REFERENCES:
            paragraph.texts.append("\n" + read_drawing(self._container, self._relationships, element) + "\n")

    def _reference(self, paragraph: _Paragraph, note: str) -> None:
        if note:
            self._num_notes += 1
            paragraph.texts.append(f"[{self._num_notes}]")
            paragraph.notes.append(f"[{self._num_notes}] {note}")

    def _read_notes(self, part: str) -> dict[str, str]:
        """Return the texts of footnotes or endnotes by id."""
        if part not in self._container:
            return {}
        return {attribute(note, "id"): _note_text(note) for note in parse_part(self._container, part)}


def _note_text(note: Element) -> str:
    paragraphs: list[list[str]] = [[]]
    for begins, element, name in walk(note, _LEFT_OUT):
        if name == "p" and begins:
            paragraphs.append([])
        elif begins:
            paragraphs[-1].append(element.text or "" if name == "t" else _CHARACTERS.get(name, ""))
    return "\n".join(text for parts in paragraphs if (text := "".join(parts).strip()))


def _symbol(code: str) -> str:
    """Return the character of a symbol; "" for one of a picture font, which has no meaning without the font."""
    try:
        number = int(code, 16)
    except ValueError:
        return ""
    return chr(number) if ord(" ") <= number < _FIRST_SURROGATE else ""


def _is_on(switch: Element | None) -> bool:
    return switch is not None and value_of(switch) not in ("0", "false", "off")
