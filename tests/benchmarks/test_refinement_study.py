"""`benchmarks.refinement`: closeness of refined answers, and times with and without refinement."""

import json

import pytest
from tiny_prompts import CHUNKS, PROMPT
from typer.testing import CliRunner

from benchmarks.refinement import app, measure_answers, summarize
from tests.benchmarks.test_studies import CASE


def test_answers_refined_to_ratio_one_are_full_prefill_after_the_first_token(tiny_engine):
    engine = tiny_engine("llama")
    for chunk in CHUNKS:
        engine.precompute(chunk)
    records = measure_answers(engine, PROMPT, CASE, 0, [0.6, 1.0], answer_tokens=6)
    found = {record.run: record for record in records}
    assert list(found) == ["not refined", "refined to 0.6", "refined to 1", "one pass at 0.6", "one pass at 1"]
    plain, refined, exact = (found[name] for name in ("not refined", "refined to 1", "one pass at 1"))
    assert refined.first_token_kl == plain.first_token_kl > 1e-6
    assert exact.answer_kl == pytest.approx(0, abs=1e-6)
    assert refined.answer_kl == pytest.approx(plain.first_token_kl / 6, abs=1e-6)
    assert refined.later_kl == pytest.approx(0, abs=1e-6)
    assert plain.later_kl == pytest.approx((6 * plain.answer_kl - plain.first_token_kl) / 5, rel=1e-4)
    runs = {run["run"]: run for run in summarize(records)}
    assert runs["not refined"]["answer_kl_over_not_refined"] == 1
    assert runs["refined to 1"]["answer_kl"] == refined.answer_kl


def test_pauses_and_rates_are_measured_with_and_without_refinement(tmp_path):
    out = tmp_path / "found.json"
    options = (
        "pauses --subject tiny --ratio 0.5 --num-chunks 2 --chunk-tokens 12 --question-tokens 4 --answer-tokens 6 "
        "--clients 2 --requests 2 --repeats 2 --out"
    )
    ran = CliRunner().invoke(app, [*options.split(), str(out)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    assert found["alone"]["0.5"]["refine_s"] > found["alone"]["0.0"]["refine_s"] == 0
    assert found["num_requests"] == 2 * 4
    assert 0 <= found["num_refined"] <= found["num_requests"]
    assert found["ttft_ratio"] > 0
    assert found["throughput_ratio"] > 0
