"""`python -m benchmarks.gpu` on a CPU: all parts run, and one that fails or takes too long stops no other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CPU, FAMILIES, PARTS, Part


@pytest.mark.timeout(1500)
def test_the_command_writes_every_part_and_says_why_one_failed(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tokens", "256", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, cwd=Path(gpu.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert "vllm is not installed" in parts.pop("vllm")["error"]
    assert not [name for name, part in parts.items() if "error" in part], done.stdout
    exactness = parts["exactness"]["found"]
    assert {each["family"] for each in exactness} == set(FAMILIES)
    for each in exactness:
        assert each["ratio_one_error"] < {"float32": 1e-5, "bfloat16": 5e-2, "float16": 2e-2}[each["dtype"]]
    modes = [(run["mode"], run["rule"]) for run in parts["ttft"]["found"]]
    assert modes == [("full", "none"), ("prefix", "none"), ("reuse", "none"), ("blend", "ask"), ("blend", "cacheblend")]
    per_layer = {each["case"]: each["per_layer"] for each in parts["launches"]["found"]}
    assert per_layer["full"] < per_layer["reuse"] < per_layer["ask 5%"]
    assert "full" in done.stdout


def test_the_parts_take_at_most_eight_minutes():
    assert sum(part.limit_s for part in PARTS.values()) <= 480


def test_a_part_ends_at_its_limit(monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {"exactness": Part(gpu.exactness, 0.1)})
    found = gpu.run_part("exactness", CPU)
    assert "time limit 2 s" in found["error"]
