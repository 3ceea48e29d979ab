"""OpenDocument files (.odt, .odp, .ods): text in reading order with headings, lists, tables, footnotes and equations.

Slides are pages. Sheets are headings with a line per row. Cells have their displayed text, except dates, which are ISO
8601. Left out: deleted text of tracked changes, comments, headers and footers, other embedded objects, picture data.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import OpenParagraph, TextBlocks, table_lines
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.office_xml import (
    attribute,
    child,
    local_name,
    parse_number,
    parse_part,
    read_properties,
    resolve_part,
    walk,
)
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

_LEFT_OUT_NAMES = (
    "tracked-changes annotation scripts font-face-decls automatic-styles forms ruby-text title desc binary-data "
    "footer-decl header-decl date-time-decl note-citation page-thumbnail math"
)
_LEFT_OUT = frozenset(_LEFT_OUT_NAMES.split())
_CHARACTERS = {"tab": "\t", "line-break": "\n"}
_WHITE_SPACE = re.compile(r"\s+")  # in the XML; elements write repeated spaces of the text
_MAX_SPACES = 16
_MAX_PARENT_STYLES = 12  # limit, because styles may be based on each other in a circle
_MAX_REPEATED_CELLS = 64  # limit, because one cell that repeats thousands of times ends a sheet


def _read(kind: str, data: bytes) -> ParsedRecords:
    """Read one file as one document. Raises UnreadableDocumentError for other, damaged and encrypted files."""
    container = ZipContainer(data, kind)
    if "META-INF/manifest.xml" in container and b"encryption-data" in container.read("META-INF/manifest.xml"):
        raise UnreadableDocumentError(f"is an {kind} with a password; save it without one")
    content = parse_part(container, "content.xml")
    reader = _ContentReader(container, _read_scripts(container, content))
    reader.read(content)
    metadata = {**read_properties(container, "meta.xml"), "num_pages": reader.num_pages}
    yield (reader.blocks if reader.num_texts else TextBlocks()).build(metadata)


read_odt = partial(_read, "OpenDocument text")
read_odp = partial(_read, "OpenDocument presentation")
read_ods = partial(_read, "OpenDocument spreadsheet")


def _read_scripts(container: ZipContainer, content: Element) -> dict[str, str]:
    """Return the marks of the styles whose text is raised or lowered, by style name."""
    roots = [content]
    if "styles.xml" in container:
        with suppress(UnreadableDocumentError):
            roots.insert(0, parse_part(container, "styles.xml"))
    styles = {
        attribute(element, "name"): element
        for root in roots
        for section in root
        if local_name(section) in ("styles", "automatic-styles")
        for element in section
        if local_name(element) == "style" and attribute(element, "family") == "text"
    }
    marks = {name: _script(styles, name) for name in styles}
    return {name: mark for name, mark in marks.items() if mark}


def _script(styles: dict[str, Element], name: str) -> str:
    """Return the mark of a style, or of the styles on which it is based: "super 58%" and "33% 58%" are raised."""
    for _ in range(_MAX_PARENT_STYLES):
        if (style := styles.get(name)) is None:
            break
        properties = child(style, "text-properties")
        position = attribute(properties, "text-position") if properties is not None else ""
        if shift := position.partition(" ")[0]:
            if not shift.strip("-+0.%"):
                return ""
            return LOWERED if shift == "sub" or shift.startswith("-") else RAISED
        name = attribute(style, "parent-style-name")
    return ""


class _ContentReader:
    """Builds blocks from a file's content. `scripts`: the marks of raised and lowered text by style name."""

    def __init__(self, container: ZipContainer, scripts: dict[str, str]) -> None:
        self._container = container
        self._scripts = scripts
        self.blocks = TextBlocks()
        self.num_pages = 0
        self.num_texts = 0  # 0 for a spreadsheet that has only the names of its sheets
        self._is_spreadsheet = False
        self._paragraphs: list[OpenParagraph] = []  # nested, because a text box is part of a paragraph
        self._footnotes: list[list[str]] = []  # paragraphs of the footnotes that are open
        self._num_footnotes = 0
        self._frames: list[str] = []  # classes of a slide's open frames: "title", "outline", "notes"
        self._prefix = ""  # of the next paragraph

    def read(self, root: Element) -> None:
        """Collect the blocks below `root`. Text after an element belongs to its parent."""
        for begins, element, name in walk(root, _LEFT_OUT):
            if begins:
                self._begin(element, name)
            elif name:
                self._end(element, name)
            elif local_name(element) == "math":
                self._add_equation(element)
            text = element.text if begins else element.tail
            if text and self._paragraphs:
                self._paragraphs[-1].texts.append(_WHITE_SPACE.sub(" ", text))

    def _begin(self, element: Element, name: str) -> None:
        if name in ("p", "h"):
            self._paragraphs.append(OpenParagraph(prefix=self._prefix))
            self._prefix = ""
        elif name in _CHARACTERS and self._paragraphs:
            self._paragraphs[-1].texts.append(_CHARACTERS[name])
        elif name == "s" and self._paragraphs:
            self._paragraphs[-1].texts.append(" " * min(parse_number(attribute(element, "c"), 1), _MAX_SPACES))
        elif name == "span" and self._paragraphs:
            self._paragraphs[-1].texts.append(self._scripts.get(attribute(element, "style-name"), ""))
        elif name == "object":
            self._read_object(element)
        elif name == "list-item":
            self._prefix = "- "
        elif name == "note" and self._paragraphs:
            self._num_footnotes += 1
            self._paragraphs[-1].texts.append(f"[{self._num_footnotes}]")
            self._footnotes.append([])
        elif name == "frame":
            self._frames.append(attribute(element, "class"))
        elif name == "notes":
            self._prefix = "Notes: "
        elif name == "spreadsheet":
            self._is_spreadsheet = True
        elif name == "page":
            self.num_pages += 1
            self.blocks.add_page(str(self.num_pages))
        elif name == "table":
            if self._is_spreadsheet and not self.blocks.tables:
                self.blocks.add_heading(attribute(element, "name"), 1)
            self.blocks.begin_table()
        elif name == "table-row":
            self.blocks.begin_row()
        elif name in ("table-cell", "covered-table-cell"):
            rows = parse_number(attribute(element, "number-rows-spanned"), 1)
            self.blocks.begin_cell(rows=rows, is_covered=name == "covered-table-cell")

    def _end(self, element: Element, name: str) -> None:
        if name in ("p", "h"):
            self._end_paragraph(element, name)
        elif name == "span" and self._paragraphs and attribute(element, "style-name") in self._scripts:
            self._paragraphs[-1].texts.append(END)
        elif name in ("list-item", "notes"):
            self._prefix = ""
        elif name == "note" and self._footnotes and self._paragraphs:
            texts = self._footnotes.pop()
            self._paragraphs[-1].notes.append(f"[{self._num_footnotes}] " + "\n".join(texts))
        elif name == "frame":
            self._frames.pop()
        elif name in ("table-cell", "covered-table-cell") and (cell := self.blocks.open_cell) is not None:
            if date := attribute(element, "date-value"):
                cell[:] = [date.removesuffix("T00:00:00").replace("T", " ")]
            repeated = min(parse_number(attribute(element, "number-columns-repeated"), 1), _MAX_REPEATED_CELLS)
            row = self.blocks.tables[-1][-1]
            row += row[-1:] * (repeated - 1)
        elif name == "table" and self._is_spreadsheet and len(self.blocks.tables) == 1:
            self.blocks.add(table_lines(self.blocks.tables.pop()))
        elif name == "table":
            self.blocks.end_table()

    def _read_object(self, element: Element) -> None:
        """Read an equation in another part of the file."""
        part = f"{resolve_part('', attribute(element, 'href'))}/content.xml"
        if part in self._container:
            with suppress(UnreadableDocumentError):
                root = parse_part(self._container, part)
                if local_name(root) == "math":
                    self._add_equation(root)

    def _add_equation(self, element: Element) -> None:
        text = read_equation(element)
        if self._paragraphs:
            self._paragraphs[-1].texts.append(text)
        else:
            self.num_texts += bool(text)
            self.blocks.add(text)

    def _end_paragraph(self, element: Element, name: str) -> None:
        paragraph = self._paragraphs.pop()
        text = write_scripts("".join(paragraph.texts)).strip()
        text = paragraph.prefix + text if text else ""
        self.num_texts += bool(text)
        if self._footnotes:
            self._footnotes[-1].append(text)
        elif (cell := self.blocks.open_cell) is not None:
            cell.extend(one for one in (text, *paragraph.notes) if one)
        elif name == "h":
            self.blocks.add_heading(text, parse_number(attribute(element, "outline-level"), 1))
        elif self._frames[-1:] == ["title"]:
            self.blocks.add_heading(text, 1)
        else:
            self.blocks.add(text)
        if not self._footnotes and self.blocks.open_cell is None:
            self.blocks.add(*paragraph.notes)
