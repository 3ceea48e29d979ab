"""Requests as token ids in a temporary file, to be read again in the order of their times.

Exports are often newest first, and a trace may be larger than the memory. A text that comes again, as the turns of a
conversation do in every later one, is tokenized and written once. The file has no name and is gone with the process;
in memory are 16 bytes per request, and 32 per distinct text of the last million.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from ragblend.bench.traffic.requests import LoggedRequest, Piece
from ragblend.bench.traffic.tokens import Ids, Tokens

_REMEMBERED = 1 << 20  # texts
_CHUNK_FLAG = 1 << 62
_BUFFER = 1 << 22
_NEVER = float("inf")


class Spooled(NamedTuple):
    """One request as it is analysed. `chunks`: [start, end) of those whose boundaries are known, ascending."""

    ids: Ids
    chunks: tuple[tuple[int, int], ...]
    answer: Ids
    namespace: str


class Spool:
    """Requests, added in any order, read in that of their times. A context manager: leaving it frees the file."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._file = tempfile.TemporaryFile(buffering=_BUFFER)  # noqa: SIM115 (closed by __exit__)
        self._size = 0  # of the file, in bytes
        self._known: dict[int, tuple[int, int]] = {}  # a text's digest: (place, tokens)
        self._names: list[str] = [""]
        self._ids_of: dict[str, int] = {"": 0}
        self._times, self._places = array("d"), array("q")
        self.num_timed = 0
        self.num_media = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._times)

    def add(self, request: LoggedRequest) -> bool:
        """Write a request; False, and nothing, for one without a token."""
        refs = [ref for ref in map(self._ref, request.pieces) if ref[1]]
        if not refs:
            return False
        answer = self._ref(Piece(request.answer)) if request.answer else (0, 0)
        name = self._ids_of.setdefault(request.namespace, len(self._names))
        if name == len(self._names):
            self._names.append(request.namespace)
        head = [name, len(refs), *answer, *(value for ref in refs for value in ref)]
        self._places.append(self._write(array("q", head).tobytes()))
        # What has no time keeps its place behind what was before it.
        last_s = self._times[-1] if self._times else -_NEVER
        self._times.append(last_s if request.time_s is None else request.time_s)
        self.num_timed += request.time_s is not None
        self.num_media += request.num_media
        return True

    def _ref(self, piece: Piece) -> tuple[int, int]:
        """(place, count of tokens) of a piece's ids in the file, the flag of a chunk added to its count."""
        content, flag = piece.content, _CHUNK_FLAG if piece.is_chunk else 0
        if isinstance(content, tuple):
            ids = np.asarray(content, np.int32)
            return (self._write(ids.tobytes()), len(ids) | flag) if len(ids) else (0, 0)
        if not content:
            return (0, 0)
        digest = xxhash.xxh3_128_intdigest(content.encode("utf-8", "surrogatepass"))
        if (known := self._known.get(digest)) is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            ids = self._tokens.ids(content)
            known = self._known[digest] = (self._write(ids.tobytes()), len(ids))
        return (known[0], known[1] | flag) if known[1] else (0, 0)

    def _write(self, data: bytes) -> int:
        self._file.write(data)
        self._size += len(data)
        return self._size - len(data)

    def in_order(self) -> Iterator[Spooled]:
        """The requests, earliest first; of equal times that which was added first."""
        self._file.flush()
        for index in np.argsort(np.frombuffer(self._times, np.float64), kind="stable"):
            place = self._places[index]
            name, num_refs, *answer = self._numbers(place, 4)
            refs = self._numbers(place + 32, 2 * num_refs)
            yield self._read(self._names[name], refs, (answer[0], answer[1]))

    def _read(self, namespace: str, refs: list[int], answer: tuple[int, int]) -> Spooled:
        pieces, chunks, place = [], [], 0
        for at, flagged in zip(refs[::2], refs[1::2], strict=True):
            count = flagged & ~_CHUNK_FLAG
            pieces.append(self._ids(at, count))
            if flagged & _CHUNK_FLAG:
                chunks.append((place, place + count))
            place += count
        return Spooled(np.concatenate(pieces), tuple(chunks), self._ids(*answer), namespace)

    def _numbers(self, place: int, count: int) -> list[int]:
        found: list[int] = np.frombuffer(os.pread(self._file.fileno(), 8 * count, place), np.int64).tolist()
        return found

    def _ids(self, place: int, count: int) -> Ids:
        return np.frombuffer(os.pread(self._file.fileno(), 4 * count, place), np.int32)
