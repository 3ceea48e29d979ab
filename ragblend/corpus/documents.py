"""Files -> documents: text, Markdown, HTML, CSV, JSON, JSON lines and PDF, one at a time or folder by folder.

Tells text from garbage and names the remedy for what it cannot read. Knows nothing about tokens, chunks or models;
`folders` knows which files there are. Read `iter_documents` first; the readers below it are one function per format.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import logging
import math
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ragblend.corpus.folders import ReadFailure, Walk, printable, shown, source_of, walk
from ragblend.corpus.pages import read_page
from ragblend.errors import EmptyCorpusError, NotADocumentError, UnreadableDocumentError

logger = logging.getLogger(__name__)

READERS_VERSION = 2
"""To be raised when a reader below gives another text for the same bytes: files that did not change are read again."""

OUTSIDE = "is a link that leads out of the folder; to have that file read, name it too"
NO_FILE = "is a link to a file that is not there; restore it, or remove the link"
MAX_FILE_MIB = 256.0
"""Of a file that is read, where nobody said otherwise; 0: no limit."""

_PEEK_BYTES = 8192  # enough to tell a picture from a text without reading all of it


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name. `source` is unique within a corpus; equal texts under two sources are fine.

    What is read from a file has its absolute path (`folders.normal_path`), and `#record` or `#record.passage`, counted
    from 0, for files that hold several.
    """

    text: str
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def content_hash(self) -> str:
        """32 hex digits; equal when text and metadata are equal, so ingestion can skip what did not change."""
        metadata = json.dumps(dict(self.metadata), sort_keys=True, default=str)
        return hashlib.blake2b(f"{metadata}\0{self.text}".encode(), digest_size=16).hexdigest()


class Skipped(NamedTuple):
    """A file in a folder that is no document: empty, a picture, a program, a configuration; and how that was told."""

    path: str
    reason: str


@dataclass(slots=True)
class FileContents:
    """The documents of one file. `failure` says why some of its records could not be read; they are left out."""

    documents: Iterable[Document]
    failure: str = ""
    unread: tuple[str, ...] = ()  # what the sources of these records are, or begin with (and then comes a full stop)

    def may_be_unread(self, source: str) -> bool:
        """Whether a source belongs to a record that could not be read."""
        return any(source == start or source.startswith(f"{start}.") for start in self.unread)


def load_documents(path: str | Path, *, glob: str = "*") -> list[Document]:
    """Every document of one file or folder; all or nothing.

    Raises NotFoundError (no such path), UnreadableDocumentError (the first file that should be text and is not) and
    EmptyCorpusError (a folder where nothing matches `glob`). To go on after a bad file, use `iter_documents`.
    """
    documents = []
    for item in iter_documents([path], glob=glob):
        if isinstance(item, ReadFailure):
            raise UnreadableDocumentError(f"cannot read {shown(item.path)}: {item.reason}")
        if isinstance(item, Document):
            documents.append(item)
    if not documents:
        raise EmptyCorpusError(f"{path} holds no file that matches {glob!r}; name another folder or pattern")
    return documents


def iter_documents(paths: Iterable[str | Path], *, glob: str = "*") -> Iterator[Document | ReadFailure | Skipped]:
    """Documents of all `paths` in order, and what became of the other files; a missing path raises NotFoundError now.

    What folders hold, and in which order, is told by `folders.walk`. In them, a file that is no document is Skipped;
    one that should be text and is not (by its name: .md, .json, ...), or that was named itself, is a ReadFailure.
    """
    return _documents(walk([paths] if isinstance(paths, str | Path) else paths, glob))


def _documents(found: Walk) -> Iterator[Document | ReadFailure | Skipped]:
    yield from found.unreadable
    yield from (Skipped(path, OUTSIDE) for path in found.outside)
    for path in found.files:
        try:
            contents = open_source(path).read()
            yield from contents.documents
        except FileNotFoundError:  # gone since its folder was listed, or a link to nowhere
            if path in found.named:
                yield ReadFailure(path, NO_FILE)
        except NotADocumentError as error:
            yield (ReadFailure if path in found.named else Skipped)(path, str(error))
        except UnreadableDocumentError as error:
            yield ReadFailure(path, str(error))
        else:
            if contents.failure:
                yield ReadFailure(path, contents.failure)


class SourceFile(NamedTuple):
    """A file as it is at this moment: what its bytes are known by (32 hex digits), and what reads them."""

    digest: str
    read: Callable[[], FileContents]


def open_source(path: str, max_file_mib: float = MAX_FILE_MIB) -> SourceFile:
    """A file to read, its format told by its name; of JSON lines, no more than one is held at a time.

    Raises FileNotFoundError, NotADocumentError and UnreadableDocumentError, also for a file beyond `max_file_mib` (0:
    no limit). `read` raises what `read_documents` does; of JSON lines, what is wrong is known as the documents are
    asked for, and which were left out behind the last.
    """
    if _suffix(path) in _LINES:
        with _opened(path, max_file_mib) as file:
            if (head := file.peek(4)) and not _mark(head):
                digest = hashlib.file_digest(file, _digest).hexdigest()
                return SourceFile(digest, partial(_streamed, path, digest))
    data = read_bytes(path, max_file_mib)
    return SourceFile(_digest(data).hexdigest(), partial(read_documents, path, data))


def read_bytes(path: str, max_file_mib: float = MAX_FILE_MIB) -> bytes:
    """What a file holds at this moment. Raises what `open_source` does."""
    with _opened(path, max_file_mib) as file:
        return file.read()


def _streamed(path: str, digest: str) -> FileContents:
    """The documents of JSON lines, one at a time."""
    _check_name(path)
    contents = FileContents(())
    contents.documents = _documents_of(path, _stream_jsonl(path, digest), contents)
    return contents


@contextmanager
def _opened(path: str, max_file_mib: float) -> Iterator[io.BufferedReader]:
    """A file to read from its beginning, if it is one that is read here and not too large."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise UnreadableDocumentError("is neither a file nor a folder; give regular files")
        with Path(path).open("rb") as file:
            head = file.peek(_PEEK_BYTES)[:_PEEK_BYTES]
            if not _is_known(path) and b"\0" in head and not _mark(head):
                raise NotADocumentError(_BINARY)
            size_mib = os.fstat(file.fileno()).st_size / (1 << 20)
            if max_file_mib and size_mib > max_file_mib:
                raise UnreadableDocumentError(
                    f"holds {size_mib:.1f} MiB, more than the setting max_file_mib allows ({max_file_mib:g}); split "
                    f"it, or raise the limit: RAGBLEND_MAX_FILE_MIB={math.ceil(size_mib)}"
                )
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableDocumentError(f"{error.strerror or error}; check its permissions") from error


def _digest(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def read_documents(path: str, data: bytes) -> FileContents:
    """The documents of a file that holds `data`, its format told by the file's name.

    Raises NotADocumentError where there is nothing to read, UnreadableDocumentError with reason and remedy where there
    should be and nothing can be read.
    """
    _check_name(path)
    if not data:
        raise NotADocumentError("is empty (0 bytes)")
    contents = FileContents(())
    try:
        contents.documents = list(_documents_of(path, _READERS.get(_suffix(path), _read_text)(data), contents))
    except NotADocumentError:
        raise
    except UnreadableDocumentError as error:
        if _is_known(path):
            raise
        raise NotADocumentError(str(error)) from error
    return contents


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UnreadableDocumentError(f"its name is not UTF-8 ({printable(path)}); rename it") from error


def _documents_of(path: str, found: Found, contents: FileContents) -> Iterator[Document]:
    """The documents among what was found in a file; `contents` is told what could not be read."""
    num_found = num_records = num_documents = 0
    bad: list[BadRecord] = []
    for record in found:
        num_found += 1
        if isinstance(record, BadRecord):
            bad.append(record)
            continue
        num_records += 1
        text = _sound(record.text)
        if text.strip():
            num_documents += 1
            yield Document(text, source_of(path, record.key), record.metadata)
    if bad:
        reasons = "; ".join(record.reason for record in bad[:3]) + ("; ..." if len(bad) > 3 else "")
        contents.failure = f"{len(bad)} of {num_found} records could not be read and are left out: {reasons}"
        contents.unread = tuple(source_of(path, record.key) for record in bad)
        if not num_records:
            raise UnreadableDocumentError(f"none of its {num_found} records can be read: {reasons}")
    elif not num_documents:
        if _suffix(path) == ".pdf":
            raise UnreadableDocumentError("holds no text; run OCR on it first")
        raise NotADocumentError("holds no text")


def reader_version(path: str) -> str:
    """What decides, besides a file's bytes, which text is read from it: our readers' version, and others'."""
    package = {".pdf": "pypdf", ".html": "trafilatura", ".htm": "trafilatura", ".xhtml": "trafilatura"}.get(
        _suffix(path)
    )
    return f"{READERS_VERSION}:{_version_of(package)}" if package else str(READERS_VERSION)


@cache
def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _suffix(path: str) -> str:
    return PurePath(path).suffix.lower()


def _is_known(path: str) -> bool:
    """Whether the file's name says that it is text of a kind that is read here."""
    return _suffix(path) in _READERS or _suffix(path) in _PLAIN


_SURROGATE = re.compile("[\ud800-\udfff]")


def _sound(text: str) -> str:
    """`text` with one kind of line break, and with lone surrogates (JSON can spell them) as U+FFFD: neither hashes."""
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Record(NamedTuple):
    """A text in a file. `key` is put behind the file's path to make its source."""

    key: str
    text: str
    metadata: dict[str, Any]


class BadRecord(NamedTuple):
    """A place in a file where a text should be and cannot be read."""

    key: str
    reason: str


Found = Iterator[Record | BadRecord]

_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_MAX_NAMED_LINES = 10  # bad lines of one file that are named one by one
_SAMPLE_CHARS = 65536
_MAX_ODD_SHARE = 0.05  # of control, private and unassigned characters; prose has none, random bytes far more


_BINARY = "is a binary file (NUL bytes); convert it to text, HTML or PDF first"


def _mark(data: bytes) -> str | None:
    """The encoding that the data's byte order mark names."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)


def _decode(data: bytes, declared: str = "") -> str:
    """Text of `data`: by its byte order mark, else as `declared`, else UTF-8. No other encoding is guessed:
    latin-1 maps every byte to some character, so it would turn any garbage into a document."""
    marked = _mark(data)
    if marked is None and b"\0" in data:
        raise UnreadableDocumentError(_BINARY)
    try:
        text = data.decode(marked or declared or "utf-8-sig")
    except (UnicodeError, LookupError) as error:
        where = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UnreadableDocumentError(_not_text(marked or declared or "UTF-8", where)) from error
    _check_sample(text[:_SAMPLE_CHARS])
    return text


def _not_text(encoding: str, where: str) -> str:
    return (
        f"is not {encoding} text ({where}); if it is text in another encoding, "
        "convert it: iconv -f ENCODING -t UTF-8 FILE"
    )


def _check_sample(sample: str) -> None:
    """Raise UnreadableDocumentError for what is no text, by how it begins."""
    num_odd = sum(
        unicodedata.category(char) in {"Cc", "Cn", "Co", "Cs"} and char not in "\t\n\r\f\x1b" for char in sample
    )
    if num_odd > _MAX_ODD_SHARE * len(sample):
        raise UnreadableDocumentError(
            f"is no text: {num_odd} of its first {len(sample)} characters are control or unassigned codes; "
            "convert it to text, HTML or PDF first"
        )


def _read_text(data: bytes) -> Found:
    yield Record("", _decode(data), {})


_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)


_MAX_EXTRACTED_CHARS = 2 << 20  # trafilatura takes 3 to 20 s per megabyte, and larger pages are data, not articles


def _read_html(data: bytes) -> Found:
    found = None if data.startswith(b"\xef\xbb\xbf") else _CHARSET.search(data[:4096])
    declared = found[1].decode().lower() if found else ""
    # Browsers read "iso-8859-1" as Windows-1252 (WHATWG Encoding Standard), and pages rely on it for quotes and dashes.
    page = _decode(data, "cp1252" if declared in {"iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"} else declared)
    parsed = read_page(page)
    extract = _trafilatura_extract() if len(page) <= _MAX_EXTRACTED_CHARS else None
    text = extract(page, include_comments=False) if extract else None
    yield Record("", text or parsed.text, {"title": parsed.title} if parsed.title else {})


@cache
def _trafilatura_extract() -> Callable[..., str | None] | None:
    """The extra `html`, which drops menus and footers that our own parser keeps; None when it is not installed."""
    try:
        from trafilatura import extract
    except ImportError as error:
        if error.name != "trafilatura":  # installed, but for example its lxml came without lxml_html_clean
            logger.warning("trafilatura does not import (%s); pages are read by the simpler parser", error)
        return None
    return extract  # type: ignore[no-any-return]


_TEXT_FIELDS = ("text", "content", "page_content")


def _read_csv(data: bytes) -> Found:
    """One document per row when a column is called text, content or page_content; else one, a paragraph per row."""
    text = _decode(data)
    header = text.partition("\n")[0]
    delimiter = max(",;\t|\x1f", key=lambda mark: (header.count(mark), mark == "\x1f"))  # \x1f: a single column
    limit = csv.field_size_limit(sys.maxsize >> 32)  # 128 KiB otherwise: less than a document may have
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restkey="", restval=""))
    except csv.Error as error:
        raise UnreadableDocumentError(f"is not CSV ({error}); repair it or rename it to .txt") from error
    finally:
        csv.field_size_limit(limit)
    wide = {number for number, row in enumerate(rows) if "" in row and isinstance(row[""], list)}
    column = next((name for name in (rows[0] if rows else ()) if name.strip().lower() in _TEXT_FIELDS), None)
    remedy = f"has more fields than the header; quote the {delimiter!r} in its text"
    if column is None:
        if wide:
            raise UnreadableDocumentError(f"row {min(wide) + 1} {remedy}")
        lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
        yield Record("", "\n\n".join(lines), {})
        return
    for number, row in enumerate(rows):
        if number in wide:
            yield BadRecord(f"#{number}", f"row {number + 1} {remedy}")
            continue
        others = {name: value for name, value in row.items() if name and name != column}
        yield Record(f"#{number}", row[column], others)


def _read_json(data: bytes) -> Found:
    try:
        value = _parse_json(_decode(data))
    except (ValueError, RecursionError) as error:
        raise UnreadableDocumentError(f"is not JSON ({error}); repair it or rename it to .txt") from error
    if isinstance(value, list):
        for number, record in enumerate(value):
            yield from _listed(record, number, f"item {number + 1}")
        return
    try:
        yield from _record(value, "", "#")
    except NotADocumentError as error:  # a configuration, most often
        raise NotADocumentError(f"its value {error}") from error


def _parse_json(text: str) -> Any:
    """A JSON value; a whole number may have more digits than Python's own integers are read with (4,300)."""

    def number(digits: str) -> int | Decimal:
        try:
            return int(digits)
        except ValueError:
            return Decimal(digits)

    return json.loads(text, parse_int=number)


def _as_number(digits: str) -> tuple[int, str]:
    """What decimal digits of any script, however many, are sorted by.

    >>> sorted(["10", "9", "009", "1" * 5000], key=_as_number)[:3]
    ['9', '009', '10']
    """
    plain = "".join(str(unicodedata.decimal(digit)) for digit in digits).lstrip("0")
    return len(plain), plain


def _read_jsonl(data: bytes) -> Found:
    return _jsonl(_decode(data).split("\n"))  # splitlines() would cut inside strings


def _stream_jsonl(path: str, digest: str) -> Found:
    """`_read_jsonl` of a file without a byte order mark of UTF-16, a line at a time."""
    with _opened(path, 0) as file:
        read = _check_utf8(file)
        if read != digest:
            raise UnreadableDocumentError("changed while it was read; run the command again")
        file.seek(0)
        # Cut at "\n" alone, which in UTF-8 is a part of no other character.
        yield from _jsonl(line.decode().removesuffix("\n") for line in _without_mark(file))


def _without_mark(file: io.BufferedReader) -> Iterator[bytes]:
    first = file.readline()
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from file


def _check_utf8(file: io.BufferedReader) -> str:
    """Raise what `_decode` does for what a file holds, a piece at a time; its digest."""
    decoder, digest = codecs.getincrementaldecoder("utf-8")(), _digest()
    sample, num_bytes = "", 0
    while True:
        data = file.read(1 << 20)
        if b"\0" in data:
            raise UnreadableDocumentError(_BINARY)
        num_held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UnreadableDocumentError(_not_text("UTF-8", f"byte {num_bytes - num_held + error.start}")) from error
        digest.update(data)
        num_bytes += len(data)
        if len(sample) < _SAMPLE_CHARS:
            sample += text[:_SAMPLE_CHARS]
        if not data:
            _check_sample(sample[:_SAMPLE_CHARS].removeprefix("\ufeff"))
            return digest.hexdigest()


def _jsonl(lines: Iterable[str]) -> Found:
    number = 0  # of the record; lines are counted as editors do, from 1 and with the blank ones
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            reason = f"line {line_number} is not JSON ({error}); put one value on each line"
            yield BadRecord(f"#{number}", reason)
        else:
            yield from _listed(record, number, f"line {line_number}")
        number += 1


def _listed(value: Any, number: int, place: str) -> Found:
    """Documents of one of several JSON values."""
    try:
        yield from _record(value, f"#{number}", ".")
    except UnreadableDocumentError as error:
        yield BadRecord(f"#{number}", f"{place} {error}")


def _record(value: Any, key: str, joint: str) -> Iterator[Record]:
    """Documents of one JSON value: a string, {text: ...}, {ctxs: [...]} (MuSiQue) or {"0": ..., ...} (CacheBlend)."""
    if isinstance(value, str):
        yield Record(key, value, {})
        return
    if isinstance(value, dict):
        if isinstance(value.get("ctxs"), list):
            # Question and answers stay out of the metadata: they belong to the record, not to the passage.
            for number, passage in enumerate(value["ctxs"]):
                try:
                    yield from _record(passage, f"{key}{joint}{number}", ".")
                except NotADocumentError as error:
                    raise UnreadableDocumentError(f"has a passage {number + 1} that {error}") from error
            return
        name = next((name for name in _TEXT_FIELDS if isinstance(value.get(name), str)), None)
        if name is not None:
            extra = value.get("metadata")
            fields = {key: item for key, item in value.items() if key not in {name, "metadata"}}
            yield Record(key, value[name], {**fields, **(extra if isinstance(extra, dict) else {})})
            return
        numbered = [name for name in value if name.isdecimal() and isinstance(value[name], str)]
        if numbered:
            for name in sorted(numbered, key=_as_number):
                yield Record(f"{key}{joint}{name}", value[name], {})
            return
    raise NotADocumentError(
        f"is neither a string nor an object with one of {', '.join(_TEXT_FIELDS)}, ctxs or numbered passages; "
        "rename the field that holds the text"
    )


def _read_pdf(data: bytes) -> Found:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise UnreadableDocumentError("PDF needs pypdf: pip install 'ragblend[pdf]'") from error
    try:
        pages = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # pypdf raises whatever a broken or locked file makes it stumble over
        raise UnreadableDocumentError(
            f"is a damaged or locked PDF ({error or type(error).__name__}); repair it or save it without a password"
        ) from error
    yield Record("", "\n\n".join(pages), {"num_pages": len(pages)})


_LINES = frozenset({".jsonl", ".ndjson"})
_PLAIN = frozenset({".txt", ".text", ".md", ".markdown", ".mdx", ".rst", ".adoc", ".asciidoc", ".org", ".tex"})
_READERS: dict[str, Callable[[bytes], Found]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    **dict.fromkeys(_LINES, _read_jsonl),
    ".json": _read_json,
    ".pdf": _read_pdf,
}
