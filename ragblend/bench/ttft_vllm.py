"""Stock vLLM with the ragblend connector, in this process, as a subject of measurements: `--backend vllm`.

The weights are a checkpoint on disk, as vLLM wants them; the paged KV is just large enough. "full" and "prefix" are
vLLM's own prefill, without and with its prefix cache. Read `open_vllm` and `warm_prefix_cache`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.bench.common.hardware import hardware_card
from ragblend.bench.common.workloads import find_dtype, find_shape, save_checkpoint, synthetic_segmenter
from ragblend.engine.store.kv import dtype_name
from ragblend.engine.vllm.launch import find_checkpoint, is_cuda, require_vllm, transfer_config
from ragblend.errors import RagblendError
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

if TYPE_CHECKING:
    from ragblend.engine.vllm.engine import VllmEngine

_SLACK_TOKENS = 64  # of context beyond the prompt
_BLOCK_TOKENS = 128  # vLLM's default block on a CPU, the largest there is: a prompt wastes one at most
_MEMORY_OPTIONS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """What to start. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: str | None
    model: str | None
    prompt_tokens: int  # of the longest prompt, its answer included
    num_prompts: int  # so many fit into the paged KV at once
    dtype: str = "float32"
    seed: int = 0
    store: Path | None = None  # None is a temporary one
    memory_gib: float = 0.0  # of the memory tier in front of the store; 0 leaves it out
    vllm_options: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def open_vllm(setup: VllmSetup) -> Iterator[tuple[VllmEngine, int]]:
    """The engine for prompts of `make_prompts`, and its vocabulary's size. vLLM ends with the context."""
    require_vllm()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the process has its threads already
    from transformers import AutoConfig

    from ragblend.engine.vllm.engine import VllmEngine

    dtype = find_dtype(setup.dtype)
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
        if setup.shape is not None:
            path = Path(directory) / setup.shape
            save_checkpoint(setup.shape, path, dtype, setup.seed)
            checkpoint = find_checkpoint(str(path), dtype_name(dtype))._replace(name=setup.shape)
            vocab_size = find_shape(setup.shape).vocab_size
        else:
            assert setup.model is not None
            checkpoint = find_checkpoint(setup.model, dtype_name(dtype))
            vocab_size = int(AutoConfig.from_pretrained(checkpoint.path).get_text_config().vocab_size)
        store = setup.store or Path(directory) / "kv"
        segmenter = synthetic_segmenter(vocab_size)
        transfer = transfer_config(store, {"memory_gib": setup.memory_gib, "remote": None}, model=str(checkpoint.path))
        transfer["kv_connector_extra_config"]["prefix_ids"] = list(segmenter.default_prefix_ids())
        options = {"max_model_len": min(setup.prompt_tokens + _SLACK_TOKENS, checkpoint.context_length)}
        if not is_cuda() and not set(_MEMORY_OPTIONS) & set(setup.vllm_options):
            rows = setup.num_prompts * (setup.prompt_tokens + _SLACK_TOKENS + _BLOCK_TOKENS)
            options["kv_cache_memory_bytes"] = rows * checkpoint.bytes_per_token
        with VllmEngine(
            checkpoint,
            segmenter,
            transfer,
            store,
            vllm_options={**options, **setup.vllm_options},
            on_miss="inline",  # nothing is computed in the background while something is timed
        ) as engine:
            yield engine, vocab_size


def warm_prefix_cache(engine: VllmEngine, prompts: Sequence[SegmentedPrompt]) -> None:
    """Leave vLLM's prefix cache as if other prompts had begun with each of `prompts`' first chunks, and nothing else.

    This is what prefix caching can hope for when chunks come in ever new orders; a prompt that was sent before, which
    would be found whole, is forgotten.
    """
    if not engine.reset_prefix_cache():
        raise RagblendError("vLLM did not reset its prefix cache: a request is still running")
    for chunk in dict.fromkeys(_first_chunk(prompt) for prompt in prompts):
        engine.generate(SegmentedPrompt([chunk], "0"), mode="prefix", max_tokens=1)


def vllm_card() -> dict[str, Any]:
    """The hardware card, with vLLM's version."""
    return {**hardware_card("cuda" if is_cuda() else "cpu"), "vllm": _version()}


def _first_chunk(prompt: SegmentedPrompt) -> Chunk:
    return next(part for message in prompt.messages for part in message.parts if isinstance(part, Chunk))


def _version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return None
