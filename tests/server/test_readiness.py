"""Graceful shutdown without vLLM: what a server waits for, and which requests it rejects. More: inside_vllm."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.metadata import MODELS_DIR
from ragblend.engine.store.open import open_store
from ragblend.server import readiness as readiness_module
from ragblend.server.readiness import Readiness

POST = {"type": "http", "method": "POST"}


class EngineClient:
    """vLLM's engine client, whose `shutdown` vLLM calls on SIGTERM."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)


async def statuses_of(readiness: Readiness, app: Any) -> list[int]:
    """Statuses of the answer to one request."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await readiness.serve_unless_stopping(app, POST, None, send)
    return [message["status"] for message in sent if "status" in message]


async def test_a_stopping_vllm_sends_its_answers_and_rejects_new_prompts():
    client, may_end, has_begun = EngineClient(), asyncio.Event(), asyncio.Event()
    readiness = Readiness(client, MemoryStore(0))

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        has_begun.set()
        await may_end.wait()
        await send({"status": 200})

    answer = asyncio.create_task(statuses_of(readiness, slow))
    await has_begun.wait()
    stopping = asyncio.create_task(asyncio.to_thread(client.shutdown, timeout=60))
    while not readiness.is_stopping:
        await asyncio.sleep(0.01)
    assert await statuses_of(readiness, slow) == [503]
    await asyncio.sleep(0.2)
    assert client.timeouts == []  # an answer is under way
    may_end.set()
    assert await answer == [200]
    await stopping
    assert len(client.timeouts) == 1
    assert 50 < (client.timeouts[0] or 0) <= 60


@pytest.mark.parametrize("timeout", [60.0, 0, None])
async def test_no_chunk_is_sent_to_an_engine_that_stops(timeout):
    """Ingestion ends before vLLM's shutdown begins, and with a timeout, the chunk in progress is completed first."""
    client, calls = EngineClient(), list[tuple[float, int]]()
    Readiness(client, MemoryStore(0), lambda timeout_s: calls.append((timeout_s, len(client.timeouts))))
    await asyncio.to_thread(client.shutdown, timeout)
    await asyncio.to_thread(client.shutdown, timeout)
    assert calls[0] == (0.0, 0)
    assert len(calls) == (2 if timeout else 1)
    assert calls[-1][0] == pytest.approx(timeout or 0.0, abs=1)
    assert calls[-1][1] == 0


@pytest.mark.parametrize(("timeout", "passed_on"), [(0.2, 10.0), (0, 0), (None, None)])
async def test_an_answer_that_takes_too_long_does_not_hold_up_the_stop(timeout, passed_on):
    """Ten seconds remain for writes to the remote tier; without time to drain, vLLM stops as before."""
    client = EngineClient()
    readiness = Readiness(client, MemoryStore(0))

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    answer = asyncio.create_task(statuses_of(readiness, endless))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(client.shutdown, timeout)
    assert client.timeouts == [passed_on]
    answer.cancel()


@pytest.mark.parametrize(
    ("catalog", "state"), [(None, "ok"), ("postgresql://user:secret@127.0.0.1:1/kv?connect_timeout=1", "unreachable")]
)
async def test_a_catalogue_that_does_not_answer_is_named(catalog, state, tmp_path):
    pytest.importorskip("psycopg")

    async def check_health() -> None: ...

    client: Any = EngineClient()
    client.check_health = check_health
    found = await Readiness(client, open_store(tmp_path, catalog=catalog)).state()
    assert found == {"ready": True, "engine": "ok", "store": "ok", "remote": "none", "catalog": state}


async def test_a_deleted_store_is_missing_even_after_a_write_recreates_it(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness_module, "_LASTS_S", 0.0)
    client = EngineClient()
    client.check_health = check_nothing
    store = open_store(tmp_path / "kv")
    (tmp_path / "kv" / MODELS_DIR).mkdir(parents=True)
    readiness = Readiness(client, store)
    assert (await readiness.state())["store"] == "ok"
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").mkdir()  # as the thread does that looks for documents, and at the start an empty volume
    state = await readiness.state()
    assert (state["ready"], state["store"]) == (False, "missing")


async def check_nothing() -> None:
    pass
