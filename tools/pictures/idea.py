"""Picture of the README: the tokens of a prompt of three chunks in three modes.

    python -m tools.pictures.idea        # docs/idea-light.svg and docs/idea-dark.svg

The times and the KL at the right are measurements of SmolLM2-135M in `data/results/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = Path(__file__).parents[2]
TIMES, CLOSENESS = (ROOT / "data/results" / name for name in ("ttft-ask-5-smollm2-fp32.json", "quality-musique.json"))

SEGMENTS = (("prefix", 5), ("chunk 7", 16), ("chunk 2", 14), ("chunk 9", 18), ("question", 6))
STORED = ("chunk 7", "chunk 2", "chunk 9")
CHOSEN = {7, 13, 24, 25, 31, 38, 44, 50}  # tokens that blending recomputes in the picture, not measured
TOP, STORE, REUSE, BLEND = 8.4, 5.7, 3.2, 1.0  # heights of the rows
CELL, GAP, LEFT = 1.0, 1.4, 17.0  # width of a token, space between segments, space before the first


class Ink(NamedTuple):
    """Colours of one variant."""

    text: str
    faint: str
    computed: str
    stored: str
    edge: str


INKS = {
    "light": Ink("#1f2328", "#59636e", "#d1570b", "#b6d4f2", "#8fb7dd"),
    "dark": Ink("#f0f6fc", "#9198a1", "#f0883e", "#1f3f63", "#3a6ea5"),
}


def places() -> dict[str, list[float]]:
    """Return {segment: horizontal positions of its tokens}."""
    found, x = {}, LEFT
    for name, count in SEGMENTS:
        found[name] = [x + CELL * i for i in range(count)]
        x += CELL * count + GAP
    return found


def measurements() -> tuple[dict[tuple[str, str], float], dict[tuple[str, str, float, str], float]]:
    """Return {(mode, rule): seconds to the first token}, and {(mode, rule, ratio, context): KL from full prefill}."""
    times = {(run["mode"], run["rule"]): run["ttft_s"] for run in json.loads(TIMES.read_text())["runs"]}
    runs = [run for run in json.loads(CLOSENESS.read_text())["runs"] if run["kind"] == "all"]
    return times, {(run["mode"], run["rule"], run["ratio"], run["context"]): run["first_token_kl"] for run in runs}


def measured() -> dict[str, tuple[float, float]]:
    """Return {row: (seconds to the first token, its KL from full prefill)}."""
    times, kl = measurements()
    return {
        "full prefill": (times["full", "none"], 0.0),
        "full reuse": (times["reuse", "none"], kl["reuse", "none", 0.0, "none"]),
        "ragblend": (times["blend", "ask"], kl["blend", "ask", 0.05, "none"]),
    }


def draw(ink: Ink, out: Path) -> None:
    """Draw one variant, as SVG without a background."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ragblend", "font.family": "sans-serif"})
    figure, axes = pyplot.subplots(figsize=(10, 3.5))
    figure.patch.set_alpha(0)
    found = places()
    end = found["question"][-1] + CELL
    for name, xs in found.items():
        middle = (xs[0] + xs[-1] + CELL) / 2
        axes.text(middle, TOP + 1.5, name, color=ink.text, ha="center", fontsize=9)
        if name in STORED:
            _tokens(axes, xs, STORE, ink, computed=set())
            tip = (middle, STORE - 0.3), (middle, STORE - 1.4)
            axes.add_patch(FancyArrowPatch(*tip, arrowstyle="-|>", mutation_scale=9, color=ink.faint))
    axes.text(0, STORE + 0.5, "stored once,\nat ingestion", color=ink.faint, va="center", fontsize=9)
    for x, words in ((end + 8, "first token"), (end + 19, "KL from\nfull prefill")):
        axes.text(x, TOP + 1.5, words, color=ink.faint, ha="center", va="bottom", fontsize=9)
    always = set(found["prefix"] + found["question"])
    every = [x for xs in found.values() for x in xs]
    computed = {"full prefill": set(every), "full reuse": always, "ragblend": always | {every[i] for i in CHOSEN}}
    for y, (mode, (seconds, kl)) in zip((TOP, REUSE, BLEND), measured().items(), strict=True):
        weight = "bold" if mode == "ragblend" else "normal"
        axes.text(0, y + 0.5, mode, color=ink.text, va="center", fontsize=10, fontweight=weight)
        for xs in found.values():
            _tokens(axes, xs, y, ink, computed[mode])
        axes.text(end + 8, y + 0.5, f"{seconds:.1f} s", color=ink.text, ha="center", va="center", fontweight=weight)
        axes.text(
            end + 19, y + 0.5, f"{kl:.3f}" if kl else "0", color=ink.text, ha="center", va="center", fontweight=weight
        )
    for x, color, words in ((LEFT, ink.computed, "computed now"), (LEFT + 20, ink.stored, "KV read from the store")):
        axes.add_patch(Rectangle((x, -0.9), 0.8, 1, facecolor=color, edgecolor=ink.edge, linewidth=0.4))
        axes.text(x + 1.6, -0.4, words, color=ink.faint, va="center", fontsize=9)
    axes.set(xlim=(-1, end + 25), ylim=(-1.4, 11.4))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def _tokens(axes: Axes, xs: list[float], y: float, ink: Ink, computed: set[float]) -> None:
    for x in xs:
        color = ink.computed if x in computed else ink.stored
        axes.add_patch(Rectangle((x, y), 0.8 * CELL, 1, facecolor=color, edgecolor=ink.edge, linewidth=0.4))


def main() -> None:
    """Draw both variants."""
    for name, ink in INKS.items():
        draw(ink, ROOT / f"docs/idea-{name}.svg")


if __name__ == "__main__":
    main()
