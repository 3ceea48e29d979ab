"""The fastest tier: chunk KV in memory under a byte budget. Works on ChunkKV values; does not depend on files or other
tiers."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.kv import (
    ChunkKV,
    KVHeader,
    MemoryKV,
    StoredLayer,
    aligned_nbytes,
    copy_into,
    load_into_memory,
)
from ragblend.engine.store.format.sizes import format_bytes
from ragblend.errors import StoreFullError, UsageError

log = logging.getLogger(__name__)

READ_AGAIN_SHARE = 0.5
"""Largest share of the capacity for entries that were read again. The rest is for new ones: if it were small, none of
the chunks of a long prompt would stay until the next turn of a conversation."""


class _MemoryEntry(NamedTuple):
    """An entry in memory, and the write counts of its tensors when it was put."""

    kv: MemoryKV
    versions: tuple[int, ...]


class MemoryStore(KVStore):
    """KVStore in memory. Its tensors take at most `capacity_bytes`. Thread-safe.

    `put` evicts the least recently used entries. Entries that were read again are evicted after all others, as long as
    they take at most READ_AGAIN_SHARE of the capacity: `get` has returned them, or they are put again soon after their
    eviction. So entries that are read often stay while those of an ingestion, or many that are read once, pass through
    the rest (2Q: Johnson, Shasha, VLDB 1994).

    A smaller `capacity_bytes`, set later, takes effect at the next `put`.

    KV in eight bits is held in eight bits; each read of a layer converts it. Callers of `put` and `get` share the
    tensors and must not write to them. If a torch operation has written to a tensor, the next `get` drops the entry
    with a warning and counts a miss.

    An engine on a GPU sets the attribute `page_locked`. Later entries are then copied to page-locked memory, which the
    GPU reads directly. When an entry is evicted, PyTorch keeps its page-locked memory and uses it for later entries.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise UsageError(
                f"capacity_bytes is {capacity_bytes}; choose 0 (hold nothing) or more, such as 8 * 1024**3"
            )
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.page_locked = False
        self._used_bytes = 0
        # Both have the least recently used entries first.
        self._entries: OrderedDict[str, _MemoryEntry] = OrderedDict()
        self._read_again: OrderedDict[str, _MemoryEntry] = OrderedDict()
        self._read_again_bytes = 0
        self._evicted: OrderedDict[str, None] = OrderedDict()  # the latest, at most as many as there are entries
        self._lock = threading.Lock()

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> MemoryKV | None:
        """Return the entry, which becomes the most recently used; None for a miss. Its tensors are read-only."""
        with self._lock:
            entry = self._entries.get(key) or self._read_again.get(key)
            if entry is None:
                self._count(num_misses=1)
                return None
            if not entry.kv.header.has_ids(token_ids):
                problem = "its token ids differ from the requested ones"
            elif tensor_write_counts(entry.kv.layers) != entry.versions:
                problem = "a caller wrote into its tensors, which are read-only; it is dropped"
                self._drop(key)
            else:
                self._record_read_again(key, entry)
                self._count(num_hits=1)
                return entry.kv
            self._count(num_misses=1, num_damaged=1)
        log.warning("KV %s in memory is not used: %s", key, problem)
        return None

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk, and evict the least recently used ones if necessary.

        The caller must no longer write to the chunk's tensors. Tensors that are slices of larger ones, or not on the
        CPU, are copied. Raises StoreFullError if the chunk alone exceeds the capacity.
        """
        if not self.fits(kv):
            raise StoreFullError(
                f"chunk {kv.header.key} needs {format_bytes(kv.nbytes)}, the memory tier holds "
                f"{format_bytes(self.capacity_bytes)} in all; raise its capacity or split documents into smaller chunks"
            )
        source = load_into_memory(kv)
        memory_kv = MemoryKV(source.header, self._own_layers(source.layers))
        with self._lock:
            self._drop(memory_kv.header.key)
            while self._used_bytes + memory_kv.nbytes > self.capacity_bytes:
                self._evict(next(iter(self._entries or self._read_again)))
            entry = _MemoryEntry(memory_kv, tensor_write_counts(memory_kv.layers))
            self._entries[memory_kv.header.key] = entry
            self._used_bytes += memory_kv.nbytes
            if memory_kv.header.key in self._evicted:
                self._record_read_again(memory_kv.header.key, entry)
            self._count(num_puts=1)
            assert self._used_bytes <= self.capacity_bytes

    def fits(self, kv: ChunkKV) -> bool:
        """Return True if the chunk alone is within the capacity."""
        return kv.nbytes <= self.capacity_bytes

    def contains(self, key: str) -> bool:
        """Return True if the store has the entry. Does not count as a use."""
        with self._lock:
            return key in self._entries or key in self._read_again

    def delete(self, key: str) -> bool:
        """Delete an entry; return True if there was one."""
        with self._lock:
            return self._drop(key)

    def keys(self) -> Iterator[str]:
        """Return the keys of all entries, in the order in which they would be evicted."""
        with self._lock:
            return iter((*self._entries, *self._read_again))

    def headers(self) -> Iterator[KVHeader]:
        """Return the headers of all entries. Does not count as hits, misses or uses."""
        with self._lock:
            return iter([entry.kv.header for entry in (*self._entries.values(), *self._read_again.values())])

    def nbytes(self) -> int:
        """Return the size in bytes of all entries' tensors, never more than `capacity_bytes`."""
        with self._lock:
            return self._used_bytes

    def _own_layers(self, layers: Sequence[StoredLayer]) -> tuple[StoredLayer, ...]:
        if self.page_locked:
            try:
                return _page_locked(layers)
            except RuntimeError as error:  # the system allows no more of it
                self.page_locked = False
                log.warning(
                    "KV is held in memory that the GPU reads more slowly, as no page-locked memory could be allocated "
                    "(%s); choose a smaller memory_gib",
                    error,
                )
        return tuple(map(_own, layers))

    def _evict(self, key: str) -> None:
        self._drop(key)
        self._count(num_evicted=1)
        self._evicted[key] = None
        while len(self._evicted) > len(self._entries) + len(self._read_again):
            self._evicted.popitem(last=False)

    def _record_read_again(self, key: str, entry: _MemoryEntry) -> None:
        self._evicted.pop(key, None)
        if self._entries.pop(key, None) is not None:
            self._read_again_bytes += entry.kv.nbytes
        self._read_again[key] = entry
        self._read_again.move_to_end(key)
        while self._read_again_bytes > READ_AGAIN_SHARE * self.capacity_bytes:
            oldest, other = self._read_again.popitem(last=False)
            self._read_again_bytes -= other.kv.nbytes
            self._entries[oldest] = other

    def _drop(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None and (entry := self._read_again.pop(key, None)) is not None:
            self._read_again_bytes -= entry.kv.nbytes
        self._used_bytes -= entry.kv.nbytes if entry is not None else 0
        return entry is not None


def _own(layer: StoredLayer) -> StoredLayer:
    """Return the layer in CPU memory that it does not share. A slice would keep the whole tensor in memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in layer}
    if sum(storages.values()) == layer.nbytes and not any(map(_needs_copy, layer)):
        return layer
    with torch.inference_mode(False):  # an inference tensor does not count in-place writes; its clone here does
        return type(layer)(*(tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in layer))


def _page_locked(layers: Sequence[StoredLayer]) -> tuple[StoredLayer, ...]:
    """Return copies of the layers in page-locked memory, several layers in one block.

    torch allocates blocks of a power of two of bytes. Each block here is the largest one that the layers left fill, so
    that little memory is unused. Raises RuntimeError if the memory cannot be allocated.
    """
    sizes = [sum(map(aligned_nbytes, layer)) for layer in layers]
    copies: list[StoredLayer] = []
    with torch.inference_mode(False):  # an inference tensor does not count in-place writes
        while len(copies) < len(layers):
            first = len(copies)
            nbytes = max(1 << sum(sizes[first:]).bit_length() - 1, sizes[first])
            ends = accumulate(sizes[first:])
            fitting = [layer for layer, end in zip(layers[first:], ends, strict=True) if end <= nbytes]
            copies += copy_into(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), fitting)
    return tuple(copies)


def _needs_copy(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_inference() or not tensor.is_contiguous()


def tensor_write_counts(layers: Sequence[StoredLayer]) -> tuple[int, ...]:
    """Return, for each tensor of `layers`, how often torch has written into it or into a view of it.

    The count is 0 for inference tensors, for which torch does not count writes.
    """
    return tuple(0 if tensor.is_inference() else tensor._version for layer in layers for tensor in layer)
