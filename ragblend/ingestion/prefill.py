"""Prefill of chunks whose KV is missing in the store: the interface, and its implementation in this process.
`send_to_remote` then checks that the remote tier has the KV.

`ray_workers` implements it in other processes. The ingesting process itself reads, splits and indexes documents and
lists missing chunks. The keys of chunks therefore do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from ragblend.corpus.folder_scan import ReadFailure
from ragblend.engine.api import Engine, IngestingEngine
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.remote.upload import finish_sending
from ragblend.engine.weightless import WeightlessEngine
from ragblend.ingestion.report import IngestReport, Progress
from ragblend.prompt.types import Chunk

Prefill = Callable[[Sequence[Chunk], Engine], Iterable[int]]
"""Prefills chunks that are missing in the engine's store, and yields the bytes stored for each: 0 for a chunk that was
already stored.
"""


def prefill_here(chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
    """Prefill and store chunks in this process, several per pass if the engine supports it. Yield the bytes stored for
    each (see `Prefill`).
    """
    return engine.precompute_all(chunks) if isinstance(engine, IngestingEngine) else map(engine.precompute, chunks)


def load_weights(engine: Engine, progress: Progress) -> float:
    """Load the weights of an engine that loads them when it needs them. Return the seconds that this took."""
    start_s = perf_counter()
    if isinstance(engine, WeightlessEngine):
        progress("load", 0, 1)
        engine.load_weights()
        progress("load", 1, 1)
    return perf_counter() - start_s


def num_chunk_tokens(chunk: Chunk, engine: Engine) -> int:
    """Return the number of tokens of a chunk, from its metadata if they have it."""
    counted = chunk.metadata.get("num_tokens")
    return counted if isinstance(counted, int) else engine.renderer.count_tokens(chunk.text)


def send_to_remote(
    stored: Sequence[Chunk], new: Sequence[Chunk], engine: Engine, report: IngestReport, progress: Progress
) -> None:
    """Send the KV of stored chunks to the remote tiers that lack it. Wait until it has arrived.

    known: chunks that were stored before; those without KV on this machine have it in a remote tier. Does nothing
    without a remote tier. KV that does not arrive is counted in `report` and named in `report.failures`.
    """
    if not engine.store.find_tiers(RemoteStore):
        return
    local = [tier for tier in engine.store.tiers if not tier.is_remote]
    keys = [key for key in map(engine.key, stored) if any(tier.contains(key) for tier in local)]
    keys += map(engine.key, new)
    for remote, sent in finish_sending(keys, engine.store, progress):
        if num_dropped := sent.num_dropped + sent.num_damaged:
            report.num_dropped += num_dropped
            report.problem = sent.problem or "they cannot be read on this machine"
            report.is_full = sent.is_full
            url = remote.values.url
            reason = f"{num_dropped} of {len(keys)} KV caches did not reach the remote tier: {report.problem}"
            report.failures.append(ReadFailure(url, f"{reason}; send them: ragblend push --remote {url}"))
