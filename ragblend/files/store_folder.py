"""Layout of a store's folder, and migration of the layout of earlier versions.

    STORE/kv/ab/...                                      entries (see `disk`); `kv_dir` names another folder for them
    STORE/catalog.sqlite                                 documents, chunks, vectors, texts (see `catalog`)
    STORE/vectors.faiss                                  vectors for searches, derived from the catalogue (see `index`)
    STORE/store.json, context.json, models/, pins/, ...  settings and metadata of the store (see `disk`)

Earlier versions had two folders. Documents were in one, by default `ragblend-data/index`. Entries and metadata were in
the other, by default `ragblend-data/kv`. Depends on names of files, not on their contents.
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
from ragblend.files.directory import make_write_error
from ragblend.files.places import expand_user_path

log = logging.getLogger(__name__)

DEFAULT_STORE = "ragblend-data"
KV_DIR = "kv"
CATALOG_FILE = "catalog.sqlite"
FORMER_REGISTRY_FILE, FORMER_SERVER_FILE = "texts.sqlite", "documents.sqlite"
VECTORS_FILE = "vectors.faiss"
FORMER_INDEX_FILE, FORMER_MANIFEST = "chunks.sqlite", "manifest.json"
_FORMER_INDEX_DIR = "index"
_METADATA_NAMES = ("models", "pins", "calibrations", "machines", "prefixes", "forgotten", "context.json")
ENTRY_SUFFIX, DAMAGED_SUFFIX = ".safetensors", ".damaged"
EVICTED_MARK = "evicted"
"""An empty file in the folder of the entries. It exists once an entry was evicted; a missing entry is then no error."""
_LOCK_TIMEOUT_S = 5.0  # for another process that has the database open


def resolve_and_migrate_store_folder(path: str | os.PathLike[str], name: str = "store") -> Path:
    """Return the absolute path of the store's folder `path`, which need not exist. Migrates an earlier layout.

    The migration runs once and is logged. If `path` is the `kv` or `index` folder of an earlier layout, returns the
    parent of `path`. name: the argument that has the path, for errors. Raises UsageError for an invalid path,
    RagblendError if another process has the earlier version's database open.
    """
    folder = expand_user_path(path, name).absolute()
    parent = folder.parent
    if folder.name in (KV_DIR, _FORMER_INDEX_DIR) and _was_part_of(folder, parent) and _migrate(parent):
        log.warning("%s is a part of the store %s, which is opened instead; change the setting to it", folder, parent)
        return parent
    _migrate(folder)
    return folder


def find_kv_dir(folder: Path) -> Path:
    """Return the default folder of KV entries for the store in `folder`.

    This is `folder`/kv. A store in the layout of an earlier version has its entries in `folder` itself.
    """
    return folder if next(_entry_folders(folder), None) is not None else folder / KV_DIR


def _was_part_of(folder: Path, parent: Path) -> bool:
    """Return True for the `kv` or `index` folder of a store in the earlier layout, also after its migration."""
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
    """Yield the folders directly in `folder` that contain entries."""
    with suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if len(each.name) == 2 and each.name != KV_DIR and each.is_dir(follow_symlinks=False):
                with suppress(OSError), os.scandir(each.path) as files:
                    if any(
                        file.name.startswith(each.name) and file.name.endswith((ENTRY_SUFFIX, DAMAGED_SUFFIX))
                        for file in files
                    ):
                        yield Path(each.path)


def _migrate(folder: Path) -> bool:
    """Move the files of an earlier layout. Return False if the folder is read-only; the files are then not moved."""
    is_current = next(_entry_folders(folder), None) is None
    if is_current and not _has_former_index(folder) and not _has_former_metadata(folder):
        return True
    try:
        with _locked(folder):
            _move_former(folder)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise make_write_error(error, folder) from error
        return False
    return True


def _has_former_index(folder: Path) -> bool:
    former = folder / _FORMER_INDEX_DIR
    is_index = (former / FORMER_INDEX_FILE).exists() and not (former / KV_DIR).is_dir()
    return is_index and not (folder / FORMER_INDEX_FILE).exists()


def _has_former_metadata(folder: Path) -> bool:
    kv = folder / KV_DIR
    return not (kv / KV_DIR).is_dir() and any((kv / name).exists() for name in (*_METADATA_NAMES, FORMER_REGISTRY_FILE))


def _move_former(folder: Path) -> None:
    moved = []
    kv, former_index = folder / KV_DIR, folder / _FORMER_INDEX_DIR
    if _has_former_metadata(folder):
        if (kv / FORMER_REGISTRY_FILE).exists() and not (folder / FORMER_REGISTRY_FILE).exists():
            _move_database(kv / FORMER_REGISTRY_FILE, folder / FORMER_REGISTRY_FILE)
        for name in _METADATA_NAMES:
            _move(kv / name, folder / name)
        moved.append(f"the metadata in {kv}")
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
        _move(folder / EVICTED_MARK, kv / EVICTED_MARK)
        moved.append("its entries")
    if moved:
        log.warning(
            "%s was written by an earlier version; %s were moved to their current places", folder, ", ".join(moved)
        )


def _move(old: Path, new: Path) -> None:
    """Move a file or folder. If the folder `new` exists, the contents are merged; existing files are kept."""
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
    """Move an SQLite file, after writing its log into it. Raises RagblendError if another process has it open."""
    try:
        with closing(
            sqlite3.connect(f"{old.as_uri()}?mode=rw", uri=True, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        ) as opened:
            opened.execute("PRAGMA journal_mode = DELETE").fetchall()  # fails if another process has it open
    except sqlite3.OperationalError as error:
        raise RagblendError(
            f"{old} cannot be moved to {new} ({error}); stop the processes that use it, and try again"
        ) from error
    except sqlite3.DatabaseError:  # it is damaged, and opening it raises an error
        for suffix in ("-wal", "-shm"):
            _move(Path(f"{old}{suffix}"), Path(f"{new}{suffix}"))
    old.rename(new)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that only one process migrates it, if the file system supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
