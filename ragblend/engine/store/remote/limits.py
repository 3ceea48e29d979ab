"""How long a connection to a remote tier may take to come about."""

from __future__ import annotations

CONNECT_TIMEOUT_S = 1.0
_CONNECT_SHARE = 10


def connect_timeout_s(timeout_s: float) -> float:
    """Seconds for connecting, of `timeout_s` seconds for one call.

    A host that is down says so in a second, whatever the call may take. Whoever allows a call minutes gets a tenth of
    them here: a process whose every core computes may not look at its own sockets for a second.
    """
    return min(timeout_s, max(CONNECT_TIMEOUT_S, timeout_s / _CONNECT_SHARE))
