"""TTFT of blending from disk, compared with blending from memory (CacheBlend, section 5).

    python -m benchmarks.load --shape llama-200m --store /mnt/disk

Prompts share no chunk. The memory tier has space for the chunks of one prompt, and is emptied before a request that
reads from the disk; the case "memory" repeats it. The page cache is dropped before reads from the disk. A throttled
reader simulates disks for which T_load is shorter or longer than T_recompute, as the loading controller estimates them.
Without the pipeline a request reads all KV before it computes. Read `run_load` first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

from typer import Option

from benchmarks.results import run_benchmark
from ragblend.engine.fusion.loader import Timeline
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import ChunkKV, KVView, StoredLayer, load_into_memory
from ragblend.engine.store.open import GIB
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.loading_controller import MachineProfile, largest_hidden_ratio
from ragblend.engine.tuning.machine import drop_page_cache
from ragblend.engine.vllm.engine import VllmEngine
from ragblend.engine.vllm.worker_side.worker import BlendWorker, worker_of_this_process
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import DEFAULT_SHAPE, Backend, PromptConfig, ShapeOption
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.output import Benchmark, median_fields, result_facts
from ragblend.lab.bench.common.shapes import find_dtype, find_shape
from ragblend.lab.bench.common.workloads import engine_for, make_prompts, open_directory, torch_threads, vocab_size
from ragblend.lab.bench.ttft_vllm import open_vllm, vllm_hardware_card
from ragblend.lab.plots import describe_axes, figure_file, workload_title
from ragblend.lab.profile import ProfileConfig, measure_machine
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.prompt.types import Chunk, Prompt

TARGET = 1.15
"""Largest TTFT of blending from a disk that loads within T_recompute, as a multiple of the TTFT from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(PromptConfig):
    """Options of this benchmark. The memory tier holds the chunks of one prompt.

    The store holds the chunks of `store_factor` prompts or more.
    """

    shape: Annotated[str, ShapeOption] = DEFAULT_SHAPE
    rule: Annotated[str, Option("--rule", help="Rule: auto, ask, cacheblend, ...")] = "auto"
    slowdowns: Annotated[
        tuple[float, ...],
        Option("--slowdowns", help="Speeds of throttled readers, as T_load over T_recompute, comma-separated."),
    ] = (0.5, 0.8, 1.0, 2.0)
    store: Annotated[
        str | None, Option("--store", metavar="DIR", help="Folder on the disk to measure. Default: one in TMPDIR.")
    ] = None
    store_factor: int = 10
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1
    repeats: Annotated[int, Option("--repeats", min=1, help="Number of prompts, each with other chunks.")] = 5
    backend: Backend = "transformers"

    def resolve_options(self) -> None:
        """Set `ratio` to the rule's default if it is None. Raise UsageError unless all slowdowns are above 0."""
        if self.ratio is None:
            object.__setattr__(self, "ratio", find_rule(self.rule, find_shape(self.shape).num_layers).ratio)
        if self.store is not None:
            object.__setattr__(self, "store", str(expand_user_path(self.store, "store")))
        if any(slowdown <= 0 for slowdown in self.slowdowns):
            raise UsageError(f"slowdowns are {self.slowdowns}; choose more than 0")

    @property
    def blend_ratio(self) -> float:
        """The recompute ratio: `ratio`, else the rule's default."""
        assert self.ratio is not None  # set by `resolve_options`
        return self.ratio


class LoadCase(NamedTuple):
    """One way to read a prompt's KV: from a tier, at a speed, with or without the pipeline.

    The pipeline loads the next layers while a layer is fused. Without it, all layers are loaded first.
    """

    source: str  # memory, disk, throttled
    pipeline: bool
    ratio: float
    load_over_recompute: float  # T_load / T_recompute at `LoadConfig.ratio`, by the controller's estimates
    expected_s: float  # estimate of the controller: with the pipeline, or the sum of both
    bytes_per_s: float | None = None  # limit of the read speed; None: no limit


LoadSample = tuple[BlendReport, Timeline]
"""One timed request."""


def run_load(config: LoadConfig, on_progress: Progress = ignore_progress) -> Facts:
    """Measure every case of `config` on the same prompts, in turns. Return the JSON object."""
    with torch_threads(config.threads), open_directory(config.store) as directory:
        disk = DiskStore(directory)
        with _open_engine(config, disk) as engine:
            return _run(config, engine, disk, on_progress)


def _run(config: LoadConfig, engine: TransformersEngine | VllmEngine, disk: DiskStore, on_progress: Progress) -> Facts:
    # For the controller: these prompts' length, ratios from 0 to well above `ratio`.
    ratios = dict.fromkeys((0.0, config.blend_ratio, min(1.0, max(0.5, 2 * config.blend_ratio))))
    effort = ProfileConfig(config.num_chunks, config.chunk_tokens, 2, tuple(ratios), config.rule)
    profile = measure_machine(engine, effort, directory=disk.root, on_progress=on_progress)
    chunks, prompts = _prompts(config, vocab_size(engine))
    for number, _ in enumerate(engine.precompute_all(chunks)):
        on_progress("precompute", number + 1, len(chunks))
    memory_bytes = config.num_chunks * config.chunk_tokens * engine.bytes_per_token
    tiers = TieredStore(MemoryStore(memory_bytes), disk)
    cases = make_cases(config, profile, memory_bytes, config.prompt_tokens)
    samples: dict[LoadCase, list[LoadSample]] = {case: [] for case in cases}
    time_request(engine, tiers, prompts[-1], cases[0], config.rule)  # warm-up
    for number, prompt in enumerate(prompts[: config.repeats]):
        on_progress("measure", number, config.repeats)
        for case in cases:
            samples[case].append(time_request(engine, tiers, prompt, case, config.rule))
    return result_facts(
        config,
        config.shape,
        vllm_hardware_card() if config.backend == "vllm" else hardware_card(),
        store_bytes=disk.nbytes(),
        memory_bytes=memory_bytes,
        page_cache_dropped=drop_page_cache([]),
        load_bytes=memory_bytes,  # of one prompt
        controller={
            "prefill_s": profile.prefill_s,
            "shares": profile.shares,
            "bytes_per_s": profile.bytes_per_s,
            "recompute_s": profile.prompt_compute_s(config.blend_ratio, config.prompt_tokens),  # T_recompute
        },
        target=TARGET,
        runs=summarize(samples),
        timelines=[median_sample_timeline(case, taken) for case, taken in samples.items()],
    )


def make_cases(config: LoadConfig, profile: MachineProfile, load_bytes: int, num_tokens: int) -> tuple[LoadCase, ...]:
    """Return the cases to measure: KV from memory, from the disk, and from readers that are throttled.

    KV from the disk and from throttled readers is loaded with the pipeline and without it. If the controller would
    choose a higher ratio than `config.blend_ratio` for a throttled reader, that ratio is a further case.
    load_bytes: size of the KV of one prompt's chunks. num_tokens: tokens of one prompt.
    """
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


@contextmanager
def _open_engine(config: LoadConfig, disk: DiskStore) -> Iterator[TransformersEngine | VllmEngine]:
    if config.backend == "vllm":
        shape = find_shape(config.shape)
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * find_dtype(config.dtype).itemsize
        memory_gib = 2 * config.num_chunks * config.chunk_tokens * token_bytes / GIB  # profiled from memory
        # More than one prompt, because vLLM keeps a block for itself.
        with open_vllm(config, config.shape, num_prompts=2, memory_gib=memory_gib, store=disk.root) as served:
            yield served
        return
    with engine_for(config.shape, disk, find_dtype(config.dtype)) as engine:
        yield engine


def _read_from(engine: TransformersEngine | VllmEngine, store: KVStore) -> TransformersEngine | BlendWorker:
    """Make the engine read from `store`. Return the object that appends the times of each request's layers to its
    `timelines`.
    """
    if isinstance(engine, TransformersEngine):
        engine.store = store
        return engine
    engine.reset_prefix_cache()  # it keeps what an earlier blend of the prompt left
    worker = worker_of_this_process()
    worker.set_read_store(store)
    return worker


def time_request(
    engine: TransformersEngine | VllmEngine, tiers: TieredStore, prompt: Prompt, case: LoadCase, rule: str
) -> LoadSample:
    """Send one request for one token, and return its report and its timeline.

    The KV is read from the memory or the disk of `tiers`, as `case.source` says. Raises RagblendError if the KV was
    read from another tier.
    """
    memory, disk = tiers.find_tier(MemoryStore), tiers.find_tier(DiskStore)
    assert memory is not None
    assert disk is not None
    store = tiers
    if case.source == "throttled" or not case.pipeline:
        throttled = ThrottledStore(disk, case.bytes_per_s or math.inf, case.pipeline)
        store = TieredStore(MemoryStore(memory.capacity_bytes), throttled)
    times = _read_from(engine, store)
    if case.source != "memory":
        for key in [*memory.keys()]:
            memory.delete(key)
        drop_page_cache(disk.kv_dir.rglob("*.safetensors"))
    before = disk.counters.num_hits
    timelines: list[Timeline] = []
    times.timelines = timelines
    report = engine.generate(prompt, mode="blend", rule=rule, recompute_ratio=case.ratio, max_tokens=1).report
    num_read = disk.counters.num_hits - before
    expected = 0 if case.source == "memory" else report.num_chunks
    if num_read != expected or report.num_chunk_hits != report.num_chunks:
        raise RagblendError(f"{num_read} of {report.num_chunks} chunks came from the disk, expected {expected}")
    return report, timelines[0]


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
        return self._throttled(super().get(key, token_ids))

    def get_local(self, key: str, token_ids: Sequence[int] | None, fetched: Mapping[str, ChunkKV]) -> ChunkKV | None:
        """Return the entry as `get` does. vLLM's worker calls this method."""
        return self._throttled(super().get_local(key, token_ids, fetched))

    def _throttled(self, kv: ChunkKV | None) -> ChunkKV | None:
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


def summarize(samples: Mapping[LoadCase, Sequence[LoadSample]]) -> list[Facts]:
    """Return a JSON object per case: median durations in seconds, and the TTFT relative to blending from memory.

    Without the pipeline, `lookup_s` includes reading. With the pipeline, `load_s` and `fuse_s` overlap. `over_memory`:
    TTFT of the case, divided by the TTFT from memory. `within_target`: whether `over_memory` is at most TARGET; None
    for memory, for a case without the pipeline, and if loading takes longer than recompute.
    """
    reports = {case: [report for report, _ in taken] for case, taken in samples.items()}
    found = {case: median_fields(taken, *_MEDIANS) for case, taken in reports.items()}
    memory_s = next(each["ttft_s"] for case, each in found.items() if case.source == "memory")
    runs = []
    for case, taken in reports.items():
        over_memory = found[case]["ttft_s"] / memory_s
        is_hidden = case.pipeline and case.source != "memory" and case.load_over_recompute <= 1
        runs.append(
            {
                "mode": "blend",
                "rule": taken[0].rule,
                **case._asdict(),
                **found[case],
                "ttft_min_s": min(report.ttft_s for report in taken),
                "ttft_max_s": max(report.ttft_s for report in taken),
                "over_memory": over_memory,
                "within_target": over_memory <= TARGET if is_hidden else None,
                "num_samples": len(taken),
            }
        )
    return runs


def median_sample_timeline(case: LoadCase, samples: Sequence[LoadSample]) -> Facts:
    """Return the timeline of the sample with the median TTFT, and the fields of `case` that identify it.

    "load" and "fuse" have [start, end] of each layer, in seconds since the earliest start.
    """
    _, (load, fuse) = sorted(samples, key=lambda sample: sample[0].ttft_s)[len(samples) // 2]
    zero_s = min(event.start_s for event in (*load, *fuse))
    facts = case._asdict()
    return {
        **{name: facts[name] for name in ("source", "pipeline", "ratio", "load_over_recompute")},
        "load": [[event.start_s - zero_s, event.end_s - zero_s] for event in sorted(load)],
        "fuse": [[event.start_s - zero_s, event.end_s - zero_s] for event in sorted(fuse)],
    }


COLUMNS: tuple[Column, ...] = (
    ("KV from", "<10", "source"), ("MB/s", ">7.1f", lambda run: run["bytes_per_s"] and run["bytes_per_s"] / 1e6),
    ("pipeline", ">9", lambda run: "on" if run["pipeline"] else "off"),
    ("ratio", ">7.2f", "ratio"), ("load/rec", ">9.2f", "load_over_recompute"),
    ("TTFT s", ">8.3f", "ttft_s"), ("min", ">7.2f", "ttft_min_s"), ("max", ">7.2f", "ttft_max_s"),
    ("stall s", ">8.3f", "stall_s"), ("expected", ">9.3f", "expected_s"), ("/ memory", ">9.2fx", "over_memory"),
    (f"<= {TARGET}", ">8", lambda run: {None: "", True: "yes", False: "NO"}[run["within_target"]]),
)  # fmt: skip


def table_lines(facts: Facts) -> list[str]:
    """Return the table: two lines that describe workload and machine, a line of titles, and one line per case."""
    config, disk = facts["config"], facts["controller"]["bytes_per_s"]["disk"]
    cache = "page cache dropped" if facts["page_cache_dropped"] else "PAGE CACHE NOT DROPPED"
    return [
        f"{config['shape']} {config['dtype']}, {config['num_chunks']} chunks x {config['chunk_tokens']} tokens of a "
        f"store {facts['store_bytes'] / facts['memory_bytes']:.1f} times the memory budget, {cache}; medians of "
        f"{config['repeats']}",
        f"by the controller: T_recompute {facts['controller']['recompute_s']:.3g} s, T_load from this disk "
        f"{facts['load_bytes'] / disk:.3g} s at {disk / 1e6:.0f} MB/s",
        *format_table(COLUMNS, facts["runs"]),
    ]


def plot_load(facts: Mapping[str, Any], path: Path) -> None:
    """Write the plots of the result: when each layer is loaded and fused, and TTFT (y) over the loading time (x)."""
    title = f"{workload_title(facts)}, {facts['runs'][0]['rule']} at {facts['config']['ratio']:.0%}"
    with figure_file(path, 15, 5, title) as figure:
        chosen = _timelines_to_show(facts)
        panels = figure.subplots(1, len(chosen) + 1)
        for axes, timeline in zip(panels, chosen, strict=False):
            _plot_timeline(axes, timeline)
        _plot_over_load(panels[-1], facts)


def _timelines_to_show(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the slowest reader that hides and the slowest of all, at the requested ratio, with the pipeline."""
    own = [each for each in facts["timelines"] if each["pipeline"] and each["ratio"] == facts["config"]["ratio"]]
    own = sorted((each for each in own if each["source"] != "memory"), key=lambda each: each["load_over_recompute"])
    hidden = [each for each in own if each["load_over_recompute"] <= 1]
    return [*hidden[-1:], *(each for each in own[-1:] if each not in hidden)]


def _plot_timeline(axes: Any, timeline: Mapping[str, Any]) -> None:
    """Draw a row per layer with the times of loading and of fusing it."""
    for name, color, offset in (("load", "#ff7f0e", -0.2), ("fuse", "#1f77b4", 0.2)):
        starts = [start for start, _ in timeline[name]]
        widths = [end - start for start, end in timeline[name]]
        rows = [layer + offset for layer in range(len(starts))]
        axes.barh(rows, widths, left=starts, height=0.4, color=color, label=name)
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(left=0)
    title = f"{timeline['source']}, T_load = {timeline['load_over_recompute']:.2f} T_recompute"
    describe_axes(axes, "seconds", "layer", title)


def _plot_over_load(axes: Any, facts: Mapping[str, Any]) -> None:
    """Draw TTFT / TTFT from memory (y) over T_load / T_recompute (x), with the pipeline and without."""
    ratio = facts["config"]["ratio"]
    runs = sorted(facts["runs"], key=lambda run: float(run["load_over_recompute"]))
    lines = {
        "pipeline on": ("o-", [run for run in runs if run["pipeline"] and run["ratio"] == ratio]),
        "pipeline off": ("o-", [run for run in runs if not run["pipeline"]]),
        "pipeline on, at the ratio that hides": ("^", [run for run in runs if run["ratio"] > ratio]),
    }
    for label, (style, points) in lines.items():
        places, over = [run["load_over_recompute"] for run in points], [run["over_memory"] for run in points]
        axes.plot(places, over, style, ms=5, label=label)
    axes.axhline(facts["target"], color="black", ls=":", lw=1, label=f"{facts['target']:g}")
    axes.axvline(1.0, color="#7f7f7f", ls="--", lw=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    describe_axes(axes, "T_load / T_recompute, by the controller", "TTFT / TTFT from memory")


BENCHMARK = Benchmark(run_load, table_lines, plot_load)


def _prompts(config: LoadConfig, vocab_size: int) -> tuple[list[Chunk], list[Prompt]]:
    """Return chunks that fill the store, and prompts without a chunk in common."""
    num_prompts = max(config.store_factor, config.repeats + 1)
    sets = [make_prompts(*config.prompt_shape, 1, vocab_size, seed) for seed in range(num_prompts)]
    return [chunk for chunks, _ in sets for chunk in chunks], [prompt for _, prompts in sets for prompt in prompts]


if __name__ == "__main__":
    run_benchmark(LoadConfig, BENCHMARK)
