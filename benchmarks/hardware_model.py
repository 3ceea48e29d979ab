"""Predicted times to the first token of Llama 3.1 8B on GPUs, as `ragblend plan` predicts them. Nothing is measured.

    python -m benchmarks.hardware_model --out data/results/hardware-model.json

KV is in the host's memory; `ask` recomputes 5 % and `cacheblend` 15 % of the chunks' tokens, evenly spread. The costs
are those of `ragblend.lab.hardware`, with the operations of today's path by Triton's kernels. Read `predict` first.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.results import split_counts
from ragblend.engine.fusion.rules import RULES
from ragblend.lab.hardware import GPUS, blend_s, full_prefill_s
from ragblend.lab.model_sizes import ModelSizes

NAMES = ("H100", "A100", "A10", "L4")
# Llama 3.1 8B: hidden 4096, intermediate 14336.
LLAMA_8B = ModelSizes(32, 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336, 4096, 32 * 2 * 1024, 32 * 8)


class Line(NamedTuple):
    """Seconds to the first token of one prompt on one GPU: full prefill, full reuse, and two rules."""

    gpu: str
    tokens: int
    full_s: float
    reuse_s: float
    ask_s: float
    cacheblend_s: float


def predict(gpu: str, tokens: int, question: int) -> Line:
    """Return the times of a prompt of `tokens` tokens, of which `question` are the question's and not stored."""
    cases = (("ask", 0.0), ("ask", 0.05), ("cacheblend", 0.15))
    times = (blend_s(LLAMA_8B, GPUS[gpu], RULES[rule], tokens, question, ratio) for rule, ratio in cases)
    return Line(gpu, tokens, full_prefill_s(LLAMA_8B, GPUS[gpu], tokens), *times)


def row(name: str, tokens: int, full_s: float, *others_s: float) -> str:
    """Return a row of the table in docs/performance.md: seconds, and how many times as fast as full prefill."""
    cells = (f"{each:.3g} s, {full_s / each:.1f}x" for each in others_s)
    return f"| {name} | {tokens:,} | {full_s:.3g} s | {' | '.join(cells)} |"


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the prompts, comma-separated.")] = "4096,16384,32768",
    question: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result. Default: none.")] = None,
) -> None:
    """Print a table of the predictions, and write them as JSON."""
    lines = [predict(gpu, count, question) for gpu in NAMES for count in split_counts(tokens)]
    print("| | tokens | full prefill | full reuse | `ask` 5 % | `cacheblend` 15 % |\n|---|---|---|---|---|---|")
    for line in lines:
        print(row(f"{line.gpu}, predicted", *line[1:]))
    if out is not None:
        facts = {
            "schema_version": 1,
            "command": "benchmarks.hardware_model",
            "config": {"question": question, "model": asdict(LLAMA_8B)},
            "gpus": {name: asdict(GPUS[name]) for name in NAMES},
            "lines": [
                {
                    name: float(f"{value:.6g}") if isinstance(value, float) else value
                    for name, value in line._asdict().items()
                }
                for line in lines
            ],
        }
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
