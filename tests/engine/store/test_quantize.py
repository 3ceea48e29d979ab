"""KV in eight bits: how far it may be off, what stays bit for bit, and what is not rounded at all."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragblend.engine.store.chunk_file import encode_chunk
from ragblend.engine.store.kv import DTYPES, KVHeader, LayerKV, MemoryKV, convert_kv_dtype, dequantized
from ragblend.engine.store.quantize import CODE_DTYPES, NUM_FIRST, dequantize, quantize, stored_bytes_per_token
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import UsageError

SHAPES = st.tuples(st.integers(1, 3), st.integers(NUM_FIRST + 1, 24), st.integers(1, 9))
ELEMENTS = st.one_of(
    st.floats(-8, 8, width=32),
    st.floats(-65504, 65504, width=16),  # what float16 holds, its subnormals among it
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.sampled_from(
        [0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**-126, 2.0**-24, 1.0]
    ),  # zeros, subnormals of float32 and float16
)


@st.composite
def pairs(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [H, T, D] of any dtype, constants among them."""
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    fill = st.one_of(st.nothing(), ELEMENTS)  # all different, or mostly one value
    arrays = [draw(hnp.arrays(np.float32, shape, elements=ELEMENTS, fill=fill)) for _ in range(2)]
    limit = torch.finfo(dtype).max
    keys, values = (torch.from_numpy(array).clamp(-limit, limit).to(dtype) for array in arrays)
    return keys, values


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding a float64 tensor to `dtype` can change at most."""
    info = torch.finfo(dtype)
    return exact.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2


def make_kv(tokens: int = 12, dtype: str = "float32", heads: int = 2, dim: int = 8, seed: int = 0) -> MemoryKV:
    generator = torch.Generator().manual_seed(seed)
    layers = tuple(
        LayerKV(*(torch.randn(heads, tokens, dim, generator=generator).to(DTYPES[dtype]) for _ in range(2)))
        for _ in range(2)
    )
    return MemoryKV(KVHeader("0" * 32, "model", (1,), tuple(range(tokens)), 2, dtype), layers)


# --- the bounds ---


@settings(max_examples=300, deadline=None)
@given(pair=pairs())
def test_int8_is_off_by_half_a_scale_at_most(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    quantized = quantize(*pair, "int8")
    assert quantized is not None
    scales = (quantized.key_scales.double(), quantized.value_scales.double())
    for exact, found, scale, dim in zip(pair, dequantize(quantized), scales, (1, 2), strict=True):
        rest = exact[:, NUM_FIRST:].double()
        assert found.dtype == exact.dtype
        assert torch.equal(found[:, :NUM_FIRST], exact[:, :NUM_FIRST]), "the first tokens stay as they are"
        error = (rest - found[:, NUM_FIRST:].double()).abs()
        bound = scale / 2 * (1 + 2**-15) + (0 if exact.dtype == torch.float32 else rounding(rest, exact.dtype) * 1.01)
        assert (error <= bound).all()
        largest = rest.abs().amax(dim, keepdim=True)
        assert (scale <= (largest / 127 * (1 + 2**-22)).clamp(min=2.0**-126)).all(), "no scale is larger than it must"


@settings(max_examples=300, deadline=None)
@given(pair=pairs())
def test_fp8_is_off_by_a_sixteenth_or_a_1024th_of_the_scale(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    quantized = quantize(*pair, "fp8")
    assert quantized is not None
    scales = (quantized.key_scales.double(), quantized.value_scales.double())
    for exact, found, scale in zip(pair, dequantize(quantized), scales, strict=True):
        rest = exact[:, NUM_FIRST:].double()
        error = (rest - found[:, NUM_FIRST:].double()).abs()
        bound = torch.maximum(rest.abs() / 16, scale / 1024) * (1 + 2**-12)
        assert (error <= bound + rounding(rest, exact.dtype) * 1.1).all()


def test_fp8_codes_are_read_as_torch_reads_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).view(1, -1, 1)  # all but the two NaNs
    layer = quantize(torch.ones(1, NUM_FIRST + codes.shape[1], 1), torch.ones(1, NUM_FIRST + codes.shape[1], 1), "fp8")
    assert layer is not None
    keys, _ = dequantize(layer._replace(key_codes=codes, key_scales=torch.ones(1, 1, 1)))
    assert torch.equal(keys[:, NUM_FIRST:], codes.float())


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_a_sink_at_the_start_costs_the_others_nothing(kv_dtype: str) -> None:
    """Keys a thousand times as large in the first token, as sinks have them, and the same rest: the same codes."""
    keys, values = torch.randn(2, 32, 8), torch.randn(2, 32, 8)
    sink = keys.clone()
    sink[:, 0] *= 1000
    plain, with_sink = quantize(keys, values, kv_dtype), quantize(sink, values, kv_dtype)
    assert plain is not None
    assert with_sink is not None
    assert torch.equal(plain.key_codes.view(torch.int8), with_sink.key_codes.view(torch.int8))
    assert torch.equal(dequantize(with_sink)[0][:, 0], sink[:, 0])


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_a_large_channel_of_keys_and_a_large_token_of_values_cost_the_others_nothing(kv_dtype: str) -> None:
    keys, values = make_kv(32, seed=1).layer(0)
    large_keys, large_values = keys.clone(), values.clone()
    large_keys[:, :, 3] *= 1000
    large_values[:, 20] *= 1000
    plain, large = quantize(keys, values, kv_dtype), quantize(large_keys, large_values, kv_dtype)
    assert plain is not None
    assert large is not None
    others = [channel for channel in range(8) if channel != 3]
    assert torch.equal(dequantize(large)[0][:, :, others], dequantize(plain)[0][:, :, others])
    others = [token for token in range(32) if token != 20]
    assert torch.equal(dequantize(large)[1][:, others], dequantize(plain)[1][:, others])


# --- what is left alone ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_values_without_an_eight_bit_form_are_stored_as_computed_or_not_at_all(
    kv_dtype: str, bad: float, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = make_kv()
    getattr(kv.layer(1), which)[1, 7, 3] = bad
    store = TieredStore(MemoryStore(1 << 20), kv_dtype=kv_dtype)
    store.put(kv)
    found = store.get(kv.header.key)
    if not math.isfinite(bad):
        assert found is None
        assert "holds infinity or NaN" in caplog.text
        return
    assert found is not None
    assert found.header.is_lossless
    kept = getattr(found.layer(1), which)
    assert torch.equal(kept.view(torch.int32), getattr(kv.layer(1), which).view(torch.int32)), "bit for bit"


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("tokens", range(1, NUM_FIRST + 2))
def test_a_chunk_too_short_to_gain_anything_stays_as_computed(kv_dtype: str, tokens: int) -> None:
    kv = make_kv(tokens, "bfloat16")
    assert convert_kv_dtype(kv, kv_dtype) is kv


def test_nothing_is_rounded_twice() -> None:
    kv = make_kv()
    once = convert_kv_dtype(kv, "int8")
    assert once.header == dataclasses.replace(kv.header, kv_dtype="int8")
    assert convert_kv_dtype(once, "fp8") is once
    assert convert_kv_dtype(once, "auto") is once
    assert convert_kv_dtype(kv, "auto") is kv


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match=r"kv_dtype is 'int4'; choose one of auto, int8, fp8"):
        TieredStore(MemoryStore(0), kv_dtype="int4")


def test_codes_under_a_header_that_says_otherwise_are_refused() -> None:
    kv, packed = make_kv(), convert_kv_dtype(make_kv(), "int8")
    with pytest.raises(ValueError, match=r"keys are .* torch.int8; expected .* torch.float8_e4m3fn"):
        MemoryKV(dataclasses.replace(kv.header, kv_dtype="fp8"), packed.layers)
    with pytest.raises(ValueError, match=r"layer 0 keys are \(2, 1, 8\)"):
        MemoryKV(kv.header, packed.layers)


# --- the bytes ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.53), ("float16", 0.53), ("float32", 0.27)])
def test_512_tokens_of_head_dimension_64_take_about_half_of_16_bits(kv_dtype: str, dtype: str, share: float) -> None:
    kv = make_kv(512, dtype, heads=4, dim=64)
    packed = convert_kv_dtype(kv, kv_dtype)
    assert len(encode_chunk(packed)) <= share * len(encode_chunk(kv))
    item = DTYPES[dtype].itemsize
    forecast = 2 * 512 * stored_bytes_per_token(2 * 4 * 64, 4, item, kv_dtype)
    assert forecast == pytest.approx(packed.nbytes, rel=0.03)
    assert 2 * 512 * stored_bytes_per_token(2 * 4 * 64, 4, item, "auto") == kv.nbytes


def test_a_layer_as_computed_is_read_without_a_copy() -> None:
    layer = make_kv().layer(0)
    assert dequantized(layer) is layer
