"""Citations of chunks: pages and headings in a chunk's metadata, and one line of text for display."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

from ragblend.corpus.documents import Document
from ragblend.corpus.folder_scan import display_source, escape_control
from ragblend.prompt.types import Chunk

PLACE_FIELDS = frozenset({"page", "page_label", "headings"})
"""Fields of a chunk's metadata that locate the chunk in its file."""

_MAX_HEADING_CHARS = 200
_MAX_QUOTED_CHARS = 36
_MAX_DEPTH = 6


def add_pages_and_headings(document: Document, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return `chunks` of `document` with their pages and headings in their metadata.

    `page`: page of the chunk's first character, a number or a label such as "iv". `page_end`: page of its last
    character, if it is another page. `headings`: the headings above the chunk's first character, and the heading with
    which the chunk begins, outermost first; at most six, each of at most 200 characters. A field that a splitter has
    set is kept.
    """
    if not document.marks:
        return list(chunks)
    pages = [mark for mark in document.marks if mark.kind == "page"]
    page_offsets = [mark.offset for mark in pages]
    paths, path_offsets = _heading_paths(document), [mark.offset for mark in document.marks if mark.kind == "heading"]
    located = []
    for chunk in chunks:
        facts: dict[str, Any] = {}
        first = bisect_right(page_offsets, chunk.start) - 1
        last = bisect_right(page_offsets, max(chunk.start, chunk.end - 1)) - 1
        if first >= 0:
            facts["page"] = _page_number(pages[first].value)
        if last > first >= 0 and pages[last].value != pages[first].value:
            facts["page_end"] = _page_number(pages[last].value)
        path = paths[bisect_right(path_offsets, chunk.start)]
        if path:
            facts["headings"] = list(path)
        located.append(replace(chunk, metadata={**facts, **chunk.metadata}) if facts else chunk)
    return located


def describe_source(source: str, metadata: Mapping[str, Any]) -> str:
    """Return one line: a chunk's file and record, its pages, and the innermost heading above it.

    Without a heading, the line has the document's title. A file below the working folder has its relative path.

    >>> describe_source("handbook.pdf", {"page": 12, "headings": ["Staff", "Leave"]})
    'handbook.pdf, p. 12, "Leave"'
    >>> describe_source("mail.mbox#3", {"page": "iv", "page_end": 2, "title": "Minutes"})
    'mail.mbox#3, pp. iv-2, "Minutes"'
    """
    parts = [display_source(source)] if source else []
    # LangChain's and LlamaIndex's PDF readers count `page` from 0 and have the page's own number in `page_label`.
    page, page_end = metadata.get("page_label", metadata.get("page")), metadata.get("page_end")
    if _is_label(page):
        pages = f"pp. {page}-{page_end}" if _is_label(page_end) else f"p. {page}"
        parts.append(_shorten(pages))
    headings = metadata.get("headings")
    named = headings[-1] if isinstance(headings, list | tuple) and headings else metadata.get("title")
    if isinstance(named, str) and named.strip():
        parts.append(f'"{_shorten(named)}"')
    return escape_control(", ".join(parts)) or "chunk"


def describe_chunk(chunk: Chunk) -> str:
    """Return one line that names a chunk: its document with page and heading, or else with the chunk's first words.

    >>> describe_chunk(Chunk("The rent is due.", "lease.txt")), describe_chunk(Chunk("The rent is due."))
    ('lease.txt, "The rent is due."', '"The rent is due."')
    """
    if PLACE_FIELDS & chunk.metadata.keys():
        return describe_source(chunk.source, chunk.metadata)
    return ", ".join(filter(None, (display_source(chunk.source), quote_beginning(chunk.text))))


def quote_beginning(text: str) -> str:
    """Return the first characters of `text` in quotes, on one line, with control characters escaped.

    >>> quote_beginning(" The rent\\nis due. "), quote_beginning("The rent is due on the first day of each month.")
    ('"The rent is due."', '"The rent is due on the first day of..."')
    """
    words = " ".join(text[: 4 * _MAX_QUOTED_CHARS].split())
    if len(words) > _MAX_QUOTED_CHARS:
        words = f"{words[:_MAX_QUOTED_CHARS].rstrip()}..."
    return escape_control(f'"{words}"')


def citation_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the title, pages and headings in a chunk's metadata, as far as it has them."""
    return {name: metadata[name] for name in ("title", "page", "page_end", "headings") if name in metadata}


def _heading_paths(document: Document) -> list[tuple[str, ...]]:
    """Return the headings in force before the first heading mark (none), and from each mark on."""
    paths: list[tuple[str, ...]] = [()]
    open_headings: list[tuple[int, str]] = []  # level and words, outermost first
    for mark in document.marks:
        if mark.kind != "heading":
            continue
        level = min(mark.level, _MAX_DEPTH)
        while open_headings and open_headings[-1][0] >= level:
            open_headings.pop()
        open_headings.append((level, _shorten(mark.value)))
        paths.append(tuple(words for _, words in open_headings if words))
    return paths


def _shorten(heading: str) -> str:
    words = " ".join(heading[: 4 * _MAX_HEADING_CHARS].split())
    return words if len(words) <= _MAX_HEADING_CHARS else f"{words[: _MAX_HEADING_CHARS - 3]}..."


def _page_number(value: str) -> int | str:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else value[:_MAX_HEADING_CHARS]


def _is_label(page: object) -> bool:
    return isinstance(page, Integral | str) and page != ""  # NumPy's integers are Integral, too
