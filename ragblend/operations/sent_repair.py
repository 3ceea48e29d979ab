"""Repair of documents that clients sent to a server: the server stores them again.

Their KV may belong to namespaces, cache salts and a model in vLLM that no other process has. So a repair only makes
them pending, and the server that has the store prefills what is missing, at once or after its next start.
Depends on the catalogue, not on engines.
"""

from __future__ import annotations

from collections.abc import Collection

from ragblend.catalog import sent_documents
from ragblend.catalog.registry import ChunkRegistry, has_registry, open_registry
from ragblend.catalog.stored_documents import StoredDocument, find_entries, find_text_keys, list_documents
from ragblend.engine.store.disk import DiskStore


def make_sent_documents_pending(disk: DiskStore, lost: Collection[str]) -> tuple[int, set[str]]:
    """Make the stored documents pending that clients sent to a server and that need entries with the keys `lost`.

    Return the number of these documents, and the keys in `lost` that the server computes again.
    """
    if not lost or not has_registry(disk):
        return 0, set()
    num_documents, keys = 0, set[str]()
    with open_registry(disk) as registry:
        for document in list_documents(registry, None):
            if document.status == "stored" and (entries := _find_entries(document, registry).intersection(lost)):
                body = {"chunks": sorted(registry.texts_of(document.key)), "adds": True}
                num_documents += sent_documents.make_pending(registry, document.key, body)
                keys |= entries
        registry.remove_stored_entries(keys)
    for key in keys:
        disk.drop_unreadable(key)
    return num_documents, keys


def _find_entries(document: StoredDocument, registry: ChunkRegistry) -> set[str]:
    keys = find_text_keys(document, registry, None)
    return {entry for _, entries in find_entries(registry, [*keys], document.key.namespace) for entry in entries}
