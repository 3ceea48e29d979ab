"""Fuse stored chunk KV into the KV of one prompt (CacheBlend, Yao et al., EuroSys 2025).

Works on token ids, positions and tensors. Knows nothing about text, storage formats or RAG frameworks.
Read `fuse` first; everything else is one of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import ProbeQueries, attend_with_weights, attention_mass
from ragblend.engine.fusion.drift_correction import DriftCorrection, fit_drift_correction, similarity_layer
from ragblend.engine.fusion.plan import FusePlan, FuseResult
from ragblend.engine.fusion.protocols import (
    CorrectableLayerSource,
    FreshKVHook,
    LayerSource,
    LayerwiseModel,
    PromptKVBuffer,
)
from ragblend.engine.fusion.rules import RuleInputs, num_to_recompute
from ragblend.engine.store.kv import LayerKV

_T = TypeVar("_T")


class LayerCall(NamedTuple):
    """A layer to be run over some rows of a prompt, as `LayerwiseModel.run_layer` takes it."""

    layer: int
    hidden: Tensor  # [R, hidden size]
    rows: Tensor  # positions [R]
    fused: PromptKVBuffer
    hook: FreshKVHook | None = None


Steps = Generator[int | LayerCall | Event, Any, _T]
"""Work in steps: yields the rows that it ran through a layer itself, a LayerCall, whose output it must be sent next, or
an Event: gone on with before that is set, it blocks until then."""


def fuse(
    model: LayerwiseModel,
    plan: FusePlan,
    fused: PromptKVBuffer,
    layers: LayerSource,
    ends_s: list[float] | None = None,
) -> FuseResult:
    """Fill `fused` with the prompt's KV and return the last token's logits.

    Fresh tokens (prefix, question, everything without stored KV) run through every layer. Of the tokens with
    stored KV, all that are candidates run up to the first check layer; there the rule keeps the share that the
    check asks for, and only those go on; each later check keeps fewer of them. A rule that asks the question has the
    fresh tokens run ahead over stale KV, as far as it reads, and chooses before layer 0. Layer by layer, computed rows
    replace stored ones, and each computed token attends to everything at or before its own position. Ratio 1.0 is
    therefore full prefill. A rule that carries has the candidates that are kept moved, before anybody attends to them,
    as the recomputed ones say (`drift_gain`).

    `ends_s`, where given, gets the moment at which each layer was done, in `perf_counter` seconds.
    """
    return run_to_completion(model, fuse_steps(model, plan, fused, layers, ends_s))


@torch.inference_mode()
def fuse_steps(
    model: LayerwiseModel, plan: FusePlan, fused: PromptKVBuffer, layers: LayerSource, ends_s: list[float] | None = None
) -> Steps[FuseResult]:
    """`fuse`, a layer at a time, for callers with other work in between, or with layers of other prompts to run."""
    state = _candidates(plan)
    chooses = plan.checks[0].ratio > 0 and plan.checks[-1].ratio < 1
    # Layer 0's stored KV is exact, for it depends on the token alone: a model of one layer has nothing to choose.
    asks_first = bool(plan.probe_layers) and chooses and model.num_layers > 1 and bool(state.mask.any())
    probe = (yield from _probe(model, plan, fused, layers, state)) if asks_first else None
    active = _active_rows(plan, state)
    num_stale = int(state.mask[active].sum())  # the device is looked into where the rows change, not at every layer
    checks = {check.layer: check.ratio for check in plan.checks if plan.rule.needs_deviation and check.ratio < 1}
    hidden = model.embed(plan.token_ids[active])
    rows_per_layer: list[float] = []
    fixed_cost = 0.0
    last_layer = model.num_layers - 1
    for layer in range(model.num_layers):
        if layers.ready is not None:
            yield layers.ready[layer]
        layers.wait(layer)  # stored KV of this layer is now in `fused`
        probe_rows, measured = 0 if probe is None else probe.extra_rows[layer], 0.0
        if layer in checks and num_stale:
            kept, num_measured = _select_at_check_layer(model, plan, fused, layer, checks[layer], hidden, active, state)
            hidden, active = hidden[kept], active[kept]
            num_stale = int(state.mask[active].sum())
            measured = num_measured * model.kv_share
            fixed_cost = fixed_cost or measured
        # Layer 0 is exact as stored.
        hook = (
            _drift_correction_hook(model, plan, layers, layer, active, state)
            if plan.corrects_drift and layer > 0
            else None
        )
        rows_per_layer.append(num_stale + probe_rows + measured)
        if layer == 0 and probe is not None:
            hidden = yield from _run_first_layer(fused, hidden, active, state, probe)
        elif len(active) and layer < last_layer:
            hidden = yield LayerCall(layer, hidden, active, fused, hook)
        elif len(active):
            # The last layer's output is needed for the last token alone; of the others only K and V.
            fresh = model.project_kv(layer, hidden)
            if hook is not None:
                hook.callback(LayerKV(fresh.keys[:, hook.row_indices], fresh.values[:, hook.row_indices]))
            fused.write(layer, active, model.place_keys(layer, fresh.keys, active), fresh.values)
            if plan.wants_logits:
                hidden = yield LayerCall(layer, hidden[-1:], active[-1:], fused)
            measured += len(active)
        if ends_s is not None:
            ends_s.append(perf_counter())
        yield int(measured)
    fused.length = plan.end
    return FuseResult(
        model.logits(hidden)[-1] if plan.wants_logits else torch.empty(0),
        active[state.mask[active]],
        rows_per_layer,
        fixed_cost,
        probe.seconds if probe is not None else 0.0,
        state.attention,
        state.deviation,
        state.select_s,
    )


@dataclass(slots=True)
class _CandidateState:
    """What is known about every token of the prompt before the first check. All tensors [T]."""

    mask: Tensor  # bool, candidates: rows whose stored KV may be replaced
    is_fresh: Tensor  # bool, tokens without stored KV, which run through every layer; the last token is always one
    is_edge: Tensor  # bool, the first and the last row of each placement
    chunks: Tensor  # int64, the placed chunk that it is in
    drift_gain: Tensor  # float32, of how far others say that it moves: the share that it does where it is kept
    attention: Tensor | None = None  # float32, once the question was run ahead
    deviation: Tensor | None = None  # float32, once the first check measured it: see Fused
    select_s: float = 0.0  # seconds at the checks
    last_correction: tuple[Tensor, Tensor, DriftCorrection | None] | None = (
        None  # the rows that ran last, who tells, and what of it
    )

    def choose(
        self,
        plan: FusePlan,
        ratio: float,
        rows: Tensor,
        key_deviation: Tensor | None = None,
        value_deviation: Tensor | None = None,
    ) -> Tensor:
        """Which of the candidates `rows` [N] are recomputed at `ratio`: indices, ascending, for causal order.

        Deviations [N] as in RuleInputs; None where the rule measures none.
        """
        attention = None if self.attention is None else self.attention[rows]
        evidence = RuleInputs(rows, key_deviation, value_deviation, attention, self.is_edge[rows], plan.seed)
        scores = plan.rule.score(evidence)
        return scores.topk(num_to_recompute(ratio, plan.num_chunk_tokens, len(rows))).indices.sort().values


def _candidates(plan: FusePlan) -> _CandidateState:
    """Which rows may be replaced, and which chunk they are in."""
    device = plan.token_ids.device
    is_candidate = torch.zeros(len(plan.token_ids), dtype=torch.bool, device=device)
    is_edge, is_fresh = torch.zeros_like(is_candidate), torch.ones_like(is_candidate)
    is_fresh[: plan.num_resident] = False
    chunks = torch.zeros(len(plan.token_ids), dtype=torch.int64, device=device)
    drift_gain = torch.zeros(len(plan.token_ids), device=device)
    recomputes_all = plan.checks[-1].ratio >= 1
    for number, placement in enumerate(plan.placements):
        stays = placement.exact and (placement.kv.header.is_lossless or not recomputes_all)
        is_candidate[placement.start : placement.end] = not stays
        is_fresh[placement.start : placement.end] = False
        is_edge[[placement.start, placement.end - 1]] = True
        share = plan.rule.drift_gain_in_context if placement.has_context else plan.rule.drift_gain
        drift_gain[placement.start : placement.end] = share
        chunks[placement.start : placement.end] = number
    if plan.wants_logits:
        is_candidate[-1], is_fresh[-1] = False, True  # always computed: its logits are the answer
    return _CandidateState(is_candidate, is_fresh, is_edge, chunks, drift_gain)


class _ProbeResult(NamedTuple):
    """The question and all other fresh tokens, run over stale KV as far as the rule wanted to see."""

    hidden: Tensor  # [rows that are fused later, hidden size] after layer 0
    extra_rows: list[int]  # token-layers that the probe adds at each layer
    seconds: float


def _probe(
    model: LayerwiseModel, plan: FusePlan, fused: PromptKVBuffer, layers: LayerSource, state: _CandidateState
) -> Steps[_ProbeResult]:
    """Run the fresh tokens through the probe's layers over the stale KV, and note in `known` what they attend to.

    Positions are the prompt's own and the softmax is over all of it. Leaves the fresh rows' KV in `fused`, where the
    main pass replaces it.
    """
    rows = state.is_fresh.nonzero().flatten()
    hidden = first = model.embed(plan.token_ids[rows])
    masses: list[Tensor] = []
    seconds = 0.0

    def watch(queries: ProbeQueries, keys: Tensor, values: Tensor | None = None) -> Tensor | None:
        if values is None:
            masses.append(attention_mass(queries.part(slice(-plan.num_queries, None)), keys))
            return None
        output, mass = attend_with_weights(queries, keys, values, plan.num_queries)
        masses.append(mass)
        return output

    for layer in range(plan.probe_layers[-1] + 1):
        if layers.ready is not None:
            yield layers.ready[layer]
        start_s = perf_counter()
        layers.wait(layer)
        hidden = model.run_probe_layer(layer, hidden, rows, fused, watch if layer in plan.probe_layers else None)
        if layer == 0:
            first = hidden[rows < plan.end]
        seconds += perf_counter() - start_s
        yield len(rows)
    state.attention = _mean_over_ranks(plan, torch.stack(masses).mean(0))
    # Layer 0's output is kept, so those rows alone are more that are only asked.
    extra_rows = [len(rows) - len(first), *[len(rows)] * plan.probe_layers[-1]]
    extra_rows += [0] * (model.num_layers - len(extra_rows))
    return _ProbeResult(first, extra_rows, seconds)


def _mean_over_ranks(plan: FusePlan, shares: Tensor) -> Tensor:
    """Every rank has as many of the heads, so their shares count alike."""
    if plan.sum_over_ranks is None:
        return shares
    summed = plan.sum_over_ranks(torch.cat((shares, shares.new_ones(1))))
    return summed[:-1] / summed[-1]


def _run_first_layer(
    fused: PromptKVBuffer, hidden: Tensor, active: Tensor, state: _CandidateState, probe: _ProbeResult
) -> Steps[Tensor]:
    """Layer 0's output [R, hidden size] of the active rows. Stored layer-0 KV is exact, so the probe's is too."""
    stale = state.mask[active]
    output = probe.hidden.new_empty(len(active), *probe.hidden.shape[1:])
    if bool(stale.any()):
        output[stale] = yield LayerCall(0, hidden[stale], active[stale], fused)
    output[~stale] = probe.hidden
    return output


def _active_rows(plan: FusePlan, state: _CandidateState) -> Tensor:
    """Positions [R] that run from layer 0 on: fresh tokens, and the candidates the first check still needs."""
    active = state.is_fresh.clone()
    active[plan.end :] = False
    ratio = plan.checks[0].ratio
    rows = state.mask.nonzero().flatten()
    count = num_to_recompute(ratio, plan.num_chunk_tokens, len(rows))
    if count and ratio < 1 and not plan.rule.needs_deviation:
        active[rows[state.choose(plan, ratio, rows)]] = True
    elif count:
        active |= state.mask
    return active.nonzero().flatten()


def _select_at_check_layer(
    model: LayerwiseModel,
    plan: FusePlan,
    fused: PromptKVBuffer,
    layer: int,
    ratio: float,
    hidden: Tensor,
    active: Tensor,
    state: _CandidateState,
) -> tuple[Tensor, int]:
    """Indices into `active` that go on, and how many tokens were measured. Only norm and K/V projection run here."""
    start_s = perf_counter()
    candidate = state.mask[active].nonzero().flatten()
    rows = active[candidate]
    fresh = model.project_kv(layer, hidden[candidate])
    stored = LayerKV(fused.keys(layer)[:, rows], fused.values(layer)[:, rows])
    fresh = LayerKV(model.place_keys(layer, fresh.keys, rows), fresh.values)
    deviations = (_deviation(fresh.keys, stored.keys), _deviation(fresh.values, stored.values))
    if plan.sum_over_ranks is not None:
        deviations = (plan.sum_over_ranks(deviations[0]), plan.sum_over_ranks(deviations[1]))
    if state.deviation is None:
        state.deviation = torch.full_like(plan.token_ids, torch.nan, dtype=torch.float32)
        state.deviation[rows] = relative_deviation(fresh, stored, plan.sum_over_ranks)
    chosen = state.choose(plan, ratio, rows, *deviations)
    goes_on = ~state.mask[active]
    goes_on[candidate[chosen]] = True
    state.select_s += perf_counter() - start_s
    return goes_on.nonzero().flatten(), len(rows)


def _drift_correction_hook(
    model: LayerwiseModel, plan: FusePlan, layers: LayerSource, layer: int, active: Tensor, state: _CandidateState
) -> FreshKVHook | None:
    """Moves the candidates that are kept as the recomputed ones among `active` say, once those know their own KV.

    Both engines give the same: heads are each rank's own, and what is alike is found over all of them.
    """
    source = cast("CorrectableLayerSource", layers)  # whoever gives a plan that carries has one
    if (
        state.last_correction is None or state.last_correction[0] is not active
    ):  # most layers run the same rows as the one before
        row_indices = state.mask[active].nonzero().flatten()
        state.last_correction = (
            active,
            row_indices,
            _fit_correction(model, plan, source, active, state) if len(row_indices) else None,
        )
    _, row_indices, correction = state.last_correction
    if correction is None:
        if len(row_indices):  # all are recomputed; otherwise nothing was placed but what is exact
            source.apply_drift(layer, None)
        return None

    def apply_correction(fresh: LayerKV) -> None:
        source.apply_drift(
            layer, correction.drift(fresh, source.read_stored(layer, correction.rows)), correction.shares
        )

    return FreshKVHook(row_indices, apply_correction)


def _fit_correction(
    model: LayerwiseModel, plan: FusePlan, source: CorrectableLayerSource, active: Tensor, state: _CandidateState
) -> DriftCorrection | None:
    """What the candidates among the rows `active` tell the others; None where there are no others."""
    rows, is_active = state.mask.nonzero().flatten(), torch.zeros_like(state.mask)
    is_active[active] = True
    is_recomputed = is_active[rows]
    if bool(is_recomputed.all()):
        return None
    similarity_values = source.read_stored(similarity_layer(model.num_layers, plan.probe_layers[-1]), rows).values
    shares = state.drift_gain.masked_fill(is_active, 0.0)
    return fit_drift_correction(
        similarity_values, rows, state.chunks[rows], is_recomputed, shares, partial(_mean_over_ranks, plan)
    )


def _deviation(fresh: Tensor, stored: Tensor) -> Tensor:
    """Squared L2 distance [T] between [H, T, D] tensors, in float32, summed over heads and dimensions."""
    return (fresh.float() - stored.float()).square().sum(dim=(0, 2))


def relative_deviation(
    fresh: LayerKV, stored: LayerKV, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """How far each token's `stored` KV is from `fresh`, both [H, T, D], keys rotated alike: [T] float32, 0 is
    equal.

    The mean of |k - k'| / |k'| and |v - v'| / |v'|, with k' and v' the fresh vectors of all heads, L2 norms. So keys
    and values count alike, however large a model's keys are. `sum_over_ranks` as in FusePlan.
    """
    total = sum_over_ranks or (lambda squares: squares)
    nothing = torch.zeros((), device=fresh.keys.device)
    shares = [
        total(_deviation(new, old)) / total(_deviation(new, nothing)).clamp_min(torch.finfo(torch.float32).tiny)
        for new, old in zip(fresh, stored, strict=True)
    ]
    return (shares[0].sqrt() + shares[1].sqrt()) / 2


@torch.inference_mode()
def run_to_completion(model: LayerwiseModel, steps: Steps[_T]) -> _T:
    """Run steps to their end, for what they return."""
    output: Tensor | None = None
    while True:
        try:
            step = steps.send(output)
        except StopIteration as end:
            result: _T = end.value
            return result
        output = model.run_layer(*step) if isinstance(step, LayerCall) else None
