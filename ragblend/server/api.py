"""What `ragblend serve` adds to vLLM's HTTP server: which chunks are stored, and the report at the end of a stream.

    GET  /v1/ragblend          {"model", "fingerprint", "dtype", "num_layers", "bytes_per_token", "context_length",
                               "context"}, and with keys the "namespace" of the one that was sent
    POST /v1/ragblend/stored   {"keys": [...]} -> {"stored": [true, false, ...]}
    POST /v1/ragblend/forget   {"keys": [...]} -> {"num_removed": 1}
    POST /v1/ragblend/prefetch {"keys": [...]} -> {"num_keys": 1}: into the workers' memory, after the answer
    ...  /v1/ragblend/documents see `routes`
    ...  /v1/ragblend/store    see `admin`
    GET  /ragblend/ready       see `readiness`

Loaded through vLLM's own `--middleware`, which puts it before everything else, vLLM's check of its API key included.
The routes are added to vLLM's application, so that its key guards them; with `--api-keys-file` each request is let in
here (`AuthGate`), and once more where it reaches the engine. Where a store is, is not told. Before 0.33, vLLM sends a
completion's `kv_transfer_params` only when it does not stream, and never when a stop string ended it; for requests that
carry ours, a stream without them ends here with one more event that has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from ragblend.engine.store.kv import DTYPES
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore, disk_tier
from ragblend.engine.store.tombstones import publish_tombstone
from ragblend.engine.transformers.model import find_model, load_tokenizer
from ragblend.engine.vllm.admin import add_admin, forget_everywhere
from ragblend.engine.vllm.api_keys import ForbiddenError, Grant
from ragblend.engine.vllm.auth_gate import App, AuthGate, Receive, Scope, Send, current_grant, gate_of
from ragblend.engine.vllm.base_engine import ServedModelInfo
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.params import PARAMS_KEY
from ragblend.engine.vllm.readiness import Readiness, add_readiness
from ragblend.engine.vllm.support import model_fingerprint, model_shape, served_options
from ragblend.errors import BackendUnreachableError, CorruptError, NotFoundError, RagblendError, UsageError
from ragblend.options import ContextPolicy, ModelOptions
from ragblend.prompt.render import Renderer

log = logging.getLogger(__name__)

MAX_KEYS = 10_000  # per request
_NAMESPACES_KEPT = 100_000
_ASK_S = 10.0  # longest wait for the workers, which answer between two steps


class BlendMiddleware:
    """ASGI middleware that equips vLLM's application at the first request, and then only lets requests in."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._gate: AuthGate | None = None
        self._equipped = False
        self._readiness: Readiness | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to vLLM."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if not self._equipped:
            self._gate = gate_of(scope["app"])  # an error here ends the request, and the next one tries again
            self._equipped = True
            try:
                self._readiness = install_routes(scope["app"])
            except Exception:  # vLLM serves on; clients then take it for one without ragblend
                log.exception("this server cannot tell what is stored, and its streams have no reports")
        app = self._app if self._gate is None else self._gate.wrap_app(self._app)
        if self._readiness is None:
            await app(scope, receive, send)
        else:
            await self._readiness.serve(app, scope, receive, send)


def install_routes(app: Any) -> Readiness:
    """Add the routes to `app`, and the report to its completion streams."""
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    chunks = ServedChunks(app.state.vllm_config)

    async def facts(request: Request) -> Response:
        grant = current_grant()
        namespace = {} if grant is None else {"namespace": grant.namespace}
        return JSONResponse({**await run_in_threadpool(chunks.facts), **namespace})

    async def stored(request: Request) -> Response:
        return await with_keys(request, lambda keys: {"stored": chunks.stored(keys, current_grant())})

    async def forget(request: Request) -> Response:
        return await with_keys(request, lambda keys: {"num_removed": chunks.forget(keys, current_grant())})

    async def prefetch(request: Request) -> Response:
        loop = asyncio.get_running_loop()

        def start(keys: list[str]) -> dict[str, Any]:
            keys = chunks.filter_owned(keys, current_grant())
            asyncio.run_coroutine_threadsafe(prefetch_on_workers(app.state.engine_client, keys), loop)
            return {"num_keys": len(keys)}

        return await with_keys(request, start)

    async def with_keys(request: Request, answer: Callable[[list[str]], dict[str, Any]]) -> Response:
        body = await request.body()
        return await respond(lambda: answer(keys_of(body)))

    async def respond(answer: Callable[[], dict[str, Any]], status: int = 200) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(answer), status)
        except (RagblendError, OSError) as error:
            known = {ForbiddenError: 403, NotFoundError: 404, UsageError: 400, BackendUnreachableError: 503}
            status = next((code for kind, code in known.items() if isinstance(error, kind)), 500)
            if status == 500:
                log.error("a request of the store failed: %s", error)
            message = chunks.config.for_clients(error)
            return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)

    app.router.add_route("/v1/ragblend", facts, methods=["GET"])
    app.router.add_route("/v1/ragblend/stored", stored, methods=["POST"])
    app.router.add_route("/v1/ragblend/forget", forget, methods=["POST"])
    app.router.add_route("/v1/ragblend/prefetch", prefetch, methods=["POST"])
    add_admin(app, chunks.store, respond)
    try:
        add_documents(app, chunks, respond)
    except Exception as error:
        log.warning("this server takes no documents under /v1/ragblend/documents: %s", error)
    serving = getattr(app.state, "openai_serving_completion", None)
    if serving is not None:
        report_in_streams(serving)
    return add_readiness(app, chunks.store.tiers)


def add_documents(app: Any, chunks: ServedChunks, respond: Any) -> None:
    """Add the routes of documents to `app`, and go on storing those that are waiting."""
    from ragblend.engine.vllm.front_end import FrontEndEngine
    from ragblend.server.documents import Documents
    from ragblend.server.routes import documents_router

    loop, client = asyncio.get_running_loop(), app.state.engine_client
    store = _SharedStore(*chunks.store.tiers, kv_dtype=chunks.store.kv_dtype)

    def make_engine(namespace: str) -> FrontEndEngine:
        return FrontEndEngine(
            client,
            loop,
            chunks.renderer,
            store,
            chunks.served_model(),
            chunks.prefix_ids,
            namespace=namespace,
            context=chunks.config.context,
        )

    documents = Documents(Path(chunks.config.store), make_engine, chunks.config.for_clients)
    app.include_router(documents_router(documents, respond))
    documents.start()


class _SharedStore(TieredStore):
    """A store whose other replicas are told what is deleted."""

    def delete(self, key: str) -> bool:
        for remote in self.tiers:
            if isinstance(remote, RemoteStore):
                publish_tombstone(remote, keys=[key])
        return super().delete(key)


class ServedChunks:
    """The store of a vLLM, as its HTTP front end sees it."""

    def __init__(self, vllm_config: Any) -> None:
        self.config = config = ConnectorConfig.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._model = vllm_config.model_config
        self.store = config.open_shared()
        self._disk = disk_tier(self.store)
        self._context = config.context
        self._namespaces: OrderedDict[str, str] = OrderedDict()  # of keys; a key never changes its own
        self._fingerprint = model_fingerprint(self._model)
        self.store.set_expected_spec(self._fingerprint, model_shape(self._model))
        self._facts: dict[str, Any] = {}

    def _remembered(self) -> ContextPolicy | None:
        try:
            return self.store.read_context()
        except CorruptError as error:  # it was sound when the server started
            log.warning("%s", error)
            return None

    def facts(self) -> dict[str, Any]:
        """What a client needs to compute keys, and to tell people what is served."""
        if self._facts:
            return {**self._facts, "context": self._context or self._remembered()}
        checkpoint = find_checkpoint(self._model.model, served_options(self._model))
        self._facts = {
            "model": checkpoint.name,
            "fingerprint": self._fingerprint,
            "dtype": checkpoint.dtype,
            "num_layers": checkpoint.num_layers,
            "bytes_per_token": checkpoint.bytes_per_token,
            "context_length": self._model.max_model_len,
        }
        return self.facts()

    @cached_property
    def renderer(self) -> Renderer:
        """Text to ids, by the tokenizer that clients have: the model's own."""
        options = served_options(self._model)
        path = find_model(self._model.model, options=options)
        tokenizer, _ = load_tokenizer(str(path), ModelOptions(trust_remote_code=options.trust_remote_code))
        return Renderer(tokenizer)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What chunks are stored after."""
        config = self.config
        return self._disk.read_prefix(config.prefix) if config.prefix and self._disk is not None else config.prefix_ids

    def served_model(self) -> ServedModelInfo:
        """What an engine over this vLLM must know of its model."""
        facts = self.facts()
        narrower = 1 if self.store.kv_dtype == "auto" else DTYPES[facts["dtype"]].itemsize
        return ServedModelInfo(
            facts["model"],
            self._fingerprint,
            facts["context_length"],
            facts["bytes_per_token"] // narrower,
            num_layers=facts["num_layers"],
        )

    def stored(self, keys: list[str], grant: Grant | None) -> list[bool]:
        """Whether each is stored; for a key with a namespace, whether it is stored in that."""
        found = self.store.contains_within_timeout(keys)
        if grant is None:
            return found
        owned = set(self.filter_owned([key for key, there in zip(keys, found, strict=True) if there], grant))
        return [key in owned for key in keys]

    def forget(self, keys: list[str], grant: Grant | None) -> int:
        """Remove those that are the caller's to remove, and have other replicas do so; how many were there."""
        keys = self.filter_owned(keys, grant)
        return forget_everywhere(self.store, keys)

    def filter_owned(self, keys: list[str], grant: Grant | None) -> list[str]:
        """Those of `keys` that `grant` may know about. A key alone does not say whose it is: the entry does.

        What only the remote tier has is looked at there, for as long as a request would wait for it.
        """
        if grant is None:
            return keys
        until_s = monotonic() + self.config.remote_timeout_s
        return [key for key in keys if grant.can_access(self._namespace_of(key, until_s))]

    def _namespace_of(self, key: str, until_s: float) -> str | None:
        if (known := self._namespaces.get(key)) is not None:
            return known
        header = self._disk.header(key) if self._disk is not None else None
        if header is None and self.config.remote is not None and monotonic() < until_s:
            kv = self.store.get(key)
            header = kv.header if kv is not None else None
        if header is None:
            return None
        self._namespaces[key] = header.namespace
        if len(self._namespaces) > _NAMESPACES_KEPT:
            self._namespaces.popitem(last=False)
        return header.namespace


def keys_of(body: bytes) -> list[str]:
    """The keys a request names. Raises UsageError for anything else."""
    try:
        keys = json.loads(body)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError('send {"keys": ["..."]}') from error
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(keys) > MAX_KEYS:
        raise UsageError(f"keys must be a list of at most {MAX_KEYS} strings")
    return keys


def report_in_streams(serving: Any) -> None:
    """Make streams of `serving`, vLLM's completion handler, end with an event that has `kv_transfer_params`."""
    original = serving.completion_stream_generator

    def with_report(request: Any, inputs: Any, results: Any, request_id: str, *rest: Any, **more: Any) -> Any:
        asked = (getattr(request, "kv_transfer_params", None) or {}).get(PARAMS_KEY)
        if asked is None:
            return original(request, inputs, results, request_id, *rest, **more)
        found: dict[str, Any] = {}
        names: set[str] = set()

        async def watched() -> AsyncIterator[Any]:
            async for index, result in results:
                names.add(result.request_id)
                found.update(getattr(result, "kv_transfer_params", None) or {})
                yield index, result

        async def events() -> AsyncIterator[str]:
            has_report = False  # from vLLM itself, as from 0.33 on
            async for event in original(request, inputs, watched(), request_id, *rest, **more):
                has_report = has_report or _has_report(event)
                done = event.startswith("data: [DONE]") and not has_report
                if done and not found and len(names) == 1:  # a stop string ended it, and vLLM has dropped the report
                    found.update(await workers_report(serving, names.pop()))
                if done and found:
                    last = {"id": request_id, "object": "text_completion", "choices": [], "kv_transfer_params": found}
                    yield f"data: {json.dumps(last)}\n\n"
                yield event

        return events()

    serving.completion_stream_generator = with_report


def _has_report(event: str) -> bool:
    """True for an event of a stream, `data: {...}`, whose `kv_transfer_params` contain a report."""
    if "kv_transfer_params" not in event:  # nearly all of them
        return False
    try:
        params = json.loads(event.removeprefix("data: ")).get("kv_transfer_params")
    except (ValueError, AttributeError):
        return False
    return isinstance(params, dict) and PARAMS_KEY in params


async def prefetch_on_workers(engine_client: Any, keys: list[str]) -> None:
    """Have the workers prefetch `keys`; they take note between two engine steps."""
    try:
        await engine_client.collective_rpc("ragblend_prefetch", timeout=_ASK_S, args=(keys,))
    except Exception as error:  # a hint: requests load what they need themselves
        log.warning("nothing is prefetched: %s", error)


async def workers_report(serving: Any, request_id: str) -> dict[str, Any]:
    """`kv_transfer_params` as the workers know them; empty when they had nothing to do, or cannot be asked."""
    try:
        reports = await _call_all_workers(serving.engine_client, "ragblend_report", request_id)
    except Exception as error:  # the answer is complete without it
        log.warning("no report on %s: %s", request_id, error)
        return {}
    found = next(filter(None, reports), None)
    return {PARAMS_KEY: found} if found is not None else {}


async def _call_all_workers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """What the workers of all engines answer: `collective_rpc` asks them all, and keeps the first answer."""
    ask_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:
        return list(await engine_client.collective_rpc(method, timeout=_ASK_S, args=args))
    engines = await ask_all("collective_rpc", method, _ASK_S, args, {})
    return [answer for workers in engines for answer in workers]
