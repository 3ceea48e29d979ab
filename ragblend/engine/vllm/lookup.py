"""Which chunks a request has, and which of them are stored on this machine, found out beside vLLM's scheduling.

On a slow disk, or one behind a network, a header takes as long as a layer. So it is read by threads: who schedules
waits for `PATIENCE_S`, which a local disk does not use up, and otherwise looks again at a later step. Knows keys and
stores, and has prompts matched; knows neither vLLM nor what becomes of what it finds.
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
from ragblend.engine.vllm.params import BlendParams
from ragblend.engine.vllm.worker import StoredSpan
from ragblend.errors import RagblendError
from ragblend.options import ContextPolicy

log = logging.getLogger(__name__)

PATIENCE_S = 0.003
NUM_LOOKUPS = 4  # requests that are looked up at the same time


class LookupResult(NamedTuple):
    """What is stored of a prompt's chunks, and keys of what the remote tier may have instead.

    `params` are the request's, with the chunks that were found in its ids; `match_s`: seconds that took.
    """

    params: BlendParams
    stored: tuple[StoredSpan, ...] = ()
    missing: tuple[str, ...] = ()
    match_s: float | None = None


class ChunkLookup:
    """Looks chunks up in `disk`, behind the contexts that the store's policy and `config` name.

    fingerprint: of the model, whose num_layers decide the default policy. `matcher` finds chunks in prompts that name
    none; without one there are none. `close` ends the threads.
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
        """Have the prompt `ids` looked up.

        asks_remote: nothing but `missing` is looked for where anything is missing that another machine may have.
        """
        return self._pool.submit(self._find, ids, params, asks_remote)

    def close(self) -> None:
        """Give up what nobody has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._matcher is not None:
            self._matcher.close()

    def context(self) -> ContextPolicy:
        """What the store's chunks are computed behind, as far as is known."""
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
        match_s = None
        if not params.spans:
            start_s = perf_counter()
            params = self._match(ids, params)
            match_s = perf_counter() - start_s
        candidates = list(self._candidates(ids, params))
        missing = self._missing(candidates) if asks_remote else ()
        stored = () if missing else tuple(self._find_stored(ids, params, candidates))
        return LookupResult(params, stored, missing, match_s)

    def _match(self, ids: Sequence[int], params: BlendParams) -> BlendParams:
        if self._matcher is None:
            return params
        try:
            return params.with_runs(self._matcher.find_runs(ids, params.namespace))
        except RagblendError as error:
            log.warning("no chunks are looked for in a prompt: %s", error)
            return params

    def _candidates(
        self, ids: Sequence[int], params: BlendParams
    ) -> Iterator[tuple[int, int, list[tuple[str, LookupContext]]]]:
        """For each chunk where it is, and the keys that it may be stored under, the best one first."""
        if not params.spans:
            return
        prefixes, policy = (params.prefix_ids(ids), self.prefix_ids), self.context()
        for place, (start, end) in enumerate(params.spans):
            is_beginning = params.chunk_start(place) == 0
            found = lookup_contexts(ids, start, prefixes, policy, is_beginning=is_beginning)
            keys = [self._key(ids, place, params, each.token_ids, each.name) for each in found]
            yield start, end, list(zip(keys, found, strict=True))

    def _missing(self, candidates: Sequence[tuple[int, int, list[tuple[str, LookupContext]]]]) -> tuple[str, ...]:
        """Keys not on this machine that would be better than what is."""
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
        """Stored chunks of the prompt, each from the best context that it is stored behind."""
        for place, (start, end, keys) in enumerate(candidates):
            chunk_ids, chunk_start = params.chunk_ids(ids, place), params.chunk_start(place)
            for key, context in keys:
                kv = self._disk.peek(key)
                if kv is not None and kv.header.token_ids == chunk_ids:
                    facts = (context.match, context.exact, context.policy, kv.nbytes)
                    yield StoredSpan(start, end, key, *facts, chunk_ids, chunk_start)
                    break

    def _find_for_ingestion(self, ids: Sequence[int], params: BlendParams) -> tuple[StoredSpan, ...]:
        """What an ingestion finds stored: the chunk itself, or else those of the chunks that it is to be behind."""
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
        """Have the store remember what is ingested into it, where it remembers nothing and nobody has said."""
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
