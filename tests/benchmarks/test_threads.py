"""The benchmark of threads and memory: a short run in which every request has its own answer, and a failing one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks import threads


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts."""
    monkeypatch.setattr(threads, "NUM_PROMPTS", 4)


def test_every_request_of_a_short_run_has_its_own_answer(tmp_path: Path) -> None:
    out = tmp_path / "threads.json"
    threads.main(model="demo", asks=10, requests=24, threads=4, max_tokens=4, out=out)
    outcomes = json.loads(out.read_text())["outcomes"]
    assert sum(outcomes.values()) == 24
    assert outcomes["same answer"] > 0
    assert outcomes["closed"] > 0


def test_an_answer_of_another_prompt_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_compare", lambda text, expected, place: "answer of another prompt")
    with pytest.raises(typer.Exit):
        threads.main(model="demo", asks=10, requests=8, threads=2, max_tokens=4, out=tmp_path / "threads.json")
