"""Models and prompts to measure: models of real shapes with random weights, and prompts of chunks in random orders.

Time to first token depends on the number of weights and tokens, not on their values. So neither a download nor a
tokenizer is needed: each word is a number, and that number is its token id. Read `engine_for` and `make_prompts` first.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.api import Engine
from ragblend.engine.base import LocalEngine
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.keys import fingerprint
from ragblend.engine.store.format.kv import dtype_name
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.transformers.model import find_device
from ragblend.ingestion.report import Progress
from ragblend.lab.bench.common.configs import PREFIX_TOKENS
from ragblend.lab.bench.common.shapes import DecoderShape, find_shape
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Chunk, Prompt

# Weights are drawn once per block and repeated: drawing 8 billion numbers takes minutes and changes no timing.
_BLOCK_VALUES = 1 << 22
_WEIGHT_STD = 0.02


def model_config(shape: DecoderShape) -> Any:
    """Return the transformers config of `shape`. Mistral gets no sliding window, and gpt-oss only a few experts."""
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    extra: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": None},
        "gpt_oss": {"num_local_experts": 4},
        "gemma3_text": {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}},
    }
    return AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        **{"rope_parameters": rope, **extra.get(shape.family, {})},
    )


@torch.no_grad()
def random_model(
    shape: DecoderShape, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | str = "cpu"
) -> Any:
    """Return a causal LM of `shape` with random weights, in `dtype` on `device`.

    The weights are allocated once, without a copy in another dtype. Norm weights are 1, all others are normal with a
    standard deviation of 0.02. Equal arguments give equal weights.
    """
    device, config = find_device(str(device)), model_config(shape)
    model = _empty_model(config, dtype)  # without initialisation
    model.to_empty(device=device)
    model.tie_weights()
    # Rotary tables and Gemma's scale are buffers, not weights: `to_empty` leaves them without a value.
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if (scale := getattr(model.model.embed_tokens, "scalar_embed_scale", None)) is not None:
        model.model.embed_tokens.embed_scale.fill_(scale)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        flat[:_BLOCK_VALUES].normal_(std=_WEIGHT_STD, generator=generator)
        for start in range(_BLOCK_VALUES, len(flat), _BLOCK_VALUES):
            count = min(_BLOCK_VALUES, len(flat) - start)
            flat[start : start + count] = flat[:count]
    return model.eval()


def synthetic_tokenizer(vocab_size: int) -> Any:
    """Return a transformers tokenizer for which the word "17" is token 17. Words other than token ids are token 0.

    Its chat template begins every prompt with the same PREFIX_TOKENS tokens.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(index): index for index in range(vocab_size)}, unk_token="0"))  # noqa: S106 (a token of text)
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    prefix = " ".join(str(index % vocab_size) for index in range(1, PREFIX_TOKENS + 1))
    tokenizer.chat_template = f"{prefix} {{% for message in messages %}}{{{{ message.content }}}} {{% endfor %}}"
    return tokenizer


def save_checkpoint(shape: DecoderShape, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `random_model` of the shape and its tokenizer to `path`, for engines that load models themselves.

    The model has no end token, so answers have the requested length.
    """
    model = _without_end_token(random_model(shape, dtype))
    model.save_pretrained(path)
    synthetic_tokenizer(shape.vocab_size).save_pretrained(path)


def save_without_weights(shape: DecoderShape, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what `save_checkpoint` writes, with no number in the file of weights, for engines that draw weights.

    The fingerprint is that of the config alone, so a store must not outlive the engine.
    """
    from safetensors.torch import save_file

    model = _without_end_token(_empty_model(model_config(shape), dtype))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    save_file({}, path / "model.safetensors", {"format": "pt"})
    synthetic_tokenizer(shape.vocab_size).save_pretrained(path)


def _without_end_token(model: Any) -> Any:
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.bos_token_id = None
    return model


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Return a causal LM that has no memory for its weights yet."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_prompts(
    num_chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    num_prompts: int,
    vocab_size: int,
    seed: int = 0,
    pool: int | None = None,
) -> tuple[list[Chunk], list[Prompt]]:
    """Return chunks and `num_prompts` prompts. Each prompt has `num_chunks` chunks in random order and a question.

    `chunk_tokens` and `question_tokens`: the length of each chunk and question. `pool`: the number of different chunks,
    from which each prompt draws; by default `num_chunks`, so that every prompt has the same chunks.
    """
    draw = random.Random(seed)
    chunks = [Chunk(_words(draw, chunk_tokens, vocab_size), source=f"chunk {i}") for i in range(pool or num_chunks)]
    prompts = []
    for _ in range(num_prompts):
        order = draw.sample(chunks, num_chunks)
        prompts.append(Prompt(order, _words(draw, question_tokens, vocab_size)))
    return chunks, prompts


def _words(draw: random.Random, count: int, vocab_size: int) -> str:
    return " ".join(str(draw.randrange(vocab_size)) for _ in range(count))


def engine_for(
    name: str, store: KVStore, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | str = "cpu"
) -> TransformersEngine:
    """Return an engine over a random-weight model of the shape `name`, for prompts of `make_prompts`.

    Its fingerprint depends on shape, seed and dtype alone, so a later run finds the KV of a disk store.
    """
    shape = find_shape(name)
    facts = {**asdict(shape), "seed": seed, "block_values": _BLOCK_VALUES}
    mark = fingerprint(f"random weights {name}", facts, dtype_name(dtype))
    return make_engine(random_model(shape, dtype, seed, device), store, name, mark)


def make_engine(model: Any, store: KVStore, name: str, fingerprint: str) -> TransformersEngine:
    """Return an engine over a transformers model, for prompts of `make_prompts`.

    name: the model's name, which becomes `engine.name`. fingerprint: identifies the model in the keys of `store`.
    """
    layers = TransformersLayers(model)
    renderer = Renderer(synthetic_tokenizer(layers.config.vocab_size))
    # "inline", so that no background work disturbs the timing.
    return TransformersEngine(layers, renderer, store, name=name, fingerprint=fingerprint, on_miss="inline")


def vocab_size(engine: LocalEngine) -> int:
    """Return the size of the vocabulary of the engine's tokenizer, a `synthetic_tokenizer`."""
    return engine.renderer.backend.get_vocab_size()


def precompute_chunks(engine: Engine, chunks: Sequence[Chunk], on_progress: Progress) -> None:
    """Compute and store the KV of those `chunks` that the engine's store lacks."""
    for number, chunk in enumerate(chunks):
        on_progress("precompute", number, len(chunks))
        engine.precompute(chunk)


@contextmanager
def open_directory(store: str | None = None) -> Iterator[Path]:
    """Yield the directory `store`; None: a temporary directory, which is deleted at the end."""
    if store is not None:
        yield Path(store)
        return
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
        yield Path(directory)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads to `count` within the context; None leaves it unchanged."""
    before, set_threads = torch.get_num_threads(), torch.set_num_threads  # vLLM replaces the latter by a no-op inside
    set_threads(count or before)
    try:
        yield
    finally:
        set_threads(before)
