"""Ingestion against kill -9, flipped bytes and a full disk. `RAGBLEND_FAULTS=full` raises the counts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ragblend import SegmentedPrompt, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.store.disk import DiskStore
from ragblend.index import open_index
from ragblend.operations.maintenance import verify_store
from ragblend.precompute import ingest, open_engine_index

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_KILLS = 100 if FULL else 20
NUM_FLIPS = 200 if FULL else 50

# One process imports everything and forks a child per attempt, so that a kill costs milliseconds, not an import.
KILLER = """
import os, random, signal, sys, time
from ragblend import load_engine
from ragblend.precompute import ingest
import torch
torch.set_num_threads(1)
corpus, store, index, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
rng, done = random.Random(0), 0
while done < kills:
    child = os.fork()
    if child == 0:
        ingest(corpus, load_engine("demo", store), index, chunk_size=112, embedder="hashing", glob="*.md")
        os._exit(0)
    time.sleep(rng.uniform(0.2, 1.2))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        done += 1
    else:
        import shutil; shutil.rmtree(store); shutil.rmtree(index)  # it finished: start anew and kill earlier
print(done)
"""


def test_kill_9_in_the_middle_of_ingestion_leaves_no_bad_entry_and_the_rerun_completes(tmp_path, counted):
    for copy in range(3):  # each paragraph with a number in front: no two copies share a chunk
        (tmp_path / "corpus" / str(copy)).mkdir(parents=True)
        for record in sample_corpus().records:
            text = record.markdown.replace("\n\n", f"\n\n{copy} ")
            (tmp_path / "corpus" / str(copy) / record.filename).write_text(text)
    places = [str(tmp_path / name) for name in ("corpus", "kv", "index")]
    command = [sys.executable, "-c", KILLER, *places, str(NUM_KILLS)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert killed.stdout.split()[-1:] == [str(NUM_KILLS)], killed.stderr[-2000:]
    if (tmp_path / "kv").exists():
        assert [result for result in DiskStore(tmp_path / "kv").verify() if not result.ok] == []
    with load_engine("demo", tmp_path / "kv") as engine:
        report = ingest(
            tmp_path / "corpus", engine, tmp_path / "index", chunk_size=112, embedder="hashing", glob="*.md"
        )
        with open_index(tmp_path / "index") as index:
            assert all(engine.is_stored(chunk) for chunk in index.chunks())
            assert index.find_problems() == []
    assert report.num_new_kv + report.num_known_kv == report.num_chunks > 200
    verified = verify_store(tmp_path / "kv", tmp_path / "index")
    assert (verified.damaged, verified.orphans, verified.index_problems) == ({}, 0, [])
    counted(f"{NUM_KILLS} kill -9 during ingestion; all {report.num_chunks} chunks there after one more run")


@pytest.fixture(scope="module")
def ingested(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("flips")
    sample_corpus().write(root / "corpus")
    with load_engine("demo", root / "kv") as engine:
        ingest(root / "corpus", engine, root / "index", chunk_size=112, embedder="hashing", glob="*.md")
    return root


def test_every_flipped_byte_is_noticed_and_never_reaches_an_answer(ingested, counted):
    rng = random.Random(1)
    questions = [json.loads(line) for line in (ingested / "corpus" / "questions.jsonl").read_text().splitlines()]
    with (
        load_engine("demo", ingested / "kv", memory_gib=0, on_miss="inline") as engine,
        open_engine_index(ingested / "index", engine, "hashing", create=False) as index,
    ):
        paths = sorted((ingested / "kv").glob("??/*.safetensors"))
        for number in range(NUM_FLIPS):
            question = questions[number % len(questions)]["question"]
            chunks = [hit.chunk for hit in index.search(question, 4)]
            prompt = SegmentedPrompt(chunks, question)
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


def test_verify_names_every_flipped_file(ingested, counted):
    rng = random.Random(2)
    paths = rng.sample(sorted((ingested / "kv").glob("??/*.safetensors")), 50)
    originals = {path: path.read_bytes() for path in paths}
    for path, original in originals.items():
        broken = bytearray(original)
        broken[rng.randrange(len(broken))] ^= 1
        path.write_bytes(broken)
    report = verify_store(ingested / "kv", ingested / "index")
    assert set(report.damaged) == {path.stem for path in paths}
    for path, original in originals.items():
        path.write_bytes(original)
        for leftover in path.parent.glob(f"{path.stem}*damaged*"):
            leftover.unlink()
    assert not verify_store(ingested / "kv", ingested / "index").has_problems
    counted(f"{len(paths)} damaged files: verify names them and no other")


def test_a_full_disk_ends_ingestion_with_an_error_and_a_whole_store(tmp_path, counted):
    """A real file system of 2 MiB; forecast and limit are switched off, so that writing itself meets the disk's end."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        sample_corpus().write(tmp_path / "corpus")
        script = (
            "import sys, ragblend.precompute as p; p.check_room = lambda *a: ''\n"
            "from ragblend.cli.app import main; sys.argv = ['ragblend', *sys.argv[1:]]; main()"
        )
        arguments = ["ingest", str(tmp_path / "corpus"), "--store", str(small / "kv"), "--index", str(tmp_path / "i")]
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
    finally:
        subprocess.run(["umount", str(small)], check=True)
