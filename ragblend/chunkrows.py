"""What a chunk database holds: its tables, and the rows as values. Every chunk's row carries a checksum.

Knows SQL's table definitions and chunks; opens nothing. `chunkdb` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragblend.segments import Chunk

SCHEMA_VERSION = 2

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, version TEXT NOT NULL, top TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY, source TEXT NOT NULL UNIQUE, "
    "file TEXT NOT NULL, content_hash TEXT NOT NULL, status TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS chunks (id INTEGER PRIMARY KEY, chunk_id TEXT NOT NULL UNIQUE, "
    "document INTEGER NOT NULL REFERENCES documents (id), ordinal INTEGER NOT NULL, "
    'start INTEGER NOT NULL, "end" INTEGER NOT NULL, text TEXT NOT NULL, metadata TEXT NOT NULL, '
    "num_tokens INTEGER, vector BLOB NOT NULL, checksum INTEGER NOT NULL, generation INTEGER NOT NULL, "
    "text_hash BLOB NOT NULL, UNIQUE (document, ordinal))",
    "CREATE TABLE IF NOT EXISTS leftovers (id INTEGER PRIMARY KEY, source TEXT NOT NULL, text TEXT NOT NULL, "
    "behind TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS documents_by_file ON documents (file)",
    "CREATE INDEX IF NOT EXISTS chunks_by_text ON chunks (text_hash)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
SELECT = (
    'SELECT c.id, c.chunk_id, d.source, c.document, c.ordinal, c.start, c."end", c.text, c.metadata, c.vector, '
    "c.checksum FROM chunks c JOIN documents d ON d.id = c.document "
)


class DocumentChange(NamedTuple):
    """What adding a document did, in document order. The document itself no longer needs the KV of `removed`."""

    added: tuple[Chunk, ...]
    kept: tuple[Chunk, ...]
    removed: tuple[Chunk, ...]


class FileNote(NamedTuple):
    """A file whose documents are here. `version`: of its bytes and of how they were read and cut; "" is not known.

    `top`: what an ingestion was told that brought it in, the file itself or a folder.
    """

    path: str
    version: str
    top: str


class Leftovers(NamedTuple):
    """What documents had before and the index has nowhere now: nobody needs its KV, or its place in the registry."""

    texts: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]  # (behind, text): a text that followed another, see `with_neighbours`
    sources: tuple[str, ...]  # documents that are gone whole
    last_id: int  # what `drop_leftovers` takes once all that is done


class Row(NamedTuple):
    """One chunk as stored."""

    id: int  # the low 63 bits of chunk_id: FAISS and SQLite have signed 64-bit ids
    chunk_id: str
    source: str
    document: int
    ordinal: int
    start: int
    end: int
    text: str
    metadata: str  # JSON
    vector: bytes  # [dim] float32, little endian
    checksum: int

    def chunk(self) -> Chunk:
        """The chunk."""
        return Chunk(self.text, self.source, self.start, self.end, json.loads(self.metadata))

    def forgotten(self) -> Chunk:
        """The chunk for whoever deletes what belongs to it; its metadata may be damaged and is left out."""
        return Chunk(self.text, self.source, self.start, self.end)

    def is_sound(self) -> bool:
        """Whether these are the bytes that were written."""
        expected = _checksum(self.ordinal, self.start, self.end, self.metadata, self.text, self.vector)
        return expected == self.checksum and self.forgotten().id == self.chunk_id


def text_hash(text: str) -> bytes:
    """16 bytes; equal for texts that are the same to the registry: equal after `strip()`."""
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()


def versions_of(texts: Sequence[str]) -> dict[tuple[str, str], None]:
    """What KV a document of these chunks may have: (text, ""), and (text, behind) for each that follows another."""
    alone = {(text, ""): None for text in texts}
    return alone | {(text, behind): None for behind, text in pairwise(texts)}


def _checksum(ordinal: int, start: int, end: int, metadata: str, text: str, vector: bytes) -> int:
    return zlib.crc32(vector, zlib.crc32(f"{ordinal}\0{start}\0{end}\0{metadata}\0{text}".encode()))


def columns_of(
    chunk: Chunk, vector: NDArray[np.float32], document: int, ordinal: int, generation: int
) -> tuple[object, ...]:
    """The row of the chunks table for one chunk."""
    metadata = json.dumps(dict(chunk.metadata), default=str)
    data = vector.astype("<f4").tobytes()
    checksum = _checksum(ordinal, chunk.start, chunk.end, metadata, chunk.text, data)
    place = (int(chunk.id, 16) & (2**63 - 1), chunk.id, document, ordinal, chunk.start, chunk.end)
    hashed = text_hash(chunk.text)
    return (*place, chunk.text, metadata, chunk.metadata.get("num_tokens"), data, checksum, generation, hashed)
