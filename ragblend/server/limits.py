"""Bounds on what clients send to a vLLM server: bodies of requests, and documents that wait to be stored.

vLLM and FastAPI wait for a body as long as its client likes, and parse one of any size on the event loop, where a small
value such as `[]` takes a hundred times its bytes. So `BodyLimits` reads each body whole, before an application parses
it. `Backlog` keeps one client from filling the disk of all. Depends on ASGI and the catalogue.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from itertools import islice
from typing import Any

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.sent_documents import SentDocument
from ragblend.errors import BacklogFullError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_WAITING, MAX_WAITING_CHARS = 100_000, 256 << 20  # documents of a namespace that wait, and their characters
RETRY_AFTER_S = 10  # seconds after which a client that was refused may send again
MAX_BODY_BYTES = 32 << 20
MAX_JSON_TOKENS = 2 << 20
"""Most strings, commas and opening brackets of a JSON body, those inside of strings not counted."""
_MAX_TOTAL_BYTES = 256 << 20  # of all requests whose response has not begun
_UNCOUNTED_BYTES = 1 << 16  # of each body, so that prompts are accepted while uploads use the total
_IDLE_S, _LEAST_BYTES = 10.0, 1 << 16  # an upload that sends fewer bytes in this time is ended
# A string, or a character outside of strings that begins a value. Possessive, so that a long string takes no memory.
_JSON_TOKENS = re.compile(rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\)|[,\[{]')


class BodyLimits:
    """Reads the bodies of a server's requests, and refuses those that are too large, too slow or too many.

    The response to a refused request has status 408, 413 or 503, and its connection is closed.
    """

    def __init__(self) -> None:
        self._num_bytes = 0  # that count towards _MAX_TOTAL_BYTES

    def wrap(self, app: App) -> App:
        """Return an ASGI application that reads each body, and then calls `app` with it as one message."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            counted = 0

            def count(num_bytes: int) -> None:
                nonlocal counted
                now = max(0, num_bytes - _UNCOUNTED_BYTES)
                self._num_bytes += now - counted
                counted = now

            async def sending(message: MutableMapping[str, Any]) -> None:
                count(0)
                await send(message)

            try:
                message = await self._read(scope, receive, count)
                await app(scope, replaying(message, receive), sending)
            except _RefusedError as error:
                await _refuse(send, error)
            finally:
                count(0)

        return limited

    async def _read(self, scope: Scope, receive: Receive, count: Callable[[int], None]) -> MutableMapping[str, Any]:
        """Return the message with the whole body, or the one that says that the client has closed the connection."""
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise _RefusedError(413, _TOO_LARGE)
        loop = asyncio.get_running_loop()
        parts: list[bytes] = []
        num_bytes, seen_bytes, end_s = 0, 0, loop.time() + _IDLE_S
        while True:
            try:
                message = await asyncio.wait_for(receive(), end_s - loop.time())
            except TimeoutError:
                reason = (
                    f"{num_bytes} bytes of the body arrived, and fewer than {_LEAST_BYTES} in the last {_IDLE_S:g} s"
                )
                raise _RefusedError(408, reason) from None
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > MAX_BODY_BYTES:
                raise _RefusedError(413, _TOO_LARGE)
            count(num_bytes)
            if self._num_bytes > _MAX_TOTAL_BYTES:
                raise _RefusedError(503, "the server is reading many large bodies; send this one again")
            if not message.get("more_body"):
                break
            if num_bytes - seen_bytes >= _LEAST_BYTES:
                seen_bytes, end_s = num_bytes, loop.time() + _IDLE_S
        body = b"".join(parts)
        if len(body) > MAX_JSON_TOKENS and await asyncio.to_thread(has_too_many_values, body):
            reason = f"the body has more than {MAX_JSON_TOKENS} strings, commas and brackets of JSON; divide it"
            raise _RefusedError(413, f"{reason} among several requests")
        return {"type": "http.request", "body": body, "more_body": False}


def replaying(message: MutableMapping[str, Any], receive: Receive) -> Receive:
    """Return a `receive` that returns `message` first."""
    messages = [message]

    async def replayed() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return replayed


def has_too_many_values(body: bytes) -> bool:
    """Return True if a body is JSON, or lines of JSON, with more than MAX_JSON_TOKENS tokens.

    >>> has_too_many_values(b"[" + b"[]," * MAX_JSON_TOKENS), has_too_many_values(b'["' + b"," * MAX_JSON_TOKENS)
    (True, False)
    """
    is_json = body.lstrip()[:1] in (b"{", b"[")
    return is_json and next(islice(_JSON_TOKENS.finditer(body), MAX_JSON_TOKENS, None), None) is not None


_TOO_LARGE = f"the body has more than {MAX_BODY_BYTES} bytes; divide it among several requests"


class _RefusedError(Exception):
    """A body that is not read to its end, or not parsed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def _refuse(send: Send, error: _RefusedError) -> None:
    body = json.dumps({"error": {"message": str(error), "code": error.status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")]
    headers += [(b"retry-after", str(RETRY_AFTER_S).encode())] if error.status == 503 else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Backlog:
    """Counts of the documents in a catalogue that wait, by namespace. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, tuple[float, int, int]] = {}  # time of the count, documents, characters
        self._lock = threading.Lock()

    def add(self, namespace: str, documents: Sequence[SentDocument]) -> None:
        """Count documents that are sent now.

        Raises BacklogFullError if then more than MAX_WAITING documents of the namespace, or MAX_WAITING_CHARS, would
        wait. A namespace without waiting documents may send as many as fit into one request. The documents in the
        catalogue are counted at most once in RETRY_AFTER_S / 2 seconds, because the database reads them for that.
        """
        with self._lock:
            now_s = time.monotonic()
            counted_s, num_documents, num_chars = self._counts.get(namespace, (-math.inf, 0, 0))
            if now_s - counted_s > RETRY_AFTER_S / 2:
                counted_s, (num_documents, num_chars) = now_s, self._ledger.count_waiting(namespace)
            new_chars = sum(len(str(document.body)) for document in documents)
            is_full = num_documents + len(documents) > MAX_WAITING or num_chars + new_chars > MAX_WAITING_CHARS
            if num_documents and is_full:
                self._counts[namespace] = counted_s, num_documents, num_chars
                raise BacklogFullError(
                    f"{num_documents} documents of this namespace, of {num_chars} characters, wait to be stored; at "
                    f"most {MAX_WAITING}, of {MAX_WAITING_CHARS} characters, may. Send more in {RETRY_AFTER_S} seconds"
                )
            self._counts[namespace] = counted_s, num_documents + len(documents), num_chars + new_chars
