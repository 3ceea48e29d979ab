"""Tables as lines of text, whose rows are JSON objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Facts = dict[str, Any]
"""A JSON object: the result of a command, or one of its runs."""

Column = tuple[str, str, str | Callable[[Facts], Any]]
"""A column of a table: its title, its format, where ">8.2fx" appends an x, and a key or a function of a run."""


def format_table(columns: Sequence[Column], runs: Iterable[Facts]) -> list[str]:
    """Return a line of titles, then one line per run, with "-" for None."""
    lines = ["".join(_cell(title, re.findall(r"^.\d+", form)[0]) for title, form, _ in columns)]
    for run in runs:
        lines.append("".join(_cell(value(run) if callable(value) else run[value], form) for _, form, value in columns))
    return [line.rstrip() for line in lines]


def _cell(value: Any, form: str) -> str:
    """Return a value as text.

    >>> _cell(2.5, ">8.2fx"), _cell(None, ">4.1f")
    ('   2.50x', '   -')
    """
    width, kind, suffix = re.findall(r"([<>]\d+)(.*?)(x?)$", form)[0]
    text = "-" if value is None else f"{value:{kind}}{suffix}"
    return f"{text:{width}}"
