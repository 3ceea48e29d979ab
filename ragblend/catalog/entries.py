"""`EntryRows`: the KV entries of a store in a ledger: the chunk of each, whether it is stored, and pending deletions.

`verify` reports entries that are recorded as stored and missing. The entries of a removed text are found by their
chunk, without reading files. `engine.deletions` schedules and runs deletions.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sqlalchemy import delete, select, update

from ragblend.catalog.schema import (
    DELETIONS,
    ENTRIES,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    split_into_batches,
)
from ragblend.catalog.token_ids import TokenIdRows, hash_ids

_OF_ENTRY = equals_parameters(ENTRIES, "key")
_KNOWN_ENTRIES = select(ENTRIES.c.key).where(is_in_values(ENTRIES.c.key))
_STORED_ENTRIES = _KNOWN_ENTRIES.where(ENTRIES.c.fingerprint != "")
_CHUNK_OF_ENTRY = select(ENTRIES.c.ids_hash, ENTRIES.c.namespace).where(_OF_ENTRY)
_ENTRIES_OF = select(ENTRIES.c.key).where(equals_parameters(ENTRIES, "ids_hash", "namespace")).order_by(ENTRIES.c.key)
_ENTRIES_OF_HASHES = select(ENTRIES.c.ids_hash, ENTRIES.c.key).where(
    is_in_values(ENTRIES.c.ids_hash), equals_parameters(ENTRIES, "namespace")
)
_CLEAR_DELETION = delete(DELETIONS).where(equals_parameters(DELETIONS, "key", "tier"))
_CANCEL_DELETION = delete(DELETIONS).where(equals_parameters(DELETIONS, "key"))
_PENDING = select(DELETIONS.c.key).where(is_in_values(DELETIONS.c.key))
_PENDING_IN_TIER = _PENDING.where(equals_parameters(DELETIONS, "tier"))
_ALL_OF_TIER = select(DELETIONS.c.key).where(equals_parameters(DELETIONS, "tier")).order_by(DELETIONS.c.number)


class EntryRows(TokenIdRows):
    """The part of `Ledger` with stored entries and pending deletions. keys: those of entries."""

    # --- the chunk of an entry ---

    def record_entry_chunk(self, key: str, token_ids: Sequence[int], namespace: str) -> None:
        """Record that the entry with this key has the KV of the chunk with these token ids."""
        chunk = (hash_ids(token_ids), namespace)
        with self._locked() as connection:
            if connection.execute(_CHUNK_OF_ENTRY, {"b_key": key}).first() == chunk:
                return
            with self.write_transaction():
                values = {"ids_hash": chunk[0], "namespace": namespace}
                if not connection.execute(update(ENTRIES).where(_OF_ENTRY).values(**values), {"b_key": key}).rowcount:
                    insert_rows(connection, ENTRIES, [{"key": key, "fingerprint": "", **values}])

    def entries_of_chunks(self, chunks: Iterable[Sequence[int]], namespace: str) -> list[list[str]]:
        """Return, for each chunk, the keys of the entries that are recorded with it. `chunks`: token ids of each."""
        batches = (self._rows(_ENTRIES_OF, b_ids_hash=hash_ids(ids), b_namespace=namespace) for ids in chunks)
        return [[row.key for row in rows] for rows in batches]

    def entries_of_texts(self, text_keys: Collection[bytes], namespace: str) -> dict[bytes, list[str]]:
        """Return, for each text, the keys of the entries that a namespace has of it, for all models."""
        hashes: dict[bytes, set[bytes]] = {key: set() for key in text_keys}
        for each in self.hash_token_ids(hashes):
            if each.namespace == namespace:
                hashes[each.text_key].add(each.ids_hash)
        entries: dict[bytes, list[str]] = {}
        for some in split_into_batches(set().union(*hashes.values())):
            for row in self._rows(_ENTRIES_OF_HASHES, values=some, b_namespace=namespace):
                entries.setdefault(row.ids_hash, []).append(row.key)
        return {key: [entry for each in of_text for entry in entries.get(each, ())] for key, of_text in hashes.items()}

    def remove_entries(self, keys: Iterable[str]) -> None:
        """Remove the records of entries. The caller deletes the entries from the store."""
        if rows := [{"b_key": key} for key in keys]:
            with self.write_transaction() as connection:
                connection.execute(delete(ENTRIES).where(_OF_ENTRY), rows)

    def are_all_entries_recorded(self, folder: Path) -> bool:
        """Return True if the chunks of every entry in the store's folder are recorded.

        They are not if the catalogue was made for entries that already existed, as after the loss of a catalogue.
        """
        return self._read_fact(self._recorded_fact(folder)) is not None

    def mark_all_entries_recorded(self, folder: Path) -> None:
        """Mark the ledger as complete for a store: no entry in `folder` has to be read again to find its chunks."""
        with self.write_transaction() as connection:
            self._write_fact(connection, self._recorded_fact(folder), "")

    def _recorded_fact(self, folder: Path) -> str:
        return f"entries recorded {self.local_tier(folder)}"

    # --- stored entries ---

    def record_stored_entries(self, keys: Iterable[str], fingerprint: str) -> None:
        """Record that entries are stored, with the fingerprint of their model."""
        keys = list(dict.fromkeys(keys))
        with self._locked() as connection:
            if len(find_existing(connection, _STORED_ENTRIES, keys)) == len(keys):
                return
            with self.write_transaction():
                recorded = find_existing(connection, _KNOWN_ENTRIES, keys)
                if changed := [{"b_key": key} for key in recorded]:
                    connection.execute(update(ENTRIES).where(_OF_ENTRY).values(fingerprint=fingerprint), changed)
                row = {"fingerprint": fingerprint, "namespace": "", "ids_hash": None}
                insert_rows(connection, ENTRIES, ({**row, "key": key} for key in keys if key not in recorded))

    def unrecord_stored_entries(self, keys: Iterable[str]) -> None:
        """Record that entries are not stored any more, so that `verify` does not report them as missing."""
        if rows := [{"b_key": key} for key in keys]:
            with self.write_transaction() as connection:
                connection.execute(delete(ENTRIES).where(_OF_ENTRY, ENTRIES.c.ids_hash.is_(None)), rows)
                connection.execute(update(ENTRIES).where(_OF_ENTRY).values(fingerprint=""), rows)

    def fingerprints_by_key(self) -> dict[str, str]:
        """Return {key: fingerprint of the model} of the stored entries."""
        query = select(ENTRIES.c.key, ENTRIES.c.fingerprint).where(ENTRIES.c.fingerprint != "").order_by(ENTRIES.c.key)
        return {row.key: row.fingerprint for row in self._rows(query)}

    # --- deletions of entries ---

    def local_tier(self, folder: Path | None) -> str:
        """Return the name of a machine's tiers in DELETIONS: "", or in a shared catalogue the name of the host and the
        store's `folder`."""
        return f"{platform.node()}:{folder}" if self.is_shared else ""

    def record_deletions(self, source_of: Mapping[str, str], tiers: Sequence[str]) -> None:
        """Record entries to be deleted from each of the tiers. They do not count as stored any more.

        source_of: for each entry's key, the document that had its text; "" if unknown.
        """
        rows = [{"key": key, "tier": tier, "source": source_of[key]} for key in source_of for tier in tiers]
        if rows:
            with self.write_transaction() as connection:
                self.unrecord_stored_entries(source_of)
                connection.execute(_CLEAR_DELETION, [{"b_key": row["key"], "b_tier": row["tier"]} for row in rows])
                insert_rows(connection, DELETIONS, rows)

    def pending_deletions(self, tier: str) -> list[str]:
        """Return the keys of the entries to delete from a tier, in the order in which they were recorded."""
        return [row.key for row in self._rows(_ALL_OF_TIER, b_tier=tier)]

    def find_pending(self, keys: Sequence[str], tier: str) -> list[str]:
        """Return the `keys` whose deletion from a tier is recorded, because other processes may have changed it."""
        with self._locked() as connection:
            pending = find_existing(connection, _PENDING_IN_TIER, keys, b_tier=tier)
        return [key for key in keys if key in pending]

    def find_pending_sources(self) -> set[str]:
        """Return the documents of which entries have to be deleted from some tier. Unknown ones are left out."""
        query = select(DELETIONS.c.source).where(DELETIONS.c.source != "").distinct()
        return {row.source for row in self._rows(query)}

    def clear_deletions(self, keys: Iterable[str], tier: str) -> None:
        """Remove the records of deletions from a tier, because it has deleted the entries."""
        if rows := [{"b_key": key, "b_tier": tier} for key in keys]:
            with self.write_transaction() as connection:
                connection.execute(_CLEAR_DELETION, rows)

    def cancel_deletions(self, keys: Iterable[str]) -> None:
        """Remove the records of deletions of entries that are stored again. Call it before they are looked up."""
        keys = [*keys]
        with self._locked() as connection:
            if pending := find_existing(connection, _PENDING, keys):
                with self.write_transaction():
                    connection.execute(_CANCEL_DELETION, [{"b_key": key} for key in pending])
