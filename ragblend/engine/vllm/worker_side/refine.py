"""Refinement of a running request in vLLM's paged cache: more chunk tokens are recomputed over the KV in its blocks.

It runs between two engine steps, in one piece, so that no forward pass reads a layer of the old KV beside a layer of
the new one. `refine` is like `BlendingEngine._refine` of the transformers engine; read that first. Depends on plans,
`layers` and `paged`, not on stored chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.plan import FusePlan
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.jobs import Refined, RefineJob
from ragblend.engine.vllm.worker_side.paged import PagedKV

if TYPE_CHECKING:
    from ragblend.engine.vllm.worker_side.layers import VllmLayers

_TURNED_POSITION = 7  # at which no pair of rotated dimensions has an angle of 0


def is_stale(plan: FusePlan) -> bool:
    """Return True if KV that `plan` places differs from full prefill's."""
    return any(not (each.exact and each.kv.header.is_lossless) for each in plan.placements)


def refine(
    layers: VllmLayers, unrotation: Unrotation, fused: FusePlan, job: RefineJob, max_token_layers: int
) -> Refined | None:
    """Recompute the share `job.ratio` of the chunk tokens over the KV that `fused` has placed in the job's blocks.

    Of the rows whose KV is in blocks, those without stored KV (the question, the answer) are computed again. A share
    that needs more than `max_token_layers` is lowered. Returns None, and writes nothing, if it is then at most the
    first token's.
    """
    start_s = perf_counter()
    plan = replace(fused.for_refinement(job.answer_ids, job.ratio), num_fused=job.num_computed)
    largest_ratio = _largest_ratio(plan, max_token_layers / layers.num_layers, layers)
    if largest_ratio < job.ratio:
        plan = replace(fused.for_refinement(job.answer_ids, largest_ratio), num_fused=job.num_computed)
    if plan.recompute_ratio <= fused.recompute_ratio:
        return None
    # At ratio 1 all rows attend to blocks, and no layer has to be read from them.
    kept = () if plan.recomputes_all else range(layers.num_layers)
    num_ahead = len(plan.token_ids) - plan.end
    paged = PagedKV(layers, job.block_ids, plan.end, kept, num_probe_rows=num_ahead, num_resident=plan.end)
    result = fuse(layers, plan, paged, _KVInBlocks(layers, unrotation, paged, plan))
    num_answered = job.num_computed - len(fused.token_ids) + 1
    return Refined(len(result.recomputed), num_answered, perf_counter() - start_s)


def _largest_ratio(plan: FusePlan, max_rows: float, layers: VllmLayers) -> float:
    """Return the share of the chunk tokens with which `plan` runs at most `max_rows` rows per layer, on average."""
    num_fresh = plan.end - plan.num_resident - plan.num_chunk_tokens
    if plan.probe_layers:
        num_probed = len(plan.token_ids) - plan.num_resident - plan.num_chunk_tokens
        max_rows -= num_probed * (plan.probe_layers[-1] + 1) / layers.num_layers
    elif plan.checks and not plan.recomputes_all:
        max_rows -= plan.num_chunk_tokens * (plan.check_layer + layers.kv_share) / layers.num_layers
    return max(0.0, max_rows - num_fresh) / plan.num_chunk_tokens


class _KVInBlocks:
    """LayerSource of a request whose chunks are in its blocks already: `wait` reads a layer instead of placing it."""

    def __init__(self, layers: VllmLayers, unrotation: Unrotation, paged: PagedKV, plan: FusePlan) -> None:
        self._layers, self._unrotation, self._paged = layers, unrotation, paged
        self._stale = [slice(each.start, each.end) for each in plan.placements if not each.exact]
        is_placed = Event()
        is_placed.set()
        self.ready: Sequence[Event] = [is_placed] * layers.num_layers

    def wait(self, layer: int) -> None:
        """Make `layer` the resident layer, if the PagedKV keeps it."""
        self._paged.read_layer(layer)

    def read_stored(self, layer: int, rows: Tensor) -> LayerKV:
        """Return the pre-RoPE keys and values [H, R, D] at positions `rows` [R]."""
        keys, values = self._paged.read_rows(layer, rows)
        return LayerKV(self._unrotation.undo(layer, keys, rows).transpose(0, 1), values.transpose(0, 1))

    def apply_drift(self, layer: int, drift: LayerKV | None, shares: Tensor | None = None) -> None:
        """Add `shares` [T, M] times `drift` [H, M, D], a pre-RoPE change, to the chunks whose KV is not exact."""
        if drift is not None and shares is not None:
            self._paged.add_drift(layer, self._stale, drift, shares)


class _Inverse(NamedTuple):
    """What undoes the rotation of one layer's keys, per dimension [D]."""

    order: Tensor  # dimension i before the rotation is dimension order[i] after it
    mirror: Tensor  # -1 for one dimension of each pair that is rotated together, else 1
    scale: Tensor  # by which keys before the rotation are multiplied


class Unrotation:
    """Inverse of `VllmLayers.rotate_keys`, by the model's own rotary modules, which rotate one way only.

    If one dimension of each rotated pair has the other sign, a rotation turns the other way round. Which dimensions
    are pairs, the order in which a layer leaves them, and the attention scaling are found by rotating unit vectors.
    """

    def __init__(self, layers: VllmLayers) -> None:
        self._layers = layers
        self._inverses: dict[int, _Inverse] = {}

    def undo(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the pre-RoPE keys [R, H, D] of a layer's rotated `keys` at positions `rows` [R]."""
        if layer not in self._inverses:
            self._inverses[layer] = self._find_inverse(layer, keys)
        order, mirror, scale = self._inverses[layer]
        turned = (keys * mirror)[..., order].contiguous()
        self._layers.rotate_keys(layer, turned, rows)
        return (turned * mirror)[..., order] * scale

    def _find_inverse(self, layer: int, like: Tensor) -> _Inverse:
        num_heads, size = like.shape[1:]
        unit = torch.eye(size, dtype=like.dtype, device=like.device)[:, None].repeat(1, num_heads, 1)
        positions = torch.zeros(size, dtype=torch.int64, device=like.device)
        moved, turned = unit.clone(), unit.clone()
        self._layers.rotate_keys(layer, moved, positions)
        self._layers.rotate_keys(layer, turned, positions + _TURNED_POSITION)
        each = torch.arange(size, device=like.device)
        order = moved[:, 0].abs().argmax(-1)
        turned[each, 0, order] = 0.0
        share, partner = turned[:, 0].abs().max(-1)
        mirror = torch.ones(size, dtype=like.dtype, device=like.device)
        mirror[torch.maximum(order, partner)[share > 0]] = -1.0
        return _Inverse(order, mirror, moved[each, 0, order] ** -2)
