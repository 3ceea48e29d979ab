"""CacheBlend on stock vLLM: a KV connector that fills a prompt's context with fused KV, and stores new chunks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ragblend.engine.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "DIR"}}'

To vLLM a blended context is a remote prefix: the scheduler's half claims the tokens up to the end of the last stored
chunk, the worker's half fuses them into the request's blocks between engine steps (`worker`), and vLLM itself
computes the rest of the prompt and samples. What a request may ask for is in `params`.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ragblend.engine.fusion.lookup import Context, contexts, holds_neighbours, neighbours, note_neighbours
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.store.base import StoreCounters
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import ModelShape, dtype_name
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore, disk_tier
from ragblend.engine.tuning.calibration import Calibrations, Chosen
from ragblend.engine.tuning.machine import read_machine_profile
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.fetch import Arrival, RemoteFetch
from ragblend.engine.vllm.loading import Loading, MemoryChange, MemoryWatch, ReadAhead, machine_facts_of
from ragblend.engine.vllm.params import PARAMS_KEY, BlendParams, parse_params, spans_between, told
from ragblend.engine.vllm.plugin import loaded_model, register
from ragblend.engine.vllm.support import check_version, refuse_unsupported
from ragblend.engine.vllm.worker import BlendWorker, Finished, Job, StoredSpan
from ragblend.errors import RagblendError, UsageError

check_version()
register()  # for processes that were told to load no plugins; too late for a worker whose model is there already

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)

log = logging.getLogger(__name__)

_REPORTS_KEPT = 1024  # for requests that a stop string ends; see vllm_extension

COUNTERS = {
    "requests": "Requests that asked for ragblend",
    "refused_requests": "Requests that asked for ragblend and were served by ordinary prefill",
    "chunk_hits": "Chunks whose stored KV was used",
    "chunk_misses": "Chunks without stored KV",
    "reused_tokens": "Prompt tokens whose stored KV was used as it is",
    "recomputed_tokens": "Chunk tokens whose stored KV was recomputed",
    "damaged_entries": "Stored chunks that turned out damaged",
    "ingested_chunks": "Chunks computed and stored",
    "remote_hits": "Chunks that came from the remote tier",
    "remote_failures": "Times the remote tier failed or took too long",
    "remote_dropped_writes": "Chunks that were stored here and not sent to the remote tier",
    "load_seconds": "Seconds spent reading and placing stored KV",
    "fuse_seconds": "Seconds spent recomputing",
}
"""What `/metrics` counts, each as `vllm:ragblend_NAME`."""


@dataclass
class BlendMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Scheduler to workers: what to blend next, what to read into memory, and whether to tell what is there."""

    jobs: list[Job] = field(default_factory=list)
    ahead: list[str] = field(default_factory=list)
    asks: bool = False


@dataclass
class BlendReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: what was done, by request, and what the first rank's memory tier holds since then."""

    reports: dict[str, BlendReport] = field(default_factory=dict)
    memory: MemoryChange | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several ranks' reports on one request the first counts: they agree but for the seconds."""
        memory = self.memory if self.memory is not None else other.memory
        return BlendReports({**other.reports, **self.reports}, memory)


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """The counts of COUNTERS since the last report."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to the named counters."""
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Sum, in place."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class BlendPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:ragblend_*` counters."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(f"vllm:ragblend_{name}", documentation, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)


@dataclass(slots=True)
class _Asked:
    """One request as the scheduler's half sees it."""

    params: BlendParams
    report: BlendReport
    end: int = 0  # tokens [0, end) are filled by the connector; 0: nothing is
    stored: tuple[StoredSpan, ...] = ()
    coming: Arrival | None = None  # chunks that the remote tier may send; what to do is settled after them
    waited_s: float = 0.0  # for those
    choice: Chosen | None = None  # what a calibration says; None where nothing is fused
    adapts: bool = False  # whether to reuse, and the ratio, are to be settled by what loading costs
    is_hidden: bool = False  # from vLLM's prefix cache


class BlendConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one in the scheduler's process and one in every worker; they talk through vLLM."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config)
        self.config = ConnectorConfig.read(dict(self._kv_transfer_config.kv_connector_extra_config or {}))
        model = vllm_config.model_config
        self._model_name = str(model.model)
        self._dtype = dtype_name(model.dtype)
        self._is_scheduler = role.name == "SCHEDULER"
        # The scheduler's half
        self._asked: dict[str, _Asked] = {}
        self._new_jobs: list[Job] = []
        self._fetch: RemoteFetch | None = None
        # Both halves'
        self._stats = BlendStats()
        self._remote: RemoteStore | None = None
        self._remote_seen = StoreCounters()
        # The workers' half
        self._model: Any | None = None
        self._worker: BlendWorker | None = None
        self._store: TieredStore | None = None
        self._through: TieredStore | None = None
        self._watch: MemoryWatch | None = None
        self._asked_to_tell = False
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, BlendReport] = {}
        self._told: OrderedDict[str, BlendReport] = OrderedDict()
        if self._is_scheduler:
            # What the remote tier has sent is there a second time, so nothing here waits for the disk.
            disk = disk_tier(self.config.open_local(fsync=False))
            assert disk is not None
            self._disk = disk
            self._remote = self.config.open_remote()
            if self._remote is not None:
                self._fetch = RemoteFetch(self._remote, self._disk, self.config.remote_timeout_s)
            self.fingerprint, shape = model_fingerprint(model), model_shape(model)
            for tier in (self._disk, self._remote):
                if tier is not None:
                    tier.expect(self.fingerprint, shape)
            self._calibrations = Calibrations(
                self._disk.root, self.fingerprint, len(shape.layers), self._disk.store_key
            )
            hardware, key = machine_facts_of(vllm_config), self._disk.store_key
            machine = read_machine_profile(self._disk.root, self.fingerprint, hardware, store_key=key)
            self._loading = Loading(machine, self._disk)
            self._read_ahead = ReadAhead(self._disk, self.config.memory_bytes)
            self._note_model(shape)
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                log.warning('set "kv_load_failure_policy": "recompute", or a failed blend fails its request')

    # -- the scheduler's half: what a request asks for, and what can be done for it

    def on_new_request(self, request: Any) -> None:
        """Read what a request asks for, look its chunks up, and keep its KV out of the exact prefix cache."""
        self._loading.request_came(request.request_id)
        try:
            params = self._params(request)
            if params is None:
                return
            asked = self._plan(request, params)
        except RagblendError as error:
            # Whatever a client sends, it gets an answer: by ordinary prefill.
            log.warning("request %s is served by ordinary prefill: %s", request.request_id, error)
            asked = _Asked(BlendParams("prefix"), BlendReport("prefix", refused_reason=str(error), failed=True))
        self._asked[request.request_id] = asked
        self._stats.add(requests=1, refused_requests=bool(asked.report.refused_reason))
        if asked.params.mode == "full":
            _hide_from_prefix_cache(request, asked)
        elif not asked.report.refused_reason:
            self._start(request, asked)

    def _params(self, request: Any) -> BlendParams | None:
        """The request's parameters, or those that separators in its prompt stand for; None: it is not for us."""
        given = request.kv_transfer_params
        if isinstance(given, dict) and PARAMS_KEY in given:
            return parse_params(given[PARAMS_KEY])
        if not self.config.separator_ids or request.prompt_token_ids is None:
            return None
        spans = spans_between(request.prompt_token_ids, self.config.separator_ids, self.config.separator_end_ids)
        # An end marker tells that separators open the chunks and belong to them.
        lead = len(self.config.separator_ids) if self.config.separator_end_ids else 0
        template = ((lead, 0),) * len(spans)
        return BlendParams(spans=spans, namespace=self.config.namespace, template=template) if spans else None

    def _plan(self, request: Any, params: BlendParams) -> _Asked:
        ids = request.prompt_token_ids
        if ids is None:
            raise UsageError("the prompt consists of embeddings; ragblend needs token ids")
        params.check_length(len(ids))
        rule = self.config.rule if params.rule == "auto" else params.rule
        ratio = self.config.ratio if params.ratio is None else params.ratio
        choice = self._calibrations.choose(tuple(ids[: params.spans[0][0]]) if params.spans else (), rule, ratio)
        params = replace(params, rule=rule, ratio=choice.ratio)
        blends = params.mode == "blend"
        used = choice.ratio if blends else float(params.mode == "full")
        report = BlendReport(params.told_as, choice.rule if blends else "none", used)
        if choice.fit is not None and params.mode in ("blend", "reuse"):
            report.predicted_agreement = choice.fit.agreement_at(used)
        report.num_chunks = len(params.spans)
        report.chunks = [ChunkReport("", end - start, hit=False) for start, end in params.spans]
        if params.spans:
            report.charged_budget = report.charged_budget_32 = 1.0
        asked = _Asked(params, report)
        if params.mode in ("full", "prefix") or not params.spans:
            return asked
        asked.choice, asked.adapts = choice, blends and choice.is_auto_ratio and self._loading.machine is not None
        if request.skip_reading_prefix_cache:
            raise UsageError("the request wants every prompt token computed (prompt logprobs), so nothing is reused")
        return asked

    def _start(self, request: Any, asked: _Asked) -> None:
        """Settle what is to be done, at once or, where chunks may come from the remote tier, after they have."""
        if asked.params.mode == "prefix" or not asked.params.spans:
            return
        missing = self._missing(request.prompt_token_ids, asked.params) if self._fetch is not None else []
        if missing and self._fetch is not None:
            asked.coming = self._fetch.start(missing)
        else:
            self._settle(request, asked)

    def _settle(self, request: Any, asked: _Asked) -> None:
        """Look the request's chunks up on this machine's disk, and decide up to where its context will be filled."""
        ids, spans = request.prompt_token_ids, asked.params.spans
        asked.stored = self._lookup(ids, asked.params)
        if asked.params.mode == "ingest":
            asked.end = spans[0][1]
            if len(self.config.prefix_ids) < spans[0][0]:  # behind more than the prefix: a chunk and its neighbour
                note_neighbours(self._disk)
        elif asked.stored:
            asked.end = asked.stored[-1].end
            if asked.end == len(ids):  # vLLM must have a token to sample from: what ends the prompt is computed
                asked.stored = asked.stored[:-1]
                asked.end = asked.stored[-1].end if asked.stored else 0
        if asked.stored and asked.params.mode != "ingest":
            self._read_ahead.waits(request.request_id, [span.key for span in asked.stored])
        if asked.end and not asked.adapts:  # otherwise it may become an ordinary prefill
            _hide_from_prefix_cache(request, asked)

    def _adapt(self, request: Any, asked: _Asked) -> None:
        """Settle the ratio by what loading costs, or leave the request to vLLM, where full prefill is faster."""
        assert asked.choice is not None
        ids, num_prefix = request.prompt_token_ids, asked.params.spans[0][0]
        asks_first = find_rule(asked.choice.rule).asks_first
        decision = self._loading.decide(asked.choice.ratio, len(ids), num_prefix, asked.stored, asks_first)
        asked.adapts = False
        if decision.refused:
            asked.report = replace(
                asked.report, mode="prefix", rule="none", recompute_ratio=0.0, predicted_agreement=None
            )
            asked.report.refused_reason = decision.refused
            asked.stored, asked.end = (), 0
            self._read_ahead.ends(request.request_id)
            self._stats.add(refused_requests=1)
            return
        asked.report.recompute_ratio = decision.ratio
        if asked.choice.fit is not None:
            asked.report.predicted_agreement = asked.choice.fit.agreement_at(decision.ratio)
        _hide_from_prefix_cache(request, asked)

    def _lookup(self, ids: Sequence[int], params: BlendParams) -> tuple[StoredSpan, ...]:
        """Stored chunks of the prompt, each from the best context that it is stored behind."""
        found = []
        for start, end in params.spans:
            for key, context in self._candidates(ids, start, end, params):
                header = self._disk.header(key)
                if header is not None and header.token_ids == tuple(ids[start:end]):
                    span = StoredSpan(start, end, key, context.match, context.exact, context.has_neighbour)
                    found.append(span)
                    break
        return tuple(found)

    def _candidates(
        self, ids: Sequence[int], start: int, end: int, params: BlendParams
    ) -> Iterator[tuple[str, Context]]:
        """Keys that a chunk may be stored under, the best one first. What is to be ingested has one only."""
        num_prefix, default = params.spans[0][0], self.config.prefix_ids
        starts = neighbours(params.spans) if holds_neighbours(self._disk) else {}
        for context in contexts(ids, start, starts.get(start), num_prefix, default):
            yield chunk_key(self.fingerprint, context.token_ids, ids[start:end], params.namespace), context
            if params.mode == "ingest":
                return

    def _missing(self, ids: Sequence[int], params: BlendParams) -> list[str]:
        """Keys not on this machine that would be better than what is. Chunks to ingest are computed, not asked for."""
        missing: dict[str, None] = {}
        for start, end in params.spans if params.mode != "ingest" else ():
            for key, _ in self._candidates(ids, start, end, params):
                if self._disk.contains(key):
                    break
                missing[key] = None
        return list(missing)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The context's tokens, to be filled between steps; None: not known yet. After a preemption the same again."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        was_hidden = asked.is_hidden
        if asked.coming is not None:
            if not asked.coming.is_over:
                return None, False
            asked.waited_s, asked.coming = asked.coming.waited_s, None
            self._settle(request, asked)
        if asked.end and asked.adapts:
            if not self._loading.is_current:
                return None, False  # the workers tell with this step what is in their memory
            self._adapt(request, asked)
        if asked.end and num_computed_tokens and not was_hidden:
            return None, False  # vLLM found those in the exact cache; hidden by now, the request finds none there
        count = asked.end - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks are there: the workers can start."""
        asked = self._asked.get(request.request_id)
        if asked is None or num_external_tokens <= 0:
            return
        # Blocks that vLLM found in its cache are this request's own, from before a preemption: the salt is unique.
        # They are written again with the rest, so that the outcome does not depend on what was left of them.
        self._read_ahead.starts(request.request_id)
        fit = asked.choice.fit if asked.choice is not None else None
        self._new_jobs.append(
            Job(
                request.request_id,
                asked.params,
                asked.report.recompute_ratio,
                tuple(request.prompt_token_ids),
                asked.end,
                asked.stored,
                tuple(blocks.get_block_ids()[0]),
                self.fingerprint,
                fit.reads if fit is not None else None,
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The jobs that came up in this step, and what to read for requests that it left waiting."""
        jobs, self._new_jobs = self._new_jobs, []
        return BlendMetadata(jobs, self._read_ahead.take(self._loading), self._loading.asks)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, BlendReports):
            return
        if meta.memory is not None:
            self._loading.note(meta.memory)
        for request_id, report in meta.reports.items():
            self._read_ahead.ends(request_id)
            if report.refused_reason:
                self._stats.add(refused_requests=1)
            asked = self._asked.get(request_id)
            if asked is not None:  # what it waited for the remote tier is part of loading, and fusing waited too
                report.load_s, report.stall_s = report.load_s + asked.waited_s, report.stall_s + asked.waited_s
            self._stats.add(load_seconds=report.load_s, fuse_seconds=report.fuse_s)
            self._stats.add(damaged_entries=report.num_damaged_entries, recomputed_tokens=report.num_recomputed_tokens)
            self._stats.add(reused_tokens=report.num_reused_tokens)
            if asked is not None:
                report.predicted_agreement = asked.report.predicted_agreement
                asked.report = report
                if report.refused_reason:
                    asked.end = 0  # or what failed once would be tried for ever

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The report goes out with the answer; vLLM may free the blocks."""
        self._loading.request_went(request.request_id)
        self._read_ahead.ends(request.request_id)
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return False, None
        report = asked.report
        if asked.params.mode == "ingest" and not report.num_chunk_hits and not report.refused_reason:
            self._stats.add(ingested_chunks=1)
        elif not report.refused_reason:
            misses = report.num_chunks - report.num_chunk_hits
            self._stats.add(chunk_hits=report.num_chunk_hits, chunk_misses=misses)
        return False, {PARAMS_KEY: told(report)}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for engines without the hybrid cache manager."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _note_model(self, shape: ModelShape) -> None:
        models = self._disk.models()
        if self.fingerprint not in models:
            if models:
                held = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
                log.warning("%s holds KV of %s, not of %s", self.config.store, held, self._model_name)
            try:
                self._disk.put_model(self.fingerprint, {"model": self._model_name, **shape.as_facts()})
            except RagblendError as error:  # a read-only store still serves
                log.warning("%s", error)

    # -- the workers' half: fuse

    def register_model(self, model: Any) -> None:
        """For a vLLM that shows its connector the model (vllm-project/vllm#37339)."""
        self._model = model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Model and cache are there, and no request yet: the time for the self-check."""
        from ragblend.engine.vllm.layers import VllmLayers
        from ragblend.engine.vllm.self_check import self_check

        model = self._model if self._model is not None else loaded_model()
        if model is None:
            raise RagblendError(
                "ragblend does not know the model of this vLLM worker: its plugin did not run. Add ragblend to "
                "VLLM_PLUGINS, or start vLLM with --worker-cls ragblend.engine.vllm.connector.BlendWorkerClass"
            )
        scheduler = self._vllm_config.scheduler_config
        batched = scheduler.max_num_batched_tokens
        layers = VllmLayers(
            model,
            self._vllm_config,
            self._kv_cache_config,
            max_rows=batched,
            max_runs=self.config.max_runs or scheduler.max_num_seqs,
        )
        if self.config.self_check:
            config = self._vllm_config.model_config
            self_check(layers, config.get_vocab_size(), self._kv_cache_config.num_blocks, self._model_name)
        # Read from this machine alone: the scheduler has had fetched what a job needs. Written through to the remote.
        self._store = store = self.config.open_local(memory=True)
        model_config = self._vllm_config.model_config
        store.expect(model_fingerprint(model_config), model_shape(model_config))
        self._watch = MemoryWatch(store) if layers.rank == 0 else None
        self._remote = self.config.open_remote() if layers.rank == 0 else None
        self._through = store
        if self._remote is not None:
            self._remote.breaker = CircuitBreaker(threshold=1)  # writes wait for the next probe, instead of being spent
            self._through = TieredStore(*store.tiers, self._remote, kv_dtype=self.config.kv_dtype)
        self._worker = BlendWorker(layers, store, self.config.slice_tokens or batched, self._through.put)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Once per engine step, after its forward pass: take new jobs, work on the oldest ones for one slice."""
        assert self._worker is not None
        assert self._store is not None
        meta = self._get_connector_metadata()
        self._asked_to_tell = meta.asks
        if meta.ahead:
            self._store.prefetch(meta.ahead)
        for job in meta.jobs:
            self._worker.submit(job)
        self._collect(self._worker.run_slice())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose context is filled. Those that ended meanwhile are dropped, which frees their blocks."""
        assert self._worker is not None
        for request_id in finished_req_ids:
            self._collect(self._worker.cancel(request_id))
        done, self._finished = self._finished, set()
        return None, done or None

    def _collect(self, finished: Sequence[Finished]) -> None:
        for job, report, failed in finished:
            self._finished.add(job.request_id)
            self._reports[job.request_id] = self._told[job.request_id] = report
            if len(self._told) > _REPORTS_KEPT:
                self._told.popitem(last=False)
            if failed:
                self._failed_blocks.update(job.block_ids)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Bring chunks into this worker's memory tier in the background; the first rank also asks the remote tier."""
        assert self._through is not None
        self._through.prefetch(keys)

    def told(self, request_id: str) -> dict[str, Any] | None:
        """The report on one of the latest jobs. Front ends know a request's id without the part vLLM adds to it."""
        for known, report in reversed(self._told.items()):
            if known == request_id or known.rpartition("-")[0] == request_id:
                return told(report)
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Reports of the jobs that ended in this step, and what came into memory or left it."""
        reports, self._reports = self._reports, {}
        change = None
        if self._watch is not None:
            change, self._asked_to_tell = self._watch.change(self._asked_to_tell), False
        return BlendReports(reports, change) if reports or change is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose fusing failed: vLLM computes them itself."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while vLLM computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """vLLM's own KV is not stored: it was computed inside somebody's prompt."""

    def wait_for_save(self) -> None:
        """Nothing is saved while vLLM computes."""

    def shutdown(self) -> None:
        """Finish what is being stored; what is on its way to the remote tier has ten seconds."""
        if self._fetch is not None:
            self._fetch.close()
        if self._worker is not None:
            self._worker.close()
        for store in (self._store, self._through):
            if store is not None:
                store.close()

    # -- counters

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call. The scheduler's half counts for all but the workers' remote writes."""
        self._count_remote()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, BlendStats()
        return stats

    def _count_remote(self) -> None:
        if self._remote is None:
            return
        now, seen = replace(self._remote.counters), self._remote_seen
        self._remote_seen = now
        self._stats.add(
            remote_hits=now.num_hits - seen.num_hits,
            remote_failures=now.num_failures - seen.num_failures,
            remote_dropped_writes=now.num_dropped - seen.num_dropped,
            damaged_entries=now.num_damaged - seen.num_damaged,
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Counts as they arrive in the front end."""
        return BlendStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        """Counters for `/metrics`."""
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _hide_from_prefix_cache(request: Any, asked: _Asked) -> None:
    """Give a request a name of its own in vLLM's prefix cache: it finds nothing there, and nobody finds its blocks."""
    asked.is_hidden = True
    request.cache_salt = f"{request.cache_salt or ''}ragblend-{uuid.uuid4().hex}"
    request.block_hashes.clear()
    request.update_block_hashes()


def model_fingerprint(model_config: Any) -> str:
    """The transformers engine's fingerprint of the checkpoint that vLLM serves, so that both use each other's KV.

    Overrides of the config are part of it. Online quantisation, which changes the KV, gives another one.
    """
    from ragblend.engine.hf.model import find_model
    from ragblend.engine.hf.model import model_fingerprint as checkpoint_fingerprint

    overrides = getattr(model_config, "hf_overrides", None) or {}
    if not isinstance(overrides, dict):
        raise UsageError("hf_overrides is a function, so the model cannot be told from others; give a dictionary")
    path, dtype = find_model(str(model_config.model)), dtype_name(model_config.dtype)
    is_quantised = getattr(model_config.hf_config, "quantization_config", None) is not None  # in the file, too
    online = None if is_quantised else model_config.quantization
    return checkpoint_fingerprint(path, f"{dtype}+{online}" if online else dtype, overrides)


def model_shape(model_config: Any) -> ModelShape:
    """What stored KV of the model looks like, all ranks' heads together."""
    heads, dim = model_config.get_total_num_kv_heads(), model_config.get_head_size()
    layers = int(model_config.hf_text_config.num_hidden_layers)
    return ModelShape.of(dtype_name(model_config.dtype), [(heads, dim, dim)] * layers)


def __getattr__(name: str) -> Any:
    """`BlendWorkerClass`, for `--worker-cls`: the platform's own worker class, with the plugin sure to have run."""
    if name != "BlendWorkerClass":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker
