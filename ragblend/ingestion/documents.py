"""Functions that find stored documents by name, remove them with their KV, and pin them.

Documents are in an index, or were added by `precompute_documents`, a vector store or a client of a server. Depends on
the index, the registry and the DocumentEngine protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ragblend.catalog.registry import catalog_location, open_registry
from ragblend.catalog.schema import DocumentKey
from ragblend.catalog.sent_documents import SentDocumentTable
from ragblend.corpus.folder_scan import match_sources, source_path
from ragblend.engine.api import DocumentEngine
from ragblend.engine.store.base import KVStore
from ragblend.errors import BackendUnreachableError, CorruptError, NotFoundError, UsageError
from ragblend.index import ChunkIndex
from ragblend.ingestion.contexts import all_variants, chunk_variants
from ragblend.ingestion.deletion import delete_orphaned_kv, delete_texts_except, find_pending_sources
from ragblend.ingestion.server_documents import LANGCHAIN_COLLECTION, is_document_server
from ragblend.prompt.types import Chunk


class Removal(NamedTuple):
    """Numbers of chunks and of KV entries that were deleted.

    `num_other_kv` counts deleted entries of other models, and of other chunks that had a deleted chunk in their
    context. The next ingestion stores the KV of these other chunks again. `num_other_kv` is 0 if a server deletes, and
    if the call finishes an earlier removal that was killed.
    """

    num_chunks: int
    num_kv: int
    num_other_kv: int = 0


def delete_precomputed(ids: Iterable[str], llm_or_engine: Any, *, collection: str = LANGCHAIN_COLLECTION) -> int:
    """Delete the KV of documents that `precompute_documents` stored under these ids. Return the number of entries.

    KV stays if its text is also in another document. Unknown ids are ignored. Raises BackendUnreachableError if a
    remote tier did not answer.
    """
    engine: DocumentEngine = getattr(llm_or_engine, "engine", llm_or_engine)
    ids = list(filter(None, ids))
    named = {DocumentKey(collection, each, engine.namespace): list[str]() for each in ids}
    if is_document_server(engine):
        return int(engine.remove_documents(collection, ids))  # type: ignore[attr-defined]
    registry = open_registry(engine.store)
    num_removed, problem = delete_texts_except(named, engine, registry)
    for name in named:
        if registry.version_of(name):
            registry.set_version(name, "")
    if problem:
        raise BackendUnreachableError(problem)
    return num_removed


def find_indexed_documents(name: str, index: ChunkIndex, *, include_unfinished: bool = False) -> list[str]:
    """Return the sources of the indexed documents that `name` selects: a file, folder or record. See `match_sources`.

    include_unfinished: also return removed documents whose KV is not completely deleted. Raises NotFoundError if no
    document matches.
    """
    known = [(source, file) for file, sources in index.content_hashes_by_file().items() for source in sources]
    found = match_sources(name, known)
    if include_unfinished:
        found += match_sources(name, [(source, source_path(source)) for source in sorted(find_pending_sources(index))])
    if not found:
        if include_unfinished and not index.is_saved:  # a removal was killed before `save`
            index.save()
        raise NotFoundError(f"the index has no document {name!r}, and none below it; list them: ragblend stats")
    return list(dict.fromkeys(found))


def find_added_documents(id_or_collection: str, store: KVStore, namespace: str) -> list[DocumentKey]:
    """Return the documents that `id_or_collection` names: an id, COLLECTION/ID, or a collection.

    An id has precedence over a collection of the same name. Searches the documents that `precompute_documents`, a
    vector store or a client of a server added in `namespace`, not the documents of ingested folders. Returns [] for an
    unknown name. Raises UsageError for an id in several collections.
    """
    with open_registry(store, create=False) as registry:
        known = [each for each in registry.documents() if each.id and each.namespace == namespace]
    if exact := [each for each in known if id_or_collection == f"{each.collection}/{each.id}"]:
        return exact
    by_id = [each for each in known if each.id == id_or_collection]
    if len(by_id) > 1:
        collections = ", ".join(repr(each.collection) for each in by_id)
        names = f"{id_or_collection!r} is a document in the collections {collections}"
        raise UsageError(f"{names}; name one: COLLECTION/{id_or_collection}")
    return by_id or [each for each in known if each.collection == id_or_collection]


def remove_added_documents(documents: Iterable[DocumentKey], engine: DocumentEngine) -> Removal:
    """Delete the texts and KV of documents that `find_added_documents` returned. Vector stores are not changed.

    KV stays if its text is also in another document. Raises BackendUnreachableError if a remote tier did not answer.
    """
    ids_of: dict[str, list[str]] = {}
    for document in documents:
        ids_of.setdefault(document.collection, []).append(document.id)
    num_removed = 0
    with open_registry(engine.store) as registry:
        texts = [text for document in documents for text in registry.texts_of(document)]
    own = _stored_keys(map(Chunk, texts), engine)
    for collection, ids in ids_of.items():
        num_removed += delete_precomputed(ids, engine, collection=collection)
        if (place := catalog_location(engine.store)) is not None:
            with SentDocumentTable(place) as sent:
                sent.remove(engine.namespace, collection, ids)
    return Removal(len(texts), num_removed, num_removed - len(own) + sum(map(engine.store.contains, own)))


def _stored_keys(chunks: Iterable[Chunk], engine: DocumentEngine) -> set[str]:
    """Return the keys of the stored KV of `chunks`, in all variants."""
    keys = {engine.key(variant) for chunk in chunks for variant in all_variants(chunk.text)}
    return set(filter(engine.store.contains, keys))


def remove_documents(sources: Iterable[str], engine: DocumentEngine, index: ChunkIndex) -> Removal:
    """Delete documents from the index with their pins, KV and registered texts. Texts of other documents are kept.

    After a kill, the same call finishes the removal. A document whose file still exists is added again by the next
    ingestion of the file or its folder. Raises NotFoundError for an unknown document. Raises BackendUnreachableError if
    a remote tier did not answer; the documents are then deleted on this machine, and the next removal or ingestion
    deletes their KV from the remote tier.
    """
    known, begun = set(index.sources()), find_pending_sources(index)
    given = [source for source in sources if source in known or source not in begun]
    own: set[str] = set()
    if not begun and not is_document_server(engine):
        with suppress(CorruptError):  # a document with damaged rows is removed without this count
            own = _stored_keys((chunk for source in given for chunk in index.chunks(source)), engine)
    num_chunks = sum(index.remove_document(source) for source in given)
    num_removed, problem = delete_orphaned_kv(index, engine)  # before saving, which fails on a full disk
    if not index.is_saved:
        index.save()
    if problem:
        raise BackendUnreachableError(
            f"the documents were removed here, but not in the remote tier ({problem}); repeat the command, or run the "
            "next `ragblend ingest` or `ragblend remove` with that tier"
        )
    num_kept = sum(map(engine.store.contains, own))  # entries of texts that other documents have
    return Removal(num_chunks, num_removed, num_removed - len(own) + num_kept if own else 0)


class PinCounts(NamedTuple):
    """Numbers of a pinned document's chunks: `num_chunks` in all, `num_stored` with stored KV."""

    num_chunks: int
    num_stored: int


def pin_document(source: str, engine: DocumentEngine, index: ChunkIndex) -> PinCounts:
    """Exempt a document's KV on disk from eviction, also after restarts. Raises NotFoundError for an unknown source."""
    chunks = list(index.chunks(source))
    if not chunks:
        raise NotFoundError(f"the index has no document {source!r}; list them: ragblend stats")
    if (disk := engine.store.disk_tier) is not None:
        disk.pin(source, [engine.key(chunk) for chunk in chunk_variants(chunks, engine.context)])
    return PinCounts(len(chunks), sum(engine.is_stored(chunk) for chunk in chunks))


def refresh_pins(sources: Sequence[str], engine: DocumentEngine, index: ChunkIndex) -> None:
    """Pin the current chunks of pinned documents that were ingested again."""
    disk = engine.store.disk_tier
    pinned = disk.pins() if disk is not None else {}
    for source in sources:
        if source in pinned:
            pin_document(source, engine, index)
