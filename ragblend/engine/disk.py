"""The durable tier: a directory of chunk files, shared by threads, processes and hosts.

    ROOT/ab/abcdef....safetensors   an entry; `.damaged` instead of `.safetensors` once it failed a checksum
    ROOT/models/FINGERPRINT.json    whose KV the store holds

An entry appears in one step and whole, is set aside when it turns out damaged, and goes when `gc` needs its room.
Works on names, files and directories; `chunk_file` knows what is inside an entry. Knows nothing about models,
prompts or other tiers.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_128_hexdigest

from ragblend.engine.chunk_file import DiskKV, MismatchError, OpenFile, UnreadableError, header_nbytes, write_chunk
from ragblend.engine.kv import ChunkKV, KVHeader, in_memory
from ragblend.engine.protocols import StoreCounters
from ragblend.errors import NotFoundError, RagblendError, StoreFullError, StoreNotWritableError, UsageError

log = logging.getLogger(__name__)

ENTRY_SUFFIX, DAMAGED_SUFFIX, TEMP_SUFFIX = ".safetensors", ".damaged", ".tmp"
MODELS_DIR = "models"
TOUCH_INTERVAL_S = 60.0  # last use is known to the minute, so a hot entry costs one utime a minute
TEMP_MAX_AGE_S = 3600.0

_NAME = re.compile(r"[0-9A-Za-z_-]{3,128}")  # a key or fingerprint becomes a file name: no dots, no slashes
# Temp files name their host: a process id says nothing about a writer on another machine of a shared file system.
_HOST = xxh3_128_hexdigest(platform.node().encode())[:8]


class StoreEntry(NamedTuple):
    """One stored chunk. `nbytes` is the file's size, `last_used_s` seconds since the epoch, to the minute."""

    key: str
    nbytes: int
    last_used_s: float
    header: KVHeader


class VerifyResult(NamedTuple):
    """Whether every byte of one file is what was written; `reason` is empty when it is."""

    key: str
    ok: bool
    reason: str


class GcResult(NamedTuple):
    """What `gc` removed, or would remove: evicted keys, quarantined and leftover temp files, and the bytes."""

    evicted: tuple[str, ...]
    num_quarantined: int
    num_temp_files: int
    freed_bytes: int
    kept_bytes: int


class DiskStore:
    """KVStore in a directory, safe to share between threads and processes.

    `fsync=False` is for tests and scratch stores: a power cut may then lose or damage the latest entries (which the
    checksums notice). `create=False` raises NotFoundError when `root` does not exist.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, create: bool = True) -> None:
        self.root = Path(root)
        self._fsync = fsync
        self._counters = StoreCounters()
        self._lock = threading.Lock()
        if not create and not self.root.is_dir():
            raise NotFoundError(f"no store at {self.root}; fill one with: ragblend ingest DOCS --store {self.root}")
        try:
            self._make_directory(self.root)
        except OSError as error:
            raise self._write_error(error, self.root, 0) from error

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses, puts, damage and evictions of this process since the store was opened."""
        return self._counters

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> DiskKV | None:
        """The entry, its header verified and no layer read; None for a miss. Never raises.

        A damaged or foreign file is moved aside. One of another version, or with token ids other than `token_ids`,
        stays where it is: somebody else may be able to use it.
        """
        path, file = self.root / key[:2] / f"{key}{ENTRY_SUFFIX}", None
        try:
            file = OpenFile(self._path(key))
            kv = DiskKV(key, path, file, self._quarantine)
            if token_ids is not None and kv.header.token_ids != tuple(token_ids):
                raise MismatchError(f"its {kv.header.num_tokens} token ids differ from the {len(token_ids)} asked for")
        except FileNotFoundError:
            pass
        except (OSError, UsageError) as error:
            log.warning("stored KV %s cannot be read: %s", key, error)
        except MismatchError as error:
            log.warning("stored KV %s in %s is not used: %s", key, path, error)
            self._count(num_damaged=1)
        except UnreadableError as error:
            assert file is not None
            self._quarantine(key, path, file, str(error))
        else:
            self._count(num_hits=1)
            _touch(file.fd, os.fstat(file.fd))
            return kv
        self._count(num_misses=1)
        return None

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk; when it returns, the entry survives a crash. Needs memory for one more layer at most.

        An entry of the same key is replaced, and its damaged copy dropped. Raises StoreFullError when the disk or the
        quota is full, StoreNotWritableError for any other refusal; no trace of the entry is left then.
        """
        path = self._path(kv.header.key)
        held = in_memory(kv)
        data_offset = header_nbytes(held)
        self._replace(path, data_offset + held.nbytes, lambda stream: write_chunk(stream, held, data_offset))
        _unlink(path.with_suffix(DAMAGED_SUFFIX))
        self._count(num_puts=1)

    def contains(self, key: str) -> bool:
        """Whether `get` would answer, judged by the header (so that ingestion recomputes what is damaged)."""
        return self.header(key) is not None

    def header(self, key: str) -> KVHeader | None:
        """The verified header of an entry; None when there is none that this version reads. Counts nothing."""
        try:
            path = self._path(key)
            return DiskKV(key, path, OpenFile(path), self._quarantine).header
        except (OSError, UsageError, UnreadableError):
            return None

    def delete(self, key: str) -> bool:
        """Remove an entry, and its damaged copy; whether there was one. Readers that hold it are not disturbed."""
        try:
            path = self._path(key)
        except UsageError:
            return False
        removed = [_unlink(path), _unlink(path.with_suffix(DAMAGED_SUFFIX))]
        return any(removed)

    def keys(self) -> Iterator[str]:
        """Keys of all entries, without temp and damaged files; unverified."""
        return (path.stem for path in self._files(ENTRY_SUFFIX))

    def nbytes(self) -> int:
        """Bytes of all entries' files, damaged ones included, on disk."""
        return sum(stat.st_size for suffix in (ENTRY_SUFFIX, DAMAGED_SUFFIX) for _, stat in self._stats(suffix))

    def entries(self) -> Iterator[StoreEntry]:
        """Every readable entry with its header, size and last use."""
        for path, stat in self._stats(ENTRY_SUFFIX):
            header = self.header(path.stem)
            if header is not None:
                yield StoreEntry(path.stem, stat.st_size, stat.st_mtime, header)

    def touch(self, key: str) -> None:
        """Note that an entry was used (a faster tier answered for it), so that `gc` keeps it."""
        with suppress(OSError, UsageError):
            path = self._path(key)
            _touch(path, path.stat())

    def verify(self) -> Iterator[VerifyResult]:
        """Read every byte of every file, quarantined ones included; what fails is quarantined."""
        for path in self._files(DAMAGED_SUFFIX):
            if (reason := self._check(path)) is not None:
                yield VerifyResult(path.stem, False, f"quarantined: {reason or 'its bytes match again'}")
        for path in self._files(ENTRY_SUFFIX):
            if (reason := self._check(path)) is not None:
                yield VerifyResult(path.stem, not reason, reason)

    def clean(self) -> int:
        """Remove temp files that a dead process of this host, or anyone an hour ago, left behind; how many."""
        return sum(_unlink(path) for path, _ in self._leftovers())

    def gc(
        self, max_bytes: int | None = None, keep: Callable[[str], bool] | None = None, dry_run: bool = False
    ) -> GcResult:
        """Remove leftovers, damaged files, entries that `keep` turns down, then the least recently used ones.

        max_bytes: what the remaining files may hold together; None leaves the rest alone. `dry_run` only reports.
        """
        if max_bytes is not None and max_bytes < 0:
            raise UsageError(f"max_bytes is {max_bytes}; choose 0 (empty the store) or more")
        leftovers, quarantined = list(self._leftovers()), list(self._stats(DAMAGED_SUFFIX))
        entries = sorted(self._stats(ENTRY_SUFFIX), key=lambda item: (item[1].st_mtime_ns, item[0]))
        kept_bytes = sum(stat.st_size for _, stat in entries)
        unwanted = {path for path, _ in entries if keep is not None and not keep(path.stem)}
        kept_bytes -= sum(stat.st_size for path, stat in entries if path in unwanted)
        evicted = []
        for path, stat in entries:  # oldest first
            if path not in unwanted:
                if max_bytes is None or kept_bytes <= max_bytes:
                    continue
                kept_bytes -= stat.st_size
            evicted.append((path, stat))
        doomed = leftovers + quarantined + evicted
        if not dry_run:
            for path, _ in doomed:
                _unlink(path)
            self._count(num_evicted=len(evicted))
        freed_bytes = sum(stat.st_size for _, stat in doomed)
        keys = tuple(path.stem for path, _ in evicted)
        return GcResult(keys, len(quarantined), len(leftovers), freed_bytes, kept_bytes)

    def put_model(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        """Note whose KV this store holds (name, dtype, number of layers, ...), as JSON. Raises what `put` raises."""
        path = self.root / MODELS_DIR / f"{_checked_name(fingerprint)}.json"
        data = json.dumps(dict(facts), indent=2, sort_keys=True).encode() + b"\n"
        with suppress(OSError):
            if path.read_bytes() == data:
                return
        self._replace(path, len(data), lambda stream: stream.write(data))

    def models(self) -> dict[str, dict[str, Any]]:
        """What `put_model` noted, by fingerprint; an unreadable note is skipped with a warning."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.root / MODELS_DIR).glob("[!.]*.json")):
            try:
                found[path.stem] = dict(json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.warning("model descriptor %s is skipped: %s", path, error)
        return found

    def _path(self, key: str) -> Path:
        return self.root / _checked_name(key)[:2] / f"{key}{ENTRY_SUFFIX}"

    def _files(self, suffix: str) -> Iterator[Path]:
        """Files of that suffix whose name is a key in the right directory, in order of their keys."""
        for path in sorted(self.root.glob(f"??/[!.]*{suffix}")):
            if _NAME.fullmatch(path.stem) and path.stem[:2] == path.parent.name:
                yield path

    def _stats(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files(suffix):
            with suppress(FileNotFoundError):  # deleted or quarantined meanwhile
                yield path, path.stat()

    def _leftovers(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in sorted(self.root.glob(f"*/.*{TEMP_SUFFIX}")):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if time.time() - stat.st_mtime > TEMP_MAX_AGE_S or _writer_is_dead(path.name):
                    yield path, stat

    def _check(self, path: Path) -> str | None:
        """Why this file is not an intact entry of its name; "" when it is, None when it is gone."""
        file = None
        try:
            file = OpenFile(path)
            DiskKV(path.stem, path, file, self._quarantine).verify(file)
        except FileNotFoundError:
            return None
        except (OSError, MismatchError) as error:
            return str(error)
        except UnreadableError as error:
            assert file is not None
            if path.suffix != DAMAGED_SUFFIX:
                self._quarantine(path.stem, path, file, str(error))
            return str(error)
        return ""

    def _quarantine(self, key: str, path: Path, file: OpenFile, reason: str) -> None:
        """Move a damaged file out of the way, unless another writer has already replaced it."""
        self._count(num_damaged=1)
        aside = path.with_suffix(DAMAGED_SUFFIX)
        try:
            if os.path.samestat(os.fstat(file.fd), path.stat()):
                path.replace(aside)
                outcome = f"moved to {aside}"
            else:
                outcome = "already replaced by another writer"
        except OSError as error:
            outcome = f"not moved aside: {error}"
        log.warning("stored KV %s is damaged (%s), %s; repair: ragblend verify --repair", key, reason, outcome)

    def _replace(self, path: Path, nbytes: int, write: Callable[[BinaryIO], Any]) -> None:
        """Put a file in place in one step: whoever looks sees the old one or the whole new one, also after a crash."""
        temp = path.with_name(f".{path.stem}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        try:
            self._make_directory(path.parent)
            with temp.open("xb") as stream:
                write(stream)
                stream.flush()
                if self._fsync:
                    os.fsync(stream.fileno())
            temp.replace(path)
            if self._fsync:
                _fsync_directory(path.parent)
        except BaseException as error:
            _unlink(temp)
            if isinstance(error, OSError):
                raise self._write_error(error, path, nbytes) from error
            raise

    def _make_directory(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            if self._fsync:
                _fsync_directory(path.parent)

    def _write_error(self, error: OSError, path: Path, nbytes: int) -> RagblendError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                f"{path} needs {nbytes} bytes, {_free_bytes(self.root)} are free there ({error.strerror}). "
                f"Make room: ragblend gc --store {self.root}, or choose a store on a larger disk"
            )
        return StoreNotWritableError(
            f"{path} cannot be written: {error.strerror or error}. Check the owner and the mount of {self.root}, "
            f"or choose another place with --store DIR"
        )

    def _count(self, **steps: int) -> None:
        with self._lock:
            for name, step in steps.items():
                setattr(self._counters, name, getattr(self._counters, name) + step)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a file of a store; use ragblend.engine.keys.chunk_key or fingerprint")
    return name


def _touch(target: int | Path, stat: os.stat_result) -> None:
    """Set the modification time to now if it is older than TOUCH_INTERVAL_S; a read-only store keeps its times."""
    with suppress(OSError):
        if time.time() - stat.st_mtime > TOUCH_INTERVAL_S:
            os.utime(target)


def _unlink(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _writer_is_dead(temp_name: str) -> bool:
    """Whether the process of this host that a temp file is named after no longer runs."""
    parts = temp_name.split(".")  # "", key, host, pid, random, "tmp"
    if len(parts) != 6 or parts[2] != _HOST or not parts[3].isdigit():
        return False
    try:
        os.kill(int(parts[3]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
