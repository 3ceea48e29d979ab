"""Bounds on the bodies of requests: their size, their number of values, all of them together, and slow uploads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ragblend.server import limits
from ragblend.server.limits import BodyLimits, has_too_many_values

FIRST = 1000  # bytes of a body whose rest does not come


class Upload:
    """A request whose body comes in `pieces`; without an end if `is_unfinished`."""

    def __init__(self, *pieces: bytes, declared: int | None = None, is_unfinished: bool = False) -> None:
        self.pieces, self.is_unfinished = list(pieces), is_unfinished
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self.scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.answer: list[dict[str, Any]] = []
        self.arrived: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self.pieces and self.is_unfinished:
            await asyncio.sleep(60)
        body = self.pieces.pop(0) if self.pieces else b""
        return {"type": "http.request", "body": body, "more_body": bool(self.pieces) or self.is_unfinished}

    async def send(self, message: dict[str, Any]) -> None:
        self.answer.append(message)

    async def run(self, server: BodyLimits) -> int:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.arrived.append(await receive())
            await send({"type": "http.response.start", "status": 200, "headers": []})

        await server.wrap(app)(self.scope, self.receive, self.send)
        return int(self.answer[0]["status"])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {
        "MAX_BODY_BYTES": 4000, "MAX_JSON_TOKENS": 100, "_MAX_TOTAL_BYTES": 5000, "_UNCOUNTED_BYTES": 100,
        "_IDLE_S": 0.1, "_LEAST_BYTES": 500,
    }.items():  # fmt: skip
        monkeypatch.setattr(limits, name, value)


@pytest.mark.parametrize(
    ("status", "upload"),
    {
        "one piece": (200, Upload(b'{"a": 1}')),
        "many pieces": (200, Upload(*[b"a" * 100] * 40)),
        "declared too large": (413, Upload(declared=4001)),
        "too large in pieces": (413, Upload(*[b"a" * 1000] * 5)),
        "too many values": (413, Upload(b"[" + b"[]," * 50 + b"[]]")),
        "an idle upload": (408, Upload(b"a" * FIRST, is_unfinished=True)),
        "nothing at all": (408, Upload(is_unfinished=True)),
    }.values(),
)
def test_a_body_arrives_whole_or_is_refused_with_a_reason(status, upload):
    sent = b"".join(upload.pieces)
    assert asyncio.run(upload.run(BodyLimits())) == status
    if status == 200:
        assert upload.arrived == [{"type": "http.request", "body": sent, "more_body": False}]
    else:
        assert not upload.arrived
        assert json.loads(upload.answer[1]["body"])["error"]["code"] == status
        assert (b"connection", b"close") in upload.answer[0]["headers"]


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (b"[" + b"[]," * 50 + b"[]]", True),
        (b'{"a":' * 101, True),
        (b'["a"' + b',"a"' * 50 + b"]", True),
        (b"{}\n" * 101, True),
        (b'"' * 300, False),  # no JSON object or list; nothing parses it
        (b'{"' + b'"' * 300, True),
        (b'{"text": "' + b'[{,\\"' * 200 + b'"}', False),
        (b'{"text": "' + b"\\\\" * 200 + b'"}', False),
        (b'{"text": "' + b"\\\\" * 200 + b'", "b": [' + b"1," * 100, True),
        (b'{"text": "' + b"," * 200, False),
        (b"\xff\xfe" + b"," * 200, False),
    ],
)
def test_values_are_counted_outside_of_strings(body, is_refused):
    assert has_too_many_values(body) is is_refused


def test_all_bodies_together_are_bounded_and_short_ones_pass():
    async def story() -> tuple[list[int], int, int]:
        server = BodyLimits()
        held = [asyncio.create_task(Upload(b"a" * FIRST, is_unfinished=True).run(server)) for _ in range(9)]
        await asyncio.sleep(0.01)
        full = Upload(b"a" * FIRST)
        during = [await full.run(server), await Upload(b"a" * 100).run(server)]
        assert (b"retry-after", b"10") in full.answer[0]["headers"]
        statuses = await asyncio.gather(*held)
        assert await Upload(b"a" * FIRST).run(server) == 200
        return during, statuses.count(503), statuses.count(408)

    assert asyncio.run(story()) == ([503, 200], 4, 5)
