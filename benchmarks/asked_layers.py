"""In which layers the question is asked best: rule `ask`, reading several parts of the model's depth.

    make real-model
    python -m benchmarks.asked_layers --model models/smollm2 --data musique --budgets 0.075 --contexts similar \\
        --depths 0-1 0.33-0.8 0.27-0.67 --out data/results/asked-layers-musique.json

Of the selection part, because it chooses (`ragblend.engine.fusion.rules.MIDDLE`). The question runs as far as the last
layer that is read; with `--budgets` what that saves goes into recomputing more.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.selection_part import arguments, config_of, write
from ragblend.bench.quality.study import run_quality, table_lines
from ragblend.engine.fusion.rules import RULES


def rule_reading(depths: str) -> str:
    """The name of `ask` that reads those, such as 0.33-0.8, which is a rule from now on.

    >>> RULES[rule_reading("0.5-1")].probe_layers((), 20)[::9]
    (10, 19)
    """
    start, end = map(float, depths.split("-"))
    name = f"ask {depths}"
    RULES[name] = replace(RULES["ask"], name=name, depths=(start, end))
    return name


def main() -> None:
    """Measure, print, and write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--depths", nargs="+", default=["0-1", "0.33-0.8"], help="from-to, as shares of the depth")
    given = parser.parse_args()
    result = run_quality(config_of(given, tuple(map(rule_reading, given.depths))), print)
    print("\n".join(table_lines(result)))
    write(given, result.as_dict())


if __name__ == "__main__":
    main()
