"""The catalogue of a store: how its database is opened, checked and written.

Every class that keeps tables in it is a `Catalog`. Reads see the last commit of any process; several changes are one
transaction, in which no other process writes. What SQLite and PostgreSQL do differently is in their `Dialect`. Knows
the schema; knows no texts, documents or KV.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from sqlalchemy import Connection, Row, Select, delete, select
from sqlalchemy.exc import DBAPIError

from ragblend.catalog.dialect import Dialect, TransactionKind
from ragblend.catalog.postgres import PostgresDialect, is_postgres_url
from ragblend.catalog.schema import (
    CHECKED_TABLES,
    ENTRY_CHUNKS,
    TEXTS,
    checksummed_columns,
    is_intact,
    text_key,
)
from ragblend.catalog.sqlite import SqliteDialect
from ragblend.config import trusted_setting
from ragblend.errors import CorruptError
from ragblend.files.directory import remove_file
from ragblend.files.places import user_path
from ragblend.files.store_folder import CATALOG_FILE, FORMER_INDEX_FILE, FORMER_REGISTRY_FILE, FORMER_SERVER_FILE
from ragblend.options import TierOptions

_STREAMED = {"stream_results": True}  # large tables, a part at a time


def find_catalog(folder: Path, url: str | None = None) -> str | Path:
    """Return where the catalogue of the store in `folder` is: at `url`, at that of RAGBLEND_CATALOG or the user's own
    settings where it is None, else in the folder.
    """
    url = url or trusted_setting("catalog")
    return folder / CATALOG_FILE if url is None else str(TierOptions(catalog=url).catalog)


def _open_dialect(place: str | Path | None) -> Dialect:
    if isinstance(place, str) and is_postgres_url(place):
        return PostgresDialect(place)
    return SqliteDialect(user_path(place, "catalog").absolute() if place is not None else None)


class Catalog:
    """The catalogue at `place`: an SQLite file, the URL of a PostgreSQL database, or in memory if it is None.

    Safe between threads and processes: the next call sees what another process has added. `close` closes the file; the
    next call opens it again, as it does where a connection is lost. Raises CorruptError for a damaged file,
    StoreMismatchError for a database with other tables, BackendUnreachableError for a server that does not answer.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        self._dialect = _open_dialect(place)
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._is_writing = False
        self._num_changes = 0  # those that this object's classes count: data_version leaves out its own commits
        _OPEN_CATALOGS.add(self)
        with self._locked():  # fail here rather than at the first prompt
            pass

    @property
    def key(self) -> object:
        """Equal for catalogues over the same database; None for one in memory."""
        return self._dialect.key

    @property
    def name(self) -> str:
        """The place of the database for messages."""
        return self._dialect.name

    @property
    def is_shared(self) -> bool:
        """True for a server's, which stores in other folders, on other machines, may have as well."""
        return self._dialect.is_shared

    def close(self) -> None:
        """Close the file. No data is lost; the next call opens the file again."""
        with self._lock:
            if self._connection is not None and self.key is not None:
                self._connection.close()
                self._connection = None

    def version(self) -> tuple[int, int]:
        """Return a value that changes with every change by another process or object, and when this object changes
        token ids.
        """
        with self._locked() as connection:
            return self._dialect.version(connection), self._num_changes

    def truncate_log(self) -> None:
        """Remove deleted rows from the file's write-ahead log, where they remain until other processes have stopped
        reading.
        """
        with self._locked() as connection:
            self._dialect.truncate_log(connection)

    def find_structure_problems(self) -> list[str]:
        """Return one sentence for each problem with the database itself, whatever its rows hold."""
        with self._locked() as connection:
            return self._dialect.find_problems(connection)

    def find_problems(self) -> list[str]:
        """Return one sentence for each problem with the catalogue. Raises CorruptError if it cannot be read at all."""
        with self._locked():
            found = self.find_structure_problems()
            for what, damaged in self._damaged_rows().items():
                if damaged:
                    found.append(f"{self._dialect.name}: {len(damaged)} {what} are not what was written")
            return found

    def remove_damaged_rows(self) -> None:
        """Delete the rows whose checksum does not match. The documents that they belonged to add them again when
        ingested.
        """
        with self._write() as connection:
            for what, damaged in self._damaged_rows().items():
                table = CHECKED_TABLES.get(what, TEXTS)
                rowid = list(table.primary_key.columns)
                for values in damaged:
                    connection.execute(delete(table).where(*(c == v for c, v in zip(rowid, values, strict=True))))
            # The entries in the store's folder are read and recorded again.
            connection.execute(delete(ENTRY_CHUNKS).where(ENTRY_CHUNKS.c.entry == ""))
        self.close()

    def damage_error(self, what: str) -> CorruptError:
        """Return the error to raise for rows that are not what was written, with what to do about it."""
        return CorruptError(f"{self._dialect.name}: {what}. {self._dialect.fix_hint()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for the classes that keep tables in it ---

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        """Hold the lock; yield the connection. RagblendErrors are raised in place of the database's own."""
        with self._lock:
            is_opened = self._connection is None or self._connection.invalidated  # by an interruption
            try:
                if is_opened:
                    self._connection = self._dialect.connect()
                    self._num_changes += not self.is_shared  # data_version counts from the beginning
                connection = self._connection
                assert connection is not None
                try:
                    yield connection
                finally:
                    if is_opened and self.is_shared:
                        self._connection = None
                        self._dialect.release(connection)
            except Exception:
                with self._dialect.named_errors():
                    raise

    def _rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        """Return the rows that a query finds."""
        with self._locked() as connection:
            return connection.execute(query, values).all()

    @contextmanager
    def _transaction(self, kind: TransactionKind) -> Iterator[Connection]:
        """Hold the lock in a transaction; inside of another one, in that."""
        with self._locked() as connection:
            if self._is_writing:
                yield connection
                return
            self._dialect.begin(connection, kind)
            self._is_writing = True
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                if not connection.invalidated:
                    with suppress(DBAPIError):
                        connection.exec_driver_sql("ROLLBACK")
                raise
            finally:
                self._is_writing = False

    def _write(self) -> AbstractContextManager[Connection]:
        """Hold the lock in a transaction, which excludes other processes; yield the connection."""
        return self._transaction("IMMEDIATE")

    def _damaged_rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return the primary keys of the rows that are not what was written, by what they are."""
        found: dict[str, list[tuple[Any, ...]]] = {"texts": []}
        with self._transaction("DEFERRED") as connection:
            for number, key, content in connection.execute(select(TEXTS), execution_options=_STREAMED):
                if not isinstance(content, str) or key != text_key(content):
                    found["texts"].append((number,))
            for what, table in CHECKED_TABLES.items():
                identity = list(table.primary_key.columns)
                query = select(*identity, *checksummed_columns(table))
                rows = connection.execute(query, execution_options=_STREAMED)
                found[what] = [tuple(row[: len(identity)]) for row in rows if not is_intact(row[len(identity) :])]
        return found


def drop_catalog(root: Path) -> None:
    """Delete a damaged catalogue from a store's directory. The next process that adds texts creates it again."""
    for name in (FORMER_REGISTRY_FILE, FORMER_SERVER_FILE, FORMER_INDEX_FILE, CATALOG_FILE):
        for suffix in ("-wal", "-shm", ""):
            remove_file(root / f"{name}{suffix}")


# --- forks: a process has its own connections ---

_OPEN_CATALOGS: WeakSet[Catalog] = WeakSet()
_PARENT_CONNECTIONS: list[Connection] = []
_FORK_WAIT_S = 1.0
_fork_locks: list[Any] = []


def _before_fork() -> None:
    """Wait up to `_FORK_WAIT_S` per catalogue until no thread is inside a database, whose locks no child gets."""
    _fork_locks.extend(each._lock for each in list(_OPEN_CATALOGS) if each._lock.acquire(timeout=_FORK_WAIT_S))


def _after_fork() -> None:
    for lock in _fork_locks:
        lock.release()
    _fork_locks.clear()


def _in_child() -> None:
    """Replace locks and connections: the thread that held a lock does not exist in the child."""
    _fork_locks.clear()
    for catalog in list(_OPEN_CATALOGS):
        catalog._lock, catalog._is_writing = threading.RLock(), False
        if catalog._connection is not None and catalog.key is not None:
            _PARENT_CONNECTIONS.append(catalog._connection)  # closed here, it would let go of the parent's locks
            catalog._connection = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
