"""The breaker opens after failures in a row, probes once per pause, and waits longer for a server that lies."""

from __future__ import annotations

from ragblend.engine.store.remote.breaker import CircuitBreaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened(clock: Clock, **options: float) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=2, pause_s=1.0, max_pause_s=4.0, clock=clock, **options)
    breaker.record_failure()
    assert breaker.is_closed
    breaker.record_failure()
    assert breaker.state == "open"
    return breaker


def test_the_circuit_opens_after_consecutive_failures_only():
    breaker = CircuitBreaker(threshold=2)
    for _ in range(5):
        breaker.record_failure()
        breaker.record_success()
    assert breaker.is_closed
    opened(Clock())


def test_one_probe_is_sent_per_pause():
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.claim_probe()
    assert breaker.wait_s() == 1.0
    clock.now_s += 1
    assert [breaker.claim_probe() for _ in range(3)] == [True, False, False]
    assert breaker.state == "half-open"
    breaker.record_probe_success()
    assert breaker.is_closed


def test_the_pause_doubles_until_a_request_succeeds():
    clock = Clock()
    breaker = opened(clock)
    pauses = [breaker.wait_s()]
    for _ in range(3):  # the server answers every ping, and fails every request
        clock.now_s += breaker.wait_s()
        assert breaker.claim_probe()
        breaker.record_probe_success()
        breaker.record_failure()
        pauses.append(breaker.wait_s())
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    clock.now_s += breaker.wait_s()
    assert breaker.claim_probe()
    breaker.record_probe_success()
    breaker.record_success()
    breaker.record_failure()
    assert breaker.is_closed
    breaker.record_failure()
    assert breaker.wait_s() == 1.0


def test_late_news_of_old_requests_change_nothing():
    breaker = opened(Clock())
    breaker.record_failure()
    breaker.record_success()
    assert (breaker.state, breaker.wait_s(), breaker.num_opened) == ("open", 1.0, 1)
