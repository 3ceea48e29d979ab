"""What keeps other web pages out: this server answers its own page only, and what it serves runs nothing foreign.

A page from elsewhere can send requests here from the user's browser, also under a name of its own that leads to this
machine (DNS rebinding). So the Host has to be an address or a name of this machine, and whatever changes something has
to come from the page that this server gave out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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
_ENCODED = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class OriginGuard:
    """Around an ASGI app: refuses with 403 what does not come from its own page. `host` is what it listens on."""

    def __init__(self, app: App, host: str) -> None:
        self._app = app
        self._names = {"localhost", host.lower()} | (set() if is_loopback(host) else {socket.gethostname().lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        reason = rejection_reason(scope.get("method", "GET"), headers, self._names)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif reason:
            body = reason.encode()
            kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": kind + _ENCODED})
            await send({"type": "http.response.body", "body": body})
        else:
            await self._app(scope, receive, _with_headers(send))


def rejection_reason(method: str, headers: Mapping[str, str], names: set[str]) -> str:
    """Why a request is refused; "" where it is not. `names`: those of this machine, besides all addresses.

    >>> names = {"localhost"}
    >>> refusal("GET", {"host": "localhost:8765"}, names), refusal("GET", {"host": "[::1]:8765"}, names)
    ('', '')
    >>> refusal("GET", {"host": "evil.example:8765"}, names).partition(";")[0]
    "the Host is 'evil.example:8765', which is no address and no name of this machine"
    >>> refusal("POST", {"host": "localhost:8765", "origin": "http://localhost:3000"}, names).partition(";")[0]
    "this comes from another page ('http://localhost:3000')"
    """
    host = headers.get("host", "")
    name = _host_name(host)
    if not (_is_address(name) or name in names or name.endswith(".localhost")):
        return (
            f"the Host is {host!r}, which is no address and no name of this machine; open the address that "
            "`ragblend ui` printed"
        )
    if method in ("GET", "HEAD"):
        return ""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_own = site in (None, "same-origin", "none") if origin is None else _origin_host(origin) == host
    return "" if is_own else f"this comes from another page ({origin!r}); open the address that `ragblend ui` printed"


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a server that listens on `host`.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _with_headers(send: Send) -> Send:
    async def send_with(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_ENCODED]
        await send(message)

    return send_with


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
