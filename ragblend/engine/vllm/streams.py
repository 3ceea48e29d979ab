"""Base class of answer streams, and the check of options, for the engines over vLLM in this process and over HTTP."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from time import perf_counter

from ragblend.engine.fusion.check_layers import validate_selection
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import BlendReport, FinishReason, Generation
from ragblend.errors import UsageError
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import GenerationOptions

log = logging.getLogger(__name__)


def checked_options(options: GenerationKeywords) -> GenerationOptions:
    """Return `options` as a GenerationOptions object.

    Raises UsageError for invalid values, and for logprobs, which vLLM engines lack.
    """
    checked = GenerationOptions(**options)
    if checked.logprobs:
        raise UsageError("logprobs are only available with backend='transformers'; leave them out for vLLM")
    rule = find_rule(checked.rule)
    if checked.rule != "auto":  # the server's rule may measure deviations
        validate_selection(rule, checked)
    return checked


def finish_reason(reason: str | None) -> FinishReason:
    """Return a Generation's finish reason for vLLM's `reason`: "stop" and "length" unchanged, else "cancelled"."""
    return "length" if reason == "length" else "stop" if reason == "stop" else "cancelled"


class AnswerStream(ABC):
    """Answer in progress. Iterating yields text; `result` is complete when the iteration ends."""

    def __init__(self, options: GenerationOptions) -> None:
        self._start_s = perf_counter()
        ratio = options.recompute_ratio
        report = BlendReport(options.mode, options.rule, ratio if isinstance(ratio, int | float) else 0.0)
        self.result = Generation("", [], "cancelled", report)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def finish(self) -> Generation:
        """Iterate to the end of the answer, and return it."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Abort the request. The result keeps the text so far."""
        self._pieces.close()

    @abstractmethod
    def _run(self) -> Generator[str]:
        """Send the request, and yield the text of the answer."""

    def _set_report(self, received: BlendReport | None, num_prompt: int, ttft_s: float, first_s: float) -> None:
        """Set the result's report, `received` from the connector if not None, with token counts and times.

        `first_s`: the time of the first token, on the clock of `perf_counter`.
        """
        if received is not None:
            self.result.report = received
        report = self.result.report
        report.prompt_tokens, report.completion_tokens = num_prompt, len(self.result.token_ids)
        report.ttft_s, report.decode_s = ttft_s, perf_counter() - first_s
        if report.failed:
            log.warning("the prompt was prefilled in full: %s", report.refused_reason)
