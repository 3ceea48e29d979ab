"""Functions that find stored documents by name, list them, and remove them with their KV.

Documents are in an index, or were added by `precompute_documents`, a vector store or a client of a server. Depends on
the index, the ledger and the DocumentEngine protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import DocumentFacts, DocumentKey, text_id, text_key
from ragblend.catalog.stored_documents import StoredDocument, find_text_keys
from ragblend.corpus.folder_scan import match_sources, resolve_source, source_path
from ragblend.engine.api import DocumentEngine, RemoteEngine
from ragblend.engine.deletions import UnfinishedDeletionError
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.errors import BackendUnreachableError, NotFoundError, UsageError
from ragblend.index import ChunkIndex
from ragblend.ingestion.deletion import delete_orphaned_kv, find_unfinished_removals, keep_only_texts
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION
from ragblend.prompt.token_index import WINDOW

_MAX_LISTED = 5  # documents in a message
_TEXT_CHARS = 60  # of a text that names a document
_DIGEST = re.compile("[0-9a-f]{32}")  # the id of a document without a name


class Removal(NamedTuple):
    """Numbers of chunks and of KV entries that were deleted."""

    num_chunks: int
    num_kv: int


def delete_precomputed(ids: Iterable[str], llm_or_engine: Any, *, collection: str = LANGCHAIN_COLLECTION) -> int:
    """Delete the KV of documents that `precompute_documents` stored under these ids. Return the number of entries.

    KV stays if its text is also in another document. Unknown ids are ignored. Raises BackendUnreachableError if a
    remote tier did not answer.
    """
    engine: DocumentEngine = getattr(llm_or_engine, "engine", llm_or_engine)
    ids = list(filter(None, ids))
    if isinstance(engine, RemoteEngine):
        return int(engine.remove_documents(collection, ids))
    with open_ledger(engine.store) as ledger:
        return _delete_added([DocumentKey(collection, each, engine.namespace) for each in ids], engine, ledger)


def _delete_added(documents: Sequence[DocumentKey], engine: DocumentEngine, ledger: Ledger) -> int:
    """Delete the texts of documents, and the KV that no other document needs. Return the number of entries."""
    try:
        return keep_only_texts({each: [] for each in documents}, engine, ledger)
    finally:
        ledger.set_facts({each: DocumentFacts() for each in documents if any(ledger.facts_of(each))})


def find_indexed_documents(name: str, index: ChunkIndex, store: KVStore | None = None) -> list[str]:
    """Return the sources of the indexed documents that `name` selects: a file, folder or record. See `match_sources`.

    Removed documents whose KV is not completely deleted from `store` are among them. Raises NotFoundError if no
    document matches.
    """
    file_of_source = [(source, file) for file, sources in index.content_hashes_by_file().items() for source in sources]
    pending = [(source, source_path(source)) for source in sorted(find_unfinished_removals(index, store))]
    sources = match_sources(name, file_of_source) + match_sources(name, pending)
    if not sources:
        if not index.is_saved:  # a removal was killed before `save`
            index.save()
        raise NotFoundError(f"the index has no document {name!r}, and none below it; list them: ragblend documents")
    return list(dict.fromkeys(sources))


def find_unfinished_documents(name: str, sources: Iterable[str]) -> list[str]:
    """Return those of `sources` that `name` names by id, COLLECTION/ID or collection: removed documents of frameworks
    whose KV is not completely deleted.

    sources: of recorded deletions, see `Ledger.find_pending_sources`.
    """
    return sorted(each for each in sources if f"/{each}".endswith(f"/{name}") or each.startswith(f"{name}/"))


def find_stored_documents(name: str, documents: Sequence[StoredDocument], namespace: str) -> list[StoredDocument]:
    """Return those of `documents` that `name` names: an id, COLLECTION/ID, a collection, a source, or a folder.

    The forms are tried in this order, first in `namespace`, then in all others. A source is a file, with or without its
    page or record, or an address. Returns [] for an unknown name. Raises UsageError for an id in several collections,
    and for a name in several other namespaces.
    """
    if not name.strip():
        raise UsageError("the name is empty; pass an id, a collection or a source, as `ragblend documents` lists them")
    if matching := _match_documents(name, [each for each in documents if each.key.namespace == namespace]):
        return matching
    matching = _match_documents(name, [each for each in documents if each.key.namespace != namespace])
    if len(namespaces := {each.key.namespace for each in matching}) > 1:
        listed = ", ".join(map(repr, sorted(namespaces)))
        raise UsageError(f"{name!r} is in the namespaces {listed}; choose one: set RAGBLEND_NAMESPACE")
    return matching


def _match_documents(name: str, documents: Sequence[StoredDocument]) -> list[StoredDocument]:
    by_id = [each for each in documents if each.key.id == name]
    if exact := [each for each in documents if name == f"{each.key.collection}/{each.key.id}"]:
        return exact
    if len(by_id) > 1:
        collections = ", ".join(repr(each.key.collection) for each in by_id)
        names = f"{name!r} is a document in the collections {collections}"
        raise UsageError(f"{names}; name one: COLLECTION/{name}")
    for matching in (by_id, [each for each in documents if each.key.collection == name]):
        if matching:
            return matching
    if matching := [each for each in documents if each.source == name]:
        return matching
    files = [_absolute_source(each.source or each.index_source) for each in documents]
    named_files = [(each.index_source or file, file) for each, file in zip(documents, files, strict=True)]
    matched = {*match_sources(name, named_files)}
    return [each for each, (source, _) in zip(documents, named_files, strict=True) if source in matched]


def _absolute_source(source: str) -> str:
    """Return the absolute path of a source, which a framework may have given relative to the working folder."""
    with suppress(UsageError):
        return source if source.startswith("/") or not source else resolve_source(source)
    return source


def find_text_documents(
    text: str,
    documents: Sequence[StoredDocument],
    ledger: Ledger,
    folder: Ledger,
    namespace: str,
) -> list[StoredDocument]:
    """Return those of `documents` that only this text identifies; [] if there are none and the text is unknown.

    If no document has the text, but an engine or a prompt stored it as a chunk, it becomes a document of `namespace`.
    ledger, folder: see `catalog.stored_documents`. Raises UsageError for a text that only other documents have.
    """
    if identified := [each for each in documents if each.key.id == text_id(text)]:
        return identified
    if owners := [each for each in documents if text_key(text) in find_text_keys(each, ledger, folder)]:
        listed = ", ".join(f"{each.key.collection}/{each.key.id}" for each in owners[:_MAX_LISTED])
        more = f" and {len(owners) - _MAX_LISTED} more" if len(owners) > _MAX_LISTED else ""
        raise UsageError(f"the text is a chunk of {listed}{more}; remove that")
    if namespace not in {each for _, each in ledger.tokenizers_and_namespaces_of(text)}:
        return []
    key = DocumentKey(LANGCHAIN_COLLECTION, text_id(text), namespace)
    ledger.add_texts({key: {text: 0}})
    return [StoredDocument(key, "", 1)]


def remove_stored_documents(
    documents: Iterable[StoredDocument],
    engine: DocumentEngine | None,
    index: ChunkIndex | None,
    ledger: Ledger | None = None,
) -> Removal:
    """Delete documents from the index and from the store's ledger, with their KV and texts.

    KV stays if its text is also in another document. A vector store of a framework is not changed, except ragblend's
    index. engine: None if no KV is stored. index: None if no document is in it. ledger: the open ledger of the engine's
    store; None: it is opened. Raises BackendUnreachableError if a remote tier did not answer; see
    `remove_indexed_documents`.
    """
    documents = list(documents)
    removal = Removal(0, 0)
    sources = [each.index_source for each in documents if each.index_source]
    if sources:
        assert index is not None
        removal = remove_indexed_documents(sources, engine, index)
    added = [each for each in documents if not each.index_source or each.index_source != each.key.id]
    if not added or engine is None:
        return removal
    with nullcontext(ledger) if ledger is not None else open_ledger(engine.store) as ledger:
        num_removed = _delete_added([each.key for each in added], engine, ledger)
        for collection, group in groupby(sorted(each.key for each in added), lambda key: key.collection):
            ledger.end_removal(engine.namespace, collection, [key.id for key in group])
    num_chunks = sum(each.num_chunks for each in added if not each.index_source)
    return Removal(removal.num_chunks + num_chunks, removal.num_kv + num_removed)


def remove_indexed_documents(sources: Iterable[str], engine: DocumentEngine | None, index: ChunkIndex) -> Removal:
    """Delete documents from the index with their KV and registered texts. Texts of other documents are kept.

    engine: None if no KV is stored; the next ingestion then looks for KV of the removed texts.
    After a kill, the same call finishes the removal. A document whose file still exists is added again by the next
    ingestion of the file or its folder. Raises NotFoundError for an unknown document. Raises BackendUnreachableError if
    a remote tier did not answer; the documents are then deleted on this machine, and the next removal or ingestion
    deletes their KV from the remote tier.
    """
    store = None if engine is None or isinstance(engine, RemoteEngine) else engine.store
    indexed, begun = set(index.sources()), find_unfinished_removals(index, store)
    present = [source for source in sources if source in indexed or source not in begun]
    num_chunks = sum(index.remove_document(source) for source in present)
    unfinished, num_removed = None, 0
    if engine is not None:
        try:
            num_removed = delete_orphaned_kv(index, engine)  # before saving, which fails on a full disk
        except UnfinishedDeletionError as error:
            unfinished = error
    if not index.is_saved:
        index.save()
    if unfinished is not None:
        raise BackendUnreachableError(
            f"the documents were removed here, but not in the remote tier ({unfinished}); repeat the command, or run "
            "the next `ragblend ingest` or `ragblend remove` with that tier"
        ) from unfinished
    return Removal(num_chunks, num_removed)


@dataclass(frozen=True)
class DocumentDetails:
    """A stored document, as `ragblend documents` and `GET /v1/ragblend/documents` list it.

    - source: file or address that it came from; "" if unknown. num_chunks: number of its chunks. kv_bytes: bytes of
      their KV on this machine's disk, for all models; documents with equal chunks share KV.
    - state: "stored" if KV of every chunk is on the disk, "partial" for some chunks, "without_kv" for none. "pending"
      or "failed" for a document that a client has sent to a server, with the `reason`.
    - reason: why it failed, what did not reach the remote tier, or that it has chunks too short for prompts to reuse.
    - text: the beginning of a chunk of a document whose id is a digest, because it has no name; "" for others.
    """

    collection: str
    id: str
    namespace: str
    source: str
    num_chunks: int
    kv_bytes: int
    state: Literal["stored", "partial", "without_kv", "pending", "failed"]
    reason: str
    text: str


def describe_documents(
    documents: Iterable[StoredDocument], disk: DiskStore | None, ledger: Ledger, folder: Ledger
) -> tuple[list[DocumentDetails], set[str]]:
    """Return the details of documents that `list_documents` returned, and the keys of their entries on the disk.

    Loads no model and no tokenizer.
    """
    with_keys = [(each, find_text_keys(each, ledger, folder)) for each in documents]
    wanted: dict[str, set[bytes]] = {}
    for each, keys in with_keys:
        wanted.setdefault(each.key.namespace, set()).update(keys)
    sizes_of: dict[tuple[str, bytes], dict[str, int]] = {}
    short: dict[str, set[bytes]] = {}
    for namespace, keys in wanted.items():
        hashed = (each for each in ledger.hash_token_ids(keys) if each.namespace == namespace)
        short[namespace] = {each.text_key for each in hashed if each.num_ids < WINDOW}
        for key, entries in ledger.entries_of_texts(keys, namespace).items():
            sizes = {entry: disk.file_bytes(entry) for entry in entries} if disk is not None else {}
            sizes_of[namespace, key] = {entry: nbytes for entry, nbytes in sizes.items() if nbytes}
    described: list[DocumentDetails] = []
    for each, keys in with_keys:
        collection, document_id, namespace = each.key
        sizes_of_texts = [sizes_of[namespace, key] for key in keys]
        num_stored = sum(map(bool, sizes_of_texts))
        state = "stored" if num_stored == len(keys) else "partial" if num_stored else "without_kv"
        state = each.status if each.status in ("pending", "failed") else state
        kv_bytes = sum({entry: nbytes for sizes in sizes_of_texts for entry, nbytes in sizes.items()}.values())
        text = ledger.text_of(min(keys))[:_TEXT_CHARS] if keys and _DIGEST.fullmatch(document_id) else ""
        reason = each.reason
        if not reason and (num_short := len(short[namespace] & keys)):
            reason = f"{num_short} of {len(keys)} chunks have fewer than {WINDOW} tokens; prompts do not reuse them"
        details: Any = (each.source, each.num_chunks, kv_bytes, state, reason, text)
        described.append(DocumentDetails(collection, document_id, namespace, *details))
    return described, {entry for sizes in sizes_of.values() for entry in sizes}
