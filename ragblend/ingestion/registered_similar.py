"""`RegisteredChunkFinder`: finds similar chunks among chunks that frameworks added, for stores with similar variants.

Chunks of a LangChain vector store or a LlamaIndex pipeline are in no ragblend index. The store's registry therefore has
their vectors, and every new chunk is compared with all of them. Depends on the registry, embedders and engines.
Prefills nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np

from ragblend.catalog.registry import ChunkRegistry, SimilarContextVariant
from ragblend.corpus.embedders import (
    Embedder,
    FloatArray,
    HashingEmbedder,
    MiniLMEmbedder,
    embedder_version,
    is_minilm_installed,
)
from ragblend.engine.api import Engine
from ragblend.prompt.types import Chunk


class RegisteredChunkFinder:
    """A `contexts.SimilarChunkFinder` over the chunks in `registry` that were added through LangChain, LlamaIndex or a
    server.

    It compares the vectors of one embedder. Chunks with vectors of another embedder are ignored.
    """

    def __init__(self, engine: Engine, registry: ChunkRegistry, embedder: Embedder) -> None:
        self.engine = engine
        self.registry = registry
        self._embedder = embedder
        self._name = f"{embedder.name} {embedder_version(embedder)}"
        self._vectors = _VECTORS.setdefault(engine, {}).setdefault(self._name, _Vectors(self._name))

    def request_variants(self, chunks: Iterable[Chunk]) -> None:
        """Record `chunks` in the registry as chunks that need a similar variant. Embed those without a vector there.

        A similar variant is a chunk's second KV, computed after similar chunks. This method does not search for these
        chunks, and computes no KV. It ignores blank chunks. A damaged vector, or one of another embedder, is replaced.
        """
        entries = {self._entry(text): text for text in dict.fromkeys(chunk.text for chunk in chunks) if text.strip()}
        if new := [pair for pair in entries.items() if not self.registry.is_variant_recorded(pair[0], self._name)]:
            rows = self._embedder.embed([text for _, text in new]).astype("<f4")
            found = [SimilarContextVariant(*pair, row.tobytes()) for pair, row in zip(new, rows, strict=True)]
            self.registry.record_variants(found, self._name)

    def find_missing_variants(self) -> list[Chunk]:
        """Return the similar variants that were requested for this engine, but are not stored.

        There are three causes. The variant is new, texts of its context were removed, or its chunk had no similar text
        when the chunk was added.
        """
        requested = self.registry.variants_without_kv(self._name)
        return [Chunk(each.text, context="similar") for each in requested if self._entry(each.text) == each.entry]

    def record_stored_variants(self, chunks: Iterable[Chunk]) -> None:
        """Record in the registry those similar variants in `chunks` whose KV is in the store."""
        own = {self.engine.key(chunk) for chunk in chunks if chunk.context == "similar"}
        if unrecorded := own.intersection(each.entry for each in self.registry.variants_without_kv(self._name)):
            with self.registry.block_additions():  # so that no deletion is recorded in between
                self.registry.set_variants_stored(filter(self.engine.store.contains, unrecorded), is_stored=True)

    def similar_texts(self, text: str, count: int, is_allowed: Callable[[str], bool]) -> list[str]:
        """See `SimilarChunkFinder`. Compares with all chunks in one matrix product, which is much faster than a
        prefill."""
        found: list[str] = []
        for near in self._vectors.nearest(text.strip(), self.registry):
            if len(found) == count:
                break
            if near in self.registry and is_allowed(near):
                found.append(near)
        return found

    def _entry(self, text: str) -> str:
        return self.engine.key(Chunk(text, context="similar"))


class _Vectors:
    """The vectors of a registry's variants in memory. Each call reads only the new rows of the registry."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the embedder
        self._lock = threading.Lock()
        self._identity: object = None  # of the registry's database
        self._clear()

    def _clear(self) -> None:
        self._row_of: dict[str, int] = {}  # row index by text
        self._texts: list[str] = []
        self._rows: FloatArray = np.empty((0, 0), np.float32)  # [capacity, dim], length 1
        self._last_number = self._num_read = 0

    def nearest(self, text: str, registry: ChunkRegistry) -> Iterator[str]:
        """Yield the other texts, nearest first, or none if the registry has no vector of `text`.

        They may include texts that were removed after the last update.
        """
        with self._lock:
            self._update(registry)
            own = self._row_of.get(text)
            texts, rows = self._texts, self._rows[: len(self._texts)]
        if own is None:
            return
        scores = rows @ rows[own]
        num_seen, num_wanted = 0, _FIRST_NEAREST
        while num_seen < len(scores):
            num_wanted = min(num_wanted, len(scores))
            least = np.partition(scores, -num_wanted)[-num_wanted]
            kept = np.flatnonzero(scores >= least)  # includes all that equal the last; older rows first
            order = kept[np.argsort(-scores[kept], kind="stable")]
            yield from (texts[place] for place in order[num_seen:] if place != own)
            num_seen, num_wanted = len(order), 8 * num_wanted

    def _update(self, registry: ChunkRegistry) -> None:
        added = registry.variants_after(self._last_number, self._name)
        self._num_read += len(added)
        num_removed = self._num_read - registry.count_variants().get(self._name, 0)
        if num_removed > self._num_read // 4 or registry.identity != self._identity:  # then the rows are read again
            self._clear()
            self._identity = registry.identity
            added = registry.variants_after(0, self._name)
            self._num_read = len(added)
        for number, variant in added:
            self._last_number = number
            if variant.text not in self._row_of:
                self._append(variant)

    def _append(self, variant: SimilarContextVariant) -> None:
        place, row = len(self._texts), np.frombuffer(variant.vector, "<f4")
        if place == len(self._rows):
            grown = np.empty((max(_FIRST_ROWS, 2 * place), row.size), np.float32)
            if place:
                grown[:place] = self._rows
            self._rows = grown
        self._rows[place] = row
        self._row_of[variant.text] = place
        self._texts.append(variant.text)


_FIRST_NEAREST, _FIRST_ROWS = 16, 64
_VECTORS: WeakKeyDictionary[Engine, dict[str, _Vectors]] = WeakKeyDictionary()


def open_registered_finder(
    engine: Engine, registry: ChunkRegistry, embedder: Embedder | None = None
) -> RegisteredChunkFinder | None:
    """Return a finder if the engine's context policy is "similar"; else None.

    embedder: None is MiniLM if it is installed, else the hashing embedder.
    """
    return (
        RegisteredChunkFinder(engine, registry, embedder or _default_embedder())
        if engine.context == "similar"
        else None
    )


@cache
def _default_embedder() -> Embedder:
    return MiniLMEmbedder() if is_minilm_installed() else HashingEmbedder()
