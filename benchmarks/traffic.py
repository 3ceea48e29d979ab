"""Write traffic of known shares as a log that `ragblend analyze` reads, and say what its shares are.

    python -m benchmarks.traffic --kind questions --out questions.jsonl
    ragblend analyze questions.jsonl

Kinds and their fields: `ragblend.bench.traffic.generate`. The truth counts tokens as the estimate does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ragblend.bench.traffic.generate import KINDS, generate
from ragblend.bench.traffic.tokens import Estimate


def write(kind: str, out: Path, **changes: Any) -> dict[str, Any]:
    """Write the traffic to `out`; returns what it is made of and its true shares."""
    traffic, tokens = replace(KINDS[kind], **changes), Estimate()
    made = generate(traffic, lambda text: len(tokens.ids(text)))
    with out.open("w", encoding="utf-8") as file:
        count = sum(bool(file.write(json.dumps(entry) + "\n")) for entry in made)
    return {"kind": kind, "num_requests": count, "traffic": asdict(traffic), "shares": made.truth.as_dict()}


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(KINDS), default="questions")
    parser.add_argument("--out", type=Path, required=True, help="the log to write, JSONL")
    parser.add_argument("--marked", action="store_true", help="mark chunks as ragblend's clients do")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(write(given.kind, given.out, marked=given.marked, seed=given.seed)))


if __name__ == "__main__":
    main()
