"""Rules score, checks narrow, budgets add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.fusion.check_layers import CheckLayer, schedule_check_layers
from ragblend.engine.fusion.plan import charged_budget, project_charged_budget
from ragblend.engine.fusion.rules import (
    DEEP_MODEL_LAYERS,
    DEFAULT_RATIO,
    DEFAULT_RULE,
    RULES,
    RuleInputs,
    find_rule,
    is_probe_worthwhile,
    num_to_recompute,
    validate_ratio,
)
from ragblend.errors import UsageError

ratios = st.floats(0, 1, allow_nan=False)


def test_rule_random_depends_on_its_seed_only():
    def scores(seed: int) -> torch.Tensor:
        return RULES["random"].score(RuleInputs(torch.arange(10, 17), seed=seed))

    before = torch.get_rng_state()
    assert torch.equal(scores(3), scores(3))
    assert not torch.equal(scores(3), scores(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rule_with_a_probe_reads_every_layer_of_a_shallow_model():
    assert RULES["ask"].probe_layers(4) == (0, 1, 2, 3)
    assert RULES["ask"].probe_layers(DEEP_MODEL_LAYERS - 1) == tuple(range(DEEP_MODEL_LAYERS - 1))
    assert RULES["cacheblend"].probe_layers(4) == ()


@given(num_layers=st.integers(DEEP_MODEL_LAYERS, 130), global_layers=st.sets(st.integers(0, 129)))
def test_the_probe_of_a_deep_model_reads_middle_global_layers(num_layers, global_layers):
    middle = RULES["ask"].probe_layers(num_layers)
    assert middle == tuple(range(middle[0], middle[-1] + 1))
    assert num_layers / 3 - 1 < middle[0] <= num_layers / 3
    assert 0.8 * num_layers - 2 < middle[-1] < 0.8 * num_layers
    known = tuple(sorted(layer for layer in global_layers if layer < num_layers))
    read = RULES["ask"].probe_layers(num_layers, known)
    assert read == (tuple(layer for layer in known if layer in middle) or known or middle)


@given(fresh=st.integers(1, 2000), tokens=st.integers(1, 2000), ratio=st.floats(0.01, 1))
def test_a_probe_pays_the_sooner_the_longer_the_context(fresh, tokens, ratio):
    def pays(fresh: int, tokens: int) -> bool:
        return is_probe_worthwhile(RULES["ask"], ratio, fresh, tokens, tokens, 5)

    assert not pays(fresh, tokens) or pays(fresh, tokens + 1)
    assert pays(fresh, tokens) or not pays(fresh + 1, tokens)
    assert is_probe_worthwhile(RULES["cacheblend"], ratio, fresh, tokens, tokens, 5)


def test_auto_names_a_rule_and_unknown_names_are_refused():
    assert find_rule("auto", DEEP_MODEL_LAYERS) is RULES[DEFAULT_RULE]
    assert find_rule("auto", DEEP_MODEL_LAYERS - 1) == dataclasses.replace(RULES[DEFAULT_RULE], ratio=DEFAULT_RATIO)
    with pytest.raises(UsageError, match=r"'best'.*auto.*cacheblend.*random"):
        find_rule("best")


# --- check layers ---


@pytest.mark.parametrize("layer", [-1, 8])
def test_a_check_that_cannot_be_run_is_refused(layer):
    with pytest.raises(UsageError, match=rf"check layer {layer} does not exist.*0\.\.7"):
        schedule_check_layers(RULES["cacheblend"], 0.15, layer, 8)
    assert schedule_check_layers(RULES["cacheblend"], 0.15, 7, 8) == (CheckLayer(7, 0.15),)
    assert schedule_check_layers(RULES["random"], 0.15, layer, 8) == ()  # no deviation is measured


@pytest.mark.parametrize("ratio", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_ratio_outside_zero_to_one_is_named(ratio):
    with pytest.raises(UsageError, match=f"recompute_ratio is {ratio}"):
        validate_ratio(ratio)
    assert [validate_ratio(inside) for inside in (0, 0.5, 1)] == [0, 0.5, 1]


# --- counting ---


@given(ratio=ratios, chunk_tokens=st.integers(0, 10_000), data=st.data())
def test_num_to_recompute_is_the_share_rounded_up_and_capped(ratio, chunk_tokens, data):
    candidates = data.draw(st.integers(0, chunk_tokens))
    count = num_to_recompute(ratio, chunk_tokens, candidates)
    assert 0 <= count <= candidates
    if count < candidates:
        assert ratio * chunk_tokens - 1e-6 <= count < ratio * chunk_tokens + 1 + 1e-6
    assert ratio != 1 or count == candidates
    assert ratio != 0 or count == 0


@given(percent=st.integers(0, 100), hundreds=st.integers(1, 50))
def test_whole_percentages_of_hundreds_are_counted_exactly(percent, hundreds):
    assert num_to_recompute(percent / 100, 100 * hundreds, 100 * hundreds) == percent * hundreds


def test_the_charged_budget_counts_every_token_layer():
    assert charged_budget([100, 30, 10, 10], 100) == pytest.approx(150 / 400)
    assert charged_budget([100] * 4, 100) == 1
    assert charged_budget([], 100) == charged_budget([1], 0) == 0


@given(rows=st.lists(st.floats(0, 100), min_size=2, max_size=12), check_layer=st.integers(0, 1))
def test_the_budget_at_the_models_own_depth_is_the_charged_budget(rows, check_layer):
    assert project_charged_budget(len(rows), rows, 100, check_layer) == pytest.approx(charged_budget(rows, 100))


def test_a_deeper_model_spreads_the_check_over_more_layers():
    rows = [100, 20, 20, 20]
    assert project_charged_budget(32, [100, 50, 20, 20], 100, 1, fixed_cost=30) == pytest.approx(
        (100 + 30 + 31 * 20) / 3200
    )
    assert project_charged_budget(4, [100, 50, 20, 20], 100, 1, fixed_cost=30) == pytest.approx(190 / 400)
    assert project_charged_budget(32, rows, 100, 1) == pytest.approx((100 + 31 * 20) / 3200)
    assert (
        project_charged_budget(320, rows, 100, 1) < project_charged_budget(32, rows, 100, 1) < charged_budget(rows, 100)
    )
