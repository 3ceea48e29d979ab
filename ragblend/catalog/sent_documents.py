"""`SentRows`: the documents that clients sent to a server, with their status: pending, stored or failed; and leases.

A document is stored if the version stored last is the version sent last. Otherwise it is pending while its row has a
body, which contains the text or chunks to store, and failed without one. The server splits and prefills.

Servers that share a catalogue take leases on documents, so that only one of them stores each document. A lease that is
not renewed expires by PostgreSQL's clock. Another server then takes over the documents of a killed one. A server that
was only suspended writes nothing more for them: its write transactions renew its leases first (see `lease`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Connection,
    TextClause,
    and_,
    case,
    cast,
    delete,
    func,
    literal,
    select,
    text,
    update,
)

from ragblend.catalog.documents import HAS_CHUNKS, OF_DOCUMENT, DocumentRows, insert_document
from ragblend.catalog.schema import (
    CHUNKS,
    DOCUMENTS,
    INTEGER,
    IS_SENT,
    DocumentKey,
    SentDocumentCounts,
    find_existing,
    is_in_values,
)
from ragblend.errors import BackendUnreachableError

_ROW = DOCUMENTS.c
_STATUSES = ("stored", "pending", "failed")
STATUS = case((_ROW.stored_version == _ROW.sent_version, "stored"), (_ROW.body.is_not(None), "pending"), else_="failed")
_OF_SENT = and_(OF_DOCUMENT, IS_SENT)
_COUNTS = [_ROW[name] for name in SentDocumentCounts._fields]
_VERSION = _ROW.sent_version.label("version")
_FACTS = [_ROW.collection, _ROW.id, _VERSION, _ROW.ingestion, _ROW.metadata, _ROW.reason, *_COUNTS]

LEASE_S = 60.0
_TAKE = text(
    "INSERT INTO leases (name, owner, expires_at) "
    "SELECT name, :owner, now() + make_interval(secs => :lease_s) FROM unnest(CAST(:names AS text[])) AS name "
    "ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at "
    "WHERE leases.expires_at < now() OR leases.owner = excluded.owner RETURNING name"
)
_RENEW = text(
    "UPDATE leases SET expires_at = now() + make_interval(secs => :lease_s) WHERE name IN (SELECT name FROM leases "
    "WHERE owner = :owner AND name = ANY(CAST(:names AS text[])) ORDER BY name FOR UPDATE) RETURNING name"
)
_RELEASE = text("DELETE FROM leases WHERE owner = :owner AND name = ANY(CAST(:names AS text[]))")
_OTHERS = text("SELECT name FROM leases WHERE owner <> :owner AND expires_at >= now()")


class SentDocument(NamedTuple):
    """A document that a client sent.

    `body` has its `text` or its `chunks`, and the settings for splitting. If `body` has the key `adds`, the chunks are
    added to those of an earlier document with the same id and version.
    """

    collection: str
    id: str
    version: str
    body: dict[str, Any]
    metadata: dict[str, Any]


class WaitingDocument(NamedTuple):
    """A document that waits to be stored. `number` changes when the document is sent again."""

    number: int
    namespace: str
    collection: str
    id: str
    version: str
    body: dict[str, Any]

    @property
    def lease_name(self) -> str:
        """Name of the document for `SentRows.take_leases`, the same for all its versions."""
        return lease_name(self.namespace, self.collection, self.id)


class Backlog(NamedTuple):
    """Numbers of documents by status. `oldest`: number of the waiting document that was sent first; None without one.

    `pending_bytes`: size of the waiting documents.
    """

    num_stored: int
    num_pending: int
    num_failed: int
    pending_bytes: int
    oldest: int | None


class SentRows(DocumentRows):
    """The part of `Ledger` with the documents that clients sent to a server.

    `owner` of the leases: ledgers with the same one have the same leases.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        super().__init__(place)
        self.owner = uuid4().hex
        self._leased = frozenset[str]()  # names that every write transaction renews

    def add_sent(self, namespace: str, documents: Iterable[SentDocument]) -> tuple[str, list[str]]:
        """Record, in one transaction, documents to be stored. Each replaces the document with the same id, if any.

        Return a unique id for this ingestion, and the ids of the documents that were there before.
        """
        ingestion, replaced = uuid4().hex, list[str]()  # unique among all replicas
        with self.write_transaction() as connection:
            for document in documents:
                name, body = DocumentKey(document.collection, document.id, namespace), document.body
                older = connection.execute(select(DOCUMENTS).where(OF_DOCUMENT), name.parameters()).first()
                facts = {} if older is None else {"version": older.version, "source": older.source}
                is_known = older is not None and older.ingestion != ""
                version, stored_version, waiting = "", "", None
                if older is not None and is_known:
                    version, stored_version, waiting = older.sent_version, older.stored_version, older.body
                    replaced.append(document.id)
                if "adds" in body:
                    if version == document.version and waiting is not None:
                        body = _joined(json.loads(waiting), body)
                    stored_version = ""  # not all of its chunks are stored
                connection.execute(delete(DOCUMENTS).where(OF_DOCUMENT), name.parameters())
                row = {**name._asdict(), **facts, "ingestion": ingestion, "sent_version": document.version}
                row |= {
                    "stored_version": stored_version,
                    "metadata": json.dumps(document.metadata),
                    "body": json.dumps(body),
                }
                number = insert_document(connection, row)
                if older is not None:
                    connection.execute(update(CHUNKS).where(CHUNKS.c.document == older.number).values(document=number))
        return ingestion, replaced

    def next_waiting(
        self,
        limit: int,
        max_chars: int,
        taken: Collection[str] = (),
        *,
        after: str = "",
        but: str | None = None,
    ) -> list[WaitingDocument]:
        """Return the documents to store next: documents of one collection, in the order in which they were sent.

        `limit`: the largest number of documents. `max_chars`: the largest number of characters in all bodies; the first
        document is returned even if its body has more. `taken`: names (`WaitingDocument.lease_name`) of documents to
        leave out. `after`: the namespace that had its turn last; the next one in alphabetical order has its turn now.
        `but`: a namespace to leave out.
        """
        waiting = select(_ROW.namespace, _ROW.collection, _ROW.id).where(_ROW.body.is_not(None))
        if but is not None:
            waiting = waiting.where(_ROW.namespace != but)
        waiting = waiting.order_by(_ROW.namespace, _ROW.number).limit(1 + len(taken))
        columns = (_ROW.number, _ROW.namespace, _ROW.collection, _ROW.id, _ROW.sent_version, _ROW.body)
        chosen: list[WaitingDocument] = []
        with self.read_transaction() as connection:
            for is_due in (_ROW.namespace > after, _ROW.namespace <= after):  # each reads a few rows of the index
                first = connection.execute(waiting.where(is_due)).all()
                if owner := next((row for row in first if lease_name(*row) not in taken), None):
                    break
            else:
                return []
            is_next = (_ROW.body.is_not(None), _ROW.namespace == owner.namespace, _ROW.collection == owner.collection)
            query = select(*columns).where(*is_next).order_by(_ROW.number).limit(limit + len(taken))
            with connection.execute(query) as rows:
                for *values, body in rows:
                    if taken and lease_name(*values[1:4]) in taken:
                        continue
                    max_chars -= len(body)
                    if chosen and (max_chars < 0 or len(chosen) == limit):
                        break
                    chosen.append(WaitingDocument._make([*values, json.loads(body)]))
        return chosen

    def count_waiting(self, namespace: str) -> tuple[int, int]:
        """Return the number of a namespace's waiting documents, and of the characters of their bodies. Reads them."""
        num_chars = func.coalesce(func.sum(func.length(_ROW.body)), 0)
        query = select(func.count(_ROW.body), num_chars).where(*_chosen(namespace, None))
        waiting: Any = self._rows(query)[0]
        return int(waiting[0]), int(waiting[1])

    def still_waiting(self, documents: Iterable[WaitingDocument]) -> list[WaitingDocument]:
        """Return the documents that still wait. Those that were stored, failed, removed or sent again are left out."""
        documents = list(documents)
        query = select(_ROW.number).where(is_in_values(_ROW.number), _ROW.body.is_not(None))
        with self._locked() as connection:
            waiting = find_existing(connection, query, (document.number for document in documents))
        return [document for document in documents if document.number in waiting]

    def record_outcome(
        self, document: WaitingDocument, counts: SentDocumentCounts, reason: str, *, is_stored: bool
    ) -> None:
        """Record that a document was stored or, if not `is_stored`, that it failed.

        `reason`: why the document failed, or that a chunk has no text or too little; "" for neither. If the
        document was sent again in the meantime, its new version stays pending.
        """
        changes = {"body": None, "stored_version": document.version if is_stored else "", "reason": reason}
        changed = update(DOCUMENTS).where(_ROW.number == document.number).values(**changes, **counts._asdict())
        with self.write_transaction() as connection:
            connection.execute(changed)

    def make_pending(self, document: DocumentKey, body: dict[str, Any]) -> bool:
        """Make a stored document pending, with the same version. Return False for one that is not stored any more.

        `body`: see `SentDocument`.
        """
        is_stored = (_OF_SENT, _ROW.stored_version == _ROW.sent_version, _ROW.body.is_(None))
        changed = update(DOCUMENTS).where(*is_stored).values(body=json.dumps(body), stored_version="")
        with self.write_transaction() as connection:
            return bool(connection.execute(changed, document.parameters()).rowcount)

    def begin_removal(self, namespace: str, collection: str, ids: Sequence[str]) -> None:
        """Record that the removal of documents has begun. They are then neither pending nor stored."""
        changes = {"body": None, "stored_version": "", "reason": "its removal is unfinished; remove it again"}
        if ids:
            with self.write_transaction() as connection:
                rows = [DocumentKey(collection, each, namespace).parameters() for each in ids]
                connection.execute(update(DOCUMENTS).where(_OF_SENT).values(**changes), rows)

    def end_removal(self, namespace: str, collection: str, ids: Sequence[str]) -> int:
        """Record that documents are removed: they are no sent documents any more. Return their number, without unknown
        ids."""
        changes = dict.fromkeys(("ingestion", "sent_version", "stored_version", "metadata", "reason"), "")
        changed = update(DOCUMENTS).where(_OF_SENT).values(body=None, **changes, **SentDocumentCounts()._asdict())
        removed = delete(DOCUMENTS).where(OF_DOCUMENT, ~IS_SENT, ~HAS_CHUNKS)
        with self.write_transaction() as connection:
            names = [DocumentKey(collection, each, namespace).parameters() for each in ids]
            num_removed = sum(connection.execute(changed, name).rowcount for name in names)
            if names:
                connection.execute(removed, names)
        self.truncate_log()
        return num_removed

    def status_counts(self, namespace: str, collection: str | None, ingestion: str | None) -> dict[str, dict[str, int]]:
        """Return {collection: counts}.

        The counts are `num_stored`, `num_pending`, `num_failed`, `num_waiting` and the sums of SentDocumentCounts. A
        waiting document has a body to store: it is pending, or it was stored and then sent again. `collection`: a name;
        None counts all collections. `ingestion`: an id; None counts all ingestions.
        """
        sums: dict[str, ColumnElement[Any]] = {
            f"num_{status}": func.sum(case({status: 1}, value=STATUS, else_=0)) for status in _STATUSES
        }
        sums["num_waiting"] = func.count(_ROW.body)
        sums |= {column.name: cast(func.sum(column), INTEGER) for column in _COUNTS}  # PostgreSQL returns a decimal
        chosen = _chosen(namespace, collection, ingestion)
        query = select(_ROW.collection, *sums.values()).where(*chosen).group_by(_ROW.collection)
        return {row[0]: dict(zip(sums, row[1:], strict=True)) for row in self._rows(query)}

    def backlogs(self, *, by_namespace: bool) -> tuple[dict[str, Backlog], int]:
        """Return the Backlog of each namespace, and the highest number of a document, 0 without documents.

        Without `by_namespace`, return one Backlog of all documents under the key "".
        """
        waiting = _ROW.body.is_not(None)
        sums = [func.sum(case({status: 1}, value=STATUS, else_=0)) for status in _STATUSES]
        size = cast(func.coalesce(func.sum(func.length(_ROW.body)), 0), INTEGER)
        facts = (*sums, size, func.min(case((waiting, _ROW.number))), func.max(_ROW.number))
        query = select(_ROW.namespace, *facts).group_by(_ROW.namespace) if by_namespace else select(literal(""), *facts)
        rows: Sequence[Any] = self._rows(query.where(IS_SENT))
        backlog_of, highest = dict[str, Backlog](), 0
        for namespace, *counts, oldest, last in rows:
            backlog_of[namespace] = Backlog._make([*(count or 0 for count in counts), oldest])
            highest = max(highest, last or 0)
        return backlog_of, highest

    def list_reasons(
        self, namespace: str, collection: str | None, ingestion: str | None, limit: int
    ) -> list[dict[str, Any]]:
        """Return collection, id, status and reason of at most `limit` documents that have a reason.

        A document has a reason if it failed, if a chunk has no text or too little, or if its removal is unfinished.
        Stored documents come last.
        """
        chosen = (*_chosen(namespace, collection, ingestion), _ROW.reason != "")
        columns = (_ROW.collection, _ROW.id, STATUS.label("status"), _ROW.reason)
        query = select(*columns).where(*chosen).order_by(STATUS == "stored", _ROW.number).limit(limit)
        return [row._asdict() for row in self._rows(query)]

    def sent_document(self, namespace: str, collection: str, document_id: str) -> dict[str, Any] | None:
        """Return a document's status, id, collection, version, ingestion, metadata, reason, counts; None if unknown."""
        query = select(*_FACTS, STATUS.label("status")).where(_OF_SENT)
        rows = self._rows(query, **DocumentKey(collection, document_id, namespace).parameters())
        return {**rows[0]._asdict(), "metadata": json.loads(rows[0].metadata)} if rows else None

    # --- leases, in a shared catalogue: only one `owner` at a time has the lease on a name ---

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """See `Catalog.write_transaction`. Inside `lease`, renew the leases first.

        Raises BackendUnreachableError, and changes nothing, if another owner has had one of them since.
        """
        with self._locked():
            is_outermost = not self._is_writing
            with super().write_transaction() as connection:
                if is_outermost:
                    self.renew_leases()
                yield connection

    @contextmanager
    def lease(self, names: Collection[str], timeout_s: float = 0.0) -> Iterator[frozenset[str]]:
        """Hold leases on those of `names` that other owners release within `timeout_s` seconds. Yield these names."""
        end_s = time.monotonic() + timeout_s
        while len(leased := self.take_leases(names)) < len({*names}) and time.monotonic() < end_s:
            time.sleep(0.1)
        self._leased = frozenset(leased)
        try:
            yield self._leased
        finally:
            self._leased = frozenset()
            with suppress(BackendUnreachableError):  # leases expire
                self.release_leases(leased)

    def renew_leases(self) -> None:
        """Renew the leases that `lease` holds. Raises BackendUnreachableError if another owner has had one since."""
        if self.is_shared and self._leased and self._execute_for_names(_RENEW, self._leased) < self._leased:
            raise BackendUnreachableError("another server has taken over these documents; try again")

    def take_leases(self, names: Collection[str]) -> set[str]:
        """Take leases on `names` for `LEASE_S` seconds, or renew them. Return the names for which this succeeded.

        Names that another owner has leased are left out. In a catalogue that is not shared, all names are returned.
        """
        if not self.is_shared:
            return {*names}
        return self._execute_for_names(_TAKE, names)

    def _execute_for_names(self, statement: TextClause, names: Collection[str]) -> set[str]:
        """Execute a statement on leases. Return the names that it returns. Sorted, so that no two servers deadlock."""
        values = {"owner": self.owner, "lease_s": LEASE_S, "names": sorted({*names})}
        with self._locked() as connection:
            return {str(name) for name in connection.execute(statement, values).scalars()}

    def release_leases(self, names: Collection[str]) -> None:
        """End the owner's leases on `names`."""
        if not self.is_shared:
            return
        with self._locked() as connection:
            connection.execute(_RELEASE, {"owner": self.owner, "names": sorted({*names})})

    def leased_by_others(self) -> set[str]:
        """Return the names that other owners have leased."""
        if not self.is_shared:
            return set()
        with self._locked() as connection:
            return {str(name) for name in connection.execute(_OTHERS, {"owner": self.owner}).scalars()}


def lease_name(namespace: str, collection: str, document_id: str) -> str:
    """Return the name of a document for `SentRows.take_leases`: namespace, collection and id as JSON."""
    return json.dumps([namespace, collection, document_id])


def _chosen(namespace: str, collection: str | None, ingestion: str | None = None) -> list[ColumnElement[bool]]:
    """Return the conditions for a namespace, and for a collection and an ingestion unless they are None."""
    chosen = [_ROW.namespace == namespace, IS_SENT]
    if collection is not None:
        chosen.append(_ROW.collection == collection)
    if ingestion is not None:
        chosen.append(_ROW.ingestion == ingestion)
    return chosen


def _joined(before: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Return one body with the chunks of both."""
    return {**added, "chunks": [*before["chunks"], *added["chunks"]]}
