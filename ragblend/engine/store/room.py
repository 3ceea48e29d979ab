"""Room in a directory of entries: a budget and quotas kept without looking, at every `put`, at what else is there.

A table in memory says what the directory holds. It follows what this process writes and reads, and is brought up to
date when others may have written much of a budget, or before something is evicted; only folders that changed are listed
then. An entry's namespace and what prefilling it again would cost stand in its header and never change for a key, so
`entries.jsonl` beside the entries remembers them: a header is read once in a store's life, not once per process.

Knows names, sizes and times of files, and how to ask for a header. Knows nothing about what else is in an entry.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ragblend.engine.store.eviction import Held, Ledger, Policy, recompute_cost
from ragblend.engine.store.kv import KVHeader
from ragblend.engine.store.sizes import format_bytes
from ragblend.errors import RagblendError, StoreFullError
from ragblend.files.directory import Directory, unlink
from ragblend.files.reading import open_file, read_file

ENTRY_SUFFIX, DAMAGED_SUFFIX = ".safetensors", ".damaged"
FACTS_FILE = "entries.jsonl"
EVICTED_MARK = "evicted"  # an empty file, once an entry had to leave for a budget: from then on not every one is missed
_FACTS_BYTES = 1 << 30
NAME = re.compile(r"[0-9A-Za-z_-]{3,128}")  # a key or fingerprint becomes a file name: no dots, no slashes

LOOK_SHARE = 1 / 16  # of the budget, or of a quota: after that many bytes written here, look at what others wrote
LOOK_INTERVAL_S = 1.0  # and before an eviction, if the last look is older
CLOCK_SLACK_S = 60.0  # an entry used later than that from now: a clock was set back
_SETTLED_S = 2.0  # a folder that changed a moment ago may change again without showing it: file times are coarse
_SPARE_LINES = 1000  # of `entries.jsonl`, beyond two per entry, before it is written anew

_Facts = tuple[str, float]  # namespace, cost


class Room:
    """Keeps the entries of a directory within `capacity_bytes` and `quotas`. Safe to share between threads.

    `read_header` reads an entry's header, None where it cannot. `pinned` says which entries stay. `evicted` is told of
    each that left.
    """

    def __init__(
        self,
        directory: Directory,
        capacity_bytes: int | None,
        policy: Policy,
        quotas: int | Mapping[str, int] | None,
        *,
        read_header: Callable[[str], KVHeader | None],
        pinned: Callable[[], AbstractSet[str]],
        evicted: Callable[[str], None],
    ) -> None:
        self._directory, self._root = directory, directory.root
        self._ledger = Ledger(capacity_bytes, policy, quotas)
        self._needs_facts = bool(self._ledger.quotas) or policy == "gdsf"
        self._read_header, self._pinned, self._evicted = read_header, pinned, evicted
        self._facts: dict[str, _Facts] | None = None  # of the file; None until the first look
        self._listed_ns: dict[str, int] = {}  # by folder, when it had changed last as it was listed
        self._damaged_bytes: dict[str, int] = {}  # by folder
        self._unseen_bytes: dict[str, int] = {}  # by namespace, written here since the last look
        self._looked_s: float | None = None  # None: to be looked at
        self._latest_s = 0.0
        self._lock = threading.Lock()  # of the ledger
        self._put_lock = threading.Lock()  # one entry at a time, so that two do not take the same room

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to keep; without, nothing is noted either."""
        return self._ledger.capacity_bytes is not None or bool(self._ledger.quotas)

    @contextmanager
    def for_entry(self, header: KVHeader, nbytes: int) -> Iterator[None]:
        """Make room for one entry, then let the caller write it. Raises StoreFullError when there cannot be any."""
        if not self.is_limited:
            yield
            return
        new, key = Held(nbytes, header.namespace, recompute_cost(header)), header.key
        with self._put_lock:
            self._make(key, new)
            yield
            with self._lock:
                is_new = key not in self._ledger
                self._ledger.hold(key, new, self._now_s())
                self._unseen_bytes[new.namespace] = self._unseen_bytes.get(new.namespace, 0) + nbytes
            if is_new:
                self._remember({key: (new.namespace, new.cost)})

    def read(self, header: KVHeader, nbytes: Callable[[], int]) -> None:
        """Note that an entry was read; `nbytes` is asked for its size if it is new here."""
        if self.is_limited:
            with self._lock:
                if header.key in self._ledger:
                    self._ledger.use(header.key, self._now_s())
                else:
                    new = Held(nbytes(), header.namespace, recompute_cost(header))
                    self._ledger.hold(header.key, new, self._now_s())

    def used(self, key: str) -> None:
        """Note a use of an entry, if it is known here."""
        if self.is_limited:
            with self._lock:
                if key in self._ledger:
                    self._ledger.use(key, self._now_s())

    def gone(self, key: str) -> None:
        """Note that an entry was deleted."""
        with self._lock:
            self._ledger.drop(key)

    def changed(self) -> None:
        """Note that entries were set aside, or removed by the dozen: the next `put` looks."""
        self._looked_s = None

    # -- making room

    def _make(self, key: str, new: Held) -> None:
        capacity, quota = self._ledger.capacity_bytes, self._ledger.quotas.of(new.namespace)
        for size, what, setting in ((capacity, "the disk budget", "disk_gib"), (quota, "the quota", "quota_gib")):
            if size is not None and new.nbytes > size:
                raise StoreFullError(
                    f"chunk {key} needs {format_bytes(new.nbytes)}, {what} of {self._root} is {format_bytes(size)} "
                    f"in all; raise {setting}"
                )
        is_fresh = self._looked_s is None or self._much_is_unseen(new.namespace)
        if is_fresh:
            self._look()
        while self._lacks(key, new):
            is_old = time.monotonic() - (self._looked_s or 0.0) > LOOK_INTERVAL_S
            leaving = None if is_old and not is_fresh else self._choose(key, new)
            if leaving is not None:
                self._remove(leaving)
            elif not is_fresh:
                self._look()
                is_fresh = True
            else:
                raise StoreFullError(
                    f"chunk {key} needs {format_bytes(new.nbytes)}, pinned entries leave no room for it in "
                    f"{self._root}; unpin a document (ragblend unpin DOC), or raise disk_gib or quota_gib"
                )

    def _lacks(self, key: str, new: Held) -> bool:
        with self._lock:
            return max(self._ledger.excess(key, new, sum(self._damaged_bytes.values()))) > 0

    def _choose(self, key: str, new: Held) -> list[str] | None:
        pinned = self._pinned()
        with self._lock:
            return self._ledger.to_leave(key, new, pinned, sum(self._damaged_bytes.values()))

    def _remove(self, leaving: Iterable[str]) -> None:
        """Remove entries, up to one that another process has used or removed meanwhile: then it is chosen again."""
        for key in leaving:
            path = self._root / key[:2] / f"{key}{ENTRY_SUFFIX}"
            try:
                used_s = path.stat().st_mtime
            except FileNotFoundError:
                self.gone(key)
                self._look()
                return
            with self._lock:
                ranking = self._ledger.ranking
                if ranking.policy == "lru" and key in self._ledger and used_s > ranking.used_s(key):
                    self._ledger.use(key, used_s)
                    return
            self._mark()
            if unlink(path):
                self._evicted(key)
            with self._lock:
                self._ledger.drop(key, evicted=True)

    def _mark(self) -> None:
        """Say, before an entry leaves, that some do."""
        mark = self._root / EVICTED_MARK
        with suppress(OSError):
            if not mark.exists():
                mark.touch()

    # -- looking at the directory

    def _much_is_unseen(self, namespace: str) -> bool:
        limits = (
            (self._ledger.capacity_bytes, sum(self._unseen_bytes.values())),
            (self._ledger.quotas.of(namespace), self._unseen_bytes.get(namespace, 0)),
        )
        return any(limit is not None and written >= limit * LOOK_SHARE for limit, written in limits)

    def _look(self) -> None:
        """Bring the ledger up to what the directory holds."""
        now_s, found = time.time(), dict[str, os.stat_result]()
        expected = self._by_folder()
        for folder in _folders(self._root):
            try:
                changed_ns = folder.stat().st_mtime_ns  # before it is listed: a change meanwhile shows next time
                files = self._list(folder) if self._listed_ns.get(folder.name) != changed_ns else None
            except OSError:  # what cannot be listed stays as it was known
                files = None
            if files is None:
                expected.pop(folder.name, None)
                continue
            found |= files
            is_settled = now_s - changed_ns / 1e9 > _SETTLED_S
            self._listed_ns[folder.name] = changed_ns if is_settled else -1
        with self._lock:
            for key in set().union(*expected.values()).difference(found):
                self._ledger.drop(key)
            new = [key for key in found if key not in self._ledger]
        facts = self._facts_of(new)
        with self._lock:
            for key in sorted(new, key=lambda key: (found[key].st_mtime_ns, key)):  # the oldest first
                stat = found[key]
                self._ledger.hold(key, Held(stat.st_size, *facts[key]), min(stat.st_mtime, now_s))
            self._unseen_bytes.clear()
        self._looked_s = time.monotonic()

    def _by_folder(self) -> dict[str, set[str]]:
        """The keys of the ledger."""
        folders: dict[str, set[str]] = {}
        with self._lock:
            for key in self._ledger:
                folders.setdefault(key[:2], set()).add(key)
        return folders

    def _list(self, folder: os.DirEntry[str]) -> dict[str, os.stat_result]:
        """The entries of one folder. Times that lie ahead (a clock went back) become now. Damaged files are counted;
        where a budget is to be kept they are removed, before any entry is."""
        found, damaged_bytes, now_s = {}, 0, time.time()
        with os.scandir(folder.path) as files:
            for file in files:
                key, suffix = os.path.splitext(file.name)  # noqa: PTH122 (a million names)
                if suffix not in (ENTRY_SUFFIX, DAMAGED_SUFFIX) or key[:2] != folder.name or not NAME.fullmatch(key):
                    continue
                with suppress(FileNotFoundError):  # deleted or quarantined meanwhile
                    stat = file.stat()
                    if suffix == DAMAGED_SUFFIX:
                        is_removed = self._ledger.capacity_bytes is not None and unlink(Path(file.path))
                        damaged_bytes += 0 if is_removed else stat.st_size
                        continue
                    if stat.st_mtime > now_s + CLOCK_SLACK_S:
                        with suppress(OSError):
                            os.utime(file.path, (now_s, now_s))
                    found[key] = stat
        self._damaged_bytes[folder.name] = damaged_bytes
        return found

    def _now_s(self) -> float:
        """Now, and never before an earlier answer: uses in this process are in the order of their turns."""
        self._latest_s = max(time.time(), self._latest_s)
        return self._latest_s

    # -- what stands in headers

    def _facts_of(self, keys: list[str]) -> dict[str, _Facts]:
        """Namespace and cost of entries that are new here; an unreadable one is worth nothing."""
        if not self._needs_facts:
            return dict.fromkeys(keys, ("", 0.0))
        known, num_lines = self._facts_on_disk() if self._facts is None else (self._facts, 0)
        found, read = {}, dict[str, _Facts]()
        for key in keys:
            facts = known.get(key)
            if facts is None and (header := self._read_header(key)) is not None:
                facts = read[key] = header.namespace, recompute_cost(header)
            found[key] = facts or ("", 0.0)
        if num_lines > 2 * len(keys) + _SPARE_LINES:
            data = _lines({**{key: known[key] for key in keys if key in known}, **read})
            with suppress(RagblendError):
                self._directory.replace(self._root / FACTS_FILE, len(data), lambda stream: stream.write(data))
        else:
            self._remember(read)
        self._facts = {}  # entries that others store from now on are read one by one
        return found

    def _facts_on_disk(self) -> tuple[dict[str, _Facts], int]:
        """What `entries.jsonl` remembers, and its number of lines; one that was cut short or has changed is skipped."""
        found, num_lines = dict[str, _Facts](), 0
        with suppress(OSError), io.BytesIO(read_file(self._root / FACTS_FILE, _FACTS_BYTES)) as lines:
            for num_lines, line in enumerate(lines, start=1):  # noqa: B007 (the last one is returned)
                with suppress(ValueError, TypeError, RecursionError):
                    key, namespace, cost, _ = json.loads(line)
                    if line == _lines({key: (namespace, cost)}):
                        found[key] = namespace, float(cost)
        return found, num_lines

    def _remember(self, facts: Mapping[str, Any]) -> None:
        """Append to `entries.jsonl`, as several processes may at once. What it lacks costs reading a header again."""
        if not self._needs_facts or not facts:
            return
        with suppress(OSError):  # read-only, or full: the entries are what matters
            handle = open_file(self._root / FACTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(handle, _lines(facts))
            finally:
                os.close(handle)


def _lines(facts: Mapping[str, _Facts]) -> bytes:
    """One line per entry, with its checksum last."""
    rows = ([key, *each, zlib.crc32(json.dumps([key, *each]).encode())] for key, each in facts.items())
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _folders(root: Path) -> list[os.DirEntry[str]]:
    """The folders that entries are in."""
    with os.scandir(root) as found:
        return [each for each in found if len(each.name) == 2 and each.is_dir()]
