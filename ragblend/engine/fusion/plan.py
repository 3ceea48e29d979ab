"""Plan and result of fusing one prompt: stored KV with its positions, the buffer of the prompt's KV, and the figures
for reports (reused and recomputed tokens, their cost, and closeness to full prefill).

Depends on tensors, positions and stored KV, not on the fusing itself (`fuse`), text or backends.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragblend.engine.fusion.attention import position_end
from ragblend.engine.fusion.check_layers import CheckLayer, mean_ratio, schedule_check_layers
from ragblend.engine.fusion.protocols import LayerwiseModel
from ragblend.engine.fusion.rules import (
    NO_PROBE_RULE,
    RULES,
    SelectionRule,
    default_check_layer,
    find_rule,
    is_probe_worthwhile,
    num_to_recompute,
)
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.store.format.kv import ChunkKV, LayerKV, slice_kv_rows
from ragblend.options import SelectionOptions
from ragblend.prompt.types import ChunkRun, Variant

# Layers whose KV is one allocation; 0: each tensor is one. With all layers in one, enlarging it would need twice its
# memory for a moment. On a CPU, the C library returns blocks above 32 MiB to the system, and new ones are zeroed again.
ALLOCATED_LAYERS = defaultdict(lambda: 8, cpu=0)


class Placement(NamedTuple):
    """Stored KV of a run of a prompt, and the position at which it is placed.

    `exact`: True if the KV was computed after precisely the tokens that precede the chunk in the prompt. Such KV is not
    recomputed, with one exception: ratio 1 recomputes KV stored in eight bits, so that it equals full prefill.
    """

    kv: ChunkKV
    start: int
    exact: bool
    variant: Variant | None = None  # the variant of the run's chunk; None for a prefix

    @classmethod
    def of_run(cls, run: ChunkRun, kv: ChunkKV) -> Placement:
        """Return the placement of `run`, whose variant has the KV `kv`, that of the whole chunk."""
        assert run.variant is not None
        rows = slice_kv_rows(kv, run.chunk_start, run.chunk_start + run.num_tokens)
        return cls(rows, run.start, run.variant.exact, run.variant)

    @property
    def end(self) -> int:
        """Return the position after the chunk's last token."""
        return self.start + self.kv.header.num_tokens


@dataclass(eq=False)
class FusedKV:
    """KV of one prompt: per layer, rotated keys and values [H, capacity, D], of which `length` rows are valid.

    A write beyond the capacity enlarges it, so that decoding can append. An object belongs to one request.
    """

    _layers: list[LayerKV]
    length: int

    @classmethod
    def allocate(cls, shapes: Sequence[tuple[int, int, int]], capacity: int, like: Tensor) -> FusedKV:
        """Return KV for `capacity` tokens, of `like`'s dtype and device. `shapes[l]`: (H, D of keys, D of values)."""
        count = ALLOCATED_LAYERS[like.device.type]
        if not count:
            return cls(
                [LayerKV(like.new_empty(h, capacity, dk), like.new_empty(h, capacity, dv)) for h, dk, dv in shapes], 0
            )
        layers: list[LayerKV] = []
        for start in range(0, len(shapes), count):
            layers += _allocate_layers(shapes[start : start + count], capacity, like)
        return cls(layers, 0)

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    def keys(self, layer: int) -> Tensor:
        """Return the rotated keys of one layer, [H, capacity, D]."""
        return self._layers[layer].keys

    def values(self, layer: int) -> Tensor:
        """Return the values of one layer, [H, capacity, D]."""
        return self._layers[layer].values

    def write(self, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Write `keys` and `values` [H, R, D] at `rows` (positions [R], or a slice)."""
        last = rows.stop if isinstance(rows, slice) else position_end(rows)
        if last > self._layers[layer].keys.shape[1]:
            self._grow(last)
        self._layers[layer].keys[:, rows] = keys
        self._layers[layer].values[:, rows] = values

    def layer(self, layer: int, capacity: int) -> LayerKV:
        """Return keys and values of one layer, after enlarging the capacity to `capacity` tokens if it is smaller."""
        if capacity > self._layers[layer].keys.shape[1]:
            self._grow(capacity)
        return self._layers[layer]

    def _grow(self, needed: int) -> None:
        # A quarter more at a time keeps the copying linear in the number of decoded tokens.
        for index, (keys, values) in enumerate(self._layers):
            more = max(needed, keys.shape[1] + max(64, keys.shape[1] // 4)) - keys.shape[1]
            self._layers[index] = LayerKV(
                torch.cat((keys, keys.new_empty(keys.shape[0], more, keys.shape[2])), dim=1),
                torch.cat((values, values.new_empty(values.shape[0], more, values.shape[2])), dim=1),
            )

    def copy_front(self, other: FusedKV, count: int) -> None:
        """Copy the first `count` rows of every layer from `other`."""
        if count:
            mine, theirs = ([tensor[:, :count] for layer in each._layers for tensor in layer] for each in (self, other))
            torch._foreach_copy_(mine, theirs)
        self.length = max(self.length, count)


def _allocate_layers(shapes: Sequence[tuple[int, int, int]], capacity: int, like: Tensor) -> Iterator[LayerKV]:
    """Yield one KV of `capacity` tokens for each shape, (H, D of keys, D of values), in one block of memory."""
    sizes = [(heads, capacity, dim) for heads, *dims in shapes for dim in dims]
    counts = [math.prod(size) for size in sizes]
    parts = torch.split(like.new_empty(sum(counts)), counts)
    tensors = (part.view(size) for part, size in zip(parts, sizes, strict=True))
    yield from itertools.starmap(LayerKV, zip(tensors, tensors, strict=True))


@dataclass(frozen=True, slots=True)
class FusePlan:
    """Plan of one prompt to fuse: its ids, the stored KV with its positions, and the number of resident rows.

    `rule` selects the share `recompute_ratio` of the chunk tokens. A rule that measures deviations selects at each of
    `checks`, by the share of that check. By default, no stored token is recomputed. The first `num_resident` rows of
    the prompt's KV are valid before fusing starts (a prefix, earlier turns). The first `num_exact` of these are exact.
    The others may not be, for example if an earlier turn blended a chunk.
    """

    token_ids: Tensor  # [T] int64, on the model's device
    placements: tuple[Placement, ...]  # ascending, not overlapping, all at or after num_resident
    rule: SelectionRule = RULES["random"]
    recompute_ratio: float = 0.0
    checks: tuple[CheckLayer, ...] = ()  # ascending; () for a rule that measures no deviation
    num_resident: int = 0
    seed: int = 0
    num_fused: int | None = None  # tokens to fuse; the caller computes later ones and the logits. None: all
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # sums rule inputs, if each rank has some of the heads
    probe_layers: tuple[int, ...] = ()  # layers of the query probe, ascending; () runs none
    question_start: int | None = None  # first token of the question; None: the token after the last placed chunk
    num_exact: int | None = None  # leading resident rows that are exact; None: all of them
    # Derived from the fields above.
    check_layer: int = field(init=False)  # the first of `checks`; 0 without one
    end: int = field(init=False)  # position after the last token that is fused
    wants_logits: bool = field(init=False)  # True if the last token is computed for its logits
    num_chunk_tokens: int = field(init=False)  # tokens of all placed chunks
    num_queries: int = field(init=False)  # tokens of the question, at least the last token
    exact_end: int = field(init=False)  # position after the resident rows that are exact
    recomputes_all: bool = field(init=False)  # True if every chunk token is recomputed: full prefill
    recomputes_some: bool = field(init=False)  # True if some may be recomputed, and some kept
    corrects_drift: bool = field(init=False)  # True if the KV of kept tokens gets drift correction

    def __post_init__(self) -> None:
        count = sum(placement.kv.header.num_tokens for placement in self.placements)
        start = self.question_start
        if start is None:
            # If the question precedes its chunks, the text after the last chunk is the probe's query: it attends to
            # the question and to all chunks.
            start = max((placement.end for placement in self.placements), default=self.num_resident)
        ratio = self.recompute_ratio
        recomputes_all = all(check.keeps_all for check in self.checks) if self.checks else ratio >= 1
        first_ratio = self.checks[0].ratio if self.checks else ratio
        recomputes_some = not recomputes_all and num_to_recompute(first_ratio, count, count) > 0
        for name, value in (
            ("check_layer", self.checks[0].layer if self.checks else 0),
            ("end", len(self.token_ids) if self.num_fused is None else self.num_fused),
            ("wants_logits", self.num_fused is None),
            ("num_chunk_tokens", count),
            ("num_queries", max(1, len(self.token_ids) - start)),
            ("exact_end", self.num_resident if self.num_exact is None else self.num_exact),
            ("recomputes_all", recomputes_all),
            ("recomputes_some", recomputes_some),
            ("corrects_drift", self.rule.drift_gain > 0 and recomputes_some),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_exact_after_fusing(self) -> int:
        """Number of leading tokens whose KV is exact once this plan is fused."""
        if self.exact_end < self.num_resident:
            return self.exact_end
        stale = (each.start for each in self.placements if not (each.exact and each.kv.header.is_lossless))
        return self.end if self.recomputes_all else min(stale, default=self.end)

    def with_rule(
        self,
        name: str,
        ratio: float,
        model: LayerwiseModel,
        check_layer: int | None = None,
        options: SelectionOptions | None = None,
        *,
        is_auto_rule: bool = False,
    ) -> FusePlan:
        """Return this plan with the rule called `name`, which recomputes the share `ratio` of the chunk tokens.

        `check_layer`: the first check layer; None is the model's default. `is_auto_rule`: the rule was not requested by
        name, so NO_PROBE_RULE replaces it if its query probe costs too much for this prompt. Raises UsageError as
        `schedule_check_layers`.
        """
        num_layers, global_layers = model.num_layers, model.global_layers
        rule = find_rule(name, num_layers)
        num_fresh = len(self.token_ids) - self.num_resident - self.num_chunk_tokens
        num_candidates = sum(each.kv.header.num_tokens for each in self.placements if not each.exact)
        counts = (num_fresh, num_candidates, self.num_chunk_tokens, num_layers)
        if is_auto_rule and not is_probe_worthwhile(rule, ratio, *counts, global_layers):
            rule, check_layer = find_rule(NO_PROBE_RULE), None
        checks: tuple[CheckLayer, ...] = ()
        if rule.deviation is not None or (options is not None and options.selection):
            options = options or SelectionOptions()
            first = default_check_layer(global_layers) if check_layer is None else check_layer
            checks = schedule_check_layers(rule, ratio, first, num_layers, options)
            rule = replace(rule, deviation=options.deviation or rule.deviation)
            ratio = mean_ratio(checks, num_layers) if options.recompute_ratios else ratio
        probe_layers = rule.probe_layers(num_layers, global_layers)
        return replace(self, rule=rule, recompute_ratio=ratio, checks=checks, probe_layers=probe_layers)

    def for_refinement(self, answer_ids: Sequence[int], ratio: float) -> FusePlan:
        """Return the plan that recomputes the share `ratio` of the chunk tokens over the KV that this plan has fused.

        `answer_ids` [A]: the tokens of the answer so far. They follow the prompt and are computed like the question's;
        both are queries of the probe. It runs over the fused KV, so it may select other tokens than before. The
        placements determine which tokens are stale; their KV is not read again. A rule that measures deviations selects
        at its first check layer alone.
        """
        token_ids = torch.cat((self.token_ids, self.token_ids.new_tensor(answer_ids)))
        checks = tuple(CheckLayer(check.layer, ratio) for check in self.checks[:1])
        return replace(self, token_ids=token_ids, recompute_ratio=ratio, checks=checks)


@dataclass(slots=True)
class FuseResult:
    """Result of fusing: logits of the last token, the recomputed chunk tokens, the cost, and the rule's inputs."""

    logits: Tensor  # [vocabulary] float32; empty if the plan needs none
    recomputed: Tensor  # positions [R] of the chunk tokens recomputed through the last layer
    rows_per_layer: list[float] = field(default_factory=list)  # placed tokens and probe rows run; K/V alone: `kv_share`
    fixed_cost: float = 0.0  # part of rows_per_layer that does not grow with depth: measuring at the first check layer
    probe_s: float = 0.0  # seconds of the query probe, waiting for its layers included
    attention: Tensor | None = None  # [T] float32, the query probe's attention
    deviation: Tensor | None = None  # [T] float32, see `MeasuredDeviation.mean_relative`; NaN: not measured
    select_s: float = 0.0  # seconds spent at the check layers: candidates measured, scored and chosen
    kept: dict[int, int] = field(default_factory=dict)  # number of chunk tokens that each check layer kept

    def add_first_layer_cost(self, num_rows: float, plan: FusePlan) -> None:
        """Add the cost of running `num_rows` rows through layer 0 only. It does not depend on the number of layers."""
        self.rows_per_layer[0] += num_rows
        if plan.check_layer == 0:
            self.fixed_cost += num_rows


def merge_fusions(fused: Sequence[tuple[FusePlan, FuseResult]]) -> tuple[FusePlan, FuseResult]:
    """Return the plans and results of one prompt, fused part by part, as one plan and one result.

    `fused`: in the order of the parts, each of which had the parts before it as resident rows. The rule and the query
    probe's attention are the last part's.
    """
    (plan, result), (first, _) = fused[-1], fused[0]
    if len(fused) == 1:
        return plan, result
    deviations = [part.deviation for _, part in fused if part.deviation is not None]
    deviation = deviations[-1].clone() if len(deviations) == len(fused) else None
    if deviation is not None:
        for earlier in deviations[:-1]:  # each has a value for the rows of that part
            deviation[: len(earlier)] = earlier.where(~earlier.isnan(), deviation[: len(earlier)])
    kept: defaultdict[int, int] = defaultdict(int)
    for _, part in fused:  # parts by different rules have different check layers
        for layer, count in part.kept.items():
            kept[layer] += count
    merged = replace(
        result,
        recomputed=torch.cat([part.recomputed for _, part in fused]),
        rows_per_layer=[sum(rows) for rows in zip(*(part.rows_per_layer for _, part in fused), strict=True)],
        fixed_cost=sum(part.fixed_cost for _, part in fused),
        probe_s=sum(part.probe_s for _, part in fused),
        select_s=sum(part.select_s for _, part in fused),
        deviation=deviation,
        kept=dict(kept),
    )
    placements = tuple(placement for part, _ in fused for placement in part.placements)
    exact_end = min(first.num_resident, plan.exact_end)
    return replace(plan, placements=placements, num_resident=first.num_resident, num_exact=exact_end), merged


def record_fusion(
    report: BlendReport, runs: Sequence[ChunkRun], plan: FusePlan, fused: FuseResult, num_known: int
) -> None:
    """Write into `report` the reused and recomputed tokens, per run and in all, and the rule's measurements.

    `runs`: the prompt's runs. `report.chunks` gets one report for each; a run is a hit if `plan` places its KV, or if
    it begins in the resident rows. `num_known`: the number of tokens at the start of the prompt whose KV an earlier
    request left in memory.

    `report.attention_*`: see `question_attention_shares`. `report.mean_deviation`: the mean relative deviation of the
    recomputed tokens, at the first check layer. Figures that the rule did not measure stay None.
    """
    recomputed = sorted(fused.recomputed.tolist()) if len(fused.recomputed) else []
    num_computed = 0  # chunk tokens without KV, which run through every layer
    placement_by_end = {placement.end: placement for placement in plan.placements}
    report.chunks = [ChunkReport(run.source, run.num_tokens, hit=False) for run in runs]
    for chunk, run in zip(report.chunks, runs, strict=True):
        start, placement = run.start, placement_by_end.get(run.end)
        resident_end = min(start + chunk.num_tokens, plan.num_resident)
        is_exact = resident_end <= max(start, plan.exact_end)  # False if an earlier turn blended a part of the chunk
        if placement is not None and placement.variant is not None:
            header, variant = placement.kv.header, placement.variant
            chunk.hit, chunk.prefix_match, chunk.context = True, variant.match, variant.policy
            chunk.exact, chunk.kv_dtype = is_exact and placement.exact and header.is_lossless, header.stored_dtype
            chunk.num_recomputed_tokens = bisect_left(recomputed, placement.end) - bisect_left(recomputed, start)
        elif start < plan.num_resident:
            chunk.hit, chunk.prefix_match, chunk.exact = True, "exact", is_exact
            num_computed += start + chunk.num_tokens - resident_end
        else:
            num_computed += chunk.num_tokens
    total = plan.num_chunk_tokens + num_computed
    rows = [count + num_computed for count in fused.rows_per_layer]
    report.charged_budget = charged_budget(rows, total)
    report.charged_budget_32 = project_charged_budget(32, rows, total, plan.check_layer, fused.fixed_cost)
    report.num_chunks, report.num_chunk_hits = len(report.chunks), sum(chunk.hit for chunk in report.chunks)
    report.num_prefix_tokens, report.num_recomputed_tokens = num_known, len(recomputed)
    report.probe_s, report.select_s = fused.probe_s, fused.select_s
    report.kept_at_check_layers = sorted(fused.kept.items())
    has_thresholds = any(check.threshold for check in plan.checks)  # then the share is known only now
    report.recompute_ratio = len(recomputed) / max(1, plan.num_chunk_tokens) if has_thresholds else plan.recompute_ratio
    # The last token is computed for its logits, even if its KV is stored.
    ends_stored = plan.wants_logits and any(each.end == len(plan.token_ids) for each in plan.placements)
    report.num_reused_tokens = num_known + plan.num_chunk_tokens - len(recomputed) - ends_stored
    shares = question_attention_shares(plan, fused)
    if shares is not None:
        report.attention_exact, report.attention_recomputed, report.attention_stale = shares
    if fused.deviation is not None and len(fused.recomputed):
        report.mean_deviation = float(fused.deviation[fused.recomputed].mean())


def question_attention_shares(plan: FusePlan, fused: FuseResult) -> tuple[float, float, float] | None:
    """Return the shares of the question's attention on exact, recomputed and stale tokens of the prompt.

    The shares sum to 1. The result is None if the rule runs no query probe. The attention is measured over the stored
    KV, before any recompute. It is the mean over the question's tokens, heads and probe layers. Stale tokens are the
    kept tokens of chunks whose stored KV is not exact (see `Placement`), and the resident tokens whose KV is not exact
    (see `FusePlan`). Recomputed tokens are chunk tokens whose stored KV was replaced. Exact tokens are all others: the
    prefix, chunks with exact KV, and tokens computed for this prompt.
    """
    if fused.attention is None:
        return None
    is_stored = np.zeros(len(fused.attention), bool)  # on the host, which needs one copy for all chunks
    for placement in plan.placements:
        is_stored[placement.start : placement.end] = not placement.exact
    is_stored[plan.exact_end : plan.num_resident] = True
    if plan.wants_logits:
        is_stored[-1] = False  # the last token is computed even where its KV is stored
    mass = fused.attention.double()
    on_device = torch.from_numpy(is_stored).to(mass.device, non_blocking=True)
    recomputed, candidates = mass[fused.recomputed].sum(), mass.where(on_device, 0.0).sum()
    everything = mass.sum()
    shares = torch.stack((everything - candidates, recomputed, candidates - recomputed)) / everything
    exact, replaced, stale = shares.tolist()
    return exact, replaced, stale


def charged_budget(rows_per_layer: Sequence[float], num_chunk_tokens: int) -> float:
    """Return the cost of a fusion as a share of the cost of running all chunk tokens through every layer.

    `rows_per_layer[l]`: the number of chunk tokens and of query probe rows that ran through layer l (see `FuseResult`).

    >>> charged_budget([100, 20, 20, 20], num_chunk_tokens=100)
    0.4
    """
    if not num_chunk_tokens or not rows_per_layer:
        return 0.0
    return sum(rows_per_layer) / (len(rows_per_layer) * num_chunk_tokens)


def project_charged_budget(
    target_num_layers: int,
    rows_per_layer: Sequence[float],
    num_chunk_tokens: int,
    check_layer: int,
    fixed_cost: float = 0.0,
) -> float:
    """Return the charged budget (see `charged_budget`) that a rule would have in a model of `target_num_layers` layers.

    Budgets of models are compared at one depth, because in a shallow model the check is most of the cost. Layers before
    the check layer keep their cost. Each of the remaining layers of the target model costs the mean of the remaining
    layers in `rows_per_layer`, without `fixed_cost`. `fixed_cost`: the part of `rows_per_layer` for measuring at the
    check layer. It does not grow with depth, so it is added once.

    >>> round(project_charged_budget(32, [100, 20, 20, 20], num_chunk_tokens=100, check_layer=1), 4)
    0.225
    """
    head, tail = list(rows_per_layer[:check_layer]), list(rows_per_layer[check_layer:])
    if not tail or target_num_layers <= check_layer:
        return charged_budget(rows_per_layer, num_chunk_tokens)
    mean = (sum(tail) - fixed_cost) / len(tail)
    return charged_budget([*head, fixed_cost + mean, *[mean] * (target_num_layers - len(head) - 1)], num_chunk_tokens)


def first_token_kl(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats of two next-token distributions, from logits [vocabulary]; never below 0.

    >>> halves, quarters = Tensor([0.5, 0.5]).log(), Tensor([0.25, 0.75]).log()
    >>> round(first_token_kl(halves, quarters), 4), first_token_kl(halves, halves)
    (0.1438, 0.0)
    """
    p, q = (logits.double().cpu().log_softmax(-1) for logits in (full, other))
    return max(0.0, float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
