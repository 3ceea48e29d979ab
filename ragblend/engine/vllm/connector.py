"""KV connector for CacheBlend on unmodified vLLM: fills a prompt's context with fused KV, and stores new chunks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ragblend.engine.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "DIR"}}'

vLLM treats a blended context as a remote prefix. The scheduler's half (`scheduler`) claims the tokens up to the end of
the last stored chunk. The worker's half (`worker`) fuses them into the request's blocks between engine steps. vLLM
computes the rest of the prompt and samples. `params` describes the parameters of requests. This module contains the
methods that vLLM calls.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ragblend.engine.report import BlendReport
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.brief_profile import profiles_itself
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.jobs import BlendJob, Refined, RefineJob
from ragblend.engine.vllm.metric_sources import MetricSource, TierMetrics
from ragblend.engine.vllm.params import report_to_json
from ragblend.engine.vllm.plugin import loaded_model, register, weights_updated
from ragblend.engine.vllm.scheduler_side.loading import MemoryTierDelta, MemoryTierTracker, machine_facts_of
from ragblend.engine.vllm.scheduler_side.scheduler import WEIGHTS_UPDATED, BlendScheduler
from ragblend.engine.vllm.support import (
    draft_note,
    model_fingerprint,
    model_kv_spec,
    reject_unsupported_config,
    require_supported_version,
    untested_architecture_note,
)
from ragblend.engine.vllm.worker_side.worker import BlendWorker, JobResult
from ragblend.errors import RagblendError

require_supported_version()
register()  # for processes without plugins; too late for a worker that has loaded its model

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ragblend.engine.vllm.metrics import BlendPromMetrics, BlendStats  # noqa: E402

log = logging.getLogger(__name__)

_REPORTS_KEPT = 1024  # for requests that end at a stop string; see `plugin.BlendWorkerExtension`


@dataclass
class BlendMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Message of one engine step from the scheduler to the workers."""

    jobs: list[BlendJob] = field(default_factory=list)  # new ones
    resident: dict[str, BlendReport] = field(default_factory=dict)  # by id of requests that need no job
    is_idle: bool = False  # vLLM schedules no tokens in this step
    refinement: RefineJob | None = None  # to run before this step's forward pass
    prefetch: list[str] = field(default_factory=list)  # keys to load into memory for later requests


@dataclass
class BlendReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message of one engine step from the workers to the scheduler."""

    reports: dict[str, BlendReport] = field(default_factory=dict)  # of finished jobs, by request id
    memory: MemoryTierDelta | None = None  # changes of the first rank's memory tier
    weights_updated: bool = False  # the model's weights have changed since it was loaded
    refined: dict[str, Refined] = field(default_factory=dict)  # refinements of this step, by request id

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return one message that combines the messages of this rank and of another rank (`other`).

        If both ranks report on a request, this rank's report is kept. Reports of ranks differ only in measured seconds.
        """
        memory = self.memory if self.memory is not None else other.memory
        updated = self.weights_updated or other.weights_updated
        return BlendReports({**other.reports, **self.reports}, memory, updated, {**other.refined, **self.refined})


class BlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """KV connector that vLLM loads: one object in the scheduler's process, and one in every worker.

    vLLM passes messages between these objects at every engine step. The connector can fill only one group of KV
    blocks, so the class does not declare SupportsHMA. vLLM then disables its hybrid cache manager, and a model with
    sliding windows has one group, too.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        reject_unsupported_config(vllm_config)
        self.config = ConnectorConfig.from_extra_config(dict(self._kv_transfer_config.kv_connector_extra_config or {}))
        self.scheduler: BlendScheduler  # set in the scheduler's half
        self._metric_sources: list[MetricSource] = []
        self._closeables: list[BlendScheduler | BlendWorker | TieredStore] = []
        # The workers' half. `register_kv_caches` sets the first two.
        self._worker: BlendWorker
        self._store: TieredStore
        self._watch: MemoryTierTracker | None = None
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._reports: dict[str, BlendReport] = {}
        self._refined: dict[str, Refined] = {}
        self._recent_reports: OrderedDict[str, BlendReport] = OrderedDict()
        if role.name == "SCHEDULER":
            if note := draft_note(vllm_config):
                log.warning("%s", note)
            self.scheduler = BlendScheduler(vllm_config, self.config)
            self._metric_sources = [self.scheduler.metrics, self.scheduler.tier_metrics]
            self._closeables = [self.scheduler]
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                log.warning(
                    'kv_load_failure_policy is %r, so a failed blend fails its request; set "kv_load_failure_policy": '
                    '"recompute"',
                    self._kv_transfer_config.kv_load_failure_policy,
                )

    # -- the scheduler's half: plans requests

    def on_new_request(self, request: Any) -> None:
        """Parse a request's parameters, salt its blocks in vLLM's prefix cache, and start the lookup of its chunks."""
        self.scheduler.on_new_request(request)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Pass vLLM's cache manager, which contains the prefix cache, to the scheduler's half."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.kv_cache_manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens after `num_computed_tokens` that the connector will fill with KV.

        The second value is True if the number is above 0: the connector fills the tokens between engine steps. The
        number is None while it is unknown, and vLLM asks again at a later step.
        """
        return self.scheduler.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Queue a request's job once vLLM has allocated the blocks."""
        if num_external_tokens > 0:
            self.scheduler.on_blocks_allocated(request, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the message of this step to the workers."""
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if is_idle:
            self.scheduler.wait_for_pending()
        refinement = None if is_idle else self.scheduler.next_refinement(scheduler_output.num_scheduled_tokens)
        resident, prefetch = self.scheduler.take_resident(), self.scheduler.loading.take_prefetches()
        return BlendMetadata(self.scheduler.take_jobs(), resident, is_idle, refinement, prefetch)

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the workers' message to the scheduler's half."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, BlendReports):
            if meta.weights_updated:
                self.scheduler.stop_reuse()
            self.scheduler.take_reports(meta.reports, meta.memory)
            self.scheduler.take_refined(meta.refined)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return False and the answer's report. False makes vLLM free the blocks. vLLM sends the report."""
        return False, self.scheduler.on_request_finished(request.request_id)

    # -- the workers' half: runs jobs

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Run the self-check and open the store. vLLM calls this once it has model and cache, before any request."""
        from ragblend.engine.fusion.self_check import check_with_kernels
        from ragblend.engine.vllm.worker_side.layers import VllmLayers
        from ragblend.engine.vllm.worker_side.measure import measure_at_start
        from ragblend.engine.vllm.worker_side.self_check import self_check

        model = loaded_model()
        if model is None:
            raise RagblendError(
                "ragblend has no access to the model of this vLLM worker, because its plugin did not run. Add ragblend "
                "to VLLM_PLUGINS"
            )
        model_config, limits = self._vllm_config.model_config, self._vllm_config.scheduler_config
        batched = limits.max_num_batched_tokens
        layers = VllmLayers(
            model,
            self._vllm_config,
            self._kv_cache_config,
            max_rows=batched,
            max_runs=limits.max_num_seqs,  # backends size their buffers by it
        )
        blocks, name = self._kv_cache_config.num_blocks, str(model_config.model)
        check_with_kernels(layers, partial(self_check, layers, model_config.get_vocab_size(), blocks, name), name)
        if note := untested_architecture_note(model_config.hf_config):
            log.warning("%s %s; it passed the exactness check", model_config.model, note)
        self._store = store = self.config.open_tiers(memory=True)
        if (memory := store.find_tier(MemoryStore)) is not None:
            memory.page_locked = layers.device.type == "cuda"
        fingerprint, spec = model_fingerprint(model_config), model_kv_spec(model_config)
        store.set_expected_spec(fingerprint, spec)
        if profiles_itself(self.config.auto_profile):
            measure_at_start(
                layers,
                store,
                fingerprint=fingerprint,
                hardware=machine_facts_of(self._vllm_config),
                spec=spec,
                vocab_size=model_config.get_vocab_size(),
                num_blocks=blocks,
                context_length=model_config.max_model_len,
            )
        for remote in store.find_tiers(RemoteStore):
            remote.breaker = CircuitBreaker(threshold=1)  # after a failure, writes wait instead of failing, too
        store.watch_deletions(skip_disk=True)  # to the scheduler, which copies fetched entries there
        if layers.rank == 0:
            self._watch = MemoryTierTracker(store)
            self._metric_sources = [TierMetrics(store, shows_bytes=True)]
        self._worker = BlendWorker(layers, store, self.config.slice_tokens or batched, self.config.message_for_clients)
        self._closeables = [self._worker, store]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's message, and run its refinement. vLLM calls this before each step's forward pass."""
        super().bind_connector_metadata(connector_metadata)
        job = connector_metadata.refinement
        if job is None or weights_updated.is_set():
            return
        refined = self._worker.refine(job)
        if refined is not None:
            self._refined[job.request_id] = refined
            if (report := self._recent_reports.get(job.request_id)) is not None:
                refined.write_to(report)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Queue the step's new jobs and run one slice of work. vLLM calls this after each step's forward pass."""
        meta = self._get_connector_metadata()
        self._keep_reports(meta.resident)
        self.prefetch(meta.prefetch)
        if weights_updated.is_set():  # all ranks see it between the same two steps
            self._record_finished(self._worker.leave_to_vllm(meta.jobs, WEIGHTS_UPDATED))
        else:
            for job in meta.jobs:
                self._worker.submit(job)
        self._record_finished(self._worker.run_slice(meta.is_idle))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Drop the jobs of `finished_req_ids`. Return None, and the ids of all jobs that ended since the last call."""
        for request_id in finished_req_ids:
            self._record_finished(self._worker.cancel(request_id))
        done, self._finished = self._finished, set()
        return None, done or None

    def _record_finished(self, finished: Sequence[JobResult]) -> None:
        for job, report, failed in finished:
            self._finished.add(job.request_id)
            self._reports[job.request_id] = report
            self._keep_reports({job.request_id: report})
            if failed:
                # The resident blocks are valid, and other requests may share them.
                self._failed_blocks.update(job.block_ids[job.num_resident // self._worker.layers.block_size :])

    def _keep_reports(self, reports: Mapping[str, BlendReport]) -> None:
        self._recent_reports.update(reports)
        while len(self._recent_reports) > _REPORTS_KEPT:
            self._recent_reports.popitem(last=False)

    def report_for(self, request_id: str) -> dict[str, Any] | None:
        """Return the report of a recent request as JSON values; None if there is none.

        `request_id` may lack the suffix that vLLM appends to a front end's id.
        """
        for recent_id, report in reversed(self._recent_reports.items()):
            if recent_id == request_id or recent_id.rpartition("-")[0] == request_id:
                return report_to_json(report)
        return None

    def keys_in_memory(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` whose entry is in this worker's memory tier."""
        memory = self._store.find_tier(MemoryStore)
        return [] if memory is None else list(filter(memory.contains, keys))

    def prefetch(self, keys: Sequence[str]) -> None:
        """Load entries into this worker's memory tier in the background, for a later request."""
        if self._store.find_tier(MemoryStore) is not None:
            self._store.prefetch(keys)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the message of this step to the scheduler; None if nothing has changed."""
        reports, self._reports = self._reports, {}
        refined, self._refined = self._refined, {}
        change = None
        if self._watch is not None:
            change = self._watch.take_delta()
        is_news = bool(reports or refined) or change is not None or weights_updated.is_set()
        return BlendReports(reports, change, weights_updated.is_set(), refined) if is_news else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the ids of the blocks of jobs that failed since the last call. vLLM computes these blocks itself."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because blocks are filled between engine steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because KV computed inside a user's prompt is never stored."""

    def wait_for_save(self) -> None:
        """Do nothing, because nothing is saved during a forward pass."""

    def shutdown(self) -> None:
        """Finish pending writes and close the stores. Writes to the remote tier get ten seconds."""
        for each in self._closeables:
            each.close()

    # -- counters

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the metrics that this process has gathered since the last call; None if nothing has changed."""
        stats = BlendStats()
        for source in self._metric_sources:
            stats.merge(source.take_changes())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return a BlendStats of `data`, the metrics that vLLM has sent to the front end."""
        return BlendStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        """Return the exporter that adds ragblend's counters, histograms and gauges to `/metrics`."""
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
