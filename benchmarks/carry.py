"""How tokens that are kept should move with the recomputed ones: rule `ask`, several shares, other numbers in `carry`.

    make real-model
    python -m benchmarks.carry --model models/smollm2 --data musique --questions 14 --shares 0.8 0.9 1 \
        --contexts similar --ratios 0.05 0.15 --out data/results/carry-musique.json
    python -m benchmarks.carry --model models/smollm2 --shares 0.8 --vary LANDMARKS 16 48 96

Of the selection part, because it chooses (`ragblend.engine.fusion.rules.CARRY`). A share of 0 is the rule without it.
`--vary` measures each value of one of the numbers in `ragblend.engine.fusion.carry` in turn.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.selection_part import arguments, config_of, write
from ragblend.bench.quality.study import run_quality, table_lines
from ragblend.engine.fusion import carry
from ragblend.engine.fusion.rules import RULES


def rule_with(share: float) -> str:
    """The name of `ask` with that share, which is a rule from now on."""
    name = f"ask carry {share:g}"
    RULES[name] = replace(RULES["ask"], name=name, carry=share, carry_in_context=share)
    return name


def main() -> None:
    """Measure, print, and write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar=("NAME", "VALUE"), help="a number of carry, and values"
    )
    given = parser.parse_args()
    config = config_of(given, (*map(rule_with, given.shares), "cacheblend"))
    name, *values = given.vary or [""]
    if given.vary and (not hasattr(carry, name) or not values):
        parser.error(f"--vary {' '.join(given.vary)}: name a number of ragblend.engine.fusion.carry, and values for it")
    found = {}
    for value in values or [""]:
        if name:
            setattr(carry, name, type(getattr(carry, name))(float(value)))
            print(f"\n{name} = {getattr(carry, name)}")
        result = run_quality(config, print)
        print("\n".join(table_lines(result)))
        found[f"{name} = {value}" if name else "as it is"] = result.as_dict()
    write(given, found if name else found["as it is"])


if __name__ == "__main__":
    main()
