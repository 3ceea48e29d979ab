"""Where stored KV may come from: the best context first, and `exact` only where every token before it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragblend import Chunk, SegmentedPrompt, load_engine, open_store
from ragblend.engine.fusion.lookup import contexts, holds_neighbours
from ragblend.engine.hf.engine import TransformersEngine

ids = st.lists(st.integers(0, 9), max_size=6)
A, B, C = (Chunk(text, f"{number}.txt") for number, text in enumerate(("the first one", "and its second", "apart")))


@given(own=ids, between=ids, before=st.lists(st.integers(0, 9), min_size=1, max_size=6), default=ids)
def test_exact_means_that_the_context_is_all_that_stands_before(own, between, before, default):
    prompt = [*own, *between, *before, 7, 7]
    start = len(prompt) - 2
    found = contexts(prompt, start, start - len(before), len(own), tuple(default))
    assert all(context.exact <= (list(context.token_ids) == prompt[:start]) for context in found)
    assert found[0].exact == (not between)
    assert [len(context.token_ids) for context in found if context.match == "exact"] == [len(own + before), len(own)]
    assert len({context.token_ids for context in found}) <= len(found) <= 4


def first_logits(engine: TransformersEngine, prompt: SegmentedPrompt, **options: object) -> torch.Tensor:
    return engine.prefill(engine.request(prompt, **options)).logits  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_behind_the_chunk_that_starts_the_prompt_a_neighbour_version_is_exact(family, tiny_engine):
    engine = tiny_engine(family)
    engine.precompute(A)
    engine.precompute(Chunk(B.text, B.source, behind=A.text))
    prompt = SegmentedPrompt([A, B], "what?")
    full = first_logits(engine, prompt, mode="full")
    for mode in ("prefix", "reuse", "blend"):
        assert (first_logits(engine, prompt, mode=mode) - full).abs().max() <= 1e-4
        report = engine.generate(prompt, mode=mode, max_tokens=1).report
        assert [(chunk.hit, chunk.exact, chunk.behind_neighbour) for chunk in report.chunks] == [
            (True, True, False),
            (True, True, True),
        ]
        assert report.num_recomputed_tokens == 0


def test_elsewhere_it_is_preferred_to_the_chunk_alone_and_counts_as_approximate(tiny_engine):
    engine = tiny_engine("llama")
    for chunk in (A, B, C, Chunk(B.text, B.source, behind=A.text)):
        engine.precompute(chunk)
    full = first_logits(engine, SegmentedPrompt([C, A, B], "what?"), mode="full")
    report = engine.generate(SegmentedPrompt([C, A, B], "what?"), mode="reuse", max_tokens=1).report
    assert [(chunk.exact, chunk.behind_neighbour) for chunk in report.chunks] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    report = engine.generate(SegmentedPrompt([A, C, B], "what?"), mode="reuse", max_tokens=1).report
    assert [chunk.behind_neighbour for chunk in report.chunks] == [False, False, False]
    one = first_logits(engine, SegmentedPrompt([C, A, B], "what?"), mode="blend", recompute_ratio=1.0)
    assert (one - full).abs().max() <= 1e-4


def test_a_store_says_that_it_holds_some_to_whoever_opens_it_later(tmp_path):
    with load_engine("demo", tmp_path) as engine:
        engine.precompute("Zenco sells nets.")
        assert not engine.finds_neighbours
        assert not holds_neighbours(open_store(tmp_path))
        assert engine.precompute(Chunk("It is in Mirton.", behind="Zenco sells nets.")) > 0
        assert engine.precompute(Chunk("It is in Mirton.", behind="Zenco sells nets.")) == 0
        assert not engine.is_stored("It is in Mirton.")
    with load_engine("demo", tmp_path) as engine:
        assert engine.finds_neighbours
        report = engine.generate(SegmentedPrompt(["Zenco sells nets.", "It is in Mirton."], "Where is Zenco?")).report
        assert [chunk.behind_neighbour for chunk in report.chunks] == [False, True]
