"""Repeated tokens of prompts: at their front, as vLLM's prefix cache reuses them, and passages anywhere else.

Passages are the chunks that a store of KV could have held. The TokenIndex finds them, as it finds an engine's stored
chunks: token for token, up to the first difference. Memory: about 5 bytes per new token, 24 per new passage, and 20 per
use of a passage. Repeated text adds only uses. Read `RepeatedPassages.count_reusable_and_add`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from ragblend.lab.traffic.tokens import Ids
from ragblend.prompt.token_index import NumberedRun, TokenIndex

BLOCK = 16
"""Tokens of a block in vLLM, the unit in which it caches prefixes."""
LEAST = 32
"""Tokens of the shortest passage that counts. A shorter one is a common phrase, not a stored chunk."""
MAX_PASSAGE = 1 << 16
"""Tokens of a passage at most, as the index has no anchors beyond. A longer one is cut."""


class PrefixCache:
    """Simulation of vLLM's prefix cache: counts the tokens at a prompt's start that are cached from earlier prompts.

    Only whole blocks of BLOCK tokens are cached. `capacity`: largest number of cached blocks. The default allows
    67 million tokens, more than GPUs hold. A full cache drops the older half of its blocks.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._half = max(1, capacity // 2)
        self._recent: set[int] = set()  # a hash per whole block, of it and all blocks before it
        self._older: set[int] = set()

    def count_cached_and_add(self, ids: Ids, namespace: str = "") -> int:
        """Return the number of cached tokens at a prompt's start, and add the prompt to the cache.

        `ids`: the prompt's tokens. Prompts of different namespaces share no blocks. The last token never counts as
        cached, because vLLM always computes it.
        """
        data, size, keys = ids.tobytes(), BLOCK * ids.itemsize, list[int]()
        key = xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "replace"))
        for start in range(0, len(data) - size + 1, size):
            key = xxhash.xxh3_64_intdigest(data[start : start + size], key)
            keys.append(key)
        missing = (n for n, key in enumerate(keys) if key not in self._recent and key not in self._older)
        num_cached = next(missing, len(keys))
        self._recent.update(keys)
        if len(self._recent) > self._half:
            self._older, self._recent = self._recent, set()
        return min(num_cached, max(0, len(ids) - 1) // BLOCK) * BLOCK

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._recent) + len(self._older)


class RepeatedPassages:
    """The passages of all prompts, and their repetitions in later prompts.

    A passage is a token sequence that no earlier prompt of its namespace contained.
    """

    def __init__(self) -> None:
        self._texts: list[Ids] = []
        self._indexes: dict[str, TokenIndex] = {}  # by namespace: no namespace finds the tokens of another
        self.size = 0  # tokens of all passages
        self.starts, self.first_requests = array("q"), array("q")  # of each passage
        # Of each repetition: its start in the concatenated passages, its number of tokens, its request's number.
        self.run_sources, self.run_lengths, self.run_requests = array("q"), array("i"), array("q")

    def ids(self, start: int, end: int) -> Ids:
        """Return the tokens [start, end) of the concatenated passages."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, end))
        ids = np.concatenate(self._texts[first:last])
        return ids[start - self.starts[first] : end - self.starts[first]]

    def count_reusable_and_add(self, request: int, ids: Ids, prefix: int, namespace: str = "") -> int:
        """Add a prompt, and return the number of its tokens that repeat passages of earlier prompts.

        `ids`: the prompt's tokens; the first `prefix` of them are neither counted nor added. `request`: number of the
        request, recorded for its passages and repetitions. Only prompts of the same `namespace` are compared.
        """
        index = self._indexes.setdefault(namespace, TokenIndex(self._texts.__getitem__))
        rest = ids[prefix:]
        runs = [run for run in index.find_runs(rest) if run[3] - run[2] >= LEAST]
        for passage, offset, start, end in runs:
            self.run_sources.append(self.starts[passage] + offset)
            self.run_lengths.append(end - start)
            self.run_requests.append(request)
        for start, end in _between(runs, len(rest)):
            for cut in range(start, end, MAX_PASSAGE):
                self._add(request, rest[cut : min(end, cut + MAX_PASSAGE)], index)
        return sum(end - start for _, _, start, end in runs)

    def _add(self, request: int, ids: Ids, index: TokenIndex) -> None:
        if len(ids) < LEAST:
            return  # too short to be found again
        index.add([(len(self._texts), ids)])
        self._texts.append(ids.copy())
        self.starts.append(self.size)
        self.first_requests.append(request)
        self.size += len(ids)


def _between(runs: Iterable[NumberedRun], length: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [0, length) that are in no run, as (start, end)."""
    last_end = 0
    for _, _, start, end in runs:
        if last_end < start:
            yield last_end, start
        last_end = end
    if last_end < length:
        yield last_end, length
