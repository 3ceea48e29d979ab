"""Access rules of the page's server: it answers only requests from the page that it sent.

A page from another site can send requests to this server from the user's browser, also under a host name that resolves
to this machine (DNS rebinding). So the Host must be an address or a name of this machine, and a request that changes
something must come from the page that this server sent.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class OriginGuard:
    """ASGI middleware that answers 403 if `rejection_reason` rejects a request, and sends `HEADERS` with every answer.

    So other pages in the user's browser cannot use the server. WebSockets are always refused. host: the address that
    the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {"localhost", host.lower()} | (set() if is_loopback(host) else {socket.gethostname().lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "websocket":
            await WebSocketClose(1008)(scope, receive, send)
        elif scope["type"] == "http" and (
            reason := rejection_reason(scope["method"], Headers(scope=scope), self._names)
        ):
            await PlainTextResponse(reason, 403)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)


def rejection_reason(method: str, headers: Mapping[str, str], names: set[str]) -> str:
    """Return the reason for which a request is rejected; "" if it is accepted.

    `names`: accepted host names. IP addresses and names that end in ".localhost" are always accepted. Requests other
    than GET and HEAD are rejected if another page sent them.

    >>> names = {"localhost"}
    >>> [rejection_reason("GET", {"host": host}, names) for host in ("localhost:8765", "[::1]:8765")]
    ['', '']
    >>> rejection_reason("GET", {"host": "evil.example:8765"}, names).partition(";")[0]
    "the Host is 'evil.example:8765', which is no address and no name of this machine"
    >>> rejection_reason("POST", {"host": "localhost:8765", "origin": "http://localhost:3000"}, names).partition(";")[0]
    "this comes from another page ('http://localhost:3000')"
    """
    host = headers.get("host", "")
    name = _split_url(f"//{host}").hostname or ""
    if not (_is_address(name) or name in names or name.endswith(".localhost")):
        return (
            f"the Host is {host!r}, which is no address and no name of this machine; open the address that "
            "`ragblend ui` printed"
        )
    if method in ("GET", "HEAD"):
        return ""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_own = site in (None, "same-origin", "none") if origin is None else _split_url(origin).netloc == host
    return "" if is_own else f"this comes from another page ({origin!r}); open the address that `ragblend ui` printed"


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens on `host`.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
