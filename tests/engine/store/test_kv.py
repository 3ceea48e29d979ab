"""The stored value: shapes and dtypes are checked when it is made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV, dtype_name

HEADER = KVHeader("0" * 32, "model", (1,), (5, 6, 7), 2, "float32")


def layer(tokens: int = 3, dtype: torch.dtype = torch.float32) -> LayerKV:
    return LayerKV(torch.ones(2, tokens, 4, dtype=dtype), torch.zeros(2, tokens, 6, dtype=dtype))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ((layer(),), "1 layers given, the header says 2"),
        ((layer(), layer(tokens=4)), r"layer 1 keys are \(2, 4, 4\)"),
        ((layer(dtype=torch.float16), layer()), r"layer 0 keys .* torch.float16; expected .* torch.float32"),
        ((layer(), LayerKV(layer().keys, layer().values[0])), "layer 1 values"),
    ],
    ids=["too few layers", "other tokens", "other dtype", "other rank"],
)
def test_tensors_that_contradict_the_header_are_refused(layers: tuple[LayerKV, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MemoryKV(HEADER, layers)


def test_a_dtype_that_cannot_be_stored_names_those_that_can() -> None:
    said = r"int8'? cannot be stored; choose one of float32, bfloat16, float16"
    with pytest.raises(ValueError, match=said):
        MemoryKV(dataclasses.replace(HEADER, dtype="int8"), (layer(), layer()))
    with pytest.raises(ValueError, match=said):
        dtype_name(torch.int8)
