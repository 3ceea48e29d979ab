"""Time limits that all backends of a remote tier share."""

from __future__ import annotations

WALK_TIMEOUT_S = 600.0  # for a list of all names, as in `stats` and `gc`
CONNECT_TIMEOUT_S = 1.0
_CONNECT_SHARE = 10


def connect_timeout_s(timeout_s: float) -> float:
    """Return the time limit for connecting, in seconds. timeout_s: the time limit of the whole call.

    The result is a tenth of `timeout_s`, but at least one second, because a process that computes on every core can
    take a second until it reads its sockets. The result never exceeds `timeout_s`.
    """
    return min(timeout_s, max(CONNECT_TIMEOUT_S, timeout_s / _CONNECT_SHARE))
