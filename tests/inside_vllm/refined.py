"""Refinements inside vLLM, and the same done by the transformers engine's parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from harness import ask, tokens
from torch import Tensor

from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, FusePlan
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.vllm.jobs import Refined, RefineJob
from ragblend.engine.vllm.worker_side import worker as vllm_worker
from ragblend.engine.vllm.worker_side.latent import is_latent, split_pairs


class Recorded(NamedTuple):
    """A refinement in a worker: what it was given, and the KV [H, T, D] of each layer before and after it."""

    plan: FusePlan
    job: RefineJob
    result: Refined | None
    before: list[LayerKV]
    after: list[LayerKV]


@contextmanager
def recorded_refinements() -> Iterator[list[Recorded]]:
    """Yield a list of the refinements that this process's worker runs."""
    found: list[Recorded] = []
    refine = vllm_worker.refine

    def recording(layers: Any, unrotation: Any, plan: FusePlan, job: RefineJob, most: int) -> Refined | None:
        before = kv_in_blocks(layers, job.block_ids, job.num_computed)
        result = refine(layers, unrotation, plan, job, most)
        after = kv_in_blocks(layers, job.block_ids, job.num_computed)
        found.append(Recorded(plan, job, result, before, after))
        return result

    vllm_worker.refine = recording
    try:
        yield found
    finally:
        vllm_worker.refine = refine


def kv_in_blocks(layers: Any, block_ids: Sequence[int], num_tokens: int) -> list[LayerKV]:
    """Return each layer's keys and values [H, T, D] of the first tokens in the blocks, as transformers orders them."""
    blocks, found = torch.tensor(block_ids), []
    for layer, attention in enumerate(layers._attention):
        keys, values = (part[:num_tokens] for part in layers.read(layer, blocks))
        if is_latent(attention):
            keys = split_pairs(keys, layers._decoder._rotary[layer])
        found.append(LayerKV(keys.transpose(0, 1).clone(), values.transpose(0, 1).clone()))
    return found


@torch.inference_mode()
def refined_by_transformers(model: Any, recorded: Recorded) -> tuple[Tensor, list[LayerKV]]:
    """Refine the KV from before `recorded`. Return the recomputed positions, and the KV of the same rows."""
    layers = TransformersLayers(copy.deepcopy(model))
    plan = replace(recorded.plan.for_refinement(recorded.job.answer_ids, recorded.job.ratio), num_fused=None)
    fused = FusedKV.allocate(layers.kv_shapes, len(plan.token_ids), layers.like)
    num_tokens = recorded.job.num_computed
    for layer, kv in enumerate(recorded.before):
        fused.write(layer, slice(0, num_tokens), *kv)
    loader = LayerLoader(
        (), layers.num_layers, layers.place_keys, fused.write, layers.device, correctable=(layers, fused)
    )
    result = fuse(layers, plan, fused, loader)
    kv = [
        LayerKV(fused.keys(each)[:, :num_tokens], fused.values(each)[:, :num_tokens])
        for each in range(layers.num_layers)
    ]
    return result.recomputed, kv


def assert_refined_as_by_transformers(model: Any, recorded: Recorded, tolerance: float = 1e-4) -> None:
    """The same number of tokens, and KV that differs by at most `tolerance`, but that from before by more."""
    assert recorded.result is not None
    recomputed, expected = refined_by_transformers(model, recorded)
    assert recorded.result.num_tokens == len(recomputed) > 0
    for layer, (mine, theirs) in enumerate(zip(recorded.after, expected, strict=True)):
        for found, wanted in zip(mine, theirs, strict=True):
            assert (found - wanted).abs().max() <= tolerance, f"layer {layer}"
    last = recorded.before[-1].values, recorded.after[-1].values
    assert (last[0] - last[1]).abs().max() > 10 * tolerance


def assert_full_prefill_follows(llm: Any, ids: list[int], answer: Any, tolerance: float) -> None:
    """Tokens and log-probabilities after a refinement at ratio 1 are those of full prefill of all tokens before."""
    after = answer.kv_transfer_params["ragblend"]["refined_after"]
    found = tokens(answer)
    full = ask(llm, [*ids, *found[:after]], {"mode": "full"}, len(found) - after)
    assert found[after:] == tokens(full)
    for mine, theirs in zip(answer.outputs[0].logprobs[after:], full.outputs[0].logprobs, strict=True):
        assert all(abs(mine[each].logprob - theirs[each].logprob) <= tolerance for each in mine.keys() & theirs.keys())
