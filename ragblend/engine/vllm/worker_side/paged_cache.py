"""vLLM's paged KV cache of all layers: writing by the backend's own function, and reading in any backend's layout.

A cache of eight bits holds KV divided by each layer's scales. In shapes: R rows, H KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.support import FP8_CACHES, kernel_blocks_per_block
from ragblend.engine.vllm.worker_side.latent import is_latent

_DIGITS = 128  # base of the numbers written into the paged cache; bfloat16 represents all integers up to 256
_DIGITS_FP8 = 8  # both formats of eight bits represent all integers up to 8


class PagedCache:
    """The paged cache of the modules `attention`, one per layer: `num_blocks` blocks of `block_size` tokens.

    `cache_dtype`: vLLM's name of its elements' dtype; `dtype`: the model's. A kernel with smaller blocks than the cache
    manager's splits each of those into `kernel_blocks` consecutive ones. A token's slot number is the same in both.
    Raises UnsupportedModelError if the kernel's blocks are unknown.
    """

    def __init__(
        self, attention: Sequence[Any], num_blocks: int, block_size: int, dtype: torch.dtype, cache_dtype: str
    ) -> None:
        self._attention, self._block_size, self._dtype = attention, block_size, dtype
        self._fp8 = FP8_CACHES.get(cache_dtype)
        shape, self._device = attention[0].kv_cache.shape, attention[0].kv_cache.device
        self.kernel_blocks = kernel_blocks_per_block(shape, num_blocks, block_size)
        self._block_dim = list(shape[:2]).index(num_blocks * self.kernel_blocks)

    @property
    def rounds(self) -> bool:
        """True if the cache has eight bits per element."""
        return self._fp8 is not None

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rotated `keys` and `values` [R, H, D] to the slots [R]."""
        attention, keys, values = self._attention[layer], keys.contiguous(), values.contiguous()
        if is_latent(attention):
            scaling = attention.kv_cache_dtype, attention._k_scale
            attention.impl.do_kv_cache_update(values[:, 0], keys, attention.kv_cache, slots, *scaling)
        else:
            attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def read(self, layer: int, blocks: Tensor) -> LayerKV:
        """Return the rotated keys and values [R, H, D] of all tokens in `blocks` [B], in the model's dtype."""
        parts = torch.arange(self.kernel_blocks, device=self._device)
        numbers = (blocks[:, None] * self.kernel_blocks + parts).flatten()
        cache = self._attention[layer].kv_cache.index_select(self._block_dim, numbers)
        if is_latent(self._attention[layer]):
            latents, keys = cache.flatten(0, 1)[:, None].tensor_split([self._attention[layer].kv_lora_rank], dim=-1)
            return LayerKV(keys, latents)
        cache_rows = cache.movedim(self._block_dim, 0).flatten(1)[:, self._block_layout]
        kv = LayerKV(cache_rows[:, 0].flatten(0, 1), cache_rows[:, 1].flatten(0, 1))
        if self._fp8 is None:
            return kv
        scaled = (part.view(self._fp8).float() * scale for part, scale in zip(kv, self._scales(layer), strict=True))
        return LayerKV(*(part.to(self._dtype) for part in scaled))

    def round(self, layer: int, kv: LayerKV) -> None:
        """Round the rotated `kv` [R, H, D] in place to what a cache of eight bits represents; others round nothing.

        Rows that attend to tensors instead of the cache then see what vLLM's own attention does.
        """
        if self._fp8 is None:
            return
        most = torch.finfo(self._fp8).max
        for tensor, scale in zip(kv, self._scales(layer), strict=True):
            numbers = (tensor.float() / scale).clamp_(-most, most)
            rounded = numbers.to(self._fp8)
            if self._truncates:
                # Without the sign bit, the codes of eight bits ascend with the magnitude.
                codes = rounded.view(torch.uint8) - (rounded.float().abs() > numbers.abs()).to(torch.uint8)
                rounded = codes.view(self._fp8)
            tensor.copy_(rounded.float() * scale)

    def _scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the factors of a layer's cached keys and values, of all heads [1, 1] or per head [H, 1]."""
        attention = self._attention[layer]
        return attention._k_scale.float().reshape(-1, 1), attention._v_scale.float().reshape(-1, 1)

    @cached_property
    def _truncates(self) -> bool:
        """Whether the backend rounds to eight bits toward zero, as on a CPU; found by writing 1.1 and reading it."""
        shape, block = (1, *self._shape[2:]), torch.zeros(1, dtype=torch.int64, device=self._device)
        written = LayerKV(*(torch.full(shape, 1.1, device=self._device) * scale for scale in self._scales(0)))
        self.write(0, block, *(tensor.to(self._dtype) for tensor in written))
        return bool((self.read(0, block).values[0] < written.values[0]).all())

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Shape of one kernel block's keys and values: 2, tokens, H, D."""
        attention = self._attention[0]
        return 2, self._block_size // self.kernel_blocks, attention.num_kv_heads, attention.head_size

    @cached_property
    def _block_layout(self) -> Tensor:
        """Indices [2, tokens, H, D] of a block's keys and values in the flattened block.

        Every backend has its own layout. It is found by writing a number for each element into vLLM's null block, which
        contains no token's KV. The numbers are written digit by digit, because small dtypes represent only small ones.
        """
        shape, base = self._shape, _DIGITS if self._fp8 is None else _DIGITS_FP8
        scales = (1, 1) if self._fp8 is None else self._scales(0)
        numbers = torch.arange(1, math.prod(shape) + 1, device=self._device).view(shape)
        block = self._attention[0].kv_cache.select(self._block_dim, 0)
        offsets, unit = torch.zeros(block.numel(), dtype=torch.int64, device=self._device), 1
        block.zero_()
        while unit <= math.prod(shape):
            digits = (numbers // unit % base).to(self._dtype)
            keys, values = ((each * scale).to(self._dtype) for each, scale in zip(digits, scales, strict=True))
            self.write(0, torch.arange(shape[1], device=self._device), keys, values)
            written = block.flatten() if self._fp8 is None else block.flatten().view(self._fp8).float().round()
            offsets += written.to(torch.int64) * unit
            unit *= base
        block.zero_()
        indices = torch.full((len(offsets) + 1,), -1, device=self._device)
        indices[offsets] = torch.arange(len(offsets), device=self._device)
        return indices[numbers]
