"""An index follows files and folders: what is new or changed goes in, what is gone goes out, the rest costs nothing.

A file is known by its bytes, a document by its text and metadata, both with how they were cut. Knows the index, and
documents as they are read; deletes no KV (see `forgetting`) and prefills nothing. Read `sync_index` first.
"""

from __future__ import annotations

import logging
import stat
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from ragblend.catalog.index_rows import IngestedFile
from ragblend.corpus.citations import locate
from ragblend.corpus.documents import Document, FileContents
from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.folder_scan import (
    BROKEN_LINK_REASON,
    LINK_OUTSIDE_REASON,
    FolderScan,
    ReadFailure,
    display_source,
    is_in,
)
from ragblend.corpus.loaders import DEFAULT_READER, FileReader
from ragblend.errors import NotADocumentError, NotFoundError, RagblendError, UsageError
from ragblend.index import ChunkIndex
from ragblend.ingestion.workers import Workers
from ragblend.prompt.types import Chunk

log = logging.getLogger(__name__)

_EMBED_BATCH = 64  # chunks per embedding call; documents are stored whole, so a batch may be a little larger
_SAVE_EVERY_S = 20.0  # the search files are rebuilt from SQLite anyway; saving them often only costs time

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("read", "embed", "prefill"), the number of finished items and, if known, of all items."""


def ignore_progress(stage: str, done: int, total: int | None) -> None:
    """Do nothing with the progress of a stage."""


class ChunkerConfig(NamedTuple):
    """How documents are cut. `version` is part of what they are known by: cut in another way, they are cut again."""

    split: Callable[[Document], list[Chunk]]
    version: str


@dataclass(slots=True)
class SyncResult:
    """The documents of one ingestion, by what was done with them."""

    sources: list[str] = field(default_factory=list)  # of every document read now or known unchanged, in reading order
    num_unchanged: int = 0
    num_updated: int = 0
    removed: list[str] = field(default_factory=list)  # sources that no longer exist
    failures: list[ReadFailure] = field(default_factory=list)
    skipped: list[ReadFailure] = field(default_factory=list)  # no documents: empty, a picture, a configuration
    notes: list[ReadFailure] = field(default_factory=list)  # what was left out of a file that was read, or guessed
    arrived: set[str] = field(default_factory=set)  # versions of files that were not known before


def sync_index(
    index: ChunkIndex,
    scan: FolderScan,
    chunker: ChunkerConfig,
    on_progress: Progress,
    workers: Workers | None = None,
    *,
    keep_missing: bool = False,
    reader: FileReader = DEFAULT_READER,
) -> SyncResult:
    """Add the documents of `scan` to the index, and remove those that are no longer there.

    Only documents that came from the files and folders of `scan` are removed: their file or record is gone, is no
    document any more, or is excluded by its folder now. Documents that the pattern of `scan` leaves out stay, and so do
    those that could not be read this time. With `keep_missing`, nothing is removed. `reader` reads the files; files
    that another reader read before are read again. `workers` embed while the next files are read.
    """
    run = _SyncPass(index, scan, chunker, on_progress, workers, keep_missing, reader)
    for path in scan.files:
        run.read(path)
    run.flush(num_ahead=0)
    if not keep_missing:
        run.remove_missing()
    if not index.is_saved:
        index.save()
    return run.result


class _Batch(NamedTuple):
    """Documents read and cut, with version and chunks, and the files that are finished by them, with what is gone."""

    documents: list[tuple[Document, str, list[Chunk]]]
    files: list[tuple[IngestedFile, list[str]]]
    wait_for_vectors: Callable[
        [], Mapping[str, FloatArray]
    ]  # vectors by text; for the rest the index asks its own embedder


class _SyncPass:
    """One pass over the files: what is known of them, and what waits to be embedded."""

    def __init__(
        self,
        index: ChunkIndex,
        scan: FolderScan,
        chunker: ChunkerConfig,
        on_progress: Progress,
        workers: Workers | None,
        keep_missing: bool,
        reader: FileReader,
    ) -> None:
        self.index, self.scan, self.chunker, self.on_progress, self.keep_missing = (
            index,
            scan,
            chunker,
            on_progress,
            keep_missing,
        )
        self._workers, self._reader = workers, reader
        skipped = [*(ReadFailure(path, LINK_OUTSIDE_REASON) for path in scan.outside), *scan.not_files]
        self.result = SyncResult(failures=list(scan.unreadable), skipped=skipped)
        self._notes, self._known = index.files(), index.documents()  # by path
        self._unread: set[str] = set()  # files that are there and could not be read: they keep what they had
        self._empty: set[str] = set()  # files that were read and are no documents
        self._made_by: dict[str, str] = {}  # source -> file, of this run
        self._waiting: list[tuple[Document, str, list[Chunk]]] = []
        self._finished: list[tuple[IngestedFile, list[str]]] = []  # read; to be noted once what waits is in the index
        self._coming: deque[_Batch] = deque()  # being embedded, the oldest first
        self._saved_s, self._num_embedded = perf_counter(), 0

    def read(self, path: str) -> None:
        """One file: nothing to do when its bytes are known."""
        try:
            file = self._reader.open(path)
            version = self._make_file_version(path, file.digest)
            note = self._notes.get(path)
            if note is not None and note.version == version:
                self._record_unchanged(note)
            else:
                self._queue_changed(path, version, file.read())
        except FileNotFoundError:  # gone since its folder was listed, or a link to nowhere
            if path in self.scan.named_files:
                self.result.failures.append(ReadFailure(path, BROKEN_LINK_REASON))
        except NotADocumentError as error:
            self._empty.add(path)
            failures = self.result.failures if path in self.scan.named_files else self.result.skipped
            failures.append(ReadFailure(path, str(error)))
        except UsageError:
            raise  # nothing about this file: a chunk size that no text can meet
        except RagblendError as error:
            self._unread.add(path)
            self.result.failures.append(ReadFailure(path, str(error)))
        self.on_progress("read", len(self.result.sources), None)
        self._flush_if_many()

    def _record_unchanged(self, note: IngestedFile) -> None:
        sources = list(self._known.get(note.path, ()))
        self.result.sources += sources
        self.result.num_unchanged += len(sources)
        self._made_by.update(dict.fromkeys(sources, note.path))
        if (top := self._find_scan_root(note.path)) != note.top:
            self._finished.append((note._replace(top=top), []))

    def _queue_changed(self, path: str, version: str, contents: FileContents) -> None:
        had, sources = self._known.get(path, {}), []
        for document in contents.documents:
            source = document.source
            sources.append(source)
            self._made_by[source] = path
            wanted = f"{document.content_hash}:{self.chunker.version}"
            if had.get(source) == wanted:
                self.result.num_unchanged += 1
                continue
            chunks = locate(document, self.chunker.split(document))
            log.info("%s: %d characters in %d chunks", display_source(source), len(document.text), len(chunks))
            self._waiting.append((document, wanted, chunks))
            self.result.num_updated += source in had
            self._flush_if_many()  # a file may hold more documents than memory
        gone = [source for source in had.keys() - set(sources) if not contents.may_be_unread(source)]
        self.result.notes += (ReadFailure(source, sentence) for sentence, source in contents.notes.items())
        if contents.failure:
            self.result.failures.append(ReadFailure(path, contents.failure))
        # Known by its bytes only when the next run has nothing to say or to do about it.
        is_done = not contents.failure and not (gone and self.keep_missing)
        note = IngestedFile(path, version if is_done else "", self._find_scan_root(path))
        self._finished.append((note, [] if self.keep_missing else sorted(gone)))
        self.result.sources += sources
        if path not in self._notes:
            self.result.arrived.add(version)

    def _flush_if_many(self) -> None:
        if sum(len(chunks) for _, _, chunks in self._waiting) >= _EMBED_BATCH:
            self.flush(self._workers.num_ahead if self._workers is not None else 0)

    def flush(self, num_ahead: int) -> None:
        """Have what waits embedded; index it, and what was sent before, up to `num_ahead` batches that are not done."""
        texts = [chunk.text for _, _, chunks in self._waiting for chunk in chunks]
        self._coming.append(_Batch(self._waiting, self._finished, self._embed(texts)))
        self._waiting, self._finished = [], []
        while len(self._coming) > num_ahead:
            self._commit(self._coming[0])
            self._coming.popleft()  # where the index refused it, it is refused again, outside of any file
        if perf_counter() - self._saved_s > _SAVE_EVERY_S:
            self.index.save()
            self._saved_s = perf_counter()

    def _embed(self, texts: list[str]) -> Callable[[], Mapping[str, FloatArray]]:
        missing = self.index.find_texts_without_vectors(texts) if self._workers is not None else []
        if self._workers is None or not missing:
            return dict
        rows = self._workers.embed(missing, self.index.manifest.embedder)
        return lambda: dict(zip(missing, rows(), strict=True))

    def _commit(self, batch: _Batch) -> None:
        """Index a batch, then note the files that are finished by it. Killed in between, they are read again."""
        if batch.documents:
            texts = [chunk.text for _, _, chunks in batch.documents for chunk in chunks]
            vectors = self.index.embed(texts, batch.wait_for_vectors())
            first = 0
            for document, version, chunks in batch.documents:
                rows = vectors[first : first + len(chunks)]
                file = self._made_by[document.source]
                self.index.add_document(document.source, version, chunks, rows, file=file)
                first += len(chunks)
            self._num_embedded += first
            self.on_progress("embed", self._num_embedded, None)
        for _, gone in batch.files:
            self._remove(gone)
        if batch.files:
            self.index.record_files(note for note, _ in batch.files)

    def remove_missing(self) -> None:
        """Take out the documents of files that are not there any more."""
        for note in self.index.files().values():
            if self.scan.is_covered(note.path) and self._is_missing(note):
                self._remove(self._known.get(note.path, ()))

    def _is_missing(self, note: IngestedFile) -> bool:
        path, found = note.path, self.scan
        if path in self._empty or path in found.links:
            return True
        if path in self._unread or path in found.filtered_out or found.is_below_unreadable(path):
            return False
        return _is_deleted(path) or found.is_hidden(path, note.top)

    def _remove(self, sources: Iterable[str]) -> None:
        for source in sources:
            with suppress(NotFoundError):  # another process may have been faster
                self.index.remove_document(source)
                self.result.removed.append(source)

    def _find_scan_root(self, path: str) -> str:
        """What brought a file in: the widest of the folders that ever did."""
        top, note = self.scan.files[path], self._notes.get(path)
        return note.top if note is not None and is_in(top, note.top) else top

    def _make_file_version(self, path: str, digest: str) -> str:
        return f"{digest}:{self._reader.version(path)}:{self.chunker.version}"


def find_moved_files(index: ChunkIndex, followed: SyncResult, found: FolderScan) -> dict[str, int]:
    """Folders and files outside of `scan` that are gone, where files with these very bytes came from before; how many.

    A folder that was moved leaves such a trace, and its documents a second time.
    """
    lost: dict[str, int] = {}
    for note in index.files().values() if followed.arrived else ():
        if note.version in followed.arrived and not found.is_covered(note.path) and _is_deleted(note.path):
            lost[note.top] = lost.get(note.top, 0) + 1
    return lost


def _is_deleted(path: str) -> bool:
    """True if there is no such file, False also if that is unknown."""
    try:
        return stat.S_ISDIR(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
