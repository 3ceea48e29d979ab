"""How fast a tier's reads were: running medians, which the loading controller weighs against prefill.

Numbers only; does not depend on tiers, files or servers.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from time import monotonic

READS_KEPT = 31
# A speed is recorded once this much was read, or for this long: that of a small read is only a part of the latency.
_LEAST_BYTES, _LEAST_S = 1 << 20, 1.0
# Longest time without a recorded speed if there is always a read that runs. Then its bytes so far are not counted.
_MOST_S = 10.0


class ReadSpeed:
    """Running medians of a tier's reads: bytes per second, and seconds until a request's first byte. Thread-safe.

    Reads that run at the same time share the line to the tier, so the speed is that of all of them together: their
    bytes divided by the seconds in which at least one ran.

    `range_bytes`: bytes of an entry that the tier reads at once, at least, before any of its layers can be used.
    """

    def __init__(self, range_bytes: float = 0.0) -> None:
        self.range_bytes = range_bytes
        self._rates = deque[float](maxlen=READS_KEPT)
        self._latencies = deque[float](maxlen=READS_KEPT)
        self._num_running = 0
        self._running_since_s = 0.0
        self._nbytes, self._busy_s = 0, 0.0  # since the last recorded speed
        self._lock = threading.Lock()

    @property
    def num_reads(self) -> int:
        """Number of recorded speeds, at most READS_KEPT."""
        return len(self._rates)

    @property
    def bytes_per_s(self) -> float | None:
        """The median speed; None before the first read."""
        with self._lock:
            return median(self._rates) if self._rates else None

    @property
    def latency_s(self) -> float:
        """The median seconds until the first byte; 0 if none was measured."""
        with self._lock:
            return median(self._latencies) if self._latencies else 0.0

    def record(self, nbytes: int, seconds: float) -> None:
        """Record a read, or several that ran one after another."""
        if nbytes > 0 and seconds > 0:
            with self._lock:
                self._rates.append(nbytes / seconds)

    def record_latency(self, seconds: float) -> None:
        """Record the seconds until the first byte of a read."""
        with self._lock:
            self._latencies.append(seconds)

    def begin(self) -> None:
        """A read begins, perhaps beside others. `end` must follow."""
        with self._lock:
            if not self._num_running:
                self._running_since_s = monotonic()
            self._num_running += 1

    def end(self, nbytes: int) -> None:
        """A read of `nbytes` bytes has ended."""
        now_s = monotonic()
        with self._lock:
            self._num_running -= 1
            self._nbytes += nbytes
            self._busy_s += now_s - self._running_since_s
            self._running_since_s = now_s
            is_enough = self._nbytes >= _LEAST_BYTES or self._busy_s >= _LEAST_S
            if self._nbytes and ((is_enough and not self._num_running) or self._busy_s >= _MOST_S):
                self._rates.append(self._nbytes / max(self._busy_s, 1e-9))
                self._nbytes, self._busy_s = 0, 0.0
