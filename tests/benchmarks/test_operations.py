"""A blended request starts few operations on a GPU: none more a layer, and none more a chunk, than is known here."""

from __future__ import annotations

import pytest

from benchmarks.operations import measure

MOST = {  # operations a layer, and of each further chunk in 12 layers; host reads
    "full": (38.0, 0.0, 0),
    "reuse": (55.0, 0.0, 1),
    "ask": (140.5, 1.0, 4),
    "cacheblend": (61.0, 7.5, 3),
}


@pytest.mark.slow
def test_no_more_operations_and_host_reads_than_known():
    for name, counted in measure().items():
        most = MOST[name]
        assert counted["per_layer"] <= most[0], name
        assert counted["per_chunk"] <= most[1], name
        assert sum(counted["host_reads"].values()) <= most[2], counted["host_reads"]
