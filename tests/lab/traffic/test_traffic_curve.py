"""Hits over a store's size are those of stack distances, on the chunks between repeated passages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import composite, integers, lists

from ragblend.lab.traffic.curve import ChunkUses, count_chunk_uses, lru_hit_tokens, merge_adjacent_chunks
from ragblend.lab.traffic.passages import RepeatedPassages


@composite
def some_uses(draw) -> ChunkUses:
    sizes = draw(lists(integers(1, 9), min_size=1, max_size=6))
    order = draw(lists(integers(0, len(sizes) - 1), max_size=60))
    starts = np.cumsum([0, *sizes[:-1]])
    return ChunkUses(starts, np.array(sizes), np.array(order, np.int64), np.arange(len(order)))


def hits_by_stack_distance(found: ChunkUses, capacity: int) -> int:
    """A use is a hit where the chunks used since the last use of the same one, itself included, fit (Mattson 1970)."""
    order, hits = found.chunks.tolist(), 0
    for place, chunk in enumerate(order):
        if chunk in order[:place]:
            last = place - 1 - order[:place][::-1].index(chunk)
            between = set(order[last:place])
            hits += int(found.sizes[chunk]) * (sum(int(found.sizes[each]) for each in between) <= capacity)
    return hits


@given(some_uses(), integers(1, 50))
def test_lru_is_what_stack_distances_give(found, capacity):
    assert lru_hit_tokens(found, capacity) == hits_by_stack_distance(found, capacity)


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def test_uses_are_of_chunks_between_places_where_passages_begin_and_end():
    first, second, third = ids(0, 100), ids(1, 60), ids(2, 80)
    passages = RepeatedPassages()
    passages.count_reusable_and_add(0, np.concatenate((first, second, third)), 0)
    passages.count_reusable_and_add(1, np.concatenate((third, ids(3, 40), first)), 0)
    passages.count_reusable_and_add(2, np.concatenate((ids(4, 40), second, ids(5, 30), second)), 0)
    found = count_chunk_uses(passages)
    assert sorted(found.sizes.tolist()) == pytest.approx([60, 80, 100], abs=3)
    assert found.counts.tolist() == [2, 2, 2], "a prompt that has a chunk twice uses it once"
    assert (np.diff(found.requests) >= 0).all()


def test_chunks_that_the_same_requests_need_are_counted_as_one():
    first, second = ids(0, 100), ids(1, 60)
    together, apart = RepeatedPassages(), RepeatedPassages()
    for number, text in enumerate((first, second)):
        apart.count_reusable_and_add(number, text, 0)
    for number, order in enumerate(([first, second], [ids(2, 50), first, second], [ids(3, 50), first, second])):
        for passages in (together, apart):
            passages.count_reusable_and_add(2 + number, np.concatenate(order), 0)
    assert [end - start for start, end, _ in merge_adjacent_chunks(count_chunk_uses(together), together.starts)] == [
        160
    ]
    assert [end - start for start, end, _ in merge_adjacent_chunks(count_chunk_uses(apart), apart.starts)] == [100, 60]
