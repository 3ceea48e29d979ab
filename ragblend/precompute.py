"""Documents to an index and a store of precomputed KV: chunk, embed, prefill. Idempotent, resumable, reported.

Read `ingest` first. Whatever was finished before an interruption is not done again: files and documents are known by
the hash of their content, chunks by the key of their KV. Knows the index, the chunker and the Engine protocol; no
framework.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ragblend.catalog.registry import open_registry, store_folders
from ragblend.catalog.schema import DocumentName, text_key
from ragblend.catalog.sent_documents import DocumentTable
from ragblend.chunker import Splitter, get_splitter_version, split
from ragblend.corpus.documents import MAX_FILE_MIB, has_visible_text
from ragblend.corpus.embedders import Embedder
from ragblend.corpus.folder_scan import ReadFailure, display_source, match_sources, scan_folders, source_path
from ragblend.corpus.loaders import FileReader, Loader
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore, StoreDefaults
from ragblend.engine.store.tiered import disk_tier, format_bytes
from ragblend.errors import (
    BackendUnreachableError,
    EmptyCorpusError,
    NotFoundError,
    StoreFullError,
    StoreMismatchError,
    UsageError,
)
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.contexts import (
    SimilarChunkFinder,
    attach_similar_texts,
    chunk_variants,
    delete_other_variants,
    delete_stale_variants,
    explain_unfit_text,
    resolve_context_policy,
)
from ragblend.ingestion.deletion import delete_orphaned_kv, find_pending_sources, registry_for, replace_documents
from ragblend.ingestion.dtype_conversion import count_other_dtypes, prefill_again, quantize_stored
from ragblend.ingestion.registered_similar import open_registered_finder
from ragblend.ingestion.sync import ChunkerConfig, find_moved_files, sync_index
from ragblend.ingestion.sync import Progress as Progress
from ragblend.ingestion.workers import Prefill, Workers, prefill_here
from ragblend.options import ContextPolicy
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)


LANGCHAIN_COLLECTION = "langchain"
"""The collection of documents whose caller names none."""

DEFAULT_CHUNK_TOKENS = 512
"""Of an index that is new, where nobody said otherwise."""


@dataclass(slots=True)
class IngestReport:
    """What ingestion changed and what the store costs. `num_new_kv` chunks were prefilled now. All paths absolute."""

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
    num_removed_kv: int = 0  # KV of chunks that were changed or removed, and of what was computed behind them
    removed: list[str] = field(default_factory=list)  # documents that are gone
    failures: list[ReadFailure] = field(default_factory=list)
    skipped: list[ReadFailure] = field(default_factory=list)  # files that are no documents
    ignored: list[str] = field(default_factory=list)  # files and folders that `.gitignore` leaves out
    notes: list[ReadFailure] = field(default_factory=list)  # what was left out of files that were read, or guessed

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        lists = {name: [item._asdict() for item in getattr(self, name)] for name in ("failures", "skipped", "notes")}
        return {**asdict(self), **lists}


def ingest(
    paths: str | Path | Sequence[str | Path],
    engine: Engine,
    index: ChunkIndex | str | Path,
    *,
    chunk_size: int | None = None,
    splitter: Splitter | None = None,
    glob: str = "*",
    precompute: bool = True,
    context: ContextPolicy | None = None,
    keep_missing: bool = False,
    max_file_mib: float = MAX_FILE_MIB,
    text_field: str = "",
    loader: Loader | None = None,
    embedder: str | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> IngestReport:
    """Read, chunk, embed and index `paths`, and precompute the KV of every chunk that the store does not hold.

    Run again, it follows its files and folders: what is edited is replaced, and documents whose file or record is gone
    are dropped with their KV, registered texts and pins, unless `keep_missing`. Only what came from `paths` is, and
    nothing that `glob` leaves out or that cannot be read this time. `folders.scan_folders` says what a folder shows.

    chunk_size: most tokens per chunk, in the engine's own tokenizer; the index's own where it is None. `splitter` cuts
    instead (`chunker.adapt_splitter` takes LangChain's and LlamaIndex's). Documents that were cut otherwise are cut
    again, and `say` is told.

    context: what chunks are computed behind besides the prefix, see `lookup`; the store remembers it. None is what it
    remembers, in a new one the default for the model: "similar" from 12 layers on, else "none". "similar" keeps a
    second version of each chunk: twice the store. `precompute_index` changes it; here it has to be what the store has,
    or UsageError.

    text_field: the field that holds the text of the records of CSV, JSON and Parquet files; a dotted path leads into
    nested objects. "" lets the reader find it. loader: a function from a path to documents of ragblend, LangChain or
    LlamaIndex, or strings, that reads every file instead of ragblend's readers. With another `text_field` or `loader`
    files are read again.

    workers: processes that embed and prefill instead of this one (`RayWorkers`).

    Files that should be text and are not, or hold more than `max_file_mib` (0: no limit), are listed in
    `report.failures`, as are documents with a chunk that the engine cannot prefill; other files that are no documents
    in `report.skipped`. Raises EmptyCorpusError when there is nothing to ingest, StoreFullError before prefilling when
    the forecast does not fit the disk, StoreMismatchError for another model's index or another embedder.
    """
    engine.check_process()
    start_s = perf_counter()
    report = IngestReport(bytes_per_token=engine.bytes_per_token)
    on_progress = progress or (lambda stage, done, total: None)
    if precompute:
        resolve_context_policy(engine, context)
    remember_defaults(engine)
    reader = FileReader(max_file_mib, text_field, loader)
    disk = disk_tier(engine.store)
    own = [index.path if isinstance(index, ChunkIndex) else index, *store_folders(engine.store)]
    own += [disk.kv_dir] if disk is not None else []
    found = scan_folders([paths] if isinstance(paths, str | Path) else paths, glob, own)
    # What is opened here is saved and closed here: left open, what was committed stands in the database's log alone.
    with (
        nullcontext(index)
        if isinstance(index, ChunkIndex)
        else open_engine_index(index, engine, embedder, chunk_size) as opened
    ):
        cut = _resolve_chunker(opened, engine, chunk_size, splitter, notify or logger.warning)
        followed = sync_index(opened, found, cut, on_progress, workers, keep_missing=keep_missing, reader=reader)
        report.num_documents, report.num_unchanged = len(followed.sources), followed.num_unchanged
        report.num_updated, report.removed = followed.num_updated, followed.removed
        report.failures, report.skipped, report.ignored = followed.failures, followed.skipped, found.ignored
        report.notes = followed.notes
        report.num_removed_kv, problem = delete_orphaned_kv(opened, engine)
        if problem:
            logger.warning("what is gone stays in the remote tier (%s); the next ingestion drops it there", problem)
        if not followed.sources and not followed.failures and not followed.removed:
            raise EmptyCorpusError(_explain_empty_corpus(paths, glob, report))
        chunks = [chunk for source in followed.sources for chunk in opened.chunks(source)]
        report.num_chunks = len(chunks)
        report.num_tokens = sum(_num_tokens(chunk, engine) for chunk in chunks)
        if precompute and chunks:
            prefill = workers.prefill if workers is not None else prefill_here
            wanted = chunk_variants(chunks, engine.context)
            precompute_chunks(wanted, engine, on_progress, report, notify, index=opened, prefill=prefill)
            indexed = set(followed.sources).difference(opened.sources("precomputed"))
            opened.set_status(indexed, "precomputed")
            _refresh_pins(followed.sources, engine, opened)
        if notify is not None:
            for folder, num_files in find_moved_files(opened, followed, found).items():
                place = display_source(folder)
                notify(
                    f"{num_files} of these files were in {place} and are gone from there; to drop their old documents: "
                    f"ragblend remove {place}"
                )
    report.store_bytes = disk_bytes(engine)
    report.elapsed_s = perf_counter() - start_s
    return report


def _resolve_chunker(
    index: ChunkIndex, engine: Engine, chunk_size: int | None, splitter: Splitter | None, notify: Callable[[str], None]
) -> ChunkerConfig:
    """How documents are to be cut, which the index remembers. A change is said."""
    made = index.manifest
    size = validate_chunk_size(engine, chunk_size or made.chunk_size or DEFAULT_CHUNK_TOKENS)
    name = get_splitter_version(splitter) if splitter is not None else ""
    if (size, name) != (made.chunk_size, made.splitter):
        if made.num_documents and (made.chunk_size or made.splitter) and (name or f"{size} tokens") != made.chunker:
            notify(
                f"chunks of {name or f'{size} tokens'} from now on, before {made.chunker}: documents given are cut and "
                "prefilled again, others when they are given"
            )
        index.set_chunker(size, name)
    if splitter is not None:
        return ChunkerConfig(splitter, name)
    return ChunkerConfig(lambda document: split(document, engine.renderer.count_tokens, size), str(size))


def precompute_chunks(
    chunks: Sequence[Chunk],
    engine: Engine,
    progress: Progress | None = None,
    report: IngestReport | None = None,
    notify: Callable[[str], None] | None = None,
    *,
    rewrite: bool = False,
    index: SimilarChunkFinder | None = None,
    register_texts: Callable[[], object] | None = None,
    prefill: Prefill = prefill_here,
) -> IngestReport:
    """Prefill every chunk whose KV the store does not hold; those that the engine cannot prefill are in
    `report.failures`.

    A chunk that is stored is known, in whatever dtype. With `rewrite`, known chunks take on the store's `kv_dtype`: KV
    as computed is rounded; KV in eight bits is prefilled again, because what rounding lost is lost.
    The size to come is forecast, told through `say`, and checked against the disk before anything is computed.
    `index` finds what similar versions are computed behind; without one they are a UsageError. `note` registers the
    texts; by default they become an index's. `prefill`: who computes.
    """
    report = report or IngestReport(bytes_per_token=engine.bytes_per_token, num_chunks=len(chunks))
    on_progress = progress or (lambda stage, done, total: None)
    start_s = perf_counter()
    if isinstance(index, ChunkIndex) and is_document_server(engine):
        return _send_indexed(
            [chunk for chunk in chunks if chunk.context != "similar"], engine, index, report, on_progress
        )
    problems = _find_unfit_texts((chunk.text for chunk in chunks), engine)
    unfit = dict.fromkeys((chunk.source, chunk.text) for chunk in chunks if chunk.text in problems)
    report.failures += [ReadFailure(source, problems[text]) for source, text in unfit]
    chunks = [chunk for chunk in chunks if chunk.text not in problems]
    distinct = {(chunk.text, chunk.context, chunk.context_texts): chunk for chunk in chunks}
    # Texts are noted first. A text whose KV is still to come is prefilled in its prompt, KV whose text is unknown would
    # never be found. And who deletes KV of texts that are gone looks there last: what is stored stays from here on.
    if register_texts is not None:
        register_texts()
    else:
        with closing(open_registry(engine.store)) as registry:
            owner = DocumentName(namespace=engine.namespace)
            if isinstance(index, ChunkIndex):
                owner = DocumentName(index.registry_name)
            registry.add((text for text, *_ in distinct), owner)
    keys = {chunk: engine.key(chunk) for chunk in distinct.values()}
    stored = engine.store.contains_many(list(keys.values()))
    missing = [chunk for chunk, is_there in zip(keys, stored, strict=True) if not is_there]
    report.num_known_kv += len(distinct) - len(missing)
    disk, absent = disk_tier(engine.store), set(missing)
    known = [chunk for chunk in distinct.values() if chunk not in absent]
    missing, renewed = attach_similar_texts(missing, engine, index), list[Chunk]()
    if rewrite:
        num_rounded, renewed = quantize_stored(known, engine)
        renewed = attach_similar_texts(renewed, engine, index)
        report.num_rewritten_kv = num_rounded + len(renewed)
    elif num_others := count_other_dtypes(known, engine, disk):
        report.num_other_kv = num_others
        if notify is not None:
            dtype = engine.store.kv_dtype
            notify(f"{num_others} known chunks stay as they are stored, not as {dtype}; to change that: "
                f"ragblend precompute --kv-dtype {dtype}")  # fmt: skip
    if disk is not None and (missing or renewed):
        num_tokens = sum(_num_tokens(chunk, engine) for chunk in (*missing, *renewed))
        forecast = num_tokens * engine.bytes_per_token
        room = describe_capacity(disk, forecast)
        if notify is not None:
            num_chunks = len(missing) + len(renewed)
            notify(
                f"to prefill: {num_chunks} chunks, {num_tokens} tokens; {format_bytes(forecast)} of KV to come, {room}"
            )
    engine.add_known(distinct.values())
    on_progress("prefill", 0, len(missing) + len(renewed))
    prefilled = chain(prefill(missing, engine), prefill_again(renewed, engine, prefill))
    try:
        for done, nbytes in enumerate(prefilled, start=1):
            report.new_kv_bytes += nbytes
            report.num_new_kv += done <= len(missing)
            on_progress("prefill", done, len(missing) + len(renewed))
    finally:
        delete_stale_variants((*missing, *renewed), engine, index)
    if disk is not None:
        with closing(open_registry(engine.store)) as registry:
            registry.record_stored(filter(disk.has_file, keys.values()), engine.fingerprint)
    report.prefill_s += perf_counter() - start_s
    return report


def remember_defaults(engine: Engine) -> None:
    """Have the store's folder remember the engine's model and system text for those who name none."""
    disk = disk_tier(engine.store)
    if disk is not None:
        path = Path(engine.name)
        model = str(path.absolute()) if engine.name != "demo" and path.exists() else engine.name
        disk.put_defaults(StoreDefaults(model, engine.system))


def _find_unfit_texts(texts: Iterable[str], engine: Engine) -> dict[str, str]:
    """Return the texts that the engine cannot prefill, each with the reason."""
    return {text: problem for text in dict.fromkeys(texts) if (problem := explain_unfit_text(text, engine))}


def precompute_index(
    engine: Engine,
    index: ChunkIndex,
    context: ContextPolicy | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    *,
    rewrite: bool = False,
    workers: Workers | None = None,
) -> IngestReport:
    """Prefill every indexed chunk whose KV the store does not hold, in every version that its context asks for.

    Another `context` than the store's is remembered first, and the versions that it has not are dropped last, so killed
    in between, the same call goes on. `rewrite`: see `precompute_chunks`; `workers`: see `ingest`.
    """
    engine.check_process()
    if context is not None:
        engine.set_context_policy(context)
    else:
        resolve_context_policy(engine, None)
    chunks = list(index.chunks())
    wanted = chunk_variants(chunks, engine.context)
    prefill = workers.prefill if workers is not None else prefill_here
    report = precompute_chunks(wanted, engine, progress, notify=notify, rewrite=rewrite, index=index, prefill=prefill)
    if context is not None:
        report.num_removed_kv, problem = delete_other_variants(chunks, wanted, engine)
        if problem:
            logger.warning("other versions stay in the remote tier (%s); the same command drops them there", problem)
        _refresh_pins(index.sources(), engine, index)
    report.num_chunks, report.num_documents = index.num_chunks, index.num_documents
    report.store_bytes = disk_bytes(engine)
    return report


def precompute_documents(
    documents: Iterable[Any],
    llm_or_engine: Any,
    progress: Progress | None = None,
    *,
    ids: Sequence[str] = (),
    versions: Sequence[str] = (),
    collection: str = LANGCHAIN_COLLECTION,
    workers: Workers | None = None,
    prefill: Prefill | None = None,
    embedder: Embedder | None = None,
) -> IngestReport:
    """Precompute the KV of documents that are chunks already: strings, Chunks, LangChain Documents, LlamaIndex nodes.

    `llm_or_engine` is an Engine, or an object with one at `.engine` (BlendLLM, ChatBlend). `ids`: the id of each
    document, the same for all chunks of one, "" for none; by default the `id` of LangChain Documents. The chunks of an
    id replace those that it had in its `collection`, and KV that no other document has is deleted. With `versions`, a
    version for each document (a hash of the file that it is cut from, for example), chunks of the version that an id
    has already are added to its others: a document may come in several calls. `workers`: processes that prefill instead
    of this one (`RayWorkers`); or `prefill` says how this one does.

    A document that the engine cannot prefill (longer than the model's context, or not Unicode) stops no other: it is
    in `report.failures` with its id and source, and logged. One without visible text is in `report.skipped`.

    In a store whose context is "similar" (the default for models of 12 layers or more), chunks are stored a second
    time, behind the most similar ones of all that came this way, by the vectors of `embedder` (None: MiniLM's where the
    extra `demo` is installed, else by their words).
    """
    start_s = perf_counter()
    engine: Engine = getattr(llm_or_engine, "engine", llm_or_engine)
    engine.check_process()
    resolve_context_policy(engine, None)
    remember_defaults(engine)
    given = [documents] if isinstance(documents, str) else list(documents)
    chunks = [as_chunk(document) for document in given]
    named_as, versioned_as = ids or [*map(_document_id, given)], versions or [""] * len(given)
    if is_document_server(engine):
        report = _send_documents(given, chunks, named_as, versioned_as, collection, engine, progress)
        report.elapsed_s = perf_counter() - start_s
        return report
    problems = _find_unfit_texts((chunk.text for chunk in chunks), engine)
    failures, skipped, fit = list[ReadFailure](), list[ReadFailure](), list[Chunk]()
    texts_of: dict[DocumentName, list[str]] = {}
    version_of: dict[DocumentName, str] = {}
    for document, chunk, found, version in zip(given, chunks, named_as, versioned_as, strict=True):
        name = DocumentName(collection if found else "", found, engine.namespace)
        version_of[name] = version
        texts_of.setdefault(name, [])  # a document that has nothing to prefill now loses what it had
        if problem := problems.get(chunk.text):
            failures.append(ReadFailure(_describe_document(document, chunk), problem))
        elif not has_visible_text(chunk.text):  # in a prompt, a blank one is text
            skipped.append(ReadFailure(_describe_document(document, chunk), "it holds no visible text"))
        else:
            texts_of[name].append(chunk.text)
            fit.append(chunk)
    for failure in (*failures, *skipped):
        logger.warning("not prefilled: %s: %s", *failure)
    chunks = fit
    registry = registry_for(llm_or_engine)
    finder, wanted = open_registered_finder(engine, registry, embedder), chunks
    main = [chunk for chunk in chunks if chunk.context is None]
    if finder is not None:
        wanted = [*chunks, *chunk_variants(main, "similar"), *finder.find_missing_variants()]

    def register_texts() -> None:
        for name, texts in texts_of.items():
            registry.add(texts, name)
        if finder is not None:
            finder.add(main)

    if prefill is None:
        prefill = workers.prefill if workers is not None else prefill_here
    report = precompute_chunks(wanted, engine, progress, register_texts=register_texts, index=finder, prefill=prefill)
    report.num_chunks, report.failures, report.skipped = len(chunks), failures, skipped
    report.num_documents = len({found for found in named_as if found}) + list(named_as).count("")
    report.num_tokens = sum(_num_tokens(chunk, engine) for chunk in chunks)
    if finder is not None:
        finder.mark_stored(wanted)
    changed = {name for name, version in version_of.items() if name.id and version != registry.version_of(name)}
    replaced = {
        name: texts for name, texts in texts_of.items() if name in changed or (name.id and not version_of[name])
    }
    report.num_removed_kv, problem = replace_documents(replaced, engine, registry)
    for name in changed:  # last: killed before, the same call replaces the document again
        registry.set_version(name, version_of[name])
    if problem:
        logger.warning("what is gone stays in the remote tier until it is evicted there: %s", problem)
    report.elapsed_s = perf_counter() - start_s
    return report


def delete_precomputed(ids: Iterable[str], llm_or_engine: Any, *, collection: str = LANGCHAIN_COLLECTION) -> int:
    """Delete the KV of documents that `precompute_documents` was given with these ids. Return the number of entries.

    KV of a text that another document has stays. Unknown ids are passed over. Raises BackendUnreachableError when a
    remote tier could not be told.
    """
    engine: Engine = getattr(llm_or_engine, "engine", llm_or_engine)
    ids = list(filter(None, ids))
    named = {DocumentName(collection, each, engine.namespace): list[str]() for each in ids}
    if is_document_server(engine):
        return int(engine.remove_documents(collection, ids))  # type: ignore[attr-defined]
    registry = registry_for(engine)
    num_removed, problem = replace_documents(named, engine, registry)
    for name in named:
        if registry.version_of(name):
            registry.set_version(name, "")
    if problem:
        raise BackendUnreachableError(problem)
    return num_removed


# --- by a server that stores documents itself: what it is sent, and what it answers ---


def is_document_server(engine: Any) -> bool:
    """True for an engine that is the client of a server: it has `send_documents` and `remove_documents`."""
    return hasattr(engine, "send_documents")


def _send(
    engine: Any,
    collection: str,
    documents: Sequence[Mapping[str, Any]],
    report: IngestReport,
    progress: Progress | None,
    described: Mapping[str, str],
) -> Mapping[str, int]:
    """Have the server store documents, and add what it did to `report`. `described`: how messages call them."""
    start_s = perf_counter()
    counts, reasons = engine.send_documents(collection, documents, progress or (lambda stage, done, total: None))
    report.num_known_kv += counts["num_known_kv"]
    report.num_new_kv += counts["num_new_kv"]
    report.new_kv_bytes += counts["new_kv_bytes"]
    for reason in reasons:
        failure = ReadFailure(described.get(reason["id"], reason["id"]), reason["reason"])
        (report.skipped if reason["status"] == "stored" else report.failures).append(failure)
        logger.warning("not prefilled: %s: %s", *failure)
    report.prefill_s += perf_counter() - start_s
    return counts  # type: ignore[no-any-return]


def _send_indexed(
    chunks: Sequence[Chunk], engine: Engine, index: ChunkIndex, report: IngestReport, progress: Progress
) -> IngestReport:
    """`precompute_chunks` by a server: with the vectors of the index, so that it finds the same chunks similar."""
    vectors = index.vectors(chunk.text for chunk in chunks)
    embedder = f"{index.manifest.embedder} {index.manifest.embedder_version}"
    sent: dict[str, dict[str, Any]] = {}
    for chunk in chunks:
        empty = {"id": chunk.source, "chunks": [], "vectors": [], "embedder": embedder}
        document = sent.setdefault(chunk.source, empty)
        document["chunks"].append(chunk.text)
        vector = np.frombuffer(vectors[text_key(chunk.text.strip())], "<f4").astype(float)
        document["vectors"].append(vector.round(6).tolist())  # half as many characters
    _send(engine, index.registry_name or LANGCHAIN_COLLECTION, [*sent.values()], report, progress, {})
    return report


def _send_documents(
    given: Sequence[Any],
    chunks: Sequence[Chunk],
    ids: Sequence[str],
    versions: Sequence[str],
    collection: str,
    engine: Engine,
    progress: Progress | None,
) -> IngestReport:
    """`precompute_documents` by a server."""
    report = IngestReport(bytes_per_token=engine.bytes_per_token)
    sent: dict[str, dict[str, Any]] = {}
    described: dict[str, str] = {}
    for document, chunk, found, version in zip(given, chunks, ids, versions, strict=True):
        name = found or text_key(chunk.text.strip()).hex()
        described.setdefault(name, _describe_document(document, chunk))
        sent.setdefault(name, {"id": name, "chunks": []})["chunks"].append(chunk.text)
        if version:
            sent[name]["version"] = version
    counts = _send(engine, collection, [*sent.values()], report, progress, described)
    report.num_documents = len(sent)
    report.num_chunks, report.num_tokens = counts["num_chunks"], counts["num_tokens"]
    return report


def _document_id(document: Any) -> str:
    return getattr(document, "id", None) or "" if hasattr(document, "page_content") else ""


def _describe_document(document: Any, chunk: Chunk) -> str:
    """Return the id and source of a framework's document for messages; without either the beginning of its text."""
    metadata, owner = chunk.metadata, getattr(document, "ref_doc_id", None)
    found = (metadata.get(key) for key in ("source", "file_path", "file_name"))
    source = chunk.source or next(filter(None, found), owner)
    name = getattr(document, "node_id", None) or getattr(document, "id", None)
    if chunk is document:  # its id is a hash
        name = None
    return " of ".join(str(part) for part in (name, source) if part) or repr(chunk.text[:60])


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
            return Chunk(text.strip(), str(metadata.get("source") or ""), metadata=metadata)
    raise UsageError(
        f"cannot precompute a {type(document).__name__}; pass strings, Chunks, LangChain Documents or LlamaIndex nodes"
    )


def find_documents(name: str, index: ChunkIndex, *, include_unfinished: bool = False) -> list[str]:
    """Sources of the documents that a person means: a file, a folder, a record; see `folders.match_sources`.

    include_unfinished: also those whose removal has begun and was not finished. Raises NotFoundError if there is none.
    """
    known = [(source, file) for file, sources in index.documents().items() for source in sources]
    found = match_sources(name, known)
    if include_unfinished:
        found += match_sources(name, [(source, source_path(source)) for source in sorted(find_pending_sources(index))])
    if not found:
        if include_unfinished and not index.is_saved:  # a removal was killed as all but this was done
            index.save()
        raise NotFoundError(f"the index has no document {name!r}, and none below it; ragblend stats lists them")
    return list(dict.fromkeys(found))


def find_added_documents(name: str, engine: Engine) -> list[DocumentName]:
    """Return the documents of the engine's namespace that `precompute_documents`, a vector store or a client of a
    server has added and that a person means: by their id, by COLLECTION/ID, or by the collection of all of them.

    Raises UsageError for an id that several collections have.
    """
    with closing(open_registry(engine.store)) as registry:
        known = [each for each in registry.documents() if each.id and each.namespace == engine.namespace]
    if exact := [each for each in known if name == f"{each.collection}/{each.id}"]:
        return exact
    by_id = [each for each in known if each.id == name]
    if len(by_id) > 1:
        collections = ", ".join(repr(each.collection) for each in by_id)
        raise UsageError(f"{name!r} is a document of the collections {collections}; name one: COLLECTION/{name}")
    return by_id or [each for each in known if each.collection == name]


def remove_added_documents(documents: Iterable[DocumentName], engine: Engine) -> tuple[int, int]:
    """Delete the texts and the KV of documents that `find_added_documents` returned, of which a vector store keeps what
    it has itself. Return the number of their chunks and of the deleted entries.

    KV of a text that another document has stays. Raises BackendUnreachableError when a remote tier could not be told.
    """
    ids_of: dict[str, list[str]] = {}
    for document in documents:
        ids_of.setdefault(document.collection, []).append(document.id)
    num_removed = 0
    with closing(open_registry(engine.store)) as registry:
        num_chunks = sum(len(registry.texts_of(document)) for document in documents)
    for collection, ids in ids_of.items():
        num_removed += delete_precomputed(ids, engine, collection=collection)
        for folder in store_folders(engine.store):
            with DocumentTable(folder) as sent:
                sent.remove(engine.namespace, collection, ids)
    return num_chunks, num_removed


def remove_documents(sources: Iterable[str], engine: Engine, index: ChunkIndex) -> tuple[int, int]:
    """Forget documents: chunks, pins, and KV and registered texts that no other document has. Chunks and KV removed.

    Killed at any moment, the same call does the rest. A document whose file is still there comes back when that, or its
    folder, is ingested again. Raises BackendUnreachableError when a remote tier could not be told, with nothing left on
    this machine; the next removal or ingestion tells it. Raises NotFoundError for a document that is not there.
    """
    known, begun = set(index.sources()), find_pending_sources(index)
    given = [source for source in sources if source in known or source not in begun]
    num_chunks = sum(index.remove_document(source) for source in given)
    num_removed, problem = delete_orphaned_kv(index, engine)  # before saving, which a full disk may refuse
    if not index.is_saved:
        index.save()
    if problem:
        raise BackendUnreachableError(
            f"removed here, not in the remote tier ({problem}); the same command, or the next `ragblend ingest` or "
            "`remove` with that tier, drops it there"
        )
    return num_chunks, num_removed


def pin_document(source: str, engine: Engine, index: ChunkIndex) -> tuple[int, int]:
    """Keep a document's KV in the tiers that evict, now and after restarts. Its chunks, and how many are stored.

    Raises NotFoundError when the index has no such document.
    """
    chunks = list(index.chunks(source))
    if not chunks:
        raise NotFoundError(f"the index has no document {source!r}; ragblend stats lists them")
    engine.store.pin(source, [engine.key(chunk) for chunk in chunk_variants(chunks, engine.context)])
    return len(chunks), sum(engine.is_stored(chunk) for chunk in chunks)


def _refresh_pins(sources: Sequence[str], engine: Engine, index: ChunkIndex) -> None:
    """A pinned document that was ingested again may have other chunks now."""
    disk = disk_tier(engine.store)
    pinned = disk.pins() if disk is not None else {}
    for source in sources:
        if source in pinned:
            pin_document(source, engine, index)


def open_engine_index(
    path: str | Path,
    engine: Engine,
    embedder: str | None = None,
    chunk_size: int | None = None,
    *,
    create: bool = True,
) -> ChunkIndex:
    """The index at `path`, made for `engine`'s tokenizer; refuses one whose chunks were cut for another model.

    `embedder` and `chunk_size` are for an index that is new; another embedder than the index's is refused.
    """
    index = open_index(
        path,
        embedder,
        create=create,
        tokenizer=engine.name,
        tokenizer_fingerprint=engine.renderer.fingerprint,
        chunk_size=chunk_size or DEFAULT_CHUNK_TOKENS,
    )
    made_for = index.manifest
    if made_for.tokenizer_fingerprint not in ("", engine.renderer.fingerprint):
        index.close()
        raise StoreMismatchError(
            f"the index {path} was chunked for {made_for.tokenizer}, the engine runs {engine.name}, whose tokenizer "
            f"differs. Use `model={made_for.tokenizer!r}`, or ingest again: ragblend ingest DOCS --store NEW_PATH "
            f"--model {engine.name}"
        )
    return index


def disk_bytes(engine: Engine) -> int:
    """Bytes of KV on disk; 0 for an engine that keeps it in memory."""
    disk = disk_tier(engine.store)
    return disk.nbytes() if disk is not None else 0


def describe_capacity(disk: DiskStore, nbytes: int) -> str:
    """How much room is left for `nbytes` of KV, in words, and whether other KV leaves for it.

    Raises StoreFullError when the disk has not so much free, or the store may not hold it at all."""
    free = shutil.disk_usage(disk.kv_dir if disk.kv_dir.is_dir() else disk.root).free
    if nbytes > free:
        raise StoreFullError(
            f"the KV to come needs {format_bytes(nbytes)}, the disk of {disk.kv_dir} has {format_bytes(free)} free. "
            "Free space, choose another `store`, a half-precision `dtype`, or fewer documents; `precompute=False` only "
            "indexes"
        )
    held = disk.recent_nbytes()
    limit, room = disk.limit_bytes(held), f"{format_bytes(free)} free"
    if limit is None or nbytes <= limit - held:
        return room
    if disk.capacity_bytes == "auto" and nbytes > limit:  # a number was somebody's choice; this nobody chose
        raise StoreFullError(
            f"the KV to come needs {format_bytes(nbytes)}, {disk.kv_dir} may hold {format_bytes(limit)}: as much as it "
            "leaves free, because no limit is set. Set one in GiB: `disk_gib=...` (0: no limit); `precompute=False` "
            "only indexes"
        )
    return (
        f"{room}; the store holds {format_bytes(held)} and may hold {format_bytes(limit)}, so what was used longest "
        "ago leaves (to keep it: `disk_gib=...`)"
    )


def validate_chunk_size(engine: Engine, chunk_size: int) -> int:
    """`chunk_size`, or a UsageError when a chunk of it would not fit the model's context with a question behind it."""
    room = engine.context_length - 64
    if not 0 < chunk_size <= room:
        raise UsageError(
            f"chunk size is {chunk_size} tokens; {engine.name} reads {engine.context_length}, choose 1 to {room} "
            "(`chunk_size`), small enough that several chunks fit"
        )
    return chunk_size


def _num_tokens(chunk: Chunk, engine: Engine) -> int:
    counted = chunk.metadata.get("num_tokens")
    return counted if isinstance(counted, int) else engine.renderer.count_tokens(chunk.text)


def _explain_empty_corpus(paths: str | Path | Sequence[str | Path], glob: str, report: IngestReport) -> str:
    names = str(paths) if isinstance(paths, str | Path) else ", ".join(str(path) for path in paths)
    found = [
        *(f"{display_source(path)} {reason}" for path, reason in report.skipped[:1]),
        *(f".gitignore leaves out {display_source(path)}: name it to read it" for path in report.ignored[:1]),
    ]
    why = f" ({'; '.join(found)})" if found else ""
    return f"{names} holds nothing to ingest that matches {glob!r}{why}; name a folder of text"
