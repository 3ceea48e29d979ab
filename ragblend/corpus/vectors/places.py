"""From a choice to vectors that are open. A KIND IS ADDED HERE, and its words in `choice`."""

from __future__ import annotations

from ragblend.corpus.vectors.choice import Choice
from ragblend.corpus.vectors.faiss_file import FaissVectors
from ragblend.corpus.vectors.outside import Outside, Place


def open_vectors(choice: Choice, number: str, dim: int) -> FaissVectors | Outside:
    """Vectors [dim] of the index with that number; empty ones for FAISS, whose file the index reads.

    Raises UsageError for an index that FAISS cannot make, ImportError where a package is missing. A server is asked at
    the first call.
    """
    return FaissVectors(dim, choice) if choice.kind == "faiss" else Outside(open_place(choice, number, dim))


def open_place(choice: Choice, number: str, dim: int) -> Place:
    """The place outside that `choice`, which is not FAISS, names."""
    if choice.kind == "qdrant":
        from ragblend.corpus.vectors.qdrant import QdrantPlace

        return QdrantPlace(choice, number, dim)
    from ragblend.corpus.vectors.postgres import PostgresPlace

    return PostgresPlace(choice, number, dim)
