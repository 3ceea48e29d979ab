"""Picture of the package's layers, with the size and the imports of each module.

    python -m tools.structure.draw --out docs/structure.png

The layers are those of the contracts in pyproject.toml that `lint-imports` checks. Sizes and imports are read from the
files. An import that follows from another import of the module is not shown.
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
WIDTH = 100.0  # width of a section, in the units of the drawing


def layer_rows(container: str) -> list[list[str]]:
    """Return the layers of `ragblend` or `ragblend.engine`, top first, as full module names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c.get("containers") == [container])
    return [[f"{container}.{name.strip()}" for name in layer.split("|")] for layer in contract["layers"]]


def size(module: str) -> tuple[int, int]:
    """Return the number of files and of lines of a module or package."""
    path = ROOT / Path(*module.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def imports(parts: list[str]) -> dict[str, list[str]]:
    """Return the imports of each part (a module or package) from other parts, without those that another one implies.

    Imports for type checkers do not count.
    """
    graph = grimp.build_graph("ragblend", exclude_type_checking_imports=True, cache_dir=None)
    part_of = {module: part for part in parts for module in {part} | graph.find_descendants(part)}
    direct: dict[str, set[str]] = {part: set() for part in parts}
    for module, part in part_of.items():
        imported = graph.find_modules_directly_imported_by(module)
        direct[part] |= {part_of[other] for other in imported if other in part_of}
        direct[part].discard(part)

    def below(part: str) -> set[str]:
        return direct[part].union(*(below(other) for other in direct[part]))

    return {part: sorted(found - set().union(*map(below, found)), key=parts.index) for part, found in direct.items()}


def draw_layers(axes: Axes, container: str, color: str) -> None:
    """Draw one section of the picture: a row per layer, a box per module or package."""
    rows = layer_rows(container)
    uses = imports([module for row in rows for module in row])
    for level, row in enumerate(rows):
        share = WIDTH / len(row)
        for number, module in enumerate(row):
            name, (num_files, num_lines) = module.rsplit(".", 1)[-1], size(module)
            is_engine = module == "ragblend.engine"
            x, y = number * share, -level
            axes.add_patch(
                Rectangle((x + 0.4, y + 0.06), share - 0.8, 0.88, fc="#dcebfa" if is_engine else color, ec="#6b7c8f")
            )
            sized = f"{num_files} files, {num_lines:,} lines" if num_files > 1 else f"{num_lines:,} lines"
            axes.text(x + 1.6, y + 0.66, name, fontsize=10, fontweight="bold", va="center")
            if 1.3 * len(name) + 0.75 * len(sized) < share - 3:  # both fit side by side
                axes.text(x + share - 1.6, y + 0.66, sized, fontsize=7, va="center", ha="right", color="#51667d")
            used = ", ".join(other.rsplit(".", 1)[-1] for other in uses[module])
            shown = textwrap.shorten(f"imports {used}", int(share * 0.95), placeholder=" ...") if used else ""
            axes.text(x + 1.6, y + 0.28, shown, fontsize=7.5, va="center", color="#37475a")
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(-len(rows) + 0.9, 1.1)
    axes.set_title(container, fontsize=11, loc="left")
    axes.axis("off")


def draw(out: Path) -> None:
    """Draw both sections and write the picture to `out`."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 8))
    draw_layers(left, "ragblend", "#fff4e0")
    draw_layers(right, "ragblend.engine", "#dcebfa")
    figure.tight_layout(pad=0.4)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the layers from the imports.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "structure.png", help="PNG file.")
    draw(parser.parse_args().out)
