"""Full prefill beside a share of live requests: how often is the blended answer the one full prefill would give?

Runs on a thread of its own once an answer has ended, so the answer itself never waits. Read `Shadow.submit` first.
Knows streams and reports. Knows nothing about backends; each brings what runs its full prefill.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ragblend.engine.agreement import ShadowCounters, ShadowReport
from ragblend.engine.api import Stream
from ragblend.engine.fusion.fidelity import first_token_kl
from ragblend.engine.generation import EngineRequest, GenerationStream, PrefillResult
from ragblend.engine.report import BlendReport, Generation
from ragblend.options import SHADOW

if TYPE_CHECKING:
    from ragblend.engine.transformers.engine import TransformersEngine

log = logging.getLogger(__name__)

MAX_WAITING = 8  # full prefills are slow: beyond these a busy server drops them instead of falling ever further behind


class Shadow:
    """Chooses requests, runs their comparisons one at a time, and counts. Safe to share between threads.

    `share`: of the requests, 0 (off) to 1 (all). `seed` makes the choice repeatable. Raises UsageError outside.
    """

    def __init__(self, share: float = 0.0, seed: int | None = None) -> None:
        self.share = SHADOW.validate("shadow", share)
        self._counters = ShadowCounters(share)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._pending: list[Future[None]] = []
        self._closed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-shadow") if share else None

    @property
    def counters(self) -> ShadowCounters:
        """The counts so far, a copy."""
        with self._lock:
            return replace(self._counters)

    def submit(self, compare: Callable[[], ShadowReport], report: BlendReport) -> None:
        """Told that an answer has ended. If chosen, `compare` runs later, and its finding becomes `report.shadow`."""
        if self._executor is None:
            return
        with self._lock:
            self._counters.num_requests += 1
            if self._random.random() >= self.share:
                return
            self._pending = [future for future in self._pending if not future.done()]
            if len(self._pending) >= MAX_WAITING or self._closed:
                self._counters.num_dropped += 1
                return
            self._pending.append(self._executor.submit(self._work, compare, report))

    def submit_repeat(self, repeat: Callable[[], Stream], answer: Generation) -> None:
        """Told that a greedy and complete answer of vLLM has ended, which `repeat` asks for again by full prefill.

        Others cannot be compared: vLLM returns tokens without their distribution.
        """

        def compare() -> ShadowReport:
            stream = repeat()
            same = same_tokens(stream, answer)
            return ShadowReport(stream.result.token_ids[:1] == answer.token_ids[:1], None, same)

        self.submit(compare, answer.report)

    def flush(self) -> None:
        """Wait for the comparisons that were chosen so far. Raises nothing: failures are counted and logged."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def close(self) -> None:
        """Finish the comparison under way, if there is one, and drop those that wait."""
        with self._lock:
            self._closed = True  # an answer may still be streaming
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _work(self, compare: Callable[[], ShadowReport], report: BlendReport) -> None:
        try:
            found = compare()
        except Exception as error:  # an answer was given long ago; measuring it must not take the process down
            log.warning("full prefill beside a request failed: %s: %s", type(error).__name__, error)
            with self._lock:
                self._counters.num_failed += 1
            return
        report.shadow = found
        with self._lock:
            counters = self._counters
            counters.num_shadowed += 1
            counters.num_first_tokens_same += found.first_token_agrees
            if found.first_token_kl is not None:
                counters.num_kl += 1
                counters.kl_sum += found.first_token_kl
            if found.answers_identical is not None:
                counters.num_answers += 1
                counters.num_answers_same += found.answers_identical


def compare_with_full(
    engine: TransformersEngine, request: EngineRequest, logits: Tensor, answer: Generation
) -> ShadowReport:
    """Run `request` by full prefill beside its `answer`, whose first token came from `logits` [vocabulary].

    The answers are compared where both are greedy and `answer` was not broken off; otherwise only the first token is.
    """
    comparable = request.options.temperature == 0 and answer.finish_reason != "cancelled"
    options = request.options if comparable else replace(request.options, max_tokens=1)
    kept: list[Tensor] = []

    def keep(prefilled: PrefillResult, _: Generation) -> None:
        kept.append(prefilled.logits)

    full = replace(request, mode="full", conversation=None, options=options)
    same = same_tokens(GenerationStream(engine, full, keep), answer)
    return ShadowReport(
        int(kept[0].argmax()) == int(logits.argmax()), first_token_kl(kept[0], logits), same if comparable else None
    )


def same_tokens(stream: Stream, answer: Generation) -> bool:
    """Whether `stream` gives `answer`, token for token. Ends it at the first token that differs."""
    for _ in stream:
        if not _has_same_prefix(stream.result.token_ids, answer.token_ids):
            stream.close()
            return False
    return stream.result.token_ids == answer.token_ids and stream.result.finish_reason == answer.finish_reason


def _has_same_prefix(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a == b for a, b in zip(first, second, strict=False))
