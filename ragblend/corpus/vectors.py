"""The vectors of chunks in memory, and the nearest of them. Knows FAISS and numbers; where rows come from is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.rows import Row
from ragblend.errors import UsageError

_PAGE = 4096  # vectors added to FAISS at a time


class Vectors:
    """Unit vectors [dim] by row id, as of `generation` of the database they are derived from."""

    def __init__(self, dim: int, generation: int = -1) -> None:
        self.generation = generation  # -1: before the first change
        self.faiss: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    @staticmethod
    def of_bytes(data: bytes, generation: int) -> Vectors:
        """What `as_bytes` wrote. FAISS's parser is not made for hostile bytes: compare their checksum before."""
        found = Vectors(1, generation)
        found.faiss = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        return found

    def as_bytes(self) -> bytes:
        """All of it, for a file."""
        return bytes(faiss.serialize_index(self.faiss).tobytes())

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.faiss.d)

    def __len__(self) -> int:
        return int(self.faiss.ntotal)

    def follow(
        self,
        generation: int,
        wanted: NDArray[np.int64],
        changed: NDArray[np.int64],
        rows: Callable[[Sequence[int]], Sequence[Row]],
    ) -> None:
        """Come to hold the `wanted` ids and no others, those that `changed` anew; `rows` has what is missing."""
        held = faiss.vector_to_array(self.faiss.id_map)
        stale = held[~np.isin(held, wanted) | np.isin(held, changed)]
        if stale.size:
            self.faiss.remove_ids(stale)
        missing = wanted[~np.isin(wanted, faiss.vector_to_array(self.faiss.id_map))]
        for start in range(0, missing.size, _PAGE):
            page = rows(missing[start : start + _PAGE].tolist())
            vectors = np.frombuffer(b"".join(row.vector for row in page), "<f4").reshape(len(page), -1)
            self.faiss.add_with_ids(vectors.astype(np.float32), np.array([row.id for row in page], np.int64))
        self.generation = generation
        assert len(self) == wanted.size

    def nearest(self, vector: FloatArray, k: int) -> dict[int, float]:
        """Row ids and scores of the `k` nearest to `vector` [1, dim]. Of equals the same are taken whatever came first:
        an index that followed its folder answers as one that is new."""
        if not len(self):
            return {}
        wanted, asked = min(k, len(self)), min(2 * k + 8, len(self))
        while True:
            scores, ids = (found[0] for found in self.faiss.search(vector, asked))  # [asked], best first
            if asked == len(self) or scores[-1] < scores[wanted - 1]:
                break
            asked = min(8 * asked, len(self))  # equals reach beyond what was asked for
        best = np.lexsort((ids, -scores))[:wanted]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))


def unit_rows(vectors: ArrayLike) -> FloatArray:
    """A copy with rows of length 1; rows of zeros stay, and what is 1 but for rounding. Raises UsageError for NaN."""
    rows = np.array(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise UsageError("vectors hold NaN or infinity; check the embedder")
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)  # [..., 1]
    np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
    return rows
