"""The index database of an earlier version is copied into the catalogue once."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ragblend.catalog import former_files
from ragblend.catalog.index_rows import IngestedFile, PendingDeletion
from ragblend.catalog.registry import ChunkRegistry
from ragblend.catalog.schema import DocumentKey, text_key
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.errors import CorruptError, StoreMismatchError
from ragblend.files.sqlite import row_checksum
from ragblend.files.store_folder import (
    CATALOG_FILE,
    FORMER_INDEX_FILE,
    FORMER_MANIFEST,
    FORMER_REGISTRY_FILE,
    VECTORS_FILE,
)
from ragblend.index import ChunkIndex, open_index

HERE = Path(__file__).parent
DUMPS = {FORMER_INDEX_FILE: "former_index.sql", FORMER_REGISTRY_FILE: "former_registry.sql"}
"""Write `chunks.sqlite` and `texts.sqlite` as the last version without a catalogue did."""
OWNER = DocumentKey("index:1efb8f56cf484f9e95d941d216b3d3d6")
DARK, ROCK, GREY, SPLITS = "Basalt is dark.", "Basalt is a rock.", "Slate is grey.", "Slate splits."
ADDED = "Of a framework."


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "store"
    found.mkdir()
    for name, dump in DUMPS.items():
        with closing(sqlite3.connect(found / name, isolation_level=None)) as file:
            file.execute("PRAGMA journal_mode = WAL")
            file.executescript((HERE / dump).read_text())
    register(found / FORMER_REGISTRY_FILE)
    for name in (VECTORS_FILE, FORMER_MANIFEST):
        (found / name).write_bytes(b"of the former index")
    return found


def register(path: Path) -> None:
    """Write the texts of the former index, and one of a framework, in place of those of the dump."""
    owners = {DARK: OWNER.collection, ROCK: OWNER.collection, GREY: OWNER.collection, SPLITS: OWNER.collection}
    owners[ADDED] = "langchain/9"
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.create_function("row_checksum", -1, row_checksum, deterministic=True)
        file.execute("DELETE FROM registered_texts")
        file.execute("DELETE FROM text_holders")
        for text, owner in owners.items():
            row = {"owner": owner, "key": text_key(text), "text": text}
            file.execute("INSERT INTO registered_texts (key, text) VALUES (:key, :text)", row)
            file.execute("INSERT INTO text_holders VALUES (:owner, :key, row_checksum(:owner, :key))", row)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.create_function("row_checksum", -1, row_checksum, deterministic=True)
        file.execute(statement)


def assert_whole(index: ChunkIndex) -> None:
    assert index.content_hashes_by_file() == {
        "/d/a.md": {"/d/a.md": "1"},
        "/d/b.md": {"/d/b.md": "3"},
        "": {"langchain/7": "h"},
    }
    assert index.files() == {f"/d/{name}.md": IngestedFile(f"/d/{name}.md", f"v{name}", "/d") for name in "ab"}
    assert index.sources() == ["/d/a.md", "/d/b.md", "langchain/7"]
    assert [chunk.text for chunk in index.chunks()] == [DARK, ROCK, GREY, DARK]
    assert dict(next(index.chunks()).metadata) == {"title": "/d/"}
    assert (index.manifest.chunk_size, index.manifest.generation, index.collection) == (64, 5, OWNER.collection)
    left = index.orphaned_texts()
    assert (left.texts, left.sources, left.source_of) == ((SPLITS,), (), {SPLITS: "/d/b.md"})
    pending = PendingDeletion("entry-x", "redis://far", "/d/b.md", text_key(b"Chalk is soft.".decode()))
    assert index.pending_deletions() == [pending]
    assert [hit.chunk.text for hit in index.search(ROCK, 1)] == [ROCK]
    np.testing.assert_array_equal(index.embed([DARK]), HashingEmbedder(8).embed([DARK]))
    assert index.registry.texts_of(OWNER) == {DARK, ROCK, GREY, SPLITS}
    assert index.registry.texts_of(DocumentKey("langchain", "9")) == {ADDED}
    assert index.registry.fingerprints_by_key() == {"entry-a": "model", "entry-b": "model"}
    assert index.find_problems() == []


def test_the_index_is_read_in_once(folder, caplog):
    for _ in range(2):
        with open_index(folder, HashingEmbedder(8)) as index:
            assert_whole(index)
    assert [record.message for record in caplog.records] == [
        f"{folder / name} was written by an earlier version; its {what} were copied into the catalogue"
        for name, what in ((FORMER_REGISTRY_FILE, "5 texts"), (FORMER_INDEX_FILE, "3 documents"))
    ]
    assert sorted(path.name for path in folder.iterdir()) == [CATALOG_FILE, VECTORS_FILE]


def test_the_registry_of_the_folder_reads_it_in_too(folder):
    with ChunkRegistry(folder / CATALOG_FILE) as registry:
        assert registry.texts_of(OWNER) == {DARK, ROCK, GREY, SPLITS}
    with open_index(folder, HashingEmbedder(8)) as index:
        assert_whole(index)


@pytest.mark.parametrize("cut", range(5))
def test_a_reading_that_is_cut_short_anywhere_is_finished_by_the_next(folder, cut, monkeypatch):
    removed: list[str] = []

    def killed(path: Path) -> None:
        if not path.name.startswith(FORMER_REGISTRY_FILE):
            if len(removed) == cut:
                raise KeyboardInterrupt
            removed.append(path.name)
        path.unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(former_files, "remove_file", killed)
        with pytest.raises(KeyboardInterrupt):
            open_index(folder, HashingEmbedder(8))
    with sqlite3.connect(folder / CATALOG_FILE) as file:  # another process has it open and changes it
        assert file.execute("SELECT count(*) FROM chunks").fetchone() == (4,)
        file.execute("DELETE FROM pending_deletions")
    file.close()
    with open_index(folder, HashingEmbedder(8)) as index:
        assert index.pending_deletions() == []
        assert [chunk.text for chunk in index.chunks()] == [DARK, ROCK, GREY, DARK]
    assert not (folder / FORMER_INDEX_FILE).exists()


def test_damaged_rows_are_found_in_the_catalogue(folder):
    for statement in (
        "UPDATE chunks SET text = 'Basalt is light.' WHERE ordinal = 1",
        "UPDATE documents SET content_hash = '9' WHERE id = 3",
        "UPDATE leftovers SET text = 'Another.'",
    ):
        change(folder / FORMER_INDEX_FILE, statement)
    with ChunkRegistry(folder / CATALOG_FILE) as registry:
        assert [problem.partition(": ")[2] for problem in registry.find_problems()] == [
            "the checksums of 1 documents do not match",
            "the checksums of 1 chunks do not match",
        ]
    with pytest.raises(CorruptError, match=r"checksum of chunk .* does not match"):
        open_index(folder, HashingEmbedder(8))


def test_a_former_index_of_another_version_is_refused_and_a_damaged_one_is_said(folder):
    change(folder / FORMER_INDEX_FILE, "PRAGMA user_version = 2")
    with pytest.raises(StoreMismatchError, match="index schema 2, but this ragblend reads schema 3"):
        open_index(folder, HashingEmbedder(8))
    (folder / FORMER_INDEX_FILE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptError, match=r"chunks\.sqlite is damaged .* ingest the documents again"):
        open_index(folder, HashingEmbedder(8))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_only_read_is_searched_and_stays(folder):
    read_in_a_folder_that_stays(folder)


def test_a_folder_that_says_it_is_only_read_is_searched_and_stays(folder, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    read_in_a_folder_that_stays(folder)


def read_in_a_folder_that_stays(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != VECTORS_FILE}
    folder.chmod(0o500)
    try:
        index = open_index(folder, HashingEmbedder(8))
        assert_whole(index)
        index.close()
    finally:
        folder.chmod(0o700)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != VECTORS_FILE} == before
