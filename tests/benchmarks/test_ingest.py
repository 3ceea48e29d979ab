"""bench ingest: the real ingestion beside the stock forward."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.ingest import BENCHMARK, IngestConfig, run_ingest, table_lines

SMALL: dict[str, Any] = {"shape": "tiny", "num_chunks": 6, "chunk_tokens": 24, "repeats": 2}
RUN_KEYS = {"mode", "chunks", "tokens", "seconds", "tokens_per_s"}


def test_both_ways_ingest_the_same_chunks_and_json_has_the_documented_keys():
    lines: list[str] = []
    found = BENCHMARK.run(IngestConfig(**{**SMALL, "repeats": 1}), echo=lines.append)
    prefill, ingest = found["runs"]
    done = [(run["mode"], run["chunks"], run["tokens"]) for run in found["runs"]]
    assert done == [("prefill", 6, 144), ("ingest", 6, 144)]
    assert all(run["tokens_per_s"] == pytest.approx(144 / run["seconds"]) for run in found["runs"])
    assert found["ingest_over_prefill"] == pytest.approx(ingest["tokens_per_s"] / prefill["tokens_per_s"])
    assert len(table_lines(found)) == 5
    assert json.loads(json.dumps(found)) == found
    assert (found["schema_version"], found["command"]) == (2, "bench ingest")
    assert all(set(run) == RUN_KEYS for run in found["runs"])
    assert any(line.startswith("cpu") for line in lines)


def test_contexts_are_ingested_in_turns_with_none():
    result = run_ingest(IngestConfig(**{**SMALL, "contexts": ("neutral",)}))
    modes = ["prefill", "ingest", "ingest neutral"]
    assert [run["mode"] for run in result["runs"]] == modes
    assert list(result["context_over_none"]) == ["neutral"]
    assert result["context_over_none"]["neutral"] > 1
    assert len(table_lines(result)) == 7
