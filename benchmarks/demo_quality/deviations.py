"""How far a fused KV is from full prefill's inside the layers: of the KV itself, and of what the question attends to.

Knows engines' layers and tensors. Read `read` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.bench.quality import measures
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.prompt.prompt import TokenizedPrompt


class Reading(NamedTuple):
    """A question and an answer, read over one prompt's fused KV."""

    log_probs: Tensor  # [A, vocabulary], see `measures.read`
    attention: tuple[Tensor, ...]  # per layer [Q, hidden size]: attention's output for the question's Q tokens


class Distance(NamedTuple):
    """How far a fused KV is from full prefill's. `kl` is KL(full || this) in nats, mean over the answer's tokens."""

    kl: float
    agreement: float  # share of the answer's tokens whose most likely token is the same
    kv_deviation: tuple[float, ...]  # per layer: ||KV - KV of full|| / ||KV of full||, chunk tokens, Frobenius norm
    attention_deviation: tuple[float, ...]  # per layer, the same of the question's attention output


def read(engine: TransformersEngine, prompt: TokenizedPrompt, fused: FusedKV, answer_ids: Sequence[int]) -> Reading:
    """`measures.read`, and what attention gave the question meanwhile."""
    num_question = prompt.num_tokens - _context(prompt)[1]
    attention: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        attention.append(output[0][0, :num_question])

    hooks = [block.self_attn.register_forward_hook(keep) for block in engine.layers.model.model.layers]
    try:
        return Reading(measures.read(engine, prompt, fused, answer_ids), tuple(attention))
    finally:
        for hook in hooks:
            hook.remove()


def distance(prompt: TokenizedPrompt, fused: FusedKV, found: Reading, full_kv: FusedKV, full: Reading) -> Distance:
    """What `found`, read over `fused`, differs from `full` in, read over `full_kv`: the same prompt and answer."""
    start, end = _context(prompt)
    layers = range(len(full.attention))
    return Distance(
        *measures.distance(found.log_probs, full.log_probs),
        tuple(_relative(_rows(fused, layer, start, end), _rows(full_kv, layer, start, end)) for layer in layers),
        tuple(_relative(mine, theirs) for mine, theirs in zip(found.attention, full.attention, strict=True)),
    )


def _context(prompt: TokenizedPrompt) -> tuple[int, int]:
    """From the first chunk's first token to behind the last chunk's last."""
    return prompt.chunk_segments[0].start, prompt.chunk_segments[-1].end


def _rows(fused: FusedKV, layer: int, start: int, end: int) -> Tensor:
    return torch.cat((fused.keys(layer)[:, start:end], fused.values(layer)[:, start:end]), dim=-1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
