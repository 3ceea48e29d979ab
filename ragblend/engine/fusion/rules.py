"""Which stale tokens to recompute: one small function per rule, all with the same signature.

A rule turns `RuleInputs` about the N candidate tokens into scores [N]; the fusor recomputes the highest. Candidates
are the stale tokens: those whose stored KV was computed without the tokens that precede them in the prompt. Depends on
tensors only.

Where the evidence comes from: positions from the plan; deviations from the check layer, where the fusor
computes K and V of the candidates afresh; attention from the question, which the fusor runs ahead over stale KV through
the layers that the rule reads.
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

# Of `ask`, chosen on the selection part of real questions (data/results/carry-*.json): what it
# recomputes unless told otherwise, and how much of what those tell the tokens that are kept move by. At 5 % it is
# closer to full prefill than `cacheblend` is at 15 %, so asking is worth a tenth of the chunk tokens.
ASK_RATIO, DRIFT_GAIN, DRIFT_GAIN_IN_CONTEXT, PROBE_MARGIN = 0.05, 0.9, 0.8, 0.1

# Layers from which a model is taken to work as the language model does on which `ask` and its constants were chosen;
# those that are used have 16 and more.
DEEP_MODEL_LAYERS = 12
# Of such a model's depth, from where and up to where `ask` reads the question, chosen as the numbers below are
# (benchmarks/RESULTS.md): both ends say less of what it is about.
PROBE_DEPTHS = (1 / 3, 0.8)


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What is known about N candidate tokens, in prompt order. All tensors [N]."""

    positions: Tensor  # int64, place in the prompt
    key_deviation: Tensor | None = None  # float32, squared L2 of fresh minus stored keys, over heads and dimensions
    value_deviation: Tensor | None = None  # float32, the same for values
    attention: Tensor | None = None  # float32, the share of the question's attention that the token gets
    is_edge: Tensor | None = None  # bool, whether the token is the first or last of a placed part of a chunk
    seed: int = 0


class CheckLayer(NamedTuple):
    """From `layer` on, `ratio` of the chunk tokens stay in the computation."""

    layer: int
    ratio: float


NO_RECOMPUTE = (CheckLayer(0, 0.0),)  # with any rule: all stored KV is kept


def cacheblend(evidence: RuleInputs) -> Tensor:
    """Squared deviation of V at the check layer (CacheBlend, section 4.3, and its public code)."""
    assert evidence.value_deviation is not None
    return evidence.value_deviation


def cacheblend_k(evidence: RuleInputs) -> Tensor:
    """Squared deviation of K at the check layer (LMCache's blender)."""
    assert evidence.key_deviation is not None
    return evidence.key_deviation


def ask(evidence: RuleInputs) -> Tensor:
    """Both ends of each placed part first, then what the question attends to, mean over the layers read, heads and its
    tokens (ProphetKV, arXiv 2602.02579).

    The first token of a text that was computed alone draws attention there (EPIC, arXiv 2410.15332, recomputes a few of
    them), and no part is left without a recomputed token that tells how far its others have moved.
    """
    assert evidence.attention is not None
    assert evidence.is_edge is not None
    return evidence.attention + evidence.is_edge  # attention is a share, so at most 1


def random(evidence: RuleInputs) -> Tensor:
    """Control: any tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(evidence.seed)
    return torch.rand(len(evidence.positions), generator=generator).to(evidence.positions.device)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A named way to choose tokens, and what it needs to see."""

    name: str
    score: Callable[[RuleInputs], Tensor]  # [N] float32; the highest are recomputed
    needs_deviation: bool = False  # runs the layers before the check layer for all candidates
    probes_before_selection: bool = (
        False  # runs the question ahead, over stale KV, to see what it attends to, before it chooses; so
    )
    # most KV is loaded before any is recomputed
    ratio: float = DEFAULT_RATIO  # of the chunk tokens, recomputed where nothing else is asked for
    drift_gain: float = 0.0  # how much of what recomputed tokens tell (`drift_correction`) the tokens kept move by
    drift_gain_in_context: float = 0.0  # the same of tokens that were stored behind other text than the prefix

    def probe_layers(self, num_layers: int, global_layers: Sequence[int] = ()) -> tuple[int, ...]:
        """The layers at which it reads the question's attention, ascending; () where it asks nothing.

        They are the middle of a deep model, all of a shallow one. Beside layers that see a window only, `global_layers`
        are those that see everything: of the layers it would read, those alone, or all of them if none is among those.

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
# data/results/closeness.json). On the embedded one of 5 layers it answers more questions than `cacheblend` at
# DEFAULT_RATIO, which it needs there (data/results/quality-demo-selection.json).
DEFAULT_RULE = "ask"
# Where running the question ahead does not pay (`is_probe_worthwhile`): of the rules that ask nothing the closest
# there, on questions that are not reported (`--split selection`, data/results/closeness-selection.json).
NO_PROBE_RULE = "cacheblend"


def find_rule(name: str, num_layers: int = DEEP_MODEL_LAYERS) -> SelectionRule:
    """The rule of that name; "auto" is the default rule, which recomputes more in a model of few layers.

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
    """The check layer of a model in which `global_layers` see everything and the others a window only.

    What no window reaches moves no keys and values there, and the question sees little of the prompt.

    >>> default_check_layer((5, 11, 17)), default_check_layer((0, 1, 2)), default_check_layer(())
    (5, 1, 1)
    """
    return next((layer for layer in global_layers if layer >= CHECK_LAYER), CHECK_LAYER)


def check_schedule(
    rule: SelectionRule, ratio: float, num_layers: int, check_layer: int = CHECK_LAYER
) -> tuple[CheckLayer, ...]:
    """At which layer `rule` narrows the computation, and to what share of the chunk tokens.

    Raises UsageError for a layer that the model does not have.
    """
    if not rule.needs_deviation:
        return (CheckLayer(0, ratio),)
    if not 0 <= check_layer < num_layers:
        raise UsageError(f"check layer {check_layer} does not exist; the model has layers 0..{num_layers - 1}")
    return (CheckLayer(check_layer, validate_ratio(ratio)),)


def validate_ratio(ratio: float) -> float:
    """`ratio` itself; raises UsageError unless 0 <= ratio <= 1."""
    return SHARE.validate("recompute_ratio", ratio)


def num_to_recompute(ratio: float, num_chunk_tokens: int, num_candidates: int) -> int:
    """Tokens that `ratio` of the chunk tokens makes, capped at the candidates; 1.0 means every candidate.

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
    """Whether running `num_fresh` tokens ahead is worth its token-layers. Long questions over short chunks are not.

    It may cost what the recompute of `ratio` costs, and ASK_WORTH more: so much more has the rule that takes its place
    to recompute, and is further from full prefill even then.

    >>> [is_probe_worthwhile(RULES["ask"], 0.05, fresh, 200, 200, 31) for fresh in (40, 41)]
    [True, False]
    """
    layers = rule.probe_layers(num_layers, global_layers)
    if not layers or not num_candidates:
        return True  # nothing is run ahead
    return num_fresh * layers[-1] <= (ratio + PROBE_MARGIN) * num_chunk_tokens * num_layers


class SelectionPlan(NamedTuple):
    """How one prompt's tokens are chosen."""

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
    """The rule `name` for one prompt. The default rule gives way to one without a probe where that does not pay.

    fitted: the rule and check layer that a calibration takes for `name`. global_layers: those that see everything, in a
    model where others see a window only; () where all are alike.
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
    """Recomputed token-layers over `num_layers x chunk tokens`. `rows_per_layer[l]` counts everything run at layer l.

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
    """The same rule's charged budget in a model of `depth` layers: layers up to the check cost the same, the mean
    of the rest fills the depth. In a shallow model the check is most of the bill; this is the bill of a deep one.

    `fixed_cost`: the part of `rows_per_layer` that the check layer itself took (measuring deviation, the question read
    there), paid once at any depth.

    >>> round(charged_budget_at(32, [100, 20, 20, 20], num_chunk_tokens=100, check_layer=1), 4)
    0.225
    """
    head, tail = list(rows_per_layer[:check_layer]), list(rows_per_layer[check_layer:])
    if not tail or depth <= check_layer:
        return charged_budget(rows_per_layer, num_chunk_tokens)
    mean = (sum(tail) - fixed_cost) / len(tail)
    return charged_budget([*head, fixed_cost + mean, *[mean] * (depth - len(head) - 1)], num_chunk_tokens)
