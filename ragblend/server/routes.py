"""HTTP routes under `/v1/ragblend/documents`: add documents, return their progress, and remove them.

    POST   /v1/ragblend/documents       documents to store: JSON, or JSON lines -> 202, {"ingestion", "num_documents"}
    GET    /v1/ragblend/documents       counts by collection, and reasons; ?collection=NAME&ingestion=NAME
                                        with ?limit=NUMBER also a list of documents, which `after` continues
    GET    /v1/ragblend/documents/ID    one document; ?collection=NAME
    DELETE /v1/ragblend/documents       {"ids": [...]}, or {"collection": NAME} for all of its documents

Each request acts in the namespace of its API key, or on a server without keys in `?namespace=NAME`. vLLM's `cache_salt`
is part of the namespace, as in prompts: a field of the JSON body, or the header SALT_HEADER. Depends on FastAPI.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from ragblend.engine.namespaces import check_namespace, salted_namespace
from ragblend.errors import (
    BackendUnreachableError,
    BacklogFullError,
    NotFoundError,
    RagblendError,
    StoreFullError,
    UsageError,
)
from ragblend.server.api_keys import DOCUMENTS_PATH, ForbiddenError
from ragblend.server.auth_gate import current_grant
from ragblend.server.documents import DocumentIngester
from ragblend.server.limits import RETRY_AFTER_S
from ragblend.server.requests import (
    MAX_LISTED,
    AcceptedDocuments,
    DeletionInput,
    DocumentInput,
    DocumentsInput,
    DocumentStatus,
    IngestionSummary,
    RemovalCounts,
    read_cursor,
    read_deletion,
    read_documents,
)

log = logging.getLogger(__name__)

SALT_HEADER = "X-Cache-Salt"
"""Header with vLLM's `cache_salt`, for requests without a JSON body. An address would be in access logs."""
Salt = Annotated[str | None, Header(alias=SALT_HEADER, description="vLLM's `cache_salt`.")]
Respond = Callable[..., Awaitable[Response]]
"""Calls a function in a thread, or a coroutine function, and returns its result with a status (200), or its error, as a
response."""
_STATUS = {
    ForbiddenError: 403,
    NotFoundError: 404,
    UsageError: 400,
    BackendUnreachableError: 503,
    StoreFullError: 507,
    BacklogFullError: 429,
}


def make_request_handler(describe: Callable[[BaseException], str]) -> Respond:
    """Return a function that runs the work of a request, and makes a response of its result or error.

    It runs a function in a thread, and awaits a coroutine function. `describe` returns an error's message for clients.
    """

    async def respond(answer: Callable[[], Any], status: int = 200) -> Response:
        try:
            result = await (answer() if iscoroutinefunction(answer) else run_in_threadpool(answer))
            return JSONResponse(result, status)
        except (RagblendError, OSError) as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            if status in (500, 507):
                log.error("a request to the store failed: %s", error)
            headers = {"retry-after": str(RETRY_AFTER_S)} if status == 429 else {}
            return JSONResponse({"error": {"message": describe(error), "code": status}}, status, headers)

    return respond


def documents_router(documents: DocumentIngester, respond: Respond) -> APIRouter:
    """Return a FastAPI router with the routes of `documents`."""
    parsing = threading.Lock()  # one body at a time, because its values take more memory than its bytes

    async def respond_to_body(request: Request, answer: Callable[[bytes], dict[str, Any]], status: int) -> Response:
        body = await request.body()
        return await respond(lambda: answer(body), status)

    async def add(
        request: Request, collection: str | None = None, namespace: str = "", cache_salt: Salt = None
    ) -> Response:
        """Record documents; a background thread chunks, embeds and prefills them. Unchanged documents are skipped.

        JSON lines (`content-type: application/x-ndjson`) have one document per line; their collection is
        `?collection=`.
        """
        content_type = request.headers.get("content-type", "")

        def answer(body: bytes) -> dict[str, Any]:
            with parsing:
                sent, salt = read_documents(body, content_type, collection)
            where = request_namespace(namespace, cache_salt, salt)
            return {"ingestion": documents.add(where, sent), "num_documents": len(sent)}

        return await respond_to_body(request, answer, 202)

    async def summarize(
        collection: str | None = None,
        ingestion: str | None = None,
        namespace: str = "",
        limit: Annotated[int, Query(ge=0, le=MAX_LISTED)] = 0,
        after: str = "",
        cache_salt: Salt = None,
    ) -> Response:
        """Return the numbers of stored, pending and failed documents, and the reasons, of a collection or one POST.

        `limit`: the largest number of documents to list, by collection and id. `after`: list those behind.
        """

        def answer() -> dict[str, Any]:
            where = request_namespace(namespace, cache_salt)
            summary = documents.summary(where, collection, ingestion)
            listed: dict[str, Any] = {"documents": [], "next": ""}
            return {**summary, **(documents.list(where, collection, read_cursor(after), limit) if limit else listed)}

        return await respond(answer)

    async def get(
        document_id: str, collection: str = "default", namespace: str = "", cache_salt: Salt = None
    ) -> Response:
        """Return the status of one document."""
        return await respond(lambda: documents.get(request_namespace(namespace, cache_salt), collection, document_id))

    async def remove(request: Request, namespace: str = "", cache_salt: Salt = None) -> Response:
        """Remove documents, and delete the KV that no other document of the namespace needs."""

        def answer(body: bytes) -> dict[str, Any]:
            request = read_deletion(body)
            where = request_namespace(namespace, cache_salt, request.cache_salt)
            removed = documents.remove(where, request.collection, request.ids)
            return dict(zip(("num_documents", "num_kv"), removed, strict=True))

        return await respond_to_body(request, answer, 200)

    router = APIRouter(prefix=DOCUMENTS_PATH, tags=["ragblend"])
    posted, deleted = _body_of(DocumentsInput), _body_of(DeletionInput)
    router.add_api_route(
        "", add, methods=["POST"], status_code=202, response_model=AcceptedDocuments, openapi_extra=posted
    )
    router.add_api_route("", summarize, methods=["GET"], response_model=IngestionSummary)
    router.add_api_route("/{document_id:path}", get, methods=["GET"], response_model=DocumentStatus)
    router.add_api_route("", remove, methods=["DELETE"], response_model=RemovalCounts, openapi_extra=deleted)
    return router


def request_namespace(named: str, *cache_salts: str | None) -> str:
    """Return the API key's namespace, without keys `named`, with the request's cache salt if it has one.

    Raises ForbiddenError if the two namespaces differ, and UsageError for two salts.
    """
    check_namespace(named)
    grant = current_grant()
    if grant is not None:
        grant.check_namespace(named)
        named = grant.namespace
    salts = {salt for salt in cache_salts if salt}
    if len(salts) > 1:
        raise UsageError(f"cache_salt and the header {SALT_HEADER} differ; send one of them")
    return salted_namespace(named, next(iter(salts), None))


def _body_of(model: type[DocumentsInput | DeletionInput]) -> dict[str, Any]:
    """Return a body's schema for the OpenAPI page. FastAPI must not parse bodies, because it reads large ones whole."""
    schema = model.model_json_schema()
    if schema.pop("$defs", None):  # a reference in a path's schema would point outside of the path
        schema["properties"]["documents"]["items"] = DocumentInput.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
