"""Content of a framework's message: its text, and the chunks that its blocks name.

Depends on strings, chunks and content blocks, not on frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk, Part, join_parts

Block = Part | Mapping[str, Any]
"""Text, a chunk, or a content block `{"type": "text", "text": ..., "extras": {"chunk_id": ...}}`."""

_INSTEAD = {
    "image": "send a description, from a model that reads images for example",
    "audio": "send its transcript",
    "video": "send its transcript, or a description",
    "file": "send its text (`ragblend ingest` reads PDF, HTML, Office and others)",
}
_INSTEAD |= {"document": _INSTEAD["file"], "media": "describe it in words"}


def text_and_chunks(content: str | Sequence[Block]) -> tuple[str, list[Chunk]]:
    """Return the text of a message's content, and the chunks in it.

    A chunk is a Chunk, or a text block that has a `chunk_id`. In the text, a blank line separates a chunk from the
    blocks before and after it (`join_parts`). Raises UsageError for a block that is not text.

    >>> text_and_chunks([{"type": "text", "text": "a b", "extras": {"chunk_id": "1"}}, "Why?"])[0]
    'a b\\n\\nWhy?'
    """
    if isinstance(content, str):
        return content, []
    parts = [_part(block) for block in content]
    return join_parts(parts), [part for part in parts if isinstance(part, Chunk)]


def is_media(kind: str) -> bool:
    """Return True if a content block of that type is an image, sound, video or file.

    >>> [is_media(kind) for kind in ("image_url", "input_audio", "reasoning")]
    [True, True, False]
    """
    return any(name in kind for name in _INSTEAD)


def reject_block(kind: str) -> NoReturn:
    """Raise UsageError for a content block of a type that engines do not support."""
    instead = next((what for name, what in _INSTEAD.items() if name in kind), "send its text as a text block")
    raise UsageError(f"a content block has type {kind!r}; the engine reads text only. Leave it out, or {instead}")


def _part(block: Block) -> Part:
    if isinstance(block, str | Chunk):
        return block
    text, kind = block.get("text"), str(block.get("type", "text"))
    if kind not in ("text", "text-plain") or not isinstance(text, str):
        reject_block(kind)
    extras = block.get("extras") or {}
    chunk_id = extras.get("chunk_id", block.get("chunk_id"))
    if chunk_id is None or not text.strip():
        return text
    return Chunk(text, str(extras.get("source") or ""), metadata={"chunk_id": chunk_id})
