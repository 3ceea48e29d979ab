"""Removal of texts: which entries documents leave behind, in which transaction their deletion is recorded.

The index records the texts that its documents have lost (see `catalog.indexed_documents`). `delete_orphaned_kv` turns
these texts into recorded deletions. `keep_only_texts` does the same for documents of frameworks and servers. Both then
run the deletions (see `engine.deletions`). Depends on the index, engines and stores, not on files or frameworks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import DocumentKey
from ragblend.engine.api import DocumentEngine, Engine, RemoteEngine
from ragblend.engine.deletions import UnfinishedDeletionError, record_entry, run_deletions, schedule_deletions
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.index import ChunkIndex
from ragblend.ingestion.contexts import all_variants
from ragblend.prompt.types import Chunk

log = logging.getLogger(__name__)

_BATCH = 64  # documents per transaction, during which no process can add documents


def delete_or_warn(delete: Callable[[], int]) -> int:
    """Return `delete()`, the number of deleted entries. If a remote tier does not answer, log a warning instead of
    raising UnfinishedDeletionError: the caller has added documents, and the next deletion continues."""
    try:
        return delete()
    except UnfinishedDeletionError as error:
        log.warning(
            "removed KV stays in the remote tier (%s); the next call that adds or removes documents deletes it", error
        )
        return error.num_deleted


def delete_orphaned_kv(index: ChunkIndex, engine: DocumentEngine) -> int:
    """Delete the KV and token ids of texts that were removed from the index. Return the number of entries.

    A text is kept if it was added again. It is also kept if it occurs in a document that was added through LangChain,
    LlamaIndex or a server. Raises UnfinishedDeletionError if a remote tier does not answer; the next call with that
    tier deletes the tier's remaining entries.
    """
    disk = engine.store.find_tier(DiskStore)
    if disk is not None:
        disk.delete_temporary_files()
    lost = index.lost_texts()
    if isinstance(engine, RemoteEngine):  # a server deletes replaced texts when it receives the new version
        if not lost.last_number:
            return 0
        num_removed: int = engine.remove_documents(index.collection, lost.sources)
        index.clear_lost_texts(lost)
        return num_removed
    with index.ledger_for(engine.store) as ledger:
        if lost.last_number:
            text_of = keys_to_delete(lost.texts, engine, ledger)  # outside of the transaction, as it may be slow
            # One transaction if index and store share a catalogue. Else the texts stay recorded until the keys are.
            with index.write_transaction(), ledger.write_transaction():
                still_lost = set(lost.texts).intersection(index.lost_texts().texts)
                owner = DocumentKey(index.collection)
                released = {*ledger.remove_texts({owner: still_lost}, engine.namespace)}
                source_of = {key: lost.source_of[text] for key, text in text_of.items() if text in released}
                schedule_deletions(source_of, engine.store, ledger)
                index.clear_lost_texts(lost)
            index.truncate_log()
            ledger.truncate_log()
        return len(run_deletions(engine.store, ledger))


def find_unfinished_removals(index: ChunkIndex, store: KVStore | None) -> set[str]:
    """Return the sources of removed documents whose KV is not completely deleted. store: None if no KV is stored."""
    sources = {*index.lost_texts().sources}
    if store is not None:
        with index.ledger_for(store) as ledger:
            sources |= ledger.find_pending_sources()
    return sources


def delete_stale_kv(chunks: Collection[Chunk], engine: Engine, ledger: Ledger) -> int:
    """Delete the KV and the token ids of those `chunks` whose text another process removed during their prefill.

    Call this after the chunks were stored. The other process could not delete KV that was not stored yet. Return the
    number of deleted entries. If a remote tier does not answer, a later deletion removes the entries of that tier.
    ledger: is only read, because it may have lost the leases without which it writes nothing.
    """
    removed = set(ledger.find_unowned_texts((chunk.text for chunk in chunks), engine.namespace))
    if not removed:
        return 0
    with open_ledger(engine.store) as writing:
        with writing.write_transaction():
            removed = set(writing.find_unowned_texts(removed, engine.namespace))  # without those that were added again
            for text in removed:
                writing.remove_ids(text, engine.renderer.fingerprint, engine.namespace)
            stale = {engine.key(chunk): "" for chunk in chunks if chunk.text in removed}
            schedule_deletions(stale, engine.store, writing)
        return delete_or_warn(lambda: len(run_deletions(engine.store, writing)))


def keys_to_delete(texts: Iterable[str], engine: DocumentEngine, ledger: Ledger) -> dict[str, str]:
    """Return {entry key: removed text} of the entries to delete if `texts` are removed, in the order of deletion.

    These are the entries of `texts` in the engine's namespace that the catalogue has recorded, for all models and
    prefixes, and all variants for this engine, which a remote tier may have.
    """
    text_of = {engine.renderer.chunk_ids(text): text for text in texts}
    keys: dict[str, str] = {}
    if text_of:
        _record_unrecorded_entries(engine, ledger)
        recorded = ledger.entries_of_chunks(text_of, engine.namespace)
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


def _record_unrecorded_entries(engine: DocumentEngine, ledger: Ledger) -> None:
    """Record the chunks of the entries that the folder had before its catalogue was made, once per catalogue."""
    disk = engine.store.find_tier(DiskStore)
    if disk is None or ledger.are_all_entries_recorded(disk.root):
        return
    for header in disk.headers():
        record_entry(ledger, header)
    ledger.mark_all_entries_recorded(disk.root)


def keep_only_texts(kept_texts: Mapping[DocumentKey, Collection[str]], engine: DocumentEngine, ledger: Ledger) -> int:
    """Remove texts from documents, and delete the KV of texts that no document of the namespace has any more.

    kept_texts: for each document to change, the texts that it keeps; its other texts are removed. Return the number of
    deleted entries. Raises UnfinishedDeletionError if a remote tier did not answer; a later call deletes its entries.
    """
    lost = {name: ledger.texts_of(name).difference(map(str.strip, texts)) for name, texts in kept_texts.items()}
    losing = [name for name, texts in lost.items() if texts]
    if losing:
        _record_unrecorded_entries(engine, ledger)
    for start in range(0, len(losing), _BATCH):
        names = losing[start : start + _BATCH]
        # In one transaction, so that a text which another process adds at the same time is either kept or added again.
        with ledger.write_transaction():
            released = ledger.remove_texts({name: lost[name] for name in names}, engine.namespace)
            name_of = {text: document.name for document in names for text in lost[document]}
            keys = keys_to_delete(released, engine, ledger)
            schedule_deletions({key: name_of.get(text, "") for key, text in keys.items()}, engine.store, ledger)
    # A call that adds documents does not wait for a tier that is known not to answer.
    is_removal = bool(kept_texts) and not any(kept_texts.values())
    is_due = bool(losing) or is_removal or all(tier.is_available() for tier in engine.store.find_tiers(RemoteStore))
    num_removed = len(run_deletions(engine.store, ledger)) if is_due else 0
    if losing:
        ledger.truncate_log()
    return num_removed
