"""Lookup of a request's chunks on this machine, in threads next to vLLM's scheduler.

On a slow or network disk, reading a header takes as long as a layer's computation. Threads therefore read it. The
scheduler waits for `PATIENCE_S`, which is enough for a local disk, and otherwise polls at a later step. Depends on
keys, stores and the prompt matcher, not on vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from ragblend.engine.fusion.lookup import KEY_CONTEXTS, LookupContext, default_context_policy, lookup_contexts
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.matching import PromptMatcher
from ragblend.engine.vllm.params import MAX_SPANS, BlendParams
from ragblend.engine.vllm.worker import StoredSpan
from ragblend.errors import RagblendError
from ragblend.options import ContextPolicy
from ragblend.prompt.match import ChunkRun

log = logging.getLogger(__name__)

PATIENCE_S = 0.003
NUM_LOOKUPS = 4  # requests that are looked up at the same time


class LookupResult(NamedTuple):
    """Stored chunks of a prompt, and keys that only the remote tier may have.

    `params` are the request's, with the spans of the `runs` that were matched in its ids; `match_s`: seconds of
    matching, or None.
    """

    params: BlendParams
    stored: tuple[StoredSpan, ...] = ()
    missing: tuple[str, ...] = ()
    runs: tuple[ChunkRun, ...] = ()
    match_s: float | None = None


class ChunkLookup:
    """Looks chunks up in `disk`, in the ingestion contexts of the store's policy and of `config`.

    `fingerprint` is that of the model, whose `num_layers` determine the default policy. `matcher` finds chunks in
    prompts that name none; without it, those prompts have no chunks. `close` ends the threads.
    """

    def __init__(
        self,
        disk: DiskStore,
        config: ConnectorConfig,
        fingerprint: str,
        num_layers: int,
        matcher: PromptMatcher | None = None,
    ) -> None:
        self._disk, self._config, self._fingerprint = disk, config, fingerprint
        self._remembered, self._default = disk.read_context(), default_context_policy(num_layers)
        self._matcher = matcher
        self.prefix_ids = disk.read_prefix(config.prefix) if config.prefix else config.prefix_ids
        if not self.prefix_ids and matcher is not None:
            self.prefix_ids = matcher.prefix_ids
        self._pool = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="ragblend-lookup")
        if matcher is not None:
            self._pool.submit(matcher.find_runs, (), config.namespace)  # the first request finds the index built

    def start(self, ids: Sequence[int], params: BlendParams, *, asks_remote: bool) -> Future[LookupResult]:
        """Start the lookup of the prompt `ids`, and return the future of its result.

        asks_remote: if the remote tier may have better entries than this machine, the result has only their keys,
        `missing`.
        """
        return self._pool.submit(self._find, ids, params, asks_remote)

    def close(self) -> None:
        """Cancel the lookups that have not begun, and close the matcher."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._matcher is not None:
            self._matcher.close()

    def context(self) -> ContextPolicy:
        """Return the store's context policy: the configured one, else the stored one, else the model's default."""
        if self._config.context is not None:
            return self._config.context
        try:
            self._remembered = self._disk.read_context()
        except RagblendError as error:  # it was sound when the server started
            log.warning("%s", error)
        return self._remembered or self._default

    def _find(self, ids: Sequence[int], params: BlendParams, asks_remote: bool) -> LookupResult:
        if params.mode == "ingest":  # what is not here is computed, not asked for
            self._persist_policy(params.context)
            return LookupResult(params, self._find_for_ingestion(ids, params))
        match_s, runs = None, tuple[ChunkRun, ...]()
        if not params.spans:
            start_s = perf_counter()
            runs = self._match(ids, params.namespace)
            params, match_s = params.with_runs(runs), perf_counter() - start_s
        candidates = list(self._candidates(ids, params))
        missing = self._missing(candidates) if asks_remote else ()
        stored = () if missing else tuple(self._find_stored(ids, params, candidates))
        return LookupResult(params, stored, missing, runs, match_s)

    def _match(self, ids: Sequence[int], namespace: str) -> tuple[ChunkRun, ...]:
        if self._matcher is None:
            return ()
        try:
            return tuple(self._matcher.find_runs(ids, namespace)[:MAX_SPANS])
        except RagblendError as error:
            log.warning("no chunks are looked for in a prompt: %s", error)
            return ()

    def _candidates(
        self, ids: Sequence[int], params: BlendParams
    ) -> Iterator[tuple[int, int, list[tuple[str, LookupContext]]]]:
        """Yield the start and end of each chunk, and the keys that it may be stored under, the best one first."""
        if not params.spans:
            return
        prefixes, policy = (params.prefix_ids(ids), self.prefix_ids), self.context()
        for place, (start, end) in enumerate(params.spans):
            is_beginning = params.chunk_start(place) == 0
            found = lookup_contexts(ids, start, prefixes, policy, is_beginning=is_beginning)
            keys = [self._key(ids, place, params, each.token_ids, each.name) for each in found]
            yield start, end, list(zip(keys, found, strict=True))

    def _missing(self, candidates: Sequence[tuple[int, int, list[tuple[str, LookupContext]]]]) -> tuple[str, ...]:
        """Return the keys that are better than the best one on this machine."""
        missing: dict[str, None] = {}
        for _, _, keys in candidates:
            for key, _ in keys:
                if self._disk.contains(key):
                    break
                missing[key] = None
        return tuple(missing)

    def _find_stored(
        self,
        ids: Sequence[int],
        params: BlendParams,
        candidates: Sequence[tuple[int, int, list[tuple[str, LookupContext]]]],
    ) -> Iterator[StoredSpan]:
        """Yield the stored chunks of the prompt, each from its best stored context."""
        for place, (start, end, keys) in enumerate(candidates):
            chunk_ids, chunk_start = params.chunk_ids(ids, place), params.chunk_start(place)
            for key, context in keys:
                kv = self._disk.peek(key)
                if kv is not None and kv.header.token_ids == chunk_ids:
                    facts = (context.match, context.exact, context.policy, kv.nbytes)
                    yield StoredSpan(start, end, key, *facts, chunk_ids, chunk_start)
                    break

    def _find_for_ingestion(self, ids: Sequence[int], params: BlendParams) -> tuple[StoredSpan, ...]:
        """Return the stored entries for an ingestion: the chunk's own, else those of the chunks in its ingestion
        context.
        """
        *behind, own = params.spans
        prefix_ids = tuple(ids[: params.spans[0][0]])
        own_key = self._key(ids, len(behind), params, prefix_ids, KEY_CONTEXTS[params.context])
        if self._disk.contains(own_key):
            chunk_ids = tuple(ids[slice(*own)])
            return (StoredSpan(*own, own_key, "exact", not behind, policy=params.context, chunk_ids=chunk_ids),)
        keys = [(span, self._key(ids, place, params, prefix_ids)) for place, span in enumerate(behind)]
        return tuple(
            StoredSpan(*span, key, "exact", exact=span[0] == len(prefix_ids), chunk_ids=tuple(ids[slice(*span)]))
            for span, key in keys
            if self._disk.contains(key)
        )

    def _persist_policy(self, policy: ContextPolicy) -> None:
        """Store the ingested chunk's context policy, unless one is configured or the store has "similar"."""
        self.context()  # reads it again
        if policy == "none" or self._config.context is not None or self._remembered not in (None, "none"):
            return
        try:
            self._disk.put_context(policy)
        except RagblendError as error:
            log.warning("%s", error)

    def _key(
        self,
        ids: Sequence[int],
        place: int,
        params: BlendParams,
        prefix_ids: Sequence[int],
        name: str = "",
    ) -> str:
        return chunk_key(self._fingerprint, prefix_ids, params.chunk_ids(ids, place), params.namespace, name)
