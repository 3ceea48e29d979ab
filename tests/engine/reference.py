"""A second CacheBlend, written from the paper (Yao et al., EuroSys 2025, sections 4.2, 4.3); no code of ragblend's.

Plain loops over query tokens, with a stock transformers model's own projections, norms, rotary module and MLP (Llama,
Mistral, Qwen2, Qwen3: separate q, k, v projections). Slow and obvious on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


@dataclass
class Span:
    """Part of a prompt. `stored`: its KV was computed alone behind `behind`; otherwise it is computed in the prompt."""

    ids: list[int]
    stored: bool = False
    exact: bool = False  # it stands right behind the tokens it was computed behind: true as it is, never a candidate
    behind: list[int] = field(default_factory=list)


@dataclass
class Blended:
    logits: Tensor  # of the last token
    selected: list[int]  # positions recomputed through the last layer
    keys: list[Tensor]  # per layer [T, H, D], rotated
    values: list[Tensor]


class Reference:
    """CacheBlend over a stock model that ragblend has not touched."""

    def __init__(self, model: Any) -> None:
        self.decoder, self.head = model.model, model.lm_head
        self.num_layers = model.config.num_hidden_layers
        self.dim = model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v before RoPE, [T, heads, D]."""
        block = self.decoder.layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(hidden)
        q, k, v = (
            projection(normed).reshape(len(hidden), -1, self.dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def rope(self, states: Tensor, positions: list[int]) -> Tensor:
        """[T, heads, D] at `positions`."""
        cos, sin = self.decoder.rotary_emb(states, torch.tensor([positions]))
        turned, _ = apply_rotary_pos_emb(states.transpose(0, 1)[None], states.transpose(0, 1)[None], cos, sin)
        return turned[0].transpose(0, 1)

    def finish(
        self, layer: int, hidden: Tensor, q: Tensor, positions: list[int], keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention token by token, each over everything up to itself, then the rest of the layer."""
        block, outputs = self.decoder.layers[layer], []
        group = q.shape[1] // keys.shape[1]
        for row, position in enumerate(positions):
            seen_keys = keys[: position + 1].repeat_interleave(group, 1)
            seen_values = values[: position + 1].repeat_interleave(group, 1)
            weights = (torch.einsum("hd,thd->ht", q[row], seen_keys) / math.sqrt(self.dim)).softmax(-1)
            outputs.append(torch.einsum("ht,thd->hd", weights, seen_values).reshape(-1))
        hidden = hidden + block.self_attn.o_proj(torch.stack(outputs))
        return hidden + block.mlp(block.post_attention_layernorm(hidden)[None])[0]  # experts want a batch dimension

    def alone(self, behind: list[int], ids: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Per layer, pre-RoPE k and v of `ids` computed behind `behind` and nothing else."""
        positions = list(range(len(behind) + len(ids)))
        hidden, kept = self.decoder.embed_tokens(torch.tensor(behind + ids)), []
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, hidden)
            kept.append((k[len(behind) :], v[len(behind) :]))
            hidden = self.finish(layer, hidden, self.rope(q, positions), positions, self.rope(k, positions), v)
        return kept

    @torch.no_grad()
    def blend(self, spans: list[Span], shares: dict[int, float], deviation: str = "v") -> Blended:
        """`shares`: at each check layer, the share of the stored tokens that stays in the computation."""
        ids = [token for span in spans for token in span.ids]
        num_stored = sum(len(span.ids) for span in spans if span.stored)
        heads = self.project(0, self.decoder.embed_tokens(torch.tensor(ids[:1])))[1].shape[1]
        keys = [torch.zeros(len(ids), heads, self.dim) for _ in range(self.num_layers)]
        values = [torch.zeros(len(ids), heads, self.dim) for _ in range(self.num_layers)]
        candidates, computed, start = set(), set(), 0
        for span in spans:
            place = list(range(start, start + len(span.ids)))
            start += len(span.ids)
            if not span.stored:
                computed.update(place)
                continue
            for layer, (k, v) in enumerate(self.alone(span.behind, span.ids)):
                keys[layer][place], values[layer][place] = self.rope(k, place), v
            if not span.exact:
                candidates.update(place)
        last = len(ids) - 1  # always computed: its logits are the answer
        candidates.discard(last)
        computed.add(last)
        if not any(shares.values()):
            candidates = set()

        running = sorted(candidates | computed)
        hidden = self.decoder.embed_tokens(torch.tensor(ids)[running])
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, hidden)
            q, k = self.rope(q, running), self.rope(k, running)
            if layer in shares and shares[layer] < 1:
                fresh, stored = (v, values[layer]) if deviation == "v" else (k, keys[layer])
                drift = {
                    position: float((fresh[row] - stored[position]).pow(2).sum())
                    for row, position in enumerate(running)
                    if position in candidates
                }
                count = min(len(drift), math.ceil(round(shares[layer] * num_stored, 6)))
                candidates = set(sorted(drift, key=lambda position: -drift[position])[:count])
                rows = [row for row, position in enumerate(running) if position in candidates | computed]
                running = [running[row] for row in rows]
                hidden, q, k, v = hidden[rows], q[rows], k[rows], v[rows]
            keys[layer][running], values[layer][running] = k, v
            hidden = self.finish(layer, hidden, q, running, keys[layer], values[layer])
        logits = self.head(self.decoder.norm(hidden))[-1]
        return Blended(logits, sorted(candidates), keys, values)


def gradual_shares(ratio: float, num_layers: int, check_layer: int = 1) -> dict[int, float]:
    """Gradual filtering (section 4.3): a straight line from 1.5 to 0.5 times the ratio over the checked layers."""
    steps = num_layers - check_layer
    high = min(1.5 * ratio, 1.0)
    low = 2 * ratio - high
    return {check_layer + step: high - (high - low) * step / (steps - 1) for step in range(steps)}
