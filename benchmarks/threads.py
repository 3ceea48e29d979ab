"""One ChatBlend under thousands of requests: memory growth, then concurrent threads and randomly cancelled streams.

    python -m benchmarks.threads --out data/results/threads.json
    .venv-vllm/bin/python -m benchmarks.threads --backend vllm --model models/smollm2 --kv-tokens 1024 --asks 0 \\
        --requests 100000 --minutes 8 --threads 8 --max-tokens 40 --mode full --out data/results/threads-vllm.json

Prompts are questions over three stored passages of the embedded corpus. First they are asked one at a time while
resident memory is sampled. Then threads ask them concurrently: half of the threads invoke, half stream, and half of the
streams are closed after a random number of chunks. Every complete answer must equal the earlier answer to the same
prompt; a closed stream must be its beginning. With `--backend vllm` and few `--kv-tokens`, vLLM preempts requests. Read
`run_threads` first.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import typer

from benchmarks.results import OutOption, write_result
from benchmarks.soak.memory import Growth, Sample, growth, rss_bytes
from ragblend import ChatBlend
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.demo.corpus import sample_corpus
from ragblend.options import Mode
from ragblend.precompute import precompute_documents

NUM_PROMPTS, NUM_PASSAGES = 40, 3
BLOCK_TOKENS = 32  # of vLLM's KV cache
SAMPLE_EVERY = 5  # asks
CLOSED = 0.5  # share of the streams
TIMEOUT_S = 600.0  # for the last requests


def make_prompts(passages: Sequence[str], questions: Sequence[str], seed: int = 0) -> list[str]:
    """Return prompts of a question after random passages."""
    draw = random.Random(seed)
    asked = draw.sample(list(questions), NUM_PROMPTS)
    return ["\n\n".join([*draw.sample(list(passages), NUM_PASSAGES), question]) for question in asked]


def measure_memory(llm: ChatBlend, prompts: Sequence[str], count: int) -> Growth:
    """Ask `count` times in turn. Return the growth of resident memory."""
    samples = list[Sample]()
    for number, prompt in enumerate(itertools.islice(itertools.cycle(prompts), count)):
        llm.invoke(prompt)
        if number % SAMPLE_EVERY == 0:
            samples.append(Sample(number, rss_bytes(os.getpid()) or 0))
    return growth("process", samples)


def run_threads(
    llm: ChatBlend, prompts: Sequence[str], num_threads: int, count: int, seconds: float = float("inf")
) -> dict[str, int]:
    """Send `count` requests by `num_threads` threads, or as many as begin within `seconds`.

    Return the number of each outcome, "hanging" threads included.
    """
    expected = [str(llm.invoke(prompt).content) for prompt in prompts]
    last_start_s = perf_counter() + seconds
    numbers, outcomes, lock = iter(range(count)), Counter[str](), threading.Lock()

    def ask(thread: int) -> None:
        draw = random.Random(thread)
        while (number := next_number()) is not None:
            place = number % len(prompts)
            try:
                outcome = _ask(llm, prompts[place], expected, place, is_stream=thread % 2 == 1, draw=draw)
            except Exception as error:
                outcome = f"error: {error}"
            with lock:
                outcomes[outcome] += 1

    def next_number() -> int | None:
        with lock:
            return next(numbers, None) if perf_counter() < last_start_s else None

    threads = [threading.Thread(target=ask, args=(thread,), daemon=True) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    if seconds < TIMEOUT_S:
        sleep(seconds)
    end_s = perf_counter() + TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, end_s - perf_counter()))
    return {**outcomes, "hanging": sum(thread.is_alive() for thread in threads)}


def vllm_options(kv_tokens: int, num_seqs: int) -> dict[str, Any]:
    """Return vLLM's options for `num_seqs` concurrent requests. kv_tokens: size of the KV cache; 0: vLLM chooses."""
    options: dict[str, Any] = {"block_size": BLOCK_TOKENS, "max_num_seqs": num_seqs, "gpu_memory_utilization": 0.3}
    options["disable_log_stats"] = False  # preemptions are counted there
    if kv_tokens:
        options |= {"num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS, "max_model_len": kv_tokens // 2}
    return options


def num_preemptions() -> int:
    """Return the number of preemptions of the vLLM in this process."""
    from prometheus_client import REGISTRY  # a dependency of vLLM

    metrics = (metric for metric in REGISTRY.collect() if metric.name == "vllm:num_preemptions")
    return int(sum(sample.value for metric in metrics for sample in metric.samples if sample.name.endswith("_total")))


def _ask(
    llm: ChatBlend, prompt: str, expected: Sequence[str], place: int, *, is_stream: bool, draw: random.Random
) -> str:
    """Ask one prompt. Return the outcome."""
    if not is_stream:
        return _compare(str(llm.invoke(prompt).content), expected, place)
    limit = draw.randint(0, (llm.max_tokens or 0) // 2) if draw.random() < CLOSED else None
    with closing(llm.stream(prompt)) as stream:  # type: ignore[type-var]  # LangChain types it as an Iterator
        text = "".join(str(chunk.content) for chunk in itertools.islice(stream, limit))
    if limit is None:
        return _compare(text, expected, place)
    return "closed" if expected[place].startswith(text) else "closed, another beginning"


def _compare(text: str, expected: Sequence[str], place: int) -> str:
    if text == expected[place]:
        return "same answer"
    return "answer of another prompt" if text in expected else "other answer"


def main(
    model: Annotated[str, typer.Option(help="'demo', a Hugging Face id or a folder.")] = "demo",
    asks: Annotated[int, typer.Option(help="Requests that are sent one at a time.")] = 2000,
    requests: Annotated[int, typer.Option(help="Requests that threads send.")] = 1000,
    threads: Annotated[int, typer.Option(help="Threads, half of them streaming.")] = 16,
    minutes: Annotated[float, typer.Option(help="Minutes after which no request begins.")] = float("inf"),
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 12,
    mode: Annotated[Mode, typer.Option(help="Mode of every request.")] = "blend",
    backend: Annotated[str, typer.Option(help="'transformers' or 'vllm'.")] = "transformers",
    kv_tokens: Annotated[int, typer.Option(help="Tokens of vLLM's KV cache; 0 leaves the size to vLLM.")] = 0,
    out: OutOption = None,
) -> None:
    """Measure memory, then send requests by threads. Exit code 1 if a request failed or had another answer."""
    quiet_libraries()
    set_num_threads(1)
    corpus = sample_corpus()
    passages = [chunk for record in corpus.records for chunk in record.chunks]
    prompts = make_prompts(passages, [question.text for question in corpus.questions])
    with tempfile.TemporaryDirectory(prefix="ragblend-threads-") as folder:
        llm = ChatBlend(
            model=model, store=folder, backend=backend, max_tokens=max_tokens, temperature=0.0, mode=mode,
            engine_options={"vllm_options": vllm_options(kv_tokens, threads)} if backend == "vllm" else {},
        )  # fmt: skip
        precompute_documents(passages, llm)
        memory = measure_memory(llm, prompts, asks) if asks else None
        start_s = perf_counter()
        outcomes = run_threads(llm, prompts, threads, requests, 60 * minutes)
        seconds = perf_counter() - start_s
    if memory is not None:
        slope = "no slope" if memory.slope is None else f"{memory.slope * 1048.576:.0f} bytes an ask"
        print_line(
            f"{asks} asks: {memory.warm_mib:.0f} MiB after the warm-up, {memory.last_mib:.0f} at the end, {slope}"
        )
    num_requests = sum(outcomes.values()) - outcomes["hanging"]
    print_line(f"{num_requests} requests by {threads} threads in {seconds:.0f} s: {outcomes}")
    result: dict[str, Any] = {"model": Path(model).name, "backend": backend, "mode": mode, "max_tokens": max_tokens}
    result |= {"asks": asks, "memory": memory and asdict(memory), "threads": threads, "requests": num_requests}
    if backend == "vllm":
        result |= {"kv_tokens": kv_tokens, "preemptions": num_preemptions()}
        print_line(f"{result['preemptions']} preemptions")
    write_result({**result, "outcomes": outcomes}, out)
    if set(outcomes) - {"same answer", "closed", "hanging"} or outcomes["hanging"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
