"""Maintenance of an index and a store: verification, repair, garbage collection, and sending entries to a remote tier.

Depends on the index, the disk store and tokenizers. Only a repair loads a model's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragblend.catalog.database import delete_catalog_files
from ragblend.catalog.ledger import Ledger, catalog_location, has_ledger, open_ledger
from ragblend.catalog.stored_documents import open_store_ledgers
from ragblend.catalog.token_ids import hash_ids
from ragblend.engine.api import Engine
from ragblend.engine.deletions import run_deletions, schedule_deletions
from ragblend.engine.store.disk import DiskStore, GcResult
from ragblend.engine.store.eviction import NAME
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.metadata import (
    CALIBRATIONS_DIR,
    CONTEXT_FILE,
    DEFAULTS_FILE,
    MACHINES_DIR,
    MODELS_DIR,
)
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.remote.upload import PushReport, send_entries
from ragblend.engine.tuning.calibration import calibration_problem
from ragblend.errors import (
    BackendUnreachableError,
    CorruptError,
    NotFoundError,
    RagblendError,
)
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.precompute import precompute_chunks
from ragblend.prompt.types import Chunk


@dataclass(slots=True)
class VerifyReport:
    """Result of `verify_and_quarantine`; a repair adds its results. Dictionaries map keys or paths to the problems."""

    checked: int = 0  # entries that were read
    damaged: dict[str, str] = field(default_factory=dict)  # entries, by key
    missing: dict[str, str] = field(default_factory=dict)  # recorded entries without a file and without eviction
    damaged_files: dict[str, str] = field(default_factory=dict)  # other files of the store, by relative path
    damaged_remote: dict[str, str] = field(default_factory=dict)  # entries of the remote tier, by key
    index_problems: list[str] = field(default_factory=list)
    orphans: int | None = None  # entries that no chunk needs; None without an index
    num_without_kv: int | None = None  # indexed chunks, which is no damage; None without an index
    num_repaired: int = 0  # chunks
    num_sent_again: int = 0  # documents of clients, which the store's server stores again
    dropped: list[str] = field(default_factory=list)  # sentences: a removed file, and how to create it again
    unrepaired: list[str] = field(default_factory=list)  # sentences: a remaining problem, and what to do

    @property
    def has_problems(self) -> bool:
        """True if an entry or a file is damaged or missing, or the index has a problem."""
        problems = (self.damaged, self.missing, self.damaged_files, self.damaged_remote, self.index_problems)
        return any(problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. "damaged", "missing" and "damaged_remote" are numbers of entries.

        The dictionaries of these three fields are in "damaged_keys", "missing_keys" and "damaged_remote_keys".
        """
        facts = asdict(self)
        for name in ("damaged", "missing", "damaged_remote"):
            facts |= {f"{name}_keys": facts[name], name: len(facts[name])}
        return facts


def verify_and_quarantine(
    store: str | Path, progress: Progress = ignore_progress, *, kv_dir: str | None = None
) -> VerifyReport:
    """Read every byte of a directory's store and check its index. Damaged entries are moved to quarantine.

    kv_dir: the folder of the entries; None: `kv` in `store`. Raises NotFoundError if there is no store.
    """
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    report = VerifyReport()
    for result in disk.verify():
        report.checked += 1
        progress("check", report.checked, None)
        if not result.ok:
            report.damaged[result.key] = result.reason
    report.damaged_files = {result.key: result.reason for result in disk.verify_metadata(calibration_problem)}
    _verify_ledger(disk, report)
    try:
        with open_index(store) as opened:
            opened.check_chunks()
            is_checked = opened.key == catalog_location(disk)
            report.index_problems = opened.find_search_problems() if is_checked else opened.find_problems()
    except NotFoundError:
        pass  # a store of framework documents has no index
    except CorruptError as error:
        report.damaged_files.setdefault(CATALOG_FILE, str(error))
    _compare_with_documents(disk, report)
    return report


def _compare_with_documents(disk: DiskStore, report: VerifyReport) -> None:
    """Count the entries that no chunk needs, and the chunks without KV."""
    if not has_ledger(disk):
        return
    try:
        with open_store_ledgers(disk) as ledgers:
            live = _LiveChunks(*ledgers)
            stored: set[tuple[str, bytes]] = set()

            def headers() -> Iterator[KVHeader]:
                for header in disk.headers():
                    stored.add((header.namespace, hash_ids(header.token_ids)))
                    yield header

            report.orphans = sum(1 for _ in _find_orphans(headers(), live))
            report.num_without_kv = sum(stored.isdisjoint(live.hashes_of.get(key, ())) for key in live.text_keys)
    except RagblendError:  # the report contains it already
        return


def _verify_ledger(disk: DiskStore, report: VerifyReport) -> None:
    """Check the ledger, and that every entry which it records as stored has a file."""
    try:
        if not has_ledger(disk):
            if next(disk.keys(), None) is not None:
                report.damaged_files[CATALOG_FILE] = "the file is missing, so no stored chunk is found in prompts"
            return
        with open_ledger(disk) as ledger:
            problems = ledger.find_problems()
            stored = (
                {} if ledger.is_shared else ledger.fingerprints_by_key()
            )  # a fleet's entries are also on other disks
    except RagblendError as error:
        report.damaged_files[CATALOG_FILE] = str(error)
        return
    if odd := {key for key in stored if not NAME.fullmatch(key)}:
        problems.append(f"the keys of {len(odd)} entries are damaged")
    if problems:
        report.damaged_files[CATALOG_FILE] = "; ".join(problems)
    if not disk.has_evicted:
        models = disk.models()
        for key, fingerprint in stored.items():
            if key not in report.damaged and key not in odd and not disk.has_file(key):
                model = models.get(fingerprint, {}).get("model", f"a model with the fingerprint {fingerprint}")
                report.missing[key] = f"stored for {model}, but its file does not exist"


def repair_store(
    report: VerifyReport,
    engine: Engine,
    index: ChunkIndex | None,
    progress: Progress = ignore_progress,
    *,
    done: Collection[str] = (),
) -> int:
    """Prefill the indexed chunks without KV, and repair the damage in `report`. Files beyond repair are deleted.

    index: None for a store of texts that frameworks have added. done: keys of entries that are repaired already. Return
    the number of prefilled chunks. If the process is killed, the next `verify` finds the remaining damage.
    """
    disk = engine.store.find_tier(DiskStore)
    if disk is not None:
        disk.delete_temporary_files()
    if report.index_problems and index is not None:
        index.rebuild()
    if disk is not None and report.damaged_files:
        _repair_files(report, disk)
    chunks = [] if index is None else list(index.chunks())
    lost = {*report.damaged, *report.missing} - {*done}
    indexed = {chunk.text.strip() for chunk in chunks}
    with open_ledger(engine.store) as ledger:
        texts = [*chunks, *(Chunk(text) for text in ledger.texts() if text not in indexed)] if lost else []
        again = [chunk for chunk in chunk_variants(texts, engine.context) if engine.key(chunk) in lost]
        repaired = precompute_chunks(
            [*chunks, *again],
            engine,
            progress,
            index=index,
            texts_of=index.texts_to_register(indexed, ledger) if index is not None else {},
            ledger=ledger,
        )
        stored = ledger.fingerprints_by_key()
    if repaired.num_dropped:
        report.unrepaired.append(": ".join(repaired.failures[-1]))
    if disk is None:
        return repaired.num_new_kv
    for key in lost.intersection(report.damaged):
        disk.drop_unreadable(key)  # last, so that the next `verify` finds it after a kill
    gone = [key for key in lost if key in stored and not disk.has_file(key)]
    if gone and not disk.has_evicted:
        report.unrepaired.append(
            f"{len(gone)} entries are missing, and their chunks are not indexed, or belong to another model, prefix or "
            "namespace. Repair with the `model`, `system` or `namespace` of these entries, add the documents again, or "
            "delete the entries' records: ragblend gc"
        )
    _compare_with_documents(disk, report)
    return repaired.num_new_kv


def drop_files_that_block_opening(report: VerifyReport, store: str | Path, *, kv_dir: str | None = None) -> None:
    """Delete the damaged files that prevent an engine from opening the store: its defaults and its catalogue.

    `report.damaged_files` names the damaged files. The deletions are added to `report.dropped`.
    """
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    if DEFAULTS_FILE in report.damaged_files:
        disk.delete_metadata(DEFAULTS_FILE)
        report.dropped.append(f"{DEFAULTS_FILE} was removed; {_LOSS_MESSAGES[DEFAULTS_FILE]}")
    if CATALOG_FILE in report.damaged_files and isinstance(catalog_location(disk), Path):
        delete_catalog_files(disk.root)
        _record_stored(disk)
        report.dropped.append(f"{CATALOG_FILE} was replaced by an empty one; {_LOSS_MESSAGES[CATALOG_FILE]}")


def _repair_files(report: VerifyReport, disk: DiskStore) -> None:
    """Delete damaged metadata files. The problems of a damaged catalogue are added to `report.unrepaired`."""
    still = {result.key for result in disk.verify_metadata(calibration_problem)}
    for place, reason in report.damaged_files.items():
        if place == CATALOG_FILE:
            with open_ledger(disk) as ledger:
                report.unrepaired += [reason] * bool(ledger.find_problems())
        elif place in still:
            disk.delete_metadata(place)
            report.dropped.append(f"{place} was removed; {_LOSS_MESSAGES[place.partition('/')[0]]}")


def _record_stored(disk: DiskStore) -> None:
    """Record all entries of the store in the ledger."""
    keys_of: dict[str, list[str]] = {}
    for header in disk.headers():
        keys_of.setdefault(header.fingerprint, []).append(header.key)
    with open_ledger(disk) as ledger:
        for fingerprint, keys in keys_of.items():
            ledger.record_stored_entries(keys, fingerprint)


_LOSS_MESSAGES = {
    MODELS_DIR: "an engine of that model writes it again",
    CALIBRATIONS_DIR: "create it again: ragblend calibrate",
    MACHINES_DIR: "create it again: ragblend profile",
    DEFAULTS_FILE: "set it again: ragblend ingest DOCS --model MODEL",
    CONTEXT_FILE: "chunks are looked up without context until it is set again: ragblend precompute --context ...",
    CATALOG_FILE: "ingest the documents again, and add those of frameworks and servers again; stored KV is reused",
}


def collect_garbage(
    store: str | Path,
    max_bytes: int | None = None,
    dry_run: bool = False,
    *,
    orphans: bool = False,
    kv_dir: str | None = None,
) -> GcResult:
    """Delete temporary files and damaged entries, then the least recently used KV until at most `max_bytes` remain.

    `max_bytes`: None sets no limit. `dry_run`: True deletes nothing, and returns the same result. `orphans`: True also
    deletes the KV and token ids of chunks that no document of the index, a framework or a server has, for all models
    and prefixes.

    Documents that are ingested during the call keep their entries. With `orphans`, raises NotFoundError if the store
    has no catalogue.
    """
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    if not orphans:
        result = disk.gc(max_bytes, None, dry_run)
        if not dry_run:
            _unrecord_missing(disk)
        return result
    if not has_ledger(disk):
        raise NotFoundError(
            f"{store} has no {CATALOG_FILE}, so it is unknown which KV documents need; add the documents again, or run "
            "ragblend gc without --orphans"
        )
    with open_store_ledgers(disk) as (ledger, folder):
        live = _LiveChunks(ledger, folder)
        if dry_run:
            unwanted = set(_find_orphans(disk.headers(), live))
            return disk.gc(max_bytes, lambda key: key not in unwanted, dry_run)
        dropped, freed_bytes = _delete_orphans(disk, ledger, folder, live)
        ledger.remove_ids_without_text()
        ledger.truncate_log()
        result = disk.gc(max_bytes)
        _unrecord_missing(disk)
        evicted, freed_bytes = (*dropped, *result.evicted), freed_bytes + result.freed_bytes
    return result._replace(evicted=evicted, freed_bytes=freed_bytes)


def _delete_orphans(disk: DiskStore, ledger: Ledger, folder: Ledger, live: _LiveChunks) -> tuple[list[str], int]:
    """Delete the entries that no chunk needs. Return their keys and the freed bytes."""
    pending = list(_find_orphans(disk.headers(), live))
    with folder.write_transaction(), ledger.write_transaction():  # storing an entry later cancels its deletion
        if live.update():
            pending = list(_find_orphans(filter(None, map(disk.header, pending)), live))
        schedule_deletions(dict.fromkeys(pending, ""), disk, ledger)
    nbytes_of = {key: disk.file_bytes(key) for key in pending}
    deleted = run_deletions(disk, ledger)
    dropped = [key for key in pending if key in deleted]
    return dropped, sum(nbytes_of[key] for key in dropped)


def _unrecord_missing(disk: DiskStore) -> None:
    """Delete the ledger's records of missing entries. It is the last step, so `verify` reports them after a kill."""
    with open_ledger(disk, create=False) as ledger:
        if gone := [key for key in ledger.fingerprints_by_key() if not disk.has_file(key)]:
            ledger.unrecord_stored_entries(gone)


def _find_orphans(headers: Iterable[KVHeader], live: _LiveChunks) -> Iterator[str]:
    """Yield the keys of entries that no live chunk needs. Entries of a system text alone are left out."""
    return (header.key for header in headers if header.prefix_ids and not live.need(header))


def push_store(
    store: str | Path, remote: RemoteStore, progress: Progress = ignore_progress, *, kv_dir: str | None = None
) -> PushReport:
    """Send every entry that the remote tier does not have. After an interruption, call it again.

    See `send_entries`. Raises BackendUnreachableError if the remote tier does not answer at the start.
    """
    status = remote.status()
    if not status.reachable:
        raise BackendUnreachableError(status.problem)
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    disk.delete_temporary_files()
    remote.values.delete_temporary_files()
    return send_entries(list(disk.keys()), set(remote.keys()), [disk], remote, progress)


class _LiveChunks:
    """The chunks that documents have, as the keys of their texts and the hashes of their token ids by any tokenizer.

    `ledger`, `folder`: see `catalog.stored_documents`.
    """

    def __init__(self, ledger: Ledger, folder: Ledger) -> None:
        self._ledger, self._folder = ledger, folder
        self._state: object = None
        self.update()

    def update(self) -> bool:
        """Read the chunks again if another process may have changed them. Return True if so."""
        state = (self._ledger.change_counter(), self._folder.change_counter())
        if state == self._state:
            return False
        self._state = state
        self.text_keys = self._ledger.text_keys() | self._folder.text_keys()
        self.hashes_of: dict[bytes, set[tuple[str, bytes]]] = {}
        for each in self._ledger.hash_token_ids(self.text_keys):
            self.hashes_of.setdefault(each.text_key, set()).add((each.namespace, each.ids_hash))
        self._hashes = set().union(*self.hashes_of.values())
        return True

    def need(self, header: KVHeader) -> bool:
        """Return True if documents have the chunk of this entry."""
        return (header.namespace, hash_ids(header.token_ids)) in self._hashes
