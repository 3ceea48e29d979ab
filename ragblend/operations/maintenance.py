"""Maintain an index and a store: check every byte, repair, collect garbage, send entries to a remote tier.

Works with the index, the disk store and tokenizers. Loads a model's weights only to repair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.catalog.database import drop_catalog
from ragblend.catalog.documents import IndexedDocuments
from ragblend.catalog.registry import ChunkRegistry, catalog_of, has_registry, open_registry, read_registry
from ragblend.catalog.schema import DocumentName
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import KVHeader
from ragblend.engine.store.metadata import (
    CALIBRATIONS_DIR,
    CONTEXT_FILE,
    DEFAULTS_FILE,
    MACHINES_DIR,
    MODELS_DIR,
    PINS_DIR,
    PREFIXES_DIR,
)
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.tuning.calibration import calibration_error
from ragblend.errors import (
    BackendUnreachableError,
    CorruptError,
    DamagedEntryError,
    NotFoundError,
    RagblendError,
    StoreFullError,
)
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.contexts import NUM_SIMILAR, chunk_variants
from ragblend.ingestion.deletion import find_orphaned_keys
from ragblend.ingestion.documents import pin_document
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.precompute import precompute_chunks
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Chunk

_BATCH = 64  # entries deleted per transaction, during which no document can be added


@dataclass(slots=True)
class VerifyReport:
    """The result of `verify`. `orphans` and `num_without_kv` are None without an index; a repair counts them again.

    `damaged`: entries, by key. `missing`: stored entries without a file although no budget evicted any, by key.
    `damaged_files`: other files of the store, by relative path. Each value is the reason.
    """

    checked: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    damaged_files: dict[str, str] = field(default_factory=dict)
    damaged_remote: dict[str, str] = field(default_factory=dict)  # entries of the remote tier
    index_problems: list[str] = field(default_factory=list)
    orphans: int | None = None
    num_without_kv: int | None = None  # indexed chunks; not damage, because a store may hold only some
    outdated: list[str] = field(default_factory=list)  # similar variants whose chunk now has other neighbours
    num_repaired: int = 0
    dropped: list[str] = field(default_factory=list)  # removed files, and how to make them again
    unrepaired: list[str] = field(default_factory=list)  # problems that it could not repair, and what to do

    @property
    def has_problems(self) -> bool:
        """True if anything is damaged, or missing."""
        found = (self.damaged, self.missing, self.damaged_files, self.damaged_remote, self.index_problems)
        return any(found)

    def as_dict(self) -> dict[str, Any]:
        """`damaged` and `missing` as counts, `damaged_keys` and `missing_keys` with the reasons."""
        facts = asdict(self)
        for name in ("damaged", "missing", "damaged_remote"):
            facts |= {f"{name}_keys": facts[name], name: len(facts[name])}
        return facts


def verify_store(
    store: str | Path,
    index: str | Path | None = None,
    progress: Progress = ignore_progress,
    *,
    kv_dir: str | None = None,
) -> VerifyReport:
    """Read every stored byte and check the index. Damaged entries are moved to quarantine, so they are never used.

    `index`: the folder with the documents, where it is not `store`; `kv_dir`: that of the entries.
    """
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    report = VerifyReport()
    for result in disk.verify():
        report.checked += 1
        progress("check", report.checked, None)
        if not result.ok:
            report.damaged[result.key] = result.reason
    report.damaged_files = {result.key: result.reason for result in disk.verify_metadata(calibration_error)}
    _verify_registry(disk, report)
    try:
        with open_index(store if index is None else index) as opened:
            is_checked = opened.registry.key == catalog_of(disk)
            report.index_problems = opened.find_search_problems() if is_checked else opened.find_problems()
            _compare_with_index(disk, opened, report)
    except NotFoundError:
        pass  # framework adapters use a store without an index
    except CorruptError as error:
        if CATALOG_FILE not in report.damaged_files:
            report.index_problems.append(str(error))
    return report


def _compare_with_index(disk: DiskStore, index: ChunkIndex, report: VerifyReport) -> None:
    """Count the entries that no chunk needs and the chunks without KV, and list the outdated similar variants."""
    try:
        with read_registry(disk) as registry:
            used = _load_live_chunks(index, registry)
    except CorruptError:  # which is in the report already
        return
    if used is None:
        return
    found = _EntrySummary()
    report.orphans = sum(1 for _ in _find_orphans(found.collect(disk.headers()), used))
    report.num_without_kv = len(used.ids - found.ids)
    report.outdated = sorted(found.find_outdated(index, used.renderer))


def _verify_registry(disk: DiskStore, report: VerifyReport) -> None:
    """Check the registry of texts, and that the entries exist that it records as stored."""
    try:
        if not has_registry(disk):
            if next(disk.keys(), None) is not None:
                report.damaged_files[CATALOG_FILE] = "it is missing, so no stored chunk is found in prompts"
            return
        with open_registry(disk) as registry:
            problems = registry.find_problems()
            stored = {} if registry.is_shared else registry.stored()  # those of a fleet are on other disks
    except RagblendError as error:
        report.damaged_files[CATALOG_FILE] = str(error)
        return
    if problems:
        report.damaged_files[CATALOG_FILE] = "; ".join(problems)
    if not disk.has_evicted:
        models = disk.models()
        for key, fingerprint in stored.items():
            if key not in report.damaged and not disk.has_file(key):
                model = models.get(fingerprint, {}).get("model", f"a model with the fingerprint {fingerprint}")
                report.missing[key] = f"stored for {model}, but its file does not exist"


def repair_store(report: VerifyReport, engine: Engine, index: ChunkIndex, progress: Progress = ignore_progress) -> int:
    """Prefill the indexed chunks without KV, repair what can be repaired and drop the rest. Return the number of
    prefilled chunks.

    If the process is killed, the next `verify` finds what was not repaired.
    """
    disk = engine.store.disk_tier
    if disk is not None:
        disk.clean()
    if report.index_problems:
        index.remove_damaged_rows()
        index.rebuild()
    if disk is not None and report.damaged_files:
        _repair_files(report, disk, engine, index)
    chunks, lost = list(index.chunks()), {*report.damaged, *report.missing}
    indexed = {chunk.text.strip() for chunk in chunks}
    with open_registry(engine.store) as registry:
        others = [Chunk(text) for text in registry.texts() if text not in indexed]
        behind = [chunk for chunk in chunk_variants(chunks, engine.context) if chunk.context is not None]
        again = [chunk for chunk in (*behind, *others) if engine.key(chunk) in lost] if lost else []
        repaired = precompute_chunks(
            [*chunks, *again],
            engine,
            progress,
            index=index,
            register_texts=lambda: registry.add(indexed, DocumentName(index.registry_name)),
        )
        stored = registry.stored()
    if CATALOG_FILE in report.damaged_files:
        engine.add_known(chunk for chunk in others if engine.is_stored(chunk))
    for key in report.damaged if disk is not None else ():
        assert disk is not None
        disk.drop_damaged(key)  # last, so that a killed repair leaves it for the next `verify`
    gone = [key for key in lost if key in stored and disk is not None and not disk.has_file(key)]
    if gone and disk is not None and not disk.has_evicted:
        report.unrepaired.append(
            f"{len(gone)} entries are missing, and this model does not make them from the index with this prefix and "
            "namespace. Repair with the `model`, `system` or `namespace` that made them, add the documents again, or "
            "delete their records: ragblend gc"
        )
    if disk is not None:
        _compare_with_index(disk, index, report)
    return repaired.num_new_kv


def drop_unreadable_files(report: VerifyReport, store: str | Path) -> None:
    """Drop what keeps an engine from opening the store: damaged defaults, and a catalogue that cannot be opened."""
    if DEFAULTS_FILE in report.damaged_files:
        DiskStore(store, create=False).delete_metadata(DEFAULTS_FILE)
        report.dropped.append(f"{DEFAULTS_FILE} is dropped: {_LOSS_MESSAGES[DEFAULTS_FILE]}")
    if CATALOG_FILE in report.damaged_files:
        disk = DiskStore(store, create=False)
        try:
            with open_registry(disk) as registry:
                is_sound = _remove_damaged_rows(registry)
        except CorruptError:
            is_sound = False
        if not is_sound:  # SQLite's own structure is damaged, so deleting rows does not repair it
            drop_catalog(disk.root)
            _record_stored(disk)
        what = f"damaged rows of {CATALOG_FILE} are" if is_sound else f"{CATALOG_FILE} is"
        report.dropped.append(f"{what} dropped: {_LOSS_MESSAGES[CATALOG_FILE]}")


def _remove_damaged_rows(registry: ChunkRegistry) -> bool:
    """Delete the damaged rows of a catalogue. Return True if it is sound then."""
    IndexedDocuments(registry).remove_damaged_rows()
    return not registry.find_problems()


def _repair_files(report: VerifyReport, disk: DiskStore, engine: Engine, index: ChunkIndex) -> None:
    """Rewrite pins of indexed documents and sound rows of the registry; remove the other damaged files."""
    for source in index.sources():
        if disk.pin_location(source) in report.damaged_files:
            pin_document(source, engine, index)
    still = {result.key for result in disk.verify_metadata(calibration_error)}
    for place, reason in report.damaged_files.items():
        if place == CATALOG_FILE:
            if (known := getattr(engine, "known_chunks", None)) is not None:
                known.close()  # it may hold a removed file open
            try:
                with open_registry(disk) as registry:
                    is_sound = _remove_damaged_rows(registry)
            except RagblendError:
                is_sound = False
            if not is_sound:
                report.unrepaired.append(reason)
                continue
            _record_stored(disk)
        elif place in still:
            disk.delete_metadata(place)
            report.dropped.append(f"{place} is dropped: {_LOSS_MESSAGES[place.partition('/')[0]]}")


def _record_stored(disk: DiskStore) -> None:
    """Record in the registry the entries that the store holds."""
    found: dict[str, list[str]] = {}
    for header in disk.headers():
        found.setdefault(header.fingerprint, []).append(header.key)
    with open_registry(disk) as registry:
        for fingerprint, keys in found.items():
            registry.record_stored(keys, fingerprint)


_LOSS_MESSAGES = {
    PINS_DIR: "nothing says which document it kept; pin it again: ragblend pin DOC",
    MODELS_DIR: "an engine of that model writes it again",
    CALIBRATIONS_DIR: "make it again: ragblend calibrate",
    MACHINES_DIR: "make it again: ragblend profile",
    PREFIXES_DIR: "a server writes it again when it starts: ragblend serve",
    DEFAULTS_FILE: "set it again: ragblend ingest DOCS --model MODEL",
    CONTEXT_FILE: "chunks are looked up without context until it is set again: ragblend precompute --context ...",
    CATALOG_FILE: "ingest the documents again, and add those of frameworks and servers again: stored KV is found",
}


class GcReport(NamedTuple):
    """Entries and files that `collect_garbage` removed, or would remove, with the registered texts and the pins."""

    evicted: tuple[str, ...]
    num_quarantined: int
    num_temp_files: int
    freed_bytes: int
    kept_bytes: int
    texts: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()


def collect_garbage(
    store: str | Path,
    index: str | Path | None,
    max_bytes: int | None = None,
    dry_run: bool = False,
    *,
    kv_dir: str | None = None,
) -> GcReport:
    """Remove leftovers and damaged files; with `index` also entries that it does not use; then KV beyond `max_bytes`.

    Unused are, for every model and prefix: KV of chunks that no document has (of the index, of a framework's store or
    of a server) and KV computed after such a chunk, their registered texts, and the pins of documents that are not
    indexed. Documents may be ingested during the run; their entries are kept. Raises RagblendError if the index's
    tokenizer cannot be loaded.
    """
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    if index is None:
        result = disk.gc(max_bytes, None, dry_run)
        if not dry_run:
            _unrecord_missing(disk)
        return GcReport(*result)
    with open_index(index) as opened, opened.registry_for(disk) as registry:
        used = _load_live_chunks(opened, registry)
        if used is None:
            raise RagblendError(
                f"the tokenizer that {index} was made with cannot be loaded, so orphans are unknown; "
                "run ragblend gc without --orphans, or make the model available"
            )
        kept = {text.strip() for _, text in opened.texts()}.union(registry.texts_of_documents())
        if dry_run:
            unwanted = set(_find_orphans(disk.headers(), used))
            result = disk.gc(max_bytes, lambda key: key not in unwanted, dry_run)
            texts = tuple(text for text in registry.texts() if text not in kept)
            return GcReport(*result, texts, _stray_pins(disk, opened, set(disk.keys()) - unwanted))
        orphans, freed_bytes = _drop_orphans(disk, opened, registry, used)
        with opened.write_transaction(), registry.block_additions():
            kept.update(text.strip() for text in opened.texts_since(used.generation))
            kept.update(registry.texts_of_documents(), registry.texts_after(used.last_text))
            texts = tuple(text for text in registry.texts() if text not in kept)
            registry.remove(texts)
            registry.remove_ids_without_text()
            registry.remove_entries(orphans)
            pins = _stray_pins(disk, opened, set(disk.keys()))
            for name in pins:
                disk.unpin(name)
        registry.truncate_log()
        result = disk.gc(max_bytes)
        _unrecord_missing(disk)
        result = result._replace(evicted=(*orphans, *result.evicted), freed_bytes=freed_bytes + result.freed_bytes)
    return GcReport(*result, texts, pins)


def _drop_orphans(
    disk: DiskStore, index: ChunkIndex, registry: ChunkRegistry, used: _LiveChunks
) -> tuple[list[str], int]:
    """Delete the entries that no chunk in use needs. Return their keys and the freed bytes."""
    dropped, freed_bytes = list[str](), 0
    pending = list(_find_orphans(disk.headers(), used))
    while pending:
        with index.write_transaction(), registry.block_additions():  # chunks added later find their KV, or prefill it
            if fresh := [*index.texts_since(used.generation), *registry.texts_after(used.last_text)]:
                used = used.add_texts(fresh, index.manifest.generation, registry.last_number())
                pending = list(_find_orphans(filter(None, map(disk.header, pending)), used))
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            freed_bytes += disk.delete_many(batch)
        dropped += batch
    return dropped, freed_bytes


def _unrecord_missing(disk: DiskStore) -> None:
    """Remove missing entries from the registry's record. Comes last: a killed `gc` reports them as missing."""
    if has_registry(disk):
        with open_registry(disk) as registry:
            if gone := [key for key in registry.stored() if not disk.has_file(key)]:
                registry.remove_stored(gone)


def _stray_pins(disk: DiskStore, index: ChunkIndex, wanted: AbstractSet[str]) -> tuple[str, ...]:
    """Return the pinned documents that are not indexed, except pins of chunks in `wanted`, which were made by hand."""
    named = set(index.sources())
    return tuple(name for name, keys in disk.pins().items() if name not in named and wanted.isdisjoint(keys))


def _find_orphans(headers: Iterable[KVHeader], used: _LiveChunks) -> Iterator[str]:
    """Yield the keys of chunk KV that no chunk in use needs."""
    behind_prefix = (header for header in headers if header.prefix_ids)
    found = find_orphaned_keys(behind_prefix, lambda ids: None if ids in used.ids else True, used.joint)
    return (key for key, _ in found)


class _EntrySummary:
    """Summary of a store's headers: the ids of its chunks, and hashes of the texts before each similar variant."""

    def __init__(self) -> None:
        self.ids: set[tuple[int, ...]] = set()
        self._after: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = {}  # by the chunk's ids, by key

    def collect(self, headers: Iterable[KVHeader]) -> Iterator[KVHeader]:
        """Yield the headers, each noted as it passes."""
        for header in headers:
            self.ids.add(header.token_ids)
            if header.context:
                self._after.setdefault(header.token_ids, {})[header.key] = tuple(map(hash, header.context_ids))
            yield header

    def find_outdated(self, index: ChunkIndex, renderer: Renderer) -> Iterator[str]:
        """Yield the keys of variants that were computed after other chunks than those which are the nearest now.

        A variant after fewer of them is not outdated: the others exceeded the context.
        """
        for text in {text for _, text in index.texts()} if self._after else ():
            if variants := self._after.get(renderer.chunk_ids(text)):
                near = index.similar_texts(text, NUM_SIMILAR, lambda each: renderer.chunk_ids(each) in self.ids)
                nearest = tuple(map(hash, renderer.context_parts(reversed(near))))
                for key, after in variants.items():
                    if after != nearest[-len(after) :]:
                        yield key


class PushReport(NamedTuple):
    """Numbers of entries that `push` sent, that the remote tier had, that were damaged, and that did not arrive."""

    num_sent: int
    num_known: int
    num_damaged: int
    num_dropped: int
    sent_bytes: int
    problem: str = ""  # why the last dropped entry did not arrive
    is_full: bool = False  # the remote tier has no room


def push_store(
    store: str | Path, remote: RemoteStore, progress: Progress = ignore_progress, *, kv_dir: str | None = None
) -> PushReport:
    """Send the remote tier every entry of the directory that it lacks. After an interruption, call it again.

    It stops sending once the remote tier's breaker has opened. Raises BackendUnreachableError if the remote tier does
    not answer at all.
    """
    status = remote.status()
    if not status.reachable:
        raise BackendUnreachableError(status.problem)
    disk = DiskStore(store, create=False, kv_dir=kv_dir)
    disk.clean()
    remote.clean()
    known, keys = set(remote.keys()), list(disk.keys())
    num_sent = num_known = num_damaged = num_dropped = sent_bytes = 0
    problem, is_full = "", False
    for done, key in enumerate(keys, start=1):
        if key in known:
            num_known += 1
        elif not remote.breaker.is_closed:
            num_dropped += 1
        else:
            try:
                found = disk.get(key)
                if found is not None:
                    remote.send(found)
                    num_sent, sent_bytes = num_sent + 1, sent_bytes + found.nbytes
                else:
                    num_damaged += 1
            except DamagedEntryError:
                num_damaged += 1
            except (BackendUnreachableError, StoreFullError) as error:
                num_dropped, problem, is_full = num_dropped + 1, str(error), isinstance(error, StoreFullError)
        progress("push", done, len(keys))
    return PushReport(num_sent, num_known, num_damaged, num_dropped, sent_bytes, problem, is_full)


class _LiveChunks(NamedTuple):
    """Id sequences of the chunks that were indexed at `generation` or belong to a document, and the ids between two
    chunks of a prompt."""

    ids: set[tuple[int, ...]]
    joint: tuple[int, ...]
    generation: int
    last_text: int  # the number of the registry's last text
    renderer: Renderer

    def add_texts(self, texts: Iterable[str], generation: int, last_text: int) -> _LiveChunks:
        """Return these chunks and those of `texts`, which were added later."""
        ids = self.ids.union(map(self.renderer.chunk_ids, texts))
        return self._replace(ids=ids, generation=generation, last_text=last_text)


def _load_live_chunks(index: ChunkIndex, registry: ChunkRegistry) -> _LiveChunks | None:
    """Return the chunks in use, as ids of the index's tokenizer; None if the tokenizer cannot be loaded."""
    from ragblend.engine.transformers.model import load_tokenizer

    # Read before the texts, so that those of another process have a later generation and number.
    made, last_text = index.manifest, registry.last_number()
    try:
        tokenizer, _ = load_tokenizer(made.tokenizer)
    except RagblendError:
        return None
    renderer = Renderer(tokenizer)
    if renderer.fingerprint != made.tokenizer_fingerprint:
        return None
    texts = {text for _, text in index.texts()}.union(registry.texts_of_documents())
    return _LiveChunks(
        set(map(renderer.chunk_ids, texts)), renderer.separator_ids, made.generation, last_text, renderer
    )
