"""Where everything stands in a store's folder, and how the two folders of earlier versions become that one.

    STORE/kv/ab/...                                      entries (see `disk`); `kv_dir` puts them elsewhere
    STORE/catalog.sqlite                                 documents, chunks, vectors, texts (see `catalog`)
    STORE/vectors.faiss                                  what a search compares, made from the catalogue (see `index`)
    STORE/store.json, context.json, models/, pins/, ...  what the store remembers (see `disk`)

Earlier versions had documents in one folder, by default `ragblend-data/index`, and all else in another, by default
`ragblend-data/kv`, where entries stood beside the notes. Knows names of files, and nothing of what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ragblend.errors import RagblendError
from ragblend.files.directory import to_write_error
from ragblend.files.places import user_path

log = logging.getLogger(__name__)

DEFAULT_STORE = "ragblend-data"
KV_DIR = "kv"
CATALOG_FILE = "catalog.sqlite"
FORMER_REGISTRY_FILE, FORMER_SERVER_FILE = "texts.sqlite", "documents.sqlite"
VECTORS_FILE = "vectors.faiss"
FORMER_INDEX_FILE, FORMER_MANIFEST = "chunks.sqlite", "manifest.json"
_FORMER_INDEX_DIR = "index"
_NOTES = ("models", "pins", "calibrations", "machines", "prefixes", "forgotten", "context.json")
_MARK = "evicted"  # see `eviction`; it stands with the entries
_ENTRY_SUFFIXES = (".safetensors", ".damaged")
_LOCK_TIMEOUT_S = 5.0  # for another process to let go of a database


def open_folder(path: str | os.PathLike[str], name: str = "store") -> Path:
    """Return the absolute path of the store's folder that `path` names; it need not exist.

    What an earlier version left there is moved to where it belongs, once, and logged. The `kv` or `index` folder of
    that version's default layout stands for the folder that they are in. `name`: the argument that has the path.
    Raises UsageError for what is no path, RagblendError while another process has the former database open.
    """
    folder = user_path(path, name).absolute()
    parent = folder.parent
    if folder.name in (KV_DIR, _FORMER_INDEX_DIR) and _was_part_of(folder, parent) and _settle(parent):
        log.warning("%s is a part of the store %s, which is opened: name that instead", folder, parent)
        return parent
    _settle(folder)
    return folder


def find_kv_dir(folder: Path) -> Path:
    """Return the folder of the entries of the store in `folder`, where nobody put them elsewhere."""
    return folder if next(_entry_folders(folder), None) is not None else folder / KV_DIR


def _was_part_of(folder: Path, parent: Path) -> bool:
    """Return True for the `kv` or `index` folder of a store in the earlier layout, or of one that has been moved."""
    if folder.name == _FORMER_INDEX_DIR and not (folder / FORMER_INDEX_FILE).exists():
        return not folder.exists() and any((parent / name).exists() for name in (FORMER_INDEX_FILE, CATALOG_FILE))
    marks = (
        parent / _FORMER_INDEX_DIR / FORMER_INDEX_FILE,
        parent / FORMER_INDEX_FILE,
        parent / FORMER_REGISTRY_FILE,
        parent / CATALOG_FILE,
    )
    return any(mark.exists() for mark in marks) and next(_entry_folders(parent / KV_DIR), None) is not None


def _entry_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in `folder` that hold entries."""
    with suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if len(each.name) == 2 and each.name != KV_DIR and each.is_dir(follow_symlinks=False):
                with suppress(OSError), os.scandir(each.path) as files:
                    if any(file.name.startswith(each.name) and file.name.endswith(_ENTRY_SUFFIXES) for file in files):
                        yield Path(each.path)


def _settle(folder: Path) -> bool:
    """Move what an earlier version left in a folder; return False for one that is only read, where it stays."""
    if not _finds_former(folder):
        return True
    try:
        with _locked(folder):
            _move_former(folder)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise to_write_error(error, folder) from error
        return False
    return True


def _finds_former(folder: Path) -> bool:
    return _has_former_index(folder) or _has_former_notes(folder) or next(_entry_folders(folder), None) is not None


def _has_former_index(folder: Path) -> bool:
    former = folder / _FORMER_INDEX_DIR
    is_there = (former / FORMER_INDEX_FILE).exists() and not (former / KV_DIR).is_dir()
    return is_there and not (folder / FORMER_INDEX_FILE).exists()


def _has_former_notes(folder: Path) -> bool:
    kv = folder / KV_DIR
    return not (kv / KV_DIR).is_dir() and any((kv / name).exists() for name in (*_NOTES, FORMER_REGISTRY_FILE))


def _move_former(folder: Path) -> None:
    moved = []
    kv, former_index = folder / KV_DIR, folder / _FORMER_INDEX_DIR
    if _has_former_notes(folder):
        if (kv / FORMER_REGISTRY_FILE).exists() and not (folder / FORMER_REGISTRY_FILE).exists():
            _move_database(kv / FORMER_REGISTRY_FILE, folder / FORMER_REGISTRY_FILE)
        for name in _NOTES:
            _move(kv / name, folder / name)
        moved.append(f"the notes in {kv}")
    if _has_former_index(folder):
        _move_database(former_index / FORMER_INDEX_FILE, folder / FORMER_INDEX_FILE)
        for name in (VECTORS_FILE, FORMER_MANIFEST):
            _move(former_index / name, folder / name)
        with suppress(OSError):
            former_index.rmdir()
        moved.append(f"the index in {former_index}")
    if entries := list(_entry_folders(folder)):
        kv.mkdir(mode=folder.stat().st_mode & 0o777, exist_ok=True)
        for each in entries:
            _move(each, kv / each.name)
        _move(folder / _MARK, kv / _MARK)
        moved.append("its entries")
    if moved:
        log.warning(
            "%s was written by an earlier version: moved %s to where they are kept now", folder, ", ".join(moved)
        )


def _move(old: Path, new: Path) -> None:
    """Move a file or a folder; the files of a folder that is there already are moved into that. Newer files stay."""
    if not os.path.lexists(old):
        return
    if not os.path.lexists(new):
        old.rename(new)
    elif old.is_dir() and new.is_dir():
        for each in list(old.iterdir()):
            _move(each, new / each.name)
        with suppress(OSError):
            old.rmdir()


def _move_database(old: Path, new: Path) -> None:
    """Move an SQLite file, its log emptied into it before."""
    try:
        with closing(
            sqlite3.connect(f"{old.as_uri()}?mode=rw", uri=True, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        ) as opened:
            opened.execute("PRAGMA journal_mode = DELETE").fetchall()  # SQLite refuses while somebody else has it open
    except sqlite3.OperationalError as error:
        raise RagblendError(
            f"{old} cannot be moved to {new} ({error}): end the processes that use it, and try again"
        ) from error
    except sqlite3.DatabaseError:  # damaged: whoever opens it says so
        for suffix in ("-wal", "-shm"):
            _move(Path(f"{old}{suffix}"), Path(f"{new}{suffix}"))
    old.rename(new)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time moves things, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
