"""Known chunks that are stored in another dtype than the store's: counted, or made to take on the store's.

KV as computed is rounded in place. KV in eight bits is prefilled again, because what rounding lost is lost. Knows
engines and stores; nothing of documents or the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import KVHeader, convert_kv_dtype, load_into_memory
from ragblend.engine.store.tiered import TieredStore
from ragblend.errors import DamagedEntryError, UsageError
from ragblend.prompt.types import Chunk

_RENEW_BATCH = 16  # chunks whose KV is missing while it is prefilled again


def count_other_dtypes(known: Sequence[Chunk], engine: Engine, disk: DiskStore | None) -> int:
    """How many of the `known` chunks are stored in another dtype than the store's, by the headers on `disk`.

    A store of KV as computed, the default, is not searched at all.
    """
    kv_dtype = engine.store.kv_dtype
    if kv_dtype == "auto" or disk is None:
        return 0
    headers = (disk.header(engine.key(chunk)) for chunk in known)
    return sum(header is not None and _has_other_dtype(header, kv_dtype) for header in headers)


def quantize_stored(known: Sequence[Chunk], engine: Engine) -> tuple[int, list[Chunk]]:
    """Store chunks as computed in the store's eight bits: how many, and the chunks that are to be prefilled instead.

    Those are in eight bits and wanted as computed or in other eight bits, or turn out damaged. Raises UsageError where
    the engine's store is somebody else's.
    """
    store = engine.store
    if not isinstance(store, TieredStore):
        raise UsageError("KV is rewritten by whoever opens the store itself, a server's where the server runs; "
                         "there: ragblend precompute --kv-dtype ... --store DIR")  # fmt: skip
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
