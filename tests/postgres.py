"""PostgreSQL servers for tests, and empty schemas in their databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import pytest

from benchmarks.postgres import PASSWORD, PostgresServer, run_postgres
from ragblend.errors import NotFoundError

__all__ = ["PASSWORD", "PostgresServer", "fresh_schema", "running_postgres", "start_postgres"]


@contextmanager
def start_postgres() -> Iterator[PostgresServer]:
    """Run a new server. Skips the test if a package is missing."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(run_postgres())
        except NotFoundError as error:
            pytest.skip(str(error))
        yield server


@contextmanager
def running_postgres() -> Iterator[str]:
    """Run a new server. Yield the URL of its empty database. Skips the test if a package is missing."""
    with start_postgres() as server:
        yield server.url


@contextmanager
def fresh_schema(url: str) -> Iterator[str]:
    """Create an empty schema in the database. Yield its URL, and drop the schema at the end."""
    import psycopg

    from ragblend.catalog import postgres

    name = f"s{uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    found = f"{url}?options=-csearch_path%3D{name}"
    yield found
    for engine in postgres._ENGINES:
        engine.dispose()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name} CASCADE")
