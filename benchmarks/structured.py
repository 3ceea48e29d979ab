"""Structured outputs: number of answers that follow their schema, and the cost of the token masks.

    python -m benchmarks.structured --model demo --model models/smollm2 --answers 200 --out FILE.json

Prompts are questions over three stored passages of the embedded corpus, blended with the defaults; every second answer
is sampled at temperature 1. The schema has nested objects, enums and arrays. It limits the length of strings and lists,
because a small model might never end them. The package jsonschema, which shares no code with the generation, checks the
answers.

The cost is measured on `--compared` answers: the tokens of each are decoded again, one by one, alternately with and
without masks. `mask_share` is the share of the masked decode that is spent on masks and grammar, `masked_to_free` the
ratio of both decodes. `held_to_free` compares the decode that produced the answer, in which forced tokens share a step,
with the free one. All are medians over answers. Read `measure` first.
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

from benchmarks.results import OutOption, write_result
from ragblend import Prompt, load_engine
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.decoding import Sampler
from ragblend.engine.generation import EngineRequest, GenerationStream, PrefillResult
from ragblend.engine.report import Generation
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.structured_outputs import TokenGuide
from ragblend.lab.bench.common.hardware import hardware_card, hardware_lines

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
    """Return questions over three passages each; no two prompts are equal."""
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
    """Generate the answers of one model. Return the number of valid answers, and the cost of the masks."""
    answers, costs = list[Generation](), list[dict[str, float]]()
    with load_engine(model, on_miss="inline") as engine:
        asked = prompts(num_answers)
        for chunk in {chunk for prompt in asked for chunk in prompt.chunks}:
            engine.precompute(chunk)
        # Warm-up: fills the caches of the tokenizer's words and of the grammar.
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
    """Return the cost of one answer's masks, compared with a free decode of the same tokens."""
    assert request.grammar is not None
    prefilled = engine.prefill(request)
    num_prompt_tokens, tokens = prefilled.fused.length, answer.token_ids
    free_s, masked_s, guide_s = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        for guide in (None, request.grammar.new_guide()):
            prefilled.fused.length = num_prompt_tokens  # drops the tokens of the previous decode
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
    """Return the seconds to decode `tokens` after a prompt one by one, and the part of them spent in `guide`."""
    sampler, logits, in_guide_s = Sampler(request.options), prefilled.logits, 0.0
    start_s = perf_counter()
    for token in tokens:
        if guide is not None:
            guide_start_s = perf_counter()
            logits = guide.mask_logits(logits)
            guide.accept_with_forced(token, 1)
            in_guide_s += perf_counter() - guide_start_s
        sampler.sample(logits)
        logits = engine.decode_step([token], prefilled.fused)
    return perf_counter() - start_s, in_guide_s


def is_valid(text: str) -> bool:
    """Return True if an answer is JSON and follows the schema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main(
    model: Annotated[list[str], typer.Option(help="Model, folder or 'demo'; repeat for more.")],
    answers: Annotated[int, typer.Option(min=1, help="Number of answers per model.")] = 200,
    compared: Annotated[int, typer.Option(min=1, help="Number of answers whose cost is measured.")] = 20,
    out: OutOption = None,
) -> None:
    """Measure each model. Print the hardware card and a table to stderr, and write the result as JSON."""
    card = hardware_card()
    typer.echo("\n".join(hardware_lines(card)), err=True)
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
