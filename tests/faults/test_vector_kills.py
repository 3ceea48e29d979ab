"""Ingestion into a vector database, killed anywhere: in the end it has what the catalogue has, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from postgres import running_postgres

from ragblend.corpus.embedders import HashingEmbedder
from ragblend.index import open_index

NUM_KILLS = 12 if os.environ.get("RAGBLEND_FAULTS") == "full" else 3
NUM_DOCUMENTS, NUM_CHUNKS, DIM = 6, 8, 32

INGESTION = f"""
import sys
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.corpus.vectors import outside
from ragblend.index import open_index
from ragblend.prompt.prompt import Chunk

outside.PAGE = 4  # many small steps, each a place to be killed at
for name in ("put", "remove", "set_state"):
    def loud(place, *given, name=name, plain=getattr(CLASS, name)):
        print(name, flush=True)
        plain(place, *given)
    setattr(CLASS, name, loud)
with open_index("index", HashingEmbedder({DIM}), create=True, vectors=sys.argv[1]) as index:
    print("open", flush=True)
    for number in range({NUM_DOCUMENTS}):
        version = sys.argv[2]
        texts = [f"version {{version}} of {{number}}, {{part}}" for part in range({NUM_CHUNKS})]
        if index.documents().get("", {{}}).get(str(number)) != version:
            chunks = [Chunk(text, str(number), 100 * part) for part, text in enumerate(texts)]
            index.add_document(str(number), version, chunks)
        if number == 2:
            index.save()
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, own_folder: None, monkeypatch) -> Iterator[tuple[str, str]]:
    """A URL, and the import of the class that writes there."""
    if request.param == "qdrant":
        pytest.importorskip("qdrant_client", reason="no qdrant-client: pip install 'ragblend[qdrant]'")
        yield f"qdrant://{tmp_path}/qdrant", "from ragblend.corpus.vectors.qdrant import QdrantPlace as CLASS"
        return
    with running_postgres() as url:
        monkeypatch.setenv("RAGBLEND_VECTORS", url)
        yield url, "from ragblend.corpus.vectors.postgres import PostgresPlace as CLASS"


def ingest(folder: Path, place: tuple[str, str], version: int, kill_at: int | None) -> tuple[int, bool]:
    """Run it, killed `kill_at` steps after it opened the index. How many steps were seen, and whether it was killed."""
    command = [sys.executable, "-c", f"{place[1]}\n{INGESTION}", place[0], str(version)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        steps = 0
        for _ in process.stdout:
            steps += 1
            if steps == kill_at:
                time.sleep(random.uniform(0, 0.01))
                process.send_signal(signal.SIGKILL)
    assert process.returncode in ((0,) if kill_at is None else (0, -9))
    return steps, process.returncode == -9


@pytest.mark.parametrize("place", ["qdrant", "pgvector"], indirect=True)
def test_a_killed_ingestion_leaves_a_place_that_the_next_one_mends(place, tmp_path, counted):
    steps, _ = ingest(tmp_path, place, 0, None)
    assert steps > 10
    at = [random.randrange(1, steps) for _ in range(NUM_KILLS)]
    num_killed = 0
    for version, moment in enumerate(at, start=1):
        _, was_killed = ingest(tmp_path, place, version, moment)
        num_killed += was_killed
        if version % 2:  # whoever opens it next, or ingests on
            with open_index(tmp_path / "index") as index:
                assert index.check() == []
    ingest(tmp_path, place, NUM_KILLS + 1, None)
    with open_index(tmp_path / "index") as index:
        assert index.is_saved
        assert index.check() == []
        held, _ = index._vectors.place.held()
        assert sorted(held) == sorted(index.ids())
        assert len(held) == NUM_DOCUMENTS * NUM_CHUNKS
        embedded = HashingEmbedder(DIM).embed([chunk.text for chunk in index.chunks()])
        found = index.search(embedded[5], 10)
        wanted = np.sort(embedded @ embedded[5])[::-1][:10]
        np.testing.assert_allclose([hit.score for hit in found], wanted, atol=1e-5)
    assert num_killed
    counted(f"{num_killed} kills of an ingestion into {place[0].partition(':')[0]} at steps {sorted(at)} of {steps}")
