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
    """Yield pages and rows of the closeness to full prefill, and of the answers."""
    musique, nq = quality("quality-musique"), quality("quality-nq-200")
    nq |= {key: run for key, run in quality("quality-nq-200-cacheblend").items() if key[0] == "cacheblend"}
    cells = {
        ("none", 1.0): ("full prefill", "everything", "not used", "0"),
        ("none", 0.0): ("full reuse", "nothing", "computed alone"),
        ("cacheblend", 0.15): ("CacheBlend's rule", "15 % of the reused tokens", "computed alone"),
        ("ask", 0.05): ("ragblend", "5 % of the reused tokens", "computed alone"),
    }
    for key, names in cells.items():
        kl = () if key == ("none", 1.0) else (f"{musique[key]['first_token_kl']:.3f}"[1:],)
        yield "README.md", row(*names, *kl, interval(nq[key], "token_f1", 3).replace("0.", "."))
    for key, run in nq.items():
        kl = "0" if key == ("none", 1.0) else interval(run, "first_token_kl", 3)
        contains = f"{run['contains_answer']:.3f}"
        name = f"`{key[0]}` {100 * key[1]:.0f} %" if key[0] != "none" else cells[key][0]
        loss = interval(run, "gold_loss", 2)
        yield "benchmarks/RESULTS.md", row(name, interval(run, "token_f1", 3), contains, loss, kl)


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


@pytest.mark.parametrize(("page", "expected"), [*speed(), *closeness(), *loading()])
def test_the_row_of_a_table_has_the_figures_of_the_result(page, expected):
    assert expected in (ROOT / page).read_text(encoding="utf-8").replace("*", "")
