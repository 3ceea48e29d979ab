"""Plain text, Markdown and source code: a file is one document, with its text unchanged."""

from __future__ import annotations

from ragblend.corpus.readers.encodings import TextWithNotes, decode_text, unify_line_breaks
from ragblend.corpus.readers.text_headings import (
    find_front_matter_title,
    find_markdown_headings,
    find_underlined_headings,
)
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords
from ragblend.errors import NotADocumentError, UnreadableDocumentError

_MAX_LINE_CHARS = 20_000  # longest line of source code that was not generated


def read_text(data: bytes) -> ParsedRecords:
    """Read a text. Raises NotADocumentError for bytes that are not text."""
    decoded = decode_document(data)
    yield ParsedRecord("", decoded.text, {}, notes=decoded.notes)


def read_markdown(data: bytes) -> ParsedRecords:
    """Read Markdown with the marks of its headings. A title in its front matter becomes metadata."""
    decoded = decode_document(data)
    title = find_front_matter_title(decoded.text)
    marks = tuple(find_markdown_headings(decoded.text))
    yield ParsedRecord("", decoded.text, {"title": title} if title else {}, marks, decoded.notes)


def read_restructured_text(data: bytes) -> ParsedRecords:
    """Read a text with the marks of its underlined headings (reStructuredText)."""
    decoded = decode_document(data)
    yield ParsedRecord("", decoded.text, {}, tuple(find_underlined_headings(decoded.text)), decoded.notes)


def read_code(data: bytes) -> ParsedRecords:
    """Read source code. Raises NotADocumentError for generated code: minified files, source maps."""
    decoded = decode_document(data)
    longest = max(map(len, decoded.text.split("\n")))
    if longest > _MAX_LINE_CHARS:
        raise NotADocumentError(
            f"is minified (a line of {longest:,} characters); add the source code that it was made from"
        )
    yield ParsedRecord("", decoded.text, {}, notes=decoded.notes)


def decode_document(data: bytes, declared: str = "") -> TextWithNotes:
    """Return the text of a file, with "\\n" line breaks. `declared`: see `decode_text`.

    Raises NotADocumentError for bytes that are not text.
    """
    try:
        text, notes = decode_text(data, declared)
    except UnreadableDocumentError as error:
        raise NotADocumentError(str(error)) from error
    return TextWithNotes(unify_line_breaks(text), notes)
