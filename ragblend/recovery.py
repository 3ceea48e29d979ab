"""Chunk boundaries, found again in a prompt that a framework has glued into one string.

`recover` is the one place for it: explicit segments, then a separator, then the registry of ingested texts. Two texts
are the same when they are equal after `strip()`. Knows strings and chunks, nothing about tokens, KV or frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragblend.errors import UsageError
from ragblend.segments import CHUNK_END, Chunk, Part

Block = Part | Mapping[str, Any]
"""Text, a chunk, or a content block `{"type": "text", "text": ..., "extras": {"chunk_id": ...}}`."""

# The frameworks' joiner after a chunk: as many line breaks as the chunk's own end has, spaces before them included.
_JOINER = re.compile(rf"(?:[ \t\r]*\n){{1,{CHUNK_END.count(chr(10))}}}")


class Match(NamedTuple):
    """A known text at `start .. end` of the text searched."""

    start: int
    end: int
    text: str


class KnownTexts(Protocol):
    """Texts of ingested chunks; `registry.ChunkRegistry` is one."""

    def __contains__(self, text: object) -> bool: ...

    def find(self, text: str) -> Sequence[tuple[int, int, str]]:
        """(start, end, known text) of each that stands in `text`, in order, none overlapping."""


def recover(
    content: str | Sequence[Block],
    *,
    segments: Sequence[Part] = (),
    separator: str | None = None,
    registry: KnownTexts | None = None,
    is_stored: Callable[[str], bool] | None = None,
) -> tuple[Part, ...]:
    """Text and chunks of one message, in order. Explicit chunks come first, then the separator, then the registry.

    Explicit are Chunks and blocks with a `chunk_id` in `content`, and `segments` found verbatim in it, each as often
    as it is given. The separator only says where to cut: a piece is a chunk when its text is in the `registry` or
    `is_stored`; so a separator typed by a user makes no chunk. Without both, pieces between two separators are chunks.
    The separator itself is dropped. The registry is searched in everything that is still text.

    A chunk carries its own end (`CHUNK_END`), so the line breaks that joined it to the next text are swallowed.

    >>> recover("Context:\\n\\nfirst\\n\\nsecond\\n\\nQuestion: why?", segments=["first", "second"])[1].text
    'first'
    """
    parts = _flatten(content)
    if segments:
        parts = _explicit(parts, segments)
    if separator is not None:
        check_separator(separator)
        cut_piece = _piece_recogniser(registry, is_stored)
        parts = _refined(parts, lambda text: _cut(text, separator, cut_piece))
    if registry is not None:
        parts = _refined(parts, lambda text: _marked(text, registry.find(text)))
    return _joined(parts)


def check_separator(separator: str) -> None:
    """Raise UsageError for a separator that frameworks would change on the way."""
    if not separator or separator != separator.strip():
        raise UsageError(
            f"separator is {separator!r}; frameworks strip outer whitespace, so choose a mark without it that no "
            "document contains, for example '[[RB]]'"
        )


def _flatten(content: str | Sequence[Block]) -> list[Part]:
    blocks: Sequence[Block] = [content] if isinstance(content, str | Chunk) else content
    return [block if isinstance(block, str | Chunk) else _from_block(block) for block in blocks]


def _from_block(block: Mapping[str, Any]) -> Part:
    kind = block.get("type", "text")
    text = block.get("text")
    if kind not in ("text", "text-plain") or not isinstance(text, str):
        raise UsageError(
            f"a content block has type {kind!r}; the engine reads text only. Remove it, or describe it in words"
        )
    extras = block.get("extras") or {}
    chunk_id = extras.get("chunk_id", block.get("chunk_id"))
    if chunk_id is None:
        return text
    return Chunk(text.strip(), str(extras.get("source", "")), metadata={"chunk_id": chunk_id})


def _refined(parts: Iterable[Part], split: Callable[[str], Iterable[Part]]) -> list[Part]:
    """`parts` with every text replaced by what `split` makes of it."""
    return [new for part in parts for new in ([part] if isinstance(part, Chunk) else split(part))]


def _explicit(parts: Sequence[Part], segments: Sequence[Part]) -> list[Part]:
    """Cut `segments` out of the texts, each as often as it is given. A text that is one segment needs no search."""
    waiting: dict[str, list[Chunk]] = {}
    for segment in segments:
        chunk = segment if isinstance(segment, Chunk) else Chunk(segment)
        text = chunk.text.strip()
        if text:
            # The stripped text is the one that was ingested; the rest of the chunk says where it came from.
            same = chunk if text == chunk.text else Chunk(text, chunk.source, metadata=chunk.metadata)
            waiting.setdefault(text, []).append(same)

    def split(text: str) -> Iterator[Part]:
        position = 0
        while position < len(text):
            found = _earliest(text, position, waiting)
            if found is None:
                break
            yield text[position : found.start]
            yield waiting[found.text].pop(0)
            if not waiting[found.text]:
                del waiting[found.text]
            position = found.end
        yield text[position:]

    return _refined(parts, split)


def _earliest(text: str, position: int, known: Iterable[str]) -> Match | None:
    """The earliest place of a known text that does not begin or end inside a word; there, the longest."""
    best: Match | None = None
    for candidate in known:
        start = text.find(candidate, position)
        while start >= 0 and not _stands_alone(text, start, start + len(candidate)):
            start = text.find(candidate, start + 1)
        if start >= 0 and (best is None or (start, -len(candidate)) < (best.start, -len(best.text))):
            best = Match(start, start + len(candidate), candidate)
    return best


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return not (
        (before.isascii() and before.isalnum() and text[start].isalnum())
        or (after.isascii() and after.isalnum() and text[end - 1].isalnum())
    )


def _piece_recogniser(
    registry: KnownTexts | None, is_stored: Callable[[str], bool] | None
) -> Callable[[str, bool], bool]:
    """Whether a piece (its text, and whether separators enclose it) is a chunk."""
    if registry is None and is_stored is None:
        return lambda text, enclosed: enclosed
    return lambda text, enclosed: (
        (registry is not None and text in registry) or (is_stored is not None and is_stored(text))
    )


def _cut(text: str, separator: str, is_chunk: Callable[[str, bool], bool]) -> Iterator[Part]:
    pieces = text.split(separator)
    for index, piece in enumerate(pieces):
        stripped = piece.strip()
        if len(pieces) > 1 and stripped and is_chunk(stripped, 0 < index < len(pieces) - 1):
            yield Chunk(stripped)
        else:
            yield piece


def _marked(text: str, matches: Iterable[tuple[int, int, str]]) -> Iterator[Part]:
    position = 0
    for start, end, known in matches:
        yield text[position:start]
        yield Chunk(known)
        position = end
    yield text[position:]


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbouring texts as one, without the joiner after a chunk; blank texts and chunks are nothing."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part if isinstance(part, str) else part.text.strip():
            merged.append(part)
    after_chunk = [False, *(isinstance(part, Chunk) for part in merged)]
    cleaned = (
        _JOINER.sub("", part, count=1) if follows and isinstance(part, str) and _JOINER.match(part) else part
        for part, follows in zip(merged, after_chunk, strict=False)
    )
    return tuple(part for part in cleaned if isinstance(part, Chunk) or part.strip())
