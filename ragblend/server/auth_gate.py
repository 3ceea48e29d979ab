"""API key enforcement in a vLLM server: reads the key of each HTTP request and checks each engine request against it.

vLLM has many routes that end in its engine, and several ways to put `kv_transfer_params` into a request. All of them
call the engine's `generate`. The namespace is therefore checked in `generate`, with the key of the request that the
current task serves. Some responses begin before that call, so `kv_transfer_params` at the top level of a body are also
checked before vLLM reads the body. The log of changes of documents names the key. Depends on ASGI and vLLM's engine
client; `api_keys` defines the rights.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from ragblend.engine.vllm.params import PARAMS_KEY
from ragblend.engine.vllm.plugin import AUDIT_LOGGER
from ragblend.server.api_keys import (
    DOCUMENTS_PATH,
    ApiKeys,
    AuthContext,
    ForbiddenError,
    Grant,
    KeysFile,
    bind_namespace,
    current_auth,
)
from ragblend.server.limits import App, BodyLimits, Receive, Scope, Send, replaying

audit_log = logging.getLogger(AUDIT_LOGGER)

_LOGGED_IDS = 100  # in one line


def install_gate(app: Any) -> KeysFile | None:
    """Add checks of API keys to the engine of vLLM's application `app`, and return the file of the keys.

    The connector's configuration names the file of the keys. Without a file, return None and change nothing.
    """
    transfer = app.state.vllm_config.kv_transfer_config
    path = ((transfer.kv_connector_extra_config if transfer is not None else None) or {}).get("keys")
    if not path:
        return None
    keys = KeysFile(path)
    guard_engine(app.state.engine_client)
    return keys


def current_grant() -> Grant | None:
    """Return the rights of the current request's key; None for a server without keys."""
    auth = current_auth.get()
    return auth.grant if auth is not None else None


def log_change(
    action: Literal["add", "replace", "delete", "clear"],
    namespace: str,
    collection: str,
    ids: Sequence[str],
    **counts: int,
) -> None:
    """Log a change of documents as one line of JSON per _LOGGED_IDS documents, with the name of the request's key.

    Nothing is logged for no `ids`, unless the `action` is "clear".
    """
    grant = current_grant()
    for start in range(0, max(len(ids), action == "clear"), _LOGGED_IDS):
        change: dict[str, object] = {
            "action": action,
            "namespace": namespace,
            "key": None if grant is None else grant.name,
        }
        if action != "clear":
            change |= {"collection": collection, "ids": ids[start : start + _LOGGED_IDS]}
        audit_log.info("%s", json.dumps({"audit": "documents", **change, **counts}))


def wrap_app(app: App, keys: ApiKeys, limits: BodyLimits) -> App:
    """Return `app` with a check of each request: 401 without a valid key, 403 without the right.

    Bodies are read within `limits`, and only those of requests with a valid key.
    """
    public_app, app_with_body = limits.wrap(app), limits.wrap(_check_params(app))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope.get("method", "WEBSOCKET"), route_path(scope)
        if keys.is_public_route(method, path) or _is_preflight(scope):
            await public_app(scope, receive, send)
            return
        grant = keys.grant_of(scope["headers"])
        if grant is None:
            await _send_error(scope, send, 401, "send an API key: Authorization: Bearer KEY")
            return
        try:
            keys.check_route(grant, method, path)
        except ForbiddenError as error:
            await _send_error(scope, send, 403, str(error))
            return
        request = AuthContext(grant)
        token = current_auth.set(request)
        try:
            await app_with_body(scope, receive, _wrap_send(scope, send, request))
        finally:
            current_auth.reset(token)

    return guarded


def guard_engine(engine_client: Any) -> None:
    """Change `engine_client` in place: it raises ForbiddenError for requests that the key does not allow.

    `generate` also adds the key's namespace to the request's `kv_transfer_params`.
    """
    generate, encode = engine_client.generate, engine_client.encode

    def stamped_generate(prompt: Any, sampling_params: Any, *rest: Any, **more: Any) -> Any:
        sampling_params = copy.copy(sampling_params)  # some of vLLM's callers share one among requests
        extra = dict(sampling_params.extra_args or {})
        extra["kv_transfer_params"] = _bind_params(extra.get("kv_transfer_params"))
        sampling_params.extra_args = extra
        return generate(prompt, sampling_params, *rest, **more)

    def guarded_encode(*arguments: Any, **more: Any) -> Any:
        _bind_params(None)  # checks the right; an embedding request has no parameters to bind
        return encode(*arguments, **more)

    engine_client.generate, engine_client.encode = stamped_generate, guarded_encode


def _bind_params(transfer_params: object) -> dict[str, Any]:
    request = current_auth.get()
    if request is None:
        raise ForbiddenError("this prompt belongs to no request with an API key")
    try:
        return bind_namespace(transfer_params, request.grant)
    except ForbiddenError as error:
        request.rejection_reason = str(error)
        raise


def _check_params(app: App) -> App:
    """Return `app` with a check that the `kv_transfer_params` of a POST name no other namespace than the key's: 403.

    The application must get each body as one message.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        # Documents are large and contain no parameters for the engine.
        if scope.get("method") == "POST" and route_path(scope) != DOCUMENTS_PATH:
            message = await receive()
            receive = replaying(message, receive)
            values: Any = None
            if PARAMS_KEY.encode() in message.get("body", b""):
                with suppress(ValueError, RecursionError):  # vLLM reports the error
                    values = json.loads(message["body"])
            grant = current_grant()
            if grant is not None and isinstance(values, dict) and isinstance(values.get("kv_transfer_params"), dict):
                try:
                    bind_namespace(values["kv_transfer_params"], grant)
                except ForbiddenError as error:
                    await _send_error(scope, send, 403, str(error))
                    return
        await app(scope, receive, send)

    return checked


def _wrap_send(scope: Scope, send: Send, request: AuthContext) -> Send:
    """Return a `send` that answers 403 instead of vLLM's own response when the engine request was rejected."""
    has_begun, is_refused = False, False

    async def sending(message: MutableMapping[str, Any]) -> None:
        nonlocal has_begun, is_refused
        if request.rejection_reason and not has_begun and not is_refused:
            is_refused = True
            await _send_error(scope, send, 403, request.rejection_reason)
        has_begun = True
        if not is_refused:
            await send(message)

    return sending


async def _send_error(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})  # 403, before it is accepted
        return
    kind = "Unauthorized" if status == 401 else "Forbidden"
    body = json.dumps({"error": {"message": reason, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def route_path(scope: Scope) -> str:
    """Return the route's path without the prefix of a proxy (vLLM's --root-path)."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _is_preflight(scope: Scope) -> bool:
    """Return True for a browser's CORS preflight request, which carries no key and reaches no route."""
    names = {name.lower() for name, _ in scope["headers"]}
    return scope.get("method") == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names
