"""The picture of an analysis, drawn from its JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragblend.lab.bench.common.plots import COLORS, figure_file

_PARTS = (
    ("prefix", "prefix", COLORS["prefix"]),
    ("elsewhere", "elsewhere", COLORS["blend"]),
    ("new", "new", COLORS["full"]),
)
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def plot_analysis(facts: Mapping[str, Any], path: Path) -> None:
    """Write the shares of the tokens, the chunks that most requests need, and what a store finds over its size."""
    with figure_file(path, 13, 4.2) as figure:
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
    axes.barh([each["hash"][:8] for each in top], [each["requests"] for each in top], color=COLORS["blend"])
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
    axes.plot(sizes, [point["lru"] for point in points], marker="o", ms=4, color=COLORS["blend"], label="LRU")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"size of the store, {unit}")
    axes.set_ylabel("share of the prompt tokens that it finds")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("behind the prefix", fontsize="medium")
