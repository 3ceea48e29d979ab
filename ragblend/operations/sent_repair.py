"""Repair of documents that clients sent to a server: the server stores them again.

Their KV may belong to namespaces, cache salts and a model in vLLM that no other process has. So a repair only makes
them pending, and the server that has the store prefills what is missing, at once or after its next start.
Depends on the catalogue, not on engines.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

from ragblend.catalog.registry import ChunkRegistry, catalog_location, has_registry, open_registry
from ragblend.catalog.sent_documents import SentDocumentTable
from ragblend.catalog.stored_documents import StoredDocument, find_entries, find_text_keys, list_documents
from ragblend.engine.store.disk import DiskStore

_SENT = "sent "  # `SentVectors.name` begins with it


def make_sent_documents_pending(disk: DiskStore, lost: Collection[str]) -> tuple[int, set[str]]:
    """Make the stored documents pending that clients sent to a server and that need entries with the keys `lost`.

    Return the number of these documents, and the keys in `lost` that the server computes again.
    """
    if not lost or not has_registry(disk):
        return 0, set()
    num_documents, found = 0, set[str]()
    place = catalog_location(disk)
    assert place is not None
    with open_registry(disk) as registry, SentDocumentTable(place) as table:
        registry.set_variants_stored(lost, is_stored=False)
        vectors = _read_sent_vectors(registry)
        for document in list_documents(registry, None):
            if document.status == "stored" and (entries := _find_entries(document, registry).intersection(lost)):
                texts = sorted(registry.texts_of(document.key))
                num_documents += table.make_pending(document.key, _as_body(texts, vectors))
                found |= entries
        registry.remove_stored_entries(found)
    for key in found:
        disk.drop_unreadable(key)
    return num_documents, found


def _find_entries(document: StoredDocument, registry: ChunkRegistry) -> set[str]:
    keys = find_text_keys(document, registry, None)
    return {entry for _, entries in find_entries(registry, [*keys], document.key.namespace) for entry in entries}


def _read_sent_vectors(registry: ChunkRegistry) -> dict[str, dict[str, bytes]]:
    """Return {embedder: {text: vector}} of the vectors that clients sent."""
    names = [name for name in registry.count_variants() if name.startswith(_SENT)]
    return {
        name.removeprefix(_SENT): {each.text: each.vector for _, each in registry.variants_after(0, name)}
        for name in names
    }


def _as_body(texts: list[str], vectors: dict[str, dict[str, bytes]]) -> dict[str, Any]:
    """Return the chunks of a document as a client sends them, with their vectors if it sent any."""
    body: dict[str, Any] = {"chunks": texts, "adds": True}
    for embedder, vector_of in vectors.items():
        if all(text in vector_of for text in texts):
            vectors_sent = [base64.b64encode(vector_of[text]).decode() for text in texts]
            return {**body, "embedder": embedder, "vectors": vectors_sent}
    return body
