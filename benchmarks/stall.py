"""Pauses of another client's stream: while a request beside it is blended, and while a server stores documents.

    python -m benchmarks.stall --threads 1 --out data/results/stall.json
    python -m benchmarks.stall --model models/smollm2 --server-python .venv-vllm/bin/python \\
        --out data/results/stall-ingestion.json

One vLLM in this process. A plain request streams all the while; its gaps are the seconds between one token and the
next, as its client sees them. They are taken with nothing beside it, beside blends from the memory tier, and beside
blends from a store that takes `read_s` for each layer of each chunk. All three in every round. Read `measure` first.

With `--server-python` it is `ragblend serve`, and OpenAI clients that stream, while the server's documents API is sent
passages of MuSiQue questions: before, during and after that. Read `measure_ingestion`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx
import typer

from benchmarks.results import write_result
from benchmarks.stock_clients import Questions, ingest, served
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
from ragblend.lab.bench.common.workloads import make_prompts, vocab_size
from ragblend.lab.bench.load import ThrottledStore
from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

QUESTION_TOKENS, STREAM_TOKENS = 8, 3072
NUM_PASSAGES = 3  # of a question, each a chunk
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
        with closing(engine.run_request(request)) as deltas:
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
        open_vllm(config, num_prompts=2, prompt_tokens=length, store=Path(directory)) as engine,
    ):
        chunks, prompts = make_prompts(
            config.num_chunks, config.chunk_tokens, QUESTION_TOKENS, repeats + 1, vocab_size(engine)
        )
        notify(f"precomputing {len(chunks)} chunks")
        for _ in engine.precompute_all(chunks):
            pass
        disk, memory, worker = DiskStore(Path(directory)), MemoryStore(1 << 40), worker_of_this_process()
        kvs = [kv for key in disk.keys() if (kv := disk.get(key)) is not None]  # noqa: SIM118 (a store is not a dict)
        for kv in kvs:
            memory.put(load_into_memory(kv))
        speed = kvs[0].nbytes / kvs[0].header.num_layers / read_s
        stores: dict[str, KVStore] = {"memory": memory, "slow store": ThrottledStore(disk, speed)}
        streamed = Prompt(chunks[:1], "0 1 2")
        for number, prompt in enumerate(prompts):
            notify(f"round {number} of {repeats}" if number else "warm-up")
            for name, side in sides.items() if number else [(SIDES[1], Side("warm-up"))]:
                with _Stream(engine, streamed) as stream:
                    if name in stores:
                        worker.set_read_store(stores[name])
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


class _ServedStream:
    """When an OpenAI client's tokens came, from the moment it has its first until it is left."""

    def __init__(self, url: str, question: str) -> None:
        self.times_s: list[float] = []
        self._url, self._question = url, question
        self._flows, self._ends = Event(), Event()
        self._thread = Thread(target=self._follow)

    def _follow(self) -> None:
        body = {"model": "model", "messages": [{"role": "user", "content": self._question}], "stream": True}
        body |= {"max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {") or not json.loads(line.removeprefix("data: "))["choices"]:
                    continue
                self.times_s.append(perf_counter())
                self._flows.set()
                if self._ends.is_set():
                    return

    def __enter__(self) -> _ServedStream:
        self._thread.start()
        self._flows.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._thread.is_alive():
            raise RagblendError("a stream ended too early; choose fewer documents")
        self._ends.set()
        self._thread.join()

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """Return the seconds from each token to the next, of those that ended in this time."""
        return [later - earlier for earlier, later in pairwise(self.times_s) if start_s <= later < end_s]


@dataclass(frozen=True, slots=True)
class IngestionStall:
    """Gaps of the streams in seconds, over all rounds, without ingestion and during it."""

    beside: str
    num_gaps: int
    median_s: float
    p95_s: float
    p99_s: float
    max_s: float
    seconds: float  # how long that went on


def measure_ingestion(
    url: str, questions: Questions, repeats: int, num_streams: int, alone_s: float, notify: Callable[[str], None]
) -> tuple[list[IngestionStall], list[dict[str, Any]]]:
    """`repeats` rounds: streams alone, beside the ingestion of new documents, alone again.

    Return the gaps of both, and the server's counts of each ingestion.
    """
    gaps_s: dict[str, list[float]] = {"nothing": [], "ingestion": []}
    seconds, counts = dict.fromkeys(gaps_s, 0.0), []
    size = len(questions.documents) // repeats
    for number in range(repeats):
        documents = questions.documents[number * size : (number + 1) * size]
        with ExitStack() as stack:
            streams = [
                stack.enter_context(_ServedStream(url, questions.asked[place][1])) for place in range(num_streams)
            ]
            marks_s = [perf_counter()]
            time.sleep(alone_s)
            marks_s.append(perf_counter())
            counts.append(ingest(url, documents))
            marks_s.append(perf_counter())
            time.sleep(alone_s)
            marks_s.append(perf_counter())
        for beside, (start_s, end_s) in zip(("nothing", "ingestion", "nothing"), pairwise(marks_s), strict=True):
            seconds[beside] += end_s - start_s
            for stream in streams:
                gaps_s[beside] += stream.gaps_between(start_s, end_s)
        notify(f"round {number + 1} of {repeats}: {counts[-1]['num_new_kv']} entries, {marks_s[2] - marks_s[1]:.1f} s")
    return [
        IngestionStall(
            beside,
            len(gaps),
            median(gaps),
            _quantile(gaps, 0.95),
            _quantile(gaps, 0.99),
            max(gaps),
            seconds[beside],
        )
        for beside, gaps in gaps_s.items()
    ], counts


def _quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the others do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def serve_and_measure(
    model: str, server_python: str, num_documents: int, repeats: int, num_streams: int, alone_s: float
) -> dict[str, Any]:
    """Start a server, measure its streams during ingestion, and return the facts."""
    questions = Questions(model, num_documents * repeats, NUM_PASSAGES)
    with tempfile.TemporaryDirectory() as folder, served(server_python, model, Path(folder)) as url:
        runs, counts = measure_ingestion(url, questions, repeats, num_streams, alone_s, print_notice)
    alone, beside = runs
    return {
        "command": "benchmarks.stall",
        "config": {
            "model": Path(model).name, "documents": num_documents, "passages": NUM_PASSAGES, "repeats": repeats,
            "streams": num_streams, "alone_s": alone_s,
        },
        "runs": [asdict(run) for run in runs],
        "p95_over_alone": beside.p95_s / alone.p95_s,
        "median_over_alone": beside.median_s / alone.median_s,
        "ingestions": counts,
    }  # fmt: skip


def main(
    shape: str = "llama-50m",
    num_chunks: int = 3,
    chunk_tokens: int = 128,
    read_s: float = 0.2,
    rule: str = "cacheblend",
    threads: int = 1,
    repeats: int = 3,
    alone_s: float = 8.0,
    model: str = "models/smollm2",
    server_python: str | None = None,
    num_documents: int = 2,
    num_streams: int = 2,
    out: Path | None = None,
) -> None:
    """A table on stderr, one line of JSON on stdout, and in `out`.

    server_python: an environment with vLLM, whose server is sent `num_documents` in each round.
    """
    set_num_threads(threads)
    quiet_libraries()
    if server_python is not None:
        write_both(serve_and_measure(model, server_python, num_documents, repeats, num_streams, alone_s), out)
        return
    config = ThroughputConfig(
        shape=shape, num_chunks=num_chunks, pool=num_chunks, chunk_tokens=chunk_tokens, dtype="float32",
        threads=threads,
        vllm_options={"max_num_batched_tokens": 512},
    )  # fmt: skip
    runs = measure(config, read_s, rule, repeats, alone_s, print_notice)
    facts = {
        "command": "benchmarks.stall",
        "hardware": vllm_hardware_card(),
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
    write_both(facts, out)


def write_both(facts: dict[str, Any], out: Path | None) -> None:
    """Write the facts to stdout, and to `out` where it is given."""
    if out is not None:
        write_result(facts, out)
    write_result(facts, None)


if __name__ == "__main__":
    typer.run(main)
