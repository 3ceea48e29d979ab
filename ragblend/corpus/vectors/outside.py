"""Vectors in a place outside of the index's folder, kept equal to the catalogue by comparing the two.

Each vector lies there under its row's id with a mark, the checksum of its row, so whatever is missing, stale or too
much is found without reading a vector. A state says what all of them are, and is taken away while they change: whoever
was killed in between left none. Knows numbers; `Place` is the part that a library or a server does.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.vectors.base import PAGE, Catalogue, Found, Ids, vectors_of


class Place(Protocol):
    """One index's vectors on some server; nobody else's are seen or touched. Any call may raise
    BackendUnreachableError."""

    is_exact: bool
    name: str  # for people

    def state(self) -> str:
        """What `set_state` wrote; "" where there is nothing."""

    def set_state(self, state: str) -> None:
        """Note a state behind everything that was put or removed before."""

    def count(self) -> int:
        """How many vectors there are."""

    def held(self) -> tuple[Ids, Ids]:
        """[n] ids and [n] marks."""

    def put(self, ids: Ids, marks: Ids, vectors: FloatArray) -> None:
        """Vectors [n, dim] in place of those with the same ids."""

    def remove(self, ids: Ids) -> None:
        """Forget these."""

    def search(self, vector: FloatArray, count: int) -> Found:
        """The `count` nearest to `vector` [dim] by inner product, the nearest first."""

    def drop(self) -> None:
        """Forget all, the state as well."""

    def close(self) -> None:
        """Let go of the connection."""


class Outside:
    """Vectors of one index in a place that other processes use as well."""

    is_shared = True
    has_exact_scores = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.generation, self.state, self._count = -1, "", 0

    @property
    def is_exact(self) -> bool:
        """Whether all vectors are compared."""
        return self.place.is_exact

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Let go of the connection."""
        self.place.close()

    def believe(self, generation: int, state: str, count: int) -> None:
        """Take these for the vectors of `generation` if the place has that state and `count` vectors; else look."""
        if state and self.place.state() == state and self.place.count() == count:
            self.generation, self.state, self._count = generation, state, count

    def forget(self) -> None:
        """Drop all that is there."""
        self.place.drop()
        self.generation, self.state, self._count = -1, "", 0

    def is_current(self, generation: int) -> bool:
        """Whether these are the vectors of that generation, and nobody changed them: one question to the place."""
        return self.generation == generation and self.place.state() == self.state

    def follow(self, catalogue: Catalogue) -> None:
        """Come to hold the vectors of the catalogue and no others."""
        ids, marks = catalogue.marks()
        state = _state_of(ids, marks)
        if self.place.state() != state or self.place.count() != ids.size:
            gone, missing = self._differences(ids, marks)
            self.place.set_state("")  # killed from here on, the next one compares again
            for start in range(0, gone.size, PAGE):
                self.place.remove(gone[start : start + PAGE])
            mark_of = dict(zip(ids.tolist(), marks.tolist(), strict=True)) if missing.size else {}
            for start in range(0, missing.size, PAGE):
                rows = catalogue.rows(missing[start : start + PAGE].tolist())
                found = np.array([row.id for row in rows], np.int64)
                self.place.put(found, np.array([mark_of[row.id] for row in rows], np.int64), vectors_of(rows))
            self.place.set_state(state)
        self.generation, self.state, self._count = catalogue.generation(), state, int(ids.size)

    def problem(self, catalogue: Catalogue) -> str:
        """What the place lacks or has too much, in a sentence; "" for nothing. Reads every id there."""
        ids, _ = catalogue.marks()
        gone, missing = self._differences(*catalogue.marks())
        extra = gone[~np.isin(gone, missing)]
        if not gone.size and not missing.size:
            return ""
        return (
            f"{self.place.name} lacks {missing.size} of {ids.size} vectors, and holds {extra.size} too many; the next "
            "ingest or search mends that"
        )

    def _differences(self, ids: Ids, marks: Ids) -> tuple[Ids, Ids]:
        """What is there and is to go, and what is not there: a changed one is both."""
        held, held_marks = self.place.held()
        known = dict(zip(held.tolist(), held_marks.tolist(), strict=True))
        missing = [row for row, mark in zip(ids.tolist(), marks.tolist(), strict=True) if known.get(row) != mark]
        gone = [*known.keys() - set(ids.tolist()), *(row for row in missing if row in known)]
        return np.array(gone, np.int64), np.array(missing, np.int64)

    def candidates(self, vector: FloatArray, count: int) -> Found:
        """The `count` nearest to `vector` [1, dim]."""
        return self.place.search(vector.reshape(-1), count)


def _state_of(ids: Ids, marks: Ids) -> str:
    """Equal for the same rows, whatever order they came in."""
    order = np.argsort(ids)
    return hashlib.sha256(ids[order].astype("<i8").tobytes() + marks[order].astype("<i8").tobytes()).hexdigest()
