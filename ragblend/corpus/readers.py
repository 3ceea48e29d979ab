"""Bytes -> the texts in them: one reader per format, told from garbage, with the remedy for what cannot be read.

A FORMAT IS ADDED HERE: a function of bytes in `READERS`. Knows nothing of files. See `documents` for whoever calls it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any, BinaryIO, NamedTuple

from ragblend.corpus.pages import read_page
from ragblend.errors import NotADocumentError, UnreadableDocumentError

logger = logging.getLogger(__name__)

READERS_VERSION = 2
"""To be raised when a reader below gives another text for the same bytes: files that did not change are read again."""


class ParsedRecord(NamedTuple):
    """A text in a file. `key` is put behind the file's path to make its source."""

    key: str
    text: str
    metadata: dict[str, Any]


class UnreadableRecord(NamedTuple):
    """A place in a file where a text should be and cannot be read."""

    key: str
    reason: str


ParsedRecords = Iterator[ParsedRecord | UnreadableRecord]

_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SAMPLE_CHARS = 65536
_MAX_ODD_SHARE = 0.05  # of control, private and unassigned characters; prose has none, random bytes far more


CHANGED_REASON = "changed while it was read; run the command again"
BINARY_REASON = "is a binary file (NUL bytes); convert it to text, HTML or PDF first"


def detect_bom_encoding(data: bytes) -> str | None:
    """The encoding that the data's byte order mark names."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)


def _decode(data: bytes, declared: str = "") -> str:
    """Text of `data`: by its byte order mark, else as `declared`, else UTF-8. No other encoding is guessed:
    latin-1 maps every byte to some character, so it would turn any garbage into a document."""
    marked = detect_bom_encoding(data)
    if marked is None and b"\0" in data:
        raise UnreadableDocumentError(BINARY_REASON)
    text = _decode_as(data, marked or declared or "utf-8-sig")
    _check_sample(text[:_SAMPLE_CHARS])
    return text


def _decode_as(data: bytes, encoding: str, start: int = 0) -> str:
    """The text of a file's bytes from `start` on. Raises UnreadableDocumentError, which says where they are none."""
    try:
        return data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        where = f"byte {start + error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UnreadableDocumentError(
            f"is not {'UTF-8' if encoding.startswith('utf-8') else encoding} text ({where}); if it is text in another "
            "encoding, convert it: iconv -f ENCODING -t UTF-8 FILE"
        ) from error


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


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """What a file is known by: 16 bytes."""
    return hashlib.blake2b(data, digest_size=16)


def read_text(data: bytes) -> ParsedRecords:
    """All of it is one document."""
    yield ParsedRecord("", _decode(data), {})


_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)


_MAX_EXTRACTED_CHARS = 2 << 20  # trafilatura takes 3 to 20 s per megabyte, and larger pages are data, not articles


def _read_html(data: bytes) -> ParsedRecords:
    found = None if data.startswith(b"\xef\xbb\xbf") else _CHARSET.search(data[:4096])
    declared = found[1].decode().lower() if found else ""
    # Browsers read "iso-8859-1" as Windows-1252 (WHATWG Encoding Standard), and pages rely on it for quotes and dashes.
    page = _decode(data, "cp1252" if declared in {"iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"} else declared)
    parsed = read_page(page)
    extract = _trafilatura_extract() if len(page) <= _MAX_EXTRACTED_CHARS else None
    text = extract(page, include_comments=False) if extract else None
    yield ParsedRecord("", text or parsed.text, {"title": parsed.title} if parsed.title else {})


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


def _read_csv(data: bytes) -> ParsedRecords:
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
    wide = {number for number, row in enumerate(rows) if isinstance(row.get(""), list)}
    column = next((name for name in (rows[0] if rows else ()) if name.strip().lower() in _TEXT_FIELDS), None)
    message = f"has more fields than the header; quote the {delimiter!r} in its text"
    if column is None:
        if wide:
            raise UnreadableDocumentError(f"row {min(wide) + 1} {message}")
        lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
        yield ParsedRecord("", "\n\n".join(lines), {})
        return
    for number, row in enumerate(rows):
        if number in wide:
            yield UnreadableRecord(f"#{number}", f"row {number + 1} {message}")
            continue
        others = {name: value for name, value in row.items() if name and name != column}
        yield ParsedRecord(f"#{number}", row[column], others)


def _read_json(data: bytes) -> ParsedRecords:
    try:
        value = _parse_json(_decode(data))
    except (ValueError, RecursionError) as error:
        raise UnreadableDocumentError(f"is not JSON ({error}); repair it or rename it to .txt") from error
    if isinstance(value, list):
        for number, record in enumerate(value):
            yield from _parse_item(record, number, f"item {number + 1}")
        return
    try:
        yield from _parse_record(value, "", "#")
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


def _read_jsonl(data: bytes) -> ParsedRecords:
    return _parse_jsonl(_decode(data).split("\n"))  # splitlines() would cut inside strings


def stream_jsonl(file: BinaryIO, digest: str) -> ParsedRecords:
    """`_read_jsonl` of a file that is no UTF-16, a line at a time. All of it is known to be text before the first."""
    read, num_bytes, sample = new_digest(), 0, ""
    for line in file:  # ends at "\n" alone, which in UTF-8 is a part of no other character
        if b"\0" in line:
            raise UnreadableDocumentError(BINARY_REASON)
        text = _decode_as(line, "utf-8", num_bytes)
        sample += text[: max(0, _SAMPLE_CHARS - len(sample))]
        read.update(line)
        num_bytes += len(line)
    _check_sample(sample.removeprefix("\ufeff"))
    if read.hexdigest() != digest:
        raise UnreadableDocumentError(CHANGED_REASON)
    file.seek(0)
    texts = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(file))
    yield from _parse_jsonl(text.removesuffix("\n") for text in texts)


def _parse_jsonl(lines: Iterable[str]) -> ParsedRecords:
    number = 0  # of the record; lines are counted as editors do, from 1 and with the blank ones
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            reason = f"line {line_number} is not JSON ({error}); put one value on each line"
            yield UnreadableRecord(f"#{number}", reason)
        else:
            yield from _parse_item(record, number, f"line {line_number}")
        number += 1


def _parse_item(value: Any, number: int, place: str) -> ParsedRecords:
    """Documents of one of several JSON values."""
    try:
        yield from _parse_record(value, f"#{number}", ".")
    except UnreadableDocumentError as error:
        yield UnreadableRecord(f"#{number}", f"{place} {error}")


def _parse_record(value: Any, key: str, joint: str) -> Iterator[ParsedRecord]:
    """Documents of one JSON value: a string, {text: ...}, {ctxs: [...]} (MuSiQue) or {"0": ..., ...} (CacheBlend)."""
    if isinstance(value, str):
        yield ParsedRecord(key, value, {})
        return
    if isinstance(value, dict):
        if isinstance(value.get("ctxs"), list):
            # Question and answers stay out of the metadata: they belong to the record, not to the passage.
            for number, passage in enumerate(value["ctxs"]):
                try:
                    yield from _parse_record(passage, f"{key}{joint}{number}", ".")
                except NotADocumentError as error:
                    raise UnreadableDocumentError(f"has a passage {number + 1} that {error}") from error
            return
        name = next((name for name in _TEXT_FIELDS if isinstance(value.get(name), str)), None)
        if name is not None:
            extra = value.get("metadata")
            fields = {key: item for key, item in value.items() if key not in {name, "metadata"}}
            yield ParsedRecord(key, value[name], {**fields, **(extra if isinstance(extra, dict) else {})})
            return
        numbered = [name for name in value if name.isdecimal() and isinstance(value[name], str)]
        if numbered:
            for name in sorted(numbered, key=_as_number):
                yield ParsedRecord(f"{key}{joint}{name}", value[name], {})
            return
    raise NotADocumentError(
        f"is neither a string nor an object with one of {', '.join(_TEXT_FIELDS)}, ctxs or numbered passages; "
        "rename the field that holds the text"
    )


# Typesetting, not spelling: nobody who asks about an office writes one, and tokenizers cut words at them.
_LIGATURES = {ord(ligature): unicodedata.normalize("NFKC", ligature) for ligature in "ﬀﬁﬂﬃﬄﬅﬆ"}


def _read_pdf(data: bytes) -> ParsedRecords:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ImportError as error:
        raise UnreadableDocumentError("PDF needs pypdf: pip install 'ragblend[pdf]'") from error
    try:
        pages = [page.extract_text().translate(_LIGATURES) for page in PdfReader(io.BytesIO(data)).pages]
    except FileNotDecryptedError as error:
        raise UnreadableDocumentError(
            "is a PDF that needs a password; save it without one, for example: qpdf --decrypt --password=... FILE NEW"
        ) from error
    except DependencyError as error:  # an encrypted file that opens without a password
        raise UnreadableDocumentError(
            f"is an encrypted PDF, and {error}; install it, or save the file without encryption"
        ) from error
    except Exception as error:  # pypdf raises errors of many types for a damaged file
        raise UnreadableDocumentError(
            f"is a damaged PDF ({error or type(error).__name__}); repair it, for example: qpdf FILE NEW"
        ) from error
    yield ParsedRecord("", "\n\n".join(pages), {"num_pages": len(pages)})


_ROWS_AT_A_TIME = 256


def stream_parquet(file: io.BufferedReader, digest: str) -> ParsedRecords:
    """`_read_parquet` of a file, some rows at a time."""
    if hashlib.file_digest(file, new_digest).hexdigest() != digest:
        raise UnreadableDocumentError(CHANGED_REASON)
    file.seek(0)
    yield from _parse_parquet(file)


def _read_parquet(data: bytes) -> ParsedRecords:
    return _parse_parquet(io.BytesIO(data))


def _parse_parquet(file: BinaryIO) -> ParsedRecords:
    """A row is read as a line of JSON with its columns would be: those of bytes and of lists of numbers (embeddings,
    pictures) are left out, and where none could be text, it is no document."""
    try:
        from pyarrow import ArrowException, types
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UnreadableDocumentError("Parquet needs pyarrow: pip install 'ragblend[parquet]'") from error

    def is_kept(kind: Any) -> bool:
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return not types.is_primitive(kind.value_type) and is_kept(kind.value_type)
        return not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))

    try:
        table = ParquetFile(file)
        names = [column.name for column in table.schema_arrow if is_kept(column.type)]
        if not any(name in _TEXT_FIELDS or name == "ctxs" or name.isdecimal() for name in names):
            found = ", ".join(table.schema_arrow.names) or "none"
            raise NotADocumentError(f"has no column {', '.join(_TEXT_FIELDS)} or ctxs, but {found}; rename the text's")
        number = 0
        for batch in table.iter_batches(_ROWS_AT_A_TIME, columns=names):
            for row in batch.to_pylist():
                yield from _parse_item(_as_json(row), number, f"row {number + 1}")
                number += 1
    except (ArrowException, OSError) as error:
        if "encrypt" in str(error).lower():
            raise UnreadableDocumentError(f"is an encrypted Parquet file ({error}); save it without a key") from error
        raise UnreadableDocumentError(f"is a damaged Parquet file ({error}); write it anew") from error


def _as_json(value: Any) -> Any:
    """A value of a column as JSON would hold it; dates, decimals and others as their text."""
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIX = ".parquet"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".mdx", ".rst", ".adoc", ".asciidoc", ".org", ".tex"})
READERS: dict[str, Callable[[bytes], ParsedRecords]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    **dict.fromkeys(JSON_LINES_SUFFIXES, _read_jsonl),
    ".json": _read_json,
    ".pdf": _read_pdf,
    PARQUET_SUFFIX: _read_parquet,
}
