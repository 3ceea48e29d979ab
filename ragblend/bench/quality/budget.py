"""Equal compute: the ratio at which a rule's bill, in a model of 32 layers, is a given budget.

A rule's bill is more than its ratio: the check layer runs its candidates, and a question that is run ahead costs its
own tokens. So rules are compared at equal charged budgets, and a budget below what a rule's check alone costs is none
that it can meet. Counts rows as the fusor does, which the tests hold against reports. Read `ratio_for` first.
"""

from __future__ import annotations

from typing import NamedTuple

from ragblend.engine.fusion.rules import Rule, charged_budget_at, first_check, num_to_recompute, schedule
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.prompt.prompt import TokenizedPrompt

DEPTH = 32  # layers that budgets are quoted for


class Costs(NamedTuple):
    """What a prompt's bill depends on, where all its chunks are stored."""

    num_chunk_tokens: int
    num_candidates: int  # all but those of a first chunk that is exact where it stands
    num_fresh: int  # tokens of the question
    num_layers: int
    kv_share: float  # of one layer's parameters: K and V of a token at the check
    global_layers: tuple[int, ...] = ()  # those that see everything, where others see a window only


def costs_of(engine: TransformersEngine, prompt: TokenizedPrompt) -> Costs:
    """The costs of `prompt`, whose chunks `engine` has stored behind its default prefix."""
    segments, num_prefix = prompt.chunk_segments, len(prompt.prefix_ids)
    total = sum(segment.num_tokens for segment in segments)
    is_exact = engine.default_prefix_ids == prompt.prefix_ids and segments[0].start == num_prefix
    num_candidates = total - segments[0].num_tokens if is_exact else total
    num_fresh = prompt.num_tokens - num_prefix - total
    layers = engine.layers
    return Costs(total, num_candidates, num_fresh, layers.num_layers, layers.kv_share, layers.global_layers)


def charge(rule: Rule, ratio: float, costs: Costs) -> float:
    """`charged_budget_32` of a blend at `ratio`."""
    checks = schedule(rule, ratio, costs.num_layers, check_layer=first_check(costs.global_layers))
    num_tokens, num_candidates = costs.num_chunk_tokens, costs.num_candidates
    kept = {c.layer: num_to_recompute(c.ratio, num_tokens, num_candidates) for c in checks if c.ratio < 1}
    active = num_candidates if rule.needs_deviation else num_to_recompute(checks[0].ratio, num_tokens, num_candidates)
    asked = rule.probe_layers(costs.num_layers, costs.global_layers) if checks[-1].ratio < 1 else ()
    rows, fixed = [], 0.0
    for layer in range(costs.num_layers):
        cost = float(costs.num_fresh) if asked and 0 < layer <= asked[-1] else 0.0
        if layer in kept and rule.needs_deviation:
            cost += active * costs.kv_share
            fixed = fixed or cost
            active = min(active, kept[layer])
        rows.append(active + cost)
    return charged_budget_at(DEPTH, rows, num_tokens, checks[0].layer, fixed)


def floor_of(rule: Rule, costs: Costs) -> float:
    """The least that `rule` can be charged: one token recomputed."""
    return charge(rule, 1 / costs.num_chunk_tokens, costs)


def ratio_for(rule: Rule, budget: float, costs: Costs) -> float:
    """The ratio whose charge is nearest to `budget`, in whole tokens: at least one, at most all candidates."""
    low, high = 1, costs.num_candidates - 1
    while low < high:  # the least count that is charged `budget` or more
        middle = (low + high) // 2
        if charge(rule, middle / costs.num_chunk_tokens, costs) < budget:
            low = middle + 1
        else:
            high = middle
    above = charge(rule, low / costs.num_chunk_tokens, costs) - budget
    below = budget - charge(rule, (low - 1) / costs.num_chunk_tokens, costs) if low > 1 else float("inf")
    return (low - 1 if below < above else low) / costs.num_chunk_tokens
