"""Random forms of selection by deviation, for both engines, and what the independent CacheBlend is given for each."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from reference import gradual_shares

FORMS = ("gradual", "several layers", "shares", "kv", "gradual of k", "threshold", "thresholds of kv")
NUM_LAYERS = 6


class Case(NamedTuple):
    """One blend: its ratio, rule and options, and the arguments of `Reference.blend` for them."""

    ratio: float
    rule: str
    options: dict[str, Any]
    reference: dict[str, Any]


def random_case(form: str, chance: random.Random) -> Case:
    """A blend of this form by a model of NUM_LAYERS layers, with random ratios, layers and thresholds."""
    ratio = round(chance.uniform(0.05, 0.6), 3)
    layers = sorted(chance.sample(range(1, NUM_LAYERS), chance.randint(2, 4)))
    falling = sorted((round(chance.uniform(0, 0.8), 3) for _ in layers), reverse=True)
    every, several = range(1, NUM_LAYERS), gradual_shares(ratio, layers, NUM_LAYERS)
    thresholds = [round(chance.uniform(0.5, 1.0), 4) for _ in layers]
    one = round(chance.uniform(0.6, 1.2), 4)
    gradual = gradual_shares(ratio, every, NUM_LAYERS)
    both, nothing = {"deviation": "kv"}, {"shares": {}}
    return {
        "gradual": Case(ratio, "cacheblend_gradual", {}, {"shares": gradual}),
        "several layers": Case(ratio, "cacheblend", {"check_layers": layers}, {"shares": several}),
        "shares": Case(
            ratio,
            "cacheblend_k",
            {"check_layers": layers, "recompute_ratios": falling},
            {"shares": dict(zip(layers, falling, strict=True)), "deviation": "k"},
        ),
        "kv": Case(ratio, "cacheblend", both, {"shares": {1: ratio}, **both}),
        "gradual of k": Case(ratio, "cacheblend_gradual", {"deviation": "k"}, {"shares": gradual, "deviation": "k"}),
        "threshold": Case(0.0, "cacheblend", {"deviation_thresholds": [one]}, {**nothing, "thresholds": {1: one}}),
        "thresholds of kv": Case(
            0.0,
            "cacheblend",
            {"check_layers": layers, "deviation_thresholds": thresholds, **both},
            {**nothing, "thresholds": dict(zip(layers, thresholds, strict=True)), **both},
        ),
    }[form]
