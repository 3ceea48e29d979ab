"""`Catalog`: opens, checks and writes the database of a store.

`Ledger` is the subclass that reads and writes its tables. Reads return the last commit of any process. Several changes
form one transaction, in which no other process writes. Each `Dialect` implements what SQLite and PostgreSQL do
differently. Depends on the schema, not on the meaning of its rows.
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
from ragblend.catalog.schema import FACTS, TEXTS, insert_rows, text_key
from ragblend.catalog.sqlite import SqliteDialect
from ragblend.config import trusted_setting
from ragblend.errors import CorruptError
from ragblend.files.directory import remove_file
from ragblend.files.places import expand_user_path
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.options import TierOptions

STREAMED = {"stream_results": True}  # a table may be larger than memory


def resolve_catalog(folder: Path, url: str | None = None) -> str | Path:
    """Return the location of the catalogue of the store in `folder`: the URL of a database, or the path of a file.

    Return `url` if it is given, else the URL in RAGBLEND_CATALOG or in the user's own configuration file. Without a
    URL, return the path of a file in `folder`.
    """
    url = url or trusted_setting("catalog")
    return folder / CATALOG_FILE if url is None else str(TierOptions(catalog=url).catalog)


class Catalog:
    """The database of a store: an SQLite file, a PostgreSQL database, or a database in memory.

    `place`: the path of the file, or the URL; None: in memory. Safe between threads and processes. Each call sees the
    commits of other processes. A call opens the database again if the database was closed, if the connection was lost,
    or if the file was deleted or replaced.

    Raises CorruptError for a damaged file. Raises StoreMismatchError for a database that is no catalogue, or that has
    another version. Raises BackendUnreachableError for a server that does not answer.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        self._dialect: Dialect
        if is_postgres_url(place):
            self._dialect = PostgresDialect(place)
        else:
            self._dialect = SqliteDialect(expand_user_path(place, "catalog").absolute() if place is not None else None)
        self.name = self._dialect.name  # the file, or the URL without user and password, for messages
        self.key = self._dialect.key  # equal for catalogues over the same database; None for one in memory
        self.is_shared = self._dialect.is_shared  # True for a database server, which stores on several machines share
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._is_in_call = self._is_writing = False
        self._num_changes = 0  # changes by this object, because SQLite's data_version does not count its own commits
        _OPEN_CATALOGS.add(self)
        with self._locked():  # an error is raised here, not at the first prompt
            pass

    def close(self) -> None:
        """Close the connection. The next call opens it again. A database in memory stays open, so no data is lost."""
        with self._lock:
            if self._connection is not None and self.key is not None:
                self._connection.close()
                self._connection = None

    def change_counter(self) -> tuple[int, int]:
        """Return two numbers, which a caller compares with those of an earlier call to detect changes.

        If both calls return the same numbers, no other process has committed between the calls, and no call on this
        object has added or removed token ids of a chunk.
        """
        with self._locked() as connection:
            return self._dialect.change_counter(connection), self._num_changes

    @property
    def identity(self) -> object:
        """A value that changes if another file replaces the SQLite file; None for PostgreSQL."""
        return self._dialect.identity

    def truncate_log(self) -> None:
        """Remove deleted rows from the file's write-ahead log, unless another process is reading it."""
        with self._locked() as connection:
            self._dialect.truncate_log(connection)

    def find_structure_problems(self) -> list[str]:
        """Return one sentence for each damage to the database's structure. Rows are not read."""
        with self._locked() as connection:
            return self._dialect.find_problems(connection)

    def find_problems(self) -> list[str]:
        """Return one sentence for each damage to the structure, and one if texts differ from their keys, which are
        their hashes. Raises CorruptError for an unreadable database."""
        with self._transaction("DEFERRED") as connection:
            problems = self._dialect.find_problems(connection)
            rows = connection.execute(select(TEXTS.c.key, TEXTS.c.text), execution_options=STREAMED)
            if num_damaged := sum(not isinstance(content, str) or key != text_key(content) for key, content in rows):
                problems.append(f"{self.name}: {num_damaged} texts differ from their keys")
            return problems

    def damage_error(self, what: str) -> CorruptError:
        """Return the error for damaged rows. Its message names the catalogue, the damage (`what`) and the fix."""
        return CorruptError(f"{self.name}: {what}. {self._dialect.fix_hint()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_transaction(self) -> AbstractContextManager[Connection]:
        """Read one state of the catalogue inside the block. Other processes may write at the same time."""
        return self._transaction("DEFERRED")

    def write_transaction(self) -> AbstractContextManager[Connection]:
        """Apply all changes of the block, or none. No other thread or process can change the catalogue inside it. Keep
        it short."""
        return self._transaction("IMMEDIATE")

    # --- for subclasses ---

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        """Hold the lock and yield the connection. Errors of the database are raised as RagblendErrors."""
        with self._lock:
            is_outermost, self._is_in_call = not self._is_in_call, True
            try:
                if is_outermost and self._dialect.file_id() != self._dialect.opened_file_id:
                    self.close()
                is_opened = self._connection is None or self._connection.invalidated  # by an interruption
                if is_opened:
                    self._connection = self._dialect.connect_and_create_tables()
                    self._num_changes += not self.is_shared  # a new connection starts data_version again
                connection = self._connection
                assert connection is not None
                try:
                    yield connection
                finally:
                    if is_opened and self.is_shared:
                        self._connection = None
                        self._dialect.release_connection(connection)
            except Exception:
                with self._dialect.wrap_errors():
                    raise
            finally:
                self._is_in_call = not is_outermost

    def _rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        """Return the rows of a query."""
        with self._locked() as connection:
            return connection.execute(query, values).all()

    @contextmanager
    def _transaction(self, kind: TransactionKind) -> Iterator[Connection]:
        """Hold the lock in a transaction. Inside another transaction, the block is part of that one."""
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

    def _read_fact(self, name: str) -> str | None:
        """Return a value of FACTS; None for an unknown name."""
        return next((str(row.value) for row in self._rows(select(FACTS.c.value).where(FACTS.c.name == name))), None)

    @staticmethod
    def _write_fact(connection: Connection, name: str, value: str) -> None:
        """Write a value of FACTS in the current transaction."""
        connection.execute(delete(FACTS).where(FACTS.c.name == name))
        insert_rows(connection, FACTS, [{"name": name, "value": value}])


def delete_catalog_files(root: Path) -> None:
    """Delete the files of a damaged catalogue from a store's folder. The next ingestion creates a new one."""
    for suffix in ("-wal", "-shm", ""):
        remove_file(root / f"{CATALOG_FILE}{suffix}")


# --- forks: each process has its own connections ---

_OPEN_CATALOGS: WeakSet[Catalog] = WeakSet()
_PARENT_CONNECTIONS: list[Connection] = []
_FORK_WAIT_S = 1.0
_fork_locks: list[Any] = []


def _before_fork() -> None:
    """Wait up to `_FORK_WAIT_S` per catalogue until no thread uses its connection: a child does not inherit locks."""
    _fork_locks.extend(each._lock for each in list(_OPEN_CATALOGS) if each._lock.acquire(timeout=_FORK_WAIT_S))


def _after_fork() -> None:
    for lock in _fork_locks:
        lock.release()
    _fork_locks.clear()


def _in_child() -> None:
    """Replace locks and connections: the thread that held a lock does not exist in the child."""
    _fork_locks.clear()
    for catalog in list(_OPEN_CATALOGS):
        catalog._lock, catalog._is_in_call, catalog._is_writing = threading.RLock(), False, False
        if catalog._connection is not None and catalog.key is not None:
            _PARENT_CONNECTIONS.append(catalog._connection)  # closing it here would release the parent's locks
            catalog._connection = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
