"""What no benchmark can measure is refused when its configuration is made, before a model is built."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import throughput
from benchmarks.ingest import IngestConfig
from benchmarks.load import LoadConfig
from benchmarks.throughput import ThroughputConfig
from ragblend.errors import UsageError
from ragblend.lab.bench import ttft
from ragblend.lab.bench.common.configs import QualityConfig, TtftConfig

UNKNOWN: list[dict[str, Any]] = [{"shape": "llama-400b"}, {"threads": 0}]
OUTSIDE: list[dict[str, Any]] = [{"ratio": 2.0}, {"dtype": "int3"}]
NO_MODE: list[dict[str, Any]] = [{"modes": ()}, {"modes": ("fuse",)}, {"rules": ("best",)}]
BESIDE_A_SHAPE: dict[str, Any] = {"model": "demo", "shape": "llama-50m"}
REFUSED: dict[type, list[dict[str, Any]]] = {
    IngestConfig: [*UNKNOWN, {"num_chunks": 0}, {"repeats": 0}, {"contexts": ("both",)}],
    LoadConfig: [
        *(*UNKNOWN, *OUTSIDE, {"rule": "best"}, {"slowdowns": (0.0,)}, {"repeats": 0}),
        *({"backend": "cuda"}, {"vllm_options": {"seed": 1}}),
    ],
    QualityConfig: [
        *({"part": "best"}, {"ratios": (2.0,)}, {"rules": ("best",)}, {"rules": ()}, {"modes": ()}, {"dtype": "int3"}),
        *({"num_questions": 0}, {"num_chunks": 0}, {"chunk_tokens": 0}),
        {"contexts": ("both",)},
    ],
    ThroughputConfig: [
        *(*UNKNOWN, *OUTSIDE, *NO_MODE, BESIDE_A_SHAPE, {"num_requests": 0}, {"pool": 3}),
        *({"rates": ()}, {"rates": (1.0, 0.0)}, {"bound_s": 0.0}),
    ],
    TtftConfig: [
        *(*UNKNOWN, *OUTSIDE, *NO_MODE, BESIDE_A_SHAPE, {"rules": ()}, {"repeats": 0}, {"tier": "tape"}),
    ],
}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        pytest.param(config, change, id=f"{config.__name__}: {change}")
        for config in REFUSED
        for change in REFUSED[config]
    ],
)
def test_a_value_out_of_range_is_refused_before_anything_is_built(config, change):
    with pytest.raises(UsageError):
        config(**change)


@pytest.mark.parametrize(
    ("subject", "config"), [(throughput.BENCHMARK, ThroughputConfig()), (ttft.BENCHMARK, TtftConfig(shape="tiny"))]
)
def test_a_missing_matplotlib_is_named_before_anything_is_measured(subject, config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    unmeasured = subject._replace(measure=lambda *_: pytest.fail("measured first"))
    with pytest.raises(ImportError, match=r"ragblend\[plot\]"):
        unmeasured.run(config, plot=tmp_path / "plot.png", echo=lambda line: None)


def test_load_blends_at_the_ratio_of_its_rule_unless_one_is_given():
    ratios = [LoadConfig(rule=rule).blend_ratio for rule in ("auto", "ask", "cacheblend")]
    assert [*ratios, LoadConfig(ratio=0.3).blend_ratio] == [0.05, 0.05, 0.15, 0.3]
