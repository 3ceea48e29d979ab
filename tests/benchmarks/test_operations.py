"""A blended request starts few operations on a GPU: none more a layer, and none more a chunk, than is known here."""

from __future__ import annotations

import pytest

from benchmarks.operations import measure

MOST = {  # operations a layer, and of each further chunk in 12 layers; host reads before the logits
    True: {"full": (38.0, 0.0, 0), "reuse": (40.0, 0.0, 0), "ask": (70.0, 0.0, 0), "cacheblend": (40.0, 0.0, 0)},
    False: {"full": (38.0, 0.0, 0), "reuse": (51.1, 0.0, 1), "ask": (125.6, 5.0, 2), "cacheblend": (57.1, 7.5, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "torch alone"])
def test_no_more_operations_and_host_reads_than_known(with_kernels):
    if with_kernels:
        pytest.importorskip("triton")
    for name, counted in measure("transformers", with_kernels=with_kernels).items():
        most = MOST[with_kernels][name]
        assert counted["per_layer"] <= most[0], name
        assert counted["per_chunk"] <= most[1], name
        # The report reads the chosen tokens and the attention's shares, once the logits are computed.
        reads = {place: count for place, count in counted["host_reads"].items() if "fusion/plan.py" not in place}
        assert sum(reads.values()) <= most[2], reads
