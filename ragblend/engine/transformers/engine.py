"""Engine that answers prompts from fused KV with a transformers model on one machine.

Chunks are precomputed after the default prefix. A request is resolved, prefilled (see `blend`) and decoded. Safe to
share between threads: one thread runs the model, and concurrent answers are decoded together (see `engine.loop`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from ragblend.engine.fusion.plan import FusedKV, first_token_kl
from ragblend.engine.fusion.prefill import (
    CPU_PASS_TOKENS,
    GPU_PASS_TOKENS,
    LEAST_PASS_TOKENS,
    prefill_chunks,
    prefill_missing,
)
from ragblend.engine.fusion.rules import NO_PROBE_RULE
from ragblend.engine.fusion.self_check import check_with_kernels, self_check
from ragblend.engine.generation import (
    CancelCheck,
    Conversation,
    DecodeStep,
    EngineKeywords,
    EngineRequest,
    GenerationStream,
    PrefillResult,
    start_streams,
)
from ragblend.engine.loop import MAX_NUM_SEQS, EngineLoop
from ragblend.engine.report import Generation, ShadowReport
from ragblend.engine.shadow import yields_same_tokens
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader, MemoryKV, convert_kv_dtype, dtype_name
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.blend import BlendingEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.transformers.model import is_quantised
from ragblend.engine.transformers.structured_outputs import GrammarCompiler
from ragblend.engine.tuning.calibration import CalibrationCache
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.errors import EngineClosedError
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import ContextPolicy, GenerationOptions
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Part, Prompt

log = logging.getLogger(__name__)


class TransformersEngine(BlendingEngine):
    """Engine over a TransformersLayers model, a Renderer and a KVStore. Use as a context manager, or `close()` it.

    - check: run `self_check`, which raises UnsupportedModelError if blending does not work with the model, and compute
      the KV of the default prefix.
    - machine: measurements by which a request without a ratio chooses its ratio, or full prefill if that is faster.
    - max_num_seqs: the largest number of prompts that are decoded together.
    - options: the keyword arguments of `LocalEngine`, such as system, namespace, on_miss and shadow.
    """

    calibrations: CalibrationCache
    measure_machine: Callable[[TransformersEngine], MachineProfile | None] | None = None
    """Measures this engine's machine before the first request that a profile may decide. None: it is not measured."""

    def __init__(
        self,
        layers: TransformersLayers,
        renderer: Renderer,
        store: KVStore,
        *,
        check: bool = True,
        machine: MachineProfile | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        **options: Any,
    ) -> None:
        super().__init__(layers, renderer, store, EngineLoop(self._decode, max_num_seqs), machine=machine, **options)
        self.context_length, self.max_num_seqs = layers.context_length, self.loop.max_num_seqs
        self._measuring = Lock()
        store.watch_deletions()
        if (memory := store.find_tier(MemoryStore)) is not None:
            memory.page_locked = layers.device.type == "cuda"
        disk = store.find_tier(DiskStore)
        root, key = (disk.root, disk.store_key) if disk is not None else (None, None)
        self.calibrations = CalibrationCache(root, self.fingerprint, layers.num_layers, key)
        self.stop_ids = renderer.stop_ids() | generation_stop_ids(layers.model)
        """Ids that end an answer: the tokenizer's and the generation config's."""
        self._grammars = GrammarCompiler(renderer, layers.config.vocab_size, self.stop_ids)
        if check:
            self._self_check()
            # Computed at load, so that the first request reuses it also in a process that has ingested nothing.
            if 0 < len(self.default_prefix_ids) < self.context_length:
                self.loop.call(lambda: self._prefix(self.default_prefix_ids))

    def _self_check(self) -> None:
        """Run `self_check`, and do without Triton's kernels if the model passes it only without them."""
        layers, is_quantized = self.layers, is_quantised(self.layers.config)
        check = partial(self_check, layers, layers.config.vocab_size, self.name, is_quantised=is_quantized)
        check_with_kernels(layers, check, self.name)

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes of stored KV per token of a long chunk, in all layers together."""
        return self.shape.bytes_per_token(self.store.kv_dtype)

    # -- ingestion

    def precompute_all(self, chunks: Sequence[Part]) -> Iterator[int]:
        """Precompute chunks. Yield, for each chunk, the number of bytes stored; 0 if it was stored before.

        Neutral variants come last, also in the results. Several short chunks are prefilled in one pass of the model.
        Their KV is written to the store while the next pass runs.

        The KV may differ from that of `precompute` by rounding, because a row of a matrix product can depend on the
        number of rows. In float32 it was bit-identical on the CPUs tested.
        """
        self.add_known_chunks(chunks)
        limit = CPU_PASS_TOKENS if self.layers.device.type == "cpu" else GPU_PASS_TOKENS
        variants = [self._chunk_ids(chunk) for chunk in chunks]
        for context in get_args(ContextPolicy):
            is_missing, prefill = partial(self._is_missing, context), partial(self._prefill_chunks, context)
            some = (token_ids for token_ids, each in variants if each == context)
            yield from prefill_missing(some, is_missing, prefill, self.store.put, limit)

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Load the KV of a later request's chunks into the fastest tier, in the background. Returns at once."""
        self.store.prefetch(self.likely_keys(chunks))

    def precompute_ids(self, token_ids: tuple[int, ...], context: ContextPolicy = "none") -> int:
        """Prefill and store a variant of a chunk that is given as token ids.

        Returns the number of bytes stored, 0 if the KV was stored already.
        """
        if not self._is_missing(context, token_ids):
            return 0
        (kv,) = self._prefill_chunks(context, [token_ids])
        self.store.put(kv)
        return kv.nbytes

    def _is_missing(self, context: ContextPolicy, token_ids: tuple[int, ...]) -> bool:
        self.check_not_forked()
        return bool(token_ids) and not self.store.contains(self.key_of_ids(token_ids, context))

    def _prefill_chunks(self, context: ContextPolicy, chunks: Sequence[tuple[int, ...]]) -> list[MemoryKV]:
        """Return the KV of a variant of chunks that are given as token ids, prefilled in one pass.

        Each is prefilled separately after the same ids, see `ids_before`.
        """
        prefix_ids, dtype = self.ids_before(context), dtype_name(self.layers.dtype)
        headers = []
        for ids in chunks:
            self._check_length(len(prefix_ids) + len(ids), "chunk")
            facts = (self.key_of_ids(ids, context), self.fingerprint, prefix_ids, ids, self.layers.num_layers, dtype)
            headers.append(KVHeader(*facts, namespace=self.namespace))
        num_more = LEAST_PASS_TOKENS - sum(map(len, chunks)) if self.layers.device.type == "cpu" else 0
        filler = [replace(headers[0], token_ids=chunks[0][:1] * num_more)] if num_more > 0 else []

        def prefill() -> list[MemoryKV]:
            return prefill_chunks(self.layers, self._prefix(prefix_ids), [*headers, *filler])[: len(headers)]

        return [convert_kv_dtype(kv, self.store.kv_dtype) for kv in self.loop.call(prefill)]

    # -- answering

    def generate(self, prompt: Prompt, **options: Unpack[EngineKeywords]) -> Generation:
        """Return the answer to `prompt`. `options` are those of `request`.

        The answer ends at an end token, at a stop string, or when `max_tokens` or the context length is reached.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(self, prompts: Sequence[Prompt], **options: Unpack[EngineKeywords]) -> list[Generation]:
        """Return the result of `generate` for each prompt. Up to `max_num_seqs` prompts are decoded together.

        If answers fail, raises the first error once the other answers have ended.
        """
        streams = [self.stream(prompt, **options) for prompt in prompts]
        for error in self.run_to_end(streams):
            if error is not None:
                raise error
        return [stream.result for stream in streams]

    def run_to_end(
        self, streams: Sequence[GenerationStream], cancel_check: CancelCheck | None = None
    ) -> list[BaseException | None]:
        """Start `streams` and wait until all have ended. Return the error of each; None if it ended without one."""
        try:
            if self.store.has_remote_tiers:
                # Fetched KV stays in memory until the prompt's prefill, so only a few prompts are fetched ahead.
                for stream in streams:
                    self.loop.wait_for_capacity()
                    start_streams([stream], cancel_check)
            else:
                start_streams(streams, cancel_check)
            return [stream.wait() for stream in streams]
        except BaseException:  # an interrupt, or a prompt that cannot be prepared, ended the wait
            for stream in streams:
                stream.close()
            raise

    def stream(self, prompt: Prompt, **options: Unpack[EngineKeywords]) -> GenerationStream:
        """Return the stream of an answer to `prompt`. Iterating over the stream yields the text.

        After the last text, `stream.result` has answer and report. Closing the stream, or the engine, ends the answer.
        Raises the errors of `request`.
        """
        request = self.request(prompt, **options)
        if not self._shadow.share or request.mode not in ("blend", "reuse"):
            return GenerationStream(self, request)

        def shadowed(prefilled: PrefillResult, answer: Generation) -> None:
            logits = prefilled.logits  # not `prefilled`, whose KV would stay in memory until full prefill has run
            self._shadow.sample(lambda: _compare_with_full(self, request, logits, answer), answer.report)

        return GenerationStream(self, request, shadowed)

    def request(
        self,
        prompt: Prompt,
        *,
        conversation: Conversation | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> EngineRequest:
        """Return a checked request: the rendered and matched prompt with its settings. Pass it to `prefill`.

        `options` are GenerationOptions. With a `conversation`, earlier turns are not prefilled again. Raises
        PromptTooLongError beyond the model's context length, UsageError for invalid values.
        """
        generation_options = GenerationOptions(**options)
        self._check_prompt(prompt, generation_options.stop_strings)
        matched = self.match(prompt)
        tuning_of = partial(self.calibrations.resolve_tuning, matched.prefix_ids)
        tuning = tuning_of(generation_options.rule, generation_options.recompute_ratio)
        adapts_rule = tuning.adapts_ratio and generation_options.mode == "blend" and generation_options.rule == "auto"
        self._check_length(matched.num_tokens + 1, "prompt")
        return EngineRequest(
            matched,
            generation_options.mode,
            tuning,
            generation_options,
            conversation,
            no_probe=tuning_of(NO_PROBE_RULE, None) if adapts_rule else None,
            grammar=self._grammars.compile(generation_options.structured_outputs)
            if generation_options.structured_outputs is not None
            else None,
        )

    def prepare_prefill(self, request: EngineRequest) -> Callable[[], PrefillResult]:
        """Prepare a prefill (see `blend`). Before the first one that a profile may decide, measure the machine."""
        if self.measure_machine is not None and request.is_adapted and request.prompt.runs:
            with self._measuring:  # other requests wait
                if self.measure_machine is not None:
                    with suppress(EngineClosedError):  # the loop then ends the answer
                        self.machine = self.loop.call(partial(self.measure_machine, self))
                    self.measure_machine = None
        return super().prepare_prefill(request)

    def decode_step(self, tokens: Sequence[int], fused: FusedKV) -> Tensor:
        """Run `tokens` through the model and add their KV to `fused`. Return the next token's logits [vocabulary]."""
        return self.loop.call(lambda: self._decode([DecodeStep(tokens, fused)]))[0]

    @torch.inference_mode()
    def _decode(self, steps: Sequence[DecodeStep]) -> Sequence[Tensor]:
        """Return `decode_step`'s logits for each step. Several steps run as one batch, equal up to float rounding."""
        return self.layers.run_decode_batch([step.tokens for step in steps], [step.fused for step in steps]).unbind()

    def close(self) -> None:
        """Finish background work and end the threads. Also close the store, which waits at most 10 s for its writes."""
        if not self.is_usable:
            return
        super().close()
        self.store.close()


def _compare_with_full(
    engine: TransformersEngine, request: EngineRequest, logits: Tensor, answer: Generation
) -> ShadowReport:
    """Run `request` by full prefill and compare with its `answer`, whose first token came from `logits` [vocabulary].

    Whole answers are compared if the request is greedy and `answer` was not cancelled; otherwise only the first token.
    """
    comparable = request.options.temperature == 0 and answer.finish_reason != "cancelled"
    options = request.options if comparable else replace(request.options, max_tokens=1)
    kept: list[Tensor] = []

    def keep(prefilled: PrefillResult, _: Generation) -> None:
        kept.append(prefilled.logits)

    full = replace(request, mode="full", conversation=None, options=options)
    same = yields_same_tokens(GenerationStream(engine, full, keep), answer)
    return ShadowReport(
        int(kept[0].argmax()) == int(logits.argmax()), first_token_kl(kept[0], logits), same if comparable else None
    )


def generation_stop_ids(model: Any) -> frozenset[int]:
    """Return the ids that end an answer, from the model's generation config."""
    end: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset(end if isinstance(end, list) else [end] if end is not None else [])
