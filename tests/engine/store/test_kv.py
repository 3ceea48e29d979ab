"""The stored value: shapes and dtypes are checked at birth, and every layer is there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ragblend.engine.store.kv import DTYPES, KVHeader, LayerKV, MemoryKV, dtype_name, load_into_memory
from ragblend.errors import DamagedEntryError

HEADER = KVHeader("0" * 32, "model", (1,), (5, 6, 7), 2, "float32")


def layer(tokens: int = 3, dtype: torch.dtype = torch.float32) -> LayerKV:
    return LayerKV(torch.ones(2, tokens, 4, dtype=dtype), torch.zeros(2, tokens, 6, dtype=dtype))


class LazyKV:
    """Makes its layers when asked, as a file does."""

    header = HEADER
    nbytes = 2 * layer().nbytes

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.asked: list[int] = []

    def layer(self, index: int) -> LayerKV:
        self.asked.append(index)
        if index == self.broken:
            raise DamagedEntryError(self.header.key, f"layer {index}")
        return layer()

    stored_layer = layer


def test_bytes_and_tokens_are_counted() -> None:
    kv = MemoryKV(HEADER, (layer(), layer()))
    assert layer().nbytes == 2 * 3 * 4 * 4 + 2 * 3 * 6 * 4
    assert kv.nbytes == 2 * layer().nbytes
    assert HEADER.num_tokens == 3
    assert kv.layer(1) is kv.layers[1]


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


def test_an_unknown_dtype_is_named_with_the_choices() -> None:
    header = dataclasses.replace(HEADER, dtype="int8")
    with pytest.raises(ValueError, match=r"'int8' cannot be stored; choose one of float32, bfloat16, float16"):
        MemoryKV(header, (layer(), layer()))


def test_a_value_does_not_change() -> None:
    kv = MemoryKV(HEADER, (layer(), layer()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.layers = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.header.key = "other"  # type: ignore[misc]


def test_in_memory_reads_every_layer_once() -> None:
    lazy = LazyKV()
    kv = load_into_memory(lazy)
    assert lazy.asked == [0, 1]
    assert kv.header is HEADER
    assert torch.equal(kv.layer(1).values, layer().values)
    assert load_into_memory(kv) is kv


def test_in_memory_passes_damage_on() -> None:
    with pytest.raises(DamagedEntryError, match="layer 1"):
        load_into_memory(LazyKV(broken=1))


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_dtypes_have_names_both_ways(name: str, dtype: torch.dtype) -> None:
    assert dtype_name(dtype) == name


def test_a_dtype_that_cannot_be_stored_names_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"torch.int8 cannot be stored; choose one of float32, bfloat16, float16"):
        dtype_name(torch.int8)
