"""Matching of prompts' token ids against stored chunks, and salts of blended KV in vLLM's own prefix cache.

`PromptMatcher` matches prompts that any client rendered; `LocalEngine.match` does the same where this process renders
the prompt. Depends on token ids, the store's chunk registry and the chat template's last ids, not on vLLM.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache, partial

from ragblend.catalog.known_chunks import open_known_chunks
from ragblend.catalog.registry import open_registry
from ragblend.engine.base import ends_with_quotation, last_turn_end
from ragblend.engine.store.base import KVStore
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun

_NAMESPACES_OPEN = 64  # token indexes in memory; every cache salt that a client chooses is a separate namespace
_PROMPTS_KEPT = 1024


class PromptMatcher:
    """Finds chunks in the token ids of prompts. It knows the chunks in the registry of `store`. Thread-safe.

    Only chunks whose token ids come from the tokenizer of `renderer` are found.
    """

    def __init__(self, store: KVStore, renderer: Renderer) -> None:
        self._registry = open_registry(store)
        self.tail_ids = renderer.tail_ids
        self.prefix_ids = renderer.prefix_ids(pins_date=True)
        self._known = lru_cache(_NAMESPACES_OPEN)(partial(open_known_chunks, self._registry, renderer.fingerprint))

    def find_runs(self, token_ids: Sequence[int], namespace: str) -> list[ChunkRun]:
        """Return the prompt's runs in order. A run equals a whole chunk of the namespace, or a part of a chunk.

        A short run at the end of the question is left out, because it may be a quotation. The prompt's last token is in
        no run, because vLLM has to compute this token before it can sample. Raises RagblendError for a damaged
        registry.
        """
        runs = self._known(namespace).find_runs(token_ids)
        if ends_with_quotation(runs, token_ids, self.tail_ids):
            runs.pop()
        last = len(token_ids) - 1
        if runs and runs[-1].end > last:
            runs[-1] = runs[-1].within(0, last)
        return runs

    def close(self) -> None:
        """Close the registry."""
        self._known.cache_clear()
        self._registry.close()


class ConversationSalts:
    """Salts of prompts in vLLM's prefix cache. Only prompts with the same salt share blended KV there.

    All turns of a conversation get one salt. Another conversation gets another salt even if it begins with the same
    chunks, because its question determines which of their tokens are recomputed. `tail_ids`: the ids that the chat
    template writes after the last user turn.
    """

    def __init__(self, tail_ids: Sequence[int]) -> None:
        self._tail_ids = tuple(tail_ids)
        self._key = os.urandom(32)  # so that no client can compute another client's salt
        self._salts: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # by digest: the prompt's length, and its salt
        self._lengths: Counter[int] = Counter()

    def salt_for(self, token_ids: Sequence[int], settings: tuple[object, ...]) -> str:
        """Return the salt of the longest earlier prompt with which this prompt begins, else a new salt.

        Prompts are compared up to the end of their last user turn. `settings`: everything on which the blended KV
        depends, except the token ids. Only prompts with equal settings share a salt.
        """
        ids, end = array("Q", token_ids), last_turn_end(token_ids, self._tail_ids)
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
        if digest.digest() in self._salts:
            return self._salts[digest.digest()][1]
        salt = salt or f"ragblend-{digest.hexdigest()}"
        self._salts[digest.digest()] = end, salt
        self._lengths[end] += 1
        if len(self._salts) > _PROMPTS_KEPT:
            _, (old_length, _) = self._salts.popitem(last=False)
            self._lengths[old_length] -= 1
            if not self._lengths[old_length]:
                del self._lengths[old_length]
        return salt
