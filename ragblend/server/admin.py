"""HTTP routes for a server's operator: list the contents of the store, and delete a namespace from it.

    GET  /v1/ragblend/store          numbers of KV caches, and bytes, by namespace; budget, remote tier
    GET  /v1/ragblend/store/chunks   ?namespace=NS&after=KEY&limit=N -> {"chunks": [...], "next": KEY or null}
    POST /v1/ragblend/store/clear    {"namespace"} -> {"num_removed", "num_unread"}

`clear` deletes from this server's disk and from the remote tier, and counts the deleted entries of both. `num_unread`
counts remote entries that are damaged or could not be read. Other replicas that share the remote tier delete theirs
through `tombstones`; without a remote tier, send the request to each replica. Depends on the tiers, not on vLLM.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.deletions import run_deletions, schedule_deletions
from ragblend.engine.namespaces import equals_ignoring_salt
from ragblend.engine.store.disk import DiskStore, StoreEntry
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.errors import UsageError
from ragblend.files.reserve import delete_with_reserve
from ragblend.server.auth_gate import log_change

PATH = "/v1/ragblend/store"
MAX_CHUNKS = 1000  # chunks in one response

Respond = Callable[[Callable[[], dict[str, Any]]], Awaitable[Any]]


def add_store_routes(app: Any, store: TieredStore, respond: Respond) -> None:
    """Add the store's routes to `app`. `respond` runs a function in a thread, and responds with its result or error."""
    from starlette.requests import Request
    from starlette.responses import Response

    def route(path: str, answer: Callable[[TieredStore, dict[str, Any]], dict[str, Any]], method: str) -> None:
        async def handle(request: Request) -> Response:
            query, body = dict(request.query_params), await request.body()
            response: Response = await respond(lambda: answer(store, _fields(body) if method == "POST" else query))
            return response

        app.router.add_route(PATH + path, handle, methods=[method])

    route("", store_usage, "GET")
    route("/chunks", list_chunks, "GET")
    route("/clear", clear_namespace, "POST")


def store_usage(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the disk tier: numbers of entries (`num_kv`) and bytes, in total and by namespace.

    The result also has the tier's limit in bytes (`budget_bytes`), and the status of the remote tier (`remote`; None
    without a remote tier). `fields` of the HTTP request are ignored.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in _entries(store):
        counts[entry.header.namespace] += 1
        sizes[entry.header.namespace] += entry.nbytes
    disk = store.find_tier(DiskStore)
    statuses = [tier.status()._asdict() for tier in store.find_tiers(RemoteStore)]
    for status in statuses:
        del status["url"]  # clients do not learn where the store is
    return {
        "num_kv": counts.total(),
        "nbytes": sizes.total(),
        "budget_bytes": None if disk is None else disk.limit_bytes(),
        "namespaces": {name: {"num_kv": counts[name], "nbytes": sizes[name]} for name in sorted(counts)},
        "remote": statuses[0] if statuses else None,
    }


def list_chunks(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a page of the chunks on disk, in the order of their keys.

    `fields` of the HTTP request: `namespace` (without it, all namespaces), `limit`, and `after`, the last key of the
    page before. In the result, `next` is the last key of this page, or None if no page follows. Raises UsageError for
    an invalid limit.
    """
    limit, after = str(fields.get("limit", MAX_CHUNKS)), str(fields.get("after", ""))
    if not limit.isdecimal() or not 0 < int(limit) <= MAX_CHUNKS:
        raise UsageError(f"limit is {limit!r}; choose 1 to {MAX_CHUNKS}")
    wanted = fields.get("namespace")
    entries = sorted(
        entry for entry in _entries(store) if entry.key > after and wanted in (None, entry.header.namespace)
    )
    page = entries[: int(limit)]
    return {
        "chunks": [
            {
                "key": entry.key,
                "namespace": entry.header.namespace,
                "num_tokens": len(entry.header.token_ids),
                "nbytes": entry.nbytes,
                "last_used_s": entry.last_used_s,
            }
            for entry in page
        ],
        "next": page[-1].key if len(entries) > len(page) else None,
    }


def clear_namespace(store: TieredStore, fields: dict[str, Any]) -> dict[str, Any]:
    """Delete all entries of a namespace, with or without a cache salt. Return `num_removed` and `num_unread`.

    `fields` of the HTTP request: `namespace`. Raises UsageError without it. The keys of entries do not show their
    namespace, so entries that only the remote tier has are read first. `num_unread` counts those that cannot be read.
    """
    namespace = fields.get("namespace")
    if not isinstance(namespace, str):
        raise UsageError('send {"namespace": "..."}')
    disk = store.find_tier(DiskStore)
    clear = partial(_clear_namespace, store, namespace)
    return clear() if disk is None else delete_with_reserve(disk.root, clear)


def _clear_namespace(store: TieredStore, namespace: str) -> dict[str, Any]:
    namespace_of = {entry.key: entry.header.namespace for entry in _entries(store)}
    keys, num_unread = {key for key, stored in namespace_of.items() if equals_ignoring_salt(stored, namespace)}, 0
    for remote in store.find_tiers(RemoteStore):
        for key in set(remote.keys()).difference(namespace_of):
            kv = remote.get(key)
            num_unread += kv is None
            if kv is not None and equals_ignoring_salt(kv.header.namespace, namespace):
                keys.add(key)
    with open_ledger(store) as ledger:
        schedule_deletions(dict.fromkeys(keys, ""), store, ledger)
        num_removed = len(run_deletions(store, ledger))
    store.delete_everywhere((), whole_namespace=namespace)  # entries that only other machines have
    log_change("clear", namespace, "", (), num_kv=num_removed)
    return {"num_removed": num_removed, "num_unread": num_unread}


def _fields(body: bytes) -> dict[str, Any]:
    fields: object = None
    with suppress(ValueError, RecursionError):
        fields = json.loads(body)
    if not isinstance(fields, dict):
        raise UsageError("send a JSON object")
    return fields


def _entries(store: TieredStore) -> Iterator[StoreEntry]:
    if (disk := store.find_tier(DiskStore)) is not None:
        yield from disk.entries()
