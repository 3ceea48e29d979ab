"""Where stored KV may come from: the best context first, and `exact` only where every token before it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_prompts import CHUNKS

from ragblend import Chunk, Prompt, load_engine, open_store
from ragblend.engine.matching import find_variants
from ragblend.engine.store.metadata import CONTEXT_FILE
from ragblend.engine.transformers.blend import BlendingEngine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import CorruptError, UsageError
from ragblend.prompt.render import NEUTRAL_TEXT
from ragblend.prompt.types import ChunkRun

ids = st.lists(st.integers(0, 9), max_size=6)
NEUTRAL_IDS = (11, 12, 13)
A, B, C = CHUNKS


@pytest.mark.parametrize("policy", ["none", "neutral"])
@given(own=ids, between=ids, default=ids, is_beginning=st.booleans())
def test_exact_means_a_chunks_beginning_behind_nothing_but_its_prefix(policy, own, between, default, is_beginning):
    prompt = [*own, *between, 7, 7]
    start = len(prompt) - 2
    prefixes = (tuple(own), tuple(default))
    run = ChunkRun((6, 7, 7), 0 if is_beginning else 1, start, start + 2)
    found = list(find_variants(run, prompt, prefixes, NEUTRAL_IDS if policy == "neutral" else (), str))
    assert all(variant.exact <= (variant.key == str(tuple(prompt[:start]))) for variant in found)
    assert any(variant.exact for variant in found) == (is_beginning and tuple(prompt[:start]) in prefixes)
    assert not any(variant.exact for variant in found[1:])
    assert not any(variant.exact for variant in found if variant.policy == "neutral")
    policies = ["neutral", "none"] if policy == "neutral" else ["none"]
    assert {variant.policy for variant in found if variant.match == "exact"} == set(policies)
    assert [variant.policy for variant in found if not variant.exact] == sorted(
        variant.policy for variant in found if not variant.exact
    )  # neutral before none
    assert {variant.key for variant in found if variant.policy == "neutral"} == (
        {str(prefix + NEUTRAL_IDS) for prefix in prefixes} if policy == "neutral" else set()
    )
    assert len(found) <= 4


def first_logits(engine: TransformersEngine, prompt: Prompt, **options: object) -> torch.Tensor:
    return engine.prefill(engine.request(prompt, **options)).logits


NEUTRAL = Chunk(C.text, C.source, context="neutral")


@pytest.fixture
def neutral_engine(tiny_engine):
    """Function from a family to an engine of the policy neutral, whose neutral text fits a small model."""

    def build(family: str) -> TransformersEngine:
        engine = tiny_engine(family, context="neutral")
        engine.neutral_ids = engine.renderer.chunk_ids(NEUTRAL_TEXT[:400]) + engine.renderer.separator_ids
        return engine

    return build


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_neutral_variant_is_the_slice_of_the_stock_models_prefill(family, neutral_engine):
    engine = neutral_engine(family)
    assert engine.precompute(NEUTRAL) > 0
    layers, ids = engine.layers, engine.renderer.chunk_ids(C.text)
    before = [*engine.default_prefix_ids, *engine.neutral_ids]
    rows = torch.arange(len(before), len(before) + len(ids))
    with torch.inference_mode():
        _, whole = layers.full_prefill(torch.tensor([*before, *ids]))
    kv = engine.store.get(engine.key(NEUTRAL))
    assert (list(kv.header.prefix_ids), kv.header.token_ids) == (before, ids)
    for layer, (keys, values) in enumerate(whole):
        found = kv.layer(layer)
        placed = layers.place_keys(layer, found.keys, rows)
        torch.testing.assert_close(placed, keys[:, len(before) :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.values, values[:, len(before) :], atol=1e-4, rtol=1e-4)


def test_a_neutral_variant_is_used_unless_the_chunk_directly_follows_its_prefix(neutral_engine):
    engine = neutral_engine("llama")
    list(engine.precompute_all((A, B, C, NEUTRAL)))
    assert engine.key(NEUTRAL) != engine.key(C)
    report = engine.generate(Prompt([A, C, B], "what?"), mode="reuse", max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"),
        (False, "neutral"),
        (False, "none"),
    ]
    report = engine.generate(Prompt([C, A, B], "what?"), mode="reuse", max_tokens=1).report
    assert (report.chunks[0].exact, report.chunks[0].context) == (True, "none")
    report = engine.generate(Prompt([A, C], "what?"), mode="prefix", max_tokens=1).report
    assert [chunk.hit for chunk in report.chunks] == [True, False]  # nothing that is not exact
    prompt = Prompt([A, C, B], "what?")
    one, full = (first_logits(engine, prompt, **how) for how in ({"recompute_ratio": 1.0}, {"mode": "full"}))
    assert (one - full).abs().max() <= 1e-4


def test_another_neutral_text_makes_other_keys_of_neutral_variants_alone(neutral_engine):
    engine = neutral_engine("llama")
    before = engine.key(C), engine.key(NEUTRAL)
    engine.neutral_ids = engine.neutral_ids[1:]
    assert (engine.key(C) == before[0], engine.key(NEUTRAL) == before[1]) == (True, False)


def test_the_neutral_text_is_computed_once_for_all_chunks(neutral_engine, monkeypatch):
    engine = neutral_engine("llama")
    fused, original = [], BlendingEngine._fuse_untimed
    monkeypatch.setattr(
        BlendingEngine, "_fuse_untimed", lambda self, plan, kv: fused.append(plan) or original(self, plan, kv)
    )
    list(engine.precompute_all([Chunk(chunk.text, context="neutral") for chunk in CHUNKS]))
    engine.precompute(Chunk(CHUNKS[0].text * 2, context="neutral"))
    num_ids = len(engine.default_prefix_ids), len(engine.default_prefix_ids) + len(engine.neutral_ids)
    assert [plan.num_fused for plan in fused] == [*num_ids]
    assert fused[1].num_resident == num_ids[0]


def test_an_engine_opened_later_uses_the_context_policy_of_the_store(tmp_path):
    first, second = "Zenco sells nets and ropes to ports.", "It is in Mirton, and so is Oston."
    behind = Chunk(second, context="neutral")
    with load_engine("demo", tmp_path) as engine:
        engine.precompute(first)
        assert (engine.context, open_store(tmp_path).read_context_policy()) == ("none", None)
        engine.set_context_policy("neutral")
        assert engine.precompute(behind) > 0
        assert engine.precompute(behind) == 0
        assert not engine.is_stored(second)
    with load_engine("demo", tmp_path) as engine:
        assert engine.context == "neutral"
        report = engine.generate(Prompt([first, second], "Where is Zenco?")).report
        assert [chunk.context for chunk in report.chunks] == ["none", "neutral"]
    note = tmp_path / CONTEXT_FILE
    note.write_bytes(note.read_bytes().replace(b"neutral", b"none"))
    with pytest.raises(CorruptError, match="ragblend precompute --context"):
        load_engine("demo", tmp_path)
    with load_engine("demo", tmp_path, context="none") as engine:
        assert engine.context == "none"
    with pytest.raises(UsageError, match="context is 'both'"):
        load_engine("demo", tmp_path, context="both")
