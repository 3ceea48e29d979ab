"""Plain text and Markdown: all of the file is one document."""

from __future__ import annotations

from ragblend.corpus.readers.encodings import decode
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords


def read_text(data: bytes) -> ParsedRecords:
    """All of it is one document."""
    yield ParsedRecord("", decode(data), {})
