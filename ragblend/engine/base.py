"""Behaviour shared by all engines: settings and their checks, keys, chunks in prompts, background work, closing.

An engine adds a way to prefill (`precompute_ids`) and a way to answer (`request`, `stream`). Read `LocalEngine.match`
first. Depends on the renderer, the store's keys and its known chunks, not on a model or backend.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, NoReturn, Self

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.deletions import record_entries_on_put, run_deletions, schedule_deletions
from ragblend.engine.matching import open_known_chunks
from ragblend.engine.no_reuse_warnings import NoReuseWarnings
from ragblend.engine.report import ShadowCounters
from ragblend.engine.shadow import Shadow
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.tuning.calibration import CalibrationCache
from ragblend.errors import EngineClosedError, PromptTooLongError, RagblendError
from ragblend.option_fields import check_unicode, default_of
from ragblend.options import CONTEXT, ContextPolicy, LoadOptions
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun, MatchedPrompt, Part, Prompt, as_chunk

log = logging.getLogger(__name__)


class EngineBase:
    """Settings, checks and closing of any engine. Use it as a context manager, or `close()` it.

    `worker` runs background work in order; None starts a thread for it. `shadow` is the argument of `Shadow`. `flags`:
    the command-line options that name the model and the store, for the commands in messages.
    """

    calibrations: CalibrationCache | None = None
    """The calibrations of the store; None for an engine whose answers another process makes."""
    closed = False
    store: KVStore
    default_prefix_ids: tuple[int, ...] = ()
    neutral_ids: tuple[int, ...] = ()
    """Token ids between the prefix and a chunk when its neutral variant is computed."""
    context_length: int
    """Longest prompt plus answer, in tokens."""

    def __init__(
        self,
        *,
        name: str,
        fingerprint: str,
        system: str | None = None,
        namespace: str = "",
        on_miss: str = default_of(LoadOptions, "on_miss"),
        shadow: float = 0.0,
        flags: str = "",
        worker: Executor | None = None,
    ) -> None:
        LoadOptions(on_miss=on_miss)  # raises UsageError for an invalid value
        check_unicode(system or "", "the system text")
        check_unicode(namespace, "the namespace")
        self._process = os.getpid()
        self.name = name
        self.fingerprint = fingerprint
        self.system = system
        self.namespace = namespace
        self.flags = flags
        self.notices = NoReuseWarnings(self)
        self._worker = worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragblend-backfill")
        self._precompute_error: Exception | None = None  # the latest of background precompute
        self._shadow = Shadow(shadow)

    @property
    def is_usable(self) -> bool:
        """Return True if the engine is not closed, and was loaded by this process and not by its parent."""
        return not self.closed and self._process == os.getpid()

    def check_not_forked(self) -> None:
        """Raise RagblendError if this process was forked after the engine was loaded: the engine's calls would hang."""
        if self._process != os.getpid():
            raise RagblendError(
                f"the engine of {self.name} was loaded before this process was forked; the forked process has none of "
                "the engine's threads, so the call would hang. Load the engine in this process, or start processes by "
                "multiprocessing.get_context('spawn')"
            )

    def is_generating(self) -> bool:
        """Return True while requests of clients run that ingestion should not delay."""
        return False

    # -- answering

    def _check_prompt(self, prompt: Prompt, stop: Sequence[str]) -> None:
        """Raise EngineClosedError, or UsageError for text that is not valid Unicode."""
        if self.closed:
            raise EngineClosedError(f"the engine of {self.name} is closed; load it again")
        for chunk in prompt.chunks:
            check_unicode(chunk.text, "a chunk")
        for message in prompt.messages:
            check_unicode(message.content, f"the {message.role} text")
        for text in stop:
            check_unicode(text, "a stop string")

    @property
    def shadow(self) -> ShadowCounters:
        """Return the counters of shadow comparisons, which `load_engine(shadow=P)` turns on."""
        return self._shadow.counters

    def wait_for_precompute(self) -> None:
        """Wait until the background precompute is done; raise its latest error since the last call."""
        with suppress(EngineClosedError, RuntimeError):  # a closed engine has no more of it
            self._worker.submit(lambda: None).result()
        error, self._precompute_error = self._precompute_error, None
        if error is not None:
            raise error

    def flush_shadow(self) -> None:
        """Wait until the shadow comparison of every sampled request has run."""
        self._shadow.flush()

    def close(self) -> None:
        """Finish background work. Safe to call again.

        Open streams end at their next token, with finish reason "cancelled". Later requests raise EngineClosedError.
        """
        if not self.is_usable:
            return
        self.closed = True
        self._shadow.close()
        self._worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a model, threads and open files can be neither pickled nor copied."""
        raise TypeError(
            f"{type(self).__name__} holds a model, threads and locks of this process; it cannot be pickled or copied. "
            "Send the arguments of load_engine and load the engine there; BlendLLM(model=..., store=...) does this"
        )


class LocalEngine(EngineBase, ABC):
    """An engine that holds its tokenizer and its store. It computes keys, finds chunks in prompts and ingests.

    Subclasses prefill and answer. `on_miss` is for chunks of a prompt that are not in the store. "store" precomputes
    such a chunk alone, in the background, for later requests. "inline" computes the chunk's KV for this request only.
    `context`: the store's context policy (see `store.keys`). None is the policy that the store has recorded, or else
    "none".
    """

    def __init__(
        self,
        renderer: Renderer,
        store: KVStore,
        *,
        on_miss: str = default_of(LoadOptions, "on_miss"),
        context: ContextPolicy | None = None,
        num_layers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(on_miss=on_miss, **options)
        self.renderer = renderer
        self.store = store
        self._entry_ledger = record_entries_on_put(store)
        self.default_prefix_ids = renderer.prefix_ids(self.system, pins_date=True)
        if context is not None:
            CONTEXT.validate("context", context)
        policy = context or store.read_context_policy()
        self.num_layers = num_layers
        self.context: ContextPolicy = policy or "none"
        self._knows_context = policy is not None
        self.neutral_ids = renderer.neutral_ids
        self._stores_missing = on_miss == "store"
        # Opened here, and not at the first prompt: a catalogue that does not answer then must not fail the prompt.
        self.known_chunks = open_known_chunks(open_ledger(store), renderer.fingerprint, self.namespace)
        """The chunks of this store and namespace that the engine looks for in prompts."""

    # -- chunks in prompts

    def match(self, prompt: Prompt) -> MatchedPrompt:
        """Return the ids that the model reads for `prompt`, and the runs of known chunks in them.

        A run is a part of a chunk (see `KnownChunks.match`). Chunks that the prompt names are matched even if they are
        unknown, so that they are stored for later requests.
        """
        self.check_not_forked()
        start_s = perf_counter()
        token_ids = self.renderer.render(prompt)
        named = {ids: chunk for chunk in prompt.chunks if (ids := self.renderer.chunk_ids(chunk.text))}
        runs = self.known_chunks.match(token_ids, self.renderer.tail_ids if prompt.is_chat else (), named)
        prefix_ids = self._own_prefix(token_ids, prompt)
        return MatchedPrompt(token_ids, tuple(runs), prefix_ids, perf_counter() - start_s)

    def _own_prefix(self, token_ids: Sequence[int], prompt: Prompt) -> tuple[int, ...]:
        """Return the ids that the prompt begins with and chunks may be stored after; () if there are none."""
        prefix = self.renderer.added_ids[0]
        if prompt.is_chat:
            first = prompt.messages[0]
            prefix = self.renderer.prefix_ids(first.content if first.role == "system" else None)
        return prefix if tuple(token_ids[: len(prefix)]) == prefix else ()

    # -- ingestion

    def set_context_policy(self, policy: ContextPolicy) -> None:
        """Set the context policy for ingestion and lookup, and store it."""
        self.store.put_context_policy(CONTEXT.validate("context", policy))
        self.context, self._knows_context = policy, True

    def likely_keys(self, chunks: Sequence[Part]) -> list[str]:
        """Return the store keys that a prompt of these chunks is likely to use.

        These are the keys of all chunks under the store's context policy, and the key of the first chunk alone. If no
        policy is given or recorded, the keys of all chunks alone are added.
        """
        named = [as_chunk(chunk) for chunk in chunks]
        first = [replace(chunk, context="none") for chunk in (named[:1] if self._knows_context else named)]
        if self.context == "neutral":
            named = [replace(chunk, context="neutral") for chunk in named]
        return list(dict.fromkeys(map(self.key, (*first, *named))))

    def key(self, chunk: Part) -> str:
        """Return the store key of the variant that the chunk's `context` names, after the default prefix."""
        return self.key_of_ids(*self._chunk_ids(chunk))

    def key_of_ids(self, token_ids: Sequence[int], context: ContextPolicy = "none") -> str:
        """Return the store key of a variant of a chunk that is given as token ids."""
        return chunk_key(self.fingerprint, self.ids_before(context), token_ids, self.namespace)

    def ids_before(self, context: ContextPolicy) -> tuple[int, ...]:
        """Return the ids after which a variant is computed: the default prefix, and the neutral text for "neutral"."""
        return self.default_prefix_ids + (self.neutral_ids if context == "neutral" else ())

    def has_kv(self, chunk_ids: Sequence[int]) -> bool:
        """Return True if the store has the KV of the chunk with these token ids alone.

        `is_stored` checks the variant that a Chunk names.
        """
        return self.store.contains(self.key_of_ids(chunk_ids))

    def is_stored(self, chunk: Part) -> bool:
        """Return True if the store has an entry for `key(chunk)`."""
        return self.store.contains(self.key(chunk))

    def precompute(self, chunk: Part) -> int:
        """Prefill the variant that the chunk's `context` names, and store its KV.

        Returns the number of bytes stored, 0 if the KV was stored already.
        """
        token_ids, context = self._chunk_ids(chunk)
        self.add_known_chunks([chunk])
        return self.precompute_ids(token_ids, context)

    def add_known_chunks(self, chunks: Iterable[Part]) -> None:
        """Add chunks to the known chunks: their token ids are matched in later prompts. Their KV is not computed."""
        self.check_not_forked()
        texts = dict.fromkeys(as_chunk(chunk).text for chunk in chunks)
        for text in texts:
            check_unicode(text, "a chunk")
        self.known_chunks.add(texts, self.renderer.chunk_ids)

    @abstractmethod
    def precompute_ids(self, token_ids: tuple[int, ...], context: ContextPolicy = "none") -> int:
        """Prefill and store a variant of a chunk that is given as token ids.

        Returns the number of bytes stored, 0 if the KV was stored already.
        """

    def forget(self, chunk: Part) -> bool:
        """Delete the KV that is stored under `key(chunk)`. Return True if there was any.

        Later prompts still match a chunk whose `context` is "neutral", because its KV alone is kept. They do not match
        other forgotten chunks.
        """
        named, key = as_chunk(chunk), self.key(chunk)
        with open_ledger(self.store) as ledger:
            schedule_deletions({key: ""}, self.store, ledger)  # first: after a kill, the next deletion continues
            if named.context != "neutral":
                self.known_chunks.remove(named.text)
            return key in run_deletions(self.store, ledger)

    def _chunk_ids(self, chunk: Part) -> tuple[tuple[int, ...], ContextPolicy]:
        """Return the chunk's token ids, and the context of the variant that it names."""
        named = as_chunk(chunk)
        check_unicode(named.text, "a chunk")
        return self.renderer.chunk_ids(named.text), named.context or "none"

    # -- background work

    def _check_length(self, num_tokens: int, what: Literal["chunk", "prompt"]) -> None:
        if num_tokens > self.context_length:
            fix = {
                "chunk": "split it into smaller chunks (of an ingestion: `chunk_size`)",
                "prompt": "retrieve fewer chunks (`k`), or ingest with a smaller `chunk_size`",
            }
            raise PromptTooLongError(
                f"the {what} takes {num_tokens} tokens, {self.name} reads {self.context_length}; {fix[what]}"
            )

    def precompute_in_background(self, misses: Iterable[ChunkRun]) -> None:
        """Precompute the chunks of the runs `misses` in the background.

        Each chunk is a separate task, so that a request waits for at most one. Does nothing if `on_miss` is "inline",
        the engine is closed or the interpreter exits.
        """
        if not self._stores_missing or self.closed:
            return
        for run in {run.chunk_ids: run for run in misses}.values():
            try:
                self._worker.submit(self._store_missing, run)
            except (EngineClosedError, RuntimeError) as error:
                log.debug("a missed chunk is not stored: %s", error)

    def _store_missing(self, run: ChunkRun) -> None:
        try:
            if run.chunk is not None:
                self.add_known_chunks([run.chunk])
            self.precompute_ids(run.chunk_ids)
        except Exception as error:
            # The answer is complete already; a full disk must not end the process.
            log.warning("a missed chunk was not stored: %s", error)
            self._precompute_error = error

    def close(self) -> None:
        """Finish background work. Safe to call again."""
        if not self.is_usable:
            return
        super().close()
        self.known_chunks.close()
        if self._entry_ledger is not None:
            self._entry_ledger.close()
