"""Matching of prompts' token ids against stored chunks.

`PromptMatcher` matches prompts that any client rendered; `LocalEngine.match` does the same where this process renders
the prompt. Depends on token ids, the store's chunk registry and the chat template's last ids, not on vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from ragblend.catalog.known_chunks import open_known_chunks
from ragblend.catalog.registry import open_registry
from ragblend.engine.store.base import KVStore
from ragblend.engine.vllm.scheduler_side.turns import without_quotations
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import ChunkRun

_NAMESPACES_OPEN = 64  # token indexes in memory; every cache salt that a client chooses is a separate namespace


class PromptMatcher:
    """Finds chunks in the token ids of prompts. It knows the chunks in the registry of `store`. Thread-safe.

    Only chunks whose token ids come from the tokenizer of `renderer` are found.
    """

    def __init__(self, store: KVStore, renderer: Renderer) -> None:
        self._registry = open_registry(store)
        self.tail_ids = renderer.tail_ids
        self.prefix_ids = renderer.prefix_ids(pins_date=True)
        self.neutral_ids = renderer.neutral_ids
        self._known = lru_cache(_NAMESPACES_OPEN)(partial(open_known_chunks, self._registry, renderer.fingerprint))

    def find_runs(self, token_ids: Sequence[int], namespace: str) -> list[ChunkRun]:
        """Return the prompt's runs in order. A run equals a whole chunk of the namespace, or a part of a chunk.

        A short run at the end of a turn's question is left out, because it may be a quotation. The prompt's last token
        is in no run, because vLLM has to compute this token before it can sample. Raises RagblendError for a damaged
        registry.
        """
        runs = without_quotations(self._known(namespace).find_runs(token_ids), token_ids, self.tail_ids)
        last = len(token_ids) - 1
        if runs and runs[-1].end > last:
            runs[-1] = runs[-1].within(0, last)
        return runs

    def close(self) -> None:
        """Close the registry."""
        self._known.cache_clear()
        self._registry.close()
