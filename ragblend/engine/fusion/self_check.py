"""The exactness gates, run on a short prompt when a model is loaded for the first time.

A model passes when stored KV, placed and fused, reproduces its own full prefill. Works on any LayerwiseModel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.plan import FusedKV, FusePlan, Placement
from ragblend.engine.fusion.prefill import prefill_chunks
from ragblend.engine.fusion.protocols import CheckableModel
from ragblend.engine.fusion.rules import RULES, Check
from ragblend.engine.store.kv import KVHeader, LayerKV, dtype_name
from ragblend.errors import UnsupportedModelError

PREFIX_TOKENS, NUM_CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS = 5, 3, 24, 7
WINDOW_TOKENS = 16  # of layers with a sliding window, for the check: less than a chunk

# Largest deviation allowed, as a share of the largest reference value. A wrong rotation, mask or projection is off
# by more than a tenth; rounding in half precision stays below a twentieth, in float32 far below a thousandth.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


class _Ready:
    """A LayerSource for KV that is placed before fusing starts."""

    def wait(self, layer: int) -> None:
        """Nothing to wait for."""


@torch.inference_mode()
def self_check(model: CheckableModel, vocabulary: int, name: str) -> None:
    """Raise UnsupportedModelError unless fused KV reproduces `model`'s full prefill. Four gates:

    stored keys, placed, equal the layer-0 keys of full prefill for every chunk (the rotation is right);
    a chunk right behind its prefix equals full prefill in every layer (the stored slice is right);
    recomputing everything over stale KV gives full prefill's logits (positions and scatter are right);
    recomputing scattered tokens over exact KV changes nothing (the mask of scattered rows is right).
    """
    tolerance = TOLERANCE[model.like.dtype]
    try:
        with model.as_checked(WINDOW_TOKENS):
            gates = _gates(model, vocabulary)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} has layers that cannot be run one at a time ({type(error).__name__}: {error}). "
            "Use a decoder of attention layers with RoPE: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, gpt-oss or a "
            "relative"
        ) from error
    for gate, deviation in gates.items():
        if not deviation <= tolerance:  # NaN fails too
            raise UnsupportedModelError(
                f"{name} fails the exactness check of {gate}: relative error {deviation:.2g}, allowed {tolerance:g}. "
                "Its layers do something that fusing does not reproduce; use another model, or mode 'full' elsewhere"
            )


def _gates(model: CheckableModel, vocabulary: int) -> dict[str, float]:
    """Relative error of each gate."""
    generator = torch.Generator().manual_seed(0)
    total = PREFIX_TOKENS + NUM_CHUNKS * CHUNK_TOKENS + QUESTION_TOKENS
    ids = torch.randint(vocabulary, (total,), generator=generator).to(model.like.device)
    reference, layers = model.full_prefill(ids)

    prefix = FusedKV.allocate(model.kv_shapes, total, model.like)
    nothing = FusePlan(ids[:PREFIX_TOKENS], (), RULES["first_k"], (Check(0, 0.0),))
    fuse(model, nothing, prefix, _Ready())
    fused = FusedKV.allocate(model.kv_shapes, total, model.like)
    fused.copy_front(prefix, PREFIX_TOKENS)
    starts = [PREFIX_TOKENS + index * CHUNK_TOKENS for index in range(NUM_CHUNKS)]
    chunks = [tuple(ids[start : start + CHUNK_TOKENS].tolist()) for start in starts]
    dtype = dtype_name(model.like.dtype)
    headers = [KVHeader("check", "check", (), chunk, model.num_layers, dtype) for chunk in chunks]
    stored = prefill_chunks(model, prefix, headers)
    placements = [Placement(kv, start, exact=False) for kv, start in zip(stored, starts, strict=True)]
    for placement in placements:
        place(model, fused, placement)

    chunk_rows = slice(PREFIX_TOKENS, PREFIX_TOKENS + NUM_CHUNKS * CHUNK_TOKENS)
    first_rows = slice(PREFIX_TOKENS, PREFIX_TOKENS + CHUNK_TOKENS)
    gates = {"key placement (RoPE)": _error(fused.keys(0)[:, chunk_rows], layers[0].keys[:, chunk_rows])}
    gates["the chunk behind its prefix"] = max(
        max(
            _error(fused.keys(index)[:, first_rows], layer.keys[:, first_rows]),
            _error(fused.values(index)[:, first_rows], layer.values[:, first_rows]),
        )
        for index, layer in enumerate(layers)
    )
    everything = FusePlan(ids, tuple(placements), RULES["cacheblend"], (Check(1, 1.0),), PREFIX_TOKENS)
    gates["ratio 1.0 against full prefill"] = _error(fuse(model, everything, fused, _Ready()).logits, reference)
    # Over the KV of full prefill itself, recomputing scattered rows must change nothing; a mask that lets them see
    # later tokens does, and it hides at ratio 0 and 1.
    for index, layer in enumerate(layers):
        fused.write(index, torch.arange(total, device=ids.device), layer.keys, layer.values)
    scattered = FusePlan(ids, tuple(placements), RULES["random"], (Check(0, 0.5),), PREFIX_TOKENS)
    gates["scattered rows over exact KV"] = _error(fuse(model, scattered, fused, _Ready()).logits, reference)
    return gates


def place(model: CheckableModel, fused: FusedKV, placement: Placement) -> None:
    """Write every layer of stored KV to its place in `fused`, keys rotated."""
    rows = torch.arange(placement.start, placement.end, device=model.like.device)
    for index in range(model.num_layers):
        keys, values = LayerKV(*(tensor.to(model.like.device) for tensor in placement.kv.layer(index)))
        fused.write(index, rows, model.place_keys(index, keys, rows), values)


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
