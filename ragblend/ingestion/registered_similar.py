"""Which of the chunks that frameworks bring are like each other: for stores that keep similar versions.

Chunks of a LangChain vector store or a LlamaIndex pipeline are in no index of ours, so their vectors are kept with
their texts, in the store's registry, and every new chunk is compared with all of them. Knows the registry, embedders
and engines; prefills nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from ragblend.corpus.chunk_registry import ChunkRegistry, SimilarVariant
from ragblend.corpus.embedders import (
    Embedder,
    FloatArray,
    HashingEmbedder,
    MiniLMEmbedder,
    embedder_version,
    is_minilm_installed,
)
from ragblend.corpus.schema import text_hash
from ragblend.engine.api import Engine
from ragblend.ingestion.deletion import has_local_tier
from ragblend.prompt.types import Chunk


class RegisteredChunkFinder:
    """A `contexts.Finder` over the chunks that frameworks have brought into `registry`; it notes their versions there.

    They are found by MiniLM where the extra `demo` is installed, else by their words, whatever the framework's own
    vectors are.
    """

    def __init__(self, engine: Engine, registry: ChunkRegistry) -> None:
        self.engine = engine
        self.registry = registry
        self._place_of: dict[str, int] | None = None  # by text, its row; None until they are needed
        self._rows: FloatArray = np.empty((0, 0), np.float32)  # [texts, dim], length 1

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Embed the chunks that have no vector yet. From here on their similar versions are wanted."""
        entries = {self._entry(text): text for text in dict.fromkeys(chunk.text for chunk in chunks) if text.strip()}
        known = {each.entry for each in self._recorded_variants()}
        if new := [(entry, text) for entry, text in entries.items() if entry not in known]:
            rows = _embedder().embed([text for _, text in new])
            noted = [SimilarVariant(*pair, row.astype("<f4").tobytes()) for pair, row in zip(new, rows, strict=True)]
            self.registry.record_similar(noted, _embedder_name())
            self._place_of = None

    def find_missing_variants(self) -> list[Chunk]:
        """The chunks of this engine that have no similar version: what it was computed behind is gone, or nothing was
        near them when they came."""
        lost = [
            each for each in self._recorded_variants() if not each.is_stored and self._entry(each.text) == each.entry
        ]
        return [Chunk(each.text, context="similar") for each in lost]

    def mark_stored(self, chunks: Iterable[Chunk]) -> None:
        """Note which of the similar versions among `chunks` are stored now."""
        entries = [self.engine.key(chunk) for chunk in chunks if chunk.context == "similar"]
        self.registry.set_similar_stored(filter(self.engine.store.contains, entries), is_stored=True)

    def similar_texts(self, text: str, count: int, is_allowed: Callable[[str], bool]) -> list[str]:
        """See `Finder`. A chunk is compared with all others: one product, where its prefill takes far longer."""
        if self._place_of is None:
            vectors = {each.text: each.vector for each in self._recorded_variants()}
            self._place_of = {known: place for place, known in enumerate(vectors)}
            self._rows = np.frombuffer(b"".join(vectors.values()), "<f4").reshape(len(vectors), -1 if vectors else 0)
        own = self._place_of.get(text.strip())
        if own is None:
            return []
        texts, found = list(self._place_of), list[str]()
        for place in np.argsort(-(self._rows @ self._rows[own]), kind="stable"):
            if len(found) == count:
                break
            if place != own and is_allowed(texts[place]):
                found.append(texts[place])
        return found

    def vectors(self, texts: Iterable[str]) -> dict[bytes, bytes]:
        """See `Finder`: what is registered at this moment, whoever takes it away."""
        return {text_hash(text): b"" for text in texts if text in self.registry}

    def _recorded_variants(self) -> list[SimilarVariant]:
        return self.registry.similar_variants(_embedder_name())

    def _entry(self, text: str) -> str:
        return self.engine.key(Chunk(text, context="similar"))


def open_registered_finder(engine: Engine, registry: ChunkRegistry) -> RegisteredChunkFinder | None:
    """Where the engine keeps similar versions, and this process can look through its store: to delete them again where
    a chunk goes that they were computed behind."""
    return (
        RegisteredChunkFinder(engine, registry)
        if engine.context == "similar" and has_local_tier(engine.store)
        else None
    )


@cache
def _embedder() -> Embedder:
    return MiniLMEmbedder() if is_minilm_installed() else HashingEmbedder()


def _embedder_name() -> str:
    return f"{_embedder().name} {embedder_version(_embedder())}"
