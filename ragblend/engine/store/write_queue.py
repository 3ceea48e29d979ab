"""A queue of background writes: bounded in bytes, with one worker thread. Dropped writes are counted.

Works on ChunkKV values and a function that writes one. Does not depend on the target.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from ragblend.engine.store.format.kv import MemoryKV
from ragblend.errors import BackendUnreachableError, RagblendError

log = logging.getLogger(__name__)

IDLE_S = 5.0  # the thread ends after this long without work, so the queue needs no explicit stop
EXIT_S = 10.0  # chunks still queued this long after the end of the main thread are dropped
RETRY_S = 1.0  # pause after a write that the target did not answer
MAX_WAITING = 100_000  # chunks, most of them by key alone


class WriteQueue:
    """Chunks that wait to be written to a slow target, such as a server. A thread writes the oldest first. Thread-safe.

    A new chunk replaces a queued one of the same key. Each dropped chunk adds 1 to `num_dropped`. The first one that is
    dropped for a reason is logged as a warning, those that follow for the same reason at level INFO. All chunks that
    are dropped at `close`, or when the process ends, are logged as one warning.

    - write(kv): writes one chunk. If it raises BackendUnreachableError, the chunk is queued again and written after a
      pause. After any other error, the chunk is dropped.
    - capacity_bytes: the largest size of the queued chunks together.
    - name: of the thread, for messages. fix: text at the end of the warning for a dropped chunk.
    - pause_s(): returns the seconds to wait before the next write; 0 for none.

    The attribute `read_back` may be set. `read_back(key)` returns a chunk from another place; None if it was deleted.
    A chunk that does not fit is then queued without its tensors. `read_back` reads them before the chunk is written.
    """

    def __init__(
        self,
        write: Callable[[MemoryKV], None],
        capacity_bytes: int,
        name: str,
        pause_s: Callable[[], float] = lambda: 0.0,
        fix: str = "",
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_back: Callable[[str], MemoryKV | None] | None = None
        self.num_dropped = 0
        self._last_reason = ""  # for which a chunk was dropped since the last written one
        self._write, self._name, self._pause_s, self._fix = write, name, pause_s, fix
        self._waiting: OrderedDict[str, MemoryKV | None] = OrderedDict()  # oldest first; None: to be read back
        self._current: tuple[str, MemoryKV | None] | None = None  # being written; no longer in _waiting
        self._queued_bytes = 0  # of both
        self._retry_at_s = 0.0
        self._thread: threading.Thread | None = None
        self._give_up_at_s: float | None = None  # set once the main thread has ended
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the queued chunks and the one being written; never more than `capacity_bytes`."""
        return self._queued_bytes

    @property
    def num_waiting(self) -> int:
        """Number of chunks not written yet, including those that are queued without tensors."""
        return len(self._waiting) + (self._current is not None)

    def put(self, kv: MemoryKV) -> bool:
        """Queue a chunk, and return True. Never waits.

        The chunk is dropped, and the result is False, if MAX_WAITING chunks are queued, or if the process ends. A chunk
        with which the queue would exceed `capacity_bytes` is dropped, too, unless `read_back` is set.
        """
        key = kv.header.key
        with self._changed:
            queued_kv = self._waiting.get(key)
            freed_bytes = queued_kv.nbytes if queued_kv is not None else 0
            has_room = self._queued_bytes - freed_bytes + kv.nbytes <= self.capacity_bytes
            if not has_room and self.read_back is None:
                self._drop(key, f"{self._queued_bytes} bytes are queued already")
                return False
            if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
                self._drop(key, f"{MAX_WAITING} chunks are queued already")
                return False
            if self._thread is None:
                # Not a daemon, even if a daemon calls this: one that is still inside torch when the interpreter goes
                # away aborts the process.
                thread = threading.Thread(target=self._work, name=self._name, daemon=False)
                try:
                    thread.start()  # it waits for the condition, which is held here
                except RuntimeError as error:  # the interpreter is going away
                    self._drop(key, str(error))
                    return False
                self._thread = thread
            self._queued_bytes += (kv.nbytes if has_room else 0) - freed_bytes
            self._waiting[key] = kv if has_room else None
            self._changed.notify_all()
            return True

    def peek(self, key: str) -> MemoryKV | None:
        """Return the chunk of `key` if it is queued and in memory; else None."""
        with self._changed:
            if key in self._waiting:
                return self._waiting[key]
            return self._current[1] if self._current is not None and self._current[0] == key else None

    def discard(self, key: str) -> None:
        """Remove the chunk of `key` from the queue. If it is being written, wait for that write."""
        with self._changed:
            self._forget(key)
            while self._current is not None and self._current[0] == key:
                self._changed.wait()
            self._forget(key)  # its write may have failed and put it back

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every queued chunk is written or dropped, and return True; return False after `timeout_s` seconds.

        timeout_s: None waits without a limit, also while the target does not answer.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_waiting, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds for queued writes, then drop those left. Return False if writes were left.
        The queue stays usable."""
        drained = self.flush(timeout_s)
        with self._changed:
            self._give_up_all("the store was closed")
        return drained

    def _work(self) -> None:
        while (item := self._next()) is not None:
            key, kv = item
            try:
                self._write(kv if kv is not None else self._read_again(key))
            except BackendUnreachableError:
                self._finish(key, kv, should_retry=True)
            except (RagblendError, OSError) as error:
                self._finish(key, kv, str(error))
            except BaseException as error:  # the thread must not die with the queue full
                log.exception("writing KV %s failed", key)
                self._finish(key, kv, repr(error))
            else:
                self._finish(key, kv)

    def _read_again(self, key: str) -> MemoryKV:
        kv = self.read_back(key) if self.read_back is not None else None
        if kv is None:
            raise RagblendError("it is no longer stored here")
        return kv

    def _next(self) -> tuple[str, MemoryKV | None] | None:
        """Wait for the next chunk that may be written, and return it; None when the thread should end."""
        idle_until_s = monotonic() + IDLE_S
        with self._changed:
            while True:
                wait_s = self._backoff_s() if self._waiting else idle_until_s - monotonic()
                exiting = not threading.main_thread().is_alive()
                if exiting and self._waiting:
                    self._give_up_at_s = self._give_up_at_s or monotonic() + EXIT_S
                    if wait_s > 0 or monotonic() > self._give_up_at_s:
                        self._give_up_all("the process ends")
                if not self._waiting and (exiting or wait_s <= 0):
                    self._thread = None
                    return None
                if self._waiting and wait_s <= 0:
                    self._current = self._waiting.popitem(last=False)
                    return self._current
                self._changed.wait(min(wait_s, 0.2))  # short, because the end of the main thread notifies no condition

    def _backoff_s(self) -> float:
        return max(self._pause_s(), self._retry_at_s - monotonic())

    def _finish(self, key: str, kv: MemoryKV | None, failure: str = "", *, should_retry: bool = False) -> None:
        with self._changed:
            self._current = None
            if should_retry:
                self._retry_at_s = monotonic() + RETRY_S
            if should_retry and key not in self._waiting:
                self._waiting[key] = kv  # at the back, so that a chunk that always fails does not block the others
            else:
                self._queued_bytes -= kv.nbytes if kv is not None else 0
                if failure:
                    self._drop(key, failure)
                elif not should_retry:
                    self._last_reason = ""
            self._changed.notify_all()

    def _forget(self, key: str) -> None:
        if key in self._waiting:
            kv = self._waiting.pop(key)
            self._queued_bytes -= kv.nbytes if kv is not None else 0
            self._changed.notify_all()

    def _give_up_all(self, reason: str) -> None:
        keys = list(self._waiting)
        for key in keys:
            self._forget(key)
        if keys:
            self.num_dropped += len(keys)
            log.warning("%d chunks are not written by %s: %s%s", len(keys), self._name, reason, self._fix)

    def _drop(self, key: str, reason: str) -> None:
        self.num_dropped += 1
        level = logging.INFO if reason == self._last_reason else logging.WARNING
        self._last_reason = reason
        log.log(level, "KV %s is not written by %s: %s%s", key, self._name, reason, self._fix)
