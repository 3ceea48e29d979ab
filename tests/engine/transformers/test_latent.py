"""Multi-head latent attention through the whole engine: what is stored, how large it is, and that answers come of it.

That blending is right, layer by layer, is shown in tests/engine/fusion/test_fuse.py, for these families as for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference import as_held
from tiny_models import LATENT
from transformers import DynamicCache

from ragblend import load_engine
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.fusion.self_check import place
from ragblend.engine.store.quantize import CODE_DTYPES
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers, cache_argument
from ragblend.engine.transformers.model import inspect_model
from ragblend.errors import StoreMismatchError
from ragblend.lab.explain import explain
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

RANK, ROPE, LAYERS = 24, 8, 6
CHUNKS = (
    Chunk("the theory of the other chunk is in the answer to the question of the chunk", source="one.txt"),
    Chunk("question the chunk with that theory and answer what the other question is", source="two.txt"),
    Chunk("what the other question is and the answer to it is the chunk with the theory", source="three.txt"),
)
PROMPT = SegmentedPrompt(CHUNKS, "what is that?")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[[str], Any], make_tokenizer: Any) -> Callable[[str], Path]:
    """`folder(family)`: a tiny model as `save_pretrained` writes it."""

    def save(family: str) -> Path:
        path = tmp_path / family
        tiny_model(family).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
        return path

    return save


@pytest.fixture
def stored(tiny_engine: Callable[..., TransformersEngine]) -> Callable[..., TransformersEngine]:
    """`stored(family, kv_dtype)`: an engine whose store holds CHUNKS."""

    def build(family: str, kv_dtype: Any = "auto") -> TransformersEngine:
        engine = tiny_engine(family, store=TieredStore(MemoryStore(1 << 26), kv_dtype=kv_dtype))
        assert all(engine.precompute(chunk) for chunk in CHUNKS)
        return engine

    return build


def logits(engine: TransformersEngine, ratio: float, mode: Any = "blend", rule: str = "cacheblend") -> torch.Tensor:
    return engine.prefill(engine.request(PROMPT, mode=mode, rule=rule, recompute_ratio=ratio)).logits


# --- what is stored ---


@pytest.mark.parametrize("family", LATENT)
def test_the_latent_and_the_shared_key_before_rope_are_what_is_stored(family, stored, stock_model):
    """Rotated to its place, it is what the model's own cache has."""
    engine = stored(family)
    kv = engine.store.get(engine.key(CHUNKS[0]))
    ids = torch.tensor([[*kv.header.prefix_ids, *kv.header.token_ids]])
    with torch.inference_mode():
        model, cache = stock_model(family), DynamicCache()
        model(ids, **{cache_argument(model): cache})
    first, count = len(kv.header.prefix_ids), kv.header.num_tokens
    rows = torch.arange(first, first + count)
    for layer in range(LAYERS):
        keys, values = kv.layer(layer)
        assert (keys.shape, values.shape) == ((1, count, ROPE), (1, count, RANK))
        stock_keys, stock_values = as_held(
            stock_model(family), cache.layers[layer].keys[0], cache.layers[layer].values[0]
        )
        placed = engine.layers.place_keys(layer, keys, rows)
        torch.testing.assert_close(placed, stock_keys[:, first:], atol=1e-5, rtol=0)
        torch.testing.assert_close(values, stock_values[:, first:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", LATENT)
def test_moving_a_chunk_turns_the_shared_part_of_its_keys_alone(family, stored):
    """Of every head's keys the last dimensions; the others, and all values, are the same wherever the chunk stands."""
    engine = stored(family)
    layers, kv = engine.layers, engine.store.get(engine.key(CHUNKS[1]))
    expanded = []
    for start in (3, 131):
        end = start + kv.header.num_tokens
        fused = FusedKV.allocate(layers.kv_shapes, end, layers.like)
        place(layers, fused, Placement(kv, start, exact=False))
        with torch.inference_mode():
            held = type(kv.layer(0))(fused.keys(2)[:, start:end], fused.values(2)[:, start:end])
            expanded.append(layers.expand_kv(2, held))
    (near, near_values), (far, far_values) = expanded
    assert near.shape[0] == near_values.shape[0] == 4
    assert torch.equal(near_values, far_values)
    assert torch.equal(near[..., :-ROPE], far[..., :-ROPE])
    assert (near[..., -ROPE:] - far[..., -ROPE:]).abs().max() > 0.1
    assert torch.equal(far[0, :, -ROPE:], far[3, :, -ROPE:])


def test_kv_share_is_what_makes_the_latent(tiny_layers):
    """What probes and checks are charged: expanding a latent is part of attention, as reading keys is."""
    layer = tiny_layers("deepseek_v3").model.model.layers[0]
    made = 64 * (RANK + ROPE)
    assert tiny_layers("deepseek_v3").kv_share == pytest.approx(made / sum(p.numel() for p in layer.parameters()))


# --- bytes ---

REAL: dict[str, tuple[str, dict[str, Any], int]] = {  # transformers' defaults but for V2-Lite; bytes in 16 bits
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"q_lora_rank": None, "moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        31_104,
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {}, 70_272),
    "GLM-4 MoE Lite": ("Glm4MoeLiteForCausalLM", {}, 54_144),
}
SHARE = {"DeepSeek-V2-Lite": 0.1125, "DeepSeek-V3": 0.0141, "GLM-4 MoE Lite": 0.0562}  # of keys and values of heads


@pytest.mark.parametrize("name", REAL)
def test_a_token_of_a_real_model_takes_about_a_tenth_of_its_keys_and_values_or_less(name, segmenter):
    """By the shapes of the real config; no weights are made."""
    class_name, fields, per_token = REAL[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**fields)
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    engine = TransformersEngine(
        TransformersLayers(model), segmenter, MemoryStore(1), name=name, fingerprint=name, check=False
    )
    by_heads = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    assert engine.bytes_per_token == per_token
    assert per_token / (2 * by_heads * config.num_hidden_layers) == pytest.approx(SHARE[name], abs=6e-5)


def test_files_are_as_small_as_the_forecast(folder, tmp_path):
    with load_engine(str(folder("deepseek_v3")), tmp_path / "kv") as engine:
        engine.precompute(CHUNKS[0])
        kv = engine.store.get(engine.key(CHUNKS[0]))
        assert engine.bytes_per_token == 4 * (RANK + ROPE) * LAYERS
        assert kv.nbytes == engine.bytes_per_token * kv.header.num_tokens
    (file,) = (tmp_path / "kv").glob("??/*.safetensors")
    assert kv.nbytes < file.stat().st_size < kv.nbytes + 8192


# --- stores ---


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_kv_from_disk_answers_as_kv_at_hand(family, folder, tmp_path):
    path = str(folder(family))
    with load_engine(path, tmp_path / "kv", on_miss="inline") as engine:
        list(engine.precompute_all(CHUNKS))
        expected = engine.generate(PROMPT, max_tokens=12)
        full = engine.generate(PROMPT, mode="full", max_tokens=12)
        assert engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=12).token_ids == full.token_ids
        assert expected.report.rule != "none"
    with load_engine(path, tmp_path / "kv", on_miss="inline") as engine:
        for rule in ("auto", "ask", "cacheblend", "cacheblend_k"):
            found = engine.generate(PROMPT, max_tokens=12, rule=rule, recompute_ratio=0.2)
            assert found.report.num_chunk_hits == 3
            assert found.report.chunks[0].exact
            assert 0 < found.report.num_recomputed_tokens < found.report.num_reused_tokens
        assert engine.generate(PROMPT, max_tokens=12).token_ids == expected.token_ids
        reused = engine.generate(PROMPT, mode="reuse", max_tokens=12).report
        assert (reused.num_chunk_hits, reused.num_recomputed_tokens) == (3, 0)
        assert explain(engine, PROMPT, recompute_ratio=1.0, max_tokens=4).answers_identical


def test_which_dimensions_turn_together_is_part_of_the_fingerprint(folder, tmp_path):
    path = folder("deepseek_v3")
    load_engine(str(path), tmp_path / "kv").close()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_interleave": False}))
    with pytest.raises(StoreMismatchError):
        load_engine(str(path), tmp_path / "kv")


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_eight_bits_are_exact_at_ratio_one_and_move_the_logits_little_beside_reuse(family, kv_dtype, stored):
    plain, coded = stored(family), stored(family, kv_dtype)
    full = logits(coded, 1.0, "full")
    assert (logits(coded, 1.0) - full).abs().max() <= 1e-4
    reuse_error = (logits(plain, 0.0) - full).abs().max()
    for ratio in (0.0, 0.3):
        moved = (logits(coded, ratio, rule="random") - logits(plain, ratio, rule="random")).abs().max()
        assert 0 < moved <= {"int8": 0.1, "fp8": 0.3}[kv_dtype] * reuse_error
    assert coded.bytes_per_token == (RANK + ROPE + 4) * LAYERS


# --- loading ---


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_doctor_takes_the_model_for_what_it_is(family, folder):
    assert inspect_model(folder(family)).startswith(LATENT[family][1].__name__)
