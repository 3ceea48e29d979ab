"""Connections to SQLite files: errors, and the physical removal of deleted rows. Does not depend on the tables."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragblend.errors import CorruptError, RagblendError, StoreFullError, StoreNotWritableError
from ragblend.files.directory import make_write_error, probe_disk_full
from ragblend.files.reading import check_regular_file

LOCK_TIMEOUT_S = 30.0

_NOT_WRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_LARGEST_LOG_BYTES = 1 << 26  # size of the largest transaction, for the check of a file-size limit


def connect(path: Path, fix: str, *, create: bool = False) -> sqlite3.Connection:
    """Return a connection to the SQLite file `path`, in autocommit mode.

    create: create a missing file. fix: advice for the CorruptError. Raises CorruptError if `path` is not a regular
    file.

    A file is opened as immutable if it has no write-ahead log, and this process cannot write to its folder (a package,
    a mounted image). SQLite then assumes that the file does not change.
    """
    try:
        check_regular_file(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ELOOP):  # SQLite reports other errors itself
            raise CorruptError(f"{path} cannot be opened: {error.strerror}. {fix}") from error
    frozen = not os.access(path.parent, os.W_OK) and path.exists() and not path.with_name(path.name + "-wal").exists()
    mode = "mode=ro&immutable=1" if frozen else "mode=rwc" if create else "mode=rw"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{mode}",
        uri=True,
        timeout=LOCK_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if not frozen:
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # removed texts must not be readable in the file
    except BaseException:
        connection.close()
        raise
    return connection


def truncate_log(connection: sqlite3.Connection) -> None:
    """Copy committed pages from the write-ahead log into the file, and empty the log, which contains deleted text.

    While other connections read, the log is kept; a later call empties it.
    """
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA busy_timeout = 1000")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute(f"PRAGMA busy_timeout = {int(LOCK_TIMEOUT_S * 1000)}")


@contextmanager
def wrap_sqlite_errors(path: Path, fix: str) -> Iterator[None]:
    """Raise RagblendErrors in place of SQLite's errors for the file `path`. fix: what to do about a damaged file."""
    try:
        yield
    except (RagblendError, sqlite3.ProgrammingError):  # the latter: use after close, a bug of the caller
        raise
    except sqlite3.IntegrityError as error:
        what = f"{path.parent}: two rows share one id ({error}); nothing was written, report it"
        raise RagblendError(what) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite3 cannot decode every message
        raise _to_ragblend_error(error, path, fix) from error
    except OSError as error:
        raise make_write_error(error, path) from error


def _to_ragblend_error(error: sqlite3.DatabaseError | UnicodeDecodeError, path: Path, fix: str) -> RagblendError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RagblendError(f"another process is writing {path.parent}; wait for it to end and try again")
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, *_NOT_WRITABLE):
        # SQLite reports "disk I/O error" for a quota, for a file-size limit, and if the log's shared memory file cannot
        # grow. It reports "unable to open" if a new file has no space.
        nbytes = 0 if code in _NOT_WRITABLE else max(map(_size, (path, path.with_name(path.name + "-wal"))))
        spare = _LARGEST_LOG_BYTES if code == sqlite3.SQLITE_IOERR else 0
        problem = probe_disk_full(path.parent, nbytes + spare)
        if problem or code == sqlite3.SQLITE_FULL:
            reason = problem or "no space is left on the disk"
            return StoreFullError(f"no room for {path.parent}: {reason}. Make room and run the command again")
        if code in _NOT_WRITABLE:
            return StoreNotWritableError(f"cannot open or write {path.parent} ({error}); check its permissions")
        return RagblendError(
            f"{path} cannot be read or written ({error}): the disk or its connection fails; the file may not be "
            "damaged. Check the system's log (dmesg), and try again"
        )
    return CorruptError(f"{path} is damaged ({error}). {fix}")


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
