"""What comes again of prompts: at their front, as vLLM's prefix cache reuses it; and passages wherever they stand.

Passages are the chunks that a store of KV could have held.

Repeated passages are found by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of any 16 neighbouring windows
of 16 tokens the one with the smallest hash is remembered, which depends on the window's tokens alone. So a passage that
stands elsewhere has the same remembered windows, and each that has 31 tokens or more has one. From such a window on,
the tokens themselves are compared in both directions: what is found is repeated token for token, up to where it ends.

In memory are 4 bytes per new token (its id), about 12 for the windows, 16 per new passage, and 20 per use of one. Text
that comes again adds only uses. Read `Passages.see`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ragblend.lab.traffic.tokens import Ids

Hashes = NDArray[np.uint64]

BLOCK = 16
"""Tokens of a block in vLLM, the unit in which it caches prefixes."""
ENTRY_BYTES = 100  # of an integer in a set or dictionary, about
WINDOW = 16  # tokens that are hashed together
SPREAD = 16  # neighbouring windows of which one is remembered
LEAST = 32
"""Tokens of the shortest passage that counts: less is a turn of phrase, and no team stores it. At `WINDOW + SPREAD - 1`
and more, none is missed."""

_MIX, _BASE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_STEP = 256  # tokens that are compared at a time


class PrefixCache:
    """How much of each prompt prefix caching reuses: whole blocks, from the first token on.

    It holds at most `capacity` blocks (67 million tokens by default, more than GPUs hold), then drops the older half.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._half = max(1, capacity // 2)
        self._recent: set[int] = set()  # a hash per whole block, of it and all blocks before it
        self._older: set[int] = set()

    def see(self, ids: Ids, answer: Ids, seed: int) -> int:
        """Tokens of the prompt that are cached; then cache it, and the `answer` that vLLM generated after it.

        The last token is computed in any case, as in vLLM. `seed`: of the namespace.
        """
        data, size, keys = np.concatenate((ids, answer)).tobytes(), BLOCK * ids.itemsize, list[int]()
        for start in range(0, len(data) - size + 1, size):
            seed = xxhash.xxh3_64_intdigest(data[start : start + size], seed)
            keys.append(seed)
        missing = (n for n, key in enumerate(keys) if key not in self._recent and key not in self._older)
        num_cached = next(missing, len(keys))
        self._recent.update(keys)
        if len(self._recent) > self._half:
            self._older, self._recent = self._recent, set()
        return min(num_cached, (len(ids) - 1) // BLOCK) * BLOCK

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)


class RepeatedRun(NamedTuple):
    """Tokens [start, end) of a prompt that had been seen, then at `source` of all new text."""

    start: int
    end: int
    source: int


class Passages:
    """All text that was new when it came, one passage after the other, and where it came again."""

    def __init__(self) -> None:
        self._ids, self.size = np.empty(1 << 16, np.int32), 0  # of all new text; so many are used
        self._windows: dict[int, int] = {}  # hash of a remembered window: where it was first
        self.starts, self.first_requests = array("q"), array("q")  # of each passage that was new
        self.run_sources, self.run_lengths, self.run_requests = array("q"), array("i"), array("q")

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        arrays = (self.starts, self.first_requests, self.run_sources, self.run_lengths, self.run_requests)
        windows = ENTRY_BYTES * len(self._windows)
        return self._ids.nbytes + windows + sum(each.itemsize * len(each) for each in arrays)

    def ids(self, start: int, end: int) -> Ids:
        """The tokens at [start, end) of all new text."""
        return self._ids[start:end]

    def see(self, request: int, ids: Ids, prefix: int, seed: int = 0) -> int:
        """Take note of one prompt; returns how many of its tokens behind the first `prefix` could come from a store.

        `seed`: of the namespace; one never finds another's.
        """
        runs = self._search(ids, prefix, seed)
        for run in runs:
            self.run_sources.append(run.source)
            self.run_lengths.append(run.end - run.start)
            self.run_requests.append(request)
        for start, end in _between(runs, prefix, len(ids)):
            self._keep(request, ids[start:end], seed)
        return sum(run.end - run.start for run in runs)

    def _search(self, ids: Ids, prefix: int, seed: int) -> list[RepeatedRun]:
        """Repeated passages behind the prefix, ascending and apart."""
        done, end = max(0, prefix - 4 * LEAST), len(ids)  # a passage may begin in the prefix and go on behind it
        if end - prefix < 1 or end - done < LEAST:
            return []
        hashes = window_hashes(ids[done:], seed)
        anchors = winnowed(hashes)
        runs: list[RepeatedRun] = []
        for anchor, window in zip((anchors + done).tolist(), hashes[anchors].tolist(), strict=True):
            source = self._windows.get(window)
            if source is not None and anchor >= done:
                run = self._extended(ids, anchor, source, done)
                if run.end - run.start >= LEAST:
                    runs.append(run)
                    done = run.end
        return [clipped for run in runs if (clipped := _behind(run, prefix)) is not None]

    def _extended(self, ids: Ids, place: int, source: int, low: int) -> RepeatedRun:
        """The longest stretch around `place`, from `low` on, that is equal to what stands around `source`."""
        passage = bisect_right(self.starts, source) - 1
        first = self.starts[passage]
        last = self.starts[passage + 1] if passage + 1 < len(self.starts) else self.size
        behind = _equal(ids[place:], self._ids[source:last])
        before = _equal(ids[low:place][::-1], self._ids[first:source][::-1])
        return RepeatedRun(place - before, place + behind, source - before)

    def _keep(self, request: int, ids: Ids, seed: int) -> None:
        """Remember a new passage."""
        if len(ids) < WINDOW:
            return  # it can never be found again
        if self.size + len(ids) > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(max(len(self._ids), len(ids)), np.int32)))
        place, self.size = self.size, self.size + len(ids)
        self._ids[place : self.size] = ids
        self.starts.append(place)
        self.first_requests.append(request)
        hashes = window_hashes(ids, seed)
        anchors = winnowed(hashes)
        for anchor, window in zip((anchors + place).tolist(), hashes[anchors].tolist(), strict=True):
            self._windows.setdefault(window, anchor)


def window_hashes(ids: Ids, seed: int) -> Hashes:
    """A hash per window of `WINDOW` tokens, by where it starts."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    count = len(ids) - WINDOW + 1
    hashes = np.full(count, seed, np.uint64)
    for offset in range(WINDOW):
        hashes *= _BASE
        hashes += mixed[offset : offset + count]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    return hashes ^ (hashes >> np.uint64(29))


def winnowed(hashes: Hashes) -> NDArray[np.int64]:
    """Places of the smallest of every `SPREAD` neighbours, ascending, each once."""
    if len(hashes) <= SPREAD:
        return np.array([np.argmin(hashes)], np.int64) if len(hashes) else np.empty(0, np.int64)
    smallest = sliding_window_view(hashes, SPREAD).argmin(axis=1)
    return np.unique(smallest + np.arange(len(smallest)))


def _equal(left: Ids, right: Ids) -> int:
    """How many tokens are the same from the first on."""
    count = min(len(left), len(right))
    for start in range(0, count, _STEP):
        stop = min(start + _STEP, count)
        differ = left[start:stop] != right[start:stop]
        if differ.any():
            return start + int(differ.argmax())
    return count


def _behind(run: RepeatedRun, prefix: int) -> RepeatedRun | None:
    """What of a run lies behind the prefix; None for less than a block of one that begins in it: there the prefix
    itself goes on, and prefix caching reuses whole blocks alone."""
    cut = max(0, prefix - run.start)
    left = run.end - run.start - cut
    return None if left <= 0 or (cut and left < BLOCK) else RepeatedRun(run.start + cut, run.end, run.source + cut)


def _between(runs: Iterable[RepeatedRun], start: int, end: int) -> Iterator[tuple[int, int]]:
    """What of [start, end) lies in no run."""
    for run in runs:
        if start < run.start:
            yield start, run.start
        start = max(start, run.end)
    if start < end:
        yield start, end
