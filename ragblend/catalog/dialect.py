"""`Dialect`: the interface to a database that can hold a catalogue.

A DATABASE IS ADDED HERE. Implementations: `sqlite`, `postgres`. The rest of the catalogue is SQLAlchemy Core, which
runs on both. Does not depend on the meaning of tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal

from sqlalchemy import Connection

TransactionKind = Literal["DEFERRED", "IMMEDIATE"]


class Dialect(ABC):
    """The database of one catalogue. Each subclass supports one kind of database, such as SQLite.

    Safe between threads, but each connection is used by one thread at a time.
    """

    name: str
    """The file, or the URL without user and password, for messages."""
    key: object
    """Equal for catalogues over the same database; None for one in memory."""
    is_shared = False
    """True for a database server, whose catalogue stores on several machines may share."""
    opened_file_id: object = None
    """The `file_id` of the opened file, set by `connect_and_create_tables`; None without a file."""
    identity: object = None
    """Changes if another file replaces the opened one. Set by `connect_and_create_tables`; None for a server."""

    @abstractmethod
    def connect_and_create_tables(self) -> Connection:
        """Return a connection in autocommit mode. Create the tables of the catalogue if they are missing.

        Raises StoreMismatchError for a database that is no catalogue, or that has another version.
        """

    def file_id(self) -> object:
        """Return a value that differs from `opened_file_id` if the opened file was deleted or replaced."""
        return None

    def release_connection(self, connection: Connection) -> None:
        """Release the connection at the end of a call. Only shared databases need this."""
        connection.close()

    @abstractmethod
    def begin(self, connection: Connection, kind: TransactionKind) -> None:
        """Begin a transaction. In a DEFERRED one, all reads see one state; an IMMEDIATE one excludes other writers."""

    @abstractmethod
    def change_counter(self, connection: Connection) -> int:
        """Return a number that changes with every commit of another process. Called per prompt, so it must be fast."""

    @abstractmethod
    def find_problems(self, connection: Connection) -> list[str]:
        """Return one sentence for each damage that the database finds in its structure."""

    @abstractmethod
    def truncate_log(self, connection: Connection) -> None:
        """Remove the contents of deleted rows from the database's log."""

    @abstractmethod
    def wrap_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises RagblendErrors in place of the database's errors."""

    @abstractmethod
    def fix_hint(self) -> str:
        """Return a sentence with the commands that repair or replace a damaged catalogue."""
