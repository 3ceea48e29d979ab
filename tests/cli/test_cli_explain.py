"""`ragblend explain` as a user types it: one JSON object, a page and a picture, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import PLACE, CommandRunner, ingest_sample

QUESTION = "What role does James Bell have?"

# What users' scripts rely on: names may be added, not taken away.
TOP = {
    "schema_version", "model", "question", "answer", "full_answer", "answers_identical", "first_token_agrees",
    "first_token_kl", "report", "full_report", "segments", "sources",
}  # fmt: skip
SEGMENT = {"kind", "start", "tokens", "chunk", "read_s"}
TOKEN = {"id", "text", "state", "deviation", "remaining", "attention"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an ingested corpus."""
    return ingest_sample(tmp_path_factory.mktemp("home"))


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    monkeypatch.chdir(home)
    return CommandRunner(capsys)


def test_json_has_every_token_and_the_figures_of_ask(run):
    common = ("-k", "3", "--max-tokens", "8", *PLACE)
    code, out, _ = run("explain", QUESTION, "--ratio", "0.2", "--json", *common)
    facts = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert facts["schema_version"] == 1
    assert set(facts) >= TOP
    assert all(set(segment) >= SEGMENT for segment in facts["segments"])
    tokens = [token for segment in facts["segments"] for token in segment["tokens"]]
    assert all(set(token) >= TOKEN for token in tokens)
    assert len(tokens) == facts["report"]["prompt_tokens"]
    kinds = ["prefix", "chunk", "text", "chunk", "text", "chunk", "suffix"]
    assert [segment["kind"] for segment in facts["segments"]] == kinds

    asked = run.facts("ask", QUESTION, "--ratio", "0.2", *common)
    full = run.facts("ask", QUESTION, "--mode", "full", *common)
    assert (facts["question"], facts["answer"], facts["full_answer"]) == (QUESTION, asked["answer"], full["answer"])
    assert facts["answers_identical"] == (asked["answer"] == full["answer"])
    assert facts["sources"] == asked["sources"]
    for name in ("rule", "num_recomputed_tokens", "charged_budget", "attention_stale", "mean_deviation"):
        assert facts["report"][name] == pytest.approx(asked["report"][name])
    assert sum(token["state"] == "recomputed" for token in tokens) == asked["report"]["num_recomputed_tokens"]


def test_a_page_and_a_picture_are_written_to_the_given_paths(run, home):
    pytest.importorskip("matplotlib")
    code, out, err = run(
        "explain", QUESTION, "--rule", "cacheblend", "--html", "out/e.html", "--png", "out/e.png", *PLACE
    )
    assert code == 0
    assert out.splitlines()[0].startswith("blend ")
    assert "recomputed, mean deviation" in out
    assert err.splitlines() == ["out/e.html written", "out/e.png written"]
    assert QUESTION in (home / "out" / "e.html").read_text(encoding="utf-8")
    assert (home / "out" / "e.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_file_the_option_that_shows_tokens_is_named(run):
    code, out, err = run("explain", QUESTION, "-k", "1", *PLACE)
    assert code == 0
    assert "chunks from the store" in out
    assert "--html" in err


@pytest.mark.parametrize("backend", ["vllm", "http://127.0.0.1:1"])
def test_engines_that_keep_their_kv_are_rejected_with_the_setting_to_change(run, backend, monkeypatch):
    monkeypatch.setenv("RAGBLEND_BACKEND", backend)
    code, _, err = run("explain", QUESTION, *PLACE)
    assert code == 2
    assert "RAGBLEND_BACKEND=transformers" in err
