"""How many of a prompt's tokens the scheduler's half of the connector finds stored. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tier_support import make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.kv import KVSpec
from ragblend.engine.transformers.checkpoints import AS_IT_IS
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.scheduler import BlendScheduler

CHUNKS = [make_kv(seed, namespace="acme") for seed in range(2)]  # of 4 tokens each, behind a prefix of one
PROMPT = [1, *CHUNKS[0].header.token_ids, *CHUNKS[1].header.token_ids]


def num_matched_tokens(monkeypatch: pytest.MonkeyPatch, store: Path, prompt: list[int], namespace: str) -> int:
    """Of `prompt`, whose chunks are stored in `store` in the namespace "acme"."""
    disk = DiskStore(store, fsync=False)
    for kv in CHUNKS:
        disk.put(kv)
    module = "ragblend.engine.vllm.scheduler"
    monkeypatch.setattr(f"{module}.model_fingerprint", lambda model: "model")
    monkeypatch.setattr(f"{module}.model_shape", lambda model: KVSpec.from_kv_shapes("float32", [(2, 4, 4)] * 2))
    monkeypatch.setattr(f"{module}.machine_facts_of", lambda config: {})
    monkeypatch.setattr(f"{module}.served_options", lambda model, place: AS_IT_IS)
    params: dict[str, Any] = {"spans": [[1, 5], [5, 9]], "namespace": namespace, "ratio": 0.5}
    request = SimpleNamespace(
        request_id="1",
        prompt_token_ids=prompt,
        kv_transfer_params={"ragblend": params},
        cache_salt=None,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        update_block_hashes=lambda: None,
        num_preemptions=0,
    )
    config = ConnectorConfig(store=str(store), context="none")
    model = SimpleNamespace(model=str(store / "no model"), tokenizer=None)
    scheduler = BlendScheduler(SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=4)), config)
    try:
        scheduler.on_new_request(request)
        while (found := scheduler.num_matched_tokens(request, 0)[0]) is None:
            scheduler.wait_for_pending()
        return found
    finally:
        scheduler.close()


@pytest.mark.parametrize(("namespace", "expected"), [("acme", 9), ("", 0), ("other", 0)])
def test_only_chunks_of_the_requests_namespace_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, namespace: str, expected: int
) -> None:
    assert num_matched_tokens(monkeypatch, tmp_path, [*PROMPT, 2], namespace) == expected


def test_of_a_prompt_that_ends_with_a_chunk_that_chunk_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM samples the first token from the computed end of the prompt."""
    assert num_matched_tokens(monkeypatch, tmp_path, PROMPT, "acme") == 5
