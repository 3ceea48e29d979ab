"""Chunks and vectors of the documents that clients sent to a server, and the keys of their stored entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ragblend.catalog.sent_documents import WaitingDocument
from ragblend.catalog.vectors import normalize_rows
from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import FloatArray
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.engine_index import DEFAULT_CHUNK_TOKENS
from ragblend.prompt.types import Chunk
from ragblend.server.requests import decode_vector

_QUESTION_TOKENS = 64  # least tokens of the context length that a chunk leaves free


def split_document(row: WaitingDocument, engine: Engine) -> list[Chunk]:
    """Return the chunks of a document: those that were sent, or its text split to fit the model's context length."""
    if "chunks" in row.body:
        chunks = [Chunk(text.strip(), row.id) for text in row.body["chunks"]]
    else:
        most = engine.context_length - _QUESTION_TOKENS
        size = min(row.body.get("chunk_size") or DEFAULT_CHUNK_TOKENS, most)
        chunks = split(Document(row.body["text"], row.id), engine.renderer.count_tokens, size)
    return chunks or [Chunk("", row.id)]  # an empty document still replaces its earlier chunks


def stored_keys(chunks: Iterable[Chunk], engine: Engine) -> set[str]:
    """Return the keys of the chunks' stored entries, in all variants of the store's context policy.

    An entry that only the memory of this process holds does not count if the store has a disk.
    """
    keys, store = [*dict.fromkeys(map(engine.key, chunk_variants(chunks, engine.context)))], engine.store
    disk = store.find_tier(DiskStore)
    if disk is not None and not store.find_tiers(RemoteStore):
        return set(filter(disk.contains, keys))
    return {key for key, is_stored in zip(keys, store.contains_many(keys), strict=True) if is_stored}


class SentVectors:
    """Embedder that returns the vectors that were sent with the texts."""

    def __init__(self, name: str, vectors: Mapping[str, str]) -> None:
        self.name = f"sent {name}"
        self._vectors = vectors
        self.dim = len(decode_vector(next(iter(vectors.values()))))

    @classmethod
    def of(cls, rows: Sequence[WaitingDocument]) -> SentVectors | None:
        """Return the embedder for documents that were sent with vectors; None for documents without."""
        vectors = {
            text.strip(): vector
            for row in rows
            for text, vector in zip(row.body.get("chunks", ()), row.body.get("vectors", ()), strict=False)
        }
        return cls(rows[0].body["embedder"], vectors) if vectors else None

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Return the vectors of `texts` as unit rows [n, dim] float32."""
        return normalize_rows([decode_vector(self._vectors[text.strip()]) for text in texts])
