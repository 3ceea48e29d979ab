"""Rotation agrees with transformers' own, composes, and refuses what cannot be placed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.glm import modeling_glm as glm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb

from ragblend.engine.fusion.attention import (
    FIXED_FREQUENCY,
    LLAMA_LAYOUT,
    RotaryLayout,
    add_rotated,
    inverse_tables,
    max_placeable_tokens,
    rotate,
)
from ragblend.errors import UnsupportedModelError

DIM = 16
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def llama_rotary(rope_parameters: dict[str, object]) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": DIM, "max_position_embeddings": 4096}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope_parameters))


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def rotary_tables(
    inv_freq: torch.Tensor, positions: torch.Tensor, attention_scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [T, R] in float32 for `positions` [T] and `inv_freq` [R/2] (radians per token)."""
    angles = positions.float()[:, None] * inv_freq.float()[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_scaling, angles.sin() * attention_scaling


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotate_agrees_with_transformers(scaling):
    rotary, keys = llama_rotary(SCALINGS[scaling]), states(40)
    positions = torch.arange(700, 740)
    cos, sin = rotary(keys[None], positions[None])
    expected, _ = apply_rotary_pos_emb(keys[None], keys[None], cos, sin)
    torch.testing.assert_close(rotate(keys, cos[0], sin[0]), expected[0], atol=1e-6, rtol=0)
    own = rotary_tables(rotary.inv_freq, positions, rotary.attention_scaling)
    torch.testing.assert_close(rotate(keys, *own), expected[0], atol=1e-5, rtol=0)


def test_the_scalings_do_differ():
    """Otherwise the test above would say nothing about them."""
    turned = []
    for parameters in SCALINGS.values():
        rotary = llama_rotary(parameters)
        turned.append(
            rotate(states(4), *rotary_tables(rotary.inv_freq, torch.arange(700, 704), rotary.attention_scaling))
        )
    for index, one in enumerate(turned):
        for other in turned[index + 1 :]:
            assert (one - other).abs().max() > 0.1


def test_partial_rotary_turns_the_first_dimensions_and_agrees_with_transformers():
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "pad_token_id": 0}
    rotary, keys = Phi3RotaryEmbedding(Phi3Config(**sizes, rope_parameters=parameters)), states(9)
    cos, sin = rotary(keys[None], torch.arange(30, 39)[None])
    assert cos.shape[-1] == DIM // 2
    expected, _ = apply_partial_rotary_pos_emb(keys[None], keys[None], cos, sin)
    found = rotate(keys, cos[0], sin[0])
    torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=0)
    assert torch.equal(found[..., DIM // 2 :], keys[..., DIM // 2 :])


@given(first=st.integers(-4096, 4096), second=st.integers(-4096, 4096), scaling=st.sampled_from(sorted(SCALINGS)))
def test_rotations_compose(first, second, scaling):
    inv_freq, keys = llama_rotary(SCALINGS[scaling]).inv_freq, states(3)

    def turn(tensor: torch.Tensor, by: int) -> torch.Tensor:
        return rotate(tensor, *rotary_tables(inv_freq, torch.full((3,), by)))

    torch.testing.assert_close(turn(turn(keys, first), second), turn(keys, first + second), atol=5e-3, rtol=0)
    torch.testing.assert_close(turn(turn(keys, first), -first), keys, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rotated_in_float32_and_rounded_once(dtype):
    keys = states(50).to(dtype)
    cos, sin = rotary_tables(llama_rotary(SCALINGS["default"]).inv_freq, torch.arange(900, 950))
    found = rotate(keys, cos, sin)
    assert found.dtype == dtype
    assert torch.equal(found, rotate(keys.float(), cos, sin).to(dtype))
    coarse = rotate(keys.float(), cos.to(dtype).float(), sin.to(dtype).float()).to(dtype)
    assert not torch.equal(found, coarse)  # tables in half precision would round twice


@pytest.mark.parametrize(
    ("rope_type", "reason"), [("dynamic", "with the prompt's length"), ("invented", "is not known")]
)
def test_length_dependent_and_unknown_rope_is_refused_by_name(rope_type, reason):
    with pytest.raises(UnsupportedModelError, match=rf"'{rope_type}'.*{reason}.*llama3, yarn"):
        max_placeable_tokens({"rope_type": rope_type}, 4096)


@pytest.mark.parametrize("rope_type", [kind for kind in FIXED_FREQUENCY if kind != "longrope"])
def test_fixed_frequency_rope_is_exact_to_the_models_limit(rope_type):
    assert max_placeable_tokens({"rope_type": rope_type, "original_max_position_embeddings": 64}, 4096) == 4096


def test_longrope_is_exact_up_to_its_original_length():
    assert max_placeable_tokens({"rope_type": "longrope", "original_max_position_embeddings": 256}, 4096) == 256
    assert max_placeable_tokens({"rope_type": "longrope"}, 4096) == 4096
    assert max_placeable_tokens({}, 4096) == 4096


LAYOUTS = {
    "adjacent": (RotaryLayout(adjacent=True), cohere.CohereConfig, cohere.CohereRotaryEmbedding, cohere),
    "adjacent, from tables of Llama": (RotaryLayout(adjacent=True), glm.GlmConfig, glm.GlmRotaryEmbedding, glm),
    "reversed": (RotaryLayout(direction=-1), nanochat.NanoChatConfig, nanochat.NanoChatRotaryEmbedding, nanochat),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_agree_with_transformers(name):
    layout, config, rotary, module = LAYOUTS[name]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "pad_token_id": 0}
    if "adjacent" in name:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    keys, made = states(9), config(**sizes)
    made.head_dim = DIM
    cos, sin = rotary(made)(keys[None], torch.arange(30, 39)[None])
    expected, _ = module.apply_rotary_pos_emb(keys[None], keys[None], cos, sin)
    found = rotate(keys, *layout.arrange(cos[0], sin[0]), layout.adjacent)
    torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=0)
    assert (found - rotate(keys, *LLAMA_LAYOUT.arrange(cos[0], sin[0]))).abs().max() > 0.1


def test_a_layer_without_rope_rotates_nothing():
    keys, layout = states(9), RotaryLayout(direction=0)
    cos, sin = layout.arrange(*rotary_tables(torch.rand(4), torch.arange(5, 14)))
    for same in (rotate(keys, cos, sin), rotate(keys, *inverse_tables(cos, sin))):
        assert torch.equal(same, keys)
    moved = keys.clone()
    add_rotated(moved, keys, cos, sin)
    assert torch.equal(moved, 2 * keys)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("scaling", "rotary"), [(1.0, 8), (1.0, 4), (1.3, 8)])
def test_what_was_rotated_is_had_back_attention_scaling_included(scaling, rotary, adjacent):
    keys, rows = torch.randn(2, 9, 8), torch.arange(5, 14)
    cos, sin = RotaryLayout(adjacent).arrange(*rotary_tables(torch.rand(rotary // 2), rows, scaling))
    back = rotate(rotate(keys, cos, sin, adjacent), *inverse_tables(cos, sin), adjacent)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=0)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [4, 8])
def test_to_add_before_or_after_rotating_is_the_same(rotary, dtype, adjacent):
    keys, by = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    cos, sin = RotaryLayout(adjacent).arrange(*rotary_tables(torch.rand(rotary // 2), torch.arange(5, 14), 0.7))
    expected = rotate(keys + by, cos, sin, adjacent)
    found = rotate(keys, cos, sin, adjacent).to(dtype)
    add_rotated(found, by, cos, sin, adjacent)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
