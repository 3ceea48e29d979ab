"""Inside vLLM, too, a blend by Triton's kernels starts few operations: no more a layer or a chunk than known here."""

from __future__ import annotations

import pytest

from benchmarks.operations import measure

MOST = {  # operations a layer, and of each further chunk in 12 layers
    "reuse": (1.0, 0.0),
    "ask": (62.5, 0.0),
    "cacheblend": (33.0, 0.0),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_more_operations_and_host_reads_than_known():
    pytest.importorskip("triton")
    counts = measure("vllm", with_kernels=True)
    for name, most in MOST.items():
        counted = counts[name]
        assert counted["per_layer"] <= most[0], name
        assert counted["per_chunk"] <= most[1], name
        # Only the report reads: the chosen tokens and the attention's shares.
        assert all("fusion/plan.py" in place for place in counted["host_reads"]), counted["host_reads"]
