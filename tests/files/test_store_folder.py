"""Folders that earlier versions wrote are opened as one store, even if their move was interrupted."""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ragblend.catalog.registry import open_registry
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.open import open_store
from ragblend.errors import RagblendError
from ragblend.files import store_folder
from ragblend.files.store_folder import CATALOG_FILE, FORMER_REGISTRY_FILE
from ragblend.index import open_index
from ragblend.operations.maintenance import verify_and_quarantine
from ragblend.precompute import ingest
from ragblend.prompt.types import Chunk

GOLDEN = Path(__file__).parents[1] / "golden" / "store"
KEYS = sorted(path.stem for path in GOLDEN.glob("kv/??/*.safetensors"))
TEXT = "The Turin office has forty desks and a roof garden."


@pytest.fixture
def former(tmp_path):
    """A store as an earlier version wrote it: `index` and `kv` in one folder."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "ragblend-data"))


def assert_whole(folder: Path) -> None:
    disk = DiskStore(folder)
    assert sorted(disk.keys()) == KEYS
    assert all(disk.contains(key) for key in KEYS)
    assert [facts["model"] for facts in disk.models().values()] == ["demo"]
    assert disk.read_context_policy() == "similar"
    with open_registry(disk) as registry:
        assert TEXT in registry
        assert len(registry.stored_variant_keys()) == 2
    with open_index(folder) as index:
        assert index.search("roof garden", 1)[0].chunk.text == TEXT
    report = verify_and_quarantine(folder)
    assert (report.has_problems, report.orphans, report.checked) == (
        False,
        0,
        len(KEYS),
    )  # two of its four texts are in no file, but in documents of LangChain's


@pytest.mark.parametrize("named", [".", "kv", "index"])
def test_the_two_former_folders_are_one_store_under_either_name(former, named, caplog):
    open_index(former / named).close()
    assert [record.message.rpartition("; ")[2] for record in caplog.records][-2:] == [
        "its 4 texts were copied into the catalogue",
        "its 2 documents were copied into the catalogue",
    ]
    caplog.clear()
    assert_whole(former)
    assert caplog.text == ""
    assert DiskStore(former / named).root == former
    assert {path.name for path in former.iterdir()} >= {"vectors.faiss", CATALOG_FILE, "models", "kv"}
    assert not (former / "index").exists()
    with load_engine(None, former, dtype="float32") as engine:
        assert engine.name == "demo"
        assert engine.precompute(Chunk(TEXT)) == 0


def test_the_entries_of_a_store_that_has_no_index_stay_where_they_are(tmp_path):
    with load_engine("demo", tmp_path / "store") as engine:
        engine.precompute(Chunk(TEXT))
    entries = sorted((tmp_path / "store" / "kv").rglob("*.safetensors"))
    assert DiskStore(tmp_path / "store" / "kv").root == tmp_path / "store"
    assert sorted((tmp_path / "store" / "kv").rglob("*.safetensors")) == entries != []


def test_a_folder_of_kv_alone_becomes_a_store(former):
    place = (former / "kv").rename(former.parent / "entries")
    disk = DiskStore(place)
    assert sorted(disk.keys()) == KEYS
    assert {path.name for path in place.iterdir()} == {"kv", "models", "context.json", FORMER_REGISTRY_FILE}
    with open_registry(disk) as registry:
        assert TEXT in registry


def test_a_move_that_is_cut_short_anywhere_is_finished_by_the_next(tmp_path, monkeypatch):
    rename, num_cuts = Path.rename, 0
    while True:
        folder = Path(shutil.copytree(GOLDEN, tmp_path / str(num_cuts)))
        left = num_cuts

        def cut(source: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", cut)
            try:
                DiskStore(folder)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert_whole(folder)
        num_cuts += 1
    assert num_cuts > 5


@pytest.mark.parametrize("named", ["kv", "entries"])
def test_a_folder_that_is_only_read_is_read_as_it_is(former, named, monkeypatch):
    if named != "kv":
        (former / "kv").rename(former / named)

    def refuse(source: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    disk = DiskStore(former / named)
    assert sorted(disk.keys()) == KEYS
    assert disk.models()


def test_folders_of_other_programs_are_not_moved(tmp_path):
    for name in ("ui", "db", "kv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("mine")
    disk = DiskStore(tmp_path)
    assert disk.kv_dir == tmp_path / "kv"
    assert (tmp_path / "ui" / "ui.txt").read_text() == (tmp_path / "db" / "db.txt").read_text() == "mine"


def test_a_database_in_use_is_not_moved(former, monkeypatch):
    monkeypatch.setattr(store_folder, "_LOCK_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(former / "index" / "chunks.sqlite", isolation_level=None)) as used:
        used.execute("PRAGMA journal_mode = WAL").fetchall()
        used.execute("BEGIN IMMEDIATE")
        with pytest.raises(RagblendError, match="stop the processes that use it"):
            open_index(former)
    assert_whole(former)


def test_entries_elsewhere_can_be_lost_and_nothing_else(tmp_path, caplog):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(TEXT)
    place = {"kv_dir": str(tmp_path / "fast"), "dtype": "float32"}

    def bring_in() -> tuple[int, int]:
        with load_engine("demo", tmp_path / "store", **place) as engine:
            report = ingest(tmp_path / "docs", engine, tmp_path / "store", embedder="hashing", context="none")
            return report.num_new_kv, report.num_known_kv

    assert bring_in() == (1, 0)
    assert len(list((tmp_path / "fast").glob("??/*.safetensors"))) == 1
    assert not (tmp_path / "store" / "kv").exists()
    assert bring_in() == (0, 1)
    shutil.rmtree(tmp_path / "fast")
    assert bring_in() == (1, 0)
    with (
        caplog.at_level(logging.WARNING),
        open_registry(open_store(tmp_path / "store", **{"kv_dir": place["kv_dir"]})) as registry,
    ):
        assert TEXT in registry
    assert not verify_and_quarantine(tmp_path / "store", kv_dir=place["kv_dir"]).has_problems
