"""`bench ttft`: time to first token of full prefill, prefix caching, full reuse and blend, on the same prompts.

The cases take turns in every round, so a machine that gets slower affects all of them. Quote the ratios of the medians.
Full prefill is the stock transformers model with its own SDPA attention, or stock vLLM (`ttft_vllm`). Read `run_ttft`
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any, NamedTuple

from ragblend.engine.api import Engine
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import load_model
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.lab.bench.common.configs import ModeAndRule, TtftConfig
from ragblend.lab.bench.common.hardware import hardware_card, peak_rss_bytes, reset_peak_rss
from ragblend.lab.bench.common.output import (
    Benchmark,
    BenchResult,
    Column,
    format_table,
    median_fields,
)
from ragblend.lab.bench.common.shapes import find_dtype
from ragblend.lab.bench.common.workloads import (
    PromptSet,
    engine_for,
    make_engine,
    make_prompts,
    open_directory,
    precompute_chunks,
    torch_threads,
)
from ragblend.lab.plots import plot_ttft
from ragblend.options import Mode, ModelOptions
from ragblend.prompt.types import Prompt

_NO_LIMIT_BYTES = 1 << 50  # the memory tier holds everything that the benchmark precomputes


class TtftSample(NamedTuple):
    """One timed request."""

    report: BlendReport
    cpu_s: float  # CPU seconds of all threads: the elapsed time on a machine without other work
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class TtftRun:
    """The result of one case. Durations in seconds, medians over all samples unless stated otherwise."""

    mode: Mode
    rule: str
    ratio: float
    charged_budget: float
    charged_budget_32: float
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    cpu_s: float
    load_s: float  # reading and placing stored KV; overlapped with fusing if it is read from disk
    stall_s: float  # the part of load_s during which fusing waited
    fuse_s: float
    probe_s: float  # the part of fuse_s in which the query probe runs
    select_s: float  # the part of fuse_s in which candidates are scored and selected
    select_share: float  # (probe_s + select_s) / ttft_s; in the table "select"
    speedup: float | None  # full prefill's median TTFT over this median; None if full was not run
    speedup_cpu: float | None  # the same for CPU seconds
    limit: float | None  # 1 / charged budget: the speedup if only chunk tokens took time, each the same
    num_recomputed_tokens: int
    peak_rss_bytes: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TtftResult(BenchResult):
    """The result of `bench ttft`."""

    stored_bytes_per_token: int
    runs: tuple[TtftRun, ...]


def run_ttft(config: TtftConfig, on_progress: Progress = ignore_progress) -> TtftResult:
    """Measure every case of `config` on the same prompts."""
    with torch_threads(config.threads), _subject(config) as subject:
        engine = subject.engine
        work = make_prompts(*config.prompt_shape, config.num_prompts, subject.vocab_size)
        precompute_chunks(engine, work.chunks, on_progress)
        samples = _measure(subject, config, work, on_progress)
        return TtftResult(config, engine.name, subject.hardware, engine.bytes_per_token, summarize(samples))


class EngineUnderTest(NamedTuple):
    """An engine to measure. `prepare` is called before every request; its time does not count."""

    engine: Engine
    vocab_size: int
    hardware: dict[str, Any]
    prepare: Callable[[Prompt, Mode], None] = lambda prompt, mode: None


@contextmanager
def _subject(config: TtftConfig) -> Iterator[EngineUnderTest]:
    """Yield the engine over the measured tier alone, because a memory tier in front of a disk would hide it."""
    if config.backend == "vllm":
        from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card, warm_prefix_cache

        def prepare(prompt: Prompt, mode: Mode) -> None:
            warm_prefix_cache(engine, [prompt] if mode == "prefix" else [])

        memory_gib = 0.0 if config.tier == "disk" else _NO_LIMIT_BYTES / GIB
        with open_vllm(config, num_prompts=2, memory_gib=memory_gib) as (engine, vocab_size):
            yield EngineUnderTest(engine, vocab_size, vllm_hardware_card(), prepare)
        return
    with open_directory() as directory:
        in_memory = config.tier == "memory"
        store: KVStore = MemoryStore(_NO_LIMIT_BYTES) if in_memory else open_store(directory, memory_gib=0)
        with _engine(config, store) as stock:
            yield EngineUnderTest(stock, stock.layers.config.vocab_size, hardware_card(config.device))


def _measure(
    subject: EngineUnderTest, config: TtftConfig, work: PromptSet, on_progress: Progress
) -> dict[ModeAndRule, list[TtftSample]]:
    """Run every case once as a warm-up, then all cases in turns. Return the samples by case."""
    for case in config.cases:
        _sample(subject, work.prompts[0], case, config.ratio)
    samples: dict[ModeAndRule, list[TtftSample]] = {case: [] for case in config.cases}
    rounds = [prompt for _ in range(config.repeats) for prompt in work.prompts]
    for number, prompt in enumerate(rounds):
        on_progress("measure", number, len(rounds))
        for case in config.cases:
            samples[case].append(_sample(subject, prompt, case, config.ratio))
    return samples


def _sample(subject: EngineUnderTest, prompt: Prompt, case: ModeAndRule, ratio: float | None) -> TtftSample:
    """Time one request for one token, so that nothing is decoded. The engine synchronizes the device."""
    rule = "auto" if case.rule == "none" else case.rule
    subject.prepare(prompt, case.mode)
    reset_peak_rss()
    start_s = process_time()
    result = subject.engine.generate(prompt, mode=case.mode, rule=rule, recompute_ratio=ratio, max_tokens=1)
    return TtftSample(result.report, process_time() - start_s, peak_rss_bytes())


_MEDIANS = ("charged_budget", "charged_budget_32", "ttft_s", "load_s", "stall_s", "fuse_s", "probe_s", "select_s")


def summarize(samples: dict[ModeAndRule, list[TtftSample]]) -> tuple[TtftRun, ...]:
    """Return for every case the medians of its samples, and the speedup over full prefill."""
    full = next((taken for case, taken in samples.items() if case.mode == "full"), None)
    full_s = median(sample.report.ttft_s for sample in full) if full else None
    full_cpu_s = median(sample.cpu_s for sample in full) if full else None
    runs = []
    for case, taken in samples.items():
        reports = [sample.report for sample in taken]
        times_s = [report.ttft_s for report in reports]
        cpu_s = median(sample.cpu_s for sample in taken)
        found = median_fields(reports, *_MEDIANS)
        runs.append(
            TtftRun(
                mode=case.mode,
                rule=reports[0].rule,  # the rule that "auto" selected
                ratio=reports[0].recompute_ratio,
                **found,
                ttft_min_s=min(times_s),
                ttft_max_s=max(times_s),
                cpu_s=cpu_s,
                select_share=median((report.probe_s + report.select_s) / report.ttft_s for report in reports),
                speedup=full_s / found["ttft_s"] if full_s is not None else None,
                speedup_cpu=full_cpu_s / cpu_s if full_cpu_s is not None and cpu_s else None,
                limit=1 / found["charged_budget"] if found["charged_budget"] else None,
                num_recomputed_tokens=reports[0].num_recomputed_tokens,
                peak_rss_bytes=max(sample.peak_rss_bytes for sample in taken),
                num_samples=len(taken),
            )
        )
    return tuple(runs)


COLUMNS = (
    Column("mode", "<7", "mode"), Column("rule", "<19", "rule"), Column("ratio", ">5.2f", "ratio"),
    Column("charged", ">8.3f", "charged_budget"), Column("TTFT s", ">8.3f", "ttft_s"),
    Column("min", ">7.2f", "ttft_min_s"), Column("max", ">7.2f", "ttft_max_s"), Column("load s", ">7.3f", "load_s"),
    Column("fuse s", ">7.2f", "fuse_s"),
    Column("select", ">7.1%", "select_share"), Column("speedup", ">8.2fx", "speedup"),
    Column("limit", ">7.2fx", "limit"), Column("cpu s", ">7.2f", "cpu_s"),
    Column("GiB", ">5.1f", lambda run: run.peak_rss_bytes / GIB),
)  # fmt: skip


def table_lines(result: TtftResult) -> list[str]:
    """Return the table: a line that describes the workload, then one line per run."""
    config = result.config
    return [
        f"{result.name} {config.dtype}, {config.num_chunks} chunks x {config.chunk_tokens} tokens + "
        f"{config.question_tokens} question tokens, {config.prompt_tokens} in all, KV from {config.tier}; "
        f"medians of {result.runs[0].num_samples}",
        *format_table(COLUMNS, result.runs),
        "charged: share of full prefill's work on chunk tokens; limit: 1 / charged; select: share of TTFT in which "
        "tokens are scored",
    ]


BENCHMARK = Benchmark(run_ttft, table_lines, plot_ttft)


def _engine(config: TtftConfig, store: KVStore) -> TransformersEngine:
    if config.model is not None:
        loaded = load_model(config.model, ModelOptions(config.dtype, config.device))
        return make_engine(loaded.model, store, loaded.name, loaded.fingerprint)
    assert config.shape is not None
    return engine_for(config.shape, store, find_dtype(config.dtype), device=config.device)
