"""Reads a PDF's contents with PDFium: text of pages, form fields, notes, bookmarks, labels and title, unprocessed but
for raised and lowered digits.

`read_contents` is the entry point. PDFium is not thread-safe, so one lock serves the process.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

import pypdfium2.raw as raw
from pypdfium2 import PdfBookmark, PdfDocument, PdfiumError, PdfPage, PdfTextPage

from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.errors import UnreadableDocumentError

_LOCK = Lock()
_HEADER_BYTES = 1024  # PDFium searches the first ones for "%PDF-", the last ones for "%%EOF"
_PASSWORD, _SECURITY = 4, 5  # PDFium's error codes
_MIN_PAGE_BYTES = 8  # file size per page; compressed empty pages take more
_MAX_ANNOTATIONS = 5000  # per page; each is searched for in the page's text
_MAX_BOOKMARKS = 20_000  # PDFium searches all pages for each one's page
_MAX_OBJECTS = 1000  # objects of a page without text that are searched for a picture
_MANY_PATHS = 50  # letters drawn as outlines; an empty page may have a line or a frame
_HIDDEN = 2  # a flag of annotations
_STREAM = re.compile(rb"\bstream\r?\n")
_DICTIONARY_BYTES = 400  # before a stream
_MIN_INFLATED, _MAX_RATIO = 16 << 20, 100  # pages of text are compressed to a quarter
_MAX_FILTERS = 8
_PIECE = 1 << 16
# PDFium removes the line break after a hyphen: U+FFFE in a page's text, U+0002 in the text of a rectangle. It drops
# these codes from a page's text, although glyphs without a letter may have them.
_HYPHEN = 2
_DROPPED = re.compile("[\x02\x03\x93-\x96\x98]")
_HYPHEN_MARK = re.compile("(?<=\\w)\x02(?=\\w)")
_NUMBER = re.compile(r"[-+\u2212\u2013]?\d[\d,]*")  # what may be raised beside other text
_SMALLER = 0.87  # of the height of the character beside it
_MIN_SHIFT = 0.06  # of that height, between the two baselines
_MAX_GAP = 0.3  # of that height, between the two characters
_INVISIBLE = re.compile("[\\s\x00-\x1f\ufffe]+")

_FIELD_TYPES = {raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX}
_BUTTON_TYPES = {raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON}
_NOTE_TYPES = {
    raw.FPDF_ANNOT_TEXT,
    raw.FPDF_ANNOT_FREETEXT,
    raw.FPDF_ANNOT_HIGHLIGHT,
    raw.FPDF_ANNOT_UNDERLINE,
    raw.FPDF_ANNOT_SQUIGGLY,
    raw.FPDF_ANNOT_STRIKEOUT,
    raw.FPDF_ANNOT_STAMP,
    raw.FPDF_ANNOT_CARET,
}


class PdfPageContents(NamedTuple):
    """The contents of a page. `fields`: its form fields as (name, value). `notes`: the texts of its annotations.

    `has_picture`: True if the page shows a picture and has no text. `is_damaged`: True if PDFium cannot read the page.
    """

    text: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    has_picture: bool = False
    is_damaged: bool = False


class PdfContents(NamedTuple):
    """The contents of a PDF. `labels`: the pages' labels, such as "iv"; "" for a page without a label.

    `headings`: the bookmarks as (title, level), by the number of their page, from 0. The highest level is 1. `is_xfa`:
    True if the form fields are in Adobe's form language (XFA) alone, which PDFium does not read.
    """

    pages: list[PdfPageContents]
    labels: list[str]
    headings: dict[int, list[tuple[str, int]]]
    title: str
    is_xfa: bool


def read_contents(data: bytes) -> PdfContents:
    """Return the contents of the PDF `data`. Raises UnreadableDocumentError if it cannot be read."""
    _check_inflated_size(data)
    with _LOCK, _opened(data) as document, _opened_form(document) as form:
        num_pages = len(document)
        return PdfContents(
            [_read_page(document, at, form) for at in range(num_pages)],
            [document.get_page_label(at).strip() for at in range(num_pages)],
            _read_headings(document),
            document.get_metadata_value("Title"),
            document.get_formtype() == raw.FORMTYPE_XFA_FULL,
        )


def _check_inflated_size(data: bytes) -> None:
    """Raise UnreadableDocumentError if a page may be a memory bomb: PDFium needs 18 times the size of its operators."""
    limit = _MIN_INFLATED + _MAX_RATIO * len(data)
    size = 0
    for stream in _STREAM.finditer(data):
        head = data[max(0, stream.start() - _DICTIONARY_BYTES) : stream.start()]
        if b"/Image" not in head.rpartition(b"obj")[2]:  # large, and PDFium does not decode it for the text
            size += _inflated_size(memoryview(data)[stream.end() :], limit - size)
        if size > limit:
            raise UnreadableDocumentError(
                f"its compressed pages hold more than {limit >> 20} MiB in {len(data)} bytes; split the file, or "
                "save it as text"
            )


def _inflated_size(data: memoryview | bytes, limit: int) -> int:
    """Return the number of bytes in a zlib stream, 0 for other data; counting stops soon after `limit`."""
    size = 0
    for _ in range(_MAX_FILTERS):  # one stream may be compressed many times
        if len(data) < 2 or data[0] & 15 != zlib.DEFLATED or int.from_bytes(data[:2]) % 31:
            break
        inflater, parts, start = zlib.decompressobj(), list[bytes](), 0
        with suppress(zlib.error):  # PDFium also reads a damaged stream up to the damage
            while start < len(data) and not inflater.eof and size <= limit:
                parts.append(inflater.decompress(data[start : start + _PIECE], limit - size + 1))
                start += _PIECE
                size += len(parts[-1])
        data = b"".join(parts)
    return size


@contextmanager
def _opened(data: bytes) -> Iterator[PdfDocument]:
    if not data.strip():
        raise UnreadableDocumentError(f"is empty ({len(data)} bytes); copy or download it again")
    if b"%PDF-" not in data[:_HEADER_BYTES]:
        raise UnreadableDocumentError(
            f"is no PDF: it begins with {data[:20]!r}, not with %PDF-; download it again, or rename it after its format"
        )
    # A file without pages keeps the previous file's error code; this call sets the code for a file that is not a PDF.
    raw.FPDF_LoadMemDocument64(b"", 0, None)
    try:
        document = PdfDocument(data)
    except PdfiumError as error:
        raise UnreadableDocumentError(_explain_failure(data, getattr(error, "err_code", None))) from error
    with closing(document):
        if len(document) * _MIN_PAGE_BYTES > len(data):
            raise UnreadableDocumentError(
                f"is a damaged PDF (it lists {len(document)} pages in {len(data)} bytes); repair it, for example: "
                "qpdf FILE NEW"
            )
        yield document


@contextmanager
def _opened_form(document: PdfDocument) -> Iterator[Any]:
    """Give a handle for the form's fields, None without a form. pypdfium2's own would log a warning for an XFA form."""
    config = raw.FPDF_FORMFILLINFO(version=2)
    has_form = document.get_formtype() != raw.FORMTYPE_NONE
    form = raw.FPDFDOC_InitFormFillEnvironment(document, config) if has_form else None
    try:
        yield form
    finally:
        if form:
            raw.FPDFDOC_ExitFormFillEnvironment(form)


def _explain_failure(data: bytes, code: int | None) -> str:
    if code == _PASSWORD:
        return (
            "is a PDF that needs a password; save it without one, for example: qpdf --decrypt --password=... FILE NEW"
        )
    if code == _SECURITY:
        return "is a PDF with an encryption that PDFium does not know; save it without encryption"
    if b"%%EOF" not in data[-_HEADER_BYTES:]:
        return (
            f"is a damaged PDF (it ends after {len(data)} bytes without %%EOF, so it is cut off); copy or download it "
            "again, or repair it, for example: qpdf FILE NEW"
        )
    return "is a damaged PDF (PDFium finds no pages in it); repair it, for example: qpdf FILE NEW"


def _read_page(document: PdfDocument, at: int, form: Any) -> PdfPageContents:
    try:
        with closing(document[at]) as page:
            with closing(page.get_textpage()) as textpage:
                text = _write_scripts(textpage, _visible_text(textpage))
            if form:
                raw.FORM_OnAfterLoadPage(page, form)  # loads the state of check boxes
            fields, notes = _read_annotations(page, form)
            if form:
                raw.FORM_OnBeforeClosePage(page, form)
            return PdfPageContents(text, fields, notes, has_picture=not text.strip() and _has_picture(page))
    except PdfiumError:
        return PdfPageContents(is_damaged=True)


def _visible_text(textpage: PdfTextPage) -> str:
    """Return the text within the page's edges. Printers' marks and cropped pictures have text outside of them."""
    text: str = textpage.get_text_range()
    bounded: str = textpage.get_text_bounded()
    # `bounded` lacks some line breaks between columns; `text` lacks characters beyond U+FFFF.
    is_whole = len("".join(text.split())) == len("".join(bounded.split())) or (
        len(_INVISIBLE.sub("", text)) == len(_INVISIBLE.sub("", bounded))
    )
    if not is_whole:
        return _HYPHEN_MARK.sub("\ufffe", bounded) if "\ufffe" in text else bounded
    num_dropped = len(_DROPPED.findall(bounded)) - text.count("\ufffe")
    return _read_characters(textpage) if num_dropped > 0 else text


def _read_characters(textpage: PdfTextPage) -> str:
    """Return the text with the characters that PDFium drops from it."""
    codes = [raw.FPDFText_GetUnicode(textpage, at) for at in range(textpage.count_chars())]
    chars = (
        "\ufffe" if code == _HYPHEN and raw.FPDFText_IsHyphen(textpage, at) else chr(code)
        for at, code in enumerate(codes)
    )
    return "".join(chars).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _write_scripts(textpage: PdfTextPage, text: str) -> str:
    """Return a page's text with its raised and lowered digits as `write_scripts` writes them.

    Other characters are left as they are: letters do not change a number.
    """
    if textpage.count_chars() != len(text):
        return text  # the places of its characters are not known
    pieces, offset = list[str](), 0
    for number in _NUMBER.finditer(text):
        (at, end), start = number.span(), number.start()
        base_at = _find_base(textpage, text, at, end)
        base = _measure(textpage, base_at)
        while at < end:
            mark, first = _script(base, _measure(textpage, at)), at
            while at < end and (at == first or _script(base, _measure(textpage, at)) == mark):
                at += 1
            if mark:
                is_next_line = first == start and base_at < start - 1
                pieces += (text[offset : base_at + 1 if is_next_line else first], mark, text[first:at], END)
                offset = at
    return write_scripts("".join([*pieces, text[offset:]])) if pieces else text


class _Place(NamedTuple):
    """The place of a character on its page."""

    left: float
    right: float
    height: float
    baseline: float


def _measure(textpage: PdfTextPage, at: int) -> _Place:
    box, x, y = raw.FS_RECTF(), ctypes.c_double(), ctypes.c_double()
    raw.FPDFText_GetLooseCharBox(textpage, at, box)
    raw.FPDFText_GetCharOrigin(textpage, at, x, y)
    return _Place(box.left, box.right, box.top - box.bottom, y.value)


def _find_base(textpage: PdfTextPage, text: str, start: int, end: int) -> int:
    """Return the number of the character that a number belongs to if it is raised or lowered.

    That is the character before it, also at the end of the line before: PDFium begins a line where the baseline
    changes much. At the beginning of a word, it is the character after the number, or else its first digit.
    """
    if start and not text[start - 1].isspace():
        return start - 1
    if start > 2 and text[start - 2 : start] == "\r\n":
        base, first = _measure(textpage, start - 3), _measure(textpage, start)
        if abs(first.left - base.right) < _MAX_GAP * base.height and _script(base, first):
            return start - 3
    return end if end < len(text) and not text[end].isspace() else start


def _script(base: _Place, place: _Place) -> str:
    """Return the mark of a character that is raised or lowered beside another one; "" for other characters."""
    shift = place.baseline - base.baseline
    if place.height > _SMALLER * base.height or not _MIN_SHIFT * base.height < abs(shift) < base.height:
        return ""
    return RAISED if shift > 0 else LOWERED


def _has_picture(page: PdfPage) -> bool:
    num_paths = 0
    for item in islice(page.get_objects(), _MAX_OBJECTS):
        if item.type == raw.FPDF_PAGEOBJ_IMAGE:
            return True
        num_paths += item.type == raw.FPDF_PAGEOBJ_PATH
    return num_paths >= _MANY_PATHS


def _read_annotations(page: PdfPage, form: Any) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the form fields with a value and the texts of notes, without hidden ones."""
    fields, notes = list[tuple[str, str]](), list[str]()
    for at in range(min(raw.FPDFPage_GetAnnotCount(page), _MAX_ANNOTATIONS)):
        annotation = raw.FPDFPage_GetAnnot(page, at)
        if not annotation:
            continue
        kind = raw.FPDFAnnot_GetSubtype(annotation)
        if kind == raw.FPDF_ANNOT_WIDGET and form:
            fields += _read_field(form, annotation)
        elif kind in _NOTE_TYPES and not raw.FPDFAnnot_GetFlags(annotation) & _HIDDEN:
            notes.append(_read_wide(raw.FPDFAnnot_GetStringValue, annotation, b"Contents"))
        raw.FPDFPage_CloseAnnot(annotation)
    return tuple(fields), tuple(filter(None, notes))


def _read_field(form: Any, annotation: Any) -> list[tuple[str, str]]:
    """Return [(name, value)] of a form field, [] for an empty one. A button that is on has the value "yes"."""
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    if raw.FPDFAnnot_GetFlags(annotation) & _HIDDEN or kind not in _FIELD_TYPES | _BUTTON_TYPES:
        return []
    name = _read_wide(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
    if kind in _BUTTON_TYPES:
        return [(name, "yes")] if name and raw.FPDFAnnot_IsChecked(form, annotation) else []
    value = _read_wide(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
    name = name or _read_wide(raw.FPDFAnnot_GetFormFieldName, form, annotation)
    return [(name, value)] if value.strip() else []


def _read_wide(function: Callable[..., int], *arguments: Any) -> str:
    """Return the string of a PDFium function that fills a buffer with UTF-16 and returns its size in bytes."""
    num_bytes = function(*arguments, None, 0)
    if num_bytes <= 2:  # the final NUL
        return ""
    buffer = ctypes.create_string_buffer(num_bytes)
    function(*arguments, ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), num_bytes)
    return buffer.raw[: num_bytes - 2].decode("utf-16-le", "replace")


def _read_headings(document: PdfDocument) -> dict[int, list[tuple[str, int]]]:
    """Return the bookmarks of each page in the order of the tree.

    Uses a stack, because a hostile tree is deep or a circle.
    """
    headings: dict[int, list[tuple[str, int]]] = {}
    stack, seen = [(raw.FPDFBookmark_GetFirstChild(document, None), 1)], set[int]()
    while stack and len(seen) < _MAX_BOOKMARKS:
        pointer, level = stack.pop()
        if not pointer or (address := ctypes.addressof(pointer.contents)) in seen:
            continue
        seen.add(address)
        stack.append((raw.FPDFBookmark_GetNextSibling(document, pointer), level))
        stack.append((raw.FPDFBookmark_GetFirstChild(document, pointer), level + 1))
        bookmark = PdfBookmark(pointer, document, level)
        destination = bookmark.get_dest()
        page = destination.get_index() if destination else None
        if page is not None:
            headings.setdefault(page, []).append((bookmark.get_title(), level))
    return headings
