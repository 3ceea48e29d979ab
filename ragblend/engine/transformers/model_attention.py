"""Attention function that ragblend registers in transformers, for scattered rows, packed chunks and decode batches.

Other calls with soft caps or sinks go to the model's eager code, and all others to the implementation that the model
had before. Depends on transformers' attention registries and on `fusion.attention`, not on models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragblend.engine.fusion.attention import (
    BLOCK_SCORES,
    AttentionExtras,
    PagedLayer,
    ProbeQueries,
    Rotation,
    attend_rows,
)
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.fusion.protocols import FreshRowsCallback, PromptKVBuffer, QueryProbeHook
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.batched_decode import BatchedDecodeCache, SequenceAttention
from ragblend.engine.transformers.families import AttentionFamily
from ragblend.engine.transformers.positions import KeyRotation

ATTENTION = "ragblend"


class RowCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Transformers cache over one prompt's KV: `update` writes the rows and returns the layer up to the last of them.

    `rotation(rows)` is the rotation of the layer's keys to positions `rows` [R]. With `kernel_rotation`, that of all
    positions, Triton's kernels write.
    """

    def __init__(
        self,
        fused: PromptKVBuffer,
        rotation: Callable[[Tensor], KeyRotation],
        rows: Tensor,
        family: AttentionFamily,
        hook: FreshRowsCallback | None = None,
        kernel_rotation: Rotation | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._fused, self._rotation, self._rows, self._family = fused, rotation, rows, family
        self._hook, self._kernel_rotation = hook, kernel_rotation
        self._end = rotation(rows).tables.end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, H, R, D] at the rows; return keys and values [1, H, end, D]."""
        fresh = self._family.to_stored(LayerKV(key_states[0], value_states[0]))
        if self._kernel_rotation is not None:
            from ragblend.engine.fusion.kernels import write_fresh_rows

            assert isinstance(self._fused, FusedKV)
            pages = PagedLayer.from_contiguous(self._fused.layer(layer_idx, self._end))
            write_fresh_rows(pages, self._rows, fresh, self._kernel_rotation, self._hook)
            return self.read(layer_idx)
        if self._hook is not None:
            row_indices, callback, correction, apply_drift = self._hook
            keys, values = fresh.keys[:, row_indices], fresh.values[:, row_indices]
            if correction is None or apply_drift is None:
                callback(LayerKV(self._rotation(self._rows).undo(keys, row_indices), values))
            else:
                keys = keys.float() - self._fused.keys(layer_idx)[:, correction.rows].float()
                values = values.float() - self._fused.values(layer_idx)[:, correction.rows].float()
                # The rotation is linear, so one inverse of the difference replaces those of fresh and stored keys.
                keys = self._rotation(correction.rows).undo(keys)
                apply_drift(correction.estimate_drift(LayerKV(keys, values)))
        self._fused.write(layer_idx, self._rows, *fresh)
        return self.read(layer_idx)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, H, end, D] of a layer, as its attention reads them."""
        stored = LayerKV(self._fused.keys(layer)[:, : self._end], self._fused.values(layer)[:, : self._end])
        keys, values = self._family.from_stored(stored)
        return keys[None], values[None]


class PackedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Transformers cache of chunks that are packed into one sequence. A chunk attends to the prefix and to itself only.

    `prefix`: the prefix's rotated keys and its values, [H, P, D] each, as attention computes with them (see
    `AttentionFamily.expand_kv`). `spans`: the consecutive rows of each chunk.
    """

    values: Tensor  # [H, R, D], the chunks' values as they are stored; set once the layer has run

    def __init__(self, prefix: LayerKV, spans: Sequence[slice], family: AttentionFamily) -> None:
        super().__init__(layers=[])
        self._prefix, self._spans, self._family = prefix, spans, family

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Set `values` from the layer's values. Return keys and values [1, H, R, D] unchanged."""
        self.values = self._family.to_stored(LayerKV(key_states[0], value_states[0])).values
        return key_states, value_states

    def sequences(self, keys: Tensor, values: Tensor) -> Iterator[SequenceAttention]:
        """Yield each chunk's rows with the KV of the prefix and of the chunk.

        `keys` and `values` [1, H, R, D] are those of the chunks.
        """
        for span in self._spans:
            whole = [
                torch.cat((before[None], fresh[:, :, span]), dim=2)
                for before, fresh in zip(self._prefix, (keys, values), strict=True)
            ]
            positions = range(self._prefix.keys.shape[1], whole[0].shape[2])
            rows = torch.arange(positions.start, positions.stop, device=keys.device)
            yield SequenceAttention(span, rows, positions, *whole)


def attend_sequences(
    query: Tensor, sequences: Iterable[SequenceAttention], scale: float | None, params: AttentionExtras
) -> Tensor:
    """Return the causal attention [1, Hq, R, D] of several sequences' rows, each over its sequence's KV.

    `query` is [1, Hq, R, D]. A row attends to itself and to earlier tokens of its sequence. An attention window in
    `params` limits this.
    """
    outputs = [
        attend_rows(query[:, :, each.span], each.keys, each.values, each.rows, scale, params, each.positions)
        for each in sequences
    ]
    return torch.cat(outputs, dim=2)


def attend_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, **kwargs: Any
) -> Tensor:
    """Return the attention output [B, R, Hq, D], computed by the model's own eager code.

    This code supports soft caps and sinks, which PyTorch's kernel does not. `seen` [B, 1, R, T] is a mask of the keys
    that each row attends to: True in a bool mask, 0 in transformers' additive mask. With None, attention is causal.
    Rows are processed in parts, because the probabilities of all rows would take gigabytes.
    """
    attend = sys.modules[type(module).__module__].eager_attention_forward
    num_rows, num_keys = query.shape[2], key.shape[2]
    if seen is None:
        seen = torch.ones(1, 1, num_rows, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_rows)
    seen = seen if seen.dtype == torch.bool else seen == 0
    outputs, most = [], max(1, BLOCK_SCORES[query.device.type] // (query.shape[0] * query.shape[1] * num_keys))
    for start in range(0, num_rows, most):
        part = seen[:, :, start : start + most]
        hidden = torch.zeros_like(part, dtype=query.dtype).masked_fill_(~part, torch.finfo(query.dtype).min)
        outputs.append(attend(module, query[:, :, start : start + most], key, value, hidden, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    blend_rows: Tensor | None = None,
    blend_probe_hook: QueryProbeHook | None = None,
    blend_sequences: PackedCache | BatchedDecodeCache | None = None,
    blend_window: int | None = None,
    blend_kernels: bool = False,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    whole: Callable[..., tuple[Tensor, Any]] = sdpa_attention_forward,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [B, R, Hq, D] of a layer.

    Scattered rows, packed chunks and several prompts are computed here. Other calls go to `attend_eager` if they have a
    soft cap of scores (`softcap`) or sinks (`s_aux`), else to `whole`, the implementation that the model had before.
    The window is in the mask and in `blend_window`.
    """
    params = AttentionExtras(blend_window, softcap, s_aux)
    if blend_sequences is not None:
        output = attend_sequences(query, blend_sequences.sequences(key, value), scaling, params)
        return output.transpose(1, 2).contiguous(), None
    if blend_rows is None and (softcap is not None or s_aux is not None):
        bends = kwargs if softcap is None else {**kwargs, "softcap": softcap}
        return attend_eager(module, query, key, value, attention_mask, scaling=scaling, **bends), None
    misses_rows = whole is sdpa_attention_forward and attention_mask is None and 1 < query.shape[2] < key.shape[2]
    if blend_rows is None and misses_rows:
        # Gemma 4's last layers get only the queries whose logits are kept. SDPA would take them for the first rows.
        blend_rows = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=key.device)
    if blend_rows is None:
        output, _ = whole(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    pages = PagedLayer.from_contiguous(LayerKV(key[0], value[0])) if blend_kernels else None
    if blend_probe_hook is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries = ProbeQueries(query[0], blend_rows, scale, params, pages=pages)
        attended = blend_probe_hook(queries, key[0], value[0])
        if attended is not None:
            return attended[None].transpose(1, 2).contiguous(), None
    if pages is not None:
        from ragblend.engine.fusion.kernels import attend

        return attend(query, pages, blend_rows, scaling, params), None
    return attend_rows(query, key, value, blend_rows, scaling, params).transpose(1, 2).contiguous(), None


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Return the output of the eager attention in the module's own file, because each model family has its own."""
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    attended: tuple[Tensor, Any] = attend(module, *args, **kwargs)
    return attended


def wrap_attention(model: Any) -> None:
    """Make `model` use ragblend's attention for scattered rows, packed chunks and decode batches.

    Other calls with a soft cap or sinks go to the model's eager code (`attend_eager`). All others go to the attention
    implementation that the model had before.
    """
    implementation = model.config._attn_implementation or "sdpa"
    if implementation.startswith(ATTENTION):  # another engine's: both do the same
        return
    name = f"{ATTENTION}_{implementation}"
    AttentionInterface.register(name, partial(_attention, whole=ALL_ATTENTION_FUNCTIONS.get(implementation, _eager)))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, sdpa_mask))
    model.set_attn_implementation(name)
