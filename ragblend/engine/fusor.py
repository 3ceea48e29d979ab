"""Fuse stored chunk KV into the KV of one prompt (CacheBlend, Yao et al., EuroSys 2025).

Works on token ids, positions and tensors. Knows nothing about text, storage formats or RAG frameworks.
Read `fuse` first; everything else is one of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ragblend.engine.kv import ChunkKV, KVHeader, LayerKV, MemoryKV, dtype_name
from ragblend.engine.protocols import FusedLayers, LayerSource, LayerwiseModel
from ragblend.engine.selection import Check, Evidence, Rule, num_to_recompute

_T = TypeVar("_T")


class Placement(NamedTuple):
    """Stored KV and the prompt position it is placed at. `exact`: it was computed behind precisely these tokens."""

    kv: ChunkKV
    start: int
    exact: bool

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.kv.header.num_tokens


class FusedKV:
    """The KV of one prompt: per layer, keys (rotated) and values [H, capacity, D], of which `length` rows are valid.

    Grows when written beyond its capacity, so decoding appends to it. Owned by one request.
    """

    def __init__(self, layers: list[LayerKV], length: int) -> None:
        self._layers = layers
        self.length = length

    @classmethod
    def allocate(cls, shapes: Sequence[tuple[int, int, int]], capacity: int, like: Tensor) -> FusedKV:
        """Room for `capacity` tokens; `shapes[l]` is (H, D of keys, D of values), dtype and device as `like`."""
        return cls(
            [LayerKV(like.new_empty(h, capacity, dk), like.new_empty(h, capacity, dv)) for h, dk, dv in shapes], 0
        )

    def keys(self, layer: int) -> Tensor:
        """Rotated keys of one layer, [H, capacity, D]."""
        return self._layers[layer].keys

    def values(self, layer: int) -> Tensor:
        """Values of one layer, [H, capacity, D]."""
        return self._layers[layer].values

    def write(self, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [H, R, D] at `rows` (positions [R], or a slice)."""
        last = rows.stop if isinstance(rows, slice) else int(rows[-1]) + 1
        if last > self._layers[layer].keys.shape[1]:
            self._grow(last)
        self._layers[layer].keys[:, rows] = keys
        self._layers[layer].values[:, rows] = values

    def _grow(self, needed: int) -> None:
        # A quarter more at a time keeps the copying linear in the number of decoded tokens.
        for index, (keys, values) in enumerate(self._layers):
            more = max(needed, keys.shape[1] + max(64, keys.shape[1] // 4)) - keys.shape[1]
            self._layers[index] = LayerKV(
                torch.cat((keys, keys.new_empty(keys.shape[0], more, keys.shape[2])), dim=1),
                torch.cat((values, values.new_empty(values.shape[0], more, values.shape[2])), dim=1),
            )

    def copy_front(self, other: FusedKV, count: int) -> None:
        """Take the first `count` rows of every layer from `other`."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.keys[:, :count] = theirs.keys[:, :count]
            mine.values[:, :count] = theirs.values[:, :count]
        self.length = max(self.length, count)


@dataclass(frozen=True, slots=True)
class FusePlan:
    """One prompt to fuse: its ids, the stored KV with its places, and how many rows at the front are there already.

    `num_resident` rows of the FusedKV are valid and exact before fusing starts (a prefix, earlier turns).
    """

    token_ids: Tensor  # [T] int64, on the model's device
    placements: tuple[Placement, ...]  # ascending, not overlapping, all at or after num_resident
    rule: Rule
    checks: tuple[Check, ...]  # see selection.schedule
    num_resident: int = 0
    seed: int = 0
    wants_logits: bool = True  # False: only the KV is wanted, and the last token is like any other
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # adds up deviations where each rank has some of the heads

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all placed chunks."""
        return sum(placement.kv.header.num_tokens for placement in self.placements)


@dataclass(slots=True)
class Fused:
    """What fusing found: logits of the last token, and which chunk tokens were recomputed."""

    logits: Tensor  # [vocabulary] float32; empty where the plan wants none
    recomputed: Tensor  # positions [R] of the chunk tokens recomputed through the last layer
    rows_per_layer: list[float] = field(default_factory=list)  # placed chunk tokens run, probes by their share


def fuse(model: LayerwiseModel, plan: FusePlan, fused: FusedLayers, layers: LayerSource) -> Fused:
    """Fill `fused` with the prompt's KV and return the last token's logits.

    Fresh tokens (prefix, question, everything without stored KV) run through every layer. Of the tokens with
    stored KV, all that are candidates run up to the first check layer; there the rule keeps the share that the
    check asks for, and only those go on. Layer by layer, computed rows replace stored ones, and each computed
    token attends to everything at or before its own position. Ratio 1.0 is therefore full prefill.
    """
    return _drain(fuse_steps(model, plan, fused, layers))


@torch.inference_mode()
def fuse_steps(
    model: LayerwiseModel, plan: FusePlan, fused: FusedLayers, layers: LayerSource
) -> Generator[int, None, Fused]:
    """`fuse`, a layer at a time, for callers with other work in between: yields the rows that each layer ran."""
    is_candidate, offsets = _candidates(plan)
    active = _active_rows(plan, is_candidate, offsets)
    checks = {check.layer: check.ratio for check in plan.checks if plan.rule.needs_deviation and check.ratio < 1}
    hidden = model.embed(plan.token_ids[active])
    rows_per_layer: list[float] = []
    last_layer = model.num_layers - 1
    for layer in range(model.num_layers):
        layers.wait(layer)  # stored KV of this layer is now in `fused`
        probed = 0
        if layer in checks and bool(is_candidate[active].any()):
            kept, probed = _check(model, plan, fused, layer, checks[layer], hidden, active, is_candidate, offsets)
            hidden, active = hidden[kept], active[kept]
        rows_per_layer.append(int(is_candidate[active].sum()) + probed * model.kv_share)
        if len(active):
            if layer < last_layer:
                hidden = model.run_layer(layer, hidden, active, fused)
            else:
                # The last layer's output is needed for the last token alone; of the others only K and V.
                fresh = model.project_kv(layer, hidden)
                fused.write(layer, active, model.place_keys(layer, fresh.keys, active), fresh.values)
                if plan.wants_logits:
                    hidden = model.run_layer(layer, hidden[-1:], active[-1:], fused)
        yield len(active) + int(probed * model.kv_share)
    fused.length = len(plan.token_ids)
    logits = model.logits(hidden)[-1] if plan.wants_logits else torch.empty(0)
    return Fused(logits, active[is_candidate[active]], rows_per_layer)


def _candidates(plan: FusePlan) -> tuple[Tensor, Tensor]:
    """[T] bool, rows whose stored KV may be replaced; [T] int64, place within the chunk."""
    device = plan.token_ids.device
    is_candidate = torch.zeros(len(plan.token_ids), dtype=torch.bool, device=device)
    offsets = torch.zeros(len(plan.token_ids), dtype=torch.int64, device=device)
    for placement in plan.placements:
        is_candidate[placement.start : placement.end] = not placement.exact
        offsets[placement.start : placement.end] = torch.arange(placement.end - placement.start, device=device)
    if plan.wants_logits:
        is_candidate[-1] = False  # the last token is always computed: its logits are the answer
    return is_candidate, offsets


def _active_rows(plan: FusePlan, is_candidate: Tensor, offsets: Tensor) -> Tensor:
    """Positions [R] that run from layer 0 on: fresh tokens, and the candidates the first check still needs."""
    active = torch.ones(len(plan.token_ids), dtype=torch.bool, device=is_candidate.device)
    active[: plan.num_resident] = False
    for placement in plan.placements:
        active[placement.start : placement.end] = False
    if plan.wants_logits:
        active[-1] = True
    first = plan.checks[0]
    if first.ratio >= 1 or (plan.rule.needs_deviation and first.ratio > 0):
        active |= is_candidate
    elif first.ratio > 0:
        rows = is_candidate.nonzero().flatten()
        scores = plan.rule.score(Evidence(rows, offsets[rows], seed=plan.seed))
        active[rows[_top(scores, num_to_recompute(first.ratio, plan.num_chunk_tokens, len(rows)))]] = True
    return active.nonzero().flatten()


def _check(
    model: LayerwiseModel,
    plan: FusePlan,
    fused: FusedLayers,
    layer: int,
    ratio: float,
    hidden: Tensor,
    active: Tensor,
    is_candidate: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, int]:
    """Indices into `active` that go on, and how many tokens were probed. Only norm and K/V projection run here."""
    candidate = is_candidate[active].nonzero().flatten()
    rows = active[candidate]
    fresh = model.project_kv(layer, hidden[candidate])
    stored = LayerKV(fused.keys(layer)[:, rows], fused.values(layer)[:, rows])
    deviations = (
        _deviation(model.place_keys(layer, fresh.keys, rows), stored.keys),
        _deviation(fresh.values, stored.values),
    )
    if plan.sum_over_ranks is not None:
        deviations = (plan.sum_over_ranks(deviations[0]), plan.sum_over_ranks(deviations[1]))
    evidence = Evidence(rows, offsets[rows], *deviations, plan.seed)
    chosen = _top(plan.rule.score(evidence), num_to_recompute(ratio, plan.num_chunk_tokens, len(rows)))
    goes_on = ~is_candidate[active]
    goes_on[candidate[chosen]] = True
    return goes_on.nonzero().flatten(), len(rows)


def _deviation(fresh: Tensor, stored: Tensor) -> Tensor:
    """Squared L2 distance [T] between [H, T, D] tensors, in float32, summed over heads and dimensions."""
    return (fresh.float() - stored.float()).square().sum(dim=(0, 2))


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending: causal order."""
    return scores.topk(count).indices.sort().values


def prefill_chunk(model: LayerwiseModel, prefix: FusedLayers, header: KVHeader) -> MemoryKV:
    """Run one chunk behind `prefix` (its rows [0, P) valid) and keep the chunk's slice: pre-RoPE keys, values.

    `prefix` is used as scratch beyond row P and is left with the same P valid rows.
    """
    return _drain(prefill_chunk_steps(model, prefix, header))


@torch.inference_mode()
def prefill_chunk_steps(model: LayerwiseModel, prefix: FusedLayers, header: KVHeader) -> Generator[int, None, MemoryKV]:
    """`prefill_chunk`, a layer at a time: yields the rows that each layer ran."""
    start = prefix.length
    device = prefix.keys(0).device
    rows = torch.arange(start, start + header.num_tokens, device=device)
    hidden = model.embed(torch.tensor(header.token_ids, device=device))
    stored = []
    for layer in range(model.num_layers):
        hidden, kv = model.run_layer_keeping_kv(layer, hidden, rows, prefix)
        stored.append(LayerKV(kv.keys.contiguous().cpu(), kv.values.contiguous().cpu()))
        yield len(rows)
    assert header.dtype == dtype_name(stored[0].keys.dtype)
    return MemoryKV(header, tuple(stored))


def _drain(steps: Generator[int, None, _T]) -> _T:
    """Run a generator to its end, for what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
