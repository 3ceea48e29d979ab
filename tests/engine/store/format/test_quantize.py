"""KV in eight bits: how far it may be off, what stays bit for bit, and what is not rounded at all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tier_support import make_kv

from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import DTYPES, KVSpec, MemoryKV, convert_kv_dtype
from ragblend.engine.store.format.quantize import CODE_DTYPES, NUM_FIRST, dequantize, quantize
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


# --- the bounds ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@settings(max_examples=200, deadline=None)
@given(pair=pairs())
def test_eight_bit_values_are_within_the_error_bound_of_their_scale(pair, kv_dtype):
    """int8: half a scale; fp8: a sixteenth of the number or a 1024th of the scale. Scales are of one channel of the
    keys and of one token of the values, without the first tokens: a sink or a large channel costs others nothing."""
    quantized = quantize(*pair, kv_dtype)
    assert quantized is not None
    largest_code = {"int8": 127, "fp8": 448}[kv_dtype]
    scales = (quantized.key_scales.double(), quantized.value_scales.double())
    for exact, found, scale, dim in zip(pair, dequantize(quantized), scales, (1, 2), strict=True):
        rest = exact[:, NUM_FIRST:].double()
        assert found.dtype == exact.dtype
        assert torch.equal(found[:, :NUM_FIRST], exact[:, :NUM_FIRST]), "the first tokens stay as they are"
        error = (rest - found[:, NUM_FIRST:].double()).abs()
        if kv_dtype == "int8":
            bound = scale / 2 * (1 + 2**-15)
        else:
            bound = torch.maximum(rest.abs() / 16, scale / 1024) * (1 + 2**-12)
        slack = {"fp8": 1.1, "int8": 0 if exact.dtype == torch.float32 else 1.01}[kv_dtype]
        assert (error <= bound + rounding(rest, exact.dtype) * slack).all()
        largest = rest.abs().amax(dim, keepdim=True)
        assert (scale <= (largest / largest_code * (1 + 2**-22)).clamp(min=2.0**-126)).all()


def test_fp8_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).view(1, -1, 1)  # all but the two NaNs
    layer = quantize(torch.ones(1, NUM_FIRST + codes.shape[1], 1), torch.ones(1, NUM_FIRST + codes.shape[1], 1), "fp8")
    keys, _ = dequantize(layer._replace(key_codes=codes, key_scales=torch.ones(1, 1, 1)))
    assert torch.equal(keys[:, NUM_FIRST:], codes.float())


# --- what is left alone ---


NOT_FINITE = (float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize(("bad", "token"), [*itertools.product(NOT_FINITE, (NUM_FIRST - 1, 7)), (3e38, 7)])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_values_without_an_eight_bit_form_are_never_stored_rounded(kv_dtype, bad, token, which, caplog):
    """The first tokens, which are stored as computed, are examined too."""
    kv = make_kv(tokens=12)
    getattr(kv.layer(1), which)[1, token, 3] = bad
    store = TieredStore(MemoryStore(1 << 20), kv_dtype=kv_dtype)
    store.put(kv)
    found = store.get(kv.header.key)
    if not math.isfinite(bad):
        assert found is None
        assert "holds infinity or NaN" in caplog.text
        return
    assert found.header.is_lossless
    kept = getattr(found.layer(1), which)
    assert torch.equal(kept.view(torch.int32), getattr(kv.layer(1), which).view(torch.int32)), "bit for bit"


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize("tokens", range(1, NUM_FIRST + 2))
def test_a_chunk_too_short_to_gain_anything_stays_as_computed(kv_dtype, tokens):
    kv = make_kv(tokens=tokens, dtype="bfloat16")
    assert convert_kv_dtype(kv, kv_dtype) is kv


def test_nothing_is_rounded_twice():
    kv = make_kv(tokens=12)
    once = convert_kv_dtype(kv, "int8")
    assert once.header == dataclasses.replace(kv.header, kv_dtype="int8")
    assert convert_kv_dtype(once, "fp8") is once
    assert convert_kv_dtype(once, "auto") is once
    assert convert_kv_dtype(kv, "auto") is kv


def test_an_unknown_dtype_is_refused_with_the_choices():
    with pytest.raises(UsageError, match=r"kv_dtype is 'int4'; choose one of auto, int8, fp8"):
        TieredStore(MemoryStore(0), kv_dtype="int4")


def test_codes_under_a_header_that_says_otherwise_are_refused():
    kv = make_kv(tokens=12)
    packed = convert_kv_dtype(kv, "int8")
    with pytest.raises(ValueError, match=r"keys are .* torch.int8; expected .* torch.float8_e4m3fn"):
        MemoryKV(dataclasses.replace(kv.header, kv_dtype="fp8"), packed.layers)
    with pytest.raises(ValueError, match=r"layer 0 keys are \(2, 1, 4\)"):
        MemoryKV(kv.header, packed.layers)


# --- the bytes ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.53), ("float16", 0.53), ("float32", 0.27)])
def test_512_tokens_of_head_dimension_64_take_about_half_of_16_bits(kv_dtype, dtype, share):
    kv = make_kv(tokens=512, dim=64, dtype=dtype)
    packed = convert_kv_dtype(kv, kv_dtype)
    assert len(encode_chunk(packed)) <= share * len(encode_chunk(kv))
    spec = KVSpec(dtype, ((2, 64, 64),) * 2)
    forecast = 512 * spec.bytes_per_token(kv_dtype)
    assert forecast == pytest.approx(packed.nbytes, rel=0.03)
    assert 512 * spec.bytes_per_token("auto") == kv.nbytes
