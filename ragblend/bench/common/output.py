"""What every benchmark does with its result: card and table for people, a picture from its JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragblend.bench.common.hardware import card_lines
from ragblend.bench.common.plots import require_matplotlib

Draw = Callable[[Mapping[str, Any], Path], None]


def on_terminal() -> Callable[[str], None] | None:
    """Where progress goes: stderr, if somebody looks at it."""
    return _tell if sys.stderr.isatty() else None


def check_plot(plot: Path | None) -> None:
    """Raise ImportError if a picture is wanted that cannot be drawn: now, not after minutes of measuring."""
    if plot is not None:
        require_matplotlib()


def present(
    facts: dict[str, Any],
    table: Sequence[str],
    echo: Callable[[str], None],
    plot: Path | None = None,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Card and table to `echo`, the picture of `facts` to `plot`; returns `facts`."""
    for line in (*card_lines(facts["hardware"]), "", *table):
        echo(line)
    if plot is not None and draw is not None:
        draw(facts, plot)
        echo(f"plot in {plot}")
    return facts


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
