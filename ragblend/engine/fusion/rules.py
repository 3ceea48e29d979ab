"""Which stale tokens to recompute: one small function per rule, all with the same signature.

A rule turns `Evidence` about the N candidate tokens into scores [N]; the fusor recomputes the highest. Candidates
are the tokens whose stored KV never saw the chunks before them; the chunk that stands exactly where it was computed
is not among them. Knows tensors only.

Where the evidence comes from: positions, offsets and separators from the plan; deviations from the check layer, where
the fusor computes K and V of the candidates afresh; attention and effect from the question, which the fusor runs ahead
over stale KV through the layers that the rule reads. At layer 1 the question's queries are exact, because layer 0 is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
ASK_RATIO, CARRY, CARRY_IN_CONTEXT, ASK_WORTH = 0.05, 0.9, 0.8, 0.1

# Layers from which a model is taken to work as the language model does on which `ask` and its constants were chosen;
# those that are used have 16 and more.
DEEP = 12
# Of such a model's depth, from where and up to where `ask` reads the question, chosen as the numbers below are
# (docs/fidelity.md, "Measured"): both ends say less of what it is about.
MIDDLE = (1 / 3, 0.8)

ATTENTION_WEIGHT = 0.1  # of `repair`; measured by benchmarks/selection_experiments.py, as the rule's candidates are


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about N candidate tokens, in prompt order. All tensors [N]."""

    positions: Tensor  # int64, place in the prompt
    offsets: Tensor  # int64, place within the chunk
    key_deviation: Tensor | None = None  # float32, squared L2 of fresh minus stored keys, over heads and dimensions
    value_deviation: Tensor | None = None  # float32, the same for values
    attention: Tensor | None = None  # float32, the share of the question's attention that the token gets
    effect: Tensor | None = None  # float32, how far the question's attention output moves if this token is repaired
    separators: Tensor | None = None  # bool, tokens of the chunks' template, such as <doc>
    seed: int = 0


class Check(NamedTuple):
    """From `layer` on, `ratio` of the chunk tokens stay in the computation."""

    layer: int
    ratio: float


def cacheblend(evidence: Evidence) -> Tensor:
    """Squared deviation of V at the check layer (CacheBlend, section 4.3, and its public code)."""
    assert evidence.value_deviation is not None
    return evidence.value_deviation


def cacheblend_k(evidence: Evidence) -> Tensor:
    """Squared deviation of K at the check layer (LMCache's blender)."""
    assert evidence.key_deviation is not None
    return evidence.key_deviation


def repair(evidence: Evidence) -> Tensor:
    """How far the question's attention output at the check layer moves when this token alone is repaired, and a tenth
    of the question's attention, both as shares of their sums.

    An early check layer does not see what a token would take over from other chunks in deeper layers. So where hardly
    anything moves any more, the tokens that the question looks at are the better guess.
    """
    assert evidence.effect is not None
    assert evidence.attention is not None
    return _share(evidence.effect) + ATTENTION_WEIGHT * _share(evidence.attention)


def ask(evidence: Evidence) -> Tensor:
    """What the question attends to, mean over the layers read, heads and its tokens (ProphetKV, arXiv 2602.02579)."""
    assert evidence.attention is not None
    return evidence.attention


def _share(scores: Tensor) -> Tensor:
    return scores / scores.sum().clamp_min(torch.finfo(scores.dtype).tiny)


def first_k(evidence: Evidence) -> Tensor:
    """The first tokens of every chunk, equally many each (EPIC, LegoLink): they act as attention sinks."""
    return -evidence.offsets.float()


def random(evidence: Evidence) -> Tensor:
    """Control: any tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(evidence.seed)
    return torch.rand(len(evidence.positions), generator=generator).to(evidence.positions.device)


def position(evidence: Evidence) -> Tensor:
    """Control: the tokens furthest into the prompt, whose stored KV missed the most context."""
    return evidence.positions.float()


@dataclass(frozen=True, slots=True)
class Rule:
    """A named way to choose tokens, and what it needs to see."""

    name: str
    score: Callable[[Evidence], Tensor]
    needs_deviation: bool  # runs the layers before the check layer for all candidates
    gradual: bool = False  # filters again at every layer after the check layer
    needs_attention: bool = False  # runs the question ahead, over stale KV, to see what it attends to
    candidate_share: float = 1.0  # of the chunk tokens, the most attended, that run up to the first check layer, ...
    candidates_per_token: float = math.inf  # ... but at most so many for each token to recompute
    ratio: float = DEFAULT_RATIO  # of the chunk tokens, recomputed where nothing else is asked for
    skips_separators: bool = False  # template tokens are chosen only when nothing else is left
    carry: float = 0.0  # how much of what recomputed tokens tell (`carry`) the tokens kept move by
    carry_in_context: float = 0.0  # the same of tokens that were stored behind other text than the prefix
    depths: tuple[float, float] = (0.0, 1.0)  # from, up to: the part of a deep model's layers where it asks

    def candidates(self, ratio: float) -> float:
        """Share of the chunk tokens that run up to the first check layer to choose `ratio` of them.

        >>> [round(RULES["repair"].candidates(ratio), 2) for ratio in (0.02, 0.05, 0.15, 1.0)]
        [0.24, 0.6, 0.6, 1.0]
        """
        return max(ratio, min(self.candidate_share, self.candidates_per_token * ratio))

    def probe_layers(
        self, checks: Sequence[Check], num_layers: int, global_layers: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The layers at which it reads the question's attention, ascending; () where it asks nothing.

        They are the checks', where it measures there; else it chooses before any layer is run, and reads the middle of
        a deep model, all of a shallow one. Beside layers that see a window only, `global_layers` are those that see
        everything: of the layers it would read, those alone, or all of them if none is among those.

        >>> [RULES[name].probe_layers([Check(1, 0.15)], 3) for name in ("repair", "ask", "cacheblend")]
        [(1,), (0, 1, 2), ()]
        >>> RULES["ask"].probe_layers([Check(0, 0.05)], 30) == tuple(range(10, 24))
        True
        >>> [RULES["ask"].probe_layers([Check(0, 0.05)], 26, layers) for layers in ((5, 11, 17, 23), (5,))]
        [(11, 17), (5,)]
        """
        if not self.needs_attention:
            return ()
        if not self.asks_first:
            return tuple(check.layer for check in checks)
        first, end = (int(share * num_layers) for share in (self.depths if num_layers >= DEEP else (0, 1)))
        within = tuple(layer for layer in global_layers if first <= layer < end)
        return within or tuple(global_layers) or tuple(range(first, end))

    @property
    def asks_first(self) -> bool:
        """Whether it reads the question before it chooses, so that most KV is loaded before any is recomputed."""
        return self.needs_attention and not self.needs_deviation

    def scores(self, evidence: Evidence) -> Tensor:
        """[N] float32; the highest are recomputed."""
        scores = self.score(evidence)
        if self.skips_separators and evidence.separators is not None:
            return scores.masked_fill(evidence.separators, -math.inf)
        return scores


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("cacheblend", cacheblend, needs_deviation=True),
        Rule("cacheblend_gradual", cacheblend, needs_deviation=True, gradual=True),
        Rule("cacheblend_k", cacheblend_k, needs_deviation=True),
        Rule(
            "repair", repair, True, needs_attention=True, candidate_share=0.6, candidates_per_token=12,
            skips_separators=True,
        ),
        Rule(
            "ask", ask, needs_deviation=False, needs_attention=True, ratio=ASK_RATIO, skips_separators=True,
            carry=CARRY, carry_in_context=CARRY_IN_CONTEXT, depths=MIDDLE,
        ),
        Rule("first_k", first_k, needs_deviation=False),
        Rule("random", random, needs_deviation=False),
        Rule("position", position, needs_deviation=False),
    )
}  # fmt: skip

# Measured on the demo model's held-out questions (`benchmarks.demo_quality`, data/results/quality.json). Its candidates
# were chosen, and others tried in its place, on questions of another part (`benchmarks/selection_experiments.py`):
# spans, forced first or last tokens, sums of ranks, checks at every layer and a shift of the values of tokens that are
# not recomputed were worse or no better; so were K, V or K+V deviation times attention, and attention in middle layers.
# Attention beside the effect is better at 15 % (KL by two thirds), no different at 5 and 10 %.
# A model of 5 layers says little about where a deep one's questions look.
SHALLOW = "repair"
# On a real language model of 30 layers `repair` is no closer than random tokens, and `ask` the closest rule
# (`ragblend bench quality`, data/results/closeness.json).
DEFAULT = "ask"
# Where running the question ahead does not pay (`probe_pays`): of the rules that ask nothing the closest there, on
# questions that are not reported (`--part selection`, data/results/closeness-selection.json).
FALLBACK = "cacheblend"


def find_rule(name: str, num_layers: int = DEEP) -> Rule:
    """The rule of that name; "auto" is the default rule of a model of so many layers.

    >>> find_rule("auto", 32).name, find_rule("auto", 5).name
    ('ask', 'repair')
    """
    if name == "auto":
        name = DEFAULT if num_layers >= DEEP else SHALLOW
    if name not in RULES:
        raise UsageError(f"rule {name!r} is unknown; choose auto or one of {', '.join(RULES)}")
    return RULES[name]


def first_check(global_layers: Sequence[int]) -> int:
    """The check layer of a model in which `global_layers` see everything and the others a window only.

    What no window reaches moves no keys and values there, and the question sees little of the prompt.

    >>> first_check((5, 11, 17)), first_check((0, 1, 2)), first_check(())
    (5, 1, 1)
    """
    return next((layer for layer in global_layers if layer >= CHECK_LAYER), CHECK_LAYER)


def gradual_schedule(ratio: float, num_layers: int, check_layer: int = CHECK_LAYER) -> tuple[Check, ...]:
    """CacheBlend's gradual filtering: the kept share shrinks linearly from 1.5 to 0.5 times `ratio`, mean `ratio`.

    The first check keeps more than `ratio`, each later layer drops the tokens that deviate least there (section 4.3).

    >>> [round(check.ratio, 3) for check in gradual_schedule(0.2, num_layers=4)]
    [0.3, 0.2, 0.1]
    """
    count = num_layers - check_layer
    if count <= 1:
        return (Check(check_layer, ratio),)
    first = min(1.0, 1.5 * ratio)
    last = 2 * ratio - first
    return tuple(Check(check_layer + i, first + (last - first) * i / (count - 1)) for i in range(count))


def schedule(
    rule: Rule, ratio: float, num_layers: int, checks: Sequence[Check] | None = None, check_layer: int = CHECK_LAYER
) -> tuple[Check, ...]:
    """At which layers `rule` narrows the computation, and to what share of the chunk tokens.

    `checks` overrides it: several check layers, ascending, with their own ratios. Raises UsageError where the
    shares grow with depth (a token that was dropped has no hidden state any more).
    """
    if checks is not None:
        if not rule.needs_deviation and len(checks) > 1:
            raise UsageError(
                f"rule {rule.name} chooses its tokens before the first layer, so only one check layer applies; "
                f"{len(checks)} given. Choose a rule that measures deviation, such as cacheblend"
            )
        return _validated(checks, num_layers)
    if not rule.needs_deviation:
        return (Check(0, ratio),)
    if rule.gradual:
        return gradual_schedule(ratio, num_layers, check_layer)
    return _validated((Check(check_layer, ratio),), num_layers)


def _validated(checks: Sequence[Check], num_layers: int) -> tuple[Check, ...]:
    if not checks:
        raise UsageError("no check layer given; pass at least one, e.g. checks=[Check(1, 0.15)]")
    for before, after in itertools.pairwise(checks):
        if after.layer <= before.layer or after.ratio > before.ratio:
            raise UsageError(f"check layers must ascend and their ratios not grow: {before} is followed by {after}")
    if checks[0].layer < 0 or checks[-1].layer >= num_layers:
        raise UsageError(f"check layer {checks[-1].layer} does not exist; the model has layers 0..{num_layers - 1}")
    for check in checks:
        check_ratio(check.ratio)
    return tuple(Check(*check) for check in checks)


def check_ratio(ratio: float) -> float:
    """`ratio` itself; raises UsageError unless 0 <= ratio <= 1."""
    return SHARE.of("recompute_ratio", ratio)


def num_to_recompute(ratio: float, num_chunk_tokens: int, num_candidates: int) -> int:
    """Tokens that `ratio` of the chunk tokens makes, capped at the candidates; 1.0 means every candidate.

    >>> num_to_recompute(0.15, num_chunk_tokens=100, num_candidates=80)
    15
    """
    # round() first: 0.15 * 100 is 15.000000000000002 in floating point, which ceil would turn into 16.
    return min(num_candidates, math.ceil(round(ratio * num_chunk_tokens, 6)))


def probe_pays(
    rule: Rule,
    checks: Sequence[Check],
    num_fresh: int,
    num_candidates: int,
    num_chunk_tokens: int,
    num_layers: int,
    global_layers: Sequence[int] = (),
) -> bool:
    """Whether running `num_fresh` tokens ahead is worth its token-layers. Long questions over short chunks are not.

    It saves the layers before the check for the candidates that nobody attends to. Beyond that it may cost as much
    as the recompute itself: with that compute `cacheblend_k` would recompute twice the tokens, and it is further from
    full prefill then (demo model, first-token KL on reference questions, 5 to 10 %). A rule that asks first may cost
    ASK_WORTH more: so much more has the rule that takes its place to recompute, and is further off even then.

    >>> [probe_pays(RULES["repair"], [Check(1, 0.1)], fresh, 200, 200, 5) for fresh in (180, 181)]
    [True, False]
    >>> [probe_pays(RULES["ask"], [Check(0, 0.05)], fresh, 200, 200, 31) for fresh in (40, 41)]
    [True, False]
    """
    layers = rule.probe_layers(checks, num_layers, global_layers)
    if not layers or not num_candidates:
        return True  # nothing is run ahead
    saved = max(0.0, num_candidates - rule.candidates(checks[0].ratio) * num_chunk_tokens) * checks[0].layer
    worth = checks[0].ratio + (ASK_WORTH if rule.asks_first else 0.0)
    return num_fresh * layers[-1] <= saved + worth * num_chunk_tokens * num_layers


class Choice(NamedTuple):
    """How one prompt's tokens are chosen."""

    rule: Rule
    checks: tuple[Check, ...]
    probe_layers: tuple[int, ...]


def settle(
    name: str,
    ratio: float,
    num_layers: int,
    *,
    num_fresh: int,
    num_candidates: int,
    num_chunk_tokens: int,
    checks: Sequence[Check] | None = None,
    fitted: tuple[str, int] | None = None,
    global_layers: Sequence[int] = (),
) -> Choice:
    """The rule `name` for one prompt. The default rule gives way to one without a probe where that does not pay.

    fitted: the rule and check layer that a calibration takes for `name`. global_layers: those that see everything, in a
    model where others see a window only; () where all are alike.
    """
    first = first_check(global_layers) if global_layers else CHECK_LAYER
    taken, check_layer = fitted or (name, first)
    rule = find_rule(taken, num_layers)
    chosen = schedule(rule, ratio, num_layers, checks, check_layer)
    counts = (num_fresh, num_candidates, num_chunk_tokens, num_layers)
    if name == "auto" and not probe_pays(rule, chosen, *counts, global_layers):
        rule = find_rule(FALLBACK)
        chosen = schedule(rule, ratio, num_layers, checks, first)
    return Choice(rule, chosen, rule.probe_layers(chosen, num_layers, global_layers))


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
