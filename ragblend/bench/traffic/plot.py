"""The pictures of an analysis and of a simulation, each drawn from its JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragblend.bench.common.plots import COLOURS, drawn

_PARTS = (
    ("prefix", "prefix", COLOURS["prefix"]),
    ("elsewhere", "elsewhere", COLOURS["blend"]),
    ("new", "new", COLOURS["full"]),
)
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def plot_analysis(facts: Mapping[str, Any], path: Path) -> None:
    """Write the shares of the tokens, the chunks that most requests need, and what a store finds over its size."""
    with drawn(path, 13, 4.2) as figure:
        shares, chunks, curve = figure.subplots(1, 3, width_ratios=(1.0, 1.2, 1.8))
        _plot_shares(shares, facts)
        _plot_chunks(chunks, facts)
        _plot_curve(curve, facts)
        by = "estimated" if facts["tokens_are_estimated"] else f"by {facts['tokens_by']}"
        figure.suptitle(f"{facts['num_requests']} requests, {facts['num_tokens']} tokens ({by})", fontsize="medium")


def _plot_shares(axes: Any, facts: Mapping[str, Any]) -> None:
    for place, (name, label, colour) in enumerate(_PARTS):
        share = facts["shares"][name]
        axes.bar([label], [share], color=colour)
        axes.annotate(f"{share:.1%}", (place, share), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("share of the prompt tokens")
    axes.set_title("seen before", fontsize="medium")


def _plot_chunks(axes: Any, facts: Mapping[str, Any]) -> None:
    top = facts["chunks"]
    axes.barh([each["hash"][:8] for each in top], [each["requests"] for each in top], color=COLOURS["blend"])
    axes.invert_yaxis()
    axes.set_xlabel("requests that need it from a store")
    axes.set_title(f"the first {len(top)} of {facts['num_chunks']} chunks that come again", fontsize="medium")
    axes.tick_params(axis="y", labelsize="small")


def _plot_curve(axes: Any, facts: Mapping[str, Any]) -> None:
    points = facts["curve"]
    name, scale, unit = "tokens", 1, "tokens"
    if points and points[-1]["bytes"] is not None:
        name = "bytes"
        scale, unit = next((each for each in _UNITS if points[-1]["bytes"] >= each[0]), _UNITS[-1])
    sizes = [point[name] / scale for point in points]
    axes.plot(sizes, [point["most"] for point in points], ls="--", color="#7f7f7f", label="no policy finds more")
    axes.plot(sizes, [point["lru"] for point in points], marker="o", ms=4, color=COLOURS["blend"], label="LRU")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"size of the store, {unit}")
    axes.set_ylabel("share of the prompt tokens that it finds")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("behind the prefix", fontsize="medium")


_TIERS = {"memory": "#1f77b4", "disk": "#aec7e8", "remote": "#ff9896", "missing": "#c7c7c7"}


def plot_simulation(facts: Mapping[str, Any], path: Path) -> None:
    """Write TTFT and throughput over the number of replicas, a line per mode, and where blending found its chunks."""
    with drawn(path, 13, 4.2) as figure:
        waits, served, found = figure.subplots(1, 3)
        runs = facts["runs"]
        for mode in dict.fromkeys(run["mode"] for run in runs):
            own = [run for run in runs if run["mode"] == mode]
            counts, colour = [run["num_replicas"] for run in own], COLOURS[mode]
            waits.plot(counts, [run["ttft_s"] for run in own], marker="o", ms=4, color=colour, label=mode)
            waits.plot(counts, [run["ttft_p95_s"] for run in own], ls=":", color=colour)
            served.plot(counts, [run["throughput"] for run in own], marker="o", ms=4, color=colour, label=mode)
        for axes, label in (
            (waits, "TTFT, seconds: median, and 95 % (dotted)"),
            (served, "requests served per second"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("replicas")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            axes.legend()
        waits.set_yscale("log")
        served.set_ylim(bottom=0)
        _plot_tiers(found, [run for run in runs if run["chunk_hits"]])
        by = "tokens estimated" if facts["tokens_are_estimated"] else f"tokens by {facts['tokens_by']}"
        figure.suptitle(f"simulated: {facts['num_requests']} requests, {by}, {runs[0]['router']}", fontsize="medium")


def _plot_tiers(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    names, below = [str(run["num_replicas"]) for run in runs], [0.0] * len(runs)
    for tier, colour in _TIERS.items():
        shares = [run["chunk_hits"].get(tier, 0.0) for run in runs]
        axes.bar(names, shares, bottom=below, color=colour, label=tier)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("replicas")
    axes.set_ylabel("share of the chunk tokens")
    axes.set_title("where blending found them", fontsize="medium")
    if runs:
        axes.legend(fontsize="small")
