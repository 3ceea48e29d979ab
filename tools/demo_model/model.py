"""The demo model's forward pass, written out: the same maths as Hugging Face's Llama, with free positions.

Training needs two things the library's class does not give cheaply: positions with jumps (to learn 4,096 tokens of
position on 256 tokens of text) and the hidden state after a middle layer. `to_hugging_face` makes the shipped model;
a test compares the two. Shapes: B rows, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model; the default is the shipped one."""

    vocab_size: int = 2560
    hidden_size: int = 128
    num_layers: int = 5
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    mlp_size: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_positions: int = 4608  # 4,096 of context, 512 for question and answer


def rope(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, T, D] of `positions` [B, T], float32."""
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = positions.float()[..., None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of `states` [B, H, T, D], halves paired as in Llama."""
    half = states.shape[-1] // 2
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], dim=-1) * sin


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalised `hidden`, same shape."""
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    """One decoder layer: attention and SwiGLU, each behind a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.n1, self.n2 = Norm(c.hidden_size, c.norm_eps), Norm(c.hidden_size, c.norm_eps)
        self.q = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.g = nn.Linear(c.hidden_size, c.mlp_size, bias=False)
        self.u = nn.Linear(c.hidden_size, c.mlp_size, bias=False)
        self.w = nn.Linear(c.mlp_size, c.hidden_size, bias=False)

    def qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, KV heads, T, D], before RoPE."""
        c, (rows, length, _) = self.config, hidden.shape
        normed = self.n1(hidden)
        q = self.q(normed).view(rows, length, c.num_heads, c.head_dim).transpose(1, 2)
        k = self.k(normed).view(rows, length, c.num_kv_heads, c.head_dim).transpose(1, 2)
        v = self.v(normed).view(rows, length, c.num_kv_heads, c.head_dim).transpose(1, 2)
        return q, k, v

    def finish(self, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The layer's output [B, T, hidden] from rotated `q`, `k`; without a mask attention is causal."""
        rows, length, _ = hidden.shape
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.o(attended.transpose(1, 2).reshape(rows, length, -1))
        normed = self.n2(hidden)
        out: Tensor = hidden + self.w(F.silu(self.g(normed)) * self.u(normed))
        return out


class DemoModel(nn.Module):
    """A Llama decoder with a tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        nn.init.normal_(self.emb.weight, std=0.05)
        for layer in self.decoder_layers():
            for linear in (layer.q, layer.k, layer.v, layer.g, layer.u):
                nn.init.normal_(linear.weight, std=config.hidden_size**-0.5)
            for linear in (layer.o, layer.w):
                nn.init.normal_(linear.weight, std=(linear.in_features * 2 * config.num_layers) ** -0.5)

    def decoder_layers(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, middle: int = 1) -> tuple[Tensor, Tensor]:
        """Normed hidden states [B, T, hidden] of the last layer and of layer `middle`."""
        hidden = self.emb(ids)
        between = hidden
        for index, layer in enumerate(self.layers):
            q, k, v = layer.qkv(hidden)  # type: ignore[operator]
            hidden = layer.finish(hidden, rotate(q, cos, sin), rotate(k, cos, sin), v)  # type: ignore[operator]
            if index == middle:
                between = hidden
        return self.norm(hidden), self.norm(between)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary of normed `hidden`."""
        return hidden @ self.emb.weight.T


@torch.no_grad()
def mimetic_init(model: DemoModel, beta: float = 0.5, noise: float = 0.25) -> None:
    """Start where binding is learnable: similarity heads (q = k), copy heads (o = v^T), and in layer 0 four heads
    that look 1 to 4 tokens back through RoPE. From a random start the same training did not find binding."""
    c = model.config
    size, groups, std = c.hidden_size, c.num_heads // c.num_kv_heads, c.hidden_size**-0.5
    inv_freq = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    used, half = 6, c.head_dim // 2
    model.emb.weight[:, 0] = 0.2  # a constant direction, which the look-back heads read
    for number, layer in enumerate(model.decoder_layers()):
        keys = torch.randn(c.num_kv_heads, c.head_dim, size) * std
        queries = keys.repeat_interleave(groups, 0) + noise * std * torch.randn(c.num_heads, c.head_dim, size)
        values = torch.linalg.qr(torch.randn(size, size))[0].view(c.num_kv_heads, c.head_dim, size)
        strength = torch.full((c.num_heads,), beta)
        queries[:, :, 0] = 0
        keys[:, :, 0] = 0
        for head in range(c.num_heads // 2 if number == 0 else 0):
            kv_head, distance, scale = head // groups, head + 1, 1.85
            keys[kv_head] = noise * std * torch.randn(c.head_dim, size)
            queries[head] = noise * std * torch.randn(c.head_dim, size)
            keys[kv_head, :used, 0] = scale
            keys[kv_head, half : half + used, 0] = 0
            queries[head, :used, 0] = scale * torch.cos(-distance * inv_freq[:used])
            queries[head, half : half + used, 0] = scale * torch.sin(-distance * inv_freq[:used])
            strength[head] = 0.8
        layer.q.weight.copy_(queries.reshape(-1, size))
        layer.k.weight.copy_(keys.reshape(-1, size))
        layer.v.weight.copy_(values.reshape(-1, size))
        out = torch.stack([strength[head] * values[head // groups].T for head in range(c.num_heads)], 1)
        out[0] = 0  # nothing writes the constant direction
        layer.o.weight.copy_(out.reshape(size, -1) + 0.1 * noise * std * torch.randn(size, c.num_heads * c.head_dim))


@torch.no_grad()
def order_words(model: DemoModel, ids: list[int], size: float = 1.0) -> None:
    """Write the order of the words `ids` along one direction of their embeddings, from -size to size."""
    direction = torch.randn(model.config.hidden_size)
    direction /= direction.norm()
    direction[0] = 0  # the constant direction of the look-back heads
    for place, token in enumerate(ids):
        row = model.emb.weight[token]
        row += (size * (2 * place / (len(ids) - 1) - 1) * row.norm() - row @ direction) * direction


@torch.no_grad()
def copy_attention(model: DemoModel, source: int, target: int, scale: float) -> None:
    """Let layer `target` start its attention as layer `source`, its output weighed by `scale`: a second hop begins as
    a second pass of the first."""
    layers = model.decoder_layers()
    for name in ("q", "k", "v", "n1"):
        getattr(layers[target], name).weight.copy_(getattr(layers[source], name).weight)
    layers[target].o.weight.copy_(scale * layers[source].o.weight)


_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "g": "mlp.gate_proj", "u": "mlp.up_proj", "w": "mlp.down_proj",
    "n1": "input_layernorm", "n2": "post_attention_layernorm",
}  # fmt: skip


def hugging_face_name(name: str) -> str:
    """What `LlamaForCausalLM` calls a parameter of `DemoModel`.

    >>> hugging_face_name("layers.3.q.weight"), hugging_face_name("emb.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.embed_tokens.weight')"""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
    return {"emb": "model.embed_tokens.weight", "norm": "model.norm.weight"}[parts[0]]


def to_hugging_face(model: DemoModel, pad_id: int, bos_id: int, eos_id: int) -> Any:
    """The same weights as `LlamaForCausalLM`, float32, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.mlp_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_positions, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, pad_token_id=pad_id, bos_token_id=bos_id,
        eos_token_id=eos_id, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    state = {hugging_face_name(name): tensor.detach().float() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    shipped = LlamaForCausalLM(config)
    shipped.load_state_dict(state)
    return shipped.eval()


def load_shipped(directory: Path) -> DemoModel:
    """The shipped weights as a `DemoModel`, float32, in eval mode."""
    from safetensors.torch import load_file

    saved = json.loads((directory / "config.json").read_text())
    config = ModelConfig(
        vocab_size=saved["vocab_size"], hidden_size=saved["hidden_size"], num_layers=saved["num_hidden_layers"],
        num_heads=saved["num_attention_heads"], num_kv_heads=saved["num_key_value_heads"], head_dim=saved["head_dim"],
        mlp_size=saved["intermediate_size"], rope_theta=saved["rope_parameters"]["rope_theta"],
        norm_eps=saved["rms_norm_eps"], max_positions=saved["max_position_embeddings"],
    )  # fmt: skip
    model, tensors = DemoModel(config), load_file(directory / "model.safetensors")
    model.load_state_dict({name: tensors[hugging_face_name(name)].float() for name in model.state_dict()})
    return model.eval()


def num_parameters(model: nn.Module) -> int:
    """Parameters, the tied head counted once."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
