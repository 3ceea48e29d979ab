"""The host queues layers and does not wait for them: torch's attention reads the chosen rows, kernels read nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_models import FAMILIES, make_model

from benchmarks.operations import DeviceLooks
from ragblend.engine.fusion.attention import positions_on_host
from ragblend.engine.fusion.check_layers import schedule_check_layers
from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, FusePlan, Placement
from ragblend.engine.fusion.prefill import prefill_chunks
from ragblend.engine.fusion.rules import CHECK_LAYER, RULES
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.transformers.layers import TransformersLayers

CHUNKS, QUESTION = (90, 70, 80), 9
TOTAL = sum(CHUNKS) + QUESTION


def looks(family: str, rule: str, num_layers: int) -> Counter[str]:
    """Return host reads by place, for one prompt blended by a model of `num_layers` layers."""
    model_class, changes = FAMILIES[family]
    model = make_model(model_class, **{**changes, "num_hidden_layers": num_layers})
    layers = TransformersLayers(model)
    assert len(layers._layouts) == num_layers  # found once, by the self-check at load
    ids = torch.randint(3, 300, (TOTAL,), generator=torch.Generator().manual_seed(0))
    placements, start = [], 0
    for count in CHUNKS:
        header = KVHeader("key", "model", (), tuple(ids[start : start + count].tolist()), num_layers, "float32")
        (kv,) = prefill_chunks(layers, FusedKV.allocate(layers.kv_shapes, 0, layers.like), [header])
        placements.append(Placement(kv, start, exact=start == 0))
        start += count
    checks = schedule_check_layers(RULES[rule], 0.2, CHECK_LAYER, num_layers)
    probe_layers = RULES[rule].probe_layers(num_layers)
    plan = FusePlan(ids, tuple(placements), RULES[rule], 0.2, checks, probe_layers=probe_layers)
    fused = FusedKV.allocate(layers.kv_shapes, TOTAL, layers.like)
    to = (num_layers, layers.place_keys, fused.write, layers.device)
    with LayerLoader(placements, *to, together=True, correctable=(layers, fused)) as loader, DeviceLooks() as seen:
        fuse(layers, plan, fused, loader)
    return seen.places


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 has windows, and scores that no kernel computes
@pytest.mark.parametrize("rule", sorted(RULES))
def test_torchs_attention_reads_rows_once_however_many_layers(rule, family):
    few, many = looks(family, rule, 6), looks(family, rule, 12)
    if RULES[rule].is_gradual:  # Gemma 2 has no global layer 0, so it is measured from layer 1 on, too
        assert (sum(few.values()), sum(many.values())) == (5, 11)
        return
    assert few == many
    assert sum(few.values()) <= 2, f"rows before and after the selection: {few}"


def test_a_host_read_is_counted_once_per_tensor():
    rows = torch.arange(5)
    with DeviceLooks() as seen:
        positions_on_host(rows)
        positions_on_host(rows)
        positions_on_host(torch.arange(5))
    assert list(seen.places.values()) == [2]  # once for each tensor
