"""Tiny GGUF files, written by the `gguf` package that llama.cpp's converter uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, model: Any, tokenizer: Any, *, quantise: bool = True, rope_freqs: bool = False) -> Path:
    """Write a Llama model and its tokenizer as GGUF. Return `path`.

    quantise: store matrices in Q8_0; all other tensors are float32. rope_freqs: add the tensor that marks Llama 3's
    scaled RoPE.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config)
    for name, weight in model.state_dict().items():
        place, parts = name.removeprefix("model."), name.split(".")
        if parts[1] == "layers":
            inner = ".".join(parts[3:-1])
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            weight = _interleaved(weight, heads[inner]) if inner in heads else weight
            target = f"blk.{parts[2]}.{_LAYER[inner]}.weight"
        else:
            ends = {"embed_tokens.weight": "token_embd", "norm.weight": "output_norm", "lm_head.weight": "output"}
            target = f"{ends[place]}.weight"
        values = weight.float().numpy()
        if quantise and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, values)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    words = sorted(vocabulary, key=lambda word: int(vocabulary[word]))
    words += [f"<unused{index}>" for index in range(len(words), config.vocab_size)]
    specials = set(tokenizer.all_special_tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([control if word in specials else normal for word in words])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return the weight with its rows in the order of llama.cpp's RoPE: rotated pairs are adjacent."""
    rows, columns = weight.shape
    return torch.reshape(weight, (heads, 2, rows // heads // 2, columns)).swapaxes(1, 2).reshape(rows, columns)
