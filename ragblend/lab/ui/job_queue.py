"""One worker that does one job after another, in the order they came, and tells each one's listener how it goes.

So a time that the page shows is that of a request alone, whatever else is being asked in another tab. Knows nothing of
what the jobs do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from ragblend.config import with_flags
from ragblend.errors import RagblendError

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""A listener that has gone is noticed by then, also while nothing happens."""

Event = tuple[str, dict[str, Any]]
Work = Callable[["UiJob"], None]


class JobCancelled(BaseException):
    """Raised in a job that is to end at once. Like Ctrl-C, and for that reason no Exception."""


class JobProgress(NamedTuple):
    """What the worker is at: a job's title, a stage of it and how far that is."""

    title: str
    stage: str = ""
    done: int = 0
    total: int | None = None


class UiJob:
    """Something to do, and the events that it tells, the last of them "end". `await` them from the loop that made it.

    `is_kept`: it is done even if nobody listens any more.
    """

    def __init__(self, desk: JobQueue, work: Work, title: str, *, is_kept: bool) -> None:
        self.title = title
        self._desk, self._work, self._is_kept = desk, work, is_kept
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stop = threading.Event()

    def emit(self, event: str, **facts: Any) -> None:
        """Say something to whoever listens."""
        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, facts))

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """How far a stage is. Raises Stopped where the job is to end."""
        self.raise_if_cancelled()
        self._desk.current = JobProgress(self.title, stage, done, total)
        self.emit("progress", stage=stage, done=done, total=total)

    def raise_if_cancelled(self) -> None:
        """Raise Stopped where the job is to end."""
        if self._stop.is_set():
            raise JobCancelled

    def detach(self) -> None:
        """Nobody listens any more."""
        if not self._is_kept:
            self._stop.set()

    def cancel(self) -> None:
        """End it as soon as it can be, and whatever it is."""
        self._stop.set()

    def run(self) -> None:
        """Do it, on the worker's thread; what goes wrong is told."""
        try:
            self.raise_if_cancelled()
            self._work(self)
        except JobCancelled:
            self.emit("error", message="This was stopped. What was finished before is kept.")
        except (RagblendError, ImportError, OSError) as error:
            self.emit("error", message=with_flags(str(error)))
        except Exception as error:
            log.exception("%s failed", self.title)
            self.emit("error", message=f"{type(error).__name__}: {error}. This is a bug; the terminal has the details.")
        finally:
            self.emit("end")

    async def events(self) -> AsyncIterator[Event]:
        """Everything it tells, up to its end. "" for a while in which it told nothing."""
        try:
            name = ""
            while name != "end":
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        name, facts = await self._events.get()
                except TimeoutError:
                    name, facts = "", {}
                yield name, facts
        finally:
            self.detach()


class JobQueue:
    """The worker. `current` is what it is at, None when it has nothing to do."""

    def __init__(self) -> None:
        self.current: JobProgress | None = None
        self.is_closed = False
        self._executor = ThreadPoolExecutor(1, "ragblend-ui")
        self._jobs: list[UiJob] = []  # that which is being done, and those that wait behind it
        self._lock = threading.Lock()

    def submit(self, work: Work, title: str, *, is_kept: bool = False) -> UiJob:
        """Queue a job."""
        job = UiJob(self, work, title, is_kept=is_kept)
        with self._lock:
            self._jobs.append(job)
            if self.is_closed:
                job.cancel()
            self._emit_queue_positions()
            self._executor.submit(self._run, job)
        return job

    def close(self) -> None:
        """End what is being done and what waits, as soon as it can be. What still comes is refused."""
        self.is_closed = True
        for job in list(self._jobs):  # without the lock: this may be called in a signal handler
            job.cancel()

    def join(self) -> None:
        """Wait for the job that was being done."""
        self._executor.shutdown(wait=True)

    def _run(self, job: UiJob) -> None:
        self.current = JobProgress(job.title)
        try:
            job.run()
        finally:
            with self._lock:
                self._jobs.remove(job)
                self.current = None
                self._emit_queue_positions()

    def _emit_queue_positions(self) -> None:
        for ahead, job in enumerate(self._jobs):
            if ahead:
                job.emit("waiting", ahead=ahead, behind=self._jobs[0].title)
