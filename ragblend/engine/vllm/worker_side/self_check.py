"""Exactness gates inside vLLM, run over its own model and paged cache before the first request.

The gates are those of `fusion.self_check`, with vLLM's plain prefill as the reference. Read that module first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ragblend.engine.fusion.check_layers import schedule_check_layers
from ragblend.engine.fusion.fuse import fuse_steps, run_to_completion
from ragblend.engine.fusion.plan import FusePlan, Placement
from ragblend.engine.fusion.rules import CHECK_LAYER, RULES
from ragblend.engine.fusion.self_check import (
    CHUNK_TOKENS,
    NUM_CHUNKS,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    TOLERANCE,
    relative_error,
)
from ragblend.engine.store.format.kv import KVHeader, dtype_name, slice_kv_rows
from ragblend.engine.vllm.support import FIX_HINT
from ragblend.engine.vllm.worker_side.layers import VllmLayers
from ragblend.engine.vllm.worker_side.paged import PagedKV, PagedLayerLoader
from ragblend.engine.vllm.worker_side.prefill import prefill_chunk
from ragblend.errors import UnsupportedModelError

_RUNS_OF_SMALL_CALLS = 6
_TF32_TOLERANCE = 1e-2
"""Allowed error in float32 on a GPU, where vLLM's Triton attention multiplies in TF32, which keeps 10 bits: 0.0015 was
measured on an H100. A wrong mask is off by ten times as much."""

_FP8_TOLERANCE = 0.1
"""Allowed error with a paged cache of eight bits on a GPU, where vLLM's attention also rounds queries, but ragblend's
does not. An estimate, because nothing was run on a GPU. On a CPU both compute in the model's dtype over the same
rounded KV."""


@torch.inference_mode()
def self_check(layers: VllmLayers, vocabulary: int, num_blocks: int, name: str) -> None:
    """Raise UnsupportedModelError unless fusing reproduces vLLM's own prefill. Overwrites the KV blocks from 1 on.

    Must run before the first request. Also raises the error if `num_blocks` is too small for the check. The hidden
    states of the question's tokens must equal those of full prefill, up to rounding, in each of these cases (gates):

    - A chunk is placed directly after its prefix.
    - All tokens are recomputed over stale KV.
    - Scattered tokens are recomputed over exact KV: in one attention call, in several calls that are planned together,
      and in several calls over the blocks.
    - The tokens that the rule "ask" selects are recomputed over exact KV.
    - A query probe runs over exact KV that was placed, or that is read from the blocks.
    """
    total = PREFIX_TOKENS + NUM_CHUNKS * CHUNK_TOKENS + QUESTION_TOKENS
    needed = -(-total // layers.block_size)
    if num_blocks <= needed:  # block 0 is vLLM's null block
        raise UnsupportedModelError(f"{name} got {num_blocks} blocks of KV cache; its self-check needs {needed + 1}")
    in_tf32 = layers.dtype == torch.float32 and layers.device.type == "cuda"
    allowed = _TF32_TOLERANCE if in_tf32 else TOLERANCE[layers.dtype]
    if layers.cache.rounds and layers.device.type == "cuda":
        allowed = _FP8_TOLERANCE
    try:
        with layers.without_adapters():
            gates = _gates(layers, vocabulary, list(range(1, needed + 1)), total)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} has layers in vLLM that cannot be run one at a time ({type(error).__name__}: {error}). {FIX_HINT}"
        ) from error
    for gate, deviation in gates.items():
        if not deviation <= allowed:  # NaN fails too
            raise UnsupportedModelError(
                f"{name} in vLLM fails the exactness check of {gate}: relative error {deviation:.2g}, allowed "
                f"{allowed:g}. Its stored KV, placed and recomputed, is not what vLLM computes, so answers would be "
                f"wrong. If docs/models.md lists its class, choose another attention backend, such as "
                f"--attention-backend FLASH_ATTN; else: {FIX_HINT[0].lower()}{FIX_HINT[1:]}"
            )


def _gates(layers: VllmLayers, vocabulary: int, blocks: list[int], total: int) -> dict[str, float]:
    """Return the relative error of each gate, by the gate's name."""
    ids = torch.randint(vocabulary, (total,), generator=torch.Generator().manual_seed(0)).to(layers.device)
    everything, context = torch.arange(total, device=layers.device), total - QUESTION_TOKENS
    question = everything[context:]
    dtype = dtype_name(layers.dtype)

    def header(start: int, end: int) -> KVHeader:
        return KVHeader("check", "check", (), tuple(ids[start:end].tolist()), layers.num_layers, dtype)

    def paged(length: int = 0) -> PagedKV:
        target = PagedKV(layers, blocks, total)
        target.length = length
        return target

    def run_question() -> Tensor:
        hidden, target = layers.embed(ids[question]), paged()
        for layer in range(layers.num_layers):
            hidden = layers.run_layer(layer, hidden, question, target)
        return layers.final_norm(hidden)

    def blended(plan: FusePlan, kept: Sequence[int] = range(layers.num_layers)) -> Tensor:
        target = PagedKV(layers, blocks, context, kept, QUESTION_TOKENS)
        with PagedLayerLoader((prefix, *plan.placements), layers, target, corrects_drift=plan.corrects_drift) as source:
            run_to_completion(layers, fuse_steps(layers, plan, target, source))
        return run_question()

    def probed(placement: Placement, num_resident: int = 0) -> Tensor:
        target = PagedKV(layers, blocks, context, range(layers.num_layers), QUESTION_TOKENS, num_resident)
        hidden = layers.embed(ids[question])
        placed: tuple[Placement, ...] = (prefix, placement)
        if num_resident:
            placed = (
                Placement(
                    slice_kv_rows(placement.kv, num_resident - placement.start, context - placement.start),
                    num_resident,
                    False,
                ),
            )
        with PagedLayerLoader(placed, layers, target) as source:
            for layer in range(layers.num_layers):
                source.wait(layer)
                hidden = layers.run_probe_layer(layer, hidden, question, target, None)
        return layers.final_norm(hidden)

    calls = layers.attention_calls([everything], [paged()])
    full = torch.cat([layers.forward(ids[call.span], call) for call in calls])
    expected = full[-QUESTION_TOKENS:]
    prefix = Placement(prefill_chunk(layers, paged(), header(0, PREFIX_TOKENS)), 0, exact=True)
    chunks = [
        Placement(prefill_chunk(layers, paged(PREFIX_TOKENS), header(start, start + CHUNK_TOKENS)), start, False)
        for start in range(PREFIX_TOKENS, context, CHUNK_TOKENS)
    ]
    first = chunks[0]._replace(exact=True)

    def plan(placements: Sequence[Placement], name: str, ratio: float) -> FusePlan:
        rule = RULES[name]
        return FusePlan(
            ids,
            tuple(placements),
            rule,
            ratio,
            schedule_check_layers(rule, ratio, CHECK_LAYER, layers.num_layers),
            PREFIX_TOKENS,
            num_fused=context,
            sum_over_ranks=layers.sum_over_ranks,
            probe_layers=rule.probe_layers(layers.num_layers),
        )

    gates = {
        "a chunk after its prefix": blended(plan([first], "cacheblend", 0.0)),
        "ratio 1.0 against full prefill": blended(plan(chunks, "cacheblend", 1.0)),
    }
    exact = prefill_chunk(layers, paged(PREFIX_TOKENS), header(PREFIX_TOKENS, context))
    whole = Placement(exact, PREFIX_TOKENS, False)
    scattered = plan([whole], "random", 0.5)
    gates["scattered tokens over exact KV"] = blended(scattered)
    with _small_calls(layers, context // 2):
        gates["scattered tokens in several calls"] = blended(scattered)
        gates["scattered tokens in several calls over the blocks"] = blended(scattered, kept=())
    gates["rule 'ask' over exact KV"] = blended(plan([whole], "ask", 0.3))
    gates["a query probe over placed KV"] = probed(whole)
    gates["a query probe over KV in the blocks"] = probed(whole, context // 2)
    return {gate: relative_error(output, expected) for gate, output in gates.items()}


@contextmanager
def _small_calls(layers: VllmLayers, max_rows: int) -> Iterator[None]:
    """Limit the size of calls, so that rows are split as in long prompts, with all calls planned first."""
    limits = layers.max_rows, layers.max_runs
    layers.max_rows, layers.max_runs = min(limits[0], max_rows), min(limits[1], _RUNS_OF_SMALL_CALLS)
    try:
        yield
    finally:
        layers.max_rows, layers.max_runs = limits
