"""vLLM's paged KV cache of all layers: writing by the backend's own function, and reading in any backend's layout.

A cache of eight bits holds KV divided by each layer's scales. In shapes: R rows, H KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
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

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as views [B, S, H, D] of its cache: B kernel blocks of S tokens.

        Only if `has_pages`.
        """
        cache = self._attention[layer].kv_cache
        assert self._page_layout is not None
        shape = (cache.shape[self._block_dim], *self._shape[1:])
        keys, values = (
            cache.as_strided(shape, (cache.stride(self._block_dim), *strides), cache.storage_offset() + first)
            for first, strides in self._page_layout
        )
        return keys, values

    def page_tables(self, block_ids: Sequence[int], num_rows: int, num_probe_rows: int) -> tuple[Tensor, Tensor]:
        """Return the pages [layers, P] of a prompt whose first `num_rows` rows have blocks, and memory for the others.

        The others have pages, too, which this memory contains: it must exist as long as the table is used.
        """
        size, cache = self._shape[1], self._attention[0].kv_cache
        parts = np.arange(self.kernel_blocks)
        with_blocks = (np.array(block_ids, np.int64)[:, None] * self.kernel_blocks + parts).ravel()[
            : -(-num_rows // size)
        ]
        num_others = -(-(num_rows + num_probe_rows) // size) - len(with_blocks)
        stride = cache.stride(self._block_dim)
        # One more page, because the first one must be at a whole number of pages from the layer's cache.
        memory = torch.empty((num_others + 1) * stride if num_others else 0, dtype=cache.dtype, device=self._device)
        tables = np.empty((len(self._attention), len(with_blocks) + num_others), np.int64)
        tables[:, : len(with_blocks)] = with_blocks
        for table, attention in zip(tables, self._attention, strict=True):
            distance = memory.data_ptr() - attention.kv_cache.data_ptr()
            table[len(with_blocks) :] = np.arange(num_others) - (-distance // (stride * cache.itemsize))
        return torch.from_numpy(tables).to(self._device, non_blocking=True), memory

    @cached_property
    def has_pages(self) -> bool:
        """True if `pages` can return every layer: numbers of the model's dtype, at regular distances in a block."""
        if self._fp8 is not None or any(map(is_latent, self._attention)):
            return False
        sizes = {(each.num_kv_heads, each.head_size, each.head_size_v, each.kv_cache.dtype) for each in self._attention}
        first = self._attention[0]
        expected = (first.num_kv_heads, first.head_size, first.head_size, self._dtype)
        return sizes == {expected} and self._page_layout is not None

    @cached_property
    def _page_layout(self) -> list[tuple[int, list[int]]] | None:
        """Offset of a block's first number, and strides of a slot, a head and a dimension, for keys and for values.

        None if a block's numbers are at other distances, or not in one piece of memory.
        """
        cache, layout = self._attention[0].kv_cache, []
        block = cache.select(self._block_dim, 0)
        size = 1 + sum((count - 1) * stride for count, stride in zip(block.shape, block.stride(), strict=True))
        places = torch.arange(size).as_strided(block.shape, block.stride()).flatten()[self._block_layout.cpu()]
        for part in places:
            first, strides = int(part[0, 0, 0]), [int(part.movedim(dim, 0)[:2, 0, 0].diff().sum()) for dim in range(3)]
            slot, head, dim = (torch.arange(count) * stride for count, stride in zip(part.shape, strides, strict=True))
            if not torch.equal(part, first + slot[:, None, None] + head[:, None] + dim):
                return None
            layout.append((first, strides))
        return layout if size <= cache.stride(self._block_dim) else None

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
