"""Engine for documents that loads the model's weights only when a chunk has to be prefilled.

Depends on the model's tokenizer and fingerprint, and on a function that loads the whole engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ragblend.engine.base import LocalEngine
from ragblend.engine.store.base import KVStore
from ragblend.options import ContextPolicy
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Part


class WeightlessEngine(LocalEngine):
    """Engine with a model's tokenizer that finds, removes and ingests documents. It answers no prompts.

    `load` returns the engine with the weights. It is called when the first chunk has to be prefilled.
    """

    def __init__(
        self,
        renderer: Renderer,
        store: KVStore,
        load: Callable[[], Any],
        *,
        context_length: int,
        bytes_per_token: int,
        **options: Any,
    ) -> None:
        super().__init__(renderer, store, **options)
        self.context_length, self.bytes_per_token = context_length, bytes_per_token
        self._load = load
        self._loaded: Any = None

    def load_weights(self) -> Any:
        """Load the engine with the weights, unless it is loaded, and return it. Its store replaces this engine's."""
        if self._loaded is None:
            self._loaded = self._load()
            self.store.close()
            self.store = self._loaded.store
        return self._loaded

    def precompute_all(self, chunks: Sequence[Part]) -> Iterable[int]:
        """Prefill and store chunks by the engine with the weights. Yield the number of bytes stored for each chunk."""
        if chunks:
            yield from self.load_weights().precompute_all(chunks)

    def precompute_ids(self, token_ids: tuple[int, ...], context: ContextPolicy = "none") -> int:
        """Prefill and store a chunk by the engine with the weights. Return the number of bytes stored."""
        return int(self.load_weights().precompute_ids(token_ids, context))

    def close(self) -> None:
        """Close the store within its timeout. Safe to call again."""
        if self.is_usable:
            super().close()
            (self.store if self._loaded is None else self._loaded).close()
