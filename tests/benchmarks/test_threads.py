"""The benchmark of threads and memory: a short run in which every request has its own answer, and a failing one."""

import json

import pytest
import typer

from benchmarks import threads


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few prompts."""
    monkeypatch.setattr(threads, "NUM_PROMPTS", 4)


def test_every_request_of_a_short_run_has_its_own_answer(tmp_path):
    out = tmp_path / "threads.json"
    threads.main(model="demo", asks=10, requests=24, threads=4, max_tokens=4, out=out)
    outcomes = json.loads(out.read_text())["outcomes"]
    assert sum(outcomes.values()) == 24
    assert outcomes["same answer"] > 0
    assert outcomes["closed"] > 0


def test_an_answer_of_another_prompt_fails_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "_compare", lambda text, expected, place: "answer of another prompt")
    with pytest.raises(typer.Exit):
        threads.main(model="demo", asks=10, requests=8, threads=2, max_tokens=4, out=tmp_path / "threads.json")
