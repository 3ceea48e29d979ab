"""Four warnings for an engine that reuses nothing, each logged once per engine, with the command that helps.

Entries of a server or of a remote tier cannot be looked at: an engine over HTTP gives the last warning alone.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Sequence
from itertools import islice
from textwrap import shorten
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragblend.engine.base import EngineBase

log = logging.getLogger(__name__)

NUM_PROMPTS_BEFORE_WARNING = 3  # prompts without a match before NO_MATCH; later ones are not looked into
LONG_PROMPT = 256  # tokens; a prompt as long holds documents more often than not
MAX_HEADERS_READ = 64  # entries that are looked at
EMPTY = "nothing is stored yet; ingest the documents first: {ingest}"
OTHER_MODEL = "the store holds KV of other models or namespaces, none of {model}; add it: {precompute}"
OTHER_PREFIX = "the store holds KV behind another prefix, none behind this one ({system}); add it: {precompute}"
NO_MATCH = (
    f"nothing in {NUM_PROMPTS_BEFORE_WARNING} prompts is stored: the documents were not ingested, or with another "
    "tokenizer or namespace, or the application rewrites their text. To ingest them: {ingest}; to look closer: "
    "ragblend explain"
)


class ReuseDiagnostics:
    """Warns of prompts of which nothing is reused, until something is. Thread-safe."""

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._warned_causes: set[str] = set()
        self._num_missed = 0
        self.is_settled = False  # something was reused, or warned of: later prompts are not looked into

    def record_lookup(self, num_tokens: int, hits: Sequence[bool], *prefixes: tuple[int, ...]) -> None:
        """Told of a prompt in a mode that reuses chunks, and for each of its chunks whether it was stored.

        `prefixes`: ids that the prompt begins with and chunks may be stored after.
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
            return None  # a remote tier has said that it does not answer; what it holds is not known
        try:
            headers = list(islice(store.headers(), MAX_HEADERS_READ))
        except OSError:  # the answer is out; what is only good to know may not spoil it
            return None
        own = [each for each in headers if (each.fingerprint, each.namespace) == (engine.fingerprint, engine.namespace)]
        if not headers and len(store.remote_tiers) < len(store.tiers):
            return EMPTY
        if headers and not own:
            return OTHER_MODEL
        if own and not any(each.prefix_ids[: len(each.prefix_ids) - sum(each.context)] in prefixes for each in own):
            return OTHER_PREFIX
        return NO_MATCH if self._num_missed == NUM_PROMPTS_BEFORE_WARNING and not self._warned_causes else None

    def _facts(self) -> dict[str, str]:
        """What the warnings name: model, system text, and what to type; where no flags are known, what to call."""
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
