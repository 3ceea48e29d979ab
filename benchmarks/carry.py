"""How much of the recomputed tokens' change of KV the tokens that are kept should take on: rule `ask`, several shares.

    make real-model
    python -m benchmarks.carry --model models/smollm2 --data musique --questions 14 --shares 0.8 0.9 1 \
        --ratios 0.005 0.05 0.15 --out data/results/carry-musique.json

Of the selection part, because it chooses (`ragblend.engine.fusion.rules.CARRY`). A share of 0 is the rule without it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from ragblend.bench.common.configs import QualityConfig
from ragblend.bench.quality.study import run_quality, table_lines
from ragblend.engine.fusion.rules import RULES


def rule_with(share: float) -> str:
    """The name of `ask` with that share, which is a rule from now on."""
    name = f"ask carry {share:g}"
    RULES[name] = replace(RULES["ask"], name=name, carry=share, carry_in_context=share)
    return name


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="musique", help="musique, nq, lookup or a file, as `bench quality` has it")
    parser.add_argument("--part", default="selection")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.15])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = QualityConfig(
        model=given.model,
        data=given.data,
        part=given.part,
        num_questions=given.questions,
        chunk_tokens=given.chunk_tokens,
        modes=("reuse", "blend"),
        rules=(*map(rule_with, given.shares), "cacheblend"),
        ratios=tuple(given.ratios),
    )
    torch.set_num_threads(config.threads or torch.get_num_threads())
    result = run_quality(config, print)
    print("\n".join(table_lines(result)))
    if given.out is not None:
        given.out.write_text(json.dumps(result.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
