"""Matching of a request's prompt and lookup of its chunks on this machine, in threads of vLLM's scheduler process.

On a slow or network disk, reading a header takes as long as computing a layer, so threads read it. The scheduler waits
for at most `PATIENCE_S`, which is enough for a local disk, and then polls at later steps. Depends on keys, stores and
the prompt matcher, not on vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from ragblend.engine.base import default_context_policy
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import LookupContext, chunk_key, lookup_contexts
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.jobs import StoredSpan
from ragblend.engine.vllm.params import MAX_RUNS, BlendParams
from ragblend.engine.vllm.scheduler_side.matching import PromptMatcher
from ragblend.engine.vllm.scheduler_side.turns import turn_ends
from ragblend.errors import RagblendError
from ragblend.options import ContextPolicy
from ragblend.prompt.types import ChunkRun

log = logging.getLogger(__name__)

PATIENCE_S = 0.003
NUM_LOOKUPS = 4  # lookups that run at the same time


class LookupResult(NamedTuple):
    """The result of looking up a prompt's chunks."""

    runs: tuple[ChunkRun, ...]  # parts of the prompt that equal a chunk, or a part of one
    stored: tuple[StoredSpan, ...] = ()  # the runs whose chunk has a stored entry
    missing: tuple[str, ...] = ()  # keys of entries that this machine does not have, but the remote tier may have
    match_s: float = 0.0  # seconds that matching the prompt took
    turn_ends: tuple[int, ...] = ()  # positions at which the prompt's turns end


class ChunkLookup:
    """Finds the chunks in prompts by `matcher`, and the chunks' entries in `disk`.

    Without a matcher, no chunk is found. `fingerprint` and `num_layers` are the model's. `close` ends the threads.
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
        self._remembered, self._default = disk.read_context_policy(), default_context_policy(num_layers)
        self._matcher = matcher
        self.prefix_ids = config.prefix_ids or (matcher.prefix_ids if matcher is not None else ())
        self._neutral_ids = matcher.neutral_ids if matcher is not None else ()
        self._pool = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="ragblend-lookup")
        if matcher is not None:
            self._pool.submit(matcher.find_runs, (), "")  # builds the token index before any request

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
        the result's `missing` has the keys of a chunk's variants that are better than its best one on this machine. If
        this machine has none, these are all variants. The remote tier may have them. If `missing` is not empty,
        `stored` is empty. Fetch the variants, and start the lookup again with `asks_remote=False`.
        """
        return self._pool.submit(self._find, ids, params, runs, asks_remote)

    def candidate_keys(self, ids: Sequence[int], namespace: str) -> list[tuple[ChunkRun, list[str]]]:
        """Return the prompt's runs, each with the keys under which its chunk may be stored in any tier, best first."""
        found = self._candidates(ids, self._match(ids, namespace), namespace)
        return [(run, [key for key, _ in keys]) for run, keys in found]

    def close(self) -> None:
        """Cancel the lookups that have not begun, and close the matcher."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._matcher is not None:
            self._matcher.close()

    def context_policy(self) -> ContextPolicy:
        """Return the context policy: the configured one, else the store's own, else the default for the model."""
        if self._config.context is not None:
            return self._config.context
        try:
            self._remembered = self._disk.read_context_policy()
        except RagblendError as error:  # the file was valid when the server started
            log.warning("%s", error)
        return self._remembered or self._default

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
        candidates = list(self._candidates(ids, runs, params.namespace))
        missing = self._missing(candidates) if asks_remote else ()
        stored = () if missing else tuple(self._find_stored(candidates))
        ends = turn_ends(ids, self._matcher.tail_ids if self._matcher is not None else (), runs) if stored else ()
        return LookupResult(runs, stored, missing, match_s, tuple(ends))

    def _match(self, ids: Sequence[int], namespace: str) -> tuple[ChunkRun, ...]:
        if self._matcher is None:
            return ()
        try:
            return tuple(self._matcher.find_runs(ids, namespace)[:MAX_RUNS])
        except RagblendError as error:
            log.warning("a prompt was not searched for chunks: %s", error)
            return ()

    def _candidates(
        self, ids: Sequence[int], runs: Sequence[ChunkRun], namespace: str
    ) -> Iterator[tuple[ChunkRun, list[tuple[str, LookupContext]]]]:
        """Yield each run with the keys under which its chunk may be stored, the best key first."""
        if not runs:
            return
        prefixes = tuple(ids[: runs[0].start]), self.prefix_ids
        neutral_ids = self._neutral_ids if self.context_policy() == "neutral" else ()
        for run in runs:
            found = lookup_contexts(ids, run.start, prefixes, neutral_ids, is_beginning=run.chunk_start == 0)
            yield run, [(self._key(run, namespace, each.token_ids), each) for each in found]

    def _missing(self, candidates: Sequence[tuple[ChunkRun, list[tuple[str, LookupContext]]]]) -> tuple[str, ...]:
        """Return the keys that are better than the best key whose entry is on this machine."""
        missing: dict[str, None] = {}
        for _, keys in candidates:
            for key, _ in keys:
                if self._disk.contains(key):
                    break
                missing[key] = None
        return tuple(missing)

    def _find_stored(
        self, candidates: Sequence[tuple[ChunkRun, list[tuple[str, LookupContext]]]]
    ) -> Iterator[StoredSpan]:
        """Yield the stored chunks of the prompt, each in its best stored variant."""
        for run, keys in candidates:
            for key, context in keys:
                kv = self._disk.peek(key)
                if kv is not None and kv.header.token_ids == run.chunk_ids:
                    facts = (context.match, context.exact, context.policy, kv.nbytes)
                    yield StoredSpan(run.start, run.end, key, *facts, run.chunk_ids, run.chunk_start)
                    break

    def _find_for_ingestion(self, ids: Sequence[int], params: BlendParams) -> LookupResult:
        """Return the chunk to ingest as the only run, with its entry if it is stored."""
        assert params.span is not None
        start, end = params.span
        run = ChunkRun(tuple(ids[start:end]), 0, start, end)
        key = self._key(run, params.namespace, tuple(ids[:start]))
        is_stored = self._disk.contains(key)
        span = StoredSpan(start, end, key, "exact", exact=True, chunk_ids=run.chunk_ids)
        return LookupResult((run,), (span,) if is_stored else ())

    def _key(self, run: ChunkRun, namespace: str, prefix_ids: Sequence[int]) -> str:
        return chunk_key(self._fingerprint, prefix_ids, run.chunk_ids, namespace)
