"""Ingestion against kill -9, flipped bytes and a full disk. `RAGBLEND_FAULTS=full` raises the counts."""

import json
import os
import random
import subprocess
import sys

import pytest
from forked import Commands, Kill
from places import small_disk, succeeded

from ragblend import Prompt, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.store.disk import DiskStore
from ragblend.index import open_index
from ragblend.operations.maintenance import verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_KILLS = 100 if FULL else 20
NUM_FLIPS = 200 if FULL else 50
INGEST = {"chunk_size": 112, "embedder": "hashing", "glob": "*.md"}


def test_a_killed_ingestion_leaves_no_bad_entry_and_a_rerun_completes_it(tmp_path, counted):
    for copy in range(3):  # each paragraph with a number in front: no two copies share a chunk
        (tmp_path / "corpus" / str(copy)).mkdir(parents=True)
        for record in sample_corpus().records:
            text = record.markdown.replace("\n\n", f"\n\n{copy} ")
            (tmp_path / "corpus" / str(copy) / record.filename).write_text(text)
    flags = ("--chunk-size", "112", "--embedder", "hashing", "--glob", "*.md", "--store", "kv")
    rng, num_kills = random.Random(0), 0
    with Commands() as commands:
        while num_kills < NUM_KILLS:
            kill = Kill(after=0, delay_s=rng.uniform(0.2, 1.2))
            done = commands.run("ingest", "corpus", "--model", "demo", *flags, cwd=tmp_path, kill=kill)
            num_kills += done.was_killed
            if not done.was_killed:  # start anew and kill earlier
                succeeded(done)
                with open_index(tmp_path / "kv") as index:
                    index.clear()
    if (tmp_path / "kv").exists():
        assert [result for result in DiskStore(tmp_path / "kv").verify() if not result.ok] == []
    with load_engine("demo", tmp_path / "kv") as engine:
        report = ingest(tmp_path / "corpus", engine, tmp_path / "kv", **INGEST)
        with open_index(tmp_path / "kv") as index:
            assert all(engine.is_stored(chunk) for chunk in index.chunks())
            assert index.find_problems() == []
    assert report.num_new_kv + report.num_known_kv == report.num_chunks > 200
    verified = verify_and_quarantine(tmp_path / "kv")
    assert (verified.damaged, verified.orphans, verified.index_problems) == ({}, 0, [])
    counted(f"{NUM_KILLS} kill -9 during ingestion; all {report.num_chunks} chunks there after one more run")


@pytest.fixture(scope="module")
def ingested(tmp_path_factory):
    root = tmp_path_factory.mktemp("flips")
    sample_corpus().write(root / "corpus")
    with load_engine("demo", root / "kv") as engine:
        ingest(root / "corpus", engine, root / "kv", **INGEST)
    return root


def test_every_flipped_byte_is_noticed_and_never_reaches_an_answer(ingested, counted):
    rng = random.Random(1)
    questions = [json.loads(line) for line in (ingested / "corpus" / "questions.jsonl").read_text().splitlines()]
    with (
        load_engine("demo", ingested / "kv", memory_gib=0, on_miss="inline") as engine,
        open_engine_index(ingested / "kv", engine, "hashing", create=False) as index,
    ):
        paths = sorted((ingested / "kv").glob("kv/??/*.safetensors"))
        for number in range(NUM_FLIPS):
            question = questions[number % len(questions)]["question"]
            chunks = [hit.chunk for hit in index.search(question, 4)]
            prompt = Prompt(chunks, question)
            full = engine.generate(prompt, mode="full", max_tokens=8)
            path = next(p for p in paths if p.stem == engine.key(chunks[number % 4]))
            original = path.read_bytes()
            broken = bytearray(original)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            damaged_before = engine.store.counters.num_damaged
            blend = engine.generate(prompt, recompute_ratio=1.0, max_tokens=8)
            assert blend.token_ids == full.token_ids
            assert blend.report.num_chunk_hits < blend.report.num_chunks
            assert engine.store.counters.num_damaged == damaged_before + 1
            path.write_bytes(original)
            path.with_suffix(".damaged").unlink(missing_ok=True)
    counted(f"{NUM_FLIPS} flipped bits in stored files: as many misses, no other answer")


def test_a_full_disk_ends_ingestion_with_an_error_and_a_whole_store(tmp_path, counted):
    """A real file system of 24 MiB has room for the documents and few entries; forecast and limit are switched off, so
    that writing itself meets the disk's end."""
    with small_disk(tmp_path / "small", "24m") as small:
        sample_corpus().write(tmp_path / "corpus")
        script = (
            "import sys, ragblend.precompute as p; p.describe_capacity = lambda *a: ''\n"
            "from ragblend.cli.app import main; sys.argv = ['ragblend', *sys.argv[1:]]; main()"
        )
        arguments = ["ingest", str(tmp_path / "corpus"), "--model", "demo", "--store", str(small / "kv")]
        command = [sys.executable, "-c", script, *arguments, "--chunk-size", "112", "--embedder", "hashing"]
        no_limit = {**os.environ, "RAGBLEND_DISK_GIB": "0"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=no_limit)
        assert done.returncode == 1, done.stderr
        assert "disk" in done.stderr
        assert "Traceback" not in done.stderr
        results = list(DiskStore(small / "kv").verify())
        assert results
        assert all(result.ok for result in results)
        counted(f"ingestion onto a full disk: exit code 1, {len(results)} entries written before, all whole")
