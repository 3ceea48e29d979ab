"""Router that sends each prompt to the replica of `ragblend serve` that has most of its tokens in memory.

    python deploy/routers/by_chunks.py --port 8000 http://replica-0:8000 http://replica-1:8000

It asks all replicas at once (`POST /v1/ragblend/lookup`, with the client's own body and key) and chooses by tokens in
memory, then on disk, then by the fewest open requests. A replica that does not answer in time is chosen last. Other
requests go to the replica with the fewest open requests. It is an example of 100 lines: no retries, no discovery.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LOOKUP_S = 0.5  # longest wait for a replica's answer, added to a prompt's time to first token
PROMPTS = ("/v1/chat/completions", "/v1/completions")
_NOT_PASSED_ON = {"host", "content-length", "connection", "transfer-encoding"}


class Replica:
    """A server. `client` sends requests to it; `num_open` of them have not ended."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url, self.num_open = url, 0
        self.client = httpx.AsyncClient(base_url=url, timeout=None, transport=transport)

    async def score(self, body: bytes, headers: dict[str, str]) -> tuple[int, int, int]:
        """Return how good it is to send the prompt here; the highest is the best."""
        try:
            answer = await self.client.post("/v1/ragblend/lookup", content=body, headers=headers, timeout=LOOKUP_S)
            tokens = answer.raise_for_status().json()["tokens"]
        except httpx.HTTPError:
            return (-1, 0, -self.num_open)
        return tokens["memory"], tokens["disk"], -self.num_open


def router(replicas: Sequence[Replica]) -> Starlette:
    """Return the router as an ASGI application."""

    async def route(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED_ON}
        if request.method == "POST" and request.url.path in PROMPTS:
            scores = await asyncio.gather(*(each.score(body, headers) for each in replicas))
            chosen = replicas[max(range(len(replicas)), key=scores.__getitem__)]
        else:
            chosen = min(replicas, key=lambda each: each.num_open)
        chosen.num_open += 1
        try:
            query = b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
            url = httpx.URL(raw_path=request.scope["raw_path"] + query)
            sent = chosen.client.build_request(request.method, url, content=body, headers=headers)
            answer = await chosen.client.send(sent, stream=True)
        except httpx.HTTPError as error:
            chosen.num_open -= 1
            return JSONResponse({"error": {"message": f"the replica does not answer: {type(error).__name__}"}}, 502)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                chosen.num_open -= 1
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in _NOT_PASSED_ON}
        return StreamingResponse(parts(), answer.status_code, kept)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for each in replicas:
            await each.client.aclose()

    methods = ["GET", "POST", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", route, methods=methods)], lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("replicas", nargs="+", metavar="URL")
    given = parser.parse_args()
    uvicorn.run(router([Replica(url) for url in given.replicas]), host=given.host, port=given.port)
