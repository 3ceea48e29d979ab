"""Working folder with a small corpus, an index and a store, which tests restore between commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import Done

PLACE = ("--store", "kv")
INGEST = (
    "ingest",
    "corpus",
    "--model",
    "demo",
    "--chunk-size",
    "64",
    "--embedder",
    "hashing",
    "--context",
    "neutral",
    *PLACE,
)


def text_about(name: str, version: int = 0) -> str:
    """Return a text of several chunks, each with a unique word."""
    return "\n\n".join(
        f"The {name} of room {number} has the secret {secret(name, version)}{number} and {number + 3} windows. "
        f"Anna, who paints {name} walls, gave it {number * 7} chairs, a lamp, a long table and a red door in May."
        for number in range(4)
    )


def secret(name: str, version: int = 0) -> str:
    return f"Qx{name}zv{version}n"


class Place(NamedTuple):
    """A working folder, and a copy that restores it. Its path must not change, because the index has absolute names."""

    work: Path
    kept: Path

    def keep(self) -> None:
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.work, self.kept)

    def put_back(self) -> None:
        shutil.rmtree(self.work)
        shutil.copytree(self.kept, self.work)

    def write(self, name: str, version: int = 0) -> None:
        (self.work / "corpus").mkdir(exist_ok=True)
        (self.work / "corpus" / f"{name}.md").write_text(text_about(name, version))


def succeeded(done: Done, *codes: int) -> Done:
    assert done.code in (codes or (0,)), done
    assert "Traceback" not in done.err, done.err
    return done


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size at `folder`. Skips the test if mounting is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # an engine's catalogue may still be open


def fill_disk(folder: Path) -> None:
    """Write to a file in `folder` until no byte is free."""
    with (folder / "fill").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
