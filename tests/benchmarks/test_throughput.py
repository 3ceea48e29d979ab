"""Throughput: arrivals are Poisson and seeded, TTFT counts from arrival, and a rate is found where the bound is met."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists
from scipy.stats import expon, kstest
from typer.testing import CliRunner

from benchmarks.results import run_benchmark
from benchmarks.throughput import (
    BENCHMARK,
    ThroughputConfig,
    TimedAnswer,
    arrival_times,
    check_answer_modes,
    compute_capacities,
    highest_rate,
    measure_idle_ttfts,
    measure_rates,
    plot_throughput,
    replay_requests,
    summarize_point,
    table_lines,
)
from ragblend.cli.app import app
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.base_engine import OutputDelta
from ragblend.errors import RagblendError, UsageError
from ragblend.lab.bench.common.output import result_facts
from ragblend.lab.bench.common.workloads import make_prompts
from ragblend.lab.bench.ttft import ModeAndRule
from ragblend.lab.tables import Facts
from ragblend.prompt.types import Prompt

FULL, PREFIX, BLEND = ModeAndRule("full", "none"), ModeAndRule("prefix", "none"), ModeAndRule("blend", "cacheblend")


# -- arrivals


@pytest.mark.parametrize("seed", range(3))
def test_gaps_between_arrivals_are_exponential(seed):
    rate = 4.0
    moments = [0.0, *arrival_times(rate, 4000, seed)]
    gaps = [after - before for before, after in pairwise(moments)]
    assert kstest(gaps, expon(scale=1 / rate).cdf).pvalue > 1e-3
    early, late = gaps[:-1], gaps[1:]  # a Poisson process has no memory
    mean = sum(gaps) / len(gaps)
    covariance = sum((a - mean) * (b - mean) for a, b in zip(early, late, strict=True)) / len(early)
    assert abs(covariance) < 4 * mean**2 / len(early) ** 0.5


@given(rate=floats(0.01, 1000), count=integers(1, 200), seed=integers(0, 1 << 32))
def test_arrivals_of_a_seed_are_equal_at_every_rate_except_for_scale(rate, count, seed):
    moments = arrival_times(rate, count, seed)
    assert moments == arrival_times(rate, count, seed)
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert [moment * rate for moment in moments] == pytest.approx(arrival_times(1.0, count, seed))
    assert moments == arrival_times(rate, count + 1, seed)[:-1]
    assert moments != arrival_times(rate, count, seed + 1)


def test_prompts_draw_their_chunks_from_the_pool():
    chunks, prompts = make_prompts(3, 4, 2, num_prompts=20, vocab_size=100, seed=1, pool=8)
    orders = [prompt.chunks for prompt in prompts]
    assert len(chunks) == 8
    assert all(len(set(order)) == 3 and set(order) <= set(chunks) for order in orders)
    assert {chunk for order in orders for chunk in order} == set(chunks)
    assert len(set(orders)) > 10


# -- serving


class Scripted:
    """An engine that answers only once all requests have been sent: each first with a report, then with two tokens."""

    def __init__(self, count: int) -> None:
        self.all_sent = threading.Barrier(count)
        self.sent: list[Any] = []

    def run_request(self, request: Any) -> Generator[OutputDelta]:
        self.sent.append(request)
        self.all_sent.wait(timeout=60)
        yield OutputDelta()
        yield OutputDelta((1,), num_cached_tokens=request)
        yield OutputDelta((2,), "length", BlendReport("full", num_chunks=request))


def test_requests_are_sent_without_waiting_for_answers():
    engine = Scripted(5)
    answers = replay_requests(engine, [3, 1, 4, 1, 5], [0.0, 0.01, 0.02, 0.03, 0.04])
    assert sorted(engine.sent) == [1, 1, 3, 4, 5]
    assert [answer.num_cached_tokens for answer in answers] == [3, 1, 4, 1, 5]
    assert [answer.arrival_s for answer in answers] == [0.0, 0.01, 0.02, 0.03, 0.04]
    assert [answer.report.num_chunks for answer in answers if answer.report] == [3, 1, 4, 1, 5]
    assert all(0 < answer.ttft_s <= answer.total_s for answer in answers)


def test_waiting_for_others_counts_as_time_to_first_token():
    early, _ = replay_requests(Scripted(2), [0, 0], [0.0, 0.2])
    assert early.ttft_s >= 0.2  # it was answered after the second had arrived


def test_an_answer_without_a_token_is_an_error():
    class Silent:
        def run_request(self, request: Any) -> Generator[OutputDelta]:
            yield OutputDelta(finish_reason="abort")

    with pytest.raises(RagblendError, match="without a token"):
        replay_requests(Silent(), [0], [0.0])


@pytest.mark.parametrize(
    ("case", "report", "complaint"),
    [
        (FULL, None, "not at work"),
        (BLEND, BlendReport("blend", num_chunks=3, num_chunk_hits=2), "1 chunks were not in the store"),
        (BLEND, BlendReport("blend", num_chunks=3, num_chunk_hits=3, refused_reason="why"), "prefill: why"),
        (BLEND, BlendReport("prefix", num_chunks=3), "prefill"),
    ],
)
def test_answers_served_in_another_way_are_not_measured(case, report, complaint):
    with pytest.raises(RagblendError, match=complaint):
        check_answer_modes(case, [TimedAnswer(0.0, 1.0, 1.0, report)])
    answers = [TimedAnswer(0.0, 1.0, 1.0, BlendReport("blend", num_chunks=3, num_chunk_hits=3))]
    assert check_answer_modes(BLEND, answers) is answers


def test_idle_times_are_medians_after_a_turn_for_warming_up():
    times: Iterator[float] = iter([100.0, 100.0, 4.0, 9.0, 5.0, 1.0, 6.0, 2.0])
    seen: list[tuple[ModeAndRule, Prompt]] = []

    def answer(case: ModeAndRule, prompts: Any, arrivals_s: Any) -> list[TimedAnswer]:
        seen.append((case, *prompts))
        return [TimedAnswer(0.0, next(times), 0.0)]

    _, prompts = make_prompts(2, 3, 3, 2, 50)
    assert measure_idle_ttfts([BLEND], prompts, answer) == {BLEND: 5.0, FULL: 2.0}
    assert [case for case, _ in seen] == [BLEND, FULL] * 4
    assert seen[0][1] == seen[1][1] != seen[2][1]


# -- results


def answers_of(*times_s: float) -> list[TimedAnswer]:
    report = BlendReport("blend", recompute_ratio=0.15)
    return [TimedAnswer(index, time_s, time_s + 1, report, 10) for index, time_s in enumerate(times_s)]


def test_a_point_is_mean_median_and_95th_percentile():
    run = summarize_point(BLEND, 2.0, answers_of(*range(1, 101)))
    assert (run["ttft_mean_s"], run["ttft_s"], run["ttft_max_s"]) == (50.5, 50.5, 100)
    assert run["ttft_p95_s"] == pytest.approx(95.05)
    assert run["served_rate"] == pytest.approx(100 / (99 + 101))  # the last arrives at 99 and takes 101
    expected = {"mode": "blend", "rule": "cacheblend", "ratio": 0.15, "rate": 2.0, "num_requests": 100}
    assert {name: run[name] for name in expected} == expected


@given(lists(floats(0.01, 100), min_size=1, max_size=12), floats(0.01, 100))
def test_the_highest_rate_within_the_bound_has_all_lower_ones_within(means, bound_s):
    points = [(float(rate), float(rate), mean_s) for rate, mean_s in enumerate(means, start=1)]
    measured, at_bound, at_least = highest_rate(points[::-1], bound_s)
    within = [mean_s <= bound_s for mean_s in means]
    count = within.index(False) if False in within else len(within)
    assert measured == (count or None)
    assert at_least == (count == len(means))
    if count:
        assert at_bound is not None
        assert count <= at_bound <= count + (not at_least)
    else:
        assert at_bound is None


def test_arrivals_that_are_not_kept_up_with_do_not_count_as_served():
    """A short burst above the served rate still keeps within the bound."""
    points = [(1.0, 1.0, 0.3), (2.0, 1.9, 0.5), (4.0, 2.5, 0.9)]
    assert highest_rate(points, 1.0) == (4.0, 2.5, True)
    assert highest_rate([*points, (8.0, 2.7, 1.1)], 1.0) == (4.0, pytest.approx(2.6), False)
    assert highest_rate([], 1.0) == (None, None, False)


def test_a_mode_far_beyond_the_bound_is_not_driven_further():
    taken: list[tuple[ModeAndRule, float]] = []

    def measure(case: ModeAndRule, rate: float) -> list[TimedAnswer]:
        taken.append((case, rate))
        return answers_of(rate if case == FULL else rate / 4)

    runs = measure_rates([FULL, BLEND], [8.0, 1.0, 2.0, 3.0, 8.0], bound_s=1.0, measure=measure)
    assert taken == [(FULL, 1.0), (BLEND, 1.0), (FULL, 2.0), (BLEND, 2.0), (FULL, 3.0), (BLEND, 3.0), (BLEND, 8.0)]
    assert [(run["mode"], run["rate"]) for run in runs] == [(case.mode, rate) for case, rate in taken]


def kept_up(rate: float, ttft_s: float) -> list[TimedAnswer]:
    """Answers that came as fast as their requests."""
    return [TimedAnswer(1 / rate - ttft_s, ttft_s, ttft_s)]


def result() -> Facts:
    slowness = {FULL: 1.0, PREFIX: 0.8, BLEND: 0.25}
    rates = [1.0, 2.0, 4.0, 8.0, 16.0]
    runs = measure_rates([*slowness], rates, 2.0, lambda case, rate: kept_up(rate, rate * slowness[case]))
    hardware = {"cpu": "a CPU", "gpu": None, "threads": 1}
    found = compute_capacities(runs, {case: slow / 2 for case, slow in slowness.items()}, 2.0)
    return result_facts(ThroughputConfig(), "llama-50m", hardware, bound_s=2.0, runs=runs, capacities=found)


def test_gains_are_ratios_of_the_rates_at_the_bound():
    full, prefix, blend = result()["capacities"]
    assert (full["max_rate"], full["rate_at_bound"], full["at_least"]) == (2.0, 2.0, False)
    assert (prefix["max_rate"], prefix["rate_at_bound"]) == (2.0, pytest.approx(2.5))
    assert (blend["max_rate"], blend["rate_at_bound"], blend["blend_gain"]) == (8.0, 8.0, None)
    assert (full["blend_gain"], prefix["blend_gain"]) == (4.0, pytest.approx(3.2))
    assert full["idle_ttft_s"] == 0.5


def test_gains_are_lower_limits_while_blend_is_within_the_bound():
    cases = {FULL: 1.0, PREFIX: 0.1, BLEND: 0.1}
    runs = measure_rates([*cases], [1.0, 2.0, 4.0], 2.0, lambda case, rate: kept_up(rate, rate * cases[case]))
    full, prefix, blend = compute_capacities(runs, cases, 2.0)
    assert (blend["rate_at_bound"], blend["at_least"]) == (4.0, True)
    assert full["blend_gain"] == 2.0
    assert (prefix["at_least"], prefix["blend_gain"]) == (True, None)  # neither met the bound
    shown = table_lines({**result(), "runs": runs, "capacities": [full, prefix, blend]})
    assert [line.split()[-1] for line in shown[-3:]] == [">2.00x", "-", "-"]


def test_without_blend_or_without_a_rate_there_is_no_gain():
    runs = measure_rates([FULL], [1.0], 2.0, lambda case, rate: answers_of(1.0))
    (full,) = compute_capacities(runs, {FULL: 1.0}, 2.0)
    assert (full["max_rate"], full["at_least"], full["blend_gain"]) == (1.0, True, None)
    (full,) = compute_capacities(runs, {FULL: 1.0}, 0.5)
    assert (full["max_rate"], full["rate_at_bound"], full["at_least"]) == (None, None, False)


def test_the_json_object_has_the_envelopes_keys_and_no_path():
    facts = result()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["schema_version"], facts["command"]) == (1, "bench throughput")
    assert set(facts) >= {"hardware", "config", "model", "prompt_tokens", "bound_s", "runs", "capacities"}
    assert {"mode", "rule", "ratio", "rate", "ttft_s", "ttft_mean_s", "ttft_p95_s"} <= set(facts["runs"][0])
    assert "store" not in facts["config"]


def test_the_table_has_a_line_per_point_and_per_mode():
    _, header, *lines = table_lines(result())
    points, capacity = lines[: lines.index("")], lines[lines.index("") + 2 :]
    assert len(points) == len(result()["runs"])
    assert {len(line) for line in points} == {len(header)}
    assert {len(line) for line in capacity} == {len(capacity[0])}
    assert len(capacity) == 4


def test_a_plot_is_written_from_the_json_object(tmp_path):
    pytest.importorskip("matplotlib")
    plot_throughput(json.loads(json.dumps(result())), tmp_path / "new" / "throughput.png")
    assert (tmp_path / "new" / "throughput.png").read_bytes().startswith(b"\x89PNG")


# -- values out of range


@pytest.mark.parametrize(
    "arguments",
    [
        ["ttft", "--backend", "http"],
        ["ttft", "--backend", "vllm", "--device", "cuda"],
        ["ttft", "--vllm-options", '{"enforce_eager": false}'],
    ],
)
def test_the_command_line_refuses_what_cannot_be_measured(arguments):
    assert isinstance(CliRunner().invoke(app, ["bench", *arguments]).exception, UsageError)


@pytest.mark.parametrize("arguments", [["--vllm-options", "{"], ["--vllm-options", "[1]"], ["--rates", "0"]])
def test_the_script_refuses_what_cannot_be_measured(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["throughput", *arguments])
    with pytest.raises(UsageError):
        run_benchmark(ThroughputConfig, BENCHMARK)
