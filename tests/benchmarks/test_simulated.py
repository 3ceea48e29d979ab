"""The simulation beside two real replicas: the figures of docs/simulate.md, and that the code still gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import NUM_REPLICAS, SimulatedConfig, deployment_of, trace
from ragblend.bench.throughput import arrival_times
from ragblend.bench.traffic.generate import Traffic
from ragblend.bench.traffic.simulation import simulate
from ragblend.engine.tuning.pipeline import machine_profile_from

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "data/results/simulate.json").read_text())
    return found


@pytest.fixture(scope="module")
def config(kept: dict[str, Any]) -> SimulatedConfig:
    return SimulatedConfig(**kept["config"] | {"traffic": Traffic(**kept["config"]["traffic"])})


def test_the_kept_predictions_are_what_the_simulation_gives(kept: dict[str, Any], config: SimulatedConfig) -> None:
    demands, _ = trace(config)
    for each in kept["runs"]:
        curve = tuple((count, seconds) for count, seconds in each["decode_s"])
        deployment = deployment_of(machine_profile_from(each["profile"]), curve, each["mode"])
        moments = arrival_times(each["rate"], config.num_requests, config.seed)
        found = simulate(demands, moments, deployment, NUM_REPLICAS).as_dict()
        assert {name: found[name] for name in each["simulated"]} == pytest.approx(each["simulated"])


def test_what_is_sent_is_what_is_simulated(config: SimulatedConfig) -> None:
    demands, prompts = trace(config)
    assert len(prompts) == len(demands) == config.num_requests
    for demand, prompt in zip(demands, prompts, strict=True):
        assert prompt.num_tokens == demand.num_tokens
        assert [segment.num_tokens for segment in prompt.chunk_segments] == [each.num_tokens for each in demand.chunks]
        assert [segment.start for segment in prompt.segments][1:] == [each.end for each in prompt.segments][:-1]
    known: dict[int, tuple[int, ...]] = {}
    for demand, prompt in zip(demands, prompts, strict=True):
        for chunk, segment in zip(demand.chunks, prompt.chunk_segments, strict=True):
            assert known.setdefault(chunk.key, segment.token_ids) == segment.token_ids


def test_the_table_is_that_of_the_results(kept: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (full|prefix|blend) \| (.+) \|$", (ROOT / "docs/simulate.md").read_text(), re.MULTILINE)
    assert [(mode, *cells.split(" | ")) for mode, cells in rows] == [row(each) for each in kept["runs"]]


def row(run: dict[str, Any]) -> tuple[str, ...]:
    real, found, off = run["measured"], run["simulated"], run["off"]
    served = f"{real['throughput']:.2f}, {found['throughput']:.2f}"
    median, late = (f"{real[name]:.2f}, {found[name]:.2f}" for name in ("ttft_s", "ttft_p95_s"))
    apart = f"{off['throughput']:+.0%}, {off['ttft_s']:+.0%}"
    return (run["mode"], f"{run['rate']:.2f}", served, median, late, apart)
