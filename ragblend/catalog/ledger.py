"""`Ledger`: the documents of a store, for folders, frameworks and clients of servers. They differ in their collection.

The ledger has the documents' chunks, texts, vectors and token ids, and the keys of their KV entries, in the tables of
`schema`. It is one class in five files, a class for each group of tables:

    documents.py          documents and their texts: who owns a text. Read it first
    indexed_documents.py  documents of a folder's index: chunks with vectors, files, texts that they lost
    sent_documents.py     documents that clients sent to a server: their status, and leases
    token_ids.py          token ids of texts, which prompts are matched with
    entries.py            KV entries: the chunk of each, and pending deletions

Depends on texts and ids, not on KV, engines or frameworks.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import select

from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.indexed_documents import IndexRows
from ragblend.catalog.schema import FACTS
from ragblend.catalog.sent_documents import SentRows
from ragblend.errors import StoreMismatchError


class Ledger(IndexRows, SentRows):
    """The documents of a store, in its database. See `Catalog` for `place`, threads, processes and errors.

    Inside `read_transaction` or `write_transaction`, all methods use that transaction. Outside of both, each method has
    a separate one.
    """

    def add_model(self, fingerprint: str, name: str, *, new_model: bool) -> None:
        """Record a model for which documents are stored.

        If the catalogue has only other models and `new_model` is False, raises StoreMismatchError.
        """
        key = f"model {fingerprint}"
        with self.write_transaction() as connection:
            query = select(FACTS.c.name, FACTS.c.value).where(FACTS.c.name.startswith("model "))
            name_of = {row.name: row.value for row in connection.execute(query)}
            if name_of and key not in name_of and not new_model:
                raise StoreMismatchError(
                    f"{self.name} is the catalogue of {', '.join(sorted(name_of.values()))}, but the engine "
                    f"runs {name}; name another database or schema: `catalog`"
                )
            if key not in name_of:
                self._write_fact(connection, key, name)


_IN_MEMORY: WeakKeyDictionary[Any, Ledger] = WeakKeyDictionary()
_IN_MEMORY_LOCK = threading.Lock()


def catalog_location(store: Any) -> str | Path | None:
    """Return the location of a KVStore's catalogue: a file in its folder, or a URL; None if it has neither."""
    return store.catalog if store.folder is None else resolve_catalog(store.folder, store.catalog)


def has_ledger(store: Any) -> bool:
    """Return True unless the ledger is in a file that does not exist yet."""
    place = catalog_location(store)
    return not isinstance(place, Path) or os.path.lexists(place)


def open_ledger(store: Any, *, create: bool = True) -> Ledger:
    """Return the ledger of a KVStore. Without `create`, return an empty one in memory if the file is missing.

    For a store without a catalogue the ledger is in memory, and all callers share it.
    """
    if not create and not has_ledger(store):
        return Ledger()
    place = catalog_location(store)
    if place is not None:
        return Ledger(place)
    with _IN_MEMORY_LOCK:
        if (ledger := _IN_MEMORY.get(store)) is None:  # `setdefault` would create a database at every call
            ledger = _IN_MEMORY[store] = Ledger()
        return ledger


def register_shared_model(place: str | Path, fingerprint: str, name: str, *, new_model: bool) -> None:
    """Record a model in the catalogue at `place`, if `place` is a URL. Raises the errors of `Ledger.add_model`.

    If `place` is a file, do nothing: a store with a catalogue file records its models in its folder.
    """
    if not isinstance(place, Path):
        with Ledger(place) as ledger:
            ledger.add_model(fingerprint, name, new_model=new_model)
