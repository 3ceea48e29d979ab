"""Output files of commands, such as pages and pictures. A command checks the path before its long work.

Depends on paths and bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ragblend.errors import UsageError
from ragblend.files.directory import make_write_error
from ragblend.files.places import expand_user_path


def check_output_path(place: str | os.PathLike[str], option: str, endings: Sequence[str] = ()) -> Path:
    """Return the path of an output file after checking that it can be written. Writes nothing.

    option: the name of the option with the path, for errors. endings: allowed file extensions. Raises UsageError for a
    folder or another extension, StoreNotWritableError if the path is not writable.
    """
    path = expand_user_path(place, option)
    if path.is_dir():
        raise UsageError(f"{option} is {place}, a folder, but a file is needed; name a file in it")
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} is {place}, but its ending has to name a format: {', '.join(endings)}")
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    code = 0
    if nearest != path and not nearest.is_dir():
        code = errno.ENOTDIR
    elif not os.access(nearest, os.W_OK):
        code = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
    if code:
        raise make_write_error(OSError(code, os.strerror(code)), path, options=f"{option} FILE")
    return path


def write_output(path: Path, data: bytes, option: str) -> None:
    """Write a file, and create its folder. Raises StoreFullError or StoreNotWritableError, which name `option`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise make_write_error(error, path, len(data), options=option) from error
