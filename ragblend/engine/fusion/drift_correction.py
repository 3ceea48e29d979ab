"""How far tokens whose stored KV is kept should move, told by those that are recomputed: a regression, once a prompt.

What stored KV misses has a part that all tokens miss alike (that text stands before them), and one that tokens like
each other miss alike, more so in one chunk. So the change of KV, fresh minus stored, keys before rotation, is taken for
a Gaussian process over the tokens, whose kernel is the sum of the two (Rasmussen and Williams 2006, chapter 2), with a
few of the tellers as landmarks (8.3.1, subset of regressors). That makes the mean of what tokens move by linear in what
the tellers did: two small products a layer. Knows tensors; nothing of models, plans and stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.kv import LayerKV

# Chosen on the selection part of real questions, as rules' shares are (`rules.CARRY`).
LANDMARKS = 48  # of the tellers: with all of them it is no closer, and slower
SHARED_KERNEL_WEIGHT = (
    0.3  # the part of what tokens miss that all miss alike, beside 1 for a token like oneself in one's own chunk
)
OTHER_CHUNK = 0.5  # how much a token in another chunk is like one, were it the same
KERNEL_LENGTH_SCALE = (
    4.0  # of squared distance, a dimension of standardised values, where likeness has fallen by e; on average 2
)
NOISE = 1.0  # variance of what no other token tells
MAX_DRIFT_RATIO = 3.0  # no teller counts for more than so many median ones: a chunk's first tokens move far, alone
DEPTH = 0.4  # the layer whose stored values say which tokens are alike, of all layers

_JITTER = 1e-6


class DriftCorrection(NamedTuple):
    """What turns the tellers' change into everybody's."""

    rows: Tensor  # positions [N] of the tellers, ascending
    weights: Tensor  # [M, N] float32
    shares: Tensor  # [T, M] float32, of the M changes that `drift` gives: how far each token moves; 0 where it does not

    def drift(self, fresh: LayerKV, stored: LayerKV) -> LayerKV:
        """Of the tellers' KV [H, N, D]: M changes, keys before rotation and values [H, M, D] float32."""
        moved = []
        for new, old in zip(fresh, stored, strict=True):
            change = new.float() - old.float()
            length = torch.linalg.vector_norm(change, dim=2, keepdim=True)
            most = MAX_DRIFT_RATIO * length.median(1, keepdim=True).values  # of each head
            limited = change * (most / length.clamp_min(torch.finfo(change.dtype).tiny)).clamp_max(1.0)
            moved.append(self.weights @ limited)
        return LayerKV(*moved)


def similarity_layer(num_layers: int, deepest: int) -> int:
    """The layer whose stored values say which tokens are alike. Not the first, which knows a token alone.

    deepest: the last layer that the question was asked in. What lies behind it is not there yet.

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
    """Of N candidates at `rows` [N] of T positions, ascending, of whom those `tells` [N] bool tell, at least one.

    values: their stored values [H, N, D] at the layer `similarity_layer`; tokens are alike where those are. chunks: the
    chunk [N] each is in. shares: [T] of what is told, what each position moves by; 0 for those that stay.
    `mean_over_ranks` of a vector, where each rank has some of the heads.
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
