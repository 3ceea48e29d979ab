"""What replicas remember, by hash and size: vLLM's prefix cache, and a store's tiers. No KV, no time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

TIERS = ("memory", "disk", "remote")


class BlockCache:
    """vLLM's paged KV with its prefix cache: blocks of running requests, and free ones that still hold what was there.

    A free block goes to whoever needs one, least recently used first; of one request's, the last block first. A
    request gets all blocks that it will need when it begins.
    """

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity = capacity  # in blocks
        self._held: dict[int, int] = {}  # blocks of running requests: by how many
        self._free: OrderedDict[int, None] = OrderedDict()
        self._num_private = 0  # of running requests, which nobody else can find

    @property
    def num_used(self) -> int:
        """Blocks of running requests."""
        return len(self._held) + self._num_private

    def num_known(self, keys: Sequence[int]) -> int:
        """How many of a prompt's first blocks are there."""
        return next((n for n, key in enumerate(keys) if key not in self._held and key not in self._free), len(keys))

    def enter(self, keys: Sequence[int], num_blocks: int) -> bool:
        """Give a request its blocks, `keys` of them such as others may find; False, and nothing, without room."""
        fresh = sum(key not in self._held for key in keys)
        num_private = num_blocks - len(keys)
        if self.num_used + fresh + num_private > self.capacity:
            return False
        for key in keys:
            self._free.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        self._num_private += num_private
        self._shrink()
        return True

    def leave(self, keys: Sequence[int], num_blocks: int, answer: Sequence[int] = ()) -> None:
        """What a request `enter`ed with is free; `answer`: blocks behind its prompt that others may find."""
        self._num_private -= num_blocks - len(keys)
        for key in reversed(answer):
            if key not in self._held:
                self._set_free(key)
        for key in reversed(keys):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._set_free(key)
        self._shrink()

    def _set_free(self, key: int) -> None:
        self._free[key] = None
        self._free.move_to_end(key)

    def _shrink(self) -> None:
        while self._free and self.num_used + len(self._free) > self.capacity:
            self._free.popitem(last=False)


class LruTier:
    """Keys under a budget of bytes, the least recently used go first, as the tiers of a real store do."""

    def __init__(self, capacity_bytes: float = math.inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def get(self, key: int) -> bool:
        """Whether it is there; it is the most recently used, then."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        return False

    def put(self, key: int, nbytes: int) -> None:
        """Take it; what is larger than the budget is not taken."""
        if self.get(key) or nbytes > self.capacity_bytes:
            return
        while self.used_bytes + nbytes > self.capacity_bytes:
            self.used_bytes -= self._sizes.popitem(last=False)[1]
        self._sizes[key] = nbytes
        self.used_bytes += nbytes


class Tiers:
    """A replica's memory and disk, in front of a remote tier that all share; None where there is none."""

    def __init__(self, memory_bytes: float, disk_bytes: float, remote: LruTier | None = None) -> None:
        self.memory, self.disk, self.remote = LruTier(memory_bytes), LruTier(disk_bytes), remote

    def is_near(self, key: int) -> bool:
        """Whether this replica has it."""
        return key in self.memory or key in self.disk

    def fetch(self, key: int, nbytes: int) -> bool:
        """Bring it from the remote tier to the disk; False where that has it not."""
        if self.remote is None or not self.remote.get(key):
            return False
        self.disk.put(key, nbytes)
        return True

    def find(self, key: int, nbytes: int) -> str | None:
        """The tier it is read from, "memory" or "disk"; it is in memory then."""
        in_memory, on_disk = self.memory.get(key), self.disk.get(key)  # both are told of a use
        if not in_memory and on_disk:
            self.memory.put(key, nbytes)
        return "memory" if in_memory else "disk" if on_disk else None

    def put(self, key: int, nbytes: int) -> None:
        """Write it through."""
        for tier in (self.memory, self.disk, self.remote):
            if tier is not None:
                tier.put(key, nbytes)
