"""Operations that the host starts for one blended request, and what makes it wait, counted without a GPU.

    python -m benchmarks.operations --out data/results/operations.json
    python -m benchmarks.operations --backend vllm --out data/results/operations-vllm.json

On a GPU the host starts each operation, which takes longer than the operation itself over the few rows that a blend
recomputes. So the number of operations a layer limits a short request. It is the slope between a model of 12 layers and
one of 24, of a prompt of 8 chunks; views do not count. The branches that a GPU takes are forced. A launch of one of
Triton's kernels counts as one operation and is not executed. `runs_without_kernels` are the counts of torch alone. Host
reads are waits for the device: operations that read a tensor's values. `per_chunk` is how many operations each further
chunk adds. In vLLM the counts of a blend are those of the connector's worker, by vLLM's layers for CPUs, and `full` is
vLLM's own pass without compiling. Read `measure` first.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ragblend
from benchmarks.results import OutOption, write_both
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.fusion import attention, plan
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import Backend, TtftConfig
from ragblend.lab.bench.common.shapes import SHAPES, DecoderShape
from ragblend.lab.bench.common.workloads import engine_for, make_prompts
from ragblend.options import Mode

LAYERS, NUM_CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS = (12, 24), (8, 16), 512, 32
CASES: dict[str, tuple[Mode, str, float]] = {
    "full": ("full", "auto", 0.0),
    "reuse": ("reuse", "auto", 0.0),
    "ask": ("blend", "ask", 0.05),
    "cacheblend": ("blend", "cacheblend", 0.15),
}
kernels = import_module("ragblend.engine.fusion.kernels") if find_spec("triton") else None
PACKAGE_DIR = str(Path(ragblend.__file__).parent)
LOOKS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "argwhere", "equal", "allclose"}
CASTS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"}


class DeviceLooks(TorchFunctionMode):
    """Context in which `places` counts this thread's host reads of tensors, by file and line of the package.

    Reads by a model's code do not count, nor do copies to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count `func` if it is a host read, and run it."""
        if _looks(getattr(func, "__name__", ""), args, kwargs or {}):
            place = _caller()
            if place:
                self.places[place] += 1
        return func(*args, **(kwargs or {}))


def _looks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in LOOKS or name in CASTS:
        return True
    if name == "__getitem__":
        return _has_mask(args[1])
    if name == "__setitem__":
        return _has_mask(args[1]) and isinstance(args[2], Tensor) and args[2].dim() > 0
    return name == "repeat_interleave" and isinstance(args[1], Tensor) and kwargs.get("output_size") is None


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _caller() -> str:
    """Return file and line of the package's call of torch; "" if other code called torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    if frame is None or not (name := frame.f_code.co_filename).startswith(PACKAGE_DIR):
        return ""
    return f"{name[len(PACKAGE_DIR) + 1 :]}:{frame.f_lineno}"


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which `num` counts the operations of this thread, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __enter__(self) -> Operations:
        """Count, and let launches of kernels count instead of running."""
        self._patch = patch.object(kernels, "_launch", self._count_launch) if kernels else nullcontext()
        self._patch.__enter__()
        entered: Operations = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.__exit__(*error)

    def _count_launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        self.num += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count `func` unless it makes a view, and run it."""
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


class Count(NamedTuple):
    """Operations of one request, and its host reads by file and line."""

    num_operations: int
    host_reads: dict[str, int]


def count_in_transformers(num_layers: int, num_chunks: int, *, with_kernels: bool) -> dict[str, Count]:
    """Return the counts of one request of each case, by a model with the heads of Llama 3.1 8B and little width."""
    shape = DecoderShape("llama", num_layers, 64, 128, 32, 8, 16, 2048, 131072, 500000.0)
    chunks, prompts = make_prompts(num_chunks, CHUNK_TOKENS, QUESTION_TOKENS, 1, shape.vocab_size)
    found = {}
    with (
        patch.dict(SHAPES, operations=shape),
        gpu_branches(),
        engine_for("operations", MemoryStore(1 << 40), torch.bfloat16) as engine,
    ):
        for _ in engine.precompute_all(chunks):
            pass
        engine.layers.uses_kernels = with_kernels
        for name, (mode, rule, ratio) in CASES.items():
            request = engine.request(prompts[0], mode=mode, rule=rule, recompute_ratio=ratio)
            prefill = engine.prepare_prefill(request)
            with Operations():
                prefill()  # what is made once: the prefix, tables of rotations
            with Operations() as operations, DeviceLooks() as looks:
                prefill()
            found[name] = Count(operations.num, dict(looks.places))
    return found


def count_in_vllm(num_layers: int, num_chunks: int, *, with_kernels: bool) -> dict[str, Count]:
    """Return the counts of one request of each case, as `count_in_transformers` does."""
    from ragblend.engine.vllm.worker_side import self_check
    from ragblend.engine.vllm.worker_side.layers import VllmLayers
    from ragblend.engine.vllm.worker_side.worker import BlendWorker, worker_of_this_process
    from ragblend.lab.bench.ttft_vllm import open_vllm

    shape = DecoderShape("llama", num_layers, 64, 128, 4, 2, 32, 2048, 131072, 500000.0)
    chunks, prompts = make_prompts(num_chunks, CHUNK_TOKENS, QUESTION_TOKENS, 1, shape.vocab_size)
    config = TtftConfig(
        backend="vllm", dtype="bfloat16", num_chunks=num_chunks, chunk_tokens=CHUNK_TOKENS,
        question_tokens=QUESTION_TOKENS,
        vllm_options={"enforce_eager": True, "max_num_batched_tokens": 16384},  # all tokens of a layer in one call
    )  # fmt: skip
    counts: dict[str, Count] = {}
    run_slice = BlendWorker.run_slice

    def counted(worker: BlendWorker, *args: Any) -> Any:
        with Operations() as operations, DeviceLooks() as looks:
            results = run_slice(worker, *args)
        seen.append(Count(operations.num, dict(looks.places)))
        return results

    with (
        patch.dict(SHAPES, operations=shape),
        gpu_branches(),
        patch.object(attention, "KERNEL_DEVICES", frozenset({"cpu"} if with_kernels else ())),
        patch.object(VllmLayers, "attends_scattered_rows_together", True),
        patch.object(self_check, "self_check"),  # it would run the kernels for minutes, in Triton's interpreter
        open_vllm(config, "operations", num_prompts=2, memory_gib=1.0) as engine,
    ):
        for _ in engine.precompute_all(chunks):
            pass
        for name, (mode, rule, ratio) in CASES.items():
            for _ in range(2):  # the first request makes what is made once
                seen: list[Count] = []
                engine.reset_prefix_cache()
                with patch.object(BlendWorker, "run_slice", counted):
                    engine.generate(prompts[0], mode=mode, rule=rule, recompute_ratio=ratio, max_tokens=1)
            reads = sum((Counter(each.host_reads) for each in seen), Counter[str]())
            counts[name] = Count(sum(each.num_operations for each in seen), dict(reads))
        counts["full"] = _count_full_prefill(worker_of_this_process().layers, config.prompt_tokens)
    return counts


def _count_full_prefill(layers: Any, num_tokens: int) -> Count:
    """Return the counts of vLLM's own pass over as many of `num_tokens` tokens as one call has, in its first blocks."""
    from ragblend.engine.vllm.worker_side.paged import PagedKV

    rows, blocks = torch.arange(num_tokens), range(1, 2 + num_tokens // layers.block_size)
    with torch.inference_mode():
        call, *_ = layers.attention_calls([rows], [PagedKV(layers, list(blocks), num_tokens)])
        with Operations() as operations, DeviceLooks() as looks:
            layers.forward(torch.zeros_like(call.positions), call)
    return Count(operations.num, dict(looks.places))


@contextmanager
def gpu_branches() -> Iterator[None]:
    """Take the branches on the CPU that a GPU of 132 processors (H100) takes."""
    with (
        patch.object(kernels, "num_processors", lambda _: 132) if kernels else nullcontext(),
        patch.dict(plan.ALLOCATED_LAYERS, cpu=8),
        patch.dict(attention.BLOCK_ROWS, cpu=512),
        patch.dict(attention.BLOCK_SCORES, cpu=1 << 22),
        patch.object(attention, "CAUSAL_KERNEL_DEVICES", frozenset({"cpu"})),
        patch.object(attention, "causal_lower_right", lambda *_: None),  # its tensor class excludes dispatch modes
        # With AMX, vLLM packs the keys of a block, and kernels that read its cache at regular distances do not run.
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False),
    ):
        yield


def measure(backend: str, *, with_kernels: bool) -> dict[str, dict[str, Any]]:
    """Return per case the operations a layer, those of each further chunk in 12 layers, and the host reads."""
    count = count_in_vllm if backend == "vllm" else count_in_transformers
    few, many = (count(num_layers, NUM_CHUNKS[0], with_kernels=with_kernels) for num_layers in LAYERS)
    more_chunks = count(LAYERS[0], NUM_CHUNKS[1], with_kernels=with_kernels)
    return {
        name: {
            "per_layer": (many[name].num_operations - few[name].num_operations) / (LAYERS[1] - LAYERS[0]),
            "per_chunk": (more_chunks[name].num_operations - few[name].num_operations)
            / (NUM_CHUNKS[1] - NUM_CHUNKS[0]),
            "host_reads": many[name].host_reads,
        }
        for name in CASES
    }


def main(backend: Backend = "transformers", out: OutOption = None) -> None:
    """Count, and write the result as JSON."""
    if kernels is None:
        raise UsageError("Triton is not installed, and its kernels are counted, too: pip install 'triton>=3.9'")
    quiet_libraries()
    set_num_threads(1)
    names = {"runs": True, "runs_without_kernels": False}
    runs = {name: measure(backend, with_kernels=with_kernels) for name, with_kernels in names.items()}
    write_both({"backend": backend, "num_chunks": NUM_CHUNKS[0], "chunk_tokens": CHUNK_TOKENS, **runs}, out)


if __name__ == "__main__":
    typer.run(main)
