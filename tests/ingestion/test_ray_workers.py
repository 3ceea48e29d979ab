"""Workers on Ray store what one process stores, bit for bit; killed at any moment, nothing is lost or done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command
from langchain_core.documents import Document

from ragblend import ingest, load_engine, open_index
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import load_into_memory
from ragblend.errors import BackendUnreachableError, StoreMismatchError, StoreNotWritableError, UsageError
from ragblend.precompute import precompute_documents, precompute_index

ray = pytest.importorskip("ray")
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (the name is Ray's): by default other tests of the machine run before Ray's workers do

from ragblend.ingestion.ray_workers import RayWorkers  # noqa: E402

pytestmark = pytest.mark.timeout(900)
DATA = Path(__file__).parents[2] / "data" / "questions" / "musique_100.json"
CHUNK_TOKENS = 48


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Real paragraphs, some of them the same in several files, some with odd bytes."""
    folder = tmp_path_factory.mktemp("docs")
    for number, text in enumerate(paragraphs()[:70]):
        (folder / f"{number:03}.md").write_text(text)
    (folder / "again.txt").write_text(paragraphs()[0])
    (folder / "odd.txt").write_text("Zürich 東京 🙂\u200b, einmal\tund noch einmal.\n\n" * 3)
    return folder


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """What this process alone makes of the corpus, by context."""
    made: dict[str, Path] = {}

    def find(context: str) -> Path:
        if context not in made:
            made[context] = tmp_path_factory.mktemp("alone")
            with load_engine("demo", made[context] / "kv") as engine:
                run(corpus, engine, made[context], context=context)
        return made[context]

    return find


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def paragraphs() -> list[str]:
    asked = json.loads(DATA.read_text())
    return list(dict.fromkeys(passage["text"] for each in asked for passage in each["ctxs"]))


def run(corpus: Path, engine: Any, home: Path, **options: Any) -> Any:
    return ingest(corpus, engine, home / "kv", chunk_size=CHUNK_TOKENS, embedder="hashing", **options)


def assert_same_kv(ours: Path, theirs: Path) -> None:
    """Both have the same KV under the same keys, to the last bit."""
    stores = [DiskStore(home / "kv") for home in (ours, theirs)]
    keys = [sorted(store.keys()) for store in stores]
    assert keys[0] == keys[1] != []
    for key in keys[0]:
        found, expected = (load_into_memory(kv) for store in stores if (kv := store.get(key)) is not None)
        assert found.header == expected.header
        for index in range(found.header.num_layers):
            pairs = zip(found.layer(index), expected.layer(index), strict=True)
            assert all(made.equal(wanted) for made, wanted in pairs), (key, index)


def assert_same(ours: Path, theirs: Path) -> None:
    """Both have the same chunks, vectors and KV."""
    assert_same_kv(ours, theirs)
    with open_index(ours / "kv") as one, open_index(theirs / "kv") as other:
        assert list(one.chunks()) == list(other.chunks())
        texts = [chunk.text for chunk in one.chunks()]
        np.testing.assert_array_equal(one.embed(texts), other.embed(texts))
        for question in ("Where does it live?", "Who wrote the song?", "東京"):
            assert [hit.chunk for hit in one.search(question, 4)] == [hit.chunk for hit in other.search(question, 4)]


def entries(home: Path) -> dict[str, int]:
    """Return the stored files with their inodes. An entry that is written again has another inode."""
    return {path.name: path.stat().st_ino for path in (home / "kv").glob("kv/??/*.safetensors")}


def find_no_cluster(**options: Any) -> None:
    raise ConnectionError("Could not find any running Ray instance")


def test_what_cannot_be_shared_out_is_refused(tmp_path, capsys, monkeypatch):
    with pytest.raises(UsageError, match="choose 1 or more"):
        RayWorkers("demo", tmp_path, count=0)
    with pytest.raises(UsageError, match="prefills in its own process"):
        RayWorkers("demo", tmp_path, backend="http://localhost:8000")
    # Another test of this machine may have a cluster, which "auto" would find.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", find_no_cluster)
    with pytest.raises(BackendUnreachableError, match="ray start --head"):
        RayWorkers("demo", tmp_path, address="auto")
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.txt").write_text("Something to read.")
    arguments = ["ingest", str(tmp_path / "a.txt"), "--model", "demo", "--store", str(tmp_path / "kv")]
    assert run_command(*arguments, "--model", "demo", "--workers", "2") == 1
    assert "pip install 'ragblend[ray]'" in capsys.readouterr().err


def test_workers_store_what_one_process_does(corpus, alone, cluster, tmp_path):
    with load_engine("demo", tmp_path / "kv") as engine, RayWorkers("demo", tmp_path / "kv") as workers:
        report = run(corpus, engine, tmp_path, context="none", workers=workers)
        assert_same(tmp_path, alone("none"))
        with open_index(tmp_path / "kv") as index:
            other = precompute_index(engine, index, "neutral", workers=workers)
        assert_same(tmp_path, alone("neutral"))
        again = run(corpus, engine, tmp_path, workers=workers)
    assert (again.num_new_kv, again.num_known_kv) == (0, report.num_new_kv + other.num_new_kv)
    store = DiskStore(tmp_path / "kv")
    nbytes = [kv.nbytes for key in store.keys() if (kv := store.get(key)) is not None]  # noqa: SIM118 (no dict)
    assert report.new_kv_bytes + other.new_kv_bytes == sum(nbytes)


def test_documents_of_a_loader_are_prefilled_by_workers(cluster, tmp_path):
    documents = [Document(page_content=text, id=f"doc {at}") for at, text in enumerate(paragraphs()[:30])]
    with load_engine("demo", tmp_path / "alone" / "kv") as engine:
        one = precompute_documents(iter(documents), engine)
    with load_engine("demo", tmp_path / "kv") as engine, RayWorkers("demo", tmp_path / "kv") as workers:
        report = precompute_documents(iter(documents), engine, workers=workers)
        again = precompute_documents(iter(documents), engine, workers=workers)
    assert (report.num_new_kv, again.num_new_kv, again.num_known_kv) == (one.num_new_kv, 0, one.num_new_kv) != (0, 0, 0)
    assert_same_kv(tmp_path, tmp_path / "alone")


def test_workers_that_are_killed_cost_nothing_but_time(corpus, alone, cluster, tmp_path):
    killed: list[int] = []
    seen: dict[str, int] = {}

    def kill(stage: str, done: int, total: int | None) -> None:
        if (stage, len(killed)) in {("embed", 0), ("prefill", 1)} and done > 40 * len(killed):
            seen.update(entries(tmp_path))
            pid = workers_of_ray()[0]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with load_engine("demo", tmp_path / "kv") as engine, RayWorkers("demo", tmp_path / "kv") as workers:
        run(corpus, engine, tmp_path, context="none", workers=workers, progress=kill)
    assert len(set(killed)) == 2
    assert_same(tmp_path, alone("none"))
    stored = entries(tmp_path)
    assert {name: stored[name] for name in seen} == seen != {}  # what was there was not computed again


def test_a_driver_that_is_killed_goes_on_with_the_same_command(corpus, alone, tmp_path):
    command = [sys.executable, "-m", "ragblend", "ingest", str(corpus), "--model", "demo", "--workers", "2"]
    command += ["--store", str(tmp_path / "kv"), "--context", "none"]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--embedder", "hashing"]
    before = set(workers_of_ray())
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while len(entries(tmp_path)) < 60:
        assert driver.poll() is None
        time.sleep(0.01)
    driver.kill()
    driver.wait()
    deadline_s = time.monotonic() + 60
    while set(workers_of_ray()) - before:  # none is left that writes, or holds memory
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    seen = entries(tmp_path)
    assert len(seen) < len(list(DiskStore(alone("none") / "kv").keys()))
    second = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not (at_work := set(workers_of_ray(b".prefill")) - before):
        assert second.poll() is None
        time.sleep(0.01)
    os.kill(at_work.pop(), signal.SIGKILL)
    report = json.loads(second.communicate()[0])  # and no other output: Ray logs the death of the worker
    assert second.returncode == 0
    assert_same(tmp_path, alone("none"))
    stored = entries(tmp_path)
    assert (
        report["num_new_kv"] + report["num_known_kv"] == len(stored) < report["num_chunks"]
    )  # a text that repeats is one
    assert {name: stored[name] for name in seen} == seen


def test_what_goes_wrong_in_a_worker_is_said_here(corpus, cluster, tmp_path):
    full = tmp_path / "full"
    full.write_text("a file where a store should be")
    with load_engine("demo", tmp_path / "kv") as engine:
        with RayWorkers("demo", full, count=1) as workers, pytest.raises(StoreNotWritableError, match="full"):
            run(corpus, engine, tmp_path, workers=workers)
        with (
            RayWorkers("demo", tmp_path / "kv", count=1, dtype="bfloat16") as workers,
            pytest.raises(StoreMismatchError, match="other weights, another dtype or another tokenizer"),
        ):
            run(corpus, engine, tmp_path, workers=workers)
        run(corpus, engine, tmp_path)  # the index that was left goes on


def workers_of_ray(at: bytes = b"") -> list[int]:
    """Processes of Ray's that run our class, and what they are at."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::_Worker" + at):
            found.append(int(folder.name))
    return sorted(found)
