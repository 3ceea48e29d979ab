"""The start-up check: passes on a model that is driven rightly, and notices every way of driving it wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ask, connector_worker, engine, random_ids, tokens
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.vllm.plugin import loaded_model
from ragblend.engine.vllm.worker_side.layers import VllmLayers
from ragblend.engine.vllm.worker_side.self_check import self_check
from ragblend.errors import UnsupportedModelError


def shifted_keys(layers: VllmLayers, *args: Any) -> None:
    layer, keys, rows = args
    VllmLayers.rotate_keys(layers, layer, keys, rows + 1)


def swapped_kv(layers: VllmLayers, *args: Any) -> LayerKV:
    keys, values = VllmLayers.project_kv(layers, *args)
    return LayerKV(values, keys)


def one_request(layers: VllmLayers, rows: Any, *whose: Any) -> Any:
    """Scattered rows as one request: what a causal flag would do, right-aligned."""
    return [layers._make_call(slice(0, len(rows)), [(0, len(rows))], rows, *whose)]


def earlier_question(layers: VllmLayers, *args: Any) -> Any:
    layer, hidden, rows, *rest = args
    return VllmLayers.run_probe_layer(layers, layer, hidden, rows - 1, *rest)


def unscaled(layers: VllmLayers, *args: Any) -> Any:
    attention = layers._own[args[0]]
    scale, attention.scale = attention.scale, 1.0  # only while the question is asked
    try:
        return VllmLayers.run_probe_layer(layers, *args)
    finally:
        attention.scale = scale


def nothing(*args: Any) -> None:
    """Stored KV that never gets into the cache."""


def test_the_check_notices_what_would_be_wrong(checkpoint, tmp_path, monkeypatch):
    with engine(checkpoint("qwen3"), tmp_path, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        layers = connector_worker().layers
        self_check(layers, 300, 100, "it")
        breakages = {
            "rotate_keys": shifted_keys,
            "project_kv": swapped_kv,
            "split_calls": one_request,
            "write": nothing,
        }
        asked = [("run_probe_layer", earlier_question), ("run_probe_layer", unscaled)]
        for name, broken in [*breakages.items(), *asked]:
            with monkeypatch.context() as patch:
                patch.setattr(layers, name, lambda *args, broken=broken: broken(layers, *args))
                with pytest.raises(UnsupportedModelError, match="fails the exactness check"):
                    self_check(layers, 300, 100, "it")
        with pytest.raises(UnsupportedModelError, match="needs 4"):
            self_check(layers, 300, 3, "it")
        ids = random_ids(50, 1)
        assert tokens(ask(llm, ids)) == tokens(ask(llm, ids))


class SharedPlans:
    """The backend's metadata builder, but for one buffer that holds the lengths of the call that was planned last."""

    def __init__(self, *args: Any) -> None:
        self._builder, self._lengths = CPUAttentionMetadataBuilder(*args), torch.zeros(1024, dtype=torch.int32)

    def build(self, *args: Any, **options: Any) -> Any:
        plan = self._builder.build(*args, **options)
        own = self._lengths[: len(plan.seq_lens)]
        plan.seq_lens = own.copy_(plan.seq_lens)
        return plan


def test_the_check_notices_calls_that_share_a_plan(checkpoint, tmp_path, monkeypatch):
    with engine(checkpoint("llama"), tmp_path, skip_tokenizer_init=True) as llm:
        connector = get_kv_transfer_group()
        monkeypatch.setattr(CPUAttentionBackend, "get_builder_cls", staticmethod(lambda: SharedPlans))
        built = (loaded_model(), llm.llm_engine.vllm_config, connector._kv_cache_config)
        with pytest.raises(UnsupportedModelError, match=r"scattered tokens in several calls.*--attention-backend"):
            self_check(VllmLayers(*built), 300, 100, "it")
