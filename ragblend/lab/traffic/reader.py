"""Logs as token ids, in the order of the requests' times: files -> lines -> requests -> ids. Read `read_requests`.

A log has one JSON value per line (`requests` says which); gzip is unpacked. Broken lines are counted, and no error
quotes a log. Exports are often newest first, and a log may be larger than the memory: ids are written to a temporary
file without a name, and the memory holds 16 bytes per request.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import sys
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import xxhash

from ragblend.errors import EmptyCorpusError, NotFoundError
from ragblend.files.reading import open_file
from ragblend.lab.traffic.requests import NO_MARKERS, ChunkMarkers, LoggedRequest, requests_in, turn_header
from ragblend.lab.traffic.tokens import Ids, Tokens

STDIN = "-"
MAX_LINE = 64 << 20
"""Bytes of one line; a longer one is broken. A prompt of a million tokens has 4 MB."""
NAMED = 20  # broken places that are named, of all that are counted

_CACHED_TOKENS = 1 << 22  # of texts whose ids are kept: the turns of a conversation are in each of its requests
_HIDDEN = re.compile(r"^[.~]")

Progress = Callable[[str, int, int | None], None]


@dataclass(slots=True)
class ParseErrors:
    """How many lines could not be read, and the places of the first ones."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str, reason: str) -> None:
        """Count one. `reason` does not quote the log."""
        self.count += 1
        if len(self.places) < NAMED:
            self.places.append(f"{place}: {reason}")


class TokenizedRequest(NamedTuple):
    """One prompt as ids. `chunks`: [start, end) of marked chunks, ascending. `answer`: the turn that followed it."""

    ids: Ids
    chunks: tuple[tuple[int, int], ...]
    answer: Ids
    namespace: str


@contextmanager
def read_requests(
    paths: Sequence[str | Path], tokens: Tokens, markers: ChunkMarkers = NO_MARKERS, progress: Progress | None = None
) -> Iterator[RequestFile]:
    """The requests of files and folders. Raises NotFoundError for a missing path, EmptyCorpusError for no request."""
    files = files_of(paths)
    with RequestFile(tokens) as requests:
        for place, value in (line for path in files for line in lines_of(path, requests.errors)):
            requests.add_logged(place, value, markers)
            if progress is not None:
                progress("read", len(requests), None)
        if not len(requests):
            raise EmptyCorpusError(
                f"no request in {', '.join(files[:3])}: {requests.errors.count} lines broken, {requests.num_other} "
                "values of another kind. A line is the JSON body of an OpenAI request: docs/analyze.md"
            )
        requests.files = tuple(files)
        yield requests


class RequestFile:
    """Tokenized requests, added in any order, read in that of their times. Closing it deletes its temporary file."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._cached: dict[int, Ids] = {}
        self._num_cached = 0
        self._namespaces: dict[str, int] = {}
        self._times, self._starts = array("d"), array("q", [0])
        self.files: tuple[str, ...] = ()
        self.errors = ParseErrors()
        self.num_timed = self.num_media = 0
        self.num_other = 0  # logged values that are no requests, or have no text

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._times)

    def add_logged(self, place: str, value: object, markers: ChunkMarkers = NO_MARKERS) -> None:
        """Add the requests of one line."""
        try:
            added = [self.add(request) for request in requests_in(value, markers)]
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            self.errors.add(place, f"its fields are of another kind ({type(error).__name__})")
        else:
            self.num_other += not any(added)

    def add(self, request: LoggedRequest) -> bool:
        """Write a request; False, and nothing, for one without a token."""
        pieces = [(self._ids(piece.content), piece.is_chunk) for piece in request.pieces]
        num_ids, bounds = 0, list[int]()
        for ids, is_chunk in pieces:
            bounds += (num_ids, num_ids + len(ids)) if is_chunk and len(ids) else ()
            num_ids += len(ids)
        if not num_ids:
            return False
        answer = [self._ids(text) for text in (turn_header("assistant"), request.answer, "\n") if request.answer]
        namespace = self._namespaces.setdefault(request.namespace, len(self._namespaces))
        head = np.array([namespace, num_ids, len(bounds), *bounds], np.int32)
        record = np.concatenate((head, *(ids for ids, _ in pieces), *answer))
        self._file.write(record.tobytes())
        self._starts.append(self._starts[-1] + record.nbytes)
        # A request without a time keeps its place after the one before it.
        last_s = self._times[-1] if self._times else -math.inf
        self._times.append(last_s if request.time_s is None else request.time_s)
        self.num_timed += request.time_s is not None
        self.num_media += request.num_media
        return True

    def _ids(self, content: str | tuple[int, ...]) -> Ids:
        if not isinstance(content, str):
            return np.asarray(content, np.int32)
        digest = xxhash.xxh3_128_intdigest(content.encode("utf-8", "surrogatepass"))
        if (ids := self._cached.get(digest)) is None:
            if self._num_cached > _CACHED_TOKENS:
                self._cached.clear()
                self._num_cached = 0
            ids = self._cached[digest] = self._tokens.ids(content)
            self._num_cached += len(ids)
        return ids

    def in_order(self) -> Iterator[TokenizedRequest]:
        """The requests, earliest first; of equal times, the one that was added first."""
        namespaces = list(self._namespaces)
        for index in np.argsort(np.frombuffer(self._times, np.float64), kind="stable"):
            start, end = self._starts[index], self._starts[index + 1]
            self._file.seek(start)
            record = np.frombuffer(self._file.read(end - start), np.int32)
            namespace, num_ids, num_bounds = record[:3].tolist()
            bounds, ids, answer = np.split(record[3:], [num_bounds, num_bounds + num_ids])
            chunks = tuple(zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True))
            yield TokenizedRequest(ids, chunks, answer, namespaces[namespace])


# -- files and lines


def files_of(paths: Iterable[str | Path]) -> list[str]:
    """The files of `paths`; a folder stands for all files below it in order of their names, hidden ones left out.

    Raises NotFoundError for a path that does not exist and for a folder without files.
    """
    found: list[str] = []
    for path in map(Path, paths):
        if str(path) == STDIN:
            found.append(STDIN)
        elif path.is_dir():
            below = sorted(each for each in path.rglob("*") if each.is_file() and not _HIDDEN.match(each.name))
            if not below:
                raise NotFoundError(f"there is no file in {path}; name the folder that the logs are in")
            found += map(str, below)
        elif path.exists():
            found.append(str(path))
        else:
            raise NotFoundError(f"there is no {path}; name files with logged requests, or folders of them")
    return found


def lines_of(path: str | Path, errors: ParseErrors) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of each line of a file, gzip or not."""
    number = 0
    try:
        with closing(_opened(path)) as stream:
            while line := stream.readline(MAX_LINE + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > MAX_LINE:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(1 << 20)
                    errors.add(place, f"longer than {MAX_LINE >> 20} MiB")
                elif line.strip():
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        errors.add(place, _reason(error))
                    else:
                        yield place, value
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or (type(error).__name__ if isinstance(error, OSError) else str(error))
        errors.add(str(path), f"cannot be read on: {why}")


def _opened(path: str | Path) -> io.BufferedReader | gzip.GzipFile:
    raw: BinaryIO = sys.stdin.buffer if path == STDIN else cast(BinaryIO, os.fdopen(open_file(path), "rb"))
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(Any, raw))
    return gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == b"\x1f\x8b" else stream


def _reason(error: Exception) -> str:
    """What is wrong with a line, without its text."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {type(error).__name__}"
