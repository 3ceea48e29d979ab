"""Repair of documents that clients sent to a server: the server stores them again.

Their KV may belong to namespaces, cache salts and a model in vLLM that no other process has. So a repair only makes
them pending, and the server that has the store prefills what is missing, at once or after its next start.
Depends on the catalogue, not on engines.
"""

from __future__ import annotations

from collections.abc import Collection

from ragblend.catalog.ledger import Ledger, has_ledger, open_ledger
from ragblend.catalog.stored_documents import StoredDocument, list_added
from ragblend.engine.store.disk import DiskStore


def make_sent_documents_pending(disk: DiskStore, lost: Collection[str]) -> tuple[int, set[str]]:
    """Make the stored documents pending that clients sent to a server and that need entries with the keys `lost`.

    Return the number of these documents, and the keys in `lost` that the server computes again.
    """
    if not lost or not has_ledger(disk):
        return 0, set()
    num_documents, made_again = 0, set[str]()
    with open_ledger(disk) as ledger:
        for document in list_added(ledger):
            if document.status == "stored" and (entries := _find_entries(document, ledger).intersection(lost)):
                body = {"chunks": sorted(ledger.texts_of(document.key)), "adds": True}
                num_documents += ledger.make_pending(document.key, body)
                made_again |= entries
        ledger.unrecord_stored_entries(made_again)
    for key in made_again:
        disk.drop_unreadable(key)
    return num_documents, made_again


def _find_entries(document: StoredDocument, ledger: Ledger) -> set[str]:
    entries = ledger.entries_of_texts(ledger.text_keys_of(document.key), document.key.namespace)
    return {entry for of_text in entries.values() for entry in of_text}
