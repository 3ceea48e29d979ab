"""`bench load`: TTFT of blending from disk, compared with blending from memory (CacheBlend, section 5).

Prompts share no chunk, and the memory tier has space for the chunks of one prompt. The first request of a prompt
therefore reads from the disk, and the case "memory" repeats it. The page cache is dropped before reads from the disk. A
throttled reader simulates disks for which T_load is shorter or longer than T_recompute, as the loading controller
estimates them. Without the pipeline a request reads all KV before it computes. Read `run_load` first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ragblend.engine.fusion.loader import Timeline
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import ChunkKV, KVView, StoredLayer, load_into_memory
from ragblend.engine.store.open import GIB
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.loading_controller import MachineProfile, largest_hidden_ratio
from ragblend.engine.tuning.machine import drop_page_cache
from ragblend.errors import RagblendError
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.lab.bench.common.configs import LoadConfig
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.output import (
    Benchmark,
    BenchResult,
    Column,
    format_table,
    median_fields,
)
from ragblend.lab.bench.common.shapes import find_dtype, find_shape
from ragblend.lab.bench.common.workloads import (
    PromptSet,
    engine_for,
    make_prompts,
    open_directory,
    torch_threads,
)
from ragblend.lab.plots import plot_load
from ragblend.lab.profile import ProfileConfig, measure_machine
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine
    from ragblend.engine.vllm.worker import BlendWorker

TARGET = 1.15
"""Largest TTFT of blending from a disk that loads within T_recompute, as a multiple of the TTFT from memory."""


class LoadCase(NamedTuple):
    """One way to read a prompt's KV. `bytes_per_s`: limit of the read speed; None: no limit."""

    source: str  # memory, disk, throttled
    pipeline: bool
    ratio: float
    load_over_recompute: float  # T_load / T_recompute at `LoadConfig.ratio`, by the controller's estimates
    expected_s: float  # estimate of the controller: with the pipeline, or the sum of both
    bytes_per_s: float | None = None


class LoadSample(NamedTuple):
    """One timed request."""

    report: BlendReport
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The result of one case. Durations in seconds, medians unless stated otherwise."""

    mode: str
    rule: str
    source: str
    pipeline: bool
    ratio: float
    charged_budget: float
    load_over_recompute: float
    bytes_per_s: float | None
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    lookup_s: float  # without the pipeline, reading is part of it
    load_s: float  # reading and placing, overlapped with fusing in the pipeline
    stall_s: float
    fuse_s: float
    over_memory: float  # its TTFT over that of blending from memory
    expected_s: float  # estimate of the controller: with the pipeline, or the sum of both
    within_target: bool | None  # None if loading takes longer than recompute, or without the pipeline
    num_samples: int


@dataclass(frozen=True, slots=True)
class LoadResult(BenchResult):
    """The result of `bench load`."""

    store_bytes: int
    memory_bytes: int
    page_cache_dropped: bool
    load_bytes: int  # of one prompt
    controller: dict[str, Any]  # its measurements; recompute_s is T_recompute
    target: float
    runs: tuple[LoadRun, ...]
    timelines: tuple[dict[str, Any], ...]


def run_load(config: LoadConfig, on_progress: Progress = ignore_progress) -> LoadResult:
    """Measure every case of `config` on the same prompts, in turns."""
    with torch_threads(config.threads), open_directory(config.store) as directory:
        disk = DiskStore(directory)
        with _subject(config, disk) as subject:
            return _run(config, subject, disk, on_progress)


def _run(config: LoadConfig, subject: StoreSwitchableEngine, disk: DiskStore, on_progress: Progress) -> LoadResult:
    engine = subject.engine
    profile = measure_machine(engine, _effort(config), directory=disk.root, on_progress=on_progress)
    work = _prompts(config, subject.vocab_size)
    for number, _ in enumerate(engine.precompute_all(work.chunks)):
        on_progress("precompute", number + 1, len(work.chunks))
    memory_bytes = config.num_chunks * config.chunk_tokens * engine.bytes_per_token
    bench = _Bench(subject, disk, memory_bytes, config.rule)
    cases = make_cases(config, profile, memory_bytes, config.prompt_tokens)
    samples: dict[LoadCase, list[LoadSample]] = {case: [] for case in cases}
    bench.sample(work.prompts[-1], cases[0])  # warm-up
    for number, prompt in enumerate(work.prompts[: config.repeats]):
        on_progress("measure", number, config.repeats)
        for case in cases:
            samples[case].append(bench.sample(prompt, case))
    return LoadResult(
        config,
        config.shape,
        subject.hardware,
        disk.nbytes(),
        memory_bytes,
        bench.page_cache_dropped,
        memory_bytes,
        {
            "prefill_s": profile.prefill_s,
            "shares": profile.shares,
            "bytes_per_s": profile.bytes_per_s,
            "recompute_s": profile.prompt_compute_s(config.blend_ratio, config.prompt_tokens),
        },
        TARGET,
        summarize(samples),
        tuple(median_sample_timeline(case, taken) for case, taken in samples.items()),
    )


def make_cases(config: LoadConfig, profile: MachineProfile, load_bytes: int, num_tokens: int) -> tuple[LoadCase, ...]:
    """Return the cases: memory with the pipeline, and the disk and each throttled reader with and without it. If a
    reader is slow enough, another case has the higher ratio that the controller would choose for this reader."""
    least_s = profile.prompt_compute_s(config.blend_ratio, num_tokens)
    asks_first = find_rule(config.rule, profile.num_layers).probes_before_selection

    def case(source: str, pipeline: bool, speed: float | None = None, ratio: float = config.blend_ratio) -> LoadCase:
        reads = speed or profile.bytes_per_s["disk"]
        load_s = 0.0 if source == "memory" else load_bytes / reads
        compute_s = profile.prompt_compute_s(ratio, num_tokens)
        expected_s = profile.blend_s(load_s, compute_s, asks_first) if pipeline else load_s + compute_s
        return LoadCase(source, pipeline, ratio, load_s / least_s, expected_s, speed)

    # Memory directly after the disk, whose request leaves the chunks in memory.
    cases = [case("disk", True), case("memory", True), case("disk", False)]
    for slowdown in config.slowdowns:
        load_s = slowdown * least_s
        speed = load_bytes / load_s
        cases += [case("throttled", True, speed), case("throttled", False, speed)]
        hidden = largest_hidden_ratio(
            config.blend_ratio,
            profile.hidden_compute_s(load_s, asks_first),
            profile.full_prefill_s(num_tokens),
            profile.shares,
        )
        if hidden > config.blend_ratio:
            cases.append(case("throttled", True, speed, hidden))
    return tuple(cases)


class StoreSwitchableEngine(NamedTuple):
    """An engine to measure. `read_from(store)`, called between requests, makes the engine read from `store`. While
    `times.timelines` is a list, each request appends the times of its layers to the list.
    """

    engine: TransformersEngine | VllmEngine
    vocab_size: int
    hardware: dict[str, Any]
    read_from: Callable[[KVStore], None]
    times: TransformersEngine | BlendWorker


@contextmanager
def _subject(config: LoadConfig, disk: DiskStore) -> Iterator[StoreSwitchableEngine]:
    if config.backend == "vllm":
        from ragblend.engine.vllm.worker import worker_of_this_process
        from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card

        shape = find_shape(config.shape)
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * find_dtype(config.dtype).itemsize
        memory_gib = 2 * config.num_chunks * config.chunk_tokens * token_bytes / GIB  # profiled from memory
        # More than one prompt, because vLLM keeps a block for itself.
        with open_vllm(config, num_prompts=2, memory_gib=memory_gib, store=disk.root) as (served, vocab_size):
            worker = worker_of_this_process()

            def read_uncached_from(store: KVStore) -> None:
                served.reset_prefix_cache()  # it keeps what an earlier blend of the prompt left
                worker.read_from(store)

            yield StoreSwitchableEngine(served, vocab_size, vllm_hardware_card(), read_uncached_from, worker)
        return
    with engine_for(config.shape, disk, find_dtype(config.dtype)) as engine:

        def read_from(store: KVStore) -> None:
            engine.store = store

        yield StoreSwitchableEngine(engine, engine.layers.config.vocab_size, hardware_card(), read_from, engine)


class _Bench:
    """Times one request at a time, from the tiers of a case."""

    def __init__(self, subject: StoreSwitchableEngine, disk: DiskStore, memory_bytes: int, rule: str) -> None:
        self._subject, self._disk, self._rule = subject, disk, rule
        self.memory_bytes = memory_bytes
        self._tiers = TieredStore(MemoryStore(memory_bytes), disk)
        self.page_cache_dropped = True

    def sample(self, prompt: Prompt, case: LoadCase) -> LoadSample:
        """Time one request of one token. Raises RagblendError if the KV was not read from the tier of the case."""
        self._subject.read_from(self._store(case))
        if case.source != "memory":
            self.page_cache_dropped &= drop_page_cache(self._disk.kv_dir.rglob("*.safetensors"))
        before = self._disk.counters.num_hits
        timelines: list[Timeline] = []
        self._subject.times.timelines = timelines
        report = self._subject.engine.generate(
            prompt, mode="blend", rule=self._rule, recompute_ratio=case.ratio, max_tokens=1
        ).report
        num_read = self._disk.counters.num_hits - before
        expected = 0 if case.source == "memory" else report.num_chunks
        if num_read != expected or report.num_chunk_hits != report.num_chunks:
            raise RagblendError(f"{num_read} of {report.num_chunks} chunks came from the disk, expected {expected}")
        return LoadSample(report, timelines[0])

    def _store(self, case: LoadCase) -> KVStore:
        if case.source in ("disk", "memory") and case.pipeline:
            return self._tiers  # the chunks in memory are those of the previous prompt
        tier = ThrottledStore(self._disk, case.bytes_per_s or math.inf, case.pipeline)
        return TieredStore(MemoryStore(self.memory_bytes), tier)


class ThrottledStore(TieredStore):
    """A tier that reads at most `bytes_per_s`, one layer after another, as one slow device would.

    pipelined: a layer is read when it is used; otherwise `get` reads the whole entry before it returns.
    """

    def __init__(self, tier: KVStore, bytes_per_s: float, pipelined: bool = True) -> None:
        super().__init__(tier)
        self._bytes_per_s, self._pipelined = bytes_per_s, pipelined
        self._busy_until_s = 0.0

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """Return the entry, whose layers are read at the throttled speed; None for a miss."""
        kv = super().get(key, token_ids)
        if kv is None:
            return None
        throttled = _ThrottledKV(kv, self._throttle)
        return throttled if self._pipelined else load_into_memory(throttled)

    def _throttle(self, read: Callable[[], StoredLayer]) -> StoredLayer:
        start_s = max(perf_counter(), self._busy_until_s)
        layer = read()
        self._busy_until_s = start_s + layer.nbytes / self._bytes_per_s
        time.sleep(max(0.0, self._busy_until_s - perf_counter()))
        return layer


class _ThrottledKV(KVView):
    """A chunk of a ThrottledStore."""

    def __init__(self, source: ChunkKV, throttle: Callable[[Callable[[], StoredLayer]], StoredLayer]) -> None:
        super().__init__(source)
        self._throttle = throttle

    def stored_layer(self, index: int) -> StoredLayer:
        return self._throttle(lambda: self.source.stored_layer(index))


_MEDIANS = ("charged_budget", "ttft_s", "lookup_s", "load_s", "stall_s", "fuse_s")


def summarize(samples: Mapping[LoadCase, Sequence[LoadSample]]) -> tuple[LoadRun, ...]:
    """Return for every case the medians of its samples, and its TTFT over that of blending from memory."""
    found = {case: median_fields([sample.report for sample in taken], *_MEDIANS) for case, taken in samples.items()}
    memory_s = next(each["ttft_s"] for case, each in found.items() if case.source == "memory")
    runs = []
    for case, taken in samples.items():
        over_memory = found[case]["ttft_s"] / memory_s
        is_hidden = case.pipeline and case.source != "memory" and case.load_over_recompute <= 1
        runs.append(
            LoadRun(
                mode="blend",
                rule=taken[0].report.rule,
                **case._asdict(),
                **found[case],
                ttft_min_s=min(sample.report.ttft_s for sample in taken),
                ttft_max_s=max(sample.report.ttft_s for sample in taken),
                over_memory=over_memory,
                within_target=over_memory <= TARGET if is_hidden else None,
                num_samples=len(taken),
            )
        )
    return tuple(runs)


def median_sample_timeline(case: LoadCase, samples: Sequence[LoadSample]) -> dict[str, Any]:
    """Return the timeline of the sample with the median TTFT: [start, end] of each layer, in seconds since layer 0."""
    ordered = sorted(samples, key=lambda sample: sample.report.ttft_s)
    load, fuse = ordered[len(ordered) // 2].timeline
    zero_s = min(event.start_s for event in (*load, *fuse))
    spans = {
        name: [[event.start_s - zero_s, event.end_s - zero_s] for event in sorted(events)]
        for name, events in (("load", load), ("fuse", fuse))
    }
    facts = case._asdict()
    return {**{name: facts[name] for name in ("source", "pipeline", "ratio", "load_over_recompute")}, **spans}


COLUMNS = (
    Column("KV from", "<10", "source"),
    Column("MB/s", ">7.1f", lambda run: run.bytes_per_s and run.bytes_per_s / 1e6),
    Column("pipeline", ">9", lambda run: "on" if run.pipeline else "off"),
    Column("ratio", ">7.2f", "ratio"), Column("load/rec", ">9.2f", "load_over_recompute"),
    Column("TTFT s", ">8.3f", "ttft_s"), Column("min", ">7.2f", "ttft_min_s"), Column("max", ">7.2f", "ttft_max_s"),
    Column("stall s", ">8.3f", "stall_s"), Column("expected", ">9.3f", "expected_s"),
    Column("/ memory", ">9.2fx", "over_memory"),
    Column(f"<= {TARGET}", ">8", lambda run: {None: "", True: "yes", False: "NO"}[run.within_target]),
)  # fmt: skip


def table_lines(result: LoadResult) -> list[str]:
    """Return the table: two lines that describe workload and machine, then one line per run."""
    config, disk = result.config, result.controller["bytes_per_s"]["disk"]
    cache = "page cache dropped" if result.page_cache_dropped else "PAGE CACHE NOT DROPPED"
    return [
        f"{config.shape} {config.dtype}, {config.num_chunks} chunks x {config.chunk_tokens} tokens of a store "
        f"{result.store_bytes / result.memory_bytes:.1f} times the memory budget, {cache}; medians of {config.repeats}",
        f"by the controller: T_recompute {result.controller['recompute_s']:.3g} s, T_load from this disk "
        f"{result.load_bytes / disk:.3g} s at {disk / 1e6:.0f} MB/s",
        *format_table(COLUMNS, result.runs),
    ]


BENCHMARK = Benchmark(run_load, table_lines, plot_load)


def _effort(config: LoadConfig) -> ProfileConfig:
    """Return what to measure for the controller: these prompts' length, ratios from 0 to well above `ratio`."""
    ratios = (0.0, config.blend_ratio, min(1.0, max(0.5, 2 * config.blend_ratio)))
    return ProfileConfig(config.num_chunks, config.chunk_tokens, 2, tuple(dict.fromkeys(ratios)), config.rule)


def _prompts(config: LoadConfig, vocab_size: int) -> PromptSet:
    """Return prompts without a chunk in common, whose chunks fill the store."""
    num_prompts = max(config.store_factor, config.repeats + 1)
    sets = [make_prompts(*config.prompt_shape, 1, vocab_size, seed) for seed in range(num_prompts)]
    chunks = tuple(chunk for each in sets for chunk in each.chunks)
    return PromptSet(chunks, tuple(each.prompts[0] for each in sets))
