"""The connector's parts that need no engine: its settings, its reports and its counters."""

import pytest

from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.connector import BlendReports, ConnectorConfig
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
