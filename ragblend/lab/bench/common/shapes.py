"""Shapes of decoders to measure, by name, and dtypes by name. Importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragblend.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder. `family` is the name of the transformers architecture."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float = 10_000.0
    tied: bool = False


SHAPES: Mapping[str, DecoderShape] = {
    "tiny": DecoderShape("llama", 4, 64, 128, 4, 2, 16, 512, 4096),
    "llama-1m": DecoderShape("llama", 4, 128, 256, 4, 2, 32, 512, 4096),
    "llama-50m": DecoderShape("llama", 16, 512, 1408, 8, 2, 64, 8192, 8192),
    "llama-200m": DecoderShape("llama", 16, 1024, 2816, 16, 4, 64, 8192, 16_384),
    "llama-1b": DecoderShape("llama", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 500_000.0, tied=True),
    "mistral-7b": DecoderShape("mistral", 32, 4096, 14_336, 32, 8, 128, 32_768, 32_768, 1_000_000.0),
    "llama-8b": DecoderShape("llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, 500_000.0),
    "qwen3-8b": DecoderShape("qwen3", 36, 4096, 12_288, 32, 8, 128, 151_936, 40_960, 1_000_000.0),
}
"""Shapes by name: two tiny ones for tests (vLLM has no attention for heads as small as tiny's), two small ones for
CPUs, and Llama-3.2-1B, Mistral-7B-v0.3, Llama-3.1-8B and Qwen3-8B."""


def find_shape(name: str) -> DecoderShape:
    """Return the shape of that name. Raises UsageError for an unknown one."""
    if name not in SHAPES:
        raise UsageError(f"shape is {name!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def find_dtype(name: str) -> torch.dtype:
    """Return a dtype by its name. Raises UsageError for an unknown one."""
    from ragblend.engine.store.format.kv import DTYPES

    if name not in DTYPES:
        raise UsageError(f"dtype is {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
