"""Four bits, measured only: within half a step of what was computed, fewer bytes than eight, first tokens untouched."""

from __future__ import annotations

import pytest
import torch

from benchmarks.int4 import GROUPS, packed_bytes, rounded
from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV
from ragblend.engine.store.quantize import NUM_FIRST


def make_kv(tokens: int = 100, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float32) -> MemoryKV:
    generator = torch.Generator().manual_seed(0)
    layers = tuple(
        LayerKV(*(torch.randn(heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))) for _ in range(2)
    )
    name = str(dtype).removeprefix("torch.")
    return MemoryKV(KVHeader("0" * 32, "model", (1,), tuple(range(tokens)), 2, name), layers)


@pytest.mark.parametrize("group", GROUPS.values())
def test_an_element_is_off_by_half_a_step_of_its_group_at_most(group: int) -> None:
    """The last group of tokens is shorter: 96 tokens are rounded, in groups of 32 or 64."""
    kv = make_kv()
    for exact, found in zip(kv.layers, rounded(kv, group).layers, strict=True):
        for before, after, dim in zip(exact, found, (1, 2), strict=True):
            assert torch.equal(after[:, :NUM_FIRST], before[:, :NUM_FIRST])
            rest = slice(NUM_FIRST, None)
            for start in range(0, before[:, rest].shape[dim], group):
                whole = before[:, rest].narrow(dim, start, min(group, before[:, rest].shape[dim] - start))
                read = after[:, rest].narrow(dim, start, whole.shape[dim])
                step = (whole.amax(dim, keepdim=True) - whole.amin(dim, keepdim=True)) / 15
                assert ((whole - read).abs() <= step / 2 + 0.01).all()  # float16 moves the ends of a group
                lines = read.movedim(dim, 0).flatten(1)
                assert max(len(lines[:, column].unique()) for column in range(lines.shape[1])) <= 16


@pytest.mark.parametrize("group", GROUPS.values())
def test_a_large_channel_of_keys_and_a_large_token_of_values_cost_the_others_nothing(group: int) -> None:
    kv = make_kv()
    large = MemoryKV(kv.header, tuple(LayerKV(*(tensor.clone() for tensor in layer)) for layer in kv.layers))
    for keys, values in large.layers:
        keys[:, :, 3] *= 1000
        values[:, 20] *= 1000
    for found, plain in zip(rounded(large, group).layers, rounded(kv, group).layers, strict=True):
        assert torch.equal(found.keys[:, :, 4:], plain.keys[:, :, 4:])
        assert torch.equal(found.values[:, 21:], plain.values[:, 21:])


def test_a_constant_is_read_as_it_was() -> None:
    ones = MemoryKV(make_kv().header, tuple(LayerKV(torch.ones(2, 100, 64), torch.ones(2, 100, 64)) for _ in "ab"))
    assert all(torch.equal(tensor, torch.ones(2, 100, 64)) for layer in rounded(ones, 32).layers for tensor in layer)


def test_bytes_are_half_a_byte_per_element_four_per_group_and_the_first_tokens() -> None:
    """bfloat16, 2 heads of 64, 512 tokens: 508 of them in 16 groups of 32 per channel, 2 groups per token and head."""
    kv = make_kv(512, dtype=torch.bfloat16)
    elements, first = 2 * 508 * 64, 2 * NUM_FIRST * 64 * 2
    per_layer = 2 * (elements // 2 + first) + 4 * (2 * 64 * 16 + 2 * 508 * 2)
    assert packed_bytes(kv, 32) == 2 * per_layer
    assert packed_bytes(kv, 64) < packed_bytes(kv, 32) < 0.32 * kv.nbytes
