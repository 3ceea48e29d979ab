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

from ragblend.errors import RagblendError

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""A listener that has gone is noticed by then, also while nothing happens."""

Event = tuple[str, dict[str, Any]]
Work = Callable[["Job"], None]


class Stopped(BaseException):
    """Raised in a job that is to end at once. Like Ctrl-C, and for that reason no Exception."""


class Progress(NamedTuple):
    """What the worker is at: a job's title, a stage of it and how far that is."""

    title: str
    stage: str = ""
    done: int = 0
    total: int | None = None


class Job:
    """Something to do, and the events that it tells, the last of them "end". `await` them from the loop that made it.

    `is_kept`: it is done even if nobody listens any more.
    """

    def __init__(self, desk: Desk, work: Work, title: str, *, is_kept: bool) -> None:
        self.title = title
        self._desk, self._work, self._is_kept = desk, work, is_kept
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stop = threading.Event()

    def tell(self, event: str, **facts: Any) -> None:
        """Say something to whoever listens."""
        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, facts))

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """How far a stage is. Raises Stopped where the job is to end."""
        self.check()
        self._desk.now = Progress(self.title, stage, done, total)
        self.tell("progress", stage=stage, done=done, total=total)

    def check(self) -> None:
        """Raise Stopped where the job is to end."""
        if self._stop.is_set():
            raise Stopped

    def leave(self) -> None:
        """Nobody listens any more."""
        if not self._is_kept:
            self._stop.set()

    def stop(self) -> None:
        """End it as soon as it can be, and whatever it is."""
        self._stop.set()

    def run(self) -> None:
        """Do it, on the worker's thread; what goes wrong is told."""
        try:
            self.check()
            self._work(self)
        except Stopped:
            self.tell("error", message="This was stopped. What was finished before is kept.")
        except (RagblendError, ImportError, OSError) as error:
            self.tell("error", message=str(error))
        except Exception as error:
            log.exception("%s failed", self.title)
            self.tell("error", message=f"{type(error).__name__}: {error}. This is a bug; the terminal has the details.")
        finally:
            self.tell("end")

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
            self.leave()


class Desk:
    """The worker. `now` is what it is at, None when it has nothing to do."""

    def __init__(self) -> None:
        self.now: Progress | None = None
        self.is_closed = False
        self._executor = ThreadPoolExecutor(1, "ragblend-ui")
        self._jobs: list[Job] = []  # that which is being done, and those that wait behind it
        self._lock = threading.Lock()

    def do(self, work: Work, title: str, *, is_kept: bool = False) -> Job:
        """Queue a job."""
        job = Job(self, work, title, is_kept=is_kept)
        with self._lock:
            self._jobs.append(job)
            if self.is_closed:
                job.stop()
            self._tell_turns()
            self._executor.submit(self._run, job)
        return job

    def close(self) -> None:
        """End what is being done and what waits, as soon as it can be. What still comes is refused."""
        self.is_closed = True
        for job in list(self._jobs):  # without the lock: this may be called in a signal handler
            job.stop()

    def join(self) -> None:
        """Wait for the job that was being done."""
        self._executor.shutdown(wait=True)

    def _run(self, job: Job) -> None:
        self.now = Progress(job.title)
        try:
            job.run()
        finally:
            with self._lock:
                self._jobs.remove(job)
                self.now = None
                self._tell_turns()

    def _tell_turns(self) -> None:
        for ahead, job in enumerate(self._jobs):
            if ahead:
                job.tell("waiting", ahead=ahead, behind=self._jobs[0].title)
