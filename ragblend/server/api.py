"""Middleware that adds ragblend's routes to vLLM's HTTP server, and reports to the streams of its answers.

    GET  /v1/ragblend          {"model", "fingerprint", "dtype", "num_layers", "bytes_per_token", "context_length",
                               "context", "answer_lead", "knows_tools", "calls", "calls_shown"}, and on a server with
                               API keys the "namespace" of the request's key
    ...  /v1/ragblend/documents see `routes`
    ...  /v1/ragblend/store    see `admin`
    POST /v1/ragblend/lookup   see `lookup`
    GET  /ragblend/ready       see `readiness`

vLLM loads the middleware through `--middleware`, and calls it before everything else, including its own check of API
keys. The routes are added to vLLM's application, so that vLLM's key guards them, too. With `--api-keys-file`,
`auth_gate` checks each request here and again when it reaches the engine. No response contains the address of a store.

Before 0.33, vLLM leaves `kv_transfer_params` out of streams and of answers that end at a stop string. A stream of a
request with ragblend's parameters therefore ends with an additional event that contains the report.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.checkpoints import find_model
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.launch import Checkpoint, find_checkpoint
from ragblend.engine.vllm.params import PARAMS_KEY
from ragblend.engine.vllm.scheduler_side.lookup import ChunkLookup
from ragblend.engine.vllm.support import model_fingerprint, model_kv_spec, vllm_model_options
from ragblend.errors import CorruptError, RagblendError
from ragblend.options import ContextPolicy, ModelOptions
from ragblend.prompt.render import Renderer
from ragblend.server.admin import add_store_routes
from ragblend.server.api_keys import KeysFile
from ragblend.server.auth_gate import current_grant, install_gate, wrap_app
from ragblend.server.document_metrics import DocumentMetrics
from ragblend.server.limits import App, BodyLimits, Receive, Scope, Send
from ragblend.server.readiness import Readiness, add_readiness_route

if TYPE_CHECKING:
    from ragblend.server.documents import DocumentIngester
    from ragblend.server.front_end import FrontEndEngine

log = logging.getLogger(__name__)

_ASK_S = 10.0  # longest wait for the workers, which respond between two engine steps


class RoutesMiddleware:
    """ASGI middleware that adds ragblend's routes to vLLM's application at the first request, and checks API keys."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._limits = BodyLimits()
        self._keys: KeysFile | None = None
        self._equipped = False
        self._readiness: Readiness | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request's API key, and pass the request on to vLLM unless the server is stopping."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        from starlette.requests import ClientDisconnect

        if not self._equipped:
            self._keys = install_gate(scope["app"])  # an error here ends the request, and the next request tries again
            self._equipped = True
            try:
                self._readiness = install_routes(scope["app"])
            except Exception:  # vLLM still serves; to clients it is a vLLM without ragblend
                log.exception("this server has no routes under /v1/ragblend, and its streams have no reports")
        limits = self._limits
        app = limits.wrap(self._app) if self._keys is None else wrap_app(self._app, self._keys.current(), limits)
        try:
            if self._readiness is None:
                await app(scope, receive, send)
            else:
                await self._readiness.serve_unless_stopping(app, scope, receive, send)
        except ClientDisconnect:  # while its body was read, so no client waits for an answer
            log.info("a client closed the connection before it had sent the body of %s", scope["path"])


def install_routes(app: Any) -> Readiness:
    """Add ragblend's routes to vLLM's application `app`, and the reports on reuse to its streamed answers.

    Return the server's Readiness, which rejects requests while the server is stopping.
    """
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    from ragblend.server.lookup import add_lookup_route
    from ragblend.server.routes import make_request_handler

    served = ServerResources(app.state.vllm_config)

    async def facts(request: Request) -> Response:
        grant = current_grant()
        namespace = {} if grant is None else {"namespace": grant.namespace}
        facts_of_model = await run_in_threadpool(lambda: {**served.model_facts(), **served.answer_parser_facts()})
        return JSONResponse({**facts_of_model, **namespace})

    respond = make_request_handler(served.config.message_for_clients)
    app.router.add_route("/v1/ragblend", facts, methods=["GET"])
    add_store_routes(app, served.store, respond)
    call_workers = partial(_call_all_workers, app.state.engine_client)
    most_tokens = app.state.vllm_config.model_config.max_model_len
    add_lookup_route(app, served.store, lambda: served.chunk_lookup, call_workers, respond, most_tokens)
    end_ingestion = []
    try:
        end_ingestion.append(add_document_routes(app, served, respond).close)
    except Exception as error:
        log.warning("this server has no routes under /v1/ragblend/documents: %s", error)
    DocumentMetrics(Path(served.config.store), served.config.catalog, by_namespace=bool(served.config.keys)).start()
    for serving, name, place in (
        (getattr(app.state, "openai_serving_completion", None), "completion_stream_generator", 1),
        (getattr(app.state, "openai_serving_chat", None), "chat_completion_stream_generator", 0),
    ):
        if serving is not None:
            add_reports_to_streams(serving, name, place)
    if (completions := getattr(app.state, "openai_serving_completion", None)) is not None:
        add_reports_of_all_prompts(completions)
    return add_readiness_route(app, served.store, *end_ingestion)


def add_document_routes(app: Any, served: ServerResources, respond: Any) -> DocumentIngester:
    """Add the routes under /v1/ragblend/documents to `app`, and start storing the documents that are waiting.

    Return the ingester that stores them. `respond`: the result of `make_request_handler`.
    """
    from ragblend.server.documents import DocumentIngester
    from ragblend.server.routes import documents_router

    config = served.config
    make_engine = partial(served.make_engine, app.state.engine_client, asyncio.get_running_loop())
    documents = DocumentIngester(Path(config.store), make_engine, config.message_for_clients, catalog=config.catalog)
    app.include_router(documents_router(documents, respond))
    documents.start()
    return documents


class ServerResources:
    """Store, model and tokenizer of a vLLM server, for its HTTP front end."""

    def __init__(self, vllm_config: Any) -> None:
        self.config = config = ConnectorConfig.from_extra_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        self._model = vllm_config.model_config
        self.store = config.open_tiers()
        self._fingerprint = model_fingerprint(self._model)
        self.store.set_expected_spec(self._fingerprint, model_kv_spec(self._model))

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return find_checkpoint(self._model.model, vllm_model_options(self._model))

    @property
    def context(self) -> ContextPolicy:
        """Return the context policy of documents: the configured one, else the store's, else "none"."""
        return self.config.context or self._stored_context() or "none"

    def _stored_context(self) -> ContextPolicy | None:
        try:
            return self.store.read_context_policy()
        except CorruptError as error:  # the file was valid when the server started
            log.warning("%s", error)
            return None

    def model_facts(self) -> dict[str, Any]:
        """Return the facts about model and store for GET /v1/ragblend."""
        checkpoint = self._checkpoint
        return {
            "model": checkpoint.name,
            "fingerprint": self._fingerprint,
            "dtype": checkpoint.dtype,
            "num_layers": checkpoint.num_layers,
            "bytes_per_token": checkpoint.bytes_per_token,
            "context_length": self._model.max_model_len,
            "context": self.context,
        }

    def answer_parser_facts(self) -> dict[str, Any]:
        """Return what a client needs to parse answers; {} if the model's tokenizer cannot be loaded.

        These are the formats of tool calls, whether the template supports tools, and the whitespace before an answer.
        """
        try:
            renderer = self.renderer
        except RagblendError:
            return {}
        forms = {"calls": asdict(renderer.call_format), "calls_shown": asdict(renderer.call_format_in_text)}
        return {"answer_lead": renderer.whitespace_before_answer, "knows_tools": renderer.knows_tools, **forms}

    @cached_property
    def renderer(self) -> Renderer:
        """Return a renderer with the model's own tokenizer, which clients use as well."""
        options = vllm_model_options(self._model)
        path = find_model(self._model.model, options=options)
        tokenizer, _ = load_tokenizer(str(path), ModelOptions(trust_remote_code=options.trust_remote_code))
        return Renderer(tokenizer)

    @cached_property
    def chunk_lookup(self) -> ChunkLookup:
        """Return the lookup of the chunks in prompts, as vLLM's scheduler has it in its own process."""
        disk = self.store.find_tier(DiskStore)
        assert disk is not None
        return ChunkLookup(disk, self.config, self._fingerprint, self.renderer)

    def make_engine(self, client: Any, loop: asyncio.AbstractEventLoop, namespace: str) -> FrontEndEngine:
        """Return an engine that ingests documents of a namespace with vLLM's `client`, which runs on `loop`."""
        from ragblend.server.front_end import FrontEndEngine

        checkpoint = self._checkpoint
        return FrontEndEngine(
            client,
            loop,
            self.renderer,
            self.store,
            self.config.prefix_ids,
            namespace=namespace,
            context=self.config.context,
            name=checkpoint.name,
            fingerprint=self._fingerprint,
            context_length=self._model.max_model_len,
            bytes_per_token=checkpoint.stored_bytes_per_token(self.store.kv_dtype),
            num_layers=checkpoint.num_layers,
        )


def add_reports_to_streams(serving: Any, method_name: str, arg_index: int) -> None:
    """Make the streams of `serving`, one of vLLM's handlers, end with an event that has `kv_transfer_params`.

    Only the streams of requests whose `kv_transfer_params` have the key PARAMS_KEY are changed. Nothing is added if
    vLLM itself sends the report.

    `method_name`: the handler's method that turns results into the events of a stream. It is called with `(request,
    *args)`: `args[arg_index]` is the iterator of vLLM's results, and `args[arg_index + 1]` the request's id.
    """
    original = getattr(serving, method_name)

    def with_report(request: Any, *args: Any, **kwargs: Any) -> Any:
        if (getattr(request, "kv_transfer_params", None) or {}).get(PARAMS_KEY) is None:
            return original(request, *args, **kwargs)
        params: dict[int, dict[str, Any]] = {}  # by the number of the prompt in the request
        request_ids: dict[int, str] = {}

        async def watched() -> AsyncIterator[Any]:
            async for each in args[arg_index]:
                number, result = each if isinstance(each, tuple) else (0, each)
                request_ids[number] = result.request_id
                if transfer_params := getattr(result, "kv_transfer_params", None):
                    params[number] = transfer_params
                yield each

        async def events() -> AsyncIterator[str]:
            has_report = False  # True from vLLM 0.33 on
            async for event in original(request, *args[:arg_index], watched(), *args[arg_index + 1 :], **kwargs):
                has_report = has_report or _has_report(event)
                if event.startswith("data: [DONE]") and not has_report:
                    for number in request_ids.keys() - params.keys():  # after a stop string, vLLM drops the report
                        params[number] = await report_from_workers(serving, request_ids[number])
                    if sent := join_reports([params[number] for number in sorted(params)]):
                        last = {"id": args[arg_index + 1], "choices": [], "kv_transfer_params": sent}
                        yield f"data: {json.dumps(last)}\n\n"
                yield event

        return events()

    setattr(serving, method_name, with_report)


def join_reports(params: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a response from those of its prompts; {} if no prompt has a report.

    With several prompts, the value of PARAMS_KEY is the list of their reports, with None for a prompt without one.

    >>> join_reports([{"ragblend": {"mode": "blend"}}, None])
    {'ragblend': [{'mode': 'blend'}, None]}
    """
    if len(params) == 1:
        return params[0] or {}
    reports = [(each or {}).get(PARAMS_KEY) for each in params]
    return {PARAMS_KEY: reports} if any(reports) else {}


def add_reports_of_all_prompts(serving: Any) -> None:
    """Have complete responses of `serving`, vLLM's handler of completions, report on each of several prompts.

    vLLM itself sends the `kv_transfer_params` of the first prompt and the `usage.cached_tokens` of the last one alone.
    """
    original = serving.request_output_to_completion_response

    def with_reports(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        response = original(outputs, *args, **kwargs)
        if len(outputs) > 1:
            response.kv_transfer_params = join_reports([each.kv_transfer_params for each in outputs]) or None
            if (details := response.usage.prompt_tokens_details) is not None:
                details.cached_tokens = sum(each.num_cached_tokens or 0 for each in outputs)
        return response

    serving.request_output_to_completion_response = with_reports


def _has_report(event: str) -> bool:
    """Return True if the `kv_transfer_params` of a stream's event, `data: {...}`, contain a report."""
    if "kv_transfer_params" not in event:  # nearly all of them
        return False
    try:
        params = json.loads(event.removeprefix("data: ")).get("kv_transfer_params")
    except (ValueError, AttributeError):
        return False
    return isinstance(params, dict) and PARAMS_KEY in params


async def report_from_workers(serving: Any, request_id: str) -> dict[str, Any]:
    """Return a request's report as `kv_transfer_params`. Asks all workers; {} if no worker has the report."""
    try:
        reports = await _call_all_workers(serving.engine_client, "ragblend_report", request_id)
    except Exception as error:  # the answer is complete without it
        log.warning("request %s has no report: %s", request_id, error)
        return {}
    report = next(filter(None, reports), None)
    return {PARAMS_KEY: report} if report is not None else {}


async def _call_all_workers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """Call a method on the workers of all engines, and return all results.

    vLLM's own `collective_rpc` also calls all engines, but returns the results of one.
    """
    call_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if call_all is None:
        return list(await engine_client.collective_rpc(method, timeout=_ASK_S, args=args))
    engines = await call_all("collective_rpc", method, _ASK_S, args, {})
    return [result for workers in engines for result in workers]
