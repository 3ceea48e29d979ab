"""A directory whose files appear in one step and whole, whoever looks and whenever somebody crashes.

A temp file names its host and process, so that what a dead writer left behind can be told from what is being written.
Works on names and bytes. Knows nothing of what is in the files.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128_hexdigest

from ragblend.errors import RagblendError, StoreFullError, StoreNotWritableError

TEMP_SUFFIX = ".tmp"
TEMP_MAX_AGE_S = 3600.0

# Temp files name their host: a process id says nothing about a writer on another machine of a shared file system.
_HOST = xxh3_128_hexdigest(platform.node().encode())[:8]


class Directory:
    """Files one level below `root`. `fsync=False`: a power cut may lose or damage the latest of them.

    What cannot be written raises StoreFullError where there is no room, else StoreNotWritableError.
    """

    def __init__(self, root: Path, *, fsync: bool) -> None:
        self.root, self._fsync = root, fsync
        try:
            self._make(root)
        except OSError as error:
            raise self.write_error(error, root) from error

    def replace(self, path: Path, nbytes: int, write: Callable[[BinaryIO], Any]) -> None:
        """Put a file in place in one step: whoever looks sees the old one or the whole new one, also after a crash."""
        temp = path.with_name(f".{path.stem}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        try:
            self._make(path.parent)
            with temp.open("xb") as stream:
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

    def leftovers(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Temp files that a dead process of this host, or anyone an hour ago, left behind."""
        for path in sorted(self.root.glob(f"*/.*{TEMP_SUFFIX}")):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if time.time() - stat.st_mtime > TEMP_MAX_AGE_S or _writer_is_dead(path.name):
                    yield path, stat

    def write_error(self, error: OSError, path: Path, nbytes: int = 0) -> RagblendError:
        """What `path`, which needs `nbytes`, could not be written for, as the error to raise."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                f"{path} needs {nbytes} bytes, {_free_bytes(self.root)} are free there ({error.strerror}). "
                f"Make room: ragblend gc --store {self.root}, or choose a store on a larger disk"
            )
        return StoreNotWritableError(
            f"{path} cannot be written: {error.strerror or error}. Check the owner and the mount of {self.root}, "
            f"or choose another place with --store DIR"
        )

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            if self._fsync:
                _fsync_directory(path.parent)


def unlink(path: Path) -> bool:
    """Remove a file; whether that was done."""
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
