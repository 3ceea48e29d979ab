"""Figures of time: 10 (loading and recompute), 14 (request rates, on vLLM), 15a to 15c (chunks, lengths, batches).

Without a model they use random weights, because times depend on shapes alone. Times are the least of REPEATS requests,
so that other programs on the machine change them little. Read `figure_10` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from benchmarks.figures.panels import Panel, Point
from benchmarks.figures.workload import PAPER, Figure, Workload
from benchmarks.load import ThrottledStore
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import load_model
from ragblend.lab.bench.common.configs import ModeAndRule, TtftConfig, expand_cases
from ragblend.lab.bench.common.shapes import find_dtype
from ragblend.lab.bench.common.workloads import (
    engine_for,
    make_engine,
    make_prompts,
    precompute_chunks,
    torch_threads,
    vocab_size,
)
from ragblend.lab.bench.ttft import run_ttft
from ragblend.lab.engines import NO_LIMIT_BYTES
from ragblend.lab.tables import Facts
from ragblend.options import MODES, ModelOptions
from ragblend.prompt.types import Prompt

SHAPE = "llama-50m"
REPEATS = 3
QUESTION_TOKENS = 32
RATIOS = (0.05, 0.15, 0.3, 0.45, 0.6)
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0)  # T_load over T_recompute at 15 %
CHUNK_COUNTS = (3, 6, 9, 12)
CHUNK_LENGTHS = (64, 128, 256, 512)
BATCHES = (1, 2, 4)
RULES = (PAPER.rule, "auto")
TTFT = "time to first token, seconds"


def label_of_case(case: ModeAndRule) -> str:
    """Return the name of a case in legends. "default" is ragblend's default, which chooses rule and ratio itself."""
    if case.mode != "blend":
        return case.mode
    return f"{PAPER.rule} {PAPER.ratio:.0%}" if case.rule == PAPER.rule else "default"


@contextmanager
def open_timed_engine(work: Workload) -> Iterator[TransformersEngine]:
    """Yield the model of `work`, or random weights, over a memory tier, for prompts of `make_prompts`."""
    store = MemoryStore(NO_LIMIT_BYTES)
    with torch_threads(work.threads):
        if work.model is None:
            engine = engine_for(SHAPE, store, find_dtype(work.dtype))
        else:
            loaded = load_model(work.model, ModelOptions(work.dtype, "auto"))
            engine = make_engine(loaded.model, store, loaded.name, loaded.fingerprint)
        with engine:
            yield engine


def measure_ttft(engine: TransformersEngine, prompt: Prompt, mode: str, rule: str, ratio: float | None) -> float:
    """Return the least TTFT of REPEATS requests, in seconds, after a warm-up."""
    options: dict[str, Any] = {"mode": mode, "rule": rule, "recompute_ratio": ratio, "max_tokens": 1}
    times = [engine.generate(prompt, **options).report.ttft_s for _ in range(REPEATS + 1)]
    return min(times[1:])


def figure_10(work: Workload) -> Facts:
    """TTFT over the recompute ratio and over the speed of the device, with loading and recompute overlapped.

    A throttled reader simulates devices. T_recompute is the time of blending at 15 % from memory."""
    with open_timed_engine(work) as engine:
        chunks, (prompt,) = make_prompts(work.num_chunks, work.chunk_tokens, QUESTION_TOKENS, 1, vocab_size(engine))
        precompute_chunks(engine, chunks, work.on_progress)
        memory, load_bytes = engine.store, work.num_chunks * work.chunk_tokens * engine.bytes_per_token
        rule = PAPER.rule

        def ttft(ratio: float, load_s: float, *, overlaps: bool = True) -> float:
            engine.store = ThrottledStore(memory, load_bytes / load_s, overlaps) if load_s else memory
            try:
                return measure_ttft(engine, prompt, "blend", rule, ratio)
            finally:
                engine.store = memory

        full_s = measure_ttft(engine, prompt, "full", "auto", None)
        from_memory = {ratio: ttft(ratio, 0.0) for ratio in RATIOS}
        recompute_s = from_memory[PAPER.ratio]
        slow_s = from_memory[0.3]  # loading hides 30 %
        slow = {ratio: ttft(ratio, slow_s) for ratio in RATIOS}
        ratios: dict[str, list[Point]] = {
            "recompute (KV in memory)": [*from_memory.items()],
            "loading alone": [(ratio, slow_s) for ratio in RATIOS],
            "both, overlapped": [*slow.items()],
            "full": [(ratio, full_s) for ratio in RATIOS],
        }
        overlapped = {load: ttft(PAPER.ratio, load * recompute_s) for load in LOADS}
        apart = {load: ttft(PAPER.ratio, load * recompute_s, overlaps=False) for load in LOADS}
        devices: dict[str, list[Point]] = {
            "overlapped": [*overlapped.items()],
            "loading first": [*apart.items()],
            "the larger of both": [(load, max(1.0, load) * recompute_s) for load in LOADS],
            "full": [(load, full_s) for load in LOADS],
        }
        return {
            "panels": [
                Panel("(a) a device on which loading hides 30 %", "recompute ratio", TTFT, ratios),
                Panel("(b) devices, 15 % recomputed", "T_load / T_recompute", TTFT, devices),
            ],
            "findings": {
                "TTFT at 30 % over 5 %, slow device": slow[0.3] / slow[0.05],
                "TTFT at 30 % over 5 %, memory": from_memory[0.3] / from_memory[0.05],
                "TTFT over memory's where T_load = T_recompute": overlapped[1.0] / recompute_s,
                "the same without overlap": apart[1.0] / recompute_s,
            },
        }


def figure_14(work: Workload) -> Facts:
    """Mean TTFT over the rate of requests, on vLLM in this process (`benchmarks.throughput`)."""
    from benchmarks.throughput import ThroughputConfig, run_throughput

    config = ThroughputConfig(
        model=work.model, shape=None if work.model else SHAPE, dtype=work.dtype, threads=work.threads,
        rules=(PAPER.rule, "auto"), num_requests=20, output_tokens=4, pool=4 * work.num_chunks,
        num_chunks=work.num_chunks, chunk_tokens=work.chunk_tokens,
    )  # fmt: skip
    facts = run_throughput(config, work.on_progress)
    series: dict[str, list[Point]] = {}
    for run in facts["runs"]:
        label = run["mode"] if run["mode"] != "blend" else run["rule"]
        series.setdefault(label, []).append((run["served_rate"], run["ttft_mean_s"]))
    findings = {}
    for each in facts["capacities"]:
        label = each["mode"] if each["mode"] != "blend" else each["rule"]
        if each["rate_at_bound"]:
            least = ", at least" if each["at_least"] else ""  # no tried rate has reached the bound
            what = f"requests per second within a mean TTFT of {facts['bound_s']:.2g} s, {label}{least}"
            findings[what] = each["rate_at_bound"]
    panel = Panel("", "served requests per second", "mean time to first token, seconds", series, log="y")
    return {"panels": [panel], "findings": findings, "model": facts["model"], "hardware": facts["hardware"]}


def over_sizes(work: Workload, x: str, sizes: Mapping[int, Workload]) -> Facts:
    """Return the TTFT of every mode over a size, with KV in memory. `sizes`: the workload of each value of `x`."""
    series: dict[str, list[Point]] = {}
    for size, each in sizes.items():
        config = TtftConfig(
            model=work.model, shape=None if work.model else SHAPE, dtype=work.dtype, threads=work.threads,
            num_chunks=each.num_chunks, chunk_tokens=each.chunk_tokens, modes=MODES, rules=RULES,
            repeats=REPEATS,
        )  # fmt: skip
        facts = run_ttft(config, work.on_progress)
        for case, run in zip(expand_cases(MODES, RULES), facts["runs"], strict=True):
            series.setdefault(label_of_case(case), []).append((size, run["ttft_min_s"]))
    findings: dict[str, float] = {}
    for label, points in series.items():
        if label not in ("full", "reuse"):
            gains = [full_s / own_s for (_, full_s), (_, own_s) in zip(series["full"], points, strict=True)]
            findings |= {f"full over {label}, least": min(gains), f"full over {label}, most": max(gains)}
    return {"panels": [Panel("", x, TTFT, series)], "findings": findings, "model": facts["model"]}


def figure_15a(work: Workload) -> Facts:
    """TTFT over the number of chunks."""
    sizes = {count: replace(work, num_chunks=count) for count in CHUNK_COUNTS}
    return over_sizes(work, f"chunks of {work.chunk_tokens} tokens", sizes)


def figure_15b(work: Workload) -> Facts:
    """TTFT over the length of a chunk."""
    sizes = {length: replace(work, chunk_tokens=length) for length in CHUNK_LENGTHS}
    return over_sizes(work, f"tokens of each of {work.num_chunks} chunks", sizes)


def figure_15c(work: Workload) -> Facts:
    """Seconds until all prompts of a batch have their first token, over the size of the batch."""
    cases = expand_cases(MODES, RULES)
    with open_timed_engine(work) as engine:
        sizes = (work.num_chunks, work.chunk_tokens, QUESTION_TOKENS)
        chunks, prompts = make_prompts(*sizes, max(BATCHES), vocab_size(engine), pool=2 * work.num_chunks)
        precompute_chunks(engine, chunks, work.on_progress)
        series: dict[str, list[Point]] = {}
        for size in BATCHES:
            for case in cases:
                series.setdefault(label_of_case(case), []).append((size, time_batch(engine, prompts[:size], case)))
    last = {label: points[-1][1] for label, points in series.items()}
    others = [label for label in last if label != "full"]
    findings = {f"full over {label}, batch of {BATCHES[-1]}": last["full"] / last[label] for label in others}
    panel = Panel("", "prompts in the batch", "seconds until all have a first token", series)
    return {"panels": [panel], "findings": findings, "model": engine.name}


def time_batch(engine: TransformersEngine, prompts: list[Prompt], case: ModeAndRule) -> float:
    """Return the least seconds of two runs until all `prompts` have their first token."""
    rule = "auto" if case.rule == "none" else case.rule
    least_s = math.inf
    for _ in range(2):
        start_s = perf_counter()
        engine.generate_batch(prompts, mode=case.mode, rule=rule, max_tokens=1)
        least_s = min(least_s, perf_counter() - start_s)
    return least_s


FIGURES: dict[str, Figure] = {
    "10": Figure(figure_10, {"chunk_tokens": 128}),
    "14": Figure(figure_14, {"num_chunks": 4, "chunk_tokens": 128}),
    "15a": Figure(figure_15a, {"chunk_tokens": 128}),
    "15b": Figure(figure_15b, {}),
    "15c": Figure(figure_15c, {"chunk_tokens": 128}),
}
