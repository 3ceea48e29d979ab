"""Ingestion contexts inside vLLM: the variants that the transformers engine makes, found under the same keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SIZES, SMALL
from tiny_models import FAMILIES, make_model
from tiny_prompts import CHUNKS

from ragblend import Chunk, Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.precompute import ingest, open_engine_index, precompute_documents, precompute_index

pytestmark = pytest.mark.timeout(600)
TEXTS = (*(chunk.text for chunk in CHUNKS), "that theory and the other theory is what the chunk is in the question of")


@pytest.fixture(scope="module")
def model(make_tokenizer, tmp_path_factory):
    """A random model whose tokenizer makes 2,064 tokens of the neutral text."""
    path = tmp_path_factory.mktemp("model")
    model_class, changes = FAMILIES["llama"]
    make_model(model_class, **{**SIZES, **changes, "max_position_embeddings": 4096}).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("contexts")
    options = {"vllm_options": SMALL | {"block_size": 32, "max_model_len": 4096}, "dtype": "float32"}
    with load_engine(model, place / "kv", backend="vllm", **options) as engine:
        yield engine


def fill(engine: Any, place: Path) -> Path:
    """An index of TEXTS, a document each; its folder."""
    docs = place / "docs"
    docs.mkdir()
    for number, text in enumerate(TEXTS):
        (docs / f"{number}.txt").write_text(text)
    ingest(docs, engine, place / "index", chunk_size=64, embedder="hashing")
    return place / "index"


@pytest.fixture(scope="module")
def index(vllm, tmp_path_factory):
    return fill(vllm, tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("policy", ["neutral", "none"])
def test_vllm_makes_and_finds_the_versions_that_transformers_makes(policy, vllm, index, model, tmp_path):
    with open_engine_index(index, vllm, create=False) as opened:
        precompute_index(vllm, opened, policy)
        root = next(tier.root for tier in vllm.store.tiers if isinstance(tier, DiskStore))
        assert vllm.store.read_context_policy() == policy
        with load_engine(model, tmp_path / "kv", dtype="float32", on_miss="inline") as ours:
            precompute_index(ours, opened, policy)
            theirs = {header.key: header for header in DiskStore(root).headers()}
            mine = {header.key: header for header in DiskStore(tmp_path / "kv").headers()}
            assert set(theirs) == set(mine)
            assert len(mine) == (8 if policy == "neutral" else 4)
            for key, header in mine.items():
                assert theirs[key] == header
                for layer in range(header.num_layers):
                    found, expected = DiskStore(root).get(key).layer(layer), ours.store.get(key).layer(layer)
                    torch.testing.assert_close(found.keys, expected.keys, atol=1e-3, rtol=1e-3)
                    torch.testing.assert_close(found.values, expected.values, atol=1e-3, rtol=1e-3)
            prompt = Prompt(TEXTS[:3], "what is the theory?")
            vllm.reset_prefix_cache()
            report = vllm.generate(prompt, mode="reuse", max_tokens=2).report
            assert [chunk.context for chunk in report.chunks] == ["none", policy, policy]
            assert [chunk.exact for chunk in report.chunks] == [True, False, False]
            for mode in ("reuse", "blend"):
                answers = [
                    engine.generate(prompt, mode=mode, rule="cacheblend", max_tokens=6) for engine in (vllm, ours)
                ]
                assert answers[0].token_ids == answers[1].token_ids
                assert [chunk.context for chunk in answers[0].report.chunks] == [
                    chunk.context for chunk in answers[1].report.chunks
                ]


def test_what_frameworks_bring_is_stored_alone_and_after_the_neutral_text(vllm, model, tmp_path):
    brought = ("the answer of that question", "is that question in the theory", "what is that theory")
    vllm.set_context_policy("neutral")
    with load_engine(model, tmp_path / "kv", dtype="float32", context="neutral") as ours:
        for engine in (vllm, ours):
            assert precompute_documents(brought, engine).num_new_kv == 6
            assert precompute_documents(brought, engine).num_new_kv == 0
        for text in brought:
            key = ours.key(Chunk(text, context="neutral"))
            found, expected = (engine.store.get(key) for engine in (vllm, ours))
            assert found.header == expected.header
            torch.testing.assert_close(found.layer(1).keys, expected.layer(1).keys, atol=1e-3, rtol=1e-3)
