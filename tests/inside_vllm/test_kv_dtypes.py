"""KV in eight bits under vLLM: ingested by one engine or the other, it is the same; ratio 1 is full prefill from it."""

import pytest
from demo_texts import QUESTION, A, B, C
from harness import SMALL

from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore

TEXTS = (A, B, C)
PROMPT = Prompt(TEXTS, QUESTION)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_both_engines_store_and_blend_the_same_eight_bits(tmp_path, kv_dtype):
    options = {"rule": "cacheblend_k", "max_tokens": 8}
    with load_engine("demo", tmp_path / "hf", on_miss="inline", kv_dtype=kv_dtype) as reference:
        for text in TEXTS:
            reference.precompute(text)
        expected = {ratio: reference.generate(PROMPT, recompute_ratio=ratio, **options) for ratio in (0.0, 0.3)}
        full = reference.generate(PROMPT, mode="full", max_tokens=8)
    with load_engine(
        "demo", tmp_path / "vllm", backend="vllm", vllm_options=SMALL, on_miss="inline", kv_dtype=kv_dtype
    ) as engine:
        for text in TEXTS:
            assert engine.precompute(text) > 0
        found = {ratio: engine.generate(PROMPT, recompute_ratio=ratio, **options) for ratio in (0.0, 0.3, 1.0)}
    assert found[1.0].token_ids == full.token_ids
    assert found[1.0].report.num_recomputed_tokens == sum(chunk.num_tokens for chunk in found[1.0].report.chunks)
    for ratio, theirs in expected.items():
        ours = found[ratio]
        assert ours.token_ids == theirs.token_ids
        assert ours.report.num_recomputed_tokens == theirs.report.num_recomputed_tokens
        assert [chunk.kv_dtype for chunk in ours.report.chunks] == [kv_dtype] * 3
        assert ours.report.chunks == theirs.report.chunks
    hf, vllm = DiskStore(tmp_path / "hf"), DiskStore(tmp_path / "vllm")
    assert sorted(hf.keys()) == sorted(vllm.keys())
    for key in hf.keys():  # noqa: SIM118 (a store is not a dict)
        mine, other = vllm.get(key), hf.get(key)
        assert mine.header == other.header
        assert mine.header.kv_dtype == kv_dtype
        for layer in range(other.header.num_layers):
            for one, two in zip(mine.layer(layer), other.layer(layer), strict=True):
                # Rounding of the sums differs between the engines, and may tip a code to its neighbour.
                assert (one - two).abs().max() <= {"int8": 0.02, "fp8": 0.08}[kv_dtype] * two.abs().max()
                assert ((one - two).abs() > 1e-4 * two.abs().max()).float().mean() < 0.01
