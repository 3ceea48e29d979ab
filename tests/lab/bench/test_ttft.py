"""TTFT: every mode runs, the budgets are the formula's, and the ratios are those of the medians."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragblend.engine.report import BlendReport
from ragblend.lab.bench.common.configs import ModeAndRule, TtftConfig, expand_cases
from ragblend.lab.bench.common.shapes import SHAPES
from ragblend.lab.bench.ttft import BENCHMARK, TtftSample, run_ttft, summarize
from ragblend.lab.plots import plot_ttft

NUM_CHUNKS, CHUNK_TOKENS = 4, 20
SMALL: dict[str, Any] = {
    "shape": "tiny",
    "num_chunks": NUM_CHUNKS,
    "chunk_tokens": CHUNK_TOKENS,
    "question_tokens": 5,
    "repeats": 2,
    "num_prompts": 2,
}
RUN_KEYS = {
    "mode", "rule", "ratio", "charged_budget", "charged_budget_32", "ttft_s", "ttft_min_s", "ttft_max_s", "load_s",
    "fuse_s", "probe_s", "select_s", "select_share", "speedup", "limit", "peak_rss_bytes",
}  # fmt: skip


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_all_modes_run_side_by_side_on_the_same_prompts(tier):
    result = run_ttft(TtftConfig(**SMALL, tier=tier, rules=("cacheblend", "random")))
    assert [(run["mode"], run["rule"]) for run in result["runs"]] == [
        ("full", "none"), ("prefix", "none"), ("reuse", "none"), ("blend", "cacheblend"), ("blend", "random"),
    ]  # fmt: skip
    for run in result["runs"]:
        assert run["num_samples"] == 4
        assert 0 < run["ttft_min_s"] <= run["ttft_s"] <= run["ttft_max_s"]
        assert run["peak_rss_bytes"] > 0
        assert (run["load_s"] > 0) == (run["mode"] != "full")
    assert result["runs"][0]["speedup"] == 1.0


def test_charged_budgets_are_the_formulas():
    result = run_ttft(TtftConfig(**SMALL, ratio=0.25, rules=("cacheblend", "random")))
    full, prefix, reuse, blend, chosen = result["runs"]
    layers = SHAPES["tiny"].num_layers
    total = NUM_CHUNKS * CHUNK_TOKENS
    candidates, kept = total - CHUNK_TOKENS, total // 4  # the chunk behind its own prefix is exact
    assert (full["charged_budget"], full["limit"]) == (1.0, 1.0)
    assert prefix["charged_budget"] == pytest.approx(candidates / total)
    assert (reuse["charged_budget"], reuse["limit"]) == (0.0, None)
    assert chosen["charged_budget"] == pytest.approx(0.25)
    # All candidates run layer 0, and layer 1 as far as their keys and values; then a quarter goes on.
    kv_share = 64 * 64 / (64 * 64 * 3 + 3 * 64 * 128 + 2 * 64)
    assert blend["charged_budget"] == pytest.approx(
        (candidates + candidates * kv_share + (layers - 1) * kept) / (layers * total)
    )
    assert blend["limit"] == pytest.approx(1 / blend["charged_budget"])
    assert blend["num_recomputed_tokens"] == kept
    assert blend["charged_budget_32"] < blend["charged_budget"]


def sample(mode: Any, ttft_s: float, cpu_s: float = 1.0, charged_budget: float = 0.25) -> TtftSample:
    report = BlendReport(mode, "rule", 0.15, ttft_s=ttft_s, charged_budget=charged_budget)
    return report, cpu_s, int(ttft_s)


def test_speedups_are_ratios_of_medians():
    full, blend = summarize(
        {
            ModeAndRule("full", "none"): [sample("full", seconds, 9.0) for seconds in (8.0, 100.0, 6.0)],
            ModeAndRule("blend", "cacheblend"): [sample("blend", seconds, 3.0) for seconds in (1.0, 2.0, 50.0)],
        }
    )
    assert (full["ttft_s"], full["ttft_min_s"], full["ttft_max_s"], full["speedup"]) == (8.0, 6.0, 100.0, 1.0)
    assert (blend["ttft_s"], blend["speedup"], blend["speedup_cpu"], blend["limit"]) == (2.0, 4.0, 3.0, 4.0)
    assert (blend["peak_rss_bytes"], blend["num_samples"]) == (50, 3)


def test_without_full_prefill_there_is_no_speedup():
    (run,) = summarize({ModeAndRule("reuse", "none"): [sample("reuse", 1.0, charged_budget=0.0)]})
    assert (run["speedup"], run["speedup_cpu"], run["limit"]) == (None, None, None)


def test_blend_runs_once_per_rule_and_the_other_modes_once():
    config = TtftConfig(**SMALL, modes=("blend", "full", "full"), rules=("random", "auto", "random"))
    cases = expand_cases(config.modes, config.rules)
    assert [case.mode for case in cases] == ["blend", "blend", "full"]
    assert cases[0].rule == "random"


def test_json_has_the_documented_keys_and_a_plot_is_made_from_it(tmp_path):
    pytest.importorskip("matplotlib")
    lines: list[str] = []
    small = {**SMALL, "rules": ("cacheblend", "random"), "threads": 1, "repeats": 1, "num_prompts": 1, "tier": "disk"}
    found = BENCHMARK.run(TtftConfig(**small), plot=tmp_path / "new" / "ttft.png", echo=lines.append)
    assert json.loads(json.dumps(found)) == found
    assert (found["schema_version"], found["command"]) == (1, "bench ttft")
    assert {"cpu", "cores", "memory_gib", "gpu", "os", "python", "torch", "transformers", "ragblend", "threads"} <= set(
        found["hardware"]
    )
    assert found["hardware"]["threads"] == 1
    assert all(set(run) >= RUN_KEYS for run in found["runs"])
    assert any(line.startswith("cpu") for line in lines)
    assert sum(line.startswith(("full", "prefix", "reuse", "blend")) for line in lines) == 5
    assert (tmp_path / "new" / "ttft.png").read_bytes().startswith(b"\x89PNG")
    plot_ttft(json.loads(json.dumps(found)), tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 0
