"""Drift correction moves kept tokens by the change predicted from recomputed ones. In engines: see test_fuse."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import fit_change_predictor
from torch import Tensor

from ragblend.engine.fusion.rules import (
    LANDMARKS,
    DriftCorrection,
    fit_drift_correction,
)
from ragblend.engine.store.format.kv import LayerKV

HEADS, DIM = 4, 8


def fit(
    values: Tensor, chunks: Tensor, recomputed: Tensor, share: float = 1.0, ranks: list[slice] | None = None
) -> list[DriftCorrection]:
    """Return the correction of every rank, for tokens from position 10; those not in `recomputed` are kept."""
    rows, shares = torch.arange(10, 10 + len(recomputed)), torch.zeros(12 + len(recomputed))
    shares[rows[~recomputed]] = share
    moving = recomputed.nonzero().flatten()
    slices, sums = ranks or [slice(None)], list[Tensor]()
    for heads in slices:  # what the ranks would sum
        fit_drift_correction(
            values[heads], rows, chunks, moving, rows[moving], shares, lambda own: sums.append(own) or own
        )
    mean = torch.stack(sums).mean(0)
    return [
        fit_drift_correction(values[heads], rows, chunks, moving, rows[moving], shares, lambda _: mean)
        for heads in slices
    ]


def change(correction: DriftCorrection, moved: Tensor) -> Tensor:
    """Return the change of the values at every position, [H, T, D], if recomputed ones moved by `moved` [H, N, D]."""
    drift = correction.estimate_drift(LayerKV(moved, moved))
    return correction.shares @ drift.values


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 200), st.integers(1, 90), st.integers(1, 6), st.integers(0, 2**31))
def test_it_is_the_mean_of_the_process_that_the_reference_solves(tokens, num_recomputed, chunks, seed):
    torch.manual_seed(seed)
    values, recomputed = torch.randn(HEADS, tokens, DIM), torch.zeros(tokens, dtype=torch.bool)
    recomputed[torch.randperm(tokens)[: min(num_recomputed, tokens - 1)]] = True
    chunk_of = torch.randint(chunks, (tokens,)).sort().values
    (correction,) = fit(values, chunk_of, recomputed, 0.8)
    moved = torch.randn(HEADS, int(recomputed.sum()), DIM)
    moved[:, 0] *= 100  # a chunk's first token
    number_of = {place: int(chunk_of[place]) for place in range(tokens)}
    moving, kept = (flags.nonzero().flatten().tolist() for flags in (recomputed, ~recomputed))
    expected = 0.8 * fit_change_predictor(values.transpose(0, 1), number_of, moving, kept)(moved.transpose(0, 1))
    found = change(correction, moved)
    torch.testing.assert_close(found[:, 10:-2][:, ~recomputed], expected.transpose(0, 1), atol=1e-3, rtol=1e-3)
    assert not found[:, 10:-2][:, recomputed].any()
    assert not found[:, :10].any()
    assert not found[:, -2:].any()


def test_ranks_with_some_heads_correct_drift_as_one_rank_does():
    values, recomputed = torch.randn(HEADS, 60, DIM), torch.arange(60) % 7 == 3
    (whole,) = fit(values, torch.arange(60) // 20, recomputed)
    moved = torch.randn(HEADS, int(recomputed.sum()), DIM)
    halves = [slice(0, 2), slice(2, 4)]
    parts = [
        change(correction, moved[heads])
        for correction, heads in zip(fit(values, torch.arange(60) // 20, recomputed, ranks=halves), halves, strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), change(whole, moved), atol=1e-5, rtol=1e-4)


def test_equal_tokens_move_by_equal_amounts():
    """No spread to standardise by, as in a chunk of one word repeated."""
    (correction,) = fit(torch.ones(HEADS, 30, DIM), torch.zeros(30), torch.arange(30) < 3)
    moved = change(correction, torch.full((HEADS, 3, DIM), 2.0))[:, 13:40]
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved), atol=1e-5, rtol=0)
    assert 1.0 < float(moved.mean()) < 2.0


def test_landmarks_bound_the_cost_of_a_long_prompt():
    recomputed = torch.arange(5000) % 10 == 0
    (correction,) = fit(torch.randn(HEADS, 5000, DIM), torch.arange(5000) // 500, recomputed)
    assert correction.shares.shape == (5012, LANDMARKS)
    assert correction.weights.shape == (LANDMARKS, 500)
