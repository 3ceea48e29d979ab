"""What `/metrics` of a vLLM server says of ragblend, in the form that vLLM collects it.

Both halves of the connector count; vLLM adds up what they counted since the last step, takes it to the front end, and
there each engine (data parallel) has its own series, told apart by vLLM's label `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ragblend.engine.vllm.metric_sources import LABEL

COUNTERS = {
    "requests": "Requests with ragblend's parameters, or in which stored chunks were found",
    "refused_requests": "Those of them that were served by ordinary prefill",
    "chunk_hits": "Chunks whose stored KV was used",
    "chunk_misses": "Chunks that were looked for and had no stored KV, or none that could be read",
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


class _Labelled(NamedTuple):
    label: str  # "" for none
    documentation: str


LABELLED_COUNTERS = {
    "left_requests": _Labelled("reason", "Requests that were left to vLLM as they came"),
    "tier_hits": _Labelled("tier", "Stored chunks found by the tier that had them, read ahead or for a request"),
    "tier_evictions": _Labelled("tier", "Stored chunks that left a tier to make room"),
}
HISTOGRAMS = {
    "request_ttft_seconds": _Labelled("mode", "Arrival until the first token, of ragblend's requests"),
    "request_match_seconds": _Labelled("", "Finding stored chunks in the ids of a prompt, per request"),
    "request_load_seconds": _Labelled("", "Reading and placing stored KV, per request"),
    "request_fuse_seconds": _Labelled("", "Recomputing, per request"),
    "request_stall_seconds": _Labelled("", "Waiting for stored KV that was not there in time, per request"),
}
GAUGES = {
    "store_bytes": _Labelled("tier", "Stored KV by tier; of the disk as it was when its files were last listed"),
    "store_missing": _Labelled("", "1 while the store's folder is deleted, else 0"),
    "blend_queue": _Labelled("", "Requests whose context is still to be filled, those being filled included"),
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_SERIES = {**LABELLED_COUNTERS, **HISTOGRAMS, **GAUGES}


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted, observed and seen since the last report, as `{"name" or "name|label": value}`.

    A counter's value is a number, a histogram's the list of what was observed, a gauge's the latest.
    """

    def reset(self) -> None:
        """Start again from nothing."""
        self.data: dict[str, Any] = {}

    def add(self, **counts: float) -> None:
        """Add to the named counters."""
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def take(self, series: Mapping[str, Any]) -> None:
        """Add what another part of the engine has: counts are summed, observations joined, gauges replaced."""
        for key, value in series.items():
            if isinstance(value, list):
                self.data[key] = [*self.data.get(key, ()), *value]
            elif key.partition(LABEL)[0] in GAUGES:
                self.data[key] = value
            else:
                self.data[key] = self.data.get(key, 0) + value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Sum, in place."""
        self.take(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: sums, and means of what was observed."""
        means = {key: sum(value) / max(1, len(value)) for key, value in self.data.items() if isinstance(value, list)}
        return {key: round(value, 3) for key, value in {**self.data, **means}.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted, and no gauge has moved."""
        return not any(value or key.partition(LABEL)[0] in GAUGES for key, value in self.data.items())


class BlendPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:ragblend_*`: counters, histograms and gauges."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._values = dict(per_engine)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(f"vllm:ragblend_{name}", documentation, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine.items()}
        self._series: dict[str, Any] = {}
        for name, (label, documentation) in _SERIES.items():
            named = (f"vllm:ragblend_{name}", documentation)
            labels = [*labelnames, *filter(None, [label])]
            if name in HISTOGRAMS:
                self._series[name] = self._histogram_cls(*named, labelnames=labels, buckets=BUCKETS_S)
            elif name in GAUGES:
                # Front ends of several processes each know the same: the latest counts.
                self._series[name] = self._gauge_cls(*named, labelnames=labels, multiprocess_mode="mostrecent")
            else:
                self._series[name] = self._counter_cls(*named, labelnames=labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition(LABEL)
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._series:
                series = self._series[name].labels(*self._values[engine_idx], *filter(None, [label]))
                if name in HISTOGRAMS:
                    for each in value:
                        series.observe(each)
                elif name in GAUGES:
                    series.set(value)
                else:
                    series.inc(value)
