"""What vectors follow, how the nearest are asked for, and which of equals are taken. Knows numbers, no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.rows import Row
from ragblend.errors import UsageError

Ids = NDArray[np.int64]

PAGE = 4096
"""Vectors that are handed on at a time."""
_ROUNDING = 1e-5  # servers sum float32 in an order of their own; what differs by more is no tie


class Catalogue(Protocol):
    """The chunks of an index with their vectors: the truth."""

    def generation(self) -> int:
        """How many times documents changed."""

    def ids(self, newer_than: int = -1) -> Ids:
        """[n] row ids of chunks written after generation `newer_than`."""

    def marks(self) -> tuple[Ids, Ids]:
        """[n] all row ids and [n] a number for each that is another as soon as the row is."""

    def rows(self, ids: Sequence[int]) -> Sequence[Row]:
        """The rows with these ids, in no order."""


class Found(NamedTuple):
    """Rows that may be the nearest, the nearest first."""

    scores: NDArray[np.float32]  # [n]
    ids: Ids  # [n]


class Vectors(Protocol):
    """Unit vectors by row id, derived from a catalogue: what is missing or stale is made again by `follow`.

    is_shared: other processes use the same place, so that `follow` is called by one at a time, with the catalogue held.
    """

    is_shared: bool

    @property
    def is_exact(self) -> bool:
        """Whether all vectors are compared."""

    @property
    def has_exact_scores(self) -> bool:
        """Whether equal vectors have equal scores, to the last bit."""

    @property
    def generation(self) -> int:
        """The generation of the catalogue that these are of; -1 where that is not known."""

    def __len__(self) -> int: ...

    def is_current(self, generation: int) -> bool:
        """Whether these are the vectors of that generation."""

    def follow(self, catalogue: Catalogue) -> None:
        """Come to hold the vectors of the catalogue and no others."""

    def candidates(self, vector: FloatArray, count: int) -> Found:
        """The `count` nearest to `vector` [1, dim]; fewer where there are no more, or some were not looked at."""

    def close(self) -> None:
        """Let go of whatever is open."""


def nearest(
    vectors: Vectors, vector: FloatArray, k: int, exact_scores: Callable[[list[int]], dict[int, float]]
) -> dict[int, float]:
    """Row ids and scores of the `k` nearest to `vector` [1, dim]. Of equals the same are taken whatever came first: an
    index that followed its folder answers as one that is new.

    exact_scores: scores of those rows that are in the catalogue, for vectors whose own are rounded.
    """
    total = len(vectors)
    if not total:
        return {}
    slack = 0.0 if vectors.has_exact_scores else _ROUNDING
    wanted, asked = min(k, total), min(2 * k + 8, total)
    while True:
        scores, ids = vectors.candidates(vector, asked)
        is_last = asked == total or len(ids) < asked or not vectors.is_exact
        if is_last or scores[-1] < scores[wanted - 1] - slack:
            break
        asked = min(8 * asked, total)  # equals reach beyond what was asked for
    if not vectors.has_exact_scores:
        found = exact_scores(ids.tolist())
        ids, scores = np.array([*found], np.int64), np.array([*found.values()], np.float32)
    best = np.lexsort((ids, -scores))[:wanted]
    return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))


def cosines(rows: Sequence[Row], vector: FloatArray) -> dict[int, float]:
    """Scores of rows by id; equal vectors have equal scores, wherever in `rows` they stand."""
    if not rows:
        return {}
    # Summed row by row: a matrix product rounds a row by its place.
    scores = (vectors_of(rows).astype(np.float64) * vector.reshape(1, -1)).sum(axis=1).astype(np.float32)
    return {row.id: float(score) for row, score in zip(rows, scores, strict=True)}


def vectors_of(rows: Sequence[Row]) -> FloatArray:
    """[n, dim] the vectors of rows."""
    return np.frombuffer(b"".join(row.vector for row in rows), "<f4").reshape(len(rows), -1).astype(np.float32)


def unit_rows(vectors: ArrayLike) -> FloatArray:
    """A copy with rows of length 1; rows of zeros stay, and what is 1 but for rounding. Raises UsageError for NaN."""
    rows = np.array(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise UsageError("vectors hold NaN or infinity; check the embedder")
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)  # [..., 1]
    np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
    return rows
