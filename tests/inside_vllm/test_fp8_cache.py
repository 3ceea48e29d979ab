"""vLLM's paged cache in eight bits: KV is placed with the backend's scales and rounding, and read back with both."""

from __future__ import annotations

import pytest
import torch
from harness import (
    PREFIX,
    ask,
    assert_same_answer,
    connector_worker,
    engine,
    ingest,
    random_ids,
    report,
    tokens,
)
from refined import assert_full_prefill_follows

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.worker_side.self_check import self_check
from ragblend.errors import UnsupportedModelError

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's cache of eight bits on a CPU needs AVX-512"
)
CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]


@pytest.fixture(scope="module", params=["fp8", "fp8_e5m2"])
def cache_dtype(request):
    return str(request.param)


@pytest.fixture(scope="module")
def plain(checkpoint, cache_dtype):
    """vLLM's own answer, without ragblend."""
    with engine(checkpoint("llama"), None, kv_cache_dtype=cache_dtype) as llm:
        return ask(llm, IDS)


@pytest.fixture(scope="module")
def served(checkpoint, cache_dtype, plain, tmp_path_factory):
    """A server with the chunks, and its store."""
    store = tmp_path_factory.mktemp("kv")
    with engine(checkpoint("llama"), store, kv_cache_dtype=cache_dtype) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        yield llm, store


def test_full_and_ratio_one_are_vllms_own_answer_in_eight_bits(served, plain):
    llm, store = served
    assert_same_answer(ask(llm, IDS), plain, 1e-4)
    for rule in ("cacheblend", "ask"):
        blended = ask(llm, IDS, {"mode": "blend", "rule": rule, "ratio": 1.0})
        assert report(blended)["num_chunk_hits"] == 2
        assert_same_answer(blended, plain, 1e-4)
    refined = ask(llm, IDS, {"mode": "blend", "rule": "ask", "ratio": 0.1, "refine_ratio": 1.0})
    assert_full_prefill_follows(llm, IDS, refined, 1e-4)
    between = ask(llm, IDS, {"mode": "blend", "rule": "ask", "ratio": 0.3})
    assert 0 < report(between)["num_recomputed_tokens"] < len(CHUNKS[0]) + len(CHUNKS[1])
    assert tokens(ask(llm, IDS, {"mode": "reuse"})) != tokens(plain)
    assert {header.dtype for header in DiskStore(store).headers()} == {"float32"}, "entries keep the model's dtype"


@torch.inference_mode()
def test_the_check_holds_with_a_checkpoints_scales_and_notices_wrong_ones(served, monkeypatch):
    layers = connector_worker().layers
    for number, attention in enumerate(layers._attention):
        for name in ("_k_scale", "_v_scale"):
            scale = 0.03 + 0.01 * number
            monkeypatch.setattr(attention, name, torch.tensor(scale))
            monkeypatch.setattr(attention, f"{name}_float", scale)
    self_check(layers, 300, 100, "it")
    kv = LayerKV(*torch.randn(2, layers.block_size, 2, 32, generator=torch.Generator().manual_seed(0)))
    layers.write(1, torch.arange(layers.block_size), *kv)
    found = layers.read(1, torch.zeros(1, dtype=torch.int64))
    layers.cache.round(1, kv)
    for mine, theirs in zip(kv, found, strict=True):
        assert mine.unique().numel() > 50
        torch.testing.assert_close(mine, theirs)
    monkeypatch.setattr(layers.cache, "_scales", lambda layer: (torch.ones(1, 1), torch.ones(1, 1)))
    with pytest.raises(UnsupportedModelError, match="fails the exactness check of a query probe"):
        self_check(layers, 300, 100, "it")
