"""TokenIndex against a search through every chunk at every position, and the bounds of its work."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.prompt import token_index
from ragblend.prompt.token_index import WINDOW, NumberedRun, TokenIndex, anchor_offsets, is_long_enough

Ids = list[int]


def index_of(chunks: dict[int, Ids]) -> TokenIndex:
    index = TokenIndex(chunks.get)
    index.add(chunks.items())
    return index


def random_ids(rng: random.Random, length: int, vocabulary: int = 50_000) -> Ids:
    return [rng.randrange(vocabulary) for _ in range(length)]


def search_everywhere(chunks: dict[int, Ids], prompt: Ids) -> list[NumberedRun]:
    """What `find_runs` returns, by comparing every chunk at every position that one of its anchors allows."""
    runs: list[tuple[NumberedRun, int]] = []
    for chunk, ids in chunks.items():
        for diagonal in range(-len(ids) + 1, len(prompt)):
            if not any(
                diagonal + offset >= 0 and prompt[diagonal + offset :][:WINDOW] == ids[offset : offset + WINDOW]
                for offset in anchor_offsets(len(ids))
            ):
                continue
            start = None
            for place in range(max(0, -diagonal), min(len(ids), len(prompt) - diagonal) + 1):
                inside = place < len(ids) and place + diagonal < len(prompt)
                if inside and ids[place] == prompt[place + diagonal]:
                    start = place if start is None else start
                elif start is not None:
                    if is_long_enough(place - start, len(ids)):
                        runs.append(((chunk, start, start + diagonal, place + diagonal), len(ids)))
                    start = None
    chosen: list[NumberedRun] = []
    while runs:
        runs.sort(key=lambda each: (each[0][2] - each[0][3], each[0][2], *each[0]))
        ((chunk, chunk_start, start, end), size) = runs.pop(0)
        other = next((each for each in chosen if each[2] < end and start < each[3]), None)
        if other is None:
            chosen.append((chunk, chunk_start, start, end))
            continue
        for first, last in ((start, min(end, other[2])), (max(start, other[3]), end)):
            if is_long_enough(last - first, size):
                runs.append(((chunk, chunk_start + first - start, first, last), size))
    return sorted(chosen, key=lambda run: run[2])


@st.composite
def chunks_and_prompt(draw: st.DrawFn) -> tuple[dict[int, Ids], Ids]:
    """Chunks that share stretches with each other, and a prompt of pieces of them."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    vocabulary = draw(st.sampled_from([2, 4, 50_000]))
    shared = [random_ids(rng, rng.randrange(1, 60), vocabulary) for _ in range(4)]

    def text(pieces: int) -> Ids:
        made = [rng.choice([*shared, random_ids(rng, rng.randrange(0, 40), vocabulary)]) for _ in range(pieces)]
        return [token for piece in made for token in piece]

    chunks = {number: text(rng.randrange(1, 4)) for number in range(draw(st.integers(1, 6)))}
    prompt: Ids = []
    for _ in range(draw(st.integers(0, 6))):
        ids = rng.choice([*chunks.values(), text(1)])
        first = rng.randrange(len(ids) + 1)
        prompt += random_ids(rng, rng.randrange(4), vocabulary) + ids[rng.choice([0, first]) :][: rng.choice([999, 30])]
    return chunks, prompt


@given(chunks_and_prompt())
def test_runs_are_those_of_a_search_through_everything(made):
    chunks, prompt = made
    found = index_of(chunks).find_runs(prompt)
    for chunk, chunk_start, start, end in found:
        assert prompt[start:end] == chunks[chunk][chunk_start:][: end - start]
    if len(set(prompt)) > 4:  # repetitive prompts may exceed the limits of hits and diagonals
        assert found == search_everywhere(chunks, prompt)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_chunks_added_and_removed_one_by_one_match_as_added_at_once(seed, count):
    rng = random.Random(seed)
    chunks = {number: random_ids(rng, rng.randrange(5, 200)) for number in range(count)}
    removed = set(rng.sample(sorted(chunks), count // 2))
    index = TokenIndex(chunks.get)
    for number, ids in chunks.items():
        index.add([(number, ids)])
    for number in removed:
        index.remove(number)
    left = {number: ids for number, ids in chunks.items() if number not in removed}
    prompt = [token for number in rng.sample(sorted(chunks), count) for token in [1, *chunks[number]]]
    assert len(index) == len(left)
    assert index.find_runs(prompt) == index_of(left).find_runs(prompt)
    index.add((number, chunks[number]) for number in removed)
    assert index.find_runs(prompt) == index_of(chunks).find_runs(prompt)


def test_a_table_that_grows_by_one_chunk_at_a_time_loses_none():
    rng = random.Random(0)
    chunks = {number: random_ids(rng, 100) for number in range(800)}
    index = TokenIndex(chunks.get)
    for number, ids in chunks.items():
        index.add([(number, ids)])
    for number, ids in chunks.items():
        assert index.find_runs([7, *ids, 7]) == [(number, 0, 1, 101)]


def test_a_chunk_is_found_whole_and_in_parts_behind_any_first_token():
    ids = list(range(1000, 1256))
    index = index_of({3: ids})
    assert index.find_runs([5, 5, *ids, 6]) == [(3, 0, 2, 258)]
    assert index.find_runs([5, *ids[1:-1], 6]) == [(3, 1, 1, 255)]
    assert index.find_runs([5, *ids[:60], 9, *ids[80:], 6]) == [(3, 0, 1, 61), (3, 80, 62, 238)]
    assert index.find_runs([5, *ids, *ids]) == [(3, 0, 1, 257), (3, 0, 257, 513)]


@pytest.mark.parametrize(
    ("length", "missing", "found"),
    [(8, 0, True), (8, 1, False), (12, 0, True), (12, 4, True), (12, 5, False), (7, 0, False), (40, 24, True)],
)
def test_a_short_chunk_matches_only_with_nearly_all_its_tokens(length, missing, found):
    ids = list(range(100, 100 + length))
    assert bool(index_of({0: ids}).find_runs([1, *ids[: length - missing], 2])) == found
    assert bool(index_of({0: ids}).find_runs([1, *ids[missing:], 2])) == (found and length <= 40)


def test_chunks_whose_ids_are_gone_are_not_found():
    index = TokenIndex(lambda chunk: None)
    index.add([(0, range(100))])
    assert index.find_runs(range(100)) == []


def test_windows_with_equal_hashes_are_distinguished(monkeypatch):
    monkeypatch.setattr(
        TokenIndex, "_hash", lambda self, windows: (windows[:, 0].astype(np.uint32), np.zeros(len(windows), np.uint8))
    )
    rng = random.Random(1)
    chunks = {number: [5, 6, *random_ids(rng, 60)] for number in range(20)}
    prompt = [token for ids in chunks.values() for token in ids]
    assert index_of(chunks).find_runs(prompt) == search_everywhere(chunks, prompt)


def count_reads(chunks: dict[int, Ids], prompt: Ids) -> tuple[list[NumberedRun], int]:
    """The runs of a prompt, and how often the ids of a chunk were read for them."""
    read: list[int] = []

    def read_ids(chunk: int) -> Ids:
        read.append(chunk)
        return chunks[chunk]

    index = TokenIndex(read_ids)
    index.add(chunks.items())
    return index.find_runs(prompt), len(read)


@pytest.mark.parametrize("make", [lambda rng: [7] * 256, lambda rng: [7, 8] * 128], ids=["one token", "two tokens"])
def test_a_prompt_that_repeats_itself_is_covered_with_bounded_work(make):
    ids = make(random.Random(0))
    runs, num_reads = count_reads(dict.fromkeys(range(200), ids), ids * 32)
    assert sum(end - start for _, _, start, end in runs) > 0.9 * 256 * 32
    assert num_reads <= 200


def test_a_sentence_in_many_chunks_is_found_and_read_from_few():
    rng = random.Random(2)
    sentence = random_ids(rng, 48)
    chunks = {number: [*sentence, *random_ids(rng, 40)] for number in range(3000)}
    runs, num_reads = count_reads(chunks, [1, *sentence, 2])
    assert [end - start for _, _, start, end in runs] == [48]
    assert num_reads <= 2 * token_index.MAX_EQUAL_ANCHORS
    runs, _ = count_reads(chunks, [1, *chunks[2999], 2])  # its own anchors lead to the sentence, too
    assert runs == [(2999, 0, 1, 89)]
