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
from ragblend.engine.store.forgotten import Heeded, Listener
from ragblend.engine.store.kv import ModelShape
from ragblend.engine.store.tiered import disk_tier
from ragblend.engine.tuning.calibration import Calibrations, Chosen
from ragblend.engine.tuning.machine import read_machine_profile
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.counting import RequestCounts, TierWatch
from ragblend.engine.vllm.fetch import Arrival, RemoteFetch
from ragblend.engine.vllm.loading import Loading, MemoryChange, ReadAhead, machine_facts_of
from ragblend.engine.vllm.lookup import PATIENCE_S, ChunkLookup, Found
from ragblend.engine.vllm.params import (
    PARAMS_KEY,
    TENANT_KEY,
    BlendParams,
    belongs_to,
    cache_salt_of,
    parse_params,
    salted_namespace,
    spans_between,
    told,
)
from ragblend.engine.vllm.support import model_fingerprint, model_shape
from ragblend.engine.vllm.worker import IDLE_PATIENCE_S, Job, StoredSpan
from ragblend.errors import RagblendError, UsageError

log = logging.getLogger(__name__)

WEIGHTS_UPDATED = "the model's weights were updated; KV is neither stored nor reused until vLLM is started again"


@dataclass(slots=True)
class _Asked:
    """One request as the scheduler's half sees it."""

    params: BlendParams
    report: BlendReport
    end: int = 0  # tokens [0, end) are filled by the connector; 0: nothing is
    stored: tuple[StoredSpan, ...] = ()
    looking: Future[Found] | None = None  # what to do is settled after it
    coming: Arrival | None = None  # chunks that the remote tier may send; they are looked for after it
    waited_s: float = 0.0  # for those
    choice: Chosen | None = None  # what a calibration says; None where nothing is fused
    adapts: bool = False  # whether to reuse, and the ratio, are to be settled by what loading costs
    is_new: bool = True  # nobody has waited for its lookup yet
    is_hidden: bool = False  # from vLLM's prefix cache
    num_missing: int = 0  # chunks that were looked for and not found
    is_filled: bool = False  # the workers have told what became of it
    request: Any = None  # vLLM's, until its first token is there


class BlendScheduler:
    """Made once in the scheduler's process. `counting` is taken by whoever reports it."""

    def __init__(self, vllm_config: Any, config: ConnectorConfig) -> None:
        self.config = config
        self.counting = RequestCounts()
        self.asked: dict[str, _Asked] = {}
        self._new_jobs: list[Job] = []
        # What the remote tier has sent is there a second time, so nothing here waits for the disk.
        local = config.open_local(fsync=False)
        self.tiers = TierWatch(local, shows_bytes=False)
        disk = disk_tier(local)
        assert disk is not None
        self.disk = disk
        self.remote = config.open_remote()
        self._fetch: RemoteFetch | None = None
        self.listener: Listener | None = None
        if self.remote is not None:
            self.listener = Listener(self.disk, self.remote, belongs_to)
            self.listener.start()  # before the first request: this replica may have been down when others forgot
            self._fetch = RemoteFetch(self.remote, self.disk, config.remote_timeout_s, self.listener)
        model = vllm_config.model_config
        self.fingerprint, shape = model_fingerprint(model), model_shape(model)
        for tier in (self.disk, self.remote):
            if tier is not None:
                tier.expect(self.fingerprint, shape)
        root, key, num_layers = self.disk.root, self.disk.store_key, len(shape.layers)
        self._calibrations = Calibrations(root, self.fingerprint, num_layers, key)
        hardware = machine_facts_of(vllm_config)
        machine = read_machine_profile(root, self.fingerprint, hardware, store_key=key)
        self.loading = Loading(machine)
        self._read_ahead = ReadAhead(config.memory_bytes)
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
        self.loading.request_came(request.request_id)
        try:
            params = self._params(request, self._bound_namespace(request))
            if params is None:
                return
            asked = self._settle_wishes(request, params)
        except RagblendError as error:
            # Whatever a client sends, it gets an answer: by ordinary prefill.
            log.warning("request %s is served by ordinary prefill: %s", request.request_id, error)
            asked = _Asked(
                BlendParams("prefix"), BlendReport("prefix", refused_reason=self.config.for_clients(error), failed=True)
            )
        self.asked[request.request_id] = asked
        asked.request = request
        self.counting.add(requests=1, refused_requests=bool(asked.report.refused_reason))
        if asked.params.mode == "full":
            _hide_from_prefix_cache(request, asked)
        elif not asked.report.refused_reason:
            self._start(request, asked)

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
        _keep_apart(request, namespace)
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
            # An end marker tells that separators open the chunks and belong to them.
            lead = len(self.config.separator_ids) if self.config.separator_end_ids else 0
            params = BlendParams(spans=spans, namespace=self.config.namespace, template=((lead, 0),) * len(spans))
        else:
            return None
        if bound is None:
            bound = salted_namespace(params.namespace, request.cache_salt)
            if params.namespace:
                _keep_apart(request, bound)
        return replace(params, namespace=bound)

    def _settle_wishes(self, request: Any, params: BlendParams) -> _Asked:
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
        if not self._reuses:
            asked.report = _as_prefill(report, WEIGHTS_UPDATED)
            return asked
        asked.choice, asked.adapts = choice, blends and choice.is_auto_ratio and self.loading.machine is not None
        if request.skip_reading_prefix_cache:
            raise UsageError("the request wants every prompt token computed (prompt logprobs), so nothing is reused")
        return asked

    def _start(self, request: Any, asked: _Asked) -> None:
        """Settle what is to be done: at once, or when a slow disk has told what is there, or a remote has sent it."""
        if asked.params.mode == "prefix" or not asked.params.spans:
            return
        self._look(request, asked, asks_remote=self._fetch is not None)
        self._is_settled(request, asked)

    def _look(self, request: Any, asked: _Asked, *, asks_remote: bool) -> None:
        asked.looking = self._lookup.start(request.prompt_token_ids, asked.params, asks_remote=asks_remote)

    def _is_settled(self, request: Any, asked: _Asked) -> bool:
        """Whether it is known what is to be done. Goes on with what has become known since the last call."""
        if asked.coming is not None:
            if not asked.coming.is_over:
                return False
            asked.waited_s, asked.coming = asked.coming.waited_s, None
            self._look(request, asked, asks_remote=False)
        if asked.looking is not None:
            try:
                found = asked.looking.result(PATIENCE_S if asked.is_new else 0.0)
            except TimeoutError:
                asked.is_new = False
                return False
            asked.looking = None
            if found.missing and self._fetch is not None:
                asked.coming = self._fetch.start(found.missing)
                return False
            self._settle(request, asked, found.stored)
        return True

    def _settle(self, request: Any, asked: _Asked, stored: tuple[StoredSpan, ...]) -> None:
        """Decide up to where the request's context will be filled."""
        ids, spans = request.prompt_token_ids, asked.params.spans
        asked.stored = stored
        if asked.params.mode == "ingest":
            asked.end = spans[-1][1]
        else:
            asked.num_missing = len(spans) - len(asked.stored)
            if asked.stored and asked.stored[-1].end == len(ids):
                # vLLM must have a token to sample from: what ends the prompt is computed.
                asked.stored = asked.stored[:-1]
            asked.end = asked.stored[-1].end if asked.stored else 0
        if asked.stored and asked.params.mode != "ingest":
            self._read_ahead.waits(request.request_id, asked.stored)
        if asked.end and not asked.adapts:  # otherwise it may become an ordinary prefill
            _hide_from_prefix_cache(request, asked)

    def _adapt(self, request: Any, asked: _Asked) -> None:
        """Settle the ratio by what loading costs, or leave the request to vLLM, where full prefill is faster."""
        assert asked.choice is not None
        ids, num_prefix = request.prompt_token_ids, asked.params.spans[0][0]
        asks_first = find_rule(asked.choice.rule).asks_first
        decision = self.loading.decide(asked.choice.ratio, len(ids), num_prefix, asked.stored, asks_first)
        asked.adapts = False
        if decision.refused:
            asked.report = _as_prefill(asked.report, decision.refused)
            asked.stored, asked.end = (), 0
            self._read_ahead.ends(request.request_id)
            self.counting.add(refused_requests=1)
            return
        asked.report.recompute_ratio = decision.ratio
        if asked.choice.fit is not None:
            asked.report.predicted_agreement = asked.choice.fit.agreement_at(decision.ratio)
        _hide_from_prefix_cache(request, asked)

    def num_filled(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The context's tokens, to be filled between steps; None: not known yet. After a preemption the same again."""
        asked = self.asked.get(request.request_id)
        if asked is None:
            return 0, False
        was_hidden = asked.is_hidden
        if not self._is_settled(request, asked):
            return None, False
        if asked.end and asked.adapts:
            if not self.loading.is_current:
                return None, False  # the workers tell with this step what is in their memory
            self._adapt(request, asked)
        if asked.end and num_computed_tokens and not was_hidden:
            return None, False  # vLLM found those in the exact cache; hidden by now, the request finds none there
        count = asked.end - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def blocks_are_there(self, request: Any, block_ids: Sequence[int]) -> None:
        """The blocks are there: the workers can start."""
        asked = self.asked.get(request.request_id)
        if asked is None:
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
                tuple(block_ids),
                self.fingerprint,
                fit.reads if fit is not None else None,
            )
        )

    def rest(self) -> None:
        """Nothing is computed in this step: where the workers have nothing to do either, wait a little for what is
        looked up or fetched, or empty steps would ask for it over and over."""
        if self._read_ahead.is_busy:
            return
        left: list[Future[Any]] = [asked.looking for asked in self.asked.values() if asked.looking is not None]
        left += [future for asked in self.asked.values() if asked.coming is not None for future in asked.coming.left]
        if left:
            wait(left, IDLE_PATIENCE_S, FIRST_COMPLETED)

    def take_jobs(self) -> tuple[list[Job], list[str]]:
        """The jobs that came up in this step, and what to read for requests that it left waiting."""
        for asked in self.asked.values():
            self._time_first_token(asked)
        waiting = (bool(each.end or each.coming or each.looking) and not each.is_filled for each in self.asked.values())
        self.counting.queue(sum(waiting))
        jobs, self._new_jobs = self._new_jobs, []
        return jobs, self._read_ahead.take(self.loading)

    def take_reports(self, reports: Mapping[str, BlendReport], memory: MemoryChange | None) -> None:
        """What the workers did, by request, and what is in their memory since then."""
        if memory is not None:
            self.loading.note(memory)
        for request_id, report in reports.items():
            self._read_ahead.ends(request_id)
            asked = self.asked.get(request_id)
            if asked is not None:  # what it waited for the remote tier is part of loading, and fusing waited too
                report.load_s, report.stall_s = report.load_s + asked.waited_s, report.stall_s + asked.waited_s
            self.counting.filled(report, observed=asked is not None and asked.params.mode != "ingest")
            if asked is not None:
                report.predicted_agreement = asked.report.predicted_agreement
                asked.report, asked.is_filled = report, True
                if report.refused_reason:
                    asked.end = 0  # or what failed once would be tried for ever

    def request_ended(self, request_id: str) -> dict[str, Any] | None:
        """What goes out with its answer; None for a request that was not for us."""
        self.loading.request_went(request_id)
        self._read_ahead.ends(request_id)
        asked = self.asked.pop(request_id, None)
        if asked is None:
            return None
        self._time_first_token(asked)
        report = asked.report
        if report.refused_reason:
            pass
        elif asked.params.mode == "ingest" and not report.num_chunk_hits:
            self.counting.add(ingested_chunks=asked.is_filled)
        else:
            # What was found and could not be read is a miss, too; what nobody looked for, or waited for, is none.
            num_lost = len(asked.stored) - report.num_chunk_hits if asked.is_filled else 0
            self.counting.add(chunk_hits=report.num_chunk_hits, chunk_misses=asked.num_missing + num_lost)
        return {PARAMS_KEY: told(report)}

    def _time_first_token(self, asked: _Asked) -> None:
        """Between two steps: at most one step later than the token."""
        if asked.request is not None and asked.request.num_output_tokens > 0:
            if asked.params.mode != "ingest":
                self.counting.first_token(asked.report.mode, asked.request.arrival_time)
            asked.request = None

    def take_forgotten(self) -> Heeded:
        """What other replicas have forgotten since the last call: the disk has, the workers are to."""
        return self.listener.take() if self.listener is not None else Heeded()

    def close(self) -> None:
        """End the threads that fetch."""
        if self.listener is not None:
            self.listener.stop()
        if self._fetch is not None:
            self._fetch.close()
        self._lookup.close()

    def _note_model(self, name: str, shape: ModelShape) -> None:
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


def _hide_from_prefix_cache(request: Any, asked: _Asked) -> None:
    """Give a request a name of its own in vLLM's prefix cache: it finds nothing there, and nobody finds its blocks."""
    asked.is_hidden = True
    _hide(request)


def _hide(request: Any) -> None:
    _salt(request, f"{request.cache_salt or ''}ragblend-{uuid.uuid4().hex}")


def _keep_apart(request: Any, namespace: str) -> None:
    """Let a request share vLLM's prefix cache with its own namespace alone."""
    if namespace:
        _salt(request, cache_salt_of(namespace))


def _salt(request: Any, salt: str) -> None:
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
