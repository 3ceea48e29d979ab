"""The study of causes measures what it says: all tokens recomputed, or all kept ones restored, is full prefill."""

from __future__ import annotations

import json

import pytest

from benchmarks.causes import main, summarize


@pytest.mark.slow
def test_an_interrupted_study_resumes_and_restored_kv_equals_full_prefill(tmp_path, monkeypatch):
    out = tmp_path / "causes.json"
    main("demo", out, "nq", 1, threads=1)
    found = {
        (each["context"], each["kind"], each["variant"], each["ratio"]): each
        for each in json.loads(out.read_text())["questions"][0]["rows"]
    }
    assert found["none", "recompute", "ask", 1.0]["first_token_kl"] == pytest.approx(0, abs=1e-4)
    for context in ("none", "neutral", "unrelated"):
        reuse = found[context, "recompute", "reuse", 0.0]["answer_kl"]
        assert found[context, "restore", "kept by ask", 0.3]["answer_kl"] < reuse
    before = out.read_text()
    monkeypatch.setattr("benchmarks.causes.measure_question", None)  # no question is measured twice
    main("demo", out, "nq", 1, threads=1)
    assert json.loads(out.read_text())["questions"] == json.loads(before)["questions"]


def test_differences_are_those_of_the_same_questions():
    def row(context: str, variant: str, kl: float) -> dict[str, object]:
        kls = {"first_token_kl": kl, "answer_kl": kl / 2, "agreement": 1.0}
        return {"context": context, "kind": "recompute", "variant": variant, "ratio": 0.05, **kls}

    bases = (1.0, 5.0)
    questions = [
        {"rows": [row("none", "ask", kl), row("none", "oracle", kl + 2), row("neutral", "ask", kl - 1)]} for kl in bases
    ]
    alone, oracle, neutral = summarize(questions)
    assert not alone.keys() & {"less_default", "less_alone"}
    assert oracle["less_default"] == {"first_token_kl": [2, 2, 2], "answer_kl": [1, 1, 1]}
    assert neutral["less_alone"] == {"first_token_kl": [-1, -1, -1], "answer_kl": [-0.5, -0.5, -0.5]}
