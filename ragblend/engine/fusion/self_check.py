"""Self-check of a model at loading: four exactness gates on a short prompt.

A model passes if stored KV, placed and fused, reproduces its own full prefill. Depends on a
transformers model as layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, FusePlan, Placement
from ragblend.engine.fusion.prefill import prefill_chunks
from ragblend.engine.fusion.rules import DRIFT_GAIN, DRIFT_GAIN_IN_CONTEXT, RULES
from ragblend.engine.store.format.kv import KVHeader, dtype_name
from ragblend.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ragblend.engine.transformers.layers import TransformersLayers

log = logging.getLogger(__name__)

GATES = (
    "key placement (RoPE)",
    "the chunk behind its prefix",
    "ratio 1.0 against full prefill",
    "scattered rows over exact KV",
)
KERNEL_GATE = "Triton's kernels against torch"  # only of a model that uses the kernels
PREFIX_TOKENS, NUM_CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS = 5, 3, 24, 7
WINDOW_TOKENS = 16  # of layers with a sliding window, for the check: less than a chunk

# Largest deviation allowed, as a share of the largest reference value. A wrong rotation, mask or projection is off
# by more than a tenth; rounding in half precision stays below a twentieth, in float32 far below a thousandth.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


# A model may compute a row differently when the batch has other rows: the kernel depends on their number, each kernel
# rounds differently, and LLM.int8 keeps whole columns exact if any row has an outlier. This noise is the model's own.
# Over many layers in half precision it reaches a gate's tolerance (Llama 3.1 8B's shape in bfloat16 on an H100: 0.06).
# If a gate exceeds its tolerance, the noise is therefore measured, by the model's own forward over pieces of the same
# prompt, and each gate allows twice the noise: without quantised weights at most MAX_TOLERANCE, less than the error of
# a wrong mask.
CUTS = ((PREFIX_TOKENS, PREFIX_TOKENS + CHUNK_TOKENS), (1, 2, 3), (50,), (83,))
NOISE_FACTOR = 2
MAX_TOLERANCE = 0.1


@torch.inference_mode()
def self_check(model: TransformersLayers, vocabulary: int, name: str, *, is_quantised: bool = False) -> None:
    """Raise UnsupportedModelError unless fused KV reproduces `model`'s full prefill.

    Four checks (`GATES`) compare results for a short prompt with full prefill:

    - Rotation: the stored keys of every chunk, rotated to their positions, equal full prefill's keys at layer 0.
    - Stored slice: the KV of a chunk directly after its prefix equals full prefill's KV at every layer.
    - Positions and scattering: recomputing all tokens over stale KV gives full prefill's logits.
    - Mask of scattered rows: recomputing scattered tokens over exact KV changes no logit.

    If the model uses Triton's kernels, a fifth check compares a blend with query probe and drift correction by the
    kernels with the same blend by torch.

    In half precision or with quantised weights, a model's results vary with the number of tokens that run together.
    An error of up to twice this variation is accepted and logged as a warning. Without quantised weights,
    an error above MAX_TOLERANCE is never accepted. `vocabulary`: number of token ids. `name`: the model's, for errors.
    """
    allowed = dict.fromkeys((*GATES, KERNEL_GATE), TOLERANCE[model.like.dtype])
    most = math.inf if is_quantised else MAX_TOLERANCE if model.like.dtype != torch.float32 else 0.0
    try:
        with model.self_check_mode(WINDOW_TOKENS):
            gates = _gates(model, vocabulary)
            if most and any(gates[gate] > allowed[gate] for gate in GATES):
                noise = _own_noise(model, vocabulary)
                allowed |= {gate: max(allowed[gate], min(NOISE_FACTOR * noise[gate], most)) for gate in GATES}
                summary = "; ".join(f"{gate} {gates[gate]:.2g} of {allowed[gate]:.2g}" for gate in gates)
                log.warning(
                    "the results of %s depend on how many tokens run together (logits by %.2g, KV by %.2g of their "
                    "largest value, in %s); the exactness check found and allows: %s",
                    name,
                    noise[GATES[2]],
                    noise[GATES[1]],
                    dtype_name(model.like.dtype),
                    summary,
                )
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} has layers that cannot be run one at a time ({type(error).__name__}: {error}). "
            "Use a decoder of attention layers with RoPE: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, gpt-oss or a "
            "relative"
        ) from error
    for gate, deviation in gates.items():
        if not deviation <= allowed[gate]:  # NaN fails too
            raise UnsupportedModelError(
                f"{name} fails the exactness check of {gate}: relative error {deviation:.2g}, allowed "
                f"{allowed[gate]:.2g}. Its stored KV, placed and recomputed, is not what its own forward pass "
                "computes, so answers would be wrong. Use a model of the table in docs/models.md, or run this one "
                "without ragblend"
            )


def _prompt(model: TransformersLayers, vocabulary: int) -> Tensor:
    """Return the ids [T] of the gates' prompt."""
    total = PREFIX_TOKENS + NUM_CHUNKS * CHUNK_TOKENS + QUESTION_TOKENS
    return torch.randint(vocabulary, (total,), generator=torch.Generator().manual_seed(0)).to(model.like.device)


def _own_noise(model: TransformersLayers, vocabulary: int) -> dict[str, float]:
    """Return, per gate, the relative change of the model's own results when its forward gets the prompt in pieces."""
    ids = _prompt(model, vocabulary)
    reference, layers = model.full_prefill(ids)
    noise = dict.fromkeys(GATES, 0.0)
    for cuts in CUTS:
        logits, cut_layers = model.full_prefill(ids, cuts)
        pairs = [pair for kv in zip(cut_layers, layers, strict=True) for pair in zip(*kv, strict=True)]
        changes = (
            relative_error(*pairs[0]),
            max(relative_error(*pair) for pair in pairs),
            *[relative_error(logits, reference)] * 2,
        )
        noise = {gate: max(noise[gate], value) for gate, value in zip(GATES, changes, strict=True)}
    return noise


def _gates(model: TransformersLayers, vocabulary: int) -> dict[str, float]:
    """Return the relative error of each gate."""
    ids = _prompt(model, vocabulary)
    total = len(ids)
    reference, layers = model.full_prefill(ids)

    prefix = FusedKV.allocate(model.kv_shapes, total, model.like)
    fuse(model, FusePlan(ids[:PREFIX_TOKENS], ()), prefix)
    fused = FusedKV.allocate(model.kv_shapes, total, model.like)
    fused.copy_front(prefix, PREFIX_TOKENS)
    starts = [PREFIX_TOKENS + index * CHUNK_TOKENS for index in range(NUM_CHUNKS)]
    chunks = [tuple(ids[start : start + CHUNK_TOKENS].tolist()) for start in starts]
    dtype = dtype_name(model.like.dtype)
    headers = [KVHeader("check", "check", (), chunk, model.num_layers, dtype) for chunk in chunks]
    stored = prefill_chunks(model, prefix, headers)
    placements = [Placement(kv, start, exact=False) for kv, start in zip(stored, starts, strict=True)]
    to = (model.num_layers, model.place_keys, fused.write, model.device)
    with LayerLoader(placements, *to, correctable=(model, fused)) as loader:
        for index in range(model.num_layers):
            loader.wait(index)

    chunk_rows = slice(PREFIX_TOKENS, PREFIX_TOKENS + NUM_CHUNKS * CHUNK_TOKENS)
    first_rows = slice(PREFIX_TOKENS, PREFIX_TOKENS + CHUNK_TOKENS)
    gates = {GATES[0]: relative_error(fused.keys(0)[:, chunk_rows], layers[0].keys[:, chunk_rows])}
    gates[GATES[1]] = max(
        max(
            relative_error(fused.keys(index)[:, first_rows], layer.keys[:, first_rows]),
            relative_error(fused.values(index)[:, first_rows], layer.values[:, first_rows]),
        )
        for index, layer in enumerate(layers)
    )
    everything = FusePlan(ids, tuple(placements), RULES["cacheblend"], 1.0, num_resident=PREFIX_TOKENS)
    gates[GATES[2]] = relative_error(fuse(model, everything, fused).logits, reference)
    # Over the KV of full prefill itself, recomputing scattered rows must change nothing. A mask that lets them attend
    # to later tokens changes them, and has no effect at ratio 0 and 1.
    for index, layer in enumerate(layers):
        fused.write(index, torch.arange(total, device=ids.device), layer.keys, layer.values)
    scattered = FusePlan(ids, tuple(placements), RULES["random"], 0.5, num_resident=PREFIX_TOKENS)
    gates[GATES[3]] = relative_error(fuse(model, scattered, fused).logits, reference)
    if model.uses_kernels:
        gates[KERNEL_GATE] = _kernel_error(model, scattered, prefix)
    return gates


def _kernel_error(model: TransformersLayers, plan: FusePlan, prefix: FusedKV) -> float:
    """Return the relative error of a blend's logits by Triton's kernels to its logits by torch."""
    # A rule that chooses the same tokens in both, because attention that differs by rounding might choose others.
    rule = replace(plan.rule, drift_gain=DRIFT_GAIN, drift_gain_in_context=DRIFT_GAIN_IN_CONTEXT)
    plan = replace(plan, rule=rule, probe_layers=tuple(range(model.num_layers)))
    logits = []
    for uses_kernels in (False, True):
        fused = FusedKV.allocate(model.kv_shapes, len(plan.token_ids), model.like)
        fused.copy_front(prefix, PREFIX_TOKENS)
        to = (model.num_layers, model.place_keys, fused.write, model.device)
        model.uses_kernels = uses_kernels
        with LayerLoader(plan.placements, *to, together=True, correctable=(model, fused)) as loader:
            logits.append(fuse(model, plan, fused, loader).logits)
    return relative_error(logits[1], logits[0])


class _WithKernels(Protocol):
    uses_kernels: bool


def check_with_kernels(layers: _WithKernels, check: Callable[[], None], name: str) -> None:
    """Run `check` of the model `name`. Do without Triton's kernels if the model passes it only without them."""
    if not layers.uses_kernels:
        check()
        return
    try:
        check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # also those of Triton's compiler
        layers.uses_kernels = False
        check()
        log.warning("%s is blended without Triton's kernels, which fail its exactness check: %s", name, error)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
