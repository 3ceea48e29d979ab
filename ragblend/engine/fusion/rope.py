"""Rotation of stored keys to their positions in a prompt: one rotation, in float32, cast once (Su et al. 2021).

Stored keys are pre-RoPE, so no rotation is undone, and every fixed-frequency scaling (linear, Llama-3, YaRN) works
unchanged with the model's own cosine and sine tables. Depends on tensors and RoPE settings, not on models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ragblend.errors import UnsupportedModelError

FIXED_FREQUENCY = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""RoPE types whose frequencies do not depend on the prompt's length (longrope: up to its original length)."""


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `states` [..., T, D] rotated by tables `cos`, `sin` [T, R], R <= D; same dtype, rotation in float32.

    Half layout (as Llama and its relatives): dimension i is paired with i + R/2. Only the first R dimensions are
    rotated (partial rotary). Rotating by p and then by q equals rotating by p + q, if the tables contain no attention
    scaling. Equals transformers' `apply_rotary_pos_emb`.
    """
    rotary_dim = cos.shape[-1]
    turned, kept = states[..., :rotary_dim], states[..., rotary_dim:]
    turned = turned.float()
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos).add_(torch.cat((-second, first), dim=-1).mul_(sin)).to(states.dtype)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def inverse_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables of the inverse of `rotate` by `cos`, `sin` [T, R], attention scaling included."""
    scaling = cos[..., :1].square() + sin[..., :1].square()  # 1 without attention scaling
    return cos / scaling, -sin / scaling


def add_rotated(states: Tensor, by: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `by` [H, T, D] float32 by tables [T, R] and add it to `states` [H, T, D], rotated already, in place."""
    rotary_dim = cos.shape[-1]
    if states.dtype != by.dtype:
        states += rotate(by, cos, sin).to(states.dtype)
        return
    half = rotary_dim // 2
    states[..., :rotary_dim].addcmul_(by[..., :rotary_dim], cos)
    states[..., :half].addcmul_(by[..., half:rotary_dim], sin[:, :half], value=-1)
    states[..., half:rotary_dim].addcmul_(by[..., :half], sin[:, half:])
    if rotary_dim < states.shape[-1]:
        states[..., rotary_dim:] += by[..., rotary_dim:]


def tables(inv_freq: Tensor, positions: Tensor, attention_scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, R] in float32 for `positions` [T] and `inv_freq` [R/2] (radians per token)."""
    angles = positions.float()[:, None] * inv_freq.float()[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_scaling, angles.sin() * attention_scaling


def rope_type_problem(rope_type: str) -> str:
    """Return why keys cannot be placed by a RoPE of this type; "" if they can."""
    if rope_type in FIXED_FREQUENCY:
        return ""
    return "changes its frequencies with the prompt's length" if rope_type == "dynamic" else "is not known to ragblend"


def exact_context(rope_parameters: Mapping[str, Any], max_positions: int) -> int:
    """Return the longest prompt, in tokens, at which the model's RoPE frequencies are fixed and keys can be placed.

    Raises UnsupportedModelError for length-dependent types (dynamic NTK) and for types not in FIXED_FREQUENCY.

    >>> exact_context({"rope_type": "yarn"}, 131072)
    131072
    """
    rope_type = rope_parameters.get("rope_type", "default")
    problem = rope_type_problem(rope_type)
    if problem:
        raise UnsupportedModelError(
            f"RoPE type {rope_type!r} {problem}, so stored keys cannot be placed. Choose a model with one of "
            f"{', '.join(FIXED_FREQUENCY)}, or set a fixed type in its config.json"
        )
    if rope_type == "longrope":
        return int(rope_parameters.get("original_max_position_embeddings") or max_positions)
    return max_positions
