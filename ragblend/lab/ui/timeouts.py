"""Time limits for requests that arrive too slowly: a connection that sends no complete head, and a body that stalls.

uvicorn limits only the time between two requests of a connection. Without these limits a connection that sends nothing
would stay open until the server ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from uvicorn.protocols.http.h11_impl import H11Protocol

from ragblend.errors import UsageError

HEAD_S = 10.0  # seconds for a request's head, from the connection or from the head's first byte
BODY_S = 20.0  # seconds for a request's body, in addition to those that its bytes take
MIN_BYTES_PER_S = 1 << 14  # slowest body that is read to its end, on average


class SlowBodyError(UsageError):
    """A request's body that arrived too slowly; answered with HTTP 408."""


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's protocol; closes a connection without a request's complete head after `HEAD_S` seconds."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Process the data, then start or end the time limit."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit."""
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:  # each byte does not restart it, or one byte per second would keep a connection open
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def limit_body_time(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a body's parts. Raises SlowBodyError below `MIN_BYTES_PER_S` after `BODY_S` seconds."""
    start_s, num_bytes = asyncio.get_running_loop().time(), 0
    while True:
        try:
            async with asyncio.timeout_at(start_s + BODY_S + num_bytes / MIN_BYTES_PER_S):
                part = await anext(parts, None)
        except TimeoutError as error:
            raise SlowBodyError(
                f"the request's body is not complete after {BODY_S:g} s; {num_bytes} bytes have arrived: send it again "
                "over a faster connection"
            ) from error
        if part is None:
            return
        num_bytes += len(part)
        yield part
