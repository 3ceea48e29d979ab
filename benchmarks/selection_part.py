"""What studies that choose something have in common: questions of the selection part, arguments, JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ragblend.bench.common.configs import QualityConfig


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Those of every such study, to which it may add its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="musique", help="musique, nq, lookup or a file, as `bench quality` has it")
    parser.add_argument("--part", default="selection")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--ratios", type=float, nargs="+", help="of the chunk tokens, recomputed (default .05 and .15)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[], help="charged budgets instead, at 32 layers")
    parser.add_argument("--contexts", nargs="+", default=["none"], help="what the chunks are stored in")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser


def config_of(given: argparse.Namespace, rules: tuple[str, ...]) -> QualityConfig:
    """The study of `rules` that was asked for. Sets the threads."""
    torch.set_num_threads(given.threads)
    return QualityConfig(
        model=given.model,
        data=given.data,
        part=given.part,
        num_questions=given.questions,
        chunk_tokens=given.chunk_tokens,
        modes=("reuse", "blend"),
        rules=rules,
        ratios=None if given.ratios is None else tuple(given.ratios),
        budgets=tuple(given.budgets),
        contexts=tuple(given.contexts),
        threads=given.threads,
    )


def write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Into the file that was asked for, if one was."""
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
