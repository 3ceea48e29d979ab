"""A prompt's KV and first logits, by a transformers model: look up, decide, place, fuse, report. Read `_blend` first.

Exact KV in memory (the prefix, earlier turns) is copied, the loader places stored chunks a layer ahead, and `fuse`
computes the rest. Depends on the model's layers, the store and reports, not on answers or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.base import LocalEngine
from ragblend.engine.fusion.fuse import LayerCall, fuse, fuse_steps
from ragblend.engine.fusion.loader import LayerLoader, Timeline
from ragblend.engine.fusion.plan import FusedKV, FusePlan, FuseResult, Placement, record_fusion
from ragblend.engine.fusion.prefill import COMPUTED_IN_PROMPT
from ragblend.engine.generation import EngineRequest, PrefillResult, Refinement
from ragblend.engine.loop import EngineLoop
from ragblend.engine.matching import PrefixKVCache, find_stored, find_variants
from ragblend.engine.report import BlendReport, ChunkReport, merge_runs_by_chunk
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import ChunkKV, KVSpec, dtype_name, is_in_memory
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import read_ahead
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.tuning.loading_controller import (
    LoadableChunk,
    MachineProfile,
    ReuseDecision,
    decide_reuse,
    tier_speeds,
)
from ragblend.engine.tuning.paces import Paces
from ragblend.errors import DamagedEntryError, LateEntryError
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun, Variant, common_prefix_length

log = logging.getLogger(__name__)


class _Fetched(NamedTuple):
    """Entries of remote tiers by key, which may still be arriving, and why others were not fetched.

    `fallback_reason`: why full prefill is faster than to fetch; "" if it is not. `decision`: that of the loading
    controller if it left chunks out, else "". `later`: the keys of these, to be fetched once the prompt is computed.
    """

    entries: Mapping[str, ChunkKV] = {}
    decision: str = ""
    fallback_reason: str = ""
    later: Sequence[str] = ()


class BlendingEngine(LocalEngine):
    """Base class of TransformersEngine: prefills prompts, and does not decode answers.

    It computes the KV of requests, prefixes and the neutral text.
    """

    def __init__(
        self,
        layers: TransformersLayers,
        renderer: Renderer,
        store: KVStore,
        loop: EngineLoop,
        *,
        machine: MachineProfile | None = None,
        **options: Any,
    ) -> None:
        super().__init__(renderer, store, num_layers=layers.num_layers, worker=loop, **options)
        self.layers = layers
        self.loop = loop
        self.shape = KVSpec.from_kv_shapes(dtype_name(layers.dtype), layers.kv_shapes)
        store.set_expected_spec(self.fingerprint, self.shape)
        self.machine = machine  # if given, requests without a ratio follow `loading_controller.decide_reuse`
        self.timelines: list[Timeline] | None = None  # if a list, every fused request appends its layers' times
        self._paces = Paces()
        self._has_warned_fallback = False
        self._prefixes = PrefixKVCache[FusedKV]()

    def prefill(self, request: EngineRequest) -> PrefillResult:
        """Return the prompt's KV, and its last token's logits, from which the first token of the answer is sampled."""
        return self.loop.call(self.prepare_prefill(request))

    def prepare_prefill(self, request: EngineRequest) -> Callable[[], PrefillResult]:
        """Start to fetch the prompt's chunks from remote tiers. Return a function that prefills the prompt on the
        loop's thread.

        A request waits here, on its caller's thread, for the headers of its chunks. Their layers arrive while the loop
        computes for other requests, and for this one.
        """
        fetches = self.store.has_remote_tiers and request.mode != "full"
        return partial(self._prefill, request, self._fetch(request) if fetches else _Fetched())

    @torch.inference_mode()
    def _prefill(self, request: EngineRequest, fetched: _Fetched) -> PrefillResult:
        """Prefill a request. If an entry is damaged or late, start again with its chunk as a miss."""
        unusable: set[str] = set()
        num_damaged = 0
        while True:
            try:
                if request.mode == "full":
                    prefilled = self._full_prefill(request)
                elif fetched.fallback_reason:
                    prefilled = self._fall_back(request, fetched.fallback_reason)
                else:
                    prefilled = self._blend(request, unusable, fetched)
            except DamagedEntryError as error:
                log.warning("%s; answering without it", error)
                unusable.add(error.key)  # the store has quarantined its file already
                num_damaged += not isinstance(error, LateEntryError)
                continue
            prefilled.report.num_damaged_entries = num_damaged
            if fetched.later:  # not before, because it would slow the line down for this prompt's other chunks
                self.store.prefetch(fetched.later)
            return prefilled

    def _blend(self, request: EngineRequest, unusable: set[str], fetched: _Fetched) -> PrefillResult:
        """Return the prefill of a request that reuses KV: full reuse, prefix reuse or blend."""
        start_s, tuning = perf_counter(), request.tuning
        capacity = request.prompt.num_tokens + min(request.options.max_tokens, 256)
        fused = FusedKV.allocate(self.layers.kv_shapes, capacity, self.layers.like)
        num_resident, num_known, num_exact = self._copy_resident_rows(request, fused)
        prefix_s = perf_counter() - start_s
        stored = placements = self._lookup(request, num_resident, unusable, fetched.entries)
        runs, stored_ends = request.prompt.runs, {each.end for each in stored}
        wanted = runs if request.mode != "prefix" else ()
        misses = tuple(run for run in wanted if run.end > num_resident and run.end not in stored_ends)
        if request.mode == "blend" and stored and request.options.blend_min_tokens:
            num_stored = sum(run.num_tokens for run in runs if run.end <= num_resident or run.end in stored_ends)
            if reason := request.options.refusal(num_stored):
                return replace(self._full_prefill(request, reason), misses=misses)
        described = ""
        decision = self._decide(
            request,
            num_resident,
            [self._loadable(each, fetched.entries) for each in stored],
            waits_for_first_byte=False,
        )
        if decision is not None:
            if decision.fallback_reason:
                prefilled = self._fall_back(request, decision.fallback_reason)
                self._prefetch_placed(stored)
                return prefilled
            described = fetched.decision or decision.describe(len(stored))
            placements = tuple(stored[at] for at in decision.used)
            if request.no_probe is not None and decision.rule == request.no_probe.rule:
                tuning = request.no_probe
            tuning = tuning._replace(recompute_ratio=decision.ratio)
        plan = FusePlan(
            self._ids(request.prompt.token_ids),
            placements,
            num_resident=num_resident,
            seed=request.options.seed or 0,
            question_start=request.prompt.question_start,
            num_exact=num_exact,
        )
        if request.mode == "blend":
            plan = plan.with_rule(
                tuning.rule,
                tuning.recompute_ratio,
                self.layers,
                tuning.check_layer,
                request.options,
                is_auto_rule=tuning.is_auto_rule,
            )
        looked_up_s = perf_counter()
        result, loader = self._fuse(plan, fused)
        blends = request.mode == "blend"
        report = BlendReport(
            request.mode, plan.rule.name if blends else "none", tuning.recompute_ratio if blends else 0.0
        )
        report.decision = described
        # A rule without a probe, which "auto" takes for a long question, is not the one that was measured.
        if (fit := tuning.fit) is not None and (
            request.mode == "reuse" or (request.mode == "blend" and plan.rule.name == fit.rule)
        ):
            fit.predict(report, report.recompute_ratio)
        record_fusion(report, runs, plan, result, num_known)
        merge_runs_by_chunk(report, request.prompt)
        report.lookup_s = looked_up_s - start_s - prefix_s
        report.load_s, report.stall_s = loader.load_s, loader.stall_s
        report.fuse_s = perf_counter() - looked_up_s - loader.stall_s + prefix_s
        if decision is not None:
            self._paces.record_blend(decision.compute_s, report.fuse_s)
            self._prefetch_placed([each for at, each in enumerate(stored) if at not in decision.used])
        refine_ratio = request.options.refine_ratio or 0.0
        return PrefillResult(
            fused,
            result.logits,
            report,
            plan.num_exact_after_fusing,
            misses,
            result.recomputed,
            result.attention,
            loader.read_s,
            self._refiner(plan, refine_ratio)
            if request.mode == "blend" and refine_ratio > plan.recompute_ratio
            else None,
        )

    # -- refine

    def _refiner(self, plan: FusePlan, ratio: float) -> Callable[[PrefillResult, Sequence[int]], Refinement] | None:
        """Return the function that recomputes the share `ratio` of the chunk tokens after the first token.

        None if none of the chunks that `plan` places has stale KV.
        """
        is_stale = any(not (each.exact and each.kv.header.is_lossless) for each in plan.placements)
        return partial(self._refine, plan, ratio) if is_stale else None

    @torch.inference_mode()
    def _refine(self, plan: FusePlan, ratio: float, prefilled: PrefillResult, answer_ids: Sequence[int]) -> Refinement:
        """Recompute the share `ratio` of the chunk tokens over the KV of `prefilled`, which has fused `plan`.

        Writes into this request's own KV only, to which shared rows (prefix, earlier turns) were copied. `answer_ids`:
        tokens of the answer so far, whose KV is computed again.
        """
        layers, fused, refined = self.layers, prefilled.fused, plan.for_refinement(answer_ids, ratio)
        # Without chunks, the loader places nothing. It corrects the drift of kept tokens, as in the first pass.
        loader = LayerLoader(
            (), layers.num_layers, layers.place_keys, fused.write, layers.device, correctable=(layers, fused)
        )
        steps, output = fuse_steps(layers, refined, fused, loader), None
        while True:
            try:
                step = steps.send(output)
            except StopIteration as end:
                result: FuseResult = end.value
                break
            output = layers.run_layer(*step) if isinstance(step, LayerCall) else None
            if layers.device.type == "cuda":
                torch.cuda.synchronize(layers.device)  # so that a slice ends when its time is over
            yield
        prefilled.report.num_refined_tokens, prefilled.report.refined_after = len(result.recomputed), len(answer_ids)
        prefilled.num_exact = min(refined.num_exact_after_fusing, len(plan.token_ids))
        return result.logits

    # -- look up

    def _copy_resident_rows(self, request: EngineRequest, fused: FusedKV) -> tuple[int, int, int]:
        """Copy the KV of earlier turns, or else of the prefix, into the front of `fused`.

        Return the number of rows, how many of them were in memory (the others are computed here), and how many leading
        ones are exact.
        """
        prompt, conversation = request.prompt, request.conversation
        if conversation is not None and conversation.fused is not None:
            count = min(common_prefix_length(conversation.token_ids, prompt.token_ids), prompt.num_tokens - 1)
            if count > prompt.num_prefix:
                fused.copy_front(conversation.fused, count)
                return count, count, min(count, conversation.num_exact)
        prefix_ids = tuple(prompt.token_ids[: prompt.num_prefix])
        prefix, count = self._prefixes.find_longest(prefix_ids)
        num_known = count
        if prefix is None or len(prefix_ids) - count > COMPUTED_IN_PROMPT:
            prefix, count = self._prefix(prefix_ids), len(prefix_ids)
        fused.copy_front(prefix, count)
        return count, num_known, count

    def _lookup(
        self, request: EngineRequest, num_resident: int, unusable: set[str], fetched: Mapping[str, ChunkKV]
    ) -> tuple[Placement, ...]:
        """Return the prompt's stored runs with their KV, each in the best variant of its chunk that is stored."""
        store_get = self.store.get
        if self.store.has_remote_tiers:
            store_get = partial(self.store.get_local, fetched=fetched)
        placements = []
        for run in request.prompt.runs:
            if run.end > num_resident:
                rest = run if run.start >= num_resident else run.within(num_resident, run.end)
                intact = (each for each in self._variants(request, rest) if each.key not in unusable)
                stored = find_stored(rest, intact, store_get)
                if stored is not None and (request.mode != "prefix" or stored[1].header.is_lossless):
                    placements.append(Placement.of_run(*stored))
        return tuple(placements)

    def _variants(self, request: EngineRequest, run: ChunkRun) -> Iterator[Variant]:
        """Yield the variants of a run's chunk that the request may use, the best first."""
        prompt, prefixes = request.prompt, (request.prompt.prefix_ids, self.default_prefix_ids)
        neutral_ids = self.neutral_ids if self.context == "neutral" else ()
        key_of = partial(chunk_key, self.fingerprint, token_ids=run.chunk_ids, namespace=self.namespace)
        for variant in find_variants(run, prompt.token_ids, prefixes, neutral_ids, key_of):
            if request.mode != "prefix" or variant.exact:
                yield variant

    # -- fetch and decide

    def _fetch(self, request: EngineRequest) -> _Fetched:
        """Fetch those of the prompt's chunks that this machine does not have, as far as they are worth the wait.

        The layers of the variants that the request will use arrive in the background. So do chunks that are not worth
        the wait, for later requests, once the prompt is computed.
        """
        memory = self.store.find_tier(MemoryStore)
        missing: list[list[str]] = []  # of each run: the variants that are better than the best one on this machine
        chunks: list[LoadableChunk] = []
        for run in request.prompt.runs:
            tier, better = "remote", list[str]()
            for variant in self._variants(request, run):
                if self.store.is_local(variant.key):
                    tier = "memory" if memory is not None and memory.contains(variant.key) else "disk"
                    break
                better.append(variant.key)
            missing.append(better)
            nbytes = run.num_tokens * self.shape.bytes_per_token(self.store.kv_dtype)
            chunks.append(LoadableChunk(tier, run.num_tokens, nbytes))
        used: Sequence[int] = range(len(chunks))
        decision = None
        if any(chunk.tier == "remote" for chunk in chunks):
            decision = self._decide(request, request.prompt.num_prefix, chunks)
        if decision is not None:
            used = decision.used
        entries = self.store.fetch_from_remote([key for at in used for key in missing[at]])
        for at in used:
            if (best := next((key for key in missing[at] if key in entries), None)) is not None:
                read_ahead(entries[best])
        if decision is None or len(used) == len(chunks):
            return _Fetched(entries)
        later = [key for at, keys in enumerate(missing) if at not in used for key in keys]
        return _Fetched(entries, decision.describe(len(chunks)), decision.fallback_reason, later)

    @staticmethod
    def _loadable(placement: Placement, fetched: Mapping[str, ChunkKV]) -> LoadableChunk:
        """Return a placed chunk as the loading controller sees it."""
        key = placement.variant.key if placement.variant is not None else ""
        tier = "memory" if is_in_memory(placement.kv) else "remote" if key in fetched else "disk"
        return LoadableChunk(tier, placement.kv.header.num_tokens, placement.kv.nbytes)

    def _decide(
        self,
        request: EngineRequest,
        num_resident: int,
        chunks: Sequence[LoadableChunk],
        *,
        waits_for_first_byte: bool = True,
    ) -> ReuseDecision | None:
        """Return the loading controller's decision; None for a request with a ratio, and without a machine profile."""
        if not request.is_adapted or not chunks or self.machine is None:
            return None
        speeds = tier_speeds(self.machine, self.store.read_speeds)
        if not waits_for_first_byte:
            speeds = {name: speed._replace(latency_s=0.0) for name, speed in speeds.items()}
        rules = request.rule_choices(self.layers.num_layers)
        machine = self._paces.current(self.machine)
        return decide_reuse(machine, rules, request.prompt.num_tokens, num_resident, chunks, speeds)

    def _prefetch_placed(self, placements: Sequence[Placement]) -> None:
        """Load chunks that were too slow to load for this request into memory, for later ones."""
        slow = (each.variant for each in placements if not is_in_memory(each.kv))
        self.store.prefetch([variant.key for variant in slow if variant is not None])

    def _fall_back(self, request: EngineRequest, reason: str) -> PrefillResult:
        """Return full prefill, because reuse would be slower. The report has `reason`; the log has the first one."""
        if not self._has_warned_fallback:
            log.warning(
                "stored KV is not used: %s. Requests that name a ratio use it; compare storage by: ragblend plan",
                reason,
            )
            self._has_warned_fallback = True
        return self._full_prefill(request, reason)

    # -- place and fuse

    def _fuse(self, plan: FusePlan, fused: FusedKV) -> tuple[FuseResult, LayerLoader]:
        """Fuse `plan` into `fused` while the loader runs ahead. Return the result, and the loader with its times."""
        layers = self.layers
        ends_s: list[float] | None = None if self.timelines is None else []
        with LayerLoader(
            plan.placements,
            layers.num_layers,
            layers.place_keys,
            fused.write,
            layers.device,
            together=True,
            first_layer=lambda token_ids: layers.project_kv(0, layers.embed(token_ids)),
            correctable=(layers, fused),
        ) as loader:
            result = fuse(layers, plan, fused, loader, ends_s)
        if loader.num_computed:
            result.add_first_layer_cost(loader.num_computed * layers.kv_share, plan)
        if self.timelines is not None and ends_s is not None:
            self.timelines.append(loader.timeline(ends_s))
        if layers.device.type == "cuda":
            torch.cuda.synchronize(layers.device)
        return result, loader

    def _full_prefill(self, request: EngineRequest, refused_reason: str = "") -> PrefillResult:
        """Return full prefill by the model's own forward, without reuse."""
        start_s = perf_counter()
        logits, layers = self.layers.full_prefill(self._ids(request.prompt.token_ids))
        num_tokens = request.prompt.num_tokens
        report = BlendReport("full", "none", 1.0, fuse_s=perf_counter() - start_s, refused_reason=refused_reason)
        if self.machine is not None:
            self._paces.record_full(self.machine, num_tokens, report.fuse_s)
        report.chunks = [ChunkReport(run.source, run.num_tokens, hit=False) for run in request.prompt.runs]
        merge_runs_by_chunk(report, request.prompt)
        report.charged_budget = report.charged_budget_32 = 1.0 if report.chunks else 0.0
        return PrefillResult(FusedKV(layers, num_tokens), logits, report, num_tokens)

    # -- KV of prefixes

    def _prefix(self, prefix_ids: tuple[int, ...]) -> FusedKV:
        """Return the KV of a prefix, computed once and kept in memory."""
        prefix_kv = self._prefixes.get(prefix_ids)
        if prefix_kv is None:
            # Chunks are stored after the default prefix and the neutral text, whose KV must not depend on earlier
            # prompts: a pass for each.
            default = self.default_prefix_ids
            if prefix_ids == default:
                shorter, count = None, 0
            elif prefix_ids == self.ids_before("neutral"):
                shorter, count = self._prefix(default), len(default)
            else:
                shorter, count = self._prefixes.find_longest(prefix_ids)
            prefix_kv = FusedKV.allocate(self.layers.kv_shapes, len(prefix_ids), self.layers.like)
            if shorter is not None:
                prefix_kv.copy_front(shorter, count)
            if count < len(prefix_ids):
                plan = FusePlan(self._ids(prefix_ids), (), num_resident=count, num_fused=len(prefix_ids))
                self._fuse_untimed(plan, prefix_kv)
            self._prefixes.put(prefix_ids, prefix_kv)
        return prefix_kv

    def _fuse_untimed(self, plan: FusePlan, fused: FusedKV) -> None:
        layers = self.layers
        with LayerLoader(plan.placements, layers.num_layers, layers.place_keys, fused.write, layers.device) as loader:
            fuse(layers, plan, fused, loader)

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.layers.device)
