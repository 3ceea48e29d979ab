"""A directory whose files appear in one step and whole, whoever looks and whenever somebody crashes.

A temp file names its host and process, so that what a dead writer left behind can be told from what is being written.
Works on names and bytes. Knows nothing of what is in the files.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128_hexdigest

from ragblend.errors import RagblendError, StoreFullError, StoreNotWritableError

TEMP_SUFFIX = ".tmp"
TEMP_MAX_AGE_S = 3600.0

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean: no room. Nothing is damaged, and with more room the same command goes on."""

_PROBE_BYTES = 1 << 16  # as much as SQLite asks for at once

# Temp files name their host: a process id says nothing about a writer on another machine of a shared file system.
_HOST = xxh3_128_hexdigest(platform.node().encode())[:8]


class Directory:
    """Files in `root` and below. `fsync=False`: a power cut may lose or damage the latest of them.

    They are their owner's alone; where the group of `root` may write there, it may read and write them, too.
    What cannot be written raises StoreFullError where there is no room, else StoreNotWritableError; `make_room` is what
    to do about the first.
    """

    def __init__(self, root: Path, *, fsync: bool, full_hint: str = "", create: bool = True) -> None:
        self.root, self._fsync = root, fsync
        self.full_hint = full_hint or f"Make room: ragblend gc --store {root}, or choose a store on a larger disk"
        try:
            if create:
                self._make(root)
        except OSError as error:
            raise self.write_error(error, root) from error

    def replace(self, path: Path, nbytes: int, write: Callable[[BinaryIO], Any]) -> None:
        """Put a file in place in one step: whoever looks sees the old one or the whole new one, also after a crash."""
        temp = path.with_name(f".{path.stem}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        try:
            self._make(path.parent)
            with temp.open("xb") as stream:
                os.fchmod(stream.fileno(), 0o660 if self._is_shared() else 0o600)  # while nothing is in it
                write(stream)
                stream.flush()
                if self._fsync:
                    os.fsync(stream.fileno())
            temp.replace(path)
            if self._fsync:
                _fsync_directory(path.parent)
        except BaseException as error:
            unlink(temp)
            if isinstance(error, OSError):
                raise self.write_error(error, path, nbytes) from error
            raise

    def write(self, path: Path, data: bytes) -> None:
        """`replace` with what is at hand already."""
        self.replace(path, len(data), lambda stream: stream.write(data))

    def find_stale_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Temp files that a dead process of this host, or anyone an hour ago, left in `root` and one level below."""
        for pattern in (f".*{TEMP_SUFFIX}", f"*/.*{TEMP_SUFFIX}"):
            for path in sorted(self.root.glob(pattern)):
                with suppress(FileNotFoundError):
                    stat = path.lstat()
                    if time.time() - stat.st_mtime > TEMP_MAX_AGE_S or _writer_is_dead(path.name):
                        yield path, stat

    def remove_stale_files(self) -> int:
        """Remove `find_stale_files`; how many."""
        return sum(unlink(path) for path, _ in self.find_stale_files())

    def write_error(self, error: OSError, path: Path, nbytes: int = 0) -> RagblendError:
        """What `path`, which needs `nbytes`, could not be written for, as the error to raise."""
        return to_write_error(error, path, nbytes, self.full_hint)

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            if path.parent != self.root and path.is_relative_to(self.root) and path != self.root:
                self._make(path.parent)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path != self.root and self._is_shared():
                with suppress(OSError):  # somebody else's, who made it just now
                    path.chmod(path.stat().st_mode | 0o070)
            if self._fsync:
                _fsync_directory(path.parent)

    def _is_shared(self) -> bool:
        """Whether the owner lets the group write here; then it reads and writes the files, too."""
        return bool(self.root.stat().st_mode & stat.S_IWGRP)


def unlink(path: Path) -> bool:
    """Remove a file; whether that was done."""
    with suppress(OSError):
        path.unlink()
        return True
    return False


def to_write_error(
    error: OSError, path: Path, nbytes: int = 0, full_hint: str = "", options: str = "`store`"
) -> RagblendError:
    """Why `path`, which needs `nbytes`, cannot be written, as the error to raise. `options` name another place."""
    if error.errno in DISK_FULL_ERRNOS:
        needs = f"{path} needs {nbytes} bytes, {_free_bytes(path)} are free there" if nbytes else f"no room for {path}"
        return StoreFullError(
            f"{needs}: {explain_disk_full(error)}. {full_hint or 'Make room and run the command again'}"
        )
    return StoreNotWritableError(
        f"{path} cannot be written: {error.strerror or error}. Check the owner and the mount of {path.parent}, "
        f"or choose another place ({options})"
    )


def remove_file(path: Path) -> bool:
    """Remove a file; False when there is none. Raises StoreNotWritableError when it is there and stays."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreNotWritableError(
            f"{path} cannot be removed: {error.strerror or error}. Check the owner and the mount of {path.parent}"
        ) from error
    return True


def explain_disk_full(error: OSError) -> str:
    """What there is no room for, in words; `error` is one of FULL."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = "" if limit == resource.RLIM_INFINITY else f" of {limit} bytes"
        return f"the file would exceed the file-size limit{most} (ulimit -f)"
    return "the disk quota is used up" if error.errno == errno.EDQUOT else "no space is left on the disk"


def probe_disk_full(folder: Path, nbytes: int = 0) -> str:
    """Why nothing more can be written in `folder`, to a file that has `nbytes` now; "" where something can.

    For libraries that report a full disk as an error of input and output.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < nbytes + _PROBE_BYTES:
        return explain_disk_full(OSError(errno.EFBIG, ""))
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return explain_disk_full(error) if error.errno in DISK_FULL_ERRNOS else ""
    return ""


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
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
