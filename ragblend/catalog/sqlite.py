"""A catalogue in an SQLite file, or in memory."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import cast
from uuid import uuid4

from sqlalchemy import Connection, Engine, NullPool, create_engine, select
from sqlalchemy.exc import DBAPIError

from ragblend.catalog.dialect import Dialect, TransactionKind
from ragblend.catalog.schema import FACTS, METADATA, SCHEMA_VERSION
from ragblend.errors import CorruptError, StoreMismatchError, StoreNotWritableError
from ragblend.files.directory import make_write_error
from ragblend.files.network import find_network_file_system
from ragblend.files.sqlite import connect, truncate_log, wrap_sqlite_errors

_PATH: ContextVar[Path | None] = ContextVar("path of the catalogue that is being opened")


class SqliteDialect(Dialect):
    """The SQLite file `path`; None: a database in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.name, self.key = str(path), path

    def connect_and_create_tables(self) -> Connection:
        """Open the file, or create it if it is missing.

        If the file is missing and its folder is read-only, open a database in memory.
        """
        path = self.path
        is_kept = path is not None and (_make_folder(path) or path.exists())
        if is_kept and path is not None:
            _create_private(path)
        self.opened_file_id = self.file_id()  # before the file is opened: another process may replace it in between
        connection = _connect_to(path if is_kept else None)
        try:
            _check_schema(connection, path, self.fix_hint())
            self.identity = (self.opened_file_id, _read_meta(connection, "id"))
        except BaseException:
            connection.close()
            raise
        return connection

    def file_id(self) -> tuple[int, int] | None:
        """Return device and inode of the file at the path; None without a file."""
        if self.path is not None:
            with suppress(OSError):
                status = self.path.stat()
                return status.st_dev, status.st_ino
        return None

    def begin(self, connection: Connection, kind: TransactionKind) -> None:
        """Begin a transaction. An IMMEDIATE one waits for other writers."""
        connection.exec_driver_sql(f"BEGIN {kind}")

    def change_counter(self, connection: Connection) -> int:
        """Return SQLite's data_version, which does not count the connection's own commits."""
        return int(_sqlite(connection).execute("PRAGMA data_version").fetchone()[0])

    def find_problems(self, connection: Connection) -> list[str]:
        """Return the lines of SQLite's integrity check, without "ok"."""
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        return [f"{self.path}: {line}" for line in lines if line != "ok"]

    def truncate_log(self, connection: Connection) -> None:
        """Empty the write-ahead log, which contains deleted rows, unless another process is reading it."""
        truncate_log(_sqlite(connection))

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Raise RagblendErrors in place of SQLite's and SQLAlchemy's errors."""
        try:
            yield
        except (DBAPIError, sqlite3.Error, UnicodeDecodeError, OSError) as error:
            original = error.orig if isinstance(error, DBAPIError) else error
            if not isinstance(original, sqlite3.Error | UnicodeDecodeError | OSError):
                raise
            with wrap_sqlite_errors(self.path or Path(), self.fix_hint()):
                raise original from (error if original is not error else error.__cause__)

    def fix_hint(self) -> str:
        """Return a sentence with the commands that repair or replace a damaged file."""
        folder = self.path and self.path.parent
        return f"Repair it: ragblend verify --repair --store {folder}; or {explain_reingestion(self.path)}"


def explain_reingestion(path: Path | None) -> str:
    """Return the end of a sentence that says how to replace a store's catalogue file by ingesting again."""
    return (
        f"delete {path}* and run ragblend ingest DOCS --store {path and path.parent} (stored KV is reused, not "
        "recomputed), then add the documents of frameworks and servers again"
    )


@cache
def _engine() -> Engine:
    """Return the SQLAlchemy engine of all SQLite catalogues, which share its compiled statements."""
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


def _sqlite(connection: Connection) -> sqlite3.Connection:
    return cast("sqlite3.Connection", connection.connection.dbapi_connection)


def _check_schema(connection: Connection, path: Path | None, fix: str) -> None:
    """Create the tables in an empty file. Raises StoreMismatchError or CorruptError if the file has other tables."""
    if not _read_schema(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if not _read_schema(connection):  # or another process was faster
            METADATA.create_all(connection)
            made = f"{SCHEMA_VERSION} {_digest(_read_schema(connection))}"
            rows = [{"name": "schema", "value": made}, {"name": "id", "value": uuid4().hex}]
            connection.execute(FACTS.insert(), rows)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.exec_driver_sql("COMMIT")
    schema = _read_schema(connection)
    tables = {name for kind, name, _ in schema if kind == "table"}
    if tables.isdisjoint(METADATA.tables):
        raise StoreMismatchError(
            f"{path} is not a catalogue (its tables are {', '.join(sorted(tables))}); "
            "choose another folder for the store: `store='OTHER_DIR'`"
        )
    version = connection.exec_driver_sql("PRAGMA user_version").scalar()
    recorded = _read_meta(connection, "schema") if FACTS.name in tables else None
    if recorded != f"{version} {_digest(schema)}":
        raise CorruptError(f"{path} is damaged (its tables are not those of version {version}). {fix}")
    if version != SCHEMA_VERSION:
        raise StoreMismatchError(
            f"{path} is a catalogue of version {version}, but this ragblend reads version {SCHEMA_VERSION}; use the "
            "ragblend that made it, or choose another folder for the store: `store='OTHER_DIR'`"
        )


def _read_meta(connection: Connection, name: str) -> str | None:
    return connection.execute(select(FACTS.c.value).where(FACTS.c.name == name)).scalar()


def _read_schema(connection: Connection) -> Sequence[tuple[str, str, str]]:
    query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"
    return [(str(kind), str(name), str(sql)) for kind, name, sql in connection.exec_driver_sql(query)]


def _digest(schema: Sequence[tuple[str, str, str]]) -> str:
    return hashlib.blake2b(repr(schema).encode(), digest_size=16).hexdigest()


def _make_folder(path: Path) -> bool:
    """Create the folder of a catalogue if missing. Return True if it can be written."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_write_error(error, path) from error
    is_writable = os.access(folder, os.W_OK)
    if is_writable and (kind := find_network_file_system(folder)):
        raise StoreNotWritableError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks do not protect the catalogue. "
            "Use a database, `catalog='postgresql://USER:PASSWORD@HOST/DATABASE'`; or put the store on a local "
            "disk and only its KV on the network: `kv_dir`"
        )
    return is_writable


def _create_private(path: Path) -> None:
    """Create the file with mode 600, like the entries' files. SQLite would create it readable for other users."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise make_write_error(error, path) from error
