"""Ingestion contexts inside vLLM: the versions that the transformers engine makes, found under the same keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL
from tiny_prompts import CHUNKS

from ragblend import Chunk, Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.precompute import ingest, open_engine_index, precompute_documents, precompute_index

pytestmark = pytest.mark.timeout(600)
TEXTS = (*(chunk.text for chunk in CHUNKS), "that theory and the other theory is what the chunk is in the question of")


@pytest.fixture(scope="module")
def model(checkpoint):
    """Its chunks are joined by a blank line."""
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("contexts")
    options = {"vllm_options": SMALL | {"block_size": 32}, "dtype": "float32"}
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


@pytest.mark.parametrize("policy", ["similar", "none"])
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
            assert len(mine) == (8 if policy == "similar" else 4)
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


def test_a_damaged_chunk_of_the_context_is_computed_again(vllm):
    a, b, c = "the answer to that theory", "is the question", "of the other chunk"
    for text in (a, b):
        vllm.precompute(Chunk(text, context="none"))
    similar = Chunk(c, context="similar", context_texts=(a, b))
    vllm.precompute(similar)
    disk = next(tier for tier in vllm.store.tiers if isinstance(tier, DiskStore))
    before = [tuple(disk.get(vllm.key(similar)).layer(layer)) for layer in range(6)]
    vllm.forget(similar)
    key = vllm.key(Chunk(a, context="none"))
    path = next(disk.kv_dir.glob(f"*/{key}*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    vllm.precompute(similar)
    for (keys, values), layer in zip(before, range(6), strict=True):
        found = disk.get(vllm.key(similar)).layer(layer)
        torch.testing.assert_close(found.keys, keys, atol=1e-3, rtol=1e-3)  # the first chunk is exact either way
        torch.testing.assert_close(found.values, values, atol=1e-3, rtol=1e-3)


def test_what_frameworks_bring_is_stored_behind_similar_chunks(vllm, model, tmp_path):
    brought = ("the answer of that question", "is that question in the theory", "what is that theory")
    vllm.set_context_policy("similar")
    with load_engine(model, tmp_path / "kv", dtype="float32", context="similar") as ours:
        for engine in (vllm, ours):
            assert precompute_documents(brought, engine).num_new_kv == 6
            assert precompute_documents(brought, engine).num_new_kv == 0
        for text in brought:
            key = ours.key(Chunk(text, context="similar"))
            found, expected = (engine.store.get(key) for engine in (vllm, ours))
            assert found.header == expected.header
            torch.testing.assert_close(found.layer(1).keys, expected.layer(1).keys, atol=1e-3, rtol=1e-3)
