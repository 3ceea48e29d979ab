"""A map from 64-bit hashes to numbers in 16 bytes per entry, and what vLLM's prefix cache would have found.

Python's dict takes about 100 bytes for the same; looking up a request's hashes all at once is faster, too.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragblend.bench.traffic.tokens import Ids

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]

BLOCK = 16
"""Tokens of a block in vLLM, the unit in which it caches prefixes."""
_FRESH = 1 << 15  # entries in the dict that new ones go to first


class HashMap:
    """Hashes and the number that each was first added with. Sorted arrays, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._levels: list[tuple[Hashes, Numbers]] = []
        self._fresh: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._fresh) + sum(len(keys) for keys, _ in self._levels)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._levels)

    def get(self, keys: Hashes) -> Numbers:
        """The number of each key, -1 where there is none."""
        fresh = self._fresh
        found = np.fromiter((fresh.get(key, -1) for key in keys.tolist()), np.int64, len(keys))
        for known, values in self._levels:
            places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            hits = (known[places] == keys) & (found < 0)
            found[hits] = values[places[hits]]
        return found

    def add(self, keys: Hashes, values: Numbers) -> None:
        """Add keys that are not there yet; of one that is given twice the first counts."""
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            self._fresh.setdefault(key, value)
        if len(self._fresh) >= _FRESH:
            self._settle()

    def _settle(self) -> None:
        keys = np.fromiter(self._fresh.keys(), np.uint64, len(self._fresh))
        values = np.fromiter(self._fresh.values(), np.int64, len(self._fresh))
        self._fresh = {}
        while self._levels and len(self._levels[-1][0]) < 2 * len(keys):
            more_keys, more_values = self._levels.pop()
            keys, values = np.concatenate((more_keys, keys)), np.concatenate((more_values, values))
        order = np.argsort(keys)
        self._levels.append((keys[order], values[order]))


class PrefixCache:
    """How much of each prompt vLLM's prefix caching would reuse: whole blocks, from the first token on.

    It forgets nothing until it holds `capacity` blocks, then the half that is older: far more than any GPU holds, so
    that prefix caching is given the benefit of the doubt.
    """

    def __init__(self, capacity: int = 1 << 25) -> None:
        self._half = max(1, capacity // 2)
        self._now, self._before = HashMap(), HashMap()

    def see(self, ids: Ids, answer: Ids, seed: int) -> int:
        """Tokens of the prompt that were cached; from now on it is, too, and the `answer` that vLLM made behind it.

        The last token is never taken from the cache, as in vLLM: it has to be computed to go on from.
        """
        keys = block_keys(np.concatenate((ids, answer)) if len(answer) else ids, seed)
        known = self._now.get(keys)
        unknown = known < 0
        if unknown.any():
            known[unknown] = self._before.get(keys[unknown])
        missing = np.flatnonzero(known < 0)
        num_known = int(missing[0]) if len(missing) else len(keys)
        fresh = keys[unknown]
        self._now.add(fresh, np.zeros(len(fresh), np.int64))
        if len(self._now) > self._half:
            self._before, self._now = self._now, HashMap()
        return min(num_known, (len(ids) - 1) // BLOCK) * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._now.nbytes + self._before.nbytes


def block_keys(ids: Ids, seed: int) -> Hashes:
    """A hash per whole block, of it and all before it. `seed`: of the namespace; one never finds another's."""
    data, size = ids.tobytes(), BLOCK * ids.itemsize
    keys = np.empty(len(ids) // BLOCK, np.uint64)
    for index in range(len(keys)):
        seed = xxhash.xxh3_64_intdigest(data[index * size : (index + 1) * size], seed)
        keys[index] = seed
    return keys


def namespace_seed(namespace: str) -> int:
    """What hashes of a namespace's tokens begin with."""
    return xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "replace")) if namespace else 0
