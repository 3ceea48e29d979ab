"""Writes that nobody waits for: a queue bounded in bytes, one worker thread, and what did not fit is counted.

Knows ChunkKV values and a function that writes one. Knows nothing about where they go.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from ragblend.engine.kv import MemoryKV
from ragblend.errors import BackendUnreachableError, RagblendError

log = logging.getLogger(__name__)

IDLE_S = 5.0  # the thread ends after this long without work, so nobody has to remember to end it
EXIT_S = 10.0  # what is still queued this long after the main thread has ended is given up
MAX_TRIES = 3  # times a write is tried when its target does not answer


class WriteQueue:
    """Chunks on their way to a slow place, in order; the latest of a key wins. Thread-safe.

    `write(kv)` stores one chunk. When it raises BackendUnreachableError the chunk is tried again, MAX_TRIES times;
    after any other RagblendError it is given up. `pause_s()` says how long to hold back, 0 for not at all. What is
    given up, or finds the queue full, is counted in `num_dropped`: the caller never waits.
    """

    def __init__(
        self,
        write: Callable[[MemoryKV], None],
        capacity_bytes: int,
        name: str,
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_dropped = self.num_written = 0
        self._write, self._name, self._pause_s = write, name, pause_s
        self._waiting: OrderedDict[str, tuple[MemoryKV, int]] = OrderedDict()  # with the tries so far, oldest first
        self._current: MemoryKV | None = None  # being written; no longer in _waiting
        self._queued_bytes = 0  # of both
        self._thread: threading.Thread | None = None
        self._give_up_at_s: float | None = None  # set once the main thread has ended
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are waiting or being written; never more than `capacity_bytes`."""
        return self._queued_bytes

    def put(self, kv: MemoryKV) -> bool:
        """Queue a chunk; False, and counted, when there is no room."""
        key = kv.header.key
        with self._changed:
            known = self._waiting.get(key)
            freed_bytes = known[0].nbytes if known else 0
            if self._queued_bytes - freed_bytes + kv.nbytes > self.capacity_bytes:
                self._drop(key, f"{self._queued_bytes} bytes are queued already")
                return False
            if self._thread is None:
                # Not a daemon: one that is still inside torch when the interpreter goes away aborts the process.
                thread = threading.Thread(target=self._work, name=self._name)
                try:
                    thread.start()  # it waits for the condition that is held here
                except RuntimeError as error:  # the interpreter is going away
                    self._drop(key, str(error))
                    return False
                self._thread = thread
            self._queued_bytes += kv.nbytes - freed_bytes
            self._waiting[key] = kv, 0
            self._changed.notify_all()
            return True

    def peek(self, key: str) -> MemoryKV | None:
        """The chunk of `key` if it is still on its way."""
        with self._changed:
            if key in self._waiting:
                return self._waiting[key][0]
            current = self._current
            return current if current is not None and current.header.key == key else None

    def discard(self, key: str) -> None:
        """Forget the chunk of `key`; when it is being written at this moment, wait until it is."""
        with self._changed:
            self._forget(key)
            while self._current is not None and self._current.header.key == key:
                self._changed.wait()
            self._forget(key)  # its write may have failed and put it back

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued is written or given up; False when `timeout_s` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._current is None, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Drain for at most `timeout_s` seconds, then give up the rest. A later `put` starts anew."""
        drained = self.flush(timeout_s)
        with self._changed:
            self._give_up_all("the store was closed")
        return drained

    def _work(self) -> None:
        while (item := self._next()) is not None:
            kv, tries = item
            try:
                self._write(kv)
            except BackendUnreachableError as error:
                self._finish(kv, tries + 1, str(error))
            except (RagblendError, OSError) as error:
                self._finish(kv, MAX_TRIES, str(error))
            except BaseException as error:  # the thread must not die with the queue full
                log.exception("writing KV %s failed", kv.header.key)
                self._finish(kv, MAX_TRIES, repr(error))
            else:
                self._finish(kv)

    def _next(self) -> tuple[MemoryKV, int] | None:
        """The chunk to write now, once there is one and the target may be asked; None when the thread is to end."""
        idle_until_s = monotonic() + IDLE_S
        with self._changed:
            while True:
                wait_s = self._pause_s() if self._waiting else idle_until_s - monotonic()
                exiting = not threading.main_thread().is_alive()
                if exiting and self._waiting:
                    self._give_up_at_s = self._give_up_at_s or monotonic() + EXIT_S
                    if wait_s > 0 or monotonic() > self._give_up_at_s:
                        self._give_up_all("the process ends")
                if not self._waiting and (exiting or wait_s <= 0):
                    self._thread = None
                    return None
                if self._waiting and wait_s <= 0:
                    kv, tries = self._waiting.popitem(last=False)[1]
                    self._current = kv
                    return kv, tries
                self._changed.wait(min(wait_s, 0.2))  # short: nobody notifies when the main thread ends

    def _finish(self, kv: MemoryKV, tries: int = 0, failure: str = "") -> None:
        key = kv.header.key
        with self._changed:
            self._current = None
            if failure and tries < MAX_TRIES and key not in self._waiting:
                self._waiting[key] = kv, tries
                self._waiting.move_to_end(key, last=False)
            else:
                self._queued_bytes -= kv.nbytes
                if failure:
                    self._drop(key, failure)
                else:
                    self.num_written += 1
            self._changed.notify_all()

    def _forget(self, key: str) -> None:
        known = self._waiting.pop(key, None)
        if known is not None:
            self._queued_bytes -= known[0].nbytes
            self._changed.notify_all()

    def _give_up_all(self, reason: str) -> None:
        for key in list(self._waiting):
            self._forget(key)
            self._drop(key, reason)

    def _drop(self, key: str, reason: str) -> None:
        self.num_dropped += 1
        log.warning("KV %s is not written by %s: %s", key, self._name, reason)
