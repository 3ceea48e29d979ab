"""Diagnostics for prompts without reuse: four warnings, each logged once per engine, with the command that fixes it.

The entries of a server or a remote tier cannot be listed, so an engine over HTTP logs only the warning NO_MATCH.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Sequence
from itertools import islice
from textwrap import shorten
from typing import Protocol

from ragblend.engine.store.base import KVStore

log = logging.getLogger(__name__)

NUM_PROMPTS_BEFORE_WARNING = 3  # prompts without a match before NO_MATCH; later ones are not examined
LONG_PROMPT = 256  # tokens; a prompt of this length usually contains documents
MAX_HEADERS_READ = 64  # entries that are examined
EMPTY = "nothing is stored yet; ingest the documents first: {ingest}"
OTHER_MODEL = "the store holds KV of other models or namespaces, none of {model}; add it: {precompute}"
OTHER_PREFIX = "the store holds KV after other prefixes, none after this one ({system}); add it: {precompute}"
NO_MATCH = (
    f"{NUM_PROMPTS_BEFORE_WARNING} prompts contained no stored chunk: the documents were not ingested, or with another "
    "tokenizer or namespace, or the application rewrites their text. Ingest them: {ingest}; or compare a prompt with "
    "the store: ragblend explain --prompt FILE --store DIR"
)


class _Engine(Protocol):
    """What the warnings need of an engine."""

    name: str
    fingerprint: str
    system: str | None
    namespace: str
    flags: str
    default_prefix_ids: tuple[int, ...]
    neutral_ids: tuple[int, ...]
    store: KVStore


class NoReuseWarnings:
    """Logs why prompts reuse nothing, one warning for each cause. Thread-safe.

    Prompts are examined until one prompt has reused a chunk, or until NUM_PROMPTS_BEFORE_WARNING have reused nothing.
    """

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._warned_causes: set[str] = set()
        self._num_missed = 0
        self.is_settled = False  # a chunk was reused, or all warnings were logged: later prompts are not examined

    def record_lookup(self, num_tokens: int, hits: Sequence[bool], *prefixes: tuple[int, ...]) -> None:
        """Record the lookup of a prompt of `num_tokens` tokens. If it reused nothing, log the cause, once per cause.

        Call this for modes with reuse only. `hits`: for each chunk of the prompt, True if it was stored. A prompt
        without chunks is recorded only if it has at least LONG_PROMPT tokens. `prefixes`: ids at the beginning of the
        prompt. A stored chunk can be reused if it was computed after one of the prefixes.
        """
        if any(hits):
            self.is_settled = True
        if not hits and num_tokens < LONG_PROMPT:
            return
        with self._lock:
            if not self.is_settled:
                self._num_missed += 1
                self.is_settled = self._num_missed == NUM_PROMPTS_BEFORE_WARNING
                cause = self._cause((self._engine.default_prefix_ids, *prefixes))
                if cause is not None and cause not in self._warned_causes:
                    self._warned_causes.add(cause)
                    log.warning("nothing was reused: %s", cause.format(**self._facts()))

    def _cause(self, prefixes: Sequence[tuple[int, ...]]) -> str | None:
        engine, store = self._engine, self._engine.store
        if any(tier.counters.num_failures for tier in store.tiers):
            return None  # a remote tier fails, so its entries are unknown
        try:
            headers = list(islice(store.headers(), MAX_HEADERS_READ))
        except OSError:  # a diagnostic must not fail an answer that is complete
            return None
        usable = [
            each for each in headers if (each.fingerprint, each.namespace) == (engine.fingerprint, engine.namespace)
        ]
        if not headers and not all(tier.is_remote for tier in store.tiers):
            return EMPTY
        if headers and not usable:
            return OTHER_MODEL
        expected_prefixes = {*prefixes, *(prefix + engine.neutral_ids for prefix in prefixes)}
        if usable and expected_prefixes.isdisjoint(each.prefix_ids for each in usable):
            return OTHER_PREFIX
        return NO_MATCH if self._num_missed == NUM_PROMPTS_BEFORE_WARNING and not self._warned_causes else None

    def _facts(self) -> dict[str, str]:
        """Return the values for the warnings: model, system text, and the command, or the function without flags."""
        engine, system, flag = self._engine, "no system text", ""
        if engine.system is not None:
            system = repr(shorten(engine.system, 60, placeholder="..."))
            flag = (
                f" --system {shlex.quote(engine.system)}" if engine.system.isprintable() else ' --system "$(cat FILE)"'
            )
        called = "ragblend.precompute.precompute_documents(documents, llm)"
        typed = f"{engine.flags}{flag}, or from Python {called}" if engine.flags else ""
        return {
            "model": f"{engine.name} in {engine.namespace!r}" if engine.namespace else engine.name,
            "system": system,
            "ingest": f"ragblend ingest DOCS {typed}" if typed else called,
            "precompute": f"ragblend precompute {typed}" if typed else called,
        }
