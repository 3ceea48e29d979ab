"""Stored chunks whose dtype is not the store's: counts them, or converts them.

KV as computed is rounded in place. KV in eight bits is prefilled again, because rounding is not reversible. Depends on
engines and stores, not on documents or the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import KVHeader, convert_kv_dtype, load_into_memory
from ragblend.errors import DamagedEntryError, UsageError
from ragblend.prompt.types import Chunk

_RENEW_BATCH = 16  # chunks whose KV is missing while it is prefilled again


def count_other_dtypes(known: Sequence[Chunk], engine: Engine, disk: DiskStore | None) -> int:
    """Return how many of the `known` chunks have another dtype than the store's, by the headers on `disk`.

    A store of KV as computed, the default, is not searched.
    """
    kv_dtype = engine.store.kv_dtype
    if kv_dtype == "auto" or disk is None:
        return 0
    headers = (disk.header(engine.key(chunk)) for chunk in known)
    return sum(header is not None and _has_other_dtype(header, kv_dtype) for header in headers)


def quantize_stored(known: Sequence[Chunk], engine: Engine) -> tuple[int, list[Chunk]]:
    """Round chunks as computed to the store's eight bits. Return their number, and the chunks to prefill instead.

    The latter are stored in eight bits but not the store's dtype, or damaged. Raises UsageError if the engine's store
    belongs to another process.
    """
    store = engine.store
    if store.is_remote:
        raise UsageError("only a process that opens the store can rewrite its KV; on the server's machine run: "
                         "ragblend precompute --kv-dtype ... --store DIR")  # fmt: skip
    num_rounded, to_prefill = 0, []
    for chunk in known:
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
        if convert_kv_dtype(whole, store.kv_dtype) is not whole:  # a few tokens have nothing to gain
            store.replace(whole)
            num_rounded += 1
    return num_rounded, to_prefill


def prefill_again(
    chunks: Sequence[Chunk], engine: Engine, prefill: Callable[[Sequence[Chunk], Engine], Iterable[int]]
) -> Iterator[int]:
    """`prefill` chunks whose KV is dropped first, a few at a time: an interruption costs those few at most.

    The bytes stored of each.
    """
    for start in range(0, len(chunks), _RENEW_BATCH):
        batch = chunks[start : start + _RENEW_BATCH]
        for chunk in batch:
            engine.forget(chunk)
        yield from prefill(batch, engine)


def _has_other_dtype(header: KVHeader, kv_dtype: str) -> bool:
    return (header.kv_dtype or "auto") != kv_dtype
