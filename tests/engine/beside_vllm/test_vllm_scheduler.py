"""How many of a prompt's tokens the scheduler's half of the connector finds stored. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tier_support import make_kv

from ragblend.catalog.ledger import Ledger
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVSpec
from ragblend.engine.transformers.checkpoints import AS_IT_IS
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import parse_params
from ragblend.engine.vllm.scheduler_side.lookup import ChunkLookup
from ragblend.engine.vllm.scheduler_side.scheduler import BlendScheduler
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.render import Renderer

CHUNKS = [make_kv(seed, tokens=80, namespace="acme") for seed in (0, 20)]  # behind a prefix of one token
PROMPT = [1, *CHUNKS[0].header.token_ids, *CHUNKS[1].header.token_ids]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer, tmp_path_factory):
    """A model's tokenizer on disk."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def num_matched_tokens(
    monkeypatch: pytest.MonkeyPatch, store: Path, tokenizer: Path, prompt: list[int], namespace: str
) -> int:
    """Of `prompt`, whose chunks are stored in `store` in the namespace "acme", and known there and in "known"."""
    disk = DiskStore(store, fsync=False)
    fingerprint = Renderer(load_tokenizer(str(tokenizer))[0]).fingerprint
    for kv in CHUNKS:
        disk.put(kv)
        with Ledger(store / CATALOG_FILE) as ledger:
            for each in ("acme", "known"):
                ledger.add_ids([(f"text {kv.header.key}", kv.header.token_ids)], fingerprint, each)
    module = "ragblend.engine.vllm.scheduler_side.scheduler"
    monkeypatch.setattr(f"{module}.model_fingerprint", lambda model: "model")
    monkeypatch.setattr(f"{module}.model_kv_spec", lambda model: KVSpec.from_kv_shapes("float32", [(2, 4, 4)] * 2))
    monkeypatch.setattr(f"{module}.machine_facts_of", lambda config: {})
    monkeypatch.setattr(f"{module}.vllm_model_options", lambda model, place: AS_IT_IS)
    params: dict[str, Any] = {"namespace": namespace, "ratio": 0.5}
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
    model = SimpleNamespace(model=str(store / "no model"), tokenizer=str(tokenizer))
    scheduler = BlendScheduler(SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=4)), config)
    try:
        scheduler.on_new_request(request)
        while (found := scheduler.num_matched_tokens(request, 0)[0]) is None:
            scheduler.wait_for_pending()
        return found
    finally:
        scheduler.close()


@pytest.mark.parametrize(("namespace", "expected"), [("acme", 161), ("known", 0), ("", 0), ("other", 0)])
def test_only_chunks_of_the_requests_namespace_are_found(monkeypatch, tmp_path, tokenizer, namespace, expected):
    asked, peek = set(), DiskStore.peek

    def recording(disk: DiskStore, key: str) -> Any:
        asked.add(key)
        return peek(disk, key)

    monkeypatch.setattr(DiskStore, "peek", recording)
    assert num_matched_tokens(monkeypatch, tmp_path, tokenizer, [*PROMPT, 2], namespace) == expected
    # Other namespaces' entries are not requested, so that the response time does not reveal them.
    assert asked.isdisjoint(kv.header.key for kv in CHUNKS) == (namespace != "acme")
    assert bool(asked) == (namespace in ("acme", "known"))


def test_the_last_token_of_a_prompt_is_computed_after_a_final_chunk(monkeypatch, tmp_path, tokenizer):
    """vLLM samples the first token from the computed end of the prompt."""
    assert num_matched_tokens(monkeypatch, tmp_path, tokenizer, PROMPT, "acme") == 160


@pytest.mark.parametrize(
    "sent",
    [
        {"mode": "ingest", "span": [1, 4]},
        {"mode": "reuse", "ratio": 0.5},
    ],
)
def test_a_request_changes_nothing_outside_its_namespace(tmp_path, sent):
    """Such as the context policy, which is the operator's and decides what is stored for all namespaces."""
    disk = DiskStore(tmp_path, fsync=False)
    disk.put_context_policy("none")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    lookup = ChunkLookup(disk, ConnectorConfig(store=str(tmp_path)), "model")
    try:
        lookup.start(PROMPT[:9], parse_params({"namespace": "acme", **sent}), asks_remote=False).result(10)
        assert lookup.context_policy() == "none"
    finally:
        lookup.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
