"""Whether a server should get requests: its engine lives, its store can be written, and it is not about to stop.

    GET /ragblend/ready   200 or 503, {"ready", "engine", "store", "remote"}; without a key, as vLLM's own /health

A remote tier that is down, or a disk that is full, is said and changes nothing: such a server answers as before, and
taking all replicas away because their shared cache has died would turn a slow service into none.

Knows vLLM's application and the store. vLLM drains on SIGTERM where `--shutdown-timeout` says how long, but its engine
ends when it has computed the last token, and what its front end has not sent by then is lost: streams of a busy server
stay open without an end. And it goes on taking requests meanwhile, and fails them. So answers are sent to their end
here before vLLM's own shutdown begins, and new requests are refused, so that a router asks another replica.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import RagblendError, StoreFullError
from ragblend.files.directory import Directory, unlink

PATH = "/ragblend/ready"
_WAIT_S = 2.0  # longest wait for one tier; one that takes longer is said to, and asked no second time meanwhile
_LASTS_S = 2.0  # several who ask at the same time share an answer
_CLOSING_S = 10.0  # for vLLM to stop, once answers have had their time: what is owed to the remote tier is written then

STOPPING = b'{"error": {"message": "this server is stopping; ask another replica", "code": 503}}'


class Readiness:
    """What `vLLM`'s engine client and the `tiers` of the store say, each asked in a thread of its own."""

    def __init__(self, engine_client: Any, tiers: Sequence[KVStore]) -> None:
        self.is_stopping = False
        self._num_under_way = 0
        self._client = engine_client
        self._disk = _CachedProbe(lambda: _disk_state([disk for tier in tiers if (disk := tier.disk_tier) is not None]))
        remote = [remote for tier in tiers for remote in tier.remote_tiers]
        self._remote = _CachedProbe(lambda: _remote_state(remote)) if remote else None
        shutdown = engine_client.shutdown

        def draining(*given: Any, **named: Any) -> Any:
            is_first, self.is_stopping = not self.is_stopping, True
            timeout_s = named.get("timeout", given[0] if given else None)
            if timeout_s and is_first:
                given, named = (), {"timeout": max(self._drain(timeout_s), _CLOSING_S)}
            return shutdown(*given, **named)

        engine_client.shutdown = draining  # what vLLM calls first when it is told to stop, in a thread of its own

    async def serve(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Have `app` answer, or refuse a prompt that comes while the server is stopping."""
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
        """Wait until every answer is sent, for at most `timeout_s`; what is left of that."""
        end_s = time.monotonic() + timeout_s
        while self._num_under_way and time.monotonic() < end_s:
            time.sleep(0.05)
        return end_s - time.monotonic()

    async def state(self) -> dict[str, Any]:
        """The answer's body."""
        engine = "stopping" if self.is_stopping else await self._engine_state()
        disk, remote = await asyncio.gather(
            asyncio.to_thread(self._disk.state), asyncio.to_thread(self._remote.state if self._remote else _no_remote)
        )
        is_ready = engine == "ok" and disk in ("ok", "full")
        return {"ready": is_ready, "engine": engine, "store": disk, "remote": remote}

    async def _engine_state(self) -> str:
        try:
            await self._client.check_health()
        except Exception:  # vLLM's own errors: which one is in its log
            return "dead"
        return "ok"


async def send_unavailable(send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Answer a request that came while the server is stopping."""
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": STOPPING})


def add_readiness(app: Any, tiers: Sequence[KVStore]) -> Readiness:
    """Add the route to `app`, whose engine and store it tells of."""
    from starlette.requests import Request
    from starlette.responses import Response

    readiness = Readiness(app.state.engine_client, tiers)

    async def ready(request: Request) -> Response:
        state = await readiness.state()
        return Response(json.dumps(state), 200 if state["ready"] else 503, media_type="application/json")

    app.router.add_route(PATH, ready, methods=["GET"])
    return readiness


class _CachedProbe:
    """A question that may hang, asked by one thread at a time."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask
        self._executor = ThreadPoolExecutor(1, "ragblend-ready")
        self._future: Future[str] | None = None
        self._asked_s = 0.0

    def state(self) -> str:
        """Its answer, at most _LASTS_S old; "slow" where there is none within _WAIT_S."""
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


def _disk_state(disks: Sequence[DiskStore]) -> str:
    for disk in disks:
        if not disk.root.is_dir():
            return "missing"
        try:
            Directory(disk.kv_dir, fsync=False).write(probe := disk.kv_dir / ".ready", b"?")
        except StoreFullError:
            return "full"
        unlink(probe)
    return "ok"


def _remote_state(tiers: Sequence[RemoteStore]) -> str:
    return "ok" if all(tier.status().reachable for tier in tiers) else "unreachable"


def _no_remote() -> str:
    return "none"
