"""bench ingest: the real ingestion beside the stock forward."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragblend.lab.bench.common.configs import IngestConfig
from ragblend.lab.bench.ingest import BENCHMARK, run_ingest, table_lines

SMALL: dict[str, Any] = {"shape": "tiny", "num_chunks": 6, "chunk_tokens": 24, "repeats": 2}
RUN_KEYS = {"mode", "chunks", "tokens", "seconds", "tokens_per_s"}


def test_both_ways_get_through_the_same_chunks():
    result = run_ingest(IngestConfig(**SMALL))
    prefill, ingest = result["runs"]
    done = [(run["mode"], run["chunks"], run["tokens"]) for run in result["runs"]]
    assert done == [("prefill", 6, 144), ("ingest", 6, 144)]
    assert ingest["tokens_per_s"] == pytest.approx(144 / ingest["seconds"])
    assert prefill["tokens_per_s"] == pytest.approx(144 / prefill["seconds"])
    assert result["ingest_over_prefill"] > 0
    assert len(table_lines(result)) == 5


def test_the_json_object_has_the_keys_that_were_agreed():
    lines: list[str] = []
    found = BENCHMARK.run(IngestConfig(**{**SMALL, "repeats": 1}), echo=lines.append)
    speeds = [run["tokens_per_s"] for run in found["runs"]]
    assert found["ingest_over_prefill"] == pytest.approx(speeds[1] / speeds[0])
    assert json.loads(json.dumps(found)) == found
    assert (found["schema_version"], found["command"]) == (2, "bench ingest")
    assert all(set(run) == RUN_KEYS for run in found["runs"])
    assert any(line.startswith("cpu") for line in lines)


def test_contexts_are_ingested_in_turns_with_none():
    result = run_ingest(IngestConfig(**{**SMALL, "contexts": ("similar",)}))
    modes = ["prefill", "ingest", "ingest similar"]
    assert [run["mode"] for run in result["runs"]] == modes
    assert list(result["context_over_none"]) == ["similar"]
    assert result["context_over_none"]["similar"] > 1
    assert len(table_lines(result)) == 7
