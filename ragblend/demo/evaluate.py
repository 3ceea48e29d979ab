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
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ragblend.demo.model import DemoModel, load_shipped, rope, rotate
from ragblend.demo.questions import KINDS, REFERENCE_KINDS, Question, all_questions
from ragblend.demo.stories import Plan, Story, focus, tell
from ragblend.demo.tokenizer import (
    ANSWER,
    BOS,
    DOC,
    EOS,
    QUESTION,
    SYSTEM,
    SYSTEM_TEXTS,
    build_tokenizer,
    encode,
    token_id,
)
from ragblend.intervals import wilson_interval


class Case(NamedTuple):
    """One held-out question: the prompt's segments as ids (prefix, then chunks), the suffix and the answer's ids.

    `texts` are the chunks and `system` the system text that the segments were made of. `opens_run` says of each chunk
    whether it can stand without those before it, so that the runs may change places."""

    question: Question
    segments: list[list[int]]
    suffix: list[int]
    answer: list[int]
    texts: tuple[str, ...] = ()
    system: str | None = None
    opens_run: tuple[bool, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        """Prefix and chunks."""
        return sum(map(len, self.segments))


class Setting(NamedTuple):
    """A context: how many chunks, about how many tokens in all, whether a system text stands before them."""

    num_chunks: int = 6
    num_tokens: int = 200
    system: bool = False


def make_cases(
    tokenizer: Tokenizer,
    per_kind: int | Mapping[str, int],
    setting: Setting,
    seed: int,
    kinds: Sequence[str] = KINDS,
    keep: Callable[[Question], bool] = lambda question: True,
) -> list[Case]:
    """`per_kind` questions of every kind, all whose answer other values compete with, at most two from one story.

    A mapping says how many of which kinds; `keep` says which questions may be asked at all."""
    rng = random.Random(seed)
    wanted = per_kind if isinstance(per_kind, Mapping) else dict.fromkeys(kinds, per_kind)
    cases: dict[str, list[Case]] = {kind: [] for kind in wanted}
    while any(len(found) < wanted[kind] for kind, found in cases.items()):
        story = tell(rng, story_plan(rng, setting), "test")
        system = rng.choice(SYSTEM_TEXTS) if setting.system else None
        segments = _segments(tokenizer, story, system)
        if not 0.8 < sum(map(len, segments)) / setting.num_tokens < 1.2:
            continue
        asked = [q for q in all_questions(rng, story, "test") if q.competing and q.guess < 1 and keep(q)]
        for kind in wanted:
            options = [question for question in asked if question.kind == kind]
            for question in rng.sample(options, min(len(options), 2, wanted[kind] - len(cases[kind]))):
                suffix = [token_id(tokenizer, QUESTION), *encode(tokenizer, question.text)]
                suffix.append(token_id(tokenizer, ANSWER))
                answer = [*encode(tokenizer, question.answer), token_id(tokenizer, EOS)]
                told = Case(question, segments, suffix, answer, tuple(story.chunks), system, tuple(story.opens_run))
                cases[kind].append(told)
    return [case for found in cases.values() for case in found]


def story_plan(rng: random.Random, setting: Setting) -> Plan:
    """A story of about the setting's size whose runs of two or three chunks come in random order."""
    long = setting.num_tokens > 500
    per_chunk = setting.num_tokens / setting.num_chunks / (7.8 if long else 9)
    sentences = (max(1, math.floor(per_chunk * 0.8)), max(1, math.ceil(per_chunk * 1.2)))
    lengths: list[int] = []
    while sum(lengths) < setting.num_chunks:
        lengths.append(min(rng.choice((2, 2, 3)), setting.num_chunks - sum(lengths)))
    allowed, weights = focus(rng, (2, 3, 4) if long else (1, 2, 2))
    return Plan(
        tuple(lengths), sentences, allowed, weights, cross=0.35, inside=0.3, new=0.35, chain=0.8,
        filler=0.35 if long else 0.05, title=0.3, compound=0.15, plain=0.8,
    )  # fmt: skip


def _segments(tokenizer: Tokenizer, story: Story, system: str | None) -> list[list[int]]:
    prefix = [token_id(tokenizer, BOS)]
    if system is not None:
        prefix += [token_id(tokenizer, SYSTEM), *encode(tokenizer, system)]
    doc = token_id(tokenizer, DOC)
    return [prefix, *([doc, *encode(tokenizer, chunk)] for chunk in story.chunks)]


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
    return {"schema_version": 1, "command": "ragblend.demo.evaluate", "seed": seed, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    """Measure the shipped model; one JSON object on stdout or in --out."""
    parser = argparse.ArgumentParser(description="Exact match of the demo model, full prefill and full reuse.")
    parser.add_argument("--weights", type=Path, default=Path(__file__).parent / "weights")
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
