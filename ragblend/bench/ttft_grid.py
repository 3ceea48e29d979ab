"""TTFT over numbers and lengths of chunks: `bench ttft --chunks 3,6,9,12 --chunk-tokens 256,512,1024`.

Each point is a run of its own of `ttft`. What the grid adds: speedup against what the charged budget allows, how times
grow with the prompt, and memory beside that of full prefill. Read `run_grid` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.bench.output import check_plot, on_terminal, present
from ragblend.bench.plots import plot_grid
from ragblend.bench.ttft import SCHEMA_VERSION, TtftConfig, TtftResult, TtftRun, run_ttft
from ragblend.bench.workloads import find_dtype
from ragblend.engine.kv import dtype_name


@dataclass(frozen=True, slots=True)
class GridRun:
    """One case at one point. `run` is that of `bench ttft`."""

    num_chunks: int
    chunk_tokens: int
    prompt_tokens: int
    run: TtftRun
    efficiency: float | None  # speedup over 1 / charged budget
    rss_over_full: float | None  # peak memory over that of full prefill

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        own = {name: getattr(self, name) for name in ("num_chunks", "chunk_tokens", "prompt_tokens")}
        return {**own, **asdict(self.run), "efficiency": self.efficiency, "rss_over_full": self.rss_over_full}


@dataclass(frozen=True, slots=True)
class Growth:
    """How one case's times grow: seconds go with prompt tokens to that power, by a straight line through the logs."""

    mode: str
    rule: str
    ttft_power: float
    fuse_power: float
    load_power: float | None  # None where nothing is loaded


@dataclass(frozen=True, slots=True)
class GridResult:
    """Every point's runs, and what they were run on."""

    config: TtftConfig  # of the first point
    name: str
    hardware: dict[str, Any]
    runs: tuple[GridRun, ...]
    growth: tuple[Growth, ...]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the command line."""
        runs = [run.as_dict() for run in self.runs]
        config = asdict(self.config) | {"modes": [*self.config.modes], "rules": [*self.config.rules]}
        config |= {"dtype": dtype_name(find_dtype(self.config.dtype))}
        for name in ("num_chunks", "chunk_tokens"):
            config[name] = sorted({run[name] for run in runs})
        config.pop("store")  # a path of this machine says nothing elsewhere
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "bench ttft",
            "hardware": self.hardware,
            "config": config,
            "model": self.name,
            "runs": runs,
            "growth": [asdict(each) for each in self.growth],
        }


def run_grid(
    config: TtftConfig,
    num_chunks: Sequence[int],
    chunk_tokens: Sequence[int],
    progress: Callable[[str], None] | None = None,
) -> GridResult:
    """Measure `config` at every pair of `num_chunks` and `chunk_tokens`, all checked before the first is run."""
    tell = progress or (lambda line: None)
    points = [
        replace(config, num_chunks=count, chunk_tokens=tokens) for tokens, count in product(chunk_tokens, num_chunks)
    ]
    results = []
    for number, point in enumerate(points, start=1):
        tell(f"point {number} of {len(points)}: {point.num_chunks} chunks of {point.chunk_tokens} tokens")
        results.append(run_ttft(point, progress))
    runs = tuple(run for result in results for run in grid_runs(result))
    return GridResult(points[0], results[0].name, results[0].hardware, runs, growth(runs))


def grid_runs(result: TtftResult) -> list[GridRun]:
    """One point's runs, each beside full prefill."""
    full = next((run for run in result.runs if run.mode == "full"), None)
    config = result.config
    return [
        GridRun(
            config.num_chunks,
            config.chunk_tokens,
            result.prompt_tokens,
            run,
            run.speedup / run.limit if run.speedup is not None and run.limit is not None else None,
            run.peak_rss_bytes / full.peak_rss_bytes if full is not None else None,
        )
        for run in result.runs
    ]


def growth(runs: Sequence[GridRun]) -> tuple[Growth, ...]:
    """Every case's powers, where the grid has prompts of several lengths."""
    if len({run.prompt_tokens for run in runs}) < 2:
        return ()
    cases = dict.fromkeys((run.run.mode, run.run.rule) for run in runs)
    return tuple(_growth_of([run for run in runs if (run.run.mode, run.run.rule) == case]) for case in cases)


def power(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """The p of seconds = c x tokens ** p that fits best.

    >>> round(power([10, 20, 40], [3, 6, 12]), 6), round(power([10, 20, 40], [1, 4, 16]), 6)
    (1.0, 2.0)
    """
    return float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])


def _growth_of(runs: Sequence[GridRun]) -> Growth:
    tokens = [run.prompt_tokens for run in runs]
    loads = [run.run.load_s for run in runs]
    return Growth(
        runs[0].run.mode,
        runs[0].run.rule,
        power(tokens, [run.run.ttft_s for run in runs]),
        power(tokens, [run.run.fuse_s for run in runs]),
        power(tokens, loads) if min(loads) > 0 else None,
    )


def table_lines(result: GridResult) -> list[str]:
    """A line per point and case, and how the times grow."""
    config = result.config
    lines = [
        f"{result.name} {dtype_name(find_dtype(config.dtype))}, {config.question_tokens} question tokens, KV from "
        f"{config.tier}; medians of {result.runs[0].run.num_samples}",
        f"{'chunks':>6}{'x':>5}{'prompt':>8} {'mode':<7}{'rule':<19}{'charged':>8}{'TTFT s':>9}{'load s':>8}"
        f"{'fuse s':>9}{'speedup':>8}{'limit':>7}{'eff.':>6}{'RSS':>6}",
    ]
    for point in result.runs:
        run = point.run
        lines.append(
            f"{point.num_chunks:>6}{point.chunk_tokens:>5}{point.prompt_tokens:>8} {run.mode:<7}{run.rule:<19}"
            f"{run.charged_budget:>8.3f}{run.ttft_s:>9.3f}{run.load_s:>8.3f}{run.fuse_s:>9.3f}"
            f"{_number(run.speedup):>8}{_number(run.limit):>7}{_number(point.efficiency):>6}"
            f"{_number(point.rss_over_full):>6}"
        )
    for each in result.growth:
        load = "" if each.load_power is None else f", loading with tokens^{each.load_power:.2f}"
        name = each.mode if each.rule == "none" else f"{each.mode} {each.rule}"
        lines.append(
            f"{name}: TTFT grows with tokens^{each.ttft_power:.2f}, computing with tokens^{each.fuse_power:.2f}{load}"
        )
    return lines


def bench_grid(
    config: TtftConfig,
    num_chunks: Sequence[int],
    chunk_tokens: Sequence[int],
    plot: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """`ragblend bench ttft` over several points: card and table to `echo`, a picture to `plot`; the JSON object."""
    check_plot(plot)
    result = run_grid(config, num_chunks, chunk_tokens, on_terminal())
    return present(result.as_dict(), table_lines(result), echo, plot, plot_grid)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
