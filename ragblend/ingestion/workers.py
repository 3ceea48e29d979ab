"""Who embeds and prefills what an ingestion brings: this process, or several (see `ray_workers`).

Reading, cutting, the index and the list of what is missing stay with the one that ingests, so whoever computes, the
same chunks are stored under the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ragblend.corpus.embedders import FloatArray
from ragblend.engine.api import Engine
from ragblend.prompt.types import Chunk

Prefill = Callable[[Sequence[Chunk], Engine], Iterable[int]]
"""Prefills chunks that are missing in the engine's store; the bytes stored of each, as they are done. What is computed
behind others comes after those."""


class Workers(Protocol):
    """Other processes, which write KV straight to the store that the engine has."""

    @property
    def num_ahead(self) -> int:
        """Batches of texts to be embedded that they may have at a time."""

    def embed(self, texts: Sequence[str], embedder: str) -> Callable[[], FloatArray]:
        """Have `texts` embedded by the embedder of that name; what is returned waits for the [n, dim] unit rows."""

    def prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
        """A `Prefill`. Chunks that are stored by the time a worker comes to them are left, and count 0 bytes."""


def prefill_here(chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
    """A `Prefill` in this process: one after the other, or side by side where the engine can."""
    together: Callable[[Sequence[Chunk]], Iterable[int]] | None = getattr(engine, "precompute_all", None)
    return together(chunks) if together is not None else map(engine.precompute, chunks)
