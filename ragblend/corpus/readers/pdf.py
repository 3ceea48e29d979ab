"""PDF: the text of pages, form fields and notes, with marks for pages and bookmarks.

`pdfium` reads the file, `pdf_text` cleans the text, and this module joins the pages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ragblend.corpus.readers.blocks import collapse_whitespace
from ragblend.corpus.readers.pdf_text import (
    compose_accents,
    find_odd,
    is_garbage,
    join_hyphens,
    mark_lost,
    normalize_characters,
    remove_controls,
)
from ragblend.corpus.readers.types import Mark, ParsedRecord, ParsedRecords
from ragblend.errors import UnreadableDocumentError

if TYPE_CHECKING:
    from ragblend.corpus.readers.pdfium import PdfPageContents

_PICTURE = "a picture and no text"
_GARBAGE = "garbled text"
_LOST = "that the fonts do not name (read as \ufffd)"
_DAMAGE = "contents that cannot be read"
_FIXES = {
    # Without an option, ocrmypdf rejects a file that has text on some page.
    _PICTURE: "run OCR on the file, for example: ocrmypdf --skip-text FILE NEW",
    _GARBAGE: "run OCR on the file, for example: ocrmypdf --force-ocr FILE NEW",
    _LOST: "if words lack letters, run OCR on the file, for example: ocrmypdf --force-ocr FILE NEW",
    _DAMAGE: "repair the file, for example: qpdf FILE NEW",
}
_NO_TEXT = "; if a viewer shows some, run OCR on the file, for example: ocrmypdf --force-ocr FILE NEW"
_XFA = "its form is of Adobe's type XFA, whose fields are not read; print it into a new PDF with Adobe Reader"
_MAX_RANGES = 20  # ranges of pages that a note names
_MAX_LEVEL = 6
_MAX_TITLE = 300
_MAX_HEADING_LINES = 3
_MAX_HEADING = 200  # characters of a line
_NO_LETTERS = re.compile(r"[\W_]+")
_PROGRAM = re.compile(r"^(microsoft (office )?(word|powerpoint|excel)|powerpoint presentation) ?- ?", re.IGNORECASE)
_NO_TITLE = re.compile(
    r"(untitled|unknown|no title|title|document|dokument|print|presentation|about:blank)[\s_-]?\d*"
    r"|\(anonymous\)|\W*|\S*\.(docx?|rtf|odt|pptx?|xlsx?|pdf|ps|dvi|tex|indd|qxd|pmd|html?|txt|fm|cdr|ai)|.*[/\\]\S+\.\w+",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?:(?i:chapter|kapitel|chapitre|part|section)\s)?[\dA-Z]{1,4}(?:\.\d{1,3})*\.?\s")


def read_pdf(data: bytes) -> ParsedRecords:
    """Read all pages as one document, with a mark for each page and each bookmark.

    Pages without readable text are left out and named in the record's notes. Raises UnreadableDocumentError for files
    with a password, damaged files and files without any text.
    """
    from ragblend.corpus.readers.pdf_glyphs import name_glyphs
    from ragblend.corpus.readers.pdfium import read_contents

    contents = read_contents(data)
    if any(find_odd(normalize_characters(page.text)) for page in contents.pages) and (named := name_glyphs(data)):
        with suppress(UnreadableDocumentError):
            contents = read_contents(named)
    texts, problems, lost = list[str](), dict[str, list[int]](), dict[int, int]()
    for number, page in enumerate(contents.pages, 1):
        text, problem, num_lost = _page_text(page)
        texts.append(text)
        if problem:
            problems.setdefault(problem, []).append(number)
        if num_lost:
            lost[number] = num_lost
    notes = [f"{_name_pages(pages)} {problem}; {_FIXES[problem]}" for problem, pages in problems.items()]
    if lost:
        characters = "1 character" if sum(lost.values()) == 1 else f"{sum(lost.values())} characters"
        notes.append(f"{_name_pages(list(lost))} {characters} {_LOST}; {_FIXES[_LOST]}")
    if contents.is_xfa:
        notes.append(_XFA)
    if not any(texts):
        raise UnreadableDocumentError(f"holds no text{': ' if notes else ''}{'; '.join(notes) or _NO_TEXT}")
    metadata: dict[str, Any] = {"num_pages": len(texts)}
    if title := _clean_title(contents.title):
        metadata["title"] = title
    if problems:
        metadata["num_pages_unread"] = sum(map(len, problems.values()))
    text, marks = _join_pages(join_hyphens(compose_accents(texts)), contents.labels, contents.headings)
    yield ParsedRecord("", text, metadata, marks, tuple(notes))


def _page_text(page: PdfPageContents) -> tuple[str, str, int]:
    """Return the page's text with its fields and notes, the page's problem or "", and the number of lost characters."""
    if page.is_damaged:
        return "", _DAMAGE, 0
    raw = normalize_characters(page.text)
    text, num_lost = mark_lost(raw)
    text = remove_controls(text)
    is_unreadable = is_garbage(raw) or bool(raw.strip() and not text)
    problem = _GARBAGE if is_unreadable else _PICTURE if page.has_picture else ""
    text = "" if problem else text
    fields = [(collapse_whitespace(_clean(name)), _clean(value)) for name, value in page.fields]
    lines = [f"{name}: {value}" if name else value for name, value in fields]
    notes = [note for note in map(_clean, page.notes) if note not in text]  # a highlight may quote the page
    blocks = [text, *("\n".join(dict.fromkeys(block)) for block in (lines, notes))]
    return "\n\n".join(filter(None, blocks)), problem, 0 if problem else num_lost


def _clean(text: str) -> str:
    return remove_controls(normalize_characters(text.replace("\r", "\n")))


def _name_pages(pages: Sequence[int]) -> str:
    """Return the beginning of a sentence about `pages`, which must ascend.

    >>> _name_pages([3]), _name_pages([1, 2, 3, 7])
    ('page 3 has', 'pages 1-3, 7 have')
    """
    if len(pages) == 1:
        return f"page {pages[0]} has"
    ranges: list[list[int]] = []
    for page in pages:
        if ranges and page == ranges[-1][1] + 1:
            ranges[-1][1] = page
        else:
            ranges.append([page, page])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    num_more = sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])
    return f"pages {', '.join(named)}{f' and {num_more} more' if num_more else ''} have"


def _clean_title(title: str) -> str:
    """Return a document's title; "" for a title that a program generated.

    >>> _clean_title("Microsoft Word - lease.doc"), _clean_title("Untitled-1"), _clean_title("Lease of the garden")
    ('', '', 'Lease of the garden')
    """
    words = _PROGRAM.sub("", collapse_whitespace(_clean(title)))[:_MAX_TITLE].strip()
    return "" if _NO_TITLE.fullmatch(words) else words


def _join_pages(
    texts: Sequence[str], labels: Sequence[str], headings: Mapping[int, Sequence[tuple[str, int]]]
) -> tuple[str, tuple[Mark, ...]]:
    """Return the document's text, with a blank line between pages, and its marks. Empty pages have none."""
    waiting: list[tuple[str, int]] = []  # headings of pages without text: they mark the next page with text
    marks, offset, parts = list[Mark](), 0, list[str]()
    for at, text in enumerate(texts):
        waiting += headings.get(at, ())
        if not text:
            continue
        marks.append(Mark(offset, "page", labels[at] or str(at + 1)))
        marks += (mark._replace(offset=offset + mark.offset) for mark in _mark_headings(text, waiting))
        waiting = []
        parts.append(text)
        offset += len(text) + 2
    return "\n\n".join(parts), tuple(marks)


def _mark_headings(text: str, headings: Sequence[tuple[str, int]]) -> list[Mark]:
    """Return the marks of a page's headings, at the line with the heading's words or else at the heading before."""
    if not headings:
        return []
    lines = _find_lines(text)
    marks, offset = list[Mark](), 0
    for title, level in headings:
        value = collapse_whitespace(_clean(title))[:_MAX_TITLE]
        if value:
            offset = max(offset, lines.get(_line_key(value), offset))
            marks.append(Mark(offset, "heading", value, min(level, _MAX_LEVEL)))
    return marks


def _find_lines(text: str) -> dict[str, int]:
    """Return the offsets of a page's lines, and of two and three consecutive lines, by `_line_key`."""
    offsets, offset, keys = dict[str, int](), 0, list[tuple[int, str]]()  # (offset, key) of one to three lines
    for line in text.split("\n"):
        letters = _fold(line[:_MAX_HEADING])
        keys = [(first, key + letters) for first, key in keys[1 - _MAX_HEADING_LINES :]]
        keys.append((offset, _line_key(line[:_MAX_HEADING])))
        for first, key in keys:
            offsets.setdefault(key, first)
        offset += len(line) + 1
    return offsets


def _line_key(line: str) -> str:
    """Return the key by which a bookmark's heading is found in the text: its letters and digits without its number."""
    number = _NUMBER.match(line)
    return _fold(line[number.end() :] if number else line)


def _fold(text: str) -> str:
    """Return the letters and digits of `text` in lower case and without accents, which bookmarks may lack."""
    return _NO_LETTERS.sub("", unicodedata.normalize("NFKD", text)).casefold()
