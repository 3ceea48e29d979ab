"""Estimated cost of blending on a GPU, from bytes and floating-point operations. Nothing is measured.

    python -m benchmarks.hardware_model                         # Llama 3.1 8B on an A100 and an H100
    python -m benchmarks.hardware_model --ratio 0.15 --tokens 4096,32768 --out FILE.json

A layer takes as long as the slower of its arithmetic and its memory traffic, part by part, while stored KV is copied
over the bus. The costs are those of `ragblend.lab.hardware`; `--efficiency` is the share of the data sheets' rates that
is reached. Recomputed tokens are at random positions, so nearly each is a separate run, the worst case; the GPU's cache
is ignored. `host s` is the time of the host, which starts every kernel and copies stored KV to the device layer by
layer, as `benchmarks.gpu` measured it with transformers; `as run` is the speedup if the host takes longer than the GPU
and works at the same time. `ragblend plan` adds the two, as today's engine does. Read `estimate` first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ragblend.engine.vllm.worker_side.attention_calls import cut_runs
from ragblend.lab.hardware import (
    GPUS,
    LAUNCHES,
    PROBED_SHARE,
    TILE_ROWS,
    asked,
    full,
    host_s,
    kv_reads_by_tile,
    placed,
    recomputed,
    seconds,
)
from ragblend.lab.model_sizes import ModelSizes

NAMES = ("A100", "H100")
# Llama 3.1 8B: hidden 4096, intermediate 14336.
LLAMA_8B = ModelSizes(32, 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336, 4096, 32 * 2 * 1024, 32 * 8)


def kv_reads_by_run(positions: Sequence[int]) -> int:
    """Return the number of tokens whose KV is read if every run of the ascending positions reads separately.

    A long run reads once per tile, as in attention kernels.

    >>> kv_reads_by_run([9, 19, 20, 21])
    32
    """
    return sum(
        positions[end - 1] + 1
        for group in cut_runs(positions, max_rows=TILE_ROWS, max_runs=len(positions))
        for _, end in group
    )


@dataclass(frozen=True)
class Line:
    """Estimate of one prompt on one GPU.

    Seconds to the first token, of the bus and of the host, and GB of KV that attention reads in one layer.
    """

    gpu: str
    tokens: int
    full_s: float
    by_runs_s: float
    together_s: float
    bus_s: float
    host_s: float
    by_runs_gb: float
    together_gb: float


def estimate(
    gpu: str, tokens: int, ratio: float, question: int, efficiency: float, model: ModelSizes = LLAMA_8B, seed: int = 0
) -> Line:
    """Estimate full prefill, and blending that recomputes the share `ratio` of all tokens except the question's."""
    device, chunk_tokens = GPUS[gpu], tokens - question
    rows = sorted(random.Random(seed).sample(range(chunk_tokens), round(ratio * chunk_tokens)))
    read = kv_reads_by_run(rows), kv_reads_by_tile(rows)
    question_s = seconds(asked(model, tokens, question), device, efficiency)
    bus_s = model.layers * chunk_tokens * model.kv_bytes / device.bus
    times = []
    for num_read in read:
        parts = [*recomputed(model, rows, num_read), placed(model, chunk_tokens)]
        layer_s = seconds(parts, device, efficiency) + question_s
        # The question selects tokens while KV arrives; the selection is fused, and then the engine runs the question.
        asking_s = PROBED_SHARE * max(model.layers * question_s, bus_s)
        times.append(asking_s + model.layers * layer_s)
    full_s = model.layers * seconds(full(model, tokens), device, efficiency)
    gb = [num_read * model.kv_bytes / 1e9 for num_read in read]
    started_s = host_s(model, device, LAUNCHES["probe"], chunk_tokens)
    return Line(gpu, tokens, full_s, times[0], times[1], bus_s, started_s, gb[0], gb[1])


def main(
    tokens: Annotated[
        str, typer.Option(help="Tokens of the prompts, comma-separated.")
    ] = "1024,3072,8192,32768,131072",
    ratio: Annotated[float, typer.Option(help="Share of the chunks' tokens that is recomputed.")] = 0.05,
    question: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
    efficiency: Annotated[float, typer.Option(help="Share of the peak rates that is reached.")] = 0.6,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result. Default: none.")] = None,
) -> None:
    """Print a table of the estimates, and write them as JSON."""
    lines = [estimate(gpu, int(count), ratio, question, efficiency) for gpu in NAMES for count in tokens.split(",")]
    print("gpu    tokens   full s   by runs  together   bus s  host s   as run   GB by runs  GB together")
    for line in lines:
        print(
            f"{line.gpu:5}{line.tokens:8}{line.full_s:9.3f}{line.full_s / line.by_runs_s:9.1f}x"
            f"{line.full_s / line.together_s:9.1f}x{line.bus_s:8.3f}{line.host_s:8.3f}"
            f"{line.full_s / max(line.together_s, line.host_s):8.1f}x{line.by_runs_gb:12.2f}{line.together_gb:12.2f}"
        )
    if out is not None:
        facts = {
            "schema_version": 1,
            "command": "benchmarks.hardware_model",
            "config": {"ratio": ratio, "question": question, "efficiency": efficiency, "model": asdict(LLAMA_8B)},
            "gpus": {name: asdict(GPUS[name]) for name in NAMES},
            "lines": [
                {
                    name: float(f"{value:.6g}") if isinstance(value, float) else value
                    for name, value in asdict(line).items()
                }
                for line in lines
            ],
        }
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
