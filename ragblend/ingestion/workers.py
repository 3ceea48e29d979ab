"""Interface of the processes that embed and prefill during an ingestion: this process, or several (`ray_workers`).

The ingesting process reads, cuts, indexes and lists missing chunks, so the same chunks are stored under the same keys
for every number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ragblend.corpus.embedders import FloatArray
from ragblend.engine.api import Engine
from ragblend.prompt.types import Chunk

Prefill = Callable[[Sequence[Chunk], Engine], Iterable[int]]
"""Prefills chunks that are missing in the engine's store, in order. Yields the stored bytes of each chunk when it is
done. A variant that follows other chunks comes after them."""


class Workers(Protocol):
    """Other processes, which write KV directly to the engine's store."""

    @property
    def num_ahead(self) -> int:
        """Largest number of batches of texts that wait for embedding."""

    def embed(self, texts: Sequence[str], embedder: str) -> Callable[[], FloatArray]:
        """Start to embed `texts` with the embedder of that name. The returned function waits for [n, dim] unit rows."""

    def prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
        """Prefill chunks as `Prefill` describes. Chunks that are already stored are skipped and yield 0 bytes."""


def prefill_here(chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
    """Prefill chunks in this process as `Prefill` describes, several per pass if the engine supports it."""
    together: Callable[[Sequence[Chunk]], Iterable[int]] | None = getattr(engine, "precompute_all", None)
    return together(chunks) if together is not None else map(engine.precompute, chunks)
