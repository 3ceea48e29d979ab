"""What every tier offers (KVStore), and what a remote one needs of the other side (ByteStore). A TIER IS ADDED HERE.

Implementations of KVStore: `memory`, `disk`, `remote.tier`, `tiered` over them. Of ByteStore: `remote.redis_values`,
`remote.object_values`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ragblend.engine.store.kv import ChunkKV


@dataclass(slots=True)
class StoreCounters:
    """What a store has seen since it was opened. A damaged entry counts as a miss too."""

    num_hits: int = 0
    num_misses: int = 0
    num_puts: int = 0
    num_damaged: int = 0
    num_unsigned: int = 0  # of those, entries without the signature that this store's key makes
    num_evicted: int = 0
    num_failures: int = 0  # requests to a remote tier that failed or took too long; each get among them is a miss too
    num_dropped: int = 0  # background writes given up: refused, without room, or still owed when the store was closed


class VerifyResult(NamedTuple):
    """Whether every byte of one entry is what was written; `reason` is empty when it is."""

    key: str
    ok: bool
    reason: str


class KVStore(Protocol):
    """Chunk KV by key. Safe to share between threads; a DiskStore also between processes.

    `get` returns None for a miss and never raises for one; a damaged, truncated or foreign entry, or one whose
    token ids differ from `token_ids`, is a miss with a warning and a counter. The tensors it returns are
    read-only. `put` of a key that is already stored is harmless; it raises StoreFullError when there is no room.
    """

    @property
    def counters(self) -> StoreCounters: ...
    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None: ...
    def put(self, kv: ChunkKV) -> None: ...
    def contains(self, key: str) -> bool: ...
    def delete(self, key: str) -> bool: ...
    def keys(self) -> Iterator[str]: ...
    def nbytes(self) -> int: ...


@runtime_checkable
class BatchContainsStore(Protocol):
    """A store that is asked for many entries in less than a round trip each."""

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]: ...  # until_s: monotonic


def contains_many(store: KVStore, keys: Sequence[str]) -> list[bool]:
    """Whether `store` has each of `keys`."""
    return store.contains_many(keys) if isinstance(store, BatchContainsStore) else [store.contains(key) for key in keys]


CONTAINS_BATCH = 200
"""Names that another machine is asked for at a time."""


class ByteStore(Protocol):
    """Named values somewhere else: what a remote tier needs of Redis or of an object store. Safe between threads.

    Every method raises BackendUnreachableError when the other side fails or takes longer than its time limit, and
    StoreFullError when it refuses a value for want of room. `put` appears in one step, or is noticed by checksums.
    What the other side announces is checked before it is read, and `sizes` ends whatever it says.
    """

    @property
    def url(self) -> str: ...  # without its password
    @property
    def max_value_bytes(self) -> int: ...
    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def contains(self, name: str) -> bool: ...
    def contains_many(self, names: Sequence[str]) -> list[bool]: ...  # at most ASK_MANY, in about one round trip
    def delete(self, name: str) -> bool: ...
    def sizes(self) -> Iterator[tuple[str, int]]: ...  # every name with its bytes
    def clean(self) -> int: ...  # remove what killed writers left behind; how many
    def list_metadata(self) -> list[str]: ...  # names of small values that are no chunks, kept beside them
    def get_metadata(self, name: str) -> bytes | None: ...
    def put_metadata(self, name: str, data: bytes) -> None: ...
    def delete_metadata(self, name: str) -> None: ...
    def ping(self) -> None: ...
    def close(self) -> None: ...
