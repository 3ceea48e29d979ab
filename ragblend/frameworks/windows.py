"""Overlapping windows over a document that is longer than the context: the chunks of each, and the token budget.

Windows are made of whole chunks, so that chunks in two windows are stored once and reused in both. Depends on chunks
and token counts, not on frameworks. Read `windows_of` first.
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
"""Largest default size of a chunk, in tokens."""
_CHUNKS_PER_WINDOW = 4  # least number by default: with fewer chunks, windows cannot overlap by a small share
_OVERLAP = 0.1  # default share of a window that the next one repeats


@dataclass(frozen=True, slots=True)
class DocumentWindow:
    """Adjacent chunks of one document, or of several documents in order, for one prompt."""

    chunks: tuple[Chunk, ...]

    @property
    def place(self) -> dict[str, Any]:
        """Sources of its first and last chunk, and the characters where it starts and ends in them."""
        first, last = self.chunks[0], self.chunks[-1]
        return {"source": first.source, "start": first.start, "last_source": last.source, "end": last.end}


def windows_of(
    texts: Iterable[tuple[str, str]],
    engine: Engine,
    budget: int,
    *,
    window_tokens: int | None = None,
    overlap_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> list[DocumentWindow]:
    """Return windows of at most `budget` prompt tokens over documents, which are given as (text, source).

    window_tokens: tokens of a window; default `budget`. overlap_tokens: least number of tokens that a window shares
    with the previous one; default a tenth. chunk_tokens: largest tokens of a chunk. Raises UsageError for sizes that
    do not fit each other.
    """
    size = budget if window_tokens is None else window_tokens
    if not 0 < size <= budget:
        raise UsageError(
            f"window_tokens is {window_tokens}, but question, instructions and answer leave {budget} tokens of the "
            f"context; choose 1 to {budget}, or lower max_tokens"
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


def spans_of(sizes: Sequence[int], budget: int, overlap: int) -> list[tuple[int, int]]:
    """Return [start, end) of each window over chunks of these sizes: as many chunks as `budget` allows.

    A window begins with chunks of the previous one that have at least `overlap` tokens together, if a further chunk
    then still fits.

    >>> spans_of([3, 3, 3, 3, 3], budget=9, overlap=3)
    [(0, 3), (2, 5)]
    >>> spans_of([3, 3, 3], budget=6, overlap=0), spans_of([5, 5, 5], budget=6, overlap=1)
    ([(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)])
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while True:
        end = start + 1
        while end < len(sizes) and sum(sizes[start : end + 1]) <= budget:
            end += 1
        spans.append((start, end))
        if end == len(sizes):
            return spans
        following = end
        while following > start + 1 and sum(sizes[following:end]) < overlap:
            following -= 1
        while following < end and sum(sizes[following : end + 1]) > budget:
            following += 1
        start = following


def chunk_token_budget(engine: Engine, system: str | None, text: str, answer_tokens: int) -> int:
    """Return the tokens of chunks that fit into a prompt with `text` after them, and an answer. Raises UsageError if
    none is left."""
    num_other = len(engine.renderer.render(Prompt(["."], text, system)))
    budget = engine.context_length - num_other - answer_tokens
    if budget < 1:
        raise UsageError(
            f"question and instructions take {num_other} tokens and the answer {answer_tokens}, but the context has "
            f"{engine.context_length}; lower max_tokens or shorten the instructions"
        )
    return budget
