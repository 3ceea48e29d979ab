"""`ragblend bench dtypes`: parse, measure, print. JSON on stdout, the rest on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragblend.cli_support import JsonOption, err, out, print_json, quiet_libraries, split_names, use_threads


def bench_dtypes(
    kv_dtypes: Annotated[str, typer.Option("--kv-dtypes", help="Comma-separated: int8, fp8.")] = "int8,fp8",
    questions: Annotated[int, typer.Option("--questions", help="Of the demo model; 0 leaves it out.")] = 210,
    context_tokens: Annotated[int, typer.Option("--context-tokens", help="Of their prefix and chunks, about.")] = 256,
    shape: Annotated[str, typer.Option("--shape", help="Random weights for bytes and times; '' for none.")] = (
        "llama-200m"
    ),
    prompts: Annotated[
        int, typer.Option("--prompts", help="Of the shape, for what rounding does to the first token; slow.")
    ] = 0,
    dtypes: Annotated[str, typer.Option("--dtypes", help="That the shape is timed in.")] = "float32",
    chunks: Annotated[int, typer.Option("--chunks")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 512,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 32,
    ratio: Annotated[float, typer.Option("--ratio")] = 0.15,
    rule: Annotated[str, typer.Option("--rule")] = "auto",
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs per store and mode; 0 for none.")] = 5,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; default is torch's choice.")] = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="JSON file, data/results/kv-dtypes.json; - for none.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_: JsonOption = False,
) -> None:
    """KV stored as computed, as int8 and as fp8: bytes, TTFT from disk, and what rounding does to the first token.

    Four bits are measured beside them, but cannot be stored.
    """
    use_threads(threads)
    quiet_libraries()
    from ragblend.bench.dtypes import DtypesConfig
    from ragblend.bench.dtypes import bench_dtypes as run

    config = DtypesConfig(
        kv_dtypes=tuple(split_names(kv_dtypes)),
        num_questions=questions,
        context_tokens=context_tokens,
        shape=shape or None,
        num_prompts=prompts,
        dtypes=tuple(split_names(dtypes)),
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        rule=rule,
        repeats=repeats,
        threads=threads,
        seed=seed,
    )
    facts = run(config, out_, lambda line: (err if json_ else out).print(line, markup=False))
    if json_:
        print_json(facts)
