"""HTTP route with which a router asks how many tokens of a prompt have stored KV on this replica.

    POST /v1/ragblend/lookup    the body of a chat completion or a completion with one prompt, as text or token ids
                                -> {"num_tokens", "num_chunks", "tokens": {"memory", "disk", "remote"}}
                                with ?prefetch=true, chunks that are not in memory are then loaded into it

The prompt is tokenized by vLLM's own /tokenize, so that its ids are those of the request itself. The chunks are those
of the namespace in which the request would find them. Depends on matching and the tiers, not on vLLM.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.vllm.params import PARAMS_KEY, parse_params
from ragblend.engine.vllm.scheduler_side.lookup import ChunkLookup
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.server.api_keys import LOOKUP_PATH
from ragblend.server.routes import SALT_HEADER, Respond, request_namespace

_REMOTE_S = 1.0  # longest wait for the remote tier, whose entries are not counted after it

CallWorkers = Callable[[str, Sequence[str]], Awaitable[Iterable[Any]]]
"""Calls a method of BlendWorkerExtension with keys, on each worker of the engine. Returns all results."""


def add_lookup_route(
    app: Any,
    store: TieredStore,
    find_chunks: Callable[[], ChunkLookup],
    call_workers: CallWorkers,
    respond: Respond,
    most_tokens: int,
) -> None:
    """Add the route to vLLM's application `app`.

    `find_chunks` returns the server's ChunkLookup; it is called in a thread. `most_tokens`: the model's context length.
    """

    async def handle(request: Request) -> Response:
        body = await request.body()

        async def answer() -> dict[str, Any]:
            fields = _fields(body)
            params = parse_params((fields.get("kv_transfer_params") or {}).get(PARAMS_KEY) or {})
            salts = request.headers.get(SALT_HEADER), fields.get("cache_salt")
            namespace = request_namespace(request.query_params.get("namespace", params.namespace), *salts)
            ids = await _token_ids(request, fields)
            if len(ids) > most_tokens:
                raise UsageError(f"the prompt has {len(ids)} tokens, but the model reads at most {most_tokens}")
            candidates = await run_in_threadpool(lambda: find_chunks().candidate_keys(ids, namespace))
            keys = [*dict.fromkeys(key for _, each in candidates for key in each)]
            tiers = await asyncio.gather(_in_memory(call_workers, keys), run_in_threadpool(_in_stores, store, keys))
            stored = {"memory": tiers[0], **tiers[1]}
            if request.query_params.get("prefetch") == "true":
                await _prefetch(call_workers, [each for _, each in candidates], stored)
            counts = {
                name: sum(run.num_tokens for run, each in candidates if not tier_keys.isdisjoint(each))
                for name, tier_keys in stored.items()
            }
            return {"num_tokens": len(ids), "num_chunks": len(candidates), "tokens": counts}

        return await respond(answer)

    app.router.add_route(LOOKUP_PATH, handle, methods=["POST"])


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that matter here. Raises UsageError for another form."""
    fields: Any = None
    with suppress(ValueError, RecursionError):
        fields = json.loads(body)
    if not isinstance(fields, dict) or ("messages" in fields) == ("prompt" in fields):
        raise UsageError("send the body of a chat completion, with `messages`, or of a completion, with `prompt`")
    prompt = fields.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        fields["prompt"] = prompt = prompt[0]
    if not isinstance(prompt, str) and not _are_ids(prompt):
        raise UsageError("`prompt` must be one prompt: text, or token ids")
    if not isinstance(fields.get("cache_salt"), str | None) or not isinstance(
        fields.get("kv_transfer_params"), dict | None
    ):
        raise UsageError("`cache_salt` must be text, and `kv_transfer_params` an object")
    return fields


def _are_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in prompt)


async def _token_ids(request: Request, fields: dict[str, Any]) -> list[int]:
    """Return the prompt's token ids, from vLLM's own route unless the request has them."""
    if isinstance(fields.get("prompt"), list):
        return list(fields["prompt"])
    headers = {name: value for name, value in request.headers.items() if name in ("authorization", "x-api-key")}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(request.app), base_url="http://server") as client:
        response = await client.post("/tokenize", json=fields, headers=headers, timeout=None)
    if response.status_code != 200:
        raise UsageError(f"vLLM does not tokenize the prompt: {response.text[:500]}")
    return list(response.json()["tokens"])


async def _in_memory(call_workers: CallWorkers, keys: Sequence[str]) -> set[str]:
    return {key for some in await _call_with_keys(call_workers, "ragblend_keys_in_memory", keys) for key in some}


async def _prefetch(call_workers: CallWorkers, keys: Sequence[Sequence[str]], stored: Mapping[str, set[str]]) -> None:
    """Load the best stored variant of each chunk into the workers' memory. `keys`: of each chunk, the best first."""
    anywhere = set().union(*stored.values())
    best = [next(filter(anywhere.__contains__, each), None) for each in keys]
    await _call_with_keys(call_workers, "ragblend_prefetch", [key for key in dict.fromkeys(best) if key is not None])


async def _call_with_keys(call_workers: CallWorkers, method: str, keys: Sequence[str]) -> list[Any]:
    """Return the results of all workers; none without keys. Raises BackendUnreachableError if a worker fails."""
    if not keys:
        return []
    try:
        return list(await call_workers(method, keys))
    except Exception as error:
        raise BackendUnreachableError(f"vLLM's workers failed to run {method}: {error}") from error


def _in_stores(store: TieredStore, keys: Sequence[str]) -> dict[str, set[str]]:
    """Return the keys of the entries on the server's disk and in the remote tier."""
    disk, in_remote = store.find_tier(DiskStore), set[str]()
    for remote in store.find_tiers(RemoteStore):
        contained = remote.contains_many(keys, time.monotonic() + _REMOTE_S)
        in_remote.update(key for key, is_stored in zip(keys, contained, strict=True) if is_stored)
    return {"disk": set() if disk is None else set(filter(disk.contains, keys)), "remote": in_remote}
