"""Number of tokens that requests find in a store of a given capacity with LRU eviction, as ragblend's disk tier has.

`count_chunk_uses` cuts repeated passages into chunks and lists the uses of each. `lru_hit_tokens` counts the tokens
that a store finds. Sizes and capacities are in tokens, which all have the same bytes of KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragblend.lab.traffic.passages import RepeatedPassages

Numbers = NDArray[np.int64]

_MIX = np.uint64(0x9E3779B97F4A7C15)

SNAP = 8
"""Bounds of passages within this many tokens of each other count as one bound."""


class ChunkUses(NamedTuple):
    """Chunks, and the requests that use each chunk.

    A use is a pair of a chunk and a request that contains the chunk. The first such request stores the chunk.
    """

    starts: Numbers  # of each chunk, in tokens of the concatenated passages
    sizes: Numbers  # of each chunk, in tokens
    chunks: Numbers  # of each use: index of its chunk
    requests: Numbers  # of each use: number of its request, ascending

    @property
    def counts(self) -> Numbers:
        """Number of requests that use each chunk."""
        return np.bincount(self.chunks, minlength=len(self.sizes))


def count_chunk_uses(passages: RepeatedPassages) -> ChunkUses:
    """Cut repeated passages into chunks where a repetition begins or ends. Return the chunks with their uses.

    No chunk contains tokens of two passages, which come from different places of the log.
    """
    sources = np.frombuffer(passages.run_sources, np.int64)
    ends = sources + np.frombuffer(passages.run_lengths, np.int32)
    requests = np.frombuffer(passages.run_requests, np.int64)
    bounds = np.unique(np.concatenate((sources, ends)))
    if not len(bounds):
        empty = np.empty(0, np.int64)
        return ChunkUses(empty, empty, empty, empty)
    starts = np.frombuffer(passages.starts, np.int64)
    homes = np.searchsorted(starts, bounds, "right")
    cuts = bounds[np.concatenate(([True], (np.diff(bounds) > SNAP) | (np.diff(homes) > 0)))]
    sizes = np.diff(np.append(cuts, bounds[-1]))
    first = np.searchsorted(cuts, sources, "right") - 1
    last = np.searchsorted(cuts, ends, "right") - 1
    last[ends == bounds[-1]] = len(cuts) if sizes[-1] else len(cuts) - 1
    spans = np.maximum(last - first, 0)
    offsets = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    chunks, when = np.repeat(first, spans) + offsets, np.repeat(requests, spans)
    used = np.unique(chunks)
    homes = np.searchsorted(starts, cuts[used], "right") - 1
    chunks = np.concatenate((used, chunks))
    when = np.concatenate((np.frombuffer(passages.first_requests, np.int64)[homes], when))
    order = np.lexsort((np.arange(len(when)), when))
    chunks, when = np.searchsorted(used, chunks[order]), when[order]
    # A chunk that a prompt has twice counts as one use.
    once = np.sort(np.unique(when * len(used) + chunks, return_index=True)[1])
    return ChunkUses(cuts[used], sizes[used], chunks[once], when[once])


def merge_adjacent_chunks(uses: ChunkUses, begins: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge adjacent chunks that the same requests use. Return the chunks as (start, end, number of requests).

    `begins`: offsets at which a chunk is not merged with the one before it.
    """
    marks = np.zeros(len(uses.sizes), np.uint64)  # of the set of requests
    np.add.at(marks, uses.chunks, (uses.requests.astype(np.uint64) + np.uint64(1)) * _MIX)
    ends = uses.starts + uses.sizes
    same = (uses.starts[1:] == ends[:-1]) & (marks[1:] == marks[:-1]) & (uses.counts[1:] == uses.counts[:-1])
    goes_on = np.concatenate(([False], same & ~np.isin(uses.starts[1:], np.asarray(begins, np.int64))))
    firsts = np.flatnonzero(~goes_on[: len(ends)])
    lasts = np.append(firsts[1:], len(ends)) - 1 if len(firsts) else firsts
    columns = (uses.starts[firsts], ends[lasts], uses.counts[firsts])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def lru_hit_tokens(uses: ChunkUses, capacity_tokens: float) -> int:
    """Return the number of tokens, summed over all requests, that an LRU store of `capacity_tokens` tokens serves."""
    sizes, stored = uses.sizes.tolist(), OrderedDict[int, None]()
    total = hits = 0
    for chunk in uses.chunks.tolist():
        if chunk in stored:
            hits += sizes[chunk]
            stored.move_to_end(chunk)
        else:
            stored[chunk] = None
            total += sizes[chunk]
        while total > capacity_tokens:
            total -= sizes[stored.popitem(last=False)[0]]
    return hits
