"""Documents of a server: recorded when they are sent, and stored by a background thread, also after a restart.

Read `DocumentIngester._store` first. One thread chunks and prefills the waiting documents with
`precompute_documents`, and pauses while requests generate. A lock lets only one of the processes that share a store's
folder store documents at a time. Servers that share a catalogue divide the documents: each server holds leases on the
documents that it stores.
Depends on an engine per namespace, not on HTTP or vLLM.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import DocumentKey, SentDocumentCounts
from ragblend.catalog.sent_documents import (
    LEASE_S,
    SentDocument,
    WaitingDocument,
    lease_name,
)
from ragblend.catalog.stored_documents import StoredDocument, list_documents, open_store_ledgers
from ragblend.corpus.documents import has_visible_text
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, EngineClosedError, NotFoundError
from ragblend.files.reserve import delete_with_reserve, fill_reserve
from ragblend.index import open_index
from ragblend.ingestion.deletion import delete_stale_kv
from ragblend.ingestion.documents import describe_documents, remove_stored_documents
from ragblend.ingestion.prefill import num_chunk_tokens
from ragblend.ingestion.report import NOT_IN_REMOTE, IngestReport
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk
from ragblend.server.auth_gate import log_change
from ragblend.server.limits import Backlog
from ragblend.server.sent_chunks import split_document, stored_keys

log = logging.getLogger(__name__)

LOCK_FILE = "documents.lock"
MAX_REASONS = 1000  # documents with a reason in one response
BUDGET_TOO_SMALL = (
    "the store's budget is too small for all of its chunks; set a larger one, and send the document again"
)

_HEADER_BYTES = 16 << 10  # of an entry's header, beside a share of its size
_BATCH, _BATCH_CHARS = 1000, 32 << 20  # most documents, and their characters, in one batch
_SHARED_BATCH = 16  # most documents in one batch if other servers store documents at the same time
_ENGINES_KEPT = 64  # namespaces; every cache salt that a client chooses is one
_ATTEMPTS = 3  # at a document whose KV is incomplete
_LOOK_S = 1.0  # between two checks for documents that were sent to another process with this folder
_RETRY_S = 5.0
_TURN_S = 1.0  # between two turns of other namespaces while documents of one are being stored
_TURN_CHARS = 1 << 16  # of the documents of one such turn
_REMOVAL_BATCH = 256  # documents that are removed in one transaction, whose log a full disk must hold
_REMOVAL_WAIT_S = 60.0  # longest wait of a removal for another process that is storing documents
_REST_S, _REST_SHARE = 1.0, 4.0  # least pause after a chunk while requests generate: seconds, multiple of its duration


class _InterruptedError(Exception):
    """Interrupts storing for a removal of documents or for `close`. The documents stay waiting."""


class _BusyError(BackendUnreachableError):
    """Another process is storing or removing documents."""


class DocumentIngester:
    """Stores the documents that clients send to this server, or to other servers with the same store or catalogue.

    `root`: the store's folder. `catalog`: URL of a shared catalogue. `start` begins to store documents in a thread.
    `make_engine` returns the engine for a namespace. `describe` returns an error's message for clients.
    """

    def __init__(
        self,
        root: Path,
        make_engine: Callable[[str], Engine],
        describe: Callable[[BaseException], str] = str,
        *,
        catalog: str | None = None,
    ) -> None:
        self._place = resolve_catalog(root, catalog)
        self._leasing, self._renew_at_s = list[Ledger](), 0.0  # ledgers with leases on documents that are being stored
        self._root, self._lock_path = root, root / LOCK_FILE
        self._make_engine, self._describe = make_engine, describe
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()
        self._num_removing = 0
        self._has_warned_of_budget = False
        self._num_attempts = Counter[int]()  # by the number of a document whose KV was incomplete each time
        self._progress = ("", 0, 0)  # namespace whose chunks are being prefilled, number done, total number
        self._turn, self._turn_at_s = "", 0.0  # namespace of the last turn, and time of the next one of others
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragblend-documents", daemon=True)
        try:
            _ = self._backlog
        except BackendUnreachableError as error:  # each use tries again
            log.warning("documents are neither accepted nor stored until the catalogue answers: %s", error)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._place)

    @cached_property
    def _backlog(self) -> Backlog:
        return Backlog(self._ledger)

    def start(self) -> None:
        """Start the thread that stores waiting documents."""
        fill_reserve(self._root)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread after its current chunk. Documents that are still waiting are stored after the next start.

        Wait until the thread has ended, for at most `timeout_s` seconds unless it is None.
        """
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout_s)

    # -- requests of clients

    def add(self, namespace: str, documents: Sequence[SentDocument]) -> str:
        """Record documents, which are then stored in the background. Return a name for this ingestion.

        Raises BacklogFullError if too many documents of the namespace wait (see `Backlog`).
        """
        self._backlog.add(namespace, documents)
        ingestion, replaced = self._ledger.add_sent(namespace, documents)
        self._wake.set()
        new = {each.id for each in documents}.difference(replaced)
        log_change("add", namespace, documents[0].collection, sorted(new))
        log_change("replace", namespace, documents[0].collection, sorted({*replaced}))
        return ingestion

    def remove(self, namespace: str, collection: str, ids: Sequence[str] | None) -> tuple[int, int]:
        """Remove the documents `ids` from a collection; None removes all of its documents.

        Also delete the KV that no other document of the namespace needs. Return the numbers of removed documents and of
        deleted entries. Raises BackendUnreachableError if another process stores documents for more than a minute, or a
        remote tier is unreachable.
        """
        with self._lock:
            self._num_removing += 1
        try:
            with self._alone(_REMOVAL_WAIT_S):
                with open_store_ledgers(self._engine(namespace).store) as ledgers:
                    stored = list_documents(*ledgers, namespace, collection)
                wanted = None if ids is None else {*ids}
                chosen = [each for each in stored if wanted is None or each.key.id in wanted]
                num_removed = 0
                for start in range(0, len(chosen), _REMOVAL_BATCH):
                    batch = chosen[start : start + _REMOVAL_BATCH]
                    remove = partial(self._remove_batch, namespace, collection, batch)
                    num_removed += delete_with_reserve(self._root, remove)
                    log_change("delete", namespace, collection, [each.key.id for each in batch])
                return len(chosen), num_removed
        finally:
            with self._lock:
                self._num_removing -= 1

    def _remove_batch(self, namespace: str, collection: str, documents: Sequence[StoredDocument]) -> int:
        """Remove documents of one collection. Return the number of deleted entries."""
        ids = [each.key.id for each in documents]
        self._ledger.begin_removal(namespace, collection, ids)
        names = [lease_name(namespace, collection, each) for each in ids]
        with self._leasing_ledger() as ledger, ledger.lease(names, _REMOVAL_WAIT_S) as leased:
            if len(leased) < len({*names}):
                raise _BusyError("another server is storing these documents; try again")
            has_indexed = any(each.index_source for each in documents)
            with open_index(self._root) if has_indexed else nullcontext() as index:
                removal = remove_stored_documents(documents, self._engine(namespace), index, ledger)
            ledger.end_removal(namespace, collection, ids)
            return removal.num_kv

    def summary(self, namespace: str, collection: str | None, ingestion: str | None) -> dict[str, Any]:
        """Return the state of a namespace's documents, with the fields of `requests.IngestionSummary`.

        `collection`, `ingestion`: only documents of this collection and this ingestion are counted; None counts all.
        """
        storing, done, total = self._progress
        if storing != namespace:  # clients do not learn about other namespaces
            done = total = 0
        return {
            "collections": self._ledger.status_counts(namespace, collection, ingestion),
            "reasons": self._ledger.list_reasons(namespace, collection, ingestion, MAX_REASONS),
            "batch": {"num_done": done, "num_chunks": total},
        }

    def list(self, namespace: str, collection: str | None, after: tuple[str, str], limit: int) -> dict[str, Any]:
        """Return `documents` and `next` of `requests.IngestionSummary`: at most `limit` documents behind `after`.

        Documents that were ingested into the store without the server are included.
        """
        engine = self._engine(namespace)
        with open_store_ledgers(engine.store) as ledgers:
            documents = list_documents(*ledgers, namespace, collection, after=after, limit=limit + 1)
            described, _ = describe_documents(documents[:limit], engine.store.find_tier(DiskStore), *ledgers)
        cursor = json.dumps(documents[limit - 1].key[:2]) if len(documents) > limit else ""
        return {"documents": [asdict(each) for each in described], "next": cursor}

    def get(self, namespace: str, collection: str, document_id: str) -> dict[str, Any]:
        """Return the `requests.DocumentStatus` of a document. Raises NotFoundError without such a document."""
        document = self._ledger.sent_document(namespace, collection, document_id)
        if document is None:
            raise NotFoundError(f"there is no document {document_id!r} in the collection {collection!r}")
        engine = self._engine(namespace)
        with open_ledger(engine.store) as ledger:
            texts = ledger.texts_of(DocumentKey(collection, document_id, namespace))
        return {**document, "num_kv": len(stored_keys([Chunk(text) for text in texts], engine))}

    # -- storing

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                while self._store_batch():
                    pass
            except _InterruptedError:
                continue
            except Exception as error:  # the documents stay waiting
                log.warning("documents are not stored at the moment: %s", error)
                self._closed.wait(_RETRY_S)
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _store_batch(self) -> bool:
        """Store the next documents. Return False if none are waiting, or another process is storing."""
        if self._num_removing:
            time.sleep(0.01)
        self._check_interrupted()
        try:
            with self._alone(0.0):
                most = _SHARED_BATCH if self._ledger.is_shared else _BATCH
                batch = self._ledger.next_waiting(most, _BATCH_CHARS, self._taken(), after=self._turn)
                self._turn_at_s = time.monotonic() + _TURN_S
                self._store_leased(batch)
                return bool(batch)
        except _BusyError:
            return False
        finally:
            self._progress = ("", 0, 0)

    def _store_leased(self, batch: Sequence[WaitingDocument]) -> None:
        """Store those of the documents of one collection that no other server stores. Their namespace has its turn."""
        if not batch:
            return
        self._turn = batch[0].namespace
        with self._leasing_ledger() as ledger, ledger.lease([row.lease_name for row in batch]) as leased:
            if mine := ledger.still_waiting(row for row in batch if row.lease_name in leased):
                self._leasing.append(ledger)
                try:
                    self._store(mine, ledger)
                finally:
                    self._leasing.remove(ledger)

    def _give_turn(self, namespace: str) -> None:
        """Store a few short documents of the next other namespace, while those of `namespace` are being stored."""
        self._turn_at_s = math.inf  # the documents of this turn give none
        progress = self._progress
        try:
            batch = self._ledger.next_waiting(
                _SHARED_BATCH, _TURN_CHARS, self._taken(), after=self._turn, but=namespace
            )
            if len(batch) > 1 or (batch and len(str(batch[0].body)) <= _TURN_CHARS):
                self._store_leased(batch)
            elif batch:
                self._turn = batch[0].namespace  # a long document waits for a separate turn
        finally:
            self._progress, self._turn_at_s = progress, time.monotonic() + _TURN_S

    def _taken(self) -> Collection[str]:
        return self._ledger.leased_by_others()

    def _store(self, rows: Sequence[WaitingDocument], ledger: Ledger) -> None:
        """Chunk, register and prefill documents of one collection, and record the result for each of them.

        ledger: has leases on the documents.
        """
        first = rows[0]
        engine = self._engine(first.namespace)
        new_kv, new_bytes = Counter[str](), Counter[str]()
        try:
            chunks_of = [split_document(row, engine) for row in rows]
            owners = [row for row, chunks in zip(rows, chunks_of, strict=True) for _ in chunks]
            report = precompute_documents(
                [chunk for chunks in chunks_of for chunk in chunks],
                engine,
                partial(self._note_progress, first.namespace),
                ids=[row.id for row in owners],
                versions=[row.version if row.body.get("adds") else "" for row in owners],
                collection=first.collection,
                prefill=partial(self._prefill, new_kv, new_bytes),
                ledger=ledger,
            )
        except (_InterruptedError, EngineClosedError, BackendUnreachableError):  # the documents stay waiting
            raise
        except Exception as error:
            if self._closed.is_set():  # an engine that is stopping rejects every chunk
                raise _InterruptedError from error
            if len(rows) == 1:
                log.warning("the document %r of the collection %r is not stored: %s", first.id, first.collection, error)
                reason = self._describe(error)
                ledger.record_outcome(first, SentDocumentCounts(), reason, is_stored=False)
                return
            for row in rows:
                self._store([row], ledger)
            return
        reason_of = dict((*report.notes, *report.skipped, *report.failures))
        failed = {failure.path for failure in report.failures}
        for row, chunks in zip(rows, chunks_of, strict=True):
            stored, num_new = stored_keys(chunks, engine), new_kv[row.id]
            stored_chunks = [chunk for chunk in chunks if engine.key(chunk) in stored]
            num_tokens = sum(engine.renderer.count_tokens(chunk.text) for chunk in stored_chunks)
            counts = (len(stored_chunks), num_tokens, max(0, len(stored) - num_new), num_new, new_bytes[row.id])
            has_all = len(stored_chunks) == sum(has_visible_text(chunk.text) for chunk in chunks)
            reason = reason_of.get(row.id, "") if has_all or row.id in failed else BUDGET_TOO_SMALL
            is_stored = has_all and row.id not in failed
            if report.num_dropped and is_stored:
                reason = _explain_dropped(stored, engine, report) or reason
            if not has_all and not all(tier.is_available() for tier in engine.store.find_tiers(RemoteStore)):
                raise BackendUnreachableError("a remote tier with KV of these documents does not answer")
            if reason == BUDGET_TOO_SMALL:
                # The document may fit now, without the KV of replaced texts. Or another process has deleted KV of equal
                # texts, which is computed again.
                self._num_attempts[row.number] += 1
                if self._num_attempts[row.number] < _ATTEMPTS:
                    continue
            self._num_attempts.pop(row.number, None)
            ledger.record_outcome(row, SentDocumentCounts(*counts), reason, is_stored=is_stored)

    def _note_progress(self, namespace: str, stage: str, done: int, total: int | None) -> None:
        if stage == "push":  # its entries go to the remote tier, which may take long
            self._check_interrupted()
            self._renew_leases()
        else:
            self._progress = (namespace, done, total or 0)

    def _prefill(
        self, new_kv: Counter[str], new_bytes: Counter[str], chunks: Sequence[Chunk], engine: Engine
    ) -> Iterator[int]:
        """Prefill chunks in turn, with pauses while requests generate. Yield the number of bytes stored for each.

        new_kv, new_bytes: by document, the number and the bytes of its new entries, which are counted here.
        """
        for chunk in chunks:
            start_s = time.monotonic()
            nbytes = self._prefill_once(chunk, engine) if self._has_room(chunk, engine) else 0
            new_kv[chunk.source] += nbytes > 0
            new_bytes[chunk.source] += nbytes
            yield nbytes
            if time.monotonic() > self._turn_at_s:
                self._give_turn(engine.namespace)
            end_s = time.monotonic()
            end_s += max(_REST_S, _REST_SHARE * (end_s - start_s))
            while True:
                self._check_interrupted()
                if time.monotonic() > end_s or not engine.is_generating():
                    break
                time.sleep(0.02)
                self._renew_leases()
            self._renew_leases()

    def _has_room(self, chunk: Chunk, engine: Engine) -> bool:
        """Return False if the KV of a chunk would evict KV of other documents, which stays reported as stored."""
        disk = engine.store.find_tier(DiskStore)
        if disk is None or engine.store.find_tiers(RemoteStore):  # what a remote tier holds can be evicted here
            return True
        nbytes = num_chunk_tokens(chunk, engine) * engine.bytes_per_token
        if disk.has_room(nbytes + nbytes // 64 + _HEADER_BYTES):
            return True
        if not self._has_warned_of_budget:
            self._has_warned_of_budget = True
            log.warning("documents are not stored any more: %s", BUDGET_TOO_SMALL)
        return False

    def _prefill_once(self, chunk: Chunk, engine: Engine) -> int:
        """Prefill a chunk, but first wait while another server prefills it. Return the number of bytes stored.

        If another server has removed the chunk since, its KV is deleted before the next chunk is prefilled. After a
        kill, no later call would delete it.
        """
        if not self._ledger.is_shared:  # no other server stores documents at the same time
            return engine.precompute(chunk)
        name = f"kv {engine.key(chunk)}"
        while not self._ledger.take_leases([name]):
            self._check_interrupted()
            time.sleep(0.05)
            self._renew_leases()
        try:
            if nbytes := engine.precompute(chunk):
                try:
                    delete_stale_kv([chunk], engine, self._ledger)
                except BackendUnreachableError:
                    engine.store.delete_everywhere([engine.key(chunk)])  # it is computed again
                    raise
            return nbytes
        finally:
            with suppress(BackendUnreachableError):
                self._ledger.release_leases([name])

    # -- helpers

    def _check_interrupted(self) -> None:
        if self._num_removing or self._closed.is_set():
            raise _InterruptedError

    def _engine(self, namespace: str) -> Engine:
        with self._lock:
            engine = self._engines.pop(namespace, None) or self._make_engine(namespace)
            self._engines[namespace] = engine  # the latest one comes last
            if len(self._engines) > _ENGINES_KEPT:
                del self._engines[next(iter(self._engines))]
            return engine

    def _leasing_ledger(self) -> Ledger:
        """Return a ledger whose write transactions depend on leases, unlike those of requests in other threads.

        The owner is the same, so that leases which an outage kept from being released are this server's to take again.
        """
        ledger = Ledger(self._place)
        ledger.owner = self._ledger.owner
        return ledger

    def _renew_leases(self) -> None:
        if time.monotonic() > self._renew_at_s:
            self._renew_at_s = time.monotonic() + LEASE_S / 4
            for ledger in self._leasing:
                ledger.renew_leases()

    @contextmanager
    def _alone(self, timeout_s: float) -> Iterator[None]:
        """Hold the folder's lock on changes of documents, against other threads and processes.

        Raises _BusyError if it is not free within `timeout_s`.
        """
        end_s = time.monotonic() + timeout_s
        with open(self._lock_path, "ab", opener=_open_private) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        raise _BusyError("another process is storing documents; try again") from None
                time.sleep(0.02)
            yield


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _explain_dropped(stored: set[str], engine: Engine, report: IngestReport) -> str:
    """Return the reason for clients if a remote tier lacks some of a document's `stored` entries, else ""."""
    keys = [*stored]
    lacking = {key for tier in engine.store.find_tiers(RemoteStore) for key in stored - tier.find_stored(keys)}
    why = "is full" if report.is_full else "does not accept it"
    return f"{NOT_IN_REMOTE}, which {why}: {len(lacking)} of {len(keys)} KV caches" if lacking else ""
