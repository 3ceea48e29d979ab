"""Prometheus metrics of ragblend in a vLLM server's `/metrics`.

vLLM collects the counts of the connector's two halves (`metric_sources`) at each engine step, and sends them to the
front end. There each engine of a data-parallel server has its own series, with vLLM's label `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ragblend.engine.vllm.metric_sources import LABEL

COUNTERS = {
    "requests": "Requests with ragblend's parameters, or with chunks in their prompt",
    "refused_requests": "Requests of these that were served by ordinary prefill",
    "chunk_hits": "Chunks whose stored KV was used",
    "chunk_misses": "Chunks without stored KV, or whose stored KV could not be read",
    "reused_tokens": "Prompt tokens whose stored KV was used without recomputing",
    "recomputed_tokens": "Chunk tokens whose stored KV was recomputed",
    "refined_tokens": "Chunk tokens recomputed after the first token of an answer",
    "damaged_entries": "Damaged entries that were read",
    "ingested_chunks": "Chunks computed and stored",
    "remote_hits": "Chunks that were read from the remote tier",
    "remote_failures": "Failures and timeouts of the remote tier",
    "remote_dropped_writes": "Chunks that were stored on this machine, but not sent to the remote tier",
    "load_seconds": "Seconds spent reading and placing stored KV",
    "fuse_seconds": "Seconds spent recomputing",
}
"""Descriptions of the counters, each exported as `vllm:ragblend_NAME`."""

# The label of a series ("" for none) and its description.
LABELLED_COUNTERS = {
    "left_requests": ("reason", "Requests that were left to vLLM unchanged"),
    "tier_hits": ("tier", "Stored chunks read from the tier"),
    "tier_evictions": ("tier", "Stored chunks evicted from the tier"),
}
HISTOGRAMS = {
    "request_ttft_seconds": ("mode", "Seconds from arrival to the first token, of ragblend's requests"),
    "request_match_seconds": ("", "Seconds spent finding stored chunks in the prompt, per request"),
    "request_load_seconds": ("", "Seconds spent reading and placing stored KV, per request"),
    "request_fuse_seconds": ("", "Seconds spent recomputing, per request"),
    "request_stall_seconds": ("", "Seconds of waiting for stored KV, per request"),
}
GAUGES = {
    "store_bytes": ("tier", "Bytes of stored KV in the tier; for the disk, when its files were last listed"),
    "store_missing": ("", "1 while the store's folder is deleted, else 0"),
    "blend_queue": ("", "Requests whose context is not filled yet"),
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_SERIES = {name: ("", text) for name, text in COUNTERS.items()} | LABELLED_COUNTERS | HISTOGRAMS | GAUGES


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """Metrics since the last report, as `{"name" or "name|label": value}`.

    The value of a counter is its increase. The value of a histogram is the list of observed values. The value of a
    gauge is the latest number.
    """

    def reset(self) -> None:
        """Remove all metrics."""
        self.data: dict[str, Any] = {}

    def merge(self, series: Mapping[str, Any]) -> None:
        """Merge the metrics of another part of the engine: add counters, join histogram values, replace gauges."""
        for key, value in series.items():
            if isinstance(value, list):
                self.data[key] = [*self.data.get(key, ()), *value]
            elif key.partition(LABEL)[0] in GAUGES:
                self.data[key] = value
            else:
                self.data[key] = self.data.get(key, 0) + value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge `other` into this object, and return it."""
        self.merge(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return counters and gauges, and the means of histograms, for vLLM's log line."""
        means = {key: sum(value) / max(1, len(value)) for key, value in self.data.items() if isinstance(value, list)}
        return {key: round(value, 3) for key, value in {**self.data, **means}.items()}

    def is_empty(self) -> bool:
        """Return True if no counter has increased, no value was observed and no gauge has changed."""
        return not any(value or key.partition(LABEL)[0] in GAUGES for key, value in self.data.items())


class BlendPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exporter of the Prometheus series `vllm:ragblend_*`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._values = dict(per_engine)
        self._series: dict[str, Any] = {}
        for name, (label, documentation) in _SERIES.items():
            named = (f"vllm:ragblend_{name}", documentation)
            labels = [*labelnames, *filter(None, [label])]
            if name in HISTOGRAMS:
                self._series[name] = self._histogram_cls(*named, labelnames=labels, buckets=BUCKETS_S)
            elif name in GAUGES:
                # Every front end process receives the same values, so the latest one is exported.
                self._series[name] = self._gauge_cls(*named, labelnames=labels, multiprocess_mode="mostrecent")
            else:
                self._series[name] = self._counter_cls(*named, labelnames=labels)
        for name in COUNTERS:
            for values in per_engine.values():
                self._series[name].labels(*values)  # exports 0 before the first count

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the metrics of one interval to the series of an engine."""
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition(LABEL)
            if name in self._series:
                series = self._series[name].labels(*self._values[engine_idx], *filter(None, [label]))
                if name in HISTOGRAMS:
                    for each in value:
                        series.observe(each)
                elif name in GAUGES:
                    series.set(value)
                else:
                    series.inc(value)
