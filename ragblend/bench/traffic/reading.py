"""Logs into a `Spool`: what an analysis begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    files, broken, num_other = files_of(paths), Broken(), 0
    with Spool(tokens) as spool:
        for place, value in (each for path in files for each in values_in(path, broken)):
            num_other += not _added(spool, place, value, marks, broken)
            tell("read", len(spool), None)
        if not len(spool):
            raise EmptyCorpusError(
                f"no request in {', '.join(map(str, files[:3]))}: {broken.count} lines broken, {num_other} values of "
                "another kind. docs/analyze.md says which logs are read"
            )
        yield LogsRead(spool, tuple(map(str, files)), broken, num_other)


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
