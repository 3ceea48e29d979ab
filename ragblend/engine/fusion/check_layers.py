"""Check layers: where a rule measures how far stored KV is from fresh KV, and how many of the tokens it keeps there.

`schedule_check_layers` turns a rule, a ratio and SelectionOptions into the check layers of one model. `fuse` measures
the deviation of the candidates at each, with `measure_deviation`, and drops those that the check layer does not keep.
Depends on tensors, rules and options, not on models, plans or stores. Read `rules` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.rules import RULES, SelectionRule
from ragblend.engine.store.format.kv import LayerKV
from ragblend.errors import UsageError
from ragblend.options import Deviation, SelectionOptions

# First and last share of several check layers, in units of the ratio: a straight line over the layers from the first
# check layer to the last layer, whose mean is the ratio. The paper keeps "slightly more" than the ratio in the first
# selected layer and fewer in each next one (CacheBlend, section 4.3), and gives no numbers.
FIRST_SHARE, LAST_SHARE = 1.2, 0.8


class CheckLayer(NamedTuple):
    """Layer at which a rule keeps some of the candidates: those with the highest score.

    It keeps `ratio` of the chunk tokens at most, and of these only tokens whose relative deviation is at least
    `threshold`.
    """

    layer: int
    ratio: float = 1.0
    threshold: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """True if every candidate is kept, so that nothing needs to be measured."""
        return self.ratio >= 1 and self.threshold <= 0


def schedule_check_layers(
    rule: SelectionRule,
    ratio: float,
    first_layer: int,
    num_layers: int,
    options: SelectionOptions | None = None,
) -> tuple[CheckLayer, ...]:
    """Return the check layers of `rule`, ascending; () for a rule that measures no deviation.

    `first_layer`: check layer of the rule if `options` names none. A gradual rule then has all layers from there on.
    `ratio`: share of the chunk tokens to recompute, the mean over the layers from the first check layer on. With
    several check layers it falls along a straight line. Raises UsageError for a layer that the model does not have,
    and if `options` does not fit the rule or the number of check layers.

    >>> schedule_check_layers(RULES["cacheblend"], 0.15, 1, 30)
    (CheckLayer(layer=1, ratio=0.15, threshold=0.0),)
    >>> [round(each.ratio, 3) for each in schedule_check_layers(RULES["cacheblend_gradual"], 0.15, 1, 5)]
    [0.172, 0.158, 0.142, 0.128]
    """
    options = options or SelectionOptions()
    validate_selection(rule, options)
    if rule.deviation is None:
        return ()
    layers = options.check_layers or (tuple(range(first_layer, num_layers)) if rule.is_gradual else (first_layer,))
    if not 0 <= layers[0] <= layers[-1] < num_layers:
        wrong = layers[0] if layers[0] < 0 else layers[-1]
        raise UsageError(f"check layer {wrong} does not exist; the model has layers 0..{num_layers - 1}")
    if options.deviation_thresholds is not None:
        thresholds = _one_per_layer("deviation_thresholds", options.deviation_thresholds, layers)
        return tuple(CheckLayer(layer, 1.0, each) for layer, each in zip(layers, thresholds, strict=True))
    if options.recompute_ratios is not None:
        ratios = _one_per_layer("recompute_ratios", options.recompute_ratios, layers)
    else:
        ratios = _falling_ratios(ratio, layers, num_layers)
    return tuple(CheckLayer(layer, each) for layer, each in zip(layers, ratios, strict=True))


def validate_selection(rule: SelectionRule, options: SelectionOptions) -> None:
    """Raise UsageError if `options` need a rule that measures deviations, and `rule` does not."""
    names = [name for name in options.selection if name != "blend_min_tokens"]
    if rule.deviation is None and names:
        able = ", ".join(each.name for each in RULES.values() if each.deviation is not None)
        raise UsageError(f"rule {rule.name!r} measures no deviation, so it cannot use {names[0]}; choose one of {able}")


def _one_per_layer(name: str, values: Sequence[float], layers: Sequence[int]) -> Sequence[float]:
    if len(values) == 1:
        return list(values) * len(layers)
    if len(values) != len(layers):
        raise UsageError(f"{name} has {len(values)} numbers for {len(layers)} check layers; pass check_layers, too")
    return values


def _falling_ratios(ratio: float, layers: Sequence[int], num_layers: int) -> list[float]:
    """Return the share of each check layer: the mean, over its layers, of a line from 1.2 to 0.8 times `ratio`.

    A check layer's layers are those from it up to the next check layer. So the mean over all of them is `ratio`, and a
    single check layer has exactly `ratio`.
    """
    half = min((FIRST_SHARE - LAST_SHARE) / 2 * ratio, 1.0 - ratio)  # no share above 1
    depth = num_layers - layers[0]
    middles = [(start + end) / 2 - layers[0] for start, end in pairwise((*layers, num_layers))]
    return [ratio + half * (1 - 2 * middle / depth) for middle in middles]


def mean_ratio(checks: Sequence[CheckLayer], num_layers: int) -> float:
    """Return the mean share of the chunk tokens that `checks` keep, over the layers from the first of them on.

    >>> mean_ratio([CheckLayer(1, 0.2), CheckLayer(3, 0.1)], num_layers=5)
    0.15
    """
    spans = pairwise((*(check.layer for check in checks), num_layers))
    kept = sum(check.ratio * (end - start) for check, (start, end) in zip(checks, spans, strict=True))
    return round(kept / (num_layers - checks[0].layer), 6)


class MeasuredDeviation(NamedTuple):
    """Squared distances of N tokens' stored keys and values from fresh ones, and squared lengths of the fresh ones.

    All are [N] float32, summed over heads and dimensions. Keys are rotated; a rotation changes no length.
    """

    keys: Tensor
    values: Tensor
    fresh_keys: Tensor
    fresh_values: Tensor

    def squared(self, deviation: Deviation) -> Tensor:
        """Return the squared distance [N] of values ("v"), keys ("k"), or both as one vector ("kv")."""
        return {"v": self.values, "k": self.keys}.get(deviation, self.keys + self.values)

    def relative(self, deviation: Deviation) -> Tensor:
        """Return the distance [N] divided by the length of the fresh vector."""
        lengths = {"v": self.fresh_values, "k": self.fresh_keys}.get(deviation, self.fresh_keys + self.fresh_values)
        return (self.squared(deviation) / lengths.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()

    @property
    def mean_relative(self) -> Tensor:
        """Mean [N] of the relative distances of keys and values, so that both have equal weight; 0 is equal."""
        return (self.relative("k") + self.relative("v")) / 2


def measure_deviation(
    fresh: LayerKV, stored: LayerKV, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> MeasuredDeviation:
    """Return how far each token's `stored` KV is from `fresh`, both [H, N, D] with rotated keys.

    `sum_over_ranks` as in FusePlan: with it, all ranks get the numbers of all heads, and so select the same tokens.
    """
    pairs = list(zip(fresh, stored, strict=True))
    squares = torch.stack(
        [(new.float() - old.float()).square().sum(dim=(0, 2)) for new, old in pairs]
        + [new.float().square().sum(dim=(0, 2)) for new, _ in pairs]
    )
    return MeasuredDeviation(*(squares if sum_over_ranks is None else sum_over_ranks(squares)))
