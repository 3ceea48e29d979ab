"""What vLLM's prefix cache would reuse of each prompt."""

from __future__ import annotations

import numpy as np
import xxhash

from ragblend.lab.traffic.tokens import Ids

BLOCK = 16
"""Tokens of a block in vLLM, the unit in which it caches prefixes."""
ENTRY_BYTES = 100  # of an integer in a set or dictionary, about


class PrefixCache:
    """How much of each prompt prefix caching reuses: whole blocks, from the first token on.

    It holds at most `capacity` blocks (67 million tokens by default, more than GPUs hold), then drops the older half.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._half = max(1, capacity // 2)
        self._recent: set[int] = set()
        self._older: set[int] = set()

    def see(self, ids: Ids, answer: Ids, seed: int) -> int:
        """Tokens of the prompt that are cached; then cache it, and the `answer` that vLLM generated after it.

        The last token is computed in any case, as in vLLM. `seed`: of the namespace.
        """
        keys = block_keys(np.concatenate((ids, answer)), seed)
        missing = (n for n, key in enumerate(keys) if key not in self._recent and key not in self._older)
        num_cached = next(missing, len(keys))
        self._recent.update(keys)
        if len(self._recent) > self._half:
            self._older, self._recent = self._recent, set()
        return min(num_cached, (len(ids) - 1) // BLOCK) * BLOCK

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        return ENTRY_BYTES * len(self)


def block_keys(ids: Ids, seed: int) -> list[int]:
    """A hash per whole block, of it and all blocks before it."""
    data, size = ids.tobytes(), BLOCK * ids.itemsize
    keys = []
    for start in range(0, len(data) - size + 1, size):
        seed = xxhash.xxh3_64_intdigest(data[start : start + size], seed)
        keys.append(seed)
    return keys


def namespace_seed(namespace: str) -> int:
    """The seed of a namespace's hashes: no namespace finds the tokens of another."""
    return xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "replace")) if namespace else 0
