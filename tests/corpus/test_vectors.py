"""Indexes that an older version searched otherwise open as flat ones."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import asdict
from pathlib import Path

import faiss
import numpy as np
import pytest

from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.store.signed_json import encode_signed_json
from ragblend.index import MANIFEST, VECTORS_FILE, ChunkIndex, open_index
from ragblend.prompt.types import Chunk

DIM = 16
RNG = np.random.default_rng(5)


def embedder() -> HashingEmbedder:
    return HashingEmbedder(DIM)


def chunks_of(source: str, count: int) -> list[Chunk]:
    return [Chunk(f"{source} {number}", source, number * 100) for number in range(count)]


def rows_of(count: int) -> np.ndarray:
    return RNG.standard_normal((count, DIM)).astype(np.float32)


def answers(index: ChunkIndex, questions: np.ndarray, k: int = 6) -> list[list[tuple[str, float]]]:
    return [[(hit.chunk.id, hit.score) for hit in index.search(question, k)] for question in questions]


def as_searched_otherwise(folder: Path, former: str) -> None:
    """Rewrite an index as an older version wrote it: its manifest names another kind of FAISS index, or a database
    with a number and without a vectors file."""
    with open_index(folder) as index:
        index.write_metadata(vectors=former, vectors_number="9f0c8e3d2b1a7645", vectors_left="[]")
        manifest = asdict(index.manifest) | {"vectors": former}
    if former.startswith("faiss:"):
        made = faiss.IndexIDMap(faiss.index_factory(DIM, former.removeprefix("faiss:")))
        data = faiss.serialize_index(made).tobytes()
        (folder / VECTORS_FILE).write_bytes(data)
        manifest["vectors_sha256"] = hashlib.sha256(data).hexdigest()
    else:
        (folder / VECTORS_FILE).unlink()
    (folder / MANIFEST).write_bytes(encode_signed_json(manifest, MANIFEST))


@pytest.mark.parametrize(
    ("former", "said"),
    [
        ("postgresql://me@db.invalid:5432/rag?sslmode=require", ["9f0c8e3d2b1a7645", "BlendVectorStore"]),
        ("qdrant:///srv/qdrant", ["qdrant:///srv/qdrant", "9f0c8e3d2b1a7645", "BlendVectorStore"]),
        ("faiss:HNSW16", ["searched in faiss:HNSW16", "flat vectors.faiss"]),
    ],
)
def test_an_index_that_was_searched_otherwise_opens_as_a_flat_one_and_says_so_once(former, said, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rows = rows_of(8)
    with open_index(tmp_path, embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 8), rows)
        wanted = answers(index, rows)
    as_searched_otherwise(tmp_path, former)
    for is_first in (True, False):
        caplog.clear()
        with open_index(tmp_path) as index:
            assert answers(index, rows) == wanted
            assert index.find_problems() == []
        assert [record.levelname for record in caplog.records] == ["WARNING"] * is_first
        if is_first:
            assert [word for word in (*said, "nothing is lost") if word not in caplog.text] == []
            assert "me@" not in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_reader_that_may_not_write_searches_such_an_index_too(tmp_path):
    with open_index(tmp_path / "i", embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 3), rows := rows_of(3))
    as_searched_otherwise(tmp_path / "i", "qdrant://db:6333/docs")
    (tmp_path / "i").chmod(0o500)
    try:
        with open_index(tmp_path / "i") as index:
            assert len(index.search(rows[0])) == 3
    finally:
        (tmp_path / "i").chmod(0o700)
