"""KV in four bits, for measuring only: rounded and restored in memory. No store writes it and no engine reads it.

The usual scheme (KIVI, Liu et al. 2024): codes of 0 to 15 with a scale and a least value in float16 for each group;
keys before RoPE per channel, in groups of successive tokens; values per token, in groups along the head dimension. The
first tokens of a chunk stay as computed, as with eight bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from ragblend.engine.store.kv import LayerKV, MemoryKV
from ragblend.engine.store.quantize import NUM_FIRST

GROUPS: Mapping[str, int] = {"int4/32": 32, "int4/64": 64}
"""Elements that share a scale, by the name of the row."""

_LARGEST_CODE = 15
_GROUP_BYTES = 4  # two float16
_SMALLEST_SCALE = 2.0**-24  # float16's smallest number


def rounded(kv: MemoryKV, group: int) -> MemoryKV:
    """The chunk as four bits would give it back, in the dtype it was computed in. Magnitudes below 65504 only."""
    layers = []
    for index in range(kv.header.num_layers):
        keys, values = (tensor.clone() for tensor in kv.layer(index))
        keys[:, NUM_FIRST:] = _rounded(keys[:, NUM_FIRST:], 1, group)
        values[:, NUM_FIRST:] = _rounded(values[:, NUM_FIRST:], 2, group)
        layers.append(LayerKV(keys, values))
    return MemoryKV(kv.header, tuple(layers))


def packed_bytes(kv: MemoryKV, group: int) -> int:
    """Bytes of the tensors that would be stored: two codes to a byte, groups, first tokens."""
    total = 0
    for index in range(kv.header.num_layers):
        for tensor, dim in zip(kv.layer(index), (1, 2), strict=True):
            rest = tensor[:, NUM_FIRST:]
            num_groups = rest.numel() // rest.shape[dim] * ceil(rest.shape[dim] / group)
            total += ceil(rest.numel() / 2) + _GROUP_BYTES * num_groups + tensor[:, :NUM_FIRST].nbytes
    return total


def _rounded(tensor: Tensor, dim: int, group: int) -> Tensor:
    """[H, T, D] through four bits, `group` elements along `dim` at a time; the last group may be shorter."""
    restored = tensor.clone()
    for part, out in zip(torch.split(tensor, group, dim), torch.split(restored, group, dim), strict=True):
        exact = part.float()
        least = exact.amin(dim, keepdim=True).half().float()
        scale = ((exact.amax(dim, keepdim=True) - least) / _LARGEST_CODE).half().float().clamp_(min=_SMALLEST_SCALE)
        out.copy_(((exact - least) / scale).round_().clamp_(0, _LARGEST_CODE).mul_(scale).add_(least))
    return restored
