"""A store whose layers come slowly, in this process and in a single rank of several."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ragblend.engine.store.format.kv import ChunkKV, KVHeader, LayerKV, StoredLayer, dequantized
from ragblend.errors import DamagedEntryError


class SlowEntry:
    """A chunk on a disk that takes as long as `wait` for each layer."""

    def __init__(self, kv: ChunkKV, wait: Callable[[], None], damaged_at: int | None = None) -> None:
        self._kv, self._wait, self._damaged_at = kv, wait, damaged_at

    @property
    def header(self) -> KVHeader:
        return self._kv.header

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def layer(self, index: int) -> LayerKV:
        return dequantized(self.stored_layer(index))

    def stored_layer(self, index: int) -> StoredLayer:
        self._wait()
        if index == self._damaged_at:
            raise DamagedEntryError(self.header.key, "flipped")
        return self._kv.stored_layer(index)


def emptied(store: Any, *but: str) -> Any:
    """The disk tier of `store`, whose memory tier then holds nothing but the keys `but`."""
    gc.collect()  # an entry with another reference is shared, and would not be read again
    memory, disk = store.tiers
    for key in {*memory.keys()}.difference(but):
        memory.delete(key)
    return disk


@contextmanager
def replaced_reads(disk: Any, replacement: Callable[[ChunkKV], ChunkKV]) -> Iterator[None]:
    """Have `disk` return the `replacement` of each entry that it reads."""
    get = disk.get

    def replaced(key: str, token_ids: Any = None) -> ChunkKV | None:
        kv = get(key, token_ids)
        return None if kv is None else replacement(kv)

    disk.get = replaced
    try:
        yield
    finally:
        del disk.get  # an attribute of the instance hides the class's method


class LagExtension:
    """Mixed into vLLM's workers (`worker_extension_cls`): one rank reads slowly, or alone meets damage."""

    rank: int

    def lag(self, rank: int, read_s: float, damaged_tokens: int = 0, damaged_at: int | None = None) -> int:
        """Make rank `rank` take `read_s` seconds per layer and chunk; its chunk of `damaged_tokens` tokens
        breaks off at layer `damaged_at`. Every rank forgets what it had in memory. Returns the rank."""
        from harness import connector_worker

        disk = emptied(connector_worker()._store)
        vars(disk).pop("get", None)  # of an earlier call
        get = disk.get

        def slowly(key: str, token_ids: Any = None) -> Any:
            kv = get(key, token_ids)
            at = damaged_at if kv is not None and kv.header.num_tokens == damaged_tokens else None
            return None if kv is None else SlowEntry(kv, partial(time.sleep, read_s), at)

        if self.rank == rank:
            disk.get = slowly
        return self.rank
