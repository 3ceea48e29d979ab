"""Eviction from a directory of entries under a byte budget. The least recently used entry is evicted first.

A `put` does not list the directory: a table in memory has its entries, and this process updates the table when it reads
or writes one. Other processes write, too. Therefore the folders that have changed are listed again before an eviction,
and whenever this process has written a sixteenth of the budget.

A budget of "auto" depends on the disk: the store grows until it holds as much as it leaves free. If other programs fill
the disk, the store stops growing and keeps its size: each new entry then replaces the least recently used ones.

Works on names, sizes and times of files. Does not depend on what an entry contains.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from ragblend.engine.store.format.sizes import format_bytes
from ragblend.errors import StoreFullError
from ragblend.files.directory import try_remove_file
from ragblend.files.store_folder import DAMAGED_SUFFIX, ENTRY_SUFFIX, EVICTED_MARK

log = logging.getLogger(__name__)

NAME = re.compile(r"[0-9A-Za-z_-]{3,128}")  # a key or fingerprint becomes a file name: no dots, no slashes

Capacity = int | Literal["auto"] | None
"""Byte budget of a directory's entries. "auto": AUTO_SHARE of (their bytes + the free space); None: no limit."""
# Half leaves as much to other programs (models, logs, a second store) as the store takes. Two stores on one disk do not
# starve each other, because each counts the other's bytes as used.
AUTO_SHARE = 0.5

RESCAN_SHARE = 1 / 16  # of the budget: after that many bytes written here, the directory is listed again
RESCAN_INTERVAL_S = 1.0  # before an eviction, the directory is listed again if the last listing is older
_ROOM_LASTS_S = 30.0  # longest age of the listing that `has_room` uses
_SETTLED_S = 2.0  # a folder that changed a moment ago may change again without showing it: file times are coarse


class _TrackedEntry(NamedTuple):
    nbytes: int
    used_s: float


class DiskEvictor:
    """Evicts entries of the directory `root`, so that together they take at most `capacity` bytes.

    A table in memory has the size and last use of each known entry. With `capacity` None, nothing is evicted.
    `evicted` is called with the key of each evicted entry. `touched_s`: times of uses that are not in the table and
    perhaps not yet in a file's time, in seconds since the epoch. Safe to share between threads.
    """

    def __init__(
        self,
        root: Path,
        capacity: Capacity,
        *,
        evicted: Callable[[str], None],
        touched_s: Mapping[str, float],
    ) -> None:
        self._root, self._capacity = root, capacity
        self._evicted, self._touched_s = evicted, touched_s
        self._held: OrderedDict[str, _TrackedEntry] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._kept_bytes = 0  # the largest bytes held, less deleted ones: "auto" does not evict below it
        self._listed_ns: dict[str, int] = {}  # by folder, its modification time when it was listed
        self._damaged_bytes: dict[str, int] = {}  # by folder
        self._unseen_bytes = 0  # written here since the last listing
        self._looked_s: float | None = None  # time of the last listing; None: outdated
        self._has_evicted = False
        self._lock = threading.Lock()  # of the table
        self._put_lock = threading.Lock()  # one entry at a time, so that two writers do not use the same free bytes

    @contextmanager
    def reserve(self, key: str, nbytes: int) -> Iterator[None]:
        """Context manager: evict entries until a new entry of `nbytes` fits. The caller writes it inside the block.

        Raises StoreFullError if the entry exceeds the budget, less the size of damaged files that cannot be deleted.
        """
        if self._capacity is None or (self._looked_s is None and self.certainly_fits(nbytes)):
            yield
            return
        with self._put_lock:
            self._evict_for(key, nbytes)
            yield
            with self._lock:
                self._track(key, nbytes)
                self._unseen_bytes += nbytes

    def certainly_fits(self, nbytes: int) -> bool:
        """Return True if an entry of `nbytes` fits for certain; False if that is not known.

        Lists no folder, because a million entries take seconds to list. The stored entries are at most as large as the
        used bytes of the whole disk. If these bytes and the new entry are within the budget, the entry fits.
        """
        if self._capacity is None:
            return True
        try:
            total_bytes, free_bytes = _disk_size(self._root)
        except OSError:
            return False
        limit = AUTO_SHARE * total_bytes if self._capacity == "auto" else self._capacity
        return total_bytes - free_bytes + nbytes <= limit

    def has_room(self, nbytes: int) -> bool:
        """Return True if an entry of `nbytes` fits without an eviction. The caller then writes it, in any process.

        The folders that have changed are listed again near the limit, and once a sixteenth of it was asked for.
        """
        if self.certainly_fits(nbytes):
            return True
        with self._put_lock:
            is_seen = self._looked_s is not None and time.monotonic() - self._looked_s < _ROOM_LASTS_S
            unseen_bytes = self._unseen_bytes + nbytes
            if not is_seen or self._excess("", unseen_bytes, self._limit() * (1 - RESCAN_SHARE)) > 0:
                with suppress(OSError):
                    self._rescan(removes_damaged=False)
                unseen_bytes = nbytes
            has_room = self._excess("", unseen_bytes, self._limit()) <= 0
            self._unseen_bytes = unseen_bytes if has_room else unseen_bytes - nbytes
            return has_room

    def record_use(self, key: str, nbytes: int) -> None:
        """Record in the table that an entry of `nbytes` was read now."""
        if self._capacity is not None:
            with self._lock:
                self._track(key, nbytes)

    def record_delete(self, key: str) -> None:
        """Remove a deleted entry from the table."""
        with self._lock:
            self._kept_bytes -= self._untrack(key)

    def held_bytes(self, max_age_s: float = 0.0) -> int:
        """Return the size in bytes of all entries, damaged ones included.

        max_age_s: if the last listing is older, the folders that have changed are listed again. Changes by other
        processes since that listing are not counted. Without a budget, before the first listing and after `invalidate`
        the folders are always listed. If folders cannot be listed, the last known size is returned.
        """
        with self._put_lock:
            is_old = self._looked_s is None or time.monotonic() - self._looked_s >= max_age_s
            if is_old or self._capacity is None:
                with suppress(OSError):
                    self._rescan(removes_damaged=False)
            with self._lock:
                return self._used_bytes + sum(self._damaged_bytes.values())

    def invalidate(self) -> None:
        """Mark the table as outdated. The next `put` lists the directory, unless its entry certainly fits."""
        self._looked_s = None

    # -- the table; callers hold its lock

    def _track(self, key: str, nbytes: int, used_s: float | None = None) -> None:
        self._untrack(key)
        self._held[key] = _TrackedEntry(nbytes, time.time() if used_s is None else used_s)
        self._used_bytes += nbytes

    def _untrack(self, key: str) -> int:
        """Remove an entry from the table; return its size in bytes, 0 for an unknown entry."""
        entry = self._held.pop(key, None)
        nbytes = entry.nbytes if entry is not None else 0
        self._used_bytes -= nbytes
        return nbytes

    # -- evicting

    def _evict_for(self, key: str, nbytes: int) -> None:
        is_fresh = self._looked_s is None or self._unseen_bytes >= self._limit() * RESCAN_SHARE
        if is_fresh:
            self._rescan()
        limit = self._limit()  # fixed for this entry: evictions for it do not lower the limit
        if nbytes > limit:
            raise StoreFullError(
                f"chunk {key} needs {format_bytes(nbytes)}, the disk budget of {self._root} is "
                f"{format_bytes(int(limit))} in all{self._full_reason()}; raise disk_gib"
            )
        while (excess_bytes := self._excess(key, nbytes, limit)) > 0:
            is_old = time.monotonic() - (self._looked_s or 0.0) > RESCAN_INTERVAL_S
            leaving = None if is_old and not is_fresh else self._choose_victims(key, excess_bytes)
            if leaving is not None:
                self._remove(leaving)
            elif not is_fresh:
                self._rescan()
                is_fresh, limit = True, self._limit()
            else:
                raise StoreFullError(
                    f"chunk {key} needs {format_bytes(nbytes)}, and evicting all other entries leaves no room for it "
                    f"in the budget of {self._root}, {format_bytes(int(limit))}{self._full_reason()}; delete its "
                    f"*{DAMAGED_SUFFIX} files, or raise disk_gib"
                )

    def _limit(self) -> float:
        """Return the current byte budget of all entries."""
        assert self._capacity is not None
        if self._capacity != "auto":
            return self._capacity
        with self._lock:
            held_bytes = self._used_bytes + sum(self._damaged_bytes.values())
            self._kept_bytes = max(self._kept_bytes, held_bytes)
            return max(self._kept_bytes, auto_limit(self._root, held_bytes))

    def _full_reason(self) -> str:
        return ' ("auto", as much as it leaves free on its disk)' if self._capacity == "auto" else ""

    def _excess(self, key: str, nbytes: int, limit: float) -> float:
        """Return the number of bytes by which an entry of `nbytes` under `key` would exceed the limit."""
        with self._lock:
            own_bytes = self._held[key].nbytes if key in self._held else 0
            return self._used_bytes - own_bytes + sum(self._damaged_bytes.values()) + nbytes - limit

    def _choose_victims(self, key: str, excess_bytes: float) -> list[str] | None:
        """Return the entries to evict, in order; None if evicting all others frees too little space."""
        with self._lock:
            leaving = []
            for other, entry in self._held.items():
                if excess_bytes <= 0:
                    break
                if other != key:
                    leaving.append(other)
                    excess_bytes -= entry.nbytes
            return leaving if excess_bytes <= 0 else None

    def _remove(self, leaving: Iterable[str]) -> None:
        """Delete entries in order, until one that another process used or deleted. The caller then chooses again."""
        for key in leaving:
            path = self._root / key[:2] / f"{key}{ENTRY_SUFFIX}"
            try:
                used_s = max(path.stat().st_mtime, self._touched_s.get(key, 0.0))
            except FileNotFoundError:
                self.record_delete(key)
                self._rescan()
                return
            with self._lock:
                entry = self._held.get(key)
                if entry is not None and used_s > entry.used_s:
                    self._track(key, entry.nbytes, used_s)
                    return
            self._mark()
            if try_remove_file(path):
                self._evicted(key)
            with self._lock:
                self._untrack(key)

    def _mark(self) -> None:
        """Log the first eviction of this process, and create the mark that this store evicts entries."""
        if not self._has_evicted:
            self._has_evicted = True
            log.warning(
                "the store %s has reached its budget of %s%s: new KV evicts the least recently used KV, also of "
                "ingested documents. Set a larger budget (disk_gib)",
                self._root,
                format_bytes(int(self._limit())),
                self._full_reason(),
            )
        mark = self._root / EVICTED_MARK
        with suppress(OSError):
            if not mark.exists():
                mark.touch()

    # -- listing the directory

    def _rescan(self, *, removes_damaged: bool = True) -> None:
        """Update the table from the directory. Damaged files are deleted, or counted."""
        now_s, listed, kept, damaged_bytes = time.time(), dict[str, _TrackedEntry](), set[str](), dict[str, int]()
        for folder in _folders(self._root):
            try:
                changed_ns = folder.stat().st_mtime_ns  # before the listing, so that a later change is seen next time
                is_known = self._listed_ns.get(folder.name) == changed_ns
                files = None if is_known else self._list(folder, removes_damaged, damaged_bytes)
            except OSError:  # a folder that cannot be listed keeps its known entries
                files = None
            if files is None:
                kept.add(folder.name)
                damaged_bytes[folder.name] = self._damaged_bytes.get(folder.name, 0)
                continue
            listed |= files
            is_settled = now_s - changed_ns / 1e9 > _SETTLED_S and not damaged_bytes[folder.name]
            self._listed_ns[folder.name] = changed_ns if is_settled else -1
        with self._lock:
            self._damaged_bytes = damaged_bytes
            for key in [key for key in self._held if key[:2] not in kept and key not in listed]:
                self._kept_bytes -= self._untrack(key)
            new = {
                key: entry
                for key, entry in listed.items()
                if (tracked := self._held.get(key)) is None or tracked.nbytes != entry.nbytes
            }
            if new:
                entries = {**self._held, **new}
                self._held = OrderedDict(sorted(entries.items(), key=lambda item: (item[1].used_s, item[0])))
                self._used_bytes = sum(entry.nbytes for entry in entries.values())
            self._unseen_bytes = 0
        self._looked_s = time.monotonic()

    def _list(
        self, folder: os.DirEntry[str], removes_damaged: bool, damaged_of: dict[str, int]
    ) -> dict[str, _TrackedEntry]:
        """Return the entries of one folder. A time in the future (a clock was set back) counts as now.

        Damaged files are deleted first if `removes_damaged`; the bytes of the others are put into `damaged_of`.
        """
        entries, damaged_bytes, now_s, name = {}, 0, time.time(), folder.name
        with os.scandir(folder.path) as files:
            for file in files:
                key, dot, suffix = file.name.rpartition(".")
                if dot + suffix not in (ENTRY_SUFFIX, DAMAGED_SUFFIX) or key[:2] != name or not NAME.fullmatch(key):
                    continue
                try:
                    stat = file.stat()
                except FileNotFoundError:  # deleted or quarantined since the listing
                    continue
                if dot + suffix == DAMAGED_SUFFIX:
                    is_removed = removes_damaged and try_remove_file(Path(file.path))
                    damaged_bytes += 0 if is_removed else stat.st_size
                    continue
                entries[key] = _TrackedEntry(stat.st_size, min(stat.st_mtime, now_s))
        damaged_of[folder.name] = damaged_bytes
        return entries


def auto_limit(root: Path, held_bytes: int) -> float:
    """Return the budget, in bytes, of the entries in `root` for the capacity "auto".

    The budget is AUTO_SHARE of (`held_bytes` + free space of the disk). held_bytes: the size of all entries now. The
    budget is infinite if the file system does not report its size.
    """
    try:
        total_bytes, free_bytes = _disk_size(root)
    except OSError:
        return math.inf
    return AUTO_SHARE * (free_bytes + held_bytes) if total_bytes else math.inf


def _disk_size(root: Path) -> tuple[int, int]:
    """Return the total and the free bytes of the disk of `root`, a folder that the first entry creates."""
    disk = shutil.disk_usage(root if root.is_dir() else root.parent)
    return disk.total, disk.free


def _folders(root: Path) -> list[os.DirEntry[str]]:
    """Return the folders of entries; none if the root was deleted, which the next write creates again."""
    try:
        with os.scandir(root) as children:
            return [each for each in children if len(each.name) == 2 and each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
