"""Shadow comparisons: full prefill of a share of live requests, compared with their blended answers.

They run on a separate thread after an answer has ended, so no answer waits for them. Read `Shadow.sample` first.
Depends on streams and reports; each backend passes the function that runs its full prefill.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from ragblend.engine.api import Stream
from ragblend.engine.report import BlendReport, Generation, ShadowCounters, ShadowReport
from ragblend.options import SHADOW

log = logging.getLogger(__name__)

MAX_WAITING = 8  # waiting comparisons; a busy server drops further ones, because full prefills are slow


class Shadow:
    """Runs full prefill for a random sample of requests, compares the answers, and counts the results. Thread-safe.

    `share`: the share of requests to sample, from 0 (none) to 1 (all); UsageError for other values. Comparisons run one
    at a time.
    """

    def __init__(self, share: float) -> None:
        self.share = SHADOW.validate("shadow", share)
        self._counters = ShadowCounters(share)
        self._random = random.Random()
        self._lock = threading.Lock()
        self._pending: list[Future[None]] = []
        self._closed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-shadow") if share else None

    @property
    def counters(self) -> ShadowCounters:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def sample(self, compare: Callable[[], ShadowReport], report: BlendReport) -> None:
        """Choose at random, with probability `share`, whether to compare a request whose answer has ended.

        If so, `compare` runs later, and its result is written to `report.shadow`. A full queue drops the comparison.
        """
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

    def sample_vllm_answer(self, stream_full: Callable[[], Stream], answer: Generation) -> None:
        """Call `sample` for a finished `answer` of vLLM: compare its tokens with those of full prefill's answer.

        `stream_full` requests the answer to the same prompt by full prefill. `answer` must be greedy and complete:
        vLLM returns tokens without their distribution, so other answers cannot be compared.
        """

        def compare() -> ShadowReport:
            stream = stream_full()
            same = yields_same_tokens(stream, answer)
            return ShadowReport(stream.result.token_ids[:1] == answer.token_ids[:1], None, same)

        self.sample(compare, answer.report)

    def flush(self) -> None:
        """Wait for the comparisons sampled so far. Raises nothing: failures are counted and logged."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def close(self) -> None:
        """Finish the running comparison, if any, and drop the waiting ones."""
        with self._lock:
            self._closed = True  # an answer may still be streaming
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _work(self, compare: Callable[[], ShadowReport], report: BlendReport) -> None:
        try:
            comparison = compare()
        except Exception as error:  # the answer is complete; a failed comparison must not end the process
            log.warning("a shadow comparison failed: %s: %s", type(error).__name__, error)
            with self._lock:
                self._counters.num_failed += 1
            return
        report.shadow = comparison
        with self._lock:
            counters = self._counters
            counters.num_shadowed += 1
            counters.num_first_tokens_same += comparison.first_token_agrees
            if comparison.first_token_kl is not None:
                counters.num_kl += 1
                counters.kl_sum += comparison.first_token_kl
            if comparison.answers_identical is not None:
                counters.num_answers += 1
                counters.num_answers_same += comparison.answers_identical


def yields_same_tokens(stream: Stream, answer: Generation) -> bool:
    """Return True if `stream` yields the tokens of `answer`. Closes the stream at the first different token."""
    for _ in stream:
        if any(a != b for a, b in zip(stream.result.token_ids, answer.token_ids, strict=False)):
            stream.close()
            return False
    return stream.result.token_ids == answer.token_ids and stream.result.finish_reason == answer.finish_reason
