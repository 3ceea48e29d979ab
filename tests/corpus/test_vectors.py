"""Every kind of FAISS index gives the answers that a flat one gives, and follows the catalogue."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.store.signed_json import encode_signed_json
from ragblend.errors import UsageError
from ragblend.index import MANIFEST, VECTORS_FILE, ChunkIndex, open_index
from ragblend.prompt.prompt import Chunk

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


def assert_alike(found: list[list[tuple[str, float]]], wanted: list[list[tuple[str, float]]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], atol=2e-6)


# --- the same answers ---


@pytest.mark.parametrize("kind", ["faiss:HNSW16", "faiss:IVF4,Flat?nprobe=4"])
def test_a_kind_answers_as_flat_faiss_does_through_changes_and_reopening(kind, tmp_path):
    questions = rows_of(10)
    vectors = {source: rows_of(16) for source in ("abcdefghijklmnop" if "IVF" in kind else "abcdef")}
    vectors["f"][:8] = vectors["a"][:8]  # equals: which are taken is not left to chance
    plain = open_index(tmp_path / "plain", embedder(), create=True)
    other = open_index(tmp_path / "other", embedder(), create=True, vectors=kind)

    def both(change: Callable[[ChunkIndex], object]) -> None:
        for index in (plain, other):
            change(index)
        assert_alike(answers(other, questions), answers(plain, questions))

    for source, rows in vectors.items():
        both(lambda index, source=source, rows=rows: index.add_document(source, "1", chunks_of(source, 16), rows))
    both(lambda index: index.remove_document("b"))
    both(lambda index: index.add_document("c", "2", chunks_of("c", 12), vectors["d"][:12]))
    both(ChunkIndex.save)
    both(ChunkIndex.rebuild)
    for index in (plain, other):
        index.save()
        index.close()
    with open_index(tmp_path / "plain") as plain, open_index(tmp_path / "other") as other:
        assert other.is_saved
        if other._vectors.is_exact:
            assert_alike(answers(other, questions, 300), answers(plain, questions, 300))
        assert other.find_problems() == []
        both(lambda index: index.add_document("g", "1", chunks_of("g", 9), rows_of(9) * 0 + vectors["a"][0]))
        both(lambda index: index.remove_document("a"))  # what was mapped is changed


# --- what is trained, marked, damaged ---


@pytest.mark.parametrize("kind", ["faiss:IVF8,Flat?nprobe=8", "faiss:IVF8,SQ8?nprobe=8", "faiss:HNSW16,SQ8"])
def test_what_has_to_be_trained_is_flat_until_there_is_enough_and_then_finds_most(kind, tmp_path):
    questions = rows_of(20)
    with open_index(tmp_path / "index", embedder(), create=True, vectors=kind) as index:
        index.add_document("a", "1", chunks_of("a", 20), rows_of(20))
        index.search(questions[0])
        assert index._vectors.is_exact
        index.add_document("b", "1", chunks_of("b", 1000), rows_of(1000))
        index.search(questions[0])
        assert not index._vectors.is_exact
    with open_index(tmp_path / "index") as index:
        assert not index._vectors.is_exact
        assert index.manifest.vectors == kind
        stored = {row.id: np.frombuffer(row.vector, "<f4") for row in index.rows(index.ids().tolist())}
        ids, matrix = np.array([*stored]), np.stack([*stored.values()])
        hits = 0
        for question in questions:
            best = ids[np.argsort(-(matrix @ question))[:10]]
            hits += len({*best.tolist()} & {int(hit.chunk.id, 16) - 2**63 for hit in index.search(question, 10)})
        assert hits / 200 > 0.8


def test_a_removed_chunk_is_not_found_in_a_graph_and_a_quarter_rebuilds_it(tmp_path):
    rows = rows_of(100)
    with open_index(tmp_path, embedder(), create=True, vectors="faiss:HNSW16") as index:
        for number in range(100):
            index.add_document(str(number), "1", chunks_of(str(number), 1), rows[number : number + 1])
        index.search(rows[0])
        for number in range(40):
            index.remove_document(str(number))
            found = index.search(rows[number], 10)
            assert len(found) == 10
            assert str(number) not in {hit.chunk.source for hit in found}
        assert index._vectors.faiss.ntotal < 100


def test_a_damaged_file_of_any_kind_is_made_again(tmp_path, caplog):
    with open_index(tmp_path, embedder(), create=True, vectors="faiss:HNSW16") as index:
        index.add_document("a", "1", chunks_of("a", 50), rows := rows_of(50))
    data = bytearray((tmp_path / VECTORS_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / VECTORS_FILE).write_bytes(data)
    with open_index(tmp_path) as index:
        assert index.search(rows[7], 1)[0].chunk.text == "a 7"
    assert "does not match its checksum" in caplog.text


# --- moving ---


def test_another_kind_is_made_from_the_same_vectors_and_remembered(tmp_path):
    rows = rows_of(25)
    with open_index(tmp_path, embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 25), rows)
        wanted = answers(index, rows)
    for kind in ("faiss:HNSW16", "faiss"):
        with open_index(tmp_path, vectors=kind) as index:
            assert_alike(answers(index, rows), wanted)
        with open_index(tmp_path) as index:
            assert index.manifest.vectors == kind
            assert index.find_problems() == []
            assert_alike(answers(index, rows), wanted)


@pytest.mark.parametrize(
    "text",
    ["", "hnsw", "faiss:NOPE", "faiss:IDMap,Flat", "faiss:IVF0,Flat", "faiss:Flat?nprobe=3", "faiss:HNSW32?x=1",
     "faiss:HNSW32?efSearch=-1", "qdrant://db/docs", "postgresql://me:secret@host/db", "postgresql://me:sec#ret@host/db"],
)  # fmt: skip
def test_what_is_no_kind_is_refused_without_its_secret_and_makes_no_folder(text, tmp_path):
    with pytest.raises(UsageError, match="choose") as caught:
        open_index(tmp_path / "i", embedder(), create=True, vectors=text)
    assert "secret" not in str(caught.value)
    assert "sec#" not in str(caught.value)
    assert not (tmp_path / "i").exists()


# --- indexes whose vectors an older version kept in a database ---


def as_in_a_database(folder: Path, url: str) -> None:
    """Have an index be as older versions left it, whose vectors were at `url`: no file of FAISS, the URL without
    its password and a number in the database, the URL and a state in the manifest."""
    with open_index(folder) as index:
        index.write_metadata(vectors=url, vectors_number="9f0c8e3d2b1a7645", vectors_left="[]")
        manifest = asdict(index.manifest) | {"vectors": url, "vectors_sha256": "ab" * 32}
    (folder / MANIFEST).write_bytes(encode_signed_json(manifest, MANIFEST))
    (folder / VECTORS_FILE).unlink()


@pytest.mark.parametrize("url", ["postgresql://me@db.invalid:5432/rag?sslmode=require", "qdrant:///srv/qdrant"])
def test_an_index_with_vectors_in_a_database_opens_and_says_once_what_became_of_them(url, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rows = rows_of(8)
    with open_index(tmp_path, embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 8), rows)
        wanted = answers(index, rows)
    as_in_a_database(tmp_path, url)
    for is_first in (True, False):
        caplog.clear()
        with open_index(tmp_path) as index:
            assert answers(index, rows) == wanted
            assert index.find_problems() == []
            assert index.manifest.vectors == ""
        assert [record.levelname for record in caplog.records] == ["WARNING"] * is_first
        if is_first:
            said = caplog.text
            assert all(word in said for word in ("9f0c8e3d2b1a7645", "PrecomputingVectorStore", "nothing is lost"))
            assert "me@" not in said
    with open_index(tmp_path, vectors="faiss:HNSW16") as index:
        assert_alike(answers(index, rows), wanted)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_reader_that_may_not_write_searches_such_an_index_too(tmp_path):
    with open_index(tmp_path / "i", embedder(), create=True) as index:
        index.add_document("a", "1", chunks_of("a", 3), rows := rows_of(3))
    as_in_a_database(tmp_path / "i", "qdrant://db:6333/docs")
    (tmp_path / "i").chmod(0o500)
    try:
        with open_index(tmp_path / "i") as index:
            assert len(index.search(rows[0])) == 3
    finally:
        (tmp_path / "i").chmod(0o700)
