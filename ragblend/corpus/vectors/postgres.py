"""Vectors in PostgreSQL with pgvector: a table for each index, `ragblend_` and its number. Nothing else is made.

Connects at the first call, and once more where a connection was lost: every call may be made twice. A state is the
comment of the table. All vectors are compared, unless `?index=hnsw` asks for pgvector's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.vectors.base import Found, Ids
from ragblend.corpus.vectors.choice import Choice
from ragblend.errors import BackendUnreachableError, RagblendError
from ragblend.redaction import redacted

try:
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import sql
except ImportError as error:
    raise ImportError("vectors in postgresql:// need psycopg and pgvector: pip install 'ragblend[pgvector]'") from error

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10
_NO_EXTENSION = (
    psycopg.errors.FeatureNotSupported,
    psycopg.errors.UndefinedFile,
    psycopg.errors.InsufficientPrivilege,
)
_EF_SEARCH = (40, 1000)  # pgvector's default, and its most


class PostgresPlace:
    """The vectors of one index."""

    def __init__(self, choice: Choice, number: str, dim: int) -> None:
        self.name = choice.shown
        self.is_exact = not dict(choice.options).get("index")
        self._choice, self._dim, self._table = choice, dim, f"ragblend_{number}"
        self._ef_search = choice.number("ef_search") or _EF_SEARCH[0]
        self._connection: psycopg.Connection[Any] | None = None

    def state(self) -> str:
        """The comment of the table."""
        query = "SELECT obj_description(to_regclass(%s), 'pg_class')"
        return self._do(lambda db: _first(db.execute(query, (self._table,)))) or ""

    def set_state(self, state: str) -> None:
        """Make the table if it is not there; build its graph if there is to be one; comment it."""

        def work(db: psycopg.Connection[Any]) -> None:
            self._make(db)
            if state and not self.is_exact:
                self._run(db, "CREATE INDEX IF NOT EXISTS {index} ON {table} USING hnsw (embedding vector_ip_ops)")
            self._run(db, "COMMENT ON TABLE {table} IS {state}", state=sql.Literal(state))

        self._do(work)

    def count(self) -> int:
        """Rows of the table."""
        return self._of_table(lambda db: int(_first(self._run(db, "SELECT count(*) FROM {table}"))), 0)

    def held(self) -> tuple[Ids, Ids]:
        """[n] ids and [n] marks."""
        found = self._of_table(lambda db: self._run(db, "SELECT id, mark FROM {table}").fetchall(), list[Any]())
        columns = np.array(found, np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def put(self, ids: Ids, marks: Ids, vectors: FloatArray) -> None:
        """Vectors [n, dim] in place of those with the same ids."""

        def work(db: psycopg.Connection[Any]) -> None:
            self._run(db, "DELETE FROM {table} WHERE id = ANY({ids})", ids=sql.Literal(ids.tolist()))
            copy = self._text("COPY {table} (id, mark, embedding) FROM STDIN WITH (FORMAT BINARY)")
            with db.cursor() as cursor, cursor.copy(copy) as stream:
                stream.set_types(["int8", "int8", "vector"])
                for each in zip(ids.tolist(), marks.tolist(), vectors, strict=True):
                    stream.write_row((each[0], each[1], Vector(each[2])))

        self._do(work)

    def remove(self, ids: Ids) -> None:
        """Forget these."""
        statement = "DELETE FROM {table} WHERE id = ANY({ids})"
        self._of_table(lambda db: self._run(db, statement, ids=sql.Literal(ids.tolist())), None)

    def search(self, vector: FloatArray, count: int) -> Found:
        """The `count` nearest to `vector` [dim]."""

        def work(db: psycopg.Connection[Any]) -> list[tuple[int, float]]:
            if not self.is_exact:  # the graph gives no more than it keeps in hand
                db.execute("SET LOCAL hnsw.iterative_scan = strict_order")
                db.execute(f"SET LOCAL hnsw.ef_search = {min(max(self._ef_search, count), _EF_SEARCH[1])}")
            order = "SELECT id, -(embedding <#> %s) FROM {table} ORDER BY embedding <#> %s LIMIT %s"
            return db.execute(self._text(order), (Vector(vector), Vector(vector), count)).fetchall()

        found = self._of_table(work, list[tuple[int, float]]())
        scores = np.array([score for _, score in found], np.float32)
        return Found(scores, np.array([row for row, _ in found], np.int64))

    def drop(self) -> None:
        """Drop the table."""
        self._do(lambda db: self._run(db, "DROP TABLE IF EXISTS {table}"))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- inside ---

    def _make(self, db: psycopg.Connection[Any]) -> None:
        columns = "(id bigint PRIMARY KEY, mark bigint NOT NULL, embedding vector({dim}) NOT NULL)"
        self._run(db, f"CREATE TABLE IF NOT EXISTS {{table}} {columns}", dim=sql.Literal(self._dim))

    def _run(self, db: psycopg.Connection[Any], text: str, **parts: sql.Composable) -> psycopg.Cursor[Any]:
        return db.execute(self._text(text, **parts))

    def _text(self, text: str, **parts: sql.Composable) -> sql.Composed:
        names = {"table": sql.Identifier(self._table), "index": sql.Identifier(f"{self._table}_hnsw")}
        return sql.SQL(text).format(**names, **parts)

    def _of_table(self, work: Callable[[psycopg.Connection[Any]], T], otherwise: T) -> T:
        """What `work` gives, or `otherwise` where there is no table."""
        try:
            return self._do(work)
        except _NoTableError:
            return otherwise

    def _do(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """`work` in a transaction of its own; once more where the connection turns out to be lost."""
        for is_last in (self._connection is None, True):
            try:
                db = self._connected()
                with db.transaction():
                    return work(db)
            except psycopg.errors.UndefinedTable:
                raise _NoTableError from None
            except psycopg.OperationalError as error:
                self.close()
                if is_last:
                    raise BackendUnreachableError(
                        f"vectors are in {self.name}, which does not answer: {self._said(error)}. Check the address "
                        "and RAGBLEND_VECTORS, which may have the password; nothing is lost, the index has every vector"
                    ) from None
            except psycopg.Error as error:
                raise RagblendError(
                    f"{self.name} refuses: {self._said(error)}. The role needs to create tables and read and write them"
                ) from None
        raise AssertionError("unreachable")

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            url = self._choice.target
            if "connect_timeout=" not in url:
                url += f"{'&' if '?' in url else '?'}connect_timeout={CONNECT_TIMEOUT_S}"
            db = psycopg.connect(url, autocommit=True)
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self._connection = db
        return self._connection

    def _prepare(self, db: psycopg.Connection[Any]) -> None:
        if _first(db.execute("SELECT count(*) FROM pg_extension WHERE extname = 'vector'")) == 0:
            # Two that do this at the same time: one of them is told so.
            with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateObject):
                try:
                    db.execute("CREATE EXTENSION IF NOT EXISTS vector")
                except _NO_EXTENSION:
                    raise RagblendError(
                        f"{self.name} has no pgvector; install it there and let its owner run CREATE EXTENSION vector"
                    ) from None
        register_vector(db)

    def _said(self, error: psycopg.Error) -> str:
        return " ".join(redacted(str(error), echo_of=self._choice.secret).split())


class _NoTableError(Exception):
    """Nothing was put there, or somebody dropped it."""


def _first(cursor: psycopg.Cursor[Any]) -> Any:
    row = cursor.fetchone()
    return row[0] if row else None
