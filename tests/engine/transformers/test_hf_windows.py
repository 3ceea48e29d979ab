"""Models with sliding windows as their users load them: saved, checked, fingerprinted, stored, asked and explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import WINDOWED, make_multimodal_gemma3, make_multimodal_gemma4
from tiny_prompts import CHUNKS, PROMPT
from torch import Tensor

from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.checkpoints import model_fingerprint
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import cache_argument_name
from ragblend.engine.transformers.model import summarize_fusable_model
from ragblend.lab.explain import explain
from ragblend.lab.model_sizes import read_model_sizes
from ragblend.options import ModelOptions
from ragblend.prompt.types import Chunk, Prompt


@torch.no_grad()
def full(model: Any, ids: tuple[int, ...]) -> tuple[Tensor, list[LayerKV]]:
    """The stock model's logits and KV, with windows of 30 tokens and a cache that forgets nothing."""
    from transformers import DynamicCache

    own, model.config.sliding_window = model.config.sliding_window, 30
    kv = DynamicCache()
    logits = model(torch.tensor([ids]), **{cache_argument_name(model): kv}).logits[0, -1]
    model.config.sliding_window = own
    return logits, [LayerKV(layer.keys[0], layer.values[0]) for layer in kv.layers]


def greedy(model: Any, ids: tuple[int, ...], count: int) -> list[int]:
    """The stock model's own answer, every token by a prefill of everything before it."""
    answer: list[int] = []
    while len(answer) < count:
        token = int(full(model, (*ids, *answer))[0].argmax())
        if token == 2:
            break
        answer.append(token)
    return answer


@pytest.mark.parametrize("family", WINDOWED)
def test_a_windowed_model_loads_answers_as_itself_and_reuses_what_it_stored(family, saved_model, stock_model, tmp_path):
    path = str(saved_model(family, sliding_window=30))
    with load_engine(path, tmp_path / "kv", on_miss="inline") as engine:
        assert all(engine.precompute(chunk) > 0 for chunk in CHUNKS)
    with load_engine(path, tmp_path / "kv", on_miss="inline") as engine:
        assert engine.bytes_per_token == read_model_sizes(path, ModelOptions(dtype="float32")).stored_bytes_per_token()
        ids = engine.renderer.render(PROMPT)
        assert len(ids) > 2 * 30
        expected = greedy(stock_model(family), ids, 8)
        for options in ({"mode": "full"}, {"mode": "prefix"}, {"recompute_ratio": 1.0}):
            assert engine.generate(PROMPT, max_tokens=8, **options).token_ids == expected
        for rule in ("ask", "cacheblend"):
            report = engine.generate(PROMPT, rule=rule, recompute_ratio=0.15, max_tokens=2).report
            assert (report.num_chunk_hits, report.num_recomputed_tokens > 0) == (3, True)
        assert report.chunks[0].exact


@pytest.mark.parametrize(("family", "make"), [("gemma3", make_multimodal_gemma3), ("gemma4", make_multimodal_gemma4)])
def test_gemma_that_reads_images_too_answers_text_as_its_decoder_alone(
    family, make, stock_model, make_tokenizer, tmp_path
):
    model = make()
    model.config.text_config.sliding_window = 30
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert f"{family.title()}ForConditionalGeneration" in summarize_fusable_model(tmp_path / "model")
    with load_engine(str(tmp_path / "model"), tmp_path / "kv", on_miss="inline") as engine:
        list(engine.precompute_all(CHUNKS))
        expected = greedy(stock_model(family), engine.renderer.render(PROMPT), 8)
        for options in ({"mode": "full"}, {"mode": "prefix"}, {"recompute_ratio": 1.0}):
            assert engine.generate(PROMPT, max_tokens=8, **options).token_ids == expected


@pytest.mark.parametrize("family", WINDOWED)
def test_an_explanation_compares_all_of_a_windowed_models_kv(family, saved_model, tmp_path):
    with load_engine(str(saved_model(family, sliding_window=30)), tmp_path / "kv", on_miss="inline") as engine:
        list(engine.precompute_all(CHUNKS))
        explained = explain(engine, PROMPT, rule="ask", recompute_ratio=0.1, max_tokens=2)
        assert explained.count("recomputed") == explained.report.num_recomputed_tokens > 0
        chunks = [segment for segment in explained.segments if segment.kind == "chunk"]
        assert all(0 < token.deviation < 10 for segment in chunks[1:] for token in segment.tokens)
        whole = explain(engine, PROMPT, rule="ask", recompute_ratio=1.0, max_tokens=2)
        assert max(token.remaining for token in whole.tokens) < 1e-4


def stored_values(engine: TransformersEngine, chunk: Chunk, layer: int) -> Tensor:
    kv = engine.store.get(engine.key(chunk), engine.renderer.chunk_ids(chunk.text))
    return kv.layer(layer).values


@pytest.mark.parametrize("family", WINDOWED)
def test_the_neutral_text_is_seen_through_the_windows(family, saved_model, stock_model, tmp_path):
    """A chunk's KV is the slice that the stock model has of it behind prefix and context, and blending it is exact."""
    chunk = Chunk(CHUNKS[1].text, context="neutral")
    path = str(saved_model(family, sliding_window=30))
    with load_engine(path, tmp_path / "kv", on_miss="inline", context="neutral") as engine:
        engine.neutral_ids = engine.neutral_ids[:80]
        engine.precompute(chunk)
        ids = engine.renderer.chunk_ids(CHUNKS[1].text)
        header = engine.store.find_tier(DiskStore).header(engine.key(chunk))
        assert header.token_ids == ids
        before = header.prefix_ids
        assert len(before) > 30
        _, kv = full(stock_model(family), (*before, *ids))
        for layer in range(6):
            torch.testing.assert_close(
                stored_values(engine, chunk, layer), kv[layer].values[:, len(before) :], atol=1e-4, rtol=0
            )
        prompt = Prompt((CHUNKS[0], CHUNKS[1]), "what is that?")
        blended = engine.generate(prompt, rule="ask", recompute_ratio=0.2, max_tokens=1).report
        assert blended.chunks[1].context == "neutral"
        expected = greedy(stock_model(family), engine.renderer.render(prompt), 6)
        assert engine.generate(prompt, recompute_ratio=1.0, max_tokens=6).token_ids == expected


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral_window", {"sliding_window": 31}),
        ("mistral_window", {"sliding_window": None}),
        ("qwen2_window", {"use_sliding_window": False}),
        ("qwen2_window", {"layer_types": ["full_attention"] * 6}),
        ("gemma2", {"attn_logit_softcapping": 30.0}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma4", {"num_kv_shared_layers": 1}),
        ("gemma4_moe", {"attention_k_eq_v": False}),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}),
    ],
)
def test_windows_and_shared_layers_are_part_of_the_fingerprint(family, change, saved_model):
    path = saved_model(family, sliding_window=30)
    before = model_fingerprint(path, "float32")
    assert model_fingerprint(path, "float32", {"use_cache": False}) == before
    assert model_fingerprint(path, "float32", change) != before
