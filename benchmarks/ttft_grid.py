"""TTFT over numbers and lengths of chunks.

    python -m benchmarks.ttft_grid --chunks 3,6,9,12 --chunk-tokens 256,512,1024

Each point is a run of its own of `ttft`. What the grid adds: speedup against what the charged budget allows, how times
grow with the prompt, and memory beside that of full prefill. Read `run_grid` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import typer

from ragblend.bench.common.configs import TtftConfig
from ragblend.bench.common.output import check_plot, on_terminal, present
from ragblend.bench.common.plots import drawn
from ragblend.bench.ttft import TtftResult, TtftRun, run_ttft
from ragblend.cli.options import split_counts, split_names
from ragblend.cli.printing import err, print_json
from ragblend.cli.session import quiet_libraries, use_threads
from ragblend.engine.report import Mode
from ragblend.errors import UsageError


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
        config = self.config.as_dict()
        for name in ("num_chunks", "chunk_tokens"):
            config[name] = sorted({run[name] for run in runs})
        return {
            "schema_version": 1,
            "command": "benchmarks.ttft_grid",
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
    if not num_chunks or not chunk_tokens:
        raise UsageError("no number of chunks or of their tokens is given; choose one or more, such as 3,6,9,12")
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
            config.prompt_tokens,
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
        f"{result.name} {config.dtype}, {config.question_tokens} question tokens, KV from "
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
    """Card and table to `echo`, a picture to `plot`; the JSON object."""
    check_plot(plot)
    result = run_grid(config, num_chunks, chunk_tokens, on_terminal())
    return present(result.as_dict(), table_lines(result), echo, plot, plot_grid)


def plot_grid(facts: Mapping[str, Any], path: Path) -> None:
    """Write a grid of `bench ttft`: speedup of blending over the prompt's length, and what takes how long."""
    with drawn(path, 12, 4.8) as figure:
        _draw(figure, facts)


def _draw(figure: Any, facts: Mapping[str, Any]) -> None:
    speedups, times = figure.subplots(1, 2)
    runs = sorted(facts["runs"], key=lambda run: int(run["prompt_tokens"]))
    blends = [run for run in runs if run["mode"] == "blend"]
    for case in dict.fromkeys((run["rule"], run["chunk_tokens"]) for run in blends):
        points = [run for run in blends if (run["rule"], run["chunk_tokens"]) == case and run["speedup"] is not None]
        places = [run["prompt_tokens"] for run in points]
        label = f"{case[0]}, chunks of {case[1]}"
        speedups.plot(places, [run["speedup"] for run in points], marker="o", ms=4, label=label)
    curves = {
        "full prefill": ("full", "ttft_s"),
        "blend, computing": ("blend", "fuse_s"),
        "loading": ("blend", "load_s"),
    }
    for label, (mode, name) in curves.items():
        points = [run for run in runs if run["mode"] == mode]
        places = [run["prompt_tokens"] for run in points]
        times.plot(places, [run[name] for run in points], "o", ms=4, label=label)
    times.set_xscale("log")
    times.set_yscale("log")
    times.set_ylabel("seconds")
    speedups.set_ylabel("full prefill / blend")
    speedups.set_ylim(bottom=0)
    for axes in (speedups, times):
        axes.set_xlabel("prompt tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    config, hardware = facts["config"], facts["hardware"]
    place = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
    figure.suptitle(f"{facts['model']} {config['dtype']}, {config['ratio']:.0%} recomputed, {place}", fontsize="medium")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(
    shape: str = "llama-200m",
    chunks: str = "3,6,9,12",
    chunk_tokens: str = "256,512,1024",
    question_tokens: int = 32,
    ratio: float = 0.15,
    modes: str = "full,prefix,reuse,blend",
    rules: str = "cacheblend",
    dtype: str = "float32",
    threads: int | None = None,
    repeats: int = 5,
    tier: str = "memory",
    seed: int = 0,
    plot: Path | None = None,
) -> None:
    """Tables on stderr, one line of JSON on stdout."""
    use_threads(threads)
    quiet_libraries()
    config = TtftConfig(
        shape=shape,
        question_tokens=question_tokens,
        ratio=ratio,
        modes=tuple(cast(Mode, mode) for mode in split_names(modes)),
        rules=tuple(split_names(rules)),
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        tier=tier,
        seed=seed,
    )
    facts = bench_grid(config, split_counts(chunks), split_counts(chunk_tokens), plot, lambda line: err.print(line))
    print_json(facts)


if __name__ == "__main__":
    typer.run(main)
