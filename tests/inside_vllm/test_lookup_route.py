"""POST /v1/ragblend/lookup without an engine: what it counts, in which namespace, and what it refuses.

`test_documents_over_http.py` asks a real server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from ragblend.engine.namespaces import salted_namespace
from ragblend.prompt.types import ChunkRun
from ragblend.server.lookup import add_lookup_route
from ragblend.server.routes import make_request_handler

PATH = "/v1/ragblend/lookup"
FOUND = [
    (ChunkRun(tuple(range(10)), 0, 0, 10), ["neutral-a", "a"]),
    (ChunkRun(tuple(range(20)), 0, 12, 32), ["neutral-b", "b"]),
    (ChunkRun(tuple(range(40)), 0, 40, 80), ["neutral-c", "c"]),
]
IN_MEMORY, ON_DISK, IN_REMOTE = {"a"}, {"neutral-a", "b"}, {"a", "b", "neutral-c"}


class Site:
    """The route over the chunks FOUND; `asked` has what was looked up: token ids and namespace."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], str]] = []
        self.prefetched: list[str] = []
        app = FastAPI()
        remote = SimpleNamespace(contains_many=lambda keys, until_s: [key in IN_REMOTE for key in keys])
        disk = SimpleNamespace(contains=ON_DISK.__contains__)
        store: Any = SimpleNamespace(find_tier=lambda _: disk, find_tiers=lambda _: [remote])
        chunks: Any = SimpleNamespace(candidate_keys=self.candidate_keys)
        add_lookup_route(app, store, lambda: chunks, self.call_workers, make_request_handler(str), 100)

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            fields = await request.json()
            assert request.headers["authorization"] == "Bearer k"
            return {"tokens": [1] if "messages" in fields else [2] * len(fields["prompt"])}

        self.http = TestClient(app, headers={"Authorization": "Bearer k"})

    def candidate_keys(self, ids: list[int], namespace: str) -> Any:
        self.asked.append((ids, namespace))
        return FOUND if ids else []

    async def call_workers(self, method: str, keys: Any) -> list[Any]:
        if "fail" in self.asked[-1][1]:
            raise TimeoutError("no answer")
        if method == "ragblend_prefetch":
            self.prefetched += keys
            return [None, None]
        assert method == "ragblend_keys_in_memory"
        return [[key for key in keys if key in IN_MEMORY], []]


@pytest.fixture
def site():
    return Site()


@pytest.mark.parametrize(
    ("body", "query", "ids", "namespace"),
    [
        ({"prompt": [5, 6, 7]}, "", [5, 6, 7], ""),
        ({"prompt": [[5, 6, 7]]}, "", [5, 6, 7], ""),
        ({"prompt": "abc", "stream": True}, "", [2, 2, 2], ""),
        ({"prompt": ["abc"]}, "?namespace=acme", [2, 2, 2], "acme"),
        ({"messages": [], "model": "m"}, "", [1], ""),
        ({"prompt": [5], "cache_salt": "s"}, "", [5], salted_namespace("", "s")),
        ({"prompt": [5], "kv_transfer_params": {"ragblend": {"namespace": "acme"}}}, "", [5], "acme"),
    ],
)
def test_tokens_are_counted_by_tier(site, body, query, ids, namespace):
    answer = site.http.post(PATH + query, json=body)
    assert answer.json() == {
        "num_tokens": len(ids),
        "num_chunks": 3,
        "tokens": {"memory": 10, "disk": 30, "remote": 70},
    }
    assert site.asked == [(ids, namespace)]


def test_prefetch_loads_the_best_stored_variant_of_each_chunk(site):
    answers = [site.http.post(PATH + query, json={"prompt": [5]}).json() for query in ("?prefetch=true", "")]
    assert answers[0] == answers[1]
    assert site.prefetched == ["neutral-a", "b", "neutral-c"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b""),
        (400, b"[]"),
        (400, b'{"prompt": "a", "messages": []}'),
        (400, b'{"model": "m"}'),
        (400, b'{"prompt": ["a", "b"]}'),
        (400, b'{"prompt": [1.5]}'),
        (400, b'{"prompt": [true]}'),
        (400, b'{"prompt": [-1]}'),
        (400, b'{"prompt": null}'),
        (400, b'{"prompt": "a", "cache_salt": 7}'),
        (400, b'{"prompt": "a", "kv_transfer_params": []}'),
        (400, b'{"prompt": "a", "kv_transfer_params": {"ragblend": 7}}'),
        (400, b'{"prompt": [' + b"1," * 100 + b"1]}"),
        (503, b'{"prompt": [1], "kv_transfer_params": {"ragblend": {"namespace": "fail"}}}'),
    ],
)
def test_other_bodies_are_refused_with_a_reason(site, status, body):
    answer = site.http.post(PATH, content=body)
    assert answer.status_code == status
    assert 10 < len(answer.json()["error"]["message"]) < 1000
