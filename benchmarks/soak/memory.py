"""Resident memory of processes during a run, and its growth in MiB per 1,000 requests, with a 95 % interval.

Samples that are a second apart are not independent. Therefore the first third of each series is dropped as warm-up and
the rest is split into blocks of equally many requests. The slope is the Theil-Sen estimate over the blocks' medians.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

NUM_BLOCKS, MIN_PER_BLOCK = 20, 2
EVERY_S = 1.0
WARM_UP = 1 / 3
_MIB = 1 << 20


def rss_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return None


class Sample(NamedTuple):
    """Resident memory after `num_requests` requests."""

    num_requests: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory growth of one process. `slope` and its interval `low` to `high` are in MiB per 1,000 requests.

    They exclude the warm-up, and are None if there are too few samples.
    """

    process: str
    num_samples: int
    num_requests: int  # between the first and the last sample, warm-up included
    first_mib: float
    warm_mib: float  # after the warm-up
    last_mib: float
    max_mib: float
    slope: float | None
    low: float | None
    high: float | None

    @property
    def is_flat(self) -> bool | None:
        """Return True if the slope's interval does not lie above 0; None if there is no slope."""
        return None if self.low is None else self.low <= 0


class Sampler(threading.Thread):
    """Thread that samples the memory of all processes every second until `stop`."""

    def __init__(self, rss_bytes: Callable[[], Mapping[str, int]], num_requests: Callable[[], int]) -> None:
        super().__init__(name="memory", daemon=True)
        self.series: dict[str, list[Sample]] = {}
        self._rss_bytes, self._num_requests = rss_bytes, num_requests
        self._ends = threading.Event()

    def run(self) -> None:
        """Append a sample of each process to `series` every EVERY_S seconds."""
        while not self._ends.wait(EVERY_S):
            now = self._num_requests()
            for process, rss in self._rss_bytes().items():
                self.series.setdefault(process, []).append(Sample(now, rss))

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()
        self.join()


def growth(process: str, samples: Sequence[Sample]) -> Growth:
    """Return the memory growth of one process.

    >>> leaks = growth("x", [Sample(10 * n, (100 + n) << 20) for n in range(300)])
    >>> leaks.slope, leaks.is_flat
    (100.0, False)
    """
    first, last = samples[0].num_requests, samples[-1].num_requests
    warm_from = first + WARM_UP * (last - first)
    warm = [sample for sample in samples if sample.num_requests >= warm_from]
    slope = low = high = None
    blocks = _blocks(warm, min(NUM_BLOCKS, len(warm) // MIN_PER_BLOCK))
    if len(blocks) >= 5:
        from scipy.stats import theilslopes

        found = theilslopes([mib for _, mib in blocks], [thousands for thousands, _ in blocks], 0.95)
        slope, low, high = (round(float(value), 4) for value in (found[0], found[2], found[3]))
    sizes = [round(sample.rss_bytes / _MIB, 2) for sample in samples]
    warm_mib = round(warm[0].rss_bytes / _MIB, 2)
    return Growth(process, len(samples), last - first, sizes[0], warm_mib, sizes[-1], max(sizes), slope, low, high)


def _blocks(samples: Sequence[Sample], count: int) -> list[tuple[float, float]]:
    """Split the samples into `count` blocks of equally many requests. Return their medians (1,000 requests, MiB)."""
    first, last = samples[0].num_requests, samples[-1].num_requests
    if not count or first == last:
        return []
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        part = min(count - 1, int(count * (sample.num_requests - first) / (last - first)))
        parts.setdefault(part, []).append(sample)
    return [
        (median(each.num_requests for each in part) / 1000, median(each.rss_bytes for each in part) / _MIB)
        for part in parts.values()
    ]
