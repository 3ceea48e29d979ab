"""The documents of a server: taken over HTTP, stored in the background, found again after a restart.

Read `Documents._store` first. One thread, of one process among those that share the store's folder, chunks, embeds and
prefills what is waiting, by `precompute_documents` as in any program, and rests while requests generate. Servers that
share a catalogue divide the documents: each holds leases on those that it works on. Knows an engine for each namespace;
knows no HTTP and no vLLM.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.leases import LEASE_S, Leases
from ragblend.catalog.registry import open_registry
from ragblend.catalog.schema import DocumentName, StoredCounts
from ragblend.catalog.sent_documents import (
    SentDocument,
    SentDocumentTable,
    WaitingDocument,
    lease_name,
)
from ragblend.catalog.vectors import normalize_rows
from ragblend.chunker import split
from ragblend.corpus.documents import Document, has_visible_text
from ragblend.corpus.embedders import FloatArray
from ragblend.engine.api import Engine
from ragblend.errors import BackendUnreachableError, EngineClosedError, NotFoundError
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.documents import delete_precomputed
from ragblend.ingestion.engine_index import DEFAULT_CHUNK_TOKENS
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk

log = logging.getLogger(__name__)

LOCK_FILE = "documents.lock"
MAX_REASONS = 1000  # documents whose failure one answer tells
NO_ROOM = "the store does not hold all of its chunks: give it a larger budget, and send the document again"

_BATCH, _BATCH_CHARS = 1000, 32 << 20  # documents whose chunks may be computed after each other from the beginning
_SHARED_BATCH = 16  # the same where other servers take others at the same time
_LOOK_S = 1.0  # between looks for documents that another process of this folder was sent
_RETRY_S = 5.0
_REMOVAL_WAIT_S = 60.0  # for a process that is storing: one chunk here, its batch elsewhere
_QUESTION_TOKENS = 64  # left free beside a chunk
# While others generate, a chunk is computed at most as often: their tokens wait for it, so few of them may.
_REST_S, _REST_SHARE = 1.0, 4.0


class _InterruptedError(Exception):
    """Somebody removes documents; what is being stored is taken up again afterwards."""


class _BusyError(BackendUnreachableError):
    """Another process is storing or removing documents."""


class Documents:
    """The documents that a server with the store folder `root` was sent, or another one with its `catalog`. `start`
    begins to store them.

    `make_engine` loads the engine of a namespace; `describe` words an error for clients.
    """

    def __init__(
        self,
        root: Path,
        make_engine: Callable[[str], Engine],
        describe: Callable[[BaseException], str] = str,
        *,
        catalog: str | None = None,
    ) -> None:
        place = resolve_catalog(root, catalog)
        self._table = SentDocumentTable(place)
        self._leases = Leases(str(place)) if self._table.is_shared else None
        self._held, self._renew_at_s = set[str](), 0.0
        self._lock_path = root / LOCK_FILE
        self._make_engine, self._describe = make_engine, describe
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()
        self._num_removing = 0
        self._progress = ("", 0, 0)  # the namespace whose chunks are prefilled, and how many of how many are
        self._new_kv: Counter[str] = Counter()
        self._new_bytes: Counter[str] = Counter()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragblend-documents", daemon=True)

    def start(self) -> None:
        """Begin to store what is waiting."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the chunk that is being computed; what is waiting is stored after the next start."""
        self._closed.set()
        self._wake.set()
        self._thread.join()

    # -- what clients ask

    def add(self, namespace: str, documents: Sequence[SentDocument]) -> str:
        """Take documents, to be stored in the background. Return a name for this ingestion."""
        ingestion = self._table.add(namespace, documents)
        self._wake.set()
        return ingestion

    def remove(self, namespace: str, collection: str, ids: Sequence[str] | None) -> tuple[int, int]:
        """Remove documents, those of a whole collection without `ids`: their texts, and the KV that no other document
        of the namespace needs. Return how many documents and entries went.

        Raises BackendUnreachableError when another process is storing for long, or a remote tier could not be told.
        """
        with self._lock:
            self._num_removing += 1
        try:
            with self._alone(_REMOVAL_WAIT_S):
                known = self._table.ids(namespace, collection)
                ids = known if ids is None else [*set(known).intersection(ids)]
                if not ids:
                    return 0, 0
                self._table.begin_removal(namespace, collection, ids)
                names = [lease_name(namespace, collection, each) for each in ids]
                with self._leased(names, _REMOVAL_WAIT_S) as leased:
                    if len(leased) < len({*names}):
                        raise _BusyError("another server is storing these documents; try again")
                    num_removed = delete_precomputed(ids, self._engine(namespace), collection=collection)
                    return self._table.remove(namespace, collection, ids), num_removed
        finally:
            with self._lock:
                self._num_removing -= 1

    def summary(self, namespace: str, collection: str | None, ingestion: str | None) -> dict[str, Any]:
        """Return how many documents of which collection are stored, pending and failed, and why."""
        storing, done, total = self._progress
        if storing != namespace:  # of others nothing is told
            done = total = 0
        return {
            "collections": self._table.summarize(namespace, collection, ingestion),
            "reasons": self._table.documents_with_reason(namespace, collection, ingestion, MAX_REASONS),
            "batch": {"num_done": done, "num_chunks": total},
        }

    def get(self, namespace: str, collection: str, document_id: str) -> dict[str, Any]:
        """Return what is known of a document, and how many of its entries the store has now."""
        found = self._table.get(namespace, collection, document_id)
        if found is None:
            raise NotFoundError(f"there is no document {document_id!r} in the collection {collection!r}")
        engine = self._engine(namespace)
        with closing(open_registry(engine.store)) as registry:
            texts = registry.texts_of(DocumentName(collection, document_id, namespace))
        return {**found, "num_kv": len(_stored_keys([Chunk(text) for text in texts], engine))}

    # -- storing

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                while self._store_batch():
                    pass
            except _InterruptedError:
                continue
            except Exception as error:  # what it was storing is still waiting
                log.warning("documents are not stored at the moment: %s", error)
                self._closed.wait(_RETRY_S)
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _store_batch(self) -> bool:
        """Store the documents that are next. False: there are none, or another process is storing."""
        if self._num_removing or self._closed.is_set():
            time.sleep(0.01)
            raise _InterruptedError
        try:
            with self._alone(0.0):
                if self._leases is None:
                    batch = self._table.waiting(_BATCH, _BATCH_CHARS)
                    self._store_by_embedder(batch)
                    return bool(batch)
                batch = self._table.waiting(_SHARED_BATCH, _BATCH_CHARS, self._leases.leased_by_others())
                if not batch:
                    return False
                with self._leased([row.lease_name for row in batch]) as leased:
                    mine = self._table.still_waiting(row for row in batch if row.lease_name in leased)
                    self._store_by_embedder(mine)
                return True
        except _BusyError:
            return False
        finally:
            self._progress = ("", 0, 0)

    def _store_by_embedder(self, batch: Sequence[WaitingDocument]) -> None:
        for _, rows in groupby(batch, lambda row: row.body.get("embedder", "")):
            self._store([*rows])

    def _store(self, rows: Sequence[WaitingDocument]) -> None:
        """Chunk, embed, record and prefill documents of one collection, and note of each what became of it."""
        first = rows[0]
        engine = self._engine(first.namespace)
        self._new_kv.clear()
        self._new_bytes.clear()
        try:
            chunks_of = [_cut(row, engine) for row in rows]
            owners = [row for row, chunks in zip(rows, chunks_of, strict=True) for _ in chunks]
            report = precompute_documents(
                [chunk for chunks in chunks_of for chunk in chunks],
                engine,
                partial(self._note_progress, first.namespace),
                ids=[row.id for row in owners],
                versions=[row.version if row.body.get("adds") else "" for row in owners],
                collection=first.collection,
                prefill=self._prefill,
                embedder=_SentVectors.of(rows),
            )
        except (_InterruptedError, EngineClosedError, BackendUnreachableError):  # they are still waiting
            raise
        except Exception as error:
            if len(rows) == 1:
                log.warning("the document %r of the collection %r is not stored: %s", first.id, first.collection, error)
                self._table.finish(first, StoredCounts(), self._describe(error), is_stored=False)
                return
            for row in rows:
                self._store([row])
            return
        reason_of = dict((*report.skipped, *report.failures))
        failed = {failure.path for failure in report.failures}
        for row, chunks in zip(rows, chunks_of, strict=True):
            stored, num_new = _stored_keys(chunks, engine), self._new_kv[row.id]
            found = [chunk for chunk in chunks if engine.key(chunk) in stored]
            num_tokens = sum(engine.renderer.count_tokens(chunk.text) for chunk in found)
            counts = (len(found), num_tokens, max(0, len(stored) - num_new), num_new, self._new_bytes[row.id])
            has_all = len(found) == sum(has_visible_text(chunk.text) for chunk in chunks)
            reason = reason_of.get(row.id, "") if has_all or row.id in failed else NO_ROOM
            is_stored = has_all and row.id not in failed
            self._table.finish(row, StoredCounts(*counts), reason, is_stored=is_stored)

    def _note_progress(self, namespace: str, stage: str, done: int, total: int | None) -> None:
        self._progress = (namespace, done, total or 0)

    def _prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterator[int]:
        """A `workers.Prefill`: one chunk after the other, with rests while requests generate."""
        is_generating: Callable[[], bool] = getattr(engine, "is_generating", lambda: False)
        for chunk in sorted(chunks, key=lambda each: bool(each.context_texts)):
            start_s = time.monotonic()
            nbytes = self._prefill_once(chunk, engine)
            self._new_kv[chunk.source] += nbytes > 0
            self._new_bytes[chunk.source] += nbytes
            yield nbytes
            end_s = time.monotonic()
            end_s += max(_REST_S, _REST_SHARE * (end_s - start_s))
            while True:
                if self._num_removing or self._closed.is_set():
                    raise _InterruptedError
                if time.monotonic() > end_s or not is_generating():
                    break
                time.sleep(0.02)
                self._renew_leases()
            self._renew_leases()

    def _prefill_once(self, chunk: Chunk, engine: Engine) -> int:
        """Prefill a chunk; where another server is prefilling it, wait for that one. Return the bytes stored."""
        if self._leases is None:
            return engine.precompute(chunk)
        name = f"kv {engine.key(chunk)}"
        while not self._leases.take([name]):
            if self._num_removing or self._closed.is_set():
                raise _InterruptedError
            time.sleep(0.05)
            self._renew_leases()
        try:
            return engine.precompute(chunk)
        finally:
            with suppress(BackendUnreachableError):
                self._leases.release([name])

    # -- inside

    def _engine(self, namespace: str) -> Engine:
        with self._lock:
            if namespace not in self._engines:
                self._engines[namespace] = self._make_engine(namespace)
            return self._engines[namespace]

    @contextmanager
    def _leased(self, names: Sequence[str], timeout_s: float = 0.0) -> Iterator[set[str]]:
        """Hold leases on documents, as many as other servers release within `timeout_s`; yield their names."""
        if self._leases is None:
            yield {*names}
            return
        end_s = time.monotonic() + timeout_s
        while len(leased := self._leases.take(names)) < len({*names}) and time.monotonic() < end_s:
            time.sleep(0.1)
        self._held, self._renew_at_s = leased, time.monotonic() + LEASE_S / 4
        try:
            yield leased
        finally:
            self._held = set()
            with suppress(BackendUnreachableError):  # they end by themselves
                self._leases.release(leased)

    def _renew_leases(self) -> None:
        if self._held and self._leases is not None and time.monotonic() > self._renew_at_s:
            self._renew_at_s = time.monotonic() + LEASE_S / 4
            if self._leases.take(self._held) < self._held:
                raise _InterruptedError  # this process was halted for so long that another one has taken over

    @contextmanager
    def _alone(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock of those who change what the folder's documents have: threads and processes."""
        end_s = time.monotonic() + timeout_s
        with open(self._lock_path, "ab", opener=_open_private) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        raise _BusyError("documents are being stored; try again") from None
                time.sleep(0.02)
            yield


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _cut(row: WaitingDocument, engine: Engine) -> list[Chunk]:
    """The chunks of a document: those that it was sent in, or its text in pieces that the model has room for."""
    if "chunks" in row.body:
        chunks = [Chunk(text.strip(), row.id) for text in row.body["chunks"]]
    else:
        most = engine.context_length - _QUESTION_TOKENS
        size = min(row.body.get("chunk_size") or DEFAULT_CHUNK_TOKENS, most)
        chunks = split(Document(row.body["text"], row.id), engine.renderer.count_tokens, size)
    return chunks or [Chunk("", row.id)]  # a document that has nothing to store now loses what it had


def _stored_keys(chunks: Iterable[Chunk], engine: Engine) -> set[str]:
    """The keys of these chunks' entries, in all variants of the store's context, that the store has now."""
    keys = [*dict.fromkeys(map(engine.key, chunk_variants(chunks, engine.context)))]
    return {key for key, there in zip(keys, engine.store.contains_many(keys), strict=True) if there}


class _SentVectors:
    """An Embedder whose vectors came with the texts."""

    def __init__(self, name: str, vectors: Mapping[str, Sequence[float]]) -> None:
        self.name = f"sent {name}"
        self._vectors = vectors
        self.dim = len(next(iter(vectors.values())))

    @classmethod
    def of(cls, rows: Sequence[WaitingDocument]) -> _SentVectors | None:
        """That of documents which were sent with vectors; None for those without."""
        vectors = {
            text.strip(): vector
            for row in rows
            for text, vector in zip(row.body.get("chunks", ()), row.body.get("vectors", ()), strict=False)
        }
        return cls(rows[0].body["embedder"], vectors) if vectors else None

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """[n, dim] float32 unit rows."""
        return normalize_rows(np.array([self._vectors[text.strip()] for text in texts], np.float32))
