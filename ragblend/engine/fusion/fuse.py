"""Fuse stored chunk KV into the KV of one prompt (CacheBlend, Yao et al., EuroSys 2025).

Works on token ids, positions and tensors. Does not depend on text, storage formats or RAG frameworks.
Read `fuse` first; everything else is one of its steps.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ragblend.engine.fusion.attention import (
    ProbeQueries,
    attend_with_weights,
    attention_mass,
    position_end,
    positions_before,
    positions_on_device,
)
from ragblend.engine.fusion.check_layers import CheckLayer, measure_deviation
from ragblend.engine.fusion.plan import FusePlan, FuseResult
from ragblend.engine.fusion.protocols import (
    FreshRowsCallback,
    LayerSource,
    LayerwiseModel,
    PromptKVBuffer,
)
from ragblend.engine.fusion.rules import (
    DriftCorrection,
    RuleInputs,
    fit_drift_correction,
    num_to_recompute,
    similarity_layer,
)
from ragblend.engine.store.format.kv import LayerKV

_T = TypeVar("_T")


class LayerCall(NamedTuple):
    """Arguments of `LayerwiseModel.run_layer`: a layer to run over some rows of a prompt."""

    layer: int
    hidden: Tensor  # [R, hidden size]
    rows: Tensor  # positions [R]
    fused: PromptKVBuffer
    hook: FreshRowsCallback | None = None


Steps = Generator[int | LayerCall | Event, Any, _T]
"""Generator of work in steps. It yields the number of rows that it ran through a layer, or a LayerCall whose output
must be sent next, or an Event: resumed before the event is set, the generator blocks."""


def fuse(
    model: LayerwiseModel,
    plan: FusePlan,
    fused: PromptKVBuffer,
    layers: LayerSource | None = None,
    ends_s: list[float] | None = None,
) -> FuseResult:
    """Fill `fused` with the prompt's KV. Return the last token's logits, the recomputed tokens and the cost.

    `layers` places the stored KV in `fused`; None: it is placed already.

    Fresh tokens, which have no stored KV (the question, for example), run through every layer. Candidates are the
    tokens whose stored KV may be replaced. For a rule that measures deviations, all candidates run up to the first
    check layer. There the rule selects some of them, and only these run through the later layers; each later check
    layer selects from those that still run. The KV of the others stays as stored from the check layer on that dropped
    them. Other rules select before the first layer, so that only selected candidates run. Before a rule with a query
    probe selects, the fresh tokens run over the stored KV, up to the last probe layer. In each layer, computed rows
    replace stored ones. Each computed token attends to all tokens at or before its position, so ratio 1.0 is full
    prefill. With drift correction (`drift_gain`), the estimated change of kept candidates is added to their KV before
    attention.

    If `ends_s` is a list, the end of each layer is appended to it, in `perf_counter` seconds.
    """
    return run_to_completion(model, fuse_steps(model, plan, fused, layers, ends_s))


@torch.inference_mode()
def fuse_steps(
    model: LayerwiseModel,
    plan: FusePlan,
    fused: PromptKVBuffer,
    layers: LayerSource | None = None,
    ends_s: list[float] | None = None,
) -> Steps[FuseResult]:
    """Run `fuse` a layer at a time (see `Steps`), for callers that interleave it with other work or other prompts."""
    state = _candidates(plan)
    # Layer 0's stored KV is exact, because it depends on the token alone: in a model of one layer nothing is stale.
    is_stale = model.num_layers > 1 and len(state.rows) > 0
    probes_first = bool(plan.probe_layers) and plan.recomputes_some and is_stale
    if probes_first:
        yield from _probe(model, plan, fused, layers, state)
    active = _active_rows(plan, state)
    checks = {check.layer: check for check in plan.checks if not check.keeps_all}
    hidden = model.embed(plan.token_ids[active.rows])
    rows_per_layer: list[float] = []
    fixed_cost, kept = 0.0, dict.fromkeys(checks, 0)
    last_layer = model.num_layers - 1
    for layer in range(model.num_layers):
        if layers is not None:
            yield layers.ready[layer]
            layers.wait(layer)  # stored KV of this layer is now in `fused`
        probe_rows, measured = state.probe_rows[layer] if layer < len(state.probe_rows) else 0, 0.0
        if layer in checks and len(active.candidates):
            measured = len(active.candidates) * model.kv_share
            fixed_cost = fixed_cost or measured
            remaining, active = _select_at_check_layer(model, plan, checks[layer], fused, hidden, active, state)
            hidden = hidden[remaining]
            kept[layer] = len(active.candidates)
        # Layer 0 is exact as stored.
        hook = None
        if plan.corrects_drift and layer > 0 and layers is not None:
            hook = _drift_correction_hook(model, plan, layers, layer, active, state)
        rows_per_layer.append(len(active.candidates) + probe_rows + measured)
        if layer == 0 and state.probe_hidden is not None:
            hidden = yield from _run_first_layer(fused, hidden, active, state.probe_hidden)
        elif len(active.rows) and layer < last_layer:
            hidden = yield LayerCall(layer, hidden, active.rows, fused, hook)
        elif len(active.rows):
            # The last layer's output is needed for the last token alone; other tokens need only its K and V.
            fresh = model.project_kv(layer, hidden)
            if hook is not None:
                hook.callback(LayerKV(fresh.keys[:, hook.row_indices], fresh.values[:, hook.row_indices]))
            fused.write(layer, active.rows, model.place_keys(layer, fresh.keys, active.rows), fresh.values)
            if plan.wants_logits:
                hidden = yield LayerCall(layer, hidden[-1:], state.last_row, fused)
            measured += len(active.rows)
        if ends_s is not None:
            ends_s.append(perf_counter())
        yield int(measured)
    fused.length = plan.end
    return FuseResult(
        model.logits(hidden)[-1] if plan.wants_logits else torch.empty(0),
        active.candidate_rows,
        rows_per_layer,
        fixed_cost,
        state.probe_s,
        state.attention,
        state.deviation,
        state.select_s,
        kept,
    )


class _ActiveRows(NamedTuple):
    """Rows of a prompt that run through a layer: R rows, of which F are fresh tokens and S are candidates.

    The host knows their numbers, and does not wait for the device to know which rows they are.
    """

    rows: Tensor  # positions [R], ascending
    fresh: Tensor  # indices [F] into `rows`, ascending
    candidates: Tensor  # indices [S] into `rows`, ascending
    candidate_rows: Tensor  # positions [S] of the same candidates
    chosen: Tensor  # indices [S] of the same candidates into `_CandidateState.rows`, ascending


@dataclass(slots=True)
class _CandidateState:
    """State of one prompt while it is fused: its C candidates, whose stored KV may be replaced, and its fresh tokens.

    Fresh tokens have no stored KV and run through every layer. With logits, the last token is one of them.
    """

    rows: Tensor  # positions [C] of the candidates, ascending
    fused_rows: Tensor  # positions [F] of the fresh tokens before the plan's end, ascending
    is_edge: Tensor  # bool [C], the first and the last row of each placement
    chunks: Tensor  # int64 [C], index of the placement that the candidate is in
    fresh_rows: Tensor  # positions of all fresh tokens, ascending; the first F are before the plan's end
    last_row: Tensor  # position [1] of the last token
    drift_gain: Tensor  # float32 [T], factor on the estimated change of the token, if it is kept
    attention: Tensor | None = None  # float32 [T], set by the query probe
    probe_hidden: Tensor | None = None  # the probe's output of layer 0 for `fused_rows`, [F, hidden size]
    probe_rows: Sequence[int] = ()  # token-layers that the probe adds at each layer up to its last
    probe_s: float = 0.0
    deviation: Tensor | None = None  # float32, set at the first check layer, see FuseResult
    select_s: float = 0.0  # seconds spent at the check layers
    # Rows that ran last, and the correction fitted for them.
    last_correction: tuple[_ActiveRows, DriftCorrection] | None = None

    def choose(self, plan: FusePlan) -> Tensor:
        """Return the indices of the candidates to recompute, ascending, for a rule that measures no deviation."""
        attention = None if self.attention is None else self.attention[self.rows]
        inputs = RuleInputs(self.rows, attention=attention, is_edge=self.is_edge, seed=plan.seed)
        count = num_to_recompute(plan.recompute_ratio, plan.num_chunk_tokens, len(self.rows))
        return plan.rule.score(inputs).topk(count).indices.sort().values

    def with_fresh_rows(self, plan: FusePlan, chosen: Tensor) -> _ActiveRows:
        """Return the fresh rows before the plan's end together with the candidates `chosen` [S]."""
        num_fresh, candidate_rows = len(self.fused_rows), self.rows[chosen]
        rows, order = torch.cat((self.fused_rows, candidate_rows)).sort()
        indices = order.argsort()
        return _ActiveRows(
            positions_before(rows, plan.end),
            indices[:num_fresh],
            indices[num_fresh:],
            positions_before(candidate_rows, plan.end),
            chosen,
        )


def _candidates(plan: FusePlan) -> _CandidateState:
    """Return the state before fusing. The host computes all of it, and then copies it to the device."""
    num_tokens, device = len(plan.token_ids), plan.token_ids.device
    is_candidate = np.zeros(num_tokens, bool)
    is_edge, is_fresh = np.zeros_like(is_candidate), np.ones_like(is_candidate)
    is_fresh[: plan.num_resident] = False
    chunks = np.zeros(num_tokens, np.int64)
    drift_gain = np.zeros(num_tokens, np.float32)
    for number, placement in enumerate(plan.placements):
        span = slice(placement.start, placement.end)
        stays = placement.exact and (placement.kv.header.is_lossless or not plan.recomputes_all)
        is_candidate[span], is_fresh[span], chunks[span] = not stays, False, number
        is_edge[[placement.start, placement.end - 1]] = True
        # KV that was computed after other text than the prefix changes less in a prompt.
        has_context = placement.variant is not None and placement.variant.policy != "none"
        drift_gain[span] = plan.rule.drift_gain_in_context if has_context else plan.rule.drift_gain
    if plan.wants_logits:
        is_candidate[-1], is_fresh[-1] = False, True  # always computed: its logits are the answer
    rows, fresh_rows = np.flatnonzero(is_candidate), np.flatnonzero(is_fresh)
    return _CandidateState(
        positions_on_device(rows, device),
        positions_on_device(fresh_rows[: np.searchsorted(fresh_rows, plan.end)], device),
        torch.as_tensor(is_edge[rows], device=device),
        torch.as_tensor(chunks[rows], device=device),
        positions_on_device(fresh_rows, device),
        positions_on_device(np.array([num_tokens - 1]), device),
        torch.as_tensor(drift_gain, device=device),
    )


def _probe(
    model: LayerwiseModel, plan: FusePlan, fused: PromptKVBuffer, layers: LayerSource | None, state: _CandidateState
) -> Steps[None]:
    """Run the question and all other fresh tokens over the stale KV up to the last probe layer.

    Set `state.attention` from the question's, and the probe's output, rows and seconds. Positions are the prompt's and
    the softmax is over the whole prompt. The fresh rows' KV stays in `fused` until the main pass replaces it.
    """
    rows = state.fresh_rows
    hidden = model.embed(plan.token_ids[rows])
    masses: list[Tensor] = []
    memory = torch.empty(len(plan.probe_layers), len(plan.token_ids), device=rows.device)

    def hook(queries: ProbeQueries, keys: Tensor, values: Tensor | None) -> Tensor | None:
        if values is None:
            queries = queries.slice_rows(slice(-plan.num_queries, None))
        if queries.pages is not None:
            from ragblend.engine.fusion import kernels

            masses.append(memory[len(masses), : position_end(queries.rows)])
            return kernels.attend_with_weights(queries, plan.num_queries, masses[-1])
        if values is None:
            masses.append(attention_mass(queries, keys))
            return None
        output, mass = attend_with_weights(queries, keys, values, plan.num_queries)
        masses.append(mass)
        return output

    for layer in range(plan.probe_layers[-1] + 1):
        if layers is not None:
            yield layers.ready[layer]
        start_s = perf_counter()
        if layers is not None:
            layers.wait(layer)
        hidden = model.run_probe_layer(layer, hidden, rows, fused, hook if layer in plan.probe_layers else None)
        if layer == 0:
            state.probe_hidden = hidden[: len(state.fused_rows)].clone()  # later layers may write into `hidden`
            # The main pass reuses this output of the rows that it fuses, so only the other rows are extra in layer 0.
            num_others = len(rows) - len(state.probe_hidden)
        state.probe_s += perf_counter() - start_s
        yield len(rows)
    state.attention = _mean_over_ranks(plan, torch.stack(masses).mean(0))
    state.probe_rows = [num_others, *[len(rows)] * plan.probe_layers[-1]]


def _mean_over_ranks(plan: FusePlan, shares: Tensor) -> Tensor:
    """Return the mean of `shares` over the ranks, each of which has the same number of heads."""
    if plan.sum_over_ranks is None:
        return shares
    summed = plan.sum_over_ranks(torch.cat((shares, shares.new_ones(1))))
    return summed[:-1] / summed[-1]


def _run_first_layer(fused: PromptKVBuffer, hidden: Tensor, active: _ActiveRows, probe_hidden: Tensor) -> Steps[Tensor]:
    """Return layer 0's output [R, hidden size] of the active rows; that of fresh rows is the probe's.

    The probe's output is exact, because stored layer-0 KV is.
    """
    output = probe_hidden.new_empty(len(active.rows), *probe_hidden.shape[1:])
    if len(candidates := active.candidates):
        output[candidates] = yield LayerCall(0, hidden[candidates], active.candidate_rows, fused)
    output[active.fresh] = probe_hidden
    return output


def _active_rows(plan: FusePlan, state: _CandidateState) -> _ActiveRows:
    """Return the rows to run in layer 0: fresh tokens, and the candidates that the first check layer measures."""
    if not len(state.rows) or not (plan.recomputes_all or plan.recomputes_some):
        return state.with_fresh_rows(plan, torch.arange(0, device=state.rows.device))
    if plan.recomputes_some and not plan.checks:
        return state.with_fresh_rows(plan, state.choose(plan))
    return state.with_fresh_rows(plan, torch.arange(len(state.rows), device=state.rows.device))


def _select_at_check_layer(
    model: LayerwiseModel,
    plan: FusePlan,
    check: CheckLayer,
    fused: PromptKVBuffer,
    hidden: Tensor,
    active: _ActiveRows,
    state: _CandidateState,
) -> tuple[Tensor, _ActiveRows]:
    """Measure the candidates among `active`. Return the indices into `active` that still run, and their rows.

    Measuring runs only the norm and the K/V projection. A threshold makes the host wait for the number of rows.
    """
    start_s, layer, rows, deviation = perf_counter(), check.layer, active.candidate_rows, plan.rule.deviation
    assert deviation is not None
    fresh = model.project_kv(layer, hidden[active.candidates])
    stored = LayerKV(fused.keys(layer)[:, rows], fused.values(layer)[:, rows])
    fresh = LayerKV(model.place_keys(layer, fresh.keys, rows), fresh.values)
    measured = measure_deviation(fresh, stored, plan.sum_over_ranks)
    if state.deviation is None:
        state.deviation = torch.full_like(plan.token_ids, torch.nan, dtype=torch.float32)
        state.deviation[rows] = measured.mean_relative
    scores = plan.rule.score(RuleInputs(rows, measured.squared(deviation)))
    highest = scores.topk(num_to_recompute(check.ratio, plan.num_chunk_tokens, len(rows))).indices
    if check.threshold > 0:
        highest = highest[measured.relative(deviation)[highest] >= check.threshold]
    picked = highest.sort().values
    selected = state.with_fresh_rows(plan, active.chosen[picked])
    remaining = torch.empty_like(selected.rows)
    remaining[selected.fresh], remaining[selected.candidates] = active.fresh, active.candidates[picked]
    state.select_s += perf_counter() - start_s
    return remaining, selected


def _drift_correction_hook(
    model: LayerwiseModel, plan: FusePlan, source: LayerSource, layer: int, active: _ActiveRows, state: _CandidateState
) -> FreshRowsCallback | None:
    """Return the hook that corrects kept candidates from the fresh KV of recomputed ones among `active`; None if none.

    With several ranks, each corrects its own heads; the similarity of tokens is measured over all heads.
    """
    if not len(active.candidates):
        return None
    if len(active.candidates) == len(state.rows):  # no candidate is kept
        source.apply_drift(layer, None)
        return None
    # Most layers run the same rows as the layer before, for which the correction is fitted already.
    if state.last_correction is None or state.last_correction[0] is not active:
        state.last_correction = (active, _fit_correction(model, plan, source, active, state))
    correction = state.last_correction[1]

    apply_drift = partial(source.apply_drift, layer, shares=correction.shares)

    def apply_correction(fresh: LayerKV) -> None:
        stored = source.read_stored(layer, correction.rows)
        change = LayerKV(fresh.keys.float() - stored.keys.float(), fresh.values.float() - stored.values.float())
        apply_drift(correction.estimate_drift(change))

    return FreshRowsCallback(active.candidates, apply_correction, correction, apply_drift)


def _fit_correction(
    model: LayerwiseModel, plan: FusePlan, source: LayerSource, active: _ActiveRows, state: _CandidateState
) -> DriftCorrection:
    """Return the regression from the candidates among the rows `active` to the kept ones."""
    values = source.read_stored(similarity_layer(model.num_layers, plan.probe_layers[-1]), state.rows).values
    shares = state.drift_gain.index_fill(0, active.rows, 0.0)
    fitted = fit_drift_correction(
        values, state.rows, state.chunks, active.chosen, active.candidate_rows, shares, partial(_mean_over_ranks, plan)
    )
    sources = torch.full_like(plan.token_ids, -2, dtype=torch.int32)
    sources[state.rows] = -1
    sources[active.rows] = torch.arange(len(active.rows), dtype=torch.int32, device=sources.device)
    return fitted._replace(sources=sources)


@torch.inference_mode()
def run_to_completion(model: LayerwiseModel, steps: Steps[_T]) -> _T:
    """Run `steps` to their end and return their result. `model` runs each LayerCall that they yield."""
    output: Tensor | None = None
    while True:
        try:
            step = steps.send(output)
        except StopIteration as end:
            result: _T = end.value
            return result
        output = model.run_layer(*step) if isinstance(step, LayerCall) else None
