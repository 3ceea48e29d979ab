"""Reference implementation of CacheBlend from the paper (Yao et al., EuroSys 2025, sections 4.2 and 4.3).

It does not use ragblend. It loops over query tokens, and calls the projections, norms, rotary module and MLP of a
stock transformers model. It is deliberately simple and slow. Supported are Llama, Mistral, Phi-3 with full rotation,
Qwen2 and Qwen3, also with sliding windows, Gemma 2, 3 and 4, gpt-oss, SmolLM3, Cohere and Cohere 2, GLM-4, OLMo 2 and
3, EXAONE 4, NanoChat and HunYuan, and with latents instead of keys and values DeepSeek V2, V3 and GLM-4 MoE Lite.

HunYuan divides a key by its length and multiplies it by a weight after RoPE. Here the division comes first, so that k
is the same for all positions; RoPE does not change the length.

For latents, k is the part of the keys that all heads share, and v is the latent after its norm. Both have one head.
Deviations and drift correction use k and v. Attention uses the keys and values that `heads` computes from them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass
class Span:
    """Part of a prompt. stored: its KV was computed with only `behind` before it, else it is computed in the prompt."""

    ids: list[int]
    stored: bool = False
    exact: bool = False  # the prompt has the same tokens before it, so its stored KV is exact and never recomputed
    behind: list[int] = field(default_factory=list)


@dataclass
class Blended:
    logits: Tensor  # of the last token
    selected: list[int]  # positions recomputed through the last layer
    keys: list[Tensor]  # per layer [T, H, D], rotated
    values: list[Tensor]


Computed = list[tuple[Tensor, Tensor]]
COMPUTED_ALONE: WeakKeyDictionary[Any, dict[Any, Computed]] = WeakKeyDictionary()
"""Cached results of `Reference.alone` by model, windows and ids, because many tests blend the same chunks."""


class Reference:
    """CacheBlend over an unmodified transformers model, whose weights must not change."""

    def __init__(self, model: Any) -> None:
        self.decoder, self.head = model.model, model.lm_head
        self.computed_alone = COMPUTED_ALONE.setdefault(model, {})
        self.config = config = model.config
        self.is_gemma4 = config.model_type == "gemma4_text"
        self.depth = config.num_hidden_layers
        self.num_layers = self.depth - (getattr(config, "num_kv_shared_layers", None) or 0)  # layers that compute KV
        first = config.per_layer_config[0]  # only Gemma 4 has different heads per layer
        self.dim = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = getattr(config, "query_pre_attn_scalar", self.dim) ** -0.5  # Gemma 2 and 3 configure it
        self.scale = 1.0 if self.is_gemma4 else self.scale
        self.is_latent = hasattr(config, "kv_lora_rank")
        if self.is_latent:
            self.dim, rope = config.qk_nope_head_dim + config.qk_rope_head_dim, config.rope_parameters
            self.scale = (
                self.dim**-0.5 * (1 + 0.1 * rope.get("mscale_all_dim", 0) * math.log(rope.get("factor", 1))) ** 2
            )
        self.kind = config.model_type
        self.scale = getattr(config, "attention_multiplier", self.scale)  # Granite, as the other multipliers
        self.residual = getattr(config, "residual_multiplier", 1.0)
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.depth
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.without_rope = {  # layers
            "smollm3": lambda layer: not config.no_rope_layers[layer],
            "cohere2": lambda layer: self.windows[layer] is None,
            "exaone4": lambda layer: window is not None and self.windows[layer] is None,
        }.get(self.kind, lambda layer: False)

    def embed(self, ids: list[int]) -> Tensor:
        """Return the hidden states of the tokens before layer 0."""
        hidden = self.decoder.embed_tokens(torch.tensor(ids)) * getattr(self.config, "embedding_multiplier", 1.0)
        return self.decoder.norm(hidden) if self.kind == "nanochat" else hidden

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v before RoPE, [T, heads, D] each."""
        block = self.decoder.layers[layer]
        attention = block.self_attn
        normed = hidden if self.kind in ("olmo2", "olmo3", "exaone4") else block.input_layernorm(hidden)
        if self.is_latent:
            lora = self.config.q_lora_rank is not None
            q = (
                attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(normed)))
                if lora
                else attention.q_proj(normed)
            )
            latent = attention.kv_a_proj_with_mqa(normed)[:, None]
            v = attention.kv_a_layernorm(latent[..., : self.config.kv_lora_rank])
            return q.reshape(len(hidden), -1, self.dim), latent[..., self.config.kv_lora_rank :], v
        if self.is_gemma4:
            return self.project_gemma4(attention, normed)
        if hasattr(attention, "qkv_proj"):  # Phi-3: one matrix for q, k and v
            config = attention.config
            heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
            projected = attention.qkv_proj(normed).split([count * self.dim for count in heads], -1)
        else:
            projected = (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
        is_joint = self.kind in ("olmo2", "olmo3", "olmoe")  # one norm over all heads
        if is_joint:
            projected = (attention.q_norm(projected[0]), attention.k_norm(projected[1]), projected[2])
        q, k, v = (states.reshape(len(hidden), -1, self.dim) for states in projected)
        if self.kind == "hunyuan_v1_dense":
            length = [(each.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() for each in (q, k)]
            return q / length[0], k / length[1], v
        if hasattr(attention, "q_norm") and not is_joint:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def project_gemma4(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v like `project`, with the head size of the layer. k and v are empty if it computes none."""
        q, nothing = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim)), normed.new_empty(0)
        if attention.is_kv_shared_layer:
            return attention.q_norm(q), nothing, nothing
        k = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim))
        v = k if attention.v_proj is None else attention.v_proj(normed).view_as(k)
        v = v / (v.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return attention.q_norm(q), attention.k_norm(k), v

    def rope(self, layer: int, states: Tensor, positions: list[int], norm: str = "key_layernorm") -> Tensor:
        """Return the states [T, heads, D] rotated to `positions`, by the model's rotary module and function.

        norm: HunYuan's, whose weight follows.
        """
        if self.without_rope(layer):
            return states
        if self.is_latent:
            return self.rope_latent(states, positions)
        by_type = "full_attention" in self.config.rope_parameters  # Gemma 3 has two RoPE bases
        which = [self.config.layer_types[layer]] if by_type else []
        cos, sin = self.decoder.rotary_emb(states, torch.tensor([positions]), *which)
        turn = sys.modules[type(self.decoder).__module__].apply_rotary_pos_emb
        if self.is_gemma4:
            return turn(states[None], cos, sin, unsqueeze_dim=2)[0]
        turned, _ = turn(states.transpose(0, 1)[None], states.transpose(0, 1)[None], cos, sin)
        turned = turned[0].transpose(0, 1)
        if self.kind == "hunyuan_v1_dense":
            turned = turned * getattr(self.decoder.layers[layer].self_attn, norm).weight
        return turned

    def rope_latent(self, states: Tensor, positions: list[int]) -> Tensor:
        """Return the states with rotated last dimensions. Rotated pairs in the result are half the width apart."""
        width, module = self.config.qk_rope_head_dim, sys.modules[type(self.decoder).__module__]
        kept, states = states[..., :-width], states[..., -width:].transpose(0, 1)[None]
        angles = self.decoder.rotary_emb(states, torch.tensor([positions]))
        if self.config.model_type == "deepseek_v2":
            turned = in_halves(module.apply_rotary_emb(states, states, angles)[0])
        elif self.config.rope_interleave:
            turned = module.apply_rotary_pos_emb_interleave(states, states, *angles)[0]
        else:
            turned = module.apply_rotary_pos_emb(states, states, *angles)[0]
        return torch.cat((kept, turned[0].transpose(0, 1)), -1)

    def heads(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of attention, [T, heads, D] each. Latents are expanded."""
        if not self.is_latent:
            return keys, values
        config, weight = self.config, self.decoder.layers[layer].self_attn.kv_b_proj.weight
        by_head = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        expanded = torch.einsum("tr,hdr->thd", values[:, 0], by_head)
        own, values = expanded[..., : config.qk_nope_head_dim], expanded[..., config.qk_nope_head_dim :]
        return torch.cat((own, keys.expand(-1, own.shape[1], -1)), -1), values

    def finish(
        self, layer: int, hidden: Tensor, q: Tensor, ids: list[int], positions: list[int], keys: Tensor, values: Tensor
    ) -> Tensor:
        """Run attention, each token over the tokens up to itself, and the rest of the layer. Return the hidden states.

        ids: those of all positions of the prompt.
        """
        block = self.decoder.layers[layer]
        attended = block.self_attn.o_proj(self.output(layer, q, positions, keys, values).flatten(1))
        if self.is_gemma4:
            return self.finish_gemma4(layer, hidden + block.post_attention_layernorm(attended), ids, positions)
        if hasattr(block, "pre_feedforward_layernorm"):  # Gemma 2 and 3 also normalise outputs of blocks
            hidden = hidden + block.post_attention_layernorm(attended)
            return hidden + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(hidden)))
        if self.kind in ("cohere", "cohere2"):  # attention and MLP side by side
            return hidden + attended + block.mlp(block.input_layernorm(hidden))
        if self.kind in ("olmo2", "olmo3", "exaone4"):
            hidden = hidden + block.post_attention_layernorm(attended)
            return hidden + block.post_feedforward_layernorm(block.mlp(hidden))
        if self.kind == "glm4":
            hidden = hidden + block.post_self_attn_layernorm(attended)
            return hidden + block.post_mlp_layernorm(block.mlp(block.post_attention_layernorm(hidden)))
        hidden = hidden + self.residual * attended
        moe = getattr(block, "block_sparse_moe", None) or block.mlp  # Granite MoE has its own name
        output = moe(block.post_attention_layernorm(hidden)[None])  # experts need a batch dimension
        return hidden + self.residual * (output[0][0] if isinstance(output, tuple) else output[0])

    def finish_gemma4(self, layer: int, hidden: Tensor, ids: list[int], positions: list[int]) -> Tensor:
        """Run the MLP and the experts, and add the per-layer input, which depends only on the token itself."""
        block, config, decoder = self.decoder.layers[layer], self.config, self.decoder
        output = block.mlp(block.pre_feedforward_layernorm(hidden))
        if config.enable_moe_block:
            _, weights, experts = block.router(hidden)
            chosen = block.experts(block.pre_feedforward_layernorm_2(hidden), experts, weights)
            output = block.post_feedforward_layernorm_1(output) + block.post_feedforward_layernorm_2(chosen)
        hidden = hidden + block.post_feedforward_layernorm(output)
        if config.hidden_size_per_layer_input:
            tokens, width = torch.tensor([ids[position] for position in positions]), config.hidden_size_per_layer_input
            part = slice(layer * width, (layer + 1) * width)
            looked_up = decoder.embed_tokens_per_layer.weight[tokens, part] * width**0.5
            projected = decoder.embed_tokens(tokens) @ decoder.per_layer_model_projection.weight[part].T
            projected = decoder.per_layer_projection_norm(projected * config.hidden_size**-0.5)
            gate = block.act_fn(block.per_layer_input_gate(hidden))
            added = block.per_layer_projection(gate * (projected + looked_up) / math.sqrt(2))
            hidden = hidden + block.post_per_layer_input_norm(added)
        return hidden * block.layer_scalar

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [vocabulary] of the last row of `hidden` [T, hidden size]."""
        logits = self.head(self.decoder.norm(hidden))[-1] * getattr(self.config, "logit_scale", 1)
        logits = logits / getattr(self.config, "logits_scaling", 1)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def alone(self, behind: list[int], ids: list[int]) -> Computed:
        """Return the pre-RoPE k and v of `ids` per layer, computed with only `behind` before them."""
        key = (*self.windows, tuple(behind), tuple(ids))
        if key not in self.computed_alone:
            self.computed_alone[key] = self.compute_alone(behind, ids)
        return self.computed_alone[key]

    def compute_alone(self, behind: list[int], ids: list[int]) -> Computed:
        positions = list(range(len(behind) + len(ids)))
        hidden, kept = self.embed(behind + ids), []
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, hidden)
            kept.append((k[len(behind) :], v[len(behind) :]))
            q, k = self.rope(layer, q, positions, "query_layernorm"), self.rope(layer, k, positions)
            hidden = self.finish(layer, hidden, q, behind + ids, positions, k, v)
        return kept

    def ask(
        self, ids: list[int], fresh: list[int], queries: list[int], keys: list[Tensor], values: list[Tensor], depth: int
    ) -> list[Tensor]:
        """Run the `fresh` positions through layers 0 .. depth over the given KV, and write their KV into it.

        Return the attention probabilities [Q, heads, T] of the `queries` per layer.
        """
        hidden, seen = self.embed([ids[place] for place in fresh]), []
        for layer in range(depth + 1):
            layer_keys, layer_values = keys[layer].clone(), values[layer].clone()
            q, k, v = self.project(layer, hidden)
            q = self.rope(layer, q, fresh, "query_layernorm")
            layer_keys[fresh], layer_values[fresh] = self.rope(layer, k, fresh), v
            rows = [q[fresh.index(position)] for position in queries]
            met, _ = self.heads(layer, layer_keys, layer_values)
            seen.append(torch.stack([self.weights(layer, *row, met) for row in zip(rows, queries, strict=True)]))
            keys[layer][fresh], values[layer][fresh] = layer_keys[fresh], layer_values[fresh]
            hidden = self.finish(layer, hidden, q, ids, fresh, layer_keys, layer_values)
        return seen

    def weights(self, layer: int, q: Tensor, position: int, keys: Tensor) -> Tensor:
        """Return the attention probabilities [heads, T] of one query [heads, D]; 0 after it and before its window."""
        window, softcap = self.windows[layer], None
        if self.config.model_type == "gemma2":  # Gemma 3 ignores this setting
            softcap = self.config.attn_logit_softcapping
        sinks = getattr(self.decoder.layers[layer].self_attn, "sinks", None)
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        weights = torch.zeros(q.shape[0], len(keys))
        for head in range(q.shape[0]):
            scores = keys[seen, head * keys.shape[1] // q.shape[0]] @ q[head] * self.scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            powers = scores.exp()
            weights[head, seen] = powers / (powers.sum() + (0.0 if sinks is None else sinks[head].exp()))
        return weights

    def output(self, layer: int, q: Tensor, queries: list[int], keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output [Q, heads, D] before the projection. Later keys and values may be NaN."""
        keys, values = self.heads(layer, keys, values)
        group, outputs = q.shape[1] // keys.shape[1], []
        for row, position in zip(q, queries, strict=True):
            weights = self.weights(layer, row, position, keys[: position + 1])
            outputs.append(torch.einsum("ht,thd->hd", weights, values[: position + 1].repeat_interleave(group, 1)))
        return torch.stack(outputs)

    @torch.no_grad()
    def blend(
        self,
        spans: list[Span],
        shares: dict[int, float],
        deviation: str = "v",
        read: Sequence[int] = (),
        question: int | None = None,
        recomputed: Sequence[int] | None = None,
        carry: float = 0.0,
        deepest: int | None = None,
        thresholds: dict[int, float] | None = None,
    ) -> Blended:
        """Blend a prompt of stored and new spans.

        shares: {check layer: share of the stored tokens that is still recomputed after it}.
        thresholds: {check layer: least distance of a recomputed token, divided by the length of its fresh vector}.
        deviation: "v", "k" or "kv" select by the deviation of values, keys or both. "ask" selects before layer 0: first
        the edges of each stored span, then the tokens with the highest attention from the question at layers `read`.
        question: position of the question's start; None: after the last stored token.
        recomputed: positions to recompute, instead of a selection.
        carry: share of the predicted change that is added to the KV of kept tokens from layer 1 on (keys before
        RoPE); see `fit_change_predictor`. It compares values at two fifths of the depth, or at layer `deepest` if the
        probe ended there.
        """
        ids = [token for span in spans for token in span.ids]
        num_stored = sum(len(span.ids) for span in spans if span.stored)
        first = self.embed(ids[:1])
        likes = [self.project(layer, first)[1:] for layer in range(self.num_layers)]
        keys, values, before_rope = (
            [torch.zeros(len(ids), *like[which].shape[1:]) for like in likes] for which in (0, 1, 0)
        )
        candidates, computed, edges, start = set(), set(), set(), 0
        chunk_of: dict[int, int] = {}
        for number, span in enumerate(spans):
            chunk_of.update(dict.fromkeys(range(start, start + len(span.ids)), number))
            place = list(range(start, start + len(span.ids)))
            start += len(span.ids)
            if not span.stored:
                computed.update(place)
                continue
            edges |= {place[0], place[-1]}
            for layer, (k, v) in enumerate(self.alone(span.behind, span.ids)):
                before_rope[layer][place], values[layer][place] = k, v
                keys[layer][place] = self.rope(layer, k, place)
            if not span.exact:
                candidates.update(place)
        last = len(ids) - 1  # always computed, because its logits are the result
        candidates.discard(last)
        computed.add(last)
        thresholds = thresholds or {}
        if recomputed is None and not any(shares.values()) and not thresholds:
            candidates = set()

        if deviation == "ask" and candidates and shares[0] < 1:
            stale = [(keys[layer].clone(), values[layer].clone()) for layer in range(self.num_layers)]
            end = max(
                end for end, span in zip(accumulate(len(s.ids) for s in spans), spans, strict=True) if span.stored
            )
            queries = list(range(min(end if question is None else question, last), len(ids)))
            seen = self.ask(ids, sorted(computed), queries, [k for k, _ in stale], [v for _, v in stale], max(read))
            mass = torch.stack([seen[layer].mean(dim=(0, 1)) for layer in read]).mean(0)
            order = sorted(candidates, key=lambda position: (position not in edges, -float(mass[position])))
            recomputed = order[: math.ceil(round(shares[0] * num_stored, 6))]

        kept = [] if recomputed is None else sorted(candidates.difference(recomputed))
        if carry and kept and recomputed:
            reached = self.num_layers - 1 if deepest is None else deepest
            predict_change = fit_change_predictor(
                values[max(1, min(self.num_layers * 2 // 5, reached))], chunk_of, sorted(recomputed), kept
            )
        candidates = candidates if recomputed is None else set(recomputed)
        running = sorted(candidates | computed)
        hidden = self.embed([ids[place] for place in running])
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, hidden)
            if carry and layer and candidates and kept:
                there = sorted(candidates)
                rows = [running.index(position) for position in there]
                moved = carry * predict_change(k[rows] - before_rope[layer][there])
                keys[layer][kept] = self.rope(layer, before_rope[layer][kept] + moved, kept)
                values[layer][kept] += carry * predict_change(v[rows] - values[layer][there])
            q, k = self.rope(layer, q, running, "query_layernorm"), self.rope(layer, k, running)
            selects = shares.get(layer, 1) < 1 or thresholds.get(layer, 0) > 0
            if selects and recomputed is None:
                met = [(k, keys[layer])] * ("k" in deviation) + [(v, values[layer])] * ("v" in deviation)
                drift, length = {}, {}
                for row, position in enumerate(running):
                    if position in candidates:
                        drift[position] = sum(float((f[row] - s[position]).pow(2).sum()) for f, s in met)
                        length[position] = sum(float(f[row].pow(2).sum()) for f, _ in met)
                count = min(len(drift), math.ceil(round(shares.get(layer, 1) * num_stored, 6)))
                least = thresholds.get(layer, 0)
                order = sorted(drift, key=lambda position: -drift[position])
                candidates = {p for p in order[:count] if math.sqrt(drift[p] / length[p]) >= least}
                rows = [row for row, position in enumerate(running) if position in candidates | computed]
                running = [running[row] for row in rows]
                hidden, q, k, v = hidden[rows], q[rows], k[rows], v[rows]
            keys[layer][running], values[layer][running] = k, v
            hidden = self.finish(layer, hidden, q, ids, running, keys[layer], values[layer])
        for layer in range(self.num_layers, self.depth):  # Gemma 4: over the KV of the last layer of the same type
            kinds = self.config.layer_types
            source = max(index for index in range(self.num_layers) if kinds[index] == kinds[layer])
            q, _, _ = self.project(layer, hidden)
            q = self.rope(layer, q, running, "query_layernorm")
            hidden = self.finish(layer, hidden, q, ids, running, keys[source], values[source])
        logits = self.logits(hidden)
        return Blended(logits, sorted(candidates), keys, values)


def gradual_shares(ratio: float, layers: Sequence[int], num_layers: int) -> dict[int, float]:
    """Return the share of each check layer in `layers`: it falls linearly, and its mean over the layers is `ratio`.

    The line goes from 1.2 times the ratio at the first check layer's start to .8 times at the end of the last layer.
    Each check layer has the mean of the line over the layers up to the next one. 1.2 times becomes 1 at most.
    """
    depth, shares = num_layers - layers[0], {}
    slope = min(0.2 * ratio, 1 - ratio)
    for place, layer in enumerate(layers):
        end = layers[place + 1] if place + 1 < len(layers) else num_layers
        steps = [ratio + slope - 2 * slope * (step - layers[0] + 0.5) / depth for step in range(layer, end)]
        shares[layer] = sum(steps) / len(steps)
    return shares


def in_halves(pairs: Tensor) -> Tensor:
    """Return [..., D] with the even dimensions first, so that adjacent rotated pairs become half the width apart."""
    order = [*range(0, pairs.shape[-1], 2), *range(1, pairs.shape[-1], 2)]
    return pairs[..., order]


def as_held(model: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Convert keys and values of a stock model's cache, [..., T, D], to those of `Reference`."""
    if not hasattr(model.config, "kv_lora_rank"):
        return keys, values
    return (in_halves(values) if model.config.model_type == "deepseek_v2" else values), keys


def as_cached(model: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Convert keys and values of `Reference` to those of a stock model's cache, the inverse of `as_held`."""
    if not hasattr(model.config, "kv_lora_rank"):
        return keys, values
    half = keys.shape[-1] // 2
    in_pairs = [place // 2 + half * (place % 2) for place in range(2 * half)]
    return values, keys[..., in_pairs] if model.config.model_type == "deepseek_v2" else keys


def fit_change_predictor(
    values: Tensor, chunk_of: dict[int, int], recomputed: list[int], kept: list[int]
) -> Callable[[Tensor], Tensor]:
    """Return a function from the change [R, H, D] of the `recomputed` tokens to that of the `kept` tokens, [N, H, D].

    It is the mean of a Gaussian process with unit noise. The kernel of two tokens is 0.3 + exp(-d / 4), where d is the
    mean squared difference of their standardised `values` [T, H, D]; the second term is halved between chunks. The
    process is approximated by a linear model, whose 48 features are the kernels with some recomputed tokens.
    """
    all_positions = sorted({*recomputed, *kept})
    rows = values[all_positions].flatten(1).double()
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
    row_of = dict(zip(all_positions, rows, strict=True))

    def kernel(one: int, other: int) -> float:
        far = float((row_of[one] - row_of[other]).pow(2).mean())
        return 0.3 + math.exp(-far / 4) * (1.0 if chunk_of[one] == chunk_of[other] else 0.5)

    count = min(48, len(recomputed))
    marks = [recomputed[place * len(recomputed) // count] for place in range(count)]
    recomputed_kernel, of_kept, of_marks = (
        torch.tensor([[kernel(one, mark) for mark in marks] for one in tokens], dtype=torch.float64)
        for tokens in (recomputed, kept, marks)
    )
    # Ridge regression: the prior covariance of the weights is the inverse kernel matrix of the marks.
    precision = recomputed_kernel.T @ recomputed_kernel + of_marks + 1e-6 * torch.eye(count)

    def predict_change(change: Tensor) -> Tensor:
        far = change.double().norm(dim=-1, keepdim=True)  # [R, H, 1]
        most = 3 * far.sort(0).values[(len(recomputed) - 1) // 2]
        change = torch.where(far > most, change * most / far, change.double())
        weights = torch.linalg.lstsq(precision, recomputed_kernel.T @ change.flatten(1)).solution
        return (of_kept @ weights).reshape(len(kept), *change.shape[1:]).float()

    return predict_change
