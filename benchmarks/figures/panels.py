"""Figures as JSON objects of panels, their pictures and their tables.

A panel has labelled series of points. Depends on matplotlib (extra `plot`) for pictures. Read `Panel` first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ragblend.lab.plots import COLORS, RULE_COLORS, describe_axes, figure_file
from ragblend.lab.tables import Facts

Point = tuple[float, float]


class Panel(NamedTuple):
    """One plot of a figure. `series`: points (x, y) by label, in the order of the legend.

    `form`: "line"; "point", one marker per series; or "image", where each series is a row of a matrix and x the column.
    `log`: the axes that are logarithmic, of "xy".
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    form: Literal["line", "point", "image"] = "line"
    log: str = ""

    def as_dict(self) -> Facts:
        """Return the panel as JSON values, its numbers with five digits."""
        series = {label: [[_short(x), _short(y)] for x, y in points] for label, points in self.series.items()}
        return {**self._asdict(), "series": series}


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def table_lines(facts: Facts) -> list[str]:
    """Return the panels as text: a line per series, with x and y of each point; then the findings."""
    lines = [facts["title"]]
    for panel in facts["panels"]:
        lines += ["", f"{panel['title']}: {panel['y']} (over {panel['x']})"]
        width = max(map(len, panel["series"]))
        for label, points in panel["series"].items():
            lines.append(f"  {label:{width}}  " + "  ".join(f"{y:.3g} ({x:.3g})" for x, y in points))
    return [*lines, "", *(f"{name}: {value:.3g}" for name, value in facts["findings"].items())]


def draw_figure(facts: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a figure: its panels side by side, with legends and units."""
    panels = facts["panels"]
    title = textwrap.fill(facts["title"], 64 * len(panels))
    with figure_file(path, 5.2 * len(panels), 4.4, title) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(figure, axes, panel)


def _draw_panel(figure: Any, axes: Any, panel: Mapping[str, Any]) -> None:
    if panel["form"] == "image":
        labels = list(panel["series"])
        image = axes.imshow([[y for _, y in points] for points in panel["series"].values()], cmap="viridis", vmin=0)
        figure.colorbar(image, ax=axes, shrink=0.8, label="share of the attention")
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize="small")
        axes.set_yticks(range(len(labels)), labels, fontsize="small")
        describe_axes(axes, panel["x"], panel["y"], panel["title"])
        axes.grid(visible=False)
        return
    rest = iter(RULE_COLORS)
    for label, points in panel["series"].items():
        color = COLORS.get(label) or next(rest)
        size = 8 if panel["form"] == "point" else 3
        axes.plot([x for x, _ in points], [y for _, y in points], color=color, label=label, marker="o", ms=size, lw=1.4)
    if "x" in panel["log"]:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if "y" in panel["log"]:
        axes.set_yscale("log")
    else:
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
    describe_axes(axes, panel["x"], panel["y"], panel["title"])
