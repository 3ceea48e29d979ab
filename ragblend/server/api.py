"""What `ragblend serve` adds to vLLM's HTTP server: documents, facts for clients, and reports in streams.

    GET  /v1/ragblend          {"model", "fingerprint", "dtype", "num_layers", "bytes_per_token", "context_length",
                               "context", "answer_lead", "knows_tools", "calls", "calls_shown"}, and with keys the
                               "namespace" of the one that was sent
    ...  /v1/ragblend/documents see `routes`
    ...  /v1/ragblend/store    see `admin`
    GET  /ragblend/ready       see `readiness`

Loaded through vLLM's own `--middleware`, which puts it before everything else, vLLM's check of its API key included.
The routes are added to vLLM's application, so that its key guards them; with `--api-keys-file` each request is let in
here (`AuthGate`), and once more where it reaches the engine. Where a store is, is not told. Before 0.33, vLLM sends
`kv_transfer_params` only when it does not stream, and never when a stop string ended the answer; for requests that
carry ours, a stream without them ends here with one more event that has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ragblend.engine.store.kv import DTYPES
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.store.tombstones import publish_tombstone
from ragblend.engine.transformers.checkpoints import find_model
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.vllm.admin import add_admin
from ragblend.engine.vllm.auth_gate import App, AuthGate, Receive, Scope, Send, current_grant, gate_of
from ragblend.engine.vllm.base_engine import ServedModelInfo
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.params import PARAMS_KEY
from ragblend.engine.vllm.readiness import Readiness, add_readiness
from ragblend.engine.vllm.support import model_fingerprint, model_shape, served_options
from ragblend.errors import CorruptError, RagblendError
from ragblend.options import ContextPolicy, ModelOptions
from ragblend.prompt.render import Renderer

log = logging.getLogger(__name__)

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
    """Add the routes to `app`, and the report to its streams."""
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    from ragblend.server.routes import responder

    chunks = ServedChunks(app.state.vllm_config)

    async def facts(request: Request) -> Response:
        grant = current_grant()
        namespace = {} if grant is None else {"namespace": grant.namespace}
        found = await run_in_threadpool(lambda: {**chunks.facts(), **chunks.answer_facts()})
        return JSONResponse({**found, **namespace})

    respond = responder(chunks.config.for_clients)
    app.router.add_route("/v1/ragblend", facts, methods=["GET"])
    add_admin(app, chunks.store, respond)
    try:
        add_documents(app, chunks, respond)
    except Exception as error:
        log.warning("this server takes no documents under /v1/ragblend/documents: %s", error)
    count_reused_tokens(app.state.engine_client)
    for serving, name, place in (
        (getattr(app.state, "openai_serving_completion", None), "completion_stream_generator", 1),
        (getattr(app.state, "openai_serving_chat", None), "chat_completion_stream_generator", 0),
    ):
        if serving is not None:
            report_in_streams(serving, name, place)
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

    config = chunks.config
    documents = Documents(Path(config.store), make_engine, config.for_clients, catalog=config.catalog)
    app.include_router(documents_router(documents, respond))
    documents.start()


class _SharedStore(TieredStore):
    """A store whose other replicas are told what is deleted."""

    def delete(self, key: str) -> bool:
        for remote in self.remote_tiers:
            publish_tombstone(remote, keys=[key])
        return super().delete(key)


class ServedChunks:
    """The store of a vLLM, as its HTTP front end sees it."""

    def __init__(self, vllm_config: Any) -> None:
        self.config = config = ConnectorConfig.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._model = vllm_config.model_config
        self.store = config.open_shared()
        self._disk = self.store.disk_tier
        self._context = config.context
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
        """What a client needs to tell people what is served."""
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

    def answer_facts(self) -> dict[str, Any]:
        """What a client needs to read answers; nothing where the model's tokenizer cannot be had."""
        try:
            renderer = self.renderer
        except RagblendError:
            return {}
        forms = {"calls": asdict(renderer.calls), "calls_shown": asdict(renderer.calls_shown)}
        return {"answer_lead": renderer.answer_lead, "knows_tools": renderer.knows_tools, **forms}

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


def count_reused_tokens(engine_client: Any) -> None:
    """Change `engine_client` in place: `cached_tokens` of a complete response are those reused and not recomputed.

    vLLM counts all that the connector filled; it sends the number where it runs with --enable-prompt-tokens-details,
    and in streams fixes it at the first token, when the report is still to come.
    """
    generate = engine_client.generate

    async def counted(*given: Any, **more: Any) -> AsyncIterator[Any]:
        async with aclosing(generate(*given, **more)) as outputs:
            async for output in outputs:
                report = (getattr(output, "kv_transfer_params", None) or {}).get(PARAMS_KEY)
                if report is not None:
                    output.num_cached_tokens = report["num_reused_tokens"]
                yield output

    engine_client.generate = counted


def report_in_streams(serving: Any, name: str, place: int) -> None:
    """Make the streams of `serving`, one of vLLM's handlers, end with an event that has `kv_transfer_params`.

    `name`: the handler's method that turns results into the events of a stream. Its first argument is the request; of
    the others, the one at `place` is the iterator of vLLM's results, and the next one is the request's id.
    """
    original = getattr(serving, name)

    def with_report(request: Any, *given: Any, **more: Any) -> Any:
        asked = (getattr(request, "kv_transfer_params", None) or {}).get(PARAMS_KEY)
        if asked is None:
            return original(request, *given, **more)
        found: dict[str, Any] = {}
        names: set[str] = set()

        async def watched() -> AsyncIterator[Any]:
            async for each in given[place]:
                result = each[1] if isinstance(each, tuple) else each
                names.add(result.request_id)
                found.update(getattr(result, "kv_transfer_params", None) or {})
                yield each

        async def events() -> AsyncIterator[str]:
            has_report = False  # from vLLM itself, as from 0.33 on
            async for event in original(request, *given[:place], watched(), *given[place + 1 :], **more):
                has_report = has_report or _has_report(event)
                done = event.startswith("data: [DONE]") and not has_report
                if done and not found and len(names) == 1:  # a stop string ended it, and vLLM has dropped the report
                    found.update(await workers_report(serving, names.pop()))
                if done and found:
                    last = {"id": given[place + 1], "choices": [], "kv_transfer_params": found}
                    yield f"data: {json.dumps(last)}\n\n"
                yield event

        return events()

    setattr(serving, name, with_report)


def _has_report(event: str) -> bool:
    """True for an event of a stream, `data: {...}`, whose `kv_transfer_params` contain a report."""
    if "kv_transfer_params" not in event:  # nearly all of them
        return False
    try:
        params = json.loads(event.removeprefix("data: ")).get("kv_transfer_params")
    except (ValueError, AttributeError):
        return False
    return isinstance(params, dict) and PARAMS_KEY in params


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
