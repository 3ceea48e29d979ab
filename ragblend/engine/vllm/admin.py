"""The store over HTTP, for who runs the server: what is in it, and forgetting all of a namespace.

    GET  /v1/ragblend/store          what it holds, by namespace; its budget, its pins, its remote tier
    GET  /v1/ragblend/store/chunks   ?namespace=NS&after=KEY&limit=N -> {"chunks": [...], "next": KEY or null}
    POST /v1/ragblend/store/clear    {"namespace"}: from every replica's disk and the remote tier ->
                                     {"num_removed", "num_unread"} of this disk and the remote tier, the latter damaged
                                     or not to be had in the remote

Knows the tiers. Other replicas are told over the remote tier (see `forgotten`); without one, ask each of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

from ragblend.catalog.registry import open_registry
from ragblend.engine.store.disk import StoreEntry
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.store.tombstones import publish_tombstone
from ragblend.engine.vllm.params import belongs_to
from ragblend.errors import UsageError

PATH = "/v1/ragblend/store"
MAX_CHUNKS = 1000  # of one answer

Respond = Callable[[Callable[[], dict[str, Any]]], Awaitable[Any]]


def add_admin(app: Any, store: TieredStore, respond: Respond) -> None:
    """Add the routes to `app`. `respond` runs what it is given in a thread; a response comes of it, or of its error."""
    from starlette.requests import Request
    from starlette.responses import Response

    def route(path: str, answer: Callable[[TieredStore, dict[str, Any]], dict[str, Any]], method: str) -> None:
        async def handle(request: Request) -> Response:
            body = await request.body() if method == "POST" else json.dumps(dict(request.query_params)).encode()
            response: Response = await respond(lambda: answer(store, _fields(body)))
            return response

        app.router.add_route(PATH + path, handle, methods=[method])

    route("", usage, "GET")
    route("/chunks", chunks, "GET")
    route("/clear", clear, "POST")


def usage(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """What the disk tier holds, and how the remote one is doing."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in _entries(store):
        counts[entry.header.namespace] += 1
        sizes[entry.header.namespace] += entry.nbytes
    disk = store.disk_tier
    statuses = [tier.status()._asdict() for tier in store.remote_tiers]
    for status in statuses:
        del status["url"]  # where the store is, is not told
    return {
        "num_chunks": counts.total(),
        "nbytes": sizes.total(),
        "budget_bytes": None if disk is None else disk.limit_bytes(),
        "namespaces": {name: {"num_chunks": counts[name], "nbytes": sizes[name]} for name in sorted(counts)},
        "pins": {} if disk is None else {document: len(keys) for document, keys in disk.pins().items()},
        "remote": statuses[0] if statuses else None,
    }


def chunks(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """Chunks on disk in the order of their keys, of one namespace or of all."""
    limit, after = str(fields.get("limit", MAX_CHUNKS)), str(fields.get("after", ""))
    if not limit.isdecimal() or not 0 < int(limit) <= MAX_CHUNKS:
        raise UsageError(f"limit is {limit!r}; choose 1 to {MAX_CHUNKS}")
    wanted = fields.get("namespace")
    found = sorted(entry for entry in _entries(store) if entry.key > after and wanted in (None, entry.header.namespace))
    shown = found[: int(limit)]
    return {
        "chunks": [
            {
                "key": entry.key,
                "namespace": entry.header.namespace,
                "num_tokens": len(entry.header.token_ids),
                "nbytes": entry.nbytes,
                "last_used_s": entry.last_used_s,
            }
            for entry in shown
        ],
        "next": shown[-1].key if len(found) > len(shown) else None,
    }


def clear(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """Forget all of a namespace, with a cache salt or without. What only the remote tier has is fetched, since its name
    does not tell whose it is."""
    namespace = _text(fields, "namespace")
    for remote in store.remote_tiers:
        publish_tombstone(remote, namespace=namespace)
    local_keys = [entry.key for entry in _entries(store) if belongs_to(entry.header.namespace, namespace)]
    num_removed, num_unread = sum(map(store.delete, local_keys)), 0
    with closing(open_registry(store)) as registry:
        registry.remove_entry_chunks(local_keys)
    held = {entry.key for entry in _entries(store)}
    for remote in store.remote_tiers:
        listed = list(remote.keys())
        for key in listed:
            if key not in held:
                kv = remote.get(key)
                num_unread += kv is None
                if kv is not None and belongs_to(kv.header.namespace, namespace):
                    num_removed += store.delete(key)
    return {"num_removed": num_removed, "num_unread": num_unread}


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError("send a JSON object") from error
    if not isinstance(fields, dict):
        raise UsageError("send a JSON object")
    return fields


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise UsageError(f'send {{"{name}": "..."}}')
    return value


def _entries(store: TieredStore) -> Iterator[StoreEntry]:
    if store.disk_tier is not None:
        yield from store.disk_tier.entries()
