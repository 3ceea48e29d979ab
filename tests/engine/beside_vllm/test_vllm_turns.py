"""Turns of a prompt, and block hashes by which later turns of a conversation find its blended KV. Needs no vLLM."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.catalog.ledger import Ledger
from ragblend.engine.matching import KnownChunks, turn_ends
from ragblend.engine.vllm.scheduler_side.turns import hide_blocks, separate_blended_blocks, split_by_turns
from ragblend.prompt.types import ChunkRun, Variant

TAIL, SETTINGS, BLOCK = (1, 2), ("blend", "ask", 0.15, None, 0), 4
ids = st.lists(st.integers(3, 5), min_size=1, max_size=12)


class Request:
    """vLLM's request: each block's hash is computed from the hash before it, the block's ids and the salt."""

    def __init__(self, token_ids: list[int]) -> None:
        self.prompt_token_ids, self.cache_salt = token_ids, None
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Append the hashes of the blocks that have none."""
        for start in range(len(self.block_hashes) * BLOCK, len(self.prompt_token_ids) // BLOCK * BLOCK, BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else (self.cache_salt or "").encode()
            block = bytes(self.prompt_token_ids[start : start + BLOCK])
            self.block_hashes.append(hashlib.sha256(before + block).digest())


def span(start: int, end: int, key: str = "one") -> ChunkRun:
    """A stored chunk in a prompt."""
    return ChunkRun((), 0, start, end, variant=Variant(key, "exact", exact=False))


def hashes(prompt: list[int], stored: list[ChunkRun], settings: tuple[object, ...] = SETTINGS) -> list[bytes]:
    """Of the blocks of a prompt with stored chunks."""
    request = Request(prompt)
    separate_blended_blocks(request, split_by_turns(stored, turn_ends(prompt, TAIL)), settings, BLOCK)
    return request.block_hashes


@given(chunk=ids, question=ids, answer=ids, more=ids)
def test_a_later_turn_finds_the_blocks_of_the_turns_before(chunk, question, answer, more):
    turn = [9, *chunk, *question, *TAIL]
    history, first = [*turn, *answer], span(1, 1 + len(chunk))
    longer = [*history, *more, *[4] * BLOCK, *TAIL]
    found = hashes(history, [first])
    for later in ([], [span(len(history), len(history) + 1, "two")]):
        assert hashes(longer, [first, *later])[: len(found)] == found
    assert not {*found} & {*hashes(history, [])}


@pytest.mark.parametrize(
    ("prompt", "stored", "settings"),
    [
        ([9] * 6 + [5] * 6 + [3, 4, *TAIL], [span(6, 12)], SETTINGS),
        ([9] * 6 + [5] * 6 + [3, 3, *TAIL], [span(6, 12, "another variant")], SETTINGS),
        ([9] * 6 + [5] * 6 + [3, 3, *TAIL], [span(6, 11)], SETTINGS),
        *(
            ([9] * 6 + [5] * 6 + [3, 3, *TAIL], [span(6, 12)], (*SETTINGS[:place], "other", *SETTINGS[place + 1 :]))
            for place in range(len(SETTINGS))
        ),
    ],
)
def test_prompts_that_are_blended_otherwise_share_exact_blocks_alone(prompt, stored, settings):
    """Another question, other stored KV, another rule: blocks before the first chunk are vLLM's own."""
    one = [9] * 6 + [5] * 6 + [3, 3, *TAIL]
    first, second, exact = hashes(one, [span(6, 12)]), hashes(prompt, stored, settings), hashes(one, [])
    assert first[0] == second[0] == exact[0]
    assert len({*first[1:], *second[1:], *exact[1:]}) == 9


@pytest.mark.parametrize("length", [3, 6])
def test_a_block_that_is_full_only_with_the_answer_is_separated_too(length):
    """Its tokens are blended, but vLLM hashes it later."""
    prompt = [9] * length
    first, second = Request(prompt), Request(prompt)
    separate_blended_blocks(first, split_by_turns([span(length - 2, length - 1)], [length]), SETTINGS, BLOCK)
    hide_blocks(second, length // BLOCK)
    made = []
    for request in (first, second, Request(prompt)):
        request.prompt_token_ids = [*prompt, *[7] * BLOCK]
        request.update_block_hashes()
        made.append(request.block_hashes[length // BLOCK])
    assert len({*made}) == 3


@given(st.lists(st.sampled_from([[3], [4, 5], [*TAIL], [1], [2]]), max_size=12))
def test_every_tail_ends_a_turn(parts):
    prompt = [token for part in parts for token in part]
    ends = turn_ends(prompt, TAIL)
    assert ends == sorted({*ends})
    assert ends[-1] == len(prompt)
    assert all(tuple(prompt[end - 2 : end]) == TAIL for end in ends[:-1])
    assert len(ends) >= sum(tuple(prompt[at : at + 2]) == TAIL for at in range(len(prompt)))
    assert turn_ends(prompt, ()) == [len(prompt)]


def test_a_tail_inside_a_chunk_ends_no_turn():
    prompt = [9, 5, *TAIL, 5, *TAIL, 6]
    run = ChunkRun((5, 1, 2, 5), 0, 1, 5)
    assert turn_ends(prompt, TAIL, [run]) == [7, 8]


def test_a_quotation_at_the_end_of_a_turn_belongs_to_its_question():
    """So a later prompt has the same runs as the prompt of the turn had."""
    chunk = tuple(range(10, 90))
    prompt = [9, *chunk, 8, *chunk[:20], *TAIL, 8, *chunk[:70], *TAIL, 8, *chunk[:20], *TAIL]
    known = KnownChunks(Ledger(), "tokenizer", "")
    known.add(["a text"], lambda _: chunk)
    runs = [ChunkRun(chunk, 0, start, start + count) for start, count in ((1, 80), (82, 20), (105, 70), (178, 20))]
    assert known.find_runs(prompt) == runs
    assert known.match(prompt, TAIL, by_turn=True) == [runs[0], runs[2]]
    assert known.match(prompt, TAIL) == runs[:3]
