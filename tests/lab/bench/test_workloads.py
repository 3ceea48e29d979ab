"""Workloads: the models have the shapes they claim, and the prompts share their chunks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragblend.engine.fusion.self_check import self_check
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.lab.bench.common.shapes import SHAPES, DecoderShape, find_shape
from ragblend.lab.bench.common.workloads import (
    PREFIX_TOKENS,
    engine_for,
    make_prompts,
    model_config,
    random_model,
    synthetic_tokenizer,
)
from ragblend.prompt.render import Renderer

TINY = SHAPES["tiny"]


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-200m", 197), ("llama-1b", 1236), ("mistral-7b", 7248), ("qwen3-8b", 8191)]
)
def test_shapes_have_the_parameters_of_the_models_they_are_named_after(name, millions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(find_shape(name)))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_every_family_passes_the_engines_exactness_check(family):
    shape = DecoderShape(family, 3, 64, 96, 4, 2, 16, 128, 1024)
    model = random_model(shape)
    assert model.config.model_type == family
    self_check(TransformersLayers(model), shape.vocab_size, family)


def test_random_model_computes_as_a_normally_built_model():
    model = random_model(TINY, seed=3)
    usual = AutoModelForCausalLM.from_config(model_config(TINY)).eval()
    usual.load_state_dict(model.state_dict())
    ids = torch.randint(TINY.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, usual(ids).logits)


def test_random_model_has_no_value_left_to_chance():
    first, again, other = (random_model(TINY, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert all(value.isfinite().all() for value in first.values())


def test_weights_larger_than_one_block_are_filled_to_the_end(monkeypatch):
    monkeypatch.setattr("ragblend.lab.bench.common.workloads._BLOCK_VALUES", 1000)
    weight = random_model(TINY).lm_head.weight
    assert weight.numel() % 1000 != 0
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((weight != 0).all())


def test_tied_weights_stay_tied():
    model = random_model(DecoderShape("llama", 2, 32, 64, 2, 1, 16, 64, 256, tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_random_model_is_built_in_its_dtype():
    model = random_model(TINY, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_prompts_have_the_same_chunks_in_other_orders_and_their_own_questions():
    chunks, prompts = work = make_prompts(5, 7, 3, num_prompts=4, vocab_size=100)
    renderer = Renderer(synthetic_tokenizer(100))
    prefix = renderer.prefix_ids()
    assert len(prefix) == PREFIX_TOKENS
    rendered = [renderer.render(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, rendered, strict=True):
        chunk_ids = [renderer.chunk_ids(chunk.text) for chunk in prompt.chunks]
        assert [len(each) for each in chunk_ids] == [7] * 5
        assert ids[:-3] == [*prefix, *chain(*chunk_ids)]
        assert set(prompt.chunks) == set(chunks)
    assert len({prompt.chunks for prompt in prompts}) > 1
    assert len({tuple(ids[-3:]) for ids in rendered}) == 4
    assert make_prompts(5, 7, 3, num_prompts=4, vocab_size=100) == work
    assert make_prompts(5, 7, 3, num_prompts=4, vocab_size=100, seed=8) != work


def test_the_fingerprint_depends_on_shape_seed_and_dtype():
    def mark(dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
        with engine_for("tiny", MemoryStore(0), dtype, seed) as engine:
            return engine.fingerprint

    assert mark() == mark()
    assert len({mark(), mark(seed=1), mark(torch.bfloat16)}) == 3
