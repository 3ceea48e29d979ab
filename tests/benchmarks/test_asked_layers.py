"""`benchmarks.asked_layers` as a reader runs it, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.asked_layers import rule_reading
from ragblend.engine.fusion.rules import RULES, Check

COMMAND = (sys.executable, "-m", "benchmarks.asked_layers", "--model", "demo", "--data", "demo", "--questions", "2")
ROOT = Path(__file__).parents[2]


def test_it_reads_the_layers_that_it_names() -> None:
    try:
        rule = RULES[rule_reading("0.5-1")]
        assert rule.probe_layers([Check(0, 0.1)], 20) == tuple(range(10, 20))
        assert rule.probe_layers([Check(0, 0.1)], 5) == tuple(range(5)), "all of a shallow model's"
    finally:
        del RULES["ask 0.5-1"]


def test_a_shallow_model_reads_all_whatever_is_named_and_the_file_says_so(tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    more = ("--chunk-tokens", "64", "--depths", "0-1", "0.5-1", "--ratios", "0.3", "--out", str(out))
    subprocess.run([*COMMAND, *more], cwd=ROOT, check=True, capture_output=True, timeout=300)
    runs = [run for run in json.loads(out.read_text())["runs"] if run["kind"] == "all" and run["mode"] == "blend"]
    assert [run["rule"] for run in runs] == ["ask 0-1", "ask 0.5-1"]
    assert runs[0]["answer_kl"] == runs[1]["answer_kl"]
    assert 0 < runs[0]["charged_budget"] < 1
