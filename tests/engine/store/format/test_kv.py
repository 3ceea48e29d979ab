"""The stored value: shapes and dtypes are checked when it is made; some of its tokens are read as all of them are."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tier_support import make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import (
    KVHeader,
    LayerKV,
    MemoryKV,
    convert_kv_dtype,
    dtype_name,
    is_in_memory,
    slice_kv_rows,
)
from ragblend.engine.store.format.quantize import CODE_DTYPES

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
def test_tensors_that_contradict_the_header_are_refused(layers, problem):
    with pytest.raises(ValueError, match=problem):
        MemoryKV(HEADER, layers)


def test_a_dtype_that_cannot_be_stored_names_those_that_can():
    said = r"int8'? cannot be stored; choose one of float32, bfloat16, float16"
    with pytest.raises(ValueError, match=said):
        MemoryKV(dataclasses.replace(HEADER, dtype="int8"), (layer(), layer()))
    with pytest.raises(ValueError, match=said):
        dtype_name(torch.int8)


@pytest.mark.parametrize("kv_dtype", ["auto", *CODE_DTYPES])
def test_rows_of_a_chunk_are_those_of_its_layers(kv_dtype, tmp_path):
    """Bit for bit, from memory and from disk; with tokens at the front, which are never rounded, and without."""
    held = convert_kv_dtype(make_kv(tokens=24, dim=16), kv_dtype)
    assert held.header.stored_dtype == ("float32" if kv_dtype == "auto" else kv_dtype)
    store = DiskStore(tmp_path, fsync=False)
    store.put(held)
    read = store.get(held.header.key)
    assert read is not None
    for kv, (start, end) in itertools.product((held, read), itertools.combinations(range(25), 2)):
        part = slice_kv_rows(kv, start, end)
        assert part.header == dataclasses.replace(kv.header, token_ids=kv.header.token_ids[start:end])
        assert is_in_memory(part) == (kv is held)
        for index in range(kv.header.num_layers):
            for found, expected in zip(part.layer(index), kv.layer(index), strict=True):
                assert torch.equal(found, expected[:, start:end])
