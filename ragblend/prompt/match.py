"""Matched prompt: the token ids of a prompt and the runs of stored chunks in them.

Depends on ids and chunks, not on tokenizers, stores or engines. `token_index` finds the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from ragblend.prompt.token_index import is_long_enough
from ragblend.prompt.types import Chunk


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Run of a chunk, given by its ids: positions [start, end) of a prompt equal the chunk's ids from `chunk_start`.

    `chunk`: the chunk if the prompt names it, else None. `document`: a document of the registry that contains the
    chunk; "" if unknown.
    """

    chunk_ids: tuple[int, ...]
    chunk_start: int
    start: int
    end: int
    chunk: Chunk | None = None
    document: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.end - self.start

    @property
    def source(self) -> str:
        """Return the source of the chunk, else its document; "" if neither is known."""
        return (self.chunk.source if self.chunk is not None else "") or self.document

    def within(self, start: int, end: int) -> ChunkRun:
        """Return the part of the run between two positions of the prompt; empty if they do not overlap the run."""
        start = max(start, self.start)
        end = max(start, min(end, self.end))
        return replace(self, chunk_start=self.chunk_start + start - self.start, start=start, end=end)

    def without(self, others: Iterable[ChunkRun]) -> list[ChunkRun]:
        """Return the parts of the run that no other run covers, if they are long enough."""
        parts = [self]
        for other in others:
            parts = [
                rest
                for part in parts
                for rest in (part.within(part.start, other.start), part.within(other.end, part.end))
                if is_long_enough(rest.num_tokens, len(self.chunk_ids))
            ]
        return parts


SegmentKind = Literal["prefix", "chunk", "text", "suffix"]


class PromptSegment(NamedTuple):
    """Positions [start, end) of a prompt: a run, or the text before, between or after runs.

    `chunk`: index in `MatchedPrompt.chunks` of the chunk that a run belongs to; None for text.
    """

    kind: SegmentKind
    start: int
    end: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class MatchedPrompt:
    """Token ids of a prompt, and the runs of chunks in them in the order of the prompt.

    `prefix_ids`: the first ids of the prompt, up to its system message, after which chunks may be stored; () if none.
    """

    token_ids: list[int]
    runs: tuple[ChunkRun, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    match_s: float = field(default=0.0, compare=False)  # seconds that rendering and matching took

    @property
    def num_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.token_ids)

    @property
    def num_prefix(self) -> int:
        """Return the number of tokens before the first run; 0 without a run."""
        return self.runs[0].start if self.runs else 0

    @property
    def question_start(self) -> int | None:
        """Return the position after the last run; None if it ends the prompt, or if there is no run."""
        end = self.runs[-1].end if self.runs else self.num_tokens
        return end if end < self.num_tokens else None

    @property
    def segments(self) -> Iterator[PromptSegment]:
        """Yield the runs and the text between them, in order. Together they cover the whole prompt."""
        end = 0
        for number, parts in enumerate(self.chunks):
            for run in (self.runs[part] for part in parts):
                if run.start > end:
                    yield PromptSegment("text" if end else "prefix", end, run.start)
                yield PromptSegment("chunk", run.start, run.end, number)
                end = run.end
        if end < self.num_tokens:
            yield PromptSegment("suffix", end, self.num_tokens)

    @property
    def chunks(self) -> list[list[int]]:
        """Return for each chunk the indices of its runs, in prompt order. A run that continues the chunk of the run
        before it belongs to the same chunk.
        """
        found: list[list[int]] = []
        for index, run in enumerate(self.runs):
            before = self.runs[index - 1] if index else None
            if (
                before is not None
                and run.chunk_ids == before.chunk_ids
                and run.chunk_start >= before.chunk_start + before.num_tokens
            ):
                found[-1].append(index)
            else:
                found.append([index])
        return found


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading ids that two sequences share.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(first), len(second))
    different = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(different[0]) if len(different) else length
