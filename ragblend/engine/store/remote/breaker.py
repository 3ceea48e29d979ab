"""A circuit breaker: after a few failures in a row, stop asking for a while, and probe before asking again.

Pure state over a monotonic clock, so a wall clock that is set back changes nothing. Knows nothing about networks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Closed: everything passes. Open: nothing does, for a pause. Half-open: one probe is out. Thread-safe.

    What takes longer than it may is a failure too. `threshold` failures in a row open it for `pause_s` seconds; each
    further failure doubles the pause, up to `max_pause_s`. A probe that succeeds closes it again, but only a real
    success forgets how long the pause was: a server that answers pings and fails everything else is left alone for
    longer and longer.
    """

    def __init__(
        self,
        threshold: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold, self._first_pause_s, self._max_pause_s = threshold, pause_s, max_pause_s
        self._clock = clock
        self._state: State = "closed"
        self._pause_s = pause_s
        self._num_failures = 0
        self._retry_at_s = 0.0
        self._lock = threading.Lock()
        self.num_opened = 0

    @property
    def state(self) -> State:
        """Where it stands now."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether requests may pass."""
        return self._state == "closed"

    def wait_s(self) -> float:
        """Seconds until the next probe is due; 0 when it is due, or when the breaker is closed."""
        with self._lock:
            return max(0.0, self._retry_at_s - self._clock()) if self._state != "closed" else 0.0

    def claim_probe(self) -> bool:
        """Whether the caller is to send the one probe that is due now; it answers with `record_probe_success` or
        `record_failure`."""
        with self._lock:
            if self._state != "open" or self._clock() < self._retry_at_s:
                return False
            self._state = "half-open"
            return True

    def record_probe_success(self) -> None:
        """The probe came back: requests pass again, and the first failure among them opens it for longer."""
        with self._lock:
            self._state, self._num_failures = "closed", self._threshold - 1

    def record_success(self) -> None:
        """A request came back."""
        with self._lock:
            if self._state == "closed":  # one that was sent before it opened proves nothing about now
                self._num_failures, self._pause_s = 0, self._first_pause_s

    def record_write_success(self) -> None:
        """A write came back: that says nothing about reads, whose failures stay counted."""
        with self._lock:
            if self._state == "closed" and not self._num_failures:
                self._pause_s = self._first_pause_s

    def record_failure(self) -> None:
        """A request or the probe failed, or took too long."""
        with self._lock:
            self._num_failures += 1
            if self._state == "open" or (self._state == "closed" and self._num_failures < self._threshold):
                return
            self._state = "open"
            self._retry_at_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self.num_opened += 1
