"""Deletion of removed texts: their KV in every tier, KV with such a text in its context, registry rows and pins.

The catalogue records the texts that documents of an index have lost (see `catalog.documents`). `delete_orphaned_kv`
finds the entries of these texts, records the entries in place of the texts, and deletes the entries. After a kill, the
next call continues. `delete_texts_except` records the entries of other documents in the transaction that removes their
texts.
Depends on the index, engines and stores, not on files or frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from ragblend.catalog.documents import IndexedDocuments
from ragblend.catalog.index_rows import OrphanedTexts, PendingDeletion
from ragblend.catalog.known_chunks import open_known_chunks
from ragblend.catalog.registry import ChunkRegistry
from ragblend.catalog.schema import DocumentKey, text_key
from ragblend.engine.api import DocumentEngine, Engine, RemoteEngine
from ragblend.engine.entry_records import record_entry
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError
from ragblend.index import ChunkIndex
from ragblend.ingestion.contexts import all_variants
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION
from ragblend.prompt.types import Chunk

Ids = tuple[int, ...]
Reason = TypeVar("Reason")

NO_TEXT = ""  # as the cause of a deletion: the entry is deleted in any case
LOCAL = ""  # `PendingDeletion.place` of the local tiers
_BATCH = 64  # entries per transaction, during which no process can add documents


def delete_orphaned_kv(index: ChunkIndex, engine: DocumentEngine) -> tuple[int, str]:
    """Delete the KV, registry rows and pins of texts that were removed from the index.

    A text is kept if it was added again. It is also kept if it occurs in a document that was added through LangChain,
    LlamaIndex or a server. Return the number of deleted entries and a problem: the error message if a remote tier did
    not answer, else "". The next call with that remote tier deletes the tier's remaining entries.
    """
    disk = engine.store.find_tier(DiskStore)
    if disk is not None:
        disk.delete_temporary_files()
    orphaned = index.orphaned_texts()
    if not orphaned.last_number and not index.pending_deletions():
        return 0, ""
    with index.registry_for(engine.store) as registry:
        if isinstance(engine, RemoteEngine):  # a server deletes replaced texts when it receives the new version
            collection = index.collection or LANGCHAIN_COLLECTION
            num_removed: int = engine.remove_documents(collection, orphaned.sources)
            index.schedule_deletions((), orphaned)
            return num_removed, ""
        if orphaned.last_number:
            _schedule_deletions(orphaned, index, engine, registry)
        index.registry.truncate_log()
        registry.truncate_log()
        return _run_deletions(index, engine, registry)


def find_pending_sources(index: ChunkIndex) -> set[str]:
    """Return the sources of removed documents whose KV is not completely deleted."""
    return {*index.orphaned_texts().sources, *(entry.source for entry in index.pending_deletions())}


def _schedule_deletions(
    orphaned: OrphanedTexts, index: ChunkIndex, engine: DocumentEngine, registry: ChunkRegistry
) -> None:
    """Release the texts in the registry, and record their entries in place of the texts."""
    released = registry.remove_from_document(orphaned.texts, DocumentKey(index.collection))
    if (disk := engine.store.find_tier(DiskStore)) is not None:
        for source in orphaned.sources:
            disk.unpin(source)
    text_of = keys_to_delete(released, engine, registry, everywhere=True)
    pending = _pending_deletions(text_of, engine, orphaned.source_of)
    if released and engine.context == "similar":
        similar = (engine.key(Chunk(text, context="similar")) for text in index.texts())
        unseen = _find_unseen_remote_keys(similar, engine, registry)
        pending += [PendingDeletion(key, place, "", b"") for key in unseen for place in _places(engine)[1:]]
    with index.write_transaction():  # also a transaction of the registry if they share a catalogue
        registry.remove_stored_entries({entry.key for entry in pending})
        index.schedule_deletions(pending, orphaned)


def _pending_deletions(
    text_of: Mapping[str, str], engine: DocumentEngine, source_of: Mapping[str, str]
) -> list[PendingDeletion]:
    """Return the deletions of entries in all tiers. text_of: the removed text that causes each deletion, by key;
    NO_TEXT to delete the entry in any case. source_of: the sources of texts.

    Only an entry of the text alone is kept if the text is added again. Another text of a similar variant may have been
    removed, too; the next ingestion computes the variant again.
    """
    pending = []
    for key, text in text_of.items():
        cause = text_key(text if key == engine.key(Chunk(text, context="none")) else NO_TEXT)
        pending += [PendingDeletion(key, place, source_of.get(text, ""), cause) for place in _places(engine)]
    return pending


def _places(engine: DocumentEngine) -> list[str]:
    """Return the tiers from which entries are deleted (`PendingDeletion.place`), the local ones first."""
    return [LOCAL, *(tier.values.url for tier in engine.store.find_tiers(RemoteStore))]


def _find_unseen_remote_keys(keys: Iterable[str], engine: DocumentEngine, registry: ChunkRegistry) -> list[str]:
    """Return the keys of similar variants that no local tier has, but a remote tier may have from other machines.

    Without a shared catalogue, this machine does not know the texts in the context of such a variant. When any text is
    removed, all these variants are deleted from the remote tiers, and the next ingestion computes them again.
    """
    if registry.is_shared or not engine.store.find_tiers(RemoteStore):
        return []
    here = [tier for tier in engine.store.tiers if not tier.is_remote]
    return [key for key in sorted(set(keys)) if not any(tier.contains(key) for tier in here)]


def _run_deletions(index: IndexedDocuments, engine: DocumentEngine, registry: ChunkRegistry) -> tuple[int, str]:
    """Delete the recorded entries, first from the local tiers, which must not wait for an unreachable remote tier.

    Return the number of deleted entries and a problem: the error message if a remote tier did not answer, else "".
    """
    recorded, store = index.pending_deletions(), engine.store
    deleted: set[str] = set()
    problem = ""
    for place in _places(engine):
        entries = [entry for entry in recorded if entry.place == place]
        for start in range(0, len(entries), _BATCH):
            with index.write_transaction(), registry.block_additions() as is_registered:
                batch = index.current_deletions(entries[start : start + _BATCH])
                pending = [entry for entry in batch if not index.has_chunk_with(entry.text_key)]
                unwanted = [entry.key for entry in pending if entry.text_key and not is_registered(entry.text_key)]
                try:
                    if place == LOCAL:
                        deleted.update(filter(store.delete_local, unwanted))
                    else:
                        deleted |= store.delete_everywhere(unwanted)
                    deleted.update(entry.key for entry in pending if not entry.text_key and store.delete(entry.key))
                except BackendUnreachableError as error:
                    problem = str(error)
                else:
                    index.clear_deletions(batch)
                    registry.set_variants_stored([entry.key for entry in pending], is_stored=False)
                if place == LOCAL:
                    registry.remove_entry_chunks(unwanted)  # including entries that were evicted earlier
            if problem:
                break
    return len(deleted), problem


def delete_stale_kv(
    chunks: Collection[Chunk], engine: Engine, registry: ChunkRegistry, index: ChunkIndex | None = None
) -> int:
    """Delete the KV of those `chunks` whose text or `context_texts` another process removed during their prefill.

    Call this after the chunks were stored. The other process could not delete KV that was not stored yet. `index`: the
    index that contains the `context_texts`; None: `registry` contains them. Return the number of deleted entries. If a
    remote tier does not answer, a later deletion removes the entries of that tier.
    """
    removed = set(registry.find_unknown_texts(chunk.text for chunk in chunks))
    context_texts = (text for chunk in chunks for text in chunk.context_texts)
    removed.update((registry if index is None else index).find_unknown_texts(context_texts))
    text_of: dict[str, str] = {}
    for chunk in chunks:
        if lost := removed.intersection((chunk.text, *chunk.context_texts)):
            text_of[engine.key(chunk)] = min(lost)
    for text in removed.intersection(chunk.text for chunk in chunks):
        registry.remove_ids(text, engine.renderer.fingerprint, engine.namespace)
    if not text_of:
        return 0
    _schedule_entries(text_of, engine, registry)
    return _run_deletions(IndexedDocuments(registry), engine, registry)[0]


def delete_unrecorded_variants(engine: Engine, registry: ChunkRegistry, variants: Collection[Chunk]) -> None:
    """Delete the stored entries of similar `variants` whose own text or a text of their context was removed.

    variants: the similar variants that the registry does not record as stored. The store may contain their entries
    nevertheless. One cause is a process that stores them now. The other is a process that was killed before it called
    `delete_stale_kv`.
    """
    keys = [engine.key(chunk) for chunk in variants]
    stored = [key for key, is_there in zip(keys, engine.store.contains_many(keys), strict=True) if is_there]
    headers = [kv.header for key in stored if (kv := engine.store.get(key)) is not None]
    known = open_known_chunks(registry, engine.renderer.fingerprint, engine.namespace)

    def reason_of(ids: Ids) -> str | None:
        return None if any(run.chunk_ids == ids for run in known.find_runs(ids)) else ""

    stale = dict(find_orphaned_keys(headers, reason_of, engine.renderer.separator_ids))
    if stale:
        _schedule_entries(stale, engine, registry)
        _run_deletions(IndexedDocuments(registry), engine, registry)


def keys_to_delete(
    texts: Iterable[str], engine: DocumentEngine, registry: ChunkRegistry, *, everywhere: bool = False
) -> dict[str, str]:
    """Return {store key: removed text} of the entries to delete if `texts` are removed, in the order of deletion.

    Without `everywhere`, these are the keys of `texts` for this engine. `everywhere` adds two kinds of entries of the
    engine's namespace, if they are known on this machine: entries of `texts` for other models and prefixes, and entries
    of chunks that have one of `texts` in their context.
    """
    texts = list(dict.fromkeys(texts))
    keys: dict[str, str] = {}
    if texts and everywhere:
        namespace, joint = engine.namespace, engine.renderer.separator_ids
        text_of = {engine.renderer.chunk_ids(text): text for text in texts}
        _record_unrecorded_entries(engine, registry)
        for ids, text in text_of.items():
            for entry in dict.fromkeys(chain.from_iterable(registry.entries_of_chunks((ids, ids + joint), namespace))):
                keys.setdefault(entry, text)
        unrecorded = chain.from_iterable(
            tier.headers() for tier in engine.store.tiers if tier.find_tier(DiskStore) is None
        )
        headers = (header for header in unrecorded if header.namespace == namespace)
        for entry, text in find_orphaned_keys(headers, text_of.get, joint):
            keys.setdefault(entry, text)
    for text in texts:
        for version in all_variants(text):
            keys.setdefault(engine.key(version), text)
    return keys


def _record_unrecorded_entries(engine: DocumentEngine, registry: ChunkRegistry) -> None:
    """Record the chunks of the entries that the folder had before its catalogue was made, once per catalogue."""
    disk = engine.store.find_tier(DiskStore)
    if disk is None or registry.are_all_entries_recorded(disk.root):
        return
    for header in disk.headers():
        record_entry(registry, header)
    registry.mark_all_entries_recorded(disk.root)


def _schedule_entries(text_of: Mapping[str, str], engine: DocumentEngine, registry: ChunkRegistry) -> None:
    """Record entries to be deleted by `_run_deletions`. text_of: see `_pending_deletions`."""
    registry.remove_stored_entries(text_of)
    IndexedDocuments(registry).schedule_deletions(_pending_deletions(text_of, engine, {}), OrphanedTexts())


def _delete_unseen_remote_keys(engine: DocumentEngine, registry: ChunkRegistry) -> str:
    """Delete what `_find_unseen_remote_keys` returns. Return the error of an unreachable remote tier, or ""."""
    unseen, problem = _find_unseen_remote_keys(registry.stored_variant_keys(), engine, registry), ""
    registry.set_variants_stored(unseen, is_stored=False)
    try:
        for key in unseen:
            engine.store.delete(key)
    except BackendUnreachableError as error:
        problem = str(error)
        pending = [PendingDeletion(key, place, "", b"") for key in unseen for place in _places(engine)[1:]]
        IndexedDocuments(registry).schedule_deletions(pending, OrphanedTexts())
    return problem


def find_orphaned_keys(
    headers: Iterable[KVHeader], reason_of: Callable[[Ids], Reason | None], separator_ids: Ids
) -> Iterator[tuple[str, Reason]]:
    """Yield (key, reason) of each entry whose chunk, or a chunk in its context, was removed.

    headers: the headers of the entries to check. reason_of: called with the token ids of a chunk; returns the reason to
    yield if the chunk was removed, None if the chunk is in use. separator_ids: the token ids between two chunks.
    """
    for header in headers:
        before = [ids[: len(ids) - len(separator_ids)] for ids in reversed(header.context_ids)]
        reasons = map(reason_of, (header.token_ids, *before))
        reason = next((each for each in reasons if each is not None), None)
        if reason is not None:
            yield header.key, reason


def delete_texts_except(
    kept_texts: Mapping[DocumentKey, Collection[str]], engine: DocumentEngine, registry: ChunkRegistry
) -> tuple[int, str]:
    """Remove texts from documents, and delete the KV of texts that no document of the namespace has any more.

    kept_texts: for each document to change, the texts that it keeps; its other texts are removed. Return the number of
    deleted entries and a problem: the error message if a remote tier did not answer, else "". The keys of that tier's
    entries stay recorded, and a later call deletes them.
    """
    documents = IndexedDocuments(registry)
    # Similar variants may be stored, also by a process that has changed the policy since.
    has_similar = engine.context == "similar" or registry.has_stored_variants()
    lost = {name: registry.texts_of(name).difference(map(str.strip, texts)) for name, texts in kept_texts.items()}
    losing = [name for name, texts in lost.items() if texts]
    if losing and has_similar:
        _record_unrecorded_entries(engine, registry)
    for start in range(0, len(losing), _BATCH):
        names = losing[start : start + _BATCH]
        # In one transaction, so that a text which another process adds at the same time is either kept or added again.
        with documents.write_transaction():
            released = registry.preview_orphaned_texts({name: kept_texts[name] for name in names})
            for name in names:
                registry.remove_from_document(lost[name], name)
            registry.remove_variants(engine.key(Chunk(text, context="similar")) for text in released)
            gone = set(registry.find_unknown_texts(released))  # the others belong to documents of other namespaces
            text_of = keys_to_delete(released, engine, registry, everywhere=has_similar)
            causes = {key: text if text in gone else NO_TEXT for key, text in text_of.items()}
            _schedule_entries(causes, engine, registry)
    # A call that adds documents does not wait for a tier that is known not to answer.
    is_removal = bool(kept_texts) and not any(kept_texts.values())
    is_due = bool(losing) or is_removal or all(tier.is_available() for tier in engine.store.find_tiers(RemoteStore))
    num_removed, problem = 0, ""
    if is_due and documents.pending_deletions():
        num_removed, problem = _run_deletions(documents, engine, registry)
    if losing:
        problem = _delete_unseen_remote_keys(engine, registry) or problem
        registry.truncate_log()
    return num_removed, problem
