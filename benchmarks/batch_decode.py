"""Answers decoded together against the same answers one after another: requests and tokens per second.

    python -m benchmarks.batch_decode --threads 1 --out data/results/batch-decode.json

In every round the requests are answered one after another, then by `generate_batch`, so many at a time: side by side,
warm-up outside, the median of the rounds' ratios. Every prompt is blended from chunks that are stored; prefilling is
per request either way. `speedup` is of whole requests, `decode_speedup` of their decoding alone. Read `measure` first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.bench.common.output import Column, on_terminal, table
from ragblend.bench.common.shapes import SHAPES
from ragblend.bench.common.workloads import draw_prompts, engine_for, engine_for_model
from ragblend.cli.options import split_counts, split_names
from ragblend.cli.printing import err, print_json
from ragblend.cli.session import quiet_libraries, use_threads
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.hf.model import load_model
from ragblend.engine.report import Generation
from ragblend.engine.store.tiered import MemoryStore
from ragblend.options import ModelOptions
from ragblend.prompt.prompt import SegmentedPrompt


@dataclass(frozen=True, slots=True)
class BatchRun:
    """So many requests at a time. Seconds and rates are medians; the `alone` ones are of the same requests, one after
    another in the same rounds."""

    model: str
    max_num_seqs: int
    num_requests: int
    requests_per_s: float
    requests_per_s_alone: float
    step_s: float  # one decode step of all
    step_s_alone: float
    speedup: float  # requests per second over those of one after another
    decode_speedup: float  # the same without prefilling
    num_same_answers: int  # token for token, of the last round


def measure(
    engine: TransformersEngine,
    prompts: Sequence[SegmentedPrompt],
    sizes: Sequence[int],
    answer_tokens: int,
    repeats: int,
    tell: Callable[[str], None],
) -> list[BatchRun]:
    """Every size beside one after another, in turns. `prompts`: as many as the largest size."""

    def alone() -> list[Generation]:
        return [engine.generate(prompt, max_tokens=answer_tokens) for prompt in prompts]

    def together(size: int) -> list[Generation]:
        engine.batch.max_num_seqs = size
        return engine.generate_batch(prompts[:size], max_tokens=answer_tokens)

    engine.generate_batch(prompts[:2], max_tokens=2)  # warm-up
    rounds = []
    for number in range(repeats):
        tell(f"{engine.name}: round {number + 1} of {repeats}")
        rounds.append({0: _timed(alone), **{size: _timed(lambda size=size: together(size)) for size in sizes}})
    return [_run(engine.name, size, rounds) for size in sizes]


class _Timed:
    """Answers, and what they took."""

    def __init__(self, answers: list[Generation], seconds: float) -> None:
        self.answers = answers
        self.request_s = seconds / len(answers)
        steps = [len(answer.token_ids) - 1 for answer in answers]
        decode_s = [answer.report.decode_s for answer in answers]
        self.step_s = statistics.fmean(took / count for took, count in zip(decode_s, steps, strict=True))


def _timed(answer: Callable[[], list[Generation]]) -> _Timed:
    start_s = perf_counter()
    answers = answer()
    return _Timed(answers, perf_counter() - start_s)


def _run(name: str, size: int, rounds: Sequence[dict[int, _Timed]]) -> BatchRun:
    pairs = [(each[0], each[size]) for each in rounds]
    alone, together = pairs[-1]
    same = [mine.token_ids == own.token_ids for mine, own in zip(together.answers, alone.answers, strict=False)]
    median = statistics.median
    return BatchRun(
        name,
        size,
        len(together.answers),
        median(1 / mine.request_s for _, mine in pairs),
        median(1 / own.request_s for own, _ in pairs),
        median(mine.step_s for _, mine in pairs),
        median(own.step_s for own, _ in pairs),
        median(own.request_s / mine.request_s for own, mine in pairs),
        median(size * own.step_s / mine.step_s for own, mine in pairs),
        sum(same),
    )


COLUMNS = (
    Column("model", "<14", "model"), Column("together", ">9", "max_num_seqs"),
    Column("req/s", ">8.3f", "requests_per_s"), Column("alone", ">8.3f", "requests_per_s_alone"),
    Column("step ms", ">9.1f", lambda run: 1e3 * run.step_s),
    Column("alone", ">8.1f", lambda run: 1e3 * run.step_s_alone),
    Column("speedup", ">9.2fx", "speedup"), Column("decode", ">9.2fx", "decode_speedup"),
    Column("same", ">6", "num_same_answers"),
)  # fmt: skip


def opened(subject: str, dtype: str, seed: int) -> TransformersEngine:
    """An engine over a shape with random weights, or over a checkpoint, whose answers are as long as they may be."""
    store = MemoryStore(1 << 33)
    if subject in SHAPES:
        engine = engine_for(subject, store, seed=seed)
    else:
        engine = engine_for_model(load_model(subject, ModelOptions(dtype=dtype)), store)
    engine.name = Path(engine.name).name
    engine.layers.model.generation_config.eos_token_id = None
    return engine


def main(
    subjects: str = "llama-200m,models/smollm2",
    sizes: str = "2,4,8,16",
    chunks: int = 6,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    answer_tokens: int = 64,
    repeats: int = 3,
    threads: int | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Shapes and checkpoints, in float32. Table on stderr, one line of JSON on stdout, and in a file."""
    use_threads(threads)
    quiet_libraries()
    counts, runs = split_counts(sizes), list[BatchRun]()
    for subject in split_names(subjects):
        engine = opened(subject, "float32", seed)
        lengths = (2 * chunks, chunks, chunk_tokens, question_tokens)
        work = draw_prompts(*lengths, max(counts), engine.layers.config.vocab_size, seed)
        for chunk in work.chunks:
            engine.precompute(chunk)
        runs += measure(engine, work.prompts, counts, answer_tokens, repeats, on_terminal() or (lambda line: None))
        engine.close()
    config = {
        "dtype": "float32", "num_chunks": chunks, "chunk_tokens": chunk_tokens, "question_tokens": question_tokens,
        "answer_tokens": answer_tokens, "repeats": repeats, "threads": threads, "seed": seed,
    }  # fmt: skip
    facts: dict[str, Any] = {
        "schema_version": 1,
        "command": "benchmarks.batch_decode",
        "hardware": hardware_card(),
        "config": config,
        "runs": [asdict(run) for run in runs],
    }
    for line in (*card_lines(facts["hardware"]), "", *table(COLUMNS, runs)):
        err.print(line)
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print_json(facts)


if __name__ == "__main__":
    typer.run(main)
