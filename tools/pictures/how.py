"""Pictures of docs/how-it-works.md: source of a prompt's KV, recomputed tokens, and time over closeness.

    python -m tools.pictures.how        # docs/how-{kv,tokens,cost}-{light,dark}.svg

The first two are sketches. The third shows measurements of SmolLM2-135M in `data/results/`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tools.pictures.idea import INKS, ROOT, Ink, measurements

NUM_LAYERS = 8  # in the sketch
CHUNKS = (("prefix", 4), ("chunk 7", 14), ("chunk 2", 12), ("chunk 9", 14), ("question", 6))
CHOSEN = {6, 11, 20, 22, 27, 33, 37, 40}  # recomputed tokens in the sketch, not measured


def kv(axes: Axes, ink: Ink) -> None:
    """Draw chunks in the store, each moved to its position in the prompt."""
    x, places = 12.0, {}
    for name, count in CHUNKS:
        places[name] = (x, count)
        x += count + 1
    stored = {"chunk 2": 12.0, "chunk 7": 31.0, "chunk 9": 48.0}
    axes.text(0, 8.6, "in the store,\nplaces from 0", color=ink.faint, va="center", fontsize=9)
    axes.text(0, 2.6, "in this prompt", color=ink.text, va="center", fontsize=9)
    for name, (start, count) in places.items():
        is_stored = name in stored
        color = ink.stored if is_stored else ink.computed
        axes.add_patch(Rectangle((start, 1.6), count, 2, facecolor=color, edgecolor=ink.edge, linewidth=0.6))
        axes.text(start + count / 2, 2.6, name, color=ink.text, ha="center", va="center", fontsize=9)
        if is_stored:
            home = stored[name]
            axes.add_patch(Rectangle((home, 7.6), count, 2, facecolor=ink.stored, edgecolor=ink.edge, linewidth=0.6))
            axes.text(home + count / 2, 8.6, name, color=ink.text, ha="center", va="center", fontsize=9)
            tip = (home + count / 2, 7.4), (start + count / 2, 3.8)
            axes.add_patch(FancyArrowPatch(*tip, arrowstyle="-|>", mutation_scale=10, color=ink.faint))
    axes.text(66, 5.6, "keys rotated to\ntheir new places,\nvalues copied", color=ink.faint, va="center", fontsize=9)
    _legend(axes, ink, 12.0, -0.8)
    axes.set(xlim=(-1, 82), ylim=(-1.4, 10.4))


def tokens(axes: Axes, ink: Ink) -> None:
    """Draw a grid of layers and tokens, coloured by whether their KV is read or computed."""
    x, index = 12.0, 0
    for name, count in CHUNKS:
        axes.text(x + count / 2, NUM_LAYERS + 0.5, name, color=ink.text, ha="center", fontsize=9)
        for _ in range(count):
            for layer in range(NUM_LAYERS):
                always = not name.startswith("chunk")
                color = ink.computed if always or (index in CHOSEN and layer > 0) else ink.stored
                axes.add_patch(Rectangle((x, layer), 0.8, 0.85, facecolor=color, edgecolor=ink.edge, linewidth=0.3))
            x, index = x + 1, index + 1
        x += 1
    axes.text(0, NUM_LAYERS - 0.6, "last layer", color=ink.faint, va="center", fontsize=9)
    axes.text(0, 0.4, "first layer", color=ink.faint, va="center", fontsize=9)
    tip = (x - 4, -1.4), (34.0, -0.2)
    axes.add_patch(FancyArrowPatch(*tip, arrowstyle="-|>", mutation_scale=10, color=ink.faint,
                                   connectionstyle="arc3,rad=-0.12"))  # fmt: skip
    axes.text(x + 1, -1.4, "the question looks first,\nand says which", color=ink.faint, va="center", fontsize=9)
    _legend(axes, ink, 12.0, -3.2)
    axes.set(xlim=(-1, 82), ylim=(-3.8, NUM_LAYERS + 1.4))


def measured() -> list[tuple[str, float, float]]:
    """Return (label, seconds to the first token, its KL from full prefill) per method, at 5 % recomputed."""
    times, kl = measurements()
    full, reuse = ("full", "none"), ("reuse", "none")
    ask, cacheblend = ("blend", "ask"), ("blend", "cacheblend")
    return [
        ("full prefill", times[full], 0.0),
        ("full reuse", times[reuse], kl[*reuse, 0.0, "none"]),
        ("CacheBlend's rule, 5 %", times[cacheblend], kl[*cacheblend, 0.05, "none"]),
        ("ask, 5 % (the default rule)", times[ask], kl[*ask, 0.05, "none"]),
    ]


def cost(axes: Axes, ink: Ink) -> None:
    """Draw the time to the first token over the KL from full prefill. Low and left is best."""
    for label, seconds, kl in measured():
        is_default = "default" in label
        axes.plot(kl, seconds, "o", color=ink.computed if is_default else ink.edge, markersize=9 if is_default else 7)
        above = is_default  # the other labels are below their points
        axes.annotate(
            f"{label}: {seconds:.1f} s, {kl:.3f}" if kl else f"{label}: {seconds:.1f} s, 0",
            (kl, seconds), xytext=(8, 12 if above else -12), textcoords="offset points",
            color=ink.text, fontsize=9, fontweight="bold" if is_default else "normal",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlim=(-0.008, 0.25), ylim=(0.2, 14))
    axes.set_xlabel("KL of the first token from full prefill, nats (left is closer)", color=ink.faint, fontsize=9)
    axes.set_ylabel("time to first token, s", color=ink.faint, fontsize=9)
    axes.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.tick_params(colors=ink.faint, labelsize=9)
    axes.patch.set_alpha(0)
    for side in axes.spines.values():
        side.set_color(ink.faint)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, ink: Ink, x: float, y: float) -> None:
    for color, words in ((ink.computed, "computed now"), (ink.stored, "KV read from the store")):
        axes.add_patch(Rectangle((x, y), 0.8, 0.85, facecolor=color, edgecolor=ink.edge, linewidth=0.4))
        axes.text(x + 1.6, y + 0.4, words, color=ink.faint, va="center", fontsize=9)
        x += 18


PICTURES: dict[str, Callable[[Axes, Ink], None]] = {"kv": kv, "tokens": tokens, "cost": cost}


def draw(name: str, ink: Ink, out: Path) -> None:
    """Draw one picture in one variant, as SVG without a background."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "ragblend", "font.family": "sans-serif"}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(9, 3.4))
        figure.patch.set_alpha(0)
        PICTURES[name](axes, ink)
        if name != "cost":
            axes.axis("off")
        figure.tight_layout()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    """Draw every picture in both variants."""
    for name in PICTURES:
        for variant, ink in INKS.items():
            draw(name, ink, ROOT / f"docs/how-{name}-{variant}.svg")


if __name__ == "__main__":
    main()
