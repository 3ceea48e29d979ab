"""KV in eight bits: int8 or fp8 codes times a scale, per channel for keys before RoPE, per token for values.

Before RoPE some channels of the keys are large in every token, so one scale per channel fits each; values have no such
channels (KIVI, Liu et al. 2024). The first tokens of any text receive much attention, with keys and values unlike the
others' (StreamingLLM, Xiao et al. 2024). They are stored as computed, and do not affect the scales.

Works on tensors [H, T, D]. Does not depend on chunks, files or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

CODE_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of the codes by the name written in headers."""

NUM_FIRST = 4
"""Tokens at a chunk's start that are stored as computed: as many as StreamingLLM found to act as sinks."""

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of a code, by dtype."""
_CODE_UNIT = {torch.int8: 1.0, torch.float8_e4m3fn: 256.0}  # factor that corrects the result of `_numbers`
_LARGEST_VALUE = 2.0**126  # so that no code times its scale leaves float32
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # half of it is less than any error that float32 can show


class QuantizedLayer(NamedTuple):
    """One layer's KV of T tokens in eight bits, except the first S tokens, which are stored as computed.

    The fields are in the order in which they are stored.
    """

    key_scales: Tensor  # [H, 1, D] float32
    value_scales: Tensor  # [H, T - S, 1] float32
    first_keys: Tensor  # [H, S, D] in the model's dtype
    first_values: Tensor  # [H, S, D]
    key_codes: Tensor  # [H, T - S, D] int8 or float8_e4m3fn
    value_codes: Tensor  # [H, T - S, D]

    @property
    def nbytes(self) -> int:
        """Bytes of all six tensors."""
        return sum(tensor.nbytes for tensor in self)


def quantize(keys: Tensor, values: Tensor, kv_dtype: str) -> QuantizedLayer | None:
    """Return pre-RoPE `keys` and `values` [H, T, D] in eight bits: codes and scales.

    Returns None for T <= NUM_FIRST, and if a number is NaN or infinite, or its magnitude is 2**126 or more. The first
    NUM_FIRST tokens, which are stored as computed, are not examined. kv_dtype: "int8" or "fp8".

    A scale is the largest magnitude in a channel of the keys, or in a token of the values, divided by 127 (int8) or 448
    (fp8). Error of a dequantized element: in int8, at most half its scale; in fp8, at most the larger of 1/16 of the
    element and 1/1024 of its scale. Rounding to the tensor's dtype adds to this error.
    """
    if keys.shape[1] <= NUM_FIRST:
        return None
    dtype = CODE_DTYPES[kv_dtype]
    key_scales = _scales(keys[:, NUM_FIRST:], 1, dtype)
    value_scales = _scales(values[:, NUM_FIRST:], 2, dtype)
    if key_scales is None or value_scales is None:
        return None
    return QuantizedLayer(
        key_scales,
        value_scales,
        keys[:, :NUM_FIRST].contiguous(),
        values[:, :NUM_FIRST].contiguous(),
        _codes(keys[:, NUM_FIRST:], key_scales, dtype),
        _codes(values[:, NUM_FIRST:], value_scales, dtype),
    )


def dequantize(layer: QuantizedLayer) -> tuple[Tensor, Tensor]:
    """Return keys and values [H, T, D] in the model's dtype, on the layer's device, in newly allocated memory."""
    return (
        _restored(layer.first_keys, layer.key_codes, layer.key_scales),
        _restored(layer.first_values, layer.value_codes, layer.value_scales),
    )


def _scales(tensor: Tensor, dim: int, dtype: torch.dtype) -> Tensor | None:
    """Return the scales of [H, T, D] over `dim`, which stays in the shape; None for values near infinity or NaN."""
    largest = tensor.abs().amax(dim, keepdim=True).float()
    if not bool((largest < _LARGEST_VALUE).all()):
        return None
    return (largest / LARGEST_CODE[dtype]).clamp_(min=_SMALLEST_SCALE)


def _codes(tensor: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    exact = (tensor.float() / scales).clamp_(-LARGEST_CODE[dtype], LARGEST_CODE[dtype])
    return (exact.round_() if dtype == torch.int8 else exact).to(dtype).contiguous()


def _restored(first: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    heads, num_first, dim = first.shape
    whole = first.new_empty(heads, num_first + codes.shape[1], dim)
    whole[:, :num_first] = first
    whole[:, num_first:] = _numbers(codes).mul_(scales * _CODE_UNIT[codes.dtype])
    return whole


def _numbers(codes: Tensor) -> Tensor:
    """Return the float32 numbers of codes; those of fp8 are 256 times too small.

    An fp8 number whose exponent and fraction bits are moved to their place in float16 is exactly itself / 256. On a CPU
    that is seven times as fast as torch's own cast.
    """
    if codes.dtype == torch.int8:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte ...
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()  # ... and leaves bit 14 here
