"""`ragblend ingest | precompute | documents | remove`: add, refresh, list and remove documents.

Parse the arguments, call one function, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, Workers, with_settings
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
from ragblend.errors import NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_file

if TYPE_CHECKING:
    from ragblend.ingestion.documents import Removal
    from ragblend.ingestion.report import IngestReport

EXIT_PARTIAL = 6
_TEXT_BYTES = 16 << 20  # most bytes of a text to remove
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


@with_settings("backend store", unflagged="catalog kv_dir model namespace")
def documents(settings: Settings, json_: JsonOption = False) -> None:
    """List the documents of a store, from folders, programs and clients of servers.

    Each document has an id in a collection, and a source, if that is known: `ragblend remove` takes these names. The
    line also says its state, its number of chunks, and the size of their KV on this machine's disk. With --backend, the
    store of a server is listed.
    """
    from ragblend.catalog.stored_documents import list_documents, open_store_ledgers
    from ragblend.engine.store.disk import DiskStore
    from ragblend.ingestion.documents import describe_documents

    unowned: list[str] = []
    if settings.is_served:
        with open_document_engine(settings) as engine:
            listed = list(engine.list_documents())  # type: ignore[attr-defined]
    else:
        disk = DiskStore(settings.store, create=False, kv_dir=settings.kv_dir, catalog=settings.catalog)
        with open_store_ledgers(disk) as ledgers:
            described, entries = describe_documents(list_documents(*ledgers), disk, *ledgers)
        listed = [asdict(each) for each in described]
        others = set(disk.keys()) - entries
        unowned = [key for key in others if (header := disk.header(key)) is not None and header.prefix_ids]
    text = "\n".join(_document_lines(listed))
    if unowned:
        text += f"\nKV of {plural(len(unowned), 'chunk')} that no document has; to delete it: ragblend gc --orphans"
    place = settings.backend if settings.is_served else settings.store
    print_result({"store": place, "documents": listed, "num_kv_without_document": len(unowned)}, text, json_)


def _remove_named(document: str | None, text: str | None, settings: Settings) -> tuple[list[str], Removal]:
    """Remove the documents that `document` names, or the one that is `text`. Return their names, and what was deleted.

    Documents of the store's folder are found first, then those of a server. Loads no model.
    """
    from ragblend.catalog.schema import text_id
    from ragblend.catalog.stored_documents import list_documents, open_store_ledgers
    from ragblend.engine.store.disk import DiskStore
    from ragblend.index import open_index
    from ragblend.ingestion.documents import (
        Removal,
        find_indexed_documents,
        find_stored_documents,
        find_text_documents,
        find_unfinished_documents,
        remove_indexed_documents,
        remove_stored_documents,
    )

    if settings.is_served and not Path(settings.store).is_dir():
        return _remove_from_server(document, text, settings)
    disk = DiskStore(settings.store, create=False, kv_dir=settings.kv_dir, catalog=settings.catalog)
    with open_store_ledgers(disk) as (ledger, folder):
        stored, has_index = list_documents(ledger, folder), folder.has_index()
        if document is not None:
            named = find_stored_documents(document, stored, settings.namespace)
        else:
            named = find_text_documents(text or "", stored, ledger, folder, settings.namespace)
        begun = find_unfinished_documents(document or text_id(text or ""), ledger.find_pending_sources())
    if settings.is_served and not named:
        return _remove_from_server(document, text, settings)
    unfinished = list[str]()
    if named:
        settings = replace(settings, namespace=named[0].key.namespace)
    elif document is not None and has_index:
        with open_index(settings.store) as opened, suppress(NotFoundError) if begun else nullcontext():
            unfinished = find_indexed_documents(document, opened, disk)
    if not named and not unfinished:
        return begun, Removal(0, _finish_deletions(settings) if begun else 0)
    with ExitStack() as stack:
        has_kv = settings.is_served or disk.models()
        engine = stack.enter_context(open_document_engine(settings)) if has_kv else None
        index = None
        if has_index:
            index = stack.enter_context(
                open_index(settings.store) if engine is None else open_settings_index(settings, engine)
            )
        if index is not None and unfinished:
            return unfinished, remove_indexed_documents(unfinished, engine, index)
        names = [each.index_source or each.key.name for each in named]
        return names, remove_stored_documents(named, engine, index)


def _finish_deletions(settings: Settings) -> int:
    """Delete the entries whose deletion is recorded. Return their number."""
    from ragblend.catalog.ledger import open_ledger
    from ragblend.engine.deletions import run_deletions

    with open_document_engine(settings) as engine, open_ledger(engine.store) as ledger:
        return len(run_deletions(engine.store, ledger))


def _remove_from_server(document: str | None, text: str | None, settings: Settings) -> tuple[list[str], Removal]:
    """Run `_remove_named` on the store of a server."""
    from ragblend.catalog.schema import DocumentKey, text_id
    from ragblend.catalog.stored_documents import StoredDocument
    from ragblend.ingestion.documents import Removal, find_stored_documents

    with open_document_engine(settings) as engine:
        client: Any = engine
        stored = [
            StoredDocument(
                DocumentKey(*(each[name] for name in DocumentKey._fields)), each["source"], each["num_chunks"]
            )
            for each in client.list_documents()
        ]
        named, num_kv = find_stored_documents(document or text_id(text or ""), stored, settings.namespace), 0
        for collection, group in groupby(named, lambda each: each.key.collection):
            num_kv += client.remove_documents(collection, [each.key.id for each in group])
    return [each.key.name for each in named], Removal(sum(each.num_chunks for each in named), num_kv)


def _read_text(path: str) -> str:
    try:
        return read_file(expand_user_path(path, "--text"), _TEXT_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _document_lines(listed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each collection, and below it a line for each of its documents."""
    from ragblend.catalog.schema import INDEX_MARK
    from ragblend.corpus.folder_scan import display_source
    from ragblend.engine.store.tiered import format_bytes

    if not listed:
        yield "no documents"
    names = itemgetter("collection", "namespace")
    for (collection, namespace), group in groupby(sorted(listed, key=names), names):
        rows = list(group)
        where = " of the index" if collection.startswith(INDEX_MARK) else ""
        where += f" in the namespace {namespace}" if namespace else ""
        yield f"collection {collection}: {plural(len(rows), 'document')}{where}"
        for each in rows:
            size = f"{plural(each['num_chunks'], 'chunk')}, {format_bytes(each['kv_bytes'])} of KV"
            notes = [f"of {display_source(each['source'])}"] if each["source"] not in ("", each["id"]) else []
            notes += [f"({each['reason']})"] if each["reason"] else []
            notes += [repr(each["text"])] if each["text"] else []
            name = display_source(each["id"]) or "its documents are in another folder"
            yield f"  {each['state']:<10}  {size:<32}  {' '.join((name, *notes))}"


@with_settings("model backend store remote", unflagged="device dtype namespace system trust_remote_code")
def remove(
    settings: Settings,
    document: Annotated[
        str | None, typer.Argument(metavar="DOC", help="A document, as `ragblend documents` lists it.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="Remove the text in FILE, which has no other name.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Remove documents, with the KV and texts that no other document uses.

    DOC is an id, COLLECTION/ID, a COLLECTION with all of its documents, or a source: a file, a record or a page of it,
    or a folder. Documents in a vector store of a framework are not deleted.

    A file that still exists is ingested again by the next `ingest` of its folder. After a crash, or an unreachable
    remote tier (exit code 5), run the same command again.
    """
    if (document is None) == (text is None):
        raise UsageError("name a document, or a file with the text to remove: ragblend remove DOC, or --text FILE")
    name = document if document is not None else f"the text of {text}"
    with waiting_lines("removing"):
        names, removal = _remove_named(document, None if text is None else _read_text(text), settings)
    if not names:
        place = settings.backend if settings.is_served else settings.store
        raise NotFoundError(f"{place} has no document {name!r}; list them: ragblend documents")
    num_chunks, num_kv = removal
    facts = {"document": name, "sources": names, "num_chunks": num_chunks, "num_kv": num_kv}
    said = f"{name}: {plural(len(names), 'document')}, {plural(num_chunks, 'chunk')} and "
    said += f"{plural(num_kv, 'KV cache')} removed"
    num_left = sum(Path(each).exists() for each in names)
    if num_left:
        what = "file is still on disk: the next `ragblend ingest` adds it again"
        if num_left > 1:
            what = "files are still on disk: the next `ragblend ingest` adds them again"
        said += f"\n{num_left} removed {what}"
    print_result(facts, said, json_)
