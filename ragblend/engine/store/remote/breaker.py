"""A circuit breaker: stops requests after several consecutive failures, and probes before it lets them pass again.

Pure state over a monotonic clock, so a wall clock that is set back has no effect. Does not depend on networks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Decides whether requests are sent to a server that may fail. Thread-safe.

    A closed breaker lets all requests pass. An open breaker lets none pass; after a pause, one probe (a ping) is due. A
    half-open breaker lets none pass, either, and waits for the answer to the probe.

    `threshold` consecutive failures open the breaker for `pause_s` seconds. A request that exceeds its time limit is a
    failure, too. A successful probe closes the breaker. Each time the breaker opens again, the pause is doubled, up to
    `max_pause_s`. Only a successful request resets the pause, because a server may answer pings but no requests.
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
        """The current state."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """True if requests may pass."""
        return self._state == "closed"

    def wait_s(self) -> float:
        """Return the seconds until the next probe is due; 0 if it is due, or if the breaker is closed."""
        with self._lock:
            return max(0.0, self._retry_at_s - self._clock()) if self._state != "closed" else 0.0

    def claim_probe(self) -> bool:
        """Return True if a probe is due, which the caller must now send.

        The caller then calls `record_probe_success` or `record_failure`.
        """
        with self._lock:
            if self._state != "open" or self._clock() < self._retry_at_s:
                return False
            self._state = "half-open"
            return True

    def record_probe_success(self) -> None:
        """Close the breaker. If the next request fails, this one failure opens the breaker again, for longer."""
        with self._lock:
            self._state, self._num_failures = "closed", self._threshold - 1

    def record_success(self) -> None:
        """Record a successful request, which resets the pause and the number of failures."""
        with self._lock:
            if self._state == "closed":  # a request that was sent before the breaker opened is no evidence
                self._num_failures, self._pause_s = 0, self._first_pause_s

    def record_write_success(self) -> None:
        """Record a successful write. It resets the pause if no request has failed since the last successful read."""
        with self._lock:
            if self._state == "closed" and not self._num_failures:
                self._pause_s = self._first_pause_s

    def record_failure(self) -> None:
        """Record that a request or the probe failed, or exceeded its time limit."""
        with self._lock:
            self._num_failures += 1
            if self._state == "open" or (self._state == "closed" and self._num_failures < self._threshold):
                return
            self._state = "open"
            self._retry_at_s = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self.num_opened += 1
