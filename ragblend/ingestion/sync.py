"""`sync_index`: adds new and changed files to an index, and removes the documents of missing files.

A file is unchanged if the digest of its bytes and the versions of reader and chunker are unchanged. It is then not read
again. A document is unchanged if its text, metadata and chunker are. Deletes no KV (see `deletion`) and prefills
nothing. Depends on the index and on readers.
"""

from __future__ import annotations

import logging
import stat
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ragblend.catalog.indexed_documents import IngestedFile
from ragblend.chunker import Splitter
from ragblend.corpus.citations import add_pages_and_headings
from ragblend.corpus.documents import Document, FileDocuments
from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.folder_scan import (
    BROKEN_LINK_REASON,
    FolderScan,
    ReadFailure,
    display_source,
    is_same_or_below,
)
from ragblend.corpus.loaders import DEFAULT_READER, FileReader
from ragblend.errors import NotADocumentError, NotFoundError, RagblendError, UsageError
from ragblend.index import ChunkIndex
from ragblend.ingestion.ray_workers import RayWorkers
from ragblend.ingestion.report import IngestReport, Progress
from ragblend.prompt.types import Chunk

log = logging.getLogger(__name__)

_EMBED_BATCH = 64  # chunks per embedding call; documents are stored whole, so a batch may be a little larger


class ChunkerConfig(NamedTuple):
    """A function that splits documents into chunks, and its version. With a new version, documents are split again."""

    split: Splitter
    version: str


@dataclass(slots=True)
class SyncResult:
    """The result of one `sync_index`. `report`: documents that it read, left unchanged, updated or removed."""

    report: IngestReport
    sources: list[str] = field(default_factory=list)  # of new, updated and unchanged documents, in reading order
    new_files: dict[str, list[str]] = field(default_factory=dict)  # digest -> paths of files that are new in the index


def sync_index(
    index: ChunkIndex,
    scan: FolderScan,
    chunker: ChunkerConfig,
    on_progress: Progress,
    workers: RayWorkers | None = None,
    *,
    keep_missing: bool = False,
    reader: FileReader = DEFAULT_READER,
) -> SyncResult:
    """Add new and changed documents of `scan` to the index, and remove those whose file or record is missing.

    Only documents from the files and folders of `scan` are removed. A document also counts as missing if its file
    contains no document any more, or if a `.gitignore` file now excludes it. Documents that the pattern of `scan`
    excludes are kept, and so are documents of unreadable files. With `keep_missing`, no document is removed. Files that
    were last read by another `reader` are read again. `workers` embed while the next files are read.
    """
    run = _SyncPass(index, scan, chunker, on_progress, workers, keep_missing, reader)
    on_progress("read", 0, None)
    for path in scan.files:
        run.read(path)
    run.flush(max_waiting_batches=0)
    if not keep_missing:
        run.remove_missing()
    if not index.is_saved:
        index.save()
    run.report.num_documents = len(run.result.sources)
    return run.result


class _Batch(NamedTuple):
    """Documents to be indexed, and files that are completely read once these documents are indexed.

    `wait_for_vectors` returns the vectors by text that workers computed. The index embeds the other texts.
    """

    documents: list[tuple[Document, str, list[Chunk]]]  # with version and chunks
    files: list[tuple[IngestedFile, list[str]]]  # with the sources of removed documents
    wait_for_vectors: Callable[[], Mapping[str, FloatArray]]


class _SyncPass:
    """The state of one `sync_index`: records of known files, and batches that are being embedded."""

    def __init__(
        self,
        index: ChunkIndex,
        scan: FolderScan,
        chunker: ChunkerConfig,
        on_progress: Progress,
        workers: RayWorkers | None,
        keep_missing: bool,
        reader: FileReader,
    ) -> None:
        self.index, self.scan, self.chunker = index, scan, chunker
        self.on_progress, self.keep_missing = on_progress, keep_missing
        self._workers, self._reader = workers, reader
        self.report = IngestReport(failures=list(scan.unreadable), skipped=list(scan.skipped), ignored=scan.ignored)
        self.result = SyncResult(self.report)
        self._records, self._known = index.files(), index.content_hashes_by_file()  # by path
        self._unread: set[str] = set()  # existing files that could not be read; their documents are kept
        self._empty: set[str] = set()  # files that were read and are no documents
        self._made_by: dict[str, str] = {}  # file by source
        self._waiting: list[tuple[Document, str, list[Chunk]]] = []
        self._finished: list[tuple[IngestedFile, list[str]]] = []  # recorded after the waiting documents are indexed
        self._batches: deque[_Batch] = deque()  # being embedded, oldest first
        self._num_embedded = 0

    def read(self, path: str) -> None:
        """Read one file, unless it is unchanged."""
        try:
            file = self._reader.open(path)
            version = self._make_file_version(path, file.digest)
            record = self._records.get(path)
            if record is not None and record.version == version:
                self._record_unchanged(record)
            else:
                self._queue_changed(path, version, file.read())
        except FileNotFoundError:  # deleted after its folder was listed, or a broken link
            if path in self.scan.named_files:
                self.report.failures.append(ReadFailure(path, BROKEN_LINK_REASON))
        except NotADocumentError as error:
            self._empty.add(path)
            failures = self.report.failures if path in self.scan.named_files else self.report.skipped
            failures.append(ReadFailure(path, str(error)))
        except UsageError:
            raise  # not an error of this file: no text fits the chunk size
        except RagblendError as error:
            self._unread.add(path)
            self.report.failures.append(ReadFailure(path, str(error)))
        self.on_progress("read", len(self.result.sources), None)
        self._flush_if_many()

    def _record_unchanged(self, record: IngestedFile) -> None:
        sources = list(self._known.get(record.path, ()))
        self.result.sources += sources
        self.report.num_unchanged += len(sources)
        self._made_by.update(dict.fromkeys(sources, record.path))
        if (top := self._find_scan_root(record.path)) != record.top:
            self._finished.append((record._replace(top=top), []))

    def _queue_changed(self, path: str, version: str, contents: FileDocuments) -> None:
        old_hashes, sources = self._known.get(path, {}), []
        for document in contents.documents:
            source = document.source
            sources.append(source)
            self._made_by[source] = path
            document_version = f"{document.content_hash}:{self.chunker.version}"
            if old_hashes.get(source) == document_version:
                self.report.num_unchanged += 1
                continue
            chunks = add_pages_and_headings(document, self.chunker.split(document))
            log.info("%s: %d characters in %d chunks", display_source(source), len(document.text), len(chunks))
            self._waiting.append((document, document_version, chunks))
            self.report.num_updated += source in old_hashes
            self._flush_if_many()  # the documents of a file may be larger than memory
        missing_sources = [
            source for source in old_hashes.keys() - set(sources) if not contents.is_unread_record(source)
        ]
        self.report.notes += (ReadFailure(source, sentence) for sentence, source in contents.notes.items())
        if contents.failure:
            self.report.failures.append(ReadFailure(path, contents.failure))
        # Without a version, the next ingestion reads the file again: to report the failure again, or remove documents.
        is_done = not contents.failure and not (missing_sources and self.keep_missing)
        record = IngestedFile(path, version if is_done else "", self._find_scan_root(path))
        self._finished.append((record, [] if self.keep_missing else sorted(missing_sources)))
        self.result.sources += sources
        if path not in self._records:
            self.result.new_files.setdefault(_digest(version), []).append(path)

    def _flush_if_many(self) -> None:
        if sum(len(chunks) for _, _, chunks in self._waiting) >= _EMBED_BATCH:
            self.flush(self._workers.max_waiting_batches if self._workers is not None else 0)

    def flush(self, max_waiting_batches: int) -> None:
        """Start to embed the waiting documents. Index the oldest batches until `max_waiting_batches` are left."""
        texts = [chunk.text for _, _, chunks in self._waiting for chunk in chunks]
        self._batches.append(_Batch(self._waiting, self._finished, self._embed(texts)))
        self._waiting, self._finished = [], []
        while len(self._batches) > max_waiting_batches:
            self._commit(self._batches[0])
            self._batches.popleft()  # not before: `read` records an error as its file's, and the last `flush` raises it

    def _embed(self, texts: list[str]) -> Callable[[], Mapping[str, FloatArray]]:
        missing = self.index.find_unknown_texts(texts) if self._workers is not None else []
        if self._workers is None or not missing:
            return dict
        rows = self._workers.embed(missing, self.index.manifest.embedder)
        return lambda: dict(zip(missing, rows(), strict=True))

    def _commit(self, batch: _Batch) -> None:
        """Index a batch, then record its files. After a kill in between, the files are read again."""
        if batch.documents:
            texts = [chunk.text for _, _, chunks in batch.documents for chunk in chunks]
            self.on_progress("embed", self._num_embedded, None)  # that of a long document takes minutes
            vectors = self.index.embed(texts, batch.wait_for_vectors())
            first = 0
            for document, version, chunks in batch.documents:
                rows = vectors[first : first + len(chunks)]
                file = self._made_by[document.source]
                self.index.add_document(document.source, version, chunks, rows, file=file)
                first += len(chunks)
            self._num_embedded += first
            self.on_progress("embed", self._num_embedded, None)
        for _, missing_sources in batch.files:
            self._remove(missing_sources)
        if batch.files:
            self.index.record_files(record for record, _ in batch.files)

    def remove_missing(self) -> None:
        """Remove the documents of missing files."""
        for record in self.index.files().values():
            if self.scan.is_covered(record.path) and self._is_missing(record):
                self._remove(self._known.get(record.path, ()))
                same = self.result.new_files.get(_digest(record.version))
                if same and _is_deleted(record.path):
                    self.report.renamed[record.path] = same.pop(0)

    def _is_missing(self, record: IngestedFile) -> bool:
        path, scan = record.path, self.scan
        if path in self._empty or path in scan.links:
            return True
        if path in self._unread or path in scan.filtered_out or scan.is_below_unreadable(path):
            return False
        return _is_deleted(path) or scan.has_left_out(path, record.top)

    def _remove(self, sources: Iterable[str]) -> None:
        for source in sources:
            with suppress(NotFoundError):  # another process may have removed it
                self.index.remove_document(source)
                self.report.removed.append(source)

    def _find_scan_root(self, path: str) -> str:
        """Return the path through which the file was ingested; after several ingestions the uppermost folder."""
        top, record = self.scan.files[path], self._records.get(path)
        return record.top if record is not None and is_same_or_below(top, record.top) else top

    def _make_file_version(self, path: str, digest: str) -> str:
        return f"{digest}:{self._reader.reader_version(path)}:{self.chunker.version}"


def explain_empty_corpus(paths: str | Path | Sequence[str | Path], glob: str, report: IngestReport) -> str:
    """Return the message of an EmptyCorpusError, with the first skipped and the first ignored file."""
    names = str(paths) if isinstance(paths, str | Path) else ", ".join(str(path) for path in paths)
    reasons = [
        *(f"{display_source(path)} {reason}" for path, reason in report.skipped[:1]),
        *(f".gitignore excludes {display_source(path)}: name it to read it" for path in report.ignored[:1]),
    ]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{names} contains no documents that match {glob!r}{why}; name a folder with text files"


def count_moved_files(index: ChunkIndex, result: SyncResult, scan: FolderScan) -> dict[str, int]:
    """Return {path of an earlier ingestion (`IngestedFile.top`): number of its files that were moved into `scan`}.

    A moved file was indexed under a path outside of `scan`. No file is at that path any more, and a new file of
    `result` has the same bytes. The documents of a moved file are in the index twice.
    """
    lost: dict[str, int] = {}
    for record in index.files().values() if result.new_files else ():
        is_new = bool(result.new_files.get(_digest(record.version)))
        if is_new and not scan.is_covered(record.path) and _is_deleted(record.path):
            lost[record.top] = lost.get(record.top, 0) + 1
    return lost


def _digest(version: str) -> str:
    """Return the digest of a file's bytes in its version, see `_make_file_version`."""
    return version.partition(":")[0]


def _is_deleted(path: str) -> bool:
    """Return True if `path` does not exist or is a folder now; False also if that cannot be checked."""
    try:
        return stat.S_ISDIR(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
