"""Documents that were dropped on the page: written to one folder under their own names and ingested from there.

A file replaces an earlier file of the same name, also in the index. Does not depend on HTTP.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO

from ragblend.config import Settings
from ragblend.corpus.folder_scan import display_source, normal_path, source_path
from ragblend.corpus.readers.formats import PARQUET_SUFFIX, READERS, TEXT_READERS, TEXT_SUFFIXES, try_reading_in_child
from ragblend.corpus.readers.rejected import CONVERTIBLE
from ragblend.engine.api import Engine
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import RagblendError, UsageError
from ragblend.files.directory import Directory
from ragblend.index import ChunkIndex
from ragblend.lab.ui.job_queue import UiJob
from ragblend.option_fields import check_unicode
from ragblend.precompute import ingest

MIB = 1 << 20
SPOOL_BYTES = 8 * MIB  # a larger upload is buffered on disk
_NAME_BYTES = 200


class TooLargeError(RagblendError):
    """A request that is larger than its limit; answered with HTTP 413."""


def uploads_folder(store: str | Path) -> Path:
    """Return the folder of the store that holds its uploaded documents."""
    return Path(store) / "uploads"


def validate_file_name(name: str) -> str:
    """Return the file name. Raises UsageError if it is empty, too long, hidden or has a slash or a control character.

    >>> validate_file_name("annual report.pdf")
    'annual report.pdf'
    """
    check_unicode(name, "the file's name")
    if not name.strip() or len(name.encode()) > _NAME_BYTES:
        raise UsageError(f"the file's name is {name[:40]!r}...; rename the file: 1 to {_NAME_BYTES} bytes")
    if name.startswith(".") or any(mark in "/\\" or not mark.isprintable() for mark in name):
        raise UsageError(
            f"the file's name is {name!r}; rename the file: no slash, no control character and no dot at the front"
        )
    return name


def list_supported_suffixes() -> list[str]:
    """Return the suffixes of the files that the installed packages can read, sorted."""
    from importlib.util import find_spec

    packages = {
        PARQUET_SUFFIX: "pyarrow",
        **dict.fromkeys((".xlsx", ".xlsm", ".xls"), "python_calamine"),
    }
    missing = {ending for ending, package in packages.items() if find_spec(package) is None}
    return sorted({*TEXT_SUFFIXES, *READERS, *TEXT_READERS} - missing - {*CONVERTIBLE, ".doc", ".key"})


def check_upload_size(name: str, num_bytes: int, max_mib: float) -> None:
    """Raise TooLargeError if an upload has more than `max_mib` MiB; 0 sets no limit."""
    if max_mib and num_bytes > max_mib * MIB:
        raise TooLargeError(
            f"{name} is larger than {max_mib:g} MiB; cut it, or raise the limit: RAGBLEND_MAX_FILE_MIB=... ragblend ui"
        )


def save_upload(path: Path, file: IO[bytes], num_bytes: int) -> None:
    """Write an upload to `path`. The file appears there when it is complete.

    `file`: the upload, with `num_bytes` bytes. Unless it is plain text, a child process reads it first. Raises
    UnreadableDocumentError if the child process crashes, takes too long or needs too much memory.
    """
    try_reading_in_child(file, num_bytes, path.suffix)
    folder = Directory(path.parent, fsync=False, full_hint="Make room and drop the file again")
    folder.remove_stale_files()
    file.seek(0)
    folder.replace(path, num_bytes, lambda stream: shutil.copyfileobj(file, stream))


def ingest_uploads(job: UiJob, names: Sequence[str], engine: Engine, index: ChunkIndex, settings: Settings) -> None:
    """Ingest uploads and emit the result as the event "ingested". `names`: file names in the folder of uploads."""
    folder = uploads_folder(settings.store)
    paths = [folder / validate_file_name(name) for name in names]
    try:
        report = ingest(
            paths,
            engine,
            index,
            chunk_size=settings.chunk_size,
            context=settings.context,
            max_file_mib=settings.max_file_mib,
            text_field=settings.text_field,
            progress=job.report_progress,
            notify=lambda line: job.emit("said", text=line),
        )
        _drop_unknown(paths, index)
    except RagblendError:
        _drop_unknown(paths, index)
        raise
    finally:
        if not index.is_saved:
            index.save()
    problems = [*report.failures, *report.skipped, *report.notes]
    job.emit(
        "ingested",
        num_documents=report.num_documents,
        num_unchanged=report.num_unchanged,
        num_chunks=report.num_chunks,
        num_tokens=report.num_tokens,
        num_new_kv=report.num_new_kv,
        prefill_s=report.prefill_s,
        store=None if report.store_bytes is None else format_bytes(report.store_bytes),
        problems=[{"name": display_name(problem.path), "reason": problem.reason} for problem in problems],
    )


def document_names(index: ChunkIndex) -> list[str]:
    """Return the display names of an index's documents, sorted."""
    return sorted({display_name(source_path(source)) for source in index.sources()}, key=str.casefold)


def display_name(path: str) -> str:
    """Return the last part of a path, with control characters escaped."""
    return PurePath(display_source(path)).name or path


def _drop_unknown(paths: Sequence[Path], index: ChunkIndex) -> None:
    """Remove the uploads that are not in the index, because they gave no document."""
    indexed = {source_path(source) for source in index.sources()}
    for path in paths:
        if normal_path(path) not in indexed:
            with suppress(OSError):
                path.unlink()
