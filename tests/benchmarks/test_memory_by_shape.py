"""What is counted is memory that is held, not what was held and given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.memory_by_shape import PARTS, ROUNDS, grown, main

HELD: list[bytearray] = []


def test_what_is_held_counts_and_what_is_given_back_does_not() -> None:
    def keep() -> None:
        HELD.append(bytearray(20 << 20))

    def give_back() -> None:
        bytearray(20 << 20)

    try:
        before, kept, same = grown([keep, give_back])
    finally:
        HELD.clear()
    assert kept - before == pytest.approx(20, abs=2)
    assert same - kept == pytest.approx(0, abs=2)


def test_both_are_run_apart_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory_by_shape._apart", lambda part, count: [1.0, count / 10, 70.0, 70.0])
    monkeypatch.setattr("benchmarks.memory_by_shape.vllm_card", dict)
    app = Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--requests", "600", "--out", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "found.json").read_text())
    assert facts["used_mib"] == {part: [1.0, 60.0, 70.0, 70.0] for part in PARTS}
    assert all(len(used) == 1 + len(ROUNDS) for used in facts["used_mib"].values())
