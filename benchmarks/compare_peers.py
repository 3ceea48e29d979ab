"""Prompts for a comparison with other projects, and ragblend's own figures on them (docs/faq.md).

    make real-model
    python -m benchmarks.compare_peers --model models/smollm2 --prompts build/peers.json \\
        --out data/results/compare-ragblend.json

The prompts are those of `ragblend bench quality --data musique`: six retrieved chunks of at most 256 tokens. In
`moved` every question has different chunks. In `topics` each of a few questions recurs, each time over six of its ten
passages in another order, so that projects that sort chunks find longer common prefixes. ragblend's figures are
measured on `moved`. At commit 19c4dfd, `benchmarks/compare_kvboost.py` and `compare_contextpilot.py` read the prompts
in separate environments.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer

from benchmarks.results import ModelOption, write_result
from ragblend.corpus.embedders import load_embedder
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion.contexts import chunk_variants
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import FULL, REUSE, Configuration, timed_prefill
from ragblend.lab.quality.tasks import SYSTEM
from ragblend.prompt.types import Prompt, as_chunk

CONFIGURATIONS = (
    REUSE,
    Configuration("blend", "cacheblend", 0.15),
    Configuration("blend", "ask", 0.05),
    Configuration("blend", "ask", 0.05, context="neutral"),
)
TIMES_ASKED = 3  # each topic
EMBEDDER = "hashing"  # similarity by common words; the comparison does not depend on the quality of retrieval


def topics(asked: Sequence[tuple[str, Prompt]], passages: int, seed: int = 0) -> list[tuple[int, str, Prompt]]:
    """Return (topic number, question, prompt), `TIMES_ASKED` times for each question, in turn.

    Each prompt has a new random selection and order of the question's chunks.
    """
    rng = random.Random(seed)
    return [
        (number, question, Prompt(rng.sample(list(prompt.chunks), passages), question, SYSTEM))
        for _ in range(TIMES_ASKED)
        for number, (question, prompt) in enumerate(asked)
    ]


def prompt_facts(engine: TransformersEngine, topic: int, question: str, prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as JSON for another project: topic, question, chunk texts, and token ids split by chunk.

    The concatenated `segments` are all token ids of the prompt.
    """
    parts: list[list[int]] = []
    matched = engine.match(prompt)
    first_starts = {matched.runs[runs[0]].start for runs in matched.runs_by_chunk}
    for start, end, run in matched.parts:
        # The text after a chunk belongs to the chunk's part, and so does a later run of the chunk.
        if start in first_starts or start == 0 or (run is None and end == matched.num_tokens):
            parts.append(matched.token_ids[start:end])
        else:
            parts[-1].extend(matched.token_ids[start:end])
    return {
        "topic": topic,
        "question": question,
        "texts": [as_chunk(chunk).text for chunk in prompt.chunks],
        "segments": parts,
    }


def measure_ragblend(base: TransformersEngine, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Return a run per configuration: mean first-token KL from full prefill in nats, and median speedup of TTFT."""
    seen: dict[Configuration, list[tuple[float, float, float, bool]]] = {each: [] for each in CONFIGURATIONS}
    full_s: list[float] = []
    for prompt in prompts:
        timed: dict[Configuration, tuple[torch.Tensor, float, float]] = {}
        engines: dict[str, TransformersEngine] = {}
        for context in dict.fromkeys(each.context for each in CONFIGURATIONS):
            engines[context] = engine = with_own_store(base, system=SYSTEM, context=context)
            for variant in chunk_variants(map(as_chunk, prompt.chunks), context):
                engine.precompute(variant)
        for each in (FULL, *CONFIGURATIONS):
            engine = engines[each.context]
            request = engine.request(prompt, mode="full", max_tokens=1)
            start_s, start_cpu_s = perf_counter(), process_time()
            prefilled, _ = timed_prefill(engine, request, each)
            took_s, took_cpu_s = perf_counter() - start_s, process_time() - start_cpu_s
            timed[each] = prefilled.logits, took_s, took_cpu_s
        full, wall_s, cpu_s = timed.pop(FULL)
        full_s.append(cpu_s)
        for each, (mine, mine_s, mine_cpu_s) in timed.items():
            seen[each].append(
                (first_token_kl(full, mine), wall_s / mine_s, cpu_s / mine_cpu_s, bool(full.argmax() == mine.argmax()))
            )
    return [
        {
            **each._asdict(),
            "num_questions": len(prompts),
            "first_token_kl": mean(row[0] for row in rows),
            "speedup": median(row[1] for row in rows),
            "speedup_cpu": median(row[2] for row in rows),
            "same_first_token": mean(row[3] for row in rows),
            "full_cpu_s": median(full_s),
        }
        for each, rows in seen.items()
    ]


@torch.inference_mode()
def main(
    model: ModelOption,
    place: Annotated[Path, typer.Option("--prompts", help="JSON file to write the prompts to.")],
    data: Annotated[str, typer.Option("--data", help="Data set.")] = "musique",
    questions: Annotated[int, typer.Option("--questions", help="Number of questions in `moved`.")] = 10,
    num_topics: Annotated[int, typer.Option("--topics", help="Number of questions in `topics`.")] = 2,
    passages: Annotated[int, typer.Option("--passages", help="Passages per prompt of `topics`.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of a chunk, at most.")] = 256,
    threads: Annotated[int, typer.Option("--threads", help="Compute threads.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file of ragblend's figures. Default: none.")] = None,
) -> None:
    """Write the prompts, measure ragblend on them, print, and write JSON."""
    torch.set_num_threads(threads)
    config = QualityConfig(
        model=model, data=data, part="reported", chunk_tokens=chunk_tokens, num_questions=questions, modes=("full",),
        rules=(), threads=threads,
    )  # fmt: skip
    wide = replace(config, num_questions=num_topics, num_chunks=10)
    with load_engine(model, dtype="float32", on_miss="inline") as base:
        assert isinstance(base, TransformersEngine)
        embedder = load_embedder(EMBEDDER)
        cases = load_cases(config)
        moved = [build_prompt(case, base, embedder, config) for case in cases]
        asked = topics(
            [(case.question, build_prompt(case, base, embedder, wide)) for case in cases[:num_topics]],
            passages,
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "system": SYSTEM,
            "moved": [
                prompt_facts(base, number, case.question, prompt)
                for number, (case, prompt) in enumerate(zip(cases, moved, strict=True))
            ],
            "topics": [prompt_facts(base, *each) for each in asked],
        }
        place.write_text(json.dumps(kept) + "\n")
        runs = measure_ragblend(base, moved)
        card = hardware_card()
    for run in runs:
        print(
            f"{run['mode']:<7}{run['rule']:<12}{run['context']:<9}{run['ratio']:>5.2f}"
            f"{run['first_token_kl']:>8.3f} nats {run['speedup_cpu']:>6.1f}x"
        )
    if out is not None:
        write_result({"command": "compare_peers", "embedder": EMBEDDER, "hardware": card, "runs": runs}, out)


if __name__ == "__main__":
    typer.run(main)
