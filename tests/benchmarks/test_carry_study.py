"""`benchmarks.carry` as a reader runs it, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "benchmarks.carry", "--model", "demo", "--data", "demo", "--questions", "2")
ROOT = Path(__file__).parents[2]


def test_each_value_of_a_number_is_measured_in_turn_and_they_differ(tmp_path: Path) -> None:
    out = tmp_path / "carry.json"
    more = ("--chunk-tokens", "64", "--shares", "0.8", "--ratios", "0.3", "--vary", "NOISE", "0.1", "10")
    subprocess.run([*COMMAND, *more, "--out", str(out)], cwd=ROOT, check=True, capture_output=True, timeout=300)
    found = json.loads(out.read_text())
    assert list(found) == ["NOISE = 0.1", "NOISE = 10"]
    means = {
        name: {run["rule"]: run["answer_kl"] for run in result["runs"] if run["kind"] == "all"}
        for name, result in found.items()
    }
    little, much = means.values()
    assert little["ask carry 0.8"] != much["ask carry 0.8"]
    assert little["cacheblend"] == much["cacheblend"], "it carries nothing"


def test_a_number_that_there_is_not_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run([*COMMAND, "--vary", "NOSE", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "name a number of ragblend.engine.fusion.carry" in ended.stderr
