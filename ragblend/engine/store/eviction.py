"""Room in a directory of entries: a budget kept without looking, at every `put`, at what else is there.

A table in memory says what the directory holds. It follows what this process writes and reads, and is brought up to
date when others may have written much of the budget, or before something is evicted; only folders that changed are
listed then. What was used least recently leaves first.

A budget of "auto" follows the disk: the store grows until it holds as much as it leaves free. Others that fill the disk
end its growth and take nothing of what it holds: at its limit each new entry takes the place of the oldest ones.

Knows names, sizes and times of files. Knows nothing about what is in an entry.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from ragblend.engine.store.sizes import format_bytes
from ragblend.errors import StoreFullError
from ragblend.files.directory import unlink

ENTRY_SUFFIX, DAMAGED_SUFFIX = ".safetensors", ".damaged"
EVICTED_MARK = "evicted"  # an empty file, once an entry had to leave for a budget: from then on not every one is missed
NAME = re.compile(r"[0-9A-Za-z_-]{3,128}")  # a key or fingerprint becomes a file name: no dots, no slashes

Capacity = int | Literal["auto"] | None
"""Bytes of a directory's entries; "auto": AUTO_SHARE of what is free and theirs already; None: no limit."""
# Half leaves as much to everybody else (models, logs, a second store) as the store takes, and two stores on one disk do
# not starve each other: each sees what the other holds as taken.
AUTO_SHARE = 0.5

RESCAN_SHARE = 1 / 16  # of the budget: after that many bytes written here, look at what others wrote
RESCAN_INTERVAL_S = 1.0  # and before an eviction, if the last look is older
CLOCK_SLACK_S = 60.0  # an entry used later than that from now: a clock was set back
_SETTLED_S = 2.0  # a folder that changed a moment ago may change again without showing it: file times are coarse


class _TrackedEntry(NamedTuple):
    nbytes: int
    used_s: float


class DiskEvictor:
    """Keeps the entries of the directory `root` within `capacity`; None is no limit, and nothing is noted then.

    `pinned` says which entries stay. `evicted` is told of each that left. Safe to share between threads.
    """

    def __init__(
        self,
        root: Path,
        capacity: Capacity,
        *,
        pinned: Callable[[], AbstractSet[str]],
        evicted: Callable[[str], None],
    ) -> None:
        self._root, self._capacity = root, capacity
        self._pinned, self._evicted = pinned, evicted
        self._held: OrderedDict[str, _TrackedEntry] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._kept_bytes = 0  # held at most, less what was deleted on purpose: "auto" takes none of it away
        self._listed_ns: dict[str, int] = {}  # by folder, when it had changed last as it was listed
        self._damaged_bytes: dict[str, int] = {}  # by folder
        self._unseen_bytes = 0  # written here since the last look
        self._looked_s: float | None = None  # None: to be looked at
        self._latest_s = 0.0
        self._lock = threading.Lock()  # of the table
        self._put_lock = threading.Lock()  # one entry at a time, so that two do not take the same room

    @contextmanager
    def reserve(self, key: str, nbytes: int) -> Iterator[None]:
        """Make room for one entry, then let the caller write it. Raises StoreFullError when there cannot be any."""
        if self._capacity is None:
            yield
            return
        with self._put_lock:
            self._evict_for(key, nbytes)
            yield
            with self._lock:
                self._track(key, nbytes, self._now_s())
                self._unseen_bytes += nbytes

    def record_use(self, key: str, nbytes: Callable[[], int] | None = None) -> None:
        """Note a use of an entry. One that is new here is held if `nbytes` can be asked for its size."""
        if self._capacity is not None:
            with self._lock:
                if key in self._held:
                    self._track(key, self._held[key].nbytes, self._now_s())
                elif nbytes is not None:
                    self._track(key, nbytes(), self._now_s())

    def record_delete(self, key: str) -> None:
        """Note that an entry was deleted."""
        with self._lock:
            self._kept_bytes -= self._untrack(key)

    def held_bytes(self, max_age_s: float = 0.0) -> int:
        """Return the bytes of all entries, damaged ones included. Only folders that changed since are listed; where the
        directory cannot be listed at all, the bytes are those of the last time.

        max_age_s: what others wrote in that many seconds may be missing, if a budget has this process follow its own.
        """
        with self._put_lock:
            age_s = time.monotonic() - self._looked_s if self._looked_s is not None else math.inf
            if self._capacity is None or age_s >= max_age_s:
                with suppress(OSError):
                    self._rescan(removes_damaged=False)
            with self._lock:
                return self._used_bytes + sum(self._damaged_bytes.values())

    def invalidate(self) -> None:
        """Note that entries were set aside, or removed by the dozen: the next `put` looks."""
        self._looked_s = None

    # -- the table; callers hold its lock

    def _track(self, key: str, nbytes: int, used_s: float) -> None:
        self._untrack(key)
        self._held[key] = _TrackedEntry(nbytes, used_s)
        self._used_bytes += nbytes

    def _untrack(self, key: str) -> int:
        """Hold an entry no longer; the bytes that it held."""
        held = self._held.pop(key, None)
        nbytes = held.nbytes if held is not None else 0
        self._used_bytes -= nbytes
        return nbytes

    def _now_s(self) -> float:
        """Now, and never before an earlier answer: uses in this process are in the order of their turns."""
        self._latest_s = max(time.time(), self._latest_s)
        return self._latest_s

    # -- making room

    def _evict_for(self, key: str, nbytes: int) -> None:
        is_fresh = self._looked_s is None or self._unseen_bytes >= self._limit() * RESCAN_SHARE
        if is_fresh:
            self._rescan()
        limit = self._limit()  # it holds for this entry: what leaves to make room does not lower it
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
                    f"chunk {key} needs {format_bytes(nbytes)}, pinned entries leave no room for it in {self._root}; "
                    f"unpin a document (ragblend unpin DOC), or raise disk_gib{self._full_reason()}"
                )

    def _limit(self) -> float:
        """Bytes that the entries may hold together now."""
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
        """By how many bytes `key` would exceed the limit."""
        with self._lock:
            own_bytes = self._held[key].nbytes if key in self._held else 0
            return self._used_bytes - own_bytes + sum(self._damaged_bytes.values()) + nbytes - limit

    def _choose_victims(self, key: str, excess_bytes: float) -> list[str] | None:
        """Entries to remove, first to leave first; None when pinned ones leave no room."""
        spared = {*self._pinned(), key}
        with self._lock:
            leaving = []
            for other, held in self._held.items():
                if excess_bytes <= 0:
                    break
                if other not in spared:
                    leaving.append(other)
                    excess_bytes -= held.nbytes
            return leaving if excess_bytes <= 0 else None

    def _remove(self, leaving: Iterable[str]) -> None:
        """Remove entries, up to one that another process has used or removed meanwhile: then it is chosen again."""
        for key in leaving:
            path = self._root / key[:2] / f"{key}{ENTRY_SUFFIX}"
            try:
                used_s = path.stat().st_mtime
            except FileNotFoundError:
                self.record_delete(key)
                self._rescan()
                return
            with self._lock:
                held = self._held.get(key)
                if held is not None and used_s > held.used_s:
                    self._track(key, held.nbytes, used_s)
                    return
            self._mark()
            if unlink(path):
                self._evicted(key)
            with self._lock:
                self._untrack(key)

    def _mark(self) -> None:
        """Say, before an entry leaves, that some do."""
        mark = self._root / EVICTED_MARK
        with suppress(OSError):
            if not mark.exists():
                mark.touch()

    # -- looking at the directory

    def _rescan(self, *, removes_damaged: bool = True) -> None:
        """Bring the table up to what the directory holds. Damaged files are removed, or counted."""
        now_s, found, kept, damaged_bytes = time.time(), dict[str, os.stat_result](), set[str](), dict[str, int]()
        for folder in _folders(self._root):
            try:
                changed_ns = folder.stat().st_mtime_ns  # before it is listed: a change meanwhile shows next time
                is_known = self._listed_ns.get(folder.name) == changed_ns
                files = None if is_known else self._list(folder, removes_damaged, damaged_bytes)
            except OSError:  # what cannot be listed stays as it was known
                files = None
            if files is None:
                kept.add(folder.name)
                damaged_bytes[folder.name] = self._damaged_bytes.get(folder.name, 0)
                continue
            found |= files
            is_settled = now_s - changed_ns / 1e9 > _SETTLED_S and not damaged_bytes[folder.name]
            self._listed_ns[folder.name] = changed_ns if is_settled else -1
        with self._lock:
            self._damaged_bytes = damaged_bytes
            for key in [key for key in self._held if key[:2] not in kept and key not in found]:
                self._kept_bytes -= self._untrack(key)
            new = [
                key for key, stat in found.items() if key not in self._held or self._held[key].nbytes != stat.st_size
            ]
            for key in new:
                self._track(key, found[key].st_size, min(found[key].st_mtime, now_s))
            if new:
                self._held = OrderedDict(sorted(self._held.items(), key=lambda item: (item[1].used_s, item[0])))
            self._unseen_bytes = 0
        self._looked_s = time.monotonic()

    def _list(
        self, folder: os.DirEntry[str], removes_damaged: bool, damaged_of: dict[str, int]
    ) -> dict[str, os.stat_result]:
        """Return the entries of one folder. Times that lie ahead (a clock went back) become now. Damaged files are
        removed, before any entry is, where `removes_damaged`; the bytes of others are put into `damaged_of`."""
        found, damaged_bytes, now_s = {}, 0, time.time()
        with os.scandir(folder.path) as files:
            for file in files:
                key, suffix = os.path.splitext(file.name)  # noqa: PTH122 (a million names)
                if suffix not in (ENTRY_SUFFIX, DAMAGED_SUFFIX) or key[:2] != folder.name or not NAME.fullmatch(key):
                    continue
                with suppress(FileNotFoundError):  # deleted or quarantined meanwhile
                    stat = file.stat()
                    if suffix == DAMAGED_SUFFIX:
                        is_removed = removes_damaged and unlink(Path(file.path))
                        damaged_bytes += 0 if is_removed else stat.st_size
                        continue
                    if stat.st_mtime > now_s + CLOCK_SLACK_S:
                        with suppress(OSError):
                            os.utime(file.path, (now_s, now_s))
                    found[key] = stat
        damaged_of[folder.name] = damaged_bytes
        return found


def auto_limit(root: Path, held_bytes: int) -> float:
    """How far entries in `root` that hold `held_bytes` may grow by themselves: AUTO_SHARE of what is free and theirs.

    Infinite where the file system does not say how large it is."""
    try:
        disk = shutil.disk_usage(root if root.is_dir() else root.parent)  # the first entry makes the folder
    except OSError:
        return math.inf
    return AUTO_SHARE * (disk.free + held_bytes) if disk.total else math.inf


def _folders(root: Path) -> list[os.DirEntry[str]]:
    """The folders that entries are in; none where somebody has removed the root, which a write makes again."""
    try:
        with os.scandir(root) as found:
            return [each for each in found if len(each.name) == 2 and each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
