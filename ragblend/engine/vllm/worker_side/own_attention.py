"""ragblend's own attention in place of that of a vLLM layer: by Triton's kernels over the paged cache, or by torch.

It computes rows that have no blocks, and scattered rows in one call. Depends on one attention module of vLLM and on a
request's KV (`paged.PagedKV`), not on the model's layers. In shapes: R rows, H KV heads, Hq query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import AttentionExtras, ProbeQueries, attend_rows, position_end
from ragblend.engine.fusion.protocols import FreshRowsCallback, QueryProbeHook
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.worker_side.attention_calls import RequestRows
from ragblend.engine.vllm.worker_side.latent import absorb_queries, attended_keys, expand_output, is_latent


class OwnAttention:
    """Attention of layer `layer`, with the heads, scale, window, softcap and sinks of its vLLM module `attention`."""

    def __init__(self, attention: Any, layer: int) -> None:
        self._attention, self._layer, self._is_latent = attention, layer, is_latent(attention)
        softcap = getattr(attention.impl, "logits_soft_cap", None) or None  # some backends have 0 for no softcap
        window, sinks = getattr(attention, "sliding_window", None), getattr(attention.impl, "sinks", None)
        self.params = AttentionExtras(window, softcap, sinks)
        self.scale: float = attention.impl.scale

    def as_heads(self, keys: Tensor, values: Tensor) -> LayerKV:
        """Reshape keys and values [R, H * D] to [H, R, D]."""
        attention = self._attention
        if self._is_latent:
            return LayerKV(keys.reshape(1, len(keys), -1), values.reshape(1, len(values), -1))
        return LayerKV(
            keys.reshape(-1, attention.num_kv_heads, attention.head_size).transpose(0, 1),
            values.reshape(-1, attention.num_kv_heads, attention.head_size_v).transpose(0, 1),
        )

    def resident_kv(self, fused: Any, end: int) -> LayerKV:
        """Return the first `end` rows of the resident layer, [H, end, D], as the layer's queries attend to them."""
        kv = LayerKV(fused.keys(self._layer)[:, :end], fused.values(self._layer)[:, :end])
        return LayerKV(attended_keys(kv), kv.values) if self._is_latent else kv

    @contextmanager
    def in_place(
        self,
        parts: Sequence[RequestRows],
        fused: Sequence[Any],
        hooks: Sequence[FreshRowsCallback | None] = (),
        probe_hook: QueryProbeHook | None = None,
    ) -> Iterator[list[Tensor]]:
        """Replace the layer's attention inside the block: by kernels over the blocks of `fused`, if it has pages, else
        over its resident layer.

        `parts` are the rows of each request. Their keys and values are written to its KV first. With kernels, this also
        corrects the drift of each request's kept rows, by its hook in `hooks`. `probe_hook` may compute the attention
        instead. Yield a list that receives the queries [Hq, R, D] of each part.
        """
        attention, seen = self._attention, list[Tensor]()

        def attend(query: Tensor, key: Tensor, value: Tensor, *_shape_and_dtype: Any, **_options: Any) -> Tensor:
            if self._is_latent:  # the latent comes before the shared key
                fresh, states = self.as_heads(value, key), absorb_queries(attention, query)
            else:
                fresh = self.as_heads(key, value)
                states = query.reshape(len(query), attention.num_heads, attention.head_size).transpose(0, 1)
            outputs = []
            for part in parts:
                mine, its_fresh = states[:, part.span], LayerKV(*(each[:, part.span] for each in fresh))
                run = self._attend_by_kernels if fused[part.owner].has_pages else self._attend_by_torch
                hook = hooks[part.owner] if hooks else None
                outputs.append(run(fused[part.owner], part, mine, its_fresh, hook, probe_hook))
                seen.append(mine)
            joined = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
            return expand_output(attention, joined) if self._is_latent else joined.transpose(0, 1).flatten(1)

        attention.forward = attend  # an attribute of the instance hides the class's method
        try:
            yield seen
        finally:
            del attention.forward

    def _attend_by_torch(
        self,
        fused: Any,
        part: RequestRows,
        states: Tensor,
        fresh: LayerKV,
        _hook: FreshRowsCallback | None,
        probe_hook: QueryProbeHook | None,
    ) -> Tensor:
        """Write the `fresh` rows [H, R, D]. Return the attention [Hq, R, D] of the queries `states` to the KV."""
        rows = part.rows
        fused.write(self._layer, rows, *fresh)
        keys, values = self.resident_kv(fused, position_end(rows))
        queries = ProbeQueries(states, rows, self.scale, self.params)
        output = probe_hook(queries, keys, values) if probe_hook is not None else None
        if output is not None:
            return output
        return attend_rows(states[None], keys[None], values[None], rows, self.scale, self.params)[0]

    def _attend_by_kernels(
        self,
        fused: Any,
        part: RequestRows,
        states: Tensor,
        fresh: LayerKV,
        hook: FreshRowsCallback | None,
        probe_hook: QueryProbeHook | None,
    ) -> Tensor:
        """As `_attend_by_torch`, and correct the drift of the kept rows by `hook`."""
        from ragblend.engine.fusion import kernels

        pages = fused.pages(self._layer)
        fused.write_by_kernels(self._layer, part.rows, fresh, hook)
        queries = ProbeQueries(states, part.rows, self.scale, self.params, pages=pages)
        output = probe_hook(queries, pages.keys, pages.values) if probe_hook is not None else None
        if output is not None:
            return output
        return kernels.attend(states[None], pages, part.rows, self.scale, self.params)[0].transpose(0, 1)
