"""The command line in the tests' own process, and a small corpus for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ragblend.cli import app as cli
from ragblend.demo.corpus import sample_corpus

PLACE = ("--store", "s")
INGEST = ("ingest", "docs", "--model", "demo", "--glob", "*.md", "--chunk-size", "112", "--embedder", "hashing")


def run_command(*arguments: str) -> int:
    """The exit code of `ragblend ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ragblend", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


class CommandRunner:
    """`run(*arguments)`: exit code, stdout and stderr of a command in the working folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = run_command(*arguments)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def facts(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """What the command prints with `--json`, once its exit code is checked."""
        ended, out, err = self(*arguments, "--json")
        assert ended == code, err
        facts: dict[str, Any] = json.loads(out)
        return facts


def ingest_sample(folder: Path) -> Path:
    """`folder` with four documents in `docs`, ingested into `s`."""
    sample_corpus().first_records(4).write(folder / "docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(*INGEST, *PLACE) == 0
    return folder
