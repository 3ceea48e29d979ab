"""Every command that changes something, killed at random moments, and run again. `RAGBLEND_FAULTS=full` raises counts.

The rerun must end where a run that was never killed ends: KV byte for byte, every other file by what is in it. What was
removed must be in no file any more, and no rerun may be needed beyond the same command.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import faiss
import pytest
from forked import Commands, Done, Kill
from places import INGEST, PLACE, Place, secret, succeeded
from servers import RedisServer, running_redis

from ragblend.engine.store.remote.tier import open_remote
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.index import open_index

pytestmark = pytest.mark.timeout(1800)

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_KILLS = 20 if FULL else 3


@pytest.fixture(scope="module")
def commands():
    with Commands() as made:
        yield made


@pytest.fixture
def place(tmp_path, commands):
    """Six documents, ingested in the context `neutral`."""
    found = Place(tmp_path / "work", tmp_path / "kept")
    found.work.mkdir()
    for name in ("amber", "basalt", "copper", "denim", "ebony", "flint"):
        found.write(name)
    succeeded(commands.run(*INGEST, cwd=found.work))
    return found


def state(work: Path) -> dict[str, Any]:
    """What a working folder holds, but for what is not told: times, ids of rows, and how SQLite laid out its pages."""
    files = [
        (str(path.relative_to(work)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(work.rglob("*"))
        if path.is_file() and path.suffix not in (".sqlite", ".faiss")
        if not path.name.endswith(("-wal", "-shm"))
    ]
    vectors = faiss.read_index(str(work / "kv" / "vectors.faiss"))
    tables = {
        "documents": "SELECT id, source, version, file_version, top FROM documents",
        "chunks": "SELECT id, key, metadata, vector FROM chunks",
        "lost texts": "SELECT source, text FROM lost_texts",
        "pending deletions": "SELECT key FROM deletions",
        "texts": "SELECT text FROM texts",
        "owners": "SELECT collection, documents.id, key FROM documents JOIN chunks ON document = number",
        "stored": "SELECT key FROM entries WHERE fingerprint <> ''",
    }
    with closing(sqlite3.connect(work / "kv" / CATALOG_FILE)) as catalog:
        rows = {name: sorted(catalog.execute(query).fetchall()) for name, query in tables.items()}
    return {"contents": files, "vectors": sorted(faiss.vector_to_array(vectors.id_map).tolist()), **rows}


def files_with(work: Path, *names: str, folders: tuple[str, ...] = ("kv",)) -> list[str]:
    """The files of store and index that hold the secret of a document, whatever they are."""
    paths = [path for folder in folders for path in (work / folder).rglob("*") if path.is_file()]
    return [str(path) for path in paths for name in names if secret(name).encode() in path.read_bytes()]


def entries(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((work / "kv").glob("kv/??/*.safetensors"))}


def basalt_is_gone(work: Path) -> None:
    """Nothing holds a word of the document any more."""
    assert files_with(work, "basalt") == []


def killed_and_run_again(
    commands: Commands,
    place: Place,
    argv: tuple[str, ...],
    check: Callable[[Path], object] = lambda work: None,
    codes: tuple[int, ...] = (0,),
    num_kills: int = NUM_KILLS,
) -> str:
    """The command, killed `num_kills` times, each time from the state that was kept, and run again. What happened."""
    rng, at = random.Random(argv[0]), []
    place.keep()
    whole = succeeded(commands.run(*argv, cwd=place.work), *codes)
    wanted = state(place.work)
    check(place.work)
    assert whole.count > 1, whole
    while len(at) < num_kills:
        place.put_back()
        moment = rng.randrange(1, whole.count + 1)
        killed = commands.run(*argv, cwd=place.work, kill=Kill(moment, rng.choice((0.0, rng.uniform(0, 0.02)))))
        if not killed.was_killed:
            succeeded(killed, *codes)
            continue
        at.append(moment)
        again = commands.run(*argv, cwd=place.work)
        # What was done before the kill is not there to be done again.
        succeeded(again, *codes, *((3,) if argv[0] == "remove" else ()))
        found = state(place.work)
        assert found == wanted, difference(found, wanted, moment)
        check(place.work)
    return f"{num_kills} kills of `{' '.join(argv[:2])}` at changes {min(at)} to {max(at)} of {whole.count}"


def difference(found: dict[str, Any], wanted: dict[str, Any], moment: int) -> str:
    """Where two states differ, for a failing test."""
    lines = [f"killed after change {moment}"]
    for name in wanted:
        one, other = (set(each[name]) for each in (found, wanted))
        if one != other:
            lines.append(f"{name}: too much {sorted(one - other)[:4]}, missing {sorted(other - one)[:4]}")
    return "\n".join(lines)


@pytest.mark.slow
def test_a_killed_removal_is_completed_by_the_same_command(commands, place, counted):
    (place.work / "corpus" / "basalt.md").unlink()
    said = killed_and_run_again(commands, place, ("remove", "corpus/basalt.md", *PLACE), basalt_is_gone)
    counted(f"{said}: no file tells a removed word")


@pytest.mark.slow
def test_a_removal_during_a_remote_outage_completes_after_it(commands, place, tmp_path, counted):
    pytest.importorskip("redis")
    for server in running_redis(tmp_path):
        far = ("--remote", server.url)
        succeeded(commands.run("push", *far, "--store", "kv", cwd=place.work))
        num_far = num_keys(server)
        server.process.send_signal(signal.SIGSTOP)  # there, and silent
        down = commands.run("remove", "corpus/basalt.md", *far, *PLACE, cwd=place.work)
        server.process.send_signal(signal.SIGCONT)
        succeeded(down, 5)
        basalt_is_gone(place.work)
        num_here = len(entries(place.work))
        assert num_here < num_far == num_keys(server)
        succeeded(commands.run("remove", "corpus/basalt.md", *far, *PLACE, cwd=place.work))
        assert num_keys(server) == num_here
        counted(
            f"a removal while Redis is silent: {num_far - num_here} entries gone here at once, there with the rerun"
        )


def num_keys(server: RedisServer) -> int:
    with closing(open_remote(server.url)) as remote:
        return sum(1 for _ in remote.keys())  # noqa: SIM118


@pytest.mark.slow
def test_a_killed_repair_loses_nothing_that_the_rerun_calls_clean(commands, place, counted):
    rng = random.Random(2)
    paths = sorted((place.work / "kv").glob("kv/??/*.safetensors"))
    for path in rng.sample(paths, 8):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1
        path.write_bytes(data)
    rng.choice([path for path in paths if path.exists()]).unlink()
    whole = {path.name for path in paths}

    def all_there(work: Path) -> None:
        assert set(entries(work)) == whole
        succeeded(commands.run("verify", *PLACE, cwd=work))

    said = killed_and_run_again(commands, place, ("verify", "--repair", *PLACE), all_there)
    counted(f"{said}: 9 entries mended")


@pytest.mark.slow
def test_a_killed_gc_is_finished_by_the_next(commands, place, counted):
    paths = sorted((place.work / "kv").glob("kv/??/*.safetensors"))
    for number, path in enumerate(paths):
        os.utime(path, (1e9 + number, 1e9 + number))
    argv = ("gc", "--max-size", f"{sum(path.stat().st_size for path in paths) // 2}B", *PLACE)
    paths[0].rename(paths[0].with_suffix(".damaged"))

    counted(killed_and_run_again(commands, place, argv))


@pytest.mark.slow
def test_gc_of_orphans_beside_an_ingestion_takes_orphans_and_nothing_fresh(commands, place, counted):
    """Half of the documents leave the index behind the store's back; others come in while `gc --orphans` runs."""
    with open_index(place.work / "kv") as index:
        for source in index.sources()[::2]:
            index.remove_document(source)
        index.clear_lost_texts(index.lost_texts())
    for name in ("amber", "copper", "ebony"):
        (place.work / "corpus" / f"{name}.md").unlink()
    for name in ("garnet", "hazel", "ivory"):
        place.write(name)
    place.keep()
    gc = ("gc", "--orphans", *PLACE)
    succeeded(commands.run(*INGEST, cwd=place.work))
    whole = succeeded(commands.run(*gc, cwd=place.work))
    wanted = state(place.work)
    rng, num_kills, num_beside = random.Random(3), 0, 0
    with Commands() as beside:
        while num_kills < NUM_KILLS:
            place.put_back()
            done: list[Done] = []
            ingestion = threading.Thread(target=lambda d=done: d.append(beside.run(*INGEST, cwd=place.work)))
            ingestion.start()
            killed = None
            while killed is None or (ingestion.is_alive() and not killed.was_killed):
                kill = Kill(rng.randrange(1, whole.count + 1), rng.uniform(0, 0.01))
                killed = commands.run(*gc, cwd=place.work, kill=kill)
                num_beside += 1
            if killed.was_killed:
                num_kills += 1
                succeeded(commands.run(*gc, cwd=place.work))  # the ingestion may still be running
            ingestion.join()
            succeeded(done[0])
            succeeded(commands.run("verify", *PLACE, cwd=place.work))  # before anything could prefill it again
            succeeded(commands.run(*gc, cwd=place.work))
            found = state(place.work)
            assert found == wanted, difference(found, wanted, kill.after)
            assert files_with(place.work, "amber", "copper", "ebony", folders=("kv",)) == []
    counted(f"{num_kills} kills of `gc --orphans` among {num_beside} beside an ingestion: no fresh entry lost")


@pytest.mark.slow
def test_a_killed_push_leaves_no_half_and_no_temp_file(commands, place, counted):
    far = place.work / "far"
    argv = ("push", "--remote", f"file://{far}", "--store", "kv")

    def all_there(work: Path) -> None:
        assert {path.name: path.read_bytes() for path in far.rglob("*") if path.is_file()} == entries(work)

    counted(killed_and_run_again(commands, place, argv, all_there))


@pytest.mark.slow
def test_push_over_keys_of_another_type_sends_what_it_says(commands, place, tmp_path, counted):
    redis = pytest.importorskip("redis")
    for server in running_redis(tmp_path):
        client = redis.Redis(port=server.port)
        stored = entries(place.work).values()
        push = ("push", "--remote", server.url, "--store", "kv", "--json")
        succeeded(commands.run(*push, cwd=place.work))
        names = sorted(client.keys())
        for name in names[::2]:
            client.delete(name)
            client.lpush(name, "no entry")
        num_planted = len(names[::2])
        found = commands.run("ask", "Which amber?", "--max-tokens", "2", "--remote", server.url, *PLACE, cwd=place.work)
        succeeded(found)
        facts = succeeded(commands.run(*push, cwd=place.work)).facts
        assert (facts["num_sent"], facts["num_known"]) == (num_planted, len(stored) - num_planted)
        assert sorted(client.get(name) for name in names) == sorted(stored)
        counted(f"push over {num_planted} lists in place of entries: as many sent, and there")


@pytest.mark.parametrize("num_kills", [1, pytest.param(NUM_KILLS, marks=pytest.mark.slow)])
def test_a_killed_ingestion_of_changed_files_ends_as_one_that_was_not(num_kills, commands, place, counted):
    place.write("basalt", version=1)
    place.write("copper", version=1)
    (place.work / "corpus" / "denim.md").unlink()
    place.write("garnet")

    def no_old_word(work: Path) -> None:
        assert files_with(work, "basalt", "copper", "denim") == []

    said = killed_and_run_again(commands, place, INGEST, no_old_word, num_kills=num_kills)
    counted(f"{said}: no file tells an old word")
