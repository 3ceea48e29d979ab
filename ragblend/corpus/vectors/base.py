"""Unit vectors, of rows and of numbers, and their cosines. Knows numbers, no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.schema import ChunkRow
from ragblend.errors import UsageError

Ids = NDArray[np.int64]

ROWS_PER_PAGE = 4096
"""Vectors that are handed on at a time."""


class NearestRows(NamedTuple):
    """Rows that may be the nearest, the nearest first."""

    scores: NDArray[np.float32]  # [n]
    ids: Ids  # [n]


def compute_cosines(rows: Sequence[ChunkRow], vector: FloatArray) -> dict[int, float]:
    """Scores of rows by id; equal vectors have equal scores, wherever in `rows` they stand."""
    if not rows:
        return {}
    # Summed row by row: a matrix product rounds a row by its place.
    scores = (stack_vectors(rows).astype(np.float64) * vector.reshape(1, -1)).sum(axis=1).astype(np.float32)
    return {row.id: float(score) for row, score in zip(rows, scores, strict=True)}


def stack_vectors(rows: Sequence[ChunkRow]) -> FloatArray:
    """[n, dim] the vectors of rows."""
    return np.frombuffer(b"".join(row.vector for row in rows), "<f4").reshape(len(rows), -1).astype(np.float32)


def normalize_rows(vectors: ArrayLike) -> FloatArray:
    """A copy with rows of length 1; rows of zeros stay, and what is 1 but for rounding. Raises UsageError for NaN."""
    rows = np.array(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise UsageError("vectors hold NaN or infinity; check the embedder")
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)  # [..., 1]
    np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
    return rows
