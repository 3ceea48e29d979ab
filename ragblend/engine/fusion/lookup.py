"""Which tokens a chunk's stored KV may have been computed behind, and which of them a prompt would rather have.

A chunk is stored behind the prefix, alone ("none"); besides, behind an *ingestion context* as well, of which the
chunk's own slice alone is kept, so that it has seen text like that of the prompts it will stand in: behind the most
similar chunks of the corpus, which are likely to be retrieved with it ("similar"). What a store's chunks are computed
behind is its policy, which its disk tier remembers.

Only what stands in the prompt precisely behind what it was computed behind is exact.

Unless told otherwise it is "similar" in a deep model, where that is closest to full prefill on real questions
(`ragblend bench quality --contexts`, docs/fidelity.md), and "none" in a shallow one, for which nothing was measured.
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
    """What one version of a chunk is computed behind besides the prefix, a text after the other, joints included."""

    policy: ContextPolicy = "none"
    parts: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it; prompts cannot tell, so it is not in the key."""
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def lengths(self) -> tuple[int, ...]:
        """`KVHeader.read_context`."""
        return tuple(map(len, self.parts))

    def validate(self) -> None:
        """Raise UsageError for a similar version of which nobody said what it is to be behind."""
        if self.policy == "similar" and not self.parts:
            raise UsageError(
                "a similar version is computed behind the chunks that an index finds; precompute it with its index "
                "(ragblend.ingest, ragblend precompute), or name them: Chunk(TEXT, context='similar', behind=(...))"
            )


NO_CONTEXT = IngestionContext()


def default_context_policy(num_layers: int) -> ContextPolicy:
    """What chunks are computed behind where nobody said, and the store remembers nothing.

    >>> default_context_policy(32), default_context_policy(5)
    ('similar', 'none')
    """
    return "similar" if num_layers >= DEEP_MODEL_LAYERS else "none"


class LookupContext(NamedTuple):
    """What stored KV was computed behind. `exact`: precisely the tokens that stand before the chunk in the prompt."""

    token_ids: tuple[int, ...]  # as they are in the key
    match: PrefixMatch  # of the prefix in it
    exact: bool
    policy: ContextPolicy
    name: str = ""  # what the key calls it: `chunk_key`'s `context`


KEY_CONTEXTS: dict[ContextPolicy, str] = {"none": "", "similar": SIMILAR}
"""`chunk_key`'s `context` for versions of each policy."""


def lookup_contexts(
    token_ids: Sequence[int],
    start: int,
    prefixes: Iterable[tuple[int, ...]],
    policy: ContextPolicy = "none",
    *,
    is_beginning: bool = True,
) -> list[LookupContext]:
    """Contexts to look for the chunk at `start` of a prompt behind, the best first.

    What is exact there is the best, then what the store's `policy` adds, then the chunk alone; each behind one of the
    `prefixes` after the other. is_beginning: the chunk's first token stands at `start`.

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
