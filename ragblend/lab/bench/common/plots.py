"""Pictures of benchmark results, drawn from their JSON objects, so that a result file can be drawn again.

Knows matplotlib (extra `plot`) and the JSON keys. Knows nothing about how the numbers came about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.files.output import check_output, write_output

PICTURE_ENDINGS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
COLORS = {"full": "#7f7f7f", "prefix": "#9edae5", "reuse": "#c49c94", "blend": "#1f77b4"}


def require_matplotlib() -> None:
    """Raise ImportError with the install line unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ragblend[plot]'") from error


def check_plot(place: str | Path | None, option: str = "--plot") -> Path | None:
    """Return the path of a picture that can be drawn and written: known before minutes of measuring. None for None."""
    if place is None:
        return None
    require_matplotlib()
    return check_output(place, option, PICTURE_ENDINGS)


def write_figure(figure: Any, path: Path, option: str = "--plot") -> None:
    """Draw a matplotlib figure into a file, in the format that its ending names."""
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, drawn.getvalue(), option)


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure of that size in inches, written to `path` at the end."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, whatever display there is
    yield figure
    write_figure(figure, path)


def plot_ttft(facts: Mapping[str, Any], path: Path) -> None:
    """Write a bar per run of `bench ttft`: median TTFT, whiskers from fastest to slowest, speedup beside it."""
    runs = facts["runs"]
    with figure_file(path, 8, 1.2 + 0.55 * len(runs)) as figure:
        axes = figure.add_subplot()
        medians = [run["ttft_s"] for run in runs]
        below = [run["ttft_s"] - run["ttft_min_s"] for run in runs]
        above = [run["ttft_max_s"] - run["ttft_s"] for run in runs]
        colors = [COLORS[run["mode"]] for run in runs]
        axes.barh([_label(run) for run in runs], medians, xerr=[below, above], color=colors, capsize=3)
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


def plot_throughput(facts: Mapping[str, Any], path: Path) -> None:
    """Write mean TTFT over the requests served, a line per mode of `bench throughput`, up to three times the bound."""
    with figure_file(path, 7.5, 4.8) as figure:
        axes = figure.add_subplot()
        config, bound = facts["config"], facts["bound_s"]
        many = len(config["rules"]) > 1
        for found in facts["capacities"]:
            points = [run for run in facts["runs"] if (run["mode"], run["rule"]) == (found["mode"], found["rule"])]
            rates, means = [run["served_rate"] for run in points], [run["ttft_mean_s"] for run in points]
            best = found["rate_at_bound"]
            label = found["mode"] + (f" {found['rule']}" if many and found["mode"] == "blend" else "")
            label += "" if best is None else f": {'>' if found['at_least'] else ''}{best:.3g}/s"
            color = None if many and found["mode"] == "blend" else COLORS[found["mode"]]
            axes.plot([0.0, *rates], [found["idle_ttft_s"], *means], label=label, color=color, marker="o", ms=4)
        axes.axhline(bound, color="black", ls=":", lw=1, label=f"bound {bound:.3g} s")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 3 * bound)
        axes.set_xlabel("requests served per second (Poisson arrivals; 0: one at a time)")
        axes.set_ylabel("mean time to first token, seconds")
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_title(f"vLLM, {_title(facts)}", fontsize="medium")


def plot_load(facts: Mapping[str, Any], path: Path) -> None:
    """Write `bench load`: every layer's loading and fusing on both sides of the line, and TTFT over T_load."""
    with figure_file(path, 15, 5) as figure:
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


def _timelines_to_show(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """At the ratio asked for, with the pipeline: the slowest reader that hides, and the slowest of all."""
    own = [each for each in facts["timelines"] if each["pipeline"] and each["ratio"] == facts["config"]["ratio"]]
    own = sorted((each for each in own if each["source"] != "memory"), key=lambda each: each["load_over_recompute"])
    hidden = [each for each in own if each["load_over_recompute"] <= 1]
    return [*hidden[-1:], *own[-1:]] if not hidden or own[-1] is not hidden[-1] else hidden[-1:]


def _plot_timeline(axes: Any, timeline: Mapping[str, Any]) -> None:
    """A row per layer: when it was loaded, and when it was fused."""
    for name, color, offset in (("load", "#ff7f0e", -0.2), ("fuse", "#1f77b4", 0.2)):
        starts = [start for start, _ in timeline[name]]
        widths = [end - start for start, end in timeline[name]]
        rows = [layer + offset for layer in range(len(starts))]
        axes.barh(rows, widths, left=starts, height=0.4, color=color, label=name)
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
    for pipeline, color in ((True, "#1f77b4"), (False, "#d62728")):
        runs = [run for run in facts["runs"] if run["pipeline"] == pipeline and run["ratio"] == ratio]
        runs.sort(key=lambda run: float(run["load_over_recompute"]))
        places = [run["load_over_recompute"] for run in runs]
        label = f"pipeline {'on' if pipeline else 'off'}"
        axes.plot(places, [run["over_memory"] for run in runs], marker="o", ms=4, color=color, label=label)
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


RULE_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22")
MIN_KL = 1e-6  # nats: what is below is rounding, and a logarithmic axis has no zero


class Panel(NamedTuple):
    """One picture of a run's `name` over its `place`."""

    place: str
    name: str
    title: str


QUALITY_PANELS = (
    Panel("charged_budget_32", "first_token_kl", "KL(full || this) of the first token, nats"),
    Panel("charged_budget_32", "answer_kl", "KL(full || this) over the answer, nats"),
    Panel("ttft_s", "gold_loss", "loss of the gold answer, nats per token"),
    Panel("ttft_s", "token_f1", "F1 of the greedy answer"),
)

_PLACES = {"charged_budget_32": "charged budget at 32 layers", "ttft_s": "time to first token, seconds"}


def plot_quality(facts: Mapping[str, Any], path: Path, panels: Sequence[Panel] = QUALITY_PANELS) -> None:
    """Write panels of `bench quality`, all questions, a line per rule, bars for 95 % intervals: KL of the first token
    and of the answer over the charged budget; the gold answer's loss and F1 over the time to first token."""
    runs = [run for run in facts["runs"] if run["kind"] == "all"]
    known = [panel for panel in panels if any(run[panel.name] is not None for run in runs)]  # ROUGE-L needs its package
    with figure_file(path, 4.5 * len(known), 4.6) as figure:
        for axes, panel in zip(figure.subplots(1, len(known)), known, strict=True):
            plot_panel(axes, panel, runs)
        config = facts["config"]
        figure.suptitle(
            f"{facts['model']} {config['dtype']}, {config['data']}, {runs[0]['num_questions']} questions, "
            f"{facts['prompt_tokens']:.0f} tokens in {config['num_chunks']} chunks, "
            f"{format_hardware(facts['hardware'])}",
            fontsize="medium",
        )


def plot_panel(axes: Any, panel: Panel, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw `panel` of these runs on matplotlib's `axes`."""
    place, name, title = panel
    colors = itertools.cycle(RULE_COLORS)
    for line in dict.fromkeys(map(_line_of, runs)):
        mode, rule, context = line
        points = [run for run in runs if _line_of(run) == line and run[name] is not None]
        points.sort(key=lambda run: float(run[place]))
        color = COLORS[mode] if mode in ("full", "prefix", "reuse") else next(colors)
        label = (rule if mode == "blend" else mode) + (f", {context}" if context != "none" else "")
        # Full prefill is no distance from itself.
        if not points or (place == "charged_budget_32" and mode not in ("reuse", "blend")):
            continue
        if name.endswith("_kl") and mode in ("full", "prefix"):
            continue
        plot_with_intervals(axes, points, place, name, color, label)
    places = [run[place] for run in runs]
    if place == "ttft_s" and min(places) > 0 and max(places) > 20 * min(places):
        axes.set_xscale("log")
    axes.set_title(title, fontsize="medium")
    axes.margins(x=0.08)
    axes.set_xlabel(_PLACES[place])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _line_of(run: Mapping[str, Any]) -> tuple[str, str, str]:
    return run["mode"], run["rule"], run["context"]


def plot_with_intervals(
    axes: Any, points: Sequence[Mapping[str, Any]], place: str, name: str, color: str, label: str, **bounds: str
) -> None:
    """`name` over `place`, with bars from its lower to its upper bound, if it has any; `low` and `high` name them
    otherwise."""
    places, values = [point[place] for point in points], [point[name] for point in points]
    low, high = (
        bound if bound in points[0] else name
        for bound in (bounds.get("low", f"{name}_low"), bounds.get("high", f"{name}_high"))
    )
    below = [max(0.0, point[name] - point[low]) for point in points]  # rounding, at 1
    above = [max(0.0, point[high] - point[name]) for point in points]
    axes.errorbar(places, values, [below, above], label=label, color=color, marker="o", ms=3, lw=1.2, capsize=2)


def plot_calibration(facts: Mapping[str, Any], path: Path) -> None:
    """Write two panels of `calibrate` over the charged budget, a line per rule: agreement with full prefill's
    first token, with 95 % intervals, and KL. A ring marks the ratio that was fitted."""
    with figure_file(path, 11, 4.4) as figure:
        agreement, divergence = figure.subplots(1, 2)
        for color, fit in zip(itertools.cycle(RULE_COLORS), facts["fits"], strict=False):
            label = f"{fit['rule']}, layer {fit['check_layer']}"
            _plot_points(agreement, fit, "agreement", ("low", "high"), 0.0, color, label)
            _plot_points(divergence, fit, "kl", ("kl", "kl"), MIN_KL, color, label)
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


def _plot_points(
    axes: Any, fit: Mapping[str, Any], what: str, bounds: tuple[str, str], least: float, color: str, label: str
) -> None:
    """`what` of a fit's curve over its charged budget; a point that is not above `least` cannot be drawn."""
    points = [point for point in fit["curve"] if point[what] > least]
    plot_with_intervals(axes, points, "charged_budget", what, color, label, low=bounds[0], high=bounds[1])
    chosen = [point for point in points if point["ratio"] == fit["ratio"]]
    places = [point["charged_budget"] for point in chosen]
    axes.plot(places, [point[what] for point in chosen], marker="o", ms=10, mfc="none", ls="", color=color)


def _label(run: Mapping[str, Any]) -> str:
    return f"{run['mode']} {run['rule']} {run['ratio']:.0%}" if run["mode"] == "blend" else str(run["mode"])


def _title(facts: Mapping[str, Any]) -> str:
    config, hardware = facts["config"], facts["hardware"]
    return (
        f"{facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, "
        f"{format_hardware(hardware)}"
    )


def format_hardware(hardware: Mapping[str, Any]) -> str:
    """What it ran on, in a few words."""
    return hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
