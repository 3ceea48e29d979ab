"""`ragblend push | stats | verify | gc | init-key | sign`: maintain a store.

Results on stdout, progress on stderr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import (
    exit_if_dropped,
    limit_line,
    plural,
    print_result,
    progress_bars,
    remote_line,
)
from ragblend.cli.session import open_document_engine, open_settings_index, remote_facts
from ragblend.config import Settings, arguments_to_flags
from ragblend.errors import CorruptError, NotFoundError
from ragblend.files.places import expand_user_path

_CONTEXTS = {
    "none": "each chunk is stored once, computed alone",
    "neutral": "each chunk is stored twice, computed alone and after a neutral text",
}


@with_settings("store remote")
def push(settings: Settings, json_: JsonOption = False) -> None:
    """Send the store's entries that the remote tier lacks. Exits 5 if some did not arrive, 1 if the tier is full."""
    from ragblend.engine.store.remote.tier import open_remote
    from ragblend.engine.store.tiered import format_bytes
    from ragblend.operations.maintenance import push_store

    tier = open_remote(settings.remote or "", timeout_s=settings.remote_timeout_s)
    with closing(tier), progress_bars() as progress:
        report = push_store(settings.store, tier, progress, kv_dir=settings.kv_dir)
    text = (
        f"{plural(report.num_sent, 'KV cache')} sent, {report.num_known} were there, {report.num_damaged} damaged "
        f"here, {report.num_dropped} did not arrive; {format_bytes(report.sent_bytes)} sent"
        + (f"\n{report.problem}" if report.problem else "")
    )
    print_result(asdict(report), text, json_)
    exit_if_dropped(report)


@with_settings("store backend remote", unflagged="namespace")
def stats(settings: Settings, json_: JsonOption = False) -> None:
    """Print the documents, stored KV and sizes of the store, or of a server (--backend URL)."""
    if settings.is_served:
        _print_served_stats(settings, json_)
        return
    from ragblend.catalog.ledger import open_ledger
    from ragblend.catalog.stored_documents import count_by_collection
    from ragblend.corpus.folder_scan import display_source
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.store.open import parse_capacity
    from ragblend.engine.store.tiered import format_bytes
    from ragblend.index import open_index
    from ragblend.operations.doctor import explain_hashed_words

    capacity_bytes = parse_capacity(settings.disk_gib)
    disk = DiskStore(settings.store, create=False, capacity_bytes=capacity_bytes, kv_dir=settings.kv_dir)
    entries, limit = list(disk.entries()), disk.limit_bytes()
    num_tokens = sum(entry.header.num_tokens for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    dtypes = Counter(entry.header.stored_dtype for entry in entries)
    with open_ledger(disk, create=False) as ledger:
        collections = count_by_collection(ledger)
        ingested = ledger.fingerprints_by_key() if disk.has_evicted and not ledger.is_shared else {}
    num_evicted = sum(not disk.has_file(key) for key in ingested)
    manifest, sources, num_chunks = None, list[str](), 0
    try:
        with open_index(settings.store) as opened:
            manifest, sources, num_chunks = opened.manifest, opened.sources(), opened.num_chunks
    except NotFoundError:
        if not collections:
            raise
    facts: dict[str, Any] = {
        "store": settings.store,
        "num_documents": len(sources),
        "num_chunks": num_chunks,
        **{name: getattr(manifest, name, None) for name in ("embedder", "tokenizer", "chunk_size", "chunker")},
        "collections": collections,
        "num_stored_kv": len(entries),
        "num_stored_tokens": num_tokens,
        "store_bytes": nbytes,
        "kv_dtypes": dict(dtypes),
        "context": disk.read_context_policy(),
        "models": disk.models(),
        "disk_gib": settings.disk_gib,
        "limit_bytes": limit,
        "num_evicted_kv": num_evicted,
        "remote": remote_facts(settings, [entry.key for entry in entries]),
        "sources": sources,
    }
    models = ", ".join(f"{model.get('model')} ({model.get('dtype')})" for model in disk.models().values())
    kv = f"{plural(len(entries), 'KV cache')}, {plural(num_tokens, 'token')}, {format_bytes(nbytes)}, for {models}"
    if not models:
        kv = "no KV is here; that of a server: ragblend stats --backend URL"
    lines = [f"store {settings.store}:"]
    if manifest is not None:
        lines[0] += (
            f" {plural(len(sources), 'document')}, {plural(num_chunks, 'chunk')} of at most {manifest.chunker} of "
            f"{manifest.tokenizer}, embedded by {manifest.embedder}"
        )
    lines += [
        f"collection {name}: {plural(counts['num_documents'], 'document')}, {plural(counts['num_chunks'], 'chunk')}"
        for name, counts in collections.items()
    ]
    if how := explain_hashed_words(settings.store, manifest.embedder if manifest is not None else ""):
        lines.append(f"hashing compares words, not meaning; for MiniLM: {how}")
    lines += [
        kv,
        limit_line(limit, settings.disk_gib),
        *(
            [f"{plural(num_evicted, 'ingested KV cache')} evicted: set a larger `disk_gib`, and ingest again"]
            if num_evicted
            else []
        ),
        *([f"context {facts['context']}: {_CONTEXTS[facts['context']]}"] if facts["context"] else []),
        *([f"stored as {', '.join(f'{name}: {count}' for name, count in dtypes.items())}"] if len(dtypes) > 1 else []),
        *([remote_line(facts["remote"])] if facts["remote"] else []),
        *(f"  {display_source(source)}" for source in sources[:20]),
        *([f"  ... and {len(sources) - 20} more (--json lists all)"] if len(sources) > 20 else []),
    ]
    print_result(facts, "\n".join(lines), json_)


def _print_served_stats(settings: Settings, json_: bool) -> None:
    """Print the numbers of a server's documents in the settings' namespace, by collection."""
    from ragblend.engine.vllm.client import Connection

    query = f"?{urlencode({'namespace': settings.namespace})}" if settings.namespace else ""
    with closing(Connection(settings.backend)) as server:
        collections = server.request_json("GET", f"/v1/ragblend/documents{query}")["collections"]
    totals = Counter[str]()
    for counts in collections.values():
        totals.update(counts)
    lines = [f"server {server.url}: {_served_line(totals)}"]
    lines += [f"collection {name}: {_served_line(counts)}" for name, counts in collections.items()]
    print_result({"server": server.url, "collections": collections}, "\n".join(lines), json_)


def _served_line(counts: Mapping[str, int]) -> str:
    num_kv = counts["num_known_kv"] + counts["num_new_kv"]
    parts = [plural(counts["num_chunks"], "chunk"), plural(counts["num_tokens"], "token"), plural(num_kv, "KV cache")]
    waiting = f"{counts['num_pending']} pending, {counts['num_failed']} failed"
    return f"{plural(counts['num_stored'], 'document')}, {waiting}; {', '.join(parts)}"


@with_settings("model store remote", unflagged="backend device dtype namespace system trust_remote_code")
def verify(
    settings: Settings,
    repair: Annotated[bool, typer.Option("--repair", help="Remove damaged entries and prefill them again.")] = False,
    json_: JsonOption = False,
) -> None:
    """Read and check every byte of the store and the remote tier. Exits 4 if data is still damaged or missing."""
    from ragblend.operations.maintenance import verify_and_quarantine

    with progress_bars() as progress:
        report = verify_and_quarantine(settings.store, progress=progress, kv_dir=settings.kv_dir)
    if settings.remote is not None:
        from ragblend.engine.store.remote.tier import open_remote
        from ragblend.operations.signing import repair_remote, verify_remote

        tier = open_remote(settings.remote, timeout_s=settings.remote_timeout_s)
        report.damaged_remote = verify_remote(tier, settings.store)
        if repair:
            repair_remote(tier, settings.store, report.damaged_remote, kv_dir=settings.kv_dir)
        tier.close()
    if repair and report.has_problems:
        from ragblend.catalog.stored_documents import open_store_ledgers
        from ragblend.engine.store.disk import DiskStore
        from ragblend.engine.store.metadata import CONTEXT_FILE
        from ragblend.operations.maintenance import drop_files_that_block_opening, repair_store
        from ragblend.operations.sent_repair import make_sent_documents_pending

        drop_files_that_block_opening(report, settings.store, kv_dir=settings.kv_dir)
        disk = DiskStore(settings.store, create=False, kv_dir=settings.kv_dir)
        lost = {*report.damaged, *report.missing}
        report.num_sent_again, sent = make_sent_documents_pending(disk, lost)
        if CONTEXT_FILE in report.damaged_files:  # an engine can open the store only after it is dropped
            settings = replace(settings, context=settings.context or "none")
        with open_store_ledgers(disk) as (ledger, folder):
            has_index, has_texts = folder.has_index(), any(ledger.texts())
        if not has_index and not has_texts:
            raise NotFoundError("; ".join([*report.dropped, f"{settings.store} has no documents: ingest them again"]))
        if has_index or lost - sent or report.damaged_files:
            with ExitStack() as stack:
                engine = stack.enter_context(open_document_engine(settings))
                opened = stack.enter_context(open_settings_index(settings, engine)) if has_index else None
                progress = stack.enter_context(progress_bars())
                report.num_repaired = repair_store(report, engine, opened, progress, done=sent)
    lines = [f"{plural(report.checked, 'KV cache')} checked, {len(report.damaged)} damaged"]
    if report.orphans is not None:
        lines[0] += f", {report.orphans} without a chunk"
    if report.missing:
        lines[0] += f", {len(report.missing)} missing"
    counts = (report.damaged, report.missing, report.damaged_remote)
    lines += [f"  {key}: {arguments_to_flags(reason)}" for entries in counts for key, reason in entries.items()]
    lines += [
        f"  {settings.store}/{place}: {arguments_to_flags(reason)}" for place, reason in report.damaged_files.items()
    ]
    lines += [f"  index: {arguments_to_flags(problem)}" for problem in report.index_problems]
    if report.num_without_kv and not report.num_sent_again:
        lines.append(
            f"{report.num_without_kv} chunks of documents have no KV here; prefill those of folders: ragblend "
            "precompute; send those of programs and of a server again"
        )
    if report.num_sent_again:
        lines.append(
            f"{plural(report.num_sent_again, 'document')} of clients of a server: it stores their lost KV again within "
            "seconds, or after its next start"
        )
    if repair:
        lines += [f"{report.num_repaired} recomputed", *report.dropped, *map(arguments_to_flags, report.unrepaired)]
    elif report.has_problems:
        lines.append("Damaged entries are never used for an answer. Drop and recompute them: ragblend verify --repair")
    print_result(report.as_dict(), "\n".join(lines), json_)
    if report.unrepaired or (report.has_problems and not repair):
        raise typer.Exit(CorruptError.exit_code)


@with_settings("store")
def gc(
    settings: Settings,
    max_size: Annotated[str | None, typer.Option("--max-size", help="Largest size to keep, e.g. 20GiB.")] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also remove KV of chunks that no document has.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed and remove nothing.")] = False,
    json_: JsonOption = False,
) -> None:
    """Remove leftovers and damaged files, then the least recently used KV beyond --max-size."""
    from ragblend.engine.store.tiered import format_bytes, parse_bytes
    from ragblend.operations.maintenance import collect_garbage

    max_bytes = parse_bytes(max_size) if max_size is not None else None
    result = collect_garbage(settings.store, max_bytes, dry_run, orphans=orphans, kv_dir=settings.kv_dir)
    verb = "would be freed" if dry_run else "freed"
    kept = format_bytes(result.kept_bytes)
    text = f"{plural(len(result.evicted), 'KV cache')}, {format_bytes(result.freed_bytes)} {verb}; {kept} kept"
    print_result({**result._asdict(), "dry_run": dry_run}, text, json_)


def init_key(
    out: Annotated[
        str | None,
        typer.Option(
            "--key-file", metavar="FILE", help="File to write the key to. Default: the file that all commands read."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Make a key that signs stored KV. New KV is signed; KV without a signature of the key is not used."""
    from ragblend.engine.store.format.signing import KEY_VARIABLE, key_path, write_key

    path = (key_path() if out is None else expand_user_path(out, "--key-file")).absolute()
    key = write_key(path)
    lines = [
        f"{path} holds a new key ({key.id}); only you can read the file",
        *([f"point to it: export RAGBLEND_STORE_KEY_FILE={path}"] if path != key_path() else []),
        "sign the entries of your stores, if you trust their writers: ragblend sign --store DIR",
        f"other machines that share a store need the same key: that file, or {KEY_VARIABLE} set to its contents",
    ]
    print_result({"path": str(path), "id": key.id}, "\n".join(lines), json_)


@with_settings("store")
def sign(
    settings: Settings,
    signed_with: Annotated[
        str | None,
        typer.Option(
            "--old-key-file", metavar="FILE", help="File of an older key. Only entries signed with it are signed again."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Sign a store's entries with the key of `ragblend init-key`.

    Without --old-key-file every intact entry is signed. Do so only if you trust everyone who could write to the store.
    """
    from ragblend.engine.store.format.signing import find_process_key, read_key
    from ragblend.operations.signing import sign_store

    key = find_process_key()
    if key is None:
        raise NotFoundError("there is no store key to sign with; make one: ragblend init-key")
    old = read_key(expand_user_path(signed_with, "--old-key-file")) if signed_with is not None else None
    with progress_bars() as progress:
        report = sign_store(settings.store, key, signed_with=old, progress=progress, kv_dir=settings.kv_dir)
    lines = [
        f"{settings.store}: {report['num_signed']} entries and {report['num_notes']} notes signed, "
        f"{report['num_known']} were (key {key.id})",
        *(f"  {name}: {reason}" for name, reason in report["refused_keys"].items()),
    ]
    if report["refused"]:
        lines.append(f"{report['refused']} refused; drop and recompute them: ragblend verify --repair")
    print_result(report, "\n".join(lines), json_)
    if report["refused"]:
        raise typer.Exit(CorruptError.exit_code)
