"""Prompts that share chunks are answered one behind the other, and each as it would be alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ragblend import Prompt, load_engine
from ragblend.engine.batch_order import order_by_shared_chunks

NAMES = "abcdefgh"


def loaded(prompts: Sequence[Sequence[str]], nbytes: Mapping[str, int], capacity: int) -> int:
    """Bytes that an LRU memory loads for prompts in this order: an independent count."""
    held: OrderedDict[str, int] = OrderedDict()
    total = 0
    for key in (key for prompt in prompts for key in prompt):
        if key in held:
            held.move_to_end(key)
            continue
        total += nbytes[key]
        if nbytes[key] <= capacity:
            held[key] = nbytes[key]
            while sum(held.values()) > capacity:
                held.popitem(last=False)
    return total


@given(
    st.lists(st.lists(st.sampled_from(NAMES), max_size=4, unique=True), max_size=25),
    st.lists(st.integers(0, 9), min_size=len(NAMES), max_size=len(NAMES)),
    st.integers(0, 40),
)
def test_each_prompt_comes_once_and_the_next_is_always_the_cheapest(prompts, sizes, capacity):
    nbytes = dict(zip(NAMES, sizes, strict=True))
    order = order_by_shared_chunks(prompts, nbytes, capacity)
    assert sorted(order) == list(range(len(prompts)))
    done: list[list[str]] = []
    for at, place in enumerate(order):
        before = loaded(done, nbytes, capacity)
        costs = {}
        for other in order[at:]:
            # What is missing at this moment, whatever is evicted while it is loaded.
            costs[other] = sum(loaded([*done, [key]], nbytes, capacity) - before for key in prompts[other])
        assert costs[place] == min(costs.values())
        done.append(prompts[place])


def test_equal_prompts_and_prompts_without_chunks_stay_in_their_order():
    assert order_by_shared_chunks([["a"], ["a"], [], ["a"]], {"a": 1}, 10) == [2, 0, 1, 3]
    assert order_by_shared_chunks([], {}, 0) == []


def test_a_batch_beyond_memory_reads_each_chunk_once_and_answers_as_one_by_one(tmp_path: Path):
    chunks = [f"George Keller the {at}th lives in Kinport and works for Synon number {at}." for at in range(12)]
    prompts = [Prompt([chunks[at % 6 * 2], chunks[at % 6 * 2 + 1]], f"Question {at}?") for at in range(18)]
    with load_engine("demo", tmp_path / "kv", on_miss="inline") as engine:
        list(engine.precompute_all(chunks))
        alone = [engine.generate(prompt, max_tokens=3) for prompt in prompts]
        size = max(kv.nbytes for key in engine.store.keys() if (kv := engine.store.get(key)))  # noqa: SIM118
    reads = {}
    for name, max_num_seqs in (("one by one", None), ("batch", 1)):
        options = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        with load_engine("demo", tmp_path / "kv", memory_gib=4 * size / 2**30, on_miss="inline", **options) as engine:
            if max_num_seqs is None:
                found = [engine.generate(prompt, max_tokens=3) for prompt in prompts]
            else:
                found = engine.generate_batch(prompts, max_tokens=3)
            reads[name] = engine.store.tiers[1].counters.num_hits
        assert [each.text for each in found] == [each.text for each in alone]
    assert reads["batch"] < reads["one by one"] / 2
