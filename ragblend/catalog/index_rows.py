"""Values of the index's rows, and conversions between chunks and rows. Contains no SQL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row

from ragblend.catalog.schema import text_key
from ragblend.corpus.metadata import metadata_to_json
from ragblend.errors import CorruptError
from ragblend.prompt.types import Chunk

LANGCHAIN_SOURCE = "langchain/"
"""Beginning of the source of a document that was added to the index through LangChain. Its id follows."""


class IngestedFile(NamedTuple):
    """The record of an ingested file. If the file's current version differs from `version`, the file is read again."""

    path: str
    version: str  # digest of the bytes, and the versions of reader and chunker; "": read the file again
    top: str  # the path given to the ingestion: this file, or a folder above it


class OrphanedTexts(NamedTuple):
    """Texts that were removed from documents of the index and that no chunk has any more.

    Their KV and registry rows have to be deleted.
    """

    texts: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # documents that were removed
    source_of: Mapping[str, str] = MappingProxyType({})  # lost text -> the first document that had it
    last_number: int = 0  # `clear_orphaned_texts` removes the records up to this row number; 0: there are none


def row_id(chunk_id: str) -> int:
    """Return the row id of a chunk: its hex id as a signed 64-bit integer. Row ids are ordered like hex ids."""
    return int(chunk_id, 16) - 2**63


def as_chunk(row: Row[Any]) -> Chunk:
    """Return the chunk of a row, which has the columns of CHUNKS, its `text` and the document's `source`.

    Raises CorruptError for metadata that are no JSON.
    """
    try:
        metadata = json.loads(row.metadata)
    except ValueError as error:
        raise CorruptError(
            f"the metadata of a chunk of {row.source} are damaged ({error}). Repair them: ragblend verify --repair"
        ) from error
    return Chunk(row.text, row.source, row.start, row.end, metadata)


def is_intact_chunk(row: Row[Any]) -> bool:
    """Return True if the row's id is the `Chunk.id` for its text, source and start."""
    return bool(row_id(Chunk(row.text, row.source, row.start).id) == row.id)


def chunk_values(
    chunk: Chunk, vector: NDArray[np.float32], document: int, ordinal: int, generation: int
) -> dict[str, object]:
    """Return the values of a chunk's row,

    `document`: number of the document's row. `ordinal`: the chunk's position in the document, from 0. Raises UsageError
    for metadata that cannot be stored.
    """
    text = chunk.text.strip()
    start = chunk.text.find(text)
    return {
        "id": row_id(chunk.id),
        "document": document,
        "ordinal": ordinal,
        "start": chunk.start,
        "end": chunk.end,
        "before": chunk.text[:start],
        "after": chunk.text[start + len(text) :],
        "metadata": metadata_to_json(chunk.metadata, f"the metadata of {chunk.source!r}"),
        "vector": vector.astype("<f4").tobytes(),
        "generation": generation,
        "key": text_key(text),
    }
