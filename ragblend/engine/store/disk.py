"""The durable tier: a directory of chunk files, shared by threads, processes and hosts.

    ROOT/kv/ab/abcdef....safetensors  an entry; `.damaged` instead of `.safetensors` once it failed a checksum
    ROOT/...                        metadata (see `metadata`)

An entry is written in one step. It is moved aside if it is damaged, and deleted by a byte budget or by `gc`.
Works on names, files and directories; `chunk_file` has the format of an entry. Does not depend on models, prompts or
other tiers.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ragblend.engine.store.base import EntryCheck, KVStore
from ragblend.engine.store.eviction import NAME, Capacity, DiskEvictor, auto_limit
from ragblend.engine.store.format.chunk_file import (
    DiskKV,
    IncompatibleEntryError,
    ReadRequirements,
    SharedFile,
    UnreadableEntryError,
    UnsignedEntryError,
    header_nbytes,
    write_chunk,
)
from ragblend.engine.store.format.kv import ChunkKV, KVHeader, KVSpec, MemoryKV, load_into_memory
from ragblend.engine.store.format.signing import KeyChoice, resolve_key
from ragblend.engine.store.format.sizes import format_bytes
from ragblend.engine.store.metadata import StoreMetadata, checked_name
from ragblend.errors import DamagedEntryError, NotFoundError, StoreNotWritableError, UsageError
from ragblend.files.directory import Directory, remove_file, try_remove_file
from ragblend.files.places import expand_user_path
from ragblend.files.store_folder import DAMAGED_SUFFIX, ENTRY_SUFFIX, EVICTED_MARK, KV_DIR

log = logging.getLogger(__name__)

TOUCH_INTERVAL_S = 60.0  # last use is known to the minute, so a hot entry costs one utime a minute
TOUCHES_KEPT = 1 << 16  # entries whose last use, and next check of the time on disk, are cached, a few MB


class StoreEntry(NamedTuple):
    """One stored chunk. `nbytes`: the file's size; `last_used_s`: seconds since the epoch, accurate to a minute."""

    key: str
    nbytes: int
    last_used_s: float
    header: KVHeader


class GcResult(NamedTuple):
    """The files and entries that `gc` deleted, or would delete in a dry run.

    `evicted`: keys of the deleted entries. `num_quarantined`: number of deleted damaged files, moved aside earlier.
    `num_temp_files`: number of deleted temporary files. `freed_bytes`: size of all deleted files. `kept_bytes`: size of
    the remaining entries.
    """

    evicted: tuple[str, ...]
    num_quarantined: int
    num_temp_files: int
    freed_bytes: int
    kept_bytes: int


class DiskStore(StoreMetadata, KVStore):
    """KVStore in a directory, safe to share between threads and processes.

    `capacity_bytes`: the byte budget of the entries; None for no limit, "auto" for half of the space that is free or
    used by entries (see `auto_limit`). If necessary, a `put` first evicts the least recently used entries. The
    directory is not listed at each `put` (see `eviction`). A process may therefore write up to 1/16 of the budget
    before it counts the entries of other processes. Several processes may each exceed the budget by that much.

    `store_key`: entries are signed with it, and entries without its signature are ignored (see `signing`). The default
    is the process's key, if there is one.

    `kv_dir`: the directory of the entries, on a faster disk for example; None is `kv` in `root`. Lost entries can be
    computed again, unlike the other files in `root`. A relative path is resolved once, when the store is opened.

    `catalog`: the catalogue's URL. None: the URL in RAGBLEND_CATALOG or the user's settings, else a file in `root`.

    `fsync=False` is for tests and scratch stores: a power cut may then lose or damage the latest entries, which the
    checksums detect. `create=False` raises NotFoundError if `root` does not exist.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        fsync: bool = True,
        create: bool = True,
        capacity_bytes: Capacity = None,
        store_key: KeyChoice = "auto",
        kv_dir: str | os.PathLike[str] | None = None,
        catalog: str | None = None,
    ) -> None:
        if isinstance(capacity_bytes, int) and capacity_bytes < 0:
            raise UsageError(f"capacity_bytes is {capacity_bytes}; choose 0 or more, 'auto', or None for no limit")
        super().__init__()
        named = expand_user_path(root, "store")
        self.root = named.absolute()
        self.capacity_bytes = capacity_bytes
        self.store_key = resolve_key(store_key)
        self.catalog = catalog
        self._requirements = ReadRequirements(self.store_key)
        self.on_put: Callable[[KVHeader], object] | None = None  # called before an entry is written
        self.on_delete: Callable[[Collection[str]], object] | None = None  # called after a tombstone's keys are deleted
        self._has_warned = False  # about an unsigned entry
        self._touch_due_s: dict[str, float] = {}  # when an entry's time on disk will be a minute old, since the epoch
        self._touched_s: dict[str, float] = {}  # last use of an entry that a faster tier returned, since the epoch
        if not create and not self.root.is_dir():
            raise NotFoundError(f"no store at {named}; fill one with: ragblend ingest DOCS --store {named}")
        self._directory = Directory(self.root, fsync=fsync)
        self.kv_dir = self.root / KV_DIR if kv_dir is None else expand_user_path(kv_dir, "kv_dir").absolute()
        hint, is_apart = self._directory.full_hint, not self.kv_dir.is_relative_to(self.root)
        self._entries = Directory(self.kv_dir, fsync=fsync, full_hint=hint, create=is_apart)
        self._writer = (
            self._entries if is_apart else self._directory
        )  # a directory's group may read the files that it writes
        self._evictor = DiskEvictor(
            self.kv_dir, capacity_bytes, evicted=lambda key: self._count(num_evicted=1), touched_s=self._touched_s
        )

    @property
    def folder(self) -> Path:
        """The store's folder."""
        return self.root

    def set_expected_spec(self, fingerprint: str, spec: KVSpec) -> None:
        """Set the dtype and the shapes of a model's KV. Entries of the model that differ are then read as damaged."""
        self._requirements.specs[fingerprint] = spec

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> DiskKV | None:
        """Return the entry, whose header is verified and whose layers are not read yet; None for a miss. Never raises.

        token_ids: the chunk's ids; None accepts any ids. An entry with other ids, or of another format version, is a
        miss, but its file stays, because another process may use it. A damaged or unsigned file is moved aside.
        """
        path, file = self.kv_dir / key[:2] / f"{key}{ENTRY_SUFFIX}", None
        try:
            file = SharedFile(self._path(key))
            kv = DiskKV(key, path, file, self._quarantine, self._requirements)
            if not kv.header.has_ids(token_ids):
                raise IncompatibleEntryError(f"its {kv.header.num_tokens} token ids differ from the requested ones")
        except FileNotFoundError:
            pass
        except (OSError, UsageError) as error:
            log.warning("stored KV %s cannot be read: %s", key, error)
        except IncompatibleEntryError as error:
            log.warning("stored KV %s in %s is not used: %s", key, path, error)
            self._count(num_damaged=1)
        except UnreadableEntryError as error:
            assert file is not None
            self._quarantine(key, path, file, str(error), is_unsigned=isinstance(error, UnsignedEntryError))
        else:
            handle = file.fd
            self._count(num_hits=1)
            self._evictor.record_use(key, os.fstat(handle).st_size)
            self._touch(key, handle)
            return kv
        self._count(num_misses=1)
        return None

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk. An entry with the same key is replaced. A damaged file of this key is deleted, too.

        With `fsync`, the entry survives a crash once `put` returns. Raises StoreFullError if the disk or the budget is
        full, and StoreNotWritableError for other failures of the disk. After an error, no part of the entry is left.
        """
        path = self._path(kv.header.key)
        loaded = load_into_memory(kv)
        data_offset = header_nbytes(loaded, self.store_key)
        nbytes = data_offset + loaded.nbytes
        if self.on_put is not None:
            self.on_put(loaded.header)
        with self._evictor.reserve(loaded.header.key, nbytes):
            self._writer.replace(path, nbytes, lambda stream: write_chunk(stream, loaded, data_offset, self.store_key))
        try_remove_file(path.with_suffix(DAMAGED_SUFFIX))
        self._count(num_puts=1)

    def contains(self, key: str) -> bool:
        """Return True if there is an entry that `get` would return, judged by its header. Tensors are not verified."""
        return self.header(key) is not None

    def peek(self, key: str) -> DiskKV | None:
        """Return the entry as `get` does, but change neither counters nor the time of last use, and move no file."""
        try:
            path = self._path(key)
            return DiskKV(key, path, SharedFile(path), self._quarantine, self._requirements)
        except (OSError, UsageError, UnreadableEntryError):
            return None

    def header(self, key: str) -> KVHeader | None:
        """Return the verified header of an entry; None if there is no readable entry. Changes no counters."""
        kv = self.peek(key)
        return None if kv is None else kv.header

    def headers(self) -> Iterator[KVHeader]:
        """Yield the verified header of each entry, in no particular order. A header is read when it is yielded."""
        for folder in self.kv_dir.glob("??"):
            for path in folder.glob(f"[!.]*{ENTRY_SUFFIX}"):
                if (header := self.header(path.stem)) is not None:
                    yield header

    def delete(self, key: str) -> bool:
        """Delete an entry and a damaged file of its key; return True if any existed. Open readers are not disturbed.

        Raises StoreNotWritableError if the entry exists and cannot be deleted.
        """
        try:
            path = self._path(key)
        except UsageError:
            return False
        removed = [remove_file(path), remove_file(path.with_suffix(DAMAGED_SUFFIX))]
        self._evictor.record_delete(key)
        return any(removed)

    def keys(self) -> Iterator[str]:
        """Return the keys of all entry files, which are not opened. Files that were moved aside are left out."""
        return (path.stem for path in self._files(ENTRY_SUFFIX))

    def nbytes(self, max_age_s: float = 0.0) -> int:
        """Return the size in bytes of all entries' files on disk, damaged ones included.

        max_age_s: with a budget, the directory is not listed if the last listing is not older, so the latest changes by
        other processes are not counted (see `eviction`).
        """
        return self._evictor.held_bytes(max_age_s)

    def certainly_fits(self, nbytes: int) -> bool:
        """Return True if `nbytes` of new entries certainly fit; False if unknown. The directory is not listed."""
        return self._evictor.certainly_fits(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Return True if a new entry of `nbytes` fits without an eviction, also if another process writes it."""
        return self._evictor.has_room(nbytes)

    def limit_bytes(self, held_bytes: int | None = None) -> int | None:
        """Return the current byte budget of the entries; None for no limit.

        A budget of "auto" is never below the bytes already stored. held_bytes: the result of `nbytes`, if known.
        """
        if self.capacity_bytes != "auto":
            return self.capacity_bytes
        held_bytes = self.nbytes() if held_bytes is None else held_bytes
        limit = max(held_bytes, auto_limit(self.kv_dir, held_bytes))
        return int(limit) if limit < math.inf else None

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every readable entry with its header, size and last use."""
        for path, stat in self._stats(ENTRY_SUFFIX):
            header = self.header(path.stem)
            if header is not None:
                yield StoreEntry(path.stem, stat.st_size, stat.st_mtime, header)

    def touch(self, key: str) -> None:
        """Record a use of an entry that a faster tier returned, so that `put` and `gc` keep it.

        The last use is the file's modification time, accurate to a minute. It is read and set at most once in
        TOUCH_INTERVAL_S, because a request touches every chunk that it gets from the memory tier.
        """
        if len(self._touched_s) >= TOUCHES_KEPT:
            self._touched_s.clear()
        self._touched_s[key] = now_s = time.time()
        # A due time beyond an interval from now means that the clock was set back and the time on disk may be ahead.
        if not now_s < self._touch_due_s.get(key, 0.0) <= now_s + TOUCH_INTERVAL_S:
            with suppress(UsageError):
                self._touch(key, self._path(key))

    def _touch(self, key: str, target: int | Path) -> None:
        """Set the modification time to now if it is off by TOUCH_INTERVAL_S. A read-only store keeps its times."""
        with suppress(OSError):
            now_s = time.time()
            used_s = (os.fstat(target) if isinstance(target, int) else target.stat()).st_mtime
            stale = abs(now_s - used_s) > TOUCH_INTERVAL_S  # also in the future: a clock was set back
            if len(self._touch_due_s) >= TOUCHES_KEPT:
                self._touch_due_s.clear()
            self._touch_due_s[key] = (now_s if stale else used_s) + TOUCH_INTERVAL_S
            if stale:
                os.utime(target)

    def verify(self) -> Iterator[EntryCheck]:
        """Read every byte of every entry, and yield an EntryCheck for each. Damaged files are moved aside.

        Intact files that were moved aside earlier are moved back. An entry is also damaged if it does not have its
        model's dtype and shapes: those of `set_expected_spec`, or else those in the store's metadata, if any.
        """
        for fingerprint, spec in self.model_specs().items():
            self._requirements.specs.setdefault(fingerprint, spec)
        for path in self._files(DAMAGED_SUFFIX):
            if (reason := self._damage_reason(path)) == "" and not os.path.lexists(path.with_suffix(ENTRY_SUFFIX)):
                with suppress(OSError):  # the store key was missing then, or the read error was temporary
                    path.replace(path.with_suffix(ENTRY_SUFFIX))
                    log.warning("stored KV %s is intact, so it was moved back to its place", path.stem)
            elif reason is not None:
                yield EntryCheck(path.stem, False, f"quarantined: {reason or 'an intact entry has taken its place'}")
        for path in self._files(ENTRY_SUFFIX):
            if (reason := self._damage_reason(path)) is not None:
                yield EntryCheck(path.stem, not reason, reason)

    def paths(self) -> Iterator[Path]:
        """Yield the paths of all entries' files, then those of files that were moved aside. No file is opened."""
        yield from self._files(ENTRY_SUFFIX)
        yield from self._files(DAMAGED_SUFFIX)

    def read_entry_file(self, path: Path) -> MemoryKV:
        """Read the whole entry in the file `path`. Raises DamagedEntryError or OSError. Moves no file."""
        try:
            return load_into_memory(DiskKV(path.stem, path, SharedFile(path), lambda *_: None, self._requirements))
        except UnreadableEntryError as error:
            raise DamagedEntryError(path.stem, str(error)) from error

    def has_file(self, key: str) -> bool:
        """Return True if the key has an entry file, intact or damaged. A file that was moved aside does not count."""
        return self._path(key).exists()

    def file_bytes(self, key: str) -> int:
        """Return the size of a key's entry file in bytes; 0 if there is none."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def has_evicted(self) -> bool:
        """True if a `put` ever evicted an entry (`gc` does not count). A missing entry may then be an evicted one."""
        return (self.kv_dir / EVICTED_MARK).exists()

    def drop_unreadable(self, key: str) -> None:
        """Delete the damaged file of `key` that was moved aside. Delete the entry file, too, if it cannot be read, or
        if it has another format version."""
        if self.contains(key):
            remove_file(self._path(key).with_suffix(DAMAGED_SUFFIX))
        else:
            self.delete(key)

    def delete_temporary_files(self) -> int:
        """Delete the temporary files of dead processes, and those older than an hour; return their number."""
        return self._directory.remove_stale_files() + self._entries.remove_stale_files()

    def gc(
        self, max_bytes: int | None = None, is_needed: Callable[[str], bool] | None = None, dry_run: bool = False
    ) -> GcResult:
        """Delete temporary files, damaged files, entries that are not needed, and the least recently used entries.

        - is_needed: is called with each key. If it returns False, the entry is deleted. If it returns True, the
          entry may still be evicted. None: all entries are needed.
        - max_bytes: the byte budget of the remaining entries; None evicts nothing.
        - dry_run: delete nothing, and return what would be deleted.

        Raises UsageError for a negative `max_bytes`. Raises StoreNotWritableError if some files could not be deleted.
        """
        if max_bytes is not None and max_bytes < 0:
            raise UsageError(f"max_bytes is {max_bytes}; choose 0 (empty the store) or more")
        leftovers = [*self._directory.find_stale_files(), *self._entries.find_stale_files()]
        quarantined = list(self._stats(DAMAGED_SUFFIX))
        entries = self._by_last_use()
        kept_bytes = sum(stat.st_size for _, stat in entries)
        unwanted = {path for path, _ in entries if is_needed is not None and not is_needed(path.stem)}
        kept_bytes -= sum(stat.st_size for path, stat in entries if path in unwanted)
        evicted = []
        for path, stat in entries:  # oldest first
            if path not in unwanted:
                if max_bytes is None or kept_bytes <= max_bytes:
                    continue
                kept_bytes -= stat.st_size
            evicted.append((path, stat))
        to_remove = leftovers + quarantined + evicted
        freed_bytes = sum(stat.st_size for _, stat in to_remove)
        keys = tuple(path.stem for path, _ in evicted)
        if not dry_run:
            self._remove(to_remove)
            self._count(num_evicted=len(evicted))
        return GcResult(keys, len(quarantined), len(leftovers), freed_bytes, kept_bytes)

    def _remove(self, files: Sequence[tuple[Path, os.stat_result]]) -> None:
        """Delete files, as many as possible. Raises StoreNotWritableError if some remain."""
        failure, num_kept, kept_bytes = "", 0, 0
        for path, stat in files:
            try:
                remove_file(path)  # no error if it was already deleted
            except StoreNotWritableError as error:
                failure, num_kept, kept_bytes = str(error), num_kept + 1, kept_bytes + stat.st_size
        self._evictor.invalidate()
        if num_kept:
            freed_bytes = sum(stat.st_size for _, stat in files) - kept_bytes
            raise StoreNotWritableError(
                f"{num_kept} of {len(files)} files could not be removed, {format_bytes(freed_bytes)} were freed and "
                f"{format_bytes(kept_bytes)} were not. {failure}"
            )

    def _by_last_use(self) -> list[tuple[Path, os.stat_result]]:
        """Return every entry, the least recently used first. A time in the future (a clock was set back) counts as
        now."""
        now_ns = time.time_ns()
        return sorted(self._stats(ENTRY_SUFFIX), key=lambda file: (min(file[1].st_mtime_ns, now_ns), file[0].stem))

    def _path(self, key: str) -> Path:
        return self.kv_dir / checked_name(key)[:2] / f"{key}{ENTRY_SUFFIX}"

    def _files(self, suffix: str) -> Iterator[Path]:
        """Yield the files of a suffix whose name is a key in the right directory, in order of their keys."""
        for path in sorted(self.kv_dir.glob(f"??/[!.]*{suffix}")):
            if NAME.fullmatch(path.stem) and path.stem[:2] == path.parent.name:
                yield path

    def _stats(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files(suffix):
            with suppress(OSError):  # deleted or quarantined since the listing, or a loop of links
                yield path, path.stat()

    def _damage_reason(self, path: Path) -> str | None:
        """Return why this file is not an intact entry of its name; "" if it is, None if it was deleted."""
        file = None
        try:
            file = SharedFile(path)
            DiskKV(path.stem, path, file, self._quarantine, self._requirements).verify(file)
        except FileNotFoundError:
            return None if not path.is_symlink() else "it is a symbolic link without a target"
        except (OSError, IncompatibleEntryError) as error:
            return str(error)
        except UnreadableEntryError as error:
            assert file is not None
            if path.suffix != DAMAGED_SUFFIX:
                self._quarantine(path.stem, path, file, str(error))
            return str(error)
        return ""

    def _quarantine(self, key: str, path: Path, file: SharedFile, reason: str, *, is_unsigned: bool = False) -> None:
        """Move a damaged file aside, unless another writer has already replaced it."""
        self._count(num_damaged=1, num_unsigned=int(is_unsigned))
        self._evictor.invalidate()
        aside = path.with_suffix(DAMAGED_SUFFIX)
        try:
            if os.path.samestat(os.fstat(file.fd), path.stat()):
                path.replace(aside)
                outcome = f"moved to {aside}"
            else:
                outcome = "already replaced by another writer"
        except OSError as error:
            outcome = f"not moved aside: {error}"
        if not is_unsigned:
            log.warning("stored KV %s is damaged (%s), %s; repair: ragblend verify --repair", key, reason, outcome)
            return
        # Only the first is a warning, because every entry of a store from before the key is unsigned.
        is_first, self._has_warned = not self._has_warned, True
        log.log(
            logging.WARNING if is_first else logging.INFO,
            "stored KV %s is not used: %s, %s. If you trust every entry of this store, sign them: ragblend sign "
            "--store %s; else prefill them again: ragblend verify --repair", key, reason, outcome, self.root,
        )  # fmt: skip
