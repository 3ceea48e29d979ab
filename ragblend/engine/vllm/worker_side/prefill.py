"""Prefill of one chunk inside vLLM. The chunk's KV is stored by ingestion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ragblend.engine.fusion.fuse import Steps, run_to_completion
from ragblend.engine.fusion.protocols import PromptKVBuffer
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, dtype_name

if TYPE_CHECKING:
    from ragblend.engine.vllm.worker_side.layers import VllmLayers


def prefill_chunk(model: VllmLayers, prefix: PromptKVBuffer, header: KVHeader) -> MemoryKV:
    """Prefill the chunk of `header` after the valid rows of `prefix`. Return its pre-RoPE keys and its values.

    The chunk's rows are written to `prefix` after the first `prefix.length` rows, which do not change.
    """
    return run_to_completion(model, prefill_chunk_steps(model, prefix, header))


@torch.inference_mode()
def prefill_chunk_steps(model: VllmLayers, prefix: PromptKVBuffer, header: KVHeader) -> Steps[MemoryKV]:
    """Run `prefill_chunk` a layer at a time. Yields the chunk's number of tokens after each layer."""
    start = prefix.length
    device = prefix.keys(0).device
    rows = torch.arange(start, start + header.num_tokens, device=device)
    hidden = model.embed(torch.tensor(header.token_ids, device=device))
    stored = []
    for layer in range(model.num_layers):
        hidden, kv = model.run_layer_keeping_unrotated_kv(layer, hidden, rows, prefix)
        stored.append(LayerKV(kv.keys.contiguous().cpu(), kv.values.contiguous().cpu()))
        yield len(rows)
    assert header.dtype == dtype_name(stored[0].keys.dtype)
    return MemoryKV(header, tuple(stored))
