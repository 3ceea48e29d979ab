"""Answer prompts from fused KV with a transformers model on one machine.

`generate` reads like the paper's figure: keys -> stored KV, or misses -> placed KV, a layer ahead -> fused KV and
first logits -> tokens. Safe to share between threads; one request computes at a time.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Unpack

import torch
from torch import Tensor

from ragblend.engine.base import EngineBase
from ragblend.engine.fusion.fidelity import note_fidelity
from ragblend.engine.fusion.fuse import Fused, FusedKV, FusePlan, Placement, fuse, prefill_chunks
from ragblend.engine.fusion.loader import LayerLoader, Timeline
from ragblend.engine.fusion.lookup import Context, contexts, holds_neighbours, neighbours, note_neighbours
from ragblend.engine.fusion.packing import CPU_PASS_TOKENS, GPU_PASS_TOKENS, LEAST_PASS_TOKENS, prefill_all
from ragblend.engine.fusion.rules import (
    RULES,
    Check,
    Choice,
    charged_budget,
    charged_budget_at,
    find_rule,
    schedule,
    settle,
)
from ragblend.engine.fusion.self_check import self_check
from ragblend.engine.generation import Conversation, GenerationStream, Options, Prefilled, Request
from ragblend.engine.hf.explain import Explanation, explain
from ragblend.engine.hf.layers import TransformersLayers
from ragblend.engine.report import BlendReport, ChunkReport, Generation
from ragblend.engine.shadow import compare_with_full
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.kv import ChunkKV, KVHeader, MemoryKV, ModelShape, dtype_name, stored_as
from ragblend.engine.store.quantize import stored_bytes_per_token
from ragblend.engine.store.tiered import ChecksShapes, Prefetches, WorksInBackground, disk_tier, is_far, kv_dtype_of
from ragblend.engine.tuning.calibration import Calibrations
from ragblend.engine.tuning.pipeline import Decision, MachineProfile, decide
from ragblend.errors import DamagedEntryError
from ragblend.options import GenerationKeywords, GenerationOptions
from ragblend.prompt.prompt import Chunk, Part, Segment, SegmentedPrompt, TokenizedPrompt
from ragblend.prompt.segmenter import Segmenter

log = logging.getLogger(__name__)

_PREFIXES_KEPT = 8  # prefixes are few and short; each is one small FusedKV
_NO_RECOMPUTE = (Check(0, 0.0),)

Find = Callable[[str, Sequence[int] | None], ChunkKV | None]
"""A store's `get`, as one request uses it."""


class TransformersEngine(EngineBase):
    """Engine over a TransformersLayers model, a Segmenter and a KVStore. Use as a context manager, or `close()` it.

    `options` are those of `EngineBase`: system, namespace, on_miss, shadow and what messages say. It sees its store's
    entries, so `notices` can tell an empty store from one that was filled behind another prefix.
    """

    keeps_conversations = True  # `stream` takes `conversation=`

    def __init__(
        self,
        layers: TransformersLayers,
        segmenter: Segmenter,
        store: KVStore,
        *,
        check: bool = True,
        machine: MachineProfile | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segmenter, store, **options)
        self.layers = layers
        self.shape = ModelShape.of(dtype_name(layers.dtype), layers.kv_shapes)
        if isinstance(store, ChecksShapes):
            store.expect(self.fingerprint, self.shape)
        disk = disk_tier(store)
        root, key = (disk.root, disk.store_key) if disk is not None else (None, None)
        self.calibrations = Calibrations(root, self.fingerprint, layers.num_layers, key)
        self.finds_neighbours = holds_neighbours(store)  # looks for chunks stored behind the one before them
        self.machine = machine  # where there is one, requests without a ratio of their own follow `controller.decide`
        self.timelines: list[Timeline] | None = None  # a list gets the layers' times of every request that fuses
        self._has_refused = False
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[tuple[int, ...], FusedKV] = OrderedDict()
        if check:
            self_check(layers, layers.config.vocab_size, self.name)

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.layers.context_length

    @property
    def bytes_per_token(self) -> int:
        """Bytes of stored KV per token of a long chunk, all layers."""
        item, kv_dtype = self.layers.like.element_size(), kv_dtype_of(self.store)
        return sum(
            stored_bytes_per_token(heads * (keys + values), heads, item, kv_dtype)
            for heads, keys, values in self.layers.kv_shapes
        )

    # -- ingestion

    def precompute_all(self, chunks: Sequence[Part]) -> Iterator[int]:
        """`precompute` of each; short chunks share a pass, and the store is written meanwhile.

        Those to be computed behind another come last: by then that one is stored. KV is that of `precompute` wherever a
        row of a matrix product does not depend on how many rows there are (so in float32 on the CPUs tested), elsewhere
        up to the rounding of such a product.
        """
        limit = CPU_PASS_TOKENS if self.layers.device.type == "cpu" else GPU_PASS_TOKENS
        behind = [chunk for chunk in chunks if isinstance(chunk, Chunk) and chunk.behind]
        ids = (self._chunk_ids(chunk)[0] for chunk in chunks if not (isinstance(chunk, Chunk) and chunk.behind))
        yield from prefill_all(ids, self._is_missing, self._prefill_chunks, self.store.put, limit)
        yield from map(self.precompute, behind)

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Bring the KV of a later request's chunks into the fastest tier, in the background. Returns at once."""
        if isinstance(self.store, Prefetches):
            self.store.prefetch([self.key(chunk) for chunk in chunks])

    def precompute_ids(self, token_ids: tuple[int, ...], neighbour: tuple[int, ...] = ()) -> int:
        """`precompute` of a chunk that is token ids already, behind another that is."""
        if not self._is_missing(token_ids, neighbour):
            return 0
        (kv,) = self._prefill_chunks([token_ids], neighbour)
        self.store.put(kv)
        if neighbour and not self.finds_neighbours:
            note_neighbours(self.store)
            self.finds_neighbours = True
        return kv.nbytes

    def _is_missing(self, token_ids: tuple[int, ...], neighbour: tuple[int, ...] = ()) -> bool:
        self.check_process()
        return bool(token_ids) and not self.store.contains(self._key(self.default_prefix_ids + neighbour, token_ids))

    def _prefill_chunks(self, chunks: Sequence[tuple[int, ...]], neighbour: tuple[int, ...] = ()) -> list[MemoryKV]:
        """The KV of chunks of token ids behind the default prefix and `neighbour`, each alone, all in one pass."""
        prefix_ids, dtype = self.default_prefix_ids + neighbour, dtype_name(self.layers.dtype)
        num_layers = self.layers.num_layers
        headers = []
        for ids in chunks:
            self._check_length(len(prefix_ids) + len(ids), "chunk")
            key = self._key(prefix_ids, ids)
            headers.append(
                KVHeader(key, self.fingerprint, prefix_ids, ids, num_layers, dtype, namespace=self.namespace)
            )
        num_more = LEAST_PASS_TOKENS - sum(map(len, chunks)) if self.layers.device.type == "cpu" else 0
        filler = [replace(headers[0], token_ids=chunks[0][:1] * num_more)] if num_more > 0 else []
        with self._lock:
            context = self._behind(neighbour) if neighbour else self._prefix(prefix_ids)
            found = prefill_chunks(self.layers, context, [*headers, *filler])[: len(headers)]
        return [stored_as(kv, kv_dtype_of(self.store)) for kv in found]

    # -- answering

    def generate(self, prompt: SegmentedPrompt, **options: Unpack[Options]) -> Generation:
        """Answer `prompt`; `options` are those of `request`. Ends at the model's end token or a stop string."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: SegmentedPrompt, **options: Unpack[Options]) -> GenerationStream:
        """`generate`, piece by piece: iterate for text; `.result` holds answer and report once it has ended.

        Options are checked here, before the first piece. Closing the stream early frees the engine, and closing the
        engine ends the stream.
        """
        request = self.request(prompt, **options)
        if not self._shadow.share or request.mode not in ("blend", "reuse"):
            return GenerationStream(self, request)

        def shadowed(prefilled: Prefilled, answer: Generation) -> None:
            logits = prefilled.logits  # and not the KV, which would stay until full prefill has run
            self._shadow.consider(lambda: compare_with_full(self, request, logits, answer), answer.report)

        return GenerationStream(self, request, shadowed)

    def explain(self, prompt: SegmentedPrompt, **options: Unpack[Options]) -> Explanation:
        """Answer `prompt` by blending and by full prefill; what became of every token. See `explain.explain`."""
        return explain(self, prompt, **options)

    def request(
        self,
        prompt: SegmentedPrompt,
        *,
        checks: Sequence[Check] | None = None,
        conversation: Conversation | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Request:
        """What to answer and how, tokenized and checked; `prefill` takes it for logits without an answer.

        `options` are GenerationOptions. `checks` sets several check layers with their own ratios instead of one. With a
        `conversation`, earlier turns are not prefilled again. Raises PromptTooLongError beyond the model's context,
        UsageError for bad values.
        """
        asked = GenerationOptions(**options)
        self._check_prompt(prompt, asked.stops)
        known_rule = find_rule(asked.rule, self.layers.num_layers)
        if checks is not None:
            schedule(known_rule, 0.0, self.layers.num_layers, checks)
        tokenized = self.segmenter.tokenize(prompt)
        choice = self.calibrations.choose(tokenized.prefix_ids, asked.rule, asked.recompute_ratio)
        self._check_length(tokenized.num_tokens + 1, "prompt")
        return Request(
            tokenized,
            asked.mode,
            asked.rule,
            choice.ratio,
            asked,
            tuple(checks) if checks is not None else None,
            conversation,
            choice.fit,
            adapts=asked.mode == "blend" and checks is None and choice.is_auto_ratio,
        )

    def prefill(self, request: Request) -> Prefilled:
        """The prompt's KV and first logits. A damaged entry met on the way makes its chunk a miss and starts again."""
        damaged: set[str] = set()
        find = self._finder(request)
        while True:
            try:
                with self._lock, torch.inference_mode():
                    prefilled = self._full(request) if request.mode == "full" else self._blend(request, damaged, find)
            except DamagedEntryError as error:
                log.warning("%s; answering without it", error)
                damaged.add(error.key)  # the store has moved it aside already
                continue
            prefilled.report.num_damaged_entries = len(damaged)
            return prefilled

    def _finder(self, request: Request) -> Find:
        """How the request is to look up chunks.

        What a remote tier has of them is fetched now, before the engine's lock: meanwhile another request computes. A
        request waits for remote tiers this once.
        """
        if request.mode == "full" or not is_far(self.store):
            return self.store.get
        keys = [
            self._key(context.token_ids, chunk.token_ids)
            for chunk, candidates in self._contexts(request.prompt)
            for context in candidates
            if chunk.token_ids and (request.mode != "prefix" or context.exact)
        ]
        return partial(self.store.get, fetched=self.store.fetch_ahead(keys))

    def _full(self, request: Request) -> Prefilled:
        """Full prefill: the model's own forward, no reuse."""
        start_s = perf_counter()
        logits, layers = self.layers.full_prefill(self._ids(request.prompt.token_ids))
        report = BlendReport("full", "none", 1.0, fuse_s=perf_counter() - start_s)
        segments = request.prompt.chunk_segments
        report.chunks = [ChunkReport(_source(segment), segment.num_tokens, hit=False) for segment in segments]
        report.charged_budget = report.charged_budget_32 = 1.0 if segments else 0.0
        return Prefilled(FusedKV(layers, request.prompt.num_tokens), logits, report)

    def _blend(self, request: Request, damaged: set[str], find: Find) -> Prefilled:
        """Full reuse, prefix reuse or blend: lookup, then fuse while the loader runs a layer ahead."""
        start_s = perf_counter()
        prompt = request.prompt
        fused = FusedKV.allocate(
            self.layers.kv_shapes, prompt.num_tokens + min(request.options.max_tokens, 256), self.layers.like
        )
        num_resident = self._resident(request, fused)
        hits = self._lookup(request, num_resident, damaged, find)
        placements = [placement for placement, _ in hits.values()]
        if request.adapts and placements and self.machine is not None:
            decision = self._decide(self.machine, request, placements, num_resident)
            if decision.refused:
                return self._refused(request, decision)
            request = replace(request, ratio=decision.ratio)
        plan = self._plan(request, placements, num_resident)
        lookup_s = perf_counter() - start_s
        start_s = perf_counter()
        ends_s: list[float] | None = None if self.timelines is None else []
        with LayerLoader(
            plan.placements,
            self.layers.num_layers,
            self.layers.place_keys,
            fused,
            self.layers.device,
            together=True,
            first_layer=lambda token_ids: self.layers.project_kv(0, self.layers.embed(token_ids)),
        ) as loader:
            result = fuse(self.layers, plan, fused, loader, ends_s)
        result.charge_once(loader.num_computed * self.layers.kv_share, plan)
        if self.timelines is not None and ends_s is not None:
            self.timelines.append(loader.timeline(ends_s))
        if self.layers.device.type == "cuda":
            torch.cuda.synchronize(self.layers.device)
        report = BlendReport(
            request.mode,
            plan.rule.name if request.mode == "blend" else "none",
            plan.checks[0].ratio if request.checks is not None else request.ratio if request.mode == "blend" else 0.0,
            lookup_s=lookup_s,
            load_s=loader.load_s,
            stall_s=loader.stall_s,
            fuse_s=perf_counter() - start_s - loader.stall_s,
            probe_s=result.probe_s,
            select_s=result.select_s,
            num_prefix_tokens=num_resident,
        )
        report.predicted_agreement = request.predicted_agreement(report.recompute_ratio)
        self._count(report, request, plan, hits, result, num_resident)
        segments = [segment for segment in prompt.chunk_segments if segment.start >= num_resident]
        misses = tuple(segment for segment in segments if segment.start not in hits) if request.mode != "prefix" else ()
        read_s = dict(zip((placement.start for placement in plan.placements), loader.read_s, strict=True))
        return Prefilled(fused, result.logits, report, misses, result.recomputed, result.attention, read_s)

    def _decide(
        self, machine: MachineProfile, request: Request, placements: Sequence[Placement], num_resident: int
    ) -> Decision:
        """Which ratio hides behind loading, by what was measured on this machine."""
        stored = [placement.kv for placement in placements]
        # What is not in memory by now is read from the disk: a remote tier has sent its chunks before the lookup.
        to_load = sum(kv.nbytes for kv in stored if not isinstance(kv, MemoryKV))
        num_stored = num_resident + sum(kv.header.num_tokens for kv in stored)
        fit = request.calibrated
        rule = find_rule(request.rule if fit is None else fit.rule, self.layers.num_layers)
        num_tokens = request.prompt.num_tokens
        return decide(machine, request.ratio, num_tokens, num_stored, {"disk": to_load}, rule.asks_first)

    def _refused(self, request: Request, decision: Decision) -> Prefilled:
        """Full prefill, because it is faster than what is stored; said in the report, and in the log the first time."""
        if not self._has_refused:
            log.warning("stored KV is not used: %s. A faster disk helps; ragblend plan", decision.refused)
            self._has_refused = True
        prefilled = self._full(request)
        prefilled.report.refused_reason = decision.refused
        return prefilled

    def _resident(self, request: Request, fused: FusedKV) -> int:
        """Put KV that is exact and at hand into the front of `fused`: earlier turns, else the prefix. Row count."""
        prompt, conversation = request.prompt, request.conversation
        if conversation is not None and conversation.fused is not None:
            count = _common_prefix(conversation.token_ids, prompt.token_ids)
            # Never end inside a chunk: its stored KV is placed whole or not at all.
            for segment in prompt.chunk_segments:
                if segment.start < count < segment.end:
                    count = segment.start
            count = min(count, prompt.num_tokens - 1)
            if count > len(prompt.prefix_ids):
                fused.copy_front(conversation.fused, count)
                return count
        prefix = self._prefix(prompt.prefix_ids)
        fused.copy_front(prefix, prefix.length)
        return prefix.length

    def _prefix(self, prefix_ids: tuple[int, ...]) -> FusedKV:
        """KV of a prefix, computed once and kept in memory."""
        known = self._prefixes.get(prefix_ids)
        if known is None:
            known = FusedKV.allocate(self.layers.kv_shapes, len(prefix_ids), self.layers.like)
            if prefix_ids:
                plan = FusePlan(self._ids(prefix_ids), (), RULES["first_k"], _NO_RECOMPUTE)
                with LayerLoader((), self.layers.num_layers, self.layers.place_keys, known, self.layers.device) as none:
                    fuse(self.layers, plan, known, none)
            self._prefixes[prefix_ids] = known
            if len(self._prefixes) > _PREFIXES_KEPT:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(prefix_ids)
        return known

    def _behind(self, neighbour: tuple[int, ...]) -> FusedKV:
        """KV of the default prefix, a chunk behind it and what joins it to the next: where that chunk is stored, exact
        and nearly for nothing."""
        prefix_ids, joint = self.default_prefix_ids, self.segmenter.joint_ids
        chunk_ids = neighbour[: len(neighbour) - len(joint)]
        kv = self.store.get(self._key(prefix_ids, chunk_ids), chunk_ids)
        if kv is None or not kv.header.is_lossless:
            return self._prefix(prefix_ids + neighbour)
        prefix = self._prefix(prefix_ids)
        fused = FusedKV.allocate(self.layers.kv_shapes, prefix.length + len(neighbour), self.layers.like)
        fused.copy_front(prefix, prefix.length)
        placed = (Placement(kv, prefix.length, exact=True),)
        ids = self._ids(prefix_ids + neighbour)
        plan = FusePlan(ids, placed, RULES["first_k"], _NO_RECOMPUTE, prefix.length, num_fused=len(ids))
        with LayerLoader(placed, self.layers.num_layers, self.layers.place_keys, fused, self.layers.device) as loader:
            fuse(self.layers, plan, fused, loader)
        return fused

    def _lookup(
        self, request: Request, num_resident: int, damaged: set[str], find: Find
    ) -> dict[int, tuple[Placement, Context]]:
        """Stored chunks by prompt position, each from the best context that it is stored behind."""
        found: dict[int, tuple[Placement, Context]] = {}
        for segment, candidates in self._contexts(request.prompt):
            if segment.start < num_resident:
                continue
            for context in candidates:
                if request.mode == "prefix" and not context.exact:
                    continue
                key = self._key(context.token_ids, segment.token_ids)
                kv = find(key, segment.token_ids) if key not in damaged else None
                if kv is not None and (request.mode != "prefix" or kv.header.is_lossless):
                    found[segment.start] = (Placement(kv, segment.start, context.exact), context)
                    break
        return found

    def _contexts(self, prompt: TokenizedPrompt) -> Iterator[tuple[Segment, list[Context]]]:
        """The chunks of `prompt`, and what to look for each behind, the best first."""
        token_ids, num_prefix = prompt.token_ids, len(prompt.prefix_ids)
        spans = ((segment.start, segment.end) for segment in prompt.chunk_segments)
        starts = neighbours(spans) if self.finds_neighbours else {}
        for segment in prompt.chunk_segments:
            before = starts.get(segment.start)
            yield segment, contexts(token_ids, segment.start, before, num_prefix, self.default_prefix_ids)

    def _plan(self, request: Request, placements: Sequence[Placement], num_resident: int) -> FusePlan:
        """What to fuse by which rule. A default rule whose probe does not pay gives way to one without."""
        prompt = request.prompt
        choice = Choice(find_rule(request.rule, self.layers.num_layers), _NO_RECOMPUTE, ())
        if request.mode == "blend":
            num_stored = sum(placement.kv.header.num_tokens for placement in placements)
            choice = settle(
                request.rule,
                request.ratio,
                self.layers.num_layers,
                num_fresh=prompt.num_tokens - num_resident - num_stored,
                num_candidates=sum(each.kv.header.num_tokens for each in placements if not each.exact),
                num_chunk_tokens=num_stored,
                checks=request.checks,
                fitted=request.calibrated.reads if request.calibrated is not None else None,
            )
        return FusePlan(
            self._ids(prompt.token_ids),
            tuple(placements),
            choice.rule,
            choice.checks,
            num_resident,
            seed=request.options.seed or 0,
            probe_layers=choice.probe_layers,
            question_start=next((segment.start for segment in prompt.segments if segment.kind == "suffix"), None),
            separators=self._separators(prompt),
        )

    def _separators(self, prompt: TokenizedPrompt) -> Tensor:
        """[T] bool: tokens that belong to the chunks' template, not to their text."""
        separators = bytearray(prompt.num_tokens)  # filled before it becomes a tensor: two writes per chunk
        for segment in prompt.chunk_segments:
            separators[segment.start : segment.start + segment.num_lead] = b"\1" * segment.num_lead
            separators[segment.end - segment.num_tail : segment.end] = b"\1" * segment.num_tail
        return torch.frombuffer(separators, dtype=torch.bool).to(self.layers.device)

    def _count(
        self,
        report: BlendReport,
        request: Request,
        plan: FusePlan,
        hits: dict[int, tuple[Placement, Context]],
        result: Fused,
        num_resident: int,
    ) -> None:
        """What was reused and recomputed, per chunk and in all."""
        recomputed = sorted(result.recomputed.tolist())
        num_computed = 0  # chunk tokens with no stored KV: they run through every layer
        for segment in request.prompt.chunk_segments:
            hit = hits.get(segment.start)
            inside = bisect_left(recomputed, segment.end) - bisect_left(recomputed, segment.start) if hit else 0
            resident = segment.start < num_resident
            if not hit and not resident:
                num_computed += segment.num_tokens
            report.chunks.append(
                ChunkReport(
                    _source(segment),
                    segment.num_tokens,
                    hit=hit is not None or resident,
                    prefix_match=hit[1].match if hit else "exact" if resident else None,
                    exact=hit[0].exact and hit[0].kv.header.is_lossless if hit else resident,
                    behind_neighbour=hit is not None and hit[1].has_neighbour,
                    num_recomputed_tokens=inside,
                    kv_dtype=hit[0].kv.header.stored_dtype if hit else None,
                )
            )
        total = plan.num_chunk_tokens + num_computed
        rows = [count + num_computed for count in result.rows_per_layer]
        first_check = plan.checks[0].layer
        report.charged_budget = charged_budget(rows, total)
        report.charged_budget_32 = charged_budget_at(32, rows, total, first_check, result.fixed_cost)
        report.num_recomputed_tokens = len(recomputed)
        note_fidelity(report, plan, result)
        # The last token is computed even when its KV is stored: its logits are the answer.
        ends_stored = any(placement.end == request.prompt.num_tokens for placement in plan.placements)
        report.num_reused_tokens = num_resident + plan.num_chunk_tokens - len(recomputed) - ends_stored

    @torch.inference_mode()
    def decode_step(self, token: int, fused: FusedKV) -> Tensor:
        """Append `token` to `fused` and return the logits [vocabulary] of what follows it."""
        with self._lock:
            rows = torch.tensor([fused.length], device=self.layers.device)
            hidden = self.layers.embed(self._ids([token]))
            for layer in range(self.layers.num_layers):
                hidden = self.layers.run_layer(layer, hidden, rows, fused)
            fused.length += 1
            return self.layers.logits(hidden)[-1]

    def backfill(self, misses: Sequence[Segment]) -> None:
        """Precompute `misses` alone, in the background, unless `on_miss` is "inline"."""
        if self._backfill is not None and not self.closed:
            for segment in misses:
                self._backfill.add(segment.token_ids)

    def close(self) -> None:
        """Finish background work, the store's within its time limit, and release the threads."""
        if not self.is_usable:
            return
        super().close()
        if isinstance(self.store, WorksInBackground):
            self.store.close()

    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's and the generation config's."""
        config = getattr(self.layers.model, "generation_config", None)
        end: Any = getattr(config, "eos_token_id", None)
        more = end if isinstance(end, list) else [end] if end is not None else []
        return self.segmenter.stop_ids() | frozenset(more)

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.layers.device)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two sequences share.

    >>> _common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _source(segment: Segment) -> str:
    return segment.chunk.source if segment.chunk is not None else ""
