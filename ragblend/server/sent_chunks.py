"""Chunks of the documents that clients sent to a server, and the keys of their stored entries."""

from __future__ import annotations

from collections.abc import Iterable

from ragblend.catalog.sent_documents import WaitingDocument
from ragblend.chunker import DEFAULT_CHUNK_SIZE, split
from ragblend.corpus.documents import Document
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.ingestion.contexts import chunk_variants
from ragblend.prompt.types import Chunk

_QUESTION_TOKENS = 64  # least tokens of the context length that a chunk leaves free


def split_document(row: WaitingDocument, engine: Engine) -> list[Chunk]:
    """Return the chunks of a document: those that were sent, or its text split to fit the model's context length."""
    if "chunks" in row.body:
        chunks = [Chunk(text.strip(), row.id) for text in row.body["chunks"]]
    else:
        most = engine.context_length - _QUESTION_TOKENS
        size = min(row.body.get("chunk_size") or DEFAULT_CHUNK_SIZE, most)
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
