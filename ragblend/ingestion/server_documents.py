"""Sends documents to a server that precomputes and stores them, and adds its counts to a report.

Depends on an engine that is the client of a server, not on how the server stores documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

from ragblend.corpus.folder_scan import ReadFailure
from ragblend.engine.api import Engine
from ragblend.index import ChunkIndex
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION, Identity, document_label
from ragblend.ingestion.report import BLANK_TEXT, NOT_IN_REMOTE, IngestReport, Progress, ignore_progress
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)

_BATCH_CHARS = 8 << 20  # most characters of the documents in one request, as JSON in ASCII
_DOCUMENT_CHARS = 24 << 20  # of a document that is sent whole; a server accepts bodies of 32 MiB
_LEAST_CHARS = 256  # that a text counts, however short it is: a server accepts 100,000 texts in a request


def _send(
    engine: Any,
    collection: str,
    documents: Iterable[Mapping[str, Any]],
    num_chunks: int,
    report: IngestReport,
    progress: Progress | None,
    described: Mapping[str, str],
) -> Mapping[str, int]:
    """Send documents to the server and add its counts and failures to `report`. Return the server's counts.

    Each request is sent when the documents of the one before are stored, so that a server never has more waiting.
    num_chunks: of all documents. described: names of the documents for messages, by id.
    """
    start_s, on_progress = perf_counter(), progress or ignore_progress
    counts, reasons, num_done = Counter[str](), dict[str, Mapping[str, str]](), 0
    on_progress("prefill", 0, num_chunks)
    for batch in _batches(documents):
        stored, problems = engine.send_documents(collection, batch, _shifted(on_progress, num_done, num_chunks))
        counts.update(stored)
        reasons |= {reason["id"]: reason for reason in problems}
        num_done += sum(len(document["chunks"]) for document in batch)
        on_progress("prefill", num_done, num_chunks)
    report.num_known_kv += counts["num_known_kv"]
    report.num_new_kv += counts["num_new_kv"]
    report.new_kv_bytes += counts["new_kv_bytes"]
    for reason in reasons.values():
        failure = ReadFailure(described.get(reason["id"], reason["id"]), reason["reason"])
        is_dropped = failure.reason.startswith(NOT_IN_REMOTE)
        if reason["status"] == "stored" and not is_dropped and failure.reason != BLANK_TEXT:
            report.notes.append(failure)
            continue
        is_skipped = reason["status"] == "stored" and not is_dropped
        (report.skipped if is_skipped else report.failures).append(failure)
        logger.warning("%s: %s" if is_dropped else "not prefilled: %s: %s", *failure)
    report.prefill_s += perf_counter() - start_s
    return counts


def _shifted(progress: Progress, num_done: int, total: int) -> Progress:
    """Return a callback for a part of the work, before which `num_done` of `total` items were finished."""
    return lambda stage, done, _: progress(stage, num_done + done, total)


def _batches(documents: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the documents in batches, each small enough for one request. Two parts of a document are in two batches."""
    batch, num_chars = list[Mapping[str, Any]](), 0
    for part, size in chain.from_iterable(map(_divide, documents)):
        if batch and num_chars + size > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(part)
        num_chars += size
    if batch:
        yield batch


def _divide(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield a document with its size, or its parts with theirs if it is too long for one request.

    The parts have the same version. The first one replaces an earlier version, and the server adds the others to it.
    """
    texts = document["chunks"]
    sizes = [max(_LEAST_CHARS, len(json.dumps(text))) for text in texts]
    other_chars = len(json.dumps({**document, "chunks": []}))
    is_divided = sum(sizes) > _DOCUMENT_CHARS
    if is_divided and "version" not in document:
        digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
        document = {**document, "version": digest}
    start = 0
    while start < len(texts):
        end, size = start + 1, sizes[start]
        while end < len(texts) and (not is_divided or size + sizes[end] <= _BATCH_CHARS):
            size += sizes[end]
            end += 1
        part = {**document, "chunks": texts[start:end]}
        yield part, size + other_chars
        start = end


def send_indexed_chunks(
    chunks: Sequence[Chunk], engine: Engine, index: ChunkIndex, report: IngestReport, progress: Progress
) -> IngestReport:
    """Run `precompute_chunks` on the server, and return `report` with the server's counts."""
    texts_of: dict[str, list[str]] = {}
    for chunk in chunks:
        texts_of.setdefault(chunk.source, []).append(chunk.text)
    documents = ({"id": source, "chunks": texts} for source, texts in texts_of.items())
    _send(engine, index.collection or LANGCHAIN_COLLECTION, documents, len(chunks), report, progress, {})
    return report


def send_documents(
    documents: Sequence[Any],
    chunks: Sequence[Chunk],
    identities: Sequence[Identity],
    collection: str,
    engine: Engine,
    progress: Progress | None,
) -> IngestReport:
    """Run `precompute_documents` on the server and return its report.

    given: the caller's documents, of any accepted type. chunks, identities: one item per document. progress: called
    while the server stores documents; None: no calls.
    """
    report = IngestReport(bytes_per_token=engine.bytes_per_token)
    sent: dict[str, dict[str, Any]] = {}
    described: dict[str, str] = {}
    for document, chunk, identity in zip(documents, chunks, identities, strict=True):
        name = identity.id
        described.setdefault(name, document_label(document, chunk))
        sent.setdefault(name, {"id": name, "chunks": []})["chunks"].append(chunk.text)
        if identity.version:
            sent[name]["version"] = identity.version
        if identity.source:
            sent[name]["metadata"] = {"source": identity.source}
    counts = _send(engine, collection, sent.values(), len(chunks), report, progress, described)
    report.num_documents = len(sent)
    report.num_chunks, report.num_tokens = counts["num_chunks"], counts["num_tokens"]
    return report
