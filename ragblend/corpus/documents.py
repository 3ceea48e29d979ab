"""Reading of a file's documents. The format follows from the file name's suffix.

An error says why a file has no documents and what to do. Does not depend on tokens, chunks or models; `folder_scan`
lists the files, `readers` holds one reader per format. Read `open_source` first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from ragblend.config import Settings
from ragblend.corpus.folder_scan import make_source, printable
from ragblend.corpus.readers.encodings import new_file_hash, unify_line_breaks
from ragblend.corpus.readers.formats import (
    READERS,
    READERS_VERSION,
    RECORD_READERS,
    STREAMING_READERS,
    TEXT_READERS,
    TEXT_SUFFIXES,
)
from ragblend.corpus.readers.rejected import not_a_document_reason
from ragblend.corpus.readers.text import read_text
from ragblend.corpus.readers.types import Mark, ParsedRecords, UnreadableRecord
from ragblend.errors import NotADocumentError, UnreadableDocumentError
from ragblend.option_fields import default_of

MAX_FILE_MIB: float = default_of(Settings, "max_file_mib")
"""Default size limit of a file in MiB; 0: no limit."""

_PEEK_BYTES = 8192  # read to detect pictures and other files without text


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `source` is unique within a corpus; several sources may have equal texts.

    The source of a file's document is the file's absolute path (`folder_scan.normal_path`). If the file holds several
    documents, `#record` or `#record.passage` follows, counted from 0.
    """

    text: str
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    marks: tuple[Mark, ...] = ()  # pages and headings, in the order of their offsets

    @property
    def content_hash(self) -> str:
        """32 hex digits that change with text, metadata or marks. Ingestion skips documents with an unchanged hash."""
        metadata = json.dumps([dict(self.metadata), self.marks], sort_keys=True, default=str)
        return hashlib.blake2b(f"{metadata}\0{self.text}".encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class FileDocuments:
    """The documents of one file. A record that could not be read has no document.

    `failure`: the reasons why records could not be read; "" if all were read. `unread`: the sources of these records.
    `notes`: sentences on what was omitted or guessed, each with the first source that it is about.
    """

    documents: Iterable[Document]
    failure: str = ""
    unread: tuple[str, ...] = ()  # sources of unread records; a source also stands for its passages, SOURCE.NUMBER
    notes: dict[str, str] = field(default_factory=dict)  # sentence on an omission or a guess -> its first source

    def is_unread_record(self, source: str) -> bool:
        """Return True if `source` belongs to a record that could not be read."""
        return any(source == start or source.startswith(f"{start}.") for start in self.unread)


class OpenedFile(NamedTuple):
    """A file to ingest. `digest`: a hash of its bytes, 32 hex digits. `read`: returns its documents."""

    digest: str
    read: Callable[[], FileDocuments]


def open_source(path: str, max_file_mib: float = MAX_FILE_MIB, text_field: str = "") -> OpenedFile:
    """Return a file's digest and the function `read`, which reads its documents.

    Raises FileNotFoundError; NotADocumentError for a file that holds no text; UnreadableDocumentError for a file that
    cannot be read, or is larger than `max_file_mib` (0: no limit). `read` raises the errors of `read_documents`.

    JSON lines and Parquet files are read while the caller iterates over the documents. The iteration may raise the
    errors of `read_documents`, and `failure` is complete at its end.
    """
    stream = STREAMING_READERS.get(_suffix(path))
    with open_file(path, max_file_mib) as file:
        if stream is not None and file.peek(1):
            digest = hashlib.file_digest(file, new_file_hash).hexdigest()
            return OpenedFile(digest, partial(_read_stream, stream, path, digest, text_field))
        data = file.read()
    return OpenedFile(new_file_hash(data).hexdigest(), partial(read_documents, path, data, text_field))


@contextmanager
def open_file(path: str, max_file_mib: float, *, any_kind: bool = False) -> Iterator[BufferedReader]:
    """Yield the file, opened at its beginning.

    Raises the errors of `open_source`. `any_kind=True` accepts kinds of files that hold no text.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise UnreadableDocumentError("is neither a file nor a folder; pass regular files")
        with Path(path).open("rb") as file:
            head = file.peek(_PEEK_BYTES)[:_PEEK_BYTES]
            if not any_kind:
                _check_kind(path, head)
            size_mib = os.fstat(file.fileno()).st_size / (1 << 20)
            if max_file_mib and size_mib > max_file_mib:
                raise UnreadableDocumentError(
                    f"holds {size_mib:.1f} MiB, more than the setting max_file_mib allows ({max_file_mib:g}); split "
                    f"it, or raise the limit: `max_file_mib={math.ceil(size_mib)}`"
                )
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableDocumentError(f"{error.strerror or error}; check its permissions") from error


def read_documents(path: str, data: bytes, text_field: str = "") -> FileDocuments:
    """Return the documents of file `path`, whose bytes are `data`.

    `text_field`: field that holds the text of CSV, JSON and Parquet records; "" lets the reader choose. Raises
    NotADocumentError if the file holds nothing to read. Raises UnreadableDocumentError if it should hold text and
    cannot be read; the message has the reason and the fix.
    """
    _check_name(path)
    if not data:
        raise NotADocumentError("is empty (0 bytes)")
    _check_kind(path, data[:_PEEK_BYTES])
    contents = FileDocuments(())
    contents.documents = list(_to_documents(path, _find_reader(path, text_field)(data), contents))
    return contents


def _find_reader(path: str, text_field: str) -> Callable[[bytes], ParsedRecords]:
    suffix = _suffix(path)
    if text_field and suffix in RECORD_READERS:
        return partial(RECORD_READERS[suffix], text_field=text_field)
    return READERS.get(suffix) or TEXT_READERS.get(suffix, read_text)


def _check_kind(path: str, head: bytes) -> None:
    """Raise NotADocumentError for archives, pictures, programs and other files without text."""
    if reason := not_a_document_reason(PurePath(path).name, head, has_reader=_is_known(path)):
        raise NotADocumentError(reason)


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UnreadableDocumentError(f"its name is not UTF-8 ({printable(path)}); rename it") from error


def _read_stream(
    stream: Callable[[BinaryIO, str], ParsedRecords], path: str, digest: str, text_field: str
) -> FileDocuments:
    """Return the documents of a file that is read some records at a time.

    Iterating raises UnreadableDocumentError if the file no longer has this `digest`.
    """

    def records() -> ParsedRecords:
        with open_file(path, 0) as file:
            if hashlib.file_digest(file, new_file_hash).hexdigest() != digest:
                raise UnreadableDocumentError("changed while it was read; run the command again")
            file.seek(0)
            yield from stream(file, text_field)

    _check_name(path)
    contents = FileDocuments(())
    contents.documents = _to_documents(path, records(), contents)
    return contents


def _to_documents(path: str, parsed: ParsedRecords, contents: FileDocuments) -> Iterator[Document]:
    """Yield the documents of the records in `parsed`; set the failures and notes of `contents`."""
    num_found = num_documents = 0
    bad: list[UnreadableRecord] = []
    for record in parsed:
        num_found += 1
        if isinstance(record, UnreadableRecord):
            bad.append(record)
            continue
        for sentence in record.notes:
            contents.notes.setdefault(sentence, make_source(path, record.key))
        text = normalize_text(record.text)
        if has_visible_text(text):
            num_documents += 1
            yield Document(text, make_source(path, record.key), record.metadata, record.marks)
    if bad:
        reasons = "; ".join(record.reason for record in bad[:3]) + ("; ..." if len(bad) > 3 else "")
        contents.failure = f"{len(bad)} of {num_found} records could not be read and are left out: {reasons}"
        contents.unread = tuple(make_source(path, record.key) for record in bad)
        if len(bad) == num_found:
            raise UnreadableDocumentError(f"none of its {num_found} records can be read: {reasons}")
    elif not num_documents:
        if _suffix(path) == ".pdf":
            raise UnreadableDocumentError("holds no text; run OCR on it first")
        raise NotADocumentError("holds no text")


def has_visible_text(text: str) -> bool:
    """Return True if `text` has a character other than spaces, control and format characters (Unicode Cc, Cf).

    >>> has_visible_text(" a"), has_visible_text(" \\n"), has_visible_text("\\u200b\\ufeff")
    (True, False, False)
    """
    return not all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def reader_version(path: str, text_field: str = "") -> str:
    """Return the version of a file's reader. If the version changes, ragblend reads the file again.

    The version contains READERS_VERSION, and `text_field` for formats that use it. The versions of parser packages are
    left out: each upgrade would make ragblend read all files again, but changes few texts. Between two releases, 0 of
    38 pages (selectolax) and 5 of 93 files (PDFium) differed. Increase READERS_VERSION when a reader or a parser
    changes the golden digests of tests/corpus/readers/test_reader_goldens.py.
    """
    version = str(READERS_VERSION)
    return f"{version}:{text_field}" if text_field and _suffix(path) in RECORD_READERS else version


def _suffix(path: str) -> str:
    return PurePath(path).suffix.lower()


def _is_known(path: str) -> bool:
    """Return True if the file's suffix is one of text that a reader supports."""
    return _suffix(path) in READERS or _suffix(path) in TEXT_SUFFIXES


_SURROGATE = re.compile("[\ud800-\udfff]")


def normalize_text(text: str) -> str:
    """Return `text` with "\\n" line breaks and U+FFFD for lone surrogates, which JSON allows and UTF-8 does not."""
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return unify_line_breaks(text)
