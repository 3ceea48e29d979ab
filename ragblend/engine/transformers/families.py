"""What differs between decoder families, and which decoders cannot be fused. A MODEL FAMILY IS ADDED HERE.

Most families (Llama, Mistral, Qwen2, Qwen3, Gemma, Granite, ...) are made of the same parts under the same names and
need nothing. One that makes its keys and values otherwise is a subclass of `AttentionFamily` in FAMILIES; the families
that the tests run are a table in tests/tiny_models.py. Every model passes `self_check` against its own prefill when
it is loaded.

Knows transformers' modules by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.fusion.rope import exact_context
from ragblend.engine.store.kv import LayerKV
from ragblend.errors import UnsupportedModelError

_FIX_HINT = (
    "ragblend fuses decoders whose layers are all attention with RoPE, over everything or a sliding window: Llama, "
    "Mistral, Qwen2, Qwen3, Phi-3, Gemma 1 to 3, gpt-oss, DeepSeek V2 and V3 and their relatives"
)

WINDOWED = "sliding_attention"
"""What transformers calls a layer in which a token sees those shortly before it only."""

_RECURRENT = frozenset({"linear_attention", "hybrid", "mamba", "conv", "recurrent"})


class AttentionFamily:
    """How one model's layers make keys and values: separate projections, and a norm of each head's keys, if any."""

    key_module = "k_proj"  # the module whose output `keys_from_output` makes pre-RoPE keys of
    half_tables = False  # whether the rotary module gives each angle once, for both dimensions that it turns
    complex_tables = False  # and as one complex number

    def __init__(self, config: Any) -> None:
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.kv_shape = (self.num_kv_heads, self.head_dim, self.head_dim)  # H, D of keys, D of values, as they are held
        self.embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0) or 1.0  # Granite
        self.logits_scaling: float = getattr(config, "logits_scaling", 1.0) or 1.0  # Granite
        self.logits_softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether a layer's attention is made like that."""
        return hasattr(attention, "k_proj") and hasattr(attention, "v_proj")

    def projections(self, attention: Any) -> list[nn.Module]:
        """The modules that make keys and values, for what running them costs."""
        return [attention.k_proj, attention.v_proj]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-RoPE keys, after a QK-norm, and values, [R, H, D] each, of `normed` [R, hidden size]."""
        keys = self.split_heads(attention.k_proj(normed))
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        return keys, self.split_heads(attention.v_proj(normed))

    def keys_from_output(self, attention: Any, output: Tensor) -> Tensor:
        """[R, H, D] of what the tapped module put out. Normed once more: some norm [R, H, D], others [H, R, D]."""
        keys = self.split_heads(output)
        return attention.k_norm(keys) if hasattr(attention, "k_norm") else keys

    def split_heads(self, projected: Tensor) -> Tensor:
        """[R, H * D] -> [R, H, D]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class PackedQKVProjection(AttentionFamily):
    """Queries, keys and values from one matrix (Phi-3)."""

    key_module = "qkv_proj"

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether there is one matrix."""
        return hasattr(attention, "qkv_proj")

    def projections(self, attention: Any) -> list[nn.Module]:
        """That matrix."""
        return [attention.qkv_proj]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The last two parts of its output [R, (Hq + 2H) * D]."""
        qkv, width = attention.qkv_proj(normed), self.num_kv_heads * self.head_dim
        return self.split_heads(qkv[..., -2 * width : -width]), self.split_heads(qkv[..., -width:])

    def keys_from_output(self, attention: Any, output: Tensor) -> Tensor:
        """The keys' part."""
        width = self.num_kv_heads * self.head_dim
        return self.split_heads(output[..., -2 * width : -width])


class JointHeadNorm(AttentionFamily):
    """One norm over the keys of all heads (OLMo 2, OLMoE)."""

    key_module = "k_norm"

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether the norm is as wide as all heads."""
        weight = getattr(getattr(attention, "k_norm", None), "weight", None)  # a norm may have none (NanoChat)
        width, projection = 0 if weight is None else weight.numel(), getattr(attention, "k_proj", None)
        return bool(width) and width == getattr(projection, "out_features", 0) != getattr(attention, "head_dim", 0)

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The norm comes before the heads are told apart."""
        return self.split_heads(attention.k_norm(attention.k_proj(normed))), self.split_heads(attention.v_proj(normed))

    def keys_from_output(self, attention: Any, output: Tensor) -> Tensor:
        """They are normed."""
        return self.split_heads(output)


class ClippedQKV(AttentionFamily):
    """Keys and values within bounds (OLMo)."""

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether there are bounds."""
        return getattr(getattr(attention, "config", None), "clip_qkv", None) is not None

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The projections, clipped."""
        bound = attention.config.clip_qkv
        keys, values = super().keys_and_values(attention, normed)
        return keys.clamp(-bound, bound), values.clamp(-bound, bound)

    def keys_from_output(self, attention: Any, output: Tensor) -> Tensor:
        """The projection is tapped before it is clipped."""
        bound = attention.config.clip_qkv
        return super().keys_from_output(attention, output).clamp(-bound, bound)


class SinkAttention(AttentionFamily):
    """Sinks in the softmax, and angles given once (gpt-oss)."""

    half_tables = True

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether its heads have sinks."""
        return hasattr(attention, "sinks") and super().fits(attention)


class LatentAttention(AttentionFamily):
    """One latent vector per token, of which each layer expands keys and values of all heads, and one rotated part of
    the keys that they share: MLA (DeepSeek V3, GLM-4 MoE Lite).

    Held as one head, the rotated part as keys, the latent after its norm as values: expanding it is linear, so whatever
    moves the latent by a sum of changes moves keys and values by the sum of theirs.
    """

    key_module = "kv_a_proj_with_mqa"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rank: int = config.kv_lora_rank
        self.kv_shape = (1, config.qk_rope_head_dim, self.rank)
        self.in_pairs: bool = getattr(config, "rope_interleave", False)  # whether neighbours turn, as projected

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether it keeps the latent and expands it, and sees everything before it: an index chooses (DSA)."""
        parts = ("kv_a_proj_with_mqa", "kv_a_layernorm", "expand_kv")
        return all(hasattr(attention, part) for part in parts) and not hasattr(attention, "indexer")

    def projections(self, attention: Any) -> list[nn.Module]:
        """The one that makes the latent: what expands it is part of attention."""
        return [attention.kv_a_proj_with_mqa]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Of its output [R, rank + D] the last, and the first, normed."""
        projected = attention.kv_a_proj_with_mqa(normed)
        latent = attention.kv_a_layernorm(projected[..., : self.rank])
        return self.keys_from_output(attention, projected), latent[..., None, :]

    def keys_from_output(self, attention: Any, output: Tensor) -> Tensor:
        """The part that is rotated."""
        keys = output[..., None, self.rank :]
        return _apart(keys) if self.in_pairs else keys

    def to_stored(self, cached: LayerKV) -> LayerKV:
        """What a layer gives its cache, [1, T, D]: the latent for keys, the rotated part, taken apart, for values."""
        return LayerKV(cached.values, cached.keys)

    def from_stored(self, held: LayerKV) -> LayerKV:
        """What a layer wants of its cache: `to_stored`, undone."""
        return LayerKV(held.values, held.keys)

    def expand_kv(self, layers: Sequence[Any], layer: int, held: LayerKV) -> LayerKV:
        """The keys, rotated, and values [heads, T, D] that queries meet: the layer itself expands what is held."""
        keys, values = layers[layer].self_attn.expand_kv(*(each[None] for each in self.from_stored(held)))
        return LayerKV(keys[0], values[0])


class InterleavedLatentAttention(LatentAttention):
    """MLA whose neighbouring dimensions turn, by complex numbers, and stay where they are (DeepSeek V2)."""

    half_tables = complex_tables = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.in_pairs = True

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """By its name: nothing else about it is different."""
        return super().fits(attention) and attention.config.model_type == "deepseek_v2"

    def to_stored(self, cached: LayerKV) -> LayerKV:
        """Here the dimensions that turn together are half the width apart."""
        return LayerKV(_apart(cached.values), cached.keys)

    def from_stored(self, held: LayerKV) -> LayerKV:
        """Neighbours again, as the queries have them."""
        return LayerKV(held.values, torch.stack(held.keys.chunk(2, dim=-1), dim=-1).flatten(-2))


def _apart(pairs: Tensor) -> Tensor:
    """[..., D], of neighbours that turn together first those that come first."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1)


FAMILIES: tuple[type[AttentionFamily], ...] = (
    PackedQKVProjection,
    JointHeadNorm,
    ClippedQKV,
    SinkAttention,
    InterleavedLatentAttention,
    LatentAttention,
    AttentionFamily,
)
"""The first that fits is taken."""


def family_of(model: Any) -> AttentionFamily:
    """How `model` makes keys and values. Raises UnsupportedModelError unless every layer can be fused exactly."""
    reject_unsupported_model(model)
    attention = text_decoder(model).layers[0].self_attn
    return next(family(model.config.get_text_config()) for family in FAMILIES if family.fits(attention))


def text_decoder(model: Any) -> Any:
    """A model's decoder: at `.model`, or within it where the model reads images too (Gemma 3). None: neither."""
    inner = getattr(model, "model", None)
    return getattr(inner, "language_model", inner)


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """A config's settings of RoPE by layer type (Gemma 3); those that all layers share are under ""."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    by_type = {kind: dict(each) for kind, each in found.items() if isinstance(each, Mapping)}
    return by_type or {"": found}


def context_length(config: Any) -> int:
    """Longest prompt plus answer at which all keys can be placed. Raises UnsupportedModelError as `exact_context`."""
    longest = config.max_position_embeddings
    return min(exact_context(each, longest) for each in rope_parameters(config).values())


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Of every layer, how many tokens a token sees, itself among them; None where that is all of the context."""
    window = getattr(config, "sliding_window", None)
    count: int = config.num_hidden_layers
    if not window or window >= context_length(config):
        return (None,) * count
    kinds = getattr(config, "layer_types", None) or (WINDOWED,) * count
    return tuple(window if kind == WINDOWED else None for kind in kinds)


def reject_unsupported_model(model: Any) -> None:
    """Raise UnsupportedModelError, naming the layer type and the way out, unless every layer can be fused exactly."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ())
    unsupported_types = sorted(kinds - {"full_attention", WINDOWED})
    if not _RECURRENT.isdisjoint(kinds):
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unsupported_types)}, which keep one state of everything before "
            f"them: the states of chunks computed apart cannot be put together. {_FIX_HINT}"
        )
    if getattr(config, "index_topk", None) is not None:
        raise UnsupportedModelError(
            f"{name} has multi-head latent attention (MLA) with an index, which chooses the tokens that are seen by "
            f"keys of its own: ragblend does not store those. {_FIX_HINT}"
        )
    decoder = text_decoder(model)
    if decoder is None or not all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm", "rotary_emb")):
        raise UnsupportedModelError(f"{name} has no decoder of RoPE attention layers at `.model`. {_FIX_HINT}")
    if unsupported_types:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unsupported_types)}, whose KV cannot be moved within a "
            f"prompt. {_FIX_HINT}"
        )
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": images alone
        raise UnsupportedModelError(
            f"{name} lets tokens see later ones (use_bidirectional_attention), so no chunk's KV is its own. {_FIX_HINT}"
        )
    attentions = [getattr(layer, "self_attn", None) for layer in decoder.layers]
    undescribed = _undescribed_kv(attentions)
    if undescribed:
        raise UnsupportedModelError(
            f"{name} has {' and '.join(undescribed)}, which no family here describes. {_FIX_HINT}"
        )
    for index, (layer, attention) in enumerate(zip(decoder.layers, attentions, strict=True)):
        fits = attention is not None and any(family.fits(attention) for family in FAMILIES)
        if not fits or not hasattr(layer, "input_layernorm"):
            kind = type(attention if attention is not None else layer).__name__
            raise UnsupportedModelError(f"layer {index} of {name} is a {kind}, which ragblend cannot fuse. {_FIX_HINT}")
    context_length(config)


def _undescribed_kv(attentions: Sequence[Any]) -> list[str]:
    """Return what a decoder's attention modules do with keys and values that no AttentionFamily does (Gemma 3n, 4)."""
    found = []
    if any(hasattr(each, "v_norm") for each in attentions):
        found.append("values that are normed (v_norm)")
    sizes = sorted({each.head_dim for each in attentions if hasattr(each, "head_dim")})
    if len(sizes) > 1:
        found.append(f"heads of {' and '.join(map(str, sizes))} dimensions in different layers")
    if any(getattr(each, "is_kv_shared_layer", False) for each in attentions):
        found.append("layers that use the KV of another layer")
    return found
