"""Draw the layers of the package: the modules of each with their size, and what each module imports.

    python -m tools.structure.draw --out docs/structure.png

The layers come from the contract that `lint-imports` checks (pyproject.toml), the rest from the files themselves. Of a
module's imports, those that follow from its other imports are left out.
"""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from pathlib import Path

import grimp
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parents[2]
WIDTH = 100.0  # of a section, in the units of the drawing


def layer_rows(container: str) -> list[list[str]]:
    """Return the layers of `ragblend` or `ragblend.engine`, top first, as full module names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c.get("containers") == [container])
    return [[f"{container}.{name.strip()}" for name in layer.split("|")] for layer in contract["layers"]]


def size(room: str) -> tuple[int, int]:
    """Files and lines of a module or package."""
    path = ROOT / Path(*room.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def imports(rooms: list[str]) -> dict[str, list[str]]:
    """What each room imports, without what another import of it implies. Imports for type checkers do not count."""
    graph = grimp.build_graph("ragblend", exclude_type_checking_imports=True, cache_dir=None)
    home = {module: room for room in rooms for module in {room} | graph.find_descendants(room)}
    direct: dict[str, set[str]] = {room: set() for room in rooms}
    for module, room in home.items():
        direct[room] |= {home[other] for other in graph.find_modules_directly_imported_by(module) if other in home}
        direct[room].discard(room)

    def below(room: str) -> set[str]:
        return direct[room].union(*(below(other) for other in direct[room]))

    return {room: sorted(seen - set().union(*map(below, seen)), key=rooms.index) for room, seen in direct.items()}


def draw_layers(axes: Axes, container: str, color: str) -> None:
    """One section: a band per floor, a box per room."""
    rows = layer_rows(container)
    uses = imports([room for row in rows for room in row])
    for level, row in enumerate(rows):
        share = WIDTH / len(row)
        for number, room in enumerate(row):
            name, (num_files, num_lines) = room.rsplit(".", 1)[-1], size(room)
            is_engine = room == "ragblend.engine"
            x, y = number * share, -level
            axes.add_patch(
                Rectangle((x + 0.4, y + 0.06), share - 0.8, 0.88, fc="#dcebfa" if is_engine else color, ec="#6b7c8f")
            )
            sized = f"{num_files} files, {num_lines:,} lines" if num_files > 1 else f"{num_lines:,} lines"
            axes.text(x + 1.6, y + 0.66, name, fontsize=10, fontweight="bold", va="center")
            axes.text(x + share - 1.6, y + 0.66, sized, fontsize=7, va="center", ha="right", color="#51667d")
            used = ", ".join(other.rsplit(".", 1)[-1] for other in uses[room])
            shown = textwrap.shorten(f"imports {used}", int(share * 0.95), placeholder=" ...") if used else ""
            axes.text(x + 1.6, y + 0.28, shown, fontsize=7.5, va="center", color="#37475a")
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(-len(rows) + 0.9, 1.1)
    axes.set_title(container, fontsize=11, loc="left")
    axes.axis("off")


def draw(out: Path) -> None:
    """Write the picture."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 8))
    draw_layers(left, "ragblend", "#fff4e0")
    draw_layers(right, "ragblend.engine", "#dcebfa")
    figure.tight_layout(pad=0.4)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the layers from the imports.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "structure.png")
    draw(parser.parse_args().out)
