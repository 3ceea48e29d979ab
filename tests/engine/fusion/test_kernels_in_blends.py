"""A blend by Triton's kernels, run in its interpreter, is the blend by torch, and at ratio 1 the model's full prefill.

`RAGBLEND_TEST_KERNELS=1 pytest tests/engine/fusion tests/engine/transformers` runs all exactness tests by the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_fuse
import torch
from test_fuse import ATOL, blend, full_prefill, make_prompt
from tiny_models import FAMILIES, make_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.plan import FuseResult, Placement
from ragblend.engine.store.format.kv import convert_kv_dtype
from ragblend.engine.transformers.layers import TransformersLayers

pytest.importorskip("triton")
from ragblend.engine.fusion import kernels

# RoPE of halves, of a part, of adjacent dimensions, before a norm, of an expanded latent; windows, soft caps and sinks.
CHOSEN = ("llama", "phi3_partial", "cohere", "hunyuan", "deepseek_v2", "gemma2", "gpt_oss")


@pytest.fixture(scope="module", params=CHOSEN)
def layers(request):
    model_class, changes = FAMILIES[request.param]
    return TransformersLayers(make_model(model_class, **changes))


@pytest.mark.parametrize("rule", ["ask", "cacheblend", "cacheblend_gradual"])
def test_a_blend_by_kernels_equals_the_blend_by_torch(layers, rule, monkeypatch):
    prompt = make_prompt(3, (13, 9, 11))
    expected = blend(layers, prompt, 0.3, rule)
    monkeypatch.setattr(layers, "uses_kernels", True)
    found = blend(layers, prompt, 0.3, rule)
    assert found.recomputed == expected.recomputed
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    for layer in range(layers.num_layers):
        torch.testing.assert_close(found.fused.keys(layer), expected.fused.keys(layer), atol=2e-5, rtol=0)
        torch.testing.assert_close(found.fused.values(layer), expected.fused.values(layer), atol=2e-5, rtol=0)


def test_ratio_one_by_kernels_is_full_prefill(layers, monkeypatch):
    prompt = make_prompt(4, (13, 9, 11))
    monkeypatch.setattr(layers, "uses_kernels", True)
    logits, _ = full_prefill(layers.model, prompt.ids)
    torch.testing.assert_close(blend(layers, prompt, 1.0).logits, logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kernels_place_eight_bit_chunks_as_torch_does(kv_dtype, monkeypatch):
    model_class, changes = FAMILIES["llama"]
    layers = TransformersLayers(make_model(model_class, **changes))

    def in_eight_bits(placements: list[Placement]) -> list[Placement]:
        return [placement._replace(kv=convert_kv_dtype(placement.kv, kv_dtype)) for placement in placements]

    expected = blend(layers, make_prompt(5), 0.0, change=in_eight_bits)
    monkeypatch.setattr(layers, "uses_kernels", True)
    found = blend(layers, make_prompt(5), 0.0, change=in_eight_bits)
    for layer in range(layers.num_layers):
        torch.testing.assert_close(found.fused.keys(layer), expected.fused.keys(layer), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["ask", "cacheblend", "cacheblend_gradual"])
def test_no_value_is_read_before_the_logits(layers, rule, monkeypatch):
    if layers.config.model_type in ("gpt_oss", "deepseek_v2"):
        pytest.skip("torch has no float32 product of experts in this mode")
    prompt, fused = make_prompt(6, (13, 9, 11)), []

    def kept(*args: Any) -> FuseResult:
        fused.append(fuse(*args))
        return fused[-1]

    monkeypatch.setattr(layers, "uses_kernels", True)
    monkeypatch.setattr(test_fuse, "fuse", kept)
    blend(layers, prompt, 0.3, rule)  # makes what is made once: chunks, tables, scratch memory
    expected = fused[-1]
    monkeypatch.setattr(kernels, "_launch", lambda *_args, **_options: None)
    monkeypatch.setattr(kernels.Pieces, "locate", lambda *_: None)
    # A tensor in this mode has no values, so that reading one is an error: `blend` itself does it after `fuse`.
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        blend(layers, prompt, 0.3, rule)
    assert fused[-1] is not expected
    assert (fused[-1].logits.shape, len(fused[-1].recomputed)) == (expected.logits.shape, len(expected.recomputed))
