"""PowerPoint files (.pptx): the slides in the order of the presentation, with tables, charts, SmartArt and notes.

Each slide is a page, its title a heading. Left out: slide numbers, dates and footers, comments, picture data.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import TableCell, TextBlocks, table_lines
from ragblend.corpus.readers.drawings import DRAWING_REFERENCES, drawing_text, paragraph_lines, read_drawing
from ragblend.corpus.readers.office_xml import (
    Relationship,
    attribute,
    child,
    find_main_part,
    local_name,
    outermost,
    parse_number,
    parse_part,
    read_properties,
    read_relationships,
)
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

_TITLES = frozenset({"title", "ctrTitle"})
_FURNITURE = frozenset({"sldNum", "dt", "ftr", "hdr", "sldImg"})  # the same on every slide
_LEFT_OUT = frozenset({"Fallback", "extLst"})  # Fallback repeats Choice for older programs


def read_pptx(data: bytes) -> ParsedRecords:
    """Read one presentation as one document.

    Raises UnreadableDocumentError if `data` is no PowerPoint file, or is damaged or encrypted.
    """
    container = ZipContainer(data, "PowerPoint file")
    blocks = TextBlocks()
    notes = []
    slides = list(dict.fromkeys(_slide_parts(container)))
    for number, part in enumerate(slides, 1):
        blocks.add_page(str(number))
        try:
            slide = parse_part(container, part)
        except UnreadableDocumentError as error:
            notes.append(f"slide {number} is left out: the file {error}")
            continue
        if not _add_slide(blocks, container, part, slide) and any(local_name(each) == "pic" for each in slide.iter()):
            notes.append(f"slide {number} has a picture and no text; run OCR on it")
    if slides and len([note for note in notes if "left out" in note]) == len(slides):
        raise UnreadableDocumentError(f"has no readable slide; {notes[0]}")
    record = blocks.build({**read_properties(container, "docProps/core.xml"), "num_pages": len(slides)}, notes)
    if notes and not record.text:
        raise UnreadableDocumentError("holds pictures and no text; export it as PDF and run OCR on it: ocrmypdf")
    yield record


def _slide_parts(container: ZipContainer) -> Iterator[str]:
    """Yield the slides' parts in the presentation's order, which may differ from that of the file names."""
    main = find_main_part(container, "ppt/presentation.xml")
    relationships = read_relationships(container, main)
    slides = child(parse_part(container, main), "sldIdLst")
    for element in slides if slides is not None else ():
        # `id` is also the slide's own number, without a namespace.
        names = (value for key, value in element.items() if key.endswith("}id"))
        if (relationship := relationships.get(next(names, ""))) is not None:
            yield relationship.target


def _add_slide(blocks: TextBlocks, container: ZipContainer, part: str, slide: Element) -> bool:
    """Add a slide's title, shapes and notes. Return False if it has no text."""
    relationships = read_relationships(container, part)
    shapes = list(_shapes(slide))
    titles = [shape for shape in shapes if _placeholder(shape) in _TITLES]
    texts = [text for shape in shapes if shape not in titles if (text := _shape_text(container, relationships, shape))]
    heading = " ".join(drawing_text(paragraph) for title in titles for paragraph in _paragraphs(title))
    blocks.add_heading(heading, 1)
    blocks.add(*texts)
    notes = _notes(container, part, relationships)
    if notes:
        blocks.add(f"Notes: {notes}")
    return bool(heading.strip() or texts or notes)


def _shapes(slide: Element) -> Iterator[Element]:
    """Return shapes with text, tables, charts and SmartArt in drawing order, also those in groups."""
    shapes = outermost(slide, "sp", "graphicFrame", "cxnSp", left_out=_LEFT_OUT)
    return (shape for shape in shapes if _placeholder(shape) not in _FURNITURE)


def _placeholder(shape: Element) -> str:
    """Return the kind of placeholder that a shape fills ("title", "body", "sldNum"); "" for other shapes."""
    for properties in ("nvSpPr", "nvGraphicFramePr"):
        if (placeholder := child(shape, properties, "nvPr", "ph")) is not None:
            return attribute(placeholder, "type", "body")
    return ""


def _shape_text(container: ZipContainer, relationships: dict[str, Relationship], shape: Element) -> str:
    if local_name(shape) != "graphicFrame":
        return paragraph_lines(shape, _LEFT_OUT)
    rows = outermost(shape, "tr", left_out=_LEFT_OUT)
    table = table_lines([[_cell(cell) for cell in row if local_name(cell) == "tc"] for row in rows])
    drawings = [
        read_drawing(container, relationships, reference)
        for reference in outermost(shape, *DRAWING_REFERENCES, left_out=_LEFT_OUT)
    ]
    return "\n".join(line for line in (table, *drawings) if line)


def _cell(cell: Element) -> TableCell:
    rows = parse_number(attribute(cell, "rowSpan"), 1)
    is_covered = attribute(cell, "vMerge") in ("1", "true")
    return TableCell(list(map(drawing_text, _paragraphs(cell))), rows=rows, is_covered=is_covered)


def _paragraphs(shape: Element) -> Iterator[Element]:
    return outermost(shape, "p", left_out=_LEFT_OUT)


def _notes(container: ZipContainer, part: str, relationships: dict[str, Relationship]) -> str:
    """Return a slide's speaker notes; "" if it has none or their part is damaged."""
    notes = next((one.target for one in relationships.values() if one.kind == "notesSlide"), "")
    if not notes:
        return ""
    try:
        shapes = _shapes(parse_part(container, notes))
    except UnreadableDocumentError:
        return ""
    texts = (_shape_text(container, {}, shape) for shape in shapes)
    return "\n".join(text for text in texts if text)
