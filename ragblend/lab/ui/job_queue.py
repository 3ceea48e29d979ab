"""One worker thread that runs jobs one at a time, in order, and sends each job's events to its listener.

One job runs at a time, so that the times on the page do not include work for another tab. Does not depend on the work
of the jobs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ragblend.config import arguments_to_flags
from ragblend.errors import RagblendError

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Seconds between events: sending one detects that the listener has gone."""

Event = tuple[str, dict[str, Any]]
Work = Callable[["UiJob"], None]


class JobCancelled(BaseException):
    """Raised inside a job that was cancelled. Like KeyboardInterrupt, it does not derive from Exception."""


class UiJob:
    """One job of a JobQueue: the function `work`, which runs in the queue's thread, and the events that it emits.

    `work` is called with the job. `title` describes it on the page. The last event is "end". Read the events in the
    event loop that created the job. `is_kept`: True runs the job to its end even if the page in the browser is closed.
    """

    def __init__(self, queue: JobQueue, work: Work, title: str, *, is_kept: bool) -> None:
        self.title = title
        self._queue, self._work, self._is_kept = queue, work, is_kept
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stop = threading.Event()

    def emit(self, event: str, **facts: Any) -> None:
        """Send an event to the job's listener, the page. `facts`: the event's content, as JSON values."""
        with suppress(RuntimeError):  # the loop is closed, so nothing listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, facts))

    def report_progress(self, stage: str, done: int, total: int | None) -> None:
        """Report that `done` of the `total` steps of a stage are finished. `total`: None if the number is unknown.

        Raises JobCancelled if the job was cancelled.
        """
        self.raise_if_cancelled()
        facts = {"stage": stage, "done": done, "total": total}
        self._queue.current = {"title": self.title, **facts}
        self.emit("progress", **facts)

    def raise_if_cancelled(self) -> None:
        """Raise JobCancelled if the job was cancelled."""
        if self._stop.is_set():
            raise JobCancelled

    def cancel_unless_kept(self) -> None:
        """Cancel the job unless `is_kept` is True. Called when the page has closed its connection."""
        if not self._is_kept:
            self._stop.set()

    def cancel(self) -> None:
        """Cancel the job, even if `is_kept` is True."""
        self._stop.set()

    def run(self) -> None:
        """Run `work`, emit its error if it raises one, and then emit "end". Called in the queue's thread."""
        try:
            self.raise_if_cancelled()
            self._work(self)
        except JobCancelled:
            self.emit("error", message="This was stopped. Results finished before are kept.")
        except (RagblendError, ImportError, OSError) as error:
            self.emit("error", message=arguments_to_flags(str(error)))
        except Exception as error:
            log.exception("%s failed", self.title)
            self.emit("error", message=f"{type(error).__name__}: {error}. This is a bug; the terminal has the details.")
        finally:
            self.emit("end")

    async def events(self) -> AsyncIterator[Event]:
        """Yield the job's events up to "end". An event named "" follows `HEARTBEAT_S` seconds without an event."""
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
            self.cancel_unless_kept()


class JobQueue:
    """Queue of jobs and the thread that runs one at a time.

    `current`: "title", "stage", "done" and "total" of the running job, as JSON values; None if no job runs.
    """

    def __init__(self) -> None:
        self.current: dict[str, Any] | None = None
        self.is_closed = False
        self._executor = ThreadPoolExecutor(1, "ragblend-ui")
        self._jobs: list[UiJob] = []  # the running job, then those that wait
        self._lock = threading.Lock()

    def submit(self, work: Work, title: str, *, is_kept: bool = False) -> UiJob:
        """Queue a job and return it. After `close`, the job is cancelled at once."""
        job = UiJob(self, work, title, is_kept=is_kept)
        with self._lock:
            self._jobs.append(job)
            if self.is_closed:
                job.cancel()
            self._emit_queue_positions()
            self._executor.submit(self._run, job)
        return job

    def close(self) -> None:
        """Cancel the running job, the waiting jobs and all jobs that are submitted later."""
        self.is_closed = True
        for job in list(self._jobs):  # without the lock, because a signal handler calls this
            job.cancel()

    def wait_for_jobs(self) -> None:
        """Wait until all jobs have ended. No job can be submitted afterwards.

        Call `close` first, so that waiting jobs end without running.
        """
        self._executor.shutdown(wait=True)

    def _run(self, job: UiJob) -> None:
        self.current = {"title": job.title, "stage": "", "done": 0, "total": None}
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
