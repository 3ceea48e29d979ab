"""`ragblend explain` as a user types it: one JSON object, a page and a picture, and clear errors."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from commands import PLACE, CommandRunner

QUESTION = "What role does James Bell have?"

# What users' scripts rely on: names may be added, not taken away.
TOP = {
    "schema_version", "model", "question", "answer", "full_answer", "answers_identical", "first_token_agrees",
    "first_token_kl", "report", "full_report", "segments", "sources",
}  # fmt: skip
SEGMENT = {"kind", "start", "tokens", "chunk", "read_s"}
TOKEN = {"id", "text", "state", "deviation", "remaining", "attention"}


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


def test_a_page_is_written_to_the_given_path(run, home):
    code, out, err = run("explain", QUESTION, "--rule", "cacheblend", "--html", "out/e.html", *PLACE)
    assert code == 0
    assert out.splitlines()[0].startswith("blend ")
    assert re.search(r"^1\. /.*\n(.*\n)*all +\d+ ", out, re.MULTILINE)
    assert err.splitlines() == ["out/e.html written"]
    assert QUESTION in (home / "out" / "e.html").read_text(encoding="utf-8")


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


@pytest.fixture
def source(run):
    """A stored chunk: its text and the document that it is of."""
    found: dict[str, str] = run.facts("search", QUESTION, "-k", "1", *PLACE)["sources"][0]
    return found


def explain_prompt(run: CommandRunner, folder: Path, content: object) -> str:
    """The lines that `explain --prompt` prints for a file of this content."""
    file = folder / "prompt"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    code, out, err = run("explain", "--prompt", str(file), "--max-tokens", "2", *PLACE)
    assert code == 0, err
    return out


def test_a_request_body_is_rendered_and_matched_like_a_request(run, source, tmp_path):
    content = [{"type": "text", "text": source["text"]}, {"type": "text", "text": f"\n\n{QUESTION}"}]
    out = explain_prompt(run, tmp_path, {"model": "any", "messages": [{"role": "user", "content": content}]})
    assert "1/1 chunks from the store" in out
    assert re.search(r"\n1\. /.*\.\.\..*\"", out)
    assert "not reused" not in out
    assert "no stored text" not in out


def test_a_rewritten_chunk_is_named_with_its_document_and_the_difference(run, source, tmp_path):
    out = explain_prompt(run, tmp_path, [{"role": "user", "content": f"{source['text'].upper()}\n\n{QUESTION}"}])
    assert "no stored chunk found in the prompt" in out
    whole = rf'not reused: {source["source"]}, ".*", all \d+ tokens; 100% of its words are in the prompt\n'
    assert re.search(whole + "  differs in letter case: ", out)


def test_a_partly_reused_chunk_shows_the_part_that_is_not_reused(run, source, tmp_path):
    words = source["text"].split(" ")
    words[8:8] = ["XYZZY"]
    out = explain_prompt(run, tmp_path, f"{' '.join(words)}\n\n{QUESTION}")
    assert "1/1 chunks from the store" in out
    missed, all_tokens, part = re.search(r"not reused: .*, (\d+) of (\d+) tokens: \"(.*)\"; ", out).groups()
    assert 0 < int(missed) < int(all_tokens) / 2
    assert " ".join(source["text"].split()).startswith(part.removesuffix("..."))


def test_a_prompt_from_stdin_without_a_stored_text_says_so(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is the capital of Norway?")))
    code, out, _ = run("explain", "--prompt", "-", "--max-tokens", "2", *PLACE)
    assert code == 0
    assert out.endswith("\nno stored text is in this prompt, and none has 5 words in a row in common with it\n")


def test_a_chunk_with_too_many_changes_is_named_with_its_similarity(run, source, tmp_path):
    words = source["text"].split(" ")
    words[6:] = ["xyzzy" if place % 4 == 0 else word for place, word in enumerate(words[6:])]
    out = explain_prompt(run, tmp_path, f"{' '.join(words)}\n\n{QUESTION}")
    assert (
        "no stored text is in this prompt, and none has 50% of its words in parts of at least 5 words in a row" in out
    )
    assert re.search(
        rf"the nearest stored text: {source['source']}, .*; \d+% of its words are in the prompt\n  \w", out
    )
    assert "not reused" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either a QUESTION or --prompt FILE"),
        ((QUESTION, "--prompt", "-"), "give either a QUESTION or --prompt FILE"),
        (("--prompt", "other.json"), "JSON without messages"),
    ],
)
def test_neither_and_both_and_another_json_are_usage_errors(run, home, arguments, message):
    (home / "other.json").write_text('{"question": "Who?"}')
    code, _, err = run("explain", *arguments, *PLACE)
    assert code == 2
    assert message in err
