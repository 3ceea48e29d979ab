"""Prefill chunks behind a prefix and keep their slices: what ingestion stores. Read `prefill_chunk` first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ragblend.engine.fusion.fuse import Steps, run_to_completion
from ragblend.engine.fusion.protocols import LayerwiseModel, PackedPrefillModel, PromptKVBuffer
from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV, dtype_name


def prefill_chunk(model: LayerwiseModel, prefix: PromptKVBuffer, header: KVHeader) -> MemoryKV:
    """Run one chunk behind `prefix` (its rows [0, P) valid) and keep the chunk's slice: pre-RoPE keys, values.

    `prefix` is used as scratch beyond row P and is left with the same P valid rows.
    """
    return run_to_completion(model, prefill_chunk_steps(model, prefix, header))


@torch.inference_mode()
def prefill_chunk_steps(model: LayerwiseModel, prefix: PromptKVBuffer, header: KVHeader) -> Steps[MemoryKV]:
    """`prefill_chunk`, a layer at a time: yields the rows that each layer ran."""
    start = prefix.length
    device = prefix.keys(0).device
    rows = torch.arange(start, start + header.num_tokens, device=device)
    hidden = model.embed(torch.tensor(header.token_ids, device=device))
    stored = []
    for layer in range(model.num_layers):
        hidden, kv = model.run_layer_keeping_kv(layer, hidden, rows, prefix)
        stored.append(LayerKV(kv.keys.contiguous().cpu(), kv.values.contiguous().cpu()))
        yield len(rows)
    assert header.dtype == dtype_name(stored[0].keys.dtype)
    return MemoryKV(header, tuple(stored))


@torch.inference_mode()
def prefill_chunks(model: PackedPrefillModel, prefix: PromptKVBuffer, headers: Sequence[KVHeader]) -> list[MemoryKV]:
    """`prefill_chunk` of several chunks in one pass, side by side behind the same `prefix`, which stays as it is.

    Norms, projections and MLPs run over all their rows at once; attention is each chunk's own.
    """
    device = prefix.keys(0).device
    counts = [header.num_tokens for header in headers]
    rows = torch.cat([torch.arange(prefix.length, prefix.length + count, device=device) for count in counts])
    ends = list(itertools.accumulate(counts))
    spans = tuple(slice(end - count, end) for count, end in zip(counts, ends, strict=True))
    hidden = model.embed(torch.tensor([token for header in headers for token in header.token_ids], device=device))
    stored: list[list[LayerKV]] = [[] for _ in headers]
    for layer in range(model.num_layers):
        hidden, kv = model.run_packed_layer(layer, hidden, rows, spans, prefix)
        keys, values = kv.keys.cpu(), kv.values.cpu()
        for layers, span in zip(stored, spans, strict=True):
            layers.append(LayerKV(keys[:, span].contiguous(), values[:, span].contiguous()))
    return [MemoryKV(header, tuple(layers)) for header, layers in zip(headers, stored, strict=True)]
