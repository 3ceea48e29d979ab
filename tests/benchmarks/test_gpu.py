"""`python -m benchmarks.gpu` on a CPU: all parts run, one that fails stops no other, long prompts may be skipped."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import BUDGET_S, CPU, FAMILIES, GPU, PARTS, Part, limit_s
from benchmarks.gpu_profile import CASES, Sizes
from benchmarks.operations import kernels
from ragblend.errors import RagblendError


@pytest.mark.timeout(1500)
def test_the_command_writes_every_part_and_says_why_one_failed(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tokens", "256", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, cwd=Path(gpu.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(PARTS)
    for name in [name for name in parts if name.startswith("vllm")]:
        assert "vllm is not installed" in parts.pop(name)["error"]
    assert not [name for name, part in parts.items() if "error" in part], done.stdout
    exactness = parts["exactness"]["found"]
    assert {each["family"] for each in exactness} == set(FAMILIES)
    for each in exactness:
        assert each["ratio_one_error"] < {"float32": 1e-5, "bfloat16": 5e-2, "float16": 2e-2}[each["dtype"]]
    runs = parts["ttft"]["found"]
    assert [(run["mode"], run["rule"]) for run in runs] == [
        ("full", "none"), ("reuse", "none"), ("blend", "ask"), ("blend", "cacheblend"),
    ]  # fmt: skip
    for run in runs:
        assert run["full_s"] == runs[0]["ttft_s"]
        assert run["full_tokens_per_s"] == pytest.approx((16 + 256 + 16) / run["full_s"])
        assert run["speedup"] == pytest.approx(run["full_s"] / run["ttft_s"])
    profiled = {(each["case"], each["kernels"]): each for each in parts["profile"]["found"]}
    choices = (True, False) if kernels is not None else (False,)
    assert set(profiled) == set(product(map(str, CASES), choices))
    for choice in choices:
        per_layer = [profiled[case, choice]["per_layer"] for case in ("full", "reuse", "ask 5%")]
        assert per_layer == sorted(per_layer)
    assert [(each["rows"], each["kernels"]) for each in parts["layers"]["found"]] == [(16, False), (29, False)]
    assert "full tokens/s" in done.stdout


def test_the_parts_and_the_commands_start_take_at_most_eight_minutes():
    assert sum(part.share_s for part in PARTS.values()) == BUDGET_S <= 480 - 30


def test_a_part_has_its_share_of_the_time_that_earlier_ones_left():
    names = list(PARTS)
    assert limit_s(names, BUDGET_S) == PARTS[names[0]].share_s
    assert limit_s(names[-2:], 100.0) + limit_s(names[-1:], 100.0 - limit_s(names[-2:], 100.0)) == pytest.approx(100.0)


def test_lengths_for_which_no_time_is_left_are_skipped():
    lengths = replace(GPU, end_s=time.monotonic() + 0.5).lengths()
    assert (next(lengths), next(lengths)) == (2048, 4096)
    time.sleep(0.3)  # what 4,096 tokens take
    with pytest.raises(RagblendError, match="skipped 8,192, 16,384, 32,768 tokens"):
        next(lengths)


def test_a_part_that_fails_keeps_its_lines(tmp_path, monkeypatch):
    def fails(sizes: Sizes) -> Iterator[dict[str, object]]:
        yield {"tokens": sizes.tokens[0]}
        raise ValueError("no more memory")

    monkeypatch.setattr(gpu, "PARTS", {"copies": Part(fails, 1.0)})
    gpu._run_part("copies", CPU, tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["found"] == [{"tokens": 256}]
    assert "no more memory" in written["error"]


def test_a_part_ends_at_its_limit_and_none_starts_without_time():
    assert "time limit 2 s" in gpu.run_part("exactness", CPU, 2.0)["error"]
    assert gpu.run_part("exactness", CPU, 0.0)["error"] == "skipped, because no time is left"
