"""The question's attention and the effect of a repair, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragblend.engine.fusion import attention
from ragblend.engine.fusion.attention import Queries, attend_weighing, attention_mass, repair_effect
from ragblend.engine.store.kv import LayerKV

LENGTH, DIM, SCALE = 40, 8, 0.3


def probabilities(queries: Queries, keys: Tensor) -> Tensor:
    """[Hq, Q, T], one query at a time."""
    num_heads, num_queries, _ = queries.states.shape
    group = num_heads // keys.shape[0]
    weights = torch.zeros(num_heads, num_queries, keys.shape[1])
    for head in range(num_heads):
        for index, row in enumerate(queries.rows.tolist()):
            seen = keys[head // group, : row + 1].double()
            scores = seen @ queries.states[head, index].double() * queries.scale
            weights[head, index, : row + 1] = scores.softmax(0)
    return weights


def outputs(queries: Queries, kv: LayerKV) -> Tensor:
    """[Hq, Q, D] attention output."""
    return probabilities(queries, kv.keys) @ kv.values.repeat_interleave(len(queries.states) // len(kv.values), 0)


def draw(seed: int, rows: list[int], kv_heads: int, sharpness: float = 1.0) -> tuple[Queries, LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    states = sharpness * torch.randn(4, len(rows), DIM, generator=generator)
    keys, values = torch.randn(2, kv_heads, LENGTH, DIM, generator=generator)
    return Queries(states, torch.tensor(rows), SCALE), LayerKV(keys, values)


questions = st.sets(st.integers(20, LENGTH - 1), min_size=1, max_size=12).map(sorted)


@settings(max_examples=30)
@given(
    rows=questions,
    kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 20),
    block=st.sampled_from([1, 400, 1 << 22]),
)
def test_the_mass_is_the_mean_of_the_probabilities_in_any_blocks(rows, kv_heads, seed, block):
    queries, kv = draw(seed, rows, kv_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        found = attention_mass(queries, kv.keys)
    torch.testing.assert_close(found, probabilities(queries, kv.keys).mean(dim=(0, 1)), atol=1e-6, rtol=0)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    assert (found[rows[-1] + 1 :] == 0).all()


@settings(max_examples=30)
@given(
    rows=questions,
    kv_heads=st.sampled_from([1, 2, 4]),
    num_asking=st.integers(1, 12),
    block=st.sampled_from([1, 400, 1 << 22]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_who_weighs_attends_as_well(rows, kv_heads, num_asking, block, dtype):
    queries, kv = draw(0, rows, kv_heads)
    queries, kv = queries._replace(states=queries.states.to(dtype)), LayerKV(kv.keys.to(dtype), kv.values.to(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        output, mass = attend_weighing(queries, kv.keys[:, : rows[-1] + 1], kv.values[:, : rows[-1] + 1], num_asking)
    exact, states = LayerKV(kv.keys.float(), kv.values.float()), queries._replace(states=queries.states.float())
    atol = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(output.float(), outputs(states, exact), atol=atol, rtol=0)
    expected = probabilities(states.last(num_asking), exact.keys).mean(dim=(0, 1))[: rows[-1] + 1]
    torch.testing.assert_close(mass, expected, atol=atol, rtol=0)


@settings(max_examples=30)
@given(
    rows=questions, kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 20),
    block=st.sampled_from([1, 1 << 22]), sharpness=st.sampled_from([0.1, 1.0, 8.0, 60.0]),
)  # fmt: skip
def test_the_effect_of_a_repair_is_what_repairing_does(rows, kv_heads, seed, block, sharpness):
    queries, stale = draw(seed, rows, kv_heads, sharpness)
    _, other = draw(seed + 1, rows, kv_heads)
    repaired = torch.tensor([0, 3, 7, 19, 30])
    fresh = LayerKV(other.keys[:, repaired], other.values[:, repaired])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        found = repair_effect(queries, stale, repaired, fresh)
    before = outputs(queries, stale)
    for index, row in enumerate(repaired.tolist()):
        keys, values = stale.keys.clone(), stale.values.clone()
        keys[:, row], values[:, row] = fresh.keys[:, index], fresh.values[:, index]
        change = (outputs(queries, LayerKV(keys, values)) - before).square().sum(-1).mean(1).sum()
        assert float(found[index]) == pytest.approx(float(change), rel=2e-3, abs=1e-4)


def test_a_token_without_drift_or_without_attention_has_no_effect():
    queries, stale = draw(1, [25, 26], 2)
    rows = torch.tensor([4, 39])  # 39 lies behind the question
    same = LayerKV(stale.keys[:, rows], stale.values[:, rows])
    assert repair_effect(queries, stale, rows, same).abs().max() < 1e-10
    moved = LayerKV(same.keys + 1, same.values + 1)
    effect = repair_effect(queries, stale, rows, moved)
    assert effect[0] > 1e-4
    assert effect[1] == 0
