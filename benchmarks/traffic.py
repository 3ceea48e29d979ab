"""Traffic of known shares: write it as a log that `ragblend analyze` reads, or check what the analysis finds in it.

    python -m benchmarks.traffic --kind questions --out questions.jsonl
    ragblend analyze questions.jsonl
    python -m benchmarks.traffic --check --model models/smollm2 > data/results/analyze.json

Kinds and their fields: `ragblend.bench.traffic.generate`. The truth counts tokens as the estimate does. `--check` also
compares the estimate with the model's tokenizer, on the texts of this repository.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ragblend.bench.common.hardware import hardware_card
from ragblend.bench.traffic.analysis import analyze
from ragblend.bench.traffic.generate import KINDS, generate
from ragblend.bench.traffic.tokens import Estimate, ModelTokens
from ragblend.bench.traffic.verdict import verdict

ROOT = Path(__file__).parents[1]
TEXTS = {"pages": "docs/*.md", "questions": "data/questions/*", "Python": "ragblend/cli/*.py"}


def write(kind: str, out: Path, **changes: Any) -> dict[str, Any]:
    """Write the traffic to `out`; returns what it is made of and its true shares."""
    traffic, tokens = replace(KINDS[kind], **changes), Estimate()
    made = generate(traffic, lambda text: len(tokens.ids(text)))
    with out.open("w", encoding="utf-8") as file:
        count = sum(bool(file.write(json.dumps(entry) + "\n")) for entry in made)
    return {"kind": kind, "num_requests": count, "traffic": asdict(traffic), "shares": made.truth.as_dict()}


def check(model: str | None) -> dict[str, Any]:
    """For each kind what is true and what is found; with a model, estimated over its own tokens for some texts."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / f"{kind}.jsonl"
            truth = write(kind, path)
            found = analyze([path], Estimate())
            facts = {"found": found.shares, "saving": found.saving.as_dict(), "verdict": verdict(found)}
            runs.append(truth | {"num_tokens": found.num_tokens} | facts)
    estimates = {} if model is None else {name: estimated(model, pattern) for name, pattern in TEXTS.items()}
    named = None if model is None else Path(model).name
    return {"hardware": hardware_card(), "model": named, "runs": runs, "estimated_over_counted": estimates}


def estimated(model: str, pattern: str) -> float:
    """Estimated over counted tokens of the files that a pattern names."""
    from ragblend.engine.hf.model import load_tokenizer

    counted, estimate = ModelTokens(load_tokenizer(model)[0], model), Estimate()
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(ROOT.glob(pattern)) if path.is_file()
    ]
    return sum(len(estimate.ids(text)) for text in texts) / sum(len(counted.ids(text)) for text in texts)


def main() -> None:
    """Parse, then write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(KINDS), default="questions")
    parser.add_argument("--out", type=Path, help="the log to write, JSONL")
    parser.add_argument("--marked", action="store_true", help="mark chunks as ragblend's clients do")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="analyse every kind and print what is found")
    parser.add_argument("--model", help="with --check, a model whose tokenizer the estimate is compared with")
    given = parser.parse_args()
    if given.check:
        print(json.dumps(check(given.model)))
    elif given.out is None:
        parser.error("--out is missing: the log to write, or --check")
    else:
        print(json.dumps(write(given.kind, given.out, marked=given.marked, seed=given.seed)))


if __name__ == "__main__":
    main()
