"""Every form of selection by deviation against the independent CacheBlend: check layers, shares, thresholds, K, V."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import Blended, Reference, gradual_shares
from selection_cases import FORMS, NUM_LAYERS, Case, random_case
from test_fuse import (
    CHUNKS,
    PREFIX,
    Outcome,
    Prompt,
    assert_full_prefill,
    assert_same_blend,
    blend,
    make_prompt,
    random_ids,
)

from ragblend.engine.fusion.check_layers import CheckLayer, mean_ratio, schedule_check_layers
from ragblend.engine.fusion.rules import RULES
from ragblend.errors import UsageError
from ragblend.options import GenerationOptions, SelectionOptions

SELECTIVE_FAMILIES = ("llama", "qwen3", "gemma2", "phi3")  # of which each random blend takes the next one


def random_prompt(chance: random.Random, seed: int) -> Prompt:
    """A prefix, two to four stored chunks, in some prompts new tokens between them, and a question.

    Without a prefix, the deviation of the first chunk would be rounding noise, in which no order is right.
    """
    chunks = tuple(chance.randint(3, 14) for _ in range(chance.randint(2, 4)))
    prompt = make_prompt(seed, chunks, chance.randint(1, 5))
    if chance.random() < 0.4:
        prompt.spans.insert(2, (chance.choice(("text", "missing")), random_ids(chance.randint(1, 6), 5000 + seed)))
    return prompt


def both_blends(case: Case, family: str, prompt: Prompt, stock_model: Any, tiny_layers: Any) -> tuple[Outcome, Blended]:
    outcome = blend(tiny_layers(family), prompt, case.ratio, case.rule, options=SelectionOptions(**case.options))
    return outcome, Reference(stock_model(family)).blend(prompt.reference_spans(), **case.reference)


@pytest.mark.parametrize(
    "count", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["few", "200"]
)
@pytest.mark.parametrize("form", FORMS)
def test_random_selections_equal_those_of_the_independent_cacheblend(form, count, stock_model, tiny_layers):
    chance, differing, partial = random.Random(form), [], 0
    for number in range(count):
        case, prompt = random_case(form, chance), random_prompt(chance, number)
        family = SELECTIVE_FAMILIES[number % len(SELECTIVE_FAMILIES)]
        if family == "gemma2" and "check_layers" not in case.options:
            family = "llama"  # Gemma 2 measures at its global layers, which the case does not name
        outcome, expected = both_blends(case, family, prompt, stock_model, tiny_layers)
        if outcome.recomputed != expected.selected:
            differing.append((number, case, outcome.recomputed, expected.selected))
            continue
        assert_same_blend(outcome, expected)
        partial += 0 < len(expected.selected) < sum(len(ids) for _, ids in prompt.starts("chunk")[1:])
    assert differing == []
    assert partial > count / 2, "most selections keep some tokens and drop some"


@pytest.mark.parametrize(
    ("rule", "options", "ratio"),
    [
        ("cacheblend_gradual", {}, 1.0),
        ("cacheblend", {"check_layers": [1, 3, 4]}, 1.0),
        ("cacheblend", {"check_layers": [1, 3], "recompute_ratios": [1.0]}, 0.0),
        ("cacheblend", {"deviation_thresholds": [0]}, 0.0),
        ("cacheblend_gradual", {"deviation": "kv", "deviation_thresholds": [0.0]}, 0.0),
    ],
)
def test_ratio_one_and_threshold_zero_equal_full_prefill(rule, options, ratio, stock_model, tiny_layers):
    prompt = make_prompt(3)
    outcome = blend(tiny_layers("qwen3"), prompt, ratio, rule, options=SelectionOptions(**options))
    assert_full_prefill(outcome, stock_model("qwen3"), prompt)


def test_dropped_tokens_run_no_later_layer_and_keep_their_stored_kv(tiny_layers):
    layers, prompt = tiny_layers("llama"), make_prompt(18)
    options = SelectionOptions(check_layers=[1, 3], recompute_ratios=[0.5, 0.2])
    outcome, untouched = blend(layers, prompt, options=options), blend(layers, prompt, 0.0)
    candidates, first, last, share = sum(CHUNKS[1:]), 37, 15, layers.kv_share  # ceil(.5 * 74), ceil(.2 * 74)
    assert outcome.result.kept == {1: first, 3: last}
    rows = [candidates, first + candidates * share, first, last + first * share, last, last]
    assert outcome.result.rows_per_layer == pytest.approx(rows)
    kept = [row for row in range(PREFIX, len(prompt.ids) - 7) if row not in outcome.recomputed]
    changed = [
        layer
        for layer in range(NUM_LAYERS)
        if not outcome.fused.values(layer)[:, kept].equal(untouched.fused.values(layer)[:, kept])
    ]
    assert changed == [1, 2], "the tokens that layer 3 dropped were recomputed in layers 1 and 2"


# --- the schedule ---


@given(
    ratio=st.floats(0, 1),
    num_layers=st.integers(2, 80),
    layers=st.sets(st.integers(1, 79), min_size=1),
)
def test_shares_fall_from_layer_to_layer_and_their_mean_is_the_ratio(ratio, num_layers, layers):
    layers = sorted(layer for layer in layers if layer < num_layers) or [1]
    checks = schedule_check_layers(RULES["cacheblend"], ratio, 1, num_layers, SelectionOptions(check_layers=layers))
    shares = [check.ratio for check in checks]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 + 1e-12 for share in shares)
    assert mean_ratio(checks, num_layers) == pytest.approx(ratio, abs=1e-6)
    assert shares == pytest.approx(list(gradual_shares(ratio, layers, num_layers).values()))


def test_the_gradual_rule_checks_every_layer_from_its_first_one():
    assert [check.layer for check in schedule_check_layers(RULES["cacheblend_gradual"], 0.15, 2, 6)] == [2, 3, 4, 5]
    assert schedule_check_layers(RULES["cacheblend"], 0.15, 1, 6) == (CheckLayer(1, 0.15),)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("ask", {"check_layers": [1]}, r"rule 'ask' measures no deviation.*check_layers.*cacheblend, cacheblend_k"),
        ("random", {"deviation": "kv"}, "rule 'random' measures no deviation"),
        ("cacheblend", {"check_layers": [2, 6]}, r"check layer 6 does not exist; the model has layers 0\.\.5"),
        ("cacheblend", {"recompute_ratios": [0.2, 0.1]}, "2 numbers for 1 check layers; pass check_layers, too"),
    ],
)
def test_options_that_a_rule_or_model_cannot_follow_are_rejected(rule, options, message):
    with pytest.raises(UsageError, match=message):
        schedule_check_layers(RULES[rule], 0.15, 1, NUM_LAYERS, SelectionOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check_layers": [3, 1]}, r"check_layers is \[3, 1\]; choose numbers of layers, ascending"),
        ({"check_layers": []}, r"check_layers is \[\]"),
        ({"recompute_ratios": [0.1, 0.2]}, "none above the one before it"),
        ({"deviation_thresholds": [-0.1]}, "deviation_thresholds is"),
        ({"deviation": "vk"}, "choose one of k, v, kv"),
        ({"blend_min_tokens": -1}, "blend_min_tokens is -1"),
        ({"check_layers": [1, 2, 3], "recompute_ratios": [0.2, 0.1]}, "has 2 numbers for the 3 check_layers"),
        ({"recompute_ratios": [0.2], "deviation_thresholds": [0.2]}, "remove the other"),
        ({"recompute_ratios": [0.2], "recompute_ratio": 0.1}, "recompute_ratio is 0.1, but recompute_ratios sets"),
        ({"deviation_thresholds": [0.2], "recompute_ratio": 0.1}, "but deviation_thresholds sets"),
    ],
)
def test_selection_options_that_contradict_each_other_are_rejected(options, message):
    with pytest.raises(UsageError, match=message):
        GenerationOptions(**options)
