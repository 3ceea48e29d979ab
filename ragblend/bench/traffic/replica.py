"""One replica as a process of simpy: a queue, vLLM's steps over it, the paged KV and the store's tiers.

A step decodes one token for every running request and computes prompts in the order in which they came, up to
`batch_tokens` of them; who has its whole prompt computed has its first token at the step's end. Read `Replica._steps`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from ragblend.bench.traffic.caches import BlockCache, LruTier, Tiers
from ragblend.bench.traffic.demand import Demand, DemandedChunk
from ragblend.bench.traffic.deployment import Deployment
from ragblend.bench.traffic.hashes import BLOCK
from ragblend.engine.tuning.pipeline import Decision
from ragblend.errors import UsageError

Steps = Generator[simpy.Event, Any, None]


@dataclass(slots=True, eq=False)
class Job:
    """A request at its replica, or a chunk to precompute, and what became of it. Moments in simulated seconds."""

    demand: Demand
    arrived_s: float
    stores: DemandedChunk | None = None  # the chunk that it precomputes
    fetched: frozenset[int] = frozenset()  # chunks that came from the remote tier for it
    began_s: float = math.nan  # in its first step
    first_s: float = math.nan  # token
    ended_s: float = math.nan
    num_prefix: int = 0  # tokens from the prefix cache
    tokens_from: Counter[str] = field(default_factory=Counter)  # chunk tokens by tier, "missing" for none
    is_looked_up: bool = False
    num_stored: int = 0  # tokens
    decision: Decision | None = None  # how it is blended; None: it is prefilled
    refused: bool = False  # because full prefill is faster
    left: int = 0  # tokens that are still to be computed
    token_s: float | None = None  # of each of them; None: by the profile's curve
    blocks: Sequence[int] = ()  # in the prefix cache
    missing: tuple[DemandedChunk, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt and its answer."""
        return -(-(self.demand.num_tokens + self.demand.num_output) // BLOCK)


class Replica:
    """Takes requests at any time; `jobs_done` are those that ended."""

    def __init__(self, env: simpy.Environment, deployment: Deployment, remote: LruTier | None, link: simpy.Resource):
        self.num_inside = self.num_ingested = 0
        self.jobs_done: list[Job] = []
        self.busy_s = 0.0
        sizes = deployment.sizes
        self.tiers = Tiers(sizes.memory, sizes.disk, remote)
        self._env, self._deployment, self._link = env, deployment, link
        self._blocks = BlockCache(deployment.batching.paged_tokens // BLOCK)
        self._waiting: deque[Job] = deque()
        self._begun: list[Job] = []  # their prompts are computed in part
        self._running: list[tuple[int, int, Job]] = []  # a heap, by the step in which each gets its last token
        self._num_steps, self._order = 0, itertools.count()
        self._coming: set[int] = set()  # chunks to precompute
        self._wake = env.event()
        env.process(self._steps())

    def take(self, demand: Demand) -> None:
        """A request arrives."""
        job = Job(demand, self._env.now)
        if job.num_blocks > self._blocks.capacity:
            raise UsageError(
                f"request {demand.number + 1} has {demand.num_tokens} tokens and {demand.num_output} to answer, more "
                f"than the {self._deployment.batching.paged_tokens:.0f} of the paged KV (--paged-tokens)"
            )
        self.num_inside += 1
        far = self._far(demand) if self._deployment.mode == "blend" else []
        if far or self._deployment.overhead_s:
            self._env.process(self._come(job, far))
        else:
            self._queue(job)

    # -- before the queue

    def _far(self, demand: Demand) -> list[DemandedChunk]:
        """Chunks that only the remote tier has."""
        remote = self.tiers.remote
        if remote is None:
            return []
        return [each for each in demand.chunks if each.key in remote and not self.tiers.is_near(each.key)]

    def _come(self, job: Job, far: list[DemandedChunk]) -> Steps:
        """Fetch what is far, while others are answered; then queue."""
        if self._deployment.overhead_s:
            yield self._env.timeout(self._deployment.overhead_s)
        if far:
            remote = self._deployment.remote
            nbytes = sum(map(self._bytes, far))
            with self._link.request() as turn:
                yield turn
                yield self._env.timeout(nbytes / remote.bytes_per_s)
            yield self._env.timeout(remote.latency_s)
            job.fetched = frozenset(each.key for each in far if self.tiers.fetch(each.key, self._bytes(each)))
        self._queue(job)

    def _bytes(self, chunk: DemandedChunk) -> int:
        return chunk.num_tokens * self._deployment.profile.bytes_per_token

    def _queue(self, job: Job) -> None:
        self._waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    # -- the engine

    def _steps(self) -> Steps:
        """vLLM's loop."""
        while True:
            if not (self._waiting or self._begun or self._running):
                self._wake = self._env.event()
                yield self._wake
            parts = self._scheduled()
            if parts:
                seconds = self._deployment.step_s(len(self._running)) + sum(map(self._part_s, parts, parts.values()))
                yield self._env.timeout(seconds)
                self.busy_s += seconds
                self._end_step(parts)
            else:
                yield from self._decode()

    def _scheduled(self) -> dict[Job, int]:
        """Prompts of the next step, and how many tokens of each."""
        batching, parts = self._deployment.batching, {}
        budget = batching.batch_tokens - len(self._running)
        for job in self._begun:
            parts[job] = min(max(budget, 0), job.left)
            budget -= parts[job]
        while self._waiting and budget > 0 and len(self._running) + len(self._begun) < batching.max_seqs:
            job = self._waiting[0]
            if not self._begin(job):
                break
            self._waiting.popleft()
            self._begun.append(job)
            parts[job] = min(budget, job.left)
            budget -= parts[job]
        return {job: count for job, count in parts.items() if count}

    def _part_s(self, job: Job, count: int) -> float:
        if job.token_s is not None:
            return count * job.token_s
        profile, place = self._deployment.profile, job.demand.num_tokens - job.left
        return profile.full_s(place + count) - profile.full_s(place)

    def _end_step(self, parts: dict[Job, int]) -> None:
        self._num_steps += 1
        self._end_finished()
        for job, count in parts.items():
            job.left -= count
            if not job.left:
                self._begun.remove(job)
                job.first_s = self._env.now
                last_step = self._num_steps + job.demand.num_output - 1
                heapq.heappush(self._running, (last_step, next(self._order), job))
        self._end_finished()

    def _decode(self) -> Steps:
        """Steps without a prompt, up to the first answer's end or the next request."""
        step_s, start_s = self._deployment.step_s(len(self._running)), self._env.now
        count = self._running[0][0] - self._num_steps
        self._wake = self._env.event()
        yield self._env.timeout(count * step_s) | self._wake
        passed_s = self._env.now - start_s
        if passed_s < count * step_s:  # the step that is under way is finished
            count = min(count, max(1, math.ceil(passed_s / step_s - 1e-9)))
            yield self._env.timeout(max(0.0, start_s + count * step_s - self._env.now))
        self.busy_s += count * step_s
        self._num_steps += count
        self._end_finished()

    def _end_finished(self) -> None:
        while self._running and self._running[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._running)[2])

    # -- one request

    def _begin(self, job: Job) -> bool:
        """Settle what is to be computed of it, and give it its blocks; False while there is no room for them."""
        demand, mode = job.demand, self._deployment.mode
        if mode == "blend" and not job.stores and not job.is_looked_up:
            self._look_up(job)
        # As the connector does it: who is blended neither finds anything in the prefix cache nor leaves anything.
        hidden = mode == "full" or job.decision is not None or job.stores is not None
        keys: Sequence[int] = () if hidden else demand.blocks[: demand.num_prompt_blocks]
        known = min(self._blocks.num_known(keys), (demand.num_tokens - 1) // BLOCK)
        if not self._blocks.enter(keys, job.num_blocks):
            return False
        job.blocks, job.began_s, job.num_prefix = keys, self._env.now, known * BLOCK
        job.left = demand.num_tokens - job.num_prefix
        if job.decision is not None:
            fresh = demand.num_tokens - job.num_stored
            job.left = max(1, round(fresh + job.decision.ratio * job.num_stored))
            job.token_s = self._deployment.blend_s(job.decision) / job.left
        return True

    def _look_up(self, job: Job) -> None:
        """Find its chunks, and decide whether they are blended."""
        demand, load_bytes, missing = job.demand, 0, []
        for chunk in demand.chunks:
            nbytes = self._bytes(chunk)
            tier = self.tiers.find(chunk.key, nbytes)
            if chunk.key in job.fetched:
                tier = "remote"  # on the disk by now
            job.tokens_from[tier or "missing"] += chunk.num_tokens
            if tier is None:
                missing.append(chunk)
                continue
            job.num_stored += chunk.num_tokens
            load_bytes += nbytes if tier != "memory" else 0
        job.missing, job.is_looked_up = tuple(missing), True
        job.num_stored = min(job.num_stored, demand.num_tokens - 1)
        if job.num_stored:
            decision = self._deployment.decision(demand.num_tokens, job.num_stored, load_bytes)
            job.refused = bool(decision.refused)
            job.decision = None if decision.refused else decision

    def _end(self, job: Job) -> None:
        job.ended_s = self._env.now
        demand = job.demand
        self._blocks.leave(job.blocks, job.num_blocks, demand.blocks[demand.num_prompt_blocks :] if job.blocks else ())
        if job.stores:
            self._coming.discard(job.stores.key)
            self.tiers.put(job.stores.key, self._bytes(job.stores))
            self.num_ingested += 1
            return
        self.num_inside -= 1
        self.jobs_done.append(job)
        if self._deployment.stores_misses:
            for chunk in job.missing:
                self._ingest(chunk)

    def _ingest(self, chunk: DemandedChunk) -> None:
        """Precompute a chunk that was missing, as one more request."""
        if chunk.key not in self._coming and not self.tiers.is_near(chunk.key):
            self._coming.add(chunk.key)
            self._queue(Job(Demand(-1, 0.0, chunk.num_tokens, 1), self._env.now, stores=chunk))
