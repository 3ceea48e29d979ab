"""Chunks on their way from the remote tier to this machine's disk, where all processes of one vLLM find them.

The scheduler asks for a request's chunks when the request arrives, and looks again at each of its steps: neither its
steps nor the workers ever wait for the network. Knows stores and keys; knows neither vLLM nor prompts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from ragblend.engine.store.base import KVStore
from ragblend.engine.store.remote.tier import NUM_FETCHES, RemoteStore
from ragblend.engine.store.tombstones import TombstoneWatcher
from ragblend.errors import RagblendError

log = logging.getLogger(__name__)


class PendingFetch:
    """Several chunks under way. Over when all have arrived or missed, at the remote's time limit at the latest."""

    def __init__(self, coming: Sequence[Future[None]], timeout_s: float) -> None:
        self._coming = coming
        self._started_s = monotonic()
        self._timeout_s = timeout_s

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for. What comes later serves later requests."""
        return self.waited_s >= self._timeout_s or not self.pending

    @property
    def pending(self) -> list[Future[None]]:
        """What has neither arrived nor missed."""
        return [future for future in self._coming if not future.done()]

    @property
    def waited_s(self) -> float:
        """Seconds since the chunks were asked for."""
        return monotonic() - self._started_s


class RemoteFetcher:
    """Brings chunks from `remote` into the `local` store in the background. Nothing here waits for either.

    Requests that want the same chunk at the same time fetch it once. A remote that is slow, down or lying, and a local
    store that is full or cannot be written, cost those chunks: they stay misses. `listener` hears what is forgotten
    meanwhile. `close` ends the threads.
    """

    def __init__(
        self, remote: RemoteStore, local: KVStore, timeout_s: float, listener: TombstoneWatcher | None = None
    ) -> None:
        self.remote, self._listener = remote, listener
        self._local, self._timeout_s = local, timeout_s
        self._pool = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="ragblend-fetch")
        self._in_flight: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def start(self, keys: Sequence[str]) -> PendingFetch:
        """Ask for `keys`, side by side."""
        until_s = monotonic() + self._timeout_s
        num_applied = self._num_applied()  # before the first byte is asked for
        self.remote.start_fetches(keys)
        with self._lock:
            for key in keys:
                if key not in self._in_flight:
                    self._in_flight[key] = self._pool.submit(self._fetch_one, key, until_s, num_applied)
            return PendingFetch([self._in_flight[key] for key in keys], self._timeout_s)

    def close(self) -> None:
        """Give up what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.remote.close(timeout_s=0.0)

    def _num_applied(self) -> int:
        return self._listener.num_applied if self._listener is not None else 0

    def _fetch_one(self, key: str, until_s: float, num_applied: int) -> None:
        try:
            # It came between the question and this; or nobody waits for it any more, and a slow remote is left alone.
            if self._local.contains(key) or monotonic() > until_s:
                return
            kv = self.remote.fetch_many([key], until_s).get(key)
            if kv is not None:
                self._local.put(kv)
                if self._num_applied() != num_applied:  # it may be what was forgotten while it was on its way
                    self._local.delete(key)
        except RagblendError as error:
            log.warning("KV %s came from %s and found no place here: %s", key, self.remote.values.url, error)
        finally:
            with self._lock:
                self._in_flight.pop(key, None)
