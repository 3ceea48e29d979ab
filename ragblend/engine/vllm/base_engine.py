"""Code of both engines beside vLLM's own: a prompt to token ids and parameters, tokens back to text and a report.

`VllmEngineBase` is the Engine without a connection to vLLM; `engine` (in this process) and `front_end` (a server's
ingestion) add that. Text is tokenized and detokenized here, never by vLLM.

Depends on matched prompts, reports and the connector's parameters, not on HTTP or vLLM.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any, Unpack

from ragblend.engine.base import LocalEngine
from ragblend.engine.decoding import StopScanner, TextStream
from ragblend.engine.fusion.lookup import NO_CONTEXT, IngestionContext
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import (
    BlendReport,
    FinishReason,
    Generation,
    Mode,
    RatioChoice,
    chunk_reports,
    join_runs,
)
from ragblend.engine.store.base import KVStore
from ragblend.engine.vllm.params import PARAMS_KEY, BlendParams
from ragblend.errors import EngineClosedError, RagblendError, UsageError
from ragblend.options import GenerationKeywords, GenerationOptions
from ragblend.prompt.match import ChunkRun, MatchedPrompt
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Chunk, Part, Prompt

log = logging.getLogger(__name__)

# What of a report is known on this side of vLLM only.
_OWN = {"match_s", "ttft_s", "decode_s", "prompt_tokens", "completion_tokens", "num_chunks", "shadow", "chunks"}
INGEST_AT_ONCE = 8  # chunks on their way to vLLM together; it batches what fits


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """One prompt with the connector's parameters and the generation options."""

    prompt: MatchedPrompt
    params: BlendParams
    options: GenerationOptions  # how long it may be, and how it is chosen and ended

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """The request's parameters for the connector, as a JSON object."""
        return {PARAMS_KEY: self.params.as_dict()}


@dataclass(slots=True)
class OutputDelta:
    """Output of one step of vLLM. The last one has `finish_reason`; `report` is set if the connector sent one."""

    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    report: BlendReport | None = None
    num_cached_tokens: int = 0  # prompt tokens that vLLM did not have to compute, where it tells


@dataclass(slots=True)
class ServedModelInfo:
    """Facts about the served model. `stop_ids` end an answer and are not part of it."""

    name: str
    fingerprint: str
    context_length: int
    bytes_per_token: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    num_layers: int = 0  # 0 where a server does not tell


class VllmStream:
    """An answer in progress. Iterating yields text; `result` is complete when the iteration ends.

    When the engine is closed, the answer ends at the next token with its text so far, finish reason "cancelled" and no
    error.
    """

    def __init__(self, engine: VllmEngineBase, request: VllmRequest) -> None:
        self._engine = engine
        self._request = request
        self._start_s = perf_counter()
        self._pieces = self._run()
        params = request.params
        report = BlendReport(params.reported_mode, params.rule, _number(params.ratio))
        report.prompt_tokens, report.match_s = request.prompt.num_tokens, request.prompt.match_s
        report.chunks = chunk_reports(request.prompt)
        report.num_chunks = len(report.chunks)
        self.result = Generation("", [], "cancelled", report)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating. The result keeps the text so far."""
        self._pieces.close()

    def _run(self) -> Generator[str]:
        request, result, report = self._request, self.result, self.result.report
        text, scanner = TextStream(self._engine.renderer), StopScanner(request.options.stops)
        finished, reported = None, False
        start_s = perf_counter()
        if self._engine.closed:
            return
        try:
            with closing(self._engine.deltas(request)) as received:
                for delta in self._until_closed(received):
                    if delta.token_ids and not result.token_ids and not report.ttft_s:
                        report.ttft_s = perf_counter() - self._start_s + report.match_s
                        start_s = perf_counter()
                    if delta.report is not None:
                        _merge_connector_report(report, delta.report, request.prompt)
                        _fill_cached(report, request, delta.num_cached_tokens)
                        reported = True
                    shown = ""
                    for token in delta.token_ids:
                        if scanner.stopped or token in self._engine.facts.stop_ids:
                            break  # vLLM sends the end token, too, and stops there by itself
                        result.token_ids.append(token)
                        shown += scanner.push(text.push(token))
                    if shown:
                        result.text += shown
                        yield shown
                    finished = delta.finish_reason or finished
                    if scanner.stopped and delta.finish_reason is None and request.options.stops:
                        break  # vLLM did not see the stop string in its own reading of the tokens
            rest = scanner.push(text.flush()) + scanner.flush()
            if rest:
                result.text += rest
                yield rest
            result.finish_reason = _finish_reason("stop" if scanner.stopped else finished)
            if reported and request.params.mode in ("blend", "reuse") and not report.refused_reason:
                hits = [chunk.hit for chunk in report.chunks]
                self._engine.notices.record_lookup(request.prompt.num_tokens, hits, request.prompt.prefix_ids)
        finally:
            report.decode_s = perf_counter() - start_s
            report.completion_tokens = len(result.token_ids)
            if reported:  # else nothing tells a miss from a vLLM that does not blend
                self._engine.backfill_missed(request, report)
                self._engine.consider_shadow(request, result)

    def _until_closed(self, deltas: Iterator[OutputDelta]) -> Iterator[OutputDelta]:
        """Yield `deltas` until the engine is closed."""
        with suppress(EngineClosedError):
            for delta in deltas:
                if self._engine.closed:
                    return
                yield delta


class VllmEngineBase(LocalEngine):
    """The Engine protocol over a vLLM that runs the ragblend connector. Safe to share between threads.

    A missing chunk is precomputed alone, by a request in the background, unless `on_miss` is "inline". A conversation
    is an ordinary prompt: chunks of earlier turns are fused again. `options` are those of `LocalEngine`.
    """

    def __init__(self, renderer: Renderer, store: KVStore, facts: ServedModelInfo, **options: Any) -> None:
        self.facts = facts
        super().__init__(
            renderer, store, name=facts.name, fingerprint=facts.fingerprint, num_layers=facts.num_layers, **options
        )

    @abstractmethod
    def deltas(self, request: VllmRequest) -> Generator[OutputDelta]:
        """Send `request` and yield its output as it arrives. Closing the generator aborts the request."""

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.facts.context_length

    @property
    def bytes_per_token(self) -> int:
        """Bytes of stored KV per chunk token, all layers."""
        return self.facts.bytes_per_token

    # -- ingestion

    def precompute_all(self, chunks: Sequence[Part]) -> Iterator[int]:
        """Yield `precompute`'s result for each chunk, several requests at once; chunks with an ingestion context come
        last.
        """
        self.add_known(chunks)
        behind = [chunk for chunk in chunks if isinstance(chunk, Chunk) and chunk.context_texts]
        first = [chunk for chunk in chunks if not (isinstance(chunk, Chunk) and chunk.context_texts)]
        with ThreadPoolExecutor(INGEST_AT_ONCE, thread_name_prefix="ragblend-ingest") as pool:
            try:
                yield from pool.map(self.precompute, first)
                yield from pool.map(self.precompute, behind)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Do nothing: vLLM's workers read ahead what waiting requests will need."""

    def precompute_ids(self, token_ids: tuple[int, ...], behind: IngestionContext = NO_CONTEXT) -> int:
        """Prefill and store a chunk given as token ids, after the ingestion context `behind`. Return the bytes stored.

        Returns 0 if it was stored already. Raises RagblendError if vLLM did not store it.
        """
        key = self.key_of(token_ids, behind)
        if not token_ids or self.store.contains(key):
            return 0
        prompt = self._ingestion(token_ids, behind)
        self._check_length(prompt.num_tokens + 1, "chunk")
        params = BlendParams("ingest", spans=_spans(prompt.runs), namespace=self.namespace, context=behind.policy)
        report = None
        with closing(self.deltas(VllmRequest(prompt, params, GenerationOptions(max_tokens=1)))) as deltas:
            for delta in deltas:
                report = delta.report or report
        if report is not None and report.refused_reason:
            raise RagblendError(f"the chunk was not stored: {report.refused_reason}")
        # A report says that it was stored, if not here: behind a balancer the next question may reach another replica.
        if report is None and not self.store.contains(key):
            raise RagblendError(
                f"vLLM answered, but the chunk's KV is not in the store (key {key}); look for ragblend in the server's "
                "log, and check its setup: ragblend doctor"
            )
        return len(token_ids) * self.bytes_per_token

    def _ingestion(self, token_ids: tuple[int, ...], behind: IngestionContext) -> MatchedPrompt:
        """Return the prompt that computes a variant: the chunks of the ingestion context and the chunk itself are its
        runs.
        """
        behind.validate()
        num_joint = len(self.renderer.separator_ids)
        ids, runs = [*self.default_prefix_ids], list[ChunkRun]()
        for part in (*behind.parts, token_ids):
            chunk_ids = part[: len(part) - num_joint] if len(runs) < len(behind.parts) else part
            runs.append(ChunkRun(chunk_ids, 0, len(ids), len(ids) + len(chunk_ids)))
            ids += part
        # One token more, because vLLM samples from the last one; which, does not matter.
        return MatchedPrompt([*ids, token_ids[-1]], tuple(runs), self.default_prefix_ids)

    # -- answering

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Answer `prompt`; `options` are GenerationOptions. Ends at the model's end token or a stop string."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> VllmStream:
        """Start an answer and return its stream. Iterating yields text; `.result` holds answer and report at its end.

        Options are checked before the request is sent. Closing the stream early aborts the request.
        """
        return VllmStream(self, self.request(prompt, **options))

    def request(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> VllmRequest:
        """Return a checked request: the matched prompt with its parameters. `options` are GenerationOptions.

        The connector resolves a `recompute_ratio` of None or "auto", because it has access to the store. Raises
        PromptTooLongError beyond the model's context length, UsageError for invalid values.
        """
        generation_options = GenerationOptions(**options)
        if generation_options.logprobs:
            raise UsageError("logprobs are given by backend='transformers' alone; leave them out for vLLM")
        find_rule(generation_options.rule)
        self._check_prompt(prompt, generation_options.stops)
        matched = self.match(prompt)
        self._check_length(matched.num_tokens + 1, "prompt")
        return VllmRequest(
            matched,
            blend_params(
                matched,
                generation_options.mode,
                generation_options.rule,
                generation_options.recompute_ratio,
                self.namespace,
                generation_options.seed or 0,
            ),
            replace(
                generation_options,
                max_tokens=min(generation_options.max_tokens, self.context_length - matched.num_tokens),
            ),
        )

    def backfill_missed(self, request: VllmRequest, report: BlendReport) -> None:
        """Store the chunks that `report` names as misses, in the background, unless `on_miss` is "inline"."""
        if request.params.mode not in ("blend", "reuse"):
            return
        prompt = request.prompt
        chunks = zip(prompt.chunks, report.chunks, strict=True)
        self.backfill(prompt.runs[parts[0]] for parts, chunk in chunks if not chunk.hit)

    def consider_shadow(self, request: VllmRequest, answer: Generation) -> None:
        """Submit a shadow comparison of a greedy and complete `answer` to `request`, if it is sampled."""
        params = request.params
        if (
            params.mode in ("blend", "reuse")
            and not request.options.temperature
            and answer.finish_reason != "cancelled"
        ):
            full = replace(request, params=replace(params, mode="full"))
            self._shadow.submit_repeat(lambda: VllmStream(self, full), answer)


def blend_params(
    prompt: MatchedPrompt, mode: Mode, rule: str, ratio: RatioChoice, namespace: str, seed: int = 0
) -> BlendParams:
    """Return the connector's parameters for `prompt`."""
    return BlendParams(mode, rule, ratio, (), namespace, seed, (), len(prompt.prefix_ids)).with_runs(prompt.runs)


def _spans(runs: Sequence[ChunkRun]) -> tuple[tuple[int, int], ...]:
    return tuple((run.start, run.end) for run in runs)


def _number(ratio: RatioChoice) -> float:
    """Return the ratio; 0 if the connector resolves it."""
    return 0.0 if ratio is None or isinstance(ratio, str) else ratio


def _finish_reason(reason: str | None) -> FinishReason:
    return "length" if reason == "length" else "stop" if reason == "stop" else "cancelled"


def _fill_cached(report: BlendReport, request: VllmRequest, num_cached_tokens: int) -> None:
    """Add the tokens of vLLM's own prefix cache to the report; the connector does not count them."""
    if report.mode != "prefix" or not num_cached_tokens:
        return
    report.num_prefix_tokens = report.num_reused_tokens = num_cached_tokens
    total = sum(run.num_tokens for run in request.prompt.runs)
    if total:
        cached = sum(max(0, min(end, num_cached_tokens) - start) for start, end in request.params.spans)
        report.charged_budget = report.charged_budget_32 = 1 - cached / total


def _merge_connector_report(report: BlendReport, connector_report: BlendReport, prompt: MatchedPrompt) -> None:
    """Copy the connector's report into `report`, except for fields that only the client knows (sources, times)."""
    for name in {each.name for each in fields(BlendReport)} - _OWN:
        setattr(report, name, getattr(connector_report, name))
    if len(connector_report.chunks) == len(prompt.runs):
        report.chunks = connector_report.chunks
        join_runs(report, prompt)
    if connector_report.failed:
        log.warning("the prompt was prefilled in full: %s", connector_report.refused_reason)
