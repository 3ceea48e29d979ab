"""Ingestion contexts of stored KV, and the order in which a prompt looks them up.

A chunk is stored after the prefix alone ("none"). It can also be prefilled after an *ingestion context*, of which only
the chunk's own slice is kept: the most similar chunks of the corpus, which are likely to be retrieved with it
("similar"). The chunk has then attended to text similar to that of later prompts. Which of the two a store uses is its
context policy; its disk tier stores it.

KV is exact only after precisely the tokens that it was computed after.

The default is "similar" in a deep model, where that is closest to full prefill on real questions (`ragblend bench
quality --contexts`, docs/fidelity.md). It is "none" in a shallow one, for which there are no measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ragblend.engine.fusion.rules import DEEP_MODEL_LAYERS
from ragblend.engine.report import PrefixMatch
from ragblend.engine.store.keys import SIMILAR
from ragblend.errors import UsageError
from ragblend.options import ContextPolicy


class IngestionContext(NamedTuple):
    """Chunks after which a variant is prefilled, in addition to the prefix: the token ids of each and its delimiter."""

    policy: ContextPolicy = "none"
    parts: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all token ids. They are not in the cache key, because a prompt does not determine them."""
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each part, for `KVHeader.context`."""
        return tuple(map(len, self.parts))

    def validate(self) -> None:
        """Raise UsageError for a similar variant that names no chunks to be prefilled after."""
        if self.policy == "similar" and not self.parts:
            raise UsageError(
                "context is 'similar' without context_texts, the chunks after which the KV is computed; precompute the "
                "chunk with its index (ragblend.ingest, ragblend precompute), or name them: "
                "Chunk(TEXT, context='similar', context_texts=(...))"
            )


NO_CONTEXT = IngestionContext()


def default_context_policy(num_layers: int) -> ContextPolicy:
    """Return the context policy of a store for which none is configured or stored.

    >>> default_context_policy(32), default_context_policy(5)
    ('similar', 'none')
    """
    return "similar" if num_layers >= DEEP_MODEL_LAYERS else "none"


class LookupContext(NamedTuple):
    """Ingestion context in which a chunk is looked up. `exact`: it equals the tokens before the chunk in the prompt."""

    token_ids: tuple[int, ...]  # the token ids in the key
    match: PrefixMatch  # "exact" if the prompt begins with them
    exact: bool
    policy: ContextPolicy
    name: str = ""  # its name in the key, `chunk_key`'s `context`


KEY_CONTEXTS: dict[ContextPolicy, str] = {"none": "", "similar": SIMILAR}
"""`chunk_key`'s `context` for the variants of each policy."""


def lookup_contexts(
    token_ids: Sequence[int],
    start: int,
    prefixes: Iterable[tuple[int, ...]],
    policy: ContextPolicy = "none",
    *,
    is_beginning: bool = True,
) -> list[LookupContext]:
    """Return the contexts in which to look up the chunk at `start` of a prompt, the best first.

    The exact context is the best, then that of the store's `policy`, then the chunk alone. Each is tried after every
    one of the `prefixes` in order. is_beginning: the run at `start` begins with the chunk's first token.

    >>> found = lookup_contexts([1, 5, 6, 7], 3, [(1,), (2,)], policy="similar")
    >>> [(context.token_ids, context.policy) for context in found]
    [((1,), 'similar'), ((2,), 'similar'), ((1,), 'none'), ((2,), 'none')]
    """
    policies: tuple[ContextPolicy, ...] = ("similar", "none") if policy == "similar" else ("none",)
    candidates = []
    for kind in policies:
        for prefix in dict.fromkeys(prefixes):
            begins = tuple(token_ids[: len(prefix)]) == prefix
            match: PrefixMatch = "exact" if begins else "approximate"
            exact = begins and kind == "none" and len(prefix) == start and is_beginning
            candidates.append(LookupContext(prefix, match, exact, kind, KEY_CONTEXTS[kind]))
    return [context for context in candidates if context.exact] + [
        context for context in candidates if not context.exact
    ]
