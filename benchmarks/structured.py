"""Is every answer valid that is held to a schema, and what do the masks cost?

    python -m benchmarks.structured --model demo --model models/smollm2 --answers 200 --out FILE.json

Prompts are questions over three stored passages of the embedded corpus, blended as they always are; every second answer
is sampled at temperature 1. The schema has nested objects, enums and arrays, and bounds what would else have no end in
a small model: strings, numbers, lists. Answers are checked by the package jsonschema, which shares no code with what
made them. `mask_share` is the time in masks, in forced tokens and in following the grammar, as a share of decoding;
`same_choice`: how often the token chosen was the likeliest of all, where that one was allowed (greedy answers: always).
Knows the engine by its guide, which it times. Read `measure` first.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import jsonschema
import typer

from ragblend import SegmentedPrompt, load_engine
from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.generation import GenerationStream
from ragblend.engine.hf.constrain import CompiledGrammar, TokenGuide
from ragblend.engine.hf.engine import TransformersEngine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "minLength": 1, "maxLength": 24},
        "confidence": {"enum": ["low", "medium", "high"]},
        "where": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kind": {"enum": ["city", "river", "building", "other"]},
                "known": {"type": "boolean"},
            },
            "required": ["name", "kind", "known"],
            "additionalProperties": False,
        },
        "sources": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"passage": {"type": "integer", "minimum": 1, "maximum": 3}},
                "required": ["passage"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["answer", "confidence", "where", "sources"],
    "additionalProperties": False,
}
MAX_TOKENS = 256
NUM_CHUNKS = 3


class TimedGuide(TokenGuide):
    """A guide that knows how long it took, and how often its mask changed the choice."""

    taken_s = 0.0
    num_forced = num_allowed = num_same = 0

    def mask(self, logits: Any, greedy: bool = False) -> Any:
        """Timed."""
        start_s = perf_counter()
        masked = super().mask(logits, greedy)
        self.taken_s += perf_counter() - start_s
        best = int(logits.argmax())
        if masked[best] == logits[best]:
            self.num_allowed += 1
            self.num_same += int(masked.argmax()) == best
        return masked

    def follow(self, token: int, room: int) -> list[int]:
        """Timed."""
        start_s = perf_counter()
        tokens = super().follow(token, room)
        self.taken_s += perf_counter() - start_s
        self.num_forced += len(tokens) - 1
        return tokens


class TimedGrammar(CompiledGrammar):
    """Hands out timed guides, and keeps them."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        super().__init__(grammar._tokenizer, grammar._grammar)
        self._of = grammar
        self.guides: list[TimedGuide] = []

    def guide(self) -> TimedGuide:
        """What holds one answer to it."""
        self.guides.append(TimedGuide(self._of.matcher(), self._tokenizer.vocab_size))
        return self.guides[-1]


def prompts(count: int) -> list[SegmentedPrompt]:
    """Questions over three passages each, no two prompts the same."""
    chunks = [chunk for record in sample_corpus().records for chunk in record.chunks]
    asked = ("What is this about?", "Who or what is named, and where?", "What happened, and in which year?")
    return [
        SegmentedPrompt(
            [chunks[(number + NUM_CHUNKS * step) % len(chunks)] for step in range(NUM_CHUNKS)],
            f"{asked[number % len(asked)]} Answer in JSON with the fields {', '.join(SCHEMA['properties'])}.",
        )
        for number in range(count)
    ]


def measure(model: str, num_answers: int) -> dict[str, Any]:
    """One row: answers of one model, how many are valid, and what it cost."""
    valid, finished, rows, compile_s = 0, 0, list[dict[str, float]](), list[float]()
    with load_engine(model, on_miss="inline") as engine:
        asked = prompts(num_answers)
        for prompt in asked:
            for chunk in prompt.chunks:
                engine.precompute(chunk)
        engine.generate(asked[0], structured_outputs={"json": SCHEMA}, max_tokens=8)  # warm-up: words of the tokenizer
        for number, prompt in enumerate(asked):
            start_s = perf_counter()
            grammar = engine._grammars.compile({"json": SCHEMA})
            compile_s.append(perf_counter() - start_s)
            answer, row = timed_answer(engine, prompt, TimedGrammar(grammar), number)
            rows.append(row)
            finished += answer.finish_reason == "stop"
            valid += is_valid(answer.text)
    decode_s, guide_s = sum(row["decode_s"] for row in rows), sum(row["guide_s"] for row in rows)
    steps = sum(row["num_steps"] for row in rows)
    return {
        "model": Path(model).name,
        "num_answers": num_answers,
        "num_valid": valid,
        "num_finished": finished,
        "mean_tokens": sum(row["num_tokens"] for row in rows) / num_answers,
        "forced_share": sum(row["num_forced"] for row in rows) / sum(row["num_tokens"] for row in rows),
        "same_choice_greedy": sum(row["num_same"] for row in rows[::2]) / sum(row["num_allowed"] for row in rows[::2]),
        "compile_ms": median(compile_s) * 1e3,
        "guide_us_per_step": guide_s / steps * 1e6,
        "step_ms": (decode_s - guide_s) / steps * 1e3,
        "mask_share": guide_s / decode_s,
    }


def timed_answer(
    engine: TransformersEngine, prompt: SegmentedPrompt, grammar: TimedGrammar, number: int
) -> tuple[Any, dict[str, float]]:
    """One answer, and the times and counts of it."""
    request = engine.request(prompt, temperature=float(number % 2), seed=number, max_tokens=MAX_TOKENS)
    stream = GenerationStream(engine, replace(request, grammar=grammar))
    for _ in stream:
        pass
    guide, report = grammar.guides[0], stream.result.report
    num_tokens = len(stream.result.token_ids)
    return stream.result, {
        "decode_s": report.decode_s,
        "guide_s": guide.taken_s,
        "num_tokens": num_tokens,
        "num_forced": guide.num_forced,
        "num_steps": num_tokens - guide.num_forced,
        "num_allowed": guide.num_allowed,
        "num_same": guide.num_same,
    }


def is_valid(text: str) -> bool:
    """Whether an answer is JSON, and the schema's."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main(
    model: Annotated[list[str], typer.Option(help="Models, each a row.")],
    answers: Annotated[int, typer.Option(min=2, help="Answers of each.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; else to stdout.")] = None,
) -> None:
    """Measure, print a card, a table and the JSON."""
    card = hardware_card()
    typer.echo("\n".join(card_lines(card)), err=True)
    typer.echo(f"{'model':<12}{'valid':>10}{'tokens':>8}{'forced':>8}{'step ms':>9}{'masks':>8}", err=True)
    runs = []
    for each in model:
        run = measure(each, answers)
        runs.append(run)
        typer.echo(
            f"{run['model']:<12}{run['num_valid']:>5}/{answers:<4}{run['mean_tokens']:>8.1f}{run['forced_share']:>8.0%}"
            f"{run['step_ms']:>9.2f}{run['mask_share']:>8.1%}",
            err=True,
        )
    facts = {"schema_version": 1, "command": "benchmarks.structured", "hardware": card, "schema": SCHEMA, "runs": runs}
    text = json.dumps(facts, indent=1)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
