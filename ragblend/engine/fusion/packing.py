"""Prefill many chunks at the speed of the model: packed into passes, written in the background.

Read `prefill_missing`. Knows token ids, a function that prefills some chunks at once and one that stores one. Knows
nothing about texts, models or files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

from ragblend.engine.fusion.lookup import NO_CONTEXT, IngestionContext
from ragblend.engine.store.kv import MemoryKV

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


def batch_by_tokens(chunks: Iterable[TokenIds], limit: int) -> Iterator[list[TokenIds]]:
    """Neighbours that go into one pass: together `limit` tokens at most, a longer chunk alone.

    >>> [len(each) for each in passes([(1,) * 300, (2,) * 300, (3,) * 300, (4,) * 900, (5,)], limit=640)]
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
    for behind, run in groupby(items, lambda item: item.behind):
        for together in batch_by_tokens((item.token_ids for item in run), limit):
            yield behind, together


def _is_done(write: Future[None] | None) -> bool:
    return write is None or write.done()


def _wait_for_write(write: Future[None] | None, nbytes: int) -> int:
    """Wait until a write has ended; its bytes, or what it raised."""
    if write is not None:
        write.result()
    return nbytes
