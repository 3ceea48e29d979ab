"""Records of stored entries in the catalogue, so that a removal finds the entries of a text without reading files.

Depends on a store and its registry, not on models.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from ragblend.catalog.registry import ChunkRegistry, open_registry
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader


def record_entries_on_put(store: KVStore) -> ChunkRegistry | None:
    """Make the store's disk tier record each entry's chunk in its registry (see `record_entry`).

    An entry is recorded before its file is written, so that a killed process leaves no unrecorded file. Return the
    registry; None if the store has no disk tier, or if that tier records its entries already.
    """
    disk = store.find_tier(DiskStore)
    if disk is None or disk.on_put is not None:
        return None
    registry = open_registry(disk)
    disk.on_put, disk.on_delete = partial(record_entry, registry), partial(_record_deletions, registry)
    return registry


def _record_deletions(registry: ChunkRegistry, keys: Collection[str]) -> None:
    """Record that another machine has deleted entries."""
    if not registry.is_shared:  # in a shared catalogue, the machine that deletes an entry removes its record
        registry.remove_stored_entries(keys)


def record_entry(registry: ChunkRegistry, header: KVHeader) -> None:
    """Record the chunk of the entry with this header."""
    registry.record_entry_chunk(header.key, header.token_ids, header.namespace)
