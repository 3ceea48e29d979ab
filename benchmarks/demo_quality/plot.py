"""The picture of `benchmarks.demo_quality`, drawn from its JSON object."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragblend.bench.common.plots import COLOURS, MIN_KL, RULE_COLOURS, drawn, with_bars


def plot_quality(facts: Mapping[str, Any], path: Path) -> None:
    """Write three panels over the budget charged in a model of 32 layers, a line per rule: exact
    match of all questions and of those that need an earlier chunk, and the first token's KL to full prefill of the
    latter. Bars are 95 % intervals."""
    with drawn(path, 15, 5) as figure:
        runs = [run for run in facts["runs"] if run["prefix_precompute"]]
        total = [run for run in runs if run["kind"] == "all"]
        refers = [run for run in runs if run["kind"] == "references"]
        everything, references, divergence = figure.subplots(1, 3)
        _plot_measure(everything, total, "exact_match", "exact match, all questions")
        if refers:
            _plot_measure(references, refers, "exact_match", "exact match, questions that need an earlier chunk")
        _plot_measure(
            divergence, refers or total, "first_token_kl", "KL(full || mode) of the first token, nats, the same"
        )
        for axes in (everything, references):
            axes.set_ylim(0, 1.02)
        divergence.set_yscale("log")
        for axes in (everything, references, divergence):
            axes.set_xscale("function", functions=(_root, _square))
            axes.set_xlim(0, 0.32)
            shares = (0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3)
            axes.set_xticks(shares, [f"{share * 100:g}" for share in shares], fontsize="small")
            axes.set_xlabel("charged budget at 32 layers, % (0 = full reuse)")
            axes.grid(alpha=0.3)
        everything.legend(fontsize="small", loc="lower right")
        figure.suptitle(
            f"{facts['model']} float32, {total[0]['num_questions']} questions over {total[0]['num_chunks']:.0f} "
            f"chunks, {total[0]['context_tokens']:.0f} tokens of context",
            fontsize="medium",
        )


def _curves(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Blend runs by rule, ascending budget; full reuse is every rule's budget 0."""
    reuse = [run for run in runs if run["mode"] == "reuse"]
    rules = dict.fromkeys(run["rule"] for run in runs if run["mode"] == "blend")
    return {
        rule: sorted(
            [*reuse, *(run for run in runs if run["rule"] == rule)], key=lambda run: float(run["charged_budget_32"])
        )
        for rule in rules
    }


def _plot_measure(axes: Any, runs: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    """A share or a KL over the charged budget, with the levels of full prefill (for a KL: of its rounding), full reuse
    and, for a share, guessing. A KL that is 0 up to rounding has no point."""
    is_share = name == "exact_match"
    for colour, (rule, curve) in zip(itertools.cycle(RULE_COLOURS), _curves(runs).items(), strict=False):
        shown = [run for run in curve if is_share or run[name] > MIN_KL]
        with_bars(axes, shown, "charged_budget_32", name, colour, rule)
    for run in (run for run in runs if run["mode"] in ("full", "reuse") and (is_share or run[name] > MIN_KL)):
        label = run["mode"] if run["dtype"] == "float32" else f"{run['mode']} {run['dtype']}"
        style = "--" if run["dtype"] == "float32" else "-."
        axes.axhline(run[name], color=COLOURS[run["mode"]], ls=style, lw=1, label=label)
    if is_share:
        axes.axhline(runs[0]["guess"], color="black", ls=":", lw=1, label="guess")
    axes.set_title(title, fontsize="medium")


def _root(values: Any) -> Any:
    """Square root, which spreads the small ratios out; 0 below 0."""
    return values.clip(0) ** 0.5 if hasattr(values, "clip") else max(0.0, values) ** 0.5


def _square(values: Any) -> Any:
    return values**2
