"""Metrics of the connector's two halves, collected until vLLM takes them. `metrics` defines the names.

Depends on reports and stores' counters, not on vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import replace

from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore, StoreCounters
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore

log = logging.getLogger(__name__)

LABEL = "|"  # separates the name of a series from the value of its label
_LIST_SHARE = 0.05  # largest share of a thread's time for listing the files on disk
_LIST_EVERY_S = 2.0  # shortest time between two lists


class MetricSource:
    """Metrics that are collected until vLLM takes them, by the names of their series.

    `counts` are counters. `observed` are the values for histograms. `gauges` are current values.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[float]] = {}
        self.gauges: dict[str, float] = {}
        self._reported_gauges: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to the named counters."""
        self.counts.update(counts)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self.observed.setdefault(name, []).append(value)

    def take_changes(self) -> dict[str, float | list[float]]:
        """Return the counts and observed values since the last call, and the gauges that have changed since then."""
        gauges = dict(self.gauges)
        counts = {name: count for name, count in self.counts.items() if count}
        changed = {name: value for name, value in gauges.items() if self._reported_gauges.get(name) != value}
        taken: dict[str, float | list[float]] = {**counts, **self.observed, **changed}
        self._reported_gauges = gauges
        self.counts.clear()
        self.observed = {}
        return taken


class RequestMetrics(MetricSource):
    """Metrics of requests, which the connector's scheduler side collects."""

    def record_filled_request(self, report: BlendReport, *, observed: bool) -> None:
        """Count a request whose context has been filled: increase the counters by the numbers in its `report`.

        If `observed` is True and reuse was not refused, also add the report's seconds to the histograms.
        """
        self.add(
            refused_requests=bool(report.refused_reason),
            load_seconds=report.load_s,
            fuse_seconds=report.fuse_s,
            damaged_entries=report.num_damaged_entries,
            recomputed_tokens=report.num_recomputed_tokens,
            reused_tokens=report.num_reused_tokens,
        )
        for name in ("load", "fuse", "stall") if observed and not report.refused_reason else ():
            self.observe(f"request_{name}_seconds", getattr(report, f"{name}_s"))

    def record_first_token(self, mode: str, arrival_s: float) -> None:
        """Add a request's TTFT to the histogram of `mode`: the seconds from `arrival_s` (since the epoch) until now."""
        self.observe(f"request_ttft_seconds{LABEL}{mode}", max(0.0, time.time() - arrival_s))

    def set_queue_length(self, length: int) -> None:
        """Set the number of requests whose context is not filled yet."""
        self.gauges["blend_queue"] = length


class TierMetrics(MetricSource):
    """Metrics of this process's memory and disk tiers (hits, evictions and sizes), and of its remote tier, if any.

    With `shows_bytes`, this process also reports the sizes of the tiers, and whether the store's folder was deleted.
    Set `shows_bytes` in only one of the processes that share a disk. `take_changes` is quick, because another thread
    measures the disk tier.
    """

    def __init__(self, store: TieredStore, *, shows_bytes: bool) -> None:
        super().__init__()
        self._tiers: dict[str, KVStore] = {
            "disk" if tier.find_tier(MemoryStore) is None else "memory": tier
            for tier in store.tiers
            if not tier.is_remote
        }
        self._remote, self._remote_seen = next(iter(store.find_tiers(RemoteStore)), None), StoreCounters()
        self._shows_bytes = shows_bytes
        self._seen = {name: StoreCounters() for name in self._tiers}
        self._listing: threading.Thread | None = None
        self._due_s = 0.0
        self._disk = store.find_tier(DiskStore) if shows_bytes else None

    def take_changes(self) -> dict[str, float | list[float]]:
        """Return the changed metrics: counts as increments since the last call, sizes as their new values."""
        for name, tier in self._tiers.items():
            now, seen = replace(tier.counters), self._seen[name]
            self._seen[name] = now
            self.counts[f"tier_hits{LABEL}{name}"] += now.num_hits - seen.num_hits
            self.counts[f"tier_evictions{LABEL}{name}"] += now.num_evicted - seen.num_evicted
        if self._remote is not None:
            now, seen = replace(self._remote.counters), self._remote_seen
            self._remote_seen = now
            self.add(
                remote_hits=now.num_hits - seen.num_hits,
                remote_failures=now.num_failures - seen.num_failures,
                remote_dropped_writes=now.num_dropped - seen.num_dropped,
                damaged_entries=now.num_damaged - seen.num_damaged,
            )
        if self._shows_bytes:
            self._update_sizes()
        return super().take_changes()

    def _update_sizes(self) -> None:
        for name, tier in self._tiers.items():
            if tier.find_tier(MemoryStore) is not None:
                self.gauges[f"store_bytes{LABEL}{name}"] = tier.nbytes()
            elif time.monotonic() >= self._due_s and (self._listing is None or not self._listing.is_alive()):
                self._listing = threading.Thread(target=self._list, args=(name, tier), daemon=True)
                self._listing.start()

    def _list(self, name: str, tier: KVStore) -> None:
        start_s = time.monotonic()
        self._check_folder()
        self.gauges[f"store_bytes{LABEL}{name}"] = tier.nbytes()
        end_s = time.monotonic()
        self._due_s = end_s + max(_LIST_EVERY_S, (end_s - start_s) / _LIST_SHARE)

    def _check_folder(self) -> None:
        """Log that the store's folder was deleted, or restored."""
        if self._disk is None:
            return
        is_missing = self._disk.is_missing()
        was_missing = bool(self.gauges.get("store_missing"))
        if is_missing and not was_missing:
            log.error(
                "the store %s was deleted while this server runs, so requests are computed in full. Restore it, or "
                "restart the server and ingest again: ragblend ingest DOCS",
                self._disk.root,
            )
        elif was_missing and not is_missing:
            log.warning("the store %s was restored", self._disk.root)
        self.gauges["store_missing"] = float(is_missing)
