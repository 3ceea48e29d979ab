"""Logs into a `Spool`: what an analysis and a simulation both begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.bench.traffic.logs import Broken, files_of, values_in
from ragblend.bench.traffic.requests import Marks, header, requests_in
from ragblend.bench.traffic.spool import Spool
from ragblend.bench.traffic.tokens import Ids, Tokens
from ragblend.errors import EmptyCorpusError

Tell = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class LogsRead:
    """Requests, to be read in the order of their times, and what in the logs was none."""

    spool: Spool
    traces: tuple[str, ...]
    broken: Broken
    num_other: int  # logged values that are no requests, or have no text


@contextmanager
def logs_read(
    paths: Sequence[str | Path], tokens: Tokens, marks: Marks, tell: Tell = lambda stage, done, total: None
) -> Iterator[LogsRead]:
    """The requests of files and folders. Raises EmptyCorpusError where there is none."""
    files, broken = files_of(paths), Broken()
    with _spooled((each for path in files for each in values_in(path, broken)), tokens, marks, broken, tell) as found:
        spool, num_other = found
        if not len(spool):
            raise EmptyCorpusError(
                f"no request in {', '.join(map(str, files[:3]))}: {broken.count} lines broken, {num_other} values of "
                "another kind. docs/analyze.md says which logs are read"
            )
        yield LogsRead(spool, tuple(map(str, files)), broken, num_other)


@contextmanager
def entries_read(name: str, entries: Iterable[Any], tokens: Tokens, marks: Marks) -> Iterator[LogsRead]:
    """Log entries that are in no file, such as generated ones, under a name."""
    broken = Broken()
    values = ((f"{name}:{number}", entry) for number, entry in enumerate(entries, 1))
    with _spooled(values, tokens, marks, broken, lambda stage, done, total: None) as (spool, num_other):
        yield LogsRead(spool, (name,), broken, num_other)


@contextmanager
def _spooled(
    values: Iterable[tuple[str, Any]], tokens: Tokens, marks: Marks, broken: Broken, tell: Tell
) -> Iterator[tuple[Spool, int]]:
    """Logged values, each with its place, in a spool, and how many of them were no requests."""
    num_other = 0
    with Spool(tokens) as spool:
        for place, value in values:
            num_other += not _added(spool, place, value, marks, broken)
            tell("read", len(spool), None)
        yield spool, num_other


def _added(spool: Spool, place: str, value: Any, marks: Marks, broken: Broken) -> bool:
    """Whether a logged value had a request with text; it is in the spool, then."""
    added = False
    try:
        for request in requests_in(value, marks):
            added |= spool.add(request)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        # A log's fields may hold anything; what no reader expects is a broken line, not the end.
        broken.add(place, f"its fields are of another kind ({type(error).__name__})")
        return True
    return added


def answered(tokens: Tokens, answer: Ids) -> Ids:
    """An answer as the next prompt of its conversation has it: a turn of the assistant."""
    if not len(answer):
        return answer
    return np.concatenate((tokens.ids(header("assistant")), answer, tokens.ids("\n")))
