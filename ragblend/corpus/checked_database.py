"""The SQLite file of an index: how it is made, opened and checked, and rows that carry checksums.

A checksum is looked at whenever its row is read; SQLite's errors leave here as ours, with the way out. Knows the
tables of `rows`, and nothing of what documents are.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from ragblend.corpus.schema import CHECKED_COLUMNS, SCHEMA, SCHEMA_VERSION
from ragblend.errors import CorruptError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.directory import remove_file, to_write_error
from ragblend.files.sqlite import connect, row_checksum, transaction, truncate_log, wrap_sqlite_errors
from ragblend.files.store_folder import DATABASE, MANIFEST

_CHECK_AT_OPEN_BYTES = 64 * 2**20  # a larger file is checked as its rows are read, and by `problems`


class CheckedDatabase:
    """One connection, shared by threads. Each method is a transaction, or a part of the one that is open.

    Raises CorruptError (bytes changed), StoreMismatchError (another schema), StoreFullError, or RagblendError when
    another process holds the write lock for longer than 30 seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._file = folder, folder / DATABASE
        self._lock = threading.RLock()
        self._process = os.getpid()
        with _wrap_errors(folder):
            self._connection = connect(self._file, make_reingest_hint(folder))
            try:
                self._check()
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the database, saving nothing."""
        with self._lock:
            self._connection.close()

    def read_transaction(self) -> AbstractContextManager[None]:
        """One state of the database for several reads; others may write meanwhile."""
        return self._transaction("DEFERRED")

    def write_transaction(self) -> AbstractContextManager[None]:
        """Several changes at once, or none. Nobody else adds or removes documents meanwhile, from any process."""
        return self._transaction("IMMEDIATE")

    def read_metadata(self) -> dict[str, str]:
        """What the creator recorded."""
        facts: dict[str, str] = json.loads(self._meta("facts"))
        return facts

    def generation(self) -> int:
        """How many times documents changed."""
        return int(self._meta("generation"))

    def write_metadata(self, **changes: object) -> None:
        """Record other facts than the creator did."""
        with self.write_transaction():
            self._put("meta", ("facts", _facts_as_text(self.read_metadata() | changes)))

    def truncate_log(self) -> None:
        """Let what was removed leave the database's log, where it stands until others have stopped reading."""
        with self._lock, _wrap_errors(self.path):
            truncate_log(self._connection)

    # --- for the classes above ---

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self.read_transaction():
            return self._connection.execute(query, values).fetchall()

    def _select_checked(
        self, table: str, columns: str, rest: str, values: Sequence[object] = ()
    ) -> list[tuple[Any, ...]]:
        """Columns of the rows that `rest` selects. Raises CorruptError when one is not what was written."""
        found = self._rows(
            f"SELECT checksum IS row_checksum({CHECKED_COLUMNS[table]}), {columns} FROM {table} {rest}", values
        )
        if not all(row[0] for row in found):
            raise CorruptError(
                f"{self._file}: a row of {table} is not what was written. {make_reingest_hint(self.path)}"
            )
        return [row[1:] for row in found]

    def _has(self, table: str, column: str, value: object) -> bool:
        return bool(self._rows(f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1", (value,)))

    def _put(self, table: str, columns: Sequence[object]) -> None:
        """A row with its checksum, in place of the one of the same key."""
        values = (*columns, row_checksum(*columns))
        places = ", ".join("?" * len(values))
        query = f"INSERT OR REPLACE INTO {table} ({CHECKED_COLUMNS[table]}, checksum) VALUES ({places})"
        self._connection.execute(query, values)

    def _advance(self) -> int:
        generation = self.generation() + 1
        self._put("meta", ("generation", str(generation)))
        return generation

    def _meta(self, key: str) -> str:
        value = next((str(found) for (found,) in self._select_checked("meta", "value", "WHERE key = ?", (key,))), "")
        if not value or (key == "generation" and not value.isdecimal()):
            raise CorruptError(f"{self._file} has lost its {key!r}. {make_reingest_hint(self.path)}")
        return value

    def _check(self) -> None:
        tables = dict(self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
        if "chunks" not in tables:
            raise CorruptError(f"{self._file} holds no index. {make_reingest_hint(self.path)}")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise StoreMismatchError(
                f"{self.path} has index schema {version}, this ragblend reads {SCHEMA_VERSION}; "
                "use the ragblend that made it, or ingest again into a new folder"
            )
        ours = {statement.replace("IF NOT EXISTS ", "") for statement in SCHEMA if "TABLE" in statement}
        if set(tables.values()) != ours:
            raise CorruptError(f"{self._file} has other tables than ragblend makes. {make_reingest_hint(self.path)}")
        if self._file.stat().st_size <= _CHECK_AT_OPEN_BYTES:
            # Not quick_check, which skips the indexes: a chunk missing from one would be silently unfindable.
            verdict = self._connection.execute("PRAGMA integrity_check").fetchone()[0]
            if verdict != "ok":
                raise CorruptError(f"{self._file} is damaged ({verdict}). {make_reingest_hint(self.path)}")
        self._meta("facts")

    @contextmanager
    def _transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
        if self._process != os.getpid():
            raise RagblendError(
                f"the index {self.path} was opened before this process was forked; SQLite cannot be carried over. "
                "Open it in this process"
            )
        with self._lock, _wrap_errors(self.path), transaction(self._connection, kind):
            yield


def create_database(folder: Path, facts: Mapping[str, object]) -> None:
    """Make an empty database in `folder` with `read_metadata` in its meta table; an existing one stays as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{folder} is not a folder; name a folder for the index") from error
    except OSError as error:
        raise to_write_error(error, folder) from error
    rows = (("facts", _facts_as_text(facts)), ("generation", "0"))
    # One transaction: killed inside it, there is no index rather than half of one.
    with _open_connection(folder, create=True) as connection, transaction(connection, "IMMEDIATE"):
        for statement in SCHEMA:
            connection.execute(statement)
        checked = [(*row, row_checksum(*row)) for row in rows]
        connection.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?, ?)", checked)


def is_blank(folder: Path) -> bool:
    """Whether creation was killed before its transaction: a file without a single table."""
    with _open_connection(folder) as connection:
        return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def make_reingest_hint(folder: Path) -> str:
    """The way out of a damaged database."""
    return (
        f"To index again, {explain_reindexing(folder)}. What was being removed goes with: ragblend gc --orphans "
        f"--store {folder}"
    )


def explain_reindexing(folder: Path) -> str:
    """Return how the documents of a store are indexed anew, in words that end a sentence."""
    return (
        f"delete the files {folder / DATABASE}* and {folder / MANIFEST}, and run ragblend ingest DOCS --store {folder} "
        "(stored KV is found, not recomputed)"
    )


def remove_database(folder: Path) -> None:
    """Remove the documents of a store, with the manifest; without one their vectors are made anew."""
    for name in (MANIFEST, f"{DATABASE}-wal", f"{DATABASE}-shm", DATABASE):
        remove_file(folder / name)


def _facts_as_text(facts: Mapping[str, object]) -> str:
    return json.dumps({key: str(value) for key, value in facts.items()})


@contextmanager
def _open_connection(folder: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    with _wrap_errors(folder):
        connection = connect(folder / DATABASE, make_reingest_hint(folder), create=create)
        try:
            yield connection
        finally:
            connection.close()


def _wrap_errors(folder: Path) -> AbstractContextManager[None]:
    return wrap_sqlite_errors(folder / DATABASE, make_reingest_hint(folder))
