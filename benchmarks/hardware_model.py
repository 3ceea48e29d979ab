"""Estimated cost of blending on a GPU, from bytes and floating-point operations. Nothing is measured.

    python -m benchmarks.hardware_model                         # Llama 3.1 8B on an A100 and an H100
    python -m benchmarks.hardware_model --ratio 0.15 --tokens 4096,32768 --out FILE.json

A layer takes as long as the slower of its arithmetic and its memory traffic (the roofline model: Williams, Waterman,
Patterson, CACM 2009), part by part, while stored KV is copied over the bus. Peaks are from NVIDIA's data sheets;
`--efficiency` is the share of them that is reached. Recomputed tokens are at random positions, so nearly each is a
separate run, the worst case; the GPU's cache is ignored.
`host s` is the time of the host, which starts every kernel and copies stored KV to the device layer by layer; `as run`
is the speedup if the host takes longer than the GPU. The host's figures are those that `benchmarks.gpu` measured with
transformers. Read `estimate` first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ragblend.engine.vllm.worker_side.attention_calls import cut_runs

BYTES = 2  # size of a bfloat16
ASKED_SHARE = 0.8  # share of the layers that the question runs through first
ATTENTION_TILE = 128  # queries that share one reading of the keys in a full prefill
TILE_ROWS = 64  # recomputed rows that share one reading of the keys, by runs and together
# The host's figures in data/results/gpu-h100.json: kernels and copies started per layer of `ask`, seconds for each (of
# `fuse_s` and `stall_s` at 4,096 tokens), and bytes per second copied from page-locked memory.
LAUNCHES_PER_LAYER, LAUNCH_S, LOADED_PER_S = 190, 21e-6, 54e9


@dataclass(frozen=True)
class Gpu:
    """Peak rates per second: dense bfloat16 operations, bytes of GPU memory, and bytes of the bus to the host."""

    flops: float
    memory: float
    bus: float


# NVIDIA A100 80GB SXM and H100 SXM data sheets; the bus is PCIe 4.0 and 5.0 x16, one way.
GPUS = {"A100": Gpu(312e12, 2.039e12, 32e9), "H100": Gpu(989e12, 3.35e12, 64e9)}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. `weights`: the number of weights of one layer."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    weights: int

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV of one token in one layer."""
        return 2 * self.kv_heads * self.head_size * BYTES

    def linear_flops(self, rows: int) -> float:
        """Return the operations of one layer's matrices for some tokens."""
        return 2.0 * self.weights * rows

    def attention_flops(self, pairs: float) -> float:
        """Return the operations of attention for a number of query-key pairs: scores, and the sum of values."""
        return 4.0 * self.heads * self.head_size * pairs


# Llama 3.1 8B: hidden 4096, intermediate 14336.
LLAMA_8B = Model(32, 32, 8, 128, 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)


class Cost(NamedTuple):
    """Number of operations, and of bytes read or written in the GPU's memory."""

    flops: float
    memory_bytes: float

    def seconds(self, gpu: Gpu, efficiency: float) -> float:
        """Return the larger of the seconds for the operations and for the memory traffic."""
        return max(self.flops / gpu.flops, self.memory_bytes / gpu.memory) / efficiency


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


def kv_reads_by_tile(positions: Sequence[int]) -> int:
    """Return the number of tokens whose KV is read if every TILE_ROWS of the ascending positions share one reading.

    >>> kv_reads_by_tile([9, 19, 20, 21])
    22
    """
    return sum(
        positions[min(start + TILE_ROWS, len(positions)) - 1] + 1 for start in range(0, len(positions), TILE_ROWS)
    )


def full(model: Model, tokens: int) -> list[Cost]:
    """Return the cost of one layer of full prefill: its matrices, and its attention."""
    read = sum(min(start + ATTENTION_TILE, tokens) for start in range(0, tokens, ATTENTION_TILE))
    return [
        Cost(model.linear_flops(tokens), model.weights * BYTES),
        Cost(model.attention_flops(tokens * (tokens + 1) / 2), read * model.kv_bytes),
    ]


def recomputed(model: Model, rows: list[int], together: bool) -> list[Cost]:
    """Return the cost of one layer over the tokens at `rows`, one by one or together, with stored KV placed."""
    read = kv_reads_by_tile(rows) if together else kv_reads_by_run(rows)
    return [
        Cost(model.linear_flops(len(rows)), model.weights * BYTES),
        Cost(model.attention_flops(sum(rows) + len(rows)), read * model.kv_bytes),
    ]


def asked(model: Model, tokens: int, question: int) -> list[Cost]:
    """Return the cost of one layer over the question alone, which reads the prompt's KV once."""
    return [
        Cost(model.linear_flops(question), model.weights * BYTES),
        Cost(model.attention_flops(question * tokens), tokens * model.kv_bytes),
    ]


def seconds(costs: list[Cost], gpu: Gpu, efficiency: float) -> float:
    """Return the seconds of parts that run in sequence."""
    return sum(cost.seconds(gpu, efficiency) for cost in costs)


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
    gpu: str, tokens: int, ratio: float, question: int, efficiency: float, model: Model = LLAMA_8B, seed: int = 0
) -> Line:
    """Estimate full prefill, and blending that recomputes the share `ratio` of all tokens except the question's."""
    device, chunk_tokens = GPUS[gpu], tokens - question
    rows = sorted(random.Random(seed).sample(range(chunk_tokens), round(ratio * chunk_tokens)))
    placed = Cost(0.0, 2.0 * chunk_tokens * model.kv_bytes)  # read and written again
    ask_s = ASKED_SHARE * model.layers * seconds(asked(model, tokens, question), device, efficiency)
    bus_s = model.layers * chunk_tokens * model.kv_bytes / device.bus
    times = []
    for together in (False, True):
        layer_s = seconds([*recomputed(model, rows, together), placed], device, efficiency)
        question_s = seconds(asked(model, tokens, question), device, efficiency)
        # The question selects tokens while KV arrives; the selection is fused, and then the engine runs the question.
        times.append(max(ask_s, ASKED_SHARE * bus_s) + model.layers * (layer_s + question_s))
    full_s = model.layers * seconds(full(model, tokens), device, efficiency)
    gb = [read(rows) * model.kv_bytes / 1e9 for read in (kv_reads_by_run, kv_reads_by_tile)]
    host_s = model.layers * (LAUNCHES_PER_LAYER * LAUNCH_S + chunk_tokens * model.kv_bytes / LOADED_PER_S)
    return Line(gpu, tokens, full_s, times[0], times[1], bus_s, host_s, gb[0], gb[1])


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
    lines = [estimate(gpu, int(count), ratio, question, efficiency) for gpu in GPUS for count in tokens.split(",")]
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
            "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
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
