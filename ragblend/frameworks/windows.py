"""A document longer than the context, in windows that overlap: which chunks each of them holds, and what fits.

Windows are made of whole chunks, so that what two of them share is stored once and reused in both. Knows chunks and
token counts. Knows no framework, and does not answer. Read `windows_of` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk, Prompt

if TYPE_CHECKING:
    from ragblend.engine.api import Engine

CHUNK_TOKENS = 256
"""Of a document's chunks at most, in windows that are large enough."""
_CHUNKS_PER_WINDOW = 4  # at least, unless a chunk size is given: fewer leave no choice where a window begins
_OVERLAP = 0.1  # of a window, unless said otherwise


@dataclass(frozen=True, slots=True)
class DocumentWindow:
    """Neighbouring chunks of a document, or of several in a row, that one prompt holds."""

    chunks: tuple[Chunk, ...]

    @property
    def place(self) -> dict[str, Any]:
        """Where it stands: its first and last source, and the characters there."""
        first, last = self.chunks[0], self.chunks[-1]
        return {"source": first.source, "start": first.start, "last_source": last.source, "end": last.end}


def windows_of(
    texts: Iterable[tuple[str, str]],
    engine: Engine,
    room: int,
    *,
    window_tokens: int | None = None,
    overlap_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> list[DocumentWindow]:
    """Windows over documents, given as text and source, of which each takes at most `room` tokens of a prompt.

    window_tokens: tokens of a window, all there is room for unless given. overlap_tokens: at least so many of them it
    shares with the one before, a tenth unless given. chunk_tokens: tokens of a chunk, at most. Raises UsageError for
    sizes that fit nowhere.
    """
    size = room if window_tokens is None else window_tokens
    if not 0 < size <= room:
        raise UsageError(
            f"window_tokens is {window_tokens}, and the context has room for {room} beside question, instructions and "
            "answer; choose between 1 and that, or lower max_tokens"
        )
    overlap = int(size * _OVERLAP) if overlap_tokens is None else overlap_tokens
    joint = len(engine.renderer.separator_ids)
    largest = min(CHUNK_TOKENS, size // _CHUNKS_PER_WINDOW) if chunk_tokens is None else chunk_tokens
    if not 0 <= overlap < size or not 0 < largest + joint <= size - overlap:
        raise UsageError(
            f"windows of {size} tokens cannot overlap by {overlap} with chunks of {largest}; choose overlap_tokens and "
            "chunk_tokens that together are smaller than a window"
        )
    count = engine.renderer.count_tokens
    chunks = [chunk for text, source in texts for chunk in split(Document(text, source), count, largest)]
    if not chunks:
        raise UsageError("the document is empty; give one with text")
    spans = spans_of([count(chunk.text) + joint for chunk in chunks], size, overlap)
    return [DocumentWindow(tuple(chunks[start:end])) for start, end in spans]


def spans_of(sizes: Sequence[int], room: int, overlap: int) -> list[tuple[int, int]]:
    """Which of the chunks, of these sizes, each window holds: as many as there is room for, and at its front those of
    the window before that are at least `overlap` together, where there is room for a further one.

    >>> spans_of([3, 3, 3, 3, 3], room=9, overlap=3)
    [(0, 3), (2, 5)]
    >>> spans_of([3, 3, 3], room=6, overlap=0), spans_of([5, 5, 5], room=6, overlap=1)
    ([(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)])
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while True:
        end = start + 1
        while end < len(sizes) and sum(sizes[start : end + 1]) <= room:
            end += 1
        spans.append((start, end))
        if end == len(sizes):
            return spans
        following = end
        while following > start + 1 and sum(sizes[following:end]) < overlap:
            following -= 1
        while following < end and sum(sizes[following : end + 1]) > room:
            following += 1
        start = following


def chunk_token_budget(engine: Engine, system: str | None, text: str, answer_tokens: int) -> int:
    """Tokens of chunks that fit into a prompt with `text` behind them, and an answer."""
    beside = len(engine.renderer.render(Prompt(["."], text, system)))
    room = engine.context_length - beside - answer_tokens
    if room < 1:
        raise UsageError(
            f"question and instructions take {beside} tokens and the answer {answer_tokens}, of a context of "
            f"{engine.context_length}; lower max_tokens or say less"
        )
    return room
