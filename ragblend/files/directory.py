"""`Directory`: writes files in one step, so that readers never see an incomplete file, also after a crash.

The name of a temp file contains the host and the id of its process, so that the files of dead writers can be
identified. Depends on names and bytes, not on the contents of files.
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
"""Errors of a full disk. No file is damaged, and the same command continues once there is free space."""

_PROBE_BYTES = 1 << 16  # SQLite's largest single request

# Temp files name their host, because a process id does not identify a writer on another machine of a shared file
# system.
_HOST = xxh3_128_hexdigest(platform.node().encode())[:8]


class Directory:
    """Writes files in `root` and below. Without `fsync`, a power failure may lose or damage the latest files.

    The owner may read and write the files. If the group may write to `root`, the group may read and write the files,
    too. A failed write raises StoreFullError on a full disk, else StoreNotWritableError. create: create `root` now if
    it is missing. full_hint: advice for StoreFullError.
    """

    def __init__(self, root: Path, *, fsync: bool, full_hint: str = "", create: bool = True) -> None:
        self.root, self._fsync = root, fsync
        self.full_hint = full_hint or f"Make room: ragblend gc --store {root}, or choose a store on a larger disk"
        try:
            if create:
                self._make(root)
        except OSError as error:
            raise make_write_error(error, root, full_hint=self.full_hint) from error

    def replace(self, path: Path, nbytes: int, write: Callable[[BinaryIO], Any]) -> None:
        """Write a file in one step: readers see the old file or the complete new one, also after a crash.

        write: called with the open temp file. nbytes: size of the new file, for the error of a full disk.
        """
        temp = path.with_name(f".{path.stem}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        try:
            self._make(path.parent)
            with temp.open("xb") as stream:
                os.fchmod(stream.fileno(), 0o660 if self._is_shared() else 0o600)  # before the data is written
                write(stream)
                stream.flush()
                if self._fsync:
                    os.fsync(stream.fileno())
            temp.replace(path)
            if self._fsync:
                _fsync_directory(path.parent)
        except BaseException as error:
            try_remove_file(temp)
            if isinstance(error, OSError):
                raise make_write_error(error, path, nbytes, self.full_hint) from error
            raise

    def write(self, path: Path, data: bytes) -> None:
        """Write a file with the bytes `data` in one step."""
        self.replace(path, len(data), lambda stream: stream.write(data))

    def find_stale_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the path and status of each abandoned temp file in `root` and one level below.

        A temp file is abandoned if it is older than an hour, or if its process ran on this host and has ended.
        """
        for pattern in (f".*{TEMP_SUFFIX}", f"*/.*{TEMP_SUFFIX}"):
            for path in sorted(self.root.glob(pattern)):
                with suppress(FileNotFoundError):
                    stat = path.lstat()
                    if time.time() - stat.st_mtime > TEMP_MAX_AGE_S or _writer_is_dead(path.name):
                        yield path, stat

    def remove_stale_files(self) -> int:
        """Remove the files of `find_stale_files`; return their number."""
        return sum(try_remove_file(path) for path, _ in self.find_stale_files())

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            if path.parent != self.root and path.is_relative_to(self.root) and path != self.root:
                self._make(path.parent)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path != self.root and self._is_shared():
                with suppress(OSError):  # another user's, created at the same time
                    path.chmod(path.stat().st_mode | 0o070)
            if self._fsync:
                _fsync_directory(path.parent)

    def _is_shared(self) -> bool:
        """True if the group may write to `root`, and may therefore read and write the files."""
        return bool(self.root.stat().st_mode & stat.S_IWGRP)


def try_remove_file(path: Path) -> bool:
    """Remove a file if possible; return True if it was removed. Raises nothing."""
    with suppress(OSError):
        path.unlink()
        return True
    return False


def make_write_error(
    error: OSError, path: Path, nbytes: int = 0, full_hint: str = "", options: str = "`store`"
) -> RagblendError:
    """Return the exception to raise after `error`, a failed write of `path`.

    The result is a StoreFullError if the disk is full, else a StoreNotWritableError. nbytes: size of the file; 0:
    unknown. full_hint: advice for StoreFullError. options: settings that choose the path, for StoreNotWritableError.
    """
    if error.errno in DISK_FULL_ERRNOS:
        needs = f"{path} needs {nbytes} bytes, {_free_bytes(path)} are free there" if nbytes else f"no room for {path}"
        return StoreFullError(
            f"{needs}: {disk_full_reason(error)}. {full_hint or 'Make room and run the command again'}"
        )
    return StoreNotWritableError(
        f"{path} cannot be written: {error.strerror or error}. Check the owner and the mount of {path.parent}, "
        f"or choose another place ({options})"
    )


def remove_file(path: Path) -> bool:
    """Remove a file; return False if there is none. Raises StoreNotWritableError if it cannot be removed."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreNotWritableError(
            f"{path} cannot be removed: {error.strerror or error}. Check the owner and the mount of {path.parent}"
        ) from error
    return True


def disk_full_reason(error: OSError) -> str:
    """Return in words which limit a write exceeded: the file-size limit, the disk quota, or the free space.

    error: an OSError whose errno is in DISK_FULL_ERRNOS.
    """
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = "" if limit == resource.RLIM_INFINITY else f" of {limit} bytes"
        return f"the file would exceed the file-size limit{most} (ulimit -f)"
    return "the disk quota is used up" if error.errno == errno.EDQUOT else "no space is left on the disk"


def probe_disk_full(folder: Path, nbytes: int = 0) -> str:
    """Return why a file of `nbytes` bytes in `folder` cannot grow, as a text of `disk_full_reason`; "" if it can.

    The result is also "" if a write fails for another reason, such as missing permissions.
    Writes a temporary file to find out. Call this after an I/O error of a library, because such an error does not say
    whether the disk is full.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < nbytes + _PROBE_BYTES:
        return disk_full_reason(OSError(errno.EFBIG, ""))
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return disk_full_reason(error) if error.errno in DISK_FULL_ERRNOS else ""
    return ""


def _writer_is_dead(temp_name: str) -> bool:
    """True if a temp file names a process of this host that has ended."""
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
