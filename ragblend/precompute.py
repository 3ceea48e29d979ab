"""Documents to an index and a store of precomputed KV: chunk, embed, prefill. Idempotent, resumable, reported.

Read `ingest` first. Whatever was finished before an interruption is not done again: documents are known by the hash
of their content, chunks by the key of their KV. Knows the index, the chunker and the Engine protocol; no framework.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from ragblend.chunker import Document, ReadFailure, Splitter, iter_documents, split
from ragblend.engine.disk import DiskStore
from ragblend.engine.protocols import Engine
from ragblend.engine.store import Pins, TieredStore, format_bytes, kv_dtype_of
from ragblend.errors import (
    EmptyCorpusError,
    NotFoundError,
    StoreFullError,
    StoreMismatchError,
    UsageError,
)
from ragblend.index import ChunkIndex, open_index
from ragblend.registry import ChunkRegistry, registry_of
from ragblend.rewriting import count_others, prefill_again, round_known
from ragblend.segments import Chunk

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("read", "embed", "prefill"), what is done and, when known, what there is to do."""

_EMBED_BATCH = 64  # chunks per embedding call; documents are stored whole, so a batch may be a little larger
_SAVE_EVERY_S = 20.0  # the search files are rebuilt from SQLite anyway; saving them often only costs time


@dataclass(slots=True)
class IngestReport:
    """What ingestion changed and what the store costs. `num_new_kv` chunks were prefilled now."""

    num_documents: int = 0
    num_unchanged: int = 0
    num_updated: int = 0
    num_chunks: int = 0  # of the documents given, new and known
    num_tokens: int = 0  # of those chunks, in the LLM's own tokens
    num_new_kv: int = 0
    num_known_kv: int = 0
    num_rewritten_kv: int = 0  # known chunks whose storage dtype was changed
    num_other_kv: int = 0  # known chunks that stay stored in another dtype than the store's
    new_kv_bytes: int = 0
    bytes_per_token: int = 0
    store_bytes: int = 0  # the whole store on disk
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    failures: list[ReadFailure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "failures": [failure._asdict() for failure in self.failures]}


def ingest(
    paths: str | Path | Sequence[str | Path],
    engine: Engine,
    index: ChunkIndex | str | Path,
    *,
    chunk_size: int = 512,
    splitter: Splitter | None = None,
    glob: str = "*",
    precompute: bool = True,
    neighbour_kv: bool = False,
    embedder: str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> IngestReport:
    """Read, chunk, embed and index `paths`, and precompute the KV of every chunk that the store does not hold.

    chunk_size: most tokens per chunk, in the engine's own tokenizer. `splitter` cuts instead
    (`chunker.adapt_splitter` takes LangChain's and LlamaIndex's). `neighbour_kv` also keeps each chunk's KV as computed
    behind the chunk before it: twice the prefill and the store, for answers closer to full prefill where retrieval
    brings both. Files that are no text are listed in `report.failures` and skipped. Raises EmptyCorpusError when
    nothing at all could be read, StoreFullError before prefilling when the forecast does not fit the disk,
    StoreMismatchError for another model's index.
    """
    start_s = perf_counter()
    report = IngestReport(bytes_per_token=engine.bytes_per_token)
    tell = progress or (lambda stage, done, total: None)
    limit = chunk_size_limit(engine, chunk_size)
    cut_version = str(limit) if splitter is None else type(splitter).__name__
    cut = splitter or (lambda document: split(document, engine.segmenter.count_tokens, limit))
    opened = index if isinstance(index, ChunkIndex) else open_engine_index(index, engine, embedder, chunk_size)
    sources = _index_documents(_documents(paths, glob, report), opened, cut, cut_version, tell, report)
    if not sources:
        failed = "; ".join(f"{failure.path}: {failure.reason}" for failure in report.failures[:3])
        if failed:
            return report
        raise EmptyCorpusError(f"{_names(paths)} holds nothing to ingest that matches {glob!r}; name a folder of text")
    chunks = [chunk for source in sources for chunk in opened.chunks(source)]
    report.num_chunks = len(chunks)
    report.num_tokens = sum(_num_tokens(chunk, engine) for chunk in chunks)
    if precompute:
        precompute_chunks(with_neighbours(chunks) if neighbour_kv else chunks, engine, tell, report, say)
        for source in sources:
            if opened.document_status(source) != "precomputed":
                opened.set_status(source, "precomputed")
        opened.save()
        _pin_again(sources, engine, opened)
    report.store_bytes = disk_bytes(engine)
    report.elapsed_s = perf_counter() - start_s
    return report


def precompute_chunks(
    chunks: Sequence[Chunk],
    engine: Engine,
    progress: Progress | None = None,
    report: IngestReport | None = None,
    say: Callable[[str], None] | None = None,
    *,
    rewrite: bool = False,
) -> IngestReport:
    """Prefill every chunk whose KV the store does not hold.

    A chunk that is stored is known, in whatever dtype. With `rewrite`, known chunks take on the store's `kv_dtype`: KV
    as computed is rounded; KV in eight bits is prefilled again, because what rounding lost is lost.
    The size to come is forecast, told through `say`, and checked against the disk before anything is computed.
    """
    report = report or IngestReport(bytes_per_token=engine.bytes_per_token, num_chunks=len(chunks))
    tell = progress or (lambda stage, done, total: None)
    start_s = perf_counter()
    distinct = {(chunk.text, chunk.behind): chunk for chunk in chunks}
    missing = [chunk for chunk in distinct.values() if not engine.is_stored(chunk)]
    report.num_known_kv += len(distinct) - len(missing)
    disk, absent = disk_store(engine), set(missing)
    known = [chunk for chunk in distinct.values() if chunk not in absent]
    renewed: list[Chunk] = []
    if rewrite:
        num_rounded, renewed = round_known(known, engine)
        report.num_rewritten_kv = num_rounded + len(renewed)
    elif num_others := count_others(known, engine, disk):
        report.num_other_kv = num_others
        if say is not None:
            dtype = kv_dtype_of(engine.store)
            say(f"{num_others} known chunks stay as they are stored, not as {dtype}; to change that: "
                f"ragblend precompute --kv-dtype {dtype}")  # fmt: skip
    if disk is not None and (missing or renewed):
        num_tokens = sum(_num_tokens(chunk, engine) for chunk in (*missing, *renewed))
        forecast = num_tokens * engine.bytes_per_token
        free = check_room(disk.root, forecast)
        if say is not None:
            size, room = format_bytes(forecast), format_bytes(free)
            num_chunks = len(missing) + len(renewed)
            say(f"to prefill: {num_chunks} chunks, {num_tokens} tokens; {size} of KV to come, {room} free")
    tell("prefill", 0, len(missing) + len(renewed))
    with closing(open_registry(engine)) as registry:
        # Texts are noted first, all in one transaction: a text whose KV is still to come is prefilled in its prompt,
        # KV whose text is unknown would never be found.
        registry.add(text for text, _ in distinct)
    stored = chain(_prefill(missing, engine), prefill_again(renewed, engine, _prefill))
    for done, nbytes in enumerate(stored, start=1):
        report.new_kv_bytes += nbytes
        report.num_new_kv += done <= len(missing)
        tell("prefill", done, len(missing) + len(renewed))
    report.prefill_s += perf_counter() - start_s
    return report


def with_neighbours(chunks: Iterable[Chunk]) -> list[Chunk]:
    """`chunks`, and after each that follows another of its document once more, to be computed behind that one."""
    found: list[Chunk] = []
    before: Chunk | None = None
    for chunk in chunks:
        found.append(chunk)
        if before is not None and before.source == chunk.source:
            found.append(replace(chunk, behind=before.text))
        before = chunk
    return found


def _prefill(chunks: Sequence[Chunk], engine: Engine) -> Iterable[int]:
    """Prefill chunks one after the other, or side by side where the engine can; the bytes stored of each."""
    together: Callable[[Sequence[Chunk]], Iterable[int]] | None = getattr(engine, "precompute_all", None)
    return together(chunks) if together is not None else map(engine.precompute, chunks)


def precompute_documents(
    documents: Iterable[Any], llm_or_engine: Any, progress: Progress | None = None
) -> IngestReport:
    """Precompute the KV of documents that are chunks already: strings, Chunks, LangChain Documents, LlamaIndex nodes.

    `llm_or_engine` is an Engine, or an object with one at `.engine` (BlendLLM, ChatBlend).
    """
    engine: Engine = getattr(llm_or_engine, "engine", llm_or_engine)
    return precompute_chunks([as_chunk(document) for document in documents], engine, progress)


def as_chunk(document: Any) -> Chunk:
    """A Chunk from a string, a Chunk, a LangChain Document or a LlamaIndex node."""
    if isinstance(document, Chunk):
        return document
    if isinstance(document, str):
        return Chunk(document.strip())
    for attribute in ("page_content", "text"):
        text = getattr(document, attribute, None)
        if isinstance(text, str):
            metadata = dict(getattr(document, "metadata", None) or {})
            return Chunk(text.strip(), str(metadata.get("source", "")), metadata=metadata)
    raise UsageError(
        f"cannot precompute a {type(document).__name__}; pass strings, Chunks, LangChain Documents or LlamaIndex nodes"
    )


def remove_document(source: str, engine: Engine, index: ChunkIndex) -> tuple[int, int]:
    """Forget a document, and its chunks' KV where no other document has the same text. Chunks and KV removed."""
    chunks = index.remove_document(source)
    index.save()
    still_used = {text for _, text in index.texts()}
    orphans = [chunk for chunk in with_neighbours(chunks) if not {chunk.text, chunk.behind or chunk.text} <= still_used]
    removed = sum(engine.forget(chunk) for chunk in orphans)
    with closing(open_registry(engine)) as registry:
        registry.remove(chunk.text for chunk in chunks if chunk.text not in still_used)
    if isinstance(engine.store, Pins):
        engine.store.unpin(source)
    return len(chunks), removed


def pin_document(source: str, engine: Engine, index: ChunkIndex) -> tuple[int, int]:
    """Keep a document's KV in the tiers that evict, now and after restarts. Its chunks, and how many are stored.

    Raises NotFoundError when the index has no such document.
    """
    chunks = list(index.chunks(source))
    if not chunks:
        raise NotFoundError(f"the index has no document {source!r}; ragblend stats lists them")
    if isinstance(engine.store, Pins):
        engine.store.pin(source, [engine.key(chunk) for chunk in with_neighbours(chunks)])
    return len(chunks), sum(engine.is_stored(chunk) for chunk in chunks)


def _pin_again(sources: Sequence[str], engine: Engine, index: ChunkIndex) -> None:
    """A pinned document that was ingested again may have other chunks now."""
    disk = disk_store(engine)
    pinned = disk.pins() if disk is not None else {}
    for source in sources:
        if source in pinned:
            pin_document(source, engine, index)


def open_engine_index(
    path: str | Path, engine: Engine, embedder: str | None = None, chunk_size: int = 512, *, create: bool = True
) -> ChunkIndex:
    """The index at `path`, made for `engine`'s tokenizer; refuses one whose chunks were cut for another model."""
    index = open_index(
        path,
        embedder,
        create=create,
        tokenizer=engine.name,
        tokenizer_fingerprint=engine.segmenter.fingerprint,
        chunk_size=chunk_size,
    )
    made_for = index.manifest
    if made_for.tokenizer_fingerprint not in ("", engine.segmenter.fingerprint):
        index.close()
        raise StoreMismatchError(
            f"the index {path} was chunked for {made_for.tokenizer}, the engine runs {engine.name}, whose tokenizer "
            f"differs. Use --model {made_for.tokenizer}, or ingest again: ragblend ingest DOCS --index NEW_PATH "
            f"--model {engine.name}"
        )
    return index


def open_registry(engine: Engine) -> ChunkRegistry:
    """The registry of chunk texts that belongs to the engine's store."""
    return registry_of(engine.store)


def disk_store(engine: Engine) -> DiskStore | None:
    """The local disk tier of the engine's store, if it has one."""
    tiers = engine.store.tiers if isinstance(engine.store, TieredStore) else (engine.store,)
    return next((tier for tier in tiers if isinstance(tier, DiskStore)), None)


def disk_bytes(engine: Engine) -> int:
    """Bytes of KV on disk; 0 for an engine that keeps it in memory."""
    disk = disk_store(engine)
    return disk.nbytes() if disk is not None else 0


def check_room(path: Path, nbytes: int) -> int:
    """Bytes free on the disk that holds `path`; raises StoreFullError when `nbytes` more do not fit."""
    free = shutil.disk_usage(path).free
    if nbytes > free:
        raise StoreFullError(
            f"the KV to come needs {format_bytes(nbytes)}, the disk of {path} has {format_bytes(free)} free. Free "
            "space, choose another --store, a half-precision --dtype, or fewer documents; --no-precompute indexes only"
        )
    return free


def chunk_size_limit(engine: Engine, chunk_size: int) -> int:
    """`chunk_size`, or a UsageError when a chunk of it would not fit the model's context with a question behind it."""
    room = engine.context_length - 64
    if not 0 < chunk_size <= room:
        raise UsageError(
            f"chunk size is {chunk_size} tokens; {engine.name} reads {engine.context_length}, choose 1 to {room} "
            "(--chunk-size), small enough that several chunks fit"
        )
    return chunk_size


def _documents(paths: str | Path | Sequence[str | Path], glob: str, report: IngestReport) -> Iterator[Document]:
    """Readable documents; the others go to the report."""
    for item in iter_documents([paths] if isinstance(paths, str | Path) else paths, glob=glob):
        if isinstance(item, ReadFailure):
            report.failures.append(item)
        else:
            yield item


def _index_documents(
    documents: Iterable[Document],
    index: ChunkIndex,
    cut: Callable[[Document], list[Chunk]],
    cut_version: str,
    tell: Progress,
    report: IngestReport,
) -> list[str]:
    """Chunk, embed and index what is new or changed; the sources of all documents.

    A document counts as changed too when it is to be cut in another way: `cut_version` is part of its hash.
    """
    sources: list[str] = []
    waiting: list[tuple[Document, list[Chunk]]] = []
    saved_s = perf_counter()
    num_embedded = 0

    def flush() -> None:
        nonlocal num_embedded, saved_s
        if not waiting:
            return
        vectors = index.embedder.embed([chunk.text for _, chunks in waiting for chunk in chunks])
        first = 0
        for document, chunks in waiting:
            rows = vectors[first : first + len(chunks)]
            index.add_document(document.source, f"{document.content_hash}:{cut_version}", chunks, rows)
            first += len(chunks)
        num_embedded += first
        tell("embed", num_embedded, None)
        waiting.clear()
        if perf_counter() - saved_s > _SAVE_EVERY_S:
            index.save()
            saved_s = perf_counter()

    for document in documents:
        report.num_documents += 1
        sources.append(document.source)
        known = index.document_hash(document.source)
        version = f"{document.content_hash}:{cut_version}"
        if known == version:
            report.num_unchanged += 1
        else:
            report.num_updated += known is not None
            waiting.append((document, cut(document)))
            if sum(len(chunks) for _, chunks in waiting) >= _EMBED_BATCH:
                flush()
        tell("read", report.num_documents, None)
    flush()
    if report.num_unchanged < report.num_documents:
        index.save()
    return sources


def _num_tokens(chunk: Chunk, engine: Engine) -> int:
    counted = chunk.metadata.get("num_tokens")
    return counted if isinstance(counted, int) else engine.segmenter.count_tokens(chunk.text)


def _names(paths: str | Path | Sequence[str | Path]) -> str:
    return str(paths) if isinstance(paths, str | Path) else ", ".join(str(path) for path in paths)
