"""What the order of a batch is worth: `generate_batch` beside the order of arrival, where memory cannot hold all.

    python -m benchmarks.batch_order --out data/results/batch-order.json

Prompts of four chunks, of eight topics that come in turns, as the sessions of many users do; then of one topic, where
the chunks are drawn from all, and prompts share what chance gives. The memory tier holds half of the corpus, the rest
lies on the disk, whose page cache is dropped before each round. Both orders answer the same prompts by the same engine,
batched alike, in turns; medians of the rounds. Read `measure` first.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, cast
from unittest.mock import patch

import typer

from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.bench.common.workloads import PromptSet, draw_prompts, engine_for, threads
from ragblend.cli.printing import err, print_json
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore, tiers_of
from ragblend.engine.tuning.machine import drop_page_cache
from ragblend.options import Mode

SCHEMA_VERSION = 1
ORDERS = ("arrival", "grouped")
HELD = 0.5  # share of the corpus that the memory tier has room for


@dataclass(frozen=True, slots=True)
class Config:
    """What is answered, and how often. `topics`: the numbers of topics; `pool`: chunks of all of them together."""

    shape: str = "llama-50m"
    num_prompts: int = 48
    pool: int = 48
    chunks: int = 4
    chunk_tokens: int = 256
    question_tokens: int = 24
    answer_tokens: int = 2
    topics: tuple[int, ...] = (8, 1)
    mode: Mode = "blend"
    repeats: int = 3


DEFAULT = Config()


@dataclass(frozen=True, slots=True)
class Run:
    """One order of one workload; medians of the rounds. A read is a chunk that came from the disk."""

    num_topics: int
    order: str
    num_reads: int
    read_mib: float
    seconds: float
    shortest_s: float
    longest_s: float


def workload(config: Config, num_topics: int, vocab_size: int) -> PromptSet:
    """Prompts of topics in turns."""
    sizes = config.chunks, config.chunk_tokens, config.question_tokens
    counts = config.pool // num_topics, config.num_prompts // num_topics
    made = [draw_prompts(counts[0], *sizes, counts[1], vocab_size, topic) for topic in range(num_topics)]
    in_turns = itertools.chain.from_iterable(zip(*(each.prompts for each in made), strict=True))
    return PromptSet(tuple(chunk for each in made for chunk in each.chunks), tuple(in_turns))


def measure(config: Config, num_topics: int, folder: Path) -> list[Run]:
    """Both orders in turns, over one store on disk."""
    disk = DiskStore(folder, store_key=None)
    engine = engine_for(config.shape, disk)
    asked = workload(config, num_topics, engine.layers.config.vocab_size)
    for chunk in asked.chunks:
        engine.precompute(chunk)
    nbytes = disk.nbytes()
    rounds: dict[str, list[tuple[int, float]]] = {order: [] for order in ORDERS}
    for _ in range(config.repeats):
        for order in ORDERS:
            engine.store = TieredStore(MemoryStore(int(HELD * nbytes)), DiskStore(folder, store_key=None))
            drop_page_cache(disk.paths())
            start_s = perf_counter()
            in_order = (lambda prompts: range(len(prompts))) if order == "arrival" else engine._grouped
            with patch.object(engine, "_grouped", in_order):
                engine.generate_batch(asked.prompts, mode=config.mode, max_tokens=config.answer_tokens)
            taken_s = perf_counter() - start_s
            rounds[order].append((tiers_of(engine.store)[1].counters.num_hits, taken_s))
    chunk_mib = nbytes / len(asked.chunks) / 2**20
    runs = []
    for order, found in rounds.items():
        num_reads, took_s = int(median(reads for reads, _ in found)), sorted(each_s for _, each_s in found)
        runs.append(Run(num_topics, order, num_reads, num_reads * chunk_mib, median(took_s), took_s[0], took_s[-1]))
    return runs


def main(
    num_prompts: Annotated[int, typer.Option("--prompts")] = DEFAULT.num_prompts,
    pool: Annotated[int, typer.Option("--pool", help="Chunks in all.")] = DEFAULT.pool,
    mode: Annotated[str, typer.Option("--mode", help="blend or reuse.")] = DEFAULT.mode,
    repeats: Annotated[int, typer.Option("--repeats")] = DEFAULT.repeats,
    home: Annotated[Path | None, typer.Option("--dir", help="Where the store is; a temporary folder.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON there.")] = None,
) -> None:
    """A line per run on stderr, JSON on stdout and in `out`."""
    config = Config(num_prompts=num_prompts, pool=pool, mode=cast("Mode", mode), repeats=repeats)
    card, runs = hardware_card(), list[dict[str, Any]]()
    err.print("\n".join(card_lines(card)))
    with threads(1), tempfile.TemporaryDirectory(dir=home) as folder:
        for num_topics in config.topics:
            for run in measure(config, num_topics, Path(folder) / str(num_topics)):
                read = f"{run.num_reads:>5} reads, {run.read_mib:>7.0f} MiB, {run.seconds:>7.2f} s"
                err.print(f"{run.num_topics:>3} topics  {run.order:<8}{read}", markup=False)
                runs.append(asdict(run))
    facts = {"schema_version": SCHEMA_VERSION, "command": "benchmarks.batch_order", "hardware": card}
    made = facts | {"config": asdict(config), "runs": runs}
    if out is not None:
        out.write_text(json.dumps(made, indent=1) + "\n")
    print_json(made)


if __name__ == "__main__":
    typer.run(main)
