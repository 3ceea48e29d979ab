"""Interfaces of the store: KVStore, which every tier implements, and ByteStore, which a remote tier is built on.

A TIER IS ADDED HERE. Implementations of KVStore: `memory`, `disk`, `remote.tier`, and `tiered`, which combines them.
Implementations of ByteStore: `remote.redis_values`, `remote.object_values`.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ragblend.engine.store.format.kv import ChunkKV, KVHeader, KVSpec
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.option_fields import default_of
from ragblend.options import ContextPolicy, KvDtype, TierOptions

T = TypeVar("T")


@dataclass(slots=True)
class StoreCounters:
    """Counts of a store since it was opened. A damaged entry also counts as a miss."""

    num_hits: int = 0
    num_misses: int = 0
    num_puts: int = 0
    num_damaged: int = 0
    num_unsigned: int = 0  # damaged entries that lack the signature of this store's key
    num_evicted: int = 0
    num_failures: int = 0  # remote requests and probes that failed or were too late; a failed get is also a miss
    num_dropped: int = 0  # background writes that were rejected, did not fit the queue, or were pending at close


class EntryCheck(NamedTuple):
    """The result of reading every byte of one entry. `ok` is True if the entry is intact; else `reason` says what is
    wrong."""

    key: str
    ok: bool
    reason: str


class KVStore(ABC):
    """A store of chunk KV by key. It consists of one tier, or of several tiers that are used as one store.

    Threads may share any store. Processes may share only a DiskStore. A tier implements the abstract methods and calls
    `super().__init__()`. The other methods have defaults for a simple tier: it is on this machine, never evicts, stores
    no metadata, and writes an entry before `put` returns. A tier that differs overrides them.
    """

    is_remote = False
    """True for a tier on another machine. A request reads all its entries there with one `fetch_from_remote`."""
    has_remote_tiers = False
    """True for a store of several tiers, one of which is remote."""
    catalog: str | None = None
    """The catalogue's URL. None: the URL in the user's settings, or else a file in the store's folder."""
    kv_dtype: KvDtype = default_of(TierOptions, "kv_dtype")
    """How `put` stores KV: "auto" as computed, "int8" or "fp8" in eight bits (see `quantize`)."""

    def __init__(self) -> None:
        self.read_speed = ReadSpeed()
        self._counters = StoreCounters()
        self._counters_lock = threading.Lock()

    @property
    def tiers(self) -> tuple[KVStore, ...]:
        """The tiers of this store, fastest first; a single tier returns itself."""
        return (self,)

    def find_tiers(self, kind: type[T]) -> tuple[T, ...]:
        """Return the tiers of a class, such as RemoteStore, fastest first."""
        tiers: list[T] = []
        for tier in self.tiers:
            if isinstance(tier, kind):
                tiers.append(tier)
            elif tier is not self:
                tiers += tier.find_tiers(kind)
        return tuple(tiers)

    def find_tier(self, kind: type[T]) -> T | None:
        """Return the fastest tier of a class, such as DiskStore; None if there is none."""
        return next(iter(self.find_tiers(kind)), None)

    @property
    def read_speeds(self) -> Mapping[str, ReadSpeed]:
        """The measured speeds of the slower tiers of a store, "disk" and "remote"; none for a single tier."""
        return {}

    @property
    def folder(self) -> Path | None:
        """The folder of the tier on disk; None if there is none."""
        folders = (tier.folder for tier in self.tiers if tier is not self)
        return next((folder for folder in folders if folder is not None), None)

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses, writes, damage, evictions and failures since the store was opened."""
        return self._counters

    def _count(self, **steps: int) -> None:
        """Add to the counters of these names."""
        with self._counters_lock:
            for name, step in steps.items():
                setattr(self._counters, name, getattr(self._counters, name) + step)

    # -- reading

    @abstractmethod
    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """Return the entry for `key`, with read-only tensors; None for a miss. Never raises.

        An entry counts as a miss if it is damaged, truncated or unsigned, or if its token ids differ from `token_ids`.
        Such a miss is logged as a warning and counted. token_ids: the chunk's ids; None accepts an entry with any ids.
        """

    def fetch_from_remote(self, keys: Sequence[str], until_s: float | None = None) -> Mapping[str, ChunkKV]:
        """Fetch, from the remote tiers in parallel, the entries that no local tier has. Return the fetched ones by key.

        Entries that do not arrive by the deadline are left out. until_s: the deadline, in seconds of the monotonic
        clock; None: now plus the largest `timeout_s` of the remote tiers.
        """
        return {}

    def get_local(self, key: str, token_ids: Sequence[int] | None, fetched: Mapping[str, ChunkKV]) -> ChunkKV | None:
        """Return the entry from a tier on this machine, or from `fetched`. Contacts no other machine.

        `fetched` is the result of `fetch_from_remote` for the same request.
        """
        return self.get(key, token_ids)

    def is_local(self, key: str) -> bool:
        """Return True if a tier of this machine has the entry, or has it queued for writing."""
        return not self.is_remote and self.contains(key)

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Return True if the store has the entry. Does not count as a use."""

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]:
        """Return `contains` for each key. Remote tiers are not contacted after `until_s` on the monotonic clock."""
        return [self.contains(key) for key in keys]

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Yield the keys of all entries, unverified."""

    def headers(self) -> Iterator[KVHeader]:
        """Yield the headers of the entries on this machine, not of remote tiers. By default each entry is read with
        `get`, which counts as a use."""
        if not self.is_remote:
            for key in self.keys():
                if (kv := self.get(key)) is not None:
                    yield kv.header

    @abstractmethod
    def nbytes(self) -> int:
        """Return the size in bytes of all entries."""

    # -- writing

    @abstractmethod
    def put(self, kv: ChunkKV) -> None:
        """Store an entry, replacing one with the same key. Raises StoreFullError when the entry does not fit."""

    def fits(self, kv: ChunkKV) -> bool:
        """Return True if the store could hold the entry after evicting all others."""
        return True

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry; return True if there was one."""

    def delete_local(self, key: str) -> bool:
        """Delete an entry from the tiers of this machine; return True if any had it."""
        return False if self.is_remote else self.delete(key)

    def delete_everywhere(self, keys: Collection[str], *, whole_namespace: str | None = None) -> set[str]:
        """Delete the entries of `keys` here and in all processes and machines that share a remote tier (see
        `tombstones`). Return the keys whose entry this store had.

        whole_namespace: a namespace to delete completely. Other processes and machines then delete all of its entries.
        This store only deletes the entries of `keys`, so pass all of its keys of the namespace. Raises
        BackendUnreachableError if a remote tier does not answer; the entries are then deleted on this machine only.
        """
        return {key for key in keys if self.delete(key)}

    def apply_deletions(self) -> None:
        """Delete on this machine the entries that other processes and machines deleted with `delete_everywhere`.

        Call it before entries are stored again: a deletion that is applied later would delete the new entries, too.
        """

    def watch_deletions(self, timeout_s: float = 0.0, *, skip_disk: bool = False) -> None:
        """Start to call `apply_deletions` every few seconds in the background, until `close`.

        Return after the first of these calls, at the latest after `timeout_s` seconds. skip_disk: do not delete from
        the disk tier, because another process watches the same disk and deletes there.
        """

    def replace_dtype(self, kv: ChunkKV) -> None:
        """Replace the stored entry by `kv`, the same KV in another dtype. Raises what `put` and `delete` raise."""
        self.put(kv)

    def put_context_policy(self, policy: ContextPolicy) -> None:
        """Store the context policy with which chunks are precomputed, in the disk tier. Without one, do nothing."""
        for tier in self.tiers:
            if tier is not self:
                tier.put_context_policy(policy)

    def read_context_policy(self) -> ContextPolicy | None:
        """Return the policy that `put_context_policy` stored; None if there is none. Raises CorruptError for damage."""
        policies = (tier.read_context_policy() for tier in self.tiers if tier is not self)
        return next((policy for policy in policies if policy is not None), None)

    # -- between tiers and in the background

    def touch(self, key: str) -> None:
        """Record a use of an entry in this tier, after a faster tier has returned the entry.

        Without this record, the tier could evict the entry, because it evicts the least recently used entries first.
        """

    def prefetch(self, keys: Sequence[str]) -> None:
        """Load entries into the fastest tier in the background. Returns at once."""

    def set_expected_spec(self, fingerprint: str, spec: KVSpec) -> None:
        """Set the dtype and the KV shapes of the model with this `fingerprint`.

        Entries of the model that have another dtype or other shapes are then treated as damaged.
        """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for background writes; return False if they did not finish within `timeout_s` seconds."""
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds for background writes. Return True if all were written.

        Writes that are left after that time are dropped and counted.
        """
        return True


class ByteRange(NamedTuple):
    """Some bytes of a value, and the size of the whole value in bytes."""

    data: bytes
    size: int


CONTAINS_BATCH = 200
"""Largest number of names in one `ByteStore.contains_many` call."""


class ByteStore(Protocol):
    """Byte values by name, in Redis or an object store. A remote tier stores its KV there. Threads may share it.

    Every method raises BackendUnreachableError when the backend fails or exceeds its time limit, and StoreFullError
    when it rejects a value because it is full. Writes are atomic, or a value contains a checksum that detects a partial
    write. The size that the backend reports is checked before a value is read. `sizes` has a time limit, too.
    """

    @property
    def url(self) -> str: ...  # without the password
    @property
    def max_value_bytes(self) -> int: ...
    @property
    def min_range_bytes(self) -> int: ...  # from which the time of a range is that of its bytes, not of the request
    def get(self, name: str) -> bytes | None: ...
    def get_range(
        self, name: str, start: int, end: int
    ) -> ByteRange | None: ...  # [start, end), as far as the value goes
    def put(self, name: str, data: bytes) -> None: ...
    def contains(self, name: str) -> bool: ...
    def contains_many(self, names: Sequence[str]) -> list[bool]: ...  # at most CONTAINS_BATCH, about one round trip
    def delete(self, name: str) -> bool: ...
    def sizes(self) -> Iterator[tuple[str, int]]: ...  # every name with its bytes
    def delete_temporary_files(self) -> int: ...  # remove files of killed writers; their number
    def list_metadata(self, after: str = "") -> list[str]: ...  # small values' names, those that sort after `after`
    def get_metadata(self, name: str) -> bytes | None: ...
    def put_metadata(self, name: str, data: bytes) -> None: ...
    def delete_metadata(self, name: str) -> None: ...
    def ping(self) -> None: ...
    def close(self) -> None: ...
