"""A catalogue in a PostgreSQL database, which stores on several machines share.

Needs psycopg 3 (`pip install 'ragblend[postgres]'`). The tables are in the first schema of the connection's search
path. Each write transaction first increments a counter row, whose lock serializes the writers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from select import POLLIN, poll
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ragblend.catalog.dialect import Dialect, TransactionKind
from ragblend.catalog.schema import FACTS, METADATA, SCHEMA_VERSION, SHARED_METADATA
from ragblend.errors import (
    BackendUnreachableError,
    RagblendError,
    StoreFullError,
    StoreMismatchError,
    StoreNotWritableError,
    UsageError,
)
from ragblend.redaction import password_encoding_hint, redact_message, redact_url

if TYPE_CHECKING:
    from psycopg.abc import PQGen

T = TypeVar("T")

SCHEMES = ("postgresql://", "postgres://")
CONNECT_TIMEOUT_S = 3
VERSION_TIMEOUT_S = 1.0  # each prompt reads the number of changes, and a request must not wait longer
ANSWER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 30.0
POOL_SIZE, MAX_CONNECTIONS = 4, 16
"""Idle connections that a process keeps, and its largest number of connections."""
_CREATION_LOCK = 0x7261_6762_6C65_6E64  # "ragblend" as the number of an advisory lock
_COUNT_WRITE = "UPDATE facts SET value = (value::bigint + 1)::text WHERE name = 'version'"
_READ_VERSION = "SELECT value FROM facts WHERE name = 'version'"
_BEGIN = {"DEFERRED": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "IMMEDIATE": f"BEGIN; {_COUNT_WRITE}"}


def is_postgres_url(place: object) -> TypeGuard[str]:
    """Return True for the URL of a PostgreSQL database.

    >>> is_postgres_url("postgresql://ragblend@db/ragblend"), is_postgres_url("catalog.sqlite")
    (True, False)
    """
    return isinstance(place, str) and place.startswith(SCHEMES)


class PostgresDialect(Dialect):
    """The PostgreSQL database at `url`, in libpq's syntax."""

    is_shared = True

    def __init__(self, url: str) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise ImportError("a catalogue in PostgreSQL needs psycopg: pip install 'ragblend[postgres]'") from error
        self._url = url
        self.name, self.key = redact_url(url), url
        self._has_tables = False

    def connect_and_create_tables(self) -> Connection:
        """Return a connection of the process's pool. The first call creates missing tables."""
        connection = _engine(self._url).connect()
        if not self._has_tables:
            try:
                self._check_schema(connection)
            except BaseException:
                connection.close()
                raise
            self._has_tables = True
        return connection

    def release_connection(self, connection: Connection) -> None:
        """Return the connection to the pool, or drop it if it is closed."""
        if not connection.invalidated and cast("Any", connection.connection.dbapi_connection).closed:
            connection.invalidate()
        connection.close()

    def begin(self, connection: Connection, kind: TransactionKind) -> None:
        """Begin a transaction. A write transaction waits for other writers."""
        with _silence_limit(connection, LOCK_TIMEOUT_S + 5.0):
            connection.exec_driver_sql(_BEGIN[kind])

    def change_counter(self, connection: Connection) -> int:
        """Return the number of write transactions of all processes."""
        with _silence_limit(connection, VERSION_TIMEOUT_S):
            opened: Any = connection.connection.dbapi_connection
            row = opened.execute(_READ_VERSION).fetchone()
        if row is None:
            self._has_tables = False
            raise StoreMismatchError(
                f"{self.name} is not a catalogue any more: its counter of changes is missing; name another database: "
                "`catalog`"
            )
        return int(row[0])

    def truncate_log(self, connection: Connection) -> None:
        """Do nothing, because PostgreSQL's vacuum overwrites deleted rows, and the server recycles its log."""

    def find_problems(self, connection: Connection) -> list[str]:
        """Check nothing and return an empty list, because PostgreSQL raises an error when it reads damaged pages."""
        return []

    def fix_hint(self) -> str:
        """Return a sentence with the fix for a damaged catalogue."""
        return (
            "Restore the database from a backup, or name an empty one and ingest the documents again (stored KV is "
            "reused, not recomputed)"
        )

    def _check_schema(self, connection: Connection) -> None:
        """Create the tables in an empty schema. Raises StoreMismatchError for another version's tables."""
        if not inspect(connection).has_table(FACTS.name):
            connection.exec_driver_sql(f"BEGIN; SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
            if not inspect(connection).has_table(FACTS.name):  # or another process was faster
                for tables in (METADATA, SHARED_METADATA):
                    tables.create_all(connection, checkfirst=False)
                rows = [{"name": "schema", "value": str(SCHEMA_VERSION)}, {"name": "version", "value": "0"}]
                connection.execute(FACTS.insert(), rows)
            connection.exec_driver_sql("COMMIT")
        recorded = connection.execute(FACTS.select().where(FACTS.c.name == "schema")).first()
        version = recorded.value if recorded is not None else "none"
        if version != str(SCHEMA_VERSION):
            raise StoreMismatchError(
                f"{self.name} is a catalogue of version {version}, but this ragblend reads version {SCHEMA_VERSION}; "
                "use the ragblend that made it, or another database or schema: `catalog`"
            )

    @contextmanager
    def wrap_errors(self) -> Iterator[None]:
        """Raise RagblendErrors in place of psycopg's and SQLAlchemy's errors, which may contain rows and passwords."""
        import psycopg

        try:
            yield
        except PoolTimeoutError:
            raise BackendUnreachableError(
                f"{MAX_CONNECTIONS} threads of this process use the catalogue {self.name}, and none finished within "
                f"{LOCK_TIMEOUT_S:g} s; try again"
            ) from None
        except DBAPIError as error:
            original = error.orig
            if not isinstance(original, psycopg.Error):
                raise
            raise self._named(original) from None
        except psycopg.Error as error:
            raise self._named(error) from None

    def _named(self, error: Any) -> RagblendError:
        """Return the error to raise in place of psycopg's `error`."""
        import psycopg

        text = str(error).strip() or type(error).__name__
        reason = redact_message(re.split(r"failed: |FATAL: +|\n", text.partition("\n")[0])[-1], self._url)
        state = error.sqlstate or ""
        if isinstance(error, psycopg.ProgrammingError) and not state:
            return UsageError(
                f"the URL {self.name} of the catalogue cannot be read ({reason}); write it as "
                f"postgresql://USER:PASSWORD@HOST/DATABASE{password_encoding_hint(self._url)}"
            )
        if state in ("53100", "53200", "53400"):
            return StoreFullError(
                f"the catalogue {self.name} has no free space: {reason}. Free space there and run the command again"
            )
        if state in ("25006", "42501", "3F000"):
            return StoreNotWritableError(
                f"the catalogue {self.name} cannot be written ({reason}); give the user the right to create tables in "
                "its schema, or name the primary server: `catalog`"
            )
        if state == "55P03" or state.startswith("40"):  # no lock in time, or a rolled back transaction
            return BackendUnreachableError(
                f"another process is writing the catalogue {self.name}; wait for it and try again"
            )
        if state in ("42P01", "42703"):
            self._has_tables = False
            return StoreMismatchError(
                f"{self.name} is not a catalogue, its tables differ ({reason}); name another database: `catalog`"
            )
        if state.startswith("XX"):
            return RagblendError(f"the catalogue {self.name} is damaged ({reason}). {self.fix_hint()}")
        if state and state[:2] not in ("08", "57", "53", "28", "3D"):
            return RagblendError(f"the catalogue {self.name} rejects a statement ({reason}; {state}); report it")
        self._has_tables = False  # the next connection may be to another server
        if ("FATAL:" in text and "database system is" not in text) or state[:2] in ("28", "3D", "53"):
            return BackendUnreachableError(
                f"the catalogue {self.name} rejects the connection: {reason}. Check user, password and database in "
                "`catalog` and the server's max_connections"
            )
        return BackendUnreachableError(
            f"the catalogue {self.name} does not answer: {reason}. Check that PostgreSQL runs there, then repeat the "
            "command; an interrupted change was not saved"
        )


@cache
def _engine(url: str) -> Engine:
    """Return the SQLAlchemy engine for `url`: this process's connection pool and compiled statements."""
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: _connect(url),
        pool_size=POOL_SIZE,
        max_overflow=MAX_CONNECTIONS - POOL_SIZE,
        pool_use_lifo=True,
        pool_timeout=LOCK_TIMEOUT_S,
        hide_parameters=True,
        use_native_hstore=False,
    )
    event.listen(engine, "checkout", _check_alive)
    _ENGINES.append(engine)
    return engine


def _connect(url: str) -> Any:
    """Return a connection in autocommit mode, which closes itself if the server stops answering."""
    from psycopg.conninfo import conninfo_to_dict

    options = conninfo_to_dict(url).get("options") or ""
    return _connection_class().connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name="ragblend",
        options=f"{options} -c lock_timeout={int(LOCK_TIMEOUT_S * 1000)}".strip(),
    )


@cache
def _connection_class() -> Any:
    import psycopg

    class TimedConnection(psycopg.Connection[Any]):
        """Closes itself when the server sends nothing for `silence_limit_s` seconds."""

        silence_limit_s = ANSWER_TIMEOUT_S

        def wait(self, gen: PQGen[T], *values: Any, **options: Any) -> T:
            return super().wait(_watched(gen, self.silence_limit_s, self._give_up), *values, **options)

        def _give_up(self) -> None:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {self.silence_limit_s:g} s")

    return TimedConnection


def _watched(gen: PQGen[T], limit_s: float, give_up: Callable[[], None]) -> PQGen[T]:
    """Run psycopg's generator. Call `give_up` once the server has sent nothing for `limit_s` seconds.

    psycopg resumes the generator with 0 after each tenth of a second without data.
    """
    until_s = monotonic() + limit_s
    try:
        state = next(gen)
        while True:
            ready = yield state
            if ready:
                until_s = monotonic() + limit_s
            elif monotonic() > until_s:
                give_up()
            state = gen.send(ready)
    except StopIteration as end:
        value: T = end.value
        return value


@contextmanager
def _silence_limit(connection: Connection, limit_s: float) -> Iterator[None]:
    opened: Any = connection.connection.dbapi_connection
    opened.silence_limit_s = limit_s
    try:
        yield
    finally:
        opened.silence_limit_s = ANSWER_TIMEOUT_S


def _check_alive(opened: Any, *_: object) -> None:
    """Raise InvalidatePoolError if the server has closed this idle connection, so that the pool opens a new one.

    Unrequested data on an idle connection means that the server has closed it.
    """
    waiting = poll()
    if not opened.closed:
        waiting.register(opened.pgconn.socket, POLLIN)
    if opened.closed or waiting.poll(0):
        raise InvalidatePoolError("the server has closed the connection")


# --- forks: each process has its own connections ---

_ENGINES: list[Engine] = []
_PARENT_POOLS: list[object] = []


def _in_child() -> None:
    for engine in _ENGINES:
        _PARENT_POOLS.append(engine.pool)  # closing it here would end the parent's sessions
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_in_child)
