"""Where stored KV may come from: the best context first, and `exact` only where every token before it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_prompts import CHUNKS

from ragblend import Chunk, Prompt, load_engine, open_store
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.store.format.keys import lookup_contexts
from ragblend.engine.store.metadata import CONTEXT_FILE
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import CorruptError, UsageError

ids = st.lists(st.integers(0, 9), max_size=6)
A, B, C = CHUNKS


@pytest.mark.parametrize("policy", ["none", "similar"])
@given(own=ids, between=ids, default=ids, is_beginning=st.booleans())
def test_exact_means_a_chunks_beginning_behind_nothing_but_its_prefix(policy, own, between, default, is_beginning):
    prompt = [*own, *between, 7, 7]
    start = len(prompt) - 2
    prefixes = (tuple(own), tuple(default))
    found = lookup_contexts(prompt, start, prefixes, policy, is_beginning=is_beginning)
    assert all(context.exact <= (list(context.token_ids) == prompt[:start]) for context in found)
    assert any(context.exact for context in found) == (is_beginning and tuple(prompt[:start]) in prefixes)
    assert not any(context.exact for context in found[1:])
    assert not any(context.exact for context in found if context.policy == "similar")
    policies = ["similar", "none"] if policy == "similar" else ["none"]
    assert {context.policy for context in found if context.match == "exact"} == set(policies)
    assert [context.policy for context in found if not context.exact] == sorted(
        (context.policy for context in found if not context.exact), reverse=True
    )  # similar before none
    assert len(found) <= 4


def first_logits(engine: TransformersEngine, prompt: Prompt, **options: object) -> torch.Tensor:
    return engine.prefill(engine.request(prompt, **options)).logits


SIMILAR = Chunk(C.text, C.source, context="similar", context_texts=(A.text, B.text))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_similar_version_is_the_slice_of_a_prefill_over_the_placed_chunks(family, tiny_engine):
    engine = tiny_engine(family, context="similar")
    for chunk in (A, B, SIMILAR):
        assert engine.precompute(chunk) > 0
    layers, prefix, joint = engine.layers, engine.default_prefix_ids, engine.renderer.separator_ids
    ids_of_a, ids_of_b, ids = (engine.renderer.chunk_ids(chunk.text) for chunk in (A, B, C))
    before = [*prefix, *ids_of_a, *joint, *ids_of_b, *joint]
    # Independently: the chunks' own KV by the stock model, turned to their places; then, layer by layer, the joints and
    # the chunk over them.
    second = len(prefix) + len(ids_of_a) + len(joint)
    fused = FusedKV.allocate(layers.kv_shapes, len(before) + len(ids), layers.like)
    with torch.inference_mode():
        for start, chunk, own in ((len(prefix), A, ids_of_a), (second, B, ids_of_b)):
            _, alone = layers.full_prefill(torch.tensor([*prefix, *own]))
            places = torch.arange(start, start + len(own))
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
            hidden = layers.run_layer(layer, hidden, rows, fused)
            found, own_rows = engine.store.get(engine.key(SIMILAR)).layer(layer), rows[len(joints) :]
            placed = layers.place_keys(layer, found.keys, own_rows)
            torch.testing.assert_close(placed, fused.keys(layer)[:, own_rows], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.values, fused.values(layer)[:, own_rows], atol=1e-4, rtol=1e-4)


def test_a_similar_version_is_found_without_the_texts_of_its_context(tiny_engine):
    engine = tiny_engine("llama", context="similar")
    list(engine.precompute_all((A, B, C, SIMILAR)))
    header = engine.store.get(engine.key(SIMILAR)).header
    assert sum(header.context) == len(header.prefix_ids) - len(engine.default_prefix_ids)
    assert engine.key(SIMILAR) == engine.key(Chunk(C.text, context="similar", context_texts=(B.text,))) != engine.key(C)
    report = engine.generate(Prompt([A, C, B], "what?"), mode="reuse", max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"),
        (False, "similar"),
        (False, "none"),
    ]
    report = engine.generate(Prompt([C, A, B], "what?"), mode="reuse", max_tokens=1).report
    assert (report.chunks[0].exact, report.chunks[0].context) == (True, "none")
    report = engine.generate(Prompt([A, C], "what?"), mode="prefix", max_tokens=1).report
    assert [chunk.hit for chunk in report.chunks] == [True, False]  # nothing that is not exact
    prompt = Prompt([A, C, B], "what?")
    one, full = (first_logits(engine, prompt, **how) for how in ({"recompute_ratio": 1.0}, {"mode": "full"}))
    assert (one - full).abs().max() <= 1e-4
    with pytest.raises(UsageError, match="ragblend precompute"):
        engine.precompute(Chunk(A.text, context="similar"))


def test_an_engine_opened_later_uses_the_context_policy_of_the_store(tmp_path):
    first, second = "Zenco sells nets and ropes to ports.", "It is in Mirton, and so is Oston."
    behind = Chunk(second, context="similar", context_texts=(first,))
    with load_engine("demo", tmp_path) as engine:
        engine.precompute(first)
        assert (engine.context, open_store(tmp_path).read_context_policy()) == ("none", None)
        engine.set_context_policy("similar")
        assert engine.precompute(behind) > 0
        assert engine.precompute(behind) == 0
        assert not engine.is_stored(second)
    with load_engine("demo", tmp_path) as engine:
        assert engine.context == "similar"
        report = engine.generate(Prompt([first, second], "Where is Zenco?")).report
        assert [chunk.context for chunk in report.chunks] == ["none", "similar"]
    note = tmp_path / CONTEXT_FILE
    note.write_bytes(note.read_bytes().replace(b"similar", b"none"))
    with pytest.raises(CorruptError, match="ragblend precompute --context"):
        load_engine("demo", tmp_path)
    with load_engine("demo", tmp_path, context="none") as engine:
        assert engine.context == "none"
    with pytest.raises(UsageError, match="context is 'both'"):
        load_engine("demo", tmp_path, context="both")
