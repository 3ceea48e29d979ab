"""Background fetches of chunks from the remote tier to this machine's disk, which all processes of a vLLM read.

The scheduler starts a fetch when a request arrives, and polls it at each step. So neither the scheduler nor the workers
wait for the network. Depends on stores and keys, not on vLLM or prompts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from ragblend.engine.store.remote.tier import NUM_FETCHES, RemoteStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.errors import RagblendError

log = logging.getLogger(__name__)


class PendingFetch:
    """Fetch of a request's chunks. It is over once every chunk has arrived or is a miss, or after `timeout_s`."""

    def __init__(self, fetches: Sequence[Future[None]], timeout_s: float) -> None:
        self._fetches = fetches
        self._started_s = monotonic()
        self._timeout_s = timeout_s

    @property
    def is_over(self) -> bool:
        """True if the request need not wait any longer. A chunk that arrives later serves later requests."""
        return self.waited_s >= self._timeout_s or not self.pending

    @property
    def pending(self) -> list[Future[None]]:
        """Fetches of single chunks that have not ended."""
        return [future for future in self._fetches if not future.done()]

    @property
    def waited_s(self) -> float:
        """Seconds since the fetch began."""
        return monotonic() - self._started_s


class RemoteFetcher:
    """Copies chunks from the remote tier of `store` to its other tiers in background threads. No method blocks.

    A chunk that several requests need at the same time is fetched once. A chunk stays a miss if the remote tier is
    slow or down, or sends a damaged entry, or if the disk cannot be written. A chunk that is deleted during its fetch
    is not kept. `close` ends the threads and closes `store`.
    """

    def __init__(self, store: TieredStore, timeout_s: float) -> None:
        (self.remote,) = store.find_tiers(RemoteStore)
        self._store, self._timeout_s = store, timeout_s
        self._pool = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="ragblend-fetch")
        self._in_flight: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def start(self, keys: Sequence[str]) -> PendingFetch:
        """Start fetching the entries of `keys`, several at the same time."""
        until_s = monotonic() + self._timeout_s
        num_deletes = self._store.num_deletes  # before the first request, so that no later deletion is overlooked
        self.remote.start_fetches(keys)
        with self._lock:
            for key in keys:
                if key not in self._in_flight:
                    self._in_flight[key] = self._pool.submit(self._fetch_one, key, until_s, num_deletes)
            return PendingFetch([self._in_flight[key] for key in keys], self._timeout_s)

    def close(self) -> None:
        """Cancel the fetches that have not begun, and close the store."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store.close(timeout_s=0.0)

    def _fetch_one(self, key: str, until_s: float, num_deletes: int) -> None:
        try:
            # Skip an entry that has arrived since, and one past its deadline: a slow remote gets no further requests.
            if self._store.is_local(key) or monotonic() > until_s:
                return
            kv = self.remote.get(key)  # waits for the fetch that `start` has begun
            if kv is not None:
                with self._store.recorded_write(kv.header, is_copy=True):
                    for tier in self._store.tiers:
                        if not tier.is_remote:
                            tier.put(kv)
                if self._store.num_deletes != num_deletes:  # this entry may have been deleted during the fetch
                    self._store.delete_local(key)
        except RagblendError as error:
            log.warning("KV %s was not copied from %s to this machine: %s", key, self.remote.values.url, error)
        finally:
            with self._lock:
                self._in_flight.pop(key, None)
