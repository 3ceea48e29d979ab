"""Multi-head latent attention (MLA) in vLLM's layers (DeepSeek V2 and V3, GLM-4 MoE Lite).

vLLM caches one vector per token and layer: the normed latent, then the rotated part of the key that all heads share.
ragblend stores both as the transformers engine does (`LatentAttention` in `engine.transformers.families`): the shared
key before rotation as keys, and the latent as values, of one head. Dimensions that are rotated together are half the
width apart in stored keys, and adjacent in vLLM's. In shapes: R rows, T tokens, Hq query heads, D size of the shared
key, L size of the latent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragblend.engine.store.format.kv import LayerKV


def is_latent(attention: Any) -> bool:
    """Return True if vLLM's `attention` layer caches latents."""
    return hasattr(attention, "kv_lora_rank")


def split_pairs(keys: Tensor, rotary: Any) -> Tensor:
    """Return vLLM's unrotated keys [R, 1, D] in the order in which they are stored."""
    if getattr(rotary, "is_neox_style", True):
        return keys.clone()
    return torch.cat((keys[..., 0::2], keys[..., 1::2]), dim=-1)


def rotate_shared_keys(keys: Tensor, rows: Tensor, rotary: Any) -> None:
    """Rotate stored `keys` [R, 1, D] in place to positions `rows` [R]. Their order becomes vLLM's."""
    if not getattr(rotary, "is_neox_style", True):
        keys.copy_(torch.stack(keys.chunk(2, dim=-1), dim=-1).flatten(-2))
    _, rotated = rotary(rows, keys.clone(), keys.clone())
    keys.copy_(rotated.view_as(keys))


def absorb_queries(attention: Any, query: Tensor) -> Tensor:
    """Return queries [Hq, R, L + D] whose product with `attended_keys` is that of `query` [R, Hq, ...] with all keys.

    The expansion of the latent to keys is applied to the queries instead.
    """
    plain, rotated = query.transpose(0, 1).split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    return torch.cat((plain @ attention.W_UK_T, rotated), dim=-1)


def attended_keys(kv: LayerKV) -> Tensor:
    """Return the keys [1, T, L + D] that `absorb_queries` is for. The keys in `kv` are rotated."""
    return torch.cat((kv.values, kv.keys), dim=-1)


def expand_output(attention: Any, output: Tensor) -> Tensor:
    """Return the attention's output [R, Hq * size of values], given sums of latents [Hq, R, L]."""
    expanded = output.new_empty(output.shape[1], attention.num_heads * attention.v_head_dim)
    attention._v_up_proj(output.transpose(0, 1).contiguous(), out=expanded)
    return expanded


def use_plan(metadata: Any) -> None:
    """Have attention compute by the plan in the `metadata` of a call.

    With MLA, all calls share a backend for rows after others, which keeps the plan that was made last. Other attention
    reads its plan from the metadata.
    """
    prefill = getattr(metadata, "prefill", None)
    backend = getattr(prefill, "prefill_backend", None)
    if backend is not None:
        backend.prepare_metadata(prefill)
