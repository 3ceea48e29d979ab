"""Compile Triton's kernels for a GPU that need not be there, and print their names: `compile_kernels.py CAPABILITY`.

The kernels are called as in a blend, with tensors of a CPU; each launch compiles instead.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragblend.engine.fusion import kernels
from ragblend.engine.fusion.attention import AttentionExtras, Rotation
from ragblend.engine.fusion.rules import DriftCorrection
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.store.format.quantize import quantize

HEADS, DIM, TOKENS, DTYPE = 2, 64, 100, torch.bfloat16
TYPES = {torch.float32: "*fp32", DTYPE: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}


def type_of(value: Any) -> str:
    """Return the type of an argument, as Triton names it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if abs(value) >= 2**31 else "i32"


def compile_kernel(kernel: Any, _grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Compile what `kernels._launch` would start."""
    bound = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    parameters = inspect.signature(kernel.fn).parameters
    is_constant = {name: "constexpr" in str(parameters[name].annotation) for name in kernel.arg_names}
    # As at a launch, the number 1 is a constant, so that numbers that are adjacent are read together.
    is_one = {name for name in kernel.arg_names if isinstance(bound[name], int) and bound[name] == 1}
    constants = {name: bound[name] for name in kernel.arg_names if is_constant[name] or name in is_one}
    types = {name: "constexpr" if name in constants else type_of(bound[name]) for name in kernel.arg_names}
    target, how = GPUTarget("cuda", int(sys.argv[1]), 32), {"num_warps": options.get("num_warps", 4)}
    compiled = triton.compile(ASTSource(kernel, types, constants), target=target, options=how)
    assert compiled.metadata.shared <= 99 << 10, "more shared memory than an A10 or L4 has"
    print(kernel.fn.__name__)


def main() -> None:
    """Call every function of `kernels`, over pages or over contiguous KV."""
    kernels._launch = compile_kernel
    table, rows = torch.zeros(9, dtype=torch.int32), torch.arange(TOKENS)
    rotation = Rotation(*torch.zeros(2, TOKENS, DIM))
    kv = LayerKV(*torch.zeros(2, HEADS, TOKENS, DIM, dtype=DTYPE))
    correction = DriftCorrection(rows[:50], torch.zeros(48, 50), torch.zeros(TOKENS, 48), table)
    parts = [kv, quantize(*kv, "int8"), quantize(*kv, "fp8")]
    pages = torch.zeros(9, 16, HEADS, DIM, dtype=DTYPE)
    paged, contiguous = kernels.PagedLayer(pages, pages, table), kernels.PagedLayer.from_contiguous(kv)
    drift = kernels.fit_drift(contiguous, kv, rows[:50], correction, rotation)
    kernels.write_rows(contiguous, rows, kv, rotation, correction, drift)
    kernels.write_rows(paged, rows, kv)
    for layer, change in ((contiguous, ()), (paged, (drift, correction.shares))):
        kernels.place(layer, parts, kernels.Pieces([0, TOKENS, 2 * TOKENS]), rotation, *change)
    query, mass = torch.zeros(1, 4 * HEADS, TOKENS, DIM, dtype=DTYPE), torch.zeros(TOKENS)
    everything = AttentionExtras(20, 5.0, torch.zeros(4 * HEADS, dtype=DTYPE))
    kernels.attend(query, contiguous, rows, num_splits=1)
    kernels.attend(query, paged, rows, None, everything, mass=mass, num_question_rows=9, num_splits=3)


if __name__ == "__main__":
    main()
