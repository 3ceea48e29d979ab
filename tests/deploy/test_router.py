"""deploy/routers/by_chunks.py in front of two replicas: prompts go to the one that has their chunks in memory."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import httpx
import pytest
from charts import DEPLOY
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

spec = importlib.util.spec_from_file_location("by_chunks", DEPLOY / "routers" / "by_chunks.py")
assert spec is not None
assert spec.loader is not None
by_chunks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_chunks)

PROMPT = {"model": "m", "prompt": "a prompt", "stream": True}


class FakeReplica:
    """A replica that has `tokens` of every prompt; it does not answer lookups if they are None."""

    def __init__(self, name: str, tokens: tuple[int, int] | None) -> None:
        self.name, self.tokens, self.seen = name, tokens, list[str]()
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST", "DELETE"])])

    async def answer(self, request: Request) -> Any:
        if request.url.path == "/v1/ragblend/lookup":
            assert (await request.json(), request.headers["authorization"]) == (PROMPT, "Bearer k")
            if self.tokens is None:
                raise httpx.ReadTimeout("no answer in time")
            return JSONResponse({"tokens": dict(zip(("memory", "disk"), self.tokens, strict=True))})
        raw = request.scope["raw_path"].decode()
        self.seen.append(f"{request.method} {raw}?{request.url.query}")
        return StreamingResponse(iter([b"data: ", self.name.encode()]), 202, {"x-served-by": self.name})


def ask(*fakes: FakeReplica, method: str = "POST", url: str = "/v1/completions", body: Any = PROMPT) -> httpx.Response:
    async def call() -> httpx.Response:
        replicas = [by_chunks.Replica(f"http://{each.name}", transport=httpx.ASGITransport(each.app)) for each in fakes]
        transport = httpx.ASGITransport(by_chunks.router(replicas))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.request(method, url, json=body, headers={"authorization": "Bearer k"})
        assert [each.num_open for each in replicas] == [0] * len(fakes)
        return answer

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ((0, 0), (0, 0), "first"),
        ((10, 500), (500, 10), "second"),
        ((0, 500), (0, 10), "first"),
        ((0, 10), (0, 500), "second"),
        (None, (0, 0), "second"),
        (None, None, "first"),
    ],
)
def test_a_prompt_goes_where_most_of_its_tokens_are_in_memory(first, second, chosen):
    fakes = FakeReplica("first", first), FakeReplica("second", second)
    answer = ask(*fakes)
    assert (answer.status_code, answer.text) == (202, f"data: {chosen}")
    assert answer.headers["x-served-by"] == chosen
    assert [each.name for each in fakes if each.seen] == [chosen]


def test_other_requests_pass_unchanged():
    fake = FakeReplica("one", (0, 0))
    ask(fake, method="GET", url="/v1/ragblend/documents/a%2Fb?collection=kb&limit=1", body=None)
    assert fake.seen == ["GET /v1/ragblend/documents/a%2Fb?collection=kb&limit=1"]
