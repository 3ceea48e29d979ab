"""Text and metadata of records: finds the field of a JSON object, or of a table's row, that holds the text.

Works on values as `json.loads` returns them. The readers of JSON, JSON lines, Parquet and CSV use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ragblend.corpus.readers.blocks import collapse_whitespace
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

TEXT_FIELDS = ("text", "content", "page_content")
METADATA_FIELDS = ("metadata", "meta")
"""Names of objects that are metadata at any depth, as LangChain, the Pile and others write them."""

_MAX_SHORT_CHARS = 200  # longest label; longer strings are sentences, which questions may be about
_MAX_PATH_CHARS = 120  # longest path of a value; bounds the text of deeply nested values
_MAX_NUMBERS = 16  # longest list of numbers in the text; longer ones are vectors, coordinates and pictures
_MIN_ENCODED_CHARS = 256
_ENCODED = re.compile(r"data:[^,\s]{0,200},\S*|(?=[^0-9]*[0-9])(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])[A-Za-z0-9+/_=-]+")
_MIN_PROSE_WORDS, _MIN_PROSE_SHARE = 4, 0.2


_CUT_NOTES = ("lists of numbers and base64 strings are left out",)


def add_notes_to_first(records: ParsedRecords, notes: tuple[str, ...]) -> ParsedRecords:
    """Yield `records`. The first one whose text could be read also gets `notes`, which are about the whole file."""
    for record in records:
        if notes and isinstance(record, ParsedRecord):
            record, notes = record._replace(notes=(*notes, *record.notes)), ()
        yield record


def read_record(record: Mapping[str, Any]) -> ParsedRecord:
    """Return a record's text and metadata. The text field is found by its name, and the result's key is "".

    The text is the string at `text`, `content` or `page_content`. Short values are metadata: numbers, strings of at
    most 200 characters on one line, and lists of these. Objects called `metadata` or `meta` are metadata, too. All
    other values follow the text as `path: value` lines, so that no sentence is lost. If there is no text field, the
    whole record becomes such lines, and the only metadata is its title.
    """
    present = [name for name in TEXT_FIELDS if isinstance(record.get(name), str)]
    empty = [name for name in TEXT_FIELDS if record.get(name, "") is None]
    main = next(iter(present + empty), None)
    if main is None:
        flat = flatten(record)
        title = record.get("title")
        return flat._replace(metadata={"title": title} if isinstance(title, str) and is_short(title) else {})
    metadata = select_metadata(record, {main, *present})
    taken = {main, *metadata, *(name for name in METADATA_FIELDS if isinstance(record.get(name), dict))}
    flat = flatten({name: value for name, value in record.items() if name not in taken})
    text = "\n\n".join(part for part in (record[main] or "", flat.text) if part)
    return flat._replace(text=text, metadata=metadata)


def read_text_field(record: Mapping[str, Any], text_field: str) -> ParsedRecord | None:
    """Return the text at `text_field`, a name or a dotted path; None if the record has no such field.

    A path goes through lists: `sections.body` is the bodies of all sections, with a blank line between two. null is an
    empty text, and a list or an object is flattened. Short values of other fields are the metadata (see `read_record`).
    Long values of other fields are left out, because the caller chose the field.
    """
    values = _find_values(record, text_field)
    if values is None:
        return None
    records = [ParsedRecord("", value, {}) if isinstance(value, str) else flatten(value) for value in values]
    text = "\n\n".join(each.text for each in records if each.text)
    notes = next((each.notes for each in records if each.notes), ())
    return ParsedRecord("", text, select_metadata(record, {text_field}), notes=notes)


def _find_values(record: Mapping[str, Any], path: str) -> list[Any] | None:
    if path in record:
        return [record[path]]
    values: list[Any] = [record]
    for name in path.split("."):
        values = [each[name] for each in _items(values) if isinstance(each, dict) and name in each]
    return values or None


def _items(values: list[Any]) -> Iterator[Any]:
    """Yield `values`; a list is replaced by its items."""
    waiting = values[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(reversed(value))
        else:
            yield value


def select_metadata(record: Mapping[str, Any], excluded: set[str]) -> dict[str, Any]:
    """Return a record's fields with a short value or a list of short values (see `is_short`), and the contents of its
    objects `metadata` and `meta`. Fields named in `excluded` and long lists of numbers are left out."""
    labels = {name: value for name, value in record.items() if name not in excluded and _is_label(value)}
    for name in METADATA_FIELDS:
        if isinstance(record.get(name), dict) and name not in excluded:
            labels.update(record[name])
    return labels


def _is_label(value: Any) -> bool:
    if isinstance(value, list):
        return not _is_vector(value) and all(is_short(item) for item in value)
    return is_short(value)


def is_short(value: Any) -> bool:
    """Return True for a string of one short line, a number, a bool or None."""
    if isinstance(value, str):
        return len(value) <= _MAX_SHORT_CHARS and "\n" not in value
    return not isinstance(value, dict | list)


_BREAK = object()  # a blank line between two items of a list, at which chunks end


def flatten(value: Any) -> ParsedRecord:
    """Return a JSON value as lines `path: value`. In a path, dots join the names of nested objects.

    >>> flatten({"name": "Pump", "parts": [{"id": 1, "tags": ["a", "b"]}, {"id": 2}]}).text
    'name: Pump\\n\\nparts.id: 1\\nparts.tags: a, b\\n\\nparts.id: 2'

    Items of a list have no number, so an inserted item does not change the lines of other items. Lists of more than 16
    numbers and base64 strings are left out; a note of the record then says so.
    """
    lines: list[str] = []
    is_cut = False
    waiting: list[tuple[str, Any]] = [("", value)]  # a stack: nesting may be deeper than Python recurses
    while waiting:
        path, item = waiting.pop()
        if item is _BREAK:
            if lines and lines[-1]:
                lines.append("")
        elif isinstance(item, dict):
            waiting.extend((_join(path, name), each) for name, each in reversed(item.items()))
        elif isinstance(item, list) and _is_vector(item):
            is_cut = True
        elif isinstance(item, list) and not all(is_short(each) for each in item):
            waiting.append((path, _BREAK))
            for each in reversed(item):
                waiting.extend(((path, each), (path, _BREAK)))
        elif isinstance(item, str) and len(item) >= _MIN_ENCODED_CHARS and _ENCODED.fullmatch(item):
            is_cut = True
        elif text := ", ".join(filter(None, map(_as_text, item))) if isinstance(item, list) else _as_text(item):
            lines.append(f"{path}: {text}" if path else text)
    return ParsedRecord("", "\n".join(lines).strip("\n"), {}, notes=_CUT_NOTES if is_cut else ())


def _join(path: str, name: str) -> str:
    name = collapse_whitespace(name[-_MAX_PATH_CHARS:])
    return f"{path}.{name}"[-_MAX_PATH_CHARS:] if path else name


def _as_text(value: Any) -> str:
    """Return a scalar as JSON writes it; "" for null."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _is_vector(items: list[Any]) -> bool:
    """Return True for many numbers, also in pairs or rows."""
    rows = [item if isinstance(item, list) else [item] for item in items]
    return sum(map(len, rows)) > _MAX_NUMBERS and all(
        isinstance(each, int | float) and not isinstance(each, bool) for row in rows for each in row
    )


def is_settings(value: Any) -> bool:
    """Return True for a JSON object with neither a list of objects nor sentences, such as a program's settings."""
    num_chars = num_prose_chars = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            num_chars += sum(map(len, item))
            waiting.extend(item.values())
        elif isinstance(item, list):
            if any(isinstance(each, dict) for each in item):
                return False
            waiting.extend(item)
        elif isinstance(item, str):
            num_chars += len(item)
            num_prose_chars += len(item) if len(item.split(None, _MIN_PROSE_WORDS)) >= _MIN_PROSE_WORDS else 0
    return num_prose_chars < _MIN_PROSE_SHARE * num_chars or not num_chars
