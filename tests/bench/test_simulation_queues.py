"""The simulation where the answer is known: queueing theory, the pipeline's formula, conservation, determinism."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis.strategies import composite, integers, lists, sampled_from

from ragblend.bench.throughput import arrival_times
from ragblend.bench.traffic.demand import Demand, DemandedChunk
from ragblend.bench.traffic.deployment import ROUTERS, SIMULATED_MODES, Batching, Deployment, Remote, TierSizes
from ragblend.bench.traffic.saving import Kind
from ragblend.bench.traffic.simulation import arrivals, run, simulate
from ragblend.engine.tuning.pipeline import MachineProfile, decide, pipelined_s
from ragblend.errors import UsageError

PROFILE = MachineProfile(
    "f", {"ranks": 1}, num_layers=32, bytes_per_token=1 << 17, prefill_s=((100.0, 0.1), (1000.0, 1.0), (2000.0, 2.5)),
    shares=((0.0, 0.1), (0.15, 0.25), (1.0, 1.1)), bytes_per_s={"disk": 2e9},
)  # fmt: skip
ALONE = Batching(batch_tokens=1000)
"""With prompts of 1,000 tokens: one at a time, as at a counter."""


def full(number: int, num_tokens: int = 1000, num_output: int = 1) -> Demand:
    return Demand(number, -math.inf, num_tokens, num_output)


def with_chunks(number: int, keys: list[int], num_output: int = 1) -> Demand:
    return Demand(number, -math.inf, 1000, num_output, chunks=tuple(DemandedChunk(key, 200) for key in keys))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_replica_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    """M/D/1: Poisson arrivals, one service time s: the mean wait is load * s / (2 (1 - load))."""
    count, service_s = 60_000, PROFILE.full_s(1000)
    deployment = Deployment(PROFILE, "full", batching=ALONE)
    found = simulate([full(n) for n in range(count)], arrival_times(load / service_s, count, 1), deployment, 1)
    assert found.queue_mean_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)
    assert found.ttft_mean_s == pytest.approx(found.queue_mean_s + service_s)
    assert found.busy == pytest.approx(load, rel=0.02)


def test_two_service_times_wait_by_their_second_moment() -> None:
    """M/G/1: the mean wait is rate * E[s^2] / (2 (1 - load)), half of the prompts being twice as long."""
    draw, count, rate = random.Random(0), 60_000, 0.4
    demands = [full(n, draw.choice((500, 1000))) for n in range(count)]
    times_s = [PROFILE.full_s(each.num_tokens) for each in demands]
    # One prompt per step, whichever it is: whoever has waited takes the next.
    deployment = Deployment(PROFILE, "full", batching=Batching(batch_tokens=1000, max_seqs=1))
    found = simulate(demands, arrival_times(rate, count, 2), deployment, 1)
    second = fmean(seconds**2 for seconds in times_s)
    assert found.queue_mean_s == pytest.approx(rate * second / (2 * (1 - rate * fmean(times_s))), rel=0.05)


@pytest.mark.parametrize("num_replicas", [1, 7, 1000])
@pytest.mark.parametrize("adapts", [False, True])
def test_without_load_ttft_is_the_pipelines(num_replicas: int, adapts: bool) -> None:
    """An hour apart, KV on disk, and far: every request takes what the formulas of `ragblend plan` say, and no more."""
    kind = Kind(0.15, asks_first=False, bytes_per_s=2e9)
    base = Deployment(PROFILE, kind=kind, adapts=adapts, ingested=True, sizes=TierSizes(memory=0))
    demands = [with_chunks(n, [4 * n + each for each in range(4)]) for n in range(50)]
    hourly = [3600.0 * n for n in range(50)]
    load_bytes = 800 * PROFILE.bytes_per_token
    ratio = decide(PROFILE, 0.15, 1000, 800, {"disk": load_bytes}).ratio if adapts else 0.15
    blend_s = pipelined_s(load_bytes / 2e9, PROFILE.recompute_s(ratio, 1000, 800), 32)
    for mode, expected_s in (("full", 1.0), ("prefix", 1.0), ("blend", blend_s)):
        jobs, _ = run(demands, hourly, replace(base, mode=mode), num_replicas)
        assert [job.first_s - job.arrived_s for job in jobs] == pytest.approx([expected_s] * 50, rel=1e-9)
    remote = Remote(bytes_per_s=1e9, latency_s=0.02)
    far = replace(base, sizes=TierSizes(0, math.inf, math.inf), remote=remote, overhead_s=0.5)
    found = simulate(demands, hourly, far, num_replicas)
    assert found.ttft_s == pytest.approx(0.5 + 0.02 + load_bytes / 1e9 + blend_s, rel=1e-9)
    assert found.chunk_hits == {"remote": 1.0}


def test_what_loads_slower_than_it_is_computed_is_prefilled() -> None:
    slow = replace(PROFILE, bytes_per_s={"disk": 1e7})
    deployment = Deployment(slow, kind=Kind(0.15, False, 1e7), adapts=True, ingested=True, sizes=TierSizes(memory=0))
    found = simulate([with_chunks(0, [1, 2, 3, 4])], [0.0], deployment, 1)
    assert (found.num_refused, found.ttft_s) == (1, pytest.approx(1.0))


def test_decoding_takes_its_steps_and_prompts_stop_it() -> None:
    """Ten tokens: the first with the prompt, nine steps of .1 s. A second prompt of 1 s stands still between."""
    deployment = Deployment(PROFILE, "full", decode_s=((1.0, 0.1), (2.0, 0.2)), batching=Batching(2000))
    jobs, _ = run([full(0, num_output=10)], [0.0], deployment, 1)
    assert jobs[0].ended_s == pytest.approx(1.0 + 9 * 0.1)
    # The second comes in the third step, which is finished first; its own step decodes one token for the first.
    first, second = run([full(0, num_output=10), full(1, num_output=2)], [0.0, 1.25], deployment, 1)[0]
    assert second.began_s == pytest.approx(1.3)
    assert second.first_s == pytest.approx(1.3 + 1.0 + 0.1)
    assert second.ended_s == pytest.approx(2.4 + 0.2)
    assert first.ended_s == pytest.approx(2.6 + 4 * 0.1)


def test_a_long_prompt_goes_in_parts_that_take_as_long_as_the_whole() -> None:
    """300 tokens a step; whoever is decoding has a token after each."""
    deployment = Deployment(PROFILE, "full", decode_s=((1.0, 0.0),), batching=Batching(batch_tokens=301))
    short, long = run([full(0, 100, 5), full(1, 1000)], [0.0, 0.05], deployment, 1)[0]
    assert short.first_s == pytest.approx(0.1)
    assert long.first_s == pytest.approx(0.1 + 1.0)
    assert short.ended_s == pytest.approx(0.1 + 1.0)


def test_what_does_not_fit_into_the_paged_kv_waits_for_room() -> None:
    room = Batching(batch_tokens=4000, paged_tokens=1024)
    deployment = Deployment(PROFILE, "full", decode_s=((1.0, 0.1),), batching=room)
    first, second = run([full(0, 1000, 11), full(1, 1000, 11)], [0.0, 0.0], deployment, 1)[0]
    assert second.began_s == pytest.approx(first.ended_s) == pytest.approx(2.0)
    with pytest.raises(UsageError, match="--paged-tokens"):
        run([full(0, 2000, 11)], [0.0], deployment, 1)


@composite
def some_demands(draw) -> list[Demand]:
    sizes = draw(lists(integers(1, 1500), min_size=1, max_size=30))
    made = []
    for number, size in enumerate(sizes):
        keys = draw(lists(integers(0, 8), max_size=4)) if size > 400 else []
        blocks = tuple(hash((draw(integers(0, 2)), place)) for place in range((size + 3) // 16))
        chunks = tuple(DemandedChunk(key, 90 + key) for key in keys)
        made.append(Demand(number, -math.inf, size, draw(integers(1, 5)), blocks, chunks, number // 3))
    return made


@settings(deadline=None)
@given(some_demands(), sampled_from(ROUTERS), sampled_from(SIMULATED_MODES), integers(1, 5), integers(0, 3))
def test_every_request_is_served_once_whatever_the_deployment(demands, router, mode, num_replicas, kind) -> None:
    deployment = Deployment(
        PROFILE, mode, router, Kind(0.15, False, 2e9), adapts=bool(kind % 2), decode_s=((1.0, 0.01), (8.0, 0.03)),
        batching=Batching(256, 3, 2048), sizes=TierSizes(300 * 2**17, 500 * 2**17, 900 * 2**17 if kind > 1 else None),
    )  # fmt: skip
    moments = arrival_times(3.0, len(demands), 5)
    jobs, replicas = run(demands, moments, deployment, num_replicas)
    assert [job.demand.number for job in jobs] == list(range(len(demands)))
    assert not sum(replica.num_inside for replica in replicas)
    for job, arrived_s in zip(jobs, moments, strict=True):
        assert arrived_s == pytest.approx(job.arrived_s)
        assert job.arrived_s <= job.began_s < job.first_s <= job.ended_s
        assert sum(job.tokens_from.values()) == (job.demand.num_chunk_tokens if mode == "blend" else 0)
    assert run(demands, moments, deployment, num_replicas)[0][-1].ended_s == jobs[-1].ended_s, "deterministic"


@settings(deadline=None, max_examples=30)
@given(integers(1, 60), integers(1, 12), sampled_from([50, 250, 1000]), integers(1, 6))
def test_another_replica_never_lowers_throughput_under_saturation(count, num_replicas, num_tokens, num_output) -> None:
    deployment = Deployment(PROFILE, "full", decode_s=((1.0, 0.01), (64.0, 0.2)), batching=Batching(1000, 16))
    demands = [full(n, num_tokens, num_output) for n in range(count)]
    fewer, more = (simulate(demands, [0.0] * count, deployment, n) for n in (num_replicas, num_replicas + 1))
    assert more.throughput >= fewer.throughput * (1 - 1e-9)


def test_replicas_share_the_way_to_the_remote_tier() -> None:
    """Eight replicas ask at once for as much: the last one's KV has come when all has been sent."""
    remote = Remote(bytes_per_s=1e9, latency_s=0.0)
    deployment = Deployment(
        PROFILE, kind=Kind(0.15, False, 2e9), ingested=True, sizes=TierSizes(0, math.inf, math.inf), remote=remote
    )
    jobs, _ = run([with_chunks(n, [n]) for n in range(8)], [0.0] * 8, deployment, 8)
    each_s = 200 * PROFILE.bytes_per_token / 1e9
    assert [job.began_s for job in jobs] == pytest.approx([each_s * (n + 1) for n in range(8)])


def test_affinity_sends_the_same_chunks_and_conversations_to_the_same_replica() -> None:
    demands = [replace(with_chunks(n, [n % 5, 100 + n]), session=n % 7) for n in range(70)]
    moments = [5.0 * n for n in range(70)]
    for router in ROUTERS:
        _, replicas = run(demands, moments, Deployment(PROFILE, "full", router), 4)
        sessions = [{job.demand.session for job in replica.jobs_done} for replica in replicas]
        apart = sum(map(len, sessions)) == len(set().union(*sessions))
        assert apart == (router == "session")
    twice = [with_chunks(n, [n % 5]) for n in range(40)]
    _, replicas = run(twice, moments[:40], Deployment(PROFILE, "full", "chunk"), 4)
    chunks = [{job.demand.chunks[0].key for job in replica.jobs_done} for replica in replicas]
    assert sum(map(len, chunks)) == 5
    turns = [len(replica.jobs_done) for replica in run(demands, moments, Deployment(PROFILE, "full"), 4)[1]]
    assert turns == [18, 18, 17, 17]


def test_arrivals_come_from_the_log_or_a_rate() -> None:
    timed = [Demand(n, 1e9 + 10 * n, 10, 1) for n in range(5)]
    assert arrivals(timed, None, 2.0, 0) == [0, 5, 10, 15, 20]
    poisson = arrivals(timed, 4.0, 2.0, 0)
    assert poisson == arrivals(timed, 8.0, 1.0, 0) != arrivals(timed, 8.0, 1.0, 1)
    with pytest.raises(UsageError, match="--rate"):
        arrivals([full(0)], None, 1.0, 0)
    with pytest.raises(UsageError, match="speedup is 0"):
        arrivals(timed, None, 0.0, 0)
