"""LayerwiseModel over a model that vLLM loaded: runs vLLM's decoder layers and attention backend over its paged cache.

Tokens at scattered positions are passed to the attention backend as several requests, one for each run of consecutive
positions. They all share the blended request's block table, and each ends at its run's last position. Every backend
that supports batches of varying lengths then applies exactly the causal mask. Keys and values are written by the
backend's own `do_kv_cache_update`, because the layout of the paged cache differs between devices and releases. Layers
that are read again are also kept as tensors (`paged.PagedKV`, the resident layer).

With Triton's kernels (`VllmLayers.uses_kernels`), scattered tokens are one call, and no layer is kept as a tensor: the
kernels write to the blocks and attend to them.

The question's tokens have no blocks while the context is fused. A query probe therefore runs them over the resident
layer or by kernels, with ragblend's own attention in place of the layer's. `self_check` compares both.

`hidden` has the shape [R, 1, hidden size] before the first layer, then [R, 2, hidden size]: the output and the residual
that vLLM's layers return. They stay separate, so that their sum is rounded exactly where vLLM rounds it. Layers that
return one tensor (Granite) have [R, 1, hidden size].
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ragblend.engine.fusion.attention import (
    ProbeQueries,
    Rotation,
    has_kernels,
    inverse_tables,
    position_end,
    rotate,
    slice_positions,
)
from ragblend.engine.fusion.fuse import LayerCall
from ragblend.engine.fusion.protocols import FreshRowsCallback, QueryProbeHook
from ragblend.engine.store.format.kv import ChunkKV, HeadSlice, LayerKV, concatenate_rows
from ragblend.engine.vllm.support import reject_kv_groups
from ragblend.engine.vllm.worker_side.adapters import without_adapters
from ragblend.engine.vllm.worker_side.attention_calls import AttentionCall, RequestRows, cut_runs
from ragblend.engine.vllm.worker_side.decoder import StopLayerError, find_decoder, stop_layer
from ragblend.engine.vllm.worker_side.latent import is_latent, use_plan
from ragblend.engine.vllm.worker_side.own_attention import OwnAttention
from ragblend.engine.vllm.worker_side.paged_cache import PagedCache

_APART = 1 << 32  # distance between the positions of two requests, so that no run spans both


class _BlockKV(Protocol):
    """What these layers need of a request's KV in blocks (`PagedKV`)."""

    blocks: Tensor
    has_pages: bool

    def should_attend_together(self, layer: int, has_hook: bool) -> bool: ...


class VllmLayers:
    """LayerwiseModel of a vLLM worker's `model`: its layers run one at a time, over any subset of the prompt's tokens.

    It has this rank's share of the KV heads. One attention call has at most `max_rows` rows, in at most `max_runs` runs
    of consecutive rows. Both limits bound the call's memory and do not change results. Raises UnsupportedModelError
    for layers or an attention backend that the connector cannot call. In shapes: R rows, H KV heads, D head size.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        max_rows: int = 8192,
        max_runs: int = 1024,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        reject_kv_groups(kv_cache_config)
        self._vllm_config = vllm_config
        self._decoder = find_decoder(model)
        self._adapters = getattr(model, "lora_manager", None)
        self._attention = self._decoder.attention
        self._names = [attention.layer_name for attention in self._attention]
        self._own = [OwnAttention(attention, layer) for layer, attention in enumerate(self._attention)]
        without_window = tuple(layer for layer, own in enumerate(self._own) if own.params.window is None)
        self.global_layers = without_window if len(without_window) < self.num_layers else ()
        """As `TransformersLayers.global_layers`."""
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size: int = spec.block_size
        self.device: torch.device = self._decoder.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.max_rows, self.max_runs = max_rows, max_runs
        self.num_ranks: int = get_tensor_model_parallel_world_size()
        self.rank: int = get_tensor_model_parallel_rank()
        builder = self._attention[0].get_attn_backend().get_builder_cls()
        # The latest result of `attention_calls`: its rows and blocks, `together`, and the calls.
        self._latest_calls: tuple[list[Tensor], bool, list[AttentionCall]] = [], False, []
        self.cache = PagedCache(
            self._attention,
            kv_cache_config.num_blocks,
            self.block_size,
            self.dtype,
            str(vllm_config.cache_config.cache_dtype),
        )
        # Block tables passed to the kernel count its own blocks.
        self._kernel_blocks = self.cache.kernel_blocks
        if self._kernel_blocks > 1:
            spec = spec.copy_with_new_block_size(self.block_size // self._kernel_blocks)
        with set_current_vllm_config(vllm_config):
            self._builder = builder(spec, self._names, vllm_config, self.device)
        self._num_heads: int = self._attention[0].num_kv_heads
        # Every rank has the whole latent.
        all_heads = 1 if is_latent(self._attention[0]) else vllm_config.model_config.get_total_num_kv_heads()
        self._num_all_heads: int = all_heads
        # For a probed token, the whole fused projection and the norm before it run.
        self.kv_share = self._decoder.kv_share
        """Share of one layer's parameters that computes keys and values, for charged budgets."""
        self.uses_kernels = self._can_use_kernels()
        """True if Triton's kernels place stored KV in the blocks and compute the attention of scattered rows."""

    # -- LayerwiseModel

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._attention)

    @property
    def attends_scattered_rows_together(self) -> bool:
        """True if one attention call may run scattered rows: by kernels, or over the resident layer (one tensor).

        False on a CPU, because vLLM's own kernel over the paged cache is always faster there (`benchmarks.scattered`).
        """
        return self.uses_kernels or self.device.type != "cpu"

    @torch.inference_mode()
    def _can_use_kernels(self) -> bool:
        """Return True if the kernels run on this device, over a cache of the model's dtype, by known rotary tables."""
        if not has_kernels(self.device) or not self.cache.has_pages:
            return False
        with self.without_adapters():  # layers run to find out how they rotate
            return all(self._decoder.key_rotation(layer, 1) is not None for layer in range(self.num_layers))

    def kernel_rotation(self, layer: int, end: int) -> Rotation:
        """Return the rotation of a layer's keys to any position before `end`, as kernels take it."""
        rotation = self._decoder.key_rotation(layer, end)
        assert rotation is not None
        return rotation

    def unrotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the pre-RoPE form [H, R, D] of rotated `keys` at positions `rows` [R]. Only if `uses_kernels`."""
        cos, sin, adjacent, _ = self.kernel_rotation(layer, position_end(rows))
        return rotate(keys, *inverse_tables(cos[rows], sin[rows]), adjacent)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [R, 1, hidden size] of token ids [R], as the model passes them to its first layer.

        Between layers the states may be [R, 2, hidden size]: the second part is the residual, which embeddings lack.
        """
        parts = [self._decoder.embed(part) for part in torch.split(token_ids, self.max_rows)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV:
        """Return a layer's pre-RoPE keys (after QK-norm) and values [H, R, D]. The layer's attention does not run."""
        projected = []
        for part in torch.split(hidden, self.max_rows):
            positions = torch.zeros(len(part), dtype=torch.int64, device=self.device)
            with self._decoder.capture(layer, stop_layer) as kept:
                try:
                    self._decoder.run_layer(layer, positions, part)
                except StopLayerError:
                    projected.append(self._own[layer].as_heads(*kept))
        return concatenate_rows(projected)

    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Return pre-RoPE `keys` [H, R, D] rotated to positions `rows` [R] by the model's own rotary module."""
        placed = keys.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        self.rotate_keys(layer, placed, rows)
        return placed.transpose(0, 1)

    def rotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Rotate the contiguous tensor `keys` [R, H, D] in place to positions `rows` [R]."""
        self._decoder.rotate_keys(layer, keys, rows)

    def run_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: Any, hook: FreshRowsCallback | None = None
    ) -> Tensor:
        """Run a decoder layer over the tokens at positions `rows` [R], and return its output [R, 2, hidden size].

        The tokens' keys and values are written to `fused`, a PagedKV. Before that, `hook` receives the pre-RoPE keys
        and the values of `rows[hook.row_indices]`.
        """
        calls = self.attention_calls([rows], [fused], fused.should_attend_together(layer, hook is not None))
        return self._run_calls(layer, hidden, calls, [hook], [fused])

    def run_layer_together(self, runs: Sequence[LayerCall]) -> list[Tensor]:
        """Run one layer for several requests at once. Return each request's output [R, 2, hidden size]."""
        if len(runs) == 1:
            return [self.run_layer(*runs[0])]
        counts, rows = [len(run.rows) for run in runs], [run.rows for run in runs]
        fused = [cast("_BlockKV", run.fused) for run in runs]
        together = all(
            each.should_attend_together(run.layer, run.hook is not None) for each, run in zip(fused, runs, strict=True)
        )
        calls = self.attention_calls(rows, fused, together)
        layer, hidden = runs[0].layer, torch.cat([run.hidden for run in runs])
        hooks = [run.hook for run in runs]
        return list(torch.split(self._run_calls(layer, hidden, calls, hooks, fused, counts), counts))

    def run_probe_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: Any, probe_hook: QueryProbeHook | None
    ) -> Tensor:
        """Run a decoder layer for a query probe, and return its output [R, 2, hidden size].

        The tokens at `rows` have no blocks in the paged cache. They attend to the resident layer of `fused`, a PagedKV.
        `probe_hook` receives the tokens' queries and the keys, and the values if there are at most `max_rows` rows.
        """
        outputs, queries = [], []
        fits = len(rows) <= self.max_rows
        alone = probe_hook if fits else None  # a hook that receives all rows at once may also compute their attention
        split = zip(torch.split(hidden, self.max_rows), torch.split(rows, self.max_rows), strict=True)
        for part, positions in [(hidden, rows)] if fits else split:
            whole = RequestRows(0, slice(0, len(part)), positions)
            with self._own[layer].in_place([whole], [fused], probe_hook=alone) as seen, self._context(len(part)):
                outputs.append(self._decoder.run_layer(layer, positions, part))
            queries += seen
        if probe_hook is not None and alone is None:
            own, pages = self._own[layer], fused.pages(layer) if fused.has_pages else None
            probe_queries = ProbeQueries(torch.cat(queries, 1), rows, own.scale, own.params, pages=pages)
            end = position_end(rows)
            probe_hook(probe_queries, pages.keys if pages else own.resident_kv(fused, end).keys, None)
        return torch.cat(outputs)

    def run_layer_keeping_unrotated_kv(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: Any
    ) -> tuple[Tensor, LayerKV]:
        """Run a layer as `run_layer` does. Return its output, and the rows' pre-RoPE keys and values [H, R, D]."""
        kvs: list[LayerKV] = []
        every_row = FreshRowsCallback(torch.arange(len(rows), device=self.device), kvs.append)
        return self.run_layer(layer, hidden, rows, fused, every_row), kvs[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise NotImplementedError, because vLLM itself computes the last token and samples."""
        raise NotImplementedError("vLLM computes the prompt's last token; set the plan's num_fused")

    # -- the paged cache

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rotated `keys` and `values` [R, H, D] to the paged cache at `slots` [R]."""
        self.cache.write(layer, slots, keys, values)

    def read(self, layer: int, blocks: Tensor) -> LayerKV:
        """Return the rotated keys and values [R, H, D] of all tokens in `blocks` [B] of the paged cache."""
        return self.cache.read(layer, blocks)

    def attention_calls(
        self, rows: Sequence[Tensor], fused: Sequence[_BlockKV], together: bool = False
    ) -> list[AttentionCall]:
        """Return the attention calls for the `rows` [R] of each request, whose KV is in `fused`.

        `together`: True if the rows attend by kernels or to the resident layers (see `PagedKV`), False if by vLLM's
        backend. The latest result is cached, because most layers run the same rows as the layer before.
        """
        key = [*rows, *(each.blocks for each in fused)]
        latest_rows, were_together, calls = self._latest_calls
        if len(latest_rows) != len(key) or were_together != together or any(map(operator.is_not, latest_rows, key)):
            if together:
                calls = self.split_shared_calls(rows)
            else:
                tables = pad_sequence([each.blocks for each in fused], batch_first=True)
                counts = torch.tensor([len(each) for each in rows])
                owners = torch.repeat_interleave(torch.arange(len(rows)), counts).to(self.device)
                calls = self.split_calls(torch.cat(list(rows)), tables, owners)
            self._latest_calls = key, together, calls
        return calls

    def split_calls(self, rows: Tensor, tables: Tensor, owners: Tensor) -> list[AttentionCall]:
        """Split `rows` [R] into calls over the paged cache, each with at most `max_rows` rows and `max_runs` runs.

        `tables` [N, B]: the block tables of N requests. `owners` [R]: the index of each row's request, ascending.
        """
        apart = rows + owners * _APART
        return [
            self._make_call(slice(runs[0][0], runs[-1][1]), runs, rows, tables, owners)
            for runs in cut_runs(apart.tolist(), self.max_rows, self.max_runs)
        ]

    def split_shared_calls(self, rows: Sequence[Tensor]) -> list[AttentionCall]:
        """Split the rows of several requests into attention calls by kernels or over the requests' resident layers.

        `rows`: positions [R] of each request. A call has at most `max_rows` rows.
        """
        joined = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
        starts = list(itertools.accumulate((len(each) for each in rows), initial=0))
        calls = []
        for first in range(0, len(joined), self.max_rows):
            span, parts = slice(first, min(first + self.max_rows, len(joined))), []
            for owner, (start, end) in enumerate(itertools.pairwise(starts)):
                mine = slice(max(start, span.start) - start, min(end, span.stop) - start)
                if mine.start < mine.stop:
                    here = slice(mine.start + start - first, mine.stop + start - first)
                    parts.append(RequestRows(owner, here, slice_positions(rows[owner], mine)))
            calls.append(AttentionCall(span, joined[span], parts=tuple(parts)))
        return calls

    def select_own_heads(self, kv: ChunkKV) -> ChunkKV:
        """Return a stored chunk's KV with this rank's heads only."""
        if self.num_ranks == 1:
            return kv
        first = self.rank * self._num_all_heads // self.num_ranks
        return HeadSlice(kv, slice(first, first + self._num_heads))

    def gather_heads(self, layer: LayerKV) -> LayerKV:
        """Gather the heads of every rank, and return them as [H, T, D] on the CPU. All ranks must call this."""
        if self.num_ranks == 1:
            return layer
        from vllm.distributed import tensor_model_parallel_all_gather

        repeated = max(1, self.num_ranks // self._num_all_heads)  # ranks that share one head
        keys, values = (
            tensor_model_parallel_all_gather(tensor.to(self.device).contiguous(), dim=0)[::repeated].cpu()
            for tensor in layer
        )
        return LayerKV(keys, values)

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Return the elementwise sum over the tensor-parallel ranks. All ranks must call this."""
        if self.num_ranks == 1:
            return numbers
        from vllm.distributed import tensor_model_parallel_all_reduce

        summed: Tensor = tensor_model_parallel_all_reduce(numbers)
        return summed

    def count_ranks(self, flags: Sequence[bool]) -> list[int]:
        """Return for each flag the number of tensor-parallel ranks on which it is True. All ranks must call this.

        The ranks exchange the flags on the host, so that no device waits.
        """
        if self.num_ranks == 1:
            return [int(flag) for flag in flags]
        from vllm.distributed import get_tp_group

        counts = torch.tensor([int(flag) for flag in flags])
        torch.distributed.all_reduce(counts, group=get_tp_group().cpu_group)
        numbers: list[int] = counts.tolist()
        return numbers

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the layers run with the base model's weights, if vLLM serves LoRA adapters."""
        return without_adapters(self._adapters, self.max_rows)

    # -- helpers

    def _context(self, num_tokens: int, call: AttentionCall | None = None) -> AbstractContextManager[None]:
        """Set the forward context that vLLM's layers read. Without `call` it contains no paged cache."""
        from vllm.forward_context import set_forward_context

        if call is not None:
            use_plan(call.metadata)
        context: AbstractContextManager[None] = set_forward_context(
            dict.fromkeys(self._names, call.metadata) if call is not None else None,
            self._vllm_config,
            num_tokens=num_tokens,
            slot_mapping=dict.fromkeys(self._names, call.slots) if call is not None else None,
        )
        return context

    def _run_calls(
        self,
        layer: int,
        hidden: Tensor,
        calls: Sequence[AttentionCall],
        hooks: Sequence[FreshRowsCallback | None],
        fused: Sequence[Any],
        counts: Sequence[int] = (0,),
    ) -> Tensor:
        """Run a layer over `hidden` in `calls`. `hooks`: of each request, which has this number of rows in `counts`."""
        if len(calls) == 1 and calls[0].parts and all(each.has_pages for each in fused):
            return self._run(layer, hidden, calls[0], fused, hooks)
        firsts = itertools.accumulate(counts[:-1], initial=0)
        called = [
            hook._replace(row_indices=hook.row_indices + first) if first else hook
            for hook, first in zip(hooks, firsts, strict=True)
            if hook
        ]
        in_pass = len(calls) == 1 and self._decoder.captures_in_pass
        if not in_pass:  # every hook must have all of its rows before the first call attends
            for each in called:
                each.callback(self.project_kv(layer, hidden[each.row_indices]))
            return torch.cat([self._run(layer, hidden[call.span], call, fused) for call in calls])
        if not called:
            return self._run(layer, hidden, calls[0], fused)

        def call_hooks() -> None:
            fresh = self._own[layer].as_heads(*kept)
            for row_indices, callback, *_ in called:
                callback(LayerKV(fresh.keys[:, row_indices], fresh.values[:, row_indices]))

        with self._decoder.capture(layer, call_hooks) as kept:
            return self._run(layer, hidden, calls[0], fused)

    def _run(
        self,
        layer: int,
        hidden: Tensor,
        call: AttentionCall,
        fused: Sequence[Any],
        hooks: Sequence[FreshRowsCallback | None] = (),
    ) -> Tensor:
        if call.parts:
            with self._own[layer].in_place(call.parts, fused, hooks), self._context(len(hidden)):
                return self._decoder.run_layer(layer, call.positions, hidden)
        with self._context(len(hidden), call):
            return self._decoder.run_layer(layer, call.positions, hidden)

    def forward(self, token_ids: Tensor, call: AttentionCall) -> Tensor:
        """Return the normed output [R, hidden size] of vLLM's own uncompiled forward pass over consecutive tokens."""
        with self._context(len(token_ids), call):
            return self._decoder.forward(token_ids, call.positions)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the final norm [R, hidden size] of the last layer's output. Needs a call of `forward` before it."""
        return self._decoder.final_norm(hidden)

    def _make_call(
        self, span: slice, runs: Sequence[tuple[int, int]], rows: Tensor, tables: Tensor, owners: Tensor
    ) -> AttentionCall:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        positions, owner = rows[span], owners[span]
        slots = tables[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        first = span.start
        starts = torch.tensor([start - first for start, _ in runs] + [runs[-1][1] - first], dtype=torch.int32)
        ends = torch.tensor([end - 1 - first for _, end in runs], device=self.device)
        lengths = (positions[ends] + 1).to(torch.int32)
        lengths_cpu = lengths.cpu()
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(runs),
            num_actual_tokens=len(positions),
            max_query_len=max(end - start for start, end in runs),
            max_seq_len=int(lengths_cpu.max()),
            block_table_tensor=self._kernel_tables(tables[owner[ends]]).to(torch.int32),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            seq_lens_cpu_upper_bound=lengths_cpu,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )
        # fast_build skips preparations that only pay if a batch runs many times.
        return AttentionCall(span, positions, slots, self._builder.build(0, common, fast_build=True))

    def _kernel_tables(self, tables: Tensor) -> Tensor:
        """Return block tables [N, B] of vLLM's cache manager in terms of the attention kernel's blocks."""
        if self._kernel_blocks == 1:
            return tables
        split = tables[..., None] * self._kernel_blocks + torch.arange(self._kernel_blocks, device=tables.device)
        return split.flatten(1)
