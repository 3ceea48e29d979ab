"""Prefill of chunks after a prefix, whose KV slices ingestion stores.

`prefill_chunks` runs several chunks in one pass of a transformers model, and `prefill_missing` many, writing them in
the background. Depends on token ids, layers and KV, not on texts or files.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ragblend.engine.fusion.protocols import PromptKVBuffer
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV

if TYPE_CHECKING:
    from ragblend.engine.transformers.layers import TransformersLayers

# Rows per pass. On a CPU packing makes short chunks faster (weights are read once, layers are called once), and less so
# when a pass exceeds the cache: `python -m benchmarks.ingest --chunk-tokens 64`. A GPU needs more rows to be busy.
CPU_PASS_TOKENS, GPU_PASS_TOKENS = 640, 8192
# CPUs use another kernel for products of a few rows. With fewer rows than this, the KV of a short chunk prefilled alone
# would differ in its last bits from that of the same chunk among others.
LEAST_PASS_TOKENS = 32

# Most tokens at the end of a prefix that are computed with the prompt rather than in a separate pass: labels, and first
# tokens of chunks, differ from prompt to prompt.
COMPUTED_IN_PROMPT = 32

UNWRITTEN_BYTES = 512 << 20  # prefilled KV that may wait for the store; with more, the model waits

TokenIds = tuple[int, ...]


@torch.inference_mode()
def prefill_chunks(model: TransformersLayers, prefix: PromptKVBuffer, headers: Sequence[KVHeader]) -> list[MemoryKV]:
    """Prefill several chunks in one pass, each after the same `prefix`. Return the pre-RoPE keys and values of each.

    Norms, projections and MLPs run over the rows of all chunks; attention runs per chunk. `prefix` is not changed.
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


def batch_by_tokens(chunks: Iterable[TokenIds], limit: int) -> Iterator[list[TokenIds]]:
    """Yield lists of adjacent chunks, each list for one pass.

    A list has at most `limit` tokens, but a longer chunk is a separate list.

    >>> [len(each) for each in batch_by_tokens([(1,) * 300, (2,) * 300, (3,) * 300, (4,) * 900, (5,)], limit=640)]
    [2, 1, 1, 1]
    """
    waiting: list[TokenIds] = []
    for chunk in chunks:
        if waiting and sum(map(len, waiting)) + len(chunk) > limit:
            yield waiting
            waiting = []
        waiting.append(chunk)
    if waiting:
        yield waiting


def prefill_missing(
    chunks: Iterable[TokenIds],
    is_missing: Callable[[TokenIds], bool],
    prefill: Callable[[Sequence[TokenIds]], list[MemoryKV]],
    put: Callable[[MemoryKV], None],
    pass_tokens: int,
) -> Iterator[int]:
    """Prefill the missing chunks, a pass at a time, while the KV of earlier passes is written.

    Yields one number per chunk, in order: the bytes that were stored, after they were written, or 0 if the chunk was
    stored before. Raises the errors of `put`. If the generator is closed early or interrupted, the KV that was
    prefilled is still stored.
    """
    no_write: Future[None] = Future()
    no_write.set_result(None)
    writes: deque[tuple[Future[None], int]] = deque()
    unwritten_bytes = 0
    with ThreadPoolExecutor(1, thread_name_prefix="ragblend-ingest") as writer:
        try:
            for together in batch_by_tokens(chunks, pass_tokens):
                missing = list(filter(is_missing, dict.fromkeys(together)))
                fresh = dict(zip(missing, prefill(missing), strict=True)) if missing else {}
                for chunk in together:
                    kv = fresh.pop(chunk, None)
                    writes.append((writer.submit(put, kv), kv.nbytes) if kv is not None else (no_write, 0))
                    unwritten_bytes += writes[-1][1]
                while writes and (writes[0][0].done() or unwritten_bytes > UNWRITTEN_BYTES):
                    write, nbytes = writes.popleft()
                    write.result()
                    unwritten_bytes -= nbytes
                    yield nbytes
            for write, nbytes in writes:
                write.result()
                yield nbytes
        except Exception:
            writer.shutdown(wait=False, cancel_futures=True)  # a store that rejects one write would reject the rest
            raise
