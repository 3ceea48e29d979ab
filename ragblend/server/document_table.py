"""Which documents a server was sent, and how far each is: a SQLite file in the store's folder.

A document is waiting while its row has a body, the chunks that are still to be stored; it is stored when the version
that was stored last is the one that was sent last. Knows rows; chunks and prefills nothing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from ragblend.files.sqlite import connect, transaction, truncate_log, wrap_sqlite_errors

DOCUMENTS_FILE = "documents.sqlite"

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS documents (number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, "
    "collection TEXT NOT NULL, id TEXT NOT NULL, ingestion TEXT NOT NULL, version TEXT NOT NULL, "
    "stored_version TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL, body TEXT, reason TEXT NOT NULL DEFAULT '', "
    "num_chunks INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0, "
    "num_known_kv INTEGER NOT NULL DEFAULT 0, num_new_kv INTEGER NOT NULL DEFAULT 0, "
    "new_kv_bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (namespace, collection, id))",
    "CREATE INDEX IF NOT EXISTS documents_waiting ON documents (number) WHERE body IS NOT NULL",
)
_STATUS = "CASE WHEN stored_version = version THEN 'stored' WHEN body IS NOT NULL THEN 'pending' ELSE 'failed' END"
_COUNTS = ("num_chunks", "num_tokens", "num_known_kv", "num_new_kv", "new_kv_bytes")
_CHOSEN = "WHERE namespace = ? AND collection = coalesce(?, collection) AND ingestion = coalesce(?, ingestion)"
_FACTS = ("collection", "id", "version", "ingestion", "metadata", "reason", *_COUNTS)


class SentDocument(NamedTuple):
    """A document as it was sent. `body`: its `text`, or its `chunks`, and what is to be known to cut and compare them;
    with `adds`, the chunks come to those that its version has already.
    """

    collection: str
    id: str
    version: str
    body: dict[str, Any]
    metadata: dict[str, Any]


class WaitingDocument(NamedTuple):
    """A document that is to be stored. `number` is another one whenever it is sent again."""

    number: int
    namespace: str
    collection: str
    id: str
    version: str
    body: dict[str, Any]


class StoredCounts(NamedTuple):
    """What storing one document came to."""

    num_chunks: int = 0
    num_tokens: int = 0
    num_known_kv: int = 0
    num_new_kv: int = 0
    new_kv_bytes: int = 0


class DocumentTable:
    """The documents of one store's folder. Safe between threads and processes."""

    def __init__(self, root: Path) -> None:
        self._path = root / DOCUMENTS_FILE
        self._fix = f"Delete {self._path} and send the documents again: stored KV is found, not recomputed"
        self._lock = threading.RLock()
        with wrap_sqlite_errors(self._path, self._fix):
            root.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # its owner's alone, as the entries beside it
            self._connection = connect(self._path, self._fix)
            for statement in _SCHEMA:
                self._connection.execute(statement)

    @contextmanager
    def _open(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[sqlite3.Connection]:
        with self._lock, wrap_sqlite_errors(self._path, self._fix), transaction(self._connection, kind):
            yield self._connection

    def add(self, namespace: str, documents: Iterable[SentDocument]) -> str:
        """Record documents that are to be stored, each in place of an older one of its id, all or none. Return a name
        for this ingestion."""
        ingestion = uuid4().hex  # which no other replica gives
        with self._open("IMMEDIATE") as connection:
            for document in documents:
                key, body = (namespace, document.collection, document.id), document.body
                query = (
                    "SELECT version, stored_version, body FROM documents WHERE namespace = ? AND collection = ? "
                    "AND id = ?"
                )
                version, stored_version, waiting = connection.execute(query, key).fetchone() or ("", "", None)
                if "adds" in body:
                    if version == document.version and waiting is not None:
                        body = _joined(json.loads(waiting), body)
                    stored_version = ""  # not all of its chunks are stored
                connection.execute(
                    "INSERT OR REPLACE INTO documents (namespace, collection, id, ingestion, version, stored_version, "
                    "metadata, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*key, ingestion, document.version, stored_version, *map(json.dumps, (document.metadata, body))),
                )
        return ingestion

    def waiting(self, limit: int, max_chars: int) -> list[WaitingDocument]:
        """Return the documents to be stored next, those of one collection, in the order in which they were sent: at
        most `limit`, and only the first where its body has more than `max_chars`."""
        query = (
            "SELECT number, namespace, collection, id, version, body FROM documents WHERE body IS NOT NULL "
            "AND namespace = ? AND collection = ? ORDER BY number LIMIT ?"
        )
        first = "SELECT namespace, collection FROM documents WHERE body IS NOT NULL ORDER BY number LIMIT 1"
        found: list[WaitingDocument] = []
        with self._open("DEFERRED") as connection:
            owner = connection.execute(first).fetchone()
            for *columns, body in connection.execute(query, (*owner, limit)) if owner is not None else ():
                max_chars -= len(body)
                if found and max_chars < 0:
                    break
                found.append(WaitingDocument._make([*columns, json.loads(body)]))
        return found

    def finish(self, document: WaitingDocument, counts: StoredCounts, reason: str, *, is_stored: bool) -> None:
        """Record that a document is stored, or why it cannot be; nothing where it was sent again meanwhile."""
        update = (
            "UPDATE documents SET body = NULL, stored_version = ?, reason = ?, "
            f"{', '.join(f'{name} = ?' for name in _COUNTS)} WHERE number = ?"
        )
        with self._open("IMMEDIATE") as connection:
            version = document.version if is_stored else ""
            connection.execute(update, (version, reason, *counts, document.number))

    def ids(self, namespace: str, collection: str) -> list[str]:
        """Return the ids of the documents of a collection."""
        query = "SELECT id FROM documents WHERE namespace = ? AND collection = ? ORDER BY number"
        with self._open("DEFERRED") as connection:
            return [row[0] for row in connection.execute(query, (namespace, collection))]

    def begin_removal(self, namespace: str, collection: str, ids: Sequence[str]) -> None:
        """Record that documents are being removed: from now on they are neither waiting nor stored."""
        update = (
            "UPDATE documents SET body = NULL, stored_version = '', reason = 'its removal was begun; remove it again' "
            "WHERE namespace = ? AND collection = ? AND id = ?"
        )
        with self._open("IMMEDIATE") as connection:
            connection.executemany(update, ((namespace, collection, each) for each in ids))

    def remove(self, namespace: str, collection: str, ids: Sequence[str]) -> int:
        """Remove documents. Return how many were there."""
        delete = "DELETE FROM documents WHERE namespace = ? AND collection = ? AND id = ?"
        with self._open("IMMEDIATE") as connection:
            num_removed = connection.executemany(delete, ((namespace, collection, each) for each in ids)).rowcount
        with self._lock:
            truncate_log(self._connection)
        return num_removed

    def summarize(self, namespace: str, collection: str | None, ingestion: str | None) -> dict[str, dict[str, int]]:
        """Return by collection how many documents are stored, pending and failed, how many are worked on, and what
        they came to; of one ingestion, or of all."""
        statuses = ", ".join(f"sum({_STATUS} = '{each}')" for each in ("stored", "pending", "failed"))
        sums = ", ".join(f"sum({name})" for name in _COUNTS)
        query = (
            f"SELECT collection, {statuses}, sum(body IS NOT NULL), {sums} FROM documents {_CHOSEN} GROUP BY collection"
        )
        names = ("num_stored", "num_pending", "num_failed", "num_waiting", *_COUNTS)
        with self._open("DEFERRED") as connection:
            rows = connection.execute(query, (namespace, collection, ingestion))
            return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}

    def with_reason(
        self, namespace: str, collection: str | None, ingestion: str | None, limit: int
    ) -> list[dict[str, Any]]:
        """Return documents of which something is to be told: those that failed, and stored ones without any chunk."""
        columns = f"collection, id, {_STATUS}, reason"
        query = f"SELECT {columns} FROM documents {_CHOSEN} AND reason <> '' ORDER BY number LIMIT ?"
        with self._open("DEFERRED") as connection:
            rows = connection.execute(query, (namespace, collection, ingestion, limit))
            return [dict(zip(("collection", "id", "status", "reason"), row, strict=True)) for row in rows]

    def get(self, namespace: str, collection: str, document_id: str) -> dict[str, Any] | None:
        """Return what is known of a document, and its `status`; None where there is none."""
        query = (
            f"SELECT {', '.join(_FACTS)}, {_STATUS} FROM documents WHERE namespace = ? AND collection = ? AND id = ?"
        )
        with self._open("DEFERRED") as connection:
            row = connection.execute(query, (namespace, collection, document_id)).fetchone()
        if row is None:
            return None
        found = dict(zip((*_FACTS, "status"), row, strict=True))
        return {**found, "metadata": json.loads(found["metadata"])}


def _joined(before: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """The bodies of one version that came in two calls: the chunks of both, and their vectors where both have some."""
    names = ["chunks"] + ["vectors"] * (before.get("embedder") == added.get("embedder") and "vectors" in added)
    kept = {name: value for name, value in added.items() if name not in ("vectors", "embedder") or len(names) == 2}
    return {**kept, **{name: [*before[name], *added[name]] for name in names}}
