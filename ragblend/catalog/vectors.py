"""Unit vectors in a flat FAISS index in memory. Every search compares all of them.

They are derived from the catalogue. Their file ends with the index's id, its generation and a digest.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ragblend.catalog.indexed_documents import IndexRows
from ragblend.corpus.embedders import FloatArray
from ragblend.errors import UsageError

_ROWS_PER_PAGE = 4096  # vectors per read from the catalogue
_TRAILER = struct.Struct("<16sq32s")  # the index's id, the generation, and the SHA-256 of all before it


class FaissVectors:
    """A FAISS index of the catalogue's unit vectors, by row id. `dim`: length of a vector.

    The vectors are those of one `generation` of the catalogue. `sync` updates them to the latest generation.
    """

    def __init__(self, dim: int, generation: int = -1) -> None:
        self.generation = generation  # -1: before the first change
        self.faiss: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    @staticmethod
    def from_bytes(data: bytes, index_id: bytes, dim: int) -> FaissVectors:
        """Return the vectors that `to_bytes` wrote for `index_id`. Raises ValueError for damage or another index."""
        end = max(0, len(data) - _TRAILER.size)
        if len(data) < _TRAILER.size or data[-32:] != hashlib.sha256(data[:-32]).digest():
            raise ValueError("does not match its checksum")  # FAISS's parser is unsafe for damaged bytes
        made_for, generation, _ = _TRAILER.unpack(data[end:])
        vectors = FaissVectors(dim, generation)
        vectors.faiss = faiss.deserialize_index(np.frombuffer(data[:end], np.uint8))
        if (made_for, vectors.faiss.d) != (index_id, dim):
            raise ValueError("belongs to another index")
        return vectors

    def to_bytes(self, index_id: bytes) -> bytes:
        """Return the contents of a vectors file. `index_id`: 16 bytes."""
        data = bytes(faiss.serialize_index(self.faiss).tobytes()) + _TRAILER.pack(index_id, self.generation, b"")[:-32]
        return data + hashlib.sha256(data).digest()

    def __len__(self) -> int:
        return int(self.faiss.ntotal)

    def sync(self, catalogue: IndexRows) -> None:
        """Make the vectors equal to the catalogue's: add new ones, replace changed ones, remove deleted ones."""
        changed, present = catalogue.row_ids(newer_than=self.generation), faiss.vector_to_array(self.faiss.id_map)
        stale, missing = np.isin(present, changed), changed
        if present.size - np.count_nonzero(stale) + changed.size != catalogue.num_chunks:  # some were removed
            wanted = catalogue.row_ids()
            stale |= ~np.isin(present, wanted)
            missing = wanted[~np.isin(wanted, present[~stale])]
        if stale.any():
            self.faiss.remove_ids(present[stale])
        for start in range(0, missing.size, _ROWS_PER_PAGE):
            rows = catalogue.rows(missing[start : start + _ROWS_PER_PAGE].tolist())
            vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f4").reshape(len(rows), -1)
            self.faiss.add_with_ids(vectors.astype(np.float32), np.array([row.id for row in rows], np.int64))
        self.generation = catalogue.generation()
        assert len(self) == catalogue.num_chunks

    def nearest(self, vector: FloatArray, k: int) -> dict[int, float]:
        """Return row ids and cosines of the `k` vectors nearest to `vector` [1, dim], nearest first.

        Equal cosines are ordered by row id, so the result does not depend on the order of insertions.
        """
        total = len(self)
        if not total:
            return {}
        num_wanted, num_read = min(k, total), min(2 * k + 8, total)
        while True:
            scores, ids = (row[0] for row in self.faiss.search(vector, num_read))
            if num_read == total or scores[-1] < scores[num_wanted - 1]:
                break
            num_read = min(8 * num_read, total)  # more vectors may have the last cosine
        best = np.lexsort((ids, -scores))[:num_wanted]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))


def normalize_rows(vectors: ArrayLike) -> FloatArray:
    """Return a float32 copy of `vectors` [..., dim] with rows of length 1. Rows of zeros stay zero.

    Rows whose length is 1 within 1e-6 are not changed. Raises UsageError for NaN or infinity.
    """
    rows = np.array(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise UsageError("vectors contain NaN or infinity; check the embedder")
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)  # [..., 1]
    np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
    return rows
