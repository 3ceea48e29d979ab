"""Pauses of another client's stream while a request beside it is blended: from memory, and from a slow store.

    python -m benchmarks.stall --threads 1 --out data/results/stall.json

One vLLM in this process. A plain request streams all the while; its gaps are the seconds between one token and the
next, as its client sees them. They are taken with nothing beside it, beside blends from the memory tier, and beside
blends from a store that takes `read_s` for each layer of each chunk. All three in every round. Read `measure` first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.results import write_result
from ragblend.cli.printing import print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import load_into_memory
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.vllm.worker import worker_of_this_process
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.configs import PREFIX_TOKENS, ThroughputConfig
from ragblend.lab.bench.common.workloads import make_prompts
from ragblend.lab.bench.load import ThrottledStore
from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_card
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

QUESTION_TOKENS, STREAM_TOKENS = 8, 3072
SIDES = ("nothing", "memory", "slow store")


@dataclass(frozen=True, slots=True)
class StallRun:
    """Gaps of the stream in seconds, over all rounds, and what the blends beside it took."""

    beside: str
    num_gaps: int
    median_s: float
    p99_s: float
    max_s: float
    over_alone: float  # the longest gap over the longest with nothing beside the stream
    blend_ttft_s: float | None  # medians of the blends
    blend_stall_s: float | None


class _Stream:
    """When a plain request's tokens came, from the moment it has its first until it is left."""

    def __init__(self, engine: VllmEngine, prompt: Prompt) -> None:
        self.times_s: list[float] = []
        self._flows, self._ends = Event(), Event()
        request = engine.request(prompt, mode="full", max_tokens=STREAM_TOKENS)
        self._thread = Thread(target=self._follow, args=(engine, request))

    def _follow(self, engine: VllmEngine, request: Any) -> None:
        with closing(engine.deltas(request)) as deltas:
            for _ in deltas:
                self.times_s.append(perf_counter())
                self._flows.set()
                if self._ends.is_set():
                    return

    def __enter__(self) -> _Stream:
        self._thread.start()
        self._flows.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._thread.is_alive():
            raise RagblendError("the stream ended too early; choose fewer chunks, or a smaller read_s")
        self._ends.set()
        self._thread.join()

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]


class Side:
    """What stands beside the stream, over all rounds: the stream's gaps, and the blends' reports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gaps_s: list[float] = []
        self.reports: list[BlendReport] = []

    def run(self, longest_alone_s: float) -> StallRun:
        """All of it in figures."""
        gaps_s = sorted(self.gaps_s)
        return StallRun(
            self.name,
            len(gaps_s),
            median(gaps_s),
            gaps_s[min(len(gaps_s) - 1, int(0.99 * len(gaps_s)))],
            gaps_s[-1],
            gaps_s[-1] / longest_alone_s,
            median(each.ttft_s for each in self.reports) if self.reports else None,
            median(each.stall_s for each in self.reports) if self.reports else None,
        )


def measure(
    config: ThroughputConfig, read_s: float, rule: str, repeats: int, alone_s: float, notify: Callable[[str], None]
) -> list[StallRun]:
    """`repeats` rounds of the three sides, each with a new stream: `alone_s` seconds with nothing beside it."""
    sides = {name: Side(name) for name in SIDES}
    length = PREFIX_TOKENS + config.num_chunks * config.chunk_tokens + QUESTION_TOKENS + STREAM_TOKENS
    with (
        tempfile.TemporaryDirectory(prefix="ragblend-stall-") as directory,
        open_vllm(config, num_prompts=2, prompt_tokens=length, store=Path(directory)) as (engine, vocab),
    ):
        work = make_prompts(config.num_chunks, config.chunk_tokens, QUESTION_TOKENS, repeats + 1, vocab)
        notify(f"precomputing {len(work.chunks)} chunks")
        for _ in engine.precompute_all(work.chunks):
            pass
        disk, memory, worker = DiskStore(Path(directory)), MemoryStore(1 << 40), worker_of_this_process()
        kvs = [kv for key in disk.keys() if (kv := disk.get(key)) is not None]  # noqa: SIM118 (a store is not a dict)
        for kv in kvs:
            memory.put(load_into_memory(kv))
        speed = kvs[0].nbytes / kvs[0].header.num_layers / read_s
        stores: dict[str, KVStore] = {"memory": memory, "slow store": ThrottledStore(disk, speed)}
        streamed = Prompt(work.chunks[:1], "0 1 2")
        for number, prompt in enumerate(work.prompts):
            notify(f"round {number} of {repeats}" if number else "warm-up")
            for name, side in sides.items() if number else [(SIDES[1], Side("warm-up"))]:
                with _Stream(engine, streamed) as stream:
                    if name in stores:
                        worker.read_from(stores[name])
                        answer = engine.generate(prompt, rule=rule, recompute_ratio=0.15, max_tokens=1)
                        side.reports.append(answer.report)
                        if answer.report.num_chunk_hits != config.num_chunks:
                            raise RagblendError(
                                f"{answer.report.num_chunk_hits} chunks were found; they are all stored"
                            )
                    else:
                        time.sleep(alone_s)
                side.gaps_s += stream.gaps_s
    longest_s = max(sides["nothing"].gaps_s)
    return [side.run(longest_s) for side in sides.values()]


def main(
    shape: str = "llama-50m",
    num_chunks: int = 3,
    chunk_tokens: int = 128,
    read_s: float = 0.2,
    rule: str = "cacheblend",
    threads: int = 1,
    repeats: int = 3,
    alone_s: float = 8.0,
    out: Path | None = None,
) -> None:
    """A table on stderr, one line of JSON on stdout, and in `out`."""
    set_num_threads(threads)
    quiet_libraries()
    config = ThroughputConfig(
        shape=shape, num_chunks=num_chunks, pool=num_chunks, chunk_tokens=chunk_tokens, dtype="float32",
        threads=threads,
        vllm_options={"max_num_batched_tokens": 512},
    )  # fmt: skip
    runs = measure(config, read_s, rule, repeats, alone_s, print_notice)
    facts = {
        "command": "benchmarks.stall",
        "hardware": vllm_card(),
        "config": {
            "shape": shape, "chunks": num_chunks, "chunk_tokens": chunk_tokens, "read_s": read_s, "rule": rule,
            "threads": threads, "repeats": repeats, "alone_s": alone_s,
        },
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip
    for run in runs:
        print_notice(
            f"beside {run.beside:<11} median {run.median_s:.4f} s, p99 {run.p99_s:.4f} s, longest {run.max_s:.3f} s",
        )
    if out is not None:
        write_result(facts, out)
    write_result(facts, None)


if __name__ == "__main__":
    typer.run(main)
