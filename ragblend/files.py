"""Open files that somebody else may have put there: regular files only, at once or not at all.

A named pipe, a device or a folder in a file's place is an OSError that says so, never a wait; a link is followed, a
loop of links is an error. Knows paths and bytes.
"""

from __future__ import annotations

import errno
import os
import stat

NOTE_BYTES = 64 << 20
"""More than any JSON file of ours holds: what is larger is not read."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`. Raises OSError, also for what is there and is no regular file."""
    # Without O_NONBLOCK, opening a pipe waits for somebody at its other end.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))


def read_file(path: str | os.PathLike[str], limit: int = NOTE_BYTES) -> bytes:
    """What the regular file at `path` holds. Raises OSError, also for more than `limit` bytes."""
    with os.fdopen(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it holds {size} bytes, more than {limit}", os.fspath(path))
        return stream.read(limit)


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a regular file is at `path`, or nothing: for what a library is about to open."""
    try:
        os.close(open_file(path))
    except FileNotFoundError:
        return
