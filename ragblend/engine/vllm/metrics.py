"""What `/metrics` of a vLLM server counts of ragblend, in the form that vLLM collects it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Requests that asked for ragblend",
    "refused_requests": "Requests that asked for ragblend and were served by ordinary prefill",
    "chunk_hits": "Chunks whose stored KV was used",
    "chunk_misses": "Chunks without stored KV",
    "reused_tokens": "Prompt tokens whose stored KV was used as it is",
    "recomputed_tokens": "Chunk tokens whose stored KV was recomputed",
    "damaged_entries": "Stored chunks that turned out damaged",
    "ingested_chunks": "Chunks computed and stored",
    "remote_hits": "Chunks that came from the remote tier",
    "remote_failures": "Times the remote tier failed or took too long",
    "remote_dropped_writes": "Chunks that were stored here and not sent to the remote tier",
    "load_seconds": "Seconds spent reading and placing stored KV",
    "fuse_seconds": "Seconds spent recomputing",
}
"""What `/metrics` counts, each as `vllm:ragblend_NAME`."""


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """The counts of COUNTERS since the last report."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to the named counters."""
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Sum, in place."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class BlendPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:ragblend_*` counters."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(f"vllm:ragblend_{name}", documentation, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
