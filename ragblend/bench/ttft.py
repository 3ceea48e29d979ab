"""Time to first token, the four modes side by side in one process: lookup + load + fuse + first token.

Chunks are precomputed, everything is warmed up, and the modes take turns (A B C, A B C, ...), so that a machine
that gets slower or faster slows or speeds them alike. Quote ratios of the medians. Full prefill is the stock
transformers model with its own SDPA attention, or stock vLLM (`ttft_vllm`). Read `run_ttft` first.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, cast

import torch

from ragblend.bench.common.hardware import hardware_card, peak_rss_bytes, reset_peak_rss
from ragblend.bench.common.output import check_plot, on_terminal, present
from ragblend.bench.common.plots import plot_ttft
from ragblend.bench.common.workloads import (
    PREFIX_TOKENS,
    PromptSet,
    engine_for,
    engine_for_model,
    find_dtype,
    find_shape,
    make_prompts,
)
from ragblend.engine.api import Engine
from ragblend.engine.fusion.rules import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.hf.model import load_model
from ragblend.engine.report import MODES, BlendReport, Mode
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.kv import dtype_name
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import UsageError
from ragblend.prompt.prompt import SegmentedPrompt

SCHEMA_VERSION = 1
DEFAULT_SHAPE = "llama-200m"
TIERS = ("memory", "disk")
BACKENDS = ("transformers", "vllm")

_NO_LIMIT_BYTES = 1 << 50  # the memory tier holds whatever the benchmark precomputes


@dataclass(frozen=True, slots=True)
class TtftConfig:
    """What to measure. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: str | None = DEFAULT_SHAPE
    model: str | None = None
    num_chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = DEFAULT_RATIO
    modes: tuple[Mode, ...] = MODES
    rules: tuple[str, ...] = ("cacheblend",)  # one blend run each
    dtype: str = "float32"
    threads: int | None = None  # None: as many as torch uses anyway
    repeats: int = 5  # timed runs per mode and prompt
    num_prompts: int = 1  # each has the chunks in another order
    tier: str = "memory"
    store: Path | None = None  # directory of the disk tier; None is a temporary one
    seed: int = 0
    device: str = "cpu"
    backend: str = "transformers"
    vllm_options: Mapping[str, Any] = field(default_factory=dict)  # vLLM's own engine arguments

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.model is None):
            raise UsageError("give either a shape (random weights) or a model (a checkpoint), not both, not neither")
        if self.shape is not None:
            find_shape(self.shape)
        for name in ("num_chunks", "chunk_tokens", "question_tokens", "repeats", "num_prompts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads is {self.threads}; choose 1 or more")
        check_ratio(self.ratio)
        check_modes(self.modes, self.rules)
        if self.tier not in TIERS:
            raise UsageError(f"tier is {self.tier!r}; choose one of {', '.join(TIERS)}")
        if self.store is not None and self.tier != "disk":
            raise UsageError(f"a store directory is for the disk tier, the tier is {self.tier}: add --tier disk")
        find_dtype(self.dtype)
        if self.backend not in BACKENDS:
            raise UsageError(f"backend is {self.backend!r}; choose one of {', '.join(BACKENDS)}")
        if self.backend == "vllm" and self.device != "cpu":
            raise UsageError(f"device is {self.device!r}; vLLM takes the device it was built for, leave it out")
        if self.backend != "vllm" and self.vllm_options:
            raise UsageError("options for vLLM need --backend vllm")

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is run."""
        return cases_of(self.modes, self.rules)


class Case(NamedTuple):
    """One line of the table. `rule` is "none" except for blend."""

    mode: Mode
    rule: str


def check_modes(modes: Sequence[str], rules: Sequence[str]) -> None:
    """Raise UsageError for a mode or a rule that does not exist, and when there is nothing to run."""
    if not modes:
        raise UsageError(f"no mode given; choose from {', '.join(MODES)}")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"mode is {mode!r}; choose from {', '.join(MODES)}")
    if "blend" in modes and not rules:
        raise UsageError("mode blend needs a rule; choose auto or one of those in `ragblend bench ttft --help`")
    for rule in rules:
        find_rule(rule)


def cases_of(modes: Sequence[Mode], rules: Sequence[str]) -> tuple[Case, ...]:
    """Every mode once, blend once per rule."""
    cases: list[Case] = []
    for mode in modes:
        cases += [Case(mode, rule) for rule in (rules if mode == "blend" else ["none"])]
    return tuple(dict.fromkeys(cases))


class Sample(NamedTuple):
    """One timed request."""

    report: BlendReport
    cpu_s: float  # processor time of all threads: what the wall clock would show on a machine of one's own
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class TtftRun:
    """One case's result. Durations in seconds, medians over all samples unless they say otherwise."""

    mode: Mode
    rule: str
    ratio: float
    charged_budget: float
    charged_budget_32: float
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    cpu_s: float
    load_s: float  # reading and placing stored KV, overlapped with fusing where it comes from disk
    stall_s: float  # the part of it that fusing had to wait for
    fuse_s: float
    probe_s: float  # the part of fuse_s until a rule that asks the question knows its attention
    select_s: float  # the part of fuse_s in which candidates are measured, scored and chosen at the check
    select_share: float  # (probe_s + select_s) / ttft_s; in the table "asking"
    speedup: float | None  # full prefill's median TTFT over this one's; None where full was not run
    speedup_cpu: float | None  # the same of processor time
    limit: float | None  # 1 / charged budget: the speedup if only chunk tokens took time, and each the same time
    num_recomputed_tokens: int
    peak_rss_bytes: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TtftResult:
    """Everything a run of the benchmark found, and what it was run on."""

    config: TtftConfig
    name: str  # of the model
    prompt_tokens: int
    stored_bytes_per_token: int
    hardware: dict[str, Any]
    runs: tuple[TtftRun, ...]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the command line."""
        config = asdict(self.config)
        config |= {"modes": [*self.config.modes], "rules": [*self.config.rules]}
        config |= {"dtype": dtype_name(find_dtype(self.config.dtype))}
        config.pop("store")  # a path of this machine says nothing elsewhere
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "bench ttft",
            "hardware": self.hardware,
            "config": config,
            "model": self.name,
            "prompt_tokens": self.prompt_tokens,
            "stored_bytes_per_token": self.stored_bytes_per_token,
            "runs": [asdict(run) for run in self.runs],
        }


def run_ttft(config: TtftConfig, progress: Callable[[str], None] | None = None) -> TtftResult:
    """Measure every case of `config` on the same prompts. `progress` is told what is being done."""
    tell = progress or (lambda line: None)
    with threads(config.threads):
        tell(f"building {config.shape or config.model}")
        with _subject(config) as subject:
            engine = subject.engine
            work = make_prompts(
                config.num_chunks,
                config.chunk_tokens,
                config.question_tokens,
                config.num_prompts,
                subject.vocab_size,
                config.seed,
            )
            tell(f"precomputing {config.num_chunks} chunks of {config.chunk_tokens} tokens")
            for chunk in work.chunks:
                engine.precompute(chunk)
            samples = _measure(subject, config, work, tell)
            return TtftResult(
                config,
                engine.name,
                samples[config.cases[0]][0].report.prompt_tokens,
                engine.bytes_per_token,
                subject.hardware,
                summarise(samples),
            )


class Subject(NamedTuple):
    """An engine to measure. `prepare` is called before every request, and its time does not count."""

    engine: Engine
    vocab_size: int
    hardware: dict[str, Any]
    prepare: Callable[[SegmentedPrompt, Mode], None] = lambda prompt, mode: None


def _subject(config: TtftConfig) -> AbstractContextManager[Subject]:
    return _vllm(config) if config.backend == "vllm" else _transformers(config)


@contextmanager
def _transformers(config: TtftConfig) -> Iterator[Subject]:
    with _store(config) as store, _engine(config, store) as engine:
        yield Subject(engine, engine.layers.config.vocab_size, hardware_card(config.device))


@contextmanager
def _vllm(config: TtftConfig) -> Iterator[Subject]:
    from ragblend.bench.ttft_vllm import VllmSetup, open_vllm, vllm_card, warm_prefix_cache

    setup = VllmSetup(
        shape=config.shape,
        model=config.model,
        dtype=config.dtype,
        seed=config.seed,
        store=config.store,
        memory_gib=0.0 if config.tier == "disk" else _NO_LIMIT_BYTES / GIB,
        num_prompts=2,
        prompt_tokens=PREFIX_TOKENS + config.num_chunks * config.chunk_tokens + config.question_tokens,
        vllm_options=config.vllm_options,
    )

    def prepare(prompt: SegmentedPrompt, mode: Mode) -> None:
        if mode == "prefix":
            warm_prefix_cache(engine, [prompt])

    with open_vllm(setup) as (engine, vocab_size):
        yield Subject(engine, vocab_size, vllm_card(), prepare)


def _measure(
    subject: Subject, config: TtftConfig, work: PromptSet, tell: Callable[[str], None]
) -> dict[Case, list[Sample]]:
    """Warm every case up once, then take turns."""
    tell("warming up")
    for case in config.cases:
        _sample(subject, work.prompts[0], case, config.ratio)
    samples: dict[Case, list[Sample]] = {case: [] for case in config.cases}
    for repeat in range(config.repeats):
        for number, prompt in enumerate(work.prompts):
            tell(f"round {repeat + 1} of {config.repeats}, prompt {number + 1} of {config.num_prompts}")
            for case in config.cases:
                samples[case].append(_sample(subject, prompt, case, config.ratio))
    return samples


def _sample(subject: Subject, prompt: SegmentedPrompt, case: Case, ratio: float) -> Sample:
    """One request of one token, so that nothing is decoded. The engine synchronises the device."""
    rule = "auto" if case.rule == "none" else case.rule
    subject.prepare(prompt, case.mode)
    reset_peak_rss()
    start_s = process_time()
    result = subject.engine.generate(prompt, mode=case.mode, rule=rule, recompute_ratio=ratio, max_tokens=1)
    return Sample(result.report, process_time() - start_s, peak_rss_bytes())


def summarise(samples: dict[Case, list[Sample]]) -> tuple[TtftRun, ...]:
    """Medians of every case, and their ratios to those of full prefill."""
    full = next((taken for case, taken in samples.items() if case.mode == "full"), None)
    full_s = _median([sample.report.ttft_s for sample in full]) if full else None
    full_cpu_s = _median([sample.cpu_s for sample in full]) if full else None
    runs = []
    for case, taken in samples.items():
        reports = [sample.report for sample in taken]
        times_s = [report.ttft_s for report in reports]
        cpu_s = _median([sample.cpu_s for sample in taken])
        budget = _median([report.charged_budget for report in reports])
        runs.append(
            TtftRun(
                mode=case.mode,
                rule=reports[0].rule,  # what "auto" stood for
                ratio=reports[0].recompute_ratio,
                charged_budget=budget,
                charged_budget_32=_median([report.charged_budget_32 for report in reports]),
                ttft_s=_median(times_s),
                ttft_min_s=min(times_s),
                ttft_max_s=max(times_s),
                cpu_s=cpu_s,
                load_s=_median([report.load_s for report in reports]),
                stall_s=_median([report.stall_s for report in reports]),
                fuse_s=_median([report.fuse_s for report in reports]),
                probe_s=_median([report.probe_s for report in reports]),
                select_s=_median([report.select_s for report in reports]),
                select_share=_median([(report.probe_s + report.select_s) / report.ttft_s for report in reports]),
                speedup=full_s / _median(times_s) if full_s is not None else None,
                speedup_cpu=full_cpu_s / cpu_s if full_cpu_s is not None and cpu_s else None,
                limit=1 / budget if budget else None,
                num_recomputed_tokens=reports[0].num_recomputed_tokens,
                peak_rss_bytes=max(sample.peak_rss_bytes for sample in taken),
                num_samples=len(taken),
            )
        )
    return tuple(runs)


def table_lines(result: TtftResult) -> list[str]:
    """The runs for people: one line each, under a line that says what was run."""
    config = result.config
    lines = [
        f"{result.name} {dtype_name(find_dtype(config.dtype))}, {config.num_chunks} chunks x {config.chunk_tokens} "
        f"tokens + {config.question_tokens} question tokens, {result.prompt_tokens} in all, KV from {config.tier}; "
        f"medians of {result.runs[0].num_samples}",
        f"{'mode':<7}{'rule':<19}{'ratio':>5}{'charged':>8}{'TTFT s':>8}{'min':>7}{'max':>7}{'load s':>7}"
        f"{'fuse s':>7}{'asking':>7}{'speedup':>8}{'limit':>7}{'cpu s':>7}{'GiB':>5}",
    ]
    for run in result.runs:
        lines.append(
            f"{run.mode:<7}{run.rule:<19}{run.ratio:>5.2f}{run.charged_budget:>8.3f}{run.ttft_s:>8.3f}"
            f"{run.ttft_min_s:>7.2f}{run.ttft_max_s:>7.2f}{run.load_s:>7.3f}{run.fuse_s:>7.2f}{run.select_share:>7.1%}"
            f"{_times(run.speedup):>8}{_times(run.limit):>7}{run.cpu_s:>7.2f}{run.peak_rss_bytes / (1 << 30):>5.1f}"
        )
    return lines


def bench_ttft(
    shape: str | None,
    model: str | None,
    chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    ratio: float,
    modes: Sequence[str],
    rules: Sequence[str],
    dtype: str,
    threads: int | None,
    repeats: int,
    questions: int,
    tier: str,
    store: Path | None,
    plot: Path | None,
    seed: int,
    device: str,
    echo: Callable[[str], None],
    backend: str = "transformers",
    vllm_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`ragblend bench ttft`: card and table to `echo`, a picture to `plot`; returns the JSON object.

    Without `shape` and `model` it runs the shape llama-200m. Raises UsageError for values out of range.
    """
    config = TtftConfig(
        shape=DEFAULT_SHAPE if shape is None and model is None else shape,
        model=model,
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        modes=tuple(cast(Mode, mode) for mode in modes),
        rules=tuple(rules),
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        num_prompts=questions,
        tier=tier,
        store=store,
        seed=seed,
        device=device,
        backend=backend,
        vllm_options=vllm_options or {},
    )
    check_plot(plot)
    result = run_ttft(config, on_terminal())
    return present(result.as_dict(), table_lines(result), echo, plot, plot_ttft)


def _engine(config: TtftConfig, store: KVStore) -> TransformersEngine:
    if config.model is not None:
        return engine_for_model(load_model(config.model, dtype_name(find_dtype(config.dtype)), config.device), store)
    assert config.shape is not None
    return engine_for(config.shape, store, find_dtype(config.dtype), config.seed, config.device)


@contextmanager
def _store(config: TtftConfig) -> Iterator[KVStore]:
    """The tier to measure, alone: a memory tier in front of the disk would answer for it."""
    if config.tier == "memory":
        yield MemoryStore(_NO_LIMIT_BYTES)
    elif config.store is not None:
        yield open_store(config.store, memory_gib=0)
    else:
        with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
            yield open_store(directory, memory_gib=0)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads meanwhile; None leaves it alone."""
    before, set_threads = torch.get_num_threads(), torch.set_num_threads  # vLLM replaces it with one that does nothing
    set_threads(count or before)
    try:
        yield
    finally:
        set_threads(before)


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
