"""`Workers`: the interface to processes that embed and prefill during an ingestion. Implementation: `ray_workers`.

The ingesting process itself reads, splits and indexes documents and lists missing chunks. The keys of chunks therefore
do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ragblend.corpus.embedders import FloatArray
from ragblend.engine.api import Engine
from ragblend.prompt.types import Chunk

Prefill = Callable[[Sequence[Chunk], Engine], Iterable[int]]
"""Prefills chunks that are missing in the engine's store, and yields the bytes stored for each. A variant with other
chunks in its context is prefilled later than those chunks.
"""


class Workers(Protocol):
    """Processes that write KV directly to the engine's store."""

    @property
    def max_waiting_batches(self) -> int:
        """Largest number of batches of texts that wait for embedding."""

    def embed(self, texts: Sequence[str], embedder: str) -> Callable[[], FloatArray]:
        """Start to embed `texts` with the embedder of this name.

        Return a function that waits until the texts are embedded, then returns the unit vectors [n, dim].
        """

    def prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
        """Prefill and store chunks. Yield the bytes stored for each; 0 for a chunk that was already stored (see
        `Prefill`).
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
