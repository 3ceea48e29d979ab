"""A file that keeps space free for deletions, because deleting rows of a catalogue needs space before it frees any."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ragblend.errors import StoreFullError
from ragblend.files.directory import try_remove_file

RESERVE_FILE = "reserve"
RESERVE_BYTES = 16 << 20  # the log of one deletion, and the longest text that a client sends
_DISK_SHARE = 64  # the reserve is at most 1/64 of the disk

T = TypeVar("T")


def fill_reserve(folder: Path) -> None:
    """Write the reserve of `folder`, as far as the disk has space for it. Raises nothing."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        wanted = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _DISK_SHARE)
        with open(
            folder / RESERVE_FILE, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            while (
                missing := wanted - os.fstat(file.fileno()).st_size
            ) > 0:  # random, because a file system may compress zeros
                file.write(os.urandom(min(missing, 1 << 20)))
            os.fsync(file.fileno())


def delete_with_reserve(folder: Path, delete: Callable[[], T]) -> T:
    """Return `delete()`. If the disk is full, call it again with the space of the folder's reserve.

    Raises StoreFullError if the disk is full and `folder` has no reserve, or a reserve that is too small.
    """
    try:
        return delete()
    except StoreFullError:
        if not try_remove_file(folder / RESERVE_FILE):
            raise
        return delete()
    finally:
        fill_reserve(folder)
