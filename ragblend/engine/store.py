"""Tiers: chunk KV in memory under a byte budget, and several stores behind one face.

Works on ChunkKV values and on any KVStore. Knows nothing about files, models or prompts.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ragblend.engine.kv import ChunkKV, KVHeader, LayerKV, MemoryKV, in_memory
from ragblend.engine.protocols import KVStore, StoreCounters
from ragblend.errors import RagblendError, StoreFullError, UsageError

log = logging.getLogger(__name__)

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """A number of bytes from text: `KiB` and `K` are 1024, `KB` is 1000, no unit is bytes. Raises UsageError.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 kB"), parse_bytes(512)
    (8589934592, 1500, 512)
    """
    match = _SIZE.fullmatch(str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{size!r} is not a size; write a number and a unit, such as 8GiB, 500MB or 4096")
    unit = _UNITS[match[2].upper()]
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people, in binary units.

    >>> format_bytes(512), format_bytes(8 * 1024**3)
    ('512 B', '8.0 GiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        if abs(amount) < 1023.95 or unit == "PiB":  # what rounds to 1024.0 goes to the next unit
            break
    return f"{amount:.1f} {unit}"


class _Held(NamedTuple):
    """An entry in memory and the write counters its tensors had when it came in."""

    kv: MemoryKV
    versions: tuple[int, ...]


class MemoryStore:
    """KVStore in memory: least recently used entries go when `capacity_bytes` of tensors are held. Thread-safe.

    Tensors are shared with whoever put or got them and are read-only for everybody. An in-place torch operation on
    one is noticed at the next `get`: the entry is dropped with a warning, as a miss, never an answer.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise UsageError(
                f"capacity_bytes is {capacity_bytes}; choose 0 (hold nothing) or more, such as 8 * 1024**3"
            )
        self.capacity_bytes = capacity_bytes
        self._entries: OrderedDict[str, _Held] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._counters = StoreCounters()
        self._lock = threading.Lock()

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses, puts, damage and evictions since the store was made."""
        return self._counters

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> MemoryKV | None:
        """The entry, which becomes the most recently used; None for a miss. Its tensors are read-only."""
        with self._lock:
            held = self._entries.get(key)
            if held is None:
                self._counters.num_misses += 1
                return None
            if token_ids is not None and held.kv.header.token_ids != tuple(token_ids):
                problem = "its token ids differ from those asked for"
            elif _versions(held.kv.layers) != held.versions:
                problem = "a caller wrote into its tensors, which are read-only; it is dropped"
                self._drop(key)
            else:
                self._entries.move_to_end(key)
                self._counters.num_hits += 1
                return held.kv
            self._counters.num_misses += 1
            self._counters.num_damaged += 1
        log.warning("KV %s in memory is not used: %s", key, problem)
        return None

    def put(self, kv: ChunkKV) -> None:
        """Hold a chunk, evicting the least recently used ones; the caller no longer writes to its tensors.

        Tensors that are slices of larger ones, or live elsewhere than on the CPU, are copied. Raises StoreFullError
        when the chunk alone exceeds the capacity.
        """
        if kv.nbytes > self.capacity_bytes:
            raise StoreFullError(
                f"chunk {kv.header.key} needs {format_bytes(kv.nbytes)}, the memory tier holds "
                f"{format_bytes(self.capacity_bytes)} in all; raise its capacity or split documents into smaller chunks"
            )
        source = in_memory(kv)
        held = MemoryKV(source.header, tuple(_own(layer) for layer in source.layers))
        with self._lock:
            self._drop(held.header.key)
            while self._used_bytes + held.nbytes > self.capacity_bytes:
                self._drop(next(iter(self._entries)))
                self._counters.num_evicted += 1
            self._entries[held.header.key] = _Held(held, _versions(held.layers))
            self._used_bytes += held.nbytes
            self._counters.num_puts += 1
            assert self._used_bytes <= self.capacity_bytes

    def contains(self, key: str) -> bool:
        """Whether the entry is held; does not count as a use."""
        with self._lock:
            return key in self._entries

    def delete(self, key: str) -> bool:
        """Drop an entry; whether there was one."""
        with self._lock:
            return self._drop(key)

    def keys(self) -> Iterator[str]:
        """Keys held at this moment, least recently used first."""
        with self._lock:
            return iter(tuple(self._entries))

    def nbytes(self) -> int:
        """Bytes of all tensors held, never more than `capacity_bytes`."""
        with self._lock:
            return self._used_bytes

    def _drop(self, key: str) -> bool:
        held = self._entries.pop(key, None)
        if held is None:
            return False
        self._used_bytes -= held.kv.nbytes
        return True


def _own(layer: LayerKV) -> LayerKV:
    """The layer in CPU memory that holds nothing else: a slice would keep the whole it was cut from alive."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in layer}
    if sum(storages.values()) == layer.nbytes and not any(map(_needs_copy, layer)):
        return layer
    with torch.inference_mode(False):  # an inference tensor does not count in-place writes; its clone here does
        return LayerKV(*(tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in layer))


def _needs_copy(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_inference() or not tensor.is_contiguous()


def _versions(layers: Sequence[LayerKV]) -> tuple[int, ...]:
    """How often torch wrote into each tensor, views of it included; 0 for inference tensors, which do not count."""
    return tuple(0 if tensor.is_inference() else tensor._version for layer in layers for tensor in layer)


@runtime_checkable
class _Touchable(Protocol):
    """A tier that evicts by last use and wants to know when a faster one answered."""

    def touch(self, key: str) -> None: ...


class TieredStore:
    """Stores in order of speed, fastest first, as one KVStore: `TieredStore(MemoryStore(8 * GIB), DiskStore("kv"))`.

    `get` asks from the top. An entry found further down still streams layer by layer, and moves up once all its
    layers have been read and verified. `put` writes through to every tier.
    """

    def __init__(self, *tiers: KVStore) -> None:
        if not tiers:
            raise UsageError("a TieredStore without tiers stores nothing; give it at least one, such as DiskStore(DIR)")
        self.tiers = tiers
        self._num_hits = self._num_misses = self._num_puts = 0
        self._lock = threading.Lock()

    @property
    def counters(self) -> StoreCounters:
        """A snapshot: one hit or miss per `get`, one put per `put`; damage and evictions summed over the tiers."""
        tiers = [tier.counters for tier in self.tiers]
        return StoreCounters(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_puts=self._num_puts,
            num_damaged=sum(counters.num_damaged for counters in tiers),
            num_evicted=sum(counters.num_evicted for counters in tiers),
        )

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """The entry from the fastest tier that has it, intact; None when none has. Its tensors are read-only."""
        for position, tier in enumerate(self.tiers):
            kv = tier.get(key, token_ids)
            if kv is None:
                continue
            with self._lock:
                self._num_hits += 1
            for slower in self.tiers[position + 1 :]:
                if isinstance(slower, _Touchable):
                    slower.touch(key)
            faster = [upper for upper in self.tiers[:position] if _fits(upper, kv)]
            return _PromotingKV(kv, tier, faster) if faster else kv
        with self._lock:
            self._num_misses += 1
        return None

    def put(self, kv: ChunkKV) -> None:
        """Write to every tier; one too large for a memory tier is left out there.

        Raises the first tier's StoreFullError (or other refusal) after all tiers were tried.
        """
        held = in_memory(kv)
        failure: RagblendError | None = None
        for tier in self.tiers:
            if not _fits(tier, held):
                continue
            try:
                tier.put(held)
            except RagblendError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        with self._lock:
            self._num_puts += 1

    def contains(self, key: str) -> bool:
        """Whether any tier has the entry."""
        return any(tier.contains(key) for tier in self.tiers)

    def delete(self, key: str) -> bool:
        """Remove the entry from every tier, the slowest first so that none is promoted again; whether any had it."""
        removed = [tier.delete(key) for tier in reversed(self.tiers)]
        return any(removed)

    def keys(self) -> Iterator[str]:
        """Every key that some tier has, once."""
        seen: set[str] = set()
        for tier in self.tiers:
            for key in tier.keys():  # noqa: SIM118 (a KVStore is not a dict)
                if key not in seen:
                    seen.add(key)
                    yield key

    def nbytes(self) -> int:
        """Bytes held by all tiers together; an entry in two tiers counts twice."""
        return sum(tier.nbytes() for tier in self.tiers)


def _fits(tier: KVStore, kv: ChunkKV) -> bool:
    return not isinstance(tier, MemoryStore) or kv.nbytes <= tier.capacity_bytes


class _PromotingKV:
    """A slower tier's entry, handed to the faster tiers once every layer of it was read. Thread-safe."""

    def __init__(self, source: ChunkKV, tier: KVStore, faster: Sequence[KVStore]) -> None:
        self._source, self._tier, self._faster = source, tier, faster
        self._read: dict[int, LayerKV] | None = {}  # None: promoted
        self._versions: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    @property
    def header(self) -> KVHeader:
        return self._source.header

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return self._source.nbytes

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer, [H, T, D] each, read and verified by the slower tier."""
        layer = self._source.layer(index)
        with self._lock:
            if self._read is None:
                return layer
            if index not in self._read:
                self._read[index], self._versions[index] = layer, _versions([layer])
            if len(self._read) < self.header.num_layers:
                return layer
            read, self._read = self._read, None
        self._promote(read)
        return layer

    def _promote(self, read: dict[int, LayerKV]) -> None:
        layers = tuple(read[index] for index in range(self.header.num_layers))
        written_into = any(_versions([read[index]]) != self._versions[index] for index in read)
        # An entry deleted while it was being read must not come back to life.
        if written_into or not self._tier.contains(self.header.key):
            return
        for tier in self._faster:
            try:
                tier.put(MemoryKV(self.header, layers))
            except RagblendError as error:  # a full faster tier costs speed, not the answer
                log.warning("KV %s stays in its slower tier: %s", self.header.key, error)
