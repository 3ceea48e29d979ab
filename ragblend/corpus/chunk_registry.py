"""Registry of ingested chunks: their texts and token ids, so that they are found again in prompts.

Two texts are identical if they are equal after `strip()`. A text belongs to documents: an index is one, and so is each
document to which a framework gives an id. When the last of them releases the text, its KV can be deleted. The file also
lists the chunks that each stored entry holds or was computed after, so that the entries of a removed text are found
without reading them. It lists the stored entries, so that a missing one is noticed, and the vectors of chunks that
frameworks add, which are in no index. Token ids belong to one tokenizer and one namespace. Depends on strings, ids and
one SQLite file, not on KV, engines or frameworks.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from ragblend.errors import CorruptError, StoreMismatchError, is_unicode
from ragblend.files.directory import remove_file, to_write_error
from ragblend.files.places import user_path
from ragblend.files.sqlite import connect, row_checksum, transaction, truncate_log, wrap_sqlite_errors
from ragblend.files.store_folder import REGISTRY_FILE as REGISTRY_FILE

_TABLE, _HOLDERS, _STORED, _SIMILAR = "registered_texts", "text_holders", "stored_kv", "similar_variants"
_IDS, _ENTRIES, _VERSIONS = "chunk_token_ids", "chunk_entries", "document_versions"
_VERSION = 5
_SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS {_TABLE} "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, text TEXT NOT NULL)",
    f"CREATE TABLE IF NOT EXISTS {_HOLDERS} "
    "(document TEXT NOT NULL, key BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (document, key)) WITHOUT ROWID",
    f"CREATE INDEX IF NOT EXISTS holders_by_text ON {_HOLDERS} (key)",
    f"CREATE TABLE IF NOT EXISTS {_STORED} "
    "(key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS {_SIMILAR} "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT NOT NULL UNIQUE, key BLOB NOT NULL, embedder TEXT NOT NULL, "
    "vector BLOB NOT NULL, is_stored INTEGER NOT NULL, checksum INTEGER NOT NULL)",
    f"CREATE INDEX IF NOT EXISTS variants_by_text ON {_SIMILAR} (key)",
    f"CREATE INDEX IF NOT EXISTS missing_variants ON {_SIMILAR} (embedder) WHERE NOT is_stored",
    f"CREATE TABLE IF NOT EXISTS {_ENTRIES} "
    "(ids_hash BLOB NOT NULL, namespace TEXT NOT NULL, entry TEXT NOT NULL, checksum INTEGER NOT NULL, "
    "PRIMARY KEY (ids_hash, namespace, entry)) WITHOUT ROWID",
    f"CREATE INDEX IF NOT EXISTS entries_by_key ON {_ENTRIES} (entry)",
    f"CREATE TABLE IF NOT EXISTS {_VERSIONS} "
    "(document TEXT PRIMARY KEY, version TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS {_IDS} "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, tokenizer TEXT NOT NULL, namespace TEXT NOT NULL, key BLOB NOT NULL, "
    "ids BLOB NOT NULL, checksum INTEGER NOT NULL)",
    f"CREATE UNIQUE INDEX IF NOT EXISTS ids_by_text ON {_IDS} (key, tokenizer, namespace)",
    f"PRAGMA user_version = {_VERSION}",
)
_TABLES = {sql.split()[5]: sql.replace("IF NOT EXISTS ", "") for sql in _SCHEMA if "CREATE TABLE" in sql}
_DAMAGED_ROWS = {
    "texts": f"FROM {_TABLE} WHERE key IS NOT text_key(text)",  # their key is their checksum
    "holders of texts": f"FROM {_HOLDERS} WHERE checksum IS NOT row_checksum(document, key)",
    "stored entries": f"FROM {_STORED} WHERE checksum IS NOT row_checksum(key, fingerprint)",
    "token ids of texts": f"FROM {_IDS} WHERE checksum IS NOT row_checksum(tokenizer, namespace, key, ids)",
    "vectors of texts": f"FROM {_SIMILAR} WHERE checksum IS NOT row_checksum(entry, key, embedder, vector)",
    "entries of chunks": f"FROM {_ENTRIES} WHERE checksum IS NOT row_checksum(ids_hash, namespace, entry)",
    "versions of documents": f"FROM {_VERSIONS} WHERE checksum IS NOT row_checksum(document, version)",
}
_ADDED_LATER = {3: (_IDS, _ENTRIES, _VERSIONS), 4: (_ENTRIES, _VERSIONS)}
"""The tables that files of an earlier version lack, by version."""
_FORMER_SIMILAR = "similar_versions"
_ALL_RECORDED = (b"", "", "")
"""The row of `chunk_entries` that says: every entry in the store's folder is recorded."""

_SOUND_VARIANT = "s.checksum IS row_checksum(s.entry, s.key, s.embedder, s.vector)"
_IS_RECORDED = f"SELECT 1 FROM {_ENTRIES} WHERE ids_hash = ? AND namespace = ? AND entry = ?"
_RECORD_ENTRY = f"INSERT OR IGNORE INTO {_ENTRIES} VALUES (?, ?, ?, ?)"
_SOUND_IDS = "checksum IS row_checksum(tokenizer, namespace, key, ids)"


class SimilarVariant(NamedTuple):
    """The variant, computed after similar chunks, of a chunk that a framework has brought."""

    entry: str  # the key of its KV: of one model, prefix and namespace
    text: str
    vector: bytes  # [dim] little-endian float32
    is_stored: bool = False


class ChunkRegistry:
    """Texts of ingested chunks, in the SQLite file `path`, or in memory if it is None.

    Safe between threads and processes: the next call sees what another process has added. `close` closes the file; the
    next call opens it again. Raises CorruptError for a damaged file, StoreMismatchError for a file with other tables.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = user_path(path, "registry").absolute() if path is not None else None
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._num_id_changes = 0  # by this object, whose connection does not count its own commits
        _OPEN_REGISTRIES.add(self)
        with self._locked():  # fail here rather than at the first prompt
            pass

    # --- what it holds ---

    def texts(self) -> Iterator[str]:
        """Return every text, stripped, in the order in which they were added."""
        with self._locked() as connection:
            return iter([text for (text,) in connection.execute(f"SELECT text FROM {_TABLE} ORDER BY id")])

    def __len__(self) -> int:
        with self._locked() as connection:
            return int(connection.execute(f"SELECT count(*) FROM {_TABLE}").fetchone()[0])

    def __contains__(self, text: object) -> bool:
        query = f"SELECT 1 FROM {_TABLE} WHERE key = ?"
        with self._locked() as connection:
            normalized = _normalize(text) if isinstance(text, str) else ""
            return connection.execute(query, (_key(normalized),)).fetchone() is not None

    def texts_of(self, document: str) -> set[str]:
        """Return the texts that belong to a document."""
        query = f"SELECT t.text FROM {_TABLE} t JOIN {_HOLDERS} h ON h.key = t.key WHERE h.document = ?"
        with self._locked() as connection:
            return {text for (text,) in connection.execute(query, (document,))}

    def documents_of(self, text: str) -> list[str]:
        """Return the documents that have a text."""
        with self._locked() as connection:
            query = f"SELECT document FROM {_HOLDERS} WHERE key = ? ORDER BY document"
            return [name for (name,) in connection.execute(query, (_key(_normalize(text)),))]

    # --- changing it: adding what is known writes nothing ---

    def add(self, texts: Iterable[str], document: str = "") -> int:
        """Add texts to `document` ("": an index); blank ones are skipped. Return the number of new texts."""
        known = list(dict.fromkeys(filter(None, map(_normalize, texts))))
        with self._locked() as connection:
            holds = f"SELECT 1 FROM {_HOLDERS} WHERE document = ? AND key = ?"
            is_known = f"SELECT 1 FROM {_TABLE} WHERE key = ?"
            keys = {_key(text): text for text in known}
            new = [pair for pair in keys.items() if connection.execute(is_known, pair[:1]).fetchone() is None]
            missing = [(document, key) for key in keys if connection.execute(holds, (document, key)).fetchone() is None]
            if new or missing:
                with self._write_transaction():
                    connection.executemany(f"INSERT OR IGNORE INTO {_TABLE} (key, text) VALUES (?, ?)", new)
                    connection.executemany(
                        f"INSERT OR IGNORE INTO {_HOLDERS} VALUES (?, ?, ?)", map(_with_checksum, missing)
                    )
        return len(new)

    def version_of(self, document: str) -> str:
        """Return the version of a document that `set_version` recorded; "" for none."""
        query = f"SELECT version FROM {_VERSIONS} WHERE document = ? AND checksum IS row_checksum(document, version)"
        with self._locked() as connection:
            row = connection.execute(query, (document,)).fetchone()
        return str(row[0]) if row is not None else ""

    def set_version(self, document: str, version: str) -> None:
        """Record the version of a document; "" removes the record."""
        with self._write_transaction() as connection:
            connection.execute(f"DELETE FROM {_VERSIONS} WHERE document = ?", (document,))
            if version:
                connection.execute(f"INSERT INTO {_VERSIONS} VALUES (?, ?, ?)", _with_checksum((document, version)))

    def preview_release(self, texts_of: Mapping[str, Iterable[str]]) -> list[str]:
        """Return the texts that no document would have if each of these documents had the texts given here alone."""
        lost: dict[str, set[str]] = {}
        with self._locked() as connection:
            for document, texts in texts_of.items():
                for text in self.texts_of(document) - set(map(_normalize, texts)):
                    lost.setdefault(text, set()).add(document)
            holders = f"SELECT document FROM {_HOLDERS} WHERE key = ? LIMIT ?"
            return sorted(
                text
                for text, losing in lost.items()
                if losing.issuperset(name for (name,) in connection.execute(holders, (_key(text), len(losing) + 1)))
            )

    def release(self, texts: Iterable[str], document: str = "") -> list[str]:
        """Remove texts from `document`. Return those that no other document has; they are deleted."""
        released = list(dict.fromkeys(map(_normalize, texts)))
        if not released:
            return []
        with self._write_transaction() as connection:
            rows = ((document, _key(text)) for text in released)
            connection.executemany(f"DELETE FROM {_HOLDERS} WHERE document = ? AND key = ?", rows)
            gone = [text for text in released if not self._has_document(text)]
            self.remove(gone)
        return gone

    def remove(self, texts: Iterable[str]) -> int:
        """Delete texts from all documents. Return the number of deleted texts."""
        normalized = list(dict.fromkeys(map(_normalize, texts)))
        if not normalized:
            return 0
        with self._write_transaction() as connection:
            keys = [(_key(text),) for text in normalized]
            # By their keys: a row of which a bit changed goes as well.
            num_removed = connection.executemany(f"DELETE FROM {_TABLE} WHERE key = ?", keys).rowcount
            for table in (_HOLDERS, _SIMILAR, _IDS):
                connection.executemany(f"DELETE FROM {table} WHERE key = ?", keys)
            self._num_id_changes += 1
            return num_removed

    @contextmanager
    def block_additions(self) -> Iterator[Callable[[bytes], bool]]:
        """Prevent every process from adding texts inside the block. Yield a function that returns True for a stored
        text's key.

        Hold the block briefly: writers of other processes wait for it.
        """
        query = f"SELECT 1 FROM {_TABLE} WHERE key = ?"
        with self._write_transaction() as connection:
            yield lambda key: connection.execute(query, (key,)).fetchone() is not None

    # --- token ids ---

    def add_ids(self, chunks: Iterable[tuple[str, Sequence[int]]], tokenizer: str, namespace: str) -> None:
        """Store the token ids of texts for a tokenizer (its fingerprint) and a namespace; intact rows are left as they
        are.
        """
        known = f"SELECT 1 FROM {_IDS} WHERE key = ? AND tokenizer = ? AND namespace = ? AND {_SOUND_IDS}"
        insert = f"INSERT OR REPLACE INTO {_IDS} (tokenizer, namespace, key, ids, checksum) VALUES (?, ?, ?, ?, ?)"
        rows = {_key(text.strip()): np.asarray(ids, "<u4").tobytes() for text, ids in chunks if is_unicode(text)}
        with self._locked() as connection:
            new = [key for key in rows if connection.execute(known, (key, tokenizer, namespace)).fetchone() is None]
            if new:
                with self._write_transaction():
                    connection.executemany(
                        insert, (_with_checksum((tokenizer, namespace, key, rows[key])) for key in new)
                    )
                    self._num_id_changes += 1

    def remove_ids(self, text: str, tokenizer: str, namespace: str) -> None:
        """Delete the token ids of a text."""
        if is_unicode(text):
            with self._write_transaction() as connection:
                delete = f"DELETE FROM {_IDS} WHERE key = ? AND tokenizer = ? AND namespace = ?"
                connection.execute(delete, (_key(text.strip()), tokenizer, namespace))
                self._num_id_changes += 1

    def remove_ids_without_text(self) -> None:
        """Delete the token ids of chunks that prompts named and no document has added."""
        with self._write_transaction() as connection:
            connection.execute(f"DELETE FROM {_IDS} WHERE key NOT IN (SELECT key FROM {_TABLE})")
            self._num_id_changes += 1

    def ids_version(self) -> tuple[int, int]:
        """Return a value that changes with every change of the token ids, by whichever process."""
        with self._locked() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0]), self._num_id_changes

    def ids_after(self, number: int, tokenizer: str, namespace: str) -> list[tuple[int, NDArray[np.uint32]]]:
        """Return the number and the token ids of each text added after the one of `number`, from intact rows."""
        owned = f"FROM {_IDS} WHERE id > ? AND tokenizer = ? AND namespace = ?"
        query = f"SELECT id, ids {owned} AND {_SOUND_IDS} ORDER BY id"
        with self._locked() as connection:
            rows = connection.execute(query, (number, tokenizer, namespace)).fetchall()
        return [(row_id, np.frombuffer(ids, "<u4")) for row_id, ids in rows]

    def read_ids(self, number: int) -> NDArray[np.uint32] | None:
        """Return the token ids of the text of this number; None if it was deleted or its row is damaged."""
        with self._locked() as connection:
            row = connection.execute(f"SELECT ids FROM {_IDS} WHERE id = ? AND {_SOUND_IDS}", (number,)).fetchone()
        return np.frombuffer(row[0], "<u4") if row is not None else None

    def documents_with_ids(self, number: int) -> list[str]:
        """Return the documents that have the text of this number."""
        query = f"SELECT document FROM {_IDS} JOIN {_HOLDERS} USING (key) WHERE id = ? ORDER BY document"
        with self._locked() as connection:
            return [name for (name,) in connection.execute(query, (number,))]

    def count_ids(self, tokenizer: str, namespace: str) -> int:
        """Return the number of texts with token ids."""
        query = f"SELECT count(*) FROM {_IDS} WHERE tokenizer = ? AND namespace = ?"
        with self._locked() as connection:
            return int(connection.execute(query, (tokenizer, namespace)).fetchone()[0])

    def has_ids(self, text: str, tokenizer: str, namespace: str) -> bool:
        """Return True if an intact row has the token ids of this text."""
        query = f"SELECT 1 FROM {_IDS} WHERE key = ? AND tokenizer = ? AND namespace = ? AND {_SOUND_IDS}"
        with self._locked() as connection:
            return connection.execute(query, (_key(_normalize(text)), tokenizer, namespace)).fetchone() is not None

    # --- what is stored beside it ---

    def record_stored(self, keys: Iterable[str], fingerprint: str) -> None:
        """Record entries that were stored, and the fingerprint of their model."""
        with self._locked() as connection:
            is_known = f"SELECT 1 FROM {_STORED} WHERE key = ?"
            each = dict.fromkeys(keys)
            if new := [(key, fingerprint) for key in each if connection.execute(is_known, (key,)).fetchone() is None]:
                with self._write_transaction():
                    connection.executemany(
                        f"INSERT OR IGNORE INTO {_STORED} VALUES (?, ?, ?)", map(_with_checksum, new)
                    )

    def remove_stored(self, keys: Iterable[str]) -> None:
        """Remove the records of entries that are deleted, so that they do not count as missing."""
        with self._write_transaction() as connection:
            connection.executemany(f"DELETE FROM {_STORED} WHERE key = ?", ((key,) for key in keys))

    def stored(self) -> dict[str, str]:
        """Return the key of every entry that was stored and not deleted since, with its model's fingerprint; intact
        rows only.
        """
        sound = "WHERE checksum IS row_checksum(key, fingerprint)"  # a damaged key may name no file at all
        with self._locked() as connection:
            return dict(connection.execute(f"SELECT key, fingerprint FROM {_STORED} {sound} ORDER BY key").fetchall())

    # --- which chunks an entry holds or was computed after ---

    def record_entry(self, entry: str, chunks: Iterable[Sequence[int]], namespace: str) -> None:
        """Record that the entry of this key holds, or was computed after, the chunks of these token ids."""
        rows = [(_ids_hash(ids), namespace, entry) for ids in chunks]
        with self._locked() as connection:
            if new := [row for row in rows if connection.execute(_IS_RECORDED, row).fetchone() is None]:
                with self._write_transaction():
                    connection.executemany(_RECORD_ENTRY, map(_with_checksum, new))

    def entries_of(self, chunks: Iterable[Sequence[int]], namespace: str) -> list[list[str]]:
        """Return for each chunk the entries that hold it, or were computed after it, from intact rows."""
        query = (
            f"SELECT entry FROM {_ENTRIES} WHERE ids_hash = ? AND namespace = ? "
            "AND checksum IS row_checksum(ids_hash, namespace, entry) ORDER BY entry"
        )
        with self._locked() as connection:
            rows = (connection.execute(query, (_ids_hash(ids), namespace)).fetchall() for ids in chunks)
            return [[entry for (entry,) in found] for found in rows]

    def remove_entries(self, entries: Iterable[str]) -> None:
        """Remove the records of entries that were deleted."""
        with self._write_transaction() as connection:
            connection.executemany(f"DELETE FROM {_ENTRIES} WHERE entry = ?", ((entry,) for entry in entries if entry))

    @property
    def has_all_entries(self) -> bool:
        """Return True if every entry in the store's folder is recorded, also those that an earlier version stored."""
        with self._locked() as connection:
            return connection.execute(_IS_RECORDED, _ALL_RECORDED).fetchone() is not None

    def set_has_all_entries(self) -> None:
        """Record that every entry in the store's folder is recorded."""
        with self._write_transaction() as connection:
            connection.execute(_RECORD_ENTRY, _with_checksum(_ALL_RECORDED))

    # --- similar variants of what frameworks bring ---

    def variants_after(self, number: int, embedder: str) -> list[tuple[int, SimilarVariant]]:
        """Return the variants whose vectors this embedder made, with their numbers, in the order in which they were
        recorded.

        Variants up to `number` and damaged rows are left out.
        """
        query = (
            f"SELECT s.id, s.entry, t.text, s.vector, s.is_stored FROM {_SIMILAR} s JOIN {_TABLE} t ON t.key = s.key "
            f"WHERE s.id > ? AND s.embedder = ? AND {_SOUND_VARIANT} ORDER BY s.id"
        )
        with self._locked() as connection:
            rows = connection.execute(query, (number, embedder)).fetchall()
        return [(row[0], SimilarVariant(*row[1:])) for row in rows]

    def count_variants(self, embedder: str) -> int:
        """Return the number of variants whose vectors this embedder made."""
        with self._locked() as connection:
            query = f"SELECT count(*) FROM {_SIMILAR} WHERE embedder = ?"
            return int(connection.execute(query, (embedder,)).fetchone()[0])

    def missing_variants(self, embedder: str) -> list[SimilarVariant]:
        """Return the variants that are requested and not stored, from intact rows."""
        query = (
            f"SELECT s.entry, t.text, s.vector, s.is_stored FROM {_SIMILAR} s JOIN {_TABLE} t ON t.key = s.key "
            f"WHERE NOT s.is_stored AND s.embedder = ? AND {_SOUND_VARIANT} ORDER BY s.id"
        )
        with self._locked() as connection:
            return [SimilarVariant(*row) for row in connection.execute(query, (embedder,))]

    def has_variant(self, entry: str, embedder: str) -> bool:
        """Return True if an intact row records the variant with a vector of this embedder."""
        query = f"SELECT 1 FROM {_SIMILAR} s WHERE s.entry = ? AND s.embedder = ? AND {_SOUND_VARIANT}"
        with self._locked() as connection:
            return connection.execute(query, (entry, embedder)).fetchone() is not None

    def similar_entries(self) -> list[str]:
        """Return the keys of the entries of stored variants."""
        with self._locked() as connection:
            query = f"SELECT entry FROM {_SIMILAR} WHERE is_stored ORDER BY entry"
            return [entry for (entry,) in connection.execute(query)]

    def has_similar_entries(self) -> bool:
        """Return True if a variant is stored."""
        with self._locked() as connection:
            return connection.execute(f"SELECT 1 FROM {_SIMILAR} WHERE is_stored LIMIT 1").fetchone() is not None

    def record_similar(self, variants: Iterable[SimilarVariant], embedder: str) -> None:
        """Record requested variants. They replace earlier records of the same entries."""
        insert = (
            f"INSERT OR REPLACE INTO {_SIMILAR} (entry, key, embedder, vector, is_stored, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?)"
        )
        rows: list[tuple[object, ...]] = []
        for each in variants:
            columns = (each.entry, _key(each.text.strip()), embedder, each.vector)
            rows.append((*columns, each.is_stored, row_checksum(*columns)))
        with self._write_transaction() as connection:
            connection.executemany(insert, rows)

    def set_similar_stored(self, entries: Iterable[str], *, is_stored: bool) -> None:
        """Record whether variants are stored now."""
        with self._write_transaction() as connection:
            rows = ((is_stored, entry) for entry in entries)
            connection.executemany(f"UPDATE {_SIMILAR} SET is_stored = ? WHERE entry = ?", rows)

    def remove_variants(self, entries: Iterable[str]) -> None:
        """Delete the records of variants that are no longer requested."""
        with self._write_transaction() as connection:
            connection.executemany(f"DELETE FROM {_SIMILAR} WHERE entry = ?", ((entry,) for entry in entries))

    # --- its bytes ---

    def find_problems(self) -> list[str]:
        """Return one sentence for each problem with the file. Raises CorruptError if it cannot be read at all."""
        with self._locked() as connection:
            found = [f"{self.path}: {line}" for (line,) in connection.execute("PRAGMA integrity_check") if line != "ok"]
            for what, rows in _DAMAGED_ROWS.items():
                if count := connection.execute(f"SELECT count(*) {rows}").fetchone()[0]:
                    found.append(f"{self.path}: {count} {what} are not what was written")
            return found

    def remove_damaged_rows(self) -> None:
        """Delete the rows whose checksum does not match. The documents that they belonged to add them again when
        ingested.
        """
        with self._locked() as connection:
            for rows in _DAMAGED_ROWS.values():
                connection.execute(f"DELETE {rows}")
            connection.execute(f"DELETE FROM {_ENTRIES} WHERE entry = ''")  # the entries are read and recorded again
        self.close()

    def truncate_log(self) -> None:
        """Remove deleted rows from the file's write-ahead log, where they remain until other processes have stopped
        reading.
        """
        with self._locked() as connection:
            truncate_log(connection)

    def close(self) -> None:
        """Close the file. No data is lost; the next call opens the file again."""
        with self._lock:
            if self._connection is not None and self.path is not None:
                self._connection.close()
                self._connection = None
                self._num_id_changes += 1  # the next connection counts from the beginning

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside ---

    def _reset_after_fork(self) -> None:
        """Replace the lock and the connection in a forked process.

        The thread that held the lock does not exist there, and SQLite requires a connection per process.
        """
        self._lock = threading.RLock()
        if self._connection is not None and self.path is not None:
            _PARENT_CONNECTIONS.append(self._connection)  # closed here, it would let go of the parent's locks
            self._connection = None
            self._num_id_changes += 1

    def _has_document(self, text: str) -> bool:
        """Return True if a document has the text."""
        query = f"SELECT 1 FROM {_HOLDERS} WHERE key = ? LIMIT 1"
        with self._locked() as connection:
            return connection.execute(query, (_key(text),)).fetchone() is not None

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock; yield the connection."""
        with self._lock, wrap_sqlite_errors(self.path or Path(), _fix_hint(self.path)):
            if self._connection is None:
                self._connection = _open(self.path)
            yield self._connection

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock in a transaction, which excludes other processes; yield the connection."""
        with self._locked() as connection, transaction(connection, "IMMEDIATE"):
            yield connection


def _normalize(text: str) -> str:
    """Return the text in the form that is compared; "" for lone surrogates, which are no valid Unicode."""
    return text.strip() if is_unicode(text) else ""


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _with_checksum(columns: tuple[object, ...]) -> tuple[object, ...]:
    return (*columns, row_checksum(*columns))


def _ids_hash(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, "<u4").tobytes(), digest_size=16).digest()


def _open(path: Path | None) -> sqlite3.Connection:
    """Return a connection in autocommit mode to a file that holds the tables; the file is created if missing."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise to_write_error(error, path) from error
    if path is None or (not os.access(path.parent, os.W_OK) and not path.exists()):
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.create_function("row_checksum", -1, row_checksum)  # what is added lives as long as the connection
    else:
        _create_private(path)
        connection = connect(path, f"Move {path} away", create=True)
    try:
        connection.create_function("text_key", 1, _key, deterministic=True)
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
        if tables and tables.keys().isdisjoint(_TABLES):
            raise StoreMismatchError(
                f"{path} is not a registry of chunk texts (it holds the tables {', '.join(sorted(tables))}); "
                "choose another folder for the store: `store='OTHER_DIR'`"
            )
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        has_schema = all(tables.get(name) == sql for name, sql in _TABLES.items())
        if version in _ADDED_LATER and _is_former(tables, version):
            with transaction(connection, "IMMEDIATE"):
                if connection.execute("PRAGMA user_version").fetchone()[0] == version:  # or another process was faster
                    _upgrade(connection)
            version, has_schema = _VERSION, True
        if tables and has_schema != (version == _VERSION):  # other versions have other tables
            raise CorruptError(
                f"{path} is damaged (version {version} with other tables than that has). {_fix_hint(path)}"
            )
        if tables and version != _VERSION:
            raise StoreMismatchError(
                f"{path} is version {version} of a registry, this ragblend reads {_VERSION}; delete it and ingest the "
                "documents again: stored KV is found, not recomputed"
            )
        if not tables:
            with transaction(connection, "IMMEDIATE"):
                for statement in _SCHEMA:
                    connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _create_private(path: Path) -> None:
    """Create the file with its owner's permissions only, as the entries have. SQLite would let other users read it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise to_write_error(error, path) from error


def _is_former(tables: Mapping[str, str], version: int) -> bool:
    """Return True if these are the tables of an earlier version."""
    later = (*_ADDED_LATER[version], _SIMILAR)
    kept = {name: sql for name, sql in _TABLES.items() if name not in later}
    return _FORMER_SIMILAR in tables and all(tables.get(name) == sql for name, sql in kept.items())


def _upgrade(connection: sqlite3.Connection) -> None:
    """Convert the tables of an earlier version to those of this version."""
    for statement in _SCHEMA:
        connection.execute(statement)
    columns = "entry, key, embedder, vector, is_stored, checksum"
    connection.execute(f"INSERT INTO {_SIMILAR} ({columns}) SELECT {columns} FROM {_FORMER_SIMILAR} ORDER BY entry")
    connection.execute(f"DROP TABLE {_FORMER_SIMILAR}")


def _fix_hint(path: Path | None) -> str:
    return (
        f"Mend it: ragblend verify --repair --store {path and path.parent}; or delete it and ingest the documents "
        "again: stored KV is found, not recomputed"
    )


_OPEN_REGISTRIES: WeakSet[ChunkRegistry] = WeakSet()
_PARENT_CONNECTIONS: list[sqlite3.Connection] = []


_FORK_WAIT_S = 1.0
_fork_locks: list[Any] = []


def _before_fork() -> None:
    """Wait up to `_FORK_WAIT_S` per registry until no thread is inside SQLite, whose locks a child would never get."""
    _fork_locks.extend(each._lock for each in list(_OPEN_REGISTRIES) if each._lock.acquire(timeout=_FORK_WAIT_S))


def _after_fork() -> None:
    for lock in _fork_locks:
        lock.release()
    _fork_locks.clear()


def _in_child() -> None:
    _fork_locks.clear()
    for registry in list(_OPEN_REGISTRIES):
        registry._reset_after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)

_IN_MEMORY: WeakKeyDictionary[Any, ChunkRegistry] = WeakKeyDictionary()
_IN_MEMORY_LOCK = threading.Lock()


def drop_registry(root: Path) -> None:
    """Delete a damaged registry from a store's directory. The next process that adds texts creates it again."""
    for suffix in ("-wal", "-shm", ""):
        remove_file(root / f"{REGISTRY_FILE}{suffix}")


def store_folders(store: Any) -> list[Path]:
    """Return the local folders in which a KVStore stores its files."""
    roots = (getattr(tier, "root", None) for tier in getattr(store, "tiers", (store,)))
    return [root for root in roots if isinstance(root, Path)]


def open_registry(store: Any) -> ChunkRegistry:
    """Return the registry of a KVStore: the file next to its local disk tier, else one in memory that lives with the
    store.
    """
    for root in store_folders(store):
        return ChunkRegistry(root / REGISTRY_FILE)
    with _IN_MEMORY_LOCK:
        return _IN_MEMORY.setdefault(store, ChunkRegistry())
