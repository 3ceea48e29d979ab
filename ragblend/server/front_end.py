"""Engine that ingests documents inside a vLLM server's HTTP front end.

It only ingests; vLLM itself answers prompts. Depends on vLLM's asynchronous engine client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any
from uuid import uuid4

from ragblend.engine.store.base import KVStore
from ragblend.engine.vllm.base_engine import OutputDelta, VllmEngineBase, VllmRequest
from ragblend.engine.vllm.engine import sampling_params
from ragblend.errors import EngineClosedError, RagblendError
from ragblend.prompt.render import Renderer
from ragblend.server.api_keys import AuthContext, Grant, current_auth

_LOOK_S = 1.0  # between two checks that the server still runs
_PRIORITY = 1 << 20  # after all requests of clients, if vLLM's scheduling policy is "priority"


class FrontEndEngine(VllmEngineBase):
    """Engine over vLLM's engine client in an HTTP server. The client runs on the event loop `loop`.

    Call this engine from other threads only. `prefix_ids`: the prefix after which the server's chunks are stored.
    """

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        renderer: Renderer,
        store: KVStore,
        prefix_ids: tuple[int, ...],
        **options: Any,
    ) -> None:
        super().__init__(renderer, store, on_miss="inline", **options)
        self.default_prefix_ids = prefix_ids
        self._client, self._event_loop = client, loop
        scheduler = client.vllm_config.scheduler_config
        self._priority = _PRIORITY if scheduler.policy == "priority" else 0

    def is_generating(self) -> bool:
        """Return True if vLLM has unfinished requests of clients.

        vLLM also counts requests of this engine, so call this method between two chunks, when this engine has none.
        """
        return bool(self._client.output_processor.get_num_unfinished_requests())

    def run_request(self, request: VllmRequest) -> Generator[OutputDelta]:
        """Run one request, and yield its output once it has ended. Closing the generator aborts the request."""
        if self._client.errored:
            raise EngineClosedError("vLLM's engine has stopped; start the server again")
        future = asyncio.run_coroutine_threadsafe(self._collect(request), self._event_loop)
        try:
            while True:
                try:
                    deltas = future.result(_LOOK_S)
                except FutureTimeoutError:
                    if not self._event_loop.is_running():
                        raise EngineClosedError("the server is stopping") from None
                    continue
                except (CancelledError, Exception) as error:
                    if self._client.errored or isinstance(error, CancelledError):
                        raise EngineClosedError(f"vLLM's engine has stopped: {error}") from error
                    raise RagblendError(f"vLLM rejects the chunk: {error}") from error
                if any(delta.finish_reason == "abort" for delta in deltas):  # not by a client
                    raise EngineClosedError("vLLM's engine has aborted the chunk, because it is stopping or paused")
                yield from deltas
                return
        finally:
            future.cancel()

    async def _collect(self, request: VllmRequest) -> list[OutputDelta]:
        # The gate of a server with API keys requires a grant of the namespace.
        current_auth.set(AuthContext(Grant(self.namespace, frozenset({"ingest"}))))
        outputs: AsyncIterator[Any] = self._client.generate(
            {"prompt_token_ids": request.token_ids},
            sampling_params(request, []),
            f"ragblend-{uuid4().hex}",
            priority=self._priority,
        )
        return [OutputDelta.from_vllm(output) async for output in outputs]
