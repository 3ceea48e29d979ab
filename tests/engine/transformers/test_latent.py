"""Multi-head latent attention: what a move changes, how many bytes a token takes, and how far eight bits are off.

That what is stored, blending and answers are right is shown in tests/engine/fusion/test_fuse.py and test_hf_engine.py,
for these families as for others.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from tiny_models import LATENT
from tiny_prompts import CHUNKS, PROMPT

from ragblend import load_engine
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.store.format.quantize import CODE_DTYPES
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.errors import StoreMismatchError

RANK, ROPE, LAYERS = 24, 8, 6


@pytest.fixture
def stored(tiny_engine):
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
def test_moving_a_chunk_turns_the_shared_part_of_its_keys_alone(family, stored):
    """The last dimensions of every head's keys turn; the others, and all values, do not depend on the position."""
    engine = stored(family)
    layers, kv = engine.layers, engine.store.get(engine.key(CHUNKS[1]))
    expanded = []
    for start in (3, 131):
        end = start + kv.header.num_tokens
        fused = FusedKV.allocate(layers.kv_shapes, end, layers.like)
        to = (layers.num_layers, layers.place_keys, fused.write, layers.device)
        with torch.inference_mode(), LayerLoader([Placement(kv, start, exact=False)], *to) as loader:
            loader.wait(2)
            held = type(kv.layer(0))(fused.keys(2)[:, start:end], fused.values(2)[:, start:end])
            expanded.append(layers.expand_kv(2, held))
    (near, near_values), (far, far_values) = expanded
    assert near.shape[0] == near_values.shape[0] == 4
    assert torch.equal(near_values, far_values)
    assert torch.equal(near[..., :-ROPE], far[..., :-ROPE])
    assert (near[..., -ROPE:] - far[..., -ROPE:]).abs().max() > 0.1
    assert torch.equal(far[0, :, -ROPE:], far[3, :, -ROPE:])


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
def test_latent_kv_of_a_real_model_is_a_tenth_or_less(name, renderer):
    """By the shapes of the real config; no weights are made."""
    class_name, fields, per_token = REAL[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**fields)
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    engine = TransformersEngine(
        TransformersLayers(model), renderer, MemoryStore(1), name=name, fingerprint=name, check=False
    )
    by_heads = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    assert engine.bytes_per_token == per_token
    assert per_token / (2 * by_heads * config.num_hidden_layers) == pytest.approx(SHARE[name], abs=6e-5)


# --- stores ---


def test_which_dimensions_turn_together_is_part_of_the_fingerprint(saved_model, tmp_path):
    path = shutil.copytree(saved_model("deepseek_v3"), tmp_path / "model")
    load_engine(str(path), tmp_path / "kv").close()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_interleave": False}))
    with pytest.raises(StoreMismatchError):
        load_engine(str(path), tmp_path / "kv")


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_eight_bit_latents_are_exact_at_ratio_one(family, kv_dtype, stored):
    plain, coded = stored(family), stored(family, kv_dtype)
    full = logits(coded, 1.0, "full")
    assert (logits(coded, 1.0) - full).abs().max() <= 1e-4
    reuse_error = (logits(plain, 0.0) - full).abs().max()
    for ratio in (0.0, 0.3):
        moved = (logits(coded, ratio, rule="random") - logits(plain, ratio, rule="random")).abs().max()
        assert 0 < moved <= {"int8": 0.1, "fp8": 0.3}[kv_dtype] * reuse_error
    assert coded.bytes_per_token == (RANK + ROPE + 4) * LAYERS
