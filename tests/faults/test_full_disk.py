"""Every command without room: a limit on the size of files, and a disk of a few megabytes that is full.

`RAGBLEND_FAULTS=full` tries every limit. A command either needs no room and succeeds, or says that there is none, with
exit 1: nothing is called damaged, and with room the same command goes on.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forked import Commands, Done
from places import INGEST, PLACE, Place, small_disk, succeeded

pytestmark = pytest.mark.timeout(1800)

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
LIMITS = (0, 100, 2_000, 40_000, 200_000)
FREE = (0, 8, 60, 400)  # KiB
ASK = ("ask", "What is the secret of amber room 1?", "--max-tokens", "2", *PLACE)
COMMANDS = {
    "ingest": INGEST,
    "precompute": ("precompute", "--kv-dtype", "int8", *PLACE),
    "precompute for another system text": ("precompute", "--system", "Be kind.", *PLACE),
    "remove": ("remove", "corpus/basalt.md", *PLACE),
    "push": ("push", "--remote", "file://{work}/far", "--store", "kv"),
    "verify": ("verify", *PLACE),
    "verify --repair": ("verify", "--repair", *PLACE),
    "gc": ("gc", "--max-size", "300KB", *PLACE),
    "gc --orphans": ("gc", "--orphans", *PLACE),
    "ask": ASK,
    "ask with another system text": (*ASK, "--system", "Be odd."),
    "search": ("search", "amber", *PLACE),
    "stats": ("stats", *PLACE),
    "explain": ("explain", "Which amber?", "--html", "page.html", *PLACE),
    "profile": ("profile", *PLACE),
    "demo": ("demo", "--dir", "demo", "--question", "Who?"),
}
HAS_NO_ROOM = re.compile(
    "no room for|no space is left|file-size limit|are free there|the disk of .* has .* free|disk quota"
)


@pytest.fixture(scope="module")
def commands():
    with Commands() as made:
        yield made


def fill(place: Place, commands: Commands) -> None:
    """Documents, of which some have changed since they were ingested, and a damaged entry."""
    for name in ("amber", "basalt", "copper"):
        place.write(name)
    succeeded(commands.run(*INGEST, cwd=place.work))
    place.write("copper", version=1)
    place.write("denim")
    path = min((place.work / "kv").glob("kv/??/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-9] + b"ragblend!")
    place.keep()


def says_so(done: Done, what: object) -> bool:
    """Whether the command failed, and for want of room."""
    said = done.out + done.err
    assert "Traceback" not in said, (what, said)
    assert "delete the files" not in said, (what, said)
    if done.code in (0, 4):  # `verify` finds what was damaged before, room or not
        return False
    assert done.code == 1, (what, done.code, said)
    assert HAS_NO_ROOM.search(said), (what, said)
    return True


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_size_limit_is_named_and_the_command_continues(name, place, commands, counted):
    argv = tuple(part.format(work=place.work) for part in COMMANDS[name])
    limits = LIMITS if FULL else random.Random(name).sample(LIMITS, 1)
    num_failed = 0
    for limit in limits:
        place.put_back()
        num_failed += says_so(commands.run(*argv, cwd=place.work, limit_bytes=limit), (name, limit))
        goes_on(commands, place.work, argv)
    counted(f"{name} with a limit of {', '.join(map(str, limits))} bytes: {num_failed} times told so, then finished")


@pytest.fixture(scope="module")
def place(tmp_path_factory, commands):
    root = tmp_path_factory.mktemp("limit")
    found = Place(root / "work", root / "kept")
    found.work.mkdir()
    fill(found, commands)
    return found


def goes_on(commands: Commands, work: Path, argv: tuple[str, ...]) -> None:
    done = commands.run(*argv, cwd=work)
    assert done.code in (0, 4) or "no document" in done.err, done
    succeeded(commands.run("verify", "--repair", *PLACE, cwd=work))
    succeeded(commands.run("verify", *PLACE, cwd=work))


def test_gc_of_a_store_that_cannot_be_written_claims_nothing(tmp_path, commands, counted):
    with small_disk(tmp_path / "small", "24m") as work:
        fill(Place(work, tmp_path / "kept"), commands)
        succeeded(commands.run("verify", "--repair", *PLACE, cwd=work))
        subprocess.run(["mount", "-o", "remount,ro", str(work)], check=True)
        for more in ((), ("--orphans",)):
            done = commands.run("gc", "--max-size", "0B", "--json", *more, *PLACE, cwd=work)
            assert done.code == 1, done
            assert not done.out
            assert "Traceback" not in done.err
            assert "0 B were freed" in done.err or "cannot be written" in done.err or "cannot open or write" in done.err
        counted("gc of a store on a read-only mount: exit 1, nothing claimed")


def test_a_full_disk_is_called_full_by_every_command(tmp_path, commands, counted):
    with small_disk(tmp_path / "small", "64m") as work:
        place = Place(work, tmp_path / "kept")
        fill(place, commands)
        names = list(COMMANDS) if FULL else random.Random(0).sample(list(COMMANDS), 5)
        num_runs = num_failed = 0
        for name in names:
            for free_kib in FREE if FULL else random.Random(name).sample(FREE, 1):
                for path in work.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                shutil.copytree(place.kept, work, dirs_exist_ok=True)
                with (work / "filling").open("wb", buffering=0) as filling:
                    filling.write(bytes(max(0, shutil.disk_usage(work).free - free_kib * 1024)))
                argv = tuple(part.format(work=work) for part in COMMANDS[name])
                num_failed += says_so(commands.run(*argv, cwd=work), (name, free_kib))
                num_runs += 1
                (work / "filling").unlink()
                goes_on(commands, work, argv)
        counted(f"{num_runs} commands on a full disk: {num_failed} told so with exit 1, all finished with room")
