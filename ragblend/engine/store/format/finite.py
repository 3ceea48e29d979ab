"""Checks that stored numbers are finite, because infinity and NaN spread to every token that attends to them.

Every layer without a signature is checked when it is read. The check takes two passes over integers (0.03 s per GB on
one core, as much as the checksum) instead of a comparison per element (0.6 to 2.4 s). Works on tensors as they are
stored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ragblend.engine.store.format.kv import LayerKV, MemoryKV, StoredLayer
from ragblend.engine.store.format.quantize import LARGEST_CODE

# As unsigned integers, the bits of negative infinity and negative NaNs are the largest; as signed ones, those of
# positive infinity and NaNs. The third item is the bits of positive infinity.
_PATTERNS = {
    torch.float32: (np.uint32, np.int32, 0x7F800000),
    torch.bfloat16: (np.uint16, np.int16, 0x7F80),
    torch.float16: (np.uint16, np.int16, 0x7C00),
}


def layer_is_finite(layer: StoredLayer) -> bool:
    """Return True if no key or value of a stored layer is infinite or NaN. The tensors are contiguous, on the CPU.

    For KV in eight bits, no code may be NaN (fp8) or -128 (int8), and each scale times the largest code must be finite
    in the model's dtype.
    """
    if isinstance(layer, LayerKV):
        return all(map(is_finite, layer))
    dtype = layer.first_keys.dtype
    scales, first, codes = layer[:2], layer[2:4], layer[4:]
    return all(map(is_finite, (*scales, *first))) and all(
        _codes_are_finite(code, scale, dtype) for code, scale in zip(codes, scales, strict=True)
    )


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is infinite or NaN. `tensor` is float32, bfloat16 or float16, on any device."""
    if not tensor.numel():
        return True
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return bool(torch.isfinite(tensor.abs().amax()))
    unsigned, signed, infinity = _PATTERNS[tensor.dtype]
    bits = tensor.reshape(-1).view(torch.uint8).numpy()
    minus_infinity = infinity + (1 << (8 * tensor.itemsize - 1))
    return int(bits.view(signed).max()) < infinity and int(bits.view(unsigned).max()) < minus_infinity


def _codes_are_finite(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Return True if codes times scales are finite in `dtype`. int8's -128 and fp8's NaN are never stored."""
    bits = codes.reshape(-1).view(torch.uint8).numpy()
    if bits.size:
        bad = int(bits.view(np.int8).min()) == -128 if codes.dtype == torch.int8 else int((bits & 0x7F).max()) == 0x7F
        if bad:
            return False
    return is_finite((scales.abs() * LARGEST_CODE[codes.dtype]).to(dtype))


def kv_is_finite(kv: MemoryKV) -> bool:
    """Return True if no tensor of the chunk contains infinity or NaN. The tensors may be on any device.

    Codes and scales of KV in eight bits are not examined, because `quantize` has rejected infinity and NaN.
    """
    full = (layer if isinstance(layer, LayerKV) else (layer.first_keys, layer.first_values) for layer in kv.layers)
    return all(is_finite(tensor) for pair in full for tensor in pair)
