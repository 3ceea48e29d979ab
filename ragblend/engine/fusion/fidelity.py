"""How close to full prefill an answer is: figures that every engine's report has, from what fusing found.

Knows what the fusor returns, and logits. Knows nothing about text, requests or backends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.plan import Fused, FusePlan
from ragblend.engine.report import BlendReport


class AttentionShares(NamedTuple):
    """Where the question looked: shares of its attention over the whole prompt, which sum to 1."""

    exact: float
    recomputed: float
    stale: float


def note_fidelity(report: BlendReport, plan: FusePlan, fused: Fused) -> None:
    """Put into `report` what the rule saw of the prompt's KV; None where it did not look.

    `attention_*` are `attention_shares`. `mean_deviation` is the mean of `relative_deviation` over the recomputed
    tokens, at the first check layer: how far their stored keys and values were from those computed afresh there.
    """
    shares = attention_shares(plan, fused)
    if shares is not None:
        report.attention_exact, report.attention_recomputed, report.attention_stale = shares
    if fused.deviation is not None and len(fused.recomputed):
        report.mean_deviation = float(fused.deviation[fused.recomputed].mean())


def attention_shares(plan: FusePlan, fused: Fused) -> AttentionShares | None:
    """How the question's attention, where the rule read it, is spread over the prompt; None if it did not ask.

    Mean over the question's tokens, heads and the layers read, over the stale KV: before anything was recomputed.
    Stale: stored KV that never saw the chunks before it and was kept. Recomputed: the same, replaced. Exact: all
    others, that is the prefix, the chunk stored behind it, and what was computed in this prompt, question included.
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
    """KL(full || other) in nats between two next-token distributions, from logits [vocabulary]; never below 0.

    >>> halves, quarters = Tensor([0.5, 0.5]).log(), Tensor([0.25, 0.75]).log()
    >>> round(first_token_kl(halves, quarters), 4), first_token_kl(halves, halves)
    (0.1438, 0.0)
    """
    p, q = (logits.double().cpu().log_softmax(-1) for logits in (full, other))
    return max(0.0, float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
