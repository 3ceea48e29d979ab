"""Loopback ports for servers that a benchmark or a test starts, and may start again at the same address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

SERVER_PORTS = range(10_000, 32_768)
"""Below the ports that Linux (`ip_local_port_range`), macOS and Windows give to outgoing connections.

Above, a connection can take the port before the server starts, or while it restarts.
"""


def free_port() -> int:
    """Return a port of `SERVER_PORTS` that is not in use.

    Raises:
        OSError: 1,000 ports drawn at random are all in use.
    """
    # Not the shared generator: each test seeds it, so that all processes would choose the same port.
    for port in random.SystemRandom().sample(SERVER_PORTS, 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        f"no loopback port between {SERVER_PORTS[0]} and {SERVER_PORTS[-1]} is free; stop servers of earlier runs"
    )
