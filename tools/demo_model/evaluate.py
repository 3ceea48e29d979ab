"""Exact match of the demo model on held-out questions, with full prefill and with full KV reuse.

Plain torch, no engine: this steers training and checks the engine's figures from outside. Every story uses only
held-out names, pairs and question phrasings. Full reuse computes each chunk's KV behind the prefix alone and rotates
the keys to their place in the prompt. Greedy decoding gives the gold answer exactly when the gold token is the
most likely one at every step, so one forward pass over prompt and answer decides it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ragblend.demo import WEIGHTS
from ragblend.intervals import wilson_interval
from tools.demo_model.cases import Case, Setting, make_cases
from tools.demo_model.model import DemoModel, load_shipped, rope, rotate
from tools.demo_model.questions import REFERENCE_KINDS
from tools.demo_model.tokenizer import build_tokenizer


@torch.no_grad()
def raw_kv(model: DemoModel, ids: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys before RoPE and values, [B, H, T, D] each, layer by layer, of rows computed alone."""
    cos, sin = rope(model.config, positions)
    hidden, layers = model.emb(ids), []
    for layer in model.decoder_layers():
        q, k, v = layer.qkv(hidden)
        layers.append((k, v))
        hidden = layer.finish(hidden, rotate(q, cos, sin), rotate(k, cos, sin), v)
    return layers


@torch.no_grad()
def full_logits(model: DemoModel, case: Case) -> Tensor:
    """Logits [A, V] that predict the answer's tokens, everything prefilled."""
    ids = [token for segment in case.segments for token in segment] + case.suffix + case.answer[:-1]
    cos, sin = rope(model.config, torch.arange(len(ids))[None])
    hidden, _ = model(torch.tensor([ids]), cos, sin)
    return model.logits(hidden[0, -len(case.answer) :])


@torch.no_grad()
def reuse_logits(model: DemoModel, case: Case) -> Tensor:
    """The same with every chunk's KV computed behind the prefix alone, keys rotated to their place, nothing else."""
    prefix, chunks = case.segments[0], case.segments[1:]
    longest = max(map(len, chunks))
    rows = torch.tensor([prefix + chunk + [0] * (longest - len(chunk)) for chunk in chunks])
    alone = raw_kv(model, rows, torch.arange(rows.shape[1])[None].expand_as(rows))
    start = len(prefix)
    context = case.num_context_tokens
    tail = torch.tensor([case.suffix + case.answer[:-1]])
    spot = torch.arange(context + tail.shape[1])[None]
    cos, sin = rope(model.config, spot)
    mask = spot[0][None] <= spot[0, context:, None]
    hidden = model.emb(tail)
    for layer, (keys, values) in zip(model.decoder_layers(), alone, strict=True):
        spans = [(0, 0, start)] + [(row, start, start + len(chunk)) for row, chunk in enumerate(chunks)]
        stored = torch.cat([keys[row, :, first:last] for row, first, last in spans], 1)[None]
        stored_values = torch.cat([values[row, :, first:last] for row, first, last in spans], 1)[None]
        q, k, v = layer.qkv(hidden)
        placed = rotate(torch.cat([stored, k], 2), cos, sin)
        q = rotate(q, cos[:, :, context:], sin[:, :, context:])
        hidden = layer.finish(hidden, q, placed, torch.cat([stored_values, v], 2), mask[None, None])
    return model.logits(model.norm(hidden[0, -len(case.answer) :]))


def is_exact(logits: Tensor, case: Case) -> bool:
    """Whether greedy decoding gives the answer and stops."""
    return logits.argmax(-1).tolist() == case.answer


def score(model: DemoModel, cases: Sequence[Case], reuse: bool = True) -> dict[str, dict[str, float]]:
    """Exact match by kind, and `all` and `references` (the kinds that need an earlier chunk), with the guess rate."""
    model.eval()
    results: dict[str, list[tuple[float, float, float, float]]] = {}
    for case in cases:
        full = is_exact(full_logits(model, case), case)
        reused = is_exact(reuse_logits(model, case), case) if reuse else math.nan
        row = (float(full), float(reused), case.question.guess, float(case.num_context_tokens))
        names = [case.question.kind, "all"] + (["references"] if case.question.kind in REFERENCE_KINDS else [])
        for name in names:
            results.setdefault(name, []).append(row)
    table: dict[str, dict[str, float]] = {}
    for name, rows in results.items():
        full_share, reuse_share, guess, tokens = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        low, high = wilson_interval(full_share, len(rows))
        table[name] = {
            "num_questions": len(rows), "full": round(full_share, 4), "full_low": round(low, 4),
            "full_high": round(high, 4), "reuse": round(reuse_share, 4), "guess": round(guess, 4),
            "context_tokens": round(tokens, 1),
        }  # fmt: skip
    return table


SETTINGS = (
    (Setting(6, 200), 1.0), (Setting(4, 256), 0.35), (Setting(8, 256, True), 0.35), (Setting(8, 1024, True), 0.15),
    (Setting(16, 1024, True), 0.15), (Setting(16, 4096, True), 0.05),
)  # fmt: skip
"""Contexts to measure, with the share of the questions each gets."""


def measure(model: DemoModel, tokenizer: Tokenizer, per_kind: int, seed: int = 4242) -> dict[str, Any]:
    """The model's scores in every setting, as one JSON object; a table goes to stderr."""
    runs: list[dict[str, Any]] = []
    for setting, share in SETTINGS:
        cases = make_cases(tokenizer, max(1, round(per_kind * share)), setting, seed)
        for kind, row in score(model, cases).items():
            runs.append({**setting._asdict(), "kind": kind, **row})
            print(
                f"{setting.num_chunks:>3} chunks {row['context_tokens']:>6.0f} tokens {kind:<15}"
                f"{row['num_questions']:>5.0f} full {row['full']:.3f}  reuse {row['reuse']:.3f}"
                f"  guess {row['guess']:.3f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return {"schema_version": 1, "command": "tools.demo_model.evaluate", "seed": seed, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    """Measure the shipped model; one JSON object on stdout or in --out."""
    parser = argparse.ArgumentParser(description="Exact match of the demo model, full prefill and full reuse.")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--per-kind", type=int, default=150, help="questions of each kind at 6 chunks, 200 tokens")
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = json.dumps(measure(load_shipped(options.weights), build_tokenizer(), options.per_kind, options.seed))
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
