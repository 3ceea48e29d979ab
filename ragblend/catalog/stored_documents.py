"""The documents of a store by name: those of its index, and those that frameworks and clients of a server have added.

Depends on rows, not on KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from sqlalchemy import case, func, select, tuple_

from ragblend.catalog.database import STREAMED
from ragblend.catalog.documents import IndexedDocuments
from ragblend.catalog.index_rows import LANGCHAIN_SOURCE
from ragblend.catalog.registry import ChunkRegistry, catalog_location, hash_ids, open_registry
from ragblend.catalog.schema import (
    CHUNKS,
    DOCUMENTS,
    ENTRIES,
    INDEX_MARK,
    IS_INDEXED,
    IS_SENT,
    TEXTS,
    TOKEN_IDS,
    DocumentKey,
    equals_parameters,
    is_in_values,
    split_into_batches,
)
from ragblend.catalog.sent_documents import STATUS
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.token_index import WINDOW


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


_ID_BYTES = 4  # of one token id
_KEYS_OF = (
    select(CHUNKS.c.key)
    .join(DOCUMENTS, DOCUMENTS.c.number == CHUNKS.c.document)
    .where(equals_parameters(DOCUMENTS, *DocumentKey._fields))
)
_NUM_CHUNKS = select(func.count()).where(CHUNKS.c.document == DOCUMENTS.c.number).scalar_subquery()
_STATUS = (case((IS_SENT, STATUS), else_="").label("status"), DOCUMENTS.c.reason)
_FIRST_METADATA = func.max(case((CHUNKS.c.ordinal == 0, CHUNKS.c.metadata))).label("metadata")
_INDEXED = (
    select(DOCUMENTS.c.id, DOCUMENTS.c.source, func.count(CHUNKS.c.id).label("num_chunks"), _FIRST_METADATA)
    .where(IS_INDEXED)
    .outerjoin(CHUNKS, CHUNKS.c.document == DOCUMENTS.c.number)
    .group_by(DOCUMENTS.c.number, DOCUMENTS.c.id, DOCUMENTS.c.source)
)
_IDS_OF_TEXTS = select(TOKEN_IDS.c.key, TOKEN_IDS.c.ids).where(
    is_in_values(TOKEN_IDS.c.key), equals_parameters(TOKEN_IDS, "namespace")
)
_ENTRIES_OF_IDS = select(ENTRIES.c.ids_hash, ENTRIES.c.key).where(
    is_in_values(ENTRIES.c.ids_hash), equals_parameters(ENTRIES, "namespace")
)


def list_documents(
    registry: ChunkRegistry,
    index: IndexedDocuments | None,
    namespace: str | None = None,
    collection: str | None = None,
    *,
    after: tuple[str, str] = ("", ""),
    limit: int | None = None,
) -> list[StoredDocument]:
    """Return the documents of a store, sorted by collection and id.

    index: the documents of the index in the store's folder. None: it has no index; an index in another folder whose KV
    is in the store is then one document, without an id. namespace, collection: only
    documents of these; None: of all. after: a collection and an id; only documents behind these. limit: the largest
    number of documents; None: all. Give `limit` together with `namespace`, because `after` names none.
    """
    found: dict[DocumentKey, StoredDocument] = {}
    for each in (
        *_list_indexed(index, namespace, collection, after),
        *_list_added(registry, namespace, collection, after, limit, with_indexes=index is None),
    ):
        found[each.key] = found[each.key].joined_with(each) if each.key in found else each
    return [found[key] for key in sorted(found)][:limit]


def _list_indexed(
    index: IndexedDocuments | None, namespace: str | None, collection: str | None, after: tuple[str, str]
) -> list[StoredDocument]:
    if index is None or collection not in (None, index.collection):
        return []
    own = index.read_metadata().get("namespace", "")
    if namespace not in (None, own):
        return []
    found = []
    for row in index._rows(_INDEXED):
        key = DocumentKey(index.collection, row.id.removeprefix(LANGCHAIN_SOURCE), own)
        source = row.source or row.id
        if key.id != row.id:
            source = str(json.loads(row.metadata or "{}").get("source") or "")
        if key[:2] > after:
            found.append(StoredDocument(key, source, row.num_chunks, row.id))
    return found


def _list_added(
    registry: ChunkRegistry,
    namespace: str | None,
    collection: str | None,
    after: tuple[str, str],
    limit: int | None,
    *,
    with_indexes: bool,
) -> list[StoredDocument]:
    columns = DOCUMENTS.c
    chosen = [tuple_(columns.collection, columns.id) > after, ~IS_INDEXED, IS_SENT | (_NUM_CHUNKS > 0)]
    chosen += [] if with_indexes else [columns.id != ""]
    chosen += [columns.namespace == namespace] if namespace is not None else []
    chosen += [columns.collection == collection] if collection is not None else []
    names = [columns[name] for name in (*DocumentKey._fields, "source", "metadata")]
    query = select(*names, *_STATUS, _NUM_CHUNKS.label("num_chunks")).where(*chosen)
    found = []
    for row in registry._rows(query.order_by(columns.collection, columns.id, columns.namespace).limit(limit)):
        source = row.source or (json.loads(row.metadata).get("source") if row.metadata else "")
        key = DocumentKey(row.collection, row.id, row.namespace)
        found.append(StoredDocument(key, str(source or ""), row.num_chunks, "", row.status, row.reason))
    return found


def count_by_collection(registry: ChunkRegistry) -> dict[str, dict[str, int]]:
    """Return `num_documents` and `num_chunks` of each collection that frameworks and clients of a server have filled.

    A collection in a namespace is named "COLLECTION (namespace NAMESPACE)".
    """
    counts: dict[str, dict[str, int]] = {}
    for document in filter(lambda each: each.key.id, list_documents(registry, None)):
        namespace = f" (namespace {document.key.namespace})" if document.key.namespace else ""
        found = counts.setdefault(document.key.collection + namespace, {"num_documents": 0, "num_chunks": 0})
        found["num_documents"] += 1
        found["num_chunks"] += document.num_chunks
    return counts


def ids_beginning_with(registry: ChunkRegistry, prefix: str, collection: str, namespace: str) -> list[str]:
    """Return the ids of a collection's documents with chunks that begin with `prefix`, which is not empty."""
    columns = DOCUMENTS.c
    behind = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    chosen = (
        columns.namespace == namespace,
        columns.collection == collection,
        columns.id >= prefix,
        columns.id < behind,
        _NUM_CHUNKS > 0,
    )
    return [row.id for row in registry._rows(select(columns.id).where(*chosen).order_by(columns.id))]


def find_text_keys(document: StoredDocument, registry: ChunkRegistry, index: IndexedDocuments | None) -> set[bytes]:
    """Return the keys of a document's texts."""
    found = {row.key for row in registry._rows(_KEYS_OF, **document.key.parameters())}
    if index is not None and document.index_source:
        key = DocumentKey(INDEX_MARK, document.index_source)
        found.update(row.key for row in index._rows(_KEYS_OF, **key.parameters()))
    return found


def find_entries(registry: ChunkRegistry, keys: Sequence[bytes], namespace: str) -> list[tuple[bytes, list[str]]]:
    """Return, for each text key, the keys of the entries of the text that a namespace has, for all models."""
    hashes: dict[bytes, set[bytes]] = {}
    for some in split_into_batches(keys):
        for row in registry._rows(_IDS_OF_TEXTS, values=some, b_namespace=namespace):
            hashes.setdefault(row.key, set()).add(hash_ids(row.ids))
    entries: dict[bytes, list[str]] = {}
    for some in split_into_batches({each for found in hashes.values() for each in found}):
        for row in registry._rows(_ENTRIES_OF_IDS, values=some, b_namespace=namespace):
            entries.setdefault(row.ids_hash, []).append(row.key)
    return [(key, [entry for each in hashes.get(key, ()) for entry in entries.get(each, ())]) for key in keys]


def find_short_texts(registry: ChunkRegistry, keys: Sequence[bytes], namespace: str) -> set[bytes]:
    """Return those of the text keys whose token ids, by a tokenizer of the namespace, are too few for prompts to reuse
    the text."""
    is_short = func.length(TOKEN_IDS.c.ids) < WINDOW * _ID_BYTES
    query = _IDS_OF_TEXTS.with_only_columns(TOKEN_IDS.c.key).where(is_short)
    batches = split_into_batches(keys)
    return {row.key for some in batches for row in registry._rows(query, values=some, b_namespace=namespace)}


@contextmanager
def open_store_documents(store: Any) -> Iterator[tuple[ChunkRegistry, IndexedDocuments | None]]:
    """Open the registry of a KVStore and the documents of the index in its folder; None if it has no index.

    Loads no vectors and no embedder. A registry whose file is missing is empty.
    """
    with ExitStack() as stack:
        registry = own = stack.enter_context(open_registry(store, create=False))
        if store.folder is None:
            yield registry, None
            return
        path = store.folder / CATALOG_FILE
        if catalog_location(store) != path and path.exists():
            own = stack.enter_context(ChunkRegistry(path))
        index = IndexedDocuments(own)
        yield registry, index if index.exists() else None


def hash_token_ids(registry: ChunkRegistry, keys: AbstractSet[bytes]) -> dict[bytes, set[tuple[str, bytes]]]:
    """Return the namespace and the hash of the token ids of each text, by text key, for all tokenizers and namespaces.

    keys: the keys of the texts.
    """
    found: dict[bytes, set[tuple[str, bytes]]] = {}
    query = select(TOKEN_IDS.c.key, TOKEN_IDS.c.namespace, TOKEN_IDS.c.ids)
    with registry._transaction("DEFERRED") as connection:
        for row in connection.execute(query, execution_options=STREAMED):
            if row.key in keys:
                found.setdefault(row.key, set()).add((row.namespace, hash_ids(row.ids)))
    return found


def live_text_keys(registry: ChunkRegistry, index: IndexedDocuments | None) -> set[bytes]:
    """Return the keys of the texts that documents have. index: the documents of the index in the store's folder."""
    found = {row.key for row in registry._rows(select(TEXTS.c.key))}
    if index is not None and index.registry.key != registry.key:
        found.update(row.key for row in index._rows(select(TEXTS.c.key)))
    return found
