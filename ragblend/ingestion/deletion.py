"""Deletion of removed texts: their KV in every tier, registry rows and pins.

The catalogue records the texts that documents of an index have lost (see `catalog.documents`). `delete_orphaned_kv`
finds the entries of these texts, records the entries in place of the texts, and deletes the entries. After a kill, the
next call continues. `delete_texts_except` records the entries of other documents in the transaction that removes their
texts.
Depends on the index, engines and stores, not on files or frameworks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from ragblend.catalog.documents import IndexedDocuments
from ragblend.catalog.index_rows import OrphanedTexts, PendingDeletion
from ragblend.catalog.registry import ChunkRegistry
from ragblend.catalog.schema import DocumentKey, text_key
from ragblend.engine.api import DocumentEngine, Engine, RemoteEngine
from ragblend.engine.entry_records import record_entry
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError
from ragblend.index import ChunkIndex
from ragblend.ingestion.contexts import all_variants
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION
from ragblend.prompt.types import Chunk

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
    text_of = keys_to_delete(released, engine, registry)
    pending = _pending_deletions(text_of, engine, orphaned.source_of)
    with index.write_transaction():  # also a transaction of the registry if they share a catalogue
        registry.remove_stored_entries({entry.key for entry in pending})
        index.schedule_deletions(pending, orphaned)


def _pending_deletions(
    text_of: Mapping[str, str], engine: DocumentEngine, source_of: Mapping[str, str]
) -> list[PendingDeletion]:
    """Return the deletions of entries in all tiers. text_of: the removed text that causes each deletion, by key;
    NO_TEXT to delete the entry in any case. source_of: the sources of texts.
    """
    return [
        PendingDeletion(key, place, source_of.get(text, ""), text_key(text))
        for key, text in text_of.items()
        for place in _places(engine)
    ]


def _places(engine: DocumentEngine) -> list[str]:
    """Return the tiers from which entries are deleted (`PendingDeletion.place`), the local ones first."""
    return [LOCAL, *(tier.values.url for tier in engine.store.find_tiers(RemoteStore))]


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
                if place == LOCAL:
                    registry.remove_entry_chunks(unwanted)  # including entries that were evicted earlier
            if problem:
                break
    return len(deleted), problem


def delete_stale_kv(chunks: Collection[Chunk], engine: Engine, registry: ChunkRegistry) -> int:
    """Delete the KV of those `chunks` whose text another process removed during their prefill.

    Call this after the chunks were stored. The other process could not delete KV that was not stored yet. Return the
    number of deleted entries. If a remote tier does not answer, a later deletion removes the entries of that tier.
    """
    removed = set(registry.find_unknown_texts(chunk.text for chunk in chunks))
    if not removed:
        return 0
    for text in removed:
        registry.remove_ids(text, engine.renderer.fingerprint, engine.namespace)
    text_of = {engine.key(chunk): chunk.text for chunk in chunks if chunk.text in removed}
    _schedule_entries(text_of, engine, registry)
    return _run_deletions(IndexedDocuments(registry), engine, registry)[0]


def keys_to_delete(texts: Iterable[str], engine: DocumentEngine, registry: ChunkRegistry) -> dict[str, str]:
    """Return {store key: removed text} of the entries to delete if `texts` are removed, in the order of deletion.

    These are the entries of `texts` in the engine's namespace that are known on this machine, for all models and
    prefixes, and all variants for this engine, which a remote tier may have.
    """
    text_of = {engine.renderer.chunk_ids(text): text for text in texts}
    keys: dict[str, str] = {}
    if text_of:
        _record_unrecorded_entries(engine, registry)
        recorded = registry.entries_of_chunks(text_of, engine.namespace)
        for text, entries in zip(text_of.values(), recorded, strict=True):
            keys |= dict.fromkeys(entries, text)
        unrecorded = (tier for tier in engine.store.tiers if tier.find_tier(DiskStore) is None)
        for header in chain.from_iterable(tier.headers() for tier in unrecorded):
            if header.namespace == engine.namespace and header.token_ids in text_of:
                keys.setdefault(header.key, text_of[header.token_ids])
    for text in text_of.values():
        for variant in all_variants(text):
            keys.setdefault(engine.key(variant), text)
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


def delete_texts_except(
    kept_texts: Mapping[DocumentKey, Collection[str]], engine: DocumentEngine, registry: ChunkRegistry
) -> tuple[int, str]:
    """Remove texts from documents, and delete the KV of texts that no document of the namespace has any more.

    kept_texts: for each document to change, the texts that it keeps; its other texts are removed. Return the number of
    deleted entries and a problem: the error message if a remote tier did not answer, else "". The keys of that tier's
    entries stay recorded, and a later call deletes them.
    """
    documents = IndexedDocuments(registry)
    lost = {name: registry.texts_of(name).difference(map(str.strip, texts)) for name, texts in kept_texts.items()}
    losing = [name for name, texts in lost.items() if texts]
    if losing:
        _record_unrecorded_entries(engine, registry)
    for start in range(0, len(losing), _BATCH):
        names = losing[start : start + _BATCH]
        # In one transaction, so that a text which another process adds at the same time is either kept or added again.
        with documents.write_transaction():
            released = registry.preview_orphaned_texts({name: kept_texts[name] for name in names})
            for name in names:
                registry.remove_from_document(lost[name], name)
            gone = set(registry.find_unknown_texts(released))  # the others belong to documents of other namespaces
            text_of = keys_to_delete(released, engine, registry)
            causes = {key: text if text in gone else NO_TEXT for key, text in text_of.items()}
            _schedule_entries(causes, engine, registry)
    # A call that adds documents does not wait for a tier that is known not to answer.
    is_removal = bool(kept_texts) and not any(kept_texts.values())
    is_due = bool(losing) or is_removal or all(tier.is_available() for tier in engine.store.find_tiers(RemoteStore))
    num_removed, problem = 0, ""
    if is_due and documents.pending_deletions():
        num_removed, problem = _run_deletions(documents, engine, registry)
    if losing:
        registry.truncate_log()
    return num_removed, problem
