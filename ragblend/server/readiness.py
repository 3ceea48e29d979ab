"""Readiness route of a vLLM server, and its graceful shutdown.

    GET /ragblend/ready   200 or 503, {"ready", "engine", "store", "remote", "catalog"}

A server is ready if its engine runs, its store can be written, and it is not stopping. An unreachable remote tier or
catalogue and a full disk are reported, but the server stays ready, because it still answers. Otherwise, a failure of
what replicas share would remove all of them at once. Like vLLM's own /health, the route ignores --api-key.

On SIGTERM, vLLM's own shutdown waits until its engine has computed the last token, for at most `--shutdown-timeout`.
New requests in that time are accepted and fail. At its end, tokens that the front end has not sent are lost. So before
that shutdown begins, `Readiness` ends the ingestion of documents, completes the answers in progress, and rejects new
requests with 503, so that a router selects another replica. Depends on vLLM's application and the store.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, RagblendError, StoreFullError
from ragblend.files.directory import Directory, try_remove_file

PATH = "/ragblend/ready"
_WAIT_S = 2.0  # longest wait for a probe of one tier, whose state is "slow" then; no second probe runs next to it
_LASTS_S = 2.0  # longest age of a probe's result that is used again
_PROBE_BYTES = 1 << 16  # a file of a few bytes fits into the inode, also on a full disk
_CLOSING_S = 10.0  # for vLLM to stop after the answers are complete; pending writes to the remote tier end within it

STOPPING = b'{"error": {"message": "this server is stopping; send the request to another replica", "code": 503}}'


class Readiness:
    """Reports whether a vLLM server with this `store` is ready, and shuts it down gracefully.

    The constructor replaces `engine_client.shutdown` by a function that first ends the ingestion of documents and waits
    until the answers in progress are sent, for at most `timeout` seconds (the argument of `shutdown`). A call without a
    timeout does not wait, and neither does a second call.

    `end_ingestion`: `DocumentIngester.close`; documents that are not stored then stay waiting.
    """

    def __init__(
        self, engine_client: Any, store: KVStore, end_ingestion: Callable[[float], object] = lambda timeout_s: None
    ) -> None:
        self.is_stopping = False
        self._num_under_way = 0
        self._client = engine_client
        self._disk = _CachedProbe(lambda: _disk_state(store.find_tier(DiskStore)))
        self._remote = _CachedProbe(lambda: _remote_state(store.find_tiers(RemoteStore)))
        self._catalog = _CachedProbe(lambda: _catalog_state(store))
        shutdown = engine_client.shutdown

        def draining(*arguments: Any, **named: Any) -> Any:
            is_first, self.is_stopping = not self.is_stopping, True
            timeout_s = named.get("timeout", arguments[0] if arguments else None)
            if is_first:
                end_ingestion(0.0)  # no further chunk begins, so that the answers in progress end sooner
            if timeout_s and is_first:
                left_s = self._drain(timeout_s)
                end_ingestion(max(left_s, 0.0))
                arguments, named = (), {"timeout": max(left_s, _CLOSING_S)}
            return shutdown(*arguments, **named)

        engine_client.shutdown = draining  # vLLM calls it first on SIGTERM, in a separate thread

    async def serve_unless_stopping(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on to `app`, but reject a POST with 503 if the server is stopping."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
        elif self.is_stopping:
            await send_unavailable(send)
        else:
            self._num_under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                self._num_under_way -= 1

    def _drain(self, timeout_s: float) -> float:
        """Wait for at most `timeout_s` until every answer is sent. Return the seconds left."""
        end_s = time.monotonic() + timeout_s
        while self._num_under_way and time.monotonic() < end_s:
            time.sleep(0.05)
        return end_s - time.monotonic()

    async def state(self) -> dict[str, Any]:
        """Return the response's body: `ready`, and the states of engine, disk, remote tier and catalogue."""
        engine = "stopping" if self.is_stopping else await self._engine_state()
        probes = (self._disk, self._remote, self._catalog)
        disk, remote, catalog = await asyncio.gather(*(asyncio.to_thread(probe.state) for probe in probes))
        is_ready = engine == "ok" and disk in ("ok", "full")
        return {"ready": is_ready, "engine": engine, "store": disk, "remote": remote, "catalog": catalog}

    async def _engine_state(self) -> str:
        try:
            await self._client.check_health()
        except Exception:  # vLLM logs the error itself
            return "dead"
        return "ok"


async def send_unavailable(send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Send a response with status 503, which says that the server is stopping."""
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": STOPPING})


def add_readiness_route(app: Any, store: KVStore, *end_ingestion: Callable[[float], object]) -> Readiness:
    """Add the readiness route to vLLM's application `app`, and return its Readiness. `end_ingestion`: see there."""
    from starlette.requests import Request
    from starlette.responses import Response

    readiness = Readiness(app.state.engine_client, store, *end_ingestion)

    async def ready(request: Request) -> Response:
        state = await readiness.state()
        return Response(json.dumps(state), 200 if state["ready"] else 503, media_type="application/json")

    app.router.add_route(PATH, ready, methods=["GET"])
    return readiness


class _CachedProbe:
    """Health check that may block. One thread at a time runs it."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask
        self._executor = ThreadPoolExecutor(1, "ragblend-ready")
        self._future: Future[str] | None = None
        self._asked_s = 0.0

    def state(self) -> str:
        """Return the check's result, at most _LASTS_S old; "slow" after _WAIT_S, "failing" for an error."""
        future = self._future
        if future is None or (future.done() and time.monotonic() - self._asked_s > _LASTS_S):
            self._asked_s = time.monotonic()
            self._future = future = self._executor.submit(self._ask)
        try:
            return future.result(_WAIT_S)
        except FutureTimeoutError:
            return "slow"
        except (RagblendError, OSError):
            return "failing"


def _disk_state(disk: DiskStore | None) -> str:
    if disk is None:
        return "ok"
    if disk.is_missing():
        return "missing"
    for folder in {disk.kv_dir, disk.root}:  # on two disks, for example
        try:
            Directory(folder, fsync=False).write(probe := folder / ".ready", b"?" * _PROBE_BYTES)
        except StoreFullError:
            return "full"
        free_bytes = shutil.disk_usage(folder).free  # a file system may notice later that a file has no space
        try_remove_file(probe)
        if not free_bytes:
            return "full"
    return "ok"


def _remote_state(tiers: Sequence[RemoteStore]) -> str:
    if not tiers:
        return "none"
    return "ok" if all(tier.status().reachable for tier in tiers) else "unreachable"


def _catalog_state(store: KVStore) -> str:
    try:
        with open_ledger(store, create=False) as ledger:  # a deleted folder is not created again
            ledger.change_counter()
    except BackendUnreachableError:
        return "unreachable"
    return "ok"
