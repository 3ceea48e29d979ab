"""Unit vectors in a flat FAISS index, in memory: every search compares all of them."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ragblend.corpus.database import ChunkDatabase
from ragblend.corpus.embedders import FloatArray
from ragblend.errors import UsageError

_ROWS_PER_PAGE = 4096  # vectors that are read from the database at a time


class FaissVectors:
    """Unit vectors [dim] by row id, derived from a database, as of its `generation`: what is missing or stale is made
    again by `sync`."""

    def __init__(self, dim: int, generation: int = -1) -> None:
        self.generation = generation  # -1: before the first change
        self.faiss: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    @staticmethod
    def from_bytes(data: bytes, generation: int) -> FaissVectors:
        """What `to_bytes` wrote. FAISS's parser is not made for hostile bytes: compare their checksum before."""
        found = FaissVectors(1, generation)
        found.faiss = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        return found

    def to_bytes(self) -> bytes:
        """All of it, for a file."""
        return bytes(faiss.serialize_index(self.faiss).tobytes())

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.faiss.d)

    def __len__(self) -> int:
        return int(self.faiss.ntotal)

    def sync(self, catalogue: ChunkDatabase) -> None:
        """Come to hold the vectors of the catalogue and no others, those written since anew."""
        changed, held = catalogue.ids(newer_than=self.generation), faiss.vector_to_array(self.faiss.id_map)
        stale, missing = np.isin(held, changed), changed
        if held.size - np.count_nonzero(stale) + changed.size != catalogue.num_chunks:  # some were removed
            wanted = catalogue.ids()
            stale |= ~np.isin(held, wanted)
            missing = wanted[~np.isin(wanted, held[~stale])]
        if stale.any():
            self.faiss.remove_ids(held[stale])
        for start in range(0, missing.size, _ROWS_PER_PAGE):
            rows = catalogue.rows(missing[start : start + _ROWS_PER_PAGE].tolist())
            vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f4").reshape(len(rows), -1)
            self.faiss.add_with_ids(vectors.astype(np.float32), np.array([row.id for row in rows], np.int64))
        self.generation = catalogue.generation()
        assert len(self) == catalogue.num_chunks

    def nearest(self, vector: FloatArray, k: int) -> dict[int, float]:
        """Row ids and scores of the `k` nearest to `vector` [1, dim]. Of equals the same are taken whatever came
        first: an index that followed its folder answers as one that is new.
        """
        total = len(self)
        if not total:
            return {}
        wanted, asked = min(k, total), min(2 * k + 8, total)
        while True:
            scores, ids = (found[0] for found in self.faiss.search(vector, asked))
            if asked == total or scores[-1] < scores[wanted - 1]:
                break
            asked = min(8 * asked, total)  # equals reach beyond what was asked for
        best = np.lexsort((ids, -scores))[:wanted]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))


def normalize_rows(vectors: ArrayLike) -> FloatArray:
    """A copy with rows of length 1; rows of zeros stay, and what is 1 but for rounding. Raises UsageError for NaN."""
    rows = np.array(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise UsageError("vectors hold NaN or infinity; check the embedder")
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)  # [..., 1]
    np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
    return rows
