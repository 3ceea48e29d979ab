"""The connector's parts that need no engine: its settings, its reports and its counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.connector import BlendConnector, BlendReports, ConnectorConfig
from ragblend.engine.vllm.metrics import COUNTERS, BlendStats
from ragblend.errors import UsageError

pytestmark = pytest.mark.smoke


def test_settings_are_read_from_json_values():
    config = ConnectorConfig.from_extra_config({"store": "kv", "prefix_ids": [1, 2], "ratio": 0.2, "rule": "random"})
    assert config.prefix_ids == (1, 2)
    assert config.ratio == 0.2
    assert ConnectorConfig.from_extra_config({"ratio": "auto"}).ratio == "auto"


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"shop": "kv"}, "shop"), ({"ratio": 2}, "2"), ({"rule": "magic"}, "magic"), ({"memory_gib": -1}, "memory_gib")],
)
def test_a_wrong_setting_is_named(extra, named):
    with pytest.raises(UsageError, match=named):
        ConnectorConfig.from_extra_config(extra)


def test_reports_of_several_ranks_become_one():
    first, second = BlendReport("blend", fuse_s=1.0), BlendReport("blend", fuse_s=2.0)
    merged = BlendReports({"a": first}).aggregate(BlendReports({"a": second, "b": second}, weights_updated=True))
    assert merged.reports == {"a": first, "b": second}
    assert merged.weights_updated


def test_counters_add_up_and_reach_prometheus():
    stats = BlendStats()
    assert stats.is_empty()
    stats.merge({"chunk_hits": 2, "fuse_seconds": 0.5})

    def sent(stats: BlendStats) -> dict[str, Any]:
        """What vLLM takes to the front end; 0.28 as it is."""
        return stats.to_dict() if hasattr(stats, "to_dict") else stats.data

    total = BlendConnector.build_kv_connector_stats(sent(stats)).aggregate(stats)
    assert total.reduce() == {"chunk_hits": 4, "fuse_seconds": 1.0}
    metrics = BlendConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.observe(sent(total), 0)
    labels = {"model_name": "m", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:ragblend_chunk_hits_total", labels) == 4
    assert REGISTRY.get_sample_value("vllm:ragblend_fuse_seconds_total", labels) == 1.0
    for name in COUNTERS:
        assert REGISTRY.get_sample_value(f"vllm:ragblend_{name}_total", labels) is not None
