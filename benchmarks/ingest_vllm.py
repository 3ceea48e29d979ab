"""Throughput of ingestion inside vLLM, compared with vLLM's own prefill of the same chunks.

    python -m benchmarks.ingest_vllm

Both process the requests of `ragblend ingest --backend vllm`: each chunk after the same prefix, several at a time.
"prefill" is vLLM's own, with its own batching, and stores nothing; "ingest" also copies the KV and stores it on disk.
Read `bench_ingest_vllm` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from benchmarks.throughput import ThroughputConfig
from ragblend.cli.options import json_object
from ragblend.cli.printing import print_json, print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.vllm.base_engine import INGEST_CONCURRENCY
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import PREFIX_TOKENS
from ragblend.lab.bench.common.workloads import make_prompts, vocab_size
from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card
from ragblend.prompt.types import Chunk, Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class IngestRun:
    """Result of one mode: the median of the rounds. `tokens`: those of the chunks, without the prefix."""

    mode: str
    chunks: int
    tokens: int
    seconds: float
    tokens_per_s: float


def bench_ingest_vllm(
    *,
    shape: str | None = None,
    model: str | None = None,
    chunks: int = 16,
    chunk_tokens: int = 512,
    dtype: str = "float32",
    threads: int | None = None,
    repeats: int = 3,
    store: Path | None = None,
    vllm_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure both modes. Return a JSON object, in which `ingest_over_prefill` is the median ratio of their speeds.

    The rounds alternate, after one uncounted round of each. vLLM runs in this process, so `ingest_over_prefill_cpu`
    compares the CPU time of all work, storing included. `shape` is llama-50m unless a `model` is given.
    """
    config = ThroughputConfig(
        shape=shape, model=model, num_chunks=chunks, pool=chunks, chunk_tokens=chunk_tokens, dtype=dtype,
        threads=threads, vllm_options=vllm_options or {},
    )  # fmt: skip
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; choose 1 or more")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    rounds: list[tuple[_Taken, _Taken]] = []
    length = PREFIX_TOKENS + chunk_tokens + 2
    with open_vllm(
        config, config.shape, config.model, num_prompts=INGEST_CONCURRENCY, prompt_tokens=length, store=store
    ) as engine:
        pool, _ = make_prompts(chunks, chunk_tokens, 1, 1, vocab_size(engine), seed)
        for number in range(repeats + 1):
            prefill, ingest = _timed(lambda: _prefill(engine, pool)), _timed(lambda: engine.precompute_all(pool))
            for chunk in pool:
                engine.forget(chunk)
            if number:  # the first round is the warm-up
                rounds.append((prefill, ingest))
                echo(f"round {number}: prefill {prefill.s:.2f} s, ingest {ingest.s:.2f} s")
        name = engine.name
    tokens = chunks * chunk_tokens
    runs = []
    for mode, taken in zip(("prefill", "ingest"), zip(*rounds, strict=True), strict=True):
        seconds = median(each.s for each in taken)
        runs.append(IngestRun(mode, chunks, tokens, seconds, tokens / seconds))
        echo(f"{mode:8} {tokens / seconds:8.0f} tokens per second")
    ratio = median(prefill.s / ingest.s for prefill, ingest in rounds)
    cpu_ratio = median(prefill.cpu_s / ingest.cpu_s for prefill, ingest in rounds)
    echo(f"ingest over prefill: {ratio:.3f}, in CPU seconds {cpu_ratio:.3f}")
    facts = {"shape": config.shape, "model": model, "chunks": chunks, "chunk_tokens": chunk_tokens, "dtype": dtype}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "benchmarks.ingest_vllm",
        "hardware": vllm_hardware_card(),
        "config": {**facts, "backend": "vllm", "threads": threads, "repeats": repeats, "seed": seed},
        "model": name,
        "rounds": [{"prefill": prefill._asdict(), "ingest": ingest._asdict()} for prefill, ingest in rounds],
        "runs": [asdict(run) for run in runs],
        "ingest_over_prefill": ratio,
        "ingest_over_prefill_cpu": cpu_ratio,
    }


class _Taken(NamedTuple):
    """Seconds and CPU seconds, of all threads, of one pass over the chunks."""

    s: float
    cpu_s: float


def _timed(work: Callable[[], Iterator[Any]]) -> _Taken:
    start_s, start_cpu_s = perf_counter(), process_time()
    for _ in work():
        pass
    return _Taken(perf_counter() - start_s, process_time() - start_cpu_s)


def _prefill(engine: VllmEngine, chunks: Sequence[Chunk]) -> Iterator[Any]:
    """Prefill every chunk by vLLM without its prefix cache, with as many concurrent requests as ingestion has."""

    def one(chunk: Chunk) -> None:
        with closing(engine.run_request(engine.request(Prompt([chunk], "0"), mode="full", max_tokens=1))) as deltas:
            for _ in deltas:
                pass

    with ThreadPoolExecutor(INGEST_CONCURRENCY) as pool:
        yield from pool.map(one, chunks)


def main(
    shape: str | None = None,
    model: str | None = None,
    num_chunks: int = 16,
    chunk_tokens: int = 512,
    dtype: str = "float32",
    threads: int = 1,
    repeats: int = 3,
    store: Path | None = None,
    vllm_options: Annotated[str | None, typer.Option(help="JSON object of vLLM's engine options.")] = None,
    seed: int = 0,
) -> None:
    """Measure both modes. Print each round to stderr and one line of JSON to stdout."""
    set_num_threads(threads)
    quiet_libraries()
    facts = bench_ingest_vllm(
        shape=shape,
        model=model,
        chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        store=store,
        vllm_options=json_object(vllm_options, "--vllm-options"),
        seed=seed,
        echo=print_notice,
    )
    print_json(facts)


if __name__ == "__main__":
    typer.run(main)
