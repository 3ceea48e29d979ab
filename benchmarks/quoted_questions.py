"""Questions that quote a stored chunk: an FAQ whose questions are asked word for word.

    python -m benchmarks.quoted_questions --model models/smollm2 --out data/results/quoted-questions.json

The chunks of an FAQ hold questions and answers, so a user's question may be part of a stored chunk. If its KV were
taken from there, the question would not have attended to the prompt. Each question is asked twice: over entries that
quote it, and over the same passages without their questions. The answers of blending should be those of full prefill as
often in both. Read `compare` first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer
from torch import Tensor

from benchmarks.results import ModelOption, OutOption, write_result
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.generation import GenerationStream
from ragblend.engine.load import load_engine
from ragblend.engine.report import Generation
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.intervals import wilson_interval
from ragblend.lab.quality.data import find_data
from ragblend.options import Mode
from ragblend.prompt.types import Prompt

NUM_ENTRIES, PASSAGE_CHARACTERS, ANSWER_TOKENS = 5, 400, 8


class Comparison(NamedTuple):
    """Closeness of blending to full prefill, over all questions."""

    num_questions: int
    same_answer: float  # share of questions whose first ANSWER_TOKENS tokens are the same
    interval: tuple[float, float]  # of that share, 95 %
    first_token_kl: float  # mean, nats
    reused_share: float  # of the prompt's tokens, mean


def compare(engine: TransformersEngine, entries: Sequence[str], questions: Sequence[str], seed: int = 0) -> Comparison:
    """Ask each question over its own entry and NUM_ENTRIES - 1 others, by blending and by full prefill."""
    draw = random.Random(seed)
    same, divergences, reused = [], [], []
    for number, question in enumerate(questions):
        others = draw.sample([place for place in range(len(entries)) if place != number], NUM_ENTRIES - 1)
        places = draw.sample([number, *others], NUM_ENTRIES)
        chunks = [entries[place] for place in places]
        for chunk in chunks:
            engine.precompute(chunk)
        prompt = Prompt(chunks, question)
        full, full_logits = _answer(engine, prompt, "full")
        blended, blended_logits = _answer(engine, prompt, "blend")
        same.append(full.token_ids == blended.token_ids)
        divergences.append(first_token_kl(full_logits, blended_logits))
        reused.append(blended.report.num_reused_tokens / blended.report.prompt_tokens)
    interval = wilson_interval(mean(same), len(same))
    return Comparison(len(same), mean(same), interval, mean(divergences), mean(reused))


def _answer(engine: TransformersEngine, prompt: Prompt, mode: Mode) -> tuple[Generation, Tensor]:
    """Return the greedy answer, and the logits [vocabulary] of its first token."""
    kept: list[Tensor] = []
    request = engine.request(prompt, mode=mode, max_tokens=ANSWER_TOKENS)
    stream = GenerationStream(engine, request, lambda prefilled, _: kept.append(prefilled.logits))
    for _ in stream:
        pass
    return stream.result, kept[0]


def main(
    model: ModelOption,
    questions: Annotated[int, typer.Option("--questions", help="Number of entries, each asked once.")] = 300,
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
    out: OutOption = None,
) -> None:
    """Compare questions that a stored chunk quotes with questions that none does."""
    quiet_libraries()
    set_num_threads(threads)
    records = json.loads(find_data("nq").read_text())[:questions]
    asked = [record["question"].strip().rstrip("?").capitalize() + "?" for record in records]
    passages = [record["text"][:PASSAGE_CHARACTERS].rpartition(" ")[0] for record in records]
    quoting = [f"{question}\n{passage}" for question, passage in zip(asked, passages, strict=True)]
    found: dict[str, Any] = {}
    with load_engine(model, None, on_miss="inline") as engine:
        if not isinstance(engine, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        for name, entries in (("quoted", quoting), ("not quoted", passages)):
            result = compare(engine, entries, asked)
            found[name] = result._asdict()
            print_line(
                f"{name}: the same answer for {result.same_answer:.1%} of {result.num_questions} "
                f"({result.interval[0]:.1%} to {result.interval[1]:.1%}), first token {result.first_token_kl:.3f} "
                f"nats, {result.reused_share:.0%} of the prompt reused"
            )
    write_result({"model": Path(model).name, **found}, out)


if __name__ == "__main__":
    typer.run(main)
