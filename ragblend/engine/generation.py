"""One request from its first logits to its last word, for engines that decode token by token themselves.

`GenerationStream` drives an engine's `prefill` and `decode_step`; or somebody else makes its steps beside those of
others, see `batching`. Knows reports, sampling and text; nothing of how
KV is stored or fused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from torch import Tensor

from ragblend.engine.decoding import Sampler, StopScanner
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.report import BlendReport, Generation, TokenLogprob
from ragblend.engine.tuning.calibration import RuleFit
from ragblend.errors import RagblendError
from ragblend.options import GenerationKeywords, GenerationOptions, Mode
from ragblend.prompt.match import ChunkRun, MatchedPrompt
from ragblend.prompt.render import Renderer
from ragblend.prompt.text_stream import TextStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Conversation:
    """KV of one conversation so far, so that earlier turns are an exact prefix of the next. Held by the caller.

    It may hold fused, hence approximate, KV: exact with respect to this conversation, and never stored.
    """

    token_ids: list[int] = field(default_factory=list)
    fused: FusedKV | None = None


class EngineKeywords(GenerationKeywords, total=False):
    """Keyword arguments of the transformers engine's `generate`, `stream` and `request`; see there."""

    conversation: Conversation | None


class TokenConstraint(Protocol):
    """Holds one answer to a grammar, token by token."""

    ended: bool  # the answer is complete, and nothing may follow

    def mask_logits(self, logits: Tensor) -> Tensor: ...  # [vocabulary], what may not come next at minus infinity
    def accept_token(
        self, token: int, max_tokens: int
    ) -> list[int]: ...  # it, and up to `room` in all that can only follow it


class Grammar(Protocol):
    """What answers are held to: one grammar, a guide for each answer."""

    def guide(self) -> TokenConstraint: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and how it is answered: `options` are what was asked for, mode, rule and ratio what is to run."""

    prompt: MatchedPrompt
    mode: Mode
    rule: str
    ratio: float
    options: GenerationOptions
    conversation: Conversation | None = None
    fit: RuleFit | None = None  # what was calibrated for the prompt's prefix and the rule
    adapts_ratio: bool = (
        False  # no ratio was asked for: `ratio` is the least, to be raised where recompute costs no time
    )
    grammar: Grammar | None = None

    @property
    def calibrated(self) -> RuleFit | None:
        """The fit, if it is of the rule that this request runs."""
        applies = self.fit is not None and self.rule in ("auto", self.fit.rule)
        return self.fit if applies else None

    def predicted_agreement(self, ratio: float) -> float | None:
        """What the calibration expects of an answer with the share `ratio` recomputed; None where it says nothing."""
        if self.calibrated is None or self.mode not in ("blend", "reuse"):
            return None
        return self.calibrated.agreement_at(ratio)


@dataclass(slots=True)
class PrefillResult:
    """The KV of a prompt, its last token's logits [vocabulary], and what it took."""

    fused: FusedKV
    logits: Tensor
    report: BlendReport
    misses: tuple[ChunkRun, ...] = ()  # runs whose chunks are not stored
    recomputed: Tensor | None = None  # positions of the chunk tokens recomputed through the last layer
    attention: Tensor | None = None  # [T] float32, where the question looked, if the rule asked it
    read_s: Mapping[int, float] = field(default_factory=dict)  # per placed chunk, by its first position: reading its KV


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a stream waits for: the logits [vocabulary] that follow `tokens`, which are to go behind `fused`."""

    tokens: Sequence[int]
    fused: FusedKV


class LookupObserver(Protocol):
    """Wants to know which chunks of an answered prompt were stored."""

    def record_lookup(self, prompt: MatchedPrompt, hits: Sequence[bool]) -> None: ...


class DecodingEngine(Protocol):
    """What a GenerationStream needs of its engine. Every call may wait for the other requests' turn."""

    @property
    def renderer(self) -> Renderer: ...
    @property
    def context_length(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def check_process(self) -> None: ...
    @property
    def notices(self) -> LookupObserver: ...
    def prefill(self, request: EngineRequest) -> PrefillResult: ...
    def decode_step(self, tokens: Sequence[int], fused: FusedKV) -> Tensor: ...
    def stop_ids(self) -> frozenset[int]: ...
    def backfill(self, misses: Sequence[ChunkRun]) -> None: ...


OnEnd = Callable[[PrefillResult, Generation], None]
"""Told once an answer has ended, cancelled ones too. The KV has the answer's tokens behind the prompt's by then."""


class GenerationStream:
    """One answer in the making. Iterating yields text; `result` is complete when the iteration ends.

    When the engine is closed it ends, at the next token, with what there is: "cancelled", and no error.
    """

    def __init__(self, engine: DecodingEngine, request: EngineRequest, on_end: OnEnd | None = None) -> None:
        self._engine = engine
        self._request = request
        self._on_end = on_end
        self._pieces = self._run()
        self.start_s = 0.0  # when its turn came
        self.waited_s = 0.0  # for others, with its next token chosen
        report = BlendReport(request.mode, request.rule, request.ratio)
        self.result = Generation("", [], "cancelled", report)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._engine.check_process()
        got = self.advance()
        while isinstance(got, DecodeStep):
            try:
                found: Tensor | BaseException = self._engine.decode_step(got.tokens, got.fused)
            except BaseException as error:
                found = error
            got = self.advance(found)
        return got

    def advance(self, logits: Tensor | BaseException | None = None) -> str | DecodeStep:
        """To the next piece of text, or to the step whose logits it needs first: hand in those, or their error.

        Raises StopIteration at the end, as `__next__` does, which makes the steps itself.
        """
        if isinstance(logits, BaseException):
            return self._pieces.throw(logits)
        return self._pieces.send(logits)

    def close(self) -> None:
        """Stop generating. The result keeps what was made so far."""
        self._pieces.close()

    def _run(self) -> Generator[str | DecodeStep, Tensor | None]:
        engine, request, result = self._engine, self._request, self.result
        if engine.closed:
            return
        self.start_s = perf_counter()
        prefilled = engine.prefill(request)
        sampler = Sampler(request.options, request.prompt.token_ids)
        guide = request.grammar.guide() if request.grammar is not None else None
        token = sampler.sample(prefilled.logits if guide is None else guide.mask_logits(prefilled.logits))
        result.report = report = prefilled.report
        report.match_s = request.prompt.match_s
        report.ttft_s = perf_counter() - self.start_s + report.match_s
        report.prompt_tokens = request.prompt.num_tokens
        report.num_chunks = len(report.chunks)
        report.num_chunk_hits = sum(chunk.hit for chunk in report.chunks)
        text, scanner = TextStream(engine.renderer), StopScanner(request.options.stops)
        ends = engine.stop_ids()
        limit = min(request.options.max_tokens, engine.context_length - request.prompt.num_tokens)
        decode_start_s = perf_counter()
        try:
            while not engine.closed:
                if token in ends:
                    result.finish_reason = "stop"
                    break
                tokens = [token] if guide is None else guide.accept_token(token, limit - len(result.token_ids))
                if len(tokens) > 1:
                    sampler.record_forced(tokens[1:])
                shown = ""
                for token in tokens:
                    result.token_ids.append(token)
                    shown += scanner.push(text.push(token))
                    if scanner.stopped:
                        break
                if shown:
                    result.text += shown
                    yield shown
                if scanner.stopped or (guide is not None and guide.ended):
                    result.finish_reason = "stop"
                    break
                if len(result.token_ids) >= limit:
                    result.finish_reason = "length"
                    break
                logits = yield DecodeStep(tokens, prefilled.fused)
                assert logits is not None
                token = sampler.sample(logits if guide is None else guide.mask_logits(logits))
            rest = scanner.push(text.flush()) + scanner.flush()
            if rest:
                result.text += rest
                yield rest
            if request.mode in ("blend", "reuse") and not report.refused_reason:
                engine.notices.record_lookup(request.prompt, [chunk.hit for chunk in report.chunks])
        finally:
            report.decode_s = perf_counter() - decode_start_s - self.waited_s
            report.completion_tokens = len(result.token_ids)
            if sampler.logprobs is not None:
                result.logprobs = [TokenLogprob(*each) for each in sampler.logprobs[: len(result.token_ids)]]
            self._remember(prefilled.fused)
            engine.backfill(prefilled.misses)
            if self._on_end is not None:
                self._on_end(prefilled, result)

    def _remember(self, fused: FusedKV) -> None:
        conversation = self._request.conversation
        if conversation is not None:
            # The last generated token's KV is not computed until a token follows it.
            ids = self._request.prompt.token_ids + self.result.token_ids
            conversation.token_ids, conversation.fused = ids[: fused.length], fused


class Backfill:
    """Precomputes missed chunks on a thread of its own, one at a time, so a request waits for at most one chunk.

    An executor, because the interpreter joins its thread at exit: a thread still inside torch then would abort it.
    """

    def __init__(self, precompute: Callable[[ChunkRun], None]) -> None:
        self._precompute = precompute
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-backfill")
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()

    def add(self, run: ChunkRun) -> None:
        """Queue the chunk of a run. Once this is closed, or the interpreter going away, the chunk stays a miss."""
        with self._lock:
            self._pending = [future for future in self._pending if not future.done() or future.exception()]
            try:
                self._pending.append(self._executor.submit(self._work, run))
            except RuntimeError as error:
                log.debug("a missed chunk is not stored: %s", error)

    def flush(self) -> None:
        """Wait for what is queued; raises what failed."""
        with self._lock:
            pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._executor.shutdown(wait=True)

    def _work(self, run: ChunkRun) -> None:
        try:
            self._precompute(run)
        except (RagblendError, OSError) as error:
            # The answer is out already; a full disk must not take the process down. flush() raises.
            log.warning("a missed chunk was not stored: %s", error)
            raise
