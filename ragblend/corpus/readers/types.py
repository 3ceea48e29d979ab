"""The values that a reader returns: texts, their marks, and the records that could not be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple


class Mark(NamedTuple):
    """A place in a text that a citation may name: the beginning of a page, or a heading.

    `offset`: characters from the text's beginning. `value`: the page's number or label, or the heading's words.
    `level`: 1 to 6 for a heading, 0 for a page.
    """

    offset: int
    kind: Literal["page", "heading"]
    value: str
    level: int = 0


class ParsedRecord(NamedTuple):
    """A text in a file. Its line breaks are "\\n".

    `key` is appended to the file's path to make the text's source. `marks` are in the order of their offsets. `notes`
    are sentences about what was left out or guessed, such as "page 3 has a picture and no text: run OCR on it".
    """

    key: str
    text: str
    metadata: dict[str, Any]
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()


class UnreadableRecord(NamedTuple):
    """A record whose text could not be read. `key`: as in ParsedRecord."""

    key: str
    reason: str


ParsedRecords = Iterator[ParsedRecord | UnreadableRecord]
