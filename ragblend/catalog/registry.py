"""`ChunkRegistry`: the chunks for which a store has KV, as texts, token ids and keys of entries.

- Texts belong to documents (`DocumentKey`): a text lives while a document has a chunk with it. Two texts are identical
  if they are equal after `strip()`. When the last document loses a text, its KV can be deleted.
- Token ids of a text are stored for each tokenizer and namespace. `engine.matching` finds them in prompts.
- Stored entries are recorded, so that `verify` reports missing ones. The chunk of each entry is recorded, so that the
  entries of a removed text are found without reading files.

Depends on texts and ids, not on KV, engines or frameworks.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, delete, exists, func, insert, select, update

from ragblend.catalog.database import Catalog, resolve_catalog
from ragblend.catalog.schema import (
    CHUNKS,
    DELETIONS,
    DOCUMENTS,
    ENTRIES,
    FACTS,
    IS_INDEXED,
    IS_OF_INDEX,
    IS_SENT,
    TEXTS,
    TOKEN_IDS,
    DocumentFacts,
    DocumentKey,
    PendingDeletion,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    split_into_batches,
    text_key,
)
from ragblend.errors import StoreMismatchError
from ragblend.option_fields import is_unicode

_ID_DTYPE = np.dtype("<u4")
_OWNED_IDS = (TOKEN_IDS.c.tokenizer == bindparam("tokenizer"), TOKEN_IDS.c.namespace == bindparam("namespace"))
_IDS_AFTER = (
    select(TOKEN_IDS.c.number, TOKEN_IDS.c.ids)
    .where(TOKEN_IDS.c.number > bindparam("number"), *_OWNED_IDS)
    .order_by(TOKEN_IDS.c.number)
)
_IDS_OF_NUMBER = select(TOKEN_IDS.c.ids).where(equals_parameters(TOKEN_IDS, "number"))
_HAS_IDS = select(TOKEN_IDS.c.number).where(equals_parameters(TOKEN_IDS, "key"), *_OWNED_IDS)
_OF_DOCUMENT = equals_parameters(DOCUMENTS, *DocumentKey._fields)
_IN_DOCUMENT = CHUNKS.c.document == DOCUMENTS.c.number
_HAS_CHUNKS = exists(CHUNKS.c.document).where(_IN_DOCUMENT)
_DOCUMENTS_WITH_IDS = (  # unsorted, for else SQLite reads all documents of the namespace in their order
    select(DOCUMENTS.c.collection, DOCUMENTS.c.id, CHUNKS.c.key)
    .join(CHUNKS, _IN_DOCUMENT)
    .join(TOKEN_IDS, TOKEN_IDS.c.key == CHUNKS.c.key)
    .where(
        equals_parameters(TOKEN_IDS, "number"),
        equals_parameters(DOCUMENTS, "namespace"),
        DOCUMENTS.c.id != "",
        ~IS_INDEXED,
    )
)
_TEXTS_WITH_IDS = (
    select(TEXTS.c.text, TOKEN_IDS.c.ids)
    .join(TOKEN_IDS, TOKEN_IDS.c.key == TEXTS.c.key)
    .where(is_in_values(TOKEN_IDS.c.ids), *_OWNED_IDS)
)
_KEYS_WITH_IDS = select(TOKEN_IDS.c.key).where(is_in_values(TOKEN_IDS.c.key), *_OWNED_IDS)
_DELETE_IDS = delete(TOKEN_IDS).where(equals_parameters(TOKEN_IDS, "key"), *_OWNED_IDS)
_OWNERS_OF_IDS = (
    select(TOKEN_IDS.c.tokenizer, TOKEN_IDS.c.namespace)
    .where(equals_parameters(TOKEN_IDS, "key"))
    .order_by(TOKEN_IDS.c.tokenizer, TOKEN_IDS.c.namespace)
)
_COUNT_IDS = select(func.count()).select_from(TOKEN_IDS).where(*_OWNED_IDS)
_REMOVALS = "removals"
_NUM_REMOVALS = select(FACTS.c.value).where(FACTS.c.name == _REMOVALS)
_IS_VISIBLE = TEXTS.c.text != ""  # an index may have a blank chunk
_HAS_TEXT = select(TEXTS.c.number).where(equals_parameters(TEXTS, "key"))
_KNOWN_KEYS = select(TEXTS.c.key).where(is_in_values(TEXTS.c.key))
_HAS_OWNER = exists(CHUNKS.c.document).where(CHUNKS.c.key == TEXTS.c.key)
_OWNED_KEYS = _KNOWN_KEYS.where(_HAS_OWNER)
_KEYS_OF_NAMESPACE = _KNOWN_KEYS.where(
    _HAS_OWNER.where(_IN_DOCUMENT, (DOCUMENTS.c.namespace == bindparam("b_namespace")) | IS_OF_INDEX)
)
_KNOWN_ENTRIES = select(ENTRIES.c.key).where(is_in_values(ENTRIES.c.key))
_STORED_ENTRIES = _KNOWN_ENTRIES.where(ENTRIES.c.fingerprint != "")
_OF_ENTRY = equals_parameters(ENTRIES, "key")
_NUMBER = select(DOCUMENTS.c.number).where(_OF_DOCUMENT)
_TEXTS_OF = (
    select(TEXTS.c.text, CHUNKS.c.start)
    .join(CHUNKS, CHUNKS.c.key == TEXTS.c.key)
    .join(DOCUMENTS, _IN_DOCUMENT)
    .where(_OF_DOCUMENT)
)
_STARTS_OF = select(CHUNKS.c.key, CHUNKS.c.start).where(
    equals_parameters(CHUNKS, "document"), is_in_values(CHUNKS.c.key)
)
_NEXT_ORDINAL = select(func.coalesce(func.max(CHUNKS.c.ordinal) + 1, 0)).where(equals_parameters(CHUNKS, "document"))
_DISOWN = delete(CHUNKS).where(equals_parameters(CHUNKS, "document", "key"))
_DELETE_IF_EMPTY = delete(DOCUMENTS).where(
    equals_parameters(DOCUMENTS, "number"),
    DOCUMENTS.c.version == "",
    DOCUMENTS.c.source == "",
    ~IS_SENT,
    ~_HAS_CHUNKS,
)
_NAMES = [DOCUMENTS.c[name] for name in DocumentKey._fields]
_OWNERS_OF = (
    select(*_NAMES)
    .join(CHUNKS, _IN_DOCUMENT)
    .where(~IS_INDEXED, equals_parameters(CHUNKS, "key"))
    .distinct()
    .order_by(*_NAMES)
)
_FACTS = select(DOCUMENTS.c.version, DOCUMENTS.c.source).where(_OF_DOCUMENT)
_CLEAR_DELETION = delete(DELETIONS).where(equals_parameters(DELETIONS, "key", "tier"))
_CANCEL_DELETION = delete(DELETIONS).where(equals_parameters(DELETIONS, "key"))
_PENDING = select(DELETIONS.c.key).where(is_in_values(DELETIONS.c.key))
_PENDING_IN_TIER = _PENDING.where(equals_parameters(DELETIONS, "tier"))
_CHUNK_OF_ENTRY = select(ENTRIES.c.ids_hash, ENTRIES.c.namespace).where(_OF_ENTRY)
_ENTRIES_OF = select(ENTRIES.c.key).where(equals_parameters(ENTRIES, "ids_hash", "namespace")).order_by(ENTRIES.c.key)


class ChunkRegistry(Catalog):
    """The ingested chunks in a store's database: their texts, token ids and keys of KV entries. See `Catalog`."""

    def add_model(self, fingerprint: str, name: str, *, new_model: bool) -> None:
        """Record a model for which documents are stored.

        If the catalogue has only other models and `new_model` is False, raises StoreMismatchError.
        """
        key = f"model {fingerprint}"
        with self._write() as connection:
            query = select(FACTS.c.name, FACTS.c.value).where(FACTS.c.name.startswith("model "))
            known = {row.name: row.value for row in connection.execute(query)}
            if known and key not in known and not new_model:
                raise StoreMismatchError(
                    f"{self.name} is the catalogue of {', '.join(sorted(known.values()))}, but the engine "
                    f"runs {name}; name another database or schema: `catalog`"
                )
            if key not in known:
                connection.execute(insert(FACTS), {"name": key, "value": name})

    # --- reading texts and documents ---

    def texts(self) -> Iterator[str]:
        """Yield the texts, stripped, in the order of addition."""
        return (row.text for row in self._rows(select(TEXTS.c.text).where(_IS_VISIBLE).order_by(TEXTS.c.number)))

    def __len__(self) -> int:
        return int(self._rows(select(func.count()).select_from(TEXTS).where(_IS_VISIBLE))[0][0])

    def __contains__(self, text: object) -> bool:
        return self._has_key(text_key(_normalize(text) if isinstance(text, str) else ""))

    def _has_key(self, key: bytes) -> bool:
        return bool(self._rows(_HAS_TEXT, b_key=key))

    def find_unowned_texts(self, texts: Iterable[str], namespace: str) -> list[str]:
        """Return the `texts` that neither an index nor a document of `namespace` has. Duplicates and blank texts are
        left out."""
        key_of = {text: text_key(stripped) for text in texts if (stripped := _normalize(text))}
        with self._locked() as connection:
            owned = find_existing(connection, _KEYS_OF_NAMESPACE, set(key_of.values()), b_namespace=namespace)
        return [text for text, key in key_of.items() if key not in owned]

    def texts_of(self, document: DocumentKey, before: int | None = None) -> set[str]:
        """Return the texts that belong to a document. before: only texts whose middle is before this offset."""
        rows = self._rows(_TEXTS_OF, **document.parameters())
        return {row.text for row in rows if before is None or row.start + len(row.text) / 2 < before}

    def text_of(self, key: bytes) -> str:
        """Return the text with this key; "" if no document has it."""
        return next((str(row.text) for row in self._rows(select(TEXTS.c.text).where(TEXTS.c.key == key))), "")

    def documents_of(self, text: str) -> list[DocumentKey]:
        """Return the names of the documents that have a text, without those of the catalogue's index."""
        return [DocumentKey(*row) for row in self._rows(_OWNERS_OF, b_key=text_key(_normalize(text)))]

    def documents(self) -> dict[DocumentKey, int]:
        """Return the number of texts of each document. Documents without texts, and those of the catalogue's index, are
        left out."""
        query = select(*_NAMES, func.count()).join(CHUNKS, _IN_DOCUMENT).where(~IS_INDEXED)
        query = query.group_by(*_NAMES).order_by(*_NAMES)
        return {DocumentKey(*row[:-1]): row[-1] for row in self._rows(query)}

    # --- changing texts and documents: adding known texts writes nothing ---

    def add(self, texts: Iterable[str], document: DocumentKey) -> int:
        """Add `texts`, except blank ones, to a document. Return the number of texts that no document had before."""
        return self.add_documents({document: dict.fromkeys(texts, 0)})

    def add_documents(self, documents: Mapping[DocumentKey, Mapping[str, int]]) -> int:
        """Add texts, except blank ones, to documents, in one transaction. Return the number of texts that are new.

        documents: for each document, the offset of each of its texts in the document, in characters; 0 if unknown.
        """
        text_of: dict[bytes, str] = {}
        start_of: dict[DocumentKey, dict[bytes, int]] = {}
        for document, starts in documents.items():
            normalized = {text: start for given, start in starts.items() if (text := _normalize(given))}
            start_of[document] = {text_key(text): start for text, start in normalized.items()}
            text_of |= {text_key(text): text for text in normalized}

        with self._locked() as connection:
            if not _find_missing_texts(connection, text_of) and not any(
                _find_missing_chunks(connection, document, each) for document, each in start_of.items()
            ):
                return 0
            with self._write():  # another process may have inserted some rows
                num_new = self.add_texts(text_of)
                for document, each in start_of.items():
                    if new := _find_missing_chunks(connection, document, each):
                        self._add_chunks(connection, document, new)
        return num_new

    def add_texts(self, text_of: Mapping[bytes, str]) -> int:
        """Add texts by their keys, inside of the transaction that adds their chunks. Return the number of new ones."""
        with self._write() as connection:
            new = _find_missing_texts(connection, text_of)
            return insert_rows(connection, TEXTS, ({"key": key, "text": text_of[key]} for key in new))

    @staticmethod
    def _add_chunks(connection: Connection, document: DocumentKey, starts: Mapping[bytes, int]) -> None:
        """Add chunks to a document, in place of those with the same texts. starts: offsets by the texts' keys."""
        number = _find_number(connection, document)
        if number is None:
            inserted = connection.execute(insert(DOCUMENTS), document._asdict()).inserted_primary_key
            assert inserted is not None
            number = inserted[0]
        else:
            connection.execute(_DISOWN, [{"b_document": number, "b_key": key} for key in starts])
        first = connection.execute(_NEXT_ORDINAL, {"b_document": number}).scalar_one()
        rows = ({"document": number, "key": key, "start": start} for key, start in starts.items())
        insert_rows(connection, CHUNKS, ({**row, "ordinal": first + place} for place, row in enumerate(rows)))

    def facts_of(self, document: DocumentKey) -> DocumentFacts:
        """Return the version and the source of a document that `set_facts` recorded."""
        rows = self._rows(_FACTS, **document.parameters())
        return DocumentFacts(*rows[0]) if rows else DocumentFacts()

    def set_facts(self, facts: Mapping[DocumentKey, DocumentFacts]) -> None:
        """Record the version and the source of documents. A document without both and without chunks is removed."""
        if facts:
            with self._write() as connection:
                for document, each in facts.items():
                    values, key = each._asdict(), document.parameters()
                    is_known = connection.execute(update(DOCUMENTS).where(_OF_DOCUMENT).values(**values), key).rowcount
                    if not is_known and any(each):
                        insert_rows(connection, DOCUMENTS, [{**document._asdict(), **values}])
                    elif is_known and not any(each):
                        connection.execute(_DELETE_IF_EMPTY, {"b_number": _find_number(connection, document)})

    def remove_from_documents(self, texts_of: Mapping[DocumentKey, Iterable[str]], namespace: str) -> list[str]:
        """Remove texts from documents. Return those that neither an index nor a document of `namespace` has any more.

        Their token ids for the namespace are deleted. Texts that no document has are deleted with all token ids.
        """
        lost = {name: {text_key(text): text for text in map(_normalize, texts)} for name, texts in texts_of.items()}
        text_of = {key: text for texts in lost.values() for key, text in texts.items()}
        if not text_of:
            return []
        with self._write() as connection:
            for document, texts in lost.items():
                number = _find_number(connection, document)
                if number is not None and texts:
                    connection.execute(_DISOWN, [{"b_document": number, "b_key": key} for key in texts])
                    connection.execute(_DELETE_IF_EMPTY, {"b_number": number})
            released = set(text_of) - find_existing(connection, _KEYS_OF_NAMESPACE, text_of, b_namespace=namespace)
            others = self.delete_unowned_texts(released)
            if others:
                values = [{"b_namespace": namespace, "b_key": key} for key in others]
                connection.execute(delete(TOKEN_IDS).where(equals_parameters(TOKEN_IDS, "namespace", "key")), values)
                self._count_removal(connection)
        return [text for key, text in text_of.items() if key in released]

    def delete_unowned_texts(self, keys: Iterable[bytes]) -> set[bytes]:
        """Delete those of the texts with these keys that no document has, with all of their token ids. Return the keys
        of the others. Call it in the transaction that removes chunks."""
        keys = {*keys}
        with self._write() as connection:
            owned = find_existing(connection, _OWNED_KEYS, keys)
            if unowned := [{"b_key": key} for key in keys - owned]:
                for table in (TEXTS, TOKEN_IDS):
                    connection.execute(delete(table).where(equals_parameters(table, "key")), unowned)
                self._count_removal(connection)
            return owned

    def write_transaction(self) -> AbstractContextManager[Connection]:
        """Apply all changes of the block, or none. No other thread or process can change the catalogue inside it. Keep
        it short."""
        return self._write()

    # --- token ids ---

    def add_ids(self, chunks: Iterable[tuple[str, Sequence[int]]], tokenizer: str, namespace: str) -> None:
        """Store the token ids of texts for a tokenizer (its fingerprint) and a namespace.
        `chunks`: pairs (text, token ids). Existing rows are not changed."""
        rows = {text_key(text.strip()): np.asarray(ids, "<u4").tobytes() for text, ids in chunks if is_unicode(text)}
        owner = {"tokenizer": tokenizer, "namespace": namespace}

        with self._locked() as connection:
            if _keys_without_ids(connection, rows, owner):
                with self._write():
                    new = _keys_without_ids(connection, rows, owner)
                    insert_rows(connection, TOKEN_IDS, ({**owner, "key": key, "ids": rows[key]} for key in new))
                    self._num_changes += 1

    def texts_without_ids(self, texts: Iterable[str], tokenizer: str, namespace: str) -> list[str]:
        """Return the texts whose token ids, for a tokenizer and a namespace, are missing."""
        text_of = {text_key(text.strip()): text for text in texts if is_unicode(text)}
        with self._locked() as connection:
            keys = _keys_without_ids(connection, text_of, {"tokenizer": tokenizer, "namespace": namespace})
        return [text_of[key] for key in keys]

    def remove_ids(self, text: str, tokenizer: str, namespace: str) -> None:
        """Delete the token ids of a text for a tokenizer and a namespace."""
        if is_unicode(text):
            owner = {"tokenizer": tokenizer, "namespace": namespace}
            with self._write() as connection:
                connection.execute(_DELETE_IDS, {**owner, "b_key": text_key(text.strip())})
                self._count_removal(connection)

    def remove_ids_without_text(self) -> None:
        """Delete the token ids of texts that no document has."""
        with self._write() as connection:
            connection.execute(delete(TOKEN_IDS).where(TOKEN_IDS.c.key.not_in(select(TEXTS.c.key))))
            self._count_removal(connection)

    def _count_removal(self, connection: Connection) -> None:
        row = {"name": _REMOVALS, "value": str(self.num_id_removals() + 1)}
        connection.execute(delete(FACTS).where(FACTS.c.name == _REMOVALS))
        connection.execute(insert(FACTS), row)
        self._num_changes += 1

    def num_id_removals(self) -> int:
        """Return the number of removals of token ids since the registry was created, in all namespaces."""
        rows = self._rows(_NUM_REMOVALS)
        return int(rows[0].value) if rows else 0

    def ids_after(self, number: int, tokenizer: str, namespace: str) -> list[tuple[int, NDArray[np.uint32]]]:
        """Return (row number, token ids) of the rows with numbers above `number`."""
        with self._locked() as connection:
            values = {"number": number, "tokenizer": tokenizer, "namespace": namespace}
            rows: Any = connection.execute(_IDS_AFTER, values)
            return [(row_number, _decode_ids(ids)) for row_number, ids in rows]

    def read_ids(self, number: int) -> NDArray[np.uint32] | None:
        """Return the token ids of a row number; None if the row was deleted."""
        rows = self._rows(_IDS_OF_NUMBER, b_number=number)
        return _decode_ids(rows[0].ids) if rows else None

    def texts_with_ids(
        self, chunks: Iterable[Sequence[int]], tokenizer: str, namespace: str
    ) -> dict[tuple[int, ...], str]:
        """Return {token ids: text} of the chunks with these token ids. Reads all rows of the tokenizer."""
        wanted = {np.asarray(ids, "<u4").tobytes(): tuple(ids) for ids in chunks}
        found: dict[tuple[int, ...], str] = {}
        for some in split_into_batches(wanted):
            rows = self._rows(_TEXTS_WITH_IDS, values=some, tokenizer=tokenizer, namespace=namespace)
            found.update((wanted[row.ids], row.text) for row in rows)
        return found

    def document_id_of_row(self, number: int, namespace: str) -> str:
        """Return the id of a document in the namespace that has the text of this row number; "" for none.

        Documents that only their text identifies are left out.
        """
        rows = self._rows(_DOCUMENTS_WITH_IDS, b_number=number, b_namespace=namespace)
        named = [(str(row.collection), str(row.id)) for row in rows if row.id != row.key.hex()]
        return min(named)[1] if named else ""

    def count_tokenized_texts(self, tokenizer: str, namespace: str) -> int:
        """Return the number of texts with token ids for a tokenizer and a namespace."""
        return int(self._rows(_COUNT_IDS, tokenizer=tokenizer, namespace=namespace)[0][0])

    def has_ids(self, text: str, tokenizer: str, namespace: str) -> bool:
        """Return True if the token ids of a text are stored."""
        key = text_key(_normalize(text))
        return bool(self._rows(_HAS_IDS, b_key=key, tokenizer=tokenizer, namespace=namespace))

    def tokenizers_and_namespaces_of(self, text: str) -> list[tuple[str, str]]:
        """Return each (tokenizer, namespace) for which the token ids of a text are stored."""
        rows = self._rows(_OWNERS_OF_IDS, b_key=text_key(_normalize(text)))
        return [(row.tokenizer, row.namespace) for row in rows]

    # --- stored entries ---

    def record_stored_entries(self, keys: Iterable[str], fingerprint: str) -> None:
        """Record the keys of stored entries with the fingerprint of their model."""
        given = list(dict.fromkeys(keys))
        with self._locked() as connection:
            if len(find_existing(connection, _STORED_ENTRIES, given)) == len(given):
                return
            with self._write():
                known = find_existing(connection, _KNOWN_ENTRIES, given)
                if changed := [{"b_key": key} for key in known]:
                    connection.execute(update(ENTRIES).where(_OF_ENTRY).values(fingerprint=fingerprint), changed)
                row = {"fingerprint": fingerprint, "namespace": "", "ids_hash": None}
                insert_rows(connection, ENTRIES, ({**row, "key": key} for key in given if key not in known))

    def remove_stored_entries(self, keys: Iterable[str]) -> None:
        """Record that entries are not stored any more, so that `verify` does not report them as missing."""
        if rows := [{"b_key": key} for key in keys]:
            with self._write() as connection:
                connection.execute(delete(ENTRIES).where(_OF_ENTRY, ENTRIES.c.ids_hash.is_(None)), rows)
                connection.execute(update(ENTRIES).where(_OF_ENTRY).values(fingerprint=""), rows)

    def fingerprints_by_key(self) -> dict[str, str]:
        """Return {key: fingerprint of the model} of the recorded entries."""
        query = select(ENTRIES.c.key, ENTRIES.c.fingerprint).where(ENTRIES.c.fingerprint != "").order_by(ENTRIES.c.key)
        return {row.key: row.fingerprint for row in self._rows(query)}

    # --- deletions of entries, see `engine.entry_records` ---

    def local_tier(self, folder: Path | None) -> str:
        """Return the name of a machine's tiers in `PendingDeletion.tier`: "", or in a shared catalogue the name of the
        host and the store's `folder`."""
        return self._mark(folder)

    def record_deletions(self, deletions: Iterable[PendingDeletion]) -> None:
        """Record entries to be deleted."""
        with self._write() as connection:
            if recorded := [*deletions]:
                connection.execute(_CLEAR_DELETION, [{"b_key": each.key, "b_tier": each.tier} for each in recorded])
                insert_rows(connection, DELETIONS, ({**each._asdict(), "text": ""} for each in recorded))

    def pending_deletions(self, tiers: Iterable[str]) -> list[PendingDeletion]:
        """Return the recorded deletions from `tiers`, in the order in which they were recorded."""
        columns = [DELETIONS.c[name] for name in PendingDeletion._fields]
        query = (
            select(*columns).where(is_in_values(DELETIONS.c.tier), DELETIONS.c.key != "").order_by(DELETIONS.c.number)
        )
        return [PendingDeletion._make(row) for row in self._rows(query, values=[*tiers])]

    def find_pending_sources(self) -> set[str]:
        """Return the documents of which entries have to be deleted from some tier. Unknown ones are left out."""
        query = select(DELETIONS.c.source).where(DELETIONS.c.key != "", DELETIONS.c.source != "").distinct()
        return {row.source for row in self._rows(query)}

    def find_pending(self, keys: Iterable[str], tier: str) -> list[str]:
        """Return the `keys` whose deletion from a tier is recorded, because other processes may have changed it."""
        keys = [*keys]
        with self._locked() as connection:
            pending = find_existing(connection, _PENDING_IN_TIER, keys, b_tier=tier)
        return [key for key in keys if key in pending]

    def clear_deletions(self, keys: Iterable[str], tier: str) -> None:
        """Remove the records of deletions from a tier, because it has deleted the entries."""
        if rows := [{"b_key": key, "b_tier": tier} for key in keys]:
            with self._write() as connection:
                connection.execute(_CLEAR_DELETION, rows)

    def cancel_deletions(self, keys: Iterable[str]) -> None:
        """Remove the records of deletions of entries that are stored again. Call it before they are looked up."""
        keys = [*keys]
        with self._locked() as connection:
            if pending := find_existing(connection, _PENDING, keys):
                with self._write():
                    connection.execute(_CANCEL_DELETION, [{"b_key": key} for key in pending])

    # --- the chunk of an entry ---

    def record_entry_chunk(self, entry: str, token_ids: Sequence[int], namespace: str) -> None:
        """Record that the entry with key `entry` has the KV of the chunk with these token ids."""
        chunk = (hash_ids(token_ids), namespace)
        with self._locked() as connection:
            if connection.execute(_CHUNK_OF_ENTRY, {"b_key": entry}).first() == chunk:
                return
            with self._write():
                values = {"ids_hash": chunk[0], "namespace": namespace}
                if not connection.execute(update(ENTRIES).where(_OF_ENTRY).values(**values), {"b_key": entry}).rowcount:
                    insert_rows(connection, ENTRIES, [{"key": entry, "fingerprint": "", **values}])

    def entries_of_chunks(self, chunks: Iterable[Sequence[int]], namespace: str) -> list[list[str]]:
        """Return, for each chunk, the keys of the entries that are recorded with it. `chunks`: token ids of each."""
        found = (self._rows(_ENTRIES_OF, b_ids_hash=hash_ids(ids), b_namespace=namespace) for ids in chunks)
        return [[row.key for row in rows] for rows in found]

    def remove_entries(self, keys: Iterable[str]) -> None:
        """Remove the records of entries. The caller deletes the entries from the store."""
        if rows := [{"b_key": key} for key in keys]:
            with self._write() as connection:
                connection.execute(delete(ENTRIES).where(_OF_ENTRY), rows)

    def are_all_entries_recorded(self, folder: Path) -> bool:
        """Return True if the chunks of every entry in the store's folder are recorded.

        They are not if the catalogue was made for entries that already existed, as after the loss of a catalogue.
        """
        return bool(self._rows(select(FACTS.c.name).where(FACTS.c.name == self._recorded_fact(folder))))

    def mark_all_entries_recorded(self, folder: Path) -> None:
        """Mark the registry as complete for a store: no entry in `folder` has to be read again to find its chunks."""
        with self._write() as connection:
            if not self.are_all_entries_recorded(folder):
                connection.execute(insert(FACTS), {"name": self._recorded_fact(folder), "value": ""})

    def _recorded_fact(self, folder: Path) -> str:
        return f"entries recorded {self._mark(folder)}"

    def _mark(self, folder: Path | None) -> str:
        """Return the name of the folder in a shared catalogue; "" in its own."""
        return f"{platform.node()}:{folder}" if self.is_shared else ""


def _normalize(text: str) -> str:
    """Return the stripped text; "" if it contains lone surrogates, which are not valid Unicode."""
    return text.strip() if is_unicode(text) else ""


def hash_ids(ids: Sequence[int] | bytes) -> bytes:
    """Return the hash of a chunk's token ids, which may be the bytes of a row of TOKEN_IDS."""
    data = ids if isinstance(ids, bytes) else np.asarray(ids, "<u4").tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


_IN_MEMORY: WeakKeyDictionary[Any, ChunkRegistry] = WeakKeyDictionary()
_IN_MEMORY_LOCK = threading.Lock()


def catalog_location(store: Any) -> str | Path | None:
    """Return the location of a KVStore's catalogue: a file in its folder, or a URL; None if it has neither."""
    return store.catalog if store.folder is None else resolve_catalog(store.folder, store.catalog)


def register_shared_model(place: str | Path, fingerprint: str, name: str, *, new_model: bool) -> None:
    """Record a model in the catalogue at `place`, if `place` is a URL. Raises the errors of `ChunkRegistry.add_model`.

    If `place` is a file, do nothing: a store with a catalogue file records its models in its folder.
    """
    if not isinstance(place, Path):
        with ChunkRegistry(place) as registry:
            registry.add_model(fingerprint, name, new_model=new_model)


def has_registry(store: Any) -> bool:
    """Return True unless the registry is in a file that does not exist yet."""
    place = catalog_location(store)
    return not isinstance(place, Path) or os.path.lexists(place)


def open_registry(store: Any, *, create: bool = True) -> ChunkRegistry:
    """Return the registry of a KVStore. Without `create`, return an empty one in memory if the file is missing.

    For a store without a catalogue the registry is in memory, and all callers share it.
    """
    if not create and not has_registry(store):
        return ChunkRegistry()
    place = catalog_location(store)
    if place is not None:
        return ChunkRegistry(place)
    with _IN_MEMORY_LOCK:
        if (registry := _IN_MEMORY.get(store)) is None:  # `setdefault` would create a database at every call
            registry = _IN_MEMORY[store] = ChunkRegistry()
        return registry


def _find_missing_texts(connection: Connection, keys: Collection[bytes]) -> list[bytes]:
    """Return those of the keys of texts that no text has."""
    known = find_existing(connection, _KNOWN_KEYS, keys)
    return [key for key in keys if key not in known]


def _find_missing_chunks(
    connection: Connection, document: DocumentKey, starts: Mapping[bytes, int]
) -> dict[bytes, int]:
    """Return the chunks that a document lacks, or has at another offset. `starts`: offsets by the texts' keys."""
    number = _find_number(connection, document)
    known = dict[bytes, int]()
    for some in split_into_batches(starts if number is not None else ()):
        rows = connection.execute(_STARTS_OF, {"b_document": number, "values": some})
        known.update((row.key, row.start) for row in rows)
    return {key: start for key, start in starts.items() if known.get(key) != start}


def _find_number(connection: Connection, document: DocumentKey) -> int | None:
    """Return the number of a document's row; None without one."""
    number: int | None = connection.execute(_NUMBER, document.parameters()).scalar()
    return number


def _keys_without_ids(connection: Connection, keys: Collection[bytes], owner: Mapping[str, str]) -> list[bytes]:
    """Return the keys of texts whose token ids are missing. `owner`: the tokenizer and the namespace."""
    known = find_existing(connection, _KEYS_WITH_IDS, keys, **owner)
    return [key for key in keys if key not in known]


def _decode_ids(data: object) -> NDArray[np.uint32]:
    """Return the token ids of a row. A damaged row whose value is no list of ids has none, and is never found."""
    if not isinstance(data, bytes) or len(data) % _ID_DTYPE.itemsize:
        data = b""
    return np.frombuffer(data, _ID_DTYPE)
