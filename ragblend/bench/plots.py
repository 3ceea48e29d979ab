"""Pictures of benchmark results, drawn from their JSON objects, so that a result file can be drawn again.

Knows matplotlib (extra `plot`) and the JSON keys. Knows nothing about how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def _label(run: Mapping[str, Any]) -> str:
    return f"{run['mode']} {run['rule']} {run['ratio']:.0%}" if run["mode"] == "blend" else str(run["mode"])


def _title(facts: Mapping[str, Any]) -> str:
    config, hardware = facts["config"], facts["hardware"]
    place = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
    return f"{facts['model']} {config['dtype']}, {config['num_chunks']} x {config['chunk_tokens']} tokens, {place}"
