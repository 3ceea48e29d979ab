"""The value that is stored: one chunk's KV, layer by layer, and what it was computed from.

The shape alphabet of the whole package: `L` layers, `H` KV heads, `T` tokens, `D` head dimension.
Works on tensors and plain facts. Knows nothing about files, models or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LAYOUT_VERSION = 1
"""Version of what the stored tensors mean (pre-RoPE keys, one slice per layer). Part of every key."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Storage dtypes by the name written in headers."""


class LayerKV(NamedTuple):
    """One layer's KV of one chunk: `keys` [H, T, D] after QK-norm and **before RoPE**, `values` [H, T, D]."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class KVHeader:
    """What a chunk's KV was computed from. Two headers with the same `key` describe the same KV."""

    key: str  # keys.chunk_key(fingerprint, prefix_ids, token_ids, namespace)
    fingerprint: str  # of the model: weights, config, dtype, RoPE
    prefix_ids: tuple[int, ...]  # the tokens it was computed behind; () for a prefix itself
    token_ids: tuple[int, ...]  # T ids
    num_layers: int
    dtype: str  # a name in DTYPES
    namespace: str = ""
    layout_version: int = LAYOUT_VERSION

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


class ChunkKV(Protocol):
    """One chunk's KV, readable layer by layer. Tensors are read-only for the caller.

    `layer(i)` raises DamagedEntryError when the bytes of layer i do not match their checksum; other layers
    stay readable. `nbytes` counts the tensors of all layers.
    """

    @property
    def header(self) -> KVHeader:
        """What the KV was computed from."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer."""


@dataclass(frozen=True, slots=True)
class MemoryKV:
    """ChunkKV whose layers are tensors in memory."""

    header: KVHeader
    layers: tuple[LayerKV, ...]

    def __post_init__(self) -> None:
        if len(self.layers) != self.header.num_layers:
            raise ValueError(f"{len(self.layers)} layers given, the header says {self.header.num_layers}")
        if self.header.dtype not in DTYPES:
            raise ValueError(f"dtype {self.header.dtype!r} cannot be stored; choose one of {', '.join(DTYPES)}")
        dtype = DTYPES[self.header.dtype]
        for index, (keys, values) in enumerate(self.layers):
            for name, tensor in (("keys", keys), ("values", values)):
                if tensor.ndim != 3 or tensor.shape[1] != self.header.num_tokens or tensor.dtype != dtype:
                    raise ValueError(
                        f"layer {index} {name} are {tuple(tensor.shape)} {tensor.dtype}; "
                        f"expected [H, {self.header.num_tokens}, D] {dtype}"
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(layer.nbytes for layer in self.layers)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer, [H, T, D] each."""
        return self.layers[index]


def in_memory(kv: ChunkKV) -> MemoryKV:
    """Every layer read (and verified) into memory; a MemoryKV is returned as it is."""
    if isinstance(kv, MemoryKV):
        return kv
    return MemoryKV(kv.header, tuple(kv.layer(index) for index in range(kv.header.num_layers)))


def dtype_name(dtype: torch.dtype) -> str:
    """The header's name of a storage dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{dtype} cannot be stored; choose one of {', '.join(DTYPES)}")


def total_tokens(chunks: Sequence[ChunkKV]) -> int:
    """Sum of T over chunks."""
    return sum(chunk.header.num_tokens for chunk in chunks)
