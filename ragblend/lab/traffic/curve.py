"""What a store of a given size would have held: hits by LRU and at most, over its capacity.

`uses_of` turns what `Passages` saw into uses of chunks; `lru_hits` and `most_hits` say how many tokens of them a store
finds. Sizes and capacities are in tokens, which all have the same bytes of KV.

The bound is Belady's MIN on tokens: a chunk of n tokens counts as n objects of one size, and what is used again last
leaves first, in parts where that is enough. For objects of one size MIN is the optimum; every policy that keeps whole
chunks is one that keeps tokens, so none finds more. (The optimum over whole chunks is NP-hard; Berger, Beckmann and
Harchol-Balter 2018.)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragblend.lab.traffic.passages import Passages

Numbers = NDArray[np.int64]

_MIX = np.uint64(0x9E3779B97F4A7C15)

SNAP = 8
"""Passages that begin or end within so many tokens of each other begin or end at the same place."""
MOST_USES = 200_000
"""Of more uses than that, those of some chunks are taken, chosen by hash (SHARDS; Waldspurger et al. 2015)."""


class Uses(NamedTuple):
    """Chunks, and which of them was used when. Every first use is one, too: there the chunk is stored."""

    starts: Numbers  # of each chunk, in all new text
    sizes: Numbers  # of each chunk, in tokens
    chunks: Numbers  # of each use, in order
    requests: Numbers  # of each use, ascending

    @property
    def counts(self) -> Numbers:
        """Requests that use each chunk."""
        return np.bincount(self.chunks, minlength=len(self.sizes))


def uses_of(passages: Passages) -> Uses:
    """Chunks are what lies between two places where some repeated passage began or ended, and is itself repeated."""
    sources = np.frombuffer(passages.run_sources, np.int64)
    ends = sources + np.frombuffer(passages.run_lengths, np.int32)
    requests = np.frombuffer(passages.run_requests, np.int64)
    bounds = np.unique(np.concatenate((sources, ends)))
    if not len(bounds):
        empty = np.empty(0, np.int64)
        return Uses(empty, empty, empty, empty)
    cuts = bounds[np.concatenate(([True], np.diff(bounds) > SNAP))]
    sizes = np.diff(np.append(cuts, bounds[-1]))
    first = np.searchsorted(cuts, sources, "right") - 1
    last = np.searchsorted(cuts, ends, "right") - 1
    last[ends == bounds[-1]] = len(cuts) if sizes[-1] else len(cuts) - 1
    spans = np.maximum(last - first, 0)
    offsets = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    chunks, when = np.repeat(first, spans) + offsets, np.repeat(requests, spans)
    used = np.unique(chunks)
    homes = np.searchsorted(np.frombuffer(passages.starts, np.int64), cuts[used], "right") - 1
    chunks = np.concatenate((used, chunks))
    when = np.concatenate((np.frombuffer(passages.first_requests, np.int64)[homes], when))
    order = np.lexsort((np.arange(len(when)), when))
    chunks, when = np.searchsorted(used, chunks[order]), when[order]
    once = np.sort(np.unique(when * len(used) + chunks, return_index=True)[1])  # a prompt may have a chunk twice
    return Uses(cuts[used], sizes[used], chunks[once], when[once])


def merged(uses: Uses, begins: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, end, requests) of chunks; neighbours that the same requests need are one, unless one `begins` there."""
    marks = np.zeros(len(uses.sizes), np.uint64)  # of the set of requests
    np.add.at(marks, uses.chunks, (uses.requests.astype(np.uint64) + np.uint64(1)) * _MIX)
    ends = uses.starts + uses.sizes
    same = (uses.starts[1:] == ends[:-1]) & (marks[1:] == marks[:-1]) & (uses.counts[1:] == uses.counts[:-1])
    goes_on = np.concatenate(([False], same & ~np.isin(uses.starts[1:], np.asarray(begins, np.int64))))
    firsts = np.flatnonzero(~goes_on[: len(ends)])
    lasts = np.append(firsts[1:], len(ends)) - 1 if len(firsts) else firsts
    columns = (uses.starts[firsts], ends[lasts], uses.counts[firsts])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def sampled(uses: Uses, most: int = MOST_USES) -> tuple[Uses, float]:
    """`uses`, or those of some of the chunks, and the share of all tokens that these have."""
    if len(uses.chunks) <= most:
        return uses, 1.0
    hashes = uses.starts.astype(np.uint64) * _MIX >> np.uint64(32)
    keep = hashes < np.uint64(int(most / len(uses.chunks) * 2**32))
    kept = keep[uses.chunks]
    names = np.cumsum(keep) - 1
    share = float(uses.sizes[keep].sum() / uses.sizes.sum())
    found = Uses(uses.starts[keep], uses.sizes[keep], names[uses.chunks[kept]], uses.requests[kept])
    return (found, share) if share else (uses, 1.0)


def lru_hits(uses: Uses, capacity: float) -> int:
    """Tokens that a store of that capacity finds, evicting what was used longest ago."""
    sizes, stored = uses.sizes.tolist(), OrderedDict[int, None]()
    total = hits = 0
    for chunk in uses.chunks.tolist():
        if chunk in stored:
            hits += sizes[chunk]
            stored.move_to_end(chunk)
        else:
            stored[chunk] = None
            total += sizes[chunk]
        while total > capacity:
            total -= sizes[stored.popitem(last=False)[0]]
    return hits


def most_hits(uses: Uses, capacity: float) -> int:
    """Tokens that no policy exceeds in a store of that capacity: Belady's MIN with every token an object."""
    sizes, order = uses.sizes.tolist(), uses.chunks.tolist()
    never = len(order)
    next_use = [never] * len(order)
    seen = [never] * len(sizes)
    for place in range(len(order) - 1, -1, -1):
        next_use[place], seen[order[place]] = seen[order[place]], place
    held = [0] * len(sizes)  # tokens of each chunk that are kept
    until = [0] * len(sizes)  # its next use
    farthest: list[tuple[int, int]] = []
    total = hits = 0
    for place, chunk in enumerate(order):
        hits += held[chunk]
        total -= held[chunk]
        held[chunk], until[chunk] = 0, next_use[place]
        if next_use[place] == never:
            continue
        held[chunk] = sizes[chunk]
        total += sizes[chunk]
        heapq.heappush(farthest, (-next_use[place], chunk))
        while total > capacity:
            moment, last = farthest[0]
            if until[last] != -moment or not held[last]:
                heapq.heappop(farthest)
                continue
            gone = min(held[last], int(np.ceil(total - capacity)))
            held[last] -= gone
            total -= gone
            if not held[last]:
                heapq.heappop(farthest)
    return hits


def zipf_slope(counts: Numbers) -> tuple[float, float] | None:
    """The slope of log count over log rank, and R squared of that line; None for fewer than 20 chunks.

    >>> [round(value, 3) for value in zipf_slope(1000 // np.arange(1, 31))]
    [-1.004, 1.0]
    """
    ordered = np.sort(counts)[::-1].astype(float)
    if len(ordered) < 20 or ordered[0] == ordered[-1]:
        return None
    ranks, values = np.log(np.arange(1, len(ordered) + 1)), np.log(ordered)
    slope, offset = np.polyfit(ranks, values, 1)
    unexplained = ((values - (slope * ranks + offset)) ** 2).sum()
    return float(slope), float(1 - unexplained / ((values - values.mean()) ** 2).sum())
