"""How much a question attends to each token of its prompt: the evidence of the rules that ask the question.

Works on queries and keys that a layer has made and rotated; a model hands them to an `AttentionMeter`. Knows tensors
only: nothing about models, rules or storage.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Float32 scores per block, 16 MiB: a question of 100 tokens over 100 000 would take gigabytes at once.
BLOCK_SCORES = 1 << 22


def attention_mass(query: Tensor, keys: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Mean attention probability [T] float32 that the queries give to each token, over heads and queries.

    query: [Hq, R, D] at positions `rows` [R], ascending; keys: [H, T, D], both rotated; Hq is a multiple of H. Row i
    sees keys 0 .. rows[i], with the whole prompt in its softmax: prefix, chunks and question. The sum is 1.
    """
    num_heads, num_queries, dim = query.shape
    groups, length = num_heads // keys.shape[0], keys.shape[1]
    block = max(1, BLOCK_SCORES // (num_heads * length))
    mass = torch.zeros(length, dtype=torch.float32, device=query.device)
    positions = torch.arange(length, device=query.device)
    for start in range(0, num_queries, block):
        part = query[:, start : start + block]
        part = part.reshape(keys.shape[0], groups * part.shape[1], dim)  # heads of a group share their keys
        scores = (part @ keys.transpose(1, 2)).float() * scale  # [H, groups * block, T]
        later = positions > rows[start : start + block, None]
        mass += scores.masked_fill_(later.repeat(groups, 1), -torch.inf).softmax(-1).sum(dim=(0, 1))
    return mass / (num_heads * num_queries)


class AttentionMeter:
    """Collects the attention of the last `num_queries` rows of every layer it watches.

    A model calls it once per watched layer with what that layer's attention got.
    """

    def __init__(self, num_tokens: int, num_queries: int) -> None:
        self._num_tokens = num_tokens
        self._num_queries = num_queries
        self.layers: list[Tensor] = []  # [T] float32 each, in the order watched

    def __call__(self, query: Tensor, keys: Tensor, rows: Tensor, scale: float) -> None:
        """`query` [Hq, R, D] at `rows` [R], `keys` [H, rows[-1] + 1, D], rotated; `scale` multiplies their product."""
        count = min(self._num_queries, len(rows))
        mass = attention_mass(query[:, -count:], keys, rows[-count:], scale)
        self.layers.append(torch.nn.functional.pad(mass, (0, self._num_tokens - len(mass))))
