"""Prefill chunks behind a prefix and keep their slices: what ingestion stores.

`prefill_chunk` is the computation, `prefill_missing` does it for many chunks at the speed of the model: packed into
passes, written in the background. Knows token ids, layers and KV; nothing of texts or files.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from ragblend.engine.fusion.fuse import Steps, run_to_completion
from ragblend.engine.fusion.lookup import NO_CONTEXT, IngestionContext
from ragblend.engine.fusion.protocols import LayerwiseModel, PackedPrefillModel, PromptKVBuffer
from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV, dtype_name

# Rows per pass. On a CPU short chunks gain when packed (weights are read once, layers are called once), and lose some
# of it when a pass outgrows the cache: `ragblend bench ingest --chunk-tokens 64`. A GPU wants more rows to be busy.
CPU_PASS_TOKENS, GPU_PASS_TOKENS = 640, 8192
# CPUs compute products of a few rows otherwise than those of many: with fewer, the KV of a short chunk that is
# prefilled alone would not be, bit for bit, that of the same chunk among others.
LEAST_PASS_TOKENS = 32

UNWRITTEN_BYTES = 512 << 20  # prefilled, on their way to the store; the model waits when there is more

TokenIds = tuple[int, ...]


class PrefillItem(NamedTuple):
    """A chunk to prefill: its ids, and what it is computed behind."""

    token_ids: TokenIds
    behind: IngestionContext = NO_CONTEXT


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


def batch_by_tokens(chunks: Iterable[TokenIds], limit: int) -> Iterator[list[TokenIds]]:
    """Neighbours that go into one pass: together `limit` tokens at most, a longer chunk alone.

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
    chunks: Iterable[PrefillItem],
    is_missing: Callable[[PrefillItem], bool],
    prefill: Callable[[Sequence[TokenIds], IngestionContext], list[MemoryKV]],
    put: Callable[[MemoryKV], None],
    pass_tokens: int,
) -> Iterator[int]:
    """Prefill the chunks that are missing, a pass at a time, while the KV of earlier ones is written.

    Those that follow each other and are computed behind the same share passes.

    Yields, in order, the bytes stored for every chunk once it is stored; 0 for one that was there. What `put` raises
    ends it. When it is closed early or interrupted, what has been prefilled is still stored.
    """
    writes: deque[tuple[Future[None] | None, int]] = deque()
    unwritten_bytes = 0
    with ThreadPoolExecutor(1, thread_name_prefix="ragblend-ingest") as writer:
        try:
            for behind, together in _batch_by_context(chunks, pass_tokens):
                missing = [ids for ids in dict.fromkeys(together) if is_missing(PrefillItem(ids, behind))]
                fresh = dict(zip(missing, prefill(missing, behind), strict=True)) if missing else {}
                for chunk in together:
                    kv = fresh.pop(chunk, None)
                    writes.append((writer.submit(put, kv), kv.nbytes) if kv is not None else (None, 0))
                    unwritten_bytes += writes[-1][1]
                while writes and (_is_done(writes[0][0]) or unwritten_bytes > UNWRITTEN_BYTES):
                    unwritten_bytes -= writes[0][1]
                    yield _wait_for_write(*writes.popleft())
            while writes:
                yield _wait_for_write(*writes.popleft())
        except Exception:
            writer.shutdown(wait=False, cancel_futures=True)  # a store that refuses one would refuse the rest, too
            raise


def _batch_by_context(items: Iterable[PrefillItem], limit: int) -> Iterator[tuple[IngestionContext, list[TokenIds]]]:
    """`batch_by_tokens` of items that are computed behind the same."""
    for behind, run in itertools.groupby(items, lambda item: item.behind):
        for together in batch_by_tokens((item.token_ids for item in run), limit):
            yield behind, together


def _is_done(write: Future[None] | None) -> bool:
    return write is None or write.done()


def _wait_for_write(write: Future[None] | None, nbytes: int) -> int:
    """Wait until a write has ended; its bytes, or what it raised."""
    if write is not None:
        write.result()
    return nbytes
