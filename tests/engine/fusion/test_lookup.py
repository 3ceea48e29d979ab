"""Where stored KV may come from: the best context first, and `exact` only where every token before it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragblend import Chunk, SegmentedPrompt, load_engine, open_store
from ragblend.engine.fusion.lookup import contexts, remembered_context
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.store.disk import CONTEXT_FILE
from ragblend.errors import CorruptError, UsageError

ids = st.lists(st.integers(0, 9), max_size=6)
A, B, C = (Chunk(text, f"{number}.txt") for number, text in enumerate(("the first one", "and its second", "apart")))


B_BEHIND_A = Chunk(B.text, B.source, context="neighbour", behind=(A.text,))


@pytest.mark.parametrize("policy", ["none", "neighbour", "fixed", "similar"])
@given(own=ids, between=ids, before=st.lists(st.integers(0, 9), min_size=1, max_size=6), default=ids)
def test_exact_means_that_the_context_is_all_that_stands_before(policy, own, between, before, default):
    prompt = [*own, *between, *before, 7, 7]
    start = len(prompt) - 2
    fixed = (8,) * 9
    found = contexts(prompt, start, start - len(before), len(own), tuple(default), policy, fixed)
    assert all(context.exact <= (list(context.token_ids) == prompt[:start]) for context in found)
    assert found[0].exact == (policy == "neighbour" and not between)
    assert not any(context.exact for context in found if context.policy in ("fixed", "similar"))
    more = {"none": [], "neighbour": [len(own + before)], "fixed": [len(own) + len(fixed)], "similar": [len(own)]}
    assert [len(context.token_ids) for context in found if context.match == "exact"] == [*more[policy], len(own)]
    assert len(found) <= 4
    first = contexts(prompt, len(own), None, len(own), tuple(default), policy, fixed)[0]
    assert (first.exact, first.policy) == (True, "none")  # in its own place the chunk alone is best


def first_logits(engine: TransformersEngine, prompt: SegmentedPrompt, **options: object) -> torch.Tensor:
    return engine.prefill(engine.request(prompt, **options)).logits  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_behind_the_chunk_that_starts_the_prompt_a_neighbour_version_is_exact(family, tiny_engine):
    engine = tiny_engine(family, context="neighbour")
    engine.precompute(A)
    engine.precompute(B_BEHIND_A)
    prompt = SegmentedPrompt([A, B], "what?")
    full = first_logits(engine, prompt, mode="full")
    for mode in ("prefix", "reuse", "blend"):
        assert (first_logits(engine, prompt, mode=mode) - full).abs().max() <= 1e-4
        report = engine.generate(prompt, mode=mode, max_tokens=1).report
        assert [(chunk.hit, chunk.exact, chunk.context) for chunk in report.chunks] == [
            (True, True, "none"),
            (True, True, "neighbour"),
        ]
        assert report.num_recomputed_tokens == 0


def test_elsewhere_it_is_preferred_to_the_chunk_alone_and_counts_as_approximate(tiny_engine):
    engine = tiny_engine("llama", context="neighbour")
    for chunk in (A, B, C, B_BEHIND_A):
        engine.precompute(chunk)
    full = first_logits(engine, SegmentedPrompt([C, A, B], "what?"), mode="full")
    report = engine.generate(SegmentedPrompt([C, A, B], "what?"), mode="reuse", max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"),
        (False, "none"),
        (False, "neighbour"),
    ]
    report = engine.generate(SegmentedPrompt([A, C, B], "what?"), mode="reuse", max_tokens=1).report
    assert [chunk.context for chunk in report.chunks] == ["none", "none", "none"]
    one = first_logits(engine, SegmentedPrompt([C, A, B], "what?"), mode="blend", recompute_ratio=1.0)
    assert (one - full).abs().max() <= 1e-4


SIMILAR = Chunk(C.text, C.source, context="similar", behind=(A.text, B.text))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_similar_version_is_the_slice_of_a_prefill_over_the_placed_chunks(family, tiny_engine):
    engine = tiny_engine(family, context="similar")
    for chunk in (A, B, SIMILAR):
        assert engine.precompute(chunk) > 0
    layers, ids_of, joint = engine.layers, engine.segmenter.chunk_ids, engine.segmenter.joint_ids
    prefix, ids = engine.default_prefix_ids, ids_of(C)
    before = [*prefix, *ids_of(A), *joint, *ids_of(B), *joint]
    # Independently: the chunks' own KV by the stock model, turned to their places; then, layer by layer, the joints and
    # the chunk over them.
    second = len(prefix) + len(ids_of(A)) + len(joint)
    fused = FusedKV.allocate(layers.kv_shapes, len(before) + len(ids), layers.like)
    with torch.inference_mode():
        for start, chunk in ((len(prefix), A), (second, B)):
            _, alone = layers.full_prefill(torch.tensor([*prefix, *ids_of(chunk)]))
            places = torch.arange(start, start + len(ids_of(chunk)))
            for layer, (keys, values) in enumerate(alone):
                if start == len(prefix):
                    fused.write(layer, slice(0, start), keys[:, :start], values[:, :start])
                    placed = keys[:, start:]
                else:
                    raw = engine.store.get(engine.key(chunk)).layer(layer).keys
                    back = layers.place_keys(layer, raw, torch.arange(len(prefix), len(prefix) + len(places)))
                    torch.testing.assert_close(back, keys[:, len(prefix) :], atol=1e-4, rtol=1e-4)
                    placed = layers.place_keys(layer, raw, places)
                fused.write(layer, places, placed, values[:, len(prefix) :])
        joints = [*range(second - len(joint), second), *range(len(before) - len(joint), len(before))]
        rows = torch.tensor([*joints, *range(len(before), len(before) + len(ids))])
        hidden = layers.embed(torch.tensor([*before, *ids])[rows])
        for layer in range(layers.num_layers):
            hidden, expected = layers.run_layer_keeping_kv(layer, hidden, rows, fused)
            found = engine.store.get(engine.key(SIMILAR)).layer(layer)
            torch.testing.assert_close(found.keys, expected.keys[:, len(joints) :], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.values, expected.values[:, len(joints) :], atol=1e-4, rtol=1e-4)


def test_a_similar_version_is_found_by_prompts_that_do_not_know_what_it_is_behind(tiny_engine):
    engine = tiny_engine("llama", context="similar")
    for chunk in (A, B, C, SIMILAR):
        engine.precompute(chunk)
    header = engine.store.get(engine.key(SIMILAR)).header
    assert sum(header.context) == len(header.prefix_ids) - len(engine.default_prefix_ids)
    assert engine.key(SIMILAR) == engine.key(Chunk(C.text, context="similar", behind=(B.text,))) != engine.key(C)
    report = engine.generate(SegmentedPrompt([A, C, B], "what?"), mode="reuse", max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"),
        (False, "similar"),
        (False, "none"),
    ]
    report = engine.generate(SegmentedPrompt([C, A, B], "what?"), mode="reuse", max_tokens=1).report
    assert (report.chunks[0].exact, report.chunks[0].context) == (True, "none")
    report = engine.generate(SegmentedPrompt([A, C], "what?"), mode="prefix", max_tokens=1).report
    assert [chunk.hit for chunk in report.chunks] == [True, False]  # nothing that is not exact
    prompt = SegmentedPrompt([A, C, B], "what?")
    one, full = (first_logits(engine, prompt, **how) for how in ({"recompute_ratio": 1.0}, {"mode": "full"}))
    assert (one - full).abs().max() <= 1e-4
    with pytest.raises(UsageError, match="ragblend precompute"):
        engine.precompute(Chunk("the other one", context="similar"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_fixed_version_is_the_slice_of_full_prefill_behind_the_fixed_text(family, tiny_engine):
    engine = tiny_engine(family, context="fixed")
    for chunk in (A, B, C):
        assert engine.precompute(chunk) > 0
    assert list(engine.precompute_all([Chunk(text) for text in ("three", "more of", "them")])) != [0, 0, 0]
    layers, prefix = engine.layers, engine.default_prefix_ids
    before = [*prefix, *engine.segmenter.fixed_ids]
    assert len(before) == len(prefix) + 512
    for text in (A.text, C.text, "three", "more of"):
        ids = engine.segmenter.chunk_ids(text)
        with torch.inference_mode():
            _, full = layers.full_prefill(torch.tensor([*before, *ids]))
        kv = engine.store.get(engine.key(text))
        assert (kv.header.prefix_ids, kv.header.context) == (tuple(before), ())
        places = torch.arange(len(before), len(before) + len(ids))
        for layer, expected in enumerate(full):
            found = kv.layer(layer)
            placed = layers.place_keys(layer, found.keys, places)
            torch.testing.assert_close(placed, expected.keys[:, len(before) :], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.values, expected.values[:, len(before) :], atol=1e-4, rtol=1e-4)


def test_the_fixed_text_is_computed_once(tiny_engine, monkeypatch):
    engine = tiny_engine("llama", context="fixed")
    rows, original = [], engine._fuse_simply
    monkeypatch.setattr(engine, "_fuse_simply", lambda plan, fused: rows.append(plan.end) or original(plan, fused))
    assert all(engine.precompute_all([A, B, C]))
    assert all(engine.precompute(text) for text in ("three", "more"))
    assert sum(count > 500 for count in rows) == 1


def test_a_chunk_in_the_first_place_is_stored_alone_as_well(tiny_engine):
    engine = tiny_engine("llama", context="fixed", on_miss="store")
    for chunk in (A, B):
        engine.precompute(chunk)

    def ask(*chunks: Chunk, **how: object) -> list[tuple[bool, bool, str]]:
        report = engine.generate(SegmentedPrompt(chunks, "what?"), max_tokens=1, **how).report
        engine.flush()
        return [(chunk.hit, chunk.exact, chunk.context) for chunk in report.chunks]

    assert ask(A, B, mode="reuse") == [(True, False, "fixed"), (True, False, "fixed")]
    assert ask(A, B, mode="reuse") == [(True, True, "none"), (True, False, "fixed")]
    assert ask(B, A, mode="prefix") == [(False, False, "none")] * 2  # and leaves it at that: it stores nothing
    assert ask(C, A) == [(False, False, "none"), (True, False, "fixed")]
    assert ask(C, A, mode="prefix") == [(True, True, "none"), (False, False, "none")]
    assert ask(A, C) == [(True, True, "none"), (True, False, "fixed")]
    prompt = SegmentedPrompt([B, A], "what?", system="the answer is that")  # exact behind no prefix that is stored
    engine.generate(prompt, max_tokens=1)
    engine.flush()
    assert not engine.is_stored(Chunk(B.text, context="none"))
    one, full = (first_logits(engine, prompt, **how) for how in ({"recompute_ratio": 1.0}, {"mode": "full"}))
    assert (one - full).abs().max() <= 1e-4


def test_a_store_tells_its_context_to_whoever_opens_it_later(tmp_path):
    behind = Chunk("It is in Mirton.", context="neighbour", behind=("Zenco sells nets.",))
    with load_engine("demo", tmp_path) as engine:
        engine.precompute("Zenco sells nets.")
        assert (engine.context, remembered_context(open_store(tmp_path))) == ("none", None)
        engine.keep_context("neighbour")
        assert engine.precompute(behind) > 0
        assert engine.precompute(behind) == 0
        assert not engine.is_stored("It is in Mirton.")
    with load_engine("demo", tmp_path) as engine:
        assert engine.context == "neighbour"
        report = engine.generate(SegmentedPrompt(["Zenco sells nets.", "It is in Mirton."], "Where is Zenco?")).report
        assert [chunk.context for chunk in report.chunks] == ["none", "neighbour"]
    note = tmp_path / CONTEXT_FILE
    note.write_bytes(note.read_bytes().replace(b"neighbour", b"similar"))
    with pytest.raises(CorruptError, match="ragblend precompute --context"):
        load_engine("demo", tmp_path)
    with load_engine("demo", tmp_path, context="none") as engine:
        assert engine.context == "none"
    with pytest.raises(UsageError, match="context is 'both'"):
        load_engine("demo", tmp_path, context="both")
