"""Metadata of documents and chunks as JSON, the form in which an index stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np

from ragblend.errors import UsageError

_MAX_DEPTH = 10_000  # a value that contains itself is deeper


def metadata_to_json(metadata: Mapping[str, Any], what: str) -> str:
    """Return metadata as JSON: strings, numbers, bools, None, and lists and dictionaries of these keep their types.

    NumPy's scalars become Python's. Dates and times become strings in ISO 8601, Decimals strings of their digits,
    tuples lists. Raises UsageError for other types, and for keys that are no strings. `what` names `metadata` in the
    message.

    >>> metadata_to_json({"year": np.int64(2024), "day": date(2024, 5, 3)}, "the metadata")
    '{"year": 2024, "day": "2024-05-03"}'
    """
    for name, value in metadata.items():
        _check_key(name, what)
        waiting = [(value, 0)]  # a stack: nesting may be deeper than Python recurses
        while waiting:
            item, depth = waiting.pop()
            if isinstance(item, dict):
                for key in item:
                    _check_key(key, f"{what} in {name!r}")
            children = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
            waiting += ((child, depth + 1) for child in children)
            if depth > _MAX_DEPTH or not (
                isinstance(item, str | int | float | dict | list | tuple | None) or _is_convertible(item)
            ):
                kind = "value that contains itself" if depth > _MAX_DEPTH else type(item).__name__
                raise UsageError(
                    f"{what}: {name!r} holds a {kind}, which cannot be stored; choose strings, numbers, bools, None, "
                    "dates, and lists and dictionaries of these"
                )
    try:
        return json.dumps(dict(metadata), default=_convert)
    except (ValueError, RecursionError) as error:  # a number of more than 4,300 digits, or too many levels
        raise UsageError(f"{what} cannot be stored ({error}); choose shorter numbers and fewer levels") from error


def _check_key(key: object, what: str) -> None:
    if not isinstance(key, str):
        raise UsageError(f"{what}: the key {key!r} is a {type(key).__name__}; choose a string, {str(key)!r}")


def _is_convertible(value: object) -> bool:
    return isinstance(value, np.bool_ | np.integer | np.floating | np.datetime64 | date | time | Decimal)


def _convert(value: Any) -> str | int | float:
    """Return a value that `_is_convertible` as a value of JSON."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    return float(str(value)) if isinstance(value, np.floating) else str(value)  # .1 of 32 bits stays .1
