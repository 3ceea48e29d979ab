"""Times the first token and ingestion, one step for each line that it reads. `compare_commits` runs it in each tree.

A line names a step of STEPS. The workloads are those of `ragblend bench ttft --shape llama-50m` and, of the
transformers engine, of `benchmarks.ingest`, on one thread. The argument is the backend, transformers or vllm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from time import perf_counter

from benchmarks.ingest import prefill_only
from ragblend.engine.store.open import open_store
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import RagblendError
from ragblend.ingestion.contexts import chunk_variants
from ragblend.lab.bench.common.configs import TtftConfig
from ragblend.lab.bench.common.workloads import engine_for, make_prompts, open_directory, torch_threads, vocab_size
from ragblend.options import ContextPolicy, Mode
from ragblend.precompute import precompute_chunks

SHAPE, CHUNK_TOKENS, RATIO = "llama-50m", 512, 0.05
REQUESTS: tuple[tuple[Mode, str], ...] = (
    ("full", "auto"),
    ("prefix", "auto"),
    ("reuse", "auto"),
    ("blend", "ask"),
    ("blend", "cacheblend"),
)
POLICIES: tuple[ContextPolicy, ...] = ("none", "neutral")
FIRST_TOKENS = tuple(f"{mode} {rule}" for mode, rule in REQUESTS)
STEPS = {
    "transformers": (*FIRST_TOKENS, "prefill", *(f"ingest {policy}" for policy in POLICIES)),
    "vllm": FIRST_TOKENS,
}


def main(backend: str) -> None:
    """Print a line when the chunks are stored, and a line of JSON per measurement, in seconds."""
    output = sys.stdout
    with redirect_stdout(sys.stderr), timed_vllm() if backend == "vllm" else timed_transformers() as steps:
        for step in steps.values():
            step()
        print("stored", flush=True, file=output)
        for line in sys.stdin:
            print(json.dumps(steps[line.strip()]()), flush=True, file=output)


@contextmanager
def timed_vllm() -> Iterator[dict[str, Callable[[], float]]]:
    """Yield the steps REQUESTS of vLLM, whose prefix cache is empty but for the first chunk in mode prefix."""
    from ragblend.lab.bench.ttft_vllm import cache_first_chunks, open_vllm

    config = TtftConfig(backend="vllm", dtype="float32", num_chunks=6, chunk_tokens=CHUNK_TOKENS, question_tokens=32)
    with torch_threads(1), open_vllm(config, SHAPE, num_prompts=2, memory_gib=4.0) as engine:
        chunks, [prompt] = make_prompts(*config.prompt_shape, 1, vocab_size(engine))
        for chunk in chunks:
            engine.precompute(chunk)

        def request(mode: Mode, rule: str) -> float:
            cache_first_chunks(engine, [prompt] if mode == "prefix" else [])
            return engine.generate(prompt, mode=mode, rule=rule, recompute_ratio=RATIO, max_tokens=1).report.ttft_s

        yield {f"{mode} {rule}": partial(request, mode, rule) for mode, rule in REQUESTS}


@contextmanager
def timed_transformers() -> Iterator[dict[str, Callable[[], float]]]:
    """Yield the steps STEPS of the transformers engine."""
    with (
        torch_threads(1),
        open_directory() as directory,
        engine_for(SHAPE, MemoryStore(1 << 40)) as engine,
        engine_for(SHAPE, open_store(directory / "kv", memory_gib=0)) as ingesting,
    ):
        chunks, [prompt] = make_prompts(6, CHUNK_TOKENS, 32, 1, vocab_size(engine))
        for chunk in chunks:
            engine.precompute(chunk)

        def request(mode: Mode, rule: str) -> float:
            result = engine.generate(prompt, mode=mode, rule=rule, recompute_ratio=RATIO, max_tokens=1)
            return result.report.ttft_s

        def prefill() -> float:
            start_s = perf_counter()
            prefill_only(ingesting, chunks[:4])
            return perf_counter() - start_s

        def ingest(policy: ContextPolicy) -> float:
            variants = chunk_variants(chunks[:4], policy)
            start_s = perf_counter()
            report = precompute_chunks(variants, ingesting)
            seconds = perf_counter() - start_s
            if report.num_new_kv != len(variants):
                raise RagblendError(f"{report.num_new_kv} of {len(variants)} chunks were new: the store was not empty")
            for variant in variants:
                ingesting.forget(variant)
            return seconds

        yield {
            **{f"{mode} {rule}": partial(request, mode, rule) for mode, rule in REQUESTS},
            "prefill": prefill,
            **{f"ingest {policy}": partial(ingest, policy) for policy in POLICIES},
        }


if __name__ == "__main__":
    main(*sys.argv[1:])
