"""Sizes of a model, read from its config alone: weights, KV per token, and operations of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.engine.store.format.quantize import CODE_DTYPES
from ragblend.errors import NotFoundError
from ragblend.files.places import expand_user_path
from ragblend.option_fields import default_of
from ragblend.options import ModelOptions, TierOptions

KV_DTYPES = ("auto", *CODE_DTYPES)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder. Where layers differ, the sizes of one layer are means."""

    layers: int
    layer_weights: float  # weights of one layer that a token passes through; of experts, those that are active
    attention_width: float  # of one layer: query heads times the dimensions of a head
    kv_numbers: int  # numbers of one token's K and V in all layers together
    kv_heads: int  # KV heads of all layers together
    itemsize: int = 2  # bytes of a number, 2 for bfloat16
    num_weights: int = 0  # of the whole model
    context_length: int = 0  # in tokens
    dtype: str = "bfloat16"

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of one token's KV in one layer, as computed."""
        return self.kv_numbers * self.itemsize / self.layers

    def linear_flops(self, rows: int) -> float:
        """Return the operations of one layer's matrices for some tokens."""
        return 2.0 * self.layer_weights * rows

    def attention_flops(self, pairs: float) -> float:
        """Return the operations of attention for a number of query-key pairs: scores, and the sum of values."""
        return 4.0 * self.attention_width * pairs

    def stored_bytes_per_token(self, kv_dtype: str = default_of(TierOptions, "kv_dtype")) -> int:
        """Return the bytes that a token of a long chunk has in a store with this `kv_dtype`, in all layers."""
        # As KVSpec.bytes_per_token, from sums over the layers.
        return self.kv_numbers * self.itemsize if kv_dtype == "auto" else self.kv_numbers + 4 * self.kv_heads


def read_model_sizes(model: str, options: ModelOptions, device: str = "cuda") -> ModelSizes:
    """Return the sizes of `model` as it runs on a "cuda" or "cpu" device, which need not exist. Loads no weights.

    `model`: a name as everywhere, of which config.json is enough, or the path of a config's JSON file. Raises
    NotFoundError for a missing model, UnsupportedModelError for one that cannot be fused.
    """
    import torch

    from ragblend.engine.store.format.kv import dtype_name
    from ragblend.engine.transformers.families import family_of, kv_source_layers, text_decoder
    from ragblend.engine.transformers.model import choose_dtype, outline_fusable_model

    outline = outline_fusable_model(_find_config(model, options), options.trust_remote_code)
    config = outline.config.get_text_config()
    dtype = choose_dtype(options.dtype, config, torch.device(device))
    layers, family = text_decoder(outline).layers, family_of(outline)
    num_kv_layers = len(set(kv_source_layers(layers)))
    shapes = [family.kv_shape(layer.self_attn) for layer in layers[:num_kv_layers]]
    return ModelSizes(
        layers=len(layers),
        layer_weights=sum(_active_weights(layer, config) for layer in layers) / len(layers),
        attention_width=config.num_attention_heads * _head_width(config, family.head_dim),
        kv_numbers=sum(heads * (keys + values) for heads, keys, values in shapes),
        kv_heads=sum(heads for heads, _, _ in shapes),
        itemsize=dtype.itemsize,
        num_weights=sum(each.numel() for each in outline.parameters()),
        context_length=int(config.max_position_embeddings),
        dtype=dtype_name(dtype),
    )


def _find_config(model: str, options: ModelOptions) -> Path:
    """Return the path of a model's files, or of its config's JSON file."""
    from ragblend.engine.transformers.checkpoints import find_model

    if model.endswith(".json"):
        path = expand_user_path(model, "model")
        if not path.is_file():
            raise NotFoundError(f"there is no config at {path}; name a model's folder, its config.json, or its id")
        return path
    try:
        return find_model(model, weights=False, options=options)
    except NotFoundError as error:
        raise NotFoundError(
            f"{error}. Sizes need the model's config.json alone: save that file, and name it: `model=config.json`"
        ) from error


def _head_width(config: Any, head_dim: int) -> float:
    """Return the dimensions of a query head: the mean of those that meet keys and those of its values (MLA)."""
    if getattr(config, "kv_lora_rank", None):
        head_dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return float(head_dims) / 2
    return float(head_dim)


def _active_weights(layer: Any, config: Any) -> float:
    """Return the number of a layer's weights that one token passes through."""
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    share = _first(config, "num_experts_per_tok", "top_k_experts") / num_experts if num_experts else 1.0
    counts: dict[str, int] = {name: each.numel() for name, each in layer.named_parameters()}
    return sum(count * (share if ".experts." in f".{name}" else 1.0) for name, count in counts.items())


def _first(config: Any, *names: str) -> int:
    """Return the first of these fields that the config has; families name them differently. 0 if it has none."""
    return next((count for name in names if (count := getattr(config, name, None))), 0)
