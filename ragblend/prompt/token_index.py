"""Token index: finds runs of chunks in the token ids of a prompt.

The index contains anchors: hashes of WINDOW ids of a chunk, one at offset 1 (the first token of a chunk often differs
after a label) and one every STRIDE ids after it. All windows of a prompt are hashed and looked up in one vectorised
pass. A hit is a candidate diagonal of a chunk (position in the prompt minus position in the chunk). On each diagonal
the ids themselves are compared, so no run is accepted by its hash alone. The index does not contain the ids of chunks:
the function `read_ids` returns them.

Anchors are stored in a table with linear probing, ordered by their hashes after a rebuild. Adding costs the same at any
size, except for a rebuild whenever the table has grown by a fifth.
"""

from __future__ import annotations

import heapq
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

WINDOW = 8
STRIDE = 32
MIN_RUN = 16
"""Least tokens of a run; WINDOW tokens are enough if the run is its whole chunk except for EDGE tokens."""
EDGE = 4
MAX_EQUAL_ANCHORS = 32
"""Anchors kept per hash. A sentence of more chunks is found in these chunks only."""
MAX_HITS_PER_TOKEN = 4
TOKENS_PER_DIAGONAL = 16
TOKENS_PER_RUN = 64
"""Limits for repetitive text. Of a prompt of T tokens, about MAX_HITS_PER_TOKEN * T hits are collected, and
T / TOKENS_PER_DIAGONAL + 64 diagonals are compared, those with most hits first. After T / TOKENS_PER_RUN + 64 runs, a
diagonal is compared only if it may have a longer run."""

_EMPTY = np.uint32(0xFFFFFFFF)
_SLOTS_PER_ANCHOR, _MAX_LOAD, _SLACK = 1.6, 0.75, 1024

IntArray = NDArray[np.int64]


NumberedRun = tuple[int, int, int, int]
"""A run as the index finds it: the number of its chunk, the offset of its first token in the chunk, and its start and
end in the prompt."""


class TokenIndex:
    """Index of chunks that finds their runs in prompts. One index is for one tokenizer and one namespace. Thread-safe.

    `read_ids(chunk)` returns the ids of an added chunk, or None if they were deleted. Chunks have numbers below
    2**32 - 1, such as their rows in a database.
    """

    def __init__(self, read_ids: Callable[[int], Sequence[int] | NDArray[np.integer] | None]) -> None:
        self._read_ids = read_ids
        self._seed = secrets.randbits(64)  # prevents a text whose windows all have the same hash
        self._removed: set[int] = set()
        self._lock = Lock()
        self._num_chunks = 0
        self._fill(_Anchors.none())

    def __len__(self) -> int:
        """Return the number of chunks."""
        return self._num_chunks

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the index takes in memory. The chunks' ids are not part of it."""
        return sum(array.nbytes for array in (self._tags, self._extras, self._chunks, self._offsets))

    def add(self, chunks: Iterable[tuple[int, Sequence[int] | NDArray[np.integer]]]) -> None:
        """Add chunks by number and ids; a number must not be added twice. A chunk of fewer than WINDOW ids is never
        found.
        """
        numbers, all_ids = [], []
        for number, ids in chunks:
            numbers.append(number)
            all_ids.append(ids if isinstance(ids, np.ndarray) else np.array(ids, np.int64))
        if not numbers:
            return
        with self._lock:
            if not self._removed.isdisjoint(numbers):
                self._fill(self._live_anchors())
            anchors = self._anchors_of(numbers, all_ids)
            self._num_chunks += len(numbers)
            if self._num_anchors + len(anchors.tags) > _MAX_LOAD * self._capacity:
                self._fill(self._live_anchors().followed_by(anchors))
            else:
                self._insert(anchors)

    def remove(self, chunk: int) -> None:
        """Remove an added chunk: `find_runs` returns no run of it any more."""
        with self._lock:
            self._removed.add(chunk)
            self._num_chunks -= 1
            if len(self._removed) > self._num_chunks // 4 + 64:
                self._fill(self._live_anchors())

    def find_runs(self, ids: Sequence[int] | NDArray[np.integer]) -> list[NumberedRun]:
        """Return runs that do not overlap, in the order of the prompt.

        Of overlapping runs, the longest is returned. Ties go to the run that starts first, and then to the run of the
        lowest chunk number. The uncovered parts of other runs are returned if they are long enough.
        """
        prompt = np.asarray(ids, np.int64)
        if len(prompt) < WINDOW or not self._num_chunks:
            return []
        tags, extras = self._hash(np.lib.stride_tricks.sliding_window_view(prompt, WINDOW))
        with self._lock:
            positions, chunks, offsets = self._look_up(tags, extras, MAX_HITS_PER_TOKEN * len(prompt))
            removed = [number for number in np.unique(chunks).tolist() if number in self._removed]
        if removed:
            kept = ~np.isin(chunks, removed)
            positions, chunks, offsets = positions[kept], chunks[kept], offsets[kept]
        diagonals = _most_hit(chunks, positions - offsets, len(prompt) // TOKENS_PER_DIAGONAL + 64)
        return _longest_first(self._runs_on(diagonals, prompt))

    def _runs_on(self, diagonals: Iterable[tuple[int, int]], prompt: IntArray) -> list[tuple[NumberedRun, int]]:
        """Return the maximal runs on diagonals (chunk, position minus offset), each with the length of its chunk.

        Repetitive text has many overlapping runs. So after one run per TOKENS_PER_RUN tokens, a diagonal is skipped if
        runs at least as long as it cover all of it.
        """
        num_plenty = len(prompt) // TOKENS_PER_RUN + 64
        runs: list[tuple[NumberedRun, int]] = []
        ids_of: dict[int, IntArray] = {}
        longest = np.zeros(len(prompt), np.int64)  # at each position: the length of the longest run that covers it
        for chunk, diagonal in diagonals:
            if chunk not in ids_of:
                chunk_ids = self._read_ids(chunk)
                ids_of[chunk] = np.asarray([] if chunk_ids is None else chunk_ids, np.int64)
            ids = ids_of[chunk]
            first, last = max(0, -diagonal), min(len(ids), len(prompt) - diagonal)
            if last - first < WINDOW:
                continue
            if len(runs) > num_plenty and longest[first + diagonal : last + diagonal].min() >= last - first:
                continue
            equal = np.zeros(last - first + 2, np.int8)
            equal[1:-1] = ids[first:last] == prompt[first + diagonal : last + diagonal]
            edges = (np.flatnonzero(np.diff(equal)) + first).tolist()
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                if is_long_enough(end - start, len(ids)):
                    runs.append(((chunk, start, start + diagonal, end + diagonal), len(ids)))
                    covered = longest[start + diagonal : end + diagonal]
                    np.maximum(covered, end - start, out=covered)
        return runs

    # --- the table ---

    def _hash(self, windows: IntArray) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Return 40 bits of a hash of each row of `windows` [N, WINDOW]: the tag, which determines the slot, and 8 more
        bits.
        """
        hashes = np.full(len(windows), self._seed, np.uint64)
        with np.errstate(over="ignore"):
            for column in windows.T:
                hashes ^= column.astype(np.uint64)
                hashes *= np.uint64(0x9E3779B97F4A7C15)
                hashes ^= hashes >> np.uint64(29)
        return (hashes >> np.uint64(32)).astype(np.uint32), (hashes & np.uint64(0xFF)).astype(np.uint8)

    def _anchors_of(self, numbers: Sequence[int], all_ids: Sequence[NDArray[np.integer]]) -> _Anchors:
        """Return the anchors of chunks; those of one chunk ascend by offset."""
        lengths = [len(ids) for ids in all_ids]
        offsets_of = {length: np.array(anchor_offsets(length), np.int64) for length in set(lengths)}
        offsets = [offsets_of[length] for length in lengths]
        owner, offset = np.repeat(np.arange(len(offsets)), [*map(len, offsets)]), np.concatenate(offsets)
        starts = (np.cumsum(lengths) - lengths)[owner] + offset
        windows = np.concatenate(all_ids)[starts[:, None] + np.arange(WINDOW)]
        chunks = np.array(numbers, np.uint32)[owner]
        return _Anchors(*self._hash(windows), chunks, offset.astype(np.uint16))

    def _fill(self, anchors: _Anchors) -> None:
        """Rebuild the table from `anchors`."""
        anchors = anchors.sorted_and_limited()
        count = len(anchors.tags)
        self._capacity = max(1024, int(count * _SLOTS_PER_ANCHOR))
        homes = self._home(anchors.tags)
        order = np.arange(count)
        slots = order + np.maximum.accumulate(homes - order) if count else order
        size = max(self._capacity, int(slots[-1]) if count else 0) + _SLACK
        self._tags, self._extras = np.zeros(size, np.uint32), np.zeros(size, np.uint8)
        self._chunks, self._offsets = np.full(size, _EMPTY, np.uint32), np.zeros(size, np.uint16)
        self._tags[slots], self._extras[slots] = anchors.tags, anchors.extras
        self._chunks[slots], self._offsets[slots] = anchors.chunks, anchors.offsets
        self._num_anchors = count
        self._removed = set()

    def _live_anchors(self) -> _Anchors:
        """Return the anchors of all chunks that were not removed."""
        live = self._chunks != _EMPTY
        if self._removed:
            live &= ~np.isin(self._chunks, np.fromiter(self._removed, np.uint32))
        return _Anchors(self._tags[live], self._extras[live], self._chunks[live], self._offsets[live])

    def _insert(self, anchors: _Anchors) -> None:
        """Insert `anchors` into the table one by one."""
        homes = self._home(anchors.tags).tolist()
        for row, slot in enumerate(homes):
            tag, extra, num_equal = anchors.tags[row], anchors.extras[row], 0
            while self._chunks[slot] != _EMPTY:
                num_equal += bool(self._tags[slot] == tag and self._extras[slot] == extra)
                slot += 1
            if num_equal >= MAX_EQUAL_ANCHORS:
                continue
            if slot + 1 == len(self._chunks):  # the last slot stays empty, because it ends every search
                rest = _Anchors(anchors.tags[row:], anchors.extras[row:], anchors.chunks[row:], anchors.offsets[row:])
                self._fill(self._live_anchors().followed_by(rest))
                return
            self._tags[slot], self._extras[slot] = tag, extra
            self._offsets[slot], self._chunks[slot] = anchors.offsets[row], anchors.chunks[row]
            self._num_anchors += 1

    def _look_up(
        self, tags: NDArray[np.uint32], extras: NDArray[np.uint8], max_hits: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return the anchors whose hashes are equal to some of `tags`, `extras` [N]: the positions of these in [N], and
        the anchors' chunks and offsets, [hits] each.
        """
        slots = self._home(tags)
        waiting, num_hits = np.arange(len(tags)), 0
        hits: list[tuple[IntArray, IntArray, IntArray]] = []
        while len(waiting) and num_hits < max_hits:
            waiting = waiting[self._chunks[slots[waiting]] != _EMPTY]
            here = slots[waiting]
            equal = (self._tags[here] == tags[waiting]) & (self._extras[here] == extras[waiting])
            hit = here[equal]
            hits.append((waiting[equal], self._chunks[hit].astype(np.int64), self._offsets[hit].astype(np.int64)))
            num_hits += len(hit)
            slots[waiting] += 1
        columns = [np.concatenate(parts) for parts in zip(*hits, strict=True)]
        return columns[0], columns[1], columns[2]

    def _home(self, tags: NDArray[np.uint32]) -> IntArray:
        """Return the slot where the search for each tag begins."""
        return ((tags.astype(np.uint64) * np.uint64(self._capacity)) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Anchors:
    """Rows of the table: 40 bits of the hash, the chunk, and the offset in it."""

    tags: NDArray[np.uint32]
    extras: NDArray[np.uint8]
    chunks: NDArray[np.uint32]
    offsets: NDArray[np.uint16]

    @classmethod
    def none(cls) -> _Anchors:
        return cls(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0, np.uint16))

    def followed_by(self, other: _Anchors) -> _Anchors:
        return _Anchors(
            np.concatenate((self.tags, other.tags)),
            np.concatenate((self.extras, other.extras)),
            np.concatenate((self.chunks, other.chunks)),
            np.concatenate((self.offsets, other.offsets)),
        )

    def sorted_and_limited(self) -> _Anchors:
        """Return the anchors ordered by their hashes, of equal ones the first MAX_EQUAL_ANCHORS."""
        keys = self.tags.astype(np.uint64) << np.uint64(8) | self.extras
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        position = np.arange(len(keys))
        is_first = np.ones(len(keys), bool)
        is_first[1:] = keys[1:] != keys[:-1]
        rank = position - np.maximum.accumulate(np.where(is_first, position, 0))
        order = order[rank < MAX_EQUAL_ANCHORS]
        return _Anchors(self.tags[order], self.extras[order], self.chunks[order], self.offsets[order])


def anchor_offsets(chunk_length: int) -> range:
    """Return a chunk's anchors: the offsets at which the index hashes WINDOW ids of the chunk. All are below 2**16.

    A chunk of fewer than MIN_RUN tokens has an anchor at every offset, so that it is found even if tokens at its edges
    differ in the prompt. A longer chunk has an anchor every STRIDE ids from offset 1 on. If that gives only one anchor,
    the chunk has an anchor every WINDOW ids instead, so that a later one matches if the first tokens differ.
    """
    end = min(chunk_length - WINDOW + 1, 1 << 16)
    if chunk_length < MIN_RUN:
        return range(end)
    return range(1, end, STRIDE if end > STRIDE + 1 else WINDOW)


def is_long_enough(length: int, chunk_length: int) -> bool:
    """Return True if `length` tokens of a chunk of `chunk_length` tokens are enough for a run."""
    return length >= MIN_RUN or length >= max(WINDOW, chunk_length - EDGE)


def _most_hit(chunks: IntArray, diagonals: IntArray, limit: int) -> list[tuple[int, int]]:
    """Return at most `limit` different pairs of chunk and diagonal, the most frequent first.

    Equally frequent pairs are spread over the prompt.
    """
    packed, num_hits = np.unique(chunks << 32 | (diagonals + (1 << 31)), return_counts=True)
    spread = (packed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    packed = packed[np.lexsort((spread, -num_hits))[:limit]]
    return list(zip((packed >> 32).tolist(), ((packed & 0xFFFFFFFF) - (1 << 31)).tolist(), strict=True))


def _longest_first(runs: Sequence[tuple[NumberedRun, int]]) -> list[NumberedRun]:
    """Return runs that do not overlap, in the order of the prompt: the longest ones, and uncovered parts of others."""
    waiting = [(start - end, start, chunk, chunk_start, size) for (chunk, chunk_start, start, end), size in runs]
    heapq.heapify(waiting)
    chosen: list[NumberedRun] = []
    starts: list[int] = []
    ends: list[int] = []
    while waiting:
        _, start, chunk, chunk_start, size = (entry := heapq.heappop(waiting))
        end, diagonal = start - entry[0], start - chunk_start
        index = bisect_left(starts, start)
        if index and ends[index - 1] > start:
            pieces = [(ends[index - 1], end)]
        elif index < len(chosen) and starts[index] < end:
            pieces = [(start, starts[index]), (ends[index], end)]
        else:
            chosen.insert(index, (chunk, chunk_start, start, end))
            starts.insert(index, start)
            ends.insert(index, end)
            continue
        for first, last in pieces:
            if is_long_enough(last - first, size):
                heapq.heappush(waiting, (first - last, first, chunk, first - diagonal, size))
    return chosen
