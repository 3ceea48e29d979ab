"""The documents of a store by name: those of its index, and those that frameworks and clients of a server have added.

Functions take two ledgers: `ledger`, of the store, and `folder`, the one with the index of the store's folder. Both are
one object unless the store's catalogue is a URL, because an index is each machine's own. Depends on rows, not on KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from sqlalchemy import case, func, select, tuple_

from ragblend.catalog.documents import HAS_CHUNKS
from ragblend.catalog.indexed_documents import LANGCHAIN_SOURCE
from ragblend.catalog.ledger import Ledger, catalog_location, open_ledger
from ragblend.catalog.schema import CHUNKS, DOCUMENTS, IN_DOCUMENT, INDEX_MARK, IS_INDEXED, IS_SENT, DocumentKey
from ragblend.catalog.sent_documents import STATUS
from ragblend.files.store_folder import CATALOG_FILE


class StoredDocument(NamedTuple):
    """A document of a store. The user names it by its id, its collection or its source.

    `source`: the file, page or address that it came from; "" if unknown. `index_source`: its source in the index; "" if
    the index does not have it. `status`, `reason`: of a document that a client sent to a server, else "".
    """

    key: DocumentKey
    source: str
    num_chunks: int
    index_source: str = ""
    status: str = ""
    reason: str = ""

    def joined_with(self, other: StoredDocument) -> StoredDocument:
        """Return the document with what `other`, the same document of another table, says about it."""
        return StoredDocument(
            self.key,
            self.source or other.source,
            max(self.num_chunks, other.num_chunks),
            self.index_source or other.index_source,
            self.status or other.status,
            self.reason or other.reason,
        )


_INDEXED = (
    select(
        DOCUMENTS.c.id,
        DOCUMENTS.c.source,
        func.count(CHUNKS.c.id).label("num_chunks"),
        func.max(case((CHUNKS.c.ordinal == 0, CHUNKS.c.metadata))).label("metadata"),
    )
    .where(IS_INDEXED)
    .outerjoin(CHUNKS, IN_DOCUMENT)
    .group_by(DOCUMENTS.c.number, DOCUMENTS.c.id, DOCUMENTS.c.source)
)
_ADDED = select(
    *(DOCUMENTS.c[name] for name in (*DocumentKey._fields, "source", "metadata", "reason")),
    case((IS_SENT, STATUS), else_="").label("status"),
    select(func.count()).where(IN_DOCUMENT).scalar_subquery().label("num_chunks"),
).where(~IS_INDEXED, IS_SENT | HAS_CHUNKS)


@contextmanager
def open_store_ledgers(store: Any) -> Iterator[tuple[Ledger, Ledger]]:
    """Open the ledger of a KVStore, and the ledger with the index of its folder. They are one object unless the store's
    catalogue is a URL and the folder has an index.

    Loads no vectors and no embedder. A ledger whose file is missing is empty.
    """
    with ExitStack() as stack:
        ledger = folder = stack.enter_context(open_ledger(store, create=False))
        path = None if store.folder is None else store.folder / CATALOG_FILE
        if path is not None and catalog_location(store) != path and path.exists():
            of_folder = stack.enter_context(Ledger(path))
            folder = of_folder if of_folder.has_index() else ledger
        yield ledger, folder


def list_documents(
    ledger: Ledger,
    folder: Ledger,
    namespace: str | None = None,
    collection: str | None = None,
    *,
    after: tuple[str, str] = ("", ""),
    limit: int | None = None,
) -> list[StoredDocument]:
    """Return the documents of a store, sorted by collection and id.

    An index in another folder whose KV is in the store is one document, without an id; it is left out if `folder` has
    an index. namespace, collection: only documents of these; None: of all. after: a collection and an id; only
    documents behind these. limit: the largest number of documents; None: all. Give `limit` together with `namespace`,
    because `after` names none.
    """
    has_index = folder.has_index()
    indexed = _list_indexed(folder, namespace, collection) if has_index else []
    document_of = {each.key: each for each in indexed if each.key[:2] > after}
    for each in list_added(ledger, namespace, collection, after=after, limit=limit, with_indexes=not has_index):
        document_of[each.key] = document_of[each.key].joined_with(each) if each.key in document_of else each
    return [document_of[key] for key in sorted(document_of)][:limit]


def _list_indexed(folder: Ledger, namespace: str | None, collection: str | None) -> Iterator[StoredDocument]:
    name = DocumentKey(folder.collection, namespace=folder.index_facts().get("namespace", ""))
    if collection not in (None, name.collection) or namespace not in (None, name.namespace):
        return
    for row in folder._rows(_INDEXED):
        document_id, source = row.id.removeprefix(LANGCHAIN_SOURCE), row.source or row.id
        if document_id != row.id:
            source = str(json.loads(row.metadata or "{}").get("source") or "")
        yield StoredDocument(name._replace(id=document_id), source, row.num_chunks, row.id)


def list_added(
    ledger: Ledger,
    namespace: str | None = None,
    collection: str | None = None,
    *,
    after: tuple[str, str] = ("", ""),
    limit: int | None = None,
    with_indexes: bool = False,
) -> list[StoredDocument]:
    """Return the documents that frameworks and clients have added. Parameters: see `list_documents`."""
    columns = DOCUMENTS.c
    query = _ADDED.where(tuple_(columns.collection, columns.id) > after)
    if not with_indexes:
        query = query.where(columns.id != "")
    if namespace is not None:
        query = query.where(columns.namespace == namespace)
    if collection is not None:
        query = query.where(columns.collection == collection)
    documents = []
    for row in ledger._rows(query.order_by(columns.collection, columns.id, columns.namespace).limit(limit)):
        source = row.source or (json.loads(row.metadata).get("source") if row.metadata else "")
        key = DocumentKey(row.collection, row.id, row.namespace)
        documents.append(StoredDocument(key, str(source or ""), row.num_chunks, "", row.status, row.reason))
    return documents


def count_by_collection(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Return `num_documents` and `num_chunks` of each collection that frameworks and clients of a server have filled.

    A collection in a namespace is named "COLLECTION (namespace NAMESPACE)".
    """
    counts: dict[str, dict[str, int]] = {}
    for document in list_added(ledger):
        namespace = f" (namespace {document.key.namespace})" if document.key.namespace else ""
        of_collection = counts.setdefault(document.key.collection + namespace, {"num_documents": 0, "num_chunks": 0})
        of_collection["num_documents"] += 1
        of_collection["num_chunks"] += document.num_chunks
    return counts


def find_text_keys(document: StoredDocument, ledger: Ledger, folder: Ledger) -> set[bytes]:
    """Return the keys of a document's texts."""
    keys = ledger.text_keys_of(document.key)
    if document.index_source:
        keys |= folder.text_keys_of(DocumentKey(INDEX_MARK, document.index_source))
    return keys
