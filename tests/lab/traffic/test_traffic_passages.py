"""Repeated passages are found wherever they stand, token for token; prefixes as vLLM's blocks; memory is bounded."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists

from ragblend.lab.traffic.passages import (
    BLOCK,
    LEAST,
    SPREAD,
    WINDOW,
    Passages,
    PrefixCache,
    window_hashes,
    winnowed,
)

NONE = np.empty(0, np.int32)


def random_ids(seed: int, count: int, vocabulary: int = 50_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


@given(integers(LEAST, 400), lists(integers(0, 200), min_size=4, max_size=4), integers(0, 1 << 20))
def test_a_passage_that_moves_is_found_to_the_token(length: int, around: list[int], seed: int) -> None:
    sizes = np.cumsum([length, *around])
    passage, left, right, new_left, new_right = np.split(random_ids(seed, int(sizes[-1])), sizes[:-1])
    passages = Passages()
    assert passages.see(0, np.concatenate((left, passage, right)), 0) == 0
    found = passages.see(1, np.concatenate((new_left, passage, new_right)), 0)
    assert length <= found <= length + 2  # a neighbour may be the same by chance
    assert passages.size <= sizes[-1]


@given(start=integers(0, 300), seed=integers(0, 1 << 20))
def test_of_31_tokens_in_a_row_one_window_is_always_remembered(start: int, seed: int) -> None:
    ids = random_ids(seed, 400, vocabulary=4)  # with many ties
    anchors = winnowed(window_hashes(ids, 0))
    guaranteed = WINDOW + SPREAD - 1
    start = min(start, len(ids) - guaranteed)
    assert ((anchors >= start) & (anchors + WINDOW <= start + guaranteed)).any()
    inside = winnowed(window_hashes(ids[start : start + guaranteed], 0)) + start
    assert set(inside.tolist()) <= set(anchors.tolist()), "and it is the same one wherever the tokens stand"


def test_shorter_than_a_passage_is_a_turn_of_phrase() -> None:
    phrase, passages = random_ids(0, LEAST - 1), Passages()
    passages.see(0, np.concatenate((random_ids(1, 100), phrase, random_ids(2, 100))), 0)
    assert passages.see(1, np.concatenate((random_ids(3, 100), phrase, random_ids(4, 100))), 0) == 0


def test_an_edited_passage_is_found_in_two_parts() -> None:
    old, passages = random_ids(0, 200), Passages()
    new = old.copy()
    new[90:100] = random_ids(1, 10)
    passages.see(0, old, 0)
    assert passages.see(1, new, 0) == 190


def test_a_namespace_never_finds_anothers_text() -> None:
    text, passages, prefixes = random_ids(0, 300), Passages(), PrefixCache()
    assert passages.see(0, text, 0, seed=1) == passages.see(1, text, 0, seed=2) == 0
    assert prefixes.see(text, NONE, 1) == prefixes.see(text, NONE, 2) == 0
    assert passages.see(2, text, 0, seed=1) == 300


def test_what_the_prefix_has_is_not_counted_again() -> None:
    text, passages = random_ids(0, 320), Passages()
    passages.see(0, text, 0)
    assert passages.see(1, text, 160) == 160
    assert passages.see(2, text, 320) == 0
    assert passages.see(3, text, 320 - BLOCK + 1) == 0, "less than a block is the rest of the prefix"


@given(prompts=lists(lists(integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12), logged=booleans())
def test_prefixes_are_those_of_all_prompts_before(prompts: list[list[int]], logged: bool) -> None:
    """Against comparing every prompt with every other."""
    pieces = [random_ids(seed, size) for seed, size in enumerate((10, 16, 37))]
    answer = random_ids(9, 21) if logged else NONE
    cache, seen = PrefixCache(), []
    for prompt in prompts:
        ids = np.concatenate([pieces[each] for each in prompt])
        longest = 0
        for other in seen:
            count = min(len(ids), len(other))
            same = np.flatnonzero(ids[:count] != other[:count])
            longest = max(longest, int(same[0]) if len(same) else count)
        assert cache.see(ids, answer, 0) == min(longest, len(ids) - 1) // BLOCK * BLOCK
        seen.append(np.concatenate((ids, answer)))


def test_a_prefix_cache_keeps_no_more_than_its_capacity() -> None:
    cache = PrefixCache(capacity=1000)
    for seed in range(100):
        cache.see(random_ids(seed, 100 * BLOCK), NONE, 0)
    assert len(cache) <= 1000 + 200
    assert cache.see(random_ids(99, 100 * BLOCK), NONE, 0) == 99 * BLOCK, "what was used last is still there"
    assert cache.see(random_ids(0, 100 * BLOCK), NONE, 0) == 0


def test_text_that_comes_again_takes_no_memory_but_for_its_uses() -> None:
    texts = [random_ids(seed, 500) for seed in range(20)]
    passages = Passages()
    for number in range(20):
        passages.see(number, texts[number], 0)
    size, before = passages.size, passages.nbytes
    for number in range(1000):
        draw = random.Random(number).sample(texts, 4)
        passages.see(20 + number, np.concatenate(draw), 0)
    assert passages.size == size
    assert passages.nbytes - before == 4 * 1000 * 20, "20 bytes per use"
