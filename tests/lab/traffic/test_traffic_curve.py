"""Hits over a store's size: LRU is what stack distances give, and no policy exceeds the bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import composite, integers, lists

from ragblend.lab.traffic.curve import Uses, lru_hits, merged, most_hits, sampled, uses_of, zipf_slope
from ragblend.lab.traffic.passages import Passages


def uses(sizes: list[int], order: list[int]) -> Uses:
    starts = np.cumsum([0, *sizes[:-1]])
    return Uses(starts, np.array(sizes), np.array(order, np.int64), np.arange(len(order)))


@composite
def some_uses(draw, most: int = 60, largest: int = 9) -> Uses:
    sizes = draw(lists(integers(1, largest), min_size=1, max_size=6))
    order = draw(lists(integers(0, len(sizes) - 1), max_size=most))
    return uses(sizes, order)


def hits_by_stack_distance(found: Uses, capacity: int) -> int:
    """A use is a hit where the chunks used since the last use of the same one, itself included, fit (Mattson 1970)."""
    order, hits = found.chunks.tolist(), 0
    for place, chunk in enumerate(order):
        if chunk in order[:place]:
            last = place - 1 - order[:place][::-1].index(chunk)
            between = set(order[last:place])
            hits += int(found.sizes[chunk]) * (sum(int(found.sizes[each]) for each in between) <= capacity)
    return hits


@given(some_uses(), integers(1, 50))
def test_lru_is_what_stack_distances_give(found: Uses, capacity: int) -> None:
    assert lru_hits(found, capacity) == hits_by_stack_distance(found, capacity)


def best_of_all(found: Uses, capacity: int) -> int:
    """The most that whole chunks can give, by trying everything."""
    order, sizes = found.chunks.tolist(), found.sizes.tolist()

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(order):
            return 0
        chunk = order[place]
        hit = sizes[chunk] if chunk in held else 0
        options = [held | {chunk}]
        kept = set()
        while options:
            option = options.pop()
            if option in kept:
                continue
            kept.add(option)
            options += [option - {each} for each in option]
        return hit + max(best(place + 1, o) for o in kept if sum(sizes[each] for each in o) <= capacity)

    return best(0, frozenset())


@given(some_uses(most=9, largest=4), integers(1, 10))
def test_no_policy_that_keeps_whole_chunks_exceeds_the_bound(found: Uses, capacity: int) -> None:
    assert lru_hits(found, capacity) <= best_of_all(found, capacity) <= most_hits(found, capacity)


@given(lists(integers(0, 4), max_size=9), integers(1, 5))
def test_with_chunks_of_one_size_the_bound_is_the_optimum(order: list[int], capacity: int) -> None:
    found = uses([1] * 5, order)
    assert most_hits(found, capacity) == best_of_all(found, capacity)


@given(some_uses())
def test_a_store_with_room_for_all_finds_every_second_use(found: Uses) -> None:
    again = sum(int(found.sizes[chunk]) for chunk in found.chunks) - int(found.sizes[np.unique(found.chunks)].sum())
    total = int(found.sizes.sum())
    assert lru_hits(found, total) == again == most_hits(found, total)


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def test_uses_are_of_chunks_between_places_where_passages_begin_and_end() -> None:
    first, second, third = ids(0, 100), ids(1, 60), ids(2, 80)
    passages = Passages()
    passages.see(0, np.concatenate((first, second, third)), 0)
    passages.see(1, np.concatenate((third, ids(3, 40), first)), 0)
    passages.see(2, np.concatenate((ids(4, 40), second, ids(5, 30), second)), 0)
    found = uses_of(passages)
    assert sorted(found.sizes.tolist()) == pytest.approx([60, 80, 100], abs=3)
    assert found.counts.tolist() == [2, 2, 2], "a prompt that has a chunk twice uses it once"
    assert (np.diff(found.requests) >= 0).all()


def test_a_sample_keeps_the_curve() -> None:
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, 2001)
    order = draw.choice(2000, 60_000, p=weights / weights.sum())
    found = uses(draw.integers(50, 150, 2000).tolist(), order.tolist())
    some, share = sampled(found, most=15_000)
    assert 0.1 < share < 0.5
    total = int(found.sizes.sum())
    for part in (0.1, 0.3, 1.0):
        whole = lru_hits(found, total * part) / found.sizes[found.chunks].sum()
        guess = lru_hits(some, total * share * part) / some.sizes[some.chunks].sum()
        assert guess == pytest.approx(whole, abs=0.1)


def test_a_slope_needs_enough_chunks_that_differ() -> None:
    assert zipf_slope(np.array([9, 3, 1])) is None
    assert zipf_slope(np.array([2] * 50)) is None
    slope = zipf_slope((1000 / np.arange(1, 200) ** 0.8).astype(int))
    assert slope is not None
    assert slope[0] == pytest.approx(-0.8, abs=0.05)


def test_chunks_that_the_same_requests_need_are_one_unless_they_came_apart_at_first() -> None:
    first, second = ids(0, 100), ids(1, 60)
    together, apart = Passages(), Passages()
    for number, text in enumerate((first, second)):
        apart.see(number, text, 0)
    for number, order in enumerate(([first, second], [ids(2, 50), first, second], [ids(3, 50), first, second])):
        for passages in (together, apart):
            passages.see(2 + number, np.concatenate(order), 0)
    assert [end - start for start, end, _ in merged(uses_of(together), together.starts)] == [160]
    assert [end - start for start, end, _ in merged(uses_of(apart), apart.starts)] == [100, 60]
