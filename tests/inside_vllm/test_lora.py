"""A server with LoRA adapters: requests of the base model are blended, and those of an adapter are left to vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import (
    PREFIX,
    SIZES,
    assert_same_answer,
    connector_scheduler,
    connector_worker,
    engine,
    greedy,
    ingest,
    random_ids,
    report,
    tokens,
    watch_counts,
)
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
WAYS: list[dict[str, Any]] = [
    {"mode": "blend", "rule": "cacheblend", "ratio": 1.0},
    {"mode": "blend", "rule": "cacheblend", "ratio": 0.3},
    {"mode": "blend", "rule": "ask", "ratio": 0.3},
]
# On a CPU vLLM adds the last slot's adapter to requests without one that share a batch with an adapter
# (`vllm.lora.ops.torch_ops` index by -1). Of two slots one stays empty here.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
OPTIONS = {**LORA, "max_model_len": 512, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
RANK, TARGETS = 8, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head")


@pytest.fixture(scope="module")
def adapter(stock, tmp_path_factory):
    """An adapter of the Llama, of its attention, a part of its MLP, and its head."""
    path, randomly = tmp_path_factory.mktemp("adapter"), torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for module, linear in stock("llama").named_modules():
        if module.endswith(TARGETS):
            for part, shape in (("A", (RANK, linear.in_features)), ("B", (linear.out_features, RANK))):
                weights[f"base_model.model.{module}.lora_{part}.weight"] = torch.randn(shape, generator=randomly) * 0.1
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": TARGETS, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("adapter", 1, str(path))


def ask_together(llm: Any, asked: list[tuple[LoRARequest | None, dict[str, Any] | None, int]]) -> list[Any]:
    """Greedy answers to the same prompt, all given at once: adapter, ragblend's parameters and length of each."""
    llm.reset_prefix_cache()
    sampling = [greedy(params, length, logprobs=20) for _, params, length in asked]
    prompts, chosen = [{"prompt_token_ids": IDS}] * len(asked), [adapter for adapter, *_ in asked]
    return list(llm.generate(prompts, sampling, lora_request=chosen, use_tqdm=False))


@pytest.fixture(scope="module")
def plain(checkpoint, adapter):
    """Answers of vLLM without ragblend: of the base model, and of the adapter."""
    with engine(checkpoint("llama"), None, **OPTIONS) as llm:
        return ask_together(llm, [(None, None, 40), (adapter, None, 40)])


@pytest.fixture(scope="module")
def without_lora(checkpoint, tmp_path_factory):
    """Blended answers of a server without LoRA."""
    with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv")) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        return ask_together(llm, [(None, way, 8) for way in WAYS])


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory, plain, without_lora):
    """A server with LoRA and the chunks, whose blends take many steps. The other engines have ended before."""
    extra = {"mode": "blend", "slice_tokens": 8}
    with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv"), extra, **OPTIONS) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        yield llm


def test_requests_of_the_base_are_blended_while_adapters_answer(served, plain, without_lora, adapter):
    counts = watch_counts(connector_scheduler(served.llm_engine))
    asked = [(adapter, None, 40), *((None, way, 8) for way in WAYS), (None, None, 40), (adapter, None, 40)]
    first, *blended, default, second = ask_together(served, asked)
    base, theirs = plain
    assert tokens(base) != tokens(theirs)
    for found in (first, second):
        assert_same_answer(found, theirs, 1e-3)
        assert found.kv_transfer_params is None
    assert tokens(blended[0]) == tokens(base)[:8]
    assert report(default)["num_chunk_hits"] == 2
    for found, expected in zip(blended, without_lora, strict=True):
        assert_same_answer(found, expected, 1e-3)
        for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "charged_budget", "rule"):
            assert report(found)[name] == report(expected)[name], name
    assert [report(each)["num_chunk_hits"] for each in blended] == [2, 2, 2]
    assert counts.data["left_requests|lora"] == 2
    assert counts.data["requests"] == 4


def test_an_adapter_reuses_nothing_even_if_its_request_asks_for_it(served, plain, adapter):
    counts = watch_counts(connector_scheduler(served.llm_engine))
    (answer,) = ask_together(served, [(adapter, {**WAYS[1], "namespace": "theirs"}, 40)])
    assert_same_answer(answer, plain[1], 1e-3)
    found = report(answer)
    assert "adapter" in found["refused_reason"]
    assert found["num_reused_tokens"] == 0
    assert counts.data["left_requests|lora"] == counts.data["refused_requests"] == 1
    stored = {"mode": "ingest", "span": [len(PREFIX), len(PREFIX) + len(CHUNKS[0])]}
    (answer,) = ask_together(served, [(adapter, stored, 1)])
    assert "adapter" in report(answer)["refused_reason"]
    assert counts.data.get("ingested_chunks", 0) == 0


def test_the_share_of_keys_and_values_counts_no_weight_twice(served):
    share = connector_worker().layers.kv_share
    hidden, width = SIZES["hidden_size"], SIZES["head_dim"]
    fused = (4 + 2 + 2) * width * hidden
    assert share == pytest.approx(
        fused / (fused + 4 * width * hidden + 3 * hidden * SIZES["intermediate_size"]), rel=0.05
    )
