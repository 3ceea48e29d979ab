"""The grid: every pair of numbers and lengths once, each beside its own full prefill, and powers that are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ttft_grid import bench_grid, growth, power, run_grid, table_lines
from ragblend.bench.common.configs import TtftConfig
from ragblend.errors import UsageError

SMALL: dict[str, Any] = {
    "shape": "tiny", "question_tokens": 5, "repeats": 1, "modes": ("full", "reuse", "blend"), "rules": ("first_k",),
}  # fmt: skip


def facts(
    chunks: tuple[int, ...] = (2, 3),
    chunk_tokens: tuple[int, ...] = (10, 20),
    plot: Path | None = None,
    echo: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> dict[str, Any]:
    config = TtftConfig(**{**SMALL, "modes": ("full", "blend"), **changes})
    return bench_grid(config, chunks, chunk_tokens, plot, echo)


def test_every_pair_is_measured_beside_its_own_full_prefill() -> None:
    result = run_grid(TtftConfig(**SMALL), [2, 4], [10, 30])
    places = [(run.num_chunks, run.chunk_tokens, run.run.mode) for run in result.runs]
    assert places == [
        (count, tokens, mode) for tokens in (10, 30) for count in (2, 4) for mode in ("full", "reuse", "blend")
    ]
    for run in result.runs:
        assert run.prompt_tokens == 16 + run.num_chunks * run.chunk_tokens + 5
        if run.run.mode == "full":
            assert (run.run.speedup, run.efficiency, run.rss_over_full) == (1.0, 1.0, 1.0)
    assert [(each.mode, each.load_power is None) for each in result.growth] == [
        ("full", True), ("reuse", False), ("blend", False)
    ]  # fmt: skip
    assert len(table_lines(result)) == 2 + 12 + 3


def test_efficiency_is_the_speedup_over_what_the_charged_budget_allows() -> None:
    full, _, blend = run_grid(TtftConfig(**SMALL), [2], [10]).runs
    assert blend.run.speedup is not None
    assert blend.efficiency == pytest.approx(blend.run.speedup * blend.run.charged_budget)
    assert blend.rss_over_full == blend.run.peak_rss_bytes / full.run.peak_rss_bytes
    assert growth([full, blend]) == ()


def test_growth_is_read_from_each_cases_own_times() -> None:
    runs = []
    for tokens in (100, 200, 400):
        (point,) = run_grid(TtftConfig(**{**SMALL, "modes": ("reuse",)}), [2], [10]).runs
        times = {"ttft_s": tokens**1.5, "fuse_s": 3.0 * tokens, "load_s": tokens / 7}
        runs.append(replace(point, prompt_tokens=tokens, run=replace(point.run, **times)))
    (found,) = growth(runs)
    assert (found.ttft_power, found.fuse_power, found.load_power) == pytest.approx((1.5, 1.0, 1.0))


@given(st.floats(0.2, 3), st.floats(1e-6, 1e3), st.lists(st.integers(2, 10**5), min_size=2, max_size=8, unique=True))
def test_a_power_law_is_found_again(exponent: float, factor: float, tokens: list[int]) -> None:
    assert power(tokens, [factor * count**exponent for count in tokens]) == pytest.approx(exponent, abs=1e-4)


def test_the_json_object_has_flat_runs_and_no_path(tmp_path: Path) -> None:
    lines: list[str] = []
    found = facts(tier="disk", store=tmp_path / "kv", echo=lines.append)
    assert json.loads(json.dumps(found)) == found
    assert (found["command"], found["config"]["num_chunks"], found["config"]["chunk_tokens"]) == (
        "benchmarks.ttft_grid", [2, 3], [10, 20]
    )  # fmt: skip
    assert len(found["runs"]) == 8
    keys = {"num_chunks", "chunk_tokens", "prompt_tokens", "mode", "ttft_s", "speedup", "efficiency", "rss_over_full"}
    assert all(set(run) >= keys for run in found["runs"])
    assert str(tmp_path) not in json.dumps(found)
    assert any("grows with tokens" in line for line in lines)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts(chunk_tokens=(10,), plot=tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("change", [{"chunks": ()}, {"chunks": (2, 0)}, {"chunk_tokens": (10, -1)}])
def test_a_point_out_of_range_is_refused_before_anything_is_run(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.ttft_grid.run_ttft", lambda *_: pytest.fail("measured first"))
    with pytest.raises(UsageError):
        facts(**change)


def test_without_full_prefill_there_is_nothing_to_stand_beside() -> None:
    result = run_grid(TtftConfig(**{**SMALL, "modes": ("blend",)}), [2], [10])
    (point,) = result.runs
    assert (point.efficiency, point.rss_over_full) == (None, None)
