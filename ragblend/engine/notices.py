"""One line instead of silence: why an engine reuses nothing, and the command that mends it.

Each cause is said once per engine, as a warning of this module's logger. What can be known depends on the engine: one
that sees its store's files (transformers, vLLM in this process) looks at the headers of a few entries; a client of a
server can only ask whether a key is stored there, so it knows KV behind no system text, and nothing of other prefixes.

Knows keys, stores' headers and prompts as token ids. Knows no model, and nothing of how an answer is made.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Protocol

from ragblend.engine.fusion.lookup import Behind
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import KVHeader
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import is_far, tiers_of
from ragblend.errors import RagblendError
from ragblend.prompt.prompt import TokenizedPrompt
from ragblend.prompt.segmenter import Segmenter

log = logging.getLogger(__name__)

PATIENCE = 3  # requests without a hit before one is warned of for which no cause was found
NUM_LOOKS = 8  # requests whose missing chunks are looked for elsewhere: later ones miss for reasons of their own
NUM_HEADERS = 64  # entries looked at to see what a store holds
LOOK_S = 1.0  # longest search for missing chunks elsewhere: a server that is asked for them may take its time
MAX_PREFIXES = 4  # other prefixes that missing chunks are looked for behind
LONG_TEXT = 1000  # characters; a text as long holds documents more often than not

_FROM_PYTHON = "ragblend.precompute.precompute_documents(documents, llm)"


class Noticing(Protocol):
    """What Notices must know of its engine."""

    name: str
    fingerprint: str
    segmenter: Segmenter
    store: KVStore
    system: str | None
    namespace: str
    default_prefix_ids: tuple[int, ...]

    @property
    def main_version(self) -> Behind: ...  # noqa: D102


class Notices:
    """Watches one engine's requests and says once, for each cause, why nothing is reused. Thread-safe; never raises.

    `flags`: how a command of ours names the engine's model and store; "" where none can. `stores_misses`: whether
    missing chunks are stored for the next time. A prompt without chunks says nothing, and neither does a hit.
    """

    def __init__(self, engine: Noticing, *, flags: str = "", stores_misses: bool = True) -> None:
        self._engine, self.flags, self._stores_misses = engine, flags, stores_misses
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._num_looks = 0
        self._num_missing = self._num_prompts = 0  # chunks, and the prompts they stood in, before the first hit
        self._has_hit = self._has_chunks = False
        self._num_unknown = 0  # long prompts in which no chunk was recognised, before one was
        self._has_texts = False  # whether texts had been ingested by then

    def answered(self, prompt: TokenizedPrompt, hits: Sequence[bool]) -> None:
        """Told that a prompt was answered in a mode that reuses chunks, and for each of them whether it was stored."""
        segments = [segment for segment in prompt.chunk_segments if segment.token_ids]
        missing = [segment.token_ids for segment, hit in zip(segments, hits, strict=False) if not hit]
        with self._lock:
            self._has_chunks |= bool(segments)
            self._has_hit |= any(hits)
            looks = bool(missing) and self._num_looks < NUM_LOOKS
            self._num_looks += looks
            if missing and not self._has_hit:
                self._num_prompts += 1
                self._num_missing += len(missing)
        if not looks:
            return
        try:
            self._explain(missing, len(segments), prompt.prefix_ids)
        except (RagblendError, OSError) as error:  # the answer is out; what is only good to know may not spoil it
            log.debug("why %d chunks were not stored is not known: %s", len(missing), error)

    def recognised_nothing(self, num_characters: int, has_texts: Callable[[], bool]) -> None:
        """Told of a prompt in which no chunk was recognised: how long its longest text is, whether any was ingested.

        Some prompts hold no document, so short ones do not count, and a single one is no reason to speak.
        """
        if num_characters < LONG_TEXT or self._has_chunks or "unknown" in self._said:
            return
        known = has_texts()
        with self._lock:
            self._num_unknown, self._has_texts = self._num_unknown + 1, known
            is_due = self._num_unknown == PATIENCE
        if is_due:
            self._say_unknown()

    def close(self) -> None:
        """Told that the engine is closed: a script that asks once hears now what others hear after a few requests."""
        if self._num_unknown and not self._has_chunks and not self._has_texts:
            self._say_unknown()
        if self._num_prompts and not self._has_hit:
            self._say_missing()

    # -- causes

    def _explain(self, missing: Sequence[tuple[int, ...]], num_chunks: int, prefix_ids: tuple[int, ...]) -> None:
        engine, place = self._engine, self._place()
        headers = list(islice(chain.from_iterable(tier.headers() for tier in self._local_tiers), NUM_HEADERS))
        own = [each for each in headers if (each.fingerprint, each.namespace) == (engine.fingerprint, engine.namespace)]
        until_s = monotonic() + LOOK_S
        for other in self._other_prefixes(own, prefix_ids):
            keys = (chunk_key(engine.fingerprint, other, ids, engine.namespace) for ids in missing)
            num_there = sum(monotonic() < until_s and self._holds(key) for key in keys)
            if num_there:
                self._say(
                    "prefix",
                    f"{num_there} of the {num_chunks} chunks of a prompt are stored in {place} behind another prefix "
                    f"({self._described(other)}) and are not reused behind this one "
                    f"({self._described(engine.default_prefix_ids)}). Compute them behind it, once: "
                    f"{self._command('precompute')}",
                )
                return
        if self._has_hit or self._is_cut_off:
            return
        if not headers and self._local_tiers:
            then = (
                "and are being stored for the next prompt that has them (on_miss='store'). To have all before the "
                "first question"
                if self._stores_misses
                else "and so they will be again (on_miss='inline' stores nothing). Ingest first"
            )
            self._say(
                "empty",
                f"nothing was stored in {place} yet: {_chunks(num_chunks)} of a prompt had to be prefilled, {then}: "
                f"{self._command('ingest DOCS')}",
            )
        elif headers and not own and len(headers) < NUM_HEADERS:
            self._say(
                "others",
                f"{place} holds KV of other models or namespaces, none of {engine.name}"
                f"{f' in {engine.namespace!r}' if engine.namespace else ''}: {_chunks(num_chunks)} of a prompt had to "
                f"be prefilled. Add it: {self._command('precompute')}",
            )
        elif self._num_prompts >= PATIENCE:
            self._say_missing()

    def _say_missing(self) -> None:
        if self._said or self._is_cut_off:
            return
        prompts = "a prompt" if self._num_prompts == 1 else f"the first {self._num_prompts} prompts"
        self._say(
            "missing",
            f"{'none' if self._num_missing > 1 else 'not one'} of the {self._num_missing} chunks in {prompts} was "
            f"stored in {self._place()}. Stored is what was ingested, to the letter: {self._command('ingest DOCS')}",
        )

    def _say_unknown(self) -> None:
        if self._has_texts:
            text = (
                f"no ingested text was found in the first {self._num_unknown} long prompts, so nothing was reused. A "
                "chunk is found when it stands in the prompt word for word: compare with what was ingested, or name "
                "the chunks, segments=[...]; strict=True raises instead"
            )
        else:
            what = "a prompt was" if self._num_unknown == 1 else f"{self._num_unknown} prompts were"
            text = (
                f"nothing was ingested into {self._place()}, so {what} prefilled in full. Ingest the documents first: "
                f"{self._command('ingest DOCS')}"
            )
        self._say("unknown", text)

    def _say(self, cause: str, text: str) -> None:
        with self._lock:
            if cause in self._said:
                return
            self._said.add(cause)
        log.warning("%s", text)

    # -- what is where

    @property
    def _is_cut_off(self) -> bool:
        """Whether a remote tier did not answer: it has said so itself, and what it holds is not known."""
        return any(tier.counters.num_failures for tier in tiers_of(self._engine.store))

    @property
    def _local_tiers(self) -> list[DiskStore | MemoryStore]:
        """Those whose entries can be looked at: a remote tier's or a server's cannot."""
        return [tier for tier in tiers_of(self._engine.store) if isinstance(tier, DiskStore | MemoryStore)]

    def _other_prefixes(self, own: Sequence[KVHeader], prefix_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        engine = self._engine
        often = Counter(header.prefix_ids for header in own if not header.context).most_common()
        plain = engine.segmenter.default_prefix_ids()
        found = dict.fromkeys([plain, plain + engine.main_version.token_ids, *(ids for ids, _ in often)])
        for tried in (prefix_ids, engine.default_prefix_ids):
            found.pop(tried, None)
            found.pop(tried + engine.main_version.token_ids, None)
        return list(found)[:MAX_PREFIXES]

    def _holds(self, key: str) -> bool:
        """Whether a tier has `key`; a remote tier is not asked, which may take its time."""
        near = [tier for tier in tiers_of(self._engine.store) if not is_far(tier)]
        return any(tier.contains(key) for tier in near)

    # -- words

    def _place(self) -> str:
        """Where entries outlive the process, without passwords."""
        found = []
        for tier in tiers_of(self._engine.store):
            places = (getattr(tier, "url", None), getattr(getattr(tier, "values", None), "url", None))
            found += [place for place in (*places, getattr(tier, "root", None)) if isinstance(place, str | Path)][:1]
        return f"the store {' and '.join(map(str, found))}" if found else "memory"

    def _described(self, prefix_ids: tuple[int, ...]) -> str:
        """A prefix in a few words, without the fixed text behind it."""
        fixed = self._engine.segmenter.fixed_ids
        if fixed and prefix_ids[-len(fixed) :] == fixed:
            prefix_ids = prefix_ids[: -len(fixed)]
        if prefix_ids == self._engine.segmenter.default_prefix_ids():
            return "no system text"
        if prefix_ids == self._engine.default_prefix_ids and self._engine.system:
            text = self._engine.system
        else:
            text = self._engine.segmenter.decode(prefix_ids)
        line = " ".join(text.split())
        return repr(line if len(line) <= 60 else f"{line[:57]}...")

    def _command(self, command: str) -> str:
        """What to type, and what to call where there is nothing to type."""
        if not self.flags:
            return _FROM_PYTHON
        system = self._engine.system
        if system is None:
            shown = ""
        elif len(system) <= 200 and system.isprintable():
            shown = f" --system {shlex.quote(system)}"
        else:  # still one line
            shown = ' --system "$(cat FILE)" with the system text in FILE'
        return f"ragblend {command} {self.flags}{shown}, or from Python {_FROM_PYTHON}"


def _chunks(count: int) -> str:
    return "the only chunk" if count == 1 else f"all {count} chunks"
