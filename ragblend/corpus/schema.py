"""What a chunk database holds: its tables, and the rows as values. Every row carries a checksum.

Knows SQL's table definitions and chunks; opens nothing. `database` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragblend.files.sqlite import row_checksum
from ragblend.prompt.types import Chunk

SCHEMA_VERSION = 3

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, version TEXT NOT NULL, top TEXT NOT NULL, "
    "checksum INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY, source TEXT NOT NULL UNIQUE, "
    "file TEXT NOT NULL, content_hash TEXT NOT NULL, status TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS chunks (id INTEGER PRIMARY KEY, chunk_id TEXT NOT NULL UNIQUE, "
    "document INTEGER NOT NULL REFERENCES documents (id), ordinal INTEGER NOT NULL, "
    'start INTEGER NOT NULL, "end" INTEGER NOT NULL, text TEXT NOT NULL, metadata TEXT NOT NULL, '
    "num_tokens INTEGER, vector BLOB NOT NULL, generation INTEGER NOT NULL, text_hash BLOB NOT NULL, "
    "checksum INTEGER NOT NULL, UNIQUE (document, ordinal))",
    "CREATE TABLE IF NOT EXISTS leftovers (id INTEGER PRIMARY KEY, source TEXT NOT NULL, text TEXT NOT NULL, "
    "behind TEXT NOT NULL, checksum INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS doomed (key TEXT NOT NULL, place TEXT NOT NULL, source TEXT NOT NULL, "
    "text_hash BLOB NOT NULL, behind_hash BLOB NOT NULL, checksum INTEGER NOT NULL, UNIQUE (key, place))",
    "CREATE INDEX IF NOT EXISTS documents_by_file ON documents (file)",
    "CREATE INDEX IF NOT EXISTS chunks_by_text ON chunks (text_hash)",
    # All that search structures ask for, without reading texts and vectors.
    "CREATE INDEX IF NOT EXISTS chunks_by_generation ON chunks (generation, document, ordinal, checksum)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
CHECKED_COLUMNS = {
    "meta": "key, value",
    "files": "path, version, top",
    "documents": "id, source, file, content_hash, status",
    "chunks": "id, chunk_id, document, ordinal, start, "
    '"end", text, metadata, num_tokens, vector, generation, text_hash',
    "leftovers": "id, source, text, behind",
    "doomed": "key, place, source, text_hash, behind_hash",
}
"""What the checksum of a row is of, by table: `row_checksum` of these columns.

`behind` and `behind_hash` are empty: versions of a chunk that was stored behind the one before it left.
"""
SELECT_CHUNKS = (
    'SELECT c.id, c.chunk_id, d.source, c.document, c.ordinal, c.start, c."end", c.text, c.metadata, c.num_tokens, '
    "c.vector, c.generation, c.text_hash, c.checksum FROM chunks c JOIN documents d ON d.id = c.document "
)


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
    last_id: int  # what `doom` takes once it is known which entries these are


class PendingDeletion(NamedTuple):
    """An entry that is to go, because nobody has its text any more, or one that it was computed behind.

    It tells no text, so it may wait for a remote tier that cannot be told now.
    """

    key: str
    place: str  # where it is to go: "" in the store of this machine, else the remote tier's URL
    source: str  # the document that had it
    text_hash: bytes


class ChunkRow(NamedTuple):
    """One chunk as stored."""

    id: int  # chunk_id as FAISS and SQLite have ids, in 64 signed bits, in the same order
    chunk_id: str
    source: str
    document: int
    ordinal: int
    start: int
    end: int
    text: str
    metadata: str  # JSON
    num_tokens: int | None
    vector: bytes  # [dim] float32, little endian
    generation: int
    text_hash: bytes
    checksum: int

    def chunk(self) -> Chunk:
        """The chunk."""
        return Chunk(self.text, self.source, self.start, self.end, json.loads(self.metadata))

    def is_intact(self) -> bool:
        """Whether these are the bytes that were written."""
        columns = (self.id, self.chunk_id, *self[3:-1])  # its document's name is not of its row
        return row_checksum(*columns) == self.checksum and Chunk(self.text, self.source, self.start).id == self.chunk_id


def text_hash(text: str) -> bytes:
    """16 bytes; equal for texts that are the same to the registry: equal after `strip()`."""
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()


def make_row(
    chunk: Chunk, vector: NDArray[np.float32], document: int, ordinal: int, generation: int
) -> tuple[object, ...]:
    """The row of the chunks table for one chunk, its checksum last."""
    num_tokens = chunk.metadata.get("num_tokens")  # a caller's metadata may hold anything by that name
    columns = (
        int(chunk.id, 16) - 2**63,
        chunk.id,
        document,
        ordinal,
        chunk.start,
        chunk.end,
        chunk.text,
        json.dumps(dict(chunk.metadata), default=str),
        num_tokens if isinstance(num_tokens, int) and 0 <= num_tokens < 2**31 else None,
        vector.astype("<f4").tobytes(),
        generation,
        text_hash(chunk.text),
    )
    return (*columns, row_checksum(*columns))
