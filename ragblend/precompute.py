"""Ingestion: documents are chunked, embedded into an index, and their KV is precomputed into a store.

Read `ingest` first. After an interruption, the same call continues where the first one ended: files and documents are
identified by the hash of their content, chunks by the key of their KV. Depends on the index, the chunker and the Engine
protocol, not on a framework.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import DocumentFacts, DocumentKey, text_id
from ragblend.chunker import Splitter
from ragblend.corpus.documents import MAX_FILE_MIB, has_visible_text
from ragblend.corpus.folder_scan import ReadFailure, display_source, scan_folders
from ragblend.corpus.loaders import FileReader, Loader
from ragblend.engine.api import Engine, RemoteEngine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.metadata import StoreDefaults
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import EmptyCorpusError
from ragblend.index import ChunkIndex
from ragblend.ingestion.capacity import SIZE_MAX_AGE_S, describe_capacity, stored_kv_bytes
from ragblend.ingestion.contexts import (
    apply_context_policy,
    chunk_variants,
    delete_other_variants,
    explain_short_text,
    explain_unfit_text,
    fits_context_length,
)
from ragblend.ingestion.deletion import delete_or_warn, delete_orphaned_kv, delete_stale_kv, keep_only_texts
from ragblend.ingestion.dtype_conversion import count_other_dtypes, quantize_stored, replace_kv
from ragblend.ingestion.engine_index import open_engine_index as open_engine_index
from ragblend.ingestion.engine_index import resolve_chunker
from ragblend.ingestion.identity import (
    LANGCHAIN_COLLECTION,
    as_chunk,
    document_label,
    find_replaced_documents,
    identify_all,
    note_text_identities,
)
from ragblend.ingestion.prefill import Prefill, load_weights, num_chunk_tokens, prefill_here, send_to_remote
from ragblend.ingestion.ray_workers import RayWorkers
from ragblend.ingestion.report import BLANK_TEXT, IngestReport, Progress, ignore_progress, show_progress
from ragblend.ingestion.self_calibration import calibrate_if_due
from ragblend.ingestion.server_documents import send_documents, send_indexed_chunks
from ragblend.ingestion.sync import count_moved_files, explain_empty_corpus, sync_index
from ragblend.options import ContextPolicy
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)


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
    workers: RayWorkers | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> IngestReport:
    """Read, chunk, embed and index `paths`, and precompute the KV of every chunk that is not stored.

    A later call with the same paths updates the index: edited files are replaced, and documents whose file or record
    no longer exists are removed with their KV and registered texts. Documents from other paths stay, and so do
    documents of files that `glob` excludes or that cannot be read.

    - index: an open index, or its folder, which is created if missing. embedder: name of the embedder of a new index.
    - chunk_size: largest number of tokens of a chunk, by the engine's tokenizer; None: the size that the index records.
    - splitter: replaces the default splitter; `chunker.adapt_splitter` accepts LangChain's and LlamaIndex's. If the
      splitter or `chunk_size` changed, documents are split again, and `notify` is called with a message.
    - glob: pattern of the files to read in folders; see `folder_scan.scan_folders`.
    - precompute: False only indexes. keep_missing: True removes no documents.
    - context: the store's context policy, see `engine.store.format.keys`. None: the stored policy; in a new store
      "neutral" for models of 12 layers or more, else "none". "neutral" stores a second variant of each chunk, which
      doubles the store. Raises UsageError for "none" if "neutral" is stored; `precompute_index` can change the policy.
    - text_field: field with the text of records in CSV, JSON and Parquet files; a dotted path names a field of nested
      objects. With "", the reader finds the field.
    - loader: a function from a path to documents of ragblend, LangChain or LlamaIndex, or strings. It reads every file
      in place of ragblend's readers. If `text_field` or `loader` changed, unchanged files are read again, too.
    - workers: processes that embed and prefill instead of this one (`RayWorkers`).
    - progress: see `precompute_documents`.

    `report.failures` lists text files that cannot be read, files larger than `max_file_mib` (0: no limit), and
    documents with a chunk that the engine cannot prefill; `report.skipped` lists other files that are no documents.
    Raises EmptyCorpusError if there is nothing to ingest, StoreFullError before prefilling if the forecast does not fit
    the disk, StoreMismatchError for another model's index or another embedder.
    """
    engine.check_not_forked()
    start_s = perf_counter()
    if precompute:
        apply_context_policy(engine, context)
    save_store_defaults(engine)
    reader = FileReader(max_file_mib, text_field, loader)
    disk = engine.store.find_tier(DiskStore)
    own_folders = [index.path if isinstance(index, ChunkIndex) else index]
    own_folders += [disk.root, disk.kv_dir] if disk is not None else []
    scan = scan_folders([paths] if isinstance(paths, str | Path) else paths, glob, own_folders)
    # An index opened here is closed here, because until then committed rows are only in the database's log.
    with (
        show_progress(progress) as on_progress,
        nullcontext(index)
        if isinstance(index, ChunkIndex)
        else open_engine_index(index, engine, embedder, chunk_size) as opened,
    ):
        cut = resolve_chunker(opened, engine, chunk_size, splitter, notify or logger.warning)
        followed = sync_index(opened, scan, cut, on_progress, workers, keep_missing=keep_missing, reader=reader)
        report = followed.report
        report.bytes_per_token = engine.bytes_per_token
        report.num_removed_kv = delete_or_warn(partial(delete_orphaned_kv, opened, engine))
        if not followed.sources and not report.failures and not report.removed:
            raise EmptyCorpusError(explain_empty_corpus(paths, glob, report))
        chunks = [chunk for source in followed.sources for chunk in opened.chunks(source)]
        report.num_chunks = len(chunks)
        report.num_tokens = sum(num_chunk_tokens(chunk, engine) for chunk in chunks)
        if precompute and chunks:
            prefill = workers.prefill if workers is not None else prefill_here
            wanted = chunk_variants(chunks, engine.context)
            precompute_chunks(wanted, engine, on_progress, report, notify, index=opened, prefill=prefill)
            _measure_default_ratio(chunks, engine, on_progress, prefill, notify)
        if notify is not None:
            for folder, num_files in count_moved_files(opened, followed, scan).items():
                place = display_source(folder)
                notify(
                    f"{num_files} of these files were in {place} before, where they no longer exist; remove their old "
                    f"documents: ragblend remove {place}"
                )
    report.store_bytes = stored_kv_bytes(engine)
    report.elapsed_s = perf_counter() - start_s
    return report


def precompute_chunks(
    chunks: Sequence[Chunk],
    engine: Engine,
    progress: Progress | None = None,
    report: IngestReport | None = None,
    notify: Callable[[str], None] | None = None,
    *,
    rewrite: bool = False,
    index: ChunkIndex | None = None,
    texts_of: Mapping[DocumentKey, Mapping[str, int]] | None = None,
    ledger: Ledger | None = None,
    prefill: Prefill = prefill_here,
) -> IngestReport:
    """Prefill every chunk that is not stored. `report.failures` lists chunks that the engine cannot prefill, and
    `report.notes` those that are too short to be found in prompts.

    Stored chunks keep their dtype. With `rewrite`, chunks in another dtype than the store's `kv_dtype` are converted:
    KV in the model's dtype is rounded; KV in eight bits is prefilled again, because rounding cannot be undone. Before
    any prefill, `notify` is called with the size of the new KV. Raises StoreFullError if the disk cannot hold it.

    - index: the index of the chunks; None for chunks that frameworks added.
    - texts_of: the documents that get the chunks' texts (see `Ledger.add_texts`). None: `index` has them, or
      each is a document that only its text identifies.
    - ledger: the open ledger of the engine's store; None: it is opened.
    - prefill: computes and stores the KV; by default in this process.
    """
    report = report or IngestReport(bytes_per_token=engine.bytes_per_token, num_chunks=len(chunks))
    on_progress = progress or ignore_progress
    start_s = perf_counter()
    if index is not None and isinstance(engine, RemoteEngine):
        alone = [chunk for chunk in chunks if chunk.context != "neutral"]
        return send_indexed_chunks(alone, engine, index, report, on_progress)
    problems = _find_unfit_texts((chunk.text for chunk in chunks), engine)
    unfit = dict.fromkeys((chunk.source, chunk.text) for chunk in chunks if chunk.text in problems)
    report.failures += [ReadFailure(source, problems[text]) for source, text in unfit]
    chunks = [chunk for chunk in chunks if chunk.text not in problems]
    # A chunk that only fits without the neutral text is stored alone.
    chunks = [chunk for chunk in chunks if chunk.context != "neutral" or fits_context_length(chunk, engine)]
    distinct = {(chunk.text, chunk.context): chunk for chunk in chunks}
    # Texts are registered before their KV is stored. A registered text without KV is prefilled in its prompts, but KV
    # of an unregistered text would never be found, and deletions of orphaned KV would remove it.
    with nullcontext(ledger) if ledger is not None else open_ledger(engine.store) as ledger:
        if texts_of is None:
            texts = dict.fromkeys(text for text, _ in distinct)
            if index is not None:
                texts_of = index.texts_to_register(texts, ledger)
            else:
                texts_of = {_name_of_text(text, engine): {text: 0} for text in texts}
        ledger.add_texts(texts_of)
        keys = {chunk: engine.key(chunk) for chunk in distinct.values()}
        ledger.cancel_deletions(keys.values())
        engine.store.apply_deletions()
        engine.add_known_chunks(distinct.values())  # before stored KV is looked up, so that `gc --orphans` keeps it
        stored = engine.store.contains_many(list(keys.values()))
        missing = [chunk for chunk, is_there in zip(keys, stored, strict=True) if not is_there]
        new = (chunk for chunk in missing if chunk.context != "neutral")
        report.notes += (
            ReadFailure(document_label(chunk, chunk), why)
            for chunk in new
            if (why := explain_short_text(chunk, engine))
        )
        report.num_known_kv += len(distinct) - len(missing)
        disk, absent = engine.store.find_tier(DiskStore), set(missing)
        num_evicted = 0 if disk is None else disk.counters.num_evicted
        stored_chunks = [chunk for chunk in distinct.values() if chunk not in absent]
        renewed = list[Chunk]()
        if rewrite:
            num_rounded, renewed = quantize_stored(stored_chunks, engine)
            report.num_rewritten_kv = num_rounded + len(renewed)
        elif num_others := count_other_dtypes(stored_chunks, engine, disk):
            report.num_other_kv = num_others
            if notify is not None:
                dtype = engine.store.kv_dtype
                notify(f"{num_others} stored KV caches keep their dtype, which is not {dtype}; to convert them: "
                    f"ragblend precompute --kv-dtype {dtype}")  # fmt: skip
        if disk is not None and (missing or renewed):
            num_tokens = sum(num_chunk_tokens(chunk, engine) for chunk in (*missing, *renewed))
            forecast = num_tokens * engine.bytes_per_token
            capacity, num_kv = describe_capacity(disk, forecast), len(missing) + len(renewed)
            if notify is not None:
                size = f"{format_bytes(forecast)} of new KV, {capacity}"
                notify(f"to prefill: {num_kv} KV caches, {num_tokens} tokens; {size}")
        if prefill is prefill_here and (missing or renewed):
            start_s += load_weights(engine, on_progress)
        on_progress("prefill", 0, len(missing) + len(renewed))
        prefilled = chain(prefill(missing, engine), replace_kv(renewed, engine, prefill))
        try:
            for done, nbytes in enumerate(prefilled, start=1):
                report.new_kv_bytes += nbytes
                report.num_new_kv += done <= len(missing)
                on_progress("prefill", done, len(missing) + len(renewed))
        finally:
            delete_stale_kv(distinct.values(), engine, ledger)
        if disk is not None:
            report.num_evicted_kv += disk.counters.num_evicted - num_evicted
            # Entries that were stored and evicted are recorded, too, so that `stats` counts them.
            recorded = [key for key in keys.values() if report.num_evicted_kv or disk.has_file(key)]
            ledger.record_stored_entries(recorded, engine.fingerprint)
    report.prefill_s += perf_counter() - start_s
    report.store_bytes = stored_kv_bytes(engine, SIZE_MAX_AGE_S)
    send_to_remote(stored_chunks, missing, engine, report, on_progress)
    return report


def _measure_default_ratio(
    chunks: Sequence[Chunk],
    engine: Engine,
    progress: Progress,
    prefill: Prefill,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Choose the default ratio on stored chunks if that is due, and notify the caller of it."""
    # Processes that prefill instead of this one have loaded the model there, not here.
    if prefill is prefill_here and (expectation := calibrate_if_due(chunks, engine, progress)):
        (notify or logger.info)(str(expectation))


def _name_of_text(text: str, engine: Engine) -> DocumentKey:
    """Return the document that only its text identifies."""
    return DocumentKey(LANGCHAIN_COLLECTION, text_id(text), engine.namespace)


def save_store_defaults(engine: Engine) -> None:
    """Store the engine's model and system prompt in the store's folder, as defaults of later commands and engines."""
    if (disk := engine.store.find_tier(DiskStore)) is not None:
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
    workers: RayWorkers | None = None,
) -> IngestReport:
    """Prefill every variant of indexed chunks that the store's context policy requires and that is not stored.

    context: the store's new context policy; None keeps the stored one. The new policy is stored first, and variants
    that it does not require are deleted last, so that a killed call can be repeated. `rewrite`: see
    `precompute_chunks`; `workers`: see `ingest`.
    """
    engine.check_not_forked()
    if context is not None:
        engine.set_context_policy(context)
    else:
        apply_context_policy(engine, None)
    chunks = list(index.chunks())
    wanted = chunk_variants(chunks, engine.context)
    prefill = workers.prefill if workers is not None else prefill_here
    report = precompute_chunks(wanted, engine, progress, notify=notify, rewrite=rewrite, index=index, prefill=prefill)
    _measure_default_ratio(chunks, engine, progress or ignore_progress, prefill, notify)
    if context is not None:
        report.num_removed_kv = delete_or_warn(partial(delete_other_variants, chunks, wanted, engine))
    report.num_chunks, report.num_documents = len(chunks), index.num_documents
    report.num_unchanged = report.num_documents
    report.num_tokens = sum(num_chunk_tokens(chunk, engine) for chunk in chunks)
    report.store_bytes = stored_kv_bytes(engine)  # without the deleted variants
    return report


def precompute_documents(
    documents: Iterable[Any],
    llm_or_engine: Any,
    progress: Progress | None = None,
    *,
    ids: Sequence[str] = (),
    versions: Sequence[str] = (),
    collection: str = LANGCHAIN_COLLECTION,
    workers: RayWorkers | None = None,
    prefill: Prefill | None = None,
    ledger: Ledger | None = None,
) -> IngestReport:
    """Precompute the KV of chunks: strings, Chunks, LangChain Documents or LlamaIndex nodes, each used as one chunk.

    - llm_or_engine: an Engine, or an object with one at `.engine` (BlendLLM, ChatBlend).
    - progress: called with a stage, the number of finished items, and of all. None: bars on stderr if it is a terminal.
    - ids: for each chunk, the id of the document that it belongs to; "" for none. The chunks passed for an id replace
      all earlier chunks of this id in `collection`, and the KV of texts that no document has any more is deleted.
      Without `ids`, the id is the document's own, else its source: metadata["source"], with its "page", or LlamaIndex'
      "file_path". A document with neither is stored by its text, which nothing replaces; `report.notes` says so.
    - versions: for each chunk, the version of its document, for example a hash of the file; "" for none. If the
      version equals the one that is stored for the id, the chunks are added to the earlier ones and do not replace
      them. A document may therefore be passed in several calls. So may one that is identified by its source, if its
      chunks have a "start_index": chunks before the first one of a call are kept.
    - workers: processes that prefill instead of this one (`RayWorkers`). prefill: a function that prefills instead;
      `workers` is then ignored. ledger: the open ledger of the engine's store; None: it is opened.

    A chunk that the engine cannot prefill (longer than the model's context length, or not Unicode) does not stop the
    others: it is logged, and listed in `report.failures` with its id and source. A chunk without visible text is in
    `report.skipped`. `report.notes` lists chunks of fewer than 8 tokens, which are stored but not found in prompts.

    In a store with the context policy "neutral" (the default for models of 12 layers or more), a second variant of each
    chunk is stored, computed after a neutral text.
    """
    start_s = perf_counter()
    engine: Engine = getattr(llm_or_engine, "engine", llm_or_engine)
    engine.check_not_forked()
    apply_context_policy(engine, None)
    save_store_defaults(engine)
    document_list = [documents] if isinstance(documents, str) else list(documents)
    chunks = [as_chunk(document) for document in document_list]
    identities = identify_all(document_list, chunks, ids, versions)
    notes = note_text_identities(document_list, chunks, identities)
    if isinstance(engine, RemoteEngine):
        with show_progress(progress) as reporter:
            report = send_documents(document_list, chunks, identities, collection, engine, reporter)
        report.notes[:0], report.elapsed_s = notes, perf_counter() - start_s
        return report
    problems = _find_unfit_texts((chunk.text for chunk in chunks), engine)
    failures, skipped, fit = list[ReadFailure](), list[ReadFailure](), list[Chunk]()
    texts_of: dict[DocumentKey, dict[str, int]] = {}
    facts_of: dict[DocumentKey, DocumentFacts] = {}
    for document, chunk, identity in zip(document_list, chunks, identities, strict=True):
        name = DocumentKey(collection, identity.id, engine.namespace)
        facts_of[name] = DocumentFacts(identity.version, identity.source)
        texts_of.setdefault(name, {})  # a document without a chunk to prefill loses its earlier chunks
        if problem := problems.get(chunk.text):
            failures.append(ReadFailure(document_label(document, chunk), problem))
        elif not has_visible_text(chunk.text):  # a blank chunk in a prompt is prefilled as text
            skipped.append(ReadFailure(document_label(document, chunk), BLANK_TEXT))
        else:
            texts_of[name][chunk.text] = identity.start
            fit.append(chunk)
    for failure in (*failures, *skipped):
        logger.warning("not prefilled: %s: %s", *failure)
    chunks = fit
    ledger = ledger or open_ledger(engine.store)
    wanted = [*chunks, *chunk_variants((chunk for chunk in chunks if chunk.context is None), engine.context)]
    prefill = prefill or (workers.prefill if workers is not None else prefill_here)
    texts_before = {name: ledger.texts_of(name) for name in texts_of}
    with show_progress(progress) as reporter:
        report = precompute_chunks(wanted, engine, reporter, texts_of=texts_of, ledger=ledger, prefill=prefill)
        _measure_default_ratio(chunks, engine, reporter, prefill)
    for failure in report.failures:  # of the remote tier
        logger.warning("%s: %s", *failure)
    report.num_chunks, report.failures, report.skipped = len(chunks), failures + report.failures, skipped
    report.notes, report.num_documents = [*notes, *report.notes], len(texts_of)
    report.num_tokens = sum(num_chunk_tokens(chunk, engine) for chunk in chunks)
    replaced = find_replaced_documents(identities, texts_of, ledger)
    report.num_removed_kv = delete_or_warn(partial(keep_only_texts, replaced, engine, ledger))
    changed = [texts != ledger.texts_of(name) for name, texts in texts_before.items() if texts]
    report.num_updated, report.num_unchanged = sum(changed), len(changed) - sum(changed)
    facts_of = dict.fromkeys(replaced, DocumentFacts()) | facts_of
    # Set last, so that after a killed call the same call replaces the document again.
    ledger.set_facts({name: facts for name, facts in facts_of.items() if facts != ledger.facts_of(name)})
    if report.num_removed_kv:
        report.store_bytes = stored_kv_bytes(engine, SIZE_MAX_AGE_S)
    report.elapsed_s = perf_counter() - start_s
    return report
