"""Figures of every engine's report on a fused prompt: reused and recomputed tokens, and closeness to full prefill.

Depends on the fusor's results and logits, not on text, requests or backends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ragblend.engine.fusion.plan import FusePlan, FuseResult, Placement
from ragblend.engine.fusion.rules import charged_budget, charged_budget_at
from ragblend.engine.report import BlendReport, PrefixMatch
from ragblend.options import ContextPolicy


class AttentionShares(NamedTuple):
    """Shares of the question's attention over the whole prompt, which sum to 1; see `attention_shares`."""

    exact: float
    recomputed: float
    stale: float


class MatchedContext(Protocol):
    """Context after which a stored chunk was computed, such as `lookup.LookupContext`."""

    @property
    def match(self) -> PrefixMatch: ...  # noqa: D102
    @property
    def policy(self) -> ContextPolicy: ...  # noqa: D102


def record_fusion(
    report: BlendReport,
    starts: Iterable[int],
    stored: Mapping[int, tuple[Placement, MatchedContext]],
    plan: FusePlan,
    fused: FuseResult,
    num_known: int,
) -> None:
    """Write into `report` the reused and recomputed tokens, per chunk and in all, and `record_fidelity`'s figures.

    The report's chunks, initially misses, begin at `starts`; `stored` has those whose stored KV was used, by start.
    `num_known`: resident rows that were in memory before this request, which did not have to compute them.
    """
    recomputed = sorted(fused.recomputed.tolist())
    num_computed = 0  # chunk tokens without KV, which run through every layer
    for chunk, start in zip(report.chunks, starts, strict=True):
        if start in stored:
            placement, seen = stored[start]
            header = placement.kv.header
            chunk.hit, chunk.prefix_match, chunk.context = True, seen.match, seen.policy
            chunk.exact, chunk.kv_dtype = placement.exact and header.is_lossless, header.stored_dtype
            chunk.num_recomputed_tokens = bisect_left(recomputed, placement.end) - bisect_left(recomputed, start)
        elif start < plan.num_resident:
            chunk.hit, chunk.prefix_match, chunk.exact = True, "exact", True
            num_computed += max(0, start + chunk.num_tokens - plan.num_resident)
        else:
            num_computed += chunk.num_tokens
    total = plan.num_chunk_tokens + num_computed
    rows = [count + num_computed for count in fused.rows_per_layer]
    report.charged_budget = charged_budget(rows, total)
    report.charged_budget_32 = charged_budget_at(32, rows, total, plan.checks[0].layer, fused.fixed_cost)
    report.num_chunks, report.num_chunk_hits = len(report.chunks), sum(chunk.hit for chunk in report.chunks)
    report.num_prefix_tokens, report.num_recomputed_tokens = num_known, len(recomputed)
    report.probe_s, report.select_s = fused.probe_s, fused.select_s
    # The last token is computed for its logits, even if its KV is stored.
    ends_stored = plan.wants_logits and any(each.end == len(plan.token_ids) for each in plan.placements)
    report.num_reused_tokens = num_known + plan.num_chunk_tokens - len(recomputed) - ends_stored
    record_fidelity(report, plan, fused)


def record_fidelity(report: BlendReport, plan: FusePlan, fused: FuseResult) -> None:
    """Write into `report` the rule's measurements of the prompt's KV; those that it did not make stay None.

    `attention_*` are `attention_shares`. `mean_deviation` is the mean of `relative_deviation` over the recomputed
    tokens, at the first check layer: the distance of their stored keys and values from the recomputed ones.
    """
    shares = attention_shares(plan, fused)
    if shares is not None:
        report.attention_exact, report.attention_recomputed, report.attention_stale = shares
    if fused.deviation is not None and len(fused.recomputed):
        report.mean_deviation = float(fused.deviation[fused.recomputed].mean())


def attention_shares(plan: FusePlan, fused: FuseResult) -> AttentionShares | None:
    """Return the shares of the question's attention over the prompt's tokens; None if the rule runs no query probe.

    The attention is the mean over the question's tokens, heads and probe layers, over stale KV, before any recompute.
    Stale: kept tokens, whose stored KV was computed without the chunks before them. Recomputed: replaced ones. Exact:
    all others, that is the prefix, the chunk stored after it, and all tokens computed in this prompt.
    """
    if fused.attention is None:
        return None
    is_stored = torch.zeros(len(fused.attention), dtype=torch.bool, device=fused.attention.device)
    for placement in plan.placements:
        is_stored[placement.start : placement.end] = not placement.exact
    if plan.wants_logits:
        is_stored[-1] = False  # the last token is computed even where its KV is stored
    mass = fused.attention.double()
    recomputed, candidates, everything = mass[fused.recomputed].sum(), mass[is_stored].sum(), mass.sum()
    shares = torch.stack((everything - candidates, recomputed, candidates - recomputed)) / everything
    return AttentionShares(*shares.tolist())


def first_token_kl(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats of two next-token distributions, from logits [vocabulary]; never below 0.

    >>> halves, quarters = Tensor([0.5, 0.5]).log(), Tensor([0.25, 0.75]).log()
    >>> round(first_token_kl(halves, quarters), 4), first_token_kl(halves, halves)
    (0.1438, 0.0)
    """
    p, q = (logits.double().cpu().log_softmax(-1) for logits in (full, other))
    return max(0.0, float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
