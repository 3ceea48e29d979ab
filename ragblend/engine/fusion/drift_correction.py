"""Drift correction: estimates the KV change of kept tokens from the measured change of recomputed tokens.

The change (fresh minus stored KV, keys before rotation) has a part that all tokens share, because text precedes them,
and a part that similar tokens share, more so within one chunk. It is modelled as a Gaussian process over the tokens,
whose kernel is the sum of both parts (Rasmussen and Williams 2006, chapter 2), with some recomputed tokens as landmarks
(8.3.1, subset of regressors). One regression is fitted per prompt. Its mean is linear in the measured change, so each
layer costs two small products. Depends on tensors, not on models, plans or stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.kv import LayerKV

# Chosen on the selection split of real questions, as `rules.DRIFT_GAIN` is.
LANDMARKS = 48  # recomputed tokens in the regression; with all of them it is slower and no closer
SHARED_KERNEL_WEIGHT = 0.3  # kernel of the part that all tokens share; an equal token of the same chunk adds 1
OTHER_CHUNK = 0.5  # factor on the kernel of tokens in different chunks
# Squared distance per dimension of standardised values at which the kernel has fallen by e; the mean distance is 2.
KERNEL_LENGTH_SCALE = 4.0
NOISE = 1.0  # variance of the part that no other token shares
MAX_DRIFT_RATIO = 3.0  # cap on a change, in median changes: a chunk's first tokens change much more than others
DEPTH = 0.4  # depth of the layer whose stored values measure the similarity of tokens, as a share of all layers

_JITTER = 1e-6


class DriftCorrection(NamedTuple):
    """Fitted regression from the KV change of N recomputed tokens to that of all T tokens, over M landmarks."""

    rows: Tensor  # positions [N] of the recomputed tokens, ascending
    weights: Tensor  # [M, N] float32
    shares: Tensor  # [T, M] float32, factors on the M rows of `drift`; 0 for tokens that are not corrected

    def drift(self, fresh: LayerKV, stored: LayerKV) -> LayerKV:
        """Return M changes [H, M, D] float32 of pre-RoPE keys and values, from recomputed tokens' KV [H, N, D]."""
        moved = []
        for new, old in zip(fresh, stored, strict=True):
            change = new.float() - old.float()
            length = torch.linalg.vector_norm(change, dim=2, keepdim=True)
            most = MAX_DRIFT_RATIO * length.median(1, keepdim=True).values  # of each head
            limited = change * (most / length.clamp_min(torch.finfo(change.dtype).tiny)).clamp_max(1.0)
            moved.append(self.weights @ limited)
        return LayerKV(*moved)


def similarity_layer(num_layers: int, deepest: int) -> int:
    """Return the layer whose stored values measure the similarity of tokens.

    It is not the first layer, whose values depend on the token alone. deepest: the last layer of the query probe; later
    layers are not loaded yet.

    >>> [similarity_layer(count, count - 1) for count in (2, 5, 30)], similarity_layer(30, 3), similarity_layer(30, 0)
    ([1, 2, 12], 3, 1)
    """
    return max(1, min(int(DEPTH * num_layers), deepest))


def fit_drift_correction(
    values: Tensor,
    rows: Tensor,
    chunks: Tensor,
    is_recomputed: Tensor,
    shares: Tensor,
    mean_over_ranks: Callable[[Tensor], Tensor],
) -> DriftCorrection:
    """Return the regression over N candidates at the positions `rows` [N], ascending, of a prompt of T tokens.

    values: the candidates' stored values [H, N, D] at `similarity_layer`, which measure their similarity. chunks: index
    [N] of each candidate's chunk. is_recomputed: [N] bool, True for at least one. shares: [T] factor on the estimated
    change of each position, 0 for positions that are not corrected. `mean_over_ranks` averages a vector over the ranks,
    if each has some of the heads.
    """
    states = values.float().transpose(0, 1).flatten(1)
    states = (states - states.mean(0)) / states.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    recomputed = is_recomputed.nonzero().flatten()
    count = min(LANDMARKS, len(recomputed))
    landmarks = recomputed[torch.arange(count, device=rows.device) * len(recomputed) // count]  # spread over the prompt
    distances = (torch.cdist(states, states[landmarks]).square() / states.shape[1]).flatten()
    distances = mean_over_ranks(distances).reshape(len(rows), len(landmarks))
    same = chunks[:, None] == chunks[landmarks]
    kernel = SHARED_KERNEL_WEIGHT + torch.exp(-distances / KERNEL_LENGTH_SCALE) * torch.where(
        same, 1.0, OTHER_CHUNK
    )  # [N, M]
    recomputed_kernel, landmark_kernel = kernel[recomputed].double(), kernel[landmarks].double()
    landmark_kernel.diagonal().add_(_JITTER)
    weights = torch.linalg.solve(recomputed_kernel.T @ recomputed_kernel + NOISE * landmark_kernel, recomputed_kernel.T)
    drift_weights = kernel.new_zeros(len(shares), len(landmarks))
    drift_weights[rows] = kernel * shares[rows, None]
    return DriftCorrection(rows[recomputed], weights.float(), drift_weights)
