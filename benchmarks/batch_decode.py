"""Throughput of batched decoding compared with decoding one answer at a time: requests and tokens per second.

    python -m benchmarks.batch_decode --threads 1 --out data/results/batch-decode.json

In every round the requests are answered in turn, and then by `generate_batch` in batches of each size. The result is
the median of the rounds' ratios, after a warm-up. Every prompt is blended from stored chunks; requests are prefilled in
turn either way. `speedup` is that of whole requests, `decode_speedup` that of decoding alone. Read `measure` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import typer

from benchmarks.results import split_counts, write_both
from ragblend.cli.options import split_names
from ragblend.cli.printing import print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.report import Generation
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import load_model
from ragblend.lab.bench.common.hardware import hardware_card, hardware_lines
from ragblend.lab.bench.common.shapes import SHAPES
from ragblend.lab.bench.common.workloads import engine_for, make_engine, make_prompts
from ragblend.lab.tables import Column, format_table
from ragblend.options import ModelOptions
from ragblend.prompt.types import Prompt

NUM_ALONE = 8
"""Requests that are answered one at a time in each round."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Result of one batch size: medians over the rounds. Fields with `alone` are of requests answered one at a time.

    `cpu_speedup` and `decode_cpu_speedup` are the ratios of CPU seconds, which other processes of a shared machine
    change less. With one thread on a quiet machine both ratios are equal.
    """

    model: str
    max_num_seqs: int
    requests_per_s: float
    requests_per_s_alone: float
    step_s: float  # one decode step of the batch
    step_s_alone: float
    speedup: float  # requests per second divided by those in turn
    decode_speedup: float  # tokens per second of decoding, prefilling left out
    cpu_speedup: float
    decode_cpu_speedup: float
    num_same_answers: int  # answers with the same tokens as in turn, in the last round


class Timed:
    """Seconds per request, by clock and CPU, and seconds per decode step, of some requests."""

    def __init__(self, answer: Callable[[], list[Generation]]) -> None:
        start_s, cpu_start_s = perf_counter(), process_time()
        self.answers = answer()
        self.request_s = (perf_counter() - start_s) / len(self.answers)
        self.request_cpu_s = (process_time() - cpu_start_s) / len(self.answers)
        reports = [each.report for each in self.answers if each.report.completion_tokens > 1]
        self.step_s = fmean([each.decode_s / (each.completion_tokens - 1) for each in reports] or [0.0])


def measure(
    engine: TransformersEngine,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    answer_tokens: int,
    repeats: int,
    notify: Callable[[str], None],
) -> list[BatchRun]:
    """Measure every batch size, alternating with requests one at a time. `prompts`: as many as the largest batch."""

    def alone(max_tokens: int) -> list[Generation]:
        return [engine.generate(prompt, max_tokens=max_tokens) for prompt in prompts[:NUM_ALONE]]

    def together(size: int) -> list[Generation]:
        engine.loop.max_num_seqs = size
        return engine.generate_batch(prompts[:size], max_tokens=answer_tokens)

    engine.generate_batch(prompts[:2], max_tokens=2)  # warm-up
    rounds = []
    for number in range(repeats):
        notify(f"{engine.name}: round {number + 1} of {repeats}")
        prefilled, one_by_one = Timed(partial(alone, 1)), Timed(partial(alone, answer_tokens))
        rounds.append((prefilled, one_by_one, {size: Timed(partial(together, size)) for size in sizes}))
    return [_run(engine.name, size, [(first, own, found[size]) for first, own, found in rounds]) for size in sizes]


def _run(name: str, size: int, rounds: Sequence[tuple[Timed, Timed, Timed]]) -> BatchRun:
    answers = zip(rounds[-1][2].answers, rounds[-1][1].answers, strict=False)
    return BatchRun(
        name,
        size,
        median(1 / together.request_s for _, _, together in rounds),
        median(1 / alone.request_s for _, alone, _ in rounds),
        median(together.step_s for _, _, together in rounds),
        median(alone.step_s for _, alone, _ in rounds),
        median(alone.request_s / together.request_s for _, alone, together in rounds),
        median(size * alone.step_s / together.step_s for _, alone, together in rounds),
        median(alone.request_cpu_s / together.request_cpu_s for _, alone, together in rounds),
        median(
            (alone.request_cpu_s - prefilled.request_cpu_s) / (together.request_cpu_s - prefilled.request_cpu_s)
            for prefilled, alone, together in rounds
        ),
        sum(mine.token_ids == own.token_ids for mine, own in answers),
    )


COLUMNS: tuple[Column, ...] = (
    ("model", "<14", "model"), ("together", ">9", "max_num_seqs"),
    ("req/s", ">8.3f", "requests_per_s"), ("alone", ">8.3f", "requests_per_s_alone"),
    ("step ms", ">9.1f", lambda run: 1e3 * run["step_s"]),
    ("alone", ">8.1f", lambda run: 1e3 * run["step_s_alone"]),
    ("speedup", ">9.2fx", "speedup"), ("decode", ">9.2fx", "decode_speedup"),
    ("by CPU s", ">9.2fx", "cpu_speedup"), ("decode", ">9.2fx", "decode_cpu_speedup"),
    ("same", ">6", "num_same_answers"),
)  # fmt: skip


def opened(subject: str, dtype: str, seed: int) -> TransformersEngine:
    """Open an engine over a shape with random weights or over a checkpoint. It ignores the end token."""
    store = MemoryStore(1 << 33)
    if subject in SHAPES:
        engine = engine_for(subject, store, seed=seed)
    else:
        loaded = load_model(subject, ModelOptions(dtype=dtype))
        engine = make_engine(loaded.model, store, loaded.name, loaded.fingerprint)
    engine.name = Path(engine.name).name
    engine.layers.model.generation_config.eos_token_id = None
    return engine


def main(
    subjects: str = "llama-200m,models/smollm2",
    sizes: str = "2,4,8,16",
    num_chunks: int = 6,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    answer_tokens: int = 64,
    repeats: int = 3,
    threads: int | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Measure shapes and checkpoints in float32. Print a table to stderr and one line of JSON to stdout or a file."""
    set_num_threads(threads)
    quiet_libraries()
    counts, runs = split_counts(sizes), list[BatchRun]()
    for subject in split_names(subjects):
        engine = opened(subject, "float32", seed)
        lengths = (num_chunks, chunk_tokens, question_tokens)
        chunks, prompts = make_prompts(*lengths, max(counts), engine.layers.config.vocab_size, seed, 2 * num_chunks)
        for chunk in chunks:
            engine.precompute(chunk)
        runs += measure(engine, prompts, counts, answer_tokens, repeats, print_notice)
        engine.close()
    config = {
        "dtype": "float32", "num_chunks": num_chunks, "chunk_tokens": chunk_tokens, "question_tokens": question_tokens,
        "answer_tokens": answer_tokens, "repeats": repeats, "threads": threads, "seed": seed,
    }  # fmt: skip
    facts: dict[str, Any] = {
        "command": "benchmarks.batch_decode",
        "hardware": hardware_card(),
        "config": config,
        "runs": [asdict(run) for run in runs],
    }
    for line in (*hardware_lines(facts["hardware"]), "", *format_table(COLUMNS, facts["runs"])):
        print_notice(line)
    write_both(facts, out)


if __name__ == "__main__":
    typer.run(main)
