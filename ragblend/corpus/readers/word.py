"""Word files (.docx): text in reading order with headings, list labels, tables, footnotes, equations, text boxes and
charts.

Left out: deleted and hidden text, comments, headers and footers, picture data. Read `_BodyReader.read` first.
"""

from __future__ import annotations

import posixpath
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import ALL_ROWS, OpenParagraph, TextBlocks
from ragblend.corpus.readers.drawings import DRAWING_REFERENCES, read_drawing
from ragblend.corpus.readers.html import read_html
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.notation.scripts import END, write_scripts
from ragblend.corpus.readers.office_xml import (
    attribute,
    child,
    find_main_part,
    local_name,
    parse_number,
    parse_part,
    read_properties,
    read_relationships,
    walk,
)
from ragblend.corpus.readers.rejected import OLE_MAGIC, ZIP_MAGIC, describe_ole
from ragblend.corpus.readers.rtf import RTF_MAGIC, read_rtf
from ragblend.corpus.readers.text import read_text
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.word_styles import (
    ListLabels,
    Style,
    outline_level,
    read_styles,
    run_script,
    value_of,
)
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

# Fallback repeats Choice for older programs. rt is the reading above East Asian characters.
_EQUATIONS = frozenset({"oMathPara", "oMath"})  # read as a whole
_LEFT_OUT = _EQUATIONS | {
    *("del", "moveFrom", "Fallback", "rt", "pPr", "rPr", "tblPr", "trPr", "tcPr", "sdtPr", "sectPr"),
}
_CHARACTERS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_FIRST_SURROGATE = 0xD800  # codes from this one upwards are symbols of a picture font (0xF000)


def read_docx(data: bytes) -> ParsedRecords:
    """Read one Word file as one document.

    Raises UnreadableDocumentError if `data` is no Word file, or is damaged or encrypted.
    """
    container = ZipContainer(data, "Word file")
    main = find_main_part(container, "word/document.xml")
    reader = _BodyReader(container, main)
    reader.read(parse_part(container, main))
    yield reader.blocks.build(read_properties(container, "docProps/core.xml"))


def read_mislabeled_doc(data: bytes) -> ParsedRecords:
    """Read a .doc file that is RTF, HTML, .docx or plain text.

    Raises UnreadableDocumentError for the format that Word used before 2007.
    """
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data.startswith(OLE_MAGIC):
        raise UnreadableDocumentError(describe_ole(data, "Word file"))
    if data.startswith(ZIP_MAGIC):
        return read_docx(data)
    if RTF_MAGIC in head:
        return read_rtf(data)
    return read_html(data) if head.startswith((b"<html", b"<!doctype html")) else read_text(data)


class _BodyReader:
    """Builds blocks from the body of a document."""

    def __init__(self, container: ZipContainer, main: str) -> None:
        self.blocks = TextBlocks()
        self._container = container
        self._relationships = read_relationships(container, main)
        part_of = {one.kind: one.target for one in self._relationships.values()}
        folder = posixpath.dirname(main)
        self._styles = read_styles(container, part_of.get("styles", f"{folder}/styles.xml"))
        self._labels = ListLabels(container, part_of.get("numbering", f"{folder}/numbering.xml"))
        self._notes = {
            reference: self._read_notes(part_of.get(kind, f"{folder}/{kind}.xml"))
            for reference, kind in (("footnoteReference", "footnotes"), ("endnoteReference", "endnotes"))
        }
        self._num_notes = 0
        self._paragraphs: list[OpenParagraph] = []  # nested, because a text box is part of a paragraph
        self._pending: list[str] = []  # footnotes of a table's cells

    def read(self, root: Element) -> None:
        """Collect the blocks below `root`."""
        for begins, element, name in walk(root, _LEFT_OUT):
            if name == "p":
                self._paragraph(begins, element)
            elif name in ("tbl", "tr", "tc"):
                self._table(begins, element, name)
            elif self._paragraphs:
                self._inline(self._paragraphs[-1], begins, element, name)

    def _paragraph(self, begins: bool, element: Element) -> None:
        if begins:
            self._paragraphs.append(OpenParagraph())
            return
        paragraph, properties = self._paragraphs.pop(), child(element, "pPr")
        text = write_scripts("".join(paragraph.texts)).strip()
        style = self._styles.get(value_of(child(properties, "pStyle")), Style())
        if text:
            label = self._label(properties, style)
            text = f"{label} {text}" if label else text
        if (cell := self.blocks.open_cell) is not None:
            cell.append(text)
            self._pending += paragraph.notes
            return
        if level := outline_level(properties) or style.heading_level:
            self.blocks.add_heading(text, level)
        else:
            self.blocks.add(text)
        self.blocks.add(*paragraph.notes)

    def _label(self, properties: Element | None, style: Style) -> str:
        numbering = child(properties, "numPr")
        list_id = value_of(child(numbering, "numId")) or style.list_id
        level = value_of(child(numbering, "ilvl"))
        return self._labels.next_label(list_id, parse_number(level, style.list_level)) if list_id else ""

    def _table(self, begins: bool, element: Element, name: str) -> None:
        blocks = self.blocks
        if begins and name == "tbl":
            blocks.begin_table()
        elif begins and name == "tr":
            blocks.begin_row()
            if num_before := parse_number(value_of(child(element, "trPr", "gridBefore"))):
                blocks.begin_cell(num_before)
        elif begins:
            columns = parse_number(value_of(child(element, "tcPr", "gridSpan")), 1)
            merge = child(element, "tcPr", "vMerge")
            is_first = value_of(merge) == "restart"
            blocks.begin_cell(columns, ALL_ROWS if is_first else 1, merge is not None and not is_first)
        elif name == "tr" and child(element, "trPr", "del") is not None and blocks.tables:
            blocks.tables[-1].pop()
        elif name == "tbl":
            blocks.end_table()
            if blocks.open_cell is None:
                blocks.add(*self._pending)
                self._pending.clear()

    def _inline(self, paragraph: OpenParagraph, begins: bool, element: Element, name: str) -> None:
        """Add the content of a paragraph's run to the paragraph's text."""
        if name == "r":
            self._run(paragraph, begins, element)
        elif paragraph.is_hidden:
            return
        elif begins and name in self._notes:
            # Removed, so that no note is repeated.
            self._reference(paragraph, self._notes[name].pop(attribute(element, "id"), ""))
            paragraph.is_hidden = attribute(element, "customMarkFollows") in ("1", "true", "on")
        elif begins and name in DRAWING_REFERENCES:
            paragraph.texts.append("\n" + read_drawing(self._container, self._relationships, element) + "\n")
        else:
            paragraph.texts.append(_text(begins, element, name))

    def _run(self, paragraph: OpenParagraph, begins: bool, element: Element) -> None:
        """Begin or end a run: text with the same properties."""
        if not begins:
            paragraph.texts.append(paragraph.script and END)
            return
        switch = child(element, "rPr", "vanish")
        paragraph.is_hidden = switch is not None and value_of(switch) not in ("0", "false", "off")
        paragraph.script = run_script(element, self._styles)
        paragraph.texts.append(paragraph.script)

    def _reference(self, paragraph: OpenParagraph, note: str) -> None:
        if note:
            self._num_notes += 1
            paragraph.texts.append(f"[{self._num_notes}]")
            paragraph.notes.append(f"[{self._num_notes}] {note}")

    def _read_notes(self, part: str) -> dict[str, str]:
        """Return the texts of footnotes or endnotes by id."""
        if part not in self._container:
            return {}
        return {attribute(note, "id"): self._note_text(note) for note in parse_part(self._container, part)}

    def _note_text(self, note: Element) -> str:
        paragraphs = [OpenParagraph()]
        for begins, element, name in walk(note, _LEFT_OUT):
            if name == "p" and begins:
                paragraphs.append(OpenParagraph())
            elif name == "r":
                self._run(paragraphs[-1], begins, element)
            else:
                paragraphs[-1].texts.append(_text(begins, element, name))
        texts = (write_scripts("".join(paragraph.texts)).strip() for paragraph in paragraphs)
        return "\n".join(text for text in texts if text)


def _text(begins: bool, element: Element, name: str) -> str:
    """Return the text that an element adds to its paragraph."""
    if not begins:
        equation = read_equation(element) if not name and local_name(element) in _EQUATIONS else ""
        return f"\n{equation}\n" if equation and local_name(element) == "oMathPara" else equation
    if name == "t":
        return element.text or ""
    return _symbol(attribute(element, "char")) if name == "sym" else _CHARACTERS.get(name, "")


def _symbol(code: str) -> str:
    """Return the character of a symbol; "" for one of a picture font, which has no meaning without the font."""
    try:
        number = int(code, 16)
    except ValueError:
        return ""
    return chr(number) if ord(" ") <= number < _FIRST_SURROGATE else ""
