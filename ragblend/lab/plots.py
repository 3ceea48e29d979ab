"""Pictures of benchmarks. Each function draws a JSON object, so a stored result can be drawn again.

Depends on matplotlib (extra `plot`) and on the JSON keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from ragblend.files.output import check_output_path, write_output

Facts = Mapping[str, Any]

PICTURE_ENDINGS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
COLORS = {"full": "#7f7f7f", "prefix": "#9edae5", "reuse": "#c49c94", "blend": "#1f77b4"}
RULE_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22")


def check_plot(place: str | Path | None) -> Path | None:
    """Return `place` as a path after checking that a picture can be drawn and written there; None for no `place`.

    Call this before a long measurement.

    Raises ImportError if matplotlib is missing, UsageError if the file's ending is not in PICTURE_ENDINGS or `place` is
    a folder, StoreNotWritableError if the file cannot be written.
    """
    if place is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ragblend[plot]'") from error
    return check_output_path(place, "--plot", PICTURE_ENDINGS)


@contextmanager
def figure_file(path: Path, width: float, height: float, title: str) -> Iterator[Any]:
    """Yield a matplotlib figure of that size in inches; write it to `path` at the end, in the format of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, also without a display
    figure.suptitle(title, fontsize="medium", parse_math=False)
    yield figure
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, drawn.getvalue(), "--plot")


def describe_axes(axes: Any, x: str, y: str, title: str = "") -> None:
    """Label the axes `x` and `y`, and add title, grid and legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def workload_title(facts: Facts) -> str:
    """Return model, dtype, chunks and hardware of a result, as the title of its picture."""
    config, hardware = facts["config"], facts["hardware"]
    return f"{facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, " + (
        hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
    )


# -- time to first token


def plot_ttft(facts: Facts, path: Path) -> None:
    """Write a bar per case of `bench ttft`: median TTFT, whiskers from fastest to slowest, the speedup as text."""
    runs = facts["runs"]
    with figure_file(path, 8, 1.2 + 0.55 * len(runs), workload_title(facts)) as figure:
        axes = figure.add_subplot()
        for run in runs:
            blend = run["mode"] == "blend"
            label = f"{run['mode']} {run['rule']} {run['ratio']:.0%}" if blend else run["mode"]
            whiskers = [[run["ttft_s"] - run["ttft_min_s"]], [run["ttft_max_s"] - run["ttft_s"]]]
            axes.barh([label], [run["ttft_s"]], xerr=whiskers, color=COLORS[run["mode"]], capsize=3)
            speedup = f", {run['speedup']:.1f}x" if run["speedup"] is not None else ""
            axes.annotate(f"{run['ttft_s']:.3g} s{speedup}", (run["ttft_max_s"], label), va="center")
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set_xlabel("time to first token, seconds (lookup + load + fuse + first token)")


# -- quality


Panel = tuple[str, str, str]
"""One plot of runs: the keys of a run that are on the x axis and on the y axis, and the title."""

QUALITY_PANELS: tuple[Panel, ...] = (
    ("charged_budget_32", "first_token_kl", "KL(full || this) of the first token, nats"),
    ("charged_budget_32", "answer_kl", "KL(full || this) over the answer, nats"),
    ("ttft_s", "gold_loss", "loss of the gold answer, nats per token"),
    ("ttft_s", "token_f1", "F1 of the greedy answer"),
)

_PLACES = {"charged_budget_32": "charged budget at 32 layers", "ttft_s": "time to first token, seconds"}


def plot_quality(facts: Facts, path: Path, panels: Sequence[Panel] = QUALITY_PANELS) -> None:
    """Write the `panels` of `bench quality` over all questions.

    Each panel has a line per mode, rule and context policy, with bars for 95 % intervals.
    """
    runs = [run for run in facts["runs"] if run["kind"] == "all"]
    title = f"{workload_title(facts)}, {facts['config']['data']}, {runs[0]['num_questions']} questions"
    with figure_file(path, 4.5 * len(panels), 4.6, title) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            plot_panel(axes, panel, runs)


def plot_panel(axes: Any, panel: Panel, runs: Sequence[Facts]) -> None:
    """Draw `panel` of these runs on matplotlib's `axes`.

    A panel with a KL divergence or the charged budget on an axis omits full prefill and prefix caching.
    """
    place, name, title = panel
    colors = itertools.cycle(RULE_COLORS)
    for line in dict.fromkeys(map(_line_of, runs)):
        mode, rule, context = line
        points = [run for run in runs if _line_of(run) == line and run[name] is not None]
        points.sort(key=lambda run: float(run[place]))
        color = COLORS[mode] if mode in ("full", "prefix", "reuse") else next(colors)
        label = (rule if mode == "blend" else mode) + (f", {context}" if context != "none" else "")
        if place == "charged_budget_32" and mode not in ("reuse", "blend"):
            continue
        if name.endswith("_kl") and mode in ("full", "prefix"):
            continue
        plot_with_intervals(axes, points, place, name, (f"{name}_low", f"{name}_high"), color, label)
    places = [run[place] for run in runs]
    if place == "ttft_s" and min(places) > 0 and max(places) > 20 * min(places):
        axes.set_xscale("log")
    describe_axes(axes, _PLACES[place], "", title)


def _line_of(run: Facts) -> tuple[str, str, str]:
    return run["mode"], run["rule"], run["context"]


def plot_with_intervals(
    axes: Any, points: Sequence[Facts], x_field: str, y_field: str, bounds: tuple[str, str], color: str, label: str
) -> None:
    """Plot the field `y_field` of `points` over the field `x_field`. Without points, nothing is plotted.

    bounds: the fields with the lower and upper end of the error bars; a field that the points lack draws no bar.
    """
    if not points:
        return
    places, values = [point[x_field] for point in points], [point[y_field] for point in points]
    low, high = (bound if bound in points[0] else y_field for bound in bounds)
    below = [max(0.0, point[y_field] - point[low]) for point in points]  # rounding, at 1
    above = [max(0.0, point[high] - point[y_field]) for point in points]
    axes.errorbar(places, values, [below, above], label=label, color=color, marker="o", ms=3, lw=1.2, capsize=2)
