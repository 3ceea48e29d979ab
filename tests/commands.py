"""Helpers that run `ragblend` commands in the test's process, and ingest a small corpus."""

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
    """Run `ragblend ARGUMENTS` in this process. Return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ragblend", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


class CommandRunner:
    """Function `run(*arguments)` that runs a command in the working folder. Returns exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = run_command(*arguments)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def facts(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command with `--json` and check its exit code. Return the printed object."""
        ended, out, err = self(*arguments, "--json")
        assert ended == code, err
        facts: dict[str, Any] = json.loads(out)
        return facts


def ingest_sample(folder: Path) -> Path:
    """Write four documents to `folder`/docs and ingest them into the store `folder`/s. Return `folder`."""
    sample_corpus().first_records(4).write(folder / "docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(*INGEST, *PLACE) == 0
    return folder
