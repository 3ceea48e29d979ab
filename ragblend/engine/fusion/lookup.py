"""Which tokens a chunk's stored KV may have been computed behind, and which of them a prompt would rather have.

A chunk is stored behind the prefix, alone; besides, or instead, behind an *ingestion context* as well, of which the
chunk's own slice alone is kept, so that it has seen text like that of the prompts it will stand in. What a store's
chunks are computed behind is its policy, which its disk tier remembers:

- "neighbour": also behind the chunk before it in its document, for prompts in which both stand side by side;
- "fixed": instead behind a neutral text, the same for all: whatever stands there, it is not the prompt's beginning;
- "similar": also behind the most similar chunks of the corpus, which are likely to be retrieved with it.

Only what stands in the prompt precisely behind what it was computed behind is exact.

Unless told otherwise it is "similar" in a deep model, where that is closest to full prefill on real questions
(`ragblend bench quality --contexts`, docs/fidelity.md), and "none" in a shallow one, for which nothing was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ragblend.engine.fusion.rules import DEEP
from ragblend.engine.report import PrefixMatch
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.keys import SIMILAR
from ragblend.engine.store.tiered import tiers_of
from ragblend.errors import UsageError
from ragblend.options import ContextPolicy

MAX_JOINT_TOKENS = 4  # between two chunks: a blank line takes one or two


class Behind(NamedTuple):
    """What one version of a chunk is computed behind besides the prefix, a text after the other, joints included."""

    policy: ContextPolicy = "none"
    parts: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it."""
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def key_ids(self) -> tuple[int, ...]:
        """What of it is in the key: all, or nothing where prompts cannot tell."""
        return () if self.policy == "similar" else self.token_ids

    @property
    def lengths(self) -> tuple[int, ...]:
        """`KVHeader.context`."""
        return tuple(map(len, self.parts)) if self.policy == "similar" else ()

    def check(self) -> None:
        """Raise UsageError for a similar version of which nobody said what it is to be behind."""
        if self.policy == "similar" and not self.parts:
            raise UsageError(
                "a similar version is computed behind the chunks that an index finds; precompute it with its index "
                "(ragblend.ingest, ragblend precompute), or name them: Chunk(TEXT, context='similar', behind=(...))"
            )


ALONE = Behind()


def default_context(num_layers: int) -> ContextPolicy:
    """What chunks are computed behind where nobody said, and the store remembers nothing.

    >>> default_context(32), default_context(5)
    ('similar', 'none')
    """
    return "similar" if num_layers >= DEEP else "none"


class Context(NamedTuple):
    """What stored KV was computed behind. `exact`: precisely the tokens that stand before the chunk in the prompt."""

    token_ids: tuple[int, ...]  # as they are in the key
    match: PrefixMatch  # of the prefix in it
    exact: bool
    policy: ContextPolicy
    name: str = ""  # what the key calls it: `chunk_key`'s `context`


def key_name(policy: ContextPolicy) -> str:
    """`chunk_key`'s `context` for versions of this policy."""
    return SIMILAR if policy == "similar" else ""


def contexts(
    token_ids: Sequence[int],
    start: int,
    before: int | None,
    prefix_length: int,
    default_prefix: tuple[int, ...],
    policy: ContextPolicy = "none",
    fixed: tuple[int, ...] = (),
) -> list[Context]:
    """Contexts to look for the chunk at `start` of a prompt behind, the best first.

    What is exact there is the best, then what the store's `policy` adds, then the chunk alone; each behind the prompt's
    own prefix, `prefix_length` ids, before the one that ingestion computes behind. before: where the chunk before it
    begins, see `neighbours`; None when there is none. fixed: the neutral text's ids.

    >>> found = contexts([1, 5, 6, 7], 3, before=1, prefix_length=1, default_prefix=(2,), policy="neighbour")
    >>> [context.token_ids for context in found]
    [(1, 5, 6), (2, 5, 6), (1,), (2,)]
    """
    own = tuple(token_ids[:prefix_length])
    versions: list[tuple[ContextPolicy, tuple[int, ...]]] = [("none", ())]
    if policy == "neighbour" and before is not None:
        versions.insert(0, (policy, tuple(token_ids[before:start])))
    elif policy == "fixed" and fixed:
        versions.insert(0, (policy, fixed))
    elif policy == "similar":
        versions.insert(0, (policy, ()))
    found = []
    for kind, ids in versions:
        for prefix in dict.fromkeys((own, default_prefix)):
            is_own = prefix == own
            exact = is_own and kind in ("none", "neighbour") and prefix_length + len(ids) == start
            match: PrefixMatch = "exact" if is_own else "approximate"
            found.append(Context(prefix + ids, match, exact, kind, key_name(kind)))
    return [context for context in found if context.exact] + [context for context in found if not context.exact]


def neighbours(spans: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Where the chunk before begins, for the chunks of a prompt (start, end) that may have been stored behind it.

    Between two neighbours stands what joins chunks, if anything; whether it is what stood there when the second was
    computed, its key tells.

    >>> neighbours([(3, 9), (10, 20), (60, 70), (70, 80)])
    {10: 3, 70: 60}
    """
    found = {}
    last_start, last_end = 0, -MAX_JOINT_TOKENS - 1
    for start, end in spans:
        if start - last_end <= MAX_JOINT_TOKENS:
            found[start] = last_start
        last_start, last_end = start, end
    return found


@runtime_checkable
class RemembersContext(Protocol):
    """A tier that remembers its chunks' policy, for whoever opens it later: a directory, a server's store."""

    def context(self) -> ContextPolicy | None: ...  # noqa: D102
    def put_context(self, policy: ContextPolicy) -> None: ...  # noqa: D102


def remembered_context(store: KVStore) -> ContextPolicy | None:
    """The policy that `store` remembers; None where it has none. Raises CorruptError for damage."""
    tier = next((tier for tier in tiers_of(store) if isinstance(tier, RemembersContext)), None)
    return tier.context() if tier is not None else None


def remember_context(store: KVStore, policy: ContextPolicy) -> None:
    """Have `store` remember it. Raises what `DiskStore.put` raises, and UsageError where a server has its own."""
    for tier in tiers_of(store):
        if isinstance(tier, RemembersContext):
            tier.put_context(policy)
