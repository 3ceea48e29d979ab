"""Sustained traffic: the time to first token while the corpus grows and prompts keep changing.

    python -m benchmarks.sustained --model models/smollm2 --threads 1 --out FILE.json --plot FILE.png
    .venv-vllm/bin/python -m benchmarks.sustained --model models/smollm2 --backend vllm --threads 1 --out FILE.json

The stream has batches of requests. Before each batch, new passages of MuSiQue are ingested, the first 100 words of
each. A prompt has six passages in random order: half of them from the newest batch of documents, the others from all
earlier ones, where a few are asked for often (Zipf). One prompt in five also has a passage that was never ingested. So
chunks are asked for the first time, again, and in new orders. The memory tier and vLLM's cache are smaller than the KV
of all passages.

Each request is answered in mode blend, and every fourth also by prefix caching (vLLM's own, in vLLM) and by full
prefill, in changing order. The time is that of a call with one token of answer, measured by the caller. Read `Stream`
and `measure` first.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from benchmarks.results import ModelOption, OutOption, write_result
from ragblend import Prompt, load_engine
from ragblend.cli.options import PlotOption
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.api import Engine
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.plots import COLORS, check_plot, describe_axes, figure_file
from ragblend.lab.quality.data import load_cases
from ragblend.lab.quality.tasks import SYSTEM
from ragblend.options import Mode
from ragblend.precompute import precompute_documents

NUM_CHUNKS = 6
NEW_DOCUMENTS = 30  # ingested before each batch of requests
NUM_WORDS = 100  # of a passage: 500 requests then take half an hour
COMPARED_EVERY = 4  # requests, because the other modes take most of the time
UNSEEN_EVERY = 5  # requests; the prompt then has a passage that was never ingested. No multiple of COMPARED_EVERY
MEMORY_TIER_GIB = 0.25
VLLM_CACHE_BYTES = 256 << 20
MAX_MODEL_LEN = 4096


class Stream:
    """Documents and prompts of the stream, drawn from MuSiQue's passages. Equal seeds give equal streams."""

    def __init__(self, seed: int = 0) -> None:
        cases = load_cases(QualityConfig(data="musique", part="all", num_questions=10**6))
        self._draw = random.Random(seed)
        passages = (" ".join(passage.split()[:NUM_WORDS]) for case in cases for passage in case.passages)
        self._passages = list(dict.fromkeys(passages))
        self._draw.shuffle(self._passages)
        self._questions = [case.question for case in cases]
        self._ingested: list[str] = []
        self._number = 0

    def new_documents(self) -> list[str]:
        """Return the passages of the next batch of documents. Later prompts may have them."""
        added = [self._passages.pop() for _ in range(NEW_DOCUMENTS)]
        self._ingested += added
        return added

    def prompt(self) -> Prompt:
        """Return the next prompt."""
        newest, earlier = self._ingested[-NEW_DOCUMENTS:], self._ingested[:-NEW_DOCUMENTS]
        chosen = self._draw.sample(newest, NUM_CHUNKS // 2 if earlier else NUM_CHUNKS)
        while len(chosen) < NUM_CHUNKS:
            # Zipf's law: the passage of rank k is asked for 1/k as often as the first one.
            rank = min(len(earlier) - 1, int(len(earlier) ** self._draw.random()) - 1)
            if earlier[rank] not in chosen:
                chosen.append(earlier[rank])
        if self._number % UNSEEN_EVERY == 0:
            chosen[-1] = self._passages.pop()
        self._number += 1
        self._draw.shuffle(chosen)
        return Prompt(chosen, self._draw.choice(self._questions), SYSTEM)


def measure(engine: Engine, stream: Stream, num_requests: int, batch: int) -> Iterator[dict[str, Any]]:
    """Yield a record of each request: its seconds in each mode, and how many of its chunks were found."""
    modes: list[Mode] = ["blend", "prefix", "full"]
    for number in range(num_requests):
        ingest_s = 0.0
        if number % batch == 0:
            start_s, texts = perf_counter(), stream.new_documents()
            precompute_documents(texts, engine, ids=[f"passage {number + each}" for each in range(len(texts))])
            ingest_s = perf_counter() - start_s
        prompt = stream.prompt()
        record: dict[str, Any] = {"number": number, "batch": number // batch, "ingest_s": ingest_s}
        first = number // COMPARED_EVERY % 3
        for mode in modes[first:] + modes[:first]:
            if mode != "blend" and number % COMPARED_EVERY:
                continue
            start_s = perf_counter()
            report = engine.generate(prompt, mode=mode, max_tokens=1).report
            record[f"{mode}_s"] = perf_counter() - start_s
            record["prompt_tokens"] = report.prompt_tokens
            if mode == "blend":
                record |= {"num_chunk_hits": report.num_chunk_hits, "num_chunks": report.num_chunks}
        yield record


def summarize(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each batch: seconds, speed-ups request by request, and the share of chunks found."""
    batches: dict[int, list[Mapping[str, Any]]] = {}
    for each in requests:
        batches.setdefault(each["batch"], []).append(each)
    summaries = []
    for number, rows in batches.items():
        compared = [row for row in rows if "full_s" in row]
        summaries.append(
            {
                "batch": number,
                "num_requests": len(rows),
                "blend_s": median(row["blend_s"] for row in rows),
                "prefix_s": median(row["prefix_s"] for row in compared),
                "full_s": median(row["full_s"] for row in compared),
                "over_prefix": median(row["prefix_s"] / row["blend_s"] for row in compared),
                "over_full": median(row["full_s"] / row["blend_s"] for row in compared),
                "hit_share": sum(row["num_chunk_hits"] for row in rows) / sum(row["num_chunks"] for row in rows),
                "ingest_s": sum(row["ingest_s"] for row in rows),
            }
        )
    return summaries


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the seconds of each mode and the speed-ups over the number of requests, a row per result."""
    with figure_file(path, 9, 3.2 * len(results), "Sustained traffic over a growing corpus") as figure:
        for row, result in zip(figure.subplots(len(results), 2, squeeze=False), results, strict=True):
            batches, size = result["batches"], result["batch_size"]
            ends = [(each["batch"] + 1) * size for each in batches]
            for mode in ("full", "prefix", "blend"):
                row[0].plot(ends, [each[f"{mode}_s"] for each in batches], color=COLORS[mode], label=mode)
            row[0].set_ylim(bottom=0)
            describe_axes(row[0], "requests", "time to first token, s", f"{result['model']}, {result['backend']}")
            for name, other in (("over_full", "full"), ("over_prefix", "prefix")):
                row[1].plot(ends, [each[name] for each in batches], color=COLORS[other], label=f"over {other}")
            row[1].axhline(1, color="black", linewidth=0.6)
            row[1].set_ylim(bottom=0)
            describe_axes(row[1], "requests", "blend's speed-up", "median of each batch")


def main(
    model: ModelOption,
    backend: Annotated[str, typer.Option("--backend", help="transformers or vllm.")] = "transformers",
    requests: Annotated[int, typer.Option("--requests", help="Number of requests.")] = 500,
    batch: Annotated[int, typer.Option("--batch", help="Requests between two ingestions.")] = 50,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
    out: OutOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Measure the stream, print a line per batch, and write the result as JSON."""
    quiet_libraries()
    set_num_threads(threads)
    picture = check_plot(plot_file)
    options: dict[str, Any] = {"memory_gib": MEMORY_TIER_GIB}
    if backend == "vllm":
        options["vllm_options"] = {
            "kv_cache_memory_bytes": VLLM_CACHE_BYTES, "max_model_len": MAX_MODEL_LEN, "enforce_eager": True
        }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="ragblend-bench-") as folder,
        load_engine(model, folder, backend=backend, dtype=dtype, system=SYSTEM, **options) as engine,
    ):
        stream = Stream()
        rows = list[dict[str, Any]]()
        for row in measure(engine, stream, requests, batch):
            rows.append(row)
            if len(rows) % batch == 0:
                print_line(_line(summarize(rows)[-1]))
    result = {
        "model": Path(model).name,
        "backend": backend,
        "dtype": dtype,
        "threads": threads,
        "batch_size": batch,
        "batches": summarize(rows),
        "requests": rows,
    }
    write_result(result, out)
    if picture is not None:
        plot([result], picture)


def _line(batch: Mapping[str, Any]) -> str:
    return (
        f"batch {batch['batch']:>2}: blend {batch['blend_s']:.3f} s, prefix {batch['prefix_s']:.3f} s, full "
        f"{batch['full_s']:.3f} s; {batch['over_full']:.2f} times full, {batch['over_prefix']:.2f} times prefix; "
        f"{batch['hit_share']:.0%} of the chunks found; ingested in {batch['ingest_s']:.1f} s"
    )


if __name__ == "__main__":
    typer.run(main)
