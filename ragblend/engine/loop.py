"""Engine loop: one thread runs all work of a model. Calls, prefills and decode steps alternate, so that no request
waits for a whole answer of another.

Requests, streams, batches, ingestion and backfill share its queue. Read `EngineLoop._run` first. Depends on answers and
decode steps, not on models, KV or text.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from ragblend.engine.generation import DecodeStep, RunningAnswer
from ragblend.errors import EngineClosedError
from ragblend.option_fields import int_at_least

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NUM_SEQS = 8
"""Default of the most answers that are decoded together."""

REFINE_SLICE_S = 0.02
"""Seconds of refinement between two decode steps of other answers. The last layer of a slice may exceed them."""


class EngineLoop(Executor):
    """Executor of all work with one model, on a single thread. Safe to share between threads.

    `decode` takes the steps of several answers and returns the logits [vocabulary] of each. At most `max_num_seqs`
    answers are decoded together. The error of one answer does not affect the others. The thread starts when the first
    work is queued. When the interpreter exits, it waits until all queued work has ended.

    The refinement of an answer starts when the loop has no other work. Work that arrives later runs between its slices.
    """

    def __init__(
        self, decode: Callable[[Sequence[DecodeStep]], Sequence[Tensor]], max_num_seqs: int = MAX_NUM_SEQS
    ) -> None:
        self.max_num_seqs: int = int_at_least(1).validate("max_num_seqs", max_num_seqs)
        self._decode = decode
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-engine")
        self._changed = threading.Condition()  # guards what follows
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._waiting: deque[RunningAnswer] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread_id: int | None = None
        self._running: list[RunningAnswer] = []  # used by the loop's thread alone
        self._known_errors: set[str] = set()

    def submit(self, function: Callable[..., T], /, *args: Any, **keywords: Any) -> Future[T]:
        """Queue a call to run between two decode steps. Raises EngineClosedError once the loop is shut down."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; load it again")
            self._calls.append((future, partial(function, *args, **keywords)))
            self.wake()
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop's thread; return its result or raise its error."""
        if self._is_own_thread():
            return function()
        return self.submit(function).result()

    def start(self, answers: Sequence[RunningAnswer]) -> None:
        """Queue answers and return at once. A closed loop ends them with their text so far."""
        with self._changed:
            if not self._is_closed:
                self._waiting.extend(answers)
                self.wake()
                return
        for answer in answers:
            answer.end()

    def wait_for_capacity(self) -> None:
        """Wait until fewer than `max_num_seqs` answers wait for their prefill."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self.max_num_seqs)

    def cancel(self, answer: RunningAnswer) -> None:
        """End a started answer at its next token, and return when it has ended."""
        answer.is_cancelled = True
        if answer.ended.is_set() or self._process != os.getpid():  # in a forked process the loop's thread is missing
            return
        with self._changed:
            is_waiting = answer in self._waiting
            if is_waiting:
                self._waiting.remove(answer)
            self.wake()
        if is_waiting:
            answer.end()
        elif not self._is_own_thread():
            answer.ended.wait()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work. If `wait`, return when all queued work has ended; `cancel_futures` has no effect."""
        with self._changed:
            self._is_closed = True
            self.wake()
        self._executor.shutdown(wait=wait and not self._is_own_thread())

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread_id

    def wake(self) -> None:
        """Let the loop continue if it is idle. Called when work was added, or when a paused answer may continue."""
        with self._changed:
            if self._is_running:
                return
            self._is_running = True
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # executors accept no work while the interpreter ends, but it still waits for threads
            threading.Thread(target=self._run, daemon=False).start()

    def _run(self) -> None:
        """Run one call, the prefills for which there is capacity, a slice of refinement and one decode step; repeat
        until no work is left.
        """
        while True:
            with self._changed:
                call = self._calls.popleft() if self._calls else None
                ready = [answer for answer in self._running if not answer.is_waiting_for_reader][: self.max_num_seqs]
                num_free = min(self.max_num_seqs - len(ready), len(self._waiting))
                starting = [self._waiting.popleft() for _ in range(num_free)]
                self._is_running = bool(call or ready or starting)
                self._thread_id = threading.get_ident() if self._is_running else None
                self._changed.notify_all()
            if call is not None:
                run_call(*call)
            for answer in starting:
                answer.advance()
            if running := [*ready, *(answer for answer in starting if answer.step is not None)]:
                self._refine(running)
                self._decode_together([answer for answer in running if not answer.is_refining])
            others = [answer for answer in self._running if answer not in ready]
            self._running = [answer for answer in (*others, *ready, *starting) if answer.step is not None]
            if not self._is_running:
                return

    def _refine(self, answers: Sequence[RunningAnswer]) -> None:
        """Run a slice of the open refinements. Start one if its answer is the only work."""
        with self._changed:
            has_other_work = len(answers) > 1 or self._calls or self._waiting
        if not has_other_work:
            answers[0].start_refinement()
        for answer in answers:
            answer.refine_for(REFINE_SLICE_S)

    def _decode_together(self, answers: Sequence[RunningAnswer]) -> None:
        """Compute the logits of every answer in one step and sample its next token."""
        running = [answer for answer in answers if not answer.end_if_cancelled()]
        start_s = perf_counter()
        for answer in running:
            answer.waited_s += start_s - answer.since_s
        results = self._logits_or_errors([answer.step for answer in running if answer.step is not None])
        for answer, logits in zip(running, results, strict=True):
            answer.advance(logits)
        end_s = perf_counter()
        for answer in running:
            answer.since_s = end_s  # sampling the tokens of the other answers is a part of the step

    def _logits_or_errors(self, steps: Sequence[DecodeStep]) -> Sequence[Tensor | BaseException]:
        """Return the logits of each step, or its error. If computing them together fails, compute each step alone."""
        if not steps:
            return []
        try:
            return self._decode(steps)
        except BaseException as error:  # of any class: without this thread every caller would wait forever
            if len(steps) == 1:
                return [error]
            level = logging.DEBUG if str(error) in self._known_errors else logging.WARNING  # once, not at every step
            self._known_errors.add(str(error))
            log.log(level, "decoding %d answers together failed (%s); decoding each alone", len(steps), error)
            return [each for step in steps for each in self._logits_or_errors([step])]


def run_call(future: Future[T], function: Callable[[], T]) -> None:
    """Call `function`, and set its result or its error in `future`. Does nothing if the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
