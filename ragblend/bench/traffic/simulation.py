"""N replicas behind a router, simulated event by event: throughput, TTFT, queueing and hits, for `ragblend simulate`.

The times are those of a machine profile, by the arithmetic of `ragblend plan`. What is modelled and what is not:
docs/simulate.md. Read `simulate`, then `replica`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import simpy

from ragblend.bench.throughput import arrival_times
from ragblend.bench.traffic.caches import TIERS, LruTier
from ragblend.bench.traffic.demand import Demand
from ragblend.bench.traffic.deployment import Deployment
from ragblend.bench.traffic.replica import Job, Replica
from ragblend.errors import UsageError

_MIX = 0x9E3779B97F4A7C15  # neighbouring numbers to far ones


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One mode on some replicas. Seconds; TTFT is from arrival to first token, the queue up to the first step, with
    what is fetched from the remote tier meanwhile."""

    mode: str
    router: str
    num_replicas: int
    num_requests: int
    arriving: float | None  # requests per second; None where all come at once
    throughput: float  # requests per second, from the first arrival to the last token
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_s: float  # median
    ttft_p95_s: float
    ttft_p99_s: float
    queue_mean_s: float
    queue_p95_s: float
    total_s: float  # median, to the last token
    busy: float  # share of the replicas' time
    prefix_hits: float  # share of the prompt tokens that the prefix cache had
    chunk_hits: dict[str, float]  # share of the chunk tokens by the tier that had them, and "missing"
    num_refused: int  # requests that full prefill answered faster
    num_ingested: int  # chunks that were precomputed on the way

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def arrivals(demands: Sequence[Demand], rate: float | None, speedup: float, seed: int) -> list[float]:
    """Seconds from the first request to each: from the log, `speedup` times as fast, or Poisson's at `rate` a second.

    Raises UsageError where the log has no times and no rate is given.
    """
    for name, value in (("rate", rate), ("speedup", speedup)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name} is {value}; choose more than 0")
    if rate is not None:
        moments = arrival_times(rate, len(demands), seed)
        return [(moment - moments[0]) / speedup for moment in moments]
    if any(math.isinf(demand.time_s) for demand in demands):
        raise UsageError("the log has requests without a time; say how many come per second: --rate 2")
    return [(demand.time_s - demands[0].time_s) / speedup for demand in demands]


def simulate(
    demands: Sequence[Demand], arrivals_s: Sequence[float], deployment: Deployment, num_replicas: int
) -> SimulatedRun:
    """Run them all to their last token. Equal arguments give equal results."""
    jobs, replicas = run(demands, arrivals_s, deployment, num_replicas)
    return summary(jobs, replicas, arrivals_s, deployment)


def run(
    demands: Sequence[Demand], arrivals_s: Sequence[float], deployment: Deployment, num_replicas: int
) -> tuple[list[Job], list[Replica]]:
    """Every request as it was served, in the order of `demands`, and the replicas."""
    if num_replicas < 1:
        raise UsageError(f"replicas are {num_replicas}; choose 1 or more")
    env = simpy.Environment()
    remote = None if deployment.sizes.remote is None else LruTier(deployment.sizes.remote)
    link = simpy.Resource(env)
    replicas = [Replica(env, deployment, remote, link) for _ in range(num_replicas)]
    if deployment.ingested:
        _ingest_all(demands, deployment, replicas, remote)
    choose = router(deployment, replicas)

    def arrive() -> Any:
        for demand, moment in zip(demands, arrivals_s, strict=True):
            yield env.timeout(max(0.0, moment - env.now))
            replicas[choose(demand)].take(demand)

    env.process(arrive())
    env.run()
    jobs = sorted((job for replica in replicas for job in replica.jobs_done), key=lambda job: job.demand.number)
    assert [job.demand.number for job in jobs] == sorted(demand.number for demand in demands)
    return jobs, replicas


def _ingest_all(
    demands: Iterable[Demand], deployment: Deployment, replicas: Sequence[Replica], remote: LruTier | None
) -> None:
    """Put every chunk into the tier that all share; without one, into every replica's disk."""
    sizes = {each.key: each.num_tokens for demand in demands for each in demand.chunks}
    for key, num_tokens in sizes.items():
        nbytes = num_tokens * deployment.profile.bytes_per_token
        for tier in (replica.tiers.disk for replica in replicas) if remote is None else (remote,):
            tier.put(key, nbytes)


def router(deployment: Deployment, replicas: Sequence[Replica]) -> Callable[[Demand], int]:
    """What says which replica takes a request."""
    count, draw = len(replicas), random.Random(deployment.seed)

    def least_queue(demand: Demand) -> int:
        inside = [replica.num_inside for replica in replicas]
        least = min(inside)
        return draw.choice([place for place, each in enumerate(inside) if each == least])

    def by_session(demand: Demand) -> int:
        return home(demand.session, count)

    def by_chunk(demand: Demand) -> int:
        votes: Counter[int] = Counter()
        for chunk in demand.chunks:
            votes[home(chunk.key, count)] += chunk.num_tokens
        return max(votes, key=lambda place: (votes[place], -place)) if votes else by_session(demand)

    turns = iter(range(1 << 62))
    return {
        "round-robin": lambda demand: next(turns) % count,
        "least-queue": least_queue,
        "session": by_session,
        "chunk": by_chunk,
    }[deployment.router]


def home(key: int, count: int) -> int:
    """The replica, of `count`, that a hash stands for."""
    return ((key + 1) * _MIX >> 13) % (1 << 51) % count


def summary(
    jobs: Sequence[Job], replicas: Sequence[Replica], arrivals_s: Sequence[float], deployment: Deployment
) -> SimulatedRun:
    """All of it in figures."""
    ttft_s = [job.first_s - job.arrived_s for job in jobs]
    queue_s = [job.began_s - job.arrived_s for job in jobs]
    first_s, last_s = min(arrivals_s), max(job.ended_s for job in jobs)
    seconds, span_s = last_s - first_s, max(arrivals_s) - first_s
    tokens_from: Counter[str] = Counter()
    for job in jobs:
        tokens_from.update(job.tokens_from)
    num_prompt, num_chunk = sum(job.demand.num_tokens for job in jobs), sum(tokens_from.values())
    return SimulatedRun(
        mode=deployment.mode,
        router=deployment.router,
        num_replicas=len(replicas),
        num_requests=len(jobs),
        arriving=(len(jobs) - 1) / span_s if span_s else None,
        throughput=len(jobs) / seconds if seconds else math.inf,
        output_tokens_per_s=sum(job.demand.num_output for job in jobs) / seconds if seconds else math.inf,
        ttft_mean_s=fmean(ttft_s),
        **dict(zip(("ttft_s", "ttft_p95_s", "ttft_p99_s"), np.percentile(ttft_s, (50, 95, 99)).tolist(), strict=True)),
        queue_mean_s=fmean(queue_s),
        queue_p95_s=float(np.percentile(queue_s, 95)),
        total_s=float(np.median([job.ended_s - job.arrived_s for job in jobs])),
        busy=sum(replica.busy_s for replica in replicas) / (seconds * len(replicas)) if seconds else 0.0,
        prefix_hits=sum(job.num_prefix for job in jobs) / num_prompt,
        chunk_hits={name: tokens_from[name] / num_chunk for name in (*TIERS, "missing") if tokens_from[name]},
        num_refused=sum(job.refused for job in jobs),
        num_ingested=sum(replica.num_ingested for replica in replicas),
    )
