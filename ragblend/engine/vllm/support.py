"""Checks that the connector supports a vLLM release, model and configuration, and the fingerprint of vLLM's model.

Reads vLLM's configuration objects by their attributes. Errors contain the reason and a fix.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.fusion.attention import rope_type_problem
from ragblend.engine.store.format.kv import KVSpec, dtype_name
from ragblend.engine.transformers.checkpoints import find_model
from ragblend.engine.transformers.checkpoints import model_fingerprint as checkpoint_fingerprint
from ragblend.engine.transformers.positions import WINDOWED, rope_parameters
from ragblend.errors import RagblendError, UnsupportedModelError, UsageError
from ragblend.files.reading import read_file
from ragblend.options import ModelOptions

log = logging.getLogger(__name__)

OLDEST, BEFORE = (0, 28), (0, 34)
"""Supported vLLM releases, from OLDEST up to but not including BEFORE. `make test-vllm` and
`make test-vllm-versions` run 0.28, 0.30 and 0.32 on a CPU. 0.33 has no CPU build, so
tests/engine/beside_vllm/test_vllm_contract.py reads its wheel."""

_GLOBAL_LAYERS_FROM = (0, 32)  # older releases apply the sliding window to the layers without one, too
_LATENTS_FROM = (0, 32)  # the oldest release in which MLA was tested

_ROPE_TYPES_OF_VLLM = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
"""Names that vLLM's models write into their config, and transformers' name of the type."""

TESTED_ARCHITECTURES = (
    "ArceeForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "HeliumForCausalLM",
    "Jais2ForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NanoChatForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Architectures that tests/inside_vllm runs, most of them beside an independent CacheBlend over the transformers
counterpart. Others are served, too, if they pass the exactness check at start."""

_NORMED_AFTER_ROPE = "its keys are normed after RoPE, but the connector takes them before it; the check at start fails"
_UNLIKE_LAYERS = (
    "its layers have heads of two sizes, or attend to other layers' KV, which the connector does not support"
)
FAILING_ARCHITECTURES = {
    **dict.fromkeys(("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"), _NORMED_AFTER_ROPE),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), _UNLIKE_LAYERS),
}
"""Architectures that are known to be rejected at start, with the reason."""

FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM's `--kv-cache-dtype` of eight bits with one scale per layer or head, and the dtypes of their elements."""

KV_FREE_DRAFT_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that compute drafts from token ids only, so that drafts need no KV."""

FIX_HINT = "Serve it without the ragblend connector, or with backend='transformers'"


def vllm_version() -> tuple[int, int]:
    """Return the installed vLLM's major and minor version; (0, 0) without vLLM.

    The CPU build is the package `vllm-cpu`. It is found only if scripts/install_vllm_cpu.sh has installed it, because
    this script adds the metadata of a package `vllm`. `vllm serve` needs this metadata, too.
    """
    try:
        major, minor = version("vllm").split(".")[:2]
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return 0, 0


def require_supported_version(installed: tuple[int, int] | None = None) -> None:
    """Raise RagblendError unless the installed vLLM is in the supported range, or newer and equal in what is used.

    A newer release that declares otherwise what ragblend uses of it is rejected with the names. Without a difference a
    warning is logged, and the exactness check at start decides.
    """
    installed = vllm_version() if installed is None else installed
    if installed >= BEFORE:
        from ragblend.engine.vllm.releases.contract import find_differences

        tested, differences = f"{BEFORE[0]}.{BEFORE[1]}", find_differences()
        if differences:
            raise RagblendError(
                f"vLLM is {installed[0]}.{installed[1]}, newer than the tested releases, and {len(differences)} names "
                f"that ragblend uses are gone or changed: {', '.join(differences)}. Use vLLM before {tested}: pip "
                f"install 'vllm<{tested}', or a newer ragblend"
            )
        log.warning(
            "vLLM is %d.%d, and ragblend was tested with releases before %s; all names that it uses are unchanged",
            *installed,
            tested,
        )
    elif installed < OLDEST:
        name = "not installed" if installed == (0, 0) else f"{installed[0]}.{installed[1]}"
        raise RagblendError(
            f"vLLM is {name}; {OLDEST[0]}.{OLDEST[1]} <= vllm < {BEFORE[0]}.{BEFORE[1]} is needed: "
            "pip install 'ragblend[vllm]' (without a GPU: scripts/install_vllm_cpu.sh VENV)"
        )


def unsupported_reasons(vllm_config: Any) -> list[str]:
    """Return all reasons why this vLLM configuration cannot be blended; empty if it can."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    reasons = _unsupported_model_reasons(model)
    has_window, sees_all = _layers_seen(model.hf_text_config)
    if has_window and not sees_all:
        reasons.append(
            f"its layers attend to {model.hf_text_config.sliding_window} tokens only (sliding window), and vLLM frees "
            "older blocks; start vLLM with --disable-sliding-window, which limits prompts to that length"
        )
    elif has_window and (0, 0) < vllm_version() < _GLOBAL_LAYERS_FROM:
        reasons.append(
            "some of its layers have a sliding window, which vLLM before "
            f"{_GLOBAL_LAYERS_FROM[0]}.{_GLOBAL_LAYERS_FROM[1]} then also applies to its other layers "
            "(vllm-project/vllm#51756); use a newer vLLM"
        )
    if parallel.pipeline_parallel_size > 1:
        reasons.append(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, but a worker needs all layers")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name} is {getattr(parallel, name)}, so that no worker has the KV of all tokens")
    if getattr(parallel, "data_parallel_size", 1) > 1 and getattr(model, "is_moe", False):
        reasons.append(
            f"data_parallel_size is {parallel.data_parallel_size} and it has experts, so its layers wait for the other "
            "engines, which do not run them for a blend; start as many servers and a router (docs/deploy.md)"
        )
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if getattr(model, "use_mla", False) and cache_dtype not in ("auto", _name(model.dtype)):
        reasons.append(f"the KV cache is {cache_dtype}, but latents (MLA) are placed in the model's dtype only")
    elif cache_dtype not in ("auto", _name(model.dtype), *FP8_CACHES):
        reasons.append(
            f"the KV cache is {cache_dtype} and the model {_name(model.dtype)}, but stored KV is placed in the model's "
            f"dtype or in {', '.join(FP8_CACHES)}; choose one by --kv-cache-dtype"
        )
    return reasons


def draft_note(vllm_config: Any) -> str:
    """Return a note on drafts by a model, whose KV is missing for blended tokens; "" without such drafts."""
    drafts = getattr(vllm_config, "speculative_config", None)
    if drafts is None or drafts.method in KV_FREE_DRAFT_METHODS:
        return ""
    return (
        f"drafts by {drafts.method} lack the KV of blended tokens: answers are the served model's, but fewer drafts "
        f"are accepted; drafts from the text need no KV: method {' or '.join(KV_FREE_DRAFT_METHODS)}"
    )


def _unsupported_model_reasons(model: Any) -> list[str]:
    config = model.hf_text_config  # of a multimodal model, its decoder's
    reasons = []
    if getattr(config, "index_topk", None) is not None:
        reasons.append("its attention is MLA with an index, whose keys ragblend does not store")
    elif getattr(model, "use_mla", False) and (0, 0) < vllm_version() < _LATENTS_FROM:
        reasons.append(f"its attention is MLA, which needs vLLM {_LATENTS_FROM[0]}.{_LATENTS_FROM[1]}")
    if getattr(model, "is_hybrid", False):
        reasons.append("it has recurrent (state space) layers, whose state cannot be combined from chunks")
    unsupported_types = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", WINDOWED})
    if unsupported_types:
        reasons.append(
            f"it has layers of type {', '.join(unsupported_types)}, whose KV cannot be moved within a prompt"
        )
    for rope in rope_parameters(config).values():
        kind = rope.get("rope_type", "default")
        kind = _ROPE_TYPES_OF_VLLM.get(kind, kind)
        if kind == "longrope":
            original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
            if model.max_model_len > original:
                reasons.append(f"its RoPE changes beyond {original} tokens; start vLLM with --max-model-len {original}")
        elif problem := rope_type_problem(kind):
            reasons.append(f"its RoPE type {kind!r} {problem}")
    return reasons


def untested_architecture_note(config: Any) -> str:
    """Return a note that vLLM was not tested with a model of this `config`; "" if it was."""
    names = list(getattr(config, "architectures", None) or ())
    if any(name in TESTED_ARCHITECTURES for name in names):
        return ""
    return f"is a {', '.join(names) or 'model of unknown class'}, which was not tested in vLLM (docs/models.md)"


def _layers_seen(config: Any) -> tuple[bool, bool]:
    """Return True if some layers have a sliding window, and True if some layers have none.

    --disable-sliding-window removes the window from the configuration.
    """
    kinds = set(getattr(config, "layer_types", None) or (WINDOWED,))
    if not getattr(config, "sliding_window", None) or not getattr(config, "use_sliding_window", True):
        return False, True
    return WINDOWED in kinds, kinds != {WINDOWED}


def reject_unsupported_config(vllm_config: Any) -> None:
    """Raise UnsupportedModelError with every reason why this vLLM configuration cannot be blended."""
    reasons = unsupported_reasons(vllm_config)
    if reasons:
        raise UnsupportedModelError(
            f"ragblend cannot blend {vllm_config.model_config.model} here: {'; '.join(reasons)}. {FIX_HINT}"
        )


def reject_kv_groups(kv_cache_config: Any) -> None:
    """Raise UnsupportedModelError unless all layers share one paged cache that keeps the blocks of all tokens.

    Layers with a sliding window are accepted if vLLM caches them like layers with full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        raise UnsupportedModelError(
            f"ragblend needs one KV cache of full attention, but vLLM has {len(groups)} of {', '.join(kinds)}. "
            f"For a model with sliding windows, start vLLM with --disable-hybrid-kv-cache-manager. {FIX_HINT}"
        )


def kernel_blocks_per_block(cache_shape: Sequence[int], num_blocks: int, block_size: int) -> int:
    """Return the number of the attention kernel's blocks in each block of vLLM's cache manager.

    `cache_shape`: shape of one layer's paged cache, whose first or second dimension counts the kernel's blocks. Raises
    UnsupportedModelError for a shape that does not fit `num_blocks` blocks of `block_size` tokens.
    """
    for size in cache_shape[:2]:
        ratio, rest = divmod(size, num_blocks)
        if ratio and not rest and not block_size % ratio:
            return ratio
    raise UnsupportedModelError(
        f"the paged cache of a layer has the shape {tuple(cache_shape)}, which is no multiple of vLLM's {num_blocks} "
        f"blocks of {block_size} tokens, so the attention kernel's blocks are unknown. Choose a --block-size that the "
        f"attention kernel supports, such as 16 or 32. {FIX_HINT}"
    )


def reject_unsupported_attention(impl: Any) -> None:
    """Raise UnsupportedModelError for the attention backend FlashInfer, and for attention with ALiBi slopes.

    FlashInfer cannot plan several calls before it runs the first. ragblend's query probe cannot compute ALiBi. `impl`:
    vLLM's implementation of a layer's attention.
    """
    is_latent = hasattr(impl, "kv_lora_rank")  # the backend of this name for MLA plans nothing
    if (
        type(impl).__name__.startswith("FlashInfer") and not is_latent
    ):  # other backends that do the same fail a gate of `self_check`
        raise UnsupportedModelError(
            "vLLM's attention backend FlashInfer overwrites the plan of one call by that of the next, but ragblend "
            "plans several calls before it runs the first. Choose another: --attention-backend FLASH_ATTN "
            "(vllm_options={'attention_backend': 'FLASH_ATTN'})"
        )
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError(f"its attention has ALiBi slopes, which ragblend does not support. {FIX_HINT}")


def model_fingerprint(model_config: Any) -> str:
    """Return the fingerprint of the checkpoint that vLLM serves. The transformers engine computes the same one.

    Both engines can therefore share stored KV. The fingerprint covers the revision, overrides of the config, a separate
    config (`hf_config_path`), and online quantisation, which changes the KV. Raises UsageError for overrides that are a
    function.
    """
    overrides = getattr(model_config, "hf_overrides", None) or {}
    if not isinstance(overrides, dict):
        raise UsageError("hf_overrides is a function, which has no fingerprint; pass a dictionary")
    path = find_model(str(model_config.model), options=vllm_model_options(model_config))
    dtype = dtype_name(model_config.dtype)
    if config_path := getattr(model_config, "hf_config_path", None):
        config = find_model(config_path, weights=False, options=vllm_model_options(model_config, config_path))
        overrides = {**json.loads(read_file(config / "config.json")), **overrides}
    is_quantised = getattr(model_config.hf_config, "quantization_config", None) is not None  # in the file, too
    online = None if is_quantised else model_config.quantization
    return checkpoint_fingerprint(path, f"{dtype}+{online}" if online else dtype, overrides)


def vllm_model_options(model_config: Any, place: str | None = None) -> ModelOptions:
    """Return the revision, dtype and trust_remote_code with which vLLM loads its model.

    `place`: name or path of another checkpoint, such as the tokenizer's; None for the model itself. For a directory,
    the result has no revision, because vLLM ignores a revision of a directory, but `find_model` would raise an error.
    """
    is_directory = Path(place or str(model_config.model)).expanduser().is_dir()
    return ModelOptions(
        dtype=dtype_name(model_config.dtype),
        revision=None if is_directory else getattr(model_config, "revision", None),
        trust_remote_code=bool(getattr(model_config, "trust_remote_code", False)),
    )


def model_kv_spec(model_config: Any) -> KVSpec:
    """Return dtype and shapes of the model's stored KV. The shapes include the heads of all ranks."""
    heads, dim, config = (
        model_config.get_total_num_kv_heads(),
        model_config.get_head_size(),
        model_config.hf_text_config,
    )
    shape = (heads, dim, dim)
    if getattr(model_config, "use_mla", False):
        shape = latent_kv_shape(config)
    return KVSpec.from_kv_shapes(dtype_name(model_config.dtype), [shape] * int(config.num_hidden_layers))


def latent_kv_shape(config: Any) -> tuple[int, int, int]:
    """Return the shape (H, D of keys, D of values) of a layer's stored KV in MLA: the shared key, and the latent."""
    return 1, int(config.qk_rope_head_dim), int(config.kv_lora_rank)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
