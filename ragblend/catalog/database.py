"""The catalogue of a store: how its SQLite file is made, opened, checked and written.

Every class that keeps tables in it is a `Catalog`. Reads see the last commit of any process; several changes are one
transaction, in which no other process writes. Knows the schema; knows no texts, documents or KV.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, cast
from weakref import WeakSet

from sqlalchemy import Connection, Engine, NullPool, Row, Select, create_engine, delete, select
from sqlalchemy.exc import DBAPIError

from ragblend.catalog.former import read_former_files
from ragblend.catalog.schema import (
    CHECKED_TABLES,
    ENTRY_CHUNKS,
    INDEX_TABLES,
    META,
    METADATA,
    SCHEMA_VERSION,
    TEXTS,
    checked_columns,
    is_intact,
    text_key,
)
from ragblend.errors import CorruptError, StoreMismatchError
from ragblend.files.directory import remove_file, to_write_error
from ragblend.files.places import user_path
from ragblend.files.sqlite import connect, truncate_log, wrap_sqlite_errors
from ragblend.files.store_folder import (
    CATALOG_FILE,
    FORMER_INDEX_FILE,
    FORMER_REGISTRY_FILE,
    FORMER_SERVER_FILE,
)


class Catalog:
    """The catalogue in the SQLite file `path`, or in memory if it is None.

    Safe between threads and processes: the next call sees what another process has added. `close` closes the file; the
    next call opens it again. Raises CorruptError for a damaged file, StoreMismatchError for a file with other tables.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = user_path(path, "catalog").absolute() if path is not None else None
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._is_writing = False
        self._num_changes = 0  # those that this object's classes count: data_version leaves out its own commits
        _OPEN_CATALOGS.add(self)
        with self._locked():  # fail here rather than at the first prompt
            pass

    def close(self) -> None:
        """Close the file. No data is lost; the next call opens the file again."""
        with self._lock:
            if self._connection is not None and self.path is not None:
                self._connection.close()
                self._connection = None

    def version(self) -> tuple[int, int]:
        """Return a value that changes with every change that another process or object makes, and with each of this
        one's to token ids."""
        with self._locked() as connection:
            opened = cast("sqlite3.Connection", connection.connection.dbapi_connection)  # each prompt asks for this
            return int(opened.execute("PRAGMA data_version").fetchone()[0]), self._num_changes

    def truncate_log(self) -> None:
        """Remove deleted rows from the file's write-ahead log, where they remain until other processes have stopped
        reading.
        """
        with self._locked() as connection:
            truncate_log(_sqlite(connection))

    def find_structure_problems(self) -> list[str]:
        """Return one sentence for each problem with the file itself, whatever the rows say."""
        with self._locked() as connection:
            lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            return [f"{self.path}: {line}" for line in lines if line != "ok"]

    def find_problems(self) -> list[str]:
        """Return one sentence for each problem with the file. Raises CorruptError if it cannot be read at all."""
        with self._locked():
            found = self.find_structure_problems()
            for what, damaged in self._damaged_rows().items():
                if damaged:
                    found.append(f"{self.path}: {len(damaged)} {what} are not what was written")
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
        return CorruptError(f"{self.path}: {what}. {fix_hint(self.path)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for the classes that keep tables in it ---

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        """Hold the lock; yield the connection. The database's own errors are raised in place of SQLAlchemy's."""
        with self._lock, wrap_sqlite_errors(self.path or Path(), fix_hint(self.path)):
            try:
                if self._connection is None or self._connection.invalidated:  # by an interruption
                    self._connection = _open(self.path)
                    self._num_changes += 1  # data_version counts from the beginning
                yield self._connection
            except DBAPIError as error:
                if isinstance(error.orig, sqlite3.Error):
                    raise error.orig from error
                raise

    def _rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        """Return the rows that a query finds."""
        with self._locked() as connection:
            return connection.execute(query, values).all()

    @contextmanager
    def _transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[Connection]:
        """Hold the lock in a transaction; inside of another one, in that."""
        with self._locked() as connection:
            if self._is_writing:
                yield connection
                return
            connection.exec_driver_sql(f"BEGIN {kind}")
            self._is_writing = True
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                if not connection.invalidated and _sqlite(connection).in_transaction:
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
        with self._locked() as connection:
            for number, key, content in connection.execute(select(TEXTS)):
                if not isinstance(content, str) or key != text_key(content):
                    found["texts"].append((number,))
            for what, table in CHECKED_TABLES.items():
                identity = list(table.primary_key.columns)
                rows = connection.execute(select(*identity, *checked_columns(table)))
                found[what] = [tuple(row[: len(identity)]) for row in rows if not is_intact(row[len(identity) :])]
        return found


def fix_hint(path: Path | None) -> str:
    """Return what to do about a damaged file."""
    folder = path and path.parent
    return f"Mend it: ragblend verify --repair --store {folder}; or {explain_reingestion(path)}"


def explain_reingestion(path: Path | None) -> str:
    """Return how a store gets a new catalogue, in words that end a sentence."""
    return (
        f"delete {path}* and run ragblend ingest DOCS --store {path and path.parent} (stored KV is found, not "
        "recomputed), and add again what frameworks and servers have added"
    )


def drop_catalog(root: Path) -> None:
    """Delete a damaged catalogue from a store's directory. The next process that adds texts creates it again."""
    for name in (FORMER_REGISTRY_FILE, FORMER_SERVER_FILE, FORMER_INDEX_FILE, CATALOG_FILE):
        for suffix in ("-wal", "-shm", ""):
            remove_file(root / f"{name}{suffix}")


# --- connections ---

_PATH: ContextVar[Path | None] = ContextVar("path of the catalogue that is being opened")


@cache
def _engine() -> Engine:
    """Return the engine of all catalogues, which keeps the compiled statements; each connection is to another file."""
    return create_engine("sqlite://", creator=_connect, poolclass=NullPool)


def _connect() -> sqlite3.Connection:
    path = _PATH.get()
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    return connect(path, f"Move {path} away", create=True)


def _connect_to(path: Path | None) -> Connection:
    token = _PATH.set(path)
    try:
        return _engine().connect()
    finally:
        _PATH.reset(token)


def _sqlite(connection: Connection | None) -> sqlite3.Connection:
    assert connection is not None
    return cast("sqlite3.Connection", connection.connection.dbapi_connection)


def _open(path: Path | None) -> Connection:
    """Return a connection in autocommit mode to a file that holds the tables; the file is created if missing.

    What files of earlier versions have is read into a new one.
    """
    folder = path.parent if path is not None else None
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise to_write_error(error, path) from error
    is_writable = folder is not None and os.access(folder, os.W_OK)
    is_kept = path is not None and (is_writable or path.exists())
    if is_kept and path is not None:
        _create_private(path)
    connection = _connect_to(path if is_kept else None)
    try:
        if is_kept and not is_writable and _is_former(connection):  # it is read in memory, as former files are
            copy, is_kept = _connect_to(None), False
            _sqlite(connection).backup(_sqlite(copy))
            connection.close()
            connection = copy
        _check_schema(connection, path)
        if folder is not None and (is_writable or not is_kept):
            read_former_files(folder, _sqlite(connection), is_kept=is_kept)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_schema(connection: Connection, path: Path | None) -> None:
    """Create the tables in an empty file; raise an error where a file has others."""
    schema = _read_schema(connection)
    if not schema:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not _read_schema(connection):  # or another process was faster
            METADATA.create_all(connection, checkfirst=False)
            _record_schema(connection)
        connection.exec_driver_sql("COMMIT")
        schema = _read_schema(connection)
    tables = {name for kind, name, _ in schema if kind == "table"}
    if META.name in tables and _is_former(connection):
        _add_index_tables(connection)
        schema = _read_schema(connection)
    if tables.isdisjoint(METADATA.tables):
        raise StoreMismatchError(
            f"{path} is not a catalogue (it holds the tables {', '.join(sorted(tables))}); "
            "choose another folder for the store: `store='OTHER_DIR'`"
        )
    version = connection.exec_driver_sql("PRAGMA user_version").scalar()
    query = select(META.c.value).where(META.c.name == "schema")
    recorded = connection.execute(query).scalar() if META.name in tables else None
    if recorded != f"{version} {_digest(schema)}":
        raise CorruptError(f"{path} is damaged (version {version} with other tables than it had). {fix_hint(path)}")
    if version != SCHEMA_VERSION:
        raise StoreMismatchError(
            f"{path} is version {version} of a catalogue, this ragblend reads {SCHEMA_VERSION}; use the ragblend that "
            "made it, or choose another folder for the store: `store='OTHER_DIR'`"
        )


def _is_former(connection: Connection) -> bool:
    """Return True for a catalogue from before it had the tables of an index."""
    return connection.exec_driver_sql("PRAGMA user_version").scalar() == 1


def _add_index_tables(connection: Connection) -> None:
    """Add the tables that a catalogue of version 1 lacks, unless it has other tables than it had."""
    recorded = select(META.c.value).where(META.c.name == "schema")
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    if connection.execute(recorded).scalar() == f"1 {_digest(_read_schema(connection))}":
        METADATA.create_all(connection, tables=INDEX_TABLES, checkfirst=False)
        _record_schema(connection)
    connection.exec_driver_sql("COMMIT")


def _record_schema(connection: Connection) -> None:
    made = f"{SCHEMA_VERSION} {_digest(_read_schema(connection))}"
    connection.execute(delete(META))
    connection.execute(META.insert().values(name="schema", value=made))
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _read_schema(connection: Connection) -> Sequence[tuple[str, str, str]]:
    query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"
    return [(str(kind), str(name), str(sql)) for kind, name, sql in connection.exec_driver_sql(query)]


def _digest(schema: Sequence[tuple[str, str, str]]) -> str:
    return hashlib.blake2b(repr(schema).encode(), digest_size=16).hexdigest()


def _create_private(path: Path) -> None:
    """Create the file with its owner's permissions only, as the entries have. SQLite would let other users read it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise to_write_error(error, path) from error


# --- forks: SQLite requires a connection per process ---

_OPEN_CATALOGS: WeakSet[Catalog] = WeakSet()
_PARENT_CONNECTIONS: list[Connection] = []
_FORK_WAIT_S = 1.0
_fork_locks: list[Any] = []


def _before_fork() -> None:
    """Wait up to `_FORK_WAIT_S` per catalogue until no thread is inside SQLite, whose locks a child would never get."""
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
        if catalog._connection is not None and catalog.path is not None:
            _PARENT_CONNECTIONS.append(catalog._connection)  # closed here, it would let go of the parent's locks
            catalog._connection = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
