"""What `documents` keeps of an index: rows as values, and chunks as rows. Knows no statements."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row

from ragblend.catalog.schema import is_intact, text_key
from ragblend.prompt.types import Chunk


class IngestedFile(NamedTuple):
    """A file whose documents are here. `version`: of its bytes and of how they were read and cut; "" is not known.

    `top`: what an ingestion was told that brought it in, the file itself or a folder.
    """

    path: str
    version: str
    top: str


class OrphanedTexts(NamedTuple):
    """What documents had before and the index has nowhere now: nobody needs its KV, or its place in the registry."""

    texts: tuple[str, ...]
    sources: tuple[str, ...]  # documents that are gone whole
    source_of: dict[str, str]  # of a text, the first document that had it
    last_number: int  # of the rows that `schedule_deletions` removes; 0 for none


class PendingDeletion(NamedTuple):
    """An entry to be deleted, because no document has its text any more, or one that it was computed after.

    It holds no text, so it may wait for a remote tier that does not answer now.
    """

    key: str
    place: str  # where it is deleted: "" in the store of this machine, else the remote tier's URL
    source: str  # the document that had it
    text_key: bytes


def row_id(chunk_id: str) -> int:
    """Return the id of a chunk's row: in 64 signed bits as databases and FAISS have ids, in the same order."""
    return int(chunk_id, 16) - 2**63


def as_chunk(row: Row[Any]) -> Chunk:
    """Return the chunk of a row, of the checked columns and the source of its document."""
    return Chunk(row.text, row.source, row.start, row.end, json.loads(row.metadata))


def is_intact_chunk(row: Row[Any]) -> bool:
    """Return True if this is what was written, and the chunk's document is named as it was."""
    return is_intact(row[:-1]) and row_id(Chunk(row.text, row.source, row.start).id) == row.id


def chunk_values(
    chunk: Chunk, vector: NDArray[np.float32], document: int, ordinal: int, generation: int
) -> dict[str, object]:
    """Return the values of the row of one chunk."""
    return {
        "id": row_id(chunk.id),
        "document": document,
        "ordinal": ordinal,
        "start": chunk.start,
        "end": chunk.end,
        "text": chunk.text,
        "metadata": json.dumps(dict(chunk.metadata), default=str),
        "vector": vector.astype("<f4").tobytes(),
        "generation": generation,
        "text_key": text_key(chunk.text.strip()),
    }
