"""Continuous batching: the answers that are being made at the same time take their decode steps together.

A thread that wants answers brings their streams to `ContinuousBatch.run_until_done` and waits there. One of those that
wait drives the steps of all; when its own answers have ended, another goes on. Each prompt is prefilled by the thread
that brought it and takes part from the next step on; answers that end leave. Knows streams and steps; nothing of
models, KV or text.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from ragblend.engine.generation import DecodeStep, GenerationStream
from ragblend.errors import RagblendError
from ragblend.options import int_at_least

log = logging.getLogger(__name__)

MAX_NUM_SEQS = 8
"""Answers that are decoded together, unless `load_engine` is told another number."""

CancelCheck = Callable[[GenerationStream], bool]
"""Asked after every piece of an answer whether that one is to be broken off; what it raises is the answer's error."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One answer in the making."""

    stream: GenerationStream
    cancel_check: CancelCheck | None
    step: DecodeStep | None = None  # what it waits for, once it is prefilled
    since_s: float = 0.0  # from when on it has waited for that step to begin
    is_done: bool = False
    is_dropped: bool = False  # who brought it is gone
    error: BaseException | None = None

    def advance(self, logits: Tensor | BaseException | None = None) -> None:
        """To its next step, or to its end."""
        try:
            got = self.stream.advance(logits)
            while isinstance(got, str):
                if self.cancel_check is not None and self.cancel_check(self.stream):
                    return self.end()
                got = self.stream.advance()
            self.step, self.since_s = got, perf_counter()
        except StopIteration:
            self.step, self.is_done = None, True
        except Exception as error:
            self.end(error)
        except BaseException as error:  # an interrupt is for the thread that it came in, which may not be this answer's
            self.end(
                RagblendError(f"the answer was broken off by a {type(error).__name__} in another thread; ask again")
            )
            raise

    def end(self, error: BaseException | None = None) -> None:
        """Break it off: it is over, as far as it came."""
        self.stream.close()
        self.step, self.error, self.is_done = None, error, True


class ContinuousBatch:
    """Runs the decode steps of at most `max_num_seqs` answers together, by `decode`, whoever asked for them.

    `decode` takes steps and returns the logits [vocabulary] of each. One answer's error, what its watch raises
    included, leaves the others as they are. Safe to share between threads.
    """

    def __init__(
        self, decode: Callable[[Sequence[DecodeStep]], Sequence[Tensor]], max_num_seqs: int = MAX_NUM_SEQS
    ) -> None:
        self.max_num_seqs: int = int_at_least(1).validate("max_num_seqs", max_num_seqs)
        self._decode = decode
        self._changed = threading.Condition()
        self._running: list[_Sequence] = []  # those that wait for a step
        self._num_taken = 0  # places that are taken, by those that are being prefilled too
        self._num_starting = 0  # of them, those that are being prefilled
        self._is_driven = False
        self._step_s = 0.0  # what the last step took
        self._known_errors: set[str] = set()

    def run_until_done(
        self, streams: Sequence[GenerationStream], cancel_check: CancelCheck | None = None
    ) -> list[BaseException | None]:
        """Take all of `streams` to their ends, beside whatever else is being answered; the error of each."""
        members = [_Sequence(stream, cancel_check) for stream in streams]
        todo = deque(members)  # to be prefilled, here and by this thread
        try:
            while todo or not all(member.is_done for member in members):
                with self._changed:
                    self._changed.wait_for(
                        lambda: (
                            (todo and self._num_taken < self.max_num_seqs)
                            or (self._running and not self._is_driven)
                            or (not todo and all(member.is_done for member in members))
                        )
                    )
                    starts = bool(todo) and self._num_taken < self.max_num_seqs
                    self._num_taken += starts
                    self._num_starting += starts
                if starts:
                    self._start(todo.popleft())
                else:
                    self._run_steps(members, todo)
        except BaseException:
            with self._changed:
                for member in members:
                    member.is_dropped = True
                if not self._is_driven:
                    self._retire_finished()
                    self._changed.notify_all()
            raise
        return [member.error for member in members]

    def _start(self, member: _Sequence) -> None:
        """Prefill it; it takes part from the next step on."""
        try:
            member.advance()
        finally:
            with self._changed:
                self._num_starting -= 1
                if member.step is not None:
                    self._running.append(member)
                else:
                    self._num_taken -= 1
                self._changed.notify_all()

    def _run_steps(self, members: Sequence[_Sequence], todo: Sequence[_Sequence]) -> None:
        """Step after step of all that run, until all `members` have ended, or the next of `todo` has a place."""
        with self._changed:
            if self._is_driven:  # somebody was quicker
                return
            self._is_driven = True
        try:
            while todo or not all(member.is_done for member in members):
                with self._changed:
                    # Who is being prefilled takes part soon: a short wait makes fewer steps, each as dear as with it.
                    self._changed.wait_for(lambda: not self._num_starting, timeout=self._step_s)
                    self._retire_finished()
                    running = list(self._running)
                    if not running or (todo and self._num_taken < self.max_num_seqs):
                        return
                self._step(running)
        finally:
            with self._changed:
                self._is_driven = False
                self._changed.notify_all()

    def _step(self, running: Sequence[_Sequence]) -> None:
        """One token, at least, of each."""
        start_s = perf_counter()
        for member in running:
            member.stream.waited_s += start_s - member.since_s
        results = self._logits_or_errors([member.step for member in running if member.step is not None])
        self._step_s = perf_counter() - start_s
        interrupt: BaseException | None = None
        for member, logits in zip(running, results, strict=True):
            try:
                member.advance(logits)
            except BaseException as error:
                interrupt = error  # the others' KV has its token already: they go on from there
        end_s = perf_counter()
        for member in running:
            member.since_s = end_s  # what choosing the others' tokens took is part of the step
        if any(member.is_done for member in running):
            with self._changed:
                self._retire_finished()
                self._changed.notify_all()
        if interrupt is not None:
            raise interrupt

    def _retire_finished(self) -> None:
        """Give away the places of those that have ended, and of those that nobody waits for any more."""
        for member in self._running:
            if member.is_dropped and not member.is_done:
                member.end()
        count = len(self._running)
        self._running = [member for member in self._running if not member.is_done]
        self._num_taken -= count - len(self._running)

    def _logits_or_errors(self, steps: Sequence[DecodeStep]) -> Sequence[Tensor | BaseException]:
        """The logits of each step; where they cannot be had together, each by itself, or its error."""
        try:
            return self._decode(steps)
        except Exception as error:
            if len(steps) == 1:
                return [error]
            level = logging.DEBUG if str(error) in self._known_errors else logging.WARNING  # once, not at every step
            self._known_errors.add(str(error))
            log.log(level, "%d answers cannot be decoded together (%s); one after another", len(steps), error)
            return [each for step in steps for each in self._logits_or_errors([step])]
