"""Repeated passages are found token for token anywhere in a prompt, prefixes as vLLM's blocks; memory is bounded."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis.strategies import integers, lists

from ragblend.lab.traffic import passages as passages_module
from ragblend.lab.traffic.passages import BLOCK, LEAST, PrefixCache, RepeatedPassages
from ragblend.prompt.token_index import STRIDE, WINDOW


def random_ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


@given(integers(STRIDE + WINDOW, 400), lists(integers(0, 200), min_size=4, max_size=4), integers(0, 1 << 20))
def test_a_passage_that_moves_is_found_to_the_token(length, around, seed):
    sizes = np.cumsum([length, *around])
    passage, left, right, new_left, new_right = np.split(random_ids(seed, int(sizes[-1])), sizes[:-1])
    passages = RepeatedPassages()
    assert passages.count_reusable_and_add(0, np.concatenate((left, passage, right)), 0) == 0
    found = passages.count_reusable_and_add(1, np.concatenate((new_left, passage, new_right)), 0)
    assert length <= found <= length + 2  # a neighbour may be the same by chance
    assert passages.size <= sizes[-1]


def test_shorter_than_a_passage_is_a_turn_of_phrase():
    phrase, passages = random_ids(0, LEAST - 1), RepeatedPassages()
    passages.count_reusable_and_add(0, np.concatenate((random_ids(1, 100), phrase, random_ids(2, 100))), 0)
    assert passages.count_reusable_and_add(1, np.concatenate((random_ids(3, 100), phrase, random_ids(4, 100))), 0) == 0


def test_an_edited_passage_is_found_in_two_parts():
    old, passages = random_ids(0, 200), RepeatedPassages()
    new = old.copy()
    new[90:100] = random_ids(1, 10)
    passages.count_reusable_and_add(0, old, 0)
    assert passages.count_reusable_and_add(1, new, 0) == 190


def test_a_passage_beyond_the_last_anchor_is_found(monkeypatch):
    monkeypatch.setattr(passages_module, "MAX_PASSAGE", 100)
    text, passages = random_ids(0, 450), RepeatedPassages()
    passages.count_reusable_and_add(0, text, 0)
    assert passages.count_reusable_and_add(1, text[200:], 0) == 250
    assert np.array_equal(passages.ids(190, 310), text[190:310])


def test_a_namespace_never_finds_anothers_text():
    text, passages, prefixes = random_ids(0, 300), RepeatedPassages(), PrefixCache()
    assert (
        passages.count_reusable_and_add(0, text, 0, "acme") == passages.count_reusable_and_add(1, text, 0, "other") == 0
    )
    assert prefixes.count_cached_and_add(text, "acme") == prefixes.count_cached_and_add(text, "other") == 0
    assert passages.count_reusable_and_add(2, text, 0, "acme") == 300


def test_what_the_prefix_has_is_not_counted_again():
    text, passages = random_ids(0, 320), RepeatedPassages()
    passages.count_reusable_and_add(0, text, 0)
    assert passages.count_reusable_and_add(1, text, 160) == 160
    assert passages.count_reusable_and_add(2, text, 320) == 0
    assert passages.count_reusable_and_add(3, text, 320 - BLOCK + 1) == 0, "less than a block is the rest of the prefix"


@given(prompts=lists(lists(integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12))
def test_prefixes_are_those_of_all_prompts_before(prompts):
    """Against comparing every prompt with every other."""
    pieces = [random_ids(seed, size) for seed, size in enumerate((10, 16, 37, 0))]
    cache, seen = PrefixCache(), []
    for prompt in prompts:
        ids = np.concatenate([pieces[each] for each in prompt])
        longest = 0
        for other in seen:
            count = min(len(ids), len(other))
            same = np.flatnonzero(ids[:count] != other[:count])
            longest = max(longest, int(same[0]) if len(same) else count)
        assert cache.count_cached_and_add(ids) == max(0, min(longest, len(ids) - 1)) // BLOCK * BLOCK
        seen.append(ids)


def test_a_prefix_cache_keeps_no_more_than_its_capacity():
    cache = PrefixCache(capacity=1000)
    for seed in range(100):
        cache.count_cached_and_add(random_ids(seed, 100 * BLOCK))
    assert len(cache) <= 1000 + 200
    assert cache.count_cached_and_add(random_ids(99, 100 * BLOCK)) == 99 * BLOCK, "what was used last is still there"
    assert cache.count_cached_and_add(random_ids(0, 100 * BLOCK)) == 0


def test_text_that_comes_again_takes_no_memory_but_for_its_uses():
    texts = [random_ids(seed, 500) for seed in range(20)]
    passages = RepeatedPassages()
    for number in range(20):
        passages.count_reusable_and_add(number, texts[number], 0)
    size = passages.size
    for number in range(1000):
        draw = random.Random(number).sample(texts, 4)
        passages.count_reusable_and_add(20 + number, np.concatenate(draw), 0)
    assert passages.size == size
    assert len(passages.run_sources) == 4 * 1000
