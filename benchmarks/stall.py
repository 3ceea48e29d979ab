"""Pauses of a token stream while another request is blended, or while the server ingests documents.

    python -m benchmarks.stall --threads 1 --out data/results/stall.json
    python -m benchmarks.stall --model models/smollm2 --server-python .venv-vllm/bin/python \\
        --out data/results/stall-ingestion.json

The first command runs vLLM in this process. A plain request streams tokens, and its gaps are the seconds between
consecutive tokens. Every round measures them on three sides: without another request, during a blend from the memory
tier, and during a blend from a store that takes `read_s` for each layer of each chunk. Read `measure` first.

The second command starts `ragblend serve`, and several clients stream from its OpenAI API. Every round measures their
gaps before, during and after the ingestion of MuSiQue passages through the documents API. Read `measure_ingestion`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import httpx
import typer

from benchmarks.load import ThrottledStore
from benchmarks.results import write_both
from benchmarks.stock_clients import Questions, ingest, served
from benchmarks.throughput import ThroughputConfig
from ragblend.cli.printing import print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import load_into_memory
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.vllm.client import sse_events
from ragblend.engine.vllm.worker_side.worker import worker_of_this_process
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.configs import PREFIX_TOKENS
from ragblend.lab.bench.common.workloads import make_prompts, vocab_size
from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card
from ragblend.prompt.types import Prompt

QUESTION_TOKENS, STREAM_TOKENS = 8, 3072
NUM_PASSAGES = 3  # of a question, each a chunk
SIDES = ("nothing", "memory", "slow store")  # store of the concurrent blend; "nothing": there is none


@dataclass(frozen=True, slots=True)
class StallRun:
    """Gaps of the stream on one side, in seconds, over all rounds, and the medians of the concurrent blends.

    beside: name of the side. The blends' values are None on the side without another request.
    """

    beside: str
    num_gaps: int
    median_s: float
    p99_s: float
    max_s: float
    over_alone: float  # the longest gap divided by the longest without another request
    blend_ttft_s: float | None
    blend_stall_s: float | None


class _Stream:
    """Background thread that reads a stream and records when each token arrives.

    Entering the context waits for the first token. Leaving it closes the stream.
    """

    def __init__(self, open_stream: Callable[[], Generator[object]]) -> None:
        self.times_s: list[float] = []
        self._is_flowing, self._is_over = Event(), Event()
        self._thread = Thread(target=self._read, args=(open_stream,))

    def _read(self, open_stream: Callable[[], Generator[object]]) -> None:
        with closing(open_stream()) as tokens:
            for _ in tokens:
                self.times_s.append(perf_counter())
                self._is_flowing.set()
                if self._is_over.is_set():
                    return

    def __enter__(self) -> _Stream:
        self._thread.start()
        self._is_flowing.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._thread.is_alive():
            raise RagblendError(
                f"the stream ended after {len(self.times_s)} tokens, before the measurement did; choose fewer chunks "
                "or documents, or a smaller read_s"
            )
        self._is_over.set()
        self._thread.join()

    def gaps_between(self, start_s: float = 0.0, end_s: float = inf) -> list[float]:
        """Return the seconds between consecutive tokens, of the gaps that ended between these times."""
        return [later - earlier for earlier, later in pairwise(self.times_s) if start_s <= later < end_s]


class Side:
    """Results of one side over all rounds: the gaps of the stream, and the reports of the concurrent blends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gaps_s: list[float] = []
        self.reports: list[BlendReport] = []

    def run(self, longest_alone_s: float) -> StallRun:
        """Return the statistics. `longest_alone_s`: the longest gap without another request."""
        gaps_s = sorted(self.gaps_s)
        return StallRun(
            self.name,
            len(gaps_s),
            median(gaps_s),
            _quantile(gaps_s, 0.99),
            gaps_s[-1],
            gaps_s[-1] / longest_alone_s,
            median(each.ttft_s for each in self.reports) if self.reports else None,
            median(each.stall_s for each in self.reports) if self.reports else None,
        )


def measure(
    config: ThroughputConfig, read_s: float, rule: str, repeats: int, alone_s: float, notify: Callable[[str], None]
) -> list[StallRun]:
    """Measure the three sides in `repeats` rounds, each side with a new stream. Return a run per side.

    alone_s: seconds of the side without another request.
    """
    sides = {name: Side(name) for name in SIDES}
    length = PREFIX_TOKENS + config.num_chunks * config.chunk_tokens + QUESTION_TOKENS + STREAM_TOKENS
    with (
        tempfile.TemporaryDirectory(prefix="ragblend-stall-") as directory,
        open_vllm(
            config, config.shape, config.model, num_prompts=2, prompt_tokens=length, store=Path(directory)
        ) as engine,
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
                request = engine.request(streamed, mode="full", max_tokens=STREAM_TOKENS)
                with _Stream(partial(engine.run_request, request)) as stream:
                    if name in stores:
                        worker.set_read_store(stores[name])
                        answer = engine.generate(prompt, rule=rule, recompute_ratio=0.15, max_tokens=1)
                        side.reports.append(answer.report)
                        if answer.report.num_chunk_hits != config.num_chunks:
                            raise RagblendError(
                                f"only {answer.report.num_chunk_hits} of {config.num_chunks} stored chunks were hits"
                            )
                        if name == SIDES[2] and answer.report.stall_s < read_s:
                            raise RagblendError(
                                f"the blend waited only {answer.report.stall_s:.3g} s for the slow store"
                            )
                    else:
                        time.sleep(alone_s)
                side.gaps_s += stream.gaps_between()
    longest_s = max(sides["nothing"].gaps_s)
    return [side.run(longest_s) for side in sides.values()]


def _stream_answer(url: str, question: str) -> Generator[object]:
    """Yield the events with tokens of a server's answer to a question."""
    body = {"model": "model", "messages": [{"role": "user", "content": question}], "stream": True}
    body |= {"max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        yield from (event for event in sse_events(response.iter_lines()) if event["choices"])


@dataclass(frozen=True, slots=True)
class IngestionStall:
    """Gaps of the streams in seconds, over all rounds. beside: "nothing", or "ingestion" for those during ingestion."""

    beside: str
    num_gaps: int
    median_s: float
    p95_s: float
    p99_s: float
    max_s: float
    seconds: float  # total length of the measured periods


def measure_ingestion(
    url: str, questions: Questions, repeats: int, num_streams: int, alone_s: float, notify: Callable[[str], None]
) -> tuple[list[IngestionStall], list[dict[str, Any]]]:
    """Measure streams in `repeats` rounds: for `alone_s` seconds, during an ingestion of documents, and again alone.

    Return the gaps without and during ingestion, and the server's counts of each ingestion.
    """
    gaps_s: dict[str, list[float]] = {"nothing": [], "ingestion": []}
    seconds, counts = dict.fromkeys(gaps_s, 0.0), []
    size = len(questions.documents) // repeats
    for number in range(repeats):
        documents = questions.documents[number * size : (number + 1) * size]
        with ExitStack() as stack:
            streams = [
                stack.enter_context(_Stream(partial(_stream_answer, url, question)))
                for _, question in questions.asked[:num_streams]
            ]
            marks_s = [perf_counter()]
            time.sleep(alone_s)
            marks_s.append(perf_counter())
            counts.append(ingest(url, documents))
            marks_s.append(perf_counter())
            time.sleep(alone_s)
            marks_s.append(perf_counter())
        for side, (start_s, end_s) in zip(("nothing", "ingestion", "nothing"), pairwise(marks_s), strict=True):
            seconds[side] += end_s - start_s
            for stream in streams:
                gaps_s[side] += stream.gaps_between(start_s, end_s)
        notify(f"round {number + 1} of {repeats}: {counts[-1]['num_new_kv']} entries, {marks_s[2] - marks_s[1]:.1f} s")
    return [
        IngestionStall(
            side,
            len(gaps),
            median(gaps),
            _quantile(gaps, 0.95),
            _quantile(gaps, 0.99),
            max(gaps),
            seconds[side],
        )
        for side, gaps in gaps_s.items()
    ], counts


def _quantile(values: list[float], share: float) -> float:
    """Return the value at the position `share` of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def serve_and_measure(
    model: str, server_python: str, num_documents: int, repeats: int, num_streams: int, alone_s: float
) -> dict[str, Any]:
    """Start a server, measure its streams during ingestion, and return the facts."""
    questions = Questions(model, num_documents * repeats, NUM_PASSAGES)
    with tempfile.TemporaryDirectory() as folder, served(server_python, model, Path(folder)) as url:
        runs, counts = measure_ingestion(url, questions, repeats, num_streams, alone_s, print_notice)
    alone, during = runs
    return {
        "command": "benchmarks.stall",
        "config": {
            "model": Path(model).name, "documents": num_documents, "passages": NUM_PASSAGES, "repeats": repeats,
            "streams": num_streams, "alone_s": alone_s,
        },
        "runs": [asdict(run) for run in runs],
        "p95_over_alone": during.p95_s / alone.p95_s,
        "median_over_alone": during.median_s / alone.median_s,
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
    """Print a table to stderr and one line of JSON to stdout; write the JSON to `out`.

    server_python: interpreter of an environment with vLLM. If given, measures a server that ingests `num_documents`
    documents in each round, instead of an engine in this process.
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
            f"{run.beside:<11} median {run.median_s:.4f} s, p99 {run.p99_s:.4f} s, longest {run.max_s:.3f} s",
        )
    write_both(facts, out)


if __name__ == "__main__":
    typer.run(main)
