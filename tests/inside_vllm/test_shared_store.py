"""Both engines reuse each other's stored KV: same keys, same files, same numbers, and the same answers."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from harness import ask, engine, ingest, random_ids, report, tokens

from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.open import open_store
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.prompt.types import Prompt

TEXTS = [
    "the theory of the first chunk answers the question",
    "another chunk, and the theory of that question: what is the answer?",
]


def load(model: str, store: Path) -> TransformersEngine:
    return load_engine(model, store=store, dtype="float32", on_miss="inline")


@pytest.mark.parametrize("family", ["llama3_scaling", "qwen3"])
def test_both_engines_store_the_same_kv_under_the_same_key(family, checkpoint, tmp_path):
    model = checkpoint(family)
    with load(str(model), tmp_path / "hf") as transformers:
        prefix_ids, chunks = transformers.default_prefix_ids, map(transformers.renderer.chunk_ids, TEXTS)
        for text in TEXTS:
            transformers.precompute(text)
    with engine(model, tmp_path / "vllm") as llm:
        for chunk_ids in chunks:
            ingest(llm, list(prefix_ids), list(chunk_ids))
    theirs, ours = DiskStore(tmp_path / "hf"), DiskStore(tmp_path / "vllm")
    assert sorted(theirs.keys()) == sorted(ours.keys())
    assert theirs.models().keys() == ours.models().keys()
    for key in theirs.keys():  # noqa: SIM118 (a store is not a dict)
        expected, found = theirs.get(key), ours.get(key)
        assert found.header == expected.header
        for layer in range(expected.header.num_layers):
            for mine, other in zip(found.layer(layer), expected.layer(layer), strict=True):
                assert (mine - other).abs().max() <= 1e-5 * other.abs().max()  # float32: rounding alone


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_each_engine_blends_with_the_others_files(family, checkpoint, tmp_path):
    model = checkpoint(family)
    asked = Prompt(TEXTS, "what is the theory?")
    options = {"recompute_ratio": 0.3, "rule": "cacheblend_k", "max_tokens": 8}
    with load(str(model), tmp_path / "hf") as transformers:
        prompt = transformers.match(asked)
        for text in TEXTS:
            transformers.precompute(text)
        own = transformers.generate(asked, **options)
    params = {"mode": "blend", "rule": "cacheblend_k", "ratio": 0.3}
    with engine(model, tmp_path / "hf", {"prefix_ids": []}) as llm:
        lent = ask(llm, prompt.token_ids, params)
    with engine(model, tmp_path / "vllm") as llm:
        for run in prompt.runs:
            ingest(llm, list(prompt.prefix_ids), list(run.chunk_ids))
    with load(str(model), tmp_path / "vllm") as transformers:
        borrowed = transformers.generate(asked, **options)
    assert report(lent)["num_chunk_hits"] == borrowed.report.num_chunk_hits == 2
    count = len(own.token_ids)  # transformers stops at the end token
    assert own.token_ids == borrowed.token_ids == tokens(lent)[:count]
    for name in ("num_recomputed_tokens", "num_reused_tokens", "charged_budget"):
        assert report(lent)[name] == pytest.approx(getattr(own.report, name), rel=0.2), name


@pytest.mark.parametrize("connector", [False, True])
def test_a_stopped_engine_lets_go_of_its_model(connector, checkpoint, tmp_path):
    from vllm.model_executor.models.llama import LlamaForCausalLM

    with engine(checkpoint("llama"), tmp_path if connector else None, skip_tokenizer_init=True) as llm:
        held = weakref.ref(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model())
        assert isinstance(held(), LlamaForCausalLM)
        ask(llm, random_ids(20, 1))
    assert llm is not None  # the engine may still be referenced
    assert held() is None


def test_the_memory_tier_answers_the_second_time(checkpoint, tmp_path):
    prefix, chunk = random_ids(4, 1), random_ids(40, 2)
    ids, params = [*random_ids(34, 3), *chunk, 9, 9], {"mode": "reuse"}
    with engine(checkpoint("llama"), tmp_path, {"prefix_ids": prefix}) as llm:
        assert [ingest(llm, prefix, chunk)["num_chunk_hits"] for _ in range(2)] == [0, 1]
        first, second = ask(llm, ids, params), ask(llm, ids, params)
    (found,) = report(first)["chunks"]
    assert found["prefix_match"] == "approximate"  # behind the server's default prefix
    assert tokens(first) == tokens(second)
    assert torch.is_tensor(open_store(tmp_path).get(next(iter(DiskStore(tmp_path).keys()))).layer(0).keys)
