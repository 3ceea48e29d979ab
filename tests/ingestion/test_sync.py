"""`ingest` run again follows its folder: what is there is there once, what is gone has left nothing behind."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

from ragblend import Chunk, load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.chunker import adapt_splitter
from ragblend.corpus import documents
from ragblend.corpus.embedders import HashingEmbedder, embedder_version
from ragblend.corpus.folder_scan import source_path
from ragblend.corpus.readers.formats import READERS
from ragblend.corpus.readers.types import ParsedRecord
from ragblend.engine.store.disk import DiskStore
from ragblend.errors import (
    BackendUnreachableError,
    EmptyCorpusError,
    RagblendError,
)
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.documents import find_indexed_documents, remove_indexed_documents
from ragblend.ingestion.report import IngestReport
from ragblend.operations.maintenance import collect_garbage, verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index

FOX, KERN, BELL = "Bob Fox lives in Norburg.", "Alice Kern works for Nexon.", "James Bell plays chess."


PARTS = [" ".join([sentence] * 3) for sentence in (FOX, KERN, BELL)]  # each paragraph is one chunk
IN_PARTS: dict[str, Any] = {"chunk_size": 24, "context": "neutral"}


@dataclass
class Corpus:
    """A folder, and an index and a store that follow it."""

    root: Path
    engine: Any
    index: ChunkIndex
    said: list[str] = field(default_factory=list)

    @property
    def docs(self) -> Path:
        return self.root / "docs"

    def write(self, **files: str | bytes | list[str]) -> None:
        """`a_txt=...` is docs/a.txt; a list is a JSONL file's records."""
        for name, content in files.items():
            path = self.docs / name.replace("_", ".").replace("..", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, list):
                content = "".join(json.dumps({"text": text}) + "\n" for text in content)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def ingest(self, *paths: str | Path, **options: Any) -> IngestReport:
        options = {"notify": self.said.append, **options}
        return ingest(paths or [self.docs], self.engine, self.index, **options)

    def documents(self) -> dict[str, str]:
        """Name below docs/ and text of every document."""
        found = {}
        for source in self.index.sources():
            found[source.removeprefix(f"{self.docs}/")] = " | ".join(chunk.text for chunk in self.index.chunks(source))
        return found

    def texts(self) -> set[str]:
        """What the index, the store and the ledger hold; all three must agree."""
        texts = {chunk.text.strip() for chunk in self.index.chunks()}
        with open_ledger(self.engine.store) as ledger:
            assert set(ledger.texts()) == texts
        keys = {self.engine.key(Chunk(text)) for text in texts}
        assert set(self.engine.store.keys()) == keys
        assert self.index.lost_texts().last_number == 0
        return texts


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "docs").mkdir()
    with (
        load_engine("demo", tmp_path / "kv") as engine,
        open_engine_index(tmp_path / "kv", engine, "hashing", 32) as index,
    ):
        yield Corpus(tmp_path, engine, index)


# --- what is there is there once ---


def test_a_file_that_did_not_change_is_not_even_parsed(corpus, monkeypatch):
    corpus.write(a_txt=FOX, r_jsonl=[KERN, BELL])
    corpus.ingest()
    monkeypatch.setattr("ragblend.corpus.documents.read_documents", lambda path, data: pytest.fail(f"parsed {path}"))
    report = corpus.ingest()
    assert (report.num_documents, report.num_unchanged, report.num_chunks, report.num_known_kv) == (3, 3, 3, 3)


def test_an_edit_that_keeps_size_and_time_is_noticed(corpus):
    corpus.write(a_txt=FOX)
    corpus.ingest()
    path = corpus.docs / "a.txt"
    before = path.stat()
    path.write_text(FOX.replace("Bob", "Rob"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert corpus.ingest().num_updated == 1
    assert corpus.texts() == {FOX.replace("Bob", "Rob")}


# --- what is gone has left nothing behind ---


GONE: dict[str, Callable[[Path], Any]] = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "blank": lambda path: path.write_text(" \n"),
    "moved out of the folder": lambda path: path.rename(path.parents[1] / "elsewhere.txt"),
    "hidden": lambda path: path.rename(path.with_name(".a.txt")),
    "ignored": lambda path: path.with_name(".gitignore").write_text("a.*\n"),
    "a folder now": lambda path: (path.unlink(), path.mkdir()),
    "a link to another file": lambda path: (path.unlink(), path.symlink_to("b.txt")),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("way", GONE)
def test_a_file_that_is_gone_is_gone_from_everything(corpus, way):
    corpus.write(a_txt=FOX, b_txt=KERN)
    corpus.ingest()
    GONE[way](corpus.docs / "a.txt")
    report = corpus.ingest()
    assert report.removed == [f"{corpus.docs}/a.txt"]
    assert (report.num_removed_kv, report.failures) == (1, [])
    assert corpus.texts() == {KERN}


@pytest.mark.parametrize(
    ("old", "new"),
    [("a.txt", "b.txt"), ("a.txt", "sub/a.txt"), ("a.txt", "a.md"), ("r.jsonl", "s.jsonl")],
    ids=["name", "folder", "ending", "records"],
)
def test_a_renamed_file_is_reported_as_renamed_and_keeps_its_kv(corpus, old, new):
    corpus.write(a_txt=FOX, r_jsonl=[KERN, BELL])
    corpus.ingest()
    (corpus.docs / new).parent.mkdir(exist_ok=True)
    (corpus.docs / old).rename(corpus.docs / new)
    report = corpus.ingest()
    assert report.renamed == {f"{corpus.docs}/{old}": f"{corpus.docs}/{new}"}
    assert {source_path(source) for source in report.removed} == {f"{corpus.docs}/{old}"}
    assert (report.num_new_kv, report.num_removed_kv, report.num_known_kv) == (0, 0, 3)
    assert corpus.texts() == {FOX, KERN, BELL}


def test_a_deleted_file_and_an_earlier_copy_are_no_rename(corpus):
    corpus.write(a_txt=FOX, b_txt=KERN)
    corpus.ingest()
    corpus.write(c_txt=FOX, d_txt=f"{KERN} She left.")
    (corpus.docs / "b.txt").unlink()
    assert corpus.ingest().renamed == {}, "the copied file is still there, and the other has other bytes"
    (corpus.docs / "a.txt").unlink()
    assert corpus.ingest().renamed == {}, "the copy was there before"


def test_not_a_word_of_it_is_left_in_any_file(corpus):
    corpus.write(a_txt=f"{FOX}\n\nThe password is Zwetschge.", b_txt=KERN)
    corpus.ingest()
    corpus.write(a_txt=FOX)
    corpus.ingest()
    corpus.index.close()
    left = [path for path in corpus.root.rglob("*") if path.is_file() and b"Zwetschge" in path.read_bytes()]
    assert left == []


def test_both_variants_of_every_prefix_of_the_namespace_are_deleted(corpus):
    corpus.write(a_txt="\n\n".join(PARTS))
    with (
        load_engine("demo", corpus.root / "kv", system="Answer briefly.") as other,
        load_engine("demo", corpus.root / "kv", namespace="tenant") as tenant,
    ):
        for engine in (corpus.engine, other, tenant):
            ingest(corpus.docs, engine, corpus.index, **IN_PARTS)
        assert len(list(DiskStore(corpus.root / "kv").keys())) == 3 * (3 + 3)
        corpus.write(a_txt="\n\n".join((PARTS[0], PARTS[2])))
        report = ingest(corpus.docs, corpus.engine, corpus.index, **IN_PARTS)
        assert report.num_removed_kv == 2 * 2
        headers = [entry.header for entry in DiskStore(corpus.root / "kv").entries()]
        kern = corpus.engine.renderer.chunk_ids(PARTS[1])
        assert {header.namespace for header in headers if header.token_ids == kern} == {"tenant"}
        assert len([header for header in headers if header.namespace == ""]) == 2 * (2 + 2)


def test_killed_before_kv_is_deleted_the_next_run_deletes_it(corpus, monkeypatch):
    corpus.write(a_txt=FOX, b_txt=KERN)
    corpus.ingest()
    corpus.write(a_txt=BELL)
    monkeypatch.setattr("ragblend.precompute.delete_orphaned_kv", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        corpus.ingest()
    monkeypatch.undo()
    assert corpus.engine.is_stored(Chunk(FOX))
    assert corpus.ingest().num_removed_kv == 1
    assert corpus.texts() == {BELL, KERN}


def test_what_a_remote_tier_could_not_be_told_is_told_next_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "docs").mkdir()
    with (
        load_engine("demo", tmp_path / "kv", remote=f"file://{tmp_path}/shared") as engine,
        open_engine_index(tmp_path / "kv", engine, "hashing", 32) as index,
    ):
        corpus = Corpus(tmp_path, engine, index)
        corpus.write(a_txt=FOX, b_txt=KERN)
        corpus.ingest()
        engine.store.flush()
        remote = engine.store.tiers[-1]
        (tmp_path / "docs" / "a.txt").unlink()
        with monkeypatch.context() as down:
            down.setattr(remote, "delete", lambda key: (_ for _ in ()).throw(BackendUnreachableError("it is down")))
            corpus.ingest()
            assert "it is down" in caplog.text
            with pytest.raises(BackendUnreachableError, match="it is down"):
                remove_indexed_documents(corpus.index.sources(), engine, index)
        assert remote.contains(engine.key(Chunk(FOX)))
        assert remote.contains(engine.key(Chunk(KERN)))
        (tmp_path / "docs" / "b.txt").unlink()
        corpus.write(c_txt=BELL)
        corpus.ingest()
        assert [remote.contains(engine.key(Chunk(text))) for text in (FOX, KERN)] == [False, False]
        assert corpus.texts() == {BELL}


# --- what stays ---


def test_documents_from_elsewhere_stay(corpus):
    """Also those of a folder whose name begins the same, of a file that is gone, and those without a file."""
    corpus.write(a_txt=FOX)
    for name in ("docs2/b.txt", "single.txt", "lost/c.txt"):
        (corpus.root / name).parent.mkdir(exist_ok=True)
        (corpus.root / name).write_text(f"This is {name}.")
    corpus.ingest(*(corpus.root / name for name in ("docs", "docs2", "single.txt", "lost")))
    corpus.index.add_document("langchain/7", "", [Chunk(BELL, "langchain/7")])
    shutil.rmtree(corpus.root / "lost")
    (corpus.docs / "a.txt").write_text(KERN)
    assert corpus.ingest().removed == []
    assert corpus.index.num_documents == 5
    assert not any("ragblend remove" in line for line in corpus.said), "deleted, not moved"
    remove_indexed_documents(find_indexed_documents(f"{corpus.root}/lost", corpus.index), corpus.engine, corpus.index)
    assert corpus.index.num_documents == 4


def test_another_pattern_takes_nothing_out_but_what_is_gone(corpus):
    corpus.write(a_txt=FOX, b_md=KERN, c_txt=BELL)
    corpus.ingest()
    (corpus.docs / "c.txt").unlink()
    assert corpus.ingest(glob="*.md").removed == [f"{corpus.docs}/c.txt"]
    assert corpus.documents() == {"a.txt": FOX, "b.md": KERN}


def test_a_file_named_alone_takes_out_only_its_own_records(corpus):
    corpus.write(a_txt=FOX, r_jsonl=[KERN, BELL])
    corpus.ingest()
    (corpus.docs / "a.txt").unlink()
    corpus.write(r_jsonl=[KERN])
    assert corpus.ingest(corpus.docs / "r.jsonl").removed == [f"{corpus.docs}/r.jsonl#1"]
    assert corpus.documents() == {"a.txt": FOX, "r.jsonl#0": KERN}


def test_keep_missing_drops_nothing_and_the_next_run_without_it_does(corpus):
    corpus.write(a_txt=FOX, r_jsonl=[KERN, BELL], b_txt="Tara Kern sings.", e_txt="This will be empty.")
    corpus.ingest()
    (corpus.docs / "a.txt").unlink()
    corpus.write(r_jsonl=[KERN], b_txt="Tara Kern dances.", e_txt="")
    report = corpus.ingest(keep_missing=True)
    assert (report.removed, report.num_updated) == ([], 1)
    assert corpus.texts() == {FOX, KERN, BELL, "Tara Kern dances.", "This will be empty."}
    assert len(corpus.ingest().removed) == 3
    assert corpus.texts() == {KERN, "Tara Kern dances."}


def test_a_file_that_cannot_be_read_this_time_keeps_what_it_had(corpus, monkeypatch):
    corpus.write(a_txt=FOX, b_json=f'["{KERN}"]', shut__c_txt=BELL)
    corpus.ingest()
    (corpus.docs / "b.json").write_text("[")
    original = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    with monkeypatch.context() as denied:
        denied.setattr(os, "scandir", scandir)
        report = corpus.ingest()
    assert sorted(Path(failure.path).name for failure in report.failures) == ["b.json", "shut"]
    assert report.removed == []
    assert corpus.texts() == {FOX, KERN, BELL}
    corpus.write(a_txt="Bob Fox lives in Oston.", b_json=f'["{KERN}"]')
    assert corpus.ingest().failures == []
    assert corpus.texts() == {"Bob Fox lives in Oston.", KERN, BELL}


def test_an_unreadable_line_keeps_its_record_and_is_always_reported(corpus):
    corpus.write(r_jsonl=[FOX, KERN, BELL])
    corpus.ingest()
    path = corpus.docs / "r.jsonl"
    path.write_text(f'{{"text": "{FOX}"}}\n{{"text": "broken\n{{"text": "{BELL}"}}\n')
    for _ in range(2):
        report = corpus.ingest()
        assert ["line 2 is not JSON" in failure.reason for failure in report.failures] == [True]
        assert corpus.texts() == {FOX, KERN, BELL}
    path.write_text(f'{{"text": "{FOX}"}}\n')
    assert corpus.ingest().failures == []
    assert corpus.texts() == {FOX}


def test_who_names_an_ignored_file_keeps_it(corpus):
    corpus.write(a_txt=FOX, b_log=KERN, _gitignore="*.log\n")
    corpus.ingest(corpus.docs / "b.log")
    corpus.ingest()
    assert corpus.texts() == {FOX, KERN}
    (corpus.docs / "b.log").unlink()
    corpus.ingest()
    assert corpus.texts() == {FOX}


def test_a_link_out_of_the_folder_is_reported_and_its_documents_removed(corpus):
    corpus.write(a_txt=FOX)
    secret, link = corpus.root / "secret.txt", corpus.docs / "notes.txt"
    secret.write_text(KERN)
    link.symlink_to(secret)
    report = corpus.ingest()
    assert corpus.texts() == {FOX}
    assert [(path, "leads out of the folder" in reason) for path, reason in report.skipped] == [(str(link), True)]
    link.unlink()
    link.write_text(KERN)
    corpus.ingest()
    assert corpus.texts() == {FOX, KERN}
    link.unlink()
    link.symlink_to(secret)
    assert corpus.ingest().removed == [str(link)]
    assert corpus.texts() == {FOX}


def test_a_file_that_vanishes_during_reading_is_deleted_without_failure(corpus, monkeypatch):
    corpus.write(a_txt=FOX, b_txt=KERN)
    corpus.ingest()
    original = documents.open_file

    def opened(path: str, *limit: float) -> AbstractContextManager[BufferedReader]:
        if path.endswith("a.txt"):
            Path(path).unlink()
        return original(path, *limit)

    monkeypatch.setattr(documents, "open_file", opened)
    report = corpus.ingest()
    assert (report.failures, report.removed) == ([], [f"{corpus.docs}/a.txt"])
    assert corpus.texts() == {KERN}


def test_a_file_written_during_reading_is_read_again_next_time(corpus, monkeypatch):
    corpus.write(a_txt=FOX)
    original = documents.open_file

    @contextmanager
    def opened(path: str, *limit: float) -> Iterator[BufferedReader]:
        with original(path, *limit) as file:
            yield file
        Path(path).write_text(KERN)

    with monkeypatch.context() as written:
        written.setattr(documents, "open_file", opened)
        corpus.ingest()
    corpus.ingest()
    assert corpus.texts() == {KERN}


def test_one_odd_file_does_not_stop_an_ingestion(corpus):
    digits = "7" * 5000
    odd = {
        "keys.json": json.dumps({digits: "The owl.", "12": "The eel.", "3": "The elk."}),
        "numbers.json": f'[{{"text": "A long number.", "size": {digits}}}, {digits}]',
        "numbers.jsonl": f'{{"text": "Another.", "size": -{digits}}}\n',
        "halves.json": '{"text": "Half \\ud83d of a face.", "title": "\\udc00", "\\ud800": 1}',
        "deep.json": "[" * 100_000,
        "a.json": '["Record zero."]',
        "a.json#0": "A file.",
    }
    for name, text in odd.items():
        (corpus.docs / name).write_text(text)
    for name in (b"caf\xe9.txt", b"caf\xe9.json"):
        Path(os.fsdecode(os.fsencode(corpus.docs) + b"/" + name)).write_text("Latin.")
    folder = Path(os.fsdecode(os.fsencode(corpus.docs) + b"/caf\xe9"))
    folder.mkdir()
    (folder / "in.txt").write_text("In a folder.")
    corpus.write(z_txt=FOX)
    for _ in range(2):
        report = corpus.ingest()
        assert FOX in corpus.texts()
        assert {
            "The owl.",
            "The eel.",
            "The elk.",
            "A long number.",
            "Another.",
            "Record zero.",
            "A file.",
        } < corpus.texts()
        assert len(report.failures) == 5  # three names, what is no record, and what is too deep
        json.dumps(report.as_dict()).encode()
    assert "Half \ufffd of a face." in corpus.texts()


def test_a_text_beyond_the_models_context_fails_its_file(corpus, monkeypatch):
    corpus.write(a_txt=FOX, b_txt=KERN)
    original = corpus.engine.renderer.count_tokens

    def count(text: str) -> int:
        if "Fox" in text:
            raise RagblendError("the text tokenizes to a control token")
        return original(text)

    monkeypatch.setattr(corpus.engine.renderer, "count_tokens", count)
    assert ["control token" in failure.reason for failure in corpus.ingest().failures] == [True]
    assert corpus.documents() == {"b.txt": KERN}


def test_a_moved_project_is_not_computed_again_and_names_its_place(corpus, monkeypatch):
    corpus.write(a_txt=FOX, b_txt=KERN)
    corpus.ingest()
    corpus.docs.rename(corpus.root / "papers")
    monkeypatch.setattr(HashingEmbedder, "embed", lambda self, texts: pytest.fail(f"embedded {texts}"))
    monkeypatch.chdir(corpus.root)
    assert corpus.ingest("papers").num_new_kv == 0
    assert any("2 of these files were in docs" in line and "ragblend remove docs" in line for line in corpus.said)
    remove_indexed_documents(find_indexed_documents("docs", corpus.index), corpus.engine, corpus.index)
    assert corpus.texts() == {FOX, KERN}
    assert corpus.index.num_documents == 2


# --- what is removed by hand ---


def test_readers_notes_are_in_the_report_of_their_run(corpus, monkeypatch):
    note = "page 3 has a picture and no text; run OCR on it"
    monkeypatch.setitem(READERS, ".manual", lambda data: iter([ParsedRecord("", FOX, {}, (), (note,))]))
    corpus.write(a_manual="anything")
    report = corpus.ingest()
    expected = {"path": f"{corpus.docs}/a.manual", "reason": note}
    assert (report.as_dict()["notes"][:1], report.failures, report.num_documents) == ([expected], [], 1)
    assert corpus.ingest().notes == []


def test_gc_of_orphans_takes_kv_and_ids_and_nothing_else(corpus):
    corpus.write(a_txt="\n\n".join(PARTS[:2]), b_txt=BELL)
    corpus.ingest(chunk_size=24)
    before = sorted(corpus.engine.store.keys())
    chunks = [Chunk("An orphan."), Chunk("An orphan.", context="neutral"), Chunk("Another.", context="neutral")]
    list(corpus.engine.precompute_all(chunks))
    orphans = [corpus.engine.key(chunk) for chunk in chunks]
    assert verify_and_quarantine(corpus.root / "kv").orphans == 3
    for dry_run in (True, False):
        garbage = collect_garbage(corpus.root / "kv", orphans=True, dry_run=dry_run)
        assert sorted(garbage.evicted) == sorted(orphans)
    assert sorted(DiskStore(corpus.root / "kv").keys()) == before
    with open_ledger(corpus.engine.store) as ledger:
        assert set(ledger.texts()) == {chunk.text.strip() for chunk in corpus.index.chunks()}
    known = corpus.engine.known_chunks
    assert [text in known for text in ("An orphan.", "Another.", BELL)] == [False, False, True]


# --- how documents are cut and embedded ---


def test_the_chunk_size_is_the_indexs_own_and_a_change_is_said(corpus):
    text = " ".join(f"{FOX} {KERN}" for _ in range(6))
    corpus.write(a_txt=text, b_txt=text + BELL)
    corpus.ingest()
    num_chunks = corpus.index.num_chunks
    assert corpus.ingest().num_unchanged == 2
    assert not any("the chunker changes" in line for line in corpus.said)
    report = corpus.ingest(corpus.docs / "a.txt", chunk_size=64)
    assert report.num_updated == 1
    assert any("the chunker changes from 32 tokens to 64 tokens" in line for line in corpus.said)
    assert corpus.index.manifest.chunk_size == 64
    assert corpus.ingest().num_updated == 1, "the other one, now that it was given"
    assert corpus.index.num_chunks < num_chunks
    assert corpus.ingest().num_unchanged == 2
    corpus.texts()


def test_another_splitter_is_said_too_and_so_is_the_way_back(corpus):
    splitters = pytest.importorskip("langchain_text_splitters")
    cut = adapt_splitter(splitters.CharacterTextSplitter(separator="\n\n", chunk_size=30, chunk_overlap=0))
    corpus.write(a_txt=f"{FOX}\n\n{KERN}")
    corpus.ingest(splitter=cut)
    assert (corpus.index.num_chunks, "CharacterTextSplitter" in corpus.index.manifest.chunker) == (2, True)
    assert corpus.ingest(splitter=cut).num_unchanged == 1
    assert not any("the chunker changes" in line for line in corpus.said), "nothing was there before"
    corpus.ingest()
    assert any("the chunker changes from CharacterTextSplitter" in line for line in corpus.said)
    assert corpus.index.num_chunks == 1


def test_a_change_is_logged_where_nobody_listens(corpus, caplog):
    corpus.write(a_txt=FOX)
    corpus.ingest()
    with caplog.at_level(logging.WARNING):
        corpus.ingest(chunk_size=16, notify=None)
    assert "the chunker changes from 32 tokens to 16 tokens" in caplog.text


def test_an_embedder_in_a_folder_has_one_name_from_everywhere(tmp_path, monkeypatch):
    class Local(HashingEmbedder):
        version = embedder_version("a folder")

        def __init__(self, name: str) -> None:
            super().__init__(16)
            self.name = name

    monkeypatch.setattr("ragblend.index.load_embedder", Local)
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    open_index(tmp_path / "index", "./model", create=True).close()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("../model", str(tmp_path / "model"), None):
        with open_index(tmp_path / "index", name) as index:
            assert index.embedder.name == str(tmp_path / "model")


# --- whole folders ---


def test_a_working_folder_is_ingested_without_what_nobody_means(tmp_path, monkeypatch):
    for name in ("a.md", "node_modules/x/readme.md", "build/out.md", "logo.png", "empty.txt", "package.json", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(FOX)
    (tmp_path / "logo.png").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / ".gitignore").write_text("build/\n")
    monkeypatch.chdir(tmp_path)
    with load_engine("demo", "ragblend-data/kv") as engine:
        for _ in range(2):
            report = ingest(".", engine, "my-index", embedder="hashing")
            assert (report.num_documents, report.failures) == (1, [])
            assert [Path(path).name for path, _ in report.skipped] == ["empty.txt", "logo.png", "package.json"]
            assert report.ignored == [str(tmp_path / "build")]
        report = ingest(["empty.txt", "logo.png", "package.json"], engine, "my-index")
        assert len(report.failures) == 3
        assert report.skipped == []
        with pytest.raises(EmptyCorpusError, match=r"\.gitignore excludes .*build: name it"):
            ingest(".", engine, "my-index", glob="*.rst")
    with open_index("my-index") as index:
        assert index.sources() == [str(tmp_path / "a.md")]
