"""Stock vLLM with the ragblend connector, in this process, as a subject of measurements: `--backend vllm`.

The weights are a checkpoint on disk, as vLLM wants them; the paged KV is just large enough. "full" and "prefix" are
vLLM's own prefill, without and with its prefix cache. Read `open_vllm` and `warm_prefix_cache`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.engine.vllm.launch import find_checkpoint, is_cuda, require_vllm, transfer_config
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.configs import LoadConfig, ThroughputConfig, TtftConfig
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.shapes import find_dtype, find_shape
from ragblend.lab.bench.common.workloads import save_checkpoint, synthetic_renderer
from ragblend.options import ModelOptions
from ragblend.prompt.types import Chunk, Prompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

_SLACK_TOKENS = 64  # of context beyond the prompt
_BLOCK_TOKENS = 128  # vLLM's default block on a CPU, the largest there is: a prompt wastes one at most
_MEMORY_OPTIONS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


@contextmanager
def open_vllm(
    config: TtftConfig | ThroughputConfig | LoadConfig,
    *,
    num_prompts: int,
    prompt_tokens: int | None = None,
    memory_gib: float = 0.0,
    store: Path | None = None,
) -> Iterator[tuple[VllmEngine, int]]:
    """The engine for `config`'s prompts, and its vocabulary's size. vLLM ends with the context.

    `num_prompts` of `prompt_tokens`, answers included, fit into the paged KV at once; a memory tier of `memory_gib`
    stands in front of the store, none where it is 0.
    """
    require_vllm()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the process has its threads already
    from transformers import AutoConfig

    from ragblend.engine.vllm.engine import VllmEngine

    dtype, shape, model = find_dtype(config.dtype), config.shape, getattr(config, "model", None)
    prompt_tokens = prompt_tokens or config.prompt_tokens
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
        if shape is not None:
            path = Path(directory) / shape
            save_checkpoint(shape, path, dtype)
            checkpoint = find_checkpoint(str(path), ModelOptions(dtype=config.dtype))._replace(name=shape)
            vocab_size = find_shape(shape).vocab_size
        else:
            assert model is not None
            checkpoint = find_checkpoint(model, ModelOptions(dtype=config.dtype))
            vocab_size = int(AutoConfig.from_pretrained(checkpoint.path).get_text_config().vocab_size)
        place = store or Path(directory) / "kv"
        renderer = synthetic_renderer(vocab_size)
        transfer = transfer_config(place, {"memory_gib": memory_gib, "remote": None}, model=str(checkpoint.path))
        transfer["kv_connector_extra_config"]["prefix_ids"] = list(renderer.prefix_ids())
        options = {"max_model_len": min(prompt_tokens + _SLACK_TOKENS, checkpoint.context_length)}
        if not is_cuda() and not set(_MEMORY_OPTIONS) & set(config.vllm_options):
            rows = num_prompts * (prompt_tokens + _SLACK_TOKENS + _BLOCK_TOKENS)
            options["kv_cache_memory_bytes"] = rows * checkpoint.bytes_per_token
        with VllmEngine(
            checkpoint,
            renderer,
            transfer,
            place,
            vllm_options={**options, **config.vllm_options},
            on_miss="inline",  # nothing is computed in the background while something is timed
        ) as engine:
            yield engine, vocab_size


def warm_prefix_cache(engine: VllmEngine, prompts: Sequence[Prompt]) -> None:
    """Leave vLLM's prefix cache as if other prompts had begun with each of `prompts`' first chunks, and nothing else.

    This is what prefix caching can hope for when chunks come in ever new orders; a prompt that was sent before, which
    would be found whole, is forgotten.
    """
    if not engine.reset_prefix_cache():
        raise RagblendError("vLLM did not reset its prefix cache: a request is still running")
    for chunk in dict.fromkeys(_first_chunk(prompt) for prompt in prompts):
        engine.generate(Prompt([chunk], "0"), mode="prefix", max_tokens=1)


def vllm_card() -> dict[str, Any]:
    """Return the hardware card, with vLLM's version."""
    return {**hardware_card("cuda" if is_cuda() else "cpu"), "vllm": _version()}


def _first_chunk(prompt: Prompt) -> Chunk:
    return prompt.chunks[0]


def _version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return None
