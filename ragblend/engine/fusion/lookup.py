"""Which tokens a chunk's stored KV may have been computed behind, and which of them a prompt would rather have.

A chunk is stored behind the prefix, alone. A *neighbour version* of it is stored behind the prefix and the chunk before
it in its document: where retrieval brings both side by side, its KV has seen what it refers back to, before anything
is recomputed. A store says by a file of its own that it holds some, so that others need not look for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ragblend.engine.report import PrefixMatch
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.tiered import disk_tier

MAX_JOINT_TOKENS = 4  # between two chunks: a blank line takes one or two
_MARK = "neighbours"  # in the root of a disk tier


class Context(NamedTuple):
    """What stored KV was computed behind. `exact`: precisely the tokens that stand before the chunk in the prompt."""

    token_ids: tuple[int, ...]
    match: PrefixMatch  # of the prefix in it
    exact: bool
    has_neighbour: bool


def contexts(
    token_ids: Sequence[int], start: int, before: int | None, prefix_length: int, default_prefix: tuple[int, ...]
) -> list[Context]:
    """Contexts to look for the chunk at `start` of a prompt behind, the best first.

    before: where the chunk before it begins, see `neighbours`; None when there is none, or no neighbour versions are
    stored.
    The prompt's own prefix, `prefix_length` ids, is tried before the one that ingestion computes behind.

    >>> [context.token_ids for context in contexts([1, 5, 6, 7], 3, before=1, prefix_length=1, default_prefix=(2,))]
    [(1, 5, 6), (2, 5, 6), (1,), (2,)]
    """
    own = tuple(token_ids[:prefix_length])
    prefixes = dict.fromkeys((own, default_prefix))
    neighbour = () if before is None else tuple(token_ids[before:start])
    found = []
    for ids in (neighbour, ()) if neighbour else ((),):
        for prefix in prefixes:
            match: PrefixMatch = "exact" if prefix == own else "approximate"
            exact = match == "exact" and prefix_length + len(ids) == start
            found.append(Context(prefix + ids, match, exact, bool(ids)))
    return found


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


def holds_neighbours(store: KVStore) -> bool:
    """Whether the disk tier of `store` says that neighbour versions were stored."""
    disk = disk_tier(store)
    return disk is not None and (disk.root / _MARK).exists()


def note_neighbours(store: KVStore) -> None:
    """Say so, for whoever opens its disk tier later. What cannot be marked is not looked for, and no error."""
    disk = disk_tier(store)
    if disk is not None:
        with suppress(OSError):
            (disk.root / _MARK).touch()
