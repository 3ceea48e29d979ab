"""One answer from its prefill to its last token, for the transformers engine, which decodes token by token.

The engine's loop (see `loop`) runs a `RunningAnswer` step by step; a `GenerationStream` is what the caller reads.
Depends on reports, sampling and text, not on how KV is stored or fused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ragblend.engine.decoding import AnswerText, Sampler
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.no_reuse_warnings import NoReuseWarnings
from ragblend.engine.report import BlendReport, Generation
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.loading_controller import RuleChoice
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import GenerationOptions, Mode
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun, MatchedPrompt

if TYPE_CHECKING:
    from ragblend.engine.transformers.structured_outputs import CompiledGrammar

log = logging.getLogger(__name__)

MAX_UNREAD_PIECES = 16
"""Unread texts of a stream at which its decoding pauses, so that an abandoned stream does not occupy the loop."""


@dataclass(slots=True)
class Conversation:
    """KV of one conversation so far. The caller passes it with the next turn, so that earlier turns are not prefilled
    again.

    Blended chunks keep the approximate KV from which the earlier answers were decoded. A conversation's KV is never
    stored.
    """

    token_ids: list[int] = field(default_factory=list, repr=False)
    fused: FusedKV | None = None
    num_exact: int = 0  # leading tokens whose KV is exact


class EngineKeywords(GenerationKeywords, total=False):
    """Keyword arguments of the transformers engine's `generate`, `stream` and `request`."""

    conversation: Conversation | None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with its settings. `tuning` applies in mode "blend"."""

    prompt: MatchedPrompt
    mode: Mode
    tuning: RequestTuning
    options: GenerationOptions
    conversation: Conversation | None = None
    no_probe: RequestTuning | None = None  # rule "auto": the tuning of the rule without a query probe
    grammar: CompiledGrammar | None = None

    @property
    def is_adapted(self) -> bool:
        """True if the loading controller chooses rule and ratio, or full prefill: no ratio is requested as a number."""
        return self.mode == "blend" and self.tuning.adapts_ratio

    def rule_choices(self, num_layers: int) -> list[RuleChoice]:
        """Return the rules by which the loading controller may blend the prompt, the preferred one first."""
        tunings = [self.tuning] if self.no_probe is None else [self.tuning, self.no_probe]
        return [
            RuleChoice(each.rule, each.recompute_ratio, find_rule(each.rule, num_layers).probes_before_selection)
            for each in tunings
        ]


Refinement = Generator[None, None, Tensor]
"""Refinement of a prompt's KV after the first token. It yields after each layer, and returns the logits [vocabulary] of
the answer's next token."""


@dataclass(slots=True)
class PrefillResult:
    """KV of a prompt, its last token's logits [vocabulary], and the report of the prefill."""

    fused: FusedKV
    logits: Tensor
    report: BlendReport
    num_exact: int  # leading tokens whose KV is exact
    misses: tuple[ChunkRun, ...] = ()  # runs whose chunks are not stored
    recomputed: Tensor | None = None  # positions of the chunk tokens recomputed through the last layer
    attention: Tensor | None = None  # [T] float32, the query probe's attention, if the rule runs one
    read_s: Mapping[int, float] = field(default_factory=dict)  # per placed chunk, by its first position: reading its KV
    # Refines this result after the given tokens of the answer; None if no refinement was requested, or none is needed.
    refine: Callable[[PrefillResult, Sequence[int]], Refinement] | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Next decode step of an answer: append `tokens` to `fused`, compute the logits [vocabulary] after them."""

    tokens: Sequence[int]
    fused: FusedKV


OnEnd = Callable[[PrefillResult, Generation], None]
"""Called once an answer has ended, also a cancelled one. The KV then has the answer's tokens after the prompt's."""


class AnswerLoop(Protocol):
    """The loop that runs an engine's answers (`EngineLoop`)."""

    def wake(self) -> None: ...
    def start(self, answers: Sequence[RunningAnswer]) -> None: ...
    def cancel(self, answer: RunningAnswer) -> None: ...


class DecodingEngine(Protocol):
    """What an answer needs of its engine (`TransformersEngine`)."""

    closed: bool
    context_length: int
    renderer: Renderer
    stop_ids: frozenset[int]
    notices: NoReuseWarnings

    @property
    def loop(self) -> AnswerLoop: ...
    def check_not_forked(self) -> None: ...
    def prepare_prefill(self, request: EngineRequest) -> Callable[[], PrefillResult]: ...
    def precompute_in_background(self, misses: Iterable[ChunkRun]) -> None: ...


class RunningAnswer:
    """An answer in progress inside the engine loop. The caller reads it through a GenerationStream.

    `advance` runs the answer up to its next decode step. It puts the answer's texts into `pieces`, and None at the end.
    """

    def __init__(self, engine: DecodingEngine, request: EngineRequest, on_end: OnEnd | None) -> None:
        self._engine = engine
        self._request = request
        self._on_end = on_end
        self.prefill: Callable[[], PrefillResult] | None = None  # set once its KV in remote tiers is fetched
        self.cancel_check: CancelCheck | None = None
        self.is_cancelled = False
        self.is_streamed = False  # True if its texts are read one by one
        self.ended = threading.Event()
        self.pieces: SimpleQueue[str | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.step: DecodeStep | None = None  # the step that it waits for, once it is prefilled
        self._refine: Callable[[], Refinement] | None = None  # starts a refinement after the tokens so far
        self._refinement: Refinement | None = None  # the one that runs
        self.called_s = 0.0  # `perf_counter` seconds at which it was started
        self.start_s = 0.0  # the same at which its prefill began
        self.since_s = 0.0  # `perf_counter` seconds since which it has waited for `step`
        self.waited_s = 0.0  # seconds of waiting for other answers
        report = BlendReport(request.mode, request.tuning.rule, request.tuning.recompute_ratio)
        self.result = Generation("", [], "cancelled", report)
        self._steps = self._run()

    def advance(self, logits: Tensor | BaseException | None = None) -> None:
        """Run to the next decode step or the end.

        The first call prefills; its `logits` are None. In later calls, `logits` are the result [vocabulary] of the
        decode step `step`, or the exception that computing the result raised.
        """
        if self.is_cancelled:
            self.end()
        if self.ended.is_set():
            return
        try:
            got = self._steps.throw(logits) if isinstance(logits, BaseException) else self._steps.send(logits)
            while isinstance(got, str):
                self.pieces.put(got)
                if self.cancel_check is not None and self.cancel_check(self):
                    self.end()
                    return
                got = self._steps.send(None)
            self.step, self.since_s = got, perf_counter()
        except StopIteration:
            self.end()
        except BaseException as error:
            self.end(error)

    @property
    def is_refining(self) -> bool:
        """Return True from the start of a refinement to its end. The decode step `step` is then a part of it."""
        return self._refinement is not None

    def start_refinement(self) -> None:
        """Start the refinement of an answer that waits for a decode step, if it is still to be refined."""
        if self._refine is not None and self.step is not None:
            self._refinement, self._refine = self._refine(), None

    def refine_for(self, seconds: float) -> None:
        """Run layers of the refinement for a number of seconds, at least one layer.

        After the last layer, run to the next decode step, as `advance` does. If the refinement fails, the answer is
        decoded from the KV as it is: every row of it is valid.
        """
        if self._refinement is None or self.end_if_cancelled():
            return
        start_s = perf_counter()
        self.waited_s += start_s - self.since_s
        report = self.result.report
        try:
            next(self._refinement)
            while perf_counter() - start_s < seconds:
                next(self._refinement)
            report.refine_s += perf_counter() - start_s
        except StopIteration as end:
            report.refine_s += perf_counter() - start_s
            self._refinement = None
            self.advance(end.value)
        except BaseException as error:  # of any class, as in `advance`
            log.warning("an answer is not refined, because an error stopped it: %s", error)
            self._refinement = None
        self.since_s = perf_counter()

    @property
    def is_waiting_for_reader(self) -> bool:
        """Return True if decoding has to pause, because the caller has not read enough of the answer's text."""
        is_behind = self.is_streamed and self.pieces.qsize() >= MAX_UNREAD_PIECES
        return is_behind and not self.is_cancelled and not self._engine.closed

    def end_if_cancelled(self) -> bool:
        """End the answer if its caller has cancelled it. Return True if the answer has ended."""
        if self.is_cancelled:
            self.end()
        return self.ended.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """End the answer with its text so far, and with `error` if one is given. Safe to call again."""
        if self.ended.is_set():
            return
        try:
            self._steps.close()
        except Exception as failed:  # raised by `on_end` or the other work at the end of an answer
            error = error or failed
        self.step, self.error = None, error
        self._refine = self._refinement = None  # they hold the prompt's KV
        self.pieces.put(None)
        self.ended.set()

    def _run(self) -> Generator[str | DecodeStep, Tensor | None]:
        engine, request, result = self._engine, self._request, self.result
        if engine.closed or self.prefill is None:
            return
        self.start_s = perf_counter()
        prefilled = self.prefill()
        if prefilled.refine is not None:
            self._refine = partial(prefilled.refine, prefilled, result.token_ids)
        sampler = Sampler(request.options, request.prompt.token_ids)
        guide = request.grammar.new_guide() if request.grammar is not None else None
        token = sampler.sample(prefilled.logits if guide is None else guide.mask_logits(prefilled.logits))
        result.report = report = prefilled.report
        report.match_s = request.prompt.match_s
        report.ttft_s = perf_counter() - self.called_s + report.match_s
        report.prompt_tokens = request.prompt.num_tokens
        text = AnswerText(engine.renderer, request.options.stop_strings)
        ends = engine.stop_ids
        limit = min(request.options.max_tokens, engine.context_length - request.prompt.num_tokens)
        decode_start_s = perf_counter()
        try:
            while not engine.closed:
                if token in ends:
                    result.finish_reason = "stop"
                    break
                tokens = [token] if guide is None else guide.accept_with_forced(token, limit - len(result.token_ids))
                if len(tokens) > 1:
                    sampler.record_forced(tokens[1:])
                answer_text = ""
                for token in tokens:
                    result.token_ids.append(token)
                    answer_text += text.push(token)
                    if text.stopped:
                        break
                if answer_text:
                    result.text += answer_text
                    yield answer_text
                if text.stopped or (guide is not None and guide.ended):
                    result.finish_reason = "stop"
                    break
                if len(result.token_ids) >= limit:
                    result.finish_reason = "length"
                    break
                logits = yield DecodeStep(tokens, prefilled.fused)
                assert logits is not None
                token = sampler.sample(logits if guide is None else guide.mask_logits(logits))
            if rest := text.flush():
                result.text += rest
                yield rest
            if request.mode in ("blend", "reuse") and not report.refused_reason and not engine.notices.is_settled:
                hits = [chunk.hit for chunk in report.chunks]
                engine.notices.record_lookup(request.prompt.num_tokens, hits, request.prompt.prefix_ids)
        finally:
            report.decode_s = perf_counter() - decode_start_s - self.waited_s
            report.completion_tokens = len(result.token_ids)
            if sampler.logprobs is not None:
                result.logprobs = sampler.logprobs[: len(result.token_ids)]
            if request.conversation is not None:
                # The last generated token's KV is not computed until a token follows it.
                fused, ids = prefilled.fused, request.prompt.token_ids + result.token_ids
                request.conversation.token_ids, request.conversation.fused = ids[: fused.length], fused
                is_exact = prefilled.num_exact == request.prompt.num_tokens
                request.conversation.num_exact = fused.length if is_exact else prefilled.num_exact
            if prefilled.misses:
                engine.precompute_in_background(prefilled.misses)
            if self._on_end is not None:
                self._on_end(prefilled, result)


CancelCheck = Callable[[RunningAnswer], bool]
"""Called after every piece of an answer; True ends the answer. An exception that it raises is the answer's error."""


class GenerationStream:
    """An answer in progress. Iterating yields text; `result` is complete when the iteration ends.

    The engine's loop begins to decode the answer at `start`, or at the first `next`. If the stream is iterated,
    decoding pauses while MAX_UNREAD_PIECES texts are unread. When the engine is closed, the answer ends at the next
    token with its text so far, finish reason "cancelled" and no error.
    """

    def __init__(self, engine: DecodingEngine, request: EngineRequest, on_end: OnEnd | None = None) -> None:
        self.request = request
        self._engine = engine
        self._answer = RunningAnswer(engine, request, on_end)
        self.result: Generation = self._answer.result
        self._is_started = False

    def start(self) -> None:
        """Start decoding in the engine's loop, and return at once. Safe to call again."""
        start_streams([self])

    def wait(self) -> BaseException | None:
        """Wait until the started answer has ended. Return its error, or None."""
        self._answer.is_streamed = False
        self._engine.loop.wake()
        self._answer.ended.wait()
        return self._answer.error

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._engine.check_not_forked()
        if not self._is_started:
            self._answer.is_streamed = True
            self.start()
        piece = self._answer.pieces.get()
        if self._answer.pieces.qsize() == MAX_UNREAD_PIECES - 1:  # decoding was paused
            self._engine.loop.wake()
        if piece is not None:
            return piece
        self._answer.pieces.put(None)  # for the next call
        error, self._answer.error = self._answer.error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        """Cancel the answer, and return when it has ended. The result keeps the text so far."""
        if self._is_started:
            self._engine.loop.cancel(self._answer)
        else:
            self._is_started = True
            self._answer.end()

    def __del__(self) -> None:
        self._answer.is_cancelled = True  # no reader is left


def start_streams(streams: Sequence[GenerationStream], cancel_check: CancelCheck | None = None) -> None:
    """Start the answers of `streams` together in the loop of their engine. Streams that were started are skipped.

    `cancel_check` is called after every piece of text; if it returns True, the answer ends.
    """
    fresh = [stream for stream in streams if not stream._is_started]
    for stream in fresh:
        stream._engine.check_not_forked()
        stream._answer.cancel_check = cancel_check
        stream._answer.called_s = perf_counter()
        stream._answer.prefill = stream._engine.prepare_prefill(stream.request)  # the loop does not wait for this
    for stream in fresh:
        stream._is_started = True
    if fresh:
        fresh[0]._engine.loop.start([stream._answer for stream in fresh])
