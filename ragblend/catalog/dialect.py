"""What differs between the databases that a catalogue is kept in: `Dialect`.

A DATABASE IS ADDED HERE. Implementations: `sqlite`, `postgres`. All else of the catalogue is SQLAlchemy Core, which
both take. Knows no tables' meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal

from sqlalchemy import Connection

TransactionKind = Literal["DEFERRED", "IMMEDIATE"]


class Dialect(ABC):
    """One database, as catalogues of this process open it. Safe between threads; a connection is one thread's."""

    name: str
    """The place of the database for messages: a file, or a URL without user and password."""
    key: object
    """Equal for catalogues over the same database; None for one in memory."""
    is_shared = False
    """True for a server: stores in several folders, on several machines, have this catalogue."""

    @abstractmethod
    def connect(self) -> Connection:
        """Return a connection in autocommit mode to a database that holds the tables; they are created if missing.

        Raises StoreMismatchError for a database with other tables.
        """

    @abstractmethod
    def release(self, connection: Connection) -> None:
        """Take back the connection of a shared database after a call."""

    @abstractmethod
    def begin(self, connection: Connection, kind: TransactionKind) -> None:
        """Begin a transaction: DEFERRED for several reads of one state, IMMEDIATE to write, one process at a time."""

    @abstractmethod
    def version(self, connection: Connection) -> int:
        """Return a number that changes with every change that another process commits. Each prompt asks for it."""

    @abstractmethod
    def find_problems(self, connection: Connection) -> list[str]:
        """Return what the database itself finds damaged in its structure."""

    @abstractmethod
    def truncate_log(self, connection: Connection) -> None:
        """Remove deleted rows from the database's log, where they can be read."""

    @abstractmethod
    def named_errors(self) -> AbstractContextManager[None]:
        """Raise the RagblendError that says what happened in place of the database's own errors."""

    @abstractmethod
    def fix_hint(self) -> str:
        """Return what to do about damage."""
