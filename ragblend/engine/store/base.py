"""What every tier offers (KVStore), and what a remote one needs of the other side (ByteStore). A TIER IS ADDED HERE.

Implementations of KVStore: `memory`, `disk`, `remote.tier`, `tiered` over them. Of ByteStore: `remote.redis_values`,
`remote.object_values`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ragblend.engine.store.kv import ChunkKV, KVHeader, KVSpec
from ragblend.options import ContextPolicy, KvDtype


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


class KVStore(ABC):
    """Chunk KV by key: one tier, or several as one. Safe to share between threads; a DiskStore also between processes.

    A tier implements the abstract methods. The defaults of the others are those of a tier on this machine that evicts
    nothing, keeps no notes and has written an entry when `put` returns.
    """

    is_remote = False
    """True for a tier on another machine. A request asks it for all its keys at once (`fetch_many`)."""
    timeout_s = 0.0
    """The longest that a request waits for this tier, in seconds."""
    kv_dtype: KvDtype = "auto"
    """How `put` stores KV: "auto" as computed, "int8" or "fp8" in eight bits (see `quantize`)."""

    @property
    def url(self) -> str:
        """The place of a remote tier, without its password; "" for a tier on this machine."""
        return ""

    @property
    def tiers(self) -> tuple[KVStore, ...]:
        """The tiers of this store, fastest first: itself, where it is one."""
        return (self,)

    @property
    def remote_tiers(self) -> tuple[KVStore, ...]:
        """The tiers on other machines."""
        return tuple(tier for tier in self.tiers if tier.is_remote)

    @property
    @abstractmethod
    def counters(self) -> StoreCounters:
        """What the store has seen since it was opened."""

    # -- reading

    @abstractmethod
    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """Return the entry, whose tensors are read-only; None for a miss. Never raises.

        A damaged, truncated or foreign entry, or one whose token ids differ from `token_ids`, is a miss with a warning
        and a counter.
        """

    def fetch_many(self, keys: Sequence[str], until_s: float | None = None) -> Mapping[str, ChunkKV]:
        """Return what only remote tiers have of `keys`, fetched side by side within their time limit.

        until_s: on the monotonic clock; None for `timeout_s` from now.
        """
        return {}

    def get_local(self, key: str, token_ids: Sequence[int] | None, fetched: Mapping[str, ChunkKV]) -> ChunkKV | None:
        """`get` for a request that has `fetched` its entries (`fetch_many`): waits for no other machine."""
        return self.get(key, token_ids)

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Return True if the entry is there. Does not count as a use."""

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]:
        """Return `contains` of each; a remote tier is asked for none after `until_s` on the monotonic clock."""
        return [self.contains(key) for key in keys]

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Yield the keys of all entries, unverified."""

    def headers(self) -> Iterator[KVHeader]:
        """Yield the headers of the entries on this machine, none of a remote tier. By default each entry is asked for
        with `get`, and counts as a use."""
        if not self.is_remote:
            for key in self.keys():
                if (kv := self.get(key)) is not None:
                    yield kv.header

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of all entries."""

    # -- writing

    @abstractmethod
    def put(self, kv: ChunkKV) -> None:
        """Store an entry, in place of one of the same key. Raises StoreFullError when there is no room."""

    def fits(self, kv: ChunkKV) -> bool:
        """Return True if the entry alone is within the store's capacity."""
        return True

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry; return True if there was one."""

    def pin(self, document: str, keys: Sequence[str]) -> None:
        """Keep a document's entries from eviction, until `unpin`; replaces an earlier pin of the document."""

    def unpin(self, document: str) -> bool:
        """Let a document's entries be evicted again; return True if it was pinned."""
        return False

    def put_context(self, policy: ContextPolicy) -> None:
        """Remember what chunks are computed behind."""

    def read_context(self) -> ContextPolicy | None:
        """Return what `put_context` remembered; None where nothing was. Raises CorruptError for damage."""
        return None

    # -- between tiers and in the background

    def touch(self, key: str) -> None:
        """Note a use of the entry that a faster tier answered, for eviction by last use."""

    def prefetch(self, keys: Sequence[str]) -> None:
        """Bring entries into the fastest tier in the background. Returns at once."""

    def set_expected_spec(self, fingerprint: str, shape: KVSpec) -> None:
        """From now on, entries of that model have this shape, or are damaged."""

    def set_read_back_tiers(self, tiers: Sequence[KVStore]) -> None:
        """Name the tiers that hold what finds no room in the queue of writes: it is read from them at its turn."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for writes in the background; return False when `timeout_s` seconds were not enough."""
        return True

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for `timeout_s` seconds at most, give up and count the rest; return True if all was written."""
        return True


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
