"""The scheduler's half of the connector: what a request asks for, and what can be done for it.

For each request: its parameters, the rule and the ratio, the chunks that are stored, up to where its context will be
filled, and the report. Nothing here waits for the disk or the network, because vLLM schedules meanwhile: chunks are
looked up (`lookup`) and fetched (`fetch`) beside it.
Knows vLLM's requests by their attributes; imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.store.kv import KVSpec
from ragblend.engine.store.tiered import disk_tier
from ragblend.engine.store.tombstones import AppliedTombstones, TombstoneWatcher
from ragblend.engine.tuning.calibration import CalibrationCache, RequestTuning
from ragblend.engine.tuning.machine import read_machine_profile
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.fetch import PendingFetch, RemoteFetcher
from ragblend.engine.vllm.loading import LoadingController, MemoryTierDelta, ReadAheadQueue, machine_facts_of
from ragblend.engine.vllm.lookup import PATIENCE_S, ChunkLookup, LookupResult
from ragblend.engine.vllm.metric_sources import RequestMetrics, TierMetrics
from ragblend.engine.vllm.params import (
    PARAMS_KEY,
    TENANT_KEY,
    BlendParams,
    belongs_to,
    cache_salt_of,
    parse_params,
    report_to_json,
    salted_namespace,
    spans_between,
)
from ragblend.engine.vllm.support import model_fingerprint, model_shape
from ragblend.engine.vllm.worker import IDLE_PATIENCE_S, BlendJob, StoredSpan
from ragblend.errors import RagblendError, UsageError

log = logging.getLogger(__name__)

WEIGHTS_UPDATED = "the model's weights were updated; KV is neither stored nor reused until vLLM is started again"


@dataclass(slots=True)
class _RequestState:
    """One request as the scheduler's half sees it."""

    params: BlendParams
    report: BlendReport
    end: int = 0  # tokens [0, end) are filled by the connector; 0: nothing is
    stored: tuple[StoredSpan, ...] = ()
    pending_lookup: Future[LookupResult] | None = None  # what to do is settled after it
    pending_fetch: PendingFetch | None = None  # chunks that the remote tier may send; they are looked for after it
    waited_s: float = 0.0  # for those
    choice: RequestTuning | None = None  # what a calibration says; None where nothing is fused
    adapts_ratio: bool = False  # whether to reuse, and the ratio, are to be settled by what loading costs
    is_new: bool = True  # nobody has waited for its lookup yet
    is_hidden: bool = False  # from vLLM's prefix cache
    num_missing: int = 0  # chunks that were looked for and not found
    is_filled: bool = False  # the workers have told what became of it
    request: Any = None  # vLLM's, until its first token is there


class BlendScheduler:
    """Made once in the scheduler's process. `counting` is taken by whoever reports it."""

    def __init__(self, vllm_config: Any, config: ConnectorConfig) -> None:
        self.config = config
        self.counting = RequestMetrics()
        self.requests: dict[str, _RequestState] = {}
        self._new_jobs: list[BlendJob] = []
        # What the remote tier has sent is there a second time, so nothing here waits for the disk.
        local = config.open_local(fsync=False)
        self.tiers = TierMetrics(local, shows_bytes=False)
        disk = disk_tier(local)
        assert disk is not None
        self.disk = disk
        self.remote = config.open_remote()
        self._fetch: RemoteFetcher | None = None
        self.listener: TombstoneWatcher | None = None
        if self.remote is not None:
            self.listener = TombstoneWatcher(self.disk, self.remote, belongs_to)
            self.listener.start()  # before the first request: this replica may have been down when others forgot
            self._fetch = RemoteFetcher(self.remote, self.disk, config.remote_timeout_s, self.listener)
        model = vllm_config.model_config
        self.fingerprint, shape = model_fingerprint(model), model_shape(model)
        for tier in (self.disk, self.remote):
            if tier is not None:
                tier.set_expected_spec(self.fingerprint, shape)
        root, key, num_layers = self.disk.root, self.disk.store_key, len(shape.layers)
        self._calibrations = CalibrationCache(root, self.fingerprint, num_layers, key)
        hardware = machine_facts_of(vllm_config)
        machine = read_machine_profile(root, self.fingerprint, hardware, store_key=key)
        self.loading = LoadingController(machine)
        self._read_ahead = ReadAheadQueue(config.memory_bytes)
        self._lookup = ChunkLookup(self.disk, config, self.fingerprint, num_layers)
        self._drops_memory = False
        self._reuses = True
        self._note_model(str(model.model), shape)

    def stop_reuse(self) -> None:
        """The workers compute with other weights from here on, so every request is left to vLLM."""
        if self._reuses:
            log.warning("%s", WEIGHTS_UPDATED)
        self._reuses = False

    def reset(self) -> None:
        """Have the workers drop what they hold in memory."""
        self._drops_memory = True

    def take_reset(self) -> bool:
        """Whether they are to, since the last call."""
        drops, self._drops_memory = self._drops_memory, False
        return drops

    def on_new_request(self, request: Any) -> None:
        """Read what a request asks for, look its chunks up, and keep its KV out of the exact prefix cache."""
        self.loading.on_request_added(request.request_id)
        try:
            params = self._params(request, self._bound_namespace(request))
            if params is None:
                return
            state = self._resolve_params(request, params)
        except RagblendError as error:
            # Whatever a client sends, it gets an answer: by ordinary prefill.
            log.warning("request %s is served by ordinary prefill: %s", request.request_id, error)
            state = _RequestState(
                BlendParams("prefix"), BlendReport("prefix", refused_reason=self.config.for_clients(error), failed=True)
            )
        self.requests[request.request_id] = state
        state.request = request
        self.counting.add(requests=1, refused_requests=bool(state.report.refused_reason))
        if state.params.mode == "full":
            _hide_from_prefix_cache(request, state)
        elif not state.report.refused_reason:
            self._begin_lookup(request, state)

    def _bound_namespace(self, request: Any) -> str | None:
        """The namespace that the request's API key is bound to; None where there are no keys.

        Its blocks in vLLM's own prefix cache are then that namespace's alone, whatever the request asks for.
        """
        if not self.config.keys:
            return None
        tenant = (request.kv_transfer_params or {}).get(TENANT_KEY)
        if not isinstance(tenant, str):  # it has not come through the front end's door
            _hide(request)
            raise UsageError("the server has keys, and the request came without one")
        namespace = salted_namespace(tenant, request.cache_salt)
        _salt_with_namespace(request, namespace)
        return namespace

    def _params(self, request: Any, bound: str | None) -> BlendParams | None:
        """The request's parameters, or those that separators in its prompt stand for; None: it is not for us."""
        given = request.kv_transfer_params
        if isinstance(given, dict) and PARAMS_KEY in given:
            params = parse_params(given[PARAMS_KEY])
        elif self.config.separator_ids and request.prompt_token_ids is not None:
            spans = spans_between(request.prompt_token_ids, self.config.separator_ids, self.config.separator_end_ids)
            if not spans:
                return None
            params = BlendParams(spans=spans, namespace=self.config.namespace)
        else:
            return None
        if bound is None:
            bound = salted_namespace(params.namespace, request.cache_salt)
            if params.namespace:
                _salt_with_namespace(request, bound)
        return replace(params, namespace=bound)

    def _resolve_params(self, request: Any, params: BlendParams) -> _RequestState:
        ids = request.prompt_token_ids
        if ids is None:
            raise UsageError("the prompt consists of embeddings; ragblend needs token ids")
        params.check_length(len(ids))
        rule = self.config.rule if params.rule == "auto" else params.rule
        ratio = self.config.ratio if params.ratio is None else params.ratio
        choice = self._calibrations.resolve_request_tuning(params.prefix_ids(ids) if params.spans else (), rule, ratio)
        params = replace(params, rule=rule, ratio=choice.ratio)
        blends = params.mode == "blend"
        used = choice.ratio if blends else float(params.mode == "full")
        report = BlendReport(params.reported_mode, choice.rule if blends else "none", used)
        if choice.fit is not None and params.mode in ("blend", "reuse"):
            report.predicted_agreement = choice.fit.agreement_at(used)
        report.num_chunks = len(params.spans)
        report.chunks = [ChunkReport("", end - start, hit=False) for start, end in params.spans]
        if params.spans:
            report.charged_budget = report.charged_budget_32 = 1.0
        state = _RequestState(params, report)
        if params.mode in ("full", "prefix") or not params.spans:
            return state
        if not self._reuses:
            state.report = _as_prefill(report, WEIGHTS_UPDATED)
            return state
        state.choice, state.adapts_ratio = choice, blends and choice.is_auto_ratio and self.loading.machine is not None
        if request.skip_reading_prefix_cache:
            raise UsageError("the request wants every prompt token computed (prompt logprobs), so nothing is reused")
        return state

    def _begin_lookup(self, request: Any, state: _RequestState) -> None:
        """Settle what is to be done: at once, or when a slow disk has told what is there, or a remote has sent it."""
        if state.params.mode == "prefix" or not state.params.spans:
            return
        self._start_lookup(request, state, asks_remote=self._fetch is not None)
        self._is_plan_ready(request, state)

    def _start_lookup(self, request: Any, state: _RequestState, *, asks_remote: bool) -> None:
        state.pending_lookup = self._lookup.start(request.prompt_token_ids, state.params, asks_remote=asks_remote)

    def _is_plan_ready(self, request: Any, state: _RequestState) -> bool:
        """Whether it is known what is to be done. Goes on with what has become known since the last call."""
        if state.pending_fetch is not None:
            if not state.pending_fetch.is_over:
                return False
            state.waited_s, state.pending_fetch = state.pending_fetch.waited_s, None
            self._start_lookup(request, state, asks_remote=False)
        if state.pending_lookup is not None:
            try:
                result = state.pending_lookup.result(PATIENCE_S if state.is_new else 0.0)
            except TimeoutError:
                state.is_new = False
                return False
            state.pending_lookup = None
            if result.missing and self._fetch is not None:
                state.pending_fetch = self._fetch.start(result.missing)
                return False
            self._plan_fill(request, state, result.stored)
        return True

    def _plan_fill(self, request: Any, state: _RequestState, stored: tuple[StoredSpan, ...]) -> None:
        """Decide up to where the request's context will be filled."""
        ids, spans = request.prompt_token_ids, state.params.spans
        state.stored = stored
        if state.params.mode == "ingest":
            state.end = spans[-1][1]
        else:
            state.num_missing = len(spans) - len(state.stored)
            if state.stored and state.stored[-1].end == len(ids):
                # vLLM must have a token to sample from: what ends the prompt is computed.
                state.stored = state.stored[:-1]
            state.end = state.stored[-1].end if state.stored else 0
        if state.stored and state.params.mode != "ingest":
            self._read_ahead.on_request_queued(request.request_id, state.stored)
        if state.end and not state.adapts_ratio:  # otherwise it may become an ordinary prefill
            _hide_from_prefix_cache(request, state)

    def _adapt_ratio(self, request: Any, state: _RequestState) -> None:
        """Settle the ratio by what loading costs, or leave the request to vLLM, where full prefill is faster."""
        assert state.choice is not None
        ids, num_prefix = request.prompt_token_ids, state.params.spans[0][0]
        asks_first = find_rule(state.choice.rule).probes_before_selection
        decision = self.loading.decide(state.choice.ratio, len(ids), num_prefix, state.stored, asks_first)
        state.adapts_ratio = False
        if decision.fallback_reason:
            state.report = _as_prefill(state.report, decision.fallback_reason)
            state.stored, state.end = (), 0
            self._read_ahead.on_request_done(request.request_id)
            self.counting.add(refused_requests=1)
            return
        state.report.recompute_ratio = decision.ratio
        if state.choice.fit is not None:
            state.report.predicted_agreement = state.choice.fit.agreement_at(decision.ratio)
        _hide_from_prefix_cache(request, state)

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The context's tokens, to be filled between steps; None: not known yet. After a preemption the same again."""
        state = self.requests.get(request.request_id)
        if state is None:
            return 0, False
        was_hidden = state.is_hidden
        if not self._is_plan_ready(request, state):
            return None, False
        if state.end and state.adapts_ratio:
            if not self.loading.is_current:
                return None, False  # the workers tell with this step what is in their memory
            self._adapt_ratio(request, state)
        if state.end and num_computed_tokens and not was_hidden:
            return None, False  # vLLM found those in the exact cache; hidden by now, the request finds none there
        count = state.end - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def on_blocks_allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        """The blocks are there: the workers can start."""
        state = self.requests.get(request.request_id)
        if state is None:
            return
        # Blocks that vLLM found in its cache are this request's own, from before a preemption: the salt is unique.
        # They are written again with the rest, so that the outcome does not depend on what was left of them.
        self._read_ahead.on_request_started(request.request_id)
        fit = state.choice.fit if state.choice is not None else None
        self._new_jobs.append(
            BlendJob(
                request.request_id,
                state.params,
                state.report.recompute_ratio,
                tuple(request.prompt_token_ids),
                state.end,
                state.stored,
                tuple(block_ids),
                self.fingerprint,
                fit.rule_and_layer if fit is not None else None,
            )
        )

    def wait_for_pending(self) -> None:
        """Nothing is computed in this step: where the workers have nothing to do either, wait a little for what is
        looked up or fetched, or empty steps would ask for it over and over."""
        if self._read_ahead.is_busy:
            return
        left: list[Future[Any]] = [
            state.pending_lookup for state in self.requests.values() if state.pending_lookup is not None
        ]
        left += [
            future
            for asked in self.requests.values()
            if asked.pending_fetch is not None
            for future in asked.pending_fetch.pending
        ]
        if left:
            wait(left, IDLE_PATIENCE_S, FIRST_COMPLETED)

    def take_jobs(self) -> tuple[list[BlendJob], list[str]]:
        """The jobs that came up in this step, and what to read for requests that it left waiting."""
        for state in self.requests.values():
            self._time_first_token(state)
        waiting = (
            bool(each.end or each.pending_fetch or each.pending_lookup) and not each.is_filled
            for each in self.requests.values()
        )
        self.counting.set_queue_length(sum(waiting))
        jobs, self._new_jobs = self._new_jobs, []
        return jobs, self._read_ahead.take(self.loading)

    def take_reports(self, reports: Mapping[str, BlendReport], memory: MemoryTierDelta | None) -> None:
        """What the workers did, by request, and what is in their memory since then."""
        if memory is not None:
            self.loading.apply_delta(memory)
        for request_id, report in reports.items():
            self._read_ahead.on_request_done(request_id)
            state = self.requests.get(request_id)
            if state is not None:  # what it waited for the remote tier is part of loading, and fusing waited too
                report.load_s, report.stall_s = report.load_s + state.waited_s, report.stall_s + state.waited_s
            self.counting.record_filled(report, observed=state is not None and state.params.mode != "ingest")
            if state is not None:
                report.predicted_agreement = state.report.predicted_agreement
                state.report, state.is_filled = report, True
                if report.refused_reason:
                    state.end = 0  # or what failed once would be tried for ever

    def on_request_finished(self, request_id: str) -> dict[str, Any] | None:
        """What goes out with its answer; None for a request that was not for us."""
        self.loading.on_request_finished(request_id)
        self._read_ahead.on_request_done(request_id)
        state = self.requests.pop(request_id, None)
        if state is None:
            return None
        self._time_first_token(state)
        report = state.report
        if report.refused_reason:
            pass
        elif state.params.mode == "ingest" and not report.num_chunk_hits:
            self.counting.add(ingested_chunks=state.is_filled)
        else:
            # What was found and could not be read is a miss, too; what nobody looked for, or waited for, is none.
            num_lost = len(state.stored) - report.num_chunk_hits if state.is_filled else 0
            self.counting.add(chunk_hits=report.num_chunk_hits, chunk_misses=state.num_missing + num_lost)
        return {PARAMS_KEY: report_to_json(report)}

    def _time_first_token(self, state: _RequestState) -> None:
        """Between two steps: at most one step later than the token."""
        if state.request is not None and state.request.num_output_tokens > 0:
            if state.params.mode != "ingest":
                self.counting.record_first_token(state.report.mode, state.request.arrival_time)
            state.request = None

    def take_tombstones(self) -> AppliedTombstones:
        """What other replicas have forgotten since the last call: the disk has, the workers are to."""
        return self.listener.take_applied() if self.listener is not None else AppliedTombstones()

    def close(self) -> None:
        """End the threads that fetch."""
        if self.listener is not None:
            self.listener.stop()
        if self._fetch is not None:
            self._fetch.close()
        self._lookup.close()

    def _note_model(self, name: str, shape: KVSpec) -> None:
        models = self.disk.models()
        if self.fingerprint not in models:
            if models:
                held = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
                log.warning("%s holds KV of %s, not of %s", self.config.store, held, name)
            try:
                self.disk.put_model(self.fingerprint, {"model": name, **shape.as_facts()})
            except RagblendError as error:  # a read-only store still serves
                log.warning("%s", error)


def _as_prefill(report: BlendReport, reason: str) -> BlendReport:
    """The report on a request that is left to vLLM."""
    return replace(
        report, mode="prefix", rule="none", recompute_ratio=0.0, predicted_agreement=None, refused_reason=reason
    )


def _hide_from_prefix_cache(request: Any, state: _RequestState) -> None:
    """Give a request a name of its own in vLLM's prefix cache: it finds nothing there, and nobody finds its blocks."""
    state.is_hidden = True
    _hide(request)


def _hide(request: Any) -> None:
    _salt(request, f"{request.cache_salt or ''}ragblend-{uuid.uuid4().hex}")


def _salt_with_namespace(request: Any, namespace: str) -> None:
    """Let a request share vLLM's prefix cache with its own namespace alone."""
    if namespace:
        _salt(request, cache_salt_of(namespace))


def _salt(request: Any, salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
