"""Shared base of the two engines that call vLLM directly: prompts to token ids, output tokens to text and reports.

`VllmEngineBase` implements the Engine protocol except for the calls to vLLM. `engine` (vLLM in this process) and
`front_end` (ingestion inside a vLLM server) add these calls. Text is tokenized and detokenized here, never by vLLM; the
connector finds the chunks in the ids.

Depends on prompts, reports and the connector's parameters, not on HTTP or vLLM.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Unpack

from ragblend.engine.base import LocalEngine
from ragblend.engine.decoding import AnswerText
from ragblend.engine.report import BlendReport, Generation
from ragblend.engine.store.base import KVStore
from ragblend.engine.vllm.params import BlendParams, report_from_params
from ragblend.engine.vllm.streams import AnswerStream, checked_options, finish_reason
from ragblend.errors import EngineClosedError, RagblendError
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import ContextPolicy, GenerationOptions
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Part, Prompt, as_chunk

log = logging.getLogger(__name__)

INGEST_CONCURRENCY = 8  # chunks sent to vLLM at the same time; vLLM batches them as far as they fit


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """Token ids of one request, with the connector's parameters and the generation options.

    The ids were rendered from `prompt` in `render_s` seconds. `prompt` is None for an ingestion.
    """

    token_ids: Sequence[int] = field(repr=False)
    params: BlendParams
    options: GenerationOptions = field(repr=False)
    prompt: Prompt | None = field(default=None, repr=False)
    render_s: float = 0.0


@dataclass(slots=True)
class OutputDelta:
    """Output of one vLLM step for an answer. The last output has a `finish_reason` and the connector's `report`."""

    token_ids: Sequence[int] = field(default=(), repr=False)
    finish_reason: str | None = None
    report: BlendReport | None = None
    num_cached_tokens: int = 0  # prompt tokens that vLLM did not compute; 0 if vLLM does not report them

    @classmethod
    def from_vllm(cls, output: Any) -> OutputDelta:
        """Return the content of vLLM's RequestOutput."""
        (completion,) = output.outputs
        report = report_from_params(getattr(output, "kv_transfer_params", None))
        return cls(tuple(completion.token_ids), completion.finish_reason, report, output.num_cached_tokens or 0)


class VllmStream(AnswerStream):
    """Answer in progress, from an engine that calls vLLM directly.

    If the engine is closed, the answer ends at its next token with its text so far and finish reason "cancelled".
    """

    def __init__(self, engine: VllmEngineBase, request: VllmRequest) -> None:
        self._engine, self._request = engine, request
        super().__init__(request.options)

    def _run(self) -> Generator[str]:
        engine, request, result = self._engine, self._request, self.result
        text = AnswerText(engine.renderer, request.options.stop_strings)
        received: BlendReport | None = None
        finished, num_cached, ttft_s, first_s = None, 0, 0.0, perf_counter()
        if engine.closed:
            return
        try:
            with closing(engine.run_request(request)) as deltas:
                for delta in self._until_closed(deltas):
                    if delta.token_ids and not ttft_s:
                        first_s = perf_counter()
                        ttft_s = first_s - self._start_s + request.render_s
                    if delta.report is not None:
                        received, num_cached = delta.report, delta.num_cached_tokens
                    answer_text = ""
                    for token in delta.token_ids:
                        if text.stopped or token in engine.stop_ids:
                            break  # vLLM sends the end token, too, and then ends the request
                        result.token_ids.append(token)
                        answer_text += text.push(token)
                    if answer_text:
                        result.text += answer_text
                        yield answer_text
                    finished = delta.finish_reason or finished
                    if text.stopped and delta.finish_reason is None and request.options.stop_strings:
                        break  # closing the deltas aborts the request: vLLM does not detokenize, so does not stop
            if rest := text.flush():
                result.text += rest
                yield rest
            result.finish_reason = finish_reason("stop" if text.stopped else finished)
        finally:
            self._set_report(received, len(request.token_ids), ttft_s, first_s)
            if received is not None:  # without a report, a miss looks like a vLLM without the connector
                received.match_s += request.render_s
                if received.mode == "prefix" and not received.num_prefix_tokens:  # vLLM prefilled it alone
                    received.num_prefix_tokens = received.num_reused_tokens = num_cached
                    received.charged_budget = received.charged_budget_32 = 1 - num_cached / len(request.token_ids)
                engine.handle_finished_answer(request, result)

    def _until_closed(self, deltas: Iterator[OutputDelta]) -> Iterator[OutputDelta]:
        """Yield `deltas` until the engine is closed."""
        with suppress(EngineClosedError):
            for delta in deltas:
                if self._engine.closed:
                    return
                yield delta


class VllmEngineBase(LocalEngine):
    """Engine over a vLLM that runs the ragblend connector. Safe to share between threads.

    If `on_miss` is "store", separate requests precompute missing chunks in the background. Every turn of a conversation
    is an ordinary prompt, in which the connector finds the reusable chunks. `bytes_per_token`: bytes of one token's
    stored KV in all layers. `stop_ids`: tokens that end an answer and are no part of it. `options`: arguments of
    `LocalEngine`.
    """

    def __init__(
        self,
        renderer: Renderer,
        store: KVStore,
        *,
        context_length: int,
        bytes_per_token: int,
        stop_ids: frozenset[int] = frozenset(),
        **options: Any,
    ) -> None:
        self.context_length, self.bytes_per_token, self.stop_ids = context_length, bytes_per_token, stop_ids
        super().__init__(renderer, store, **options)

    @abstractmethod
    def run_request(self, request: VllmRequest) -> Generator[OutputDelta]:
        """Send `request` to vLLM and yield the output of its steps. Closing the generator aborts the request.

        Some subclasses yield the output while the answer is generated, others all of it at the end.
        """

    # -- ingestion

    def precompute_all(self, chunks: Sequence[Part]) -> Iterator[int]:
        """Precompute chunks by several requests at once. Yield the number of bytes stored for each chunk.

        Neutral variants come last, also in the results.
        """
        self.add_known_chunks(chunks)
        ordered = sorted(chunks, key=lambda chunk: as_chunk(chunk).context == "neutral")
        with ThreadPoolExecutor(INGEST_CONCURRENCY, thread_name_prefix="ragblend-ingest") as pool:
            try:
                yield from pool.map(self.precompute, ordered)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Do nothing. Engines that can call vLLM's workers load KV before a request: VllmEngine, VllmClient."""

    def precompute_ids(self, token_ids: tuple[int, ...], context: ContextPolicy = "none") -> int:
        """Prefill and store a variant of a chunk that is given as token ids.

        Returns the number of bytes stored, 0 if the KV was stored already. Raises RagblendError if vLLM did not
        store the KV.
        """
        key = self.key_of_ids(token_ids, context)
        if not token_ids or self.store.contains(key):
            return 0
        request = self._ingestion(token_ids, context)
        self._check_length(len(request.token_ids) + 1, "chunk")
        report = None
        with closing(self.run_request(request)) as deltas:
            for delta in deltas:
                report = delta.report or report
        if report is not None and report.refused_reason:
            raise RagblendError(f"the chunk was not stored: {report.refused_reason}")
        # A report proves that a replica stored the chunk. Behind a load balancer, that may be another replica.
        if report is None and not self.store.contains(key):
            raise RagblendError(
                f"vLLM answered, but the chunk's KV is not in the store (key {key}); search vLLM's log for ragblend, "
                "and check the setup: ragblend doctor"
            )
        return len(token_ids) * self.bytes_per_token

    def _ingestion(self, token_ids: tuple[int, ...], context: ContextPolicy) -> VllmRequest:
        """Return the request that ingests a variant: the ids before it, and the chunk."""
        ids = [*self.ids_before(context), *token_ids]
        params = BlendParams("ingest", namespace=self.namespace, span=(len(ids) - len(token_ids), len(ids)))
        # vLLM samples from the last token, so any one token follows the chunk.
        return VllmRequest([*ids, token_ids[-1]], params, GenerationOptions(max_tokens=1))

    # -- answering

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Return the answer to `prompt`, up to an end token or a stop string.

        `options`: fields of GenerationOptions.
        """
        return self.stream(prompt, **options).finish()

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> VllmStream:
        """Start an answer and return its stream. Iterating yields text; afterwards `.result` has answer and report.

        Options are checked before the request is sent. Closing the stream early aborts the request.
        """
        return VllmStream(self, self.request(prompt, **options))

    def request(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> VllmRequest:
        """Return the request for a prompt: its token ids and parameters. Nothing is sent.

        `options`: fields of GenerationOptions. The connector resolves a `recompute_ratio` of None or "auto", because it
        has access to the store. Raises PromptTooLongError beyond the model's context length, and UsageError for invalid
        values.
        """
        checked = checked_options(options)
        self._check_prompt(prompt, checked.stop_strings)
        self.check_not_forked()
        start_s = perf_counter()
        token_ids = self.renderer.render(prompt)
        render_s = perf_counter() - start_s
        self._check_length(len(token_ids) + 1, "prompt")
        max_tokens = min(checked.max_tokens, self.context_length - len(token_ids))
        params = BlendParams.from_options(checked, self.namespace)
        return VllmRequest(token_ids, params, replace(checked, max_tokens=max_tokens), prompt, render_s)

    def handle_finished_answer(self, request: VllmRequest, answer: Generation) -> None:
        """After an answer, warn if no chunk was reused, and store missing chunks in the background.

        Some greedy answers are also compared with full prefill in the background (shadow comparison).
        """
        report = answer.report
        if request.prompt is None or request.params.mode not in ("blend", "reuse"):
            return
        if not report.refused_reason and answer.finish_reason != "cancelled":
            prefix_ids = self._own_prefix(request.token_ids, request.prompt)
            hits = [chunk.hit for chunk in report.chunks] or [False] * len(request.prompt.chunks)
            self.notices.record_lookup(report.prompt_tokens, hits, prefix_ids)
        if report.num_chunk_hits < max(report.num_chunks, len(request.prompt.chunks)):
            self._backfill_missed(request.prompt)
        if not request.options.temperature and answer.finish_reason != "cancelled":
            full = replace(request, params=replace(request.params, mode="full"))
            self._shadow.sample_vllm_answer(lambda: VllmStream(self, full), answer)

    def _backfill_missed(self, prompt: Prompt) -> None:
        """Precompute the missing chunks of a prompt in the background, unless `on_miss` is "inline"."""
        if not self._stores_missing or self.closed:
            return
        try:
            self.precompute_in_background(run for run in self.match(prompt).runs if not self.has_kv(run.chunk_ids))
        except RagblendError as error:  # the answer is complete already
            log.warning("missed chunks are not stored: %s", error)
