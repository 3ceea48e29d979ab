"""What differs between decoder families, and which decoders cannot be fused. A MODEL FAMILY IS ADDED HERE.

Most families (Llama, Mistral, Qwen2, Qwen3, Gemma, Granite, ...) are made of the same parts under the same names and
need nothing. One that makes its keys and values otherwise is a subclass of `Family` in FAMILIES; the families that the
tests run are a table in tests/conftest.py. Every model passes `self_check` against its own prefill when it is loaded.

Knows transformers' modules by their attributes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ragblend.engine.fusion.rope import exact_context
from ragblend.errors import UnsupportedModelError

_WAY_OUT = (
    "ragblend fuses decoders whose layers are all full attention with RoPE: Llama, Mistral (without sliding window), "
    "Qwen2, Qwen3, Phi-3, Gemma and their relatives"
)


class Family:
    """How one model's layers make keys and values: separate projections, and a norm of each head's keys, if any."""

    tapped: tuple[str, ...] = ("k_norm", "k_proj")  # the first of these that a layer has puts out its pre-RoPE keys

    def __init__(self, config: Any) -> None:
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.embedding_multiplier: float = getattr(config, "embedding_multiplier", 1.0) or 1.0  # Granite
        self.logits_scaling: float = getattr(config, "logits_scaling", 1.0) or 1.0  # Granite

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether a layer's attention is made like that."""
        return hasattr(attention, "k_proj") and hasattr(attention, "v_proj")

    def projections(self, attention: Any) -> list[nn.Module]:
        """The modules that make keys and values, for what running them costs."""
        return [attention.k_proj, attention.v_proj]

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-RoPE keys, after a QK-norm, and values, [R, H, D] each, of `normed` [R, hidden size]."""
        keys = self.heads(attention.k_proj(normed))
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        return keys, self.heads(attention.v_proj(normed))

    def tapped_keys(self, output: Tensor, num_rows: int) -> Tensor:
        """[R, H, D] of what the tapped module put out for `num_rows` tokens."""
        keys = self.heads(output) if output.ndim == 2 else output
        if keys.shape[0] == self.num_kv_heads != num_rows:  # some models norm after the transpose: [H, R, D]
            keys = keys.transpose(0, 1)
        return keys

    def heads(self, projected: Tensor) -> Tensor:
        """[R, H * D] -> [R, H, D]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class FusedProjection(Family):
    """Queries, keys and values from one matrix (Phi-3)."""

    tapped = ("qkv_proj",)

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
        return self.heads(qkv[..., -2 * width : -width]), self.heads(qkv[..., -width:])

    def tapped_keys(self, output: Tensor, num_rows: int) -> Tensor:
        """The keys' part."""
        width = self.num_kv_heads * self.head_dim
        return self.heads(output[..., -2 * width : -width])


class NormOverHeads(Family):
    """One norm over the keys of all heads (OLMo 2, OLMoE)."""

    @classmethod
    def fits(cls, attention: Any) -> bool:
        """Whether the norm is as wide as all heads."""
        norm, projection = getattr(attention, "k_norm", None), getattr(attention, "k_proj", None)
        width = norm.weight.numel() if norm is not None else 0
        return bool(width) and width == getattr(projection, "out_features", 0) != getattr(attention, "head_dim", 0)

    def keys_and_values(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The norm comes before the heads are told apart."""
        return self.heads(attention.k_norm(attention.k_proj(normed))), self.heads(attention.v_proj(normed))


class Clipped(Family):
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

    def tapped_keys(self, output: Tensor, num_rows: int) -> Tensor:
        """The projection is tapped before it is clipped."""
        return super().tapped_keys(output, num_rows).clamp(-self.clip, self.clip)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.clip: float = config.clip_qkv


FAMILIES: tuple[type[Family], ...] = (FusedProjection, NormOverHeads, Clipped, Family)
"""The first that fits is taken."""


def family_of(model: Any) -> Family:
    """How `model` makes keys and values. Raises UnsupportedModelError unless every layer can be fused exactly."""
    refuse_unsupported(model)
    attention = model.model.layers[0].self_attn
    return next(family(model.config) for family in FAMILIES if family.fits(attention))


def rope_parameters(config: Any) -> dict[str, Any]:
    """A config's settings of RoPE."""
    return dict(getattr(config, "rope_parameters", None) or {})


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModelError, naming the layer type and the way out, unless every layer can be fused exactly."""
    config, name = model.config, type(model).__name__
    decoder = getattr(model, "model", None)
    if decoder is None or not all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm", "rotary_emb")):
        raise UnsupportedModelError(f"{name} has no decoder of RoPE attention layers at `.model`. {_WAY_OUT}")
    foreign = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"})
    if foreign:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(foreign)}, whose KV cannot be moved within a prompt. {_WAY_OUT}"
        )
    window = getattr(config, "sliding_window", None)
    if window:
        raise UnsupportedModelError(
            f"{name} has sliding_attention layers (window {window} tokens), whose KV cannot be moved within a prompt. "
            f'{_WAY_OUT}; if your prompts stay below {window} tokens, set "sliding_window": null in its config.json'
        )
    for knob in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, knob, None):
            raise UnsupportedModelError(f"{name} uses {knob}, which partial prefill does not reproduce. {_WAY_OUT}")
    for index, layer in enumerate(decoder.layers):
        attention = getattr(layer, "self_attn", None)
        fits = attention is not None and any(family.fits(attention) for family in FAMILIES)
        if not fits or not hasattr(layer, "input_layernorm"):
            kind = type(attention if attention is not None else layer).__name__
            raise UnsupportedModelError(f"layer {index} of {name} is a {kind}, which ragblend cannot fuse. {_WAY_OUT}")
    exact_context(rope_parameters(config), config.max_position_embeddings)
