"""Worker's half of the connector: fuses prompts into vLLM's paged cache, one slice of work between two engine steps.

Each job is a generator that stops at every layer, so that a blend delays the decodes of other requests by at most one
slice. The size of a slice is given in token-layers instead of seconds, because all tensor-parallel ranks must stop at
the same layer. A job waits if its next layer has not been read on every rank, and engine steps continue. Jobs run in
the order of their arrival. Small jobs in a row share a pass: a layer runs once over the rows of all of them.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.fuse import LayerCall, Steps, fuse_steps
from ragblend.engine.fusion.loader import Timeline
from ragblend.engine.fusion.plan import FusePlan, FuseResult, Placement, merge_fusions, record_fusion
from ragblend.engine.fusion.prefill import COMPUTED_IN_PROMPT
from ragblend.engine.matching import PrefixKVCache
from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.keys import key_from_header
from ragblend.engine.store.format.kv import ChunkKV, KVHeader, MemoryKV, dtype_name, slice_kv_rows
from ragblend.engine.vllm.jobs import BlendJob, BlendTurn, Refined, RefineJob
from ragblend.engine.vllm.worker_side.layers import VllmLayers
from ragblend.engine.vllm.worker_side.paged import PagedKV, PagedLayerLoader
from ragblend.engine.vllm.worker_side.prefill import prefill_chunk_steps
from ragblend.engine.vllm.worker_side.refine import Unrotation, is_stale, refine
from ragblend.errors import DamagedEntryError, UsageError
from ragblend.prompt.types import ChunkRun

log = logging.getLogger(__name__)

_PREFIXES_BYTES = 512 << 20  # limit on the prefixes' KV, because clients choose how long prefixes are

# Most rows of a shared pass. A pass of few rows spends its time on reading the weights, so one more request costs
# little. With many rows, sharing would only delay the first request until the last one is done. Not measured on a GPU.
_PASS_ROWS_CPU, _PASS_ROWS_GPU = 64, 512

# Longest time that a slice waits for a layer to be read. It is short compared with an engine step, and saves a layer
# that is read soon from waiting for the next step. It is longer while vLLM is idle, because steps would be empty.
_PATIENCE_S, IDLE_PATIENCE_S = 0.001, 0.01


class JobResult(NamedTuple):
    """A job that has ended, and its report. `failed`: its blocks have no valid KV, so vLLM computes the prompt."""

    job: BlendJob
    report: BlendReport
    failed: bool


_JobOutput = tuple[BlendReport, Future[None] | None]
"""Report of a job, and the write of the ingested chunk."""


@dataclass(slots=True)
class _ActiveJob:
    job: BlendJob
    steps: Steps[_JobOutput]
    pending: LayerCall | Event | None = None  # layer to be run, or event of a layer to be read
    busy_s: float = 0.0
    unread_since_s: float = 0.0  # start of the current wait for a layer to be read
    unread_s: float = 0.0  # duration of earlier waits


class BlendWorker:
    """Runs jobs over `layers` with KV from `store`. Not thread-safe: only vLLM's worker thread may call it.

    `slice_tokens` limits the work of one `run_slice` to that of prefilling this number of tokens. The last layer
    of a slice may exceed the limit. `describe_error` returns an error's text for reports. Reads use the tiers on this
    machine only, because the scheduler has fetched a job's entries from the remote tier. A separate thread stores new
    chunks.
    """

    def __init__(
        self,
        layers: VllmLayers,
        store: KVStore,
        slice_tokens: int,
        describe_error: Callable[[BaseException], str] = str,
    ) -> None:
        self._describe_error = describe_error
        self.layers, self._store, self._write = layers, store, store.put
        self._slice = slice_tokens * layers.num_layers
        self._pass_rows = _PASS_ROWS_CPU if layers.device.type == "cpu" else _PASS_ROWS_GPU
        self._jobs: list[_ActiveJob] = []  # in the order of arrival
        self._pass: list[_ActiveJob] = []  # jobs that share the current pass
        self._storing: list[tuple[BlendJob, BlendReport, Future[None]]] = []
        self._fused: dict[str, FusePlan] = {}  # the last turn of requests to refine, by request id
        self._unrotation = Unrotation(layers)
        self._readers: list[Event] = []  # each is set once a reader has ended
        self._prefixes = PrefixKVCache[MemoryKV](lambda kv: kv.nbytes, _PREFIXES_BYTES)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-store")
        self.timelines: list[Timeline] | None = None  # if a list, it receives the layer times of every blend

    def set_read_store(self, store: KVStore) -> None:
        """Read the KV of later jobs from `store`. New chunks are still written to the store of the constructor."""
        self._store = store

    def submit(self, job: BlendJob) -> None:
        """Queue a job."""
        steps = self._ingest(job) if job.params.mode == "ingest" and not job.stored else self._blend(job)
        self._jobs.append(_ActiveJob(job, steps))

    def leave_to_vllm(self, jobs: Sequence[BlendJob], reason: str) -> list[JobResult]:
        """Drop all active jobs, and `jobs`, which were not submitted. Return a failed result for each, with `reason`.

        vLLM then computes the prompts of all these jobs.
        """
        self._prefixes.clear()
        self._fused.clear()
        dropped = [running.job for running in self._jobs]
        for running in self._jobs:
            self._drop(running)
        return [_left_to_vllm(job, reason) for job in (*dropped, *jobs)]

    def cancel(self, request_id: str) -> list[JobResult]:
        """Drop a request's job, so that its blocks are not written any more. Return [its result]; [] without a job."""
        self._fused.pop(request_id, None)
        for running in self._jobs:
            if running.job.request_id == request_id:
                self._drop(running)
                return [JobResult(running.job, BlendReport(running.job.params.reported_mode), failed=False)]
        return []

    @torch.inference_mode()
    def run_slice(self, is_idle: bool = True) -> list[JobResult]:
        """Run jobs until they have done the work of one slice, or no job can continue. Return the finished jobs.

        `is_idle`: vLLM schedules no tokens in this step. The slice then waits longer for a layer that is being read.
        """
        finished = self._take_stored()
        if not self._jobs:
            return finished
        with self.layers.without_adapters():
            self._run_jobs(finished, self._slice, is_idle)
        return finished

    @torch.inference_mode()
    def refine(self, job: RefineJob) -> Refined | None:
        """Refine a request whose prompt was fused here. Return None if nothing is left to refine.

        The request's KV must have no other user. If an error stops the refinement, the answer is decoded from the KV
        as it is: every row of it is valid.
        """
        fused = self._fused.pop(job.request_id, None)
        if fused is None:
            return None
        try:
            with self.layers.without_adapters():
                return refine(self.layers, self._unrotation, fused, job, self._slice)
        except Exception as error:
            log.warning(
                "the answer of request %s is not refined, because an error stopped it", job.request_id, exc_info=error
            )
            return None

    def _run_jobs(self, finished: list[JobResult], budget: int, is_idle: bool) -> None:
        """Run jobs for at most `budget` token-layers, and append the results of those that end to `finished`."""
        patience_s = IDLE_PATIENCE_S if is_idle else _PATIENCE_S
        while self._jobs and budget > 0:
            self._pass = self._pass or self._next_pass()
            patience_s -= self._resume_read_jobs(patience_s)
            alone = next((running for running in self._pass if running.pending is None), None)
            if alone is not None:
                budget -= self._advance(alone, None, finished)
            elif any(isinstance(running.pending, LayerCall) for running in self._pass):
                budget -= self._run_layer(finished)
            else:
                break

    def _resume_read_jobs(self, patience_s: float) -> float:
        """Resume the jobs of the pass whose layer has been read on all ranks. Return the seconds this took.

        If no job can continue, wait for the oldest job's layer, at most `patience_s`.
        """
        unread = [(running, running.pending) for running in self._pass if isinstance(running.pending, Event)]
        if not unread:
            return 0.0
        start_s = perf_counter()
        counts = self.layers.count_ranks([event.is_set() for _, event in unread])
        if len(unread) == len(self._pass) and max(counts) < self.layers.num_ranks:
            unread[0][1].wait(max(0.0, patience_s))
            counts = self.layers.count_ranks([event.is_set() for _, event in unread])
        now_s = perf_counter()
        for (running, _), count in zip(unread, counts, strict=True):
            if count == self.layers.num_ranks:
                running.pending = None
                running.unread_s += now_s - running.unread_since_s
        return now_s - start_s

    def _next_pass(self) -> list[_ActiveJob]:
        """Return the oldest job, and the next ones as far as their rows fit into a pass."""
        num_rows = list(itertools.accumulate(running.job.num_tokens_to_compute for running in self._jobs))
        return self._jobs[: max(1, bisect_right(num_rows, self._pass_rows))]

    def _run_layer(self, finished: list[JobResult]) -> int:
        """Run the lowest layer that jobs of the pass wait for, for all of these jobs. Return the token-layers run."""
        waiting = [(running, running.pending) for running in self._pass if isinstance(running.pending, LayerCall)]
        lowest = min(run.layer for _, run in waiting)
        together = [(running, run) for running, run in waiting if run.layer == lowest]
        start_s, num_rows = perf_counter(), sum(len(run.rows) for _, run in together)
        try:
            outputs = self.layers.run_layer_together([run for _, run in together])
        except Exception as error:
            finished += [self._failed(running, error) for running, _ in together]
            return num_rows
        row_s = (perf_counter() - start_s) / num_rows
        for (running, run), output in zip(together, outputs, strict=True):
            running.busy_s += row_s * len(run.rows)
            num_rows += self._advance(running, output, finished)
        return num_rows

    def _advance(self, running: _ActiveJob, output: Tensor | None, finished: list[JobResult]) -> int:
        """Resume a job with the `output` of the layer that it requested. Return the token-layers that it ran itself."""
        start_s = perf_counter()
        try:
            step = running.steps.send(output)
        except StopIteration as end:
            output_of_job: _JobOutput = end.value
            report, storing = output_of_job
            report.fuse_s = max(0.0, running.busy_s + perf_counter() - start_s - report.stall_s)
            report.stall_s += running.unread_s
            self._drop(running)
            if storing is not None:
                self._storing.append((running.job, report, storing))
            else:
                finished.append(JobResult(running.job, report, failed=False))
            return 0
        except Exception as error:
            finished.append(self._failed(running, error))
            return 0
        running.unread_since_s = perf_counter()
        running.busy_s += running.unread_since_s - start_s
        running.pending = None if isinstance(step, int) else step
        return step if isinstance(step, int) else 0

    def _failed(self, running: _ActiveJob, error: Exception) -> JobResult:
        """Log a job's error and return its result, so that the error does not end the server."""
        log.error("blending request %s failed", running.job.request_id, exc_info=error)
        self._drop(running)
        return _left_to_vllm(running.job, f"blending failed ({self._describe_error(error)})")

    def _drop(self, running: _ActiveJob) -> None:
        running.steps.close()
        running.pending = None
        self._readers = [done for done in self._readers if not done.is_set()]
        self._jobs = [other for other in self._jobs if other is not running]
        self._pass = [other for other in self._pass if other is not running]

    def close(self) -> None:
        """Drop all jobs, finish pending writes, and end the threads."""
        for running in self._jobs:
            self._drop(running)
        for done in self._readers:
            done.wait()
        self._writer.shutdown(wait=True)

    # -- the two kinds of jobs

    def _blend(self, job: BlendJob) -> Steps[_JobOutput]:
        """Fuse the stored chunks into the request's blocks, one turn of the prompt after the other."""
        prefix_key = (job.params.namespace, job.prefix_ids)
        was_known = prefix_key in self._prefixes
        prefix = () if job.num_resident else (yield from self._prefix(job))
        num_resident = job.num_resident or sum(placement.end for placement in prefix)
        num_known = 0 if prefix_key in self._prefixes and not was_known and not job.num_resident else num_resident
        mode = job.params.reported_mode
        report = BlendReport(mode, "none", job.recompute_ratio)
        fused: list[tuple[FusePlan, FuseResult]] = []
        for turn in job.turns:
            before = prefix if not fused else ()
            fused.append((yield from self._blend_turn(job, turn, before, num_resident, report)))
            num_resident = turn.fused_end
        plan, result = merge_fusions(fused)
        if job.params.mode == "blend":
            report.rule = plan.rule.name
            last, turn = fused[-1][0], job.turns[-1]
            if (
                (job.params.refine_ratio or 0.0) > last.recompute_ratio
                and turn.end == len(job.token_ids)
                and is_stale(last)
            ):
                self._fused[job.request_id] = replace(last, num_resident=turn.fused_start, num_exact=None)
        record_fusion(report, job.runs, plan, result, num_known)
        return report, None

    def _blend_turn(
        self,
        job: BlendJob,
        turn: BlendTurn,
        prefix: tuple[Placement, ...],
        num_resident: int,
        report: BlendReport,
    ) -> Steps[tuple[FusePlan, FuseResult]]:
        """Fuse one turn's chunks. After a damaged entry, start again without it. Add the seconds to `report`.

        `num_resident`: the number of tokens before the turn whose KV is there, in blocks or as the placements `prefix`.
        """
        damaged: set[str] = set()
        while True:
            plan = self._fuse_plan(job, turn, self._lookup(turn.stored, damaged), num_resident)
            paged = self._paged(job, turn, plan, 0 if prefix else num_resident)
            try:
                ends_s: list[float] = []
                placed = (*prefix, *plan.placements)
                with self._source(placed, paged, corrects_drift=plan.corrects_drift) as source:
                    num_charged = source.num_computed * self.layers.kv_share
                    if source.num_computed:
                        source.wait(0)  # computes layer 0, which counts as work of this slice
                        yield math.ceil(num_charged)
                    result = yield from fuse_steps(self.layers, plan, paged, source, ends_s)
                    yield source.done
                break
            except DamagedEntryError as error:
                log.warning("%s; blending request %s without it", error, job.request_id)
                damaged.add(error.key)
        result.add_first_layer_cost(num_charged, plan)
        if self.timelines is not None:
            self.timelines.append(source.timeline(ends_s))
        report.load_s += source.load_s
        report.stall_s += source.stall_s
        report.num_damaged_entries += len(damaged)
        return plan, result

    def _ingest(self, job: BlendJob) -> Steps[_JobOutput]:
        """Compute the KV of the span after the ids before it, and queue it for storing."""
        layers, ids = self.layers, job.token_ids
        (run,) = job.runs
        prefix = yield from self._prefix(job)
        paged = PagedKV(layers, job.block_ids, job.end)
        for placement in prefix:
            paged.place_stored_layers(placement)
        header = self._header(job, ids[: run.start], run.chunk_ids, job.params.namespace)
        kv = yield from prefill_chunk_steps(layers, paged, header)
        whole = MemoryKV(kv.header, tuple(layers.gather_heads(kv.layer(index)) for index in range(layers.num_layers)))
        report = BlendReport("full", "none", 1.0, num_chunks=1, charged_budget=1.0, charged_budget_32=1.0)
        return report, self._writer.submit(self._write, whole) if layers.rank == 0 else None

    def _take_stored(self) -> list[JobResult]:
        """Return the results of ingestions whose write has ended, with or without an error."""
        finished, waiting = [], []
        for job, report, future in self._storing:
            if not future.done():
                waiting.append((job, report, future))
                continue
            error = future.exception()
            if error is not None:
                log.warning("request %s was not stored: %s", job.request_id, error)
                report.refused_reason, report.failed = f"not stored: {self._describe_error(error)}", True
            finished.append(JobResult(job, report, failed=False))
        self._storing = waiting
        return finished

    # -- parts of jobs

    def _fuse_plan(
        self, job: BlendJob, turn: BlendTurn, placements: tuple[Placement, ...], num_resident: int
    ) -> FusePlan:
        """Return the plan of a turn: placed chunks, selection rule and check layer.

        The plan is a function of the prompt: how many tokens before the turn's first chunk have KV already changes
        nothing but the work.
        """
        params, tuning, layers, ids = job.params, job.tuning, self.layers, job.token_ids[: turn.end]
        question_start = turn.runs[-1].end
        plan = FusePlan(
            torch.tensor(ids, dtype=torch.int64, device=layers.device),
            placements,
            num_resident=turn.runs[0].start,
            seed=params.seed or 0,
            num_fused=turn.fused_end,
            sum_over_ranks=layers.sum_over_ranks if layers.num_ranks > 1 else None,
            question_start=question_start if question_start < len(ids) else None,
        )
        if params.mode == "blend":
            plan = plan.with_rule(
                tuning.rule,
                tuning.recompute_ratio,
                layers,
                tuning.check_layer,
                params,
                is_auto_rule=tuning.is_auto_rule,
            )
        is_exact = job.recompute_ratio >= 1
        return replace(
            plan, num_resident=num_resident, num_exact=None if is_exact else min(num_resident, job.runs[0].start)
        )

    def _paged(self, job: BlendJob, turn: BlendTurn, plan: FusePlan, num_in_blocks: int) -> PagedKV:
        """Return the request's blocks, with the layers that the plan needs as tensors."""
        kept = {check.layer for check in plan.checks}
        # Kernels also compute the few fresh rows of a prompt that recomputes no chunk token.
        attends = not plan.recomputes_all if self.layers.uses_kernels else plan.recomputes_some
        if self.layers.attends_scattered_rows_together and attends:
            kept.update(range(self.layers.num_layers))
        num_probe_rows = len(plan.token_ids) - plan.end if plan.probe_layers else 0
        kept.update(range(plan.probe_layers[-1] + 1) if plan.probe_layers else ())
        return PagedKV(self.layers, job.block_ids, plan.end, kept, num_probe_rows, num_in_blocks)

    def _source(
        self, placements: Sequence[Placement], paged: PagedKV, *, corrects_drift: bool = False
    ) -> PagedLayerLoader:
        """Return the reader of one job's chunks. It may end later than the job, after its current read."""
        source = PagedLayerLoader(placements, self.layers, paged, corrects_drift=corrects_drift)
        self._readers.append(source.done)
        return source

    def _prefix(self, job: BlendJob) -> Steps[tuple[Placement, ...]]:
        """Return the prefix's exact KV as one placement, or none. It is computed in the request's blocks, and cached.

        A prompt may also use a cached prefix that lacks at most `COMPUTED_IN_PROMPT` tokens. These are then computed
        with the prompt.
        """
        prefix_ids, namespace = job.prefix_ids, job.params.namespace
        if not prefix_ids:
            return ()
        kv = self._prefixes.get(prefix_ids, namespace)
        if kv is None and job.params.mode != "ingest":
            nearest, count = self._prefixes.find_longest(prefix_ids, namespace)
            if nearest is not None and count and len(prefix_ids) - count <= COMPUTED_IN_PROMPT:
                return (Placement(slice_kv_rows(nearest, 0, count), 0, exact=True),)
        if kv is None:
            paged = PagedKV(self.layers, job.block_ids, len(prefix_ids))
            kv = yield from prefill_chunk_steps(self.layers, paged, self._header(job, (), prefix_ids, ""))
            self._prefixes.put(prefix_ids, kv, namespace)
        return (Placement(kv, 0, exact=True),)

    def _lookup(self, runs: Sequence[ChunkRun], damaged: set[str]) -> tuple[Placement, ...]:
        """Return those of the stored runs that could be read on all ranks, with the KV of this rank's heads."""
        entries: list[ChunkKV | None] = []
        for run in runs:
            assert run.variant is not None
            key = run.variant.key
            entries.append(self._store.get_local(key, run.chunk_ids, {}) if key not in damaged else None)
        # Each rank reads separately. A chunk that one rank cannot read is a miss on all, so that all compute the same.
        counts = self.layers.count_ranks([kv is not None for kv in entries])
        return tuple(
            Placement.of_run(run, self.layers.select_own_heads(kv))
            for run, kv, count in zip(runs, entries, counts, strict=True)
            if kv is not None and count == self.layers.num_ranks
        )

    def _header(self, job: BlendJob, prefix_ids: Sequence[int], ids: Sequence[int], namespace: str) -> KVHeader:
        facts = (job.fingerprint, tuple(prefix_ids), tuple(ids), self.layers.num_layers, dtype_name(self.layers.dtype))
        header = KVHeader("", *facts, namespace=namespace)
        return replace(header, key=key_from_header(header))


def _left_to_vllm(job: BlendJob, reason: str) -> JobResult:
    return JobResult(job, BlendReport(job.params.reported_mode, refused_reason=reason, failed=True), failed=True)


def worker_of_this_process() -> BlendWorker:
    """Return the worker of a vLLM in this process, for benchmarks that replace its store.

    Raises UsageError if the worker runs in another process.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        raise UsageError(
            "vLLM's worker runs in another process, where its store cannot be replaced; unset "
            "VLLM_ENABLE_V1_MULTIPROCESSING, and leave out the vllm_options that start several processes"
        )
    worker: BlendWorker = get_kv_transfer_group()._worker
    return worker
