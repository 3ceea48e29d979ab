"""Tiny random models of every supported family. `make_model(FAMILIES[name][0], **FAMILIES[name][1])` builds one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers.models.cohere import CohereForCausalLM
from transformers.models.cohere2 import Cohere2ForCausalLM
from transformers.models.deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.exaone4 import Exaone4ForCausalLM
from transformers.models.gemma import GemmaForCausalLM
from transformers.models.gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3 import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from transformers.models.gemma4 import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4VisionConfig,
)
from transformers.models.glm import GlmForCausalLM
from transformers.models.glm4 import Glm4ForCausalLM
from transformers.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from transformers.models.gpt_oss import GptOssForCausalLM
from transformers.models.granite import GraniteForCausalLM
from transformers.models.hunyuan_v1_dense import HunYuanDenseV1ForCausalLM
from transformers.models.llama import LlamaForCausalLM
from transformers.models.mistral import MistralForCausalLM
from transformers.models.nanochat import NanoChatForCausalLM
from transformers.models.olmo import OlmoForCausalLM
from transformers.models.olmo2 import Olmo2ForCausalLM
from transformers.models.olmo3 import Olmo3ForCausalLM
from transformers.models.phi3 import Phi3ForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.siglip import SiglipVisionConfig
from transformers.models.smollm3 import SmolLM3ForCausalLM

VOCABULARY = 300
CHATML = "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}<|im|>assistant\n"

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama3_scaling": (LlamaForCausalLM, {"rope_parameters": _LLAMA3}),
    "yarn": (LlamaForCausalLM, {"rope_parameters": _YARN}),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {}),
    "phi3": (Phi3ForCausalLM, {}),
    "phi3_mha": (Phi3ForCausalLM, {"num_key_value_heads": 4}),
    "phi3_partial": (Phi3ForCausalLM, {"rope_parameters": _PARTIAL}),
    "gemma": (GemmaForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "olmo": (OlmoForCausalLM, {"clip_qkv": 0.6}),
    "granite": (
        GraniteForCausalLM,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    ),
}

ROTATIONS: dict[str, tuple[type, dict[str, Any]]] = {  # families that rotate keys otherwise, or norm otherwise
    "smollm3": (SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1, 1, 0, 1]}),
    "cohere": (CohereForCausalLM, {"use_qk_norm": True, "logit_scale": 0.7}),
    "glm": (GlmForCausalLM, {"rope_parameters": _PARTIAL}),
    "glm4": (Glm4ForCausalLM, {"rope_parameters": _PARTIAL}),
    "olmo2": (Olmo2ForCausalLM, {}),
    "nanochat": (NanoChatForCausalLM, {"final_logit_softcapping": 3.0}),
    "hunyuan": (HunYuanDenseV1ForCausalLM, {}),
}
FAMILIES |= ROTATIONS

_LATENT_SIZES = {  # widths differ, so that a confusion of two of them raises an error
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
}
_DEEPSEEK_YARN = {
    **_YARN,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}  # the two `mscale` values are equal in released models, whose tables are therefore not scaled
LATENT: dict[str, tuple[type, dict[str, Any]]] = {
    "deepseek_v2": (  # V2; V2-Lite projects queries in one step, and has no groups of experts
        DeepseekV2ForCausalLM,
        _LATENT_SIZES
        | {"q_lora_rank": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v2_lite": (
        DeepseekV2ForCausalLM,
        _LATENT_SIZES | {"q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        _LATENT_SIZES
        | {"q_lora_rank": 32, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v3_halves": (  # weights whose rotated pairs are not adjacent
        DeepseekV3ForCausalLM,
        _LATENT_SIZES | {"q_lora_rank": 32, "first_k_dense_replace": 6, "rope_interleave": False},
    ),
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, _LATENT_SIZES | {"q_lora_rank": 32}),
}
FAMILIES |= LATENT

_EVERY_THIRD_IS_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
WINDOWED: dict[str, tuple[type, dict[str, Any]]] = {
    # The windows have half the length of the tests' prompts, and the soft caps change the scores.
    "gemma2": (
        Gemma2ForCausalLM,
        {
            "sliding_window": 50,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (Gemma3ForCausalLM, {"sliding_window": 52, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}),
    "gemma4": (  # E2B: per-layer inputs; the last two of eight layers use the KV of earlier ones
        Gemma4ForCausalLM,
        {
            "sliding_window": 57,
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 2,
            "layer_types": [*_EVERY_THIRD_IS_GLOBAL, "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_moe": (  # 26B-A4B: experts; one projection for keys and values of global layers
        Gemma4ForCausalLM,
        {
            "sliding_window": 58,
            "layer_types": _EVERY_THIRD_IS_GLOBAL,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gpt_oss": (GptOssForCausalLM, {"sliding_window": 51, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral_window": (MistralForCausalLM, {"sliding_window": 53}),
    "qwen2_window": (Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 54, "max_window_layers": 3}),
    "qwen3_window": (Qwen3ForCausalLM, {"use_sliding_window": True, "sliding_window": 55, "max_window_layers": 0}),
    "phi3_window": (Phi3ForCausalLM, {"sliding_window": 56}),
    # Their layers without a window have no RoPE.
    "cohere2": (Cohere2ForCausalLM, {"sliding_window": 49, "layer_types": _EVERY_THIRD_IS_GLOBAL, "logit_scale": 0.7}),
    "exaone4": (Exaone4ForCausalLM, {"sliding_window": 48, "layer_types": _EVERY_THIRD_IS_GLOBAL}),
    "olmo3": (
        Olmo3ForCausalLM,
        {
            "sliding_window": 47,
            "layer_types": _EVERY_THIRD_IS_GLOBAL,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}
FAMILIES |= WINDOWED


def make_model(model_class: Any, seed: int = 0, **changes: Any) -> Any:
    """Return a random model with 6 layers, hidden size 64 and 4 heads of 16, unless `changes` has other sizes.

    The weights are so large that attention is far from uniform.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.06,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**sizes, **changes})).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 1:  # norms: all ones would hide a norm that is skipped or doubled
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4: as with norms
                buffer.mul_(1.2)
        if model.config.model_type == "gemma4_text":  # attention has no scale, because trained query norms include it
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.mul_(layer.self_attn.head_dim**-0.5)
    return model


def stock_models(**sizes: Any) -> Callable[[str], Any]:
    """Return a function from a family to its model with eager attention. It caches the models."""

    @cache
    def build(family: str) -> Any:
        model_class, changes = FAMILIES[family]
        model = make_model(model_class, **{**sizes, **changes})
        model.set_attn_implementation("eager")
        return model

    return build


def make_multimodal_gemma3(**sizes: Any) -> Any:
    """Return the model of the family "gemma3" in the multimodal class, with a vision tower of one layer."""
    model_class, changes = FAMILIES["gemma3"]
    text = make_model(model_class, **{**sizes, **changes})
    eye = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(
        text_config=text.config, vision_config=eye, image_token_index=VOCABULARY - 1, mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _with_text_of(text, Gemma3ForConditionalGeneration(config))


def make_multimodal_gemma4() -> Any:
    """Return the model of the family "gemma4" in the multimodal class, with a vision tower of one layer."""
    model_class, changes = FAMILIES["gemma4"]
    text = make_model(model_class, **changes)
    eye = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, position_embedding_size=64,
    )  # fmt: skip
    config = Gemma4Config(text_config=text.config, vision_config=eye, tie_word_embeddings=False)
    return _with_text_of(text, Gemma4ForConditionalGeneration(config))


def make_multimodal_qwen3(**sizes: Any) -> Any:
    """Return the model of the family "qwen3" in the class Qwen3-VL, with a vision tower of two layers."""
    text = make_model(FAMILIES["qwen3"][0], **sizes)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    eye = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": text.config.hidden_size, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    described = {**text.config.to_dict(), "model_type": "qwen3_vl_text", "rope_parameters": rope}
    start, end, image, video = range(6, 10)
    config = Qwen3VLConfig(
        text_config=described, vision_config=eye, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    return _with_text_of(text, Qwen3VLForConditionalGeneration(config))


def _with_text_of(text: Any, model: Any) -> Any:
    """Copy the weights of the decoder `text` into the multimodal `model`. Return `model`."""
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model.eval()
