"""Defaults of the latest ingestion, which the store saves so that later commands need not name them."""

import shutil
from pathlib import Path

import pytest
from commands import CommandRunner

from ragblend.demo.corpus import sample_corpus
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.signing import StoreKey
from ragblend.engine.store.metadata import DEFAULTS_FILE, StoreDefaults
from ragblend.errors import CorruptError, UsageError
from ragblend.llm import ChatBlend
from ragblend.prompt.types import Chunk

SYSTEM = "Answer from the documents."
FIRST = ("ingest", "docs", "--model", "demo", "--embedder", "hashing", "--chunk-size", "112", "--system", SYSTEM)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Commands in a folder with a few documents, whose settings the store has saved."""
    sample_corpus().first_records(2).write(tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    command = CommandRunner(capsys)
    assert command.facts(*FIRST)["num_new_kv"] > 0
    return command


def test_later_commands_need_no_model_embedder_system_text_or_chunk_size(run):
    again = run.facts("ingest", "docs")
    assert (again["num_new_kv"], again["num_unchanged"]) == (0, again["num_documents"])
    stats = run.facts("stats")
    assert (stats["store"], stats["embedder"], stats["chunk_size"]) == ("ragblend-data", "hashing", 112)
    report = run.facts("ask", "Where is Zenco based?", "-k", "2", "--max-tokens", "2")["report"]
    assert report["num_chunk_hits"] == 2, report
    assert run.facts("verify")["num_without_kv"] == 0
    assert {check["name"]: check["ok"] for check in run.facts("doctor")["checks"]}["model"]


def test_python_takes_the_same_from_the_store(run):
    with pytest.raises(UsageError, match="model='demo'"):
        ChatBlend()
    with pytest.raises(UsageError, match=r"nowhere names none.*model='demo'"):
        ChatBlend(store="nowhere")
    chat = ChatBlend(store="ragblend-data", max_tokens=2)
    assert (chat.model, chat.system) == ("demo", SYSTEM)
    text = sample_corpus().records[0].chunks[0]
    assert chat.invoke(f"{text}\n\nWhere is it?").response_metadata["ragblend"]["num_chunk_hits"] == 1
    with load_engine(None, "ragblend-data", system="") as engine:
        assert not engine.is_stored(Chunk(text)), "an empty system text is none, even if the store has one"


def test_ingestion_without_a_model_is_an_error_that_suggests_one(run, monkeypatch):
    code, out, err = run("ingest", "docs", "--store", "new")
    assert (code, out) == (2, "")
    assert "--model demo" in err
    assert not Path("new", "catalog.sqlite").exists()
    monkeypatch.setenv("RAGBLEND_TRUST_REMOTE_CODE", "1")
    code, _, err = run("ask", "Who?")
    assert (code, "name it: --model" in err) == (2, True), err


def test_the_latest_ingestion_counts(run):
    assert run("ingest", "docs", "--system", "Say it shortly.")[0] == 0
    assert DiskStore("ragblend-data").read_defaults() == StoreDefaults("demo", "Say it shortly.")
    assert run.facts("ask", "Where is Zenco based?", "-k", "2", "--max-tokens", "2")["report"]["num_chunk_hits"] == 2


def test_a_damaged_metadata_file_is_an_error_and_repair_deletes_it(run):
    path = Path("ragblend-data", DEFAULTS_FILE)
    path.write_text(path.read_text().replace("Answer", "Invent"))
    code, _, err = run("ask", "Who?")
    assert (code, "store.json is damaged" in err) == (4, True), err
    assert run("verify")[0] == 4
    code, out, err = run("verify", "--repair", "--model", "demo")
    assert (code, "store.json was removed" in out) == (0, True), out + err
    assert run("verify")[0] == 0


def test_a_metadata_file_without_the_stores_signature_is_rejected(tmp_path):
    key = StoreKey(b"k" * 32)
    DiskStore(tmp_path, store_key=None).put_defaults(StoreDefaults("demo", "Say what I want."))
    with pytest.raises(CorruptError, match=DEFAULTS_FILE):
        DiskStore(tmp_path, store_key=key).read_defaults()
    assert DiskStore(tmp_path, store_key=key).sign_metadata_files_again(DiskStore(tmp_path, store_key=None)) == 1
    assert DiskStore(tmp_path, store_key=key).read_defaults().model == "demo"


def test_every_command_finds_entries_that_are_kept_elsewhere(run, monkeypatch):
    num_chunks = run.facts("stats")["num_stored_kv"]
    monkeypatch.setenv("RAGBLEND_KV_DIR", "fast")
    shutil.move("ragblend-data/kv", "fast")
    assert run.facts("stats")["num_stored_kv"] == num_chunks
    assert run.facts("verify")["checked"] == num_chunks
    assert run.facts("ingest", "docs")["num_new_kv"] == 0
    shutil.rmtree("fast")
    assert run.facts("ingest", "docs")["num_new_kv"] == num_chunks
    assert not Path("ragblend-data", "kv").exists()
    assert len(run.facts("gc", "--max-size", "0")["evicted"]) == num_chunks
