"""How far kept tokens move, from what the recomputed ones tell. That both engines do it: test_fuse, test_engine."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import fit_change_predictor
from torch import Tensor

from ragblend.engine.fusion.drift_correction import (
    LANDMARKS,
    DriftCorrection,
    fit_drift_correction,
)
from ragblend.engine.store.kv import LayerKV

HEADS, DIM = 4, 8


def carried(
    values: Tensor, chunks: Tensor, tells: Tensor, share: float = 1.0, ranks: list[slice] | None = None
) -> list[DriftCorrection]:
    """On every rank, of tokens at positions 10 and on, of which those that do not tell are kept."""
    rows, shares = torch.arange(10, 10 + len(tells)), torch.zeros(12 + len(tells))
    shares[rows[~tells]] = share
    slices, sums = ranks or [slice(None)], list[Tensor]()
    for heads in slices:  # what the ranks would sum
        fit_drift_correction(values[heads], rows, chunks, tells, shares, lambda own: sums.append(own) or own)
    mean = torch.stack(sums).mean(0)
    return [fit_drift_correction(values[heads], rows, chunks, tells, shares, lambda _: mean) for heads in slices]


def change(told: DriftCorrection, moved: Tensor) -> Tensor:
    """By how much every position's values move, [H, T, D], where the tellers' moved by `moved` [H, N, D]."""
    drift = told.drift(LayerKV(moved, moved), LayerKV(torch.zeros_like(moved), torch.zeros_like(moved)))
    return told.shares @ drift.values


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 200), st.integers(1, 90), st.integers(1, 6), st.integers(0, 2**31))
def test_it_is_the_mean_of_the_process_that_the_reference_solves(tokens: int, tellers: int, chunks: int, seed: int):
    torch.manual_seed(seed)
    values, tells = torch.randn(HEADS, tokens, DIM), torch.zeros(tokens, dtype=torch.bool)
    tells[torch.randperm(tokens)[: min(tellers, tokens - 1)]] = True
    chunk_of = torch.randint(chunks, (tokens,)).sort().values
    (told,) = carried(values, chunk_of, tells, 0.8)
    moved = torch.randn(HEADS, int(tells.sum()), DIM)
    moved[:, 0] *= 100  # a chunk's first token
    number_of = {place: int(chunk_of[place]) for place in range(tokens)}
    who, kept = (flags.nonzero().flatten().tolist() for flags in (tells, ~tells))
    expected = 0.8 * fit_change_predictor(values.transpose(0, 1), number_of, who, kept)(moved.transpose(0, 1))
    found = change(told, moved)
    torch.testing.assert_close(found[:, 10:-2][:, ~tells], expected.transpose(0, 1), atol=1e-3, rtol=1e-3)
    assert not found[:, 10:-2][:, tells].any()
    assert not found[:, :10].any()
    assert not found[:, -2:].any()


def test_ranks_with_some_of_the_heads_move_them_as_one_with_all_does() -> None:
    values, tells = torch.randn(HEADS, 60, DIM), torch.arange(60) % 7 == 3
    (whole,) = carried(values, torch.arange(60) // 20, tells)
    moved = torch.randn(HEADS, int(tells.sum()), DIM)
    halves = [slice(0, 2), slice(2, 4)]
    parts = [
        change(told, moved[heads])
        for told, heads in zip(carried(values, torch.arange(60) // 20, tells, ranks=halves), halves, strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), change(whole, moved), atol=1e-5, rtol=1e-4)


def test_all_tell_alike_where_all_tokens_are_the_same() -> None:
    """No spread to standardise by, as in a chunk of one word repeated."""
    (told,) = carried(torch.ones(HEADS, 30, DIM), torch.zeros(30), torch.arange(30) < 3)
    moved = change(told, torch.full((HEADS, 3, DIM), 2.0))[:, 13:40]
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved), atol=1e-5, rtol=0)
    assert 1.0 < float(moved.mean()) < 2.0


def test_landmarks_bound_what_a_long_prompt_costs() -> None:
    tells = torch.arange(5000) % 10 == 0
    (told,) = carried(torch.randn(HEADS, 5000, DIM), torch.arange(5000) // 500, tells)
    assert told.shares.shape == (5012, LANDMARKS)
    assert told.weights.shape == (LANDMARKS, 500)
