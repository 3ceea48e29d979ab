"""What each half of the connector counts for `/metrics`, until vLLM takes it. The names are in `metrics`.

Knows requests by their report and stores by their counters. Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import replace

from ragblend.engine.report import BlendReport
from ragblend.engine.store.base import KVStore, StoreCounters
from ragblend.engine.store.metadata import MODELS_DIR
from ragblend.engine.store.tiered import TieredStore

log = logging.getLogger(__name__)

LABEL = "|"  # between the name of a series and its label's value
_LIST_SHARE = 0.05  # of a thread's time, to list the disk's files
_LIST_EVERY_S = 2.0  # at most that often


class RequestMetrics:
    """What the scheduler's half counts: `counts` by name, and what it observed of single requests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[float]] = {}
        self._queue = 0
        self._reported_queue = 0

    def add(self, **counts: float) -> None:
        """Add to the named counters."""
        self.counts.update(counts)

    def record_filled(self, report: BlendReport, *, observed: bool) -> None:
        """Count a request whose context has been filled. If `observed`, also add it to the histograms."""
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
        """The first token is there of a request that arrived at `arrival_s`, since the epoch."""
        self.observe(f"request_ttft_seconds{LABEL}{mode}", max(0.0, time.time() - arrival_s))

    def set_queue_length(self, length: int) -> None:
        """How many requests have a context that is still to be filled."""
        self._queue = length

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram."""
        self.observed.setdefault(name, []).append(value)

    def take(self) -> dict[str, float | list[float]]:
        """All of it since the last call."""
        taken: dict[str, float | list[float]] = {**self.counts, **self.observed}
        if self._queue != self._reported_queue:
            taken["blend_queue"] = self._reported_queue = self._queue
        self.counts.clear()
        self.observed = {}
        return taken


class TierMetrics:
    """What the memory and the disk tier of this process did since the last look, and how much they hold.

    The disk's files are listed in a thread, because the engine's steps wait for this one. `shows_bytes`: of several
    processes over one disk, one reports its size, and whether its folder was deleted.
    """

    def __init__(self, store: TieredStore, *, shows_bytes: bool) -> None:
        self._tiers: dict[str, KVStore] = {
            "disk" if tier.memory_tier is None else "memory": tier for tier in store.tiers
        }
        self._shows_bytes = shows_bytes
        self._seen = {name: StoreCounters() for name in self._tiers}
        self._nbytes: dict[str, int] = {}
        self._reported_nbytes: dict[str, int] = {}
        self._listing: threading.Thread | None = None
        self._due_s = 0.0
        self._disk = store.disk_tier if shows_bytes else None
        self._had_notes = False
        self._is_missing: bool | None = None  # not looked for yet
        self._reported_missing: bool | None = None

    def take(self) -> dict[str, float]:
        """Series that have changed since the last call."""
        found: dict[str, float] = {}
        for name, tier in self._tiers.items():
            now, seen = replace(tier.counters), self._seen[name]
            self._seen[name] = now
            for series, count in (
                ("tier_hits", now.num_hits - seen.num_hits),
                ("tier_evictions", now.num_evicted - seen.num_evicted),
            ):
                if count:
                    found[f"{series}{LABEL}{name}"] = count
        if self._shows_bytes:
            self._update_sizes()
            nbytes = dict(self._nbytes)
            found |= {
                f"store_bytes{LABEL}{name}": n for name, n in nbytes.items() if self._reported_nbytes.get(name) != n
            }
            self._reported_nbytes = nbytes
            if self._is_missing != self._reported_missing:
                self._reported_missing = self._is_missing
                found["store_missing"] = float(bool(self._is_missing))
        return found

    def _update_sizes(self) -> None:
        for name, tier in self._tiers.items():
            if tier.memory_tier is not None:
                self._nbytes[name] = tier.nbytes()
            elif time.monotonic() >= self._due_s and (self._listing is None or not self._listing.is_alive()):
                self._listing = threading.Thread(target=self._list, args=(name, tier), daemon=True)
                self._listing.start()

    def _list(self, name: str, tier: KVStore) -> None:
        start_s = time.monotonic()
        self._look_for_folder()
        self._nbytes[name] = tier.nbytes()
        end_s = time.monotonic()
        self._due_s = end_s + max(_LIST_EVERY_S, (end_s - start_s) / _LIST_SHARE)

    def _look_for_folder(self) -> None:
        """Log when the store's folder is deleted, and when it is back.

        A writer makes the folder again, so the notes on models, which a store has from its first server on, are looked
        for once they were seen.
        """
        if self._disk is None:
            return
        has_notes = (self._disk.root / MODELS_DIR).is_dir()
        self._had_notes = self._had_notes or has_notes
        is_missing = not (has_notes if self._had_notes else self._disk.root.is_dir())
        if is_missing and not self._is_missing:
            log.error(
                "the store %s was deleted while this server runs. Requests whose chunks it lacks are computed in full. "
                "Put it back, or start the server again and ingest again: ragblend ingest DOCS",
                self._disk.root,
            )
        elif self._is_missing and not is_missing:
            log.warning("the store %s is back", self._disk.root)
        self._is_missing = is_missing
