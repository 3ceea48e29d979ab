"""Rules: selection of the stale tokens to recompute, by one small function per rule. A RULE IS ADDED HERE, in RULES.

A rule turns the `RuleInputs` of N candidate tokens into scores [N]; the fusor recomputes those with the highest scores.
Candidates are the stale tokens, whose stored KV was computed without the tokens that precede them in the prompt.
Depends on tensors only.

The inputs: positions come from the plan, deviations from the check layer, where the fusor recomputes K and V of the
candidates, and attention from the query probe, which runs the question over stale KV before the selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.errors import UsageError
from ragblend.options import SHARE

DEFAULT_RATIO = 0.15  # CacheBlend, section 4.2: the share that its authors found to restore most answers

# Layer 0's keys and values depend on the token alone, so stored and fresh agree there;
# layer 1 is the first that can show a deviation (CacheBlend, section 4.3).
CHECK_LAYER = 1

# Constants of `ask`, chosen on the selection split of real questions (data/results/carry-*.json): its default ratio,
# and the factors on the estimated change of kept tokens. At 5 % it is closer to full prefill than `cacheblend` is at
# 15 %, so the query probe may cost as much as recomputing a tenth of the chunk tokens.
ASK_RATIO, DRIFT_GAIN, DRIFT_GAIN_IN_CONTEXT, PROBE_MARGIN = 0.05, 0.9, 0.8, 0.1

# Least layers of a deep model, such as the language model on which `ask` and its constants were chosen. Language models
# in use have 16 and more; the embedded model has 5.
DEEP_MODEL_LAYERS = 12
# First and last probe layer of a deep model, as shares of its depth (benchmarks/RESULTS.md). Attention in the first and
# the last layers is less specific to the question.
PROBE_DEPTHS = (1 / 3, 0.8)


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Inputs of a rule: values of N candidate tokens, in prompt order. All tensors [N]."""

    positions: Tensor  # int64, position in the prompt
    key_deviation: Tensor | None = None  # float32, squared L2 of fresh minus stored keys, over heads and dimensions
    value_deviation: Tensor | None = None  # float32, the same for values
    attention: Tensor | None = None  # float32, share of the question's attention on the token
    is_edge: Tensor | None = None  # bool, True for the first and last token of a placed part of a chunk
    seed: int = 0


class CheckLayer(NamedTuple):
    """Layer from which on only `ratio` of the chunk tokens are computed."""

    layer: int
    ratio: float


NO_RECOMPUTE = (CheckLayer(0, 0.0),)  # with any rule: all stored KV is kept


def cacheblend(evidence: RuleInputs) -> Tensor:
    """Return the squared deviation of V at the check layer (CacheBlend, section 4.3, and its public code)."""
    assert evidence.value_deviation is not None
    return evidence.value_deviation


def cacheblend_k(evidence: RuleInputs) -> Tensor:
    """Return the squared deviation of K at the check layer (LMCache's blender)."""
    assert evidence.key_deviation is not None
    return evidence.key_deviation


def ask(evidence: RuleInputs) -> Tensor:
    """Return the question's attention, mean over probe layers, heads and its tokens (ProphetKV, arXiv 2602.02579).

    The first and last token of each placed part get 1 more, so they are recomputed first. The first token of a text
    that was computed alone attracts attention (EPIC, arXiv 2410.15332, recomputes a few of them), and drift correction
    needs a recomputed token in each part.
    """
    assert evidence.attention is not None
    assert evidence.is_edge is not None
    return evidence.attention + evidence.is_edge  # attention is a share, so at most 1


def random(evidence: RuleInputs) -> Tensor:
    """Return random scores, equal for equal seeds: the control."""
    generator = torch.Generator().manual_seed(evidence.seed)
    return torch.rand(len(evidence.positions), generator=generator).to(evidence.positions.device)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Named scoring of candidate tokens, with the inputs it needs and its defaults."""

    name: str
    score: Callable[[RuleInputs], Tensor]  # [N] float32; the highest are recomputed
    needs_deviation: bool = False  # runs the layers before the check layer for all candidates
    # Runs the query probe before it selects tokens. Most layers must then be loaded before recompute starts.
    probes_before_selection: bool = False
    ratio: float = DEFAULT_RATIO  # share of the chunk tokens to recompute, if the request has no ratio
    drift_gain: float = 0.0  # factor on the change of kept tokens that `drift_correction` estimates; 0: no correction
    drift_gain_in_context: float = 0.0  # the same for tokens stored after other text than the prefix

    def probe_layers(self, num_layers: int, global_layers: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the probe layers, at which the rule reads the question's attention, ascending; () without a probe.

        They are the middle layers of a deep model, and all layers of a shallow one. `global_layers` are the layers
        without an attention window, if other layers have one. The probe layers are then the global ones among the
        middle layers, or all global layers if there is none.

        >>> [RULES[name].probe_layers(3) for name in ("ask", "cacheblend")]
        [(0, 1, 2), ()]
        >>> RULES["ask"].probe_layers(30) == tuple(range(10, 24))
        True
        >>> [RULES["ask"].probe_layers(26, layers) for layers in ((5, 11, 17, 23), (5,))]
        [(11, 17), (5,)]
        """
        if not self.probes_before_selection:
            return ()
        first, end = (
            int(share * num_layers) for share in (PROBE_DEPTHS if num_layers >= DEEP_MODEL_LAYERS else (0, 1))
        )
        within = tuple(layer for layer in global_layers if first <= layer < end)
        return within or tuple(global_layers) or tuple(range(first, end))


RULES: dict[str, SelectionRule] = {
    rule.name: rule
    for rule in (
        SelectionRule("cacheblend", cacheblend, needs_deviation=True),
        SelectionRule("cacheblend_k", cacheblend_k, needs_deviation=True),
        SelectionRule(
            "ask", ask, probes_before_selection=True, ratio=ASK_RATIO, drift_gain=DRIFT_GAIN,
            drift_gain_in_context=DRIFT_GAIN_IN_CONTEXT,
        ),
        SelectionRule("random", random),
    )
}  # fmt: skip

# On a real language model of 30 layers `ask` is the closest rule (`ragblend bench quality`,
# data/results/closeness.json). On the embedded one of 5 layers, at DEFAULT_RATIO, it answers more questions than
# `cacheblend` (data/results/quality-demo-selection.json).
DEFAULT_RULE = "ask"
# Rule for prompts whose query probe costs too much (`is_probe_worthwhile`): the closest rule without a probe, on
# questions that are not reported (`--split selection`, data/results/closeness-selection.json).
NO_PROBE_RULE = "cacheblend"


def find_rule(name: str, num_layers: int = DEEP_MODEL_LAYERS) -> SelectionRule:
    """Return the rule of that name. "auto" is the default rule, with a higher ratio in a model of few layers.

    Raises UsageError for an unknown name.

    >>> [(rule.name, rule.ratio) for rule in (find_rule("auto", 32), find_rule("auto", 5))]
    [('ask', 0.05), ('ask', 0.15)]
    """
    if name == "auto":
        return (
            RULES[DEFAULT_RULE]
            if num_layers >= DEEP_MODEL_LAYERS
            else replace(RULES[DEFAULT_RULE], ratio=DEFAULT_RATIO)
        )
    if name not in RULES:
        raise UsageError(f"rule {name!r} is unknown; choose auto or one of {', '.join(RULES)}")
    return RULES[name]


def default_check_layer(global_layers: Sequence[int]) -> int:
    """Return the check layer of a model in which `global_layers` have no attention window: the first of them after 0.

    Before it, tokens attend only to their window, so their keys and values deviate little.

    >>> default_check_layer((5, 11, 17)), default_check_layer((0, 1, 2)), default_check_layer(())
    (5, 1, 1)
    """
    return next((layer for layer in global_layers if layer >= CHECK_LAYER), CHECK_LAYER)


def check_schedule(
    rule: SelectionRule, ratio: float, num_layers: int, check_layer: int = CHECK_LAYER
) -> tuple[CheckLayer, ...]:
    """Return the layers at which `rule` reduces the computed tokens, each with the share of chunk tokens it keeps.

    Raises UsageError for a layer that the model does not have.
    """
    if not rule.needs_deviation:
        return (CheckLayer(0, ratio),)
    if not 0 <= check_layer < num_layers:
        raise UsageError(f"check layer {check_layer} does not exist; the model has layers 0..{num_layers - 1}")
    return (CheckLayer(check_layer, validate_ratio(ratio)),)


def validate_ratio(ratio: float) -> float:
    """Return `ratio`. Raises UsageError unless 0 <= ratio <= 1."""
    return SHARE.validate("recompute_ratio", ratio)


def num_to_recompute(ratio: float, num_chunk_tokens: int, num_candidates: int) -> int:
    """Return the number of tokens to recompute: `ratio` of the chunk tokens, at most all candidates.

    >>> num_to_recompute(0.15, num_chunk_tokens=100, num_candidates=80)
    15
    """
    # round() first: 0.15 * 100 is 15.000000000000002 in floating point, which ceil would turn into 16.
    return min(num_candidates, math.ceil(round(ratio * num_chunk_tokens, 6)))


def is_probe_worthwhile(
    rule: SelectionRule,
    ratio: float,
    num_fresh: int,
    num_candidates: int,
    num_chunk_tokens: int,
    num_layers: int,
    global_layers: Sequence[int] = (),
) -> bool:
    """Return True if the query probe of `num_fresh` tokens costs few enough token-layers.

    It may cost as much as recomputing `ratio` plus PROBE_MARGIN of the chunk tokens. NO_PROBE_RULE recomputes that much
    more, and is less close to full prefill even then. Long questions over short chunks cost more.

    >>> [is_probe_worthwhile(RULES["ask"], 0.05, fresh, 200, 200, 31) for fresh in (40, 41)]
    [True, False]
    """
    layers = rule.probe_layers(num_layers, global_layers)
    if not layers or not num_candidates:
        return True  # there is no probe to run
    return num_fresh * layers[-1] <= (ratio + PROBE_MARGIN) * num_chunk_tokens * num_layers


class SelectionPlan(NamedTuple):
    """Rule, check layers and probe layers of one prompt."""

    rule: SelectionRule
    checks: tuple[CheckLayer, ...]
    probe_layers: tuple[int, ...]


def plan_selection(
    name: str,
    ratio: float,
    num_layers: int,
    *,
    num_fresh: int,
    num_candidates: int,
    num_chunk_tokens: int,
    fitted: tuple[str, int] | None = None,
    global_layers: Sequence[int] = (),
) -> SelectionPlan:
    """Return the rule `name` for one prompt. "auto" is NO_PROBE_RULE if the default rule's probe costs too much.

    fitted: rule and check layer of a calibration for `name`. global_layers: the layers without an attention window, if
    others have one; else ().
    """
    first = default_check_layer(global_layers) if global_layers else CHECK_LAYER
    taken, check_layer = fitted or (name, first)
    rule = find_rule(taken, num_layers)
    counts = (num_fresh, num_candidates, num_chunk_tokens, num_layers)
    if name == "auto" and not is_probe_worthwhile(rule, ratio, *counts, global_layers):
        rule, check_layer = find_rule(NO_PROBE_RULE), first
    checks = check_schedule(rule, ratio, num_layers, check_layer)
    return SelectionPlan(rule, checks, rule.probe_layers(num_layers, global_layers))


def charged_budget(rows_per_layer: Sequence[float], num_chunk_tokens: int) -> float:
    """Return the recomputed token-layers as a share of `num_layers x chunk tokens`.

    `rows_per_layer[l]` counts all rows run at layer l.

    >>> charged_budget([100, 20, 20, 20], num_chunk_tokens=100)
    0.4
    """
    if not num_chunk_tokens or not rows_per_layer:
        return 0.0
    return sum(rows_per_layer) / (len(rows_per_layer) * num_chunk_tokens)


def charged_budget_at(
    depth: int,
    rows_per_layer: Sequence[float],
    num_chunk_tokens: int,
    check_layer: int,
    fixed_cost: float = 0.0,
) -> float:
    """Return the charged budget that the same rule would have in a model of `depth` layers.

    Layers up to the check cost the same; each further layer costs the mean of the others. In a shallow model the check
    is most of the cost. `fixed_cost`: the part of `rows_per_layer` for measuring at the check layer, which does not
    grow with depth.

    >>> round(charged_budget_at(32, [100, 20, 20, 20], num_chunk_tokens=100, check_layer=1), 4)
    0.225
    """
    head, tail = list(rows_per_layer[:check_layer]), list(rows_per_layer[check_layer:])
    if not tail or depth <= check_layer:
        return charged_budget(rows_per_layer, num_chunk_tokens)
    mean = (sum(tail) - fixed_cost) / len(tail)
    return charged_budget([*head, fixed_cost + mean, *[mean] * (depth - len(head) - 1)], num_chunk_tokens)
