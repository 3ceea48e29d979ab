"""`bench ttft`: time to first token of full prefill, prefix caching, full reuse and blend, on the same prompts.

The cases take turns in every round, so a machine that gets slower affects all of them. Quote the ratios of the medians.
Full prefill is the stock transformers model with its own SDPA attention, or stock vLLM (`ttft_vllm`). Read `run_ttft`
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import process_time

from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import load_model
from ragblend.engine.vllm.engine import VllmEngine
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import ModeAndRule, TtftConfig, expand_cases
from ragblend.lab.bench.common.hardware import hardware_card, peak_rss_bytes, reset_peak_rss
from ragblend.lab.bench.common.output import Benchmark, median_fields, result_facts
from ragblend.lab.bench.common.shapes import find_dtype
from ragblend.lab.bench.common.workloads import (
    engine_for,
    make_engine,
    make_prompts,
    open_directory,
    precompute_chunks,
    torch_threads,
    vocab_size,
)
from ragblend.lab.bench.ttft_vllm import cache_first_chunks, open_vllm, vllm_hardware_card
from ragblend.lab.engines import NO_LIMIT_BYTES
from ragblend.lab.plots import plot_ttft
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.options import ModelOptions
from ragblend.prompt.types import Prompt

TtftSample = tuple[BlendReport, float, int]
"""One timed request: its report; the CPU seconds of all threads, which are the elapsed time on a machine without other
work; the largest resident memory in bytes."""


def run_ttft(config: TtftConfig, on_progress: Progress = ignore_progress) -> Facts:
    """Measure every case of `config` on the same prompts. Return the JSON object."""
    with torch_threads(config.threads), _open_engine(config) as engine:
        chunks, prompts = make_prompts(*config.prompt_shape, config.num_prompts, vocab_size(engine))
        precompute_chunks(engine, chunks, on_progress)
        return result_facts(
            config,
            engine.name,
            vllm_hardware_card() if config.backend == "vllm" else hardware_card(config.device),
            stored_bytes_per_token=engine.bytes_per_token,
            runs=summarize(_measure(engine, config, prompts, on_progress)),
        )


@contextmanager
def _open_engine(config: TtftConfig) -> Iterator[TransformersEngine | VllmEngine]:
    """Yield the engine over the measured tier alone, because a memory tier in front of a disk would hide it."""
    if config.backend == "vllm":
        memory_gib = 0.0 if config.tier == "disk" else NO_LIMIT_BYTES / GIB
        with open_vllm(config, config.shape, config.model, num_prompts=2, memory_gib=memory_gib) as served:
            yield served
        return
    with open_directory() as directory:
        in_memory = config.tier == "memory"
        store: KVStore = MemoryStore(NO_LIMIT_BYTES) if in_memory else open_store(directory, memory_gib=0)
        if config.model is not None:
            loaded = load_model(config.model, ModelOptions(config.dtype, config.device))
            engine = make_engine(loaded.model, store, loaded.name, loaded.fingerprint)
        else:
            assert config.shape is not None
            engine = engine_for(config.shape, store, find_dtype(config.dtype), device=config.device)
        with engine:
            yield engine


def _measure(
    engine: TransformersEngine | VllmEngine, config: TtftConfig, prompts: Sequence[Prompt], on_progress: Progress
) -> dict[ModeAndRule, list[TtftSample]]:
    """Run every case once as a warm-up, then all cases in turns. Return the samples by case."""
    samples: dict[ModeAndRule, list[TtftSample]] = {case: [] for case in expand_cases(config.modes, config.rules)}
    for case in samples:
        sample_ttft(engine, prompts[0], case, config.ratio)
    rounds = [prompt for _ in range(config.repeats) for prompt in prompts]
    for number, prompt in enumerate(rounds):
        on_progress("measure", number, len(rounds))
        for case in samples:
            samples[case].append(sample_ttft(engine, prompt, case, config.ratio))
    return samples


def sample_ttft(
    engine: TransformersEngine | VllmEngine, prompt: Prompt, case: ModeAndRule, ratio: float | None
) -> TtftSample:
    """Time one request for one token, so that nothing is decoded. The engine synchronizes the device."""
    rule = "auto" if case.rule == "none" else case.rule
    if isinstance(engine, VllmEngine):
        cache_first_chunks(engine, [prompt] if case.mode == "prefix" else [])
    reset_peak_rss()
    start_s = process_time()
    result = engine.generate(prompt, mode=case.mode, rule=rule, recompute_ratio=ratio, max_tokens=1)
    return result.report, process_time() - start_s, peak_rss_bytes()


_MEDIANS = ("charged_budget", "charged_budget_32", "ttft_s", "load_s", "stall_s", "fuse_s", "probe_s", "select_s")
"""charged_budget: share of full prefill's work on chunk tokens. load_s: reading and placing stored KV, overlapped with
fusing if it is read from disk; stall_s: the part of it during which fusing waited. probe_s, select_s: the parts of
fuse_s in which the query probe runs, and in which candidates are scored and selected."""


def summarize(samples: Mapping[ModeAndRule, Sequence[TtftSample]]) -> list[Facts]:
    """Return a JSON object per case (mode and rule), with the medians of its samples. Durations are in seconds.

    `speedup`: full prefill's median TTFT, divided by the median TTFT of the case. `speedup_cpu`: the same ratio of CPU
    times. Both are None if full prefill was not measured.
    """
    full = next((taken for case, taken in samples.items() if case.mode == "full"), None)
    full_s = median(report.ttft_s for report, _, _ in full) if full else None
    full_cpu_s = median(cpu_s for _, cpu_s, _ in full) if full else None
    runs = []
    for case, taken in samples.items():
        reports = [report for report, _, _ in taken]
        times_s = [report.ttft_s for report in reports]
        cpu_s = median(cpu_s for _, cpu_s, _ in taken)
        medians = median_fields(reports, *_MEDIANS)
        runs.append(
            {
                "mode": case.mode,
                "rule": reports[0].rule,  # the rule that "auto" selected
                "ratio": reports[0].recompute_ratio,
                **medians,
                "ttft_min_s": min(times_s),
                "ttft_max_s": max(times_s),
                "cpu_s": cpu_s,
                "select_share": median((report.probe_s + report.select_s) / report.ttft_s for report in reports),
                "speedup": full_s / medians["ttft_s"] if full_s is not None else None,
                "speedup_cpu": full_cpu_s / cpu_s if full_cpu_s is not None and cpu_s else None,
                # The speedup if only chunk tokens took time, each the same.
                "limit": 1 / medians["charged_budget"] if medians["charged_budget"] else None,
                "num_recomputed_tokens": reports[0].num_recomputed_tokens,
                "peak_rss_bytes": max(peak_bytes for _, _, peak_bytes in taken),
                "num_samples": len(taken),
            }
        )
    return runs


COLUMNS: tuple[Column, ...] = (
    ("mode", "<7", "mode"), ("rule", "<19", "rule"), ("ratio", ">5.2f", "ratio"),
    ("charged", ">8.3f", "charged_budget"), ("TTFT s", ">8.3f", "ttft_s"),
    ("min", ">7.2f", "ttft_min_s"), ("max", ">7.2f", "ttft_max_s"), ("load s", ">7.3f", "load_s"),
    ("fuse s", ">7.2f", "fuse_s"), ("select", ">7.1%", "select_share"), ("speedup", ">8.2fx", "speedup"),
    ("limit", ">7.2fx", "limit"), ("cpu s", ">7.2f", "cpu_s"),
    ("GiB", ">5.1f", lambda run: run["peak_rss_bytes"] / GIB),
)  # fmt: skip


def table_lines(facts: Facts) -> list[str]:
    """Return the table: a line that describes the workload, a line of titles, one line per case, and a legend."""
    config = facts["config"]
    return [
        f"{facts['model']} {config['dtype']}, {config['num_chunks']} chunks x {config['chunk_tokens']} tokens + "
        f"{config['question_tokens']} question tokens, {facts['prompt_tokens']} in all, KV from {config['tier']}; "
        f"medians of {facts['runs'][0]['num_samples']}",
        *format_table(COLUMNS, facts["runs"]),
        "charged: share of full prefill's work on chunk tokens; limit: 1 / charged; select: share of TTFT in which "
        "tokens are scored",
    ]


BENCHMARK = Benchmark(run_ttft, table_lines, plot_ttft)
