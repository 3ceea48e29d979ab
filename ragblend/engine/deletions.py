"""Records of stored entries in the catalogue, and the deletion of entries by these records.

Each entry of a disk tier is recorded when it is stored, so that a removal finds the entries of a text without reading
files. Every removal, replacement, `gc --orphans` and change of the context policy calls `schedule_deletions` with the
keys of the entries that it leaves, and then, on the same thread, `run_deletions`, which deletes the entries. Documents
of an index are removed in an earlier transaction, which records the texts that they lost; other removals of documents
remove the texts in the transaction that schedules. After a kill, or while a remote tier does not answer, the records
stay, and the next call that adds or removes documents continues; no thread retries. Ingesting a text again
cancels the deletion of its entries (`Ledger.cancel_deletions`). Depends on a store and its ledger, not on models or
texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError

_BATCH = 64  # entries per transaction, during which no process can add documents


class UnfinishedDeletionError(BackendUnreachableError):
    """A remote tier did not answer, so it still has entries whose deletion is recorded. The next run deletes them.

    `num_deleted`: number of entries that were deleted, from the tiers of this machine at least.
    """

    def __init__(self, num_deleted: int, reason: str) -> None:
        super().__init__(reason)
        self.num_deleted = num_deleted


def schedule_deletions(source_of: Mapping[str, str], store: KVStore, ledger: Ledger) -> None:
    """Record entries that `run_deletions` has to delete from every tier of `store`. They count as stored no more.

    source_of: for each entry's key, the document that had its text; "" if unknown. Call it in the transaction of
    `ledger` that removes the texts, or their records, so that a kill leaves either of them or these records.
    """
    ledger.record_deletions(source_of, _deletion_tiers(store, ledger))


def run_deletions(store: KVStore, ledger: Ledger) -> set[str]:
    """Delete the entries whose deletion is recorded. Return the keys of those that a tier had.

    The tiers of this machine delete first, because they must not wait for an unreachable remote tier. A remote tier
    then publishes a tombstone, with which other machines delete the entries. Raises UnfinishedDeletionError, after
    every tier was tried, if a remote tier does not answer.
    """
    deleted, unanswered = set[str](), ""
    for tier in _deletion_tiers(store, ledger):
        keys = ledger.pending_deletions(tier)
        for start in range(0, len(keys), _BATCH):
            with ledger.write_transaction():  # no process stores an entry again in the meantime
                batch = ledger.find_pending(keys[start : start + _BATCH], tier)
                try:
                    deleted |= _delete_from_tier(batch, tier, store)
                except BackendUnreachableError as error:
                    unanswered = str(error)
                    break
                ledger.clear_deletions(batch, tier)
                if tier == ledger.local_tier(store.folder):
                    ledger.remove_entries(batch)  # including entries that were evicted earlier
    if unanswered:
        raise UnfinishedDeletionError(len(deleted), unanswered)
    return deleted


def _deletion_tiers(store: KVStore, ledger: Ledger) -> list[str]:
    """Return the tiers of DELETIONS: this machine's tiers as one, then the URL of each remote tier."""
    return [ledger.local_tier(store.folder), *(tier.values.url for tier in store.find_tiers(RemoteStore))]


def _delete_from_tier(keys: Iterable[str], tier: str, store: KVStore) -> set[str]:
    """Delete entries from one of `_deletion_tiers`. Return the keys of those that it had."""
    if any(tier == remote.values.url for remote in store.find_tiers(RemoteStore)):
        return store.delete_everywhere([*keys])
    return {key for key in keys if store.delete_local(key)}


def record_entries_on_put(store: KVStore) -> Ledger | None:
    """Make the store's disk tier record each entry's chunk in its ledger (see `record_entry`).

    An entry is recorded before its file is written, so that a killed process leaves no unrecorded file. Return the
    ledger; None if the store has no disk tier, or if that tier records its entries already.
    """
    disk = store.find_tier(DiskStore)
    if disk is None or disk.on_put is not None:
        return None
    ledger = open_ledger(disk)
    disk.on_put, disk.on_delete = partial(record_entry, ledger), partial(_unrecord_entries, ledger)
    return ledger


def _unrecord_entries(ledger: Ledger, keys: Collection[str]) -> None:
    """Remove the records of entries that another machine has deleted."""
    if not ledger.is_shared:  # in a shared catalogue, the machine that deletes an entry removes its record
        ledger.unrecord_stored_entries(keys)


def record_entry(ledger: Ledger, header: KVHeader) -> None:
    """Record the chunk of the entry with this header."""
    ledger.record_entry_chunk(header.key, header.token_ids, header.namespace)
