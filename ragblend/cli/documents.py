"""`ragblend ingest | precompute | remove`: add, refresh and remove documents. Parse the arguments, call one function,
print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import DocumentArgument, JsonOption, Workers, with_settings
from ragblend.cli.printing import (
    exit_if_dropped,
    plural,
    print_ingest,
    print_message,
    print_result,
    progress_bars,
    waiting_lines,
)
from ragblend.cli.session import (
    embedder_name,
    open_document_engine,
    open_settings_index,
    open_workers,
    opening_title,
)
from ragblend.config import Settings
from ragblend.errors import NotFoundError

if TYPE_CHECKING:
    from ragblend.catalog.schema import DocumentKey
    from ragblend.ingestion.report import IngestReport

EXIT_PARTIAL = 6
DOCUMENT_KINDS = (
    "txt, md, html, pdf, docx, pptx, xlsx, odt, rtf, epub, ipynb, eml, mbox, csv, json, jsonl, parquet, xml, "
    "source code"
)


@with_settings(
    "model backend store remote chunk_size text_field context embedder system namespace dtype kv_dtype device "
    "trust_remote_code",
    unflagged="catalog disk_gib gpus_per_worker kv_dir max_file_mib memory_gib remote_timeout_s",
)
def ingest(
    settings: Settings,
    paths: Annotated[list[str], typer.Argument(help=f"Files or folders: {DOCUMENT_KINDS}.")],
    glob: Annotated[
        str, typer.Option("--glob", help="Pattern of file names; other files in folders are skipped.")
    ] = "*",
    keep_missing: Annotated[
        bool, typer.Option("--keep-missing", help="Keep documents whose files or records no longer exist.")
    ] = False,
    loader: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Function that reads every file: from a path to its documents."),
    ] = None,
    precompute: Annotated[bool, typer.Option("--precompute/--no-precompute", help="Also prefill the chunks.")] = True,
    workers: Workers = None,
    json_: JsonOption = False,
) -> None:
    """Chunk, embed, index and precompute documents. After an interruption the same command continues.

    After changes run it again: edited documents are replaced, missing ones removed.
    """
    from ragblend.corpus.loaders import import_loader
    from ragblend.precompute import ingest as run

    load = import_loader(loader) if loader is not None else None
    with (
        progress_bars(opening_title(settings, "opening the store")) as progress,
        open_document_engine(settings, new_model=True) as engine,
        open_workers(settings, workers) as others,
    ):
        report = run(
            list(paths),
            engine,
            settings.store,
            chunk_size=settings.chunk_size,
            glob=glob,
            precompute=precompute,
            keep_missing=keep_missing,
            context=settings.context,
            max_file_mib=settings.max_file_mib,
            text_field=settings.text_field,
            loader=load,
            embedder=embedder_name(settings),
            workers=others,
            progress=progress,
            notify=print_message,
        )
    _print_and_exit(report, settings, json_)


@with_settings(
    "model backend store remote context system namespace dtype kv_dtype device trust_remote_code",
    unflagged="catalog disk_gib gpus_per_worker kv_dir memory_gib remote_timeout_s",
)
def precompute(
    settings: Settings,
    kv_dtype: str | None = None,
    workers: Workers = None,
    json_: JsonOption = False,
) -> None:
    """Prefill indexed chunks without KV, such as for a new model, dtype or system text.

    --kv-dtype converts the stored KV: from auto to int8 or fp8 by rounding, else by prefilling the chunks again.
    --context changes the context policy: missing KV is prefilled, then KV of other contexts is deleted.
    """
    from ragblend.precompute import precompute_index

    with (
        progress_bars(opening_title(settings, "opening the store")) as progress,
        open_document_engine(settings, new_model=True) as engine,
        open_settings_index(settings, engine) as opened,
        open_workers(settings, workers) as others,
    ):
        rewrite = kv_dtype is not None
        report = precompute_index(
            engine, opened, settings.context, progress, print_message, rewrite=rewrite, workers=others
        )
    _print_and_exit(report, settings, json_)


def _print_and_exit(report: IngestReport, settings: Settings, json_: bool) -> None:
    """Print the report. Exit as `push` does if KV did not reach the remote tier, else with 6 if anything failed."""
    print_ingest(report, settings, json_)
    exit_if_dropped(report)
    if report.failures:
        raise typer.Exit(EXIT_PARTIAL)


def _find_documents(document: str, settings: Settings) -> tuple[list[DocumentKey], list[str]]:
    """Return (added documents, sources of indexed documents) that the name `document` stands for. One list is empty.

    Loads no model. Raises NotFoundError for an unknown document. Without an index, the error lists the collections of
    the store.
    """
    from ragblend.catalog.registry import open_registry
    from ragblend.engine.store.disk import DiskStore
    from ragblend.index import open_index
    from ragblend.ingestion.documents import find_added_documents, find_indexed_documents

    collections: Mapping[str, Any] = {}
    if not settings.is_served:
        disk = DiskStore(settings.store, create=False, kv_dir=settings.kv_dir, catalog=settings.catalog)
        if added := find_added_documents(document, disk, settings.namespace):
            return added, []
        with open_registry(disk, create=False) as registry:
            collections = registry.count_by_collection()
    try:
        index = open_index(settings.store)
    except NotFoundError:
        if not collections:
            raise
        place = f"{settings.store} has no document {document!r}, only those of {', '.join(collections)}"
        raise NotFoundError(f"{place}; list them: ragblend stats --store {settings.store}") from None
    with index:
        return [], find_indexed_documents(document, index, include_unfinished=True)


@with_settings("model backend store remote", unflagged="device dtype namespace system trust_remote_code")
def remove(settings: Settings, document: DocumentArgument, json_: JsonOption = False) -> None:
    """Remove documents, with the KV and texts that no other document uses.

    DOC is a file or a folder. For documents that a vector store or a client of a server has added, DOC is an id,
    COLLECTION/ID, or COLLECTION for all of its documents. Pins of the documents are removed, too. Documents in the
    vector store itself are not deleted.

    A file that still exists is ingested again by the next `ingest` of its folder. After a crash, or an unreachable
    remote tier (exit code 5), run the same command again.
    """
    from ragblend.ingestion.documents import remove_added_documents, remove_documents

    added, sources = _find_documents(document, settings)
    with waiting_lines("removing"), open_document_engine(settings) as engine:
        if added:
            sources = [f"{each.collection}/{each.id}" for each in added]
            num_chunks, num_kv, num_other_kv = remove_added_documents(added, engine)
        else:
            with open_settings_index(settings, engine) as opened:
                num_chunks, num_kv, num_other_kv = remove_documents(sources, engine, opened)
    facts = {"document": document, "sources": sources, "num_chunks": num_chunks, "num_kv": num_kv}
    text = f"{document}: {plural(len(sources), 'document')}, {plural(num_chunks, 'chunk')} and "
    text += f"{plural(num_kv, 'KV cache')} removed"
    if num_other_kv:
        text += (
            f"\n{num_other_kv} of these KV caches had been computed after a removed chunk, or by another model; "
            "`ragblend precompute` stores those of other documents again"
        )
    num_left = sum(Path(source).exists() for source in sources)
    if num_left and not added:
        what = "file is still on disk: the next `ragblend ingest` adds it again"
        if num_left > 1:
            what = "files are still on disk: the next `ragblend ingest` adds them again"
        text += f"\n{num_left} removed {what}"
    print_result(facts, text, json_)
