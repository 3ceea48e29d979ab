"""The stored value: one chunk's KV, layer by layer, and the facts that it was computed from.

The shape alphabet of the whole package: `L` layers, `H` KV heads, `T` tokens, `D` head dimension. Works on tensors and
plain facts. Does not depend on files, models or prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ragblend.engine.store.format.quantize import CODE_DTYPES, QuantizedLayer, dequantize, quantize

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1
"""Version of what the stored tensors mean (pre-RoPE keys, one slice per layer). Part of every key."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes that KV is computed in, by the name written in headers."""

_ALIGNMENT = 256  # bytes, of each tensor in a block


class LayerKV(NamedTuple):
    """One layer's KV of one chunk: `keys` [H, T, D] after QK-norm and before RoPE, `values` [H, T, D]."""

    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


StoredLayer = LayerKV | QuantizedLayer
"""One layer as a store holds it: as computed, or in eight bits."""


@dataclass(frozen=True, slots=True)
class KVHeader:
    """Facts about a stored chunk: its model, prefix and tokens, and the dtypes of its KV as computed and as stored."""

    key: str  # keys.key_from_header(header), a hash of the other facts
    fingerprint: str  # of the model: weights, config, dtype, RoPE
    prefix_ids: tuple[int, ...] = field(repr=False)  # before the chunk when it was computed; () for a prefix itself
    token_ids: tuple[int, ...] = field(repr=False)  # T ids
    num_layers: int
    dtype: str  # a name in DTYPES: the dtype in which the KV was computed, and which `layer` returns
    namespace: str = ""
    kv_dtype: str | None = None  # a name in CODE_DTYPES; None: stored as computed, bit for bit

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)

    def has_ids(self, token_ids: Sequence[int] | None) -> bool:
        """Return True if the chunk's token ids are `token_ids`. None matches any chunk."""
        return token_ids is None or self.token_ids == tuple(token_ids)

    @property
    def is_lossless(self) -> bool:
        """True if the stored numbers are bit for bit the computed ones."""
        return self.kv_dtype is None

    @property
    def stored_dtype(self) -> str:
        """The stored dtype: "int8", "fp8", or the dtype of the computation."""
        return self.kv_dtype or self.dtype


class KVSpec(NamedTuple):
    """Dtype and per-layer shapes of one model's KV. Entries of other shapes do not belong to the model."""

    dtype: str  # a name in DTYPES
    layers: tuple[tuple[int, int, int], ...]  # H, D of keys, D of values, per layer

    @classmethod
    def from_kv_shapes(cls, dtype: str, shapes: Sequence[tuple[int, int, int]]) -> Self:
        """Return the spec of a model. shapes: (H, D of keys, D of values) of each layer."""
        return cls(dtype, tuple((int(heads), int(keys), int(values)) for heads, keys, values in shapes))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self | None:
        """Return the spec that `as_facts` wrote into `facts`; None if `facts` has no valid spec."""
        try:
            shapes = tuple((int(heads), int(keys), int(values)) for heads, keys, values in facts["kv_shapes"])
            count, dtype = int(facts["num_layers"]), str(facts["dtype"])
        except (KeyError, TypeError, ValueError):
            return None
        return cls(dtype, shapes * count if len(shapes) == 1 else shapes) if dtype in DTYPES else None

    def as_facts(self) -> dict[str, Any]:
        """Return the spec as JSON values, for the facts about the model in a store's metadata."""
        shapes = self.layers[:1] if len(set(self.layers)) == 1 else self.layers
        return {"dtype": self.dtype, "num_layers": len(self.layers), "kv_shapes": [list(each) for each in shapes]}

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Return the number of bytes that each further token of a long chunk adds to a stored entry, in all layers.

        kv_dtype: "auto", "int8" or "fp8"; the eight-bit dtypes have a scale of 4 bytes for each head's values.

        >>> spec = KVSpec("bfloat16", ((4, 64, 64),))
        >>> spec.bytes_per_token("auto"), spec.bytes_per_token("int8")
        (1024, 528)
        """
        item, scale = (DTYPES[self.dtype].itemsize, 0) if kv_dtype == "auto" else (1, 4)
        return sum(heads * ((keys + values) * item + scale) for heads, keys, values in self.layers)

    def mismatch_reason(self, header: KVHeader, shapes: Sequence[tuple[int, int, int]]) -> str:
        """Return why an entry with this header and these layer shapes does not belong to the model; "" if it does."""
        if header.dtype != self.dtype:
            return f"its dtype is {header.dtype}, the model's {self.dtype}"
        if len(shapes) != len(self.layers):
            return f"it has {len(shapes)} layers, the model {len(self.layers)}"
        for index, (theirs, ours) in enumerate(zip(shapes, self.layers, strict=True)):
            if theirs != ours:
                return f"layer {index} has heads and dimensions {theirs}, the model {ours}"
        return ""


class ChunkKV(Protocol):
    """One chunk's KV, readable layer by layer. Tensors are read-only for the caller.

    `layer(i)` and `stored_layer(i)` raise DamagedEntryError when the bytes of layer i do not match their checksum;
    other layers stay readable. `nbytes` counts the stored tensors of all layers.
    """

    @property
    def header(self) -> KVHeader:
        """The chunk's model, tokens and dtypes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""

    def layer(self, index: int) -> LayerKV:
        """Return keys and values of one layer, in the dtype of the computation."""

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored; `dequantized` converts it to keys and values."""


@dataclass(frozen=True, slots=True)
class MemoryKV:
    """ChunkKV whose layers are tensors in memory."""

    header: KVHeader
    layers: tuple[StoredLayer, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.layers) != self.header.num_layers:
            raise ValueError(f"{len(self.layers)} layers given, the header says {self.header.num_layers}")
        if self.header.dtype not in DTYPES:
            raise ValueError(f"dtype {self.header.dtype!r} cannot be stored; choose one of {', '.join(DTYPES)}")
        for index, layer in enumerate(self.layers):
            *_, keys, values = layer
            specs = tensor_specs(self.header, keys.shape, values.shape)
            for tensor, (name, dtype, shape) in zip(layer, specs, strict=True):
                if tensor.shape != shape or tensor.dtype != dtype:
                    raise ValueError(
                        f"layer {index} {name} are {tuple(tensor.shape)} {tensor.dtype}; expected {shape} {dtype}"
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors in memory."""
        return sum(layer.nbytes for layer in self.layers)

    def layer(self, index: int) -> LayerKV:
        """Return keys and values of one layer, [H, T, D] each. A layer in eight bits is dequantized at each call."""
        return dequantized(self.layers[index])

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored, in eight bits or as computed."""
        return self.layers[index]


class TensorSpec(NamedTuple):
    """One stored tensor of a layer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_specs(header: KVHeader, keys: Sequence[int], values: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return name, dtype and shape of each tensor of a layer, in the order of LayerKV's or QuantizedLayer's fields.

    keys, values: the shapes of the layer's keys and values. They are [H, T, D] for KV stored as computed. They are
    [H, T - S, D], without the first S tokens, for KV in eight bits, because the first S tokens are not quantized.
    """
    heads, dim, value_heads, value_dim = keys[0], keys[-1], values[0], values[-1]
    dtype, num_tokens = DTYPES[header.dtype], header.num_tokens
    if header.kv_dtype is None:
        return (
            TensorSpec("keys", dtype, (heads, num_tokens, dim)),
            TensorSpec("values", dtype, (value_heads, num_tokens, value_dim)),
        )
    codes, num_codes = CODE_DTYPES[header.kv_dtype], keys[1]
    num_first = num_tokens - num_codes
    return (
        TensorSpec("keys.scales", torch.float32, (heads, 1, dim)),
        TensorSpec("values.scales", torch.float32, (value_heads, num_codes, 1)),
        TensorSpec("keys.first", dtype, (heads, num_first, dim)),
        TensorSpec("values.first", dtype, (value_heads, num_first, value_dim)),
        TensorSpec("keys", codes, (heads, num_codes, dim)),
        TensorSpec("values", codes, (value_heads, num_codes, value_dim)),
    )


def dequantized(layer: StoredLayer) -> LayerKV:
    """Return keys and values in the dtype of the computation. A layer that is not quantized is returned unchanged."""
    return layer if isinstance(layer, LayerKV) else LayerKV(*dequantize(layer))


def convert_kv_dtype(kv: MemoryKV, kv_dtype: str) -> MemoryKV:
    """Return the chunk with KV in a store's `kv_dtype`: "auto" as computed, "int8" or "fp8" in eight bits.

    A chunk in eight bits is returned unchanged, because a second rounding would add to the error. A chunk is also
    returned unchanged if it is too short for eight bits to save bytes, or if `quantize` returns None for a layer.
    """
    if kv_dtype == "auto" or not kv.header.is_lossless:
        return kv
    layers = []
    for index in range(kv.header.num_layers):
        keys, values = kv.layer(index)
        layer = quantize(keys, values, kv_dtype)
        if layer is None or layer.nbytes >= keys.nbytes + values.nbytes:
            log.debug("KV %s stays as computed: layer %d has nothing to gain from %s", kv.header.key, index, kv_dtype)
            return kv
        layers.append(layer)
    return MemoryKV(replace(kv.header, kv_dtype=kv_dtype), tuple(layers))


def load_into_memory(kv: ChunkKV) -> MemoryKV:
    """Read and verify every layer. Return the chunk in memory, not dequantized. A MemoryKV is returned unchanged."""
    if isinstance(kv, MemoryKV):
        return kv
    return MemoryKV(kv.header, tuple(kv.stored_layer(index) for index in range(kv.header.num_layers)))


def aligned_nbytes(tensor: Tensor) -> int:
    """Return the tensor's size in bytes, rounded up to a multiple of 256.

    Tensors that share one block of memory begin at multiples of 256 bytes.
    """
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def copy_into(block: Tensor, layers: Sequence[StoredLayer]) -> list[StoredLayer]:
    """Copy the layers into `block` [N] uint8, one after another. Return the copies."""
    copies = layer_views(block, layers)
    for copied, layer in zip(copies, layers, strict=True):
        for copy, tensor in zip(copied, layer, strict=True):
            copy.copy_(tensor.detach())
    return copies


def layer_views(block: Tensor, like: Sequence[StoredLayer]) -> list[StoredLayer]:
    """Return layers like `like` in the first bytes of `block` [N] uint8, one after another. See `layer_view`."""
    starts = accumulate((sum(map(aligned_nbytes, layer)) for layer in like), initial=0)
    return [layer_view(block[start:], layer) for start, layer in zip(starts, like, strict=False)]


def layer_view(block: Tensor, like: StoredLayer) -> StoredLayer:
    """Return a layer like `like` in the first bytes of `block` [N] uint8. Each tensor begins at a multiple of 256."""
    starts = accumulate(map(aligned_nbytes, like), initial=0)
    return type(like)(*(view_as(block[start:], tensor) for start, tensor in zip(starts, like, strict=False)))


def view_as(block: Tensor, like: Tensor) -> Tensor:
    """Return the first bytes of `block` [N] uint8 as a tensor of the dtype and shape of `like`."""
    return block[: like.nbytes].view(like.dtype).view(like.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in headers. Raises ValueError for a dtype that a store does not accept.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    for name, torch_dtype in DTYPES.items():
        if torch_dtype == dtype:
            return name
    raise ValueError(f"{dtype} cannot be stored; choose one of {', '.join(DTYPES)}")


def slice_kv_rows(kv: ChunkKV, start: int, end: int) -> ChunkKV:
    """Return the KV of the tokens [start, end) of a chunk. If these are all tokens, return the chunk itself."""
    return kv if (start, end) == (0, kv.header.num_tokens) else RowSlice(kv, start, end)


def concatenate_rows(layers: Sequence[LayerKV]) -> LayerKV:
    """Return one layer of several chunks as one, [H, T of all, D]."""
    if len(layers) == 1:
        return layers[0]
    return LayerKV(torch.cat([each.keys for each in layers], 1), torch.cat([each.values for each in layers], 1))


def is_in_memory(kv: ChunkKV) -> bool:
    """Return True if a chunk's layers are tensors in memory. For a RowSlice, its source chunk decides."""
    return isinstance(kv.source if isinstance(kv, RowSlice) else kv, MemoryKV)


class KVView:
    """Base of ChunkKV classes that read another chunk, `source`. A subclass defines `stored_layer`."""

    def __init__(self, source: ChunkKV) -> None:
        self.source = source

    @property
    def header(self) -> KVHeader:
        """The header of the source chunk."""
        return self.source.header

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the whole source chunk."""
        return self.source.nbytes

    def layer(self, index: int) -> LayerKV:
        """Return keys and values of one layer, in the dtype of the computation."""
        return dequantized(self.stored_layer(index))

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored."""
        raise NotImplementedError


class RowSlice(KVView):
    """The KV of the tokens [start, end) of a stored chunk. A read loads all tokens, as checksums cover whole layers."""

    def __init__(self, source: ChunkKV, start: int, end: int) -> None:
        super().__init__(source)
        self._rows = (start, end)
        self._header = replace(source.header, token_ids=source.header.token_ids[start:end])

    @property
    def header(self) -> KVHeader:
        """The header of the source chunk, with the token ids [start, end) only."""
        return self._header

    def stored_layer(self, index: int) -> StoredLayer:
        """Return the tokens [start, end) of one layer as it is stored."""
        layer, (start, end) = self.source.stored_layer(index), self._rows
        if isinstance(layer, LayerKV):
            return LayerKV(layer.keys[:, start:end], layer.values[:, start:end])
        num_first = layer.first_keys.shape[1]  # the first tokens are not in eight bits
        first = slice(start, min(end, num_first))
        codes = slice(max(start - num_first, 0), max(end - num_first, 0))
        return QuantizedLayer(
            layer.key_scales,
            layer.value_scales[:, codes],
            layer.first_keys[:, first],
            layer.first_values[:, first],
            layer.key_codes[:, codes],
            layer.value_codes[:, codes],
        )


class HeadSlice(KVView):
    """Some KV heads of a stored chunk. A read loads all heads, as checksums cover whole layers."""

    def __init__(self, source: ChunkKV, heads: slice) -> None:
        super().__init__(source)
        self._heads = heads

    def stored_layer(self, index: int) -> StoredLayer:
        """Return the slice's heads of one layer, as stored, in contiguous tensors.

        Heads are the first dimension of every tensor of a layer.
        """
        stored = self.source.stored_layer(index)
        return type(stored)(*(tensor[self._heads].contiguous() for tensor in stored))
