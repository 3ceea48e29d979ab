"""Requests per second at equal time to first token, under Poisson arrivals (CacheBlend, figure 14).

    python -m benchmarks.throughput --shape llama-200m --num-requests 64

The defaults take under ten minutes on one idle CPU core. A larger shape, more or longer chunks and low rates take
longer.

Every mode gets the same prompts at the same times: one sequence of arrivals with mean gap 1, drawn once and scaled to
each rate. Requests are sent without waiting for answers, so a mode that is too slow for a rate builds up a queue, and
TTFT is measured from the arrival. vLLM runs in this process; prompts are tokenized before the clock starts. Read
`run_throughput` first.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from typer import Option

from benchmarks.results import run_benchmark
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.base_engine import VllmRequest
from ragblend.errors import RagblendError, UsageError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import (
    Chunks,
    ChunkTokens,
    ModeAndRule,
    Model,
    Modes,
    PromptConfig,
    Rules,
    choose_shape,
    expand_cases,
)
from ragblend.lab.bench.common.output import Benchmark, result_facts
from ragblend.lab.bench.common.workloads import make_prompts, precompute_chunks, torch_threads, vocab_size
from ragblend.lab.bench.ttft_vllm import cache_first_chunks, open_vllm, vllm_hardware_card
from ragblend.lab.plots import COLORS, describe_axes, figure_file, workload_title
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

BOUND_FACTOR = 2.0  # the default bound, as a multiple of full prefill's TTFT on an idle engine
LOADS = (0.4, 0.7, 1.0, 1.4, 1.8, 2.2, 2.7, 3.3, 4.0)
"""Default rates, in requests per duration of a full prefill. Full prefill cannot keep up beyond 1."""

_STOP_FACTOR = 2.0  # a mode whose mean TTFT exceeds the bound by this factor is not measured at higher rates
_IDLE_SAMPLES = 3
_HEAD_START_S = 0.05  # until the sending threads are ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(PromptConfig):
    """Options of this benchmark. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: Annotated[
        str | None,
        Option("--shape", help="Model of random weights: llama-50m (default), llama-200m, llama-1b, ..."),
    ] = None
    model: Model = None
    num_chunks: Chunks = 4
    chunk_tokens: ChunkTokens = 128
    pool: int = 24  # stored chunks that prompts draw from
    output_tokens: int = 8
    num_requests: Annotated[int, Option("--num-requests", min=1, help="Requests per rate and mode.")] = 16
    rates: Annotated[
        tuple[float, ...] | None,
        Option("--rates", help="Requests per second, comma-separated. Default: multiples of full prefill's."),
    ] = None
    bound_s: Annotated[
        float | None,
        Option("--max-mean-ttft-s", help="Largest mean TTFT, seconds. Default: twice full prefill's when idle."),
    ] = None
    modes: Modes = ("full", "prefix", "blend")
    rules: Rules = ("auto",)
    memory_gib: float = 2.0  # of the memory tier

    def resolve_options(self) -> None:
        """Set the default shape. Raise UsageError if `num_chunks` exceeds `pool`, or a rate or bound is 0 or less."""
        object.__setattr__(self, "shape", choose_shape(self.shape, self.model, "llama-50m"))
        if self.pool < self.num_chunks:
            raise UsageError(
                f"num_chunks is {self.num_chunks}, but only {self.pool} chunks are stored; choose {self.pool} or less"
            )
        if self.rates is not None and (not self.rates or min(self.rates) <= 0):
            raise UsageError("rates must be above 0 requests per second; leave them out to have them chosen")
        if self.bound_s is not None and self.bound_s <= 0:
            raise UsageError(f"the bound is {self.bound_s} s; choose more than 0")


class TimedAnswer(NamedTuple):
    """One answered request. `ttft_s`, `total_s`: seconds from its arrival to its first and last token."""

    arrival_s: float
    ttft_s: float
    total_s: float
    report: BlendReport | None = None
    num_cached_tokens: int = 0  # prompt tokens from vLLM's prefix cache


def run_throughput(config: ThroughputConfig, on_progress: Progress = ignore_progress) -> Facts:
    """Measure every mode of `config` at every rate on the same prompts. Return the JSON object."""
    cases = expand_cases(config.modes, config.rules)
    # Enough for all prompts of a rate and all chunks, so that vLLM's prefix cache evicts nothing.
    num_prompts = config.num_requests + -(-config.pool // config.num_chunks)
    longest = config.prompt_tokens + config.output_tokens
    with (
        torch_threads(config.threads),
        open_vllm(
            config,
            config.shape,
            config.model,
            num_prompts=num_prompts,
            prompt_tokens=longest,
            memory_gib=config.memory_gib,
        ) as engine,
    ):
        words = vocab_size(engine)
        chunks, prompts = make_prompts(*config.prompt_shape, config.num_requests, words, pool=config.pool)
        precompute_chunks(engine, chunks, on_progress)

        def requests_of(case: ModeAndRule, prompts: Sequence[Prompt]) -> list[VllmRequest]:
            options: dict[str, Any] = {"mode": case.mode, "recompute_ratio": config.ratio}
            options |= {"rule": case.rule} if case.mode == "blend" else {}
            return [engine.request(prompt, max_tokens=config.output_tokens, **options) for prompt in prompts]

        def answer(case: ModeAndRule, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> list[TimedAnswer]:
            cache_first_chunks(engine, prompts if case.mode == "prefix" else [])
            return check_answer_modes(case, replay_requests(engine, requests_of(case, prompts), arrivals_s))

        idle_s = measure_idle_ttfts(cases, prompts, answer)
        bound_s = config.bound_s or BOUND_FACTOR * idle_s[_FULL]
        rates = config.rates or tuple(float(f"{load / idle_s[_FULL]:.3g}") for load in LOADS)
        gaps = arrival_times(1.0, config.num_requests)

        def measure(case: ModeAndRule, rate: float) -> list[TimedAnswer]:
            return answer(case, prompts, [moment / rate for moment in gaps])

        runs = measure_rates(cases, rates, bound_s, measure, on_progress)
        capacities = compute_capacities(runs, {case: idle_s[case] for case in cases}, bound_s)
        hardware = vllm_hardware_card()
        return result_facts(config, engine.name, hardware, bound_s=bound_s, runs=runs, capacities=capacities)


_FULL = ModeAndRule("full", "none")  # always measured idle, because the bound and the rates are derived from it


def arrival_times(rate: float, count: int, seed: int = 0) -> list[float]:
    """Return the times, in seconds and ascending, of `count` arrivals of a Poisson process with `rate` per second.

    Equal seeds give the same sequence at every rate, scaled by 1 / `rate`.
    """
    draw, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(1.0)
        moments.append(now / rate)
    return moments


def replay_requests(
    engine: VllmEngine, requests: Sequence[VllmRequest], arrivals_s: Sequence[float]
) -> list[TimedAnswer]:
    """Send each request at its time in `arrivals_s`, without waiting for other answers. Return the answers.

    Raises RagblendError for an answer without a token.
    """
    start_s = time.perf_counter() + _HEAD_START_S

    def send(request: VllmRequest, arrival_s: float) -> TimedAnswer:
        due_s = start_s + arrival_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        first_s, report, num_cached = None, None, 0
        with closing(engine.run_request(request)) as deltas:
            for delta in deltas:
                if delta.token_ids and first_s is None:
                    first_s = time.perf_counter() - due_s
                report = delta.report or report
                num_cached = max(num_cached, delta.num_cached_tokens)
        if first_s is None:
            raise RagblendError("vLLM answered a request without a token")
        return TimedAnswer(arrival_s, first_s, time.perf_counter() - due_s, report, num_cached)

    with ThreadPoolExecutor(len(requests), thread_name_prefix="ragblend-bench") as pool:
        return list(pool.map(send, requests, arrivals_s))


def check_answer_modes(case: ModeAndRule, answers: list[TimedAnswer]) -> list[TimedAnswer]:
    """Return the answers. Raises RagblendError if an answer was not computed in the mode of `case`, or if the store
    lacked a chunk of its prompt.
    """
    for answer in answers:
        report = answer.report
        if report is None:
            raise RagblendError("vLLM sent no report: the ragblend connector is not at work")
        if report.refused_reason or report.mode != case.mode:
            raise RagblendError(f"a request of mode {case.mode} was served by prefill: {report.refused_reason}")
        if case.mode in ("blend", "reuse") and report.num_chunk_hits != report.num_chunks:
            raise RagblendError(f"{report.num_chunks - report.num_chunk_hits} chunks were not in the store")
    return answers


def measure_idle_ttfts(
    cases: Sequence[ModeAndRule],
    prompts: Sequence[Prompt],
    answer: Callable[[ModeAndRule, Sequence[Prompt], Sequence[float]], list[TimedAnswer]],
) -> dict[ModeAndRule, float]:
    """Return the median TTFT in seconds of every case and of full prefill, when the engine is idle.

    Sends one request at a time, after a warm-up. answer: a function of a case, prompts and their arrival times in
    seconds; sends the prompts and returns the answers.
    """
    wanted = tuple(dict.fromkeys([*cases, _FULL]))
    samples: dict[ModeAndRule, list[float]] = {case: [] for case in wanted}
    for turn in range(_IDLE_SAMPLES + 1):
        for case in wanted:
            (answered,) = answer(case, [prompts[turn % len(prompts)]], [0.0])
            if turn:
                samples[case].append(answered.ttft_s)
    return {case: statistics.median(taken) for case, taken in samples.items()}


def measure_rates(
    cases: Sequence[ModeAndRule],
    rates: Sequence[float],
    bound_s: float,
    measure: Callable[[ModeAndRule, float], list[TimedAnswer]],
    on_progress: Progress = ignore_progress,
) -> list[Facts]:
    """Measure all cases at each rate, from low to high. Return the result of `summarize_point` per rate and case.

    If the mean TTFT of a case is more than `_STOP_FACTOR` times `bound_s`, the case is not measured at higher rates.
    """
    runs: list[Facts] = []
    running, ascending = list(cases), sorted(set(rates))
    for number, rate in enumerate(ascending):
        on_progress("rates", number, len(ascending))
        for case in list(running):
            run = summarize_point(case, rate, measure(case, rate))
            runs.append(run)
            if run["ttft_mean_s"] > _STOP_FACTOR * bound_s:
                running.remove(case)
    return runs


def summarize_point(case: ModeAndRule, rate: float, answers: Sequence[TimedAnswer]) -> Facts:
    """Return the JSON object of one mode at one rate, with figures of its answers.

    rate: arriving requests per second. TTFT: seconds from arrival to first token; `ttft_s` is the median.
    """
    report = answers[0].report
    times_s = [answer.ttft_s for answer in answers]
    return {
        "mode": case.mode,
        "rule": case.rule,
        "ratio": 0.0 if report is None else report.recompute_ratio,
        "rate": rate,
        "num_requests": len(answers),
        "ttft_mean_s": statistics.fmean(times_s),
        "ttft_s": statistics.median(times_s),
        "ttft_p95_s": float(np.percentile(times_s, 95)),
        "ttft_max_s": max(times_s),
        # Finished requests per second, until the end of the last one.
        "served_rate": len(answers) / max(answer.arrival_s + answer.total_s for answer in answers),
        "num_cached_tokens": statistics.fmean(answer.num_cached_tokens for answer in answers),  # mean per request
    }


def compute_capacities(runs: Sequence[Facts], idle_s: Mapping[ModeAndRule, float], bound_s: float) -> list[Facts]:
    """Return an object per case: the requests per second that the case can serve with a mean TTFT up to `bound_s`.

    `max_rate`: the highest rate of arrivals within the bound. `rate_at_bound`: the served rate at the bound. Compare
    cases by `rate_at_bound`. `max_rate` may be a rate at which the queue would grow, because measurements are short.
    `at_least`: all measured rates are within the bound, so the true rates may be higher. `blend_gain`: `rate_at_bound`
    of the first case with mode "blend", divided by `rate_at_bound` of this case. `blend_gain` is None for mode "blend",
    for a case with `at_least`, and if one of the two rates is missing.
    """
    capacities: list[Facts] = []
    for case, idle_ttft_s in idle_s.items():
        own = [run for run in runs if (run["mode"], run["rule"]) == case]
        points = [(run["rate"], run["served_rate"], run["ttft_mean_s"]) for run in own]
        max_rate, at_bound, at_least = highest_rate(points, bound_s)
        capacities.append(
            {
                **case._asdict(),
                "idle_ttft_s": idle_ttft_s,  # median, one request at a time
                "max_rate": max_rate,
                "rate_at_bound": at_bound,
                "at_least": at_least,
            }
        )
    blend = next((each["rate_at_bound"] for each in capacities if each["mode"] == "blend"), None)
    for each in capacities:
        is_compared = blend and each["rate_at_bound"] and not each["at_least"] and each["mode"] != "blend"
        each["blend_gain"] = blend / each["rate_at_bound"] if is_compared else None
    return capacities


def highest_rate(
    points: Sequence[tuple[float, float, float]], bound_s: float
) -> tuple[float | None, float | None, bool]:
    """Return the highest rate of arrivals within the bound, the served rate at the bound, and True if all are within.

    `points`: (rate of arrivals, served rate, mean TTFT in seconds). A rate is within the bound if neither its own mean
    TTFT nor the mean TTFT of a lower rate exceeds `bound_s`. The served rate at the bound is interpolated linearly
    between two points. If all rates are within the bound, the last served rate is returned; if none is, both are None.

    >>> highest_rate([(1.0, 1.0, 0.2), (2.0, 2.0, 0.4), (3.0, 2.5, 1.2)], bound_s=0.8)
    (2.0, 2.25, False)
    """
    below: tuple[float, float, float] | None = None
    for rate, served, mean_s in sorted(points):
        if mean_s > bound_s:
            if below is None:
                return None, None, False
            below_rate, below_served, below_s = below
            share = (bound_s - below_s) / (mean_s - below_s)
            return below_rate, below_served + share * (served - below_served), False
        below = rate, served, mean_s
    return (None, None, False) if below is None else (below[0], below[1], True)


COLUMNS: tuple[Column, ...] = (
    ("req/s", ">7.3g", "rate"), (" mode", "<8", lambda run: f" {run['mode']}"), ("rule", "<19", "rule"),
    ("mean s", ">8.3f", "ttft_mean_s"), ("median", ">8.3f", "ttft_s"), ("p95", ">8.3f", "ttft_p95_s"),
    ("max", ">8.3f", "ttft_max_s"), ("served/s", ">9.2f", "served_rate"), ("cached", ">8.0f", "num_cached_tokens"),
)  # fmt: skip


def table_lines(facts: Facts) -> list[str]:
    """Return the tables: a line per rate and mode, then the capacity of each mode."""
    config, capacities = facts["config"], facts["capacities"]
    blend = next((each for each in capacities if each["mode"] == "blend"), None)
    more = ">" if blend is not None and blend["at_least"] else ""
    columns: tuple[Column, ...] = (
        ("mode", "<7", "mode"), ("rule", "<19", "rule"), ("idle s", ">8.3f", "idle_ttft_s"),
        ("arriving", ">10", lambda each: _rate(each, "max_rate")),
        ("served", ">10", lambda each: _rate(each, "rate_at_bound")),
        ("blend serves", ">14", lambda each: each["blend_gain"] and f"{more}{each['blend_gain']:.2f}x"),
    )  # fmt: skip
    return [
        f"{facts['model']} {config['dtype']}, {config['num_chunks']} of {config['pool']} chunks x "
        f"{config['chunk_tokens']} tokens + {config['question_tokens']} question tokens, {facts['prompt_tokens']} in "
        f"all, {config['output_tokens']} answered; {config['num_requests']} Poisson arrivals per rate",
        *format_table(COLUMNS, facts["runs"]),
        "",
        f"requests per second with a mean TTFT of at most {facts['bound_s']:.3g} s: arriving, and served",
        *format_table(columns, capacities),
    ]


def _rate(capacity: Facts, name: str) -> str | None:
    return None if capacity[name] is None else f"{'>' if capacity['at_least'] else ''}{capacity[name]:.3g}"


def plot_throughput(facts: Mapping[str, Any], path: Path) -> None:
    """Write a plot of mean TTFT (y) over the requests served per second (x), a line per mode. The
    y axis ends at three times the TTFT bound.
    """
    bound = facts["bound_s"]
    with figure_file(path, 7.5, 4.8, f"vLLM, {workload_title(facts)}") as figure:
        axes = figure.add_subplot()
        for found in facts["capacities"]:
            points = [run for run in facts["runs"] if (run["mode"], run["rule"]) == (found["mode"], found["rule"])]
            rates, means = [run["served_rate"] for run in points], [run["ttft_mean_s"] for run in points]
            best, blend = found["rate_at_bound"], found["mode"] == "blend"
            label = f"blend {found['rule']}" if blend else found["mode"]
            label += "" if best is None else f": {'>' if found['at_least'] else ''}{best:.3g}/s"
            color = None if blend else COLORS[found["mode"]]
            axes.plot([0.0, *rates], [found["idle_ttft_s"], *means], label=label, color=color, marker="o", ms=4)
        axes.axhline(bound, color="black", ls=":", lw=1, label=f"bound {bound:.3g} s")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 3 * bound)
        describe_axes(
            axes,
            "requests served per second (Poisson arrivals; 0: one at a time)",
            "mean time to first token, seconds",
        )


BENCHMARK = Benchmark(run_throughput, table_lines, plot_throughput)


if __name__ == "__main__":
    run_benchmark(ThroughputConfig, BENCHMARK)
