"""The breaker opens after failures in a row, probes once per pause, and waits longer for a server that lies."""

from __future__ import annotations

from ragblend.engine.store.remote.breaker import CircuitBreaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened(clock: Clock, **options: float) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=2, pause_s=1.0, max_pause_s=4.0, clock=clock, **options)
    breaker.failed()
    assert breaker.is_closed
    breaker.failed()
    assert breaker.state == "open"
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(threshold=2)
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.is_closed
    opened(Clock())


def test_one_probe_is_sent_per_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.claim_probe()
    assert breaker.wait_s() == 1.0
    clock.now_s += 1
    assert [breaker.claim_probe() for _ in range(3)] == [True, False, False]
    assert breaker.state == "half-open"
    breaker.probed()
    assert breaker.is_closed


def test_the_pause_doubles_until_a_request_succeeds() -> None:
    clock = Clock()
    breaker = opened(clock)
    pauses = [breaker.wait_s()]
    for _ in range(3):  # the server answers every ping, and fails every request
        clock.now_s += breaker.wait_s()
        assert breaker.claim_probe()
        breaker.probed()
        breaker.failed()
        pauses.append(breaker.wait_s())
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    clock.now_s += breaker.wait_s()
    assert breaker.claim_probe()
    breaker.probed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.is_closed
    breaker.failed()
    assert breaker.wait_s() == 1.0


def test_late_news_of_old_requests_change_nothing() -> None:
    breaker = opened(Clock())
    breaker.failed()
    breaker.succeeded()
    assert (breaker.state, breaker.wait_s(), breaker.num_opened) == ("open", 1.0, 1)
