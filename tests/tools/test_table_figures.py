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
    runs = quality("quality-musique")
    keys = ("ask", 0.05), ("cacheblend", 0.15), ("none", 0.0)
    ours, paper, reuse = (f"{runs[key]['first_token_kl']:.3f}".removeprefix("0") for key in keys)
    yield "README.md", f"MuSiQue: KL {ours}; CacheBlend's rule at 15 % {paper}, full reuse {reuse}"
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
        ("none", 1.0, "none"): ("full prefill", "everything"),
        ("none", 0.0, "none"): ("full reuse", "nothing"),
        ("cacheblend", 0.15, "none"): ("CacheBlend's rule", "15 %"),
        ("ask", 0.05, "none"): ("ragblend at 5 %", "5 %"),
        ("ask", 0.3, "none"): ("ragblend", "30 %, measured"),
    }
    times = {(run["rule"], run["ratio"]): f"{run['ttft_s']:.1f} s" for run in result("times-1-5b")["runs"]}
    for key, names in rows.items():
        musique, nq = (runs[(task, *key)] for task in ("musique", "nq"))
        kl = [f"{each['first_token_kl']:.3f}" if key[1] < 1 else "0" for each in (musique, nq)]
        f1 = [f"{each['token_f1']:.2f}" for each in (musique, nq)]
        yield "README.md", row(*names, *kl, *f1, times[key[:2]])
    for rule, ratio, context in dict.fromkeys(key[1:] for key in runs):
        modes = {1.0: "full prefill", 0.0: "full reuse"}
        name = f"`{rule}` {100 * ratio:.0f} %" if rule != "none" else modes[ratio]
        cells = []
        for task in ("musique", "nq"):
            run = runs[task, rule, ratio, context]
            kl = ("0", "0") if ratio == 1 else (interval(run, "first_token_kl", 3), f"{run['answer_kl']:.3f}")
            cells += [*kl, interval(run, "token_f1", 2)]
        yield "benchmarks/RESULTS.md", row(name, context if ratio < 1 else "-", *cells)


CAUSES = {  # rows of the table of causes: kind, variant and ratio
    "full reuse": ("recompute", "reuse", 0.0),
    **{f"`ask` {100 * ratio:.0f} %": ("recompute", "ask", ratio) for ratio in (0.05, 0.15, 0.3)},
    "`ask` 5 % without drift correction": ("recompute", "ask without drift", 0.05),
    "the most attended tokens of full prefill, 5 %": ("recompute", "oracle", 0.05),
    "the same, 15 %": ("recompute", "oracle", 0.15),
    "`cacheblend` 15 %": ("recompute", "cacheblend", 0.15),
    "the first four tokens of each chunk": ("recompute", "sinks", 0.0),
    "`ask` 5 %, then exact KV of the recomputed tokens": ("restore", "recomputed by ask", 0.05),
    "`ask` 5 %, then exact KV of all kept tokens": ("restore", "kept by ask", 0.05),
    "full reuse with exact keys of all tokens": ("restore", "keys", 1.0),
    "full reuse with exact values of all tokens": ("restore", "values", 1.0),
    **{
        f"full reuse with exact KV in quarter {quarter} of the layers": ("restore", f"layers {quarter} of 4", 1.0)
        for quarter in (1, 2, 3, 4)
    },
}


def causes() -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of causes: both models, over chunks stored alone and after the neutral text."""

    def short(number: float) -> str:
        return f"{number:.3f}".removeprefix("0") if number < 0.9995 else f"{number:.2f}"

    def cell(run: dict[str, Any]) -> str:
        low, high = map(short, run["interval"])
        return f"{short(run['first_token_kl'])} ({low} to {high}), {short(run['answer_kl'])}"

    runs = [result(f"causes-{model}-musique")["runs"] for model in ("smollm2", "1-5b")]
    names = ("context", "kind", "variant", "ratio")
    by_model = [{tuple(run[name] for name in names): run for run in found} for found in runs]
    for name, key in CAUSES.items():
        yield (
            "benchmarks/RESULTS.md",
            row(name, *(cell(found[context, *key]) for found in by_model for context in ("none", "neutral"))),
        )


DIFFERENCES = (  # model, key of the run, base of its paired differences, measure
    ("1-5b", ("none", "restore", "recomputed by ask", 0.05), "less_default", "first_token_kl"),
    ("smollm2", ("none", "restore", "recomputed by ask", 0.05), "less_default", "first_token_kl"),
    ("smollm2", ("none", "recompute", "oracle", 0.05), "less_default", "first_token_kl"),
    ("smollm2", ("none", "recompute", "oracle", 0.05), "less_default", "answer_kl"),
    ("1-5b", ("none", "recompute", "oracle", 0.05), "less_default", "first_token_kl"),
    ("1-5b", ("none", "recompute", "ask", 0.3), "less_default", "first_token_kl"),
    ("smollm2", ("none", "recompute", "ask without drift", 0.05), "less_default", "first_token_kl"),
    ("1-5b", ("none", "recompute", "ask without drift", 0.05), "less_default", "first_token_kl"),
    ("smollm2", ("neutral", "recompute", "ask", 0.05), "less_alone", "answer_kl"),
    ("1-5b", ("neutral", "recompute", "ask", 0.05), "less_alone", "answer_kl"),
    ("1-5b", ("neutral", "recompute", "ask", 0.3), "less_alone", "answer_kl"),
    ("1-5b", ("neutral", "recompute", "reuse", 0.0), "less_alone", "answer_kl"),
)


@pytest.mark.parametrize(("model", "key", "base", "measure"), DIFFERENCES)
def test_a_difference_of_causes_is_that_of_the_result(model, key, base, measure):
    names = ("context", "kind", "variant", "ratio")
    (run,) = (run for run in result(f"causes-{model}-musique")["runs"] if tuple(run[name] for name in names) == key)
    numbers = (f"{number:+.3f}".replace("+0.", "+.").replace("-0.", "-.") for number in run[base][measure])
    page = " ".join((ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").split())
    assert "{} [{}, {}]".format(*numbers) in page


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


@pytest.mark.parametrize(("page", "expected"), [*speed(), *closeness(), *study(), *causes(), *loading()])
def test_the_row_of_a_table_has_the_figures_of_the_result(page, expected):
    assert expected in (ROOT / page).read_text(encoding="utf-8").replace("*", "")
