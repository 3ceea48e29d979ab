"""The shared tier: the bytes of chunk files in Redis or an object store, without delaying answers.

A value has the bytes of a disk tier's file, so the same code verifies it. Values arrive range by range, a chunk's
header first and then its layers, so that an engine computes while they arrive (see `fetch`). `fetch_from_remote`
fetches the chunks of a request in parallel, within one time limit. A failed or late fetch is a miss and a counted
failure, even if the value arrives later. Writes wait in a queue until the backend accepts them. After several failures
the breaker stops requests until a probe, sent in the background, succeeds.

Works on ChunkKV and a ByteStore. Does not depend on servers, other tiers, models or prompts.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from time import monotonic, perf_counter
from typing import NamedTuple

from ragblend.engine.store.base import CONTAINS_BATCH, ByteStore, EntryCheck, KVStore, StoreCounters
from ragblend.engine.store.format.chunk_bytes import decode_chunk
from ragblend.engine.store.format.chunk_file import (
    ReadRequirements,
    UnreadableEntryError,
    UnsignedEntryError,
    encode_chunk,
)
from ragblend.engine.store.format.kv import ChunkKV, KVSpec, MemoryKV, load_into_memory
from ragblend.engine.store.format.signing import KeyChoice, resolve_key
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.engine.store.remote.breaker import CircuitBreaker, State
from ragblend.engine.store.remote.fetch import RemoteFetch
from ragblend.engine.store.write_queue import WriteQueue
from ragblend.errors import BackendUnreachableError, RagblendError, StoreFullError, UsageError
from ragblend.redaction import HIDDEN, redact_url, url_in_command

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # limit of a request's, or a `get`'s, total wait; recomputing a chunk is rarely slower
QUEUE_BYTES = 1 << 30
NUM_FETCHES = 8  # chunks fetched at the same time
RESULT_TTL_S = 2.0  # how long a result is kept for other requests of the same chunk
_MAX_BAD = 4096
# Schemes whose file has another name than theirs.
ALIASES = dict.fromkeys(("rediss", "redis+cluster", "rediss+cluster"), "redis")
_OVERDUE = 0.9  # share of the time limit after which a missing result counts as a failure of the backend


class RemoteStatus(NamedTuple):
    """The state of a remote tier. `latency_s`: round trip of a ping in seconds, None if it failed.

    `problem`: why the ping failed; "" if it did not. `breaker`: state of the CircuitBreaker. `num_failures`: number of
    failed requests since the RemoteStore was created; `num_dropped`: number of dropped writes. `num_waiting`: number of
    writes that are queued or in progress; `queued_bytes`: size of their tensors in memory.
    """

    url: str
    reachable: bool
    latency_s: float | None
    breaker: State
    num_failures: int
    num_dropped: int
    num_waiting: int
    queued_bytes: int
    problem: str = ""


class RemoteStore(KVStore):
    """KVStore over a ByteStore. Reads take at most `timeout_s` and never raise. `put` does not wait.

    `store_key`: new entries are signed with this key, and entries that it has not signed are ignored (see `signing`).
    The default is the process's own key, if there is one.

    Concurrent requests for the same chunk fetch it once. If the backend does not answer, BackendUnreachableError is
    raised only by methods whose docstrings say so, such as `delete`. `flush` waits for queued writes. `close` waits for
    them, too, and then releases threads and connections. The store stays usable.
    """

    is_remote = True

    def __init__(
        self,
        values: ByteStore,
        *,
        timeout_s: float = TIMEOUT_S,
        queue_bytes: int = QUEUE_BYTES,
        breaker: CircuitBreaker | None = None,
        store_key: KeyChoice = "auto",
    ) -> None:
        super().__init__()
        self.values = values
        self.read_speed = ReadSpeed(values.min_range_bytes)
        self.store_key = resolve_key(store_key)
        self._requirements = ReadRequirements(self.store_key)
        self.breaker = breaker or CircuitBreaker()
        self.timeout_s = timeout_s
        self._flights: dict[str, RemoteFetch] = {}  # in progress, or begun less than RESULT_TTL_S ago
        self._bad: OrderedDict[str, None] = OrderedDict()  # keys whose values failed verification and must be rewritten
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._has_warned = False  # about the current outage
        self.last_failure = ""
        """Why the latest failed request failed; "" if none has failed."""
        fix = f"; what is on disk goes there with: ragblend push --remote {url_in_command(values.url)}"
        self._queue = WriteQueue(self._send, queue_bytes, "ragblend-remote-writer", self._backoff_s, fix)

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses, puts, damage, failures and dropped writes since the store was created."""
        self._counters.num_dropped = self._queue.num_dropped
        return self._counters

    def set_expected_spec(self, fingerprint: str, spec: KVSpec) -> None:
        """Set the dtype and the shapes of a model's KV. Entries of the model that differ are then read as damaged."""
        self._requirements.specs[fingerprint] = spec

    # -- reading

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> MemoryKV | None:
        """Return the entry, whole and verified. Return None for a miss, or if no reply arrives in time."""
        kv = self.get_local(key, token_ids, self.fetch_from_remote([key]))
        if isinstance(kv, RemoteFetch) and not kv.wait_until_over(kv.until_s):
            self._give_up(kv)
        whole = kv.whole if isinstance(kv, RemoteFetch) else kv
        if kv is not None and whole is None:
            self._count(num_misses=1, num_hits=-1)
        return whole

    def get_local(
        self, key: str, token_ids: Sequence[int] | None, fetched: Mapping[str, ChunkKV]
    ) -> MemoryKV | RemoteFetch | None:
        """Return the entry from `fetched`, the result of `fetch_from_remote`; None for a miss. Sends no request."""
        kv = fetched.get(key)
        assert kv is None or isinstance(kv, MemoryKV | RemoteFetch)
        if kv is not None and not kv.header.has_ids(token_ids):
            log.warning("KV %s from %s is not used: its token ids differ from the requested ones", key, self.values.url)
            self._count(num_damaged=1, num_misses=1, num_hits=-1)
            return None
        return kv

    def fetch_from_remote(self, keys: Sequence[str], until_s: float | None = None) -> dict[str, MemoryKV | RemoteFetch]:
        """Fetch `keys` in parallel. Return, by key, the entries whose header arrived in time. Each key counts as a
        `get`.

        An entry of which layers are still to arrive is returned as a RemoteFetch. They arrive from the first read on,
        or from `read_ahead` on. until_s:
        the deadline, in seconds of the monotonic clock; None: `timeout_s` seconds from now.
        """
        until_s = monotonic() + self.timeout_s if until_s is None else until_s
        fetches = self.start_fetches(keys)
        fetched: dict[str, MemoryKV | RemoteFetch] = {}
        for key in dict.fromkeys(keys):
            kv: MemoryKV | RemoteFetch | None = self._queue.peek(key)
            if kv is None and (fetch := fetches.get(key)) is not None:
                if fetch.wait_for_header(min(until_s, fetch.until_s)):
                    kv = fetch.whole or fetch
                elif not fetch.is_over:
                    self._give_up(fetch)
            if kv is not None:
                fetched[key] = kv
            self._count(num_misses=kv is None, num_hits=kv is not None)
        return fetched

    def start_fetches(self, keys: Sequence[str]) -> dict[str, RemoteFetch]:
        """Start to fetch `keys` in parallel. Return the fetches by key. A later `get` of a key waits for its fetch."""
        wanted = [key for key in dict.fromkeys(keys) if self._queue.peek(key) is None]
        return {key: fetch for key in wanted if (fetch := self._start(key)) is not None}

    def _start(self, key: str) -> RemoteFetch | None:
        """Return the fetch of `key`, started unless it is in progress; None while the breaker is open."""
        with self._lock:
            self._expire_results(monotonic())
            if (flight := self._flights.get(key)) is not None:
                return flight
            if self.breaker.is_closed:
                fetch = RemoteFetch(key, self._requirements, self.timeout_s, self._continue)
                self._flights[key] = fetch
                self._pool().submit(self._fetch_next, fetch)
                return fetch
        self._probe_when_due()
        return None

    def _expire_results(self, now_s: float) -> None:
        """Drop results older than RESULT_TTL_S. Fetches are in order of start: the first recent one ends the loop."""
        old = takewhile(lambda each: now_s - each[1].started_s > RESULT_TTL_S, self._flights.items())
        for key in [key for key, fetch in old if fetch.is_over or fetch.is_paused]:
            del self._flights[key]

    def _give_up(self, fetch: RemoteFetch) -> None:
        """Stop a fetch that a request has waited for to its end. It counts as a failure if its time is over."""
        is_overdue = monotonic() - fetch.started_s >= _OVERDUE * self.timeout_s
        if is_overdue and self._forget(fetch):  # several may wait for one fetch; it fails once
            fetch.stop()  # a request that runs ends by its own time limit
            self._record_failure(self._slow(fetch.key))

    def _fetch_next(self, fetch: RemoteFetch) -> None:
        """Read the next range of an entry, and queue the one after it behind the next ranges of other entries."""
        if fetch.is_over:  # a request has given it up
            return
        if not self.breaker.is_closed:  # it opened while this fetch waited for a thread
            self._forget(fetch)
            fetch.stop()
            return
        problem = self._slow(fetch.key) if self._is_late(fetch) else ""
        try:
            if not problem:
                fetch.read_next(self.values, self.read_speed)
        except UnreadableEntryError as error:
            log.warning("KV %s from %s is not used: %s", fetch.key, self.values.url, error)
            self._count(num_damaged=1, num_unsigned=isinstance(error, UnsignedEntryError))
            self._mark_bad(fetch.key)
            fetch.stop(is_damaged=True)
        except RagblendError as error:
            problem = str(error)
        except Exception as error:  # a bug or lack of memory costs this chunk, not the answer
            problem = f"KV {fetch.key} could not be fetched from {self.values.url}: {error!r}"
        problem = problem or (self._slow(fetch.key) if self._is_late(fetch) else "")
        if problem:
            if self._forget(fetch):  # otherwise a waiting request has counted the failure
                self._record_failure(problem)
            fetch.stop()
            return
        self.breaker.record_success()
        if fetch.continues:
            self._continue(fetch)

    def _continue(self, fetch: RemoteFetch) -> None:
        with self._lock:
            if self._executor is not None:
                self._executor.submit(self._fetch_next, fetch)
                return
        fetch.stop()  # `close` has ended the threads

    def _is_late(self, fetch: RemoteFetch) -> bool:
        return monotonic() > fetch.until_s

    def _slow(self, key: str) -> str:
        return f"KV {key} did not come from {self.values.url} within {self.timeout_s:g} s"

    # -- writing

    def put(self, kv: ChunkKV) -> None:
        """Queue a chunk for sending, and return at once.

        If the queue is full, only the key is queued, and the tensors are read from a local tier before sending.
        If `set_upload_source_tiers` has set no local tier, the chunk is dropped instead and adds 1 to `num_dropped`.
        """
        loaded = load_into_memory(kv)
        with self._lock:
            self._flights.pop(loaded.header.key, None)
        if self._queue.put(loaded):
            self._count(num_puts=1)

    def set_upload_source_tiers(self, tiers: Sequence[KVStore]) -> None:
        """Set the local tiers from which the sending thread reads an entry whose tensors are not in the write queue.

        `tiers` are tried in order, so the fastest comes first. Without tiers, `put` drops an entry that does not fit
        into the queue.
        """

        def read_back(key: str) -> MemoryKV | None:
            local_kv = next((kv for tier in tiers if (kv := tier.get(key)) is not None), None)
            return None if local_kv is None else load_into_memory(local_kv)

        self._queue.read_back = read_back if tiers else None

    def put_and_wait(self, kv: ChunkKV) -> None:
        """Send a chunk and wait for the reply. Raises BackendUnreachableError or StoreFullError."""
        self._send(load_into_memory(kv))
        self._count(num_puts=1)

    def _send(self, kv: MemoryKV) -> None:
        """Send one chunk, unless the backend has it."""
        key = kv.header.key
        if kv.nbytes > self.values.max_value_bytes:
            raise StoreFullError(f"{kv.nbytes} bytes; {self.values.url} takes {self.values.max_value_bytes} at most")
        try:
            if key in self._bad or not self.values.contains(key):
                self.values.put(key, encode_chunk(kv, self.store_key))
        except BackendUnreachableError as error:
            self._record_failure(str(error))
            raise
        self.breaker.record_write_success()
        with self._lock:
            self._bad.pop(key, None)

    def _backoff_s(self) -> float:
        """Return the seconds until the writer may try again; 0 while the breaker is closed."""
        self._probe_when_due()
        return 0.0 if self.breaker.is_closed else max(0.01, self.breaker.wait_s())

    def contains(self, key: str) -> bool:
        """Return True if the entry is stored or queued; False if it is known as damaged or no answer arrives."""
        return self.contains_many([key])[0]

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]:
        """Return the result of `contains` for each key. The backend is queried in batches.

        No batch is queried after a failure or after `until_s`; the result is False for keys that were not queried.
        until_s: a time of the monotonic clock, in seconds.
        """
        there = {key for key in keys if self._queue.peek(key) is not None}
        there |= self.find_stored([key for key in dict.fromkeys(keys) if key not in there], until_s)
        return [key in there for key in keys]

    def find_stored(self, keys: Sequence[str], until_s: float = math.inf) -> set[str]:
        """Return those of `keys` whose entries the backend has; the queue does not count. See `contains_many`."""
        there = set[str]()
        left = [key for key in keys if key not in self._bad]
        for start in range(0, len(left), CONTAINS_BATCH):
            batch = left[start : start + CONTAINS_BATCH]
            if monotonic() >= until_s or not self.is_available():
                break
            try:
                there.update(key for key, exists in zip(batch, self.values.contains_many(batch), strict=True) if exists)
            except RagblendError as error:
                self._record_failure(str(error))
                break
            self.breaker.record_success()
        return there

    def delete(self, key: str) -> bool:
        """Delete an entry; return True if there was one. Raises BackendUnreachableError if no answer arrives."""
        queued = self._queue.peek(key) is not None
        self._queue.discard(key)
        self.drop_result(key)
        with self._lock:
            self._bad.pop(key, None)
        return self.values.delete(key) or queued

    def drop_result(self, key: str) -> None:
        """Drop the result of a recent fetch, so that the next `get` fetches again."""
        with self._lock:
            self._flights.pop(key, None)

    def keys(self) -> Iterator[str]:
        """Return the keys of all entries, unverified; none while the backend does not answer."""
        return (key for key, _ in self._sizes())

    def nbytes(self) -> int:
        """Return the size in bytes of all entries; 0 while the backend does not answer."""
        return sum(size for _, size in self._sizes())

    def verify(self) -> Iterator[EntryCheck]:
        """Fetch and verify every entry, and yield an EntryCheck for each. The next `put` rewrites a damaged entry.

        Raises BackendUnreachableError if the backend does not answer.
        """
        for key in [key for key, _ in self.values.sizes()]:
            try:
                if (data := self.values.get(key)) is not None:
                    decode_chunk(data, key, self._requirements)
                    yield EntryCheck(key, True, "")
            except UnreadableEntryError as error:
                self._mark_bad(key)
                yield EntryCheck(key, False, f"in {self.values.url}: {error}")

    # -- state

    def status(self) -> RemoteStatus:
        """Ping the backend, also while the breaker is open. Return the state of this tier."""
        start_s, problem = perf_counter(), ""
        try:
            self.values.ping()
        except RagblendError as error:
            problem = str(error)
        latency_s = None if problem else perf_counter() - start_s
        counters = self.counters
        return RemoteStatus(
            self.values.url,
            not problem,
            latency_s,
            self.breaker.state,
            counters.num_failures,
            counters.num_dropped,
            self.num_waiting,
            self._queue.nbytes,
            problem,
        )

    def is_available(self) -> bool:
        """Return True if the breaker is closed. Otherwise, send its probe in the background if the probe is due."""
        if not self.breaker.is_closed:
            self._probe_when_due()
        return self.breaker.is_closed

    @property
    def num_waiting(self) -> int:
        """Number of writes that are queued or in progress."""
        return self._queue.num_waiting

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until no write is queued, and return True; return False after `timeout_s` seconds. None: no limit."""
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds for queued writes, then drop those left. Return False if writes were left."""
        drained = self._queue.close(timeout_s)
        with self._lock:
            executor, self._executor = self._executor, None
            fetches = list(self._flights.values())
            self._flights.clear()
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        for fetch in fetches:
            fetch.stop()
        self.values.close()
        return drained

    def _sizes(self) -> Iterator[tuple[str, int]]:
        try:
            yield from self.values.sizes()
        except RagblendError as error:
            self._record_failure(str(error))

    def _pool(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="ragblend-remote")
        return self._executor

    def _probe_when_due(self) -> None:
        """Send the breaker's probe in the background, if it is due."""
        if self.breaker.claim_probe():
            try:
                with self._lock:
                    self._pool().submit(self._probe)
            except RuntimeError as error:  # the interpreter is shutting down
                log.info("%s", error)
                self.breaker.record_failure()

    def _probe(self) -> None:
        try:
            self.values.ping()
        except RagblendError as error:
            log.info("%s", error)
            self._count(num_failures=1)  # so that the counter grows for as long as the outage lasts
            self.breaker.record_failure()
        else:
            self.breaker.record_probe_success()
            log.warning("%s answers again", self.values.url)
            self._has_warned = False

    def _record_failure(self, reason: str) -> None:
        self._count(num_failures=1)
        self.last_failure = reason
        self.breaker.record_failure()
        with self._lock:
            is_new, self._has_warned = not self._has_warned, True
        if not is_new:  # an outage is logged once
            log.info("%s", reason)
            return
        look = f"ragblend doctor --remote {url_in_command(self.values.url)}"
        problem = reason.partition("; check it: ")[0]
        log.warning("%s; answers go on without it, and prefill what only it has; check it: %s", problem, look)

    def _forget(self, fetch: RemoteFetch) -> bool:
        """Remove a fetch from the list, so that the next `get` fetches again; return True if it was listed."""
        with self._lock:
            if self._flights.get(fetch.key) is not fetch:
                return False
            del self._flights[fetch.key]
            return True

    def _mark_bad(self, key: str) -> None:
        with self._lock:
            self._bad[key] = None
            if len(self._bad) > _MAX_BAD:
                self._bad.popitem(last=False)


def open_remote(url: str, *, timeout_s: float = TIMEOUT_S, store_key: KeyChoice = "auto") -> RemoteStore:
    """Return the remote tier at `url`: `redis://`, `redis+cluster://`, `s3://BUCKET/PREFIX`, `gs://`, `az://`,
    `file:///DIR`.

    Opens no connection yet. Raises UsageError for an invalid URL. Raises ImportError if the client library is missing.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if not scheme or timeout_s <= 0:
        problem = f"the remote's time limit is {timeout_s} s"
        problem = problem if scheme else f"{redact_url(url)!r} is not the URL of a remote tier"
        raise UsageError(f"{problem}; write `remote='redis://HOST:6379/0'` or s3://BUCKET/PREFIX, and more than 0 s")
    if HIDDEN + "@" in url:
        raise UsageError(f"the password is left out of {redact_url(url)!r}, as it is printed; give the whole URL")
    # A scheme has its module SCHEME_values.py in this folder, or is opened by obstore.
    name = ALIASES.get(scheme, scheme)
    module = f"{__package__}.{name}_values"
    if not name.isidentifier() or find_spec(module) is None:
        module = f"{__package__}.object_values"
    values: ByteStore = import_module(module).open_values(url, timeout_s)
    return RemoteStore(values, timeout_s=timeout_s, store_key=store_key)
