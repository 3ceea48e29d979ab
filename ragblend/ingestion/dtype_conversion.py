"""Counts and converts stored chunks whose dtype differs from the store's `kv_dtype`.

KV in the model's dtype is quantized in place. KV in eight bits is prefilled again, because quantization is not
reversible. Depends on engines and stores, not on documents or the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader, convert_kv_dtype, load_into_memory
from ragblend.errors import DamagedEntryError, UsageError
from ragblend.ingestion.prefill import Prefill
from ragblend.prompt.types import Chunk

_RENEW_BATCH = 16  # chunks whose KV is deleted before it is prefilled again


def count_other_dtypes(chunks: Sequence[Chunk], engine: Engine, disk: DiskStore | None) -> int:
    """Return how many of `chunks` are stored in another dtype than the store's `kv_dtype`. Reads headers on
    `disk`.

    Returns 0 without a disk tier, and for the `kv_dtype` "auto" (the default), which keeps any dtype.
    """
    kv_dtype = engine.store.kv_dtype
    if kv_dtype == "auto" or disk is None:
        return 0
    headers = (disk.header(engine.key(chunk)) for chunk in chunks)
    return sum(header is not None and _has_other_dtype(header, kv_dtype) for header in headers)


def quantize_stored(chunks: Sequence[Chunk], engine: Engine) -> tuple[int, list[Chunk]]:
    """Quantize the KV of `chunks` from the model's dtype to the store's eight-bit `kv_dtype`.

    Return the number of quantized chunks, and the chunks to prefill again: those in another eight-bit dtype, and
    damaged ones. Raises UsageError if the store belongs to a server.
    """
    store = engine.store
    if store.is_remote:
        raise UsageError("only a process that opens the store can rewrite its KV; on the server's machine run: "
                         "ragblend precompute --kv-dtype ... --store DIR")  # fmt: skip
    num_rounded, to_prefill = 0, []
    for chunk in chunks:
        kv = store.get(engine.key(chunk))
        if kv is None or not _has_other_dtype(kv.header, store.kv_dtype):
            continue
        if not kv.header.is_lossless:
            to_prefill.append(chunk)
            continue
        try:
            whole = load_into_memory(kv)
        except DamagedEntryError:
            to_prefill.append(chunk)
            continue
        if convert_kv_dtype(whole, store.kv_dtype) is not whole:  # very short chunks stay as they are
            store.replace_dtype(whole)
            num_rounded += 1
    return num_rounded, to_prefill


def replace_kv(chunks: Sequence[Chunk], engine: Engine, prefill: Prefill) -> Iterator[int]:
    """Delete the KV of chunks and call `prefill` on them, batch by batch, so an interruption loses one batch at most.

    Yields the number of bytes stored for each chunk.
    """
    for start in range(0, len(chunks), _RENEW_BATCH):
        batch = chunks[start : start + _RENEW_BATCH]
        for chunk in batch:
            engine.forget(chunk)
        yield from prefill(batch, engine)


def _has_other_dtype(header: KVHeader, kv_dtype: str) -> bool:
    return (header.kv_dtype or "auto") != kv_dtype
