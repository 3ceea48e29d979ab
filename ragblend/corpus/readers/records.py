"""JSON, JSON lines and Parquet: files of records. `fields` finds the field of a record that holds its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import date, time
from decimal import Decimal
from itertools import islice
from typing import Any, BinaryIO

from ragblend.corpus.readers.encodings import SAMPLE_CHARS, check_is_text, decode_text
from ragblend.corpus.readers.fields import (
    TEXT_FIELDS,
    add_notes_to_first,
    flatten,
    is_settings,
    read_record,
    read_text_field,
)
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords, UnreadableRecord
from ragblend.errors import NotADocumentError, UnreadableDocumentError


def read_json(data: bytes, text_field: str = "") -> ParsedRecords:
    """Read a JSON file: a value, a list of values, or a value on each line.

    `text_field`: see `read_text_field`; "" finds the text field by its name (`read_record`).
    """
    decoded = decode_text(data)
    return add_notes_to_first(_parse_json_file(decoded.text, text_field), decoded.notes)


def _parse_json_file(text: str, text_field: str) -> ParsedRecords:
    try:
        value = _parse_json(text)
    except json.JSONDecodeError as error:
        # In exports of databases, a value ends with its line and another one follows.
        first = text[: error.pos]
        if error.msg != "Extra data" or "\n" in first.strip() or not first.endswith("\n"):
            raise _not_json(error) from error
        yield from _parse_jsonl(text.split("\n"), text_field)
        return
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from error
    if isinstance(value, list):
        for number, record in enumerate(value):
            yield from _parse_item(record, number, f"item {number + 1}", text_field)
        return
    if isinstance(value, dict) and not text_field and not _is_record(value) and is_settings(value):
        raise NotADocumentError(
            "holds settings or data, and neither sentences nor a list of records; to read one of its fields: "
            "`text_field='NAME'`"
        )
    try:
        yield from _parse_record(value, "", "#", text_field)
    except NotADocumentError as error:
        raise NotADocumentError(f"its value {error}") from error


def _not_json(error: Exception) -> UnreadableDocumentError:
    return UnreadableDocumentError(f"is not JSON ({error}); repair it or rename it to .txt")


def _parse_json(text: str) -> Any:
    """Return a JSON value; a whole number of more digits than Python converts to int (4,300) becomes a Decimal."""

    def number(digits: str) -> int | Decimal:
        try:
            return int(digits)
        except ValueError:
            return Decimal(digits)

    return json.loads(text, parse_int=number)


def stream_jsonl(file: BinaryIO, text_field: str = "") -> ParsedRecords:
    """Read a JSON value from each line, a line at a time, after reading the whole file once to check it.

    `text_field`: see `read_json`. Raises UnreadableDocumentError if the file is not text. A file in another encoding
    than UTF-8 is read into memory.
    """
    if not _is_utf8(file):  # detecting another encoding needs the whole file
        file.seek(0)
        decoded = decode_text(file.read())
        # splitlines() would also cut at line separators inside strings.
        yield from add_notes_to_first(_parse_jsonl(decoded.text.split("\n"), text_field), decoded.notes)
        return
    file.seek(0)
    texts = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(file))
    yield from _parse_jsonl((text.removesuffix("\n") for text in texts), text_field)


def _is_utf8(file: BinaryIO) -> bool:
    """Return True if a file is UTF-8 and not ISO-2022. Raises UnreadableDocumentError if it is UTF-8 and not text."""
    sample = ""
    for line in file:  # lines end at "\n", which in UTF-8 is not a part of another character
        try:
            text = line.decode()
        except UnicodeDecodeError:
            return False
        if "\0" in text or "\x1b$" in text:  # the escape sequences of ISO-2022 are valid UTF-8
            return False
        sample += text[: max(0, SAMPLE_CHARS - len(sample))]
    check_is_text(sample.removeprefix("\ufeff"))
    return True


def _parse_jsonl(lines: Iterable[str], text_field: str) -> ParsedRecords:
    number = 0  # number of the record; lines are counted from 1, with blank ones, as in editors
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            reason = f"line {line_number} is not JSON ({error}); put one value on each line"
            yield UnreadableRecord(f"#{number}", reason)
        else:
            yield from _parse_item(record, number, f"line {line_number}", text_field)
        number += 1


def _parse_item(value: Any, number: int, place: str, text_field: str) -> ParsedRecords:
    """Yield the documents of one of several JSON values."""
    try:
        yield from _parse_record(value, f"#{number}", ".", text_field)
    except UnreadableDocumentError as error:
        yield UnreadableRecord(f"#{number}", f"{place} {error}")


def _is_record(value: dict[str, Any]) -> bool:
    return any(name in value for name in TEXT_FIELDS) or isinstance(value.get("ctxs"), list) or bool(_passages(value))


def _passages(value: dict[str, Any]) -> list[str]:
    """Return the names of numbered passages, in the order of their numbers."""
    names = [name for name in value if name.isascii() and name.isdecimal() and isinstance(value[name], str)]
    return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0")))  # more digits than int() takes


def _parse_record(value: Any, key: str, joint: str, text_field: str) -> Iterator[ParsedRecord]:
    """Yield the documents of one JSON value: a string, list or object, {ctxs: [...]} (MuSiQue) or {"0": ..., ...}
    (CacheBlend).

    `text_field`: the field of an object that holds the text; "" leaves the choice to `read_record`.
    """
    if isinstance(value, str):
        yield ParsedRecord(key, value, {})
    elif isinstance(value, list):
        yield flatten(value)._replace(key=key)
    elif not isinstance(value, dict):
        raise NotADocumentError(f"is {json.dumps(value, default=str)}, which is neither a text nor an object with one")
    elif text_field:
        if (record := read_text_field(value, text_field)) is None:
            raise UnreadableDocumentError(
                f"has no field {text_field!r}, but {_list_names(value)}; name another (`text_field`)"
            )
        yield record._replace(key=key)
    elif isinstance(value.get("ctxs"), list):
        # The question and the answers are not metadata, because they belong to the record.
        for number, passage in enumerate(value["ctxs"]):
            try:
                yield from _parse_record(passage, f"{key}{joint}{number}", ".", "")
            except NotADocumentError as error:
                raise UnreadableDocumentError(f"has a passage {number + 1} that {error}") from error
    elif not any(name in value for name in TEXT_FIELDS) and (passages := _passages(value)):
        for name in passages:
            yield ParsedRecord(f"{key}{joint}{name}", value[name], {})
    else:
        yield read_record(value)._replace(key=key)


def _list_names(names: Iterable[str]) -> str:
    """Return the first names for a message."""
    listed = [name[:40] for name in islice(names, 13)]
    return ", ".join(listed[:12]) + (", ..." if len(listed) > 12 else "") or "none"


_ROWS_AT_A_TIME = 256


def stream_parquet(file: BinaryIO, text_field: str = "") -> ParsedRecords:
    """Read each row of a Parquet file as a document, some rows at a time. `text_field`: see `read_json`.

    A row is read as the JSON object of its columns, without bytes and lists of numbers (embeddings, pictures). Raises
    UnreadableDocumentError if the file is not Parquet, or if pyarrow is not installed.
    """
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
        if text_field and not {text_field, text_field.partition(".")[0]} & set(names):
            raise UnreadableDocumentError(
                f"has no column {text_field!r} of texts, but {_list_names(names)}; name another (`text_field`)"
            )
        number = 0
        for batch in table.iter_batches(_ROWS_AT_A_TIME, columns=names):
            for row in batch.to_pylist():
                yield from _parse_item(_as_json(row), number, f"row {number + 1}", text_field)
                number += 1
    except (ArrowException, OSError) as error:
        if "encrypt" in str(error).lower():
            raise UnreadableDocumentError(f"is an encrypted Parquet file ({error}); save it without a key") from error
        raise UnreadableDocumentError(f"is a damaged Parquet file ({error}); write it again") from error


_SCALARS = (str, int, float, date, time, Decimal)  # `metadata_to_json` writes these


def _as_json(value: Any) -> Any:
    """Return a column's value as JSON, a date, a time or a Decimal; others become text."""
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, _SCALARS) else str(value)
