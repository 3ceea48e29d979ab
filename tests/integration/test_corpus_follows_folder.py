"""A folder that is edited, moved about and ingested again from anywhere: the index, the ledger, the KV and the
answers end up as those of a fresh ingest. `RAGBLEND_FAULTS=full` raises the counts."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ragblend import Prompt, load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.engine.store.disk import DiskStore
from ragblend.errors import EmptyCorpusError
from ragblend.index import ChunkIndex
from ragblend.ingestion.documents import find_indexed_documents, remove_indexed_documents
from ragblend.operations.maintenance import collect_garbage, verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
SEEDS = range(5) if FULL else range(1)
NUM_FILES, NUM_STEPS = 300, 200
CHUNK_TOKENS = 24
OPTIONS: dict[str, Any] = {"chunk_size": CHUNK_TOKENS, "embedder": "hashing"}
QUESTIONS = ("Where does Bob Fox live?", "What does Nexon sell?", "Who plays the flute?", "Zebra?")

SUBJECTS = ("Alice Kern", "Bob Fox", "Tara Kern", "James Bell", "The company", "She", "Nexon")
FACTS = ("works for Nexex", "lives in Norburg", "plays the flute", "sells drones", "is based in Halford")


class Folder:
    """A folder that changes at random. Every method is one thing that people do to folders."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng, self.num_made = root, rng, 0
        for name in (".git", "a", "a/deep", "b b", "ünï"):  # a repository: rules hold for folders further down, too
            (root / name).mkdir(parents=True)

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file() and path.name != ".gitignore")

    def folders(self) -> list[Path]:
        visible = (path for path in self.root.rglob("*") if path.name != ".git")
        found = (path for path in visible if path.is_dir() and not path.is_symlink())
        return [self.root, *sorted(found)]

    def text(self) -> str:
        sentences = (f"{self.rng.choice(SUBJECTS)} {self.rng.choice(FACTS)}." for _ in range(self.rng.randint(1, 6)))
        return self.rng.choice(("\n\n", " ")).join(sentences)

    def content(self, suffix: str) -> str:
        texts = [self.text() for _ in range(self.rng.randint(0, 4))]
        if suffix == ".jsonl":
            return "".join(json.dumps({"text": text, "n": self.rng.randint(0, 2)}) + "\n" for text in texts)
        if suffix == ".json":
            return json.dumps(texts)
        if suffix == ".csv":
            return "title,text\n" + "".join(f'T{self.rng.randint(0, 2)},"{text}"\n' for text in texts)
        return self.text()

    def add(self) -> None:
        self.num_made += 1
        suffix = self.rng.choice((".txt", ".md", ".jsonl", ".json", ".csv", ""))
        name = f"{self.rng.choice(('note', 'ein Blatt', 'Ärger', 'c#', 'draft'))}{self.num_made}{suffix}"
        (self.rng.choice(self.folders()) / name).write_text(self.content(suffix))

    def any_file(self) -> Path:
        return self.rng.choice(self.files())

    def edit(self) -> None:
        path = self.any_file()
        if not path.is_symlink():
            path.write_text(self.content(path.suffix))

    def change_a_record(self) -> None:
        path = self.rng.choice([path for path in self.files() if path.suffix == ".jsonl"])
        lines = path.read_text().splitlines(keepends=True)
        if lines:
            place = self.rng.randrange(len(lines))
            lines[place : place + 1] = self.rng.choice(([], [json.dumps({"text": self.text()}) + "\n"]))
            path.write_text("".join(lines))

    def empty(self) -> None:
        self.any_file().write_bytes(b"")

    def make_binary(self) -> None:
        path = self.any_file()
        if not path.suffix:
            path.write_bytes(bytes(range(256)))

    def delete(self) -> None:
        self.any_file().unlink()

    def rename(self) -> None:
        self.num_made += 1
        path = self.any_file()
        path.rename(self.rng.choice(self.folders()) / f"moved{self.num_made}{path.suffix}")

    def rename_a_folder(self) -> None:
        self.num_made += 1
        folder = self.rng.choice(self.folders())
        if folder != self.root:
            folder.rename(folder.with_name(f"folder{self.num_made}"))

    def delete_a_folder(self) -> None:
        folder = self.rng.choice(self.folders()[1:] or [self.root])
        if folder != self.root and self.rng.random() < 0.3:
            shutil.rmtree(folder)

    def copy(self) -> None:
        self.num_made += 1
        path = self.any_file()
        shutil.copy(path, self.rng.choice(self.folders()) / f"copy{self.num_made}{path.suffix}")

    def file_to_folder(self) -> None:
        path = self.any_file()
        path.unlink()
        path.mkdir()
        (path / "inside.txt").write_text(self.text())

    def folder_to_file(self) -> None:
        folder = self.rng.choice(self.folders())
        if folder != self.root and len(list(folder.rglob("*"))) < 10:
            shutil.rmtree(folder)
            folder.write_text(self.text())

    def link(self) -> None:
        self.num_made += 1
        target = self.rng.choice((self.any_file(), self.rng.choice(self.folders()), self.root.parent / "outside.txt"))
        (self.rng.choice(self.folders()) / f"link{self.num_made}{target.suffix}").symlink_to(target)

    def ignore(self) -> None:
        folder = self.rng.choice(self.folders())
        (folder / ".gitignore").write_text(self.rng.choice(("draft*\n", "", "# nothing\n", "draft*\n!draft1*\n")))

    def edit_outside(self) -> None:
        (self.root.parent / "outside.txt").write_text(self.text())


STEPS: tuple[Callable[[Folder], None], ...] = (
    *(3 * (Folder.add, Folder.edit, Folder.change_a_record, Folder.delete, Folder.rename)),
    *(Folder.empty, Folder.make_binary, Folder.rename_a_folder, Folder.delete_a_folder, Folder.copy),
    *(Folder.file_to_folder, Folder.folder_to_file, Folder.link, Folder.link, Folder.ignore, Folder.edit_outside),
)


def ingest_somewhere(folder: Folder, engine: Any, index: ChunkIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or part of the folder, named as one would from where one is."""
    rng = folder.rng
    place = rng.choice([folder.root.parent, *folder.folders()])
    monkeypatch.chdir(place)
    what = rng.choice((folder.root, folder.root, rng.choice(folder.folders()), folder.any_file()))
    if "draft" in str(what):
        return  # a file that is named is ingested though `.gitignore` names it; a fresh ingest of the folder skips it
    given = str(what) if rng.random() < 0.5 else os.path.relpath(what, place)
    with suppress(EmptyCorpusError):
        ingest(given, engine, index, glob=rng.choice(("*", "*", "*.md", "*.txt")), **OPTIONS)


def state(place: Path, engine: Any, index: ChunkIndex) -> dict[str, Any]:
    """Everything that should not depend on what was there before."""
    with open_ledger(engine.store) as ledger:
        texts = sorted(ledger.texts())
    answers = []
    for question in QUESTIONS:
        hits = index.search(question, 4, neighbours=1, order="document")
        answer = engine.generate(Prompt([hit.chunk for hit in hits], question), max_tokens=8)
        places = [(hit.chunk.source, hit.chunk.start, hit.score, hit.is_neighbour) for hit in hits]
        answers.append((places, answer.token_ids, answer.report.num_reused_tokens))
    return {
        "chunks": {source: list(index.chunks(source)) for source in sorted(index.sources())},
        "hashes": {
            source: hashed for found in index.content_hashes_by_file().values() for source, hashed in found.items()
        },
        "files": {path: note.version for path, note in index.files().items()},
        "leftovers": index.lost_texts().last_number,
        "texts": texts,
        "keys": sorted(engine.store.keys()),
        "nbytes": {entry.key: entry.nbytes for entry in DiskStore(place / "kv").entries()},
        "problems": index.find_problems(),
        "answers": answers,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_after_any_edits_everything_is_as_after_a_fresh_ingest(seed, tmp_path, monkeypatch, counted):
    rng = random.Random(seed)
    (tmp_path / "outside.txt").write_text("James Bell is outside.")
    folder = Folder(tmp_path / "docs", rng)
    while len(folder.files()) < NUM_FILES:
        folder.add()
    num_runs = 1
    with (
        load_engine("demo", tmp_path / "kv", memory_gib=0) as engine,
        open_engine_index(tmp_path / "kv", engine, "hashing", CHUNK_TOKENS) as index,
    ):
        ingest(folder.root, engine, index, **OPTIONS)
        for _ in range(NUM_STEPS):
            rng.choice(STEPS)(folder)
            if rng.random() < 0.05:
                remove_indexed_documents(find_indexed_documents(rng.choice(index.sources()), index), engine, index)
            if rng.random() < 0.2:
                ingest_somewhere(folder, engine, index, monkeypatch)
                num_runs += 1
        monkeypatch.chdir(tmp_path)
        ingest("docs", engine, index, **OPTIONS)
        followed = state(tmp_path, engine, index)
        again = ingest("docs", engine, index, **OPTIONS)
        assert (again.num_new_kv, again.num_updated, again.removed, again.num_removed_kv) == (0, 0, [], 0)
        assert again.num_unchanged == again.num_documents == len(followed["chunks"])
    with (
        load_engine("demo", tmp_path / "fresh" / "kv", memory_gib=0) as engine,
        open_engine_index(tmp_path / "fresh" / "kv", engine, "hashing", CHUNK_TOKENS) as index,
    ):
        ingest(folder.root, engine, index, **OPTIONS)
        fresh = state(tmp_path / "fresh", engine, index)
    for what, expected in fresh.items():
        assert followed[what] == expected, what
    for key in fresh["keys"]:
        mine, theirs = DiskStore(tmp_path / "kv").get(key), DiskStore(tmp_path / "fresh" / "kv").get(key)
        for layer in range(mine.header.num_layers):
            for one, other in zip(mine.layer(layer), theirs.layer(layer), strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    verified = verify_and_quarantine(tmp_path / "kv")
    assert (verified.damaged, verified.orphans, verified.index_problems) == ({}, 0, [])
    garbage = collect_garbage(tmp_path / "kv", orphans=True)
    assert garbage.evicted == ()
    counted(f"{NUM_STEPS} edits of a folder of {NUM_FILES} files, {num_runs} ingestions: as a fresh one, seed {seed}")
