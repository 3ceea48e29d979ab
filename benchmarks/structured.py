"""Is every answer valid that is held to a schema, and what do the masks cost?

    python -m benchmarks.structured --model demo --model models/smollm2 --answers 200 --out FILE.json

Prompts are questions over three stored passages of the embedded corpus, blended as they always are; every second answer
is sampled at temperature 1. The schema has nested objects, enums and arrays, and bounds what would else have no end in
a small model: strings, numbers, lists. Answers are checked by the package jsonschema, which shares no code with what
made them.

Cost, over `--compared` of them: the answer's own tokens are decoded once more, one by one, free and masked in turns.
`mask_share` is the time in masks and in following the grammar, as a share of the masked decode, `masked_to_free` the
two side by side. `held_to_free` is the decode that gave the answer, whose forced tokens share a step, beside the free
one. All are medians over answers. Knows the engine by its guide, which it times. Read `measure` first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import jsonschema
import typer

from benchmarks.results import write_result
from ragblend import Prompt, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.decoding import Sampler
from ragblend.engine.generation import EngineRequest, GenerationStream, PrefillResult
from ragblend.engine.report import Generation
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.structured_outputs import TokenGuide
from ragblend.lab.bench.common.hardware import card_lines, hardware_card

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
ROUNDS = 3


def prompts(count: int) -> list[Prompt]:
    """Questions over three passages each, no two prompts the same."""
    chunks = [chunk for record in sample_corpus().records for chunk in record.chunks]
    asked = ("What is this about?", "Who or what is named, and where?", "What happened, and in which year?")
    return [
        Prompt(
            [chunks[(number + NUM_CHUNKS * step) % len(chunks)] for step in range(NUM_CHUNKS)],
            f"{asked[number % len(asked)]} Answer in JSON with the fields {', '.join(SCHEMA['properties'])}.",
        )
        for number in range(count)
    ]


def measure(model: str, num_answers: int, num_compared: int) -> dict[str, Any]:
    """One row: answers of one model, how many are valid, and what it cost."""
    answers, costs = list[Generation](), list[dict[str, float]]()
    with load_engine(model, on_miss="inline") as engine:
        asked = prompts(num_answers)
        for chunk in {chunk for prompt in asked for chunk in prompt.chunks}:
            engine.precompute(chunk)
        # Warm-up: the tokenizer's words, the grammar and what is learnt of it.
        engine.generate(asked[0], structured_outputs={"json": SCHEMA}, max_tokens=MAX_TOKENS)
        for number, prompt in enumerate(asked):
            request = engine.request(
                prompt,
                structured_outputs={"json": SCHEMA},
                temperature=float(number % 2),
                seed=number,
                max_tokens=MAX_TOKENS,
            )
            stream = GenerationStream(engine, request)
            for _ in stream:
                pass
            answers.append(stream.result)
            if number < num_compared:
                costs.append(compared(engine, request, stream.result))
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "model": Path(model).name,
        "num_answers": num_answers,
        "num_valid": sum(is_valid(answer.text) for answer in answers),
        "num_finished": sum(answer.finish_reason == "stop" for answer in answers),
        "mean_tokens": num_tokens / num_answers,
        "num_compared": num_compared,
        **{name: median(cost[name] for cost in costs) for name in costs[0]},
    }


def compared(engine: TransformersEngine, request: EngineRequest, answer: Generation) -> dict[str, float]:
    """What the masks of one answer cost, beside a free decode of the same tokens."""
    assert request.grammar is not None
    prefilled = engine.prefill(request)
    num_prompt_tokens, tokens = prefilled.fused.length, answer.token_ids
    free_s, masked_s, guide_s = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        for guide in (None, request.grammar.guide()):
            prefilled.fused.length = num_prompt_tokens  # the tokens behind it are written over
            taken_s, in_guide_s = decoded(engine, request, prefilled, tokens, guide)
            (free_s if guide is None else masked_s).append(taken_s)
            guide_s += [] if guide is None else [in_guide_s]
    return {
        "free_ms_per_token": median(free_s) / len(tokens) * 1e3,
        "mask_us_per_token": median(guide_s) / len(tokens) * 1e6,
        "mask_share": median(guide_s) / median(masked_s),
        "masked_to_free": median(masked_s) / median(free_s),
        "held_to_free": answer.report.decode_s / median(free_s),
    }


def decoded(
    engine: TransformersEngine,
    request: EngineRequest,
    prefilled: PrefillResult,
    tokens: Sequence[int],
    guide: TokenGuide | None,
) -> tuple[float, float]:
    """Seconds to decode `tokens` behind a prompt one by one, each chosen as ever, and those of them in `guide`."""
    sampler, logits, in_guide_s = Sampler(request.options), prefilled.logits, 0.0
    start_s = perf_counter()
    for token in tokens:
        if guide is not None:
            guide_start_s = perf_counter()
            logits = guide.mask_logits(logits)
            guide.accept_token(token, 1)
            in_guide_s += perf_counter() - guide_start_s
        sampler.sample(logits)
        logits = engine.decode_step([token], prefilled.fused)
    return perf_counter() - start_s, in_guide_s


def is_valid(text: str) -> bool:
    """Whether an answer is JSON, and the schema's."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main(
    model: Annotated[list[str], typer.Option(help="Models, each a row.")],
    answers: Annotated[int, typer.Option(min=1, help="Answers of each.")] = 200,
    compared: Annotated[int, typer.Option(min=1, help="Answers of which the masks' cost is measured.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes; else to stdout.")] = None,
) -> None:
    """Measure, print a card, a table and the JSON."""
    card = hardware_card()
    typer.echo("\n".join(card_lines(card)), err=True)
    typer.echo(f"{'model':<12}{'valid':>10}{'tokens':>8}{'free ms':>9}{'masks':>8}{'held':>8}", err=True)
    runs = []
    for each in model:
        run = measure(each, answers, min(compared, answers))
        runs.append(run)
        typer.echo(
            f"{run['model']:<12}{run['num_valid']:>5}/{answers:<4}{run['mean_tokens']:>8.1f}"
            f"{run['free_ms_per_token']:>9.2f}{run['mask_share']:>8.1%}{run['held_to_free']:>8.2f}",
            err=True,
        )
    write_result({"command": "benchmarks.structured", "hardware": card, "schema": SCHEMA, "runs": runs}, out)


if __name__ == "__main__":
    typer.run(main)
