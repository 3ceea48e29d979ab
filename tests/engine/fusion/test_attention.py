"""The question's attention and that of scattered rows, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragblend.engine.fusion import attention
from ragblend.engine.fusion.attention import (
    BLOCK_ROWS,
    PLAIN,
    AttentionExtras,
    ProbeQueries,
    attend_rows,
    attend_with_weights,
    attention_mass,
)
from ragblend.engine.store.format.kv import LayerKV

LENGTH, DIM, SCALE = 40, 8, 0.3


def probabilities(queries: ProbeQueries, keys: Tensor) -> Tensor:
    """[Hq, Q, T], one query at a time."""
    num_heads, num_queries, _ = queries.states.shape
    group = num_heads // keys.shape[0]
    weights = torch.zeros(num_heads, num_queries, keys.shape[1])
    for head in range(num_heads):
        for index, row in enumerate(queries.rows.tolist()):
            first = 0 if queries.params.window is None else max(0, row + 1 - queries.params.window)
            seen = keys[head // group, first : row + 1].double()
            scores = seen @ queries.states[head, index].double() * queries.scale
            if queries.params.softcap is not None:
                scores = queries.params.softcap * (scores / queries.params.softcap).tanh()
            if queries.params.sinks is not None:
                scores = torch.cat((scores, queries.params.sinks[head : head + 1].double()))
            weights[head, index, first : row + 1] = scores.softmax(0)[: row + 1 - first]
    return weights


def outputs(queries: ProbeQueries, kv: LayerKV) -> Tensor:
    """[Hq, Q, D] attention output."""
    return probabilities(queries, kv.keys) @ kv.values.repeat_interleave(len(queries.states) // len(kv.values), 0)


def draw(seed: int, rows: list[int], kv_heads: int) -> tuple[ProbeQueries, LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(4, len(rows), DIM, generator=generator)
    keys, values = torch.randn(2, kv_heads, LENGTH, DIM, generator=generator)
    return ProbeQueries(states, torch.tensor(rows), SCALE), LayerKV(keys, values)


def params(window: int | None, softcap: float | None, has_sinks: bool) -> AttentionExtras:
    return AttentionExtras(window, softcap, torch.tensor([-1.0, 0.5, 2.0, 0.0]) if has_sinks else None)


sights = st.one_of(
    st.just(PLAIN),
    st.builds(
        params, st.one_of(st.none(), st.integers(2, LENGTH + 5)), st.sampled_from([None, 1.5, 20.0]), st.booleans()
    ),
)
questions = st.sets(st.integers(20, LENGTH - 1), min_size=1, max_size=12).map(sorted)


@settings(max_examples=30)
@given(
    rows=questions,
    kv_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 20),
    block=st.sampled_from([1, 400, 1 << 22]),
    params=sights,
)
def test_the_mass_is_the_mean_of_the_probabilities_in_any_blocks(rows, kv_heads, seed, block, params):
    queries, kv = draw(seed, rows, kv_heads)
    queries = queries._replace(params=params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        found = attention_mass(queries, kv.keys)
    torch.testing.assert_close(found, probabilities(queries, kv.keys).mean(dim=(0, 1)), atol=1e-6, rtol=0)
    if params.sinks is None:
        assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    assert (found[rows[-1] + 1 :] == 0).all()


@settings(max_examples=30)
@given(
    rows=questions,
    kv_heads=st.sampled_from([1, 2, 4]),
    num_asking=st.integers(1, 12),
    block=st.sampled_from([1, 400, 1 << 22]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    params=sights,
)
def test_attention_with_weights_has_the_output_of_attention(rows, kv_heads, num_asking, block, dtype, params):
    queries, kv = draw(0, rows, kv_heads)
    queries = queries._replace(states=queries.states.to(dtype), params=params)
    kv = LayerKV(kv.keys.to(dtype), kv.values.to(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        output, mass = attend_with_weights(
            queries, kv.keys[:, : rows[-1] + 1], kv.values[:, : rows[-1] + 1], num_asking
        )
    exact, states = LayerKV(kv.keys.float(), kv.values.float()), queries._replace(states=queries.states.float())
    atol = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(output.float(), outputs(states, exact), atol=atol, rtol=0)
    expected = probabilities(states.slice_rows(slice(-num_asking, None)), exact.keys).mean(dim=(0, 1))[: rows[-1] + 1]
    torch.testing.assert_close(mass, expected, atol=atol, rtol=0)


@settings(max_examples=60)
@given(
    rows=st.one_of(
        st.sets(st.integers(0, LENGTH - 1), min_size=1).map(sorted),
        st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda run: list(range(run[0], run[0] + run[1]))),
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
    params=sights,
    block=st.sampled_from([1, 1 << 22]),
    block_rows=st.sampled_from([1, 3, BLOCK_ROWS["cpu"]]),
)
def test_scattered_rows_see_their_window_and_nothing_else_is_touched(rows, kv_heads, params, block, block_rows):
    queries, kv = draw(3, rows, kv_heads)
    queries = queries._replace(params=params)
    expected = outputs(queries, kv)
    unseen = torch.ones(LENGTH, dtype=torch.bool)
    for row in rows:
        unseen[max(0, row + 1 - (params.window or LENGTH)) : row + 1] = False
    inner = torch.arange(LENGTH)
    unseen &= (inner < inner[~unseen].min()) | (inner > rows[-1])  # between rows far apart, blocks read over gaps
    keys, values = (states.masked_fill(unseen[:, None], torch.nan)[None] for states in kv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_SCORES, "cpu", block)
        patch.setitem(attention.BLOCK_ROWS, "cpu", block_rows)
        found = attend_rows(queries.states[None], keys, values, queries.rows, SCALE, params)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 10])
def test_adjacent_rows_on_a_gpu_need_no_mask_for_an_equal_result(start, kv_heads, monkeypatch):
    """A CPU stands in for the GPU: torch then makes the mask itself."""
    monkeypatch.setitem(attention.BLOCK_ROWS, "cpu", 8)
    queries, kv = draw(5, list(range(start, 35)), kv_heads)
    keys, values = (states.clone()[None] for states in kv)
    keys[:, :, 35:] = values[:, :, 35:] = torch.nan  # positions that no row reads
    masked = attend_rows(queries.states[None], keys, values, queries.rows, SCALE)
    monkeypatch.setattr(attention, "CAUSAL_KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(attention, "_mask", None)
    found = attend_rows(queries.states[None], keys, values, queries.rows, SCALE)
    torch.testing.assert_close(found, masked, atol=1e-6, rtol=0)
    torch.testing.assert_close(found[0], outputs(queries, kv), atol=1e-5, rtol=0)
