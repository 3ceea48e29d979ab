"""Prefill of chunks whose KV is missing in the store: the interface, and its implementation in this process.

`ray_workers` implements it in other processes. The ingesting process itself reads, splits and indexes documents and
lists missing chunks. The keys of chunks therefore do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ragblend.engine.api import Engine
from ragblend.prompt.types import Chunk

Prefill = Callable[[Sequence[Chunk], Engine], Iterable[int]]
"""Prefills chunks that are missing in the engine's store, and yields the bytes stored for each: 0 for a chunk that was
already stored. A variant with other chunks in its context is prefilled later than those chunks.
"""


def prefill_here(chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
    """Prefill and store chunks in this process, several per pass if the engine supports it. Yield the bytes stored for
    each (see `Prefill`).
    """
    together: Callable[[Sequence[Chunk]], Iterable[int]] | None = getattr(engine, "precompute_all", None)
    return together(chunks) if together is not None else map(engine.precompute, chunks)


def num_chunk_tokens(chunk: Chunk, engine: Engine) -> int:
    """Return the number of tokens of a chunk, from its metadata if they have it."""
    counted = chunk.metadata.get("num_tokens")
    return counted if isinstance(counted, int) else engine.renderer.count_tokens(chunk.text)
