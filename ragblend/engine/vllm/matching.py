"""Stored chunks in the token ids of prompts, whatever client they came from, and salts for vLLM's own prefix cache.

`PromptMatcher` does for the scheduler what `LocalEngine.match` does where the prompt is rendered here. Knows token ids,
the store's registry and the template's last ids. Knows nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from ragblend.catalog.known_chunks import KnownChunks, open_known_chunks
from ragblend.catalog.registry import open_registry
from ragblend.engine.base import LEAST_QUOTE, turn_end
from ragblend.engine.store.base import KVStore
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun

_NAMESPACES_OPEN = 64  # clients choose cache salts, and each is a namespace of its own
_PROMPTS_KEPT = 1024


class PromptMatcher:
    """Finds runs of the chunks that the registry of `store` has of the tokenizer of `renderer`. Thread-safe."""

    def __init__(self, store: KVStore, renderer: Renderer) -> None:
        self._registry, self._fingerprint = open_registry(store), renderer.fingerprint
        self.tail_ids = renderer.tail_ids
        self.prefix_ids = renderer.prefix_ids(pins_date=True)
        self._known = lru_cache(_NAMESPACES_OPEN)(self._open)

    def find_runs(self, token_ids: Sequence[int], namespace: str) -> list[ChunkRun]:
        """Return the runs of a namespace's chunks in a prompt, without a question that quotes one.

        The prompt's last token is in none: vLLM must have one to sample from. Raises RagblendError for a damaged
        registry.
        """
        runs = self._known(namespace).find_runs(token_ids)
        if runs and runs[-1].num_tokens < LEAST_QUOTE and runs[-1].end >= turn_end(token_ids, self.tail_ids):
            runs.pop()
        last = len(token_ids) - 1
        if runs and runs[-1].end > last:
            runs[-1] = runs[-1].within(0, last)
        return runs

    def close(self) -> None:
        """Free the registry's file."""
        self._known.cache_clear()
        self._registry.close()

    def _open(self, namespace: str) -> KnownChunks:
        return open_known_chunks(self._registry, self._fingerprint, namespace)


class ConversationSalts:
    """Salts under which blended KV is kept in vLLM's prefix cache, found there by prompts that go on from an earlier
    one and by nobody else.

    A prompt that only begins with the same chunks gets another salt: which of their tokens were recomputed depends on
    the question. `tail_ids`: what the template writes after the last user turn.
    """

    def __init__(self, tail_ids: Sequence[int]) -> None:
        self._tail_ids = tuple(tail_ids)
        self._key = os.urandom(32)  # so that no client can name another's salt
        self._salts: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # by digest: the prompt's length, and its salt
        self._lengths: Counter[int] = Counter()

    def salt_for(self, token_ids: Sequence[int], settings: tuple[object, ...]) -> str:
        """Return the salt of a prompt that is blended by `settings`: everything that decides what its KV will be.

        It is that of the longest earlier prompt with the same settings that this one begins with.
        """
        ids, end = array("Q", token_ids), turn_end(token_ids, self._tail_ids)
        digest = hashlib.blake2b(repr(settings).encode(errors="surrogatepass"), digest_size=16, key=self._key)
        salt, start = "", 0
        for length in sorted(length for length in self._lengths if length <= end):
            digest.update(ids[start:length])
            start = length
            known = self._salts.get(digest.digest())
            if known is not None:
                self._salts.move_to_end(digest.digest())
                salt = known[1]
        digest.update(ids[start:end])
        self._add(digest.digest(), end, salt or f"ragblend-{digest.hexdigest()}")
        return self._salts[digest.digest()][1]

    def _add(self, key: bytes, length: int, salt: str) -> None:
        if key in self._salts:
            return
        self._salts[key] = length, salt
        self._lengths[length] += 1
        if len(self._salts) > _PROMPTS_KEPT:
            _, (gone, _) = self._salts.popitem(last=False)
            self._lengths[gone] -= 1
            if not self._lengths[gone]:
                del self._lengths[gone]
