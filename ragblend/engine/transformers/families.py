"""Differences between decoder families, and the decoders that cannot be fused. A MODEL FAMILY IS ADDED HERE.

Most families (Llama, Mistral, Qwen2, Qwen3, Gemma, Granite, ...) consist of the same parts under the same names and
need no code. A family that computes keys and values otherwise is a subclass of `AttentionFamily` in FAMILIES.
tests/tiny_models.py lists the families that the tests run. Every model must pass `self_check` against its own prefill
when it is loaded.

Depends on the attributes of transformers' modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.positions import WINDOWED, context_length
from ragblend.errors import UnsupportedModelError

_FIX_HINT = (
    "ragblend fuses decoders whose layers are all attention with RoPE, over everything or a sliding window: Llama, "
    "Mistral, Qwen2, Qwen3, Phi-3, Gemma 1 to 4, gpt-oss, DeepSeek V2 and V3 and their relatives"
)

_RECURRENT = frozenset({"linear_attention", "hybrid", "mamba", "conv", "recurrent"})


class AttentionFamily:
    """Family of models whose attention computes keys and values in the same way.

    This class describes models with one projection for keys and one for values. The keys of each head may have a norm.
    Subclasses describe other families.
    """

    key_module = "k_proj"  # the module whose output `keys_from_module_output` turns into pre-RoPE keys
    half_tables = False  # True if the rotary module returns each angle once, for both dimensions that it rotates
    complex_tables = False  # True if it returns each angle as one complex number
    shares_kv = False  # True if layers exchange keys and values in the argument `shared_kv_states`

    def __init__(self, config: Any) -> None:
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0) or 1.0  # Granite
        self.logits_scaling: float = getattr(config, "logits_scaling", 1.0) or 1.0  # Granite
        self.logits_scaling /= getattr(config, "logit_scale", 1.0) or 1.0  # Cohere
        self.norms_embeddings: bool = config.model_type == "nanochat"  # by the norm that follows the last layer
        self.logits_softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if this family describes a layer's attention."""
        return hasattr(attention, "k_proj") and hasattr(attention, "v_proj")

    def kv_shape(self, attention: Any) -> tuple[int, int, int]:
        """Return the stored shape of a layer's KV: (H, D of keys, D of values)."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    def stored_kv_projections(self, attention: Any) -> list[nn.Module]:
        """Return the modules that compute the stored keys and values.

        The cost of computing KV is estimated from their number of parameters.
        """
        return [attention.k_proj, attention.v_proj]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [R, H, D] each, of `normed` [R, hidden size]. Keys are after QK-norm, before RoPE."""
        keys = self.keys_from_module_output(attention, attention.k_proj(normed))
        return keys, self.split_heads(attention.v_proj(normed))

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the pre-RoPE keys [R, H, D], given the output of the module `key_module`.

        If the model has a QK-norm, this method applies the norm to `output`. It does not read the norm's output from
        the model's pass, because that is [R, H, D] in some models and [H, R, D] in others.
        """
        keys = self.split_heads(output)
        return attention.k_norm(keys) if hasattr(attention, "k_norm") else keys

    def split_heads(self, projected: Tensor) -> Tensor:
        """Return `projected` [R, H * D] as [R, H, D]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)

    def to_stored(self, cached: LayerKV) -> LayerKV:
        """Return `cached` (KV as a layer caches it) in stored form. Most families store it unchanged."""
        return cached

    def from_stored(self, stored: LayerKV) -> LayerKV:
        """Return `stored` in the form that a layer reads from its cache. Inverse of `to_stored`."""
        return stored

    def expand_kv(self, attention: Any, stored: LayerKV) -> LayerKV:
        """Return the keys and values [heads, T, D] that `attention` computes with. The keys in `stored` are rotated."""
        return stored

    def rotated_key_weight(self, attention: Any) -> Tensor | None:
        """Return the weight [D] by which the layer multiplies keys after RoPE; None if it does not."""
        return None


class PackedQKVProjection(AttentionFamily):
    """Queries, keys and values from one matrix (Phi-3)."""

    key_module = "qkv_proj"

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the attention has one packed projection."""
        return hasattr(attention, "qkv_proj")

    def stored_kv_projections(self, attention: Any) -> list[nn.Module]:
        """Return the packed projection."""
        return [attention.qkv_proj]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, H, D], the last two parts of the projection's output [R, (Hq + 2H) * D]."""
        qkv, width = attention.qkv_proj(normed), self.num_kv_heads * self.head_dim
        return self.keys_from_module_output(attention, qkv), self.split_heads(qkv[..., -width:])

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the keys' part of the projection's output."""
        width = self.num_kv_heads * self.head_dim
        return self.split_heads(output[..., -2 * width : -width])


class JointHeadNorm(AttentionFamily):
    """One norm over the keys of all heads (OLMoE, OLMo 2)."""

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the norm is as wide as all heads together."""
        weight = getattr(getattr(attention, "k_norm", None), "weight", None)  # a norm may have none (NanoChat)
        # Cohere's weight is [heads, head size], for a norm of each head.
        width, projection = 0 if weight is None else weight.shape[-1], getattr(attention, "k_proj", None)
        return bool(width) and width == getattr(projection, "out_features", 0) != getattr(attention, "head_dim", 0)

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the keys [R, H, D], normed before they are split into heads."""
        return self.split_heads(attention.k_norm(output))


class NormAfterRope(AttentionFamily):
    """Keys that are normed after RoPE (HunYuan).

    RoPE keeps the length of a key, so dividing by it may come first. Only the norm's weight must come after RoPE.
    """

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the attention has the norm `key_layernorm`."""
        return hasattr(attention, "key_layernorm") and super().fits(attention)

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the keys [R, H, D], normed without the norm's weight."""
        keys, eps = self.split_heads(output), attention.key_layernorm.variance_epsilon
        return nn.functional.rms_norm(keys.float(), keys.shape[-1:], eps=eps).to(keys.dtype)

    def rotated_key_weight(self, attention: Any) -> Tensor | None:
        """Return the norm's weight [D]."""
        weight: Tensor = attention.key_layernorm.weight
        return weight


class ClippedQKV(AttentionFamily):
    """Keys and values that the model clips to the range -clip_qkv to clip_qkv (OLMo)."""

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the config limits queries, keys and values (`clip_qkv`)."""
        return getattr(getattr(attention, "config", None), "clip_qkv", None) is not None

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projections, clipped."""
        bound = attention.config.clip_qkv
        keys, values = super().keys_and_values(attention, normed)  # these keys are clipped already
        return keys, values.clamp(-bound, bound)

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the keys in `output`, clipped. `output` is not clipped, because the model clips it only afterwards."""
        bound = attention.config.clip_qkv
        return super().keys_from_module_output(attention, output).clamp(-bound, bound)


class SinkAttention(AttentionFamily):
    """Attention sinks in the softmax, and rotary tables of width D / 2 instead of D (gpt-oss)."""

    half_tables = True

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the attention's heads have sinks."""
        return hasattr(attention, "sinks") and super().fits(attention)


class ValueNormAttention(AttentionFamily):
    """Normed values, and heads whose number and size differ by layer (Gemma 4).

    The last layers attend to the KV of earlier layers. No KV is stored for these last layers.
    """

    shares_kv = True

    def __init__(self, config: Any) -> None:
        # The config of one layer: that of all layers raises an error when it is asked for sizes that differ.
        super().__init__(config.per_layer_config[0])

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True if the layer normalizes its values, or attends to the values of another layer."""
        return hasattr(attention, "v_norm") or uses_kv_of_other_layer(attention)

    def kv_shape(self, attention: Any) -> tuple[int, int, int]:
        """Return (H, D, D), with the layer's own H and D. Keys and values have the same D."""
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        return heads, attention.head_dim, attention.head_dim

    def stored_kv_projections(self, attention: Any) -> list[nn.Module]:
        """Return the projections of keys and values. Some layers have one projection for both."""
        return [each for each in (attention.k_proj, attention.v_proj) if each is not None]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values after the norms. In a layer without `v_proj`, values are computed from the keys'
        projection, too."""
        projected = attention.k_proj(normed)
        values = projected if attention.v_proj is None else attention.v_proj(normed)
        values = values.view(*values.shape[:-1], -1, attention.head_dim)
        return self.keys_from_module_output(attention, projected), attention.v_norm(values)

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the module's output, split into heads of this layer's size and normed."""
        keys: Tensor = attention.k_norm(output.view(*output.shape[:-1], -1, attention.head_dim))
        return keys


class LatentAttention(AttentionFamily):
    """Multi-head latent attention, MLA (DeepSeek V3, GLM-4 MoE Lite).

    In each layer, a token has one latent vector and one rotary part. The model expands the latent into the keys and
    values of all heads. The rotary part belongs to the keys, and all heads share it. Both are stored as one head: the
    rotary part as keys, before rotation, and the normed latent as values. The expansion is linear, so drift correction
    of the latent corrects the expanded keys and values, too.
    """

    key_module = "kv_a_proj_with_mqa"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rank: int = config.kv_lora_rank
        self.rotary_dim: int = config.qk_rope_head_dim
        self.in_pairs: bool = getattr(config, "rope_interleave", False)  # True if adjacent dimensions form a pair

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True for MLA that stores and expands the latent, except for sparse attention (DSA)."""
        parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "expand_kv")
        return all(hasattr(attention, part) for part in parts) and not hasattr(attention, "indexer")

    def kv_shape(self, attention: Any) -> tuple[int, int, int]:
        """Return the shape of one head, with the rotary part as keys and the latent as values."""
        return 1, self.rotary_dim, self.rank

    def stored_kv_projections(self, attention: Any) -> list[nn.Module]:
        """Return the projection whose output is the latent and the rotary part. The expanded latent is not stored."""
        return [attention.kv_a_proj_with_mqa]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary part as keys [R, 1, D], before rotation, and the normed latent as values [R, 1, rank]."""
        projected = attention.kv_a_proj_with_mqa(normed)
        latent = attention.kv_a_layernorm(projected[..., : self.rank])
        return self.keys_from_module_output(attention, projected), latent[..., None, :]

    def keys_from_module_output(self, attention: Any, output: Tensor) -> Tensor:
        """Return the rotary part [R, 1, D] of the projection's output [R, rank + D], before rotation."""
        keys = output[..., None, self.rank :]
        return _split_pairs(keys) if self.in_pairs else keys

    def to_stored(self, cached: LayerKV) -> LayerKV:
        """Return the stored form: rotary part as keys, latent as values."""
        return LayerKV(cached.values, cached.keys)

    def from_stored(self, stored: LayerKV) -> LayerKV:
        """Return the form that a layer reads: latent as keys, rotary part as values."""
        return LayerKV(stored.values, stored.keys)

    def expand_kv(self, attention: Any, stored: LayerKV) -> LayerKV:
        """Return the keys and values of all heads, which `attention` makes from the rotary part and the latent."""
        keys, values = attention.expand_kv(*(each[None] for each in self.from_stored(stored)))
        return LayerKV(keys[0], values[0])


class InterleavedLatentAttention(LatentAttention):
    """MLA that rotates pairs of adjacent dimensions, and keeps the order of the dimensions (DeepSeek V2)."""

    half_tables = complex_tables = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.in_pairs = True

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Return True for model type deepseek_v2. The type decides, because other MLA models have the same modules."""
        return super().fits(attention) and attention.config.model_type == "deepseek_v2"

    def to_stored(self, cached: LayerKV) -> LayerKV:
        """Return the stored form: the two dimensions of a rotated pair are half the width apart."""
        return LayerKV(_split_pairs(cached.values), cached.keys)

    def from_stored(self, stored: LayerKV) -> LayerKV:
        """Return the form that a layer reads: the two dimensions of a rotated pair are adjacent."""
        return LayerKV(stored.values, torch.stack(stored.keys.chunk(2, dim=-1), dim=-1).flatten(-2))


def _split_pairs(pairs: Tensor) -> Tensor:
    """Return [..., D] with the first dimension of every adjacent pair in the first half, the other in the second."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1)


FAMILIES: tuple[type[AttentionFamily], ...] = (
    PackedQKVProjection,
    JointHeadNorm,
    NormAfterRope,
    ClippedQKV,
    SinkAttention,
    InterleavedLatentAttention,
    LatentAttention,
    ValueNormAttention,
    AttentionFamily,
)
"""A model's family is the first that fits."""


def family_of(model: Any) -> AttentionFamily:
    """Return the attention family of `model`. Raises UnsupportedModelError unless every layer can be fused exactly."""
    reject_unsupported_model(model)
    attention = text_decoder(model).layers[0].self_attn
    return next(family(model.config.get_text_config()) for family in FAMILIES if family.fits(attention))


def text_decoder(model: Any) -> Any:
    """Return a model's decoder: `model.model`, or the language model in it if the model also reads images.

    Returns None if there is no `model.model`.
    """
    inner = getattr(model, "model", None)
    return getattr(inner, "language_model", inner)


def uses_kv_of_other_layer(attention: Any) -> bool:
    """Return True if a layer computes no keys and values, and attends to those of another layer."""
    return getattr(attention, "is_kv_shared_layer", False)


def kv_source_layers(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return, per layer, the index of the layer whose keys and values it attends to.

    For most layers this is the layer itself. Gemma 4's last layers compute no KV. Each of them attends to the last
    earlier layer of the same layer type that computes KV.
    """
    sources, latest = [], dict[Any, int]()
    for index, layer in enumerate(layers):
        kind = getattr(layer.self_attn, "layer_type", None)
        if not uses_kv_of_other_layer(layer.self_attn):
            latest[kind] = index
        sources.append(latest[kind])
    return tuple(sources)


def reject_unsupported_model(model: Any) -> None:
    """Raise UnsupportedModelError if a layer cannot be fused exactly. The error names the layer type and a fix."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    unsupported_types = sorted(kinds - {"full_attention", WINDOWED})
    if not _RECURRENT.isdisjoint(kinds):
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unsupported_types)}, which keep one state of all tokens so far; "
            f"the states of separately computed chunks cannot be combined. {_FIX_HINT}"
        )
    if getattr(config, "index_topk", None) is not None:
        raise UnsupportedModelError(
            f"{name} has multi-head latent attention (MLA) with an index, which selects tokens by separate keys that "
            f"ragblend does not store. {_FIX_HINT}"
        )
    decoder = text_decoder(model)
    if decoder is None or not all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm", "rotary_emb")):
        raise UnsupportedModelError(f"{name} has no decoder of RoPE attention layers at `.model`. {_FIX_HINT}")
    if unsupported_types:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unsupported_types)}, whose KV cannot be placed at another position "
            f"of a prompt. {_FIX_HINT}"
        )
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": images alone
        raise UnsupportedModelError(
            f"{name} lets tokens attend to later ones (use_bidirectional_attention), so a chunk's KV depends on the "
            f"text after it. {_FIX_HINT}"
        )
    if hasattr(decoder, "altup_projections"):
        raise UnsupportedModelError(
            f"{name} has several hidden states per token (AltUp), which no family here describes. {_FIX_HINT}"
        )
    attentions = [getattr(layer, "self_attn", None) for layer in decoder.layers]
    uses_other = [uses_kv_of_other_layer(attention) for attention in attentions]
    if all(uses_other) or uses_other != sorted(uses_other):
        raise UnsupportedModelError(
            f"{name} uses the KV of another model, or has a layer that makes KV after one that does not. {_FIX_HINT}"
        )
    for index, (layer, attention) in enumerate(zip(decoder.layers, attentions, strict=True)):
        fits = attention is not None and any(family.fits(attention) for family in FAMILIES)
        if not fits:
            kind = type(attention if attention is not None else layer).__name__
            raise UnsupportedModelError(f"layer {index} of {name} is a {kind}, which ragblend cannot fuse. {_FIX_HINT}")
    context_length(config)
