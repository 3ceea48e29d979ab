"""Matching of a request's prompt and lookup of its chunks on this machine, in threads of vLLM's scheduler process.

On a slow or network disk, reading a header takes as long as computing a layer, so threads read it. The scheduler waits
for at most `PATIENCE_S`, which is enough for a local disk, and then polls at later steps. Depends on keys, stores and
matching, not on vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter
from typing import NamedTuple

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.matching import find_stored, find_variants, open_known_chunks, turn_ends
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import ChunkKV
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import MAX_RUNS, BlendParams
from ragblend.errors import RagblendError
from ragblend.options import ContextPolicy
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun, Variant

log = logging.getLogger(__name__)

PATIENCE_S = 0.003
NUM_LOOKUPS = 4  # lookups that run at the same time
_NAMESPACES_OPEN = 64  # token indexes in memory; every cache salt that a client chooses is a separate namespace


class MissingVariants(NamedTuple):
    """Keys of a run's variants that this machine does not have, and that are better than the best one it has.

    `is_local`: this machine has a variant.
    """

    keys: tuple[str, ...]
    is_local: bool


class LookupResult(NamedTuple):
    """The result of looking up a prompt's chunks."""

    runs: tuple[ChunkRun, ...]  # those whose chunk is stored have its best stored variant
    missing: tuple[MissingVariants, ...] = ()  # of each run; () if the remote tier is not asked
    match_s: float = 0.0  # seconds that matching the prompt took
    turn_ends: tuple[int, ...] = ()  # positions at which the prompt's turns end; () if no chunk is stored


class ChunkLookup:
    """Finds the chunks in prompts, and the chunks' entries in `disk`.

    Only chunks whose token ids come from the tokenizer of `renderer` are found; without a renderer, none is.
    `fingerprint` is the model's. `close` ends the threads.
    """

    def __init__(
        self,
        disk: DiskStore,
        config: ConnectorConfig,
        fingerprint: str,
        renderer: Renderer | None = None,
    ) -> None:
        self._disk, self._config, self._fingerprint = disk, config, fingerprint
        self._remembered = disk.read_context_policy()
        self._pool = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="ragblend-lookup")
        self.prefix_ids = config.prefix_ids
        self._tail_ids: tuple[int, ...] = ()
        self._neutral_ids: tuple[int, ...] = ()
        self._ledger = None if renderer is None else open_ledger(disk)
        if renderer is not None and self._ledger is not None:
            self.prefix_ids = config.prefix_ids or renderer.prefix_ids(pins_date=True)
            self._tail_ids, self._neutral_ids = renderer.tail_ids, renderer.neutral_ids
            open_chunks = partial(open_known_chunks, self._ledger, renderer.fingerprint)
            self._known_chunks = lru_cache(_NAMESPACES_OPEN)(open_chunks)
            self._pool.submit(self._match, (), "")  # builds the token index before any request

    def start(
        self,
        ids: Sequence[int],
        params: BlendParams,
        runs: tuple[ChunkRun, ...] | None = None,
        *,
        asks_remote: bool,
    ) -> Future[LookupResult]:
        """Start the lookup of the prompt `ids`, and return the future of its result.

        `runs`: the runs that an earlier lookup of the prompt has found; None for the first lookup. With `asks_remote`,
        the result's `missing` has the variants that the remote tier may have and that would be used. If it is not
        empty, no run has a variant. Fetch the missing ones, and start the lookup again with `asks_remote=False`.
        """
        return self._pool.submit(self._find, ids, params, runs, asks_remote)

    def candidate_keys(self, ids: Sequence[int], namespace: str) -> list[tuple[ChunkRun, list[str]]]:
        """Return the prompt's runs, each with the keys under which its chunk may be stored in any tier, best first."""
        candidates = self._candidates(ids, self._match(ids, namespace), namespace)
        return [(run, [variant.key for variant in variants]) for run, variants in candidates]

    def close(self) -> None:
        """Cancel the lookups that have not begun, and close the ledger."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._ledger is not None:
            self._known_chunks.cache_clear()
            self._ledger.close()

    def context_policy(self) -> ContextPolicy:
        """Return the context policy: the configured one, else the store's own, else "none"."""
        if self._config.context is not None:
            return self._config.context
        try:
            self._remembered = self._disk.read_context_policy()
        except RagblendError as error:  # the file was valid when the server started
            log.warning("%s", error)
        return self._remembered or "none"

    def _find(
        self, ids: Sequence[int], params: BlendParams, runs: tuple[ChunkRun, ...] | None, asks_remote: bool
    ) -> LookupResult:
        # The store's context policy stays as it is: the operator chooses it, for all namespaces. A chunk that is not on
        # this machine is computed, not fetched.
        if params.mode == "ingest":
            return self._find_for_ingestion(ids, params)
        start_s = perf_counter()
        if runs is None:
            runs = self._match(ids, params.namespace)
        match_s = perf_counter() - start_s
        candidates = self._candidates(ids, runs, params.namespace)
        if asks_remote and (missing := self._missing(candidates)):
            return LookupResult(runs, missing, match_s)
        runs = tuple(self._with_stored_variant(run, variants) for run, variants in candidates)
        ends = turn_ends(ids, self._tail_ids, runs) if any(run.variant is not None for run in runs) else ()
        return LookupResult(runs, (), match_s, tuple(ends))

    def _match(self, ids: Sequence[int], namespace: str) -> tuple[ChunkRun, ...]:
        """Return the prompt's runs. Without a catalogue that can be read, there are none.

        The prompt's last token is in no run, because vLLM has to compute this token before it can sample.
        """
        if self._ledger is None:
            return ()
        try:
            runs = self._known_chunks(namespace).match(ids, self._tail_ids, by_turn=True)
        except RagblendError as error:
            log.warning("a prompt was not searched for chunks: %s", error)
            return ()
        last = len(ids) - 1
        if runs and runs[-1].end > last:
            runs[-1] = runs[-1].within(0, last)
        return tuple(runs[:MAX_RUNS])

    def _candidates(
        self, ids: Sequence[int], runs: Sequence[ChunkRun], namespace: str
    ) -> list[tuple[ChunkRun, list[Variant]]]:
        """Return each run with the variants of its chunk that may be stored, the best first."""
        if not runs:
            return []
        prefixes = tuple(ids[: runs[0].start]), self.prefix_ids
        neutral_ids = self._neutral_ids if self.context_policy() == "neutral" else ()
        keys = (partial(self._key, run.chunk_ids, namespace) for run in runs)
        return [
            (run, list(find_variants(run, ids, prefixes, neutral_ids, key_of)))
            for run, key_of in zip(runs, keys, strict=True)
        ]

    def _missing(self, candidates: Sequence[tuple[ChunkRun, list[Variant]]]) -> tuple[MissingVariants, ...]:
        """Return the variants of each run that are better than the best on this machine; () if no run has one."""
        missing = []
        for _, variants in candidates:
            is_stored = [self._disk.contains(variant.key) for variant in variants]
            num_better = is_stored.index(True) if True in is_stored else len(variants)
            keys = tuple(variant.key for variant in variants[:num_better])
            missing.append(MissingVariants(keys, num_better < len(variants)))
        return tuple(missing) if any(each.keys for each in missing) else ()

    def _with_stored_variant(self, run: ChunkRun, variants: Sequence[Variant]) -> ChunkRun:
        """Return the run with the best variant that is on this machine; the run as it is if none is."""

        def read(key: str, chunk_ids: Sequence[int]) -> ChunkKV | None:
            kv = self._disk.peek(key)
            return kv if kv is not None and kv.header.has_ids(chunk_ids) else None

        stored = find_stored(run, variants, read)
        if stored is None:
            return run
        run, kv = stored
        assert run.variant is not None
        return replace(run, variant=replace(run.variant, nbytes=kv.nbytes))

    def _find_for_ingestion(self, ids: Sequence[int], params: BlendParams) -> LookupResult:
        """Return the chunk to ingest as the only run, with its variant if it is stored."""
        assert params.span is not None
        start, end = params.span
        run = ChunkRun(tuple(ids[start:end]), 0, start, end)
        key = self._key(run.chunk_ids, params.namespace, tuple(ids[:start]))
        return LookupResult(
            (replace(run, variant=Variant(key, "exact", exact=True)) if self._disk.contains(key) else run,)
        )

    def _key(self, chunk_ids: Sequence[int], namespace: str, prefix_ids: Sequence[int]) -> str:
        return chunk_key(self._fingerprint, prefix_ids, chunk_ids, namespace)
