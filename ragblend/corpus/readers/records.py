"""JSON, JSON lines and Parquet: files of records, of which one field holds the text."""

from __future__ import annotations

import hashlib
import io
import json
import unicodedata
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, BinaryIO

from ragblend.corpus.readers.encodings import (
    BINARY_REASON,
    CHANGED_REASON,
    SAMPLE_CHARS,
    check_sample,
    decode,
    decode_as,
    new_digest,
)
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords, UnreadableRecord
from ragblend.errors import NotADocumentError, UnreadableDocumentError

TEXT_FIELDS = ("text", "content", "page_content")


def read_json(data: bytes) -> ParsedRecords:
    """Read a JSON file: a value, or a list of them."""
    try:
        value = _parse_json(decode(data))
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


def read_jsonl(data: bytes) -> ParsedRecords:
    """Read a JSON value from each line."""
    return _parse_jsonl(decode(data).split("\n"))  # splitlines() would cut inside strings


def stream_jsonl(file: BinaryIO, digest: str) -> ParsedRecords:
    """`read_jsonl` of a file that is no UTF-16, a line at a time. All of it is known to be text before the first."""
    read, num_bytes, sample = new_digest(), 0, ""
    for line in file:  # ends at "\n" alone, which in UTF-8 is a part of no other character
        if b"\0" in line:
            raise UnreadableDocumentError(BINARY_REASON)
        text = decode_as(line, "utf-8", num_bytes)
        sample += text[: max(0, SAMPLE_CHARS - len(sample))]
        read.update(line)
        num_bytes += len(line)
    check_sample(sample.removeprefix("\ufeff"))
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
        name = next((name for name in TEXT_FIELDS if isinstance(value.get(name), str)), None)
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
        f"is neither a string nor an object with one of {', '.join(TEXT_FIELDS)}, ctxs or numbered passages; "
        "rename the field that holds the text"
    )


_ROWS_AT_A_TIME = 256


def stream_parquet(file: io.BufferedReader, digest: str) -> ParsedRecords:
    """`read_parquet` of a file, some rows at a time."""
    if hashlib.file_digest(file, new_digest).hexdigest() != digest:
        raise UnreadableDocumentError(CHANGED_REASON)
    file.seek(0)
    yield from _parse_parquet(file)


def read_parquet(data: bytes) -> ParsedRecords:
    """Read the rows of a Parquet file."""
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
        if not any(name in TEXT_FIELDS or name == "ctxs" or name.isdecimal() for name in names):
            found = ", ".join(table.schema_arrow.names) or "none"
            raise NotADocumentError(f"has no column {', '.join(TEXT_FIELDS)} or ctxs, but {found}; rename the text's")
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
