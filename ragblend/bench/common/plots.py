"""Pictures of benchmark results, drawn from their JSON objects, so that a result file can be drawn again.

Knows matplotlib (extra `plot`) and the JSON keys. Knows nothing about how the numbers came about.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"full": "#7f7f7f", "prefix": "#9edae5", "reuse": "#c49c94", "blend": "#1f77b4"}


def require_matplotlib() -> None:
    """Raise ImportError with the install line unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ragblend[plot]'") from error


def plot_ttft(facts: Mapping[str, Any], path: Path) -> None:
    """Write a bar per run of `bench ttft`: median TTFT, whiskers from fastest to slowest, speedup beside it."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = facts["runs"]
    figure = Figure(figsize=(8, 1.2 + 0.55 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, whatever display there is
    axes = figure.add_subplot()
    medians = [run["ttft_s"] for run in runs]
    below = [run["ttft_s"] - run["ttft_min_s"] for run in runs]
    above = [run["ttft_max_s"] - run["ttft_s"] for run in runs]
    colours = [_COLOURS[run["mode"]] for run in runs]
    axes.barh([_label(run) for run in runs], medians, xerr=[below, above], color=colours, capsize=3)
    for place, run in enumerate(runs):
        speedup = f", {run['speedup']:.1f}x" if run["speedup"] is not None else ""
        axes.annotate(
            f"{run['ttft_s']:.3g} s{speedup}",
            (run["ttft_max_s"], place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_xlabel("time to first token, seconds (lookup + load + fuse + first token)")
    axes.set_title(_title(facts), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_throughput(facts: Mapping[str, Any], path: Path) -> None:
    """Write mean TTFT over the requests served, a line per mode of `bench throughput`, up to three times the bound."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    config, hardware, bound = facts["config"], facts["hardware"], facts["bound_s"]
    many = len(config["rules"]) > 1
    for found in facts["capacities"]:
        points = [run for run in facts["runs"] if (run["mode"], run["rule"]) == (found["mode"], found["rule"])]
        rates, means = [run["served_rate"] for run in points], [run["ttft_mean_s"] for run in points]
        best = found["rate_at_bound"]
        label = found["mode"] + (f" {found['rule']}" if many and found["mode"] == "blend" else "")
        label += "" if best is None else f": {'>' if found['at_least'] else ''}{best:.3g}/s"
        colour = None if many and found["mode"] == "blend" else _COLOURS[found["mode"]]
        axes.plot([0.0, *rates], [found["idle_ttft_s"], *means], label=label, color=colour, marker="o", ms=4)
    axes.axhline(bound, color="black", ls=":", lw=1, label=f"bound {bound:.3g} s")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 3 * bound)
    axes.set_xlabel("requests served per second (Poisson arrivals; 0: one at a time)")
    axes.set_ylabel("mean time to first token, seconds")
    axes.grid(alpha=0.3)
    axes.legend()
    place = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
    axes.set_title(
        f"vLLM, {facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, {place}",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_load(facts: Mapping[str, Any], path: Path) -> None:
    """Write `bench load`: every layer's loading and fusing on both sides of the line, and TTFT over T_load."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    chosen = _timelines_to_show(facts)
    panels = figure.subplots(1, len(chosen) + 1)
    for axes, timeline in zip(panels, chosen, strict=False):
        _plot_timeline(axes, timeline)
    _plot_over_load(panels[-1], facts)
    config, hardware = facts["config"], facts["hardware"]
    figure.suptitle(
        f"{facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, "
        f"{facts['runs'][0]['rule']} at {config['ratio']:.0%}, {hardware['cpu']}, {hardware['threads']} thread(s)",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _timelines_to_show(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """At the ratio asked for, with the pipeline: the slowest reader that hides, and the slowest of all."""
    own = [each for each in facts["timelines"] if each["pipeline"] and each["ratio"] == facts["config"]["ratio"]]
    own = sorted((each for each in own if each["source"] != "memory"), key=lambda each: each["load_over_recompute"])
    hidden = [each for each in own if each["load_over_recompute"] <= 1]
    return [*hidden[-1:], *own[-1:]] if not hidden or own[-1] is not hidden[-1] else hidden[-1:]


def _plot_timeline(axes: Any, timeline: Mapping[str, Any]) -> None:
    """A row per layer: when it was loaded, and when it was fused."""
    for name, colour, offset in (("load", "#ff7f0e", -0.2), ("fuse", "#1f77b4", 0.2)):
        starts = [start for start, _ in timeline[name]]
        widths = [end - start for start, end in timeline[name]]
        rows = [layer + offset for layer in range(len(starts))]
        axes.barh(rows, widths, left=starts, height=0.4, color=colour, label=name)
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("layer")
    axes.set_title(
        f"{timeline['source']}, T_load = {timeline['load_over_recompute']:.2f} T_recompute", fontsize="medium"
    )
    axes.legend(fontsize="small")


def _plot_over_load(axes: Any, facts: Mapping[str, Any]) -> None:
    """TTFT over that from memory, over T_load / T_recompute, with the pipeline and without."""
    ratio = facts["config"]["ratio"]
    for pipeline, colour in ((True, "#1f77b4"), (False, "#d62728")):
        runs = [run for run in facts["runs"] if run["pipeline"] == pipeline and run["ratio"] == ratio]
        runs.sort(key=lambda run: float(run["load_over_recompute"]))
        places = [run["load_over_recompute"] for run in runs]
        label = f"pipeline {'on' if pipeline else 'off'}"
        axes.plot(places, [run["over_memory"] for run in runs], marker="o", ms=4, color=colour, label=label)
    more = [run for run in facts["runs"] if run["ratio"] > ratio]
    if more:
        places = [run["load_over_recompute"] for run in more]
        label = "on, at the ratio that hides: " + ", ".join(f"{run['ratio']:.0%}" for run in more)
        axes.plot(places, [run["over_memory"] for run in more], "^", color="#2ca02c", label=label)
    axes.axhline(facts["target"], color="black", ls=":", lw=1, label=f"{facts['target']:g}")
    axes.axvline(1.0, color="#7f7f7f", ls="--", lw=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T_load / T_recompute, by the controller")
    axes.set_ylabel("TTFT / TTFT from memory")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


_RULE_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22")
_MIN_KL = 1e-6  # nats: what is below is rounding, and a logarithmic axis has no zero


def plot_quality(facts: Mapping[str, Any], path: Path) -> None:
    """Write three panels of `bench quality` over the budget charged in a model of 32 layers, a line per rule: exact
    match of all questions and of those that need an earlier chunk, and the first token's KL to full prefill of the
    latter. Bars are 95 % intervals."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    runs = [run for run in facts["runs"] if run["prefix_precompute"]]
    total = [run for run in runs if run["kind"] == "all"]
    refers = [run for run in runs if run["kind"] == "references"]
    everything, references, divergence = figure.subplots(1, 3)
    _plot_measure(everything, total, "exact_match", "exact match, all questions")
    if refers:
        _plot_measure(references, refers, "exact_match", "exact match, questions that need an earlier chunk")
    _plot_measure(divergence, refers or total, "first_token_kl", "KL(full || mode) of the first token, nats, the same")
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
        f"{facts['model']} float32, {total[0]['num_questions']} questions over {total[0]['num_chunks']:.0f} chunks, "
        f"{total[0]['context_tokens']:.0f} tokens of context",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_calibration(facts: Mapping[str, Any], path: Path) -> None:
    """Write two panels of `calibrate` over the charged budget, a line per rule: agreement with full
    prefill's first token, with 95 % intervals, and KL. A ring marks the ratio that was fitted."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    agreement, divergence = figure.subplots(1, 2)
    for colour, fit in zip(itertools.cycle(_RULE_COLOURS), facts["fits"], strict=False):
        label = f"{fit['rule']}, layer {fit['check_layer']}"
        _plot_points(agreement, fit, "agreement", ("low", "high"), 0.0, colour, label)
        _plot_points(divergence, fit, "kl", ("kl", "kl"), _MIN_KL, colour, label)
    agreement.set_ylabel("first token is full prefill's")
    divergence.set_ylabel("KL(full || blend) of the first token, nats")
    divergence.set_yscale("log")
    for axes in (agreement, divergence):
        axes.set_xlabel("charged budget (0 = full reuse)")
        axes.grid(alpha=0.3)
    agreement.legend(fontsize="small", loc="lower right")
    figure.suptitle(
        f"{facts['model']}, {facts['num_questions']} questions, target {facts['target']}: ratio {facts['ratio']:g}",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plot_points(
    axes: Any, fit: Mapping[str, Any], what: str, bounds: tuple[str, str], least: float, colour: str, label: str
) -> None:
    """`what` of a fit's curve over its charged budget; a point that is not above `least` cannot be drawn."""
    points = [point for point in fit["curve"] if point[what] > least]
    budgets, values = [point["charged_budget"] for point in points], [point[what] for point in points]
    below = [max(0.0, point[what] - point[bounds[0]]) for point in points]
    above = [max(0.0, point[bounds[1]] - point[what]) for point in points]
    axes.errorbar(budgets, values, [below, above], label=label, color=colour, marker="o", ms=3, lw=1.2, capsize=2)
    chosen = [point for point in points if point["ratio"] == fit["ratio"]]
    places = [point["charged_budget"] for point in chosen]
    axes.plot(places, [point[what] for point in chosen], marker="o", ms=10, mfc="none", ls="", color=colour)


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
    for colour, (rule, curve) in zip(itertools.cycle(_RULE_COLOURS), _curves(runs).items(), strict=False):
        shown = [run for run in curve if is_share or run[name] > _MIN_KL]
        values = [run[name] for run in shown]
        below = [max(0.0, run[name] - run[f"{name}_low"]) for run in shown]  # rounding, at 1
        above = [max(0.0, run[f"{name}_high"] - run[name]) for run in shown]
        budgets = [run["charged_budget_32"] for run in shown]
        axes.errorbar(budgets, values, [below, above], label=rule, color=colour, marker="o", ms=3, lw=1.2, capsize=2)
    for run in (run for run in runs if run["mode"] in ("full", "reuse") and (is_share or run[name] > _MIN_KL)):
        label = run["mode"] if run["dtype"] == "float32" else f"{run['mode']} {run['dtype']}"
        style = "--" if run["dtype"] == "float32" else "-."
        axes.axhline(run[name], color=_COLOURS[run["mode"]], ls=style, lw=1, label=label)
    if is_share:
        axes.axhline(runs[0]["guess"], color="black", ls=":", lw=1, label="guess")
    axes.set_title(title, fontsize="medium")


def _root(values: Any) -> Any:
    """Square root, which spreads the small ratios out; 0 below 0."""
    return values.clip(0) ** 0.5 if hasattr(values, "clip") else max(0.0, values) ** 0.5


def _square(values: Any) -> Any:
    return values**2


def _label(run: Mapping[str, Any]) -> str:
    return f"{run['mode']} {run['rule']} {run['ratio']:.0%}" if run["mode"] == "blend" else str(run["mode"])


def _title(facts: Mapping[str, Any]) -> str:
    config, hardware = facts["config"], facts["hardware"]
    place = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
    return f"{facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, {place}"
