"""A model loaded by vLLM as a LayerwiseModel: its own decoder layers and attention backend, over its own paged cache.

The trick: tokens at scattered positions are given to the attention backend as several requests, one for each run of
consecutive positions, which all share the blended request's block table and end at the run's last position. Every
backend for batches of varying lengths then applies precisely the causal mask, whatever it is made of. The paged
cache is never indexed, its layout differs between devices and releases: keys and values are written by the backend's
own `do_kv_cache_update`, and only what is needed again is kept aside.

The question has no blocks while its context is fused. It is run ahead over what was kept aside: for that call the
layer's attention is ours (`attention.attend_weighing`), and `self_check` compares the two.

`hidden` is what vLLM's layers hand on: [R, 1, hidden size] before the first layer, then [R, 2, hidden size], the
output and the residual, so that a sum is rounded exactly where vLLM rounds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ragblend.engine.fusion.attention import AttentionParams, ProbeQueries, attend_rows, on_host
from ragblend.engine.fusion.fuse import LayerCall
from ragblend.engine.fusion.protocols import FreshKVHook, QueryProbeHook
from ragblend.engine.store.kv import ChunkKV, HeadSlice, LayerKV
from ragblend.engine.vllm.attention_calls import AttentionCall, RequestRows, cut_runs, kv_reads_per_run, kv_reads_shared
from ragblend.engine.vllm.support import (
    kernel_blocks_per_block,
    reject_kv_groups,
    reject_shared_plans,
    reject_unsupported_attention,
)
from ragblend.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ragblend.engine.vllm.paged import PagedKV

_DIGITS = 128  # of one number in the paged cache: bfloat16 has all whole numbers up to 256
_APART = 1 << 32  # between the positions of two requests, so that no run spans both

# How many times more of the cache rows must read as runs than together, for ours to attend instead of the backend. On a
# CPU never: its kernel is quicker than ours on few rows and on many (`benchmarks.scattered`). On a GPU a reckoning, not
# a measurement: what reads eight times less is not slower by as much (docs/vllm.md).
_TOGETHER_CPU, _TOGETHER_GPU = math.inf, 8.0


class _StopError(Exception):
    """Ends a layer once its keys and values are known."""


def _stop() -> None:
    raise _StopError


class VllmLayers:
    """LayerwiseModel over `model` as a vLLM worker holds it, with this rank's share of the KV heads.

    max_rows, max_runs: rows and pseudo requests of one call at most; both exact, they bound the workspace. Scattered
    rows that would read `together_from` times as much of the cache as together attend together, over what is at hand;
    None: what suits the device. Raises UnsupportedModelError for layers or an attention backend that cannot be driven
    from outside.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        max_rows: int = 8192,
        max_runs: int = 1024,
        together_from: float | None = None,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
        from vllm.model_executor.layers.attention import Attention

        reject_kv_groups(kv_cache_config)
        self._vllm_config = vllm_config
        self._decoder = getattr(model, "model", model)
        self._layers = list(self._decoder.layers)
        self._attention: list[Any] = []
        for index, layer in enumerate(self._layers):
            found = [module for module in layer.modules() if isinstance(module, Attention)]
            if len(found) != 1 or not hasattr(getattr(layer, "self_attn", None), "rotary_emb"):
                raise UnsupportedModelError(f"layer {index} of {type(model).__name__} is no RoPE attention layer")
            if not hasattr(found[0].impl, "do_kv_cache_update"):
                raise UnsupportedModelError(
                    f"vLLM's attention backend {type(found[0].impl).__name__} offers no do_kv_cache_update; choose "
                    "another with --attention-backend, such as FLASH_ATTN"
                )
            reject_unsupported_attention(found[0].impl)
            self._attention.append(found[0])
        self._names = [attention.layer_name for attention in self._attention]
        self._sights = [_attention_params(attention) for attention in self._attention]
        seeing_all = tuple(layer for layer, sight in enumerate(self._sights) if sight.window is None)
        self.global_layers = seeing_all if len(seeing_all) < len(self._layers) else ()
        """As `TransformersLayers.global_layers`."""
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size: int = spec.block_size
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.max_rows, self.max_runs = max_rows, max_runs
        usual = _TOGETHER_CPU if self.device.type == "cpu" else _TOGETHER_GPU
        self.together_from = usual if together_from is None else together_from
        self.num_ranks: int = get_tensor_model_parallel_world_size()
        self.rank: int = get_tensor_model_parallel_rank()
        builder = self._attention[0].get_attn_backend().get_builder_cls()
        self._joined: tuple[list[Tensor], bool, list[AttentionCall]] = [], False, []  # the rows that ran together last
        # A kernel that does not take the manager's blocks splits each into several, which follow each other: a token's
        # slot is the same number in both, and only the tables that the kernel reads by count its own blocks.
        shape, num_blocks = self._attention[0].kv_cache.shape, kv_cache_config.num_blocks
        self._kernel_blocks = kernel_blocks_per_block(shape, num_blocks, self.block_size)
        self._block_dim = list(shape[:2]).index(num_blocks * self._kernel_blocks)
        if self._kernel_blocks > 1:
            spec = spec.copy_with_new_block_size(self.block_size // self._kernel_blocks)
        with set_current_vllm_config(vllm_config):
            self._builder = builder(spec, self._names, vllm_config, self.device)
        reject_shared_plans(self._plans, type(self._attention[0].impl).__name__)
        attention = self._layers[0].self_attn
        self._num_heads: int = self._attention[0].num_kv_heads
        self._num_all_heads: int = getattr(attention, "total_num_kv_heads", self._num_heads * self.num_ranks)
        # The whole fused projection runs where a token is probed, and so does the norm before it.
        self._kv_share = _num_weights(attention.qkv_proj) / _num_weights(self._layers[0])

    # -- LayerwiseModel

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def kv_share(self) -> float:
        """Share of one layer's parameters that runs where a token is probed, for charged budgets."""
        return self._kv_share

    @property
    def may_attend(self) -> bool:
        """Whether rows ever attend together here, so that every layer is worth being kept at hand."""
        return self.together_from < math.inf

    def embed(self, token_ids: Tensor) -> Tensor:
        """[R, 1, hidden size] for ids [R]."""
        hidden: Tensor = self._decoder.embed_input_ids(token_ids)
        return hidden[:, None]

    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV:
        """Pre-RoPE keys (after QK-norm) and values, [H, R, D]; the layer is left before its attention."""
        pieces = []
        for part in torch.split(hidden, self.max_rows):
            positions = torch.zeros(len(part), dtype=torch.int64, device=self.device)
            with self._capture(layer, _stop) as kept:
                try:
                    self._call(layer, positions, part)
                except _StopError:
                    pieces.append(self._as_heads(layer, *kept))
        return _joined(pieces)

    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Pre-RoPE `keys` [H, R, D] rotated to `rows` [R] by the model's own rotary module, as its prefill does."""
        placed = keys.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        self.rotate_keys(layer, placed, rows)
        return placed.transpose(0, 1)

    def rotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Rotate `keys` [R, H, D], contiguous, in place to positions `rows` [R]."""
        flat = keys.view(len(keys), -1)
        turned, _ = self._layers[layer].self_attn.rotary_emb(rows, flat, None)
        if turned.data_ptr() != flat.data_ptr():  # the module decides whether it works in place
            flat.copy_(turned)

    def run_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: Any, hook: FreshKVHook | None = None
    ) -> Tensor:
        """One decoder layer over the tokens at `rows` [R]; the backend writes their K/V into the paged cache."""
        together = fused.should_attend_together(layer, rows, hook is not None)
        pieces = fused.attention_calls(rows, together)
        return self._run_pieces(layer, hidden, pieces, [hook] if hook is not None else [], [fused])

    def run_together(self, runs: Sequence[LayerCall]) -> list[Tensor]:
        """`run_layer` of the same layer for several requests in one call; their outputs."""
        if len(runs) == 1:
            return [self.run_layer(*runs[0])]
        counts, rows = [len(run.rows) for run in runs], [run.rows for run in runs]
        fused = [cast("PagedKV", run.fused) for run in runs]
        together = all(
            each.should_attend_together(run.layer, run.rows, run.hook is not None)
            for each, run in zip(fused, runs, strict=True)
        )
        known, were_together, pieces = self._joined
        is_known = len(known) == len(rows) and all(mine is each for mine, each in zip(known, rows, strict=True))
        if not is_known or were_together != together:
            if together:
                pieces = self.split_shared_calls(rows)
            else:
                tables = pad_sequence([each.blocks for each in fused], batch_first=True)
                owners = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(counts)).to(self.device)
                pieces = self.split_calls(torch.cat(rows), tables, owners)
            self._joined = rows, together, pieces
        layer, hidden = runs[0].layer, torch.cat([run.hidden for run in runs])
        firsts = itertools.accumulate(counts[:-1], initial=0)
        hooks = [
            run.hook._replace(row_indices=run.hook.row_indices + first)
            for run, first in zip(runs, firsts, strict=True)
            if run.hook
        ]
        return list(torch.split(self._run_pieces(layer, hidden, pieces, hooks, fused), counts))

    def run_probe_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: Any, probe_hook: QueryProbeHook | None
    ) -> Tensor:
        """`run_layer` for rows that need no blocks: their attention is over what `fused` keeps of the layer."""
        outputs, queries = [], []
        fits = len(rows) <= self.max_rows
        alone = probe_hook if fits else None  # then it can attend too
        split = zip(torch.split(hidden, self.max_rows), torch.split(rows, self.max_rows), strict=True)
        for part, places in [(hidden, rows)] if fits else split:
            whole = RequestRows(0, slice(0, len(part)), places, on_host(places))
            with self._attending_over(layer, [whole], [fused], alone) as seen, self._context(len(part)):
                outputs.append(self._call(layer, places, part))
            queries += seen
        if probe_hook is not None and alone is None:
            scale = self._attention[layer].impl.scale
            probe_queries = ProbeQueries(torch.cat(queries, 1), rows, scale, self._sights[layer])
            probe_hook(probe_queries, fused.keys(layer)[:, : on_host(rows)[-1] + 1])
        return torch.cat(outputs)

    def run_layer_keeping_kv(self, layer: int, hidden: Tensor, rows: Tensor, fused: Any) -> tuple[Tensor, LayerKV]:
        """`run_layer`, and the rows' pre-RoPE keys and values [H, R, D] as the layer computed them."""
        outputs, pieces = [], []
        for piece in fused.attention_calls(rows):
            with self._capture(layer) as kept:
                outputs.append(self._run(layer, hidden[piece.span], piece, [fused]))
            pieces.append(self._as_heads(layer, *kept))
        return torch.cat(outputs), _joined(pieces)

    def logits(self, hidden: Tensor) -> Tensor:
        """Not offered: vLLM itself computes the question, and samples."""
        raise NotImplementedError("the connector leaves the last token to vLLM; give the plan a num_fused")

    # -- the paged cache

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rotated `keys` and `values` [R, H, D] into the paged cache at `slots` [R]."""
        attention = self._attention[layer]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), attention.kv_cache, slots)

    def read(self, layer: int, blocks: Tensor) -> LayerKV:
        """Rotated keys and values [R, H, D] of all tokens of `blocks` [B], out of the paged cache."""
        parts = torch.arange(self._kernel_blocks, device=self.device)
        numbers = (blocks[:, None] * self._kernel_blocks + parts).flatten()
        cache = self._attention[layer].kv_cache.index_select(self._block_dim, numbers)
        found = cache.movedim(self._block_dim, 0).flatten(1)[:, self._block_layout]
        return LayerKV(found[:, 0].flatten(0, 1), found[:, 1].flatten(0, 1))

    @cached_property
    def _block_layout(self) -> Tensor:
        """Where a flattened block of the paged cache has its keys and values, [2, tokens, H, D].

        The layout is the backend's own affair. So numbers are written into vLLM's null block, which holds nothing, in
        digits that every dtype has, and looked for there.
        """
        attention, size = self._attention[0], self.block_size // self._kernel_blocks
        shape = (2, size, self._num_heads, attention.head_size)
        numbers = torch.arange(1, math.prod(shape) + 1, device=self.device).view(shape)
        block = attention.kv_cache.select(self._block_dim, 0)
        found, unit = torch.zeros(block.numel(), dtype=torch.int64, device=self.device), 1
        block.zero_()
        while unit <= math.prod(shape):
            digits = (numbers // unit % _DIGITS).to(self.dtype)
            self.write(0, torch.arange(size, device=self.device), digits[0], digits[1])
            found += block.flatten().to(torch.int64) * unit
            unit *= _DIGITS
        block.zero_()
        places = torch.full((len(found) + 1,), -1, device=self.device)
        places[found] = torch.arange(len(found), device=self.device)
        return places[numbers]

    def split_calls(self, rows: Tensor, tables: Tensor, owners: Tensor) -> list[AttentionCall]:
        """`rows` [R] in pieces of at most `max_rows` rows and `max_runs` runs, ascending, each ready to be run.

        `tables` [N, B] are the blocks of N requests, `owners` [R] says whose each row is; one after the other.
        """
        places = rows + owners * _APART
        return [
            self._piece(slice(runs[0][0], runs[-1][1]), runs, rows, tables, owners)
            for runs in cut_runs(places.tolist(), self.max_rows, self.max_runs)
        ]

    def split_shared_calls(self, rows: Sequence[Tensor]) -> list[AttentionCall]:
        """The rows [R] of each of several requests, one after the other, in pieces that attend over what is at hand."""
        joined = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
        starts = list(itertools.accumulate((len(each) for each in rows), initial=0))
        pieces = []
        for first in range(0, len(joined), self.max_rows):
            span, parts = slice(first, min(first + self.max_rows, len(joined))), []
            for owner, (start, end) in enumerate(itertools.pairwise(starts)):
                mine = slice(max(start, span.start) - start, min(end, span.stop) - start)
                if mine.start < mine.stop:
                    here = slice(mine.start + start - first, mine.stop + start - first)
                    parts.append(RequestRows(owner, here, rows[owner][mine], on_host(rows[owner])[mine]))
            pieces.append(AttentionCall(span, joined[span], parts=tuple(parts)))
        return pieces

    def should_share_reads(self, rows: Tensor) -> bool:
        """Whether rows [R], ascending, had better attend together."""
        if not self.may_attend or not len(rows):
            return False
        places = on_host(rows)
        return kv_reads_per_run(places) >= self.together_from * kv_reads_shared(places)

    def own_heads(self, kv: ChunkKV) -> ChunkKV:
        """This rank's heads of a stored chunk."""
        if self.num_ranks == 1:
            return kv
        first = self.rank * self._num_all_heads // self.num_ranks
        return HeadSlice(kv, slice(first, first + self._num_heads))

    def all_heads(self, layer: LayerKV) -> LayerKV:
        """The heads of every rank, [H, T, D]. All ranks must call it; on the CPU, as they are stored."""
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
        """Elementwise sum over the tensor-parallel ranks; all of them must call it."""
        if self.num_ranks == 1:
            return numbers
        from vllm.distributed import tensor_model_parallel_all_reduce

        summed: Tensor = tensor_model_parallel_all_reduce(numbers)
        return summed

    def count_ranks(self, flags: Sequence[bool]) -> list[int]:
        """On how many tensor-parallel ranks each of `flags` holds; all of them must call it. No device waits for it."""
        if self.num_ranks == 1:
            return [int(flag) for flag in flags]
        from vllm.distributed import get_tp_group

        counts = torch.tensor([int(flag) for flag in flags])
        torch.distributed.all_reduce(counts, group=get_tp_group().cpu_group)
        numbers: list[int] = counts.tolist()
        return numbers

    # -- helpers

    def _context(self, num_tokens: int, piece: AttentionCall | None = None) -> AbstractContextManager[None]:
        """What vLLM's layers look up while they run; without a `piece` there is no paged cache for them."""
        from vllm.forward_context import set_forward_context

        context: AbstractContextManager[None] = set_forward_context(
            dict.fromkeys(self._names, piece.metadata) if piece is not None else None,
            self._vllm_config,
            num_tokens=num_tokens,
            slot_mapping=dict.fromkeys(self._names, piece.slots) if piece is not None else None,
        )
        return context

    def _run_pieces(
        self,
        layer: int,
        hidden: Tensor,
        pieces: Sequence[AttentionCall],
        hooks: Sequence[FreshKVHook],
        fused: Sequence[Any],
    ) -> Tensor:
        if len(pieces) > 1:  # all are to be told before the first piece attends
            for each in hooks:
                each.callback(self.project_kv(layer, hidden[each.row_indices]))
            return torch.cat([self._run(layer, hidden[piece.span], piece, fused) for piece in pieces])
        if not hooks:
            return self._run(layer, hidden, pieces[0], fused)

        def call_hooks() -> None:
            fresh = self._as_heads(layer, *kept)
            for row_indices, callback in hooks:
                callback(LayerKV(fresh.keys[:, row_indices], fresh.values[:, row_indices]))

        with self._capture(layer, call_hooks) as kept:
            return self._run(layer, hidden, pieces[0], fused)

    def _run(self, layer: int, hidden: Tensor, piece: AttentionCall, fused: Sequence[Any]) -> Tensor:
        if piece.parts:
            with self._attending_over(layer, piece.parts, fused), self._context(len(hidden)):
                return self._call(layer, piece.positions, hidden)
        with self._context(len(hidden), piece):
            return self._call(layer, piece.positions, hidden)

    def _call(self, layer: int, positions: Tensor, hidden: Tensor) -> Tensor:
        """vLLM's layer on [R, 1 or 2, hidden size]; it may write into what it is given, so it is given copies."""
        parts = [part.clone(memory_format=torch.contiguous_format) for part in torch.unbind(hidden, 1)]
        residual = parts[1] if len(parts) > 1 else None
        return torch.stack(self._layers[layer](positions, parts[0], residual), dim=1)

    def forward(self, token_ids: Tensor, piece: AttentionCall) -> Tensor:
        """vLLM's own uncompiled forward over consecutive tokens: normed output [R, hidden size], to compare with."""
        with self._context(len(token_ids), piece):
            output: Tensor = self._decoder.forward(token_ids, piece.positions, None)
        return output

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: [R, 2, hidden size] to [R, hidden size]."""
        output, _ = self._decoder.norm(*(part.contiguous() for part in torch.unbind(hidden, 1)))
        normed: Tensor = output
        return normed

    @contextmanager
    def _capture(self, layer: int, then: Callable[[], None] | None = None) -> Iterator[list[Tensor]]:
        """Filled with the layer's keys (after QK-norm, before RoPE) and values; `then`, before it writes or attends,
        called."""
        kept: list[Tensor] = []

        def before_rotary(_module: Any, args: tuple[Any, ...]) -> None:
            if not kept:  # it also turns what `then` places
                kept.append(args[2].clone())  # the rotary kernels turn in place

        def before_attention(_module: Any, args: tuple[Any, ...]) -> None:
            kept.append(args[2].clone())
            if then is not None:
                then()

        hooks = (
            self._layers[layer].self_attn.rotary_emb.register_forward_pre_hook(before_rotary),
            self._attention[layer].register_forward_pre_hook(before_attention),
        )
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _attending_over(
        self, layer: int, parts: Sequence[RequestRows], fused: Sequence[Any], watch: QueryProbeHook | None = None
    ) -> Iterator[list[Tensor]]:
        """The layer's attention gives the rows' KV of each part to its owner's `fused` and reads there, or has `watch`
        read; filled with each part's queries [Hq, R, D]."""
        attention, seen = self._attention[layer], []
        sight, scale = self._sights[layer], attention.impl.scale

        def attend(query: Tensor, key: Tensor, value: Tensor, *_shape_and_dtype: Any) -> Tensor:
            fresh = self._as_heads(layer, key, value)
            states = query.reshape(len(query), attention.num_heads, attention.head_size).transpose(0, 1)
            outputs = []
            for owner, span, rows, places in parts:
                theirs, mine, end = fused[owner], states[:, span], places[-1] + 1
                theirs.write(layer, rows, fresh.keys[:, span], fresh.values[:, span])
                keys, values = theirs.keys(layer)[:, :end], theirs.values(layer)[:, :end]
                probe_queries = ProbeQueries(mine, rows, scale, sight, places)
                output = watch(probe_queries, keys, values) if watch is not None else None
                if output is None:
                    output = attend_rows(mine[None], keys[None], values[None], rows, scale, sight, places)[0]
                outputs.append(output)
                seen.append(mine)
            return (torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]).transpose(0, 1).flatten(1)

        attention.forward = attend  # on the instance, so before the class's own
        try:
            yield seen
        finally:
            del attention.forward

    def _as_heads(self, layer: int, keys: Tensor, values: Tensor) -> LayerKV:
        """[R, H * D] each, to [H, R, D]."""
        attention = self._attention[layer]
        return LayerKV(
            keys.reshape(-1, attention.num_kv_heads, attention.head_size).transpose(0, 1),
            values.reshape(-1, attention.num_kv_heads, attention.head_size_v).transpose(0, 1),
        )

    def _piece(
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
        # fast_build: no shortcuts that only pay when a batch is replayed many times.
        return AttentionCall(span, positions, slots, self._builder.build(0, common, fast_build=True))

    def _kernel_tables(self, tables: Tensor) -> Tensor:
        """Block tables [N, B] of vLLM's cache manager in the attention kernel's blocks."""
        if self._kernel_blocks == 1:
            return tables
        split = tables[..., None] * self._kernel_blocks + torch.arange(self._kernel_blocks, device=tables.device)
        return split.flatten(1)

    def _plans(self, places: Sequence[int]) -> list[Any]:
        """The backend's metadata of the calls for rows at `places`, in vLLM's null block."""
        rows = torch.tensor(places, device=self.device)
        tables = rows.new_zeros(1, places[-1] // self.block_size + 1)
        return [call.metadata for call in self.split_calls(rows, tables, torch.zeros_like(rows))]


def _attention_params(attention: Any) -> AttentionParams:
    """How vLLM's attention layer attends, for ours to do alike."""
    impl = attention.impl
    softcap = getattr(impl, "logits_soft_cap", None) or None  # 0 in some backends, where there is none
    return AttentionParams(attention.sliding_window, softcap, getattr(impl, "sinks", None))


def _num_weights(module: Any) -> int:
    """Weights of `module`, on a CPU too, where vLLM packs those of linear layers elsewhere and leaves none behind."""
    count = 0
    for part in module.modules():
        inputs = getattr(part, "input_size_per_partition", getattr(part, "input_size", 0))
        outputs = getattr(part, "output_size_per_partition", getattr(part, "output_size", 0))
        count += max(int(inputs * outputs), sum(parameter.numel() for parameter in part.parameters(recurse=False)))
    return count


def _joined(pieces: list[LayerKV]) -> LayerKV:
    if len(pieces) == 1:
        return pieces[0]
    return LayerKV(torch.cat([piece.keys for piece in pieces], 1), torch.cat([piece.values for piece in pieces], 1))
