"""Functions that open and read regular files only, and never wait, because another user may have created the file.

A named pipe, a device or a folder raises an OSError that names its kind. Links are followed; a loop of links is an
error. Depends on paths and bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from ragblend.errors import NotFoundError, UsageError

MAX_METADATA_BYTES = 64 << 20
"""Default size limit. Every JSON file that ragblend writes is smaller."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular_file(path: str | os.PathLike[str]) -> int:
    """Return a descriptor for reading the regular file at `path`. Raises OSError, also for other kinds of files."""
    # Without O_NONBLOCK, opening a pipe waits for a process at its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(fd).st_mode, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of_file(mode)}, not a file", os.fspath(path))


def kind_of_file(mode: int) -> str:
    """Return the kind of a file that is not regular, by its `st_mode`: "a folder", "a named pipe", ..."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def read_file(path: str | os.PathLike[str], limit: int = MAX_METADATA_BYTES) -> bytes:
    """Return the bytes of the regular file at `path`.

    Raises OSError, also for more than `limit` bytes, and for a file that consists mostly of holes.
    """
    with os.fdopen(open_regular_file(path), "rb") as stream:
        size = checked_file_size(stream.fileno())
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {limit}", os.fspath(path))
        return stream.read(size)


def read_private_file(path: Path, what: str, missing: str, limit: int) -> bytes:
    """Return at most the first `limit` bytes of a regular file that contains secrets.

    what: the file's role, for errors ("the store key"). missing: the message if there is no file. Raises NotFoundError
    for a missing file, UsageError for a file that is not readable or has unsafe permissions. It must belong to this
    process's user or to root. The file's group may have permission to read it, but not to write it. Other users must
    have no permission.
    """
    try:
        with os.fdopen(open_regular_file(path), "rb") as stream:
            facts = os.fstat(stream.fileno())
            data = stream.read(limit)
    except FileNotFoundError:
        raise NotFoundError(missing) from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    if facts.st_mode & (stat.S_IRWXO | stat.S_IWGRP) or facts.st_uid not in (os.getuid(), 0):
        raise UsageError(f"other users can read or change {what} {path}; run: chmod 600 {path}")
    return data


def read_text(path: str | os.PathLike[str], what: str, fix: str, limit: int = MAX_METADATA_BYTES) -> str:
    """Return the text of a UTF-8 file that a user wrote, without a byte order mark.

    what: the file's role, for errors ("the questions"). fix: what to do, for errors. Raises NotFoundError for a missing
    file, UsageError for a file that is not regular, not readable, larger than `limit` bytes or not UTF-8.
    """
    try:
        return read_file(path, limit).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"{what}: {path} does not exist; {fix}") from error
    except OSError as error:
        raise UsageError(f"{what}: {path} cannot be read: {error.strerror or error}; {fix}") from error
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "ISO-8859-1"
        raise UsageError(
            f"{what}: {path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); convert it: "
            f"iconv -f {encoding} -t UTF-8 {path} > NEW"
        ) from error


def checked_file_size(fd: int) -> int:
    """Return the size in bytes of the open file `fd`. Raises OSError if most of the file is a hole.

    A sparse file that takes 2 KB on the disk can have a size of a terabyte. It must not be read into memory.
    """
    facts = os.fstat(fd)
    # A compressing file system, or one with unwritten data, also reports few blocks, but no hole.
    if facts.st_blocks * 512 < facts.st_size // 2:
        first_hole = os.lseek(fd, 0, os.SEEK_HOLE)
        os.lseek(fd, 0, os.SEEK_SET)
        if first_hole < facts.st_size:
            raise OSError(errno.EFBIG, f"of its {facts.st_size} bytes, {facts.st_blocks * 512} are on the disk")
    return facts.st_size


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError if `path` exists and is not a regular file. Call it before a library opens the file.

    Does not open the file, because closing a file releases all locks that this process has on the file. SQLite
    connections would lose their locks.
    """
    try:
        _check_mode(Path(path).stat().st_mode, path)
    except FileNotFoundError:
        return
