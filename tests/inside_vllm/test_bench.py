"""Benchmarks on vLLM, each run once on a tiny shape: every mode is served the way it says, with the envelope's keys."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu, load, throughput
from benchmarks.ingest_vllm import bench_ingest_vllm
from ragblend.lab.bench import ttft
from ragblend.lab.bench.common.configs import TtftConfig
from ragblend.options import MODES

PREFIX, CHUNK, BLOCK = 16, 128, 128  # tokens of the system text and of a chunk, and of vLLM's blocks on a CPU


def test_ttft_runs_every_mode_on_vllm():
    config = TtftConfig(
        shape="llama-1m", num_chunks=3, chunk_tokens=CHUNK, question_tokens=8, ratio=0.25, modes=MODES,
        rules=("cacheblend", "random"), threads=1, repeats=1, num_prompts=2, tier="disk",
        backend="vllm",
    )  # fmt: skip
    found = ttft.BENCHMARK.run(config, echo=lambda line: None)
    assert json.loads(json.dumps(found)) == found
    assert (found["command"], found["model"], found["config"]["backend"]) == ("bench ttft", "llama-1m", "vllm")
    assert found["hardware"]["vllm"]
    assert found["prompt_tokens"] == PREFIX + 3 * CHUNK + 8
    full, prefix, reuse, cacheblend, chosen = found["runs"]
    assert [run["mode"] for run in found["runs"]] == ["full", "prefix", "reuse", "blend", "blend"]
    assert full["charged_budget"] == 1.0
    # The first chunk was first before, the others were not; vLLM caches whole blocks.
    cached = (PREFIX + CHUNK) // BLOCK * BLOCK
    assert prefix["charged_budget"] == pytest.approx(1 - cached / found["prompt_tokens"])
    assert 0 < reuse["charged_budget"] < 1 / 4  # layer 0's keys and values of four layers: computed, not read
    assert reuse["num_recomputed_tokens"] == 0
    assert (cacheblend["rule"], chosen["rule"]) == ("cacheblend", "random")
    assert cacheblend["num_recomputed_tokens"] == chosen["num_recomputed_tokens"] == 3 * CHUNK // 4
    assert reuse["load_s"] > 0


def test_the_gpu_benchmark_blends_with_weights_that_vllm_draws():
    runs = list(gpu.vllm(gpu.CPU, 0, is_compiled=False))
    cases = ("none", "none", "ask", "cacheblend")
    assert [(run["tokens"], run["rule"]) for run in runs] == [(tokens, rule) for tokens in (256, 512) for rule in cases]
    for full, reuse, *blends in (runs[:4], runs[4:]):
        assert (full["mode"], full["speedup"], reuse["mode"]) == ("full", 1.0, "reuse")
        assert reuse["load_s"] > 0
        shares = [run["num_recomputed_tokens"] / full["tokens"] for run in blends]
        assert shares == pytest.approx([0.05, 0.15], abs=0.005)


def test_loading_in_vllm_comes_from_where_each_case_says(tmp_path):
    """The benchmark itself stops where a chunk came from elsewhere."""
    lines: list[str] = []
    config = load.LoadConfig(
        shape="llama-1m", num_chunks=3, chunk_tokens=CHUNK, question_tokens=8, repeats=1, store_factor=2,
        slowdowns=(0.5, 3.0), store=tmp_path / "kv", backend="vllm",
    )  # fmt: skip
    found = load.BENCHMARK.run(config, echo=lines.append)
    assert json.loads(json.dumps(found)) == found
    assert str(tmp_path) not in json.dumps(found)
    assert (found["command"], found["config"]["backend"]) == ("bench load", "vllm")
    assert found["hardware"]["vllm"]
    assert found["load_bytes"] == found["memory_bytes"] == 3 * CHUNK * 2 * 4 * 2 * 32 * 4
    runs = {(run["source"], run["pipeline"]): run for run in found["runs"] if run["load_over_recompute"] < 3}
    assert set(runs) == {(source, on) for source in ("disk", "throttled") for on in (True, False)} | {("memory", True)}
    held, read = runs["memory", True], runs["disk", True]
    assert held["charged_budget"] == runs["disk", False]["charged_budget"] < read["charged_budget"]
    slow = [run for run in found["runs"] if run["bytes_per_s"] is not None]
    assert len(slow) >= 4
    for run in slow:
        assert run["ttft_s"] >= found["load_bytes"] / run["bytes_per_s"]
    for timeline in found["timelines"]:
        assert len(timeline["load"]) == len(timeline["fuse"]) == 4


def test_throughput_serves_every_mode_at_every_rate():
    lines: list[str] = []
    config = throughput.ThroughputConfig(
        shape="llama-1m", num_chunks=2, chunk_tokens=CHUNK, pool=4, question_tokens=8, output_tokens=3, num_requests=3,
        rates=(5.0, 1e6), bound_s=1e6, threads=1,
    )  # fmt: skip
    found = throughput.BENCHMARK.run(config, echo=lines.append)
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "bench throughput"
    assert [(run["rate"], run["mode"]) for run in found["runs"]] == [
        (rate, mode) for rate in (5.0, 1e6) for mode in ("full", "prefix", "blend")
    ]
    cached = {run["mode"]: run["num_cached_tokens"] for run in found["runs"] if run["rate"] == 5.0}
    assert cached["full"] == 0
    assert BLOCK <= cached["prefix"] < cached["blend"]
    assert all(run["num_requests"] == 3 for run in found["runs"])
    for capacity in found["capacities"]:
        assert (capacity["max_rate"], capacity["at_least"]) == (1e6, True)
        assert capacity["idle_ttft_s"] > 0
    assert sum(line.startswith(("full", "prefix", "blend")) for line in lines) == 3


def test_ingestion_and_prefill_of_the_same_chunks_side_by_side(tmp_path):
    lines: list[str] = []
    found = bench_ingest_vllm(
        shape="llama-1m", chunks=3, chunk_tokens=CHUNK, threads=1, repeats=2, store=tmp_path / "kv", echo=lines.append
    )
    assert json.loads(json.dumps(found)) == found
    assert str(tmp_path) not in json.dumps(found)
    assert (found["command"], found["model"], found["config"]["backend"]) == (
        "benchmarks.ingest_vllm",
        "llama-1m",
        "vllm",
    )
    prefill, ingest = found["runs"]
    assert (prefill["mode"], ingest["mode"]) == ("prefill", "ingest")
    for run in (prefill, ingest):
        assert (run["chunks"], run["tokens"]) == (3, 3 * CHUNK)
        assert run["tokens_per_s"] == pytest.approx(run["tokens"] / run["seconds"])
    ratios = [each["prefill"]["s"] / each["ingest"]["s"] for each in found["rounds"]]
    assert found["ingest_over_prefill"] == pytest.approx(sum(ratios) / 2)
    assert len(lines) == 2 + 3
    assert not list((tmp_path / "kv").rglob("*.safetensors"))  # every round starts from nothing stored
