"""Scheduler's half of the connector: plans each request, queues its job for the workers, and completes its report.

A plan consists of the request's parameters, rule and ratio, the stored chunks in its prompt, the tokens that vLLM's own
prefix cache has, and the end of the context to fill. Nothing here waits for the disk or the network, because vLLM's
scheduler would wait, too. Threads look chunks up (`lookup`) and fetch them (`fetch`).
Depends on the attributes of vLLM's requests; does not import vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ragblend.engine.fusion.check_layers import schedule_check_layers
from ragblend.engine.fusion.rules import CHECK_LAYER, NO_PROBE_RULE, find_rule
from ragblend.engine.namespaces import salted_namespace, vllm_cache_salt
from ragblend.engine.report import BlendReport, ChunkReport, merge_runs_by_chunk
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVSpec
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tombstones import FIRST_POLL_TIMEOUT_S
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.tuning.calibration import CalibrationCache, RequestTuning
from ragblend.engine.tuning.loading_controller import LoadableChunk, ReuseDecision
from ragblend.engine.tuning.machine import read_machine_profile
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.jobs import BlendJob, BlendTurn, Refined, RefineJob
from ragblend.engine.vllm.metric_sources import LABEL, RequestMetrics, TierMetrics
from ragblend.engine.vllm.params import (
    PARAMS_KEY,
    TENANT_KEY,
    BlendParams,
    parse_params,
    report_to_json,
)
from ragblend.engine.vllm.scheduler_side.fetch import PendingFetch, RemoteFetcher
from ragblend.engine.vllm.scheduler_side.loading import LoadingController, MemoryTierDelta, machine_facts_of
from ragblend.engine.vllm.scheduler_side.lookup import PATIENCE_S, ChunkLookup, LookupResult
from ragblend.engine.vllm.scheduler_side.refinement import refine_job
from ragblend.engine.vllm.scheduler_side.turns import hide_blocks, separate_blended_blocks, split_by_turns, with_runs
from ragblend.engine.vllm.support import model_fingerprint, model_kv_spec, vllm_model_options
from ragblend.engine.vllm.worker_side.worker import IDLE_PATIENCE_S
from ragblend.errors import RagblendError, UsageError
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun, MatchedPrompt

log = logging.getLogger(__name__)

WEIGHTS_UPDATED = "the model's weights were updated, so KV is neither stored nor reused; restart vLLM to reuse KV again"
NO_REUSE_REASONS = {
    "embeddings": "the prompt consists of embeddings, but ragblend needs token ids; send text or token ids",
    "multimodal": "the prompt contains images or other media, which have no token ids, so nothing is reused",
    "lora": "the request selects an adapter, but stored KV is the base model's, so nothing is reused",
    "prompt_logprobs": "the request needs every prompt token computed (prompt logprobs), so nothing is reused",
}
"""Messages why no stored KV can be used for a request, by the reason that `left_requests` counts."""


@dataclass(slots=True)
class _RequestState:
    """State of one request in the scheduler's half."""

    params: BlendParams
    report: BlendReport
    end: int = 0  # the connector fills tokens [0, end); 0: none
    turns: tuple[BlendTurn, ...] = ()  # the turns of the prompt that have stored chunks
    pending_lookup: Future[LookupResult] | None = None  # the plan is made from its result
    pending_fetch: PendingFetch | None = None  # from the remote tier; a second lookup follows it
    later: Sequence[str] = ()  # keys to fetch afterwards, for later requests
    waited_s: float = 0.0  # for the fetch
    tuning: RequestTuning | None = None  # None before the lookup; with `adapts_ratio`, its ratio is still to be chosen
    no_probe: RequestTuning | None = None  # rule "auto": the tuning of the rule without a query probe
    is_new: bool = True  # the scheduler has not waited for its lookup yet
    is_ours: bool = True  # it has parameters, or its prompt has runs of chunks
    is_separated: bool = False  # vLLM's prefix cache shares its blocks only with prompts whose blocks have the same KV
    hidden: tuple[int, list[Any]] | None = None  # index and hashes of blocks that are computed again, see `hide_blocks`
    num_resident: int = 0  # tokens at the prompt's start that vLLM's prefix cache has
    runs: tuple[ChunkRun, ...] | None = None  # None before the prompt is matched
    num_missing: int = 0  # runs without a stored entry
    is_filled: bool = False  # the workers have reported the job
    is_refinable: bool = False  # the workers have filled its last turn, and no refinement has followed
    request: Any = field(default=None, repr=False)  # vLLM's
    is_timed: bool = False  # its first token is recorded

    @property
    def adapts_ratio(self) -> bool:
        """True if the loading controller still has to choose the ratio, or full prefill."""
        return self.tuning is not None and self.tuning.adapts_ratio

    @property
    def stored(self) -> tuple[ChunkRun, ...]:
        """Return the stored runs of all turns."""
        return tuple(run for turn in self.turns for run in turn.stored)

    @property
    def refine_ratio(self) -> float:
        """Share of the chunk tokens to recompute after the first token; 0 if it is not above the first token's."""
        ratio = self.params.refine_ratio or 0.0
        return ratio if self.params.mode == "blend" and ratio > self.report.recompute_ratio else 0.0


class BlendScheduler:
    """The connector's part in vLLM's scheduler process. It plans the blends of requests, which the workers run."""

    def __init__(self, vllm_config: Any, config: ConnectorConfig) -> None:
        self.config = config
        self.metrics = RequestMetrics()
        self.requests: dict[str, _RequestState] = {}
        self._unfinished: set[str] = set()  # all requests of vLLM, also those that are left to it
        self._new_jobs: list[BlendJob] = []
        self._new_resident: dict[str, BlendReport] = {}
        # A fetched entry is also in the remote tier, so no write needs to wait until the disk has it (fsync).
        self.store = config.open_tiers(fsync=False)
        disk = self.store.find_tier(DiskStore)
        assert disk is not None
        self.disk = disk
        self.tier_metrics = TierMetrics(self.store, shows_bytes=False)
        # Before the first request, because this replica may have been down at a deletion.
        self.store.watch_deletions(FIRST_POLL_TIMEOUT_S)
        self._fetch = RemoteFetcher(self.store, config.remote_timeout_s) if self.store.find_tiers(RemoteStore) else None
        model = vllm_config.model_config
        self.fingerprint, shape = model_fingerprint(model), model_kv_spec(model)
        self.store.set_expected_spec(self.fingerprint, shape)
        root, key, num_layers = self.disk.root, self.disk.store_key, len(shape.layers)
        self._num_layers = num_layers
        self._calibrations = CalibrationCache(root, self.fingerprint, num_layers, key)
        self._check_rule(BlendParams(**config.selection.selection))
        hardware = machine_facts_of(vllm_config)
        machine = read_machine_profile(root, self.fingerprint, hardware, store_key=key)
        self.loading = LoadingController(machine, self.store)
        self._filling: set[str] = set()  # requests whose context the workers fill
        self._lookup = ChunkLookup(self.disk, config, self.fingerprint, self._load_renderer(model))
        self._cache_config = vllm_config.cache_config
        self.kv_cache_manager: Any = None  # vLLM's, once vLLM has passed it
        self._reuses = True
        self._record_model(str(model.model), shape)

    def stop_reuse(self) -> None:
        """Leave every later request to vLLM, because the workers' weights have changed."""
        if self._reuses:
            log.warning("%s", WEIGHTS_UPDATED)
        self._reuses = False

    def _load_renderer(self, model: Any) -> Renderer | None:
        """Return the renderer of the model's tokenizer; None if the tokenizer cannot be loaded."""
        try:
            place = str(model.tokenizer or model.model)
            return Renderer(load_tokenizer(place, vllm_model_options(model, place))[0])
        except (RagblendError, OSError, ValueError) as error:
            log.warning("prompts are not searched for chunks, because the tokenizer cannot be loaded: %s", error)
            return None

    def on_new_request(self, request: Any) -> None:
        """Parse a request's parameters, salt its blocks in vLLM's prefix cache, and start the lookup of its chunks."""
        self._unfinished.add(request.request_id)
        try:
            params = self._params(request, self._bound_namespace(request))
            if params is None:
                return
            state = self._make_state(request, params)
        except RagblendError as error:
            # A request with invalid parameters is answered, too.
            log.warning("request %s is served by ordinary prefill: %s", request.request_id, error)
            state = _RequestState(
                BlendParams("prefix"),
                BlendReport("prefix", refused_reason=self.config.message_for_clients(error), failed=True),
            )
        self.requests[request.request_id] = state
        state.request = request
        self.metrics.add(requests=state.is_ours, refused_requests=bool(state.report.refused_reason))
        if state.params.mode == "full":
            hide_blocks(request, 0)
        elif not state.report.refused_reason and state.params.mode != "prefix":
            self._start_lookup(request, state, asks_remote=self._fetch is not None)
            self._is_plan_ready(request, state)

    def _bound_namespace(self, request: Any) -> str | None:
        """Return the namespace of the request's API key; None on a server without keys.

        With keys, requests of any mode share blocks in vLLM's own prefix cache only within that namespace.
        """
        if not self.config.keys:
            return None
        tenant = (request.kv_transfer_params or {}).get(TENANT_KEY)
        if not isinstance(tenant, str):  # the request did not pass the front end's gate
            hide_blocks(request, 0)
            raise UsageError("the server requires API keys, but the request has none; send Authorization: Bearer KEY")
        namespace = salted_namespace(tenant, request.cache_salt)
        if namespace:
            _salt(request, vllm_cache_salt(namespace))
        return namespace

    def _params(self, request: Any, bound: str | None) -> BlendParams | None:
        """Return the request's parameters, or the server's defaults; None if the request is left to vLLM."""
        transfer_params = request.kv_transfer_params
        if isinstance(transfer_params, dict) and PARAMS_KEY in transfer_params:
            params = parse_params(transfer_params[PARAMS_KEY])
            if "mode" not in transfer_params[PARAMS_KEY]:
                params = replace(params, mode=self.config.mode)
        elif reason := self._reason_to_leave(request):
            self._count_left(reason)
            return None
        else:
            params = BlendParams(self.config.mode)
        if bound is None:
            bound = salted_namespace(params.namespace, request.cache_salt)
            if params.namespace:
                _salt(request, vllm_cache_salt(bound))
        return replace(params, namespace=bound)

    def _reason_to_leave(self, request: Any) -> str:
        """Return the reason why the prompt of a request without parameters is not matched; "" if it is matched."""
        if self.config.mode not in ("blend", "reuse"):
            return "mode"
        return "weights_updated" if not self._reuses else _no_reuse_reason(request)

    def _count_left(self, reason: str) -> None:
        self.metrics.add(**{f"left_requests{LABEL}{reason}": 1})

    def _make_state(self, request: Any, params: BlendParams) -> _RequestState:
        state = _RequestState(params, BlendReport(params.reported_mode))
        state.is_ours = PARAMS_KEY in (request.kv_transfer_params or {})
        if params.mode in ("full", "prefix"):
            self._resolve_rule(request, state)
            return state
        self._check_rule(params)
        if reason := _no_reuse_reason(request):
            self._count_left(reason)
            raise UsageError(NO_REUSE_REASONS[reason])
        params.check_tokens_after_span(len(request.prompt_token_ids))
        if not self._reuses:
            state.report = _as_prefill(state.report, WEIGHTS_UPDATED)
        return state

    def _check_rule(self, params: BlendParams) -> None:
        """Raise UsageError for an unknown rule, and for selection options that the rule or the model cannot follow."""
        rule = find_rule(self._rule_name(params))
        if params.selection:
            schedule_check_layers(rule, 0.0, min(CHECK_LAYER, self._num_layers - 1), self._num_layers, params)

    def _rule_name(self, params: BlendParams) -> str:
        return self.config.rule if params.rule == "auto" else params.rule

    def _resolve_rule(self, request: Any, state: _RequestState) -> None:
        """Resolve rule and ratio, and start the report, once the request's runs are known."""
        ids, params, runs = request.prompt_token_ids, state.params, state.runs or ()
        if params.rule == "auto" and params.ratio is None and not params.selection:
            state.params = params = replace(params, **self.config.selection.selection)
        rule, ratio = self._rule_name(params), self.config.ratio if params.ratio is None else params.ratio
        ratio = ratio if params.least_ratio is None else params.least_ratio
        prefix_ids, default = tuple(ids[: runs[0].start]) if runs else (), tuple(self._lookup.prefix_ids)
        if prefix_ids[: len(default)] == default:
            prefix_ids = default  # labels or turns may follow it before the first chunk
        tuning = self._calibrations.resolve_tuning(prefix_ids, rule, ratio)
        refine_ratio = self.config.refine_ratio if params.refine_ratio is None else params.refine_ratio
        state.params = params = replace(params, refine_ratio=refine_ratio)
        blends = params.mode == "blend"
        used = tuning.recompute_ratio if blends else float(params.mode == "full")
        report = BlendReport(params.reported_mode, tuning.rule if blends else "none", used)
        if tuning.fit is not None and params.mode in ("blend", "reuse"):
            tuning.fit.predict(report, used)
        report.num_chunks = len(runs)
        report.chunks = [ChunkReport(run.source, run.num_tokens, hit=False) for run in runs]
        if runs or params.mode == "full":
            report.charged_budget = report.charged_budget_32 = 1.0
        adapts_ratio = blends and tuning.adapts_ratio and self.loading.machine is not None
        state.report, state.tuning = report, tuning._replace(adapts_ratio=adapts_ratio)
        if adapts_ratio and rule == "auto":
            state.no_probe = self._calibrations.resolve_tuning(prefix_ids, NO_PROBE_RULE, None)

    def _start_lookup(self, request: Any, state: _RequestState, *, asks_remote: bool) -> None:
        ids, params = request.prompt_token_ids, state.params
        state.pending_lookup = self._lookup.start(ids, params, state.runs, asks_remote=asks_remote)

    def _is_plan_ready(self, request: Any, state: _RequestState) -> bool:
        """Continue with the results of lookup and fetch. Return True once both are complete."""
        if state.pending_fetch is not None:
            if not state.pending_fetch.is_over:
                return False
            state.waited_s, state.pending_fetch = state.pending_fetch.waited_s, None
            if state.later and self._fetch is not None:
                self._fetch.start(state.later)
            self._start_lookup(request, state, asks_remote=False)
        if state.pending_lookup is not None:
            try:
                result = state.pending_lookup.result(PATIENCE_S if state.is_new else 0.0)
            except TimeoutError:
                state.is_new = False
                return False
            state.pending_lookup = None
            if state.runs is None:
                self._take_runs(request, state, result)
            if result.missing and self._fetch is not None:
                return self._start_fetch(request, state, result, self._fetch)
            if result.runs:
                self._plan_fill(request, state, result)
        return True

    def _start_fetch(self, request: Any, state: _RequestState, lookup: LookupResult, fetch: RemoteFetcher) -> bool:
        """Fetch the variants that may be in the remote tier, and wait for those that are worth it.

        Return True if the request is left to vLLM, because full prefill is faster.
        """
        used: Sequence[int] = range(len(lookup.runs))
        if state.adapts_ratio:
            chunks = self.loading.fetchable_chunks(lookup.runs, lookup.missing)
            decision = self._decide(request, lookup.runs, state, chunks)
            used = decision.used
            if len(used) < len(chunks):
                state.report.decision = decision.describe(len(chunks))
            if decision.fallback_reason:
                self._refuse(state, decision.fallback_reason)
        state.later = [key for at, each in enumerate(lookup.missing) if at not in used for key in each.keys]
        if state.report.refused_reason:
            fetch.start(state.later)
            return True
        state.pending_fetch = fetch.start([key for at in used for key in lookup.missing[at].keys])
        return False

    def _decide(
        self, request: Any, runs: Sequence[ChunkRun], state: _RequestState, chunks: Sequence[LoadableChunk]
    ) -> ReuseDecision:
        """Return the loading controller's decision on a request."""
        tunings = [each for each in (state.tuning, state.no_probe) if each is not None]
        return self.loading.decide(tunings, len(request.prompt_token_ids), runs[0].start, chunks)

    def _refuse(self, state: _RequestState, reason: str) -> None:
        """Leave a request to vLLM, because full prefill is faster."""
        state.report = _as_prefill(state.report, reason)
        state.turns, state.end = (), 0
        self.metrics.add(refused_requests=1)

    def _take_runs(self, request: Any, state: _RequestState, result: LookupResult) -> None:
        """Record the runs in a request's prompt. Without runs or parameters, the request is left to vLLM."""
        state.runs = result.runs
        if state.params.mode != "ingest":
            self.metrics.observe("request_match_seconds", result.match_s)
            if not result.runs:
                self._count_left("no_chunks")
                if not state.is_ours:
                    del self.requests[request.request_id]
                    return
            elif not state.is_ours:
                state.is_ours = True
                self.metrics.add(requests=1)
        self._resolve_rule(request, state)
        state.report.match_s = result.match_s

    def _plan_fill(self, request: Any, state: _RequestState, result: LookupResult) -> None:
        """Set the end of the context that the connector fills, from the stored chunks."""
        state.runs = runs = result.runs
        if state.params.mode == "ingest":
            state.turns = (BlendTurn(0, len(request.prompt_token_ids), runs),)
            state.end = runs[-1].end
            state.is_separated = True
            hide_blocks(request, 0)
            return
        state.num_missing = sum(run.variant is None for run in runs)
        num_stored = sum(run.num_tokens for run in runs if run.variant is not None)
        if state.params.mode == "blend" and (reason := state.params.refusal(num_stored)):
            self._refuse(state, reason)
            return
        state.turns = split_by_turns(runs, result.turn_ends)
        state.end = state.turns[-1].fused_end if state.turns else 0
        if state.end and not state.adapts_ratio:  # else the loading controller may still choose full prefill
            self._separate(request, state)

    def _separate(self, request: Any, state: _RequestState) -> None:
        """Have vLLM's prefix cache share the request's blended blocks only with prompts that blend them equally."""
        tuning, params = state.tuning, state.params
        assert tuning is not None
        # Each parameter that changes the KV of a blend must be here, else two requests share blocks that differ.
        rule = (tuning.rule, tuning.is_auto_rule, tuning.check_layer, *sorted(params.selection.items()))
        settings = (params.mode, rule, state.report.recompute_ratio, state.refine_ratio, params.seed)
        separate_blended_blocks(request, state.turns, settings, self._cache_config.block_size)
        state.is_separated = True

    def _num_cached(self, request: Any) -> int:
        """Return the number of leading tokens that vLLM's prefix cache has under the request's hashes."""
        return 0 if self.kv_cache_manager is None else int(self.kv_cache_manager.get_computed_blocks(request)[1])

    def _record_resident(self, state: _RequestState, num_cached: int) -> None:
        """Complete the report of a request whose context vLLM's prefix cache has: the first `num_cached` tokens."""
        report, runs = state.report, state.runs or ()
        report.chunks = [
            replace(chunk, hit=True, prefix_match="exact", exact=report.recompute_ratio >= 1)
            if run.start < num_cached
            else chunk
            for chunk, run in zip(report.chunks, runs, strict=True)
        ]
        report.num_prefix_tokens = report.num_reused_tokens = num_cached
        report.num_chunk_hits = sum(chunk.hit for chunk in report.chunks)
        total = sum(chunk.num_tokens for chunk in report.chunks)
        cached = sum(max(0, min(run.end, num_cached) - run.start) for run in runs)
        report.charged_budget = report.charged_budget_32 = 1 - cached / total
        state.is_filled = True
        self.metrics.add(reused_tokens=num_cached)

    def _adapt(self, request: Any, state: _RequestState) -> None:
        """Set rule, ratio and chunks that the loading controller chooses, or leave the request to vLLM."""
        tuning = state.tuning
        assert tuning is not None
        assert state.runs
        stored = state.stored
        decision = self._decide(request, state.runs, state, self.loading.stored_chunks(stored))
        self.loading.prefetch_unused(stored, decision)
        if decision.fallback_reason:
            self._refuse(state, decision.fallback_reason)
            return
        state.report.decision = state.report.decision or decision.describe(len(stored))
        if state.no_probe is not None and decision.rule == state.no_probe.rule:
            tuning = state.no_probe
        state.tuning = tuning = tuning._replace(recompute_ratio=decision.ratio, adapts_ratio=False)
        state.report.rule, state.report.recompute_ratio = decision.rule, decision.ratio
        if tuning.fit is not None:
            tuning.fit.predict(state.report, decision.ratio)
        unused = {stored[at].start for at in range(len(stored)) if at not in decision.used}
        # vLLM computes them as it computes chunks that are not stored.
        state.runs = tuple(replace(run, variant=None) if run.start in unused else run for run in state.runs)
        state.turns = with_runs(state.turns, state.runs)
        state.end = state.turns[-1].fused_end
        self._separate(request, state)

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens after `num_computed_tokens` that the workers will fill with KV.

        The second value is True if the number is above 0, because workers fill the tokens between engine steps. The
        number is None while it is unknown. A preempted request gets the same number again.
        """
        state = self.requests.get(request.request_id)
        if state is None:
            return 0, False
        was_separated = state.is_separated
        if not self._is_plan_ready(request, state):
            return None, False
        if state.end and state.adapts_ratio:
            self._adapt(request, state)
        if state.is_separated != was_separated and (num_computed_tokens or self._num_cached(request)):
            return None, False  # vLLM found blocks by the previous hashes, and looks again at the next step
        if not state.end:
            return 0, False
        is_ingestion = state.params.mode == "ingest"
        if num_computed_tokens >= state.end and not is_ingestion:
            if not state.is_filled:
                self._record_resident(state, num_computed_tokens)
                self._new_resident[request.request_id] = state.report
            return 0, False
        # A turn of which vLLM has only a part is fused again, because its selection is one of the whole turn.
        start = 0
        if not is_ingestion:
            start = next(turn.fused_start for turn in state.turns if turn.fused_end > num_computed_tokens)
        if num_computed_tokens > start:
            _unhide_blocks(request, state)
            index = start // self._cache_config.block_size
            state.hidden = index, request.block_hashes[index:]
            hide_blocks(request, index)
            return None, False
        state.num_resident = num_computed_tokens
        return state.end - num_computed_tokens, True

    def on_blocks_allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        """Queue the request's job, because vLLM has allocated its blocks."""
        state = self.requests.get(request.request_id)
        if state is None:
            return
        _unhide_blocks(request, state)  # once they are computed again, they are found again
        self._filling.add(request.request_id)
        assert state.tuning is not None
        self._new_jobs.append(
            BlendJob(
                request.request_id,
                state.params,
                state.tuning,
                tuple(request.prompt_token_ids),
                state.runs or (),
                state.end,
                tuple(turn for turn in state.turns if not turn.stored or turn.fused_end > state.num_resident),
                tuple(block_ids),
                self.fingerprint,
                state.num_resident,
            )
        )

    def wait_for_pending(self) -> None:
        """Wait at most `IDLE_PATIENCE_S` for a pending lookup or fetch.

        Called in steps that schedule no tokens, so that the scheduler does not poll in a busy loop. Returns at once
        while the workers are busy.
        """
        if self._filling:
            return
        pending: list[Future[Any]] = []
        for state in self.requests.values():
            if state.pending_lookup is not None:
                pending.append(state.pending_lookup)
            if state.pending_fetch is not None:
                pending += state.pending_fetch.pending
        if pending:
            wait(pending, IDLE_PATIENCE_S, FIRST_COMPLETED)

    def take_jobs(self) -> list[BlendJob]:
        """Return the new jobs of this step."""
        for state in self.requests.values():
            self._time_first_token(state)
        waiting = (
            bool(each.end or each.pending_fetch or each.pending_lookup) and not each.is_filled
            for each in self.requests.values()
        )
        self.metrics.set_queue_length(sum(waiting))
        jobs, self._new_jobs = self._new_jobs, []
        return jobs

    def take_resident(self) -> dict[str, BlendReport]:
        """Return the reports, by request id, of this step's new requests whose context vLLM's prefix cache has."""
        reports, self._new_resident = self._new_resident, {}
        return reports

    def take_reports(self, reports: Mapping[str, BlendReport], memory: MemoryTierDelta | None) -> None:
        """Record the workers' reports, by request id, and the changes of their memory tier."""
        if memory is not None:
            self.loading.apply_delta(memory)
        for request_id, report in reports.items():
            self._filling.discard(request_id)
            state = self.requests.get(request_id)
            if state is not None:  # waiting for the remote tier is both a load time and a stall
                report.load_s, report.stall_s = report.load_s + state.waited_s, report.stall_s + state.waited_s
            self.metrics.record_filled_request(report, observed=state is not None and state.params.mode != "ingest")
            if state is not None:
                before = state.report
                if report.rule == before.rule:  # the workers may take a rule without a probe, which was not measured
                    report.predicted_agreement, report.predicted_kl = before.predicted_agreement, before.predicted_kl
                report.match_s, report.decision = before.match_s, before.decision
                state.report, state.is_filled = report, True
                self._note_result(state)
                state.is_refinable = bool(state.turns and state.refine_ratio)

    def next_refinement(self, scheduled: Mapping[str, int]) -> RefineJob | None:
        """Return the refinement to run before this step; None if there is none.

        Only a request that is alone in vLLM is refined, so that no other request waits. `scheduled`: tokens of each
        request in this step. A step of more than one token, by drafts, may use a plan of MLA that a refinement changes.
        """
        if len(self._unfinished) != 1 or self.kv_cache_manager is None:  # vLLM 0.28 and 0.29 do not pass it
            return None
        state = self.requests.get(next(iter(self._unfinished)))
        if state is None or not state.is_refinable or scheduled.get(state.request.request_id) != 1:
            return None
        blocks = self.kv_cache_manager.get_blocks(state.request.request_id).blocks[0]
        first = state.turns[-1].fused_start // self._cache_config.block_size
        job = refine_job(state.request, state.refine_ratio, blocks, first)
        state.is_refinable = job is None
        return job

    def take_refined(self, refined: Mapping[str, Refined]) -> None:
        """Record the workers' refinements, by request id."""
        for request_id, each in refined.items():
            self.metrics.add(refined_tokens=each.num_tokens)
            if (state := self.requests.get(request_id)) is not None:
                each.write_to(state.report)

    def _note_result(self, state: _RequestState) -> None:
        """Write the number of reused tokens into vLLM's request, and hide its blocks if they differ from the plan."""
        request, report, starts = state.request, state.report, {run.start for run in state.stored}
        stats = request.prefill_stats  # None after the first token
        if stats is not None:
            num_local = stats.num_local_cached_tokens
            stats.set(stats.num_prompt_tokens, num_local, max(0, report.num_reused_tokens - num_local))
        is_read = all(
            chunk.hit for run, chunk in zip(state.runs or (), report.chunks, strict=False) if run.start in starts
        )
        if report.refused_reason or not is_read:
            hide_blocks(request, state.num_resident // self._cache_config.block_size)
        if report.refused_reason:
            state.turns, state.end = (), 0  # so that a failed blend is not repeated forever

    def on_request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Remove a request. Return the `kv_transfer_params` of its response; None for a request left to vLLM."""
        self._filling.discard(request_id)
        self._unfinished.discard(request_id)
        state = self.requests.pop(request_id, None)
        if state is None or not state.is_ours:
            return None
        self._time_first_token(state)
        report = state.report
        if report.refused_reason:
            pass
        elif state.params.mode == "ingest" and not report.num_chunk_hits:
            self.metrics.add(ingested_chunks=state.is_filled)
        else:
            # A stored chunk that could not be read is a miss, too, but not one whose job was dropped.
            num_unread = len(state.stored) - report.num_chunk_hits if state.is_filled else 0
            self.metrics.add(chunk_hits=report.num_chunk_hits, chunk_misses=state.num_missing + num_unread)
        if state.runs and len(report.chunks) == len(state.runs):
            merge_runs_by_chunk(report, MatchedPrompt([], state.runs))
        return {PARAMS_KEY: report_to_json(report)}

    def _time_first_token(self, state: _RequestState) -> None:
        """Record the request's first token, at most one engine step late."""
        if not state.is_timed and state.request.num_output_tokens > 0:
            if state.params.mode != "ingest" and state.is_ours:
                self.metrics.record_first_token(state.report.mode, state.request.arrival_time)
            state.is_timed = True

    def close(self) -> None:
        """End the threads for deletions, fetches and lookups."""
        if self._fetch is not None:
            self._fetch.close()
        self._lookup.close()

    def _record_model(self, name: str, shape: KVSpec) -> None:
        models = self.disk.models()
        if self.fingerprint not in models:
            if models:
                names = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
                log.warning("%s contains KV of %s, but not of %s", self.config.store, names, name)
            try:
                self.disk.put_model(self.fingerprint, {"model": name, **shape.as_facts()})
            except RagblendError as error:  # a read-only store still serves
                log.warning("%s", error)


def _no_reuse_reason(request: Any) -> str:
    """Return why a request can use no stored KV, as a key of NO_REUSE_REASONS; "" if it can use stored KV."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    if getattr(request, "mm_features", None):
        return "multimodal"
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    return "prompt_logprobs" if request.skip_reading_prefix_cache else ""


def _as_prefill(report: BlendReport, reason: str = "") -> BlendReport:
    """Return `report` changed to that of a request that is left to vLLM; `reason` if it could not be blended."""
    return replace(
        report,
        mode="prefix",
        rule="none",
        recompute_ratio=0.0,
        predicted_agreement=None,
        predicted_kl=None,
        refused_reason=reason,
    )


def _unhide_blocks(request: Any, state: _RequestState) -> None:
    """Give blocks that were hidden from vLLM's prefix cache their hashes back."""
    if state.hidden is not None:
        index, hashes = state.hidden
        request.block_hashes[index:], state.hidden = hashes, None


def _salt(request: Any, salt: str | None) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
