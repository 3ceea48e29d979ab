"""Tokens per second of ingestion into a disk store, compared with the model's prefill alone.

    python -m benchmarks.ingest --contexts none,neutral --json

Prefill and ingestion take turns on the same chunks. Prefill keeps no KV. Ingestion looks up the missing chunks, packs
and prefills them, and writes files that survive a crash. It is repeated with each context policy of `contexts`. Read
`run_ingest` first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, ClassVar

import torch
from typer import Option

from benchmarks.results import run_benchmark
from ragblend.engine.store.open import open_store
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import RagblendError
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import DEFAULT_SHAPE, BenchConfig, ChunkTokens, ShapeOption
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.output import Benchmark, result_facts
from ragblend.lab.bench.common.shapes import find_dtype
from ragblend.lab.bench.common.workloads import engine_for, make_prompts, open_directory, torch_threads
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.options import CONTEXT, ContextPolicy
from ragblend.precompute import precompute_chunks
from ragblend.prompt.types import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig(BenchConfig):
    """Options of this benchmark. Each round prefills `num_chunks` chunks, then ingests them once per context policy:
    "none", and the others in `contexts`."""

    schema_version: ClassVar[int] = 2

    shape: Annotated[str, ShapeOption] = DEFAULT_SHAPE
    num_chunks: Annotated[int, Option("--num-chunks", min=1, help="Chunks of each round.")] = 8
    chunk_tokens: ChunkTokens = 512
    repeats: Annotated[int, Option("--repeats", min=1, help="Rounds of prefill and ingestion in turns.")] = 3
    contexts: Annotated[tuple[ContextPolicy, ...], Option("--contexts", help="Context policies: none, neutral.")] = (
        "none",
    )
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1

    def resolve_options(self) -> None:
        """Raise UsageError for an unknown context policy."""
        for policy in self.contexts:
            CONTEXT.validate("context", policy)


def run_ingest(config: IngestConfig, on_progress: Progress = ignore_progress) -> Facts:
    """Run the benchmark that `config` describes. Return its JSON object.

    "runs" has one object per mode, with the median seconds over the rounds. The mode "prefill" runs the model alone.
    The mode "ingest" also writes the KV to disk.
    """
    with torch_threads(config.threads), open_directory() as directory:
        store = open_store(directory / "kv", memory_gib=0)
        with engine_for(config.shape, store, find_dtype(config.dtype)) as engine:
            rounds = time_prefill_and_ingest(engine, config, on_progress)
            bytes_per_token = engine.bytes_per_token
        tokens = config.num_chunks * config.chunk_tokens
        runs = []
        for mode in rounds[0]:
            seconds = statistics.median(times[mode] for times in rounds)
            run = {"mode": mode, "chunks": config.num_chunks, "tokens": tokens}
            runs.append({**run, "seconds": seconds, "tokens_per_s": tokens / seconds})
        return result_facts(
            config,
            config.shape,
            hardware_card(),
            stored_bytes_per_token=bytes_per_token,
            runs=runs,
            # Tokens per second of ingestion over prefill's, median of the rounds.
            ingest_over_prefill=statistics.median(times["prefill"] / times["ingest"] for times in rounds),
            # Seconds of ingestion with a context policy over those without, median of the rounds.
            context_over_none={
                policy: statistics.median(times[_mode(policy)] / times["ingest"] for times in rounds)
                for policy in config.contexts
                if policy != "none"
            },
        )


def time_prefill_and_ingest(
    engine: TransformersEngine, config: IngestConfig, on_progress: Progress
) -> list[dict[str, float]]:
    """Return one dictionary per round with the seconds of each mode. An untimed warm-up comes first.

    The modes are "prefill", "ingest" (without context) and, if `config.contexts` has "neutral", "ingest neutral".
    """
    vocabulary, count = engine.layers.config.vocab_size, config.num_chunks
    drawn, _ = make_prompts(count + 3, config.chunk_tokens, 1, 1, vocabulary)
    warm_up, chunks = drawn[count:], drawn[:count]
    policies = tuple(dict.fromkeys(("none", *config.contexts)))
    prefill_only(engine, warm_up[:1])
    for policy in policies:
        precompute_chunks(chunk_variants(warm_up, policy), engine)
    rounds = []
    for number in range(config.repeats):
        on_progress("measure", number, config.repeats)
        times = {"prefill": _measure_seconds(lambda: prefill_only(engine, chunks))}
        for policy in policies:
            made = chunk_variants(chunks, policy)
            times[_mode(policy)] = _measure_seconds(lambda made=made: _ingest_new(engine, made))  # type: ignore[misc]
            for chunk in made:
                engine.forget(chunk)
        rounds.append(times)
    return rounds


def _mode(policy: ContextPolicy) -> str:
    return "ingest" if policy == "none" else f"ingest {policy}"


@torch.inference_mode()
def prefill_only(engine: TransformersEngine, chunks: Sequence[Chunk]) -> None:
    """Run the model over each chunk after the prefix, without storing the KV."""
    device = engine.layers.device
    for chunk in chunks:
        ids = engine.default_prefix_ids + engine.renderer.chunk_ids(chunk.text)
        engine.layers.full_prefill(torch.tensor(ids, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ingest_new(engine: TransformersEngine, chunks: Sequence[Chunk]) -> None:
    report = precompute_chunks(chunks, engine)
    if report.num_new_kv != len(chunks):
        raise RagblendError(f"{report.num_new_kv} of {len(chunks)} chunks were new: the store was not empty")


COLUMNS: tuple[Column, ...] = (
    ("mode", "<16", "mode"), ("chunks", ">7", "chunks"), ("tokens", ">8", "tokens"), ("seconds", ">9.2f", "seconds"),
    ("tokens/s", ">10.1f", "tokens_per_s"),
)  # fmt: skip


def table_lines(facts: Facts) -> list[str]:
    """Return the table, then the speed of ingestion relative to prefill, and the time per policy relative to "none"."""
    config = facts["config"]
    return [
        f"{config['shape']} {config['dtype']}, {config['num_chunks']} chunks x {config['chunk_tokens']} tokens; "
        f"medians of {config['repeats']}",
        *format_table(COLUMNS, facts["runs"]),
        f"ingest over prefill: {facts['ingest_over_prefill']:.3f}",
        *(f"{policy} over none: {over:.2f} times as long" for policy, over in facts["context_over_none"].items()),
    ]


BENCHMARK = Benchmark(run_ingest, table_lines)


def _measure_seconds(work: Callable[[], None]) -> float:
    start_s = perf_counter()
    work()
    return perf_counter() - start_s


if __name__ == "__main__":
    run_benchmark(IngestConfig, BENCHMARK)
