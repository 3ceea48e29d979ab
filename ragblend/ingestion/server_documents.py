"""Sends documents to a server that precomputes and stores them, and adds its counts to a report.

Depends on an engine that is the client of a server, not on how the server stores documents.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from ragblend.catalog.schema import text_key
from ragblend.corpus.folder_scan import ReadFailure
from ragblend.engine.api import Engine
from ragblend.index import ChunkIndex
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION, Identity, document_label
from ragblend.ingestion.report import BLANK_TEXT, NOT_IN_REMOTE, IngestReport
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)


def is_document_server(engine: Any) -> bool:
    """Return True for an engine that is the client of a server: it has `send_documents` and `remove_documents`."""
    return hasattr(engine, "send_documents")


def _send(
    engine: Any,
    collection: str,
    documents: Sequence[Mapping[str, Any]],
    report: IngestReport,
    progress: Progress | None,
    described: Mapping[str, str],
) -> Mapping[str, int]:
    """Send documents to the server and add its counts and failures to `report`. Return the server's counts.

    described: names of the documents for messages, by id.
    """
    start_s = perf_counter()
    counts, reasons = engine.send_documents(collection, documents, progress or ignore_progress)
    report.num_known_kv += counts["num_known_kv"]
    report.num_new_kv += counts["num_new_kv"]
    report.new_kv_bytes += counts["new_kv_bytes"]
    for reason in reasons:
        failure = ReadFailure(described.get(reason["id"], reason["id"]), reason["reason"])
        is_dropped = failure.reason.startswith(NOT_IN_REMOTE)
        if reason["status"] == "stored" and not is_dropped and failure.reason != BLANK_TEXT:
            report.notes.append(failure)
            continue
        is_skipped = reason["status"] == "stored" and not is_dropped
        (report.skipped if is_skipped else report.failures).append(failure)
        logger.warning("%s: %s" if is_dropped else "not prefilled: %s: %s", *failure)
    report.prefill_s += perf_counter() - start_s
    return counts  # type: ignore[no-any-return]


def send_indexed_chunks(
    chunks: Sequence[Chunk], engine: Engine, index: ChunkIndex, report: IngestReport, progress: Progress
) -> IngestReport:
    """Run `precompute_chunks` on the server, and return `report` with the server's counts.

    The chunks are sent with the index's vectors, so that the server finds the same similar chunks.
    """
    vectors = index.stored_vectors(chunk.text for chunk in chunks)
    embedder = f"{index.manifest.embedder} {index.manifest.embedder_version}"
    sent: dict[str, dict[str, Any]] = {}
    for chunk in chunks:
        empty = {"id": chunk.source, "chunks": [], "vectors": [], "embedder": embedder}
        document = sent.setdefault(chunk.source, empty)
        document["chunks"].append(chunk.text)
        document["vectors"].append(base64.b64encode(vectors[text_key(chunk.text.strip())]).decode())
    _send(engine, index.collection or LANGCHAIN_COLLECTION, [*sent.values()], report, progress, {})
    return report


def send_documents(
    given: Sequence[Any],
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
    for document, chunk, identity in zip(given, chunks, identities, strict=True):
        name = identity.id
        described.setdefault(name, document_label(document, chunk))
        sent.setdefault(name, {"id": name, "chunks": []})["chunks"].append(chunk.text)
        if identity.version:
            sent[name]["version"] = identity.version
        if identity.source:
            sent[name]["metadata"] = {"source": identity.source}
    counts = _send(engine, collection, [*sent.values()], report, progress, described)
    report.num_documents = len(sent)
    report.num_chunks, report.num_tokens = counts["num_chunks"], counts["num_tokens"]
    return report
