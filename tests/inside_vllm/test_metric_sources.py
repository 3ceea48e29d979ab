"""The counts of `/metrics` are those of the requests' reports: hits, misses, tokens, seconds, tiers. In process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
from harness import PREFIX, add, ask, connector_scheduler, engine, ingest, make_known, random_ids, report, watch_counts

from ragblend.engine.matching import LEAST_QUOTE
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.connector import BlendReports
from ragblend.engine.vllm.metric_sources import LABEL
from ragblend.engine.vllm.metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED_COUNTERS, BlendPromMetrics, BlendStats

pytestmark = pytest.mark.smoke

CHUNKS = [random_ids(40, seed) for seed in (2, 3, 4)]
UNSTORED = random_ids(30, 9)


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = tmp_path_factory.mktemp("kv")
    make_known(store, checkpoint("llama"), [UNSTORED])
    with engine(checkpoint("llama"), store, skip_tokenizer_init=True) as llm:
        halves = (connector_scheduler(llm.llm_engine), get_kv_transfer_group())
        llm.taken = [watch_counts(half) for half in halves]
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        yield llm


def counted(llm: Any) -> dict[str, Any]:
    """Return the metrics since the last call. A request without chunks takes the last ones."""
    ask(llm, random_ids(8, 5), max_tokens=2)
    found = BlendStats()
    for half in llm.taken:
        found.merge(half.data)
        half.reset()
    return found.data


def prompt(chunks: list[list[int]], tail: int = 6) -> list[int]:
    return [*PREFIX, *(token for chunk in chunks for token in chunk), *random_ids(tail, 50)]


@pytest.mark.parametrize("mode", ["full", "prefix"])
def test_modes_that_look_for_nothing_miss_nothing(llm, mode):
    counted(llm)
    ids = prompt([*CHUNKS, UNSTORED])
    ask(llm, ids, {"mode": mode})
    found = counted(llm)
    assert (found["requests"], found.get("chunk_hits", 0), found.get("chunk_misses", 0)) == (1, 0, 0)


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_a_chunk_that_is_not_stored_is_one_miss(llm, mode):
    counted(llm)
    ids = prompt([*CHUNKS[:2], UNSTORED, CHUNKS[2]])
    got = report(ask(llm, ids, {"mode": mode}))
    found = counted(llm)
    assert (got["num_chunk_hits"], got["num_chunks"]) == (3, 4)
    assert (found["chunk_hits"], found["chunk_misses"]) == (3, 1)
    assert found["reused_tokens"] == got["num_reused_tokens"]


def test_an_aborted_request_adds_no_miss_for_what_is_stored(llm, monkeypatch):
    # Both lookups end before their request does, on a machine under load as well.
    monkeypatch.setattr("ragblend.engine.vllm.scheduler_side.scheduler.PATIENCE_S", 60.0)
    counted(llm)
    ids = prompt([*CHUNKS, UNSTORED])
    for name, num_steps in (("900001", 0), ("900002", 1)):
        give_up(llm, name, ids, {"mode": "blend"}, num_steps)
    give_up(llm, "900003", [*PREFIX, *random_ids(46, 77)], {"mode": "ingest", "span": [5, 45]}, 0)
    found = Counter({name: value for name, value in counted(llm).items() if name in COUNTERS})
    assert found["requests"] == 3
    assert (found["chunk_misses"], found["ingested_chunks"]) == (2, 0)  # the unstored one, twice
    assert found["chunk_hits"] in (0, 3)  # 3 if the second request's context was filled


def give_up(llm: Any, name: str, ids: list[int], params: dict[str, Any], num_steps: int) -> None:
    add(llm, name, ids, params, 4)
    for _ in range(num_steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([name])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def test_a_stored_chunk_that_ends_the_prompt_is_no_miss(llm):
    counted(llm)
    long = random_ids(LEAST_QUOTE + 1, 8)  # a shorter one would be a quote in the question
    ingest(llm, PREFIX, long)
    counted(llm)
    ask(llm, prompt([CHUNKS[0], long], tail=0), {"mode": "blend"})
    found = counted(llm)
    assert (found["chunk_hits"], found.get("chunk_misses", 0)) == (2, 0)


def test_every_chunk_is_told_what_was_recomputed_of_it(llm):
    ids = prompt(CHUNKS)
    got = report(ask(llm, ids, {"mode": "blend", "ratio": 0.5}))
    each = [chunk["num_recomputed_tokens"] for chunk in got["chunks"]]
    assert sum(each) == got["num_recomputed_tokens"] > 0
    assert each[0] == 0  # exact
    assert all(each[1:])


def test_histograms_gauges_and_tiers_are_filled(llm):
    counted(llm)
    ids = prompt(CHUNKS)
    got = [report(ask(llm, ids, {"mode": mode})) for mode in ("blend", "reuse")]
    ask(llm, ids, {"mode": "prefix"})
    found = counted(llm)
    for name in ("load", "fuse", "stall"):
        assert found[f"request_{name}_seconds"] == [each[f"{name}_s"] for each in got]
    for mode in ("blend", "reuse", "prefix"):
        (ttft_s,) = found[f"request_ttft_seconds{LABEL}{mode}"]
        assert 0 < ttft_s < 600
    assert found[f"tier_hits{LABEL}memory"] >= 6  # what was ingested here is in memory
    ingest(llm, PREFIX, random_ids(20, 60))
    end_s = time.monotonic() + 60
    while f"store_bytes{LABEL}disk" not in found and time.monotonic() < end_s:
        time.sleep(0.2)
        found |= counted(llm)
    assert found[f"store_bytes{LABEL}disk"] > 0


def test_every_series_reaches_prometheus_by_engine():
    from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
    from prometheus_client import Counter as PromCounter
    from vllm.config import VllmConfig

    stats, other = BlendStats(), BlendStats()
    stats.merge({"requests": 1, f"tier_hits{LABEL}disk": 2, "blend_queue": 5, "request_load_seconds": [0.2]})
    other.merge({"requests": 2, f"tier_hits{LABEL}disk": 3, "blend_queue": 1, "request_load_seconds": [0.4]})
    stats.aggregate(other)
    assert stats.reduce() == {"requests": 3, "tier_hits|disk": 5, "blend_queue": 1, "request_load_seconds": 0.3}
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (PromCounter, Gauge, Histogram)}
    metrics = BlendPromMetrics(VllmConfig(), types, ["engine"], {0: ["0"], 1: ["1"]})
    for name, (label, _) in {**LABELLED_COUNTERS, **HISTOGRAMS, **GAUGES}.items():
        for index in (0, 1):
            metrics.observe({f"{name}{LABEL}x" if label else name: [0.25] if name in HISTOGRAMS else 7}, index)
    metrics.observe(stats.data, 1)
    shown = generate_latest(registry).decode()
    assert 'vllm:ragblend_requests_total{engine="1"} 3.0' in shown
    assert 'vllm:ragblend_tier_hits_total{engine="1",tier="disk"} 5.0' in shown
    assert 'vllm:ragblend_request_ttft_seconds_count{engine="0",mode="x"} 1.0' in shown
    assert 'vllm:ragblend_blend_queue{engine="0"} 7.0' in shown
    assert 'vllm:ragblend_blend_queue{engine="1"} 1.0' in shown


def test_reports_of_several_ranks_become_one():
    first, second = BlendReport("blend", fuse_s=1.0), BlendReport("blend", fuse_s=2.0)
    merged = BlendReports({"a": first}).aggregate(BlendReports({"a": second, "b": second}, weights_updated=True))
    assert merged.reports == {"a": first, "b": second}
    assert merged.weights_updated


def test_log_lines_look_as_vllms_do():
    script = (
        "import logging, vllm.logger; from ragblend.engine.vllm.plugin import use_vllm_logger\n"
        "use_vllm_logger(); use_vllm_logger(); vllm.logger._configure_vllm_root_logger()\n"
        "logging.getLogger('ragblend.engine.vllm.scheduler_side.scheduler').warning('is full')"
    )
    left_out = ("VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in (said.stdout + said.stderr).splitlines() if "is full" in line]
    assert len(lines) == 1
    assert re.match(r"(\(\w+ pid=\d+\) )?WARNING \d\d-\d\d \d\d:\d\d:\d\d \[.*\] is full$", lines[0]), lines
