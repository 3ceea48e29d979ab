"""Rows of the pages' tables that repeat a stored result have its figures: a new measurement fails until they follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = ("ttft-ask-5-llama-200m-fp32", "ttft-ask-5-vllm-llama-200m-fp32")
RUNS = (("full", "none"), ("prefix", "none"), ("reuse", "none"), ("blend", "ask"), ("blend", "cacheblend"))


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "data/results" / f"{name}.json").read_text(encoding="utf-8"))


def times(name: str) -> dict[tuple[str, str], str]:
    """Return {(mode, rule): "seconds, speedup"}; full prefill has no speedup."""
    cells = {}
    for run in result(name)["runs"]:
        speedup = f", {run['speedup']:.{2 if run['speedup'] < 2 else 1}f}x" if run["mode"] != "full" else ""
        cells[run["mode"], run["rule"]] = f"{run['ttft_s']:.2f} s{speedup}"
    return cells


def quality(name: str) -> dict[tuple[str, float], dict[str, Any]]:
    """Return {(rule, ratio): run} over all kinds of questions. Full prefill and full reuse have rule "none"."""
    return {(run["rule"], run["ratio"]): run for run in result(name)["runs"] if run["kind"] == "all"}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def interval(run: dict[str, Any], measure: str, digits: int) -> str:
    return f"{run[measure]:.{digits}f} ({run[f'{measure}_low']:.{digits}f} to {run[f'{measure}_high']:.{digits}f})"


def speed() -> Iterator[tuple[str, str]]:
    """Yield pages and rows of the time to first token."""
    both = [times(name) for name in ENGINES]
    labels = {
        "README.md": ("ragblend, 5 %, the default", "CacheBlend's rule, 5 %"),
        "docs/performance.md": ("blend, `ask`, 5 %", "blend, `cacheblend`, 5 %"),
    }
    for page, names in labels.items():
        for name, run in zip(("full prefill", "prefix caching", "full reuse", *names), RUNS, strict=True):
            yield page, row(name, *(cells[run] for cells in both))
    names = ("`llama-200m` (197 M parameters), transformers", "`llama-200m`, vLLM", "SmolLM2-135M, transformers")
    for name, cells in zip(names, [*both, times("ttft-ask-5-smollm2-fp32")], strict=True):
        yield "benchmarks/RESULTS.md", row(name, *(cells[RUNS[index]] for index in (0, 3, 4, 2)))


def closeness() -> Iterator[tuple[str, str]]:
    """Yield pages and rows of SmolLM2's closeness to full prefill, and of its answers."""
    for key, run in quality("quality-nq-200").items():
        kl = "0" if key == ("none", 1.0) else interval(run, "first_token_kl", 3)
        contains = f"{run['contains_answer']:.3f}"
        modes = {1.0: "full prefill", 0.0: "full reuse"}
        name = f"`{key[0]}` {100 * key[1]:.0f} %" if key[0] != "none" else modes[key[1]]
        loss = interval(run, "gold_loss", 2)
        yield "benchmarks/RESULTS.md", row(name, interval(run, "token_f1", 3), contains, loss, kl)


def study() -> Iterator[tuple[str, str]]:
    """Yield pages and rows of the 1.5 B model: its closeness to full prefill, its answers and its time."""
    runs = {}
    for run in result("quality-1-5b")["runs"]:
        runs[run["kind"], run["rule"], run["ratio"], run["context"]] = run
    rows = {
        ("none", 1.0, "none"): ("full prefill", "everything", "not used"),
        ("none", 0.0, "none"): ("full reuse", "nothing", "computed alone"),
        ("cacheblend", 0.15, "none"): ("CacheBlend's rule", "15 %", "computed alone"),
        ("ask", 0.05, "neutral"): ("ragblend at 5 %", "5 %", "after a neutral text"),
        ("ask", 0.3, "neutral"): ("ragblend", "30 %, measured", "after a neutral text"),
    }
    for key, names in rows.items():
        musique, nq = (runs[(task, *key)] for task in ("musique", "nq"))
        kl = [f"{each['first_token_kl']:.3f}" if key[1] < 1 else "0" for each in (musique, nq)]
        f1 = [f"{each['token_f1']:.2f}" for each in (musique, nq)]
        yield "README.md", row(*names, *kl, *f1, f"{musique['ttft_s']:.1f} s")
    for rule, ratio, context in dict.fromkeys(key[1:] for key in runs):
        modes = {1.0: "full prefill", 0.0: "full reuse"}
        name = f"`{rule}` {100 * ratio:.0f} %" if rule != "none" else modes[ratio]
        cells = []
        for task in ("musique", "nq"):
            run = runs[task, rule, ratio, context]
            kl = ("0", "0") if ratio == 1 else (interval(run, "first_token_kl", 3), f"{run['answer_kl']:.3f}")
            cells += [*kl, interval(run, "token_f1", 2)]
        yield "benchmarks/RESULTS.md", row(name, context if ratio < 1 else "-", *cells)


def loading() -> Iterator[tuple[str, str]]:
    """Yield pages and rows of loading from slow storage."""
    runs = [run for run in result("base-load-ask")["runs"] if run["source"] != "memory"]
    runs.sort(key=lambda run: run["load_over_recompute"])
    for page, name, has_pipeline in (
        ("docs/performance.md", "`ask`: TTFT / TTFT from memory", True),
        ("benchmarks/RESULTS.md", "TTFT / TTFT from memory", True),
        ("benchmarks/RESULTS.md", "without pipeline", False),
    ):
        yield page, row(name, *(f"{run['over_memory']:.2f}" for run in runs if run["pipeline"] is has_pipeline))


@pytest.mark.parametrize(("page", "expected"), [*speed(), *closeness(), *study(), *loading()])
def test_the_row_of_a_table_has_the_figures_of_the_result(page, expected):
    assert expected in (ROOT / page).read_text(encoding="utf-8").replace("*", "")
