"""Several stores as one: `TieredStore(MemoryStore(8 * GIB), DiskStore("kv"), open_remote("redis://..."))`.

Works on any KVStore. Does not depend on files, servers, models or prompts.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from time import monotonic
from weakref import WeakValueDictionary

from ragblend.engine.store.base import KVStore, StoreCounters
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.finite import kv_is_finite
from ragblend.engine.store.format.kv import (
    ChunkKV,
    KVHeader,
    KVSpec,
    KVView,
    MemoryKV,
    StoredLayer,
    convert_kv_dtype,
    load_into_memory,
)
from ragblend.engine.store.format.sizes import format_bytes, parse_bytes
from ragblend.engine.store.memory import MemoryStore, tensor_write_counts
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.engine.store.remote.fetch import RemoteFetch
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tombstones import Tombstones
from ragblend.engine.store.write_queue import WriteQueue
from ragblend.errors import BackendUnreachableError, RagblendError, StoreFullError, UsageError
from ragblend.option_fields import default_of
from ragblend.options import KvDtype, TierOptions

__all__ = ["MemoryStore", "TieredStore", "format_bytes", "parse_bytes"]

log = logging.getLogger(__name__)

PROMOTION_BYTES = 1 << 30  # of queued promotions to disk and remote tiers; an entry that exceeds it is not promoted
NUM_PREFETCHES = 4


class TieredStore(KVStore):
    """Stores in order of speed, fastest first, as one KVStore. Safe to share between threads.

    `get` tries the fastest tier first. When all layers of an entry have been read from a slower tier and verified, the
    entry is copied to the faster tiers (promoted): to memory at once, to other tiers in the background. Concurrent
    readers of an entry read each of its layers only once. `put` writes to every tier. `close` waits for background
    work; the store stays usable.

    `kv_dtype`: how `put` stores KV. "auto" is as computed; "int8" and "fp8" are in eight bits (see `quantize`). Reading
    does not depend on `kv_dtype`, because each entry's header names its dtype.

    `delete_everywhere` also deletes from other stores with the same remote tier (see `tombstones`).
    """

    def __init__(
        self, *tiers: KVStore, kv_dtype: KvDtype = default_of(TierOptions, "kv_dtype"), catalog: str | None = None
    ) -> None:
        if not tiers:
            raise UsageError("a TieredStore without tiers stores nothing; give it at least one, such as DiskStore(DIR)")
        super().__init__()
        self._tiers = tiers
        self.has_remote_tiers = any(tier.is_remote or tier.has_remote_tiers for tier in tiers)
        self.kv_dtype = TierOptions(kv_dtype=kv_dtype).kv_dtype
        self.catalog = catalog or next((tier.catalog for tier in tiers if tier.catalog is not None), None)
        self.num_deletes = 0  # also of entries that the store does not have; grows before an entry is deleted
        self._num_writes = 0  # in progress
        # Queues of promotions into tiers other than memory, by position.
        self._promotions = {
            position: WriteQueue(tier.put, PROMOTION_BYTES, f"ragblend-promote-{position}")
            for position, tier in enumerate(tiers[:-1])
            if tier.find_tier(MemoryStore) is None
        }
        for position, tier in enumerate(tiers):
            if tier.is_remote:
                for remote in tier.find_tiers(RemoteStore):
                    remote.set_upload_source_tiers(tiers[:position])
        self._tombstones = [Tombstones(self, remote) for remote in self.find_tiers(RemoteStore)]
        self._being_read: WeakValueDictionary[str, _PromotingKV] = WeakValueDictionary()
        self._prefetching: set[str] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def tiers(self) -> tuple[KVStore, ...]:
        """The tiers, fastest first."""
        return self._tiers

    @property
    def counters(self) -> StoreCounters:
        """Current counts. Hits, misses and puts are counted once per call; the other counts are sums over the tiers."""
        tiers = [tier.counters for tier in self._tiers]
        sums = {each.name: sum(getattr(counters, each.name) for counters in tiers) for each in fields(StoreCounters)}
        sums |= {name: getattr(self._counters, name) for name in ("num_hits", "num_misses", "num_puts")}
        sums["num_dropped"] += sum(queue.num_dropped for queue in self._promotions.values())
        return StoreCounters(**sums)

    def set_expected_spec(self, fingerprint: str, spec: KVSpec) -> None:
        """Set the dtype and the shapes of a model's KV. Entries of the model that differ are then read as damaged."""
        for tier in self._tiers:
            tier.set_expected_spec(fingerprint, spec)

    # -- reading

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """Return the intact entry from the fastest tier that has it; None for a miss. See `KVStore.get`."""
        kv = self._find(key, token_ids, self._tiers)
        self._count(num_hits=kv is not None, num_misses=kv is None)
        return kv

    def get_local(self, key: str, token_ids: Sequence[int] | None, fetched: Mapping[str, ChunkKV]) -> ChunkKV | None:
        """Return the entry from `fetched` or a tier on this machine; None for a miss. See `KVStore.get_local`."""
        kv = fetched.get(key)
        if kv is None or not kv.header.has_ids(token_ids) or not is_readable(kv):
            kv = self._find(key, token_ids, [tier for tier in self._tiers if not tier.is_remote])
        self._count(num_hits=kv is not None, num_misses=kv is None)
        return kv

    def fetch_from_remote(self, keys: Sequence[str], until_s: float | None = None) -> dict[str, ChunkKV]:
        """Fetch from the remote tiers, in parallel, the entries that no local tier has. Return these entries by key.

        The method returns when the header of every entry has arrived or is known to be missing, at the latest at
        `until_s`. Layers may still arrive; an entry is promoted to the local tiers once all were read. until_s: the
        deadline, in seconds of the monotonic clock; None: now plus the largest `timeout_s` of the remote tiers.
        """
        if until_s is None:
            until_s = monotonic() + max((tier.timeout_s for tier in self.find_tiers(RemoteStore)), default=0.0)
        fetched: dict[str, ChunkKV] = {}
        num_deletes = self.num_deletes
        wanted = [key for key in dict.fromkeys(keys) if not self.is_local(key)]
        for position, tier in enumerate(self._tiers):
            if tier.is_remote:
                missing = [key for key in wanted if key not in fetched]
                for key, kv in tier.fetch_from_remote(missing, until_s).items():
                    fetched[key] = self._with_promotion(kv, position, num_deletes)
        return fetched

    @property
    def read_speeds(self) -> dict[str, ReadSpeed]:
        """The measured speeds of "disk" and "remote", the tiers from which entries are read into memory."""
        tiers = [tier for tier in self._tiers if tier.find_tier(MemoryStore) is None]
        return {"remote" if tier.is_remote else "disk": tier.read_speed for tier in reversed(tiers)}

    def is_local(self, key: str) -> bool:
        """Return True if a tier of this machine has the entry, or has it queued for writing."""
        return any(queue.peek(key) is not None for queue in self._promotions.values()) or any(
            tier.contains(key) for tier in self._tiers if not tier.is_remote
        )

    def prefetch(self, keys: Sequence[str]) -> None:
        """Load entries into the fastest tier in the background, for a later request. Returns at once.

        The entries must fit into that tier together, or later ones evict earlier ones.
        """
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._prefetching]
            self._prefetching.update(missing)
            for key in missing:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(NUM_PREFETCHES, thread_name_prefix="ragblend-prefetch")
                self._executor.submit(self._prefetch_one, key)

    def _prefetch_one(self, key: str) -> None:
        try:
            if not self._tiers[0].contains(key) and (kv := self._find(key, None, self._tiers)) is not None:
                load_into_memory(kv)  # reading every layer promotes the entry
        except RagblendError as error:  # the request for the entry raises it again, where the caller can react
            log.warning("KV %s was not prefetched: %s", key, error)
        finally:
            with self._lock:
                self._prefetching.discard(key)

    def _find(self, key: str, token_ids: Sequence[int] | None, tiers: Sequence[KVStore]) -> ChunkKV | None:
        """Return the entry from the fastest of `tiers` that has it; reading it promotes it to faster tiers."""
        num_deletes = self.num_deletes
        for position, tier in enumerate(self._tiers):
            if tier not in tiers:
                continue
            if position and (shared := self._shared(key, token_ids)) is not None:
                return shared
            waits = self._pending_write(position, key, token_ids) if position in self._promotions else None
            kv = waits or tier.get(key, token_ids)
            if kv is None:
                continue
            for slower in self._tiers[position + 1 :]:
                slower.touch(key)
            return self._with_promotion(kv, position, num_deletes) if position else kv
        return None

    def _shared(self, key: str, token_ids: Sequence[int] | None) -> _PromotingKV | None:
        """Return the entry that another reader is reading now; None if there is none."""
        shared = self._being_read.get(key)
        return shared if shared is not None and shared.is_good and shared.header.has_ids(token_ids) else None

    def _pending_write(self, position: int, key: str, token_ids: Sequence[int] | None) -> MemoryKV | None:
        """Return the entry that is queued for the tier at `position`; None if there is none."""
        kv = self._promotions[position].peek(key)
        return kv if kv is not None and kv.header.has_ids(token_ids) else None

    def _with_promotion(self, kv: ChunkKV, position: int, num_deletes: int) -> ChunkKV:
        """Return the entry for the caller. It is promoted to the faster tiers once all its layers are read."""
        faster = [upper for upper in range(position) if self._tiers[upper].fits(kv)]
        if not faster:
            return kv
        tier = self._tiers[position]
        is_file = not tier.is_remote and not isinstance(kv, MemoryKV)

        def promote(whole: MemoryKV) -> None:
            # An entry that was deleted while it was read must not be written again. No request is sent to learn this.
            if tier.contains(whole.header.key) if is_file else self.num_deletes == num_deletes:
                self._promote(whole, faster)

        if isinstance(kv, MemoryKV):
            promote(kv)
            return kv
        promoting = _PromotingKV(kv, None if tier.is_remote else tier.read_speed, promote)
        self._being_read[kv.header.key] = promoting
        return promoting

    @contextmanager
    def recorded_write(self, header: KVHeader, *, is_copy: bool) -> Iterator[None]:
        """Context manager: record the write of an entry. The caller writes the entry inside the block.

        A tombstone that arrives during the write then deletes the new entry, too.
        header: the entry's header. is_copy: the entry was fetched from the remote tier (see `Tombstones.record_write`).
        """
        for tombstones in self._tombstones:
            tombstones.record_write(header, is_copy=is_copy)
        with self._lock:
            self._num_writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writes -= 1

    @property
    def is_writing(self) -> bool:
        """True while an entry is written or queued for writing."""
        num_queued = sum(each.num_waiting for each in self._promotions.values())
        return self._num_writes + num_queued + sum(tier.num_waiting for tier in self.find_tiers(RemoteStore)) > 0

    def _promote(self, kv: MemoryKV, positions: Sequence[int]) -> None:
        for position in positions:
            if position in self._promotions:
                with self.recorded_write(kv.header, is_copy=True):
                    self._promotions[position].put(kv)
                continue
            try:
                self._tiers[position].put(kv)
            except StoreFullError as error:  # its capacity was lowered
                log.debug("%s", error)
            except RagblendError as error:  # a failed promotion costs speed, not the answer
                log.warning("KV %s stays in its slower tier: %s", kv.header.key, error)

    # -- writing

    def put(self, kv: ChunkKV) -> None:
        """Write the entry to every tier, in the store's dtype. A remote tier writes in the background.

        A memory tier that is too small for the entry is skipped. If a tier fails, the others are written, and then the
        first error is raised. Raises BackendUnreachableError before any tier is written if the catalogue's server does
        not answer. KV with infinity or NaN is not stored but logged, because no reader would accept it.
        """
        converted = convert_kv_dtype(load_into_memory(kv), self.kv_dtype)
        if not kv_is_finite(converted):
            log.warning(
                "KV %s is not stored: it holds infinity or NaN as the model computed it in %s; choose another `dtype`",
                converted.header.key,
                converted.header.dtype,
            )
            return
        failure: RagblendError | None = None
        with self.recorded_write(converted.header, is_copy=False):
            for tier in sorted(self._tiers, key=lambda tier: tier.find_tier(DiskStore) is None):
                if not tier.fits(converted):
                    continue
                try:
                    tier.put(converted)
                except RagblendError as error:
                    if tier.find_tier(DiskStore) is not None and isinstance(error, BackendUnreachableError):
                        raise  # the catalogue does not answer: no removal would find an entry without a record
                    if tier.find_tier(MemoryStore) is None or len(self._tiers) == 1:
                        failure = failure or error
        if failure is not None:
            raise failure
        self._count(num_puts=1)

    def replace_dtype(self, kv: ChunkKV) -> None:
        """Replace the stored entry by `kv`, the same KV in another dtype.

        A remote tier does not overwrite entries, so its entry is deleted first. Raises BackendUnreachableError if a
        remote tier does not answer; the entry on this machine is then unchanged.
        """
        for tier in self.find_tiers(RemoteStore):
            tier.delete(kv.header.key)
        self.put(kv)

    def delete(self, key: str, tiers: Sequence[KVStore] | None = None) -> bool:
        """Delete the entry from `tiers`, which are tiers of this store; None: from all. Return True if any had it.

        Slower tiers delete the entry first, so that no reader promotes it again. Raises BackendUnreachableError, after
        the local tiers deleted it, if a remote tier does not answer.
        """
        tiers = self._tiers if tiers is None else tiers
        with self._lock:
            self.num_deletes += 1
        if (shared := self._being_read.pop(key, None)) is not None:
            shared.cancel()
        removed, failure = False, None
        for position, tier in reversed(list(enumerate(self._tiers))):
            if tier not in tiers:
                continue
            if position in self._promotions:
                self._promotions[position].discard(key)
            try:
                removed = tier.delete(key) or removed
            except BackendUnreachableError as error:
                failure = error
        if failure is not None:
            raise failure
        return removed

    def delete_local(self, key: str) -> bool:
        """Delete the entry from the tiers of this machine; return True if any had it."""
        return self.delete(key, [tier for tier in self._tiers if not tier.is_remote])

    def delete_everywhere(self, keys: Collection[str], *, whole_namespace: str | None = None) -> set[str]:
        """Delete entries from every tier of this store. Then write tombstones: records from which other processes and
        machines learn that they must delete the entries, too.

        See KVStore for `whole_namespace`, result and errors. Tombstones are written after the deletion, because another
        store could otherwise apply one and then fetch the entry again.
        """
        deleted: set[str] = set()
        failure: BackendUnreachableError | None = None
        for key in keys:
            try:
                if self.delete(key) if failure is None else self.delete_local(key):
                    deleted.add(key)
            except BackendUnreachableError as error:
                failure = error
        if failure is not None:
            raise failure
        for tombstones in self._tombstones:
            tombstones.publish(keys, whole_namespace=whole_namespace)
        # Another store may have sent an entry after its deletion above, and polled before the tombstone was written.
        for remote in self.find_tiers(RemoteStore):
            for key in keys:
                remote.delete(key)
        return deleted

    def apply_deletions(self) -> None:
        """Delete from the local tiers the entries that other processes and machines have deleted everywhere."""
        for tombstones in self._tombstones:
            tombstones.poll()

    def watch_deletions(self, timeout_s: float = 0.0, *, skip_disk: bool = False) -> None:
        """Call `apply_deletions` every few seconds in the background, until `close`. Wait up to `timeout_s` seconds for
        the first call.

        skip_disk: do not delete from the disk tier, because another process watches the same disk and deletes there.
        """
        for tombstones in self._tombstones:
            tombstones.watch(timeout_s, skip_disk=skip_disk)

    # -- state

    def contains(self, key: str) -> bool:
        """Return True if any tier has the entry."""
        return any(tier.contains(key) for tier in self._tiers)

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]:
        """Return for each key whether any tier has the entry. Remote tiers are queried for keys that no local tier has.

        until_s: a time of the monotonic clock, in seconds. No query is sent after it; keys not queried are False.
        """
        there = {key for key in dict.fromkeys(keys) if self.is_local(key)}
        for tier in self.find_tiers(RemoteStore):
            left = [key for key in dict.fromkeys(keys) if key not in there]
            there.update(key for key, exists in zip(left, tier.contains_many(left, until_s), strict=True) if exists)
        return [key in there for key in keys]

    def keys(self) -> Iterator[str]:
        """Yield the keys of all tiers' entries, each key once."""
        seen: set[str] = set()
        for tier in self._tiers:
            for key in tier.keys():  # noqa: SIM118 (a KVStore is not a dict)
                if key not in seen:
                    seen.add(key)
                    yield key

    def headers(self) -> Iterator[KVHeader]:
        """Return the headers of the entries on this machine; an entry in two tiers occurs twice."""
        return chain.from_iterable(tier.headers() for tier in self._tiers)

    def nbytes(self) -> int:
        """Return the size in bytes of all tiers together; an entry in two tiers counts twice."""
        return sum(tier.nbytes() for tier in self._tiers)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for promotions and remote writes; return False if they did not finish within `timeout_s` seconds."""
        return self._each_within(timeout_s, "flush")

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds for background work, then drop what is left. Return False if work was left."""
        with self._lock:
            executor, self._executor = self._executor, None
            self._prefetching.clear()
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        for tombstones in self._tombstones:
            tombstones.end_watch()
        return self._each_within(timeout_s, "close")

    def _each_within(self, timeout_s: float | None, action: str) -> bool:
        """Flush or close every queue and every tier that writes in the background, within one time limit."""
        until_s = None if timeout_s is None else monotonic() + timeout_s
        done = True
        for part in (*self._promotions.values(), *self._tiers):
            left_s = None if until_s is None else max(0.0, until_s - monotonic())
            done = getattr(part, action)(left_s) and done
        return done


def is_readable(kv: ChunkKV) -> bool:
    """Return False for an entry of a remote tier of which layers are missing and will not arrive any more."""
    fetch = _fetch_of(kv)
    return fetch is None or fetch.is_readable


def read_ahead(kv: ChunkKV) -> None:
    """Let the layers of an entry of a remote tier arrive in the background. Nothing happens for other entries."""
    if (fetch := _fetch_of(kv)) is not None:
        fetch.read_ahead()


def _fetch_of(kv: ChunkKV) -> RemoteFetch | None:
    source = kv.source if isinstance(kv, KVView) else kv
    return source if isinstance(source, RemoteFetch) else None


class _PromotingKV(KVView):
    """An entry of a slower tier, read once for all its readers, and promoted once every layer was read. Thread-safe.

    The speed of reading the whole entry is recorded in `speed`, if given.
    """

    def __init__(self, source: ChunkKV, speed: ReadSpeed | None, promote: Callable[[MemoryKV], None]) -> None:
        super().__init__(source)
        self._speed, self._promote = speed, promote
        self._read: dict[int, tuple[StoredLayer, tuple[int, ...]]] = {}  # layers, with their write counts at that time
        self._read_s = 0.0
        self._promoted = False
        self._lock = threading.Lock()
        self.is_good = True  # False once a layer was damaged, or the entry deleted

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored, read and verified by the slower tier."""
        with self._lock:  # a second reader of the layer waits for the first, and uses its result
            cached = self._read.get(index)
            if cached is not None and tensor_write_counts([cached[0]]) == cached[1]:
                return cached[0]
            start_s = monotonic()
            try:
                layer = self.source.stored_layer(index)
            except RagblendError:
                self.is_good = False
                raise
            self._read_s += monotonic() - start_s
            if cached is None:
                self._read[index] = layer, tensor_write_counts([layer])
            whole = len(self._read) == self.header.num_layers and not self._promoted
            self._promoted = self._promoted or whole
        if whole:
            if self._speed is not None:
                self._speed.record(self.nbytes, self._read_s)
            self._promote_entry()
        return layer

    def cancel(self) -> None:
        """Do not promote the entry any more, because it was deleted."""
        self._promoted, self.is_good = True, False

    def _promote_entry(self) -> None:
        layers = [self._read[index] for index in range(self.header.num_layers)]
        written_into = any(tensor_write_counts([layer]) != counters for layer, counters in layers)
        if self.is_good and not written_into:
            self._promote(MemoryKV(self.header, tuple(layer for layer, _ in layers)))
