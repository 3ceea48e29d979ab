"""The benchmark of requests beside full prefill: a small run on each of its machines."""

from __future__ import annotations

import json

import pytest

from benchmarks import never_slower
from ragblend.lab.bench.common.shapes import find_shape
from ragblend.lab.bench.common.workloads import save_checkpoint


@pytest.mark.parametrize("machine", never_slower.MACHINES)
def test_each_machine_is_measured_and_its_requests_say_why(machine, tmp_path):
    model = tmp_path / "model"
    save_checkpoint(find_shape("llama-1m"), model)
    (run,) = never_slower.measure_machine("transformers", machine, model, [600], 2, slow_bytes_per_s=1e5)
    assert (run["machine"], run["tokens"], len(run["modes"])) == (machine, 600, 2)
    assert run["request_over_full"] > 0
    assert "full prefill" in run["decision"]
    assert 0 < run["measured_s"] < 60
    if machine == "slow-disk":  # 600 tokens load in 6 s
        assert run["modes"] == ["full", "full"]
    json.dumps(run)
