"""API keys of a vLLM server, each bound to a namespace and to rights.

    open = ["/health"]                 # paths that need no key; by default there are none

    [keys."a key of the tenant's"]     # or its SHA-256, so that the file holds no key: [keys."sha256:9f86d0..."]
    namespace = "acme"
    rights = ["ask", "ingest"]         # admin: every route, and both of these
    name = "the intranet's crawler"    # for the audit log; optional

Keys are checked in two places. The HTTP middleware checks each request's key and route first. Before a request enters
the engine, `bind_namespace` adds the key's namespace to the request, or rejects a request that names another namespace.
The engine rejects requests to which no namespace was added. Depends on HTTP's paths and headers; imports neither vLLM
nor a web framework.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import tomllib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ragblend.engine.namespaces import check_namespace
from ragblend.engine.vllm.params import PARAMS_KEY, TENANT_KEY
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_private_file

Right = Literal["ask", "ingest", "admin"]
RIGHTS: tuple[Right, ...] = get_args(Right)

log = logging.getLogger(__name__)

_SHA256 = "sha256:"
_LOOK_S = 2.0  # between two looks at the keys file
_MAX_NAME_CHARS = 200
_MAX_FILE_BYTES = 8 << 20

_ANY_KEY = frozenset(
    {("GET", path) for path in ("/health", "/ping", "/version", "/v1/models", "/v1/ragblend", "/ragblend/ready")}
)
# The engine requests of these routes are checked by `bind_namespace`.
_ENGINE = frozenset(
    {
        "/v1/completions",
        "/v1/completions/render",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/inference/v1/generate",
        "/invocations",
        "/tokenize",
        "/detokenize",
    }
)
DOCUMENTS_PATH, LOOKUP_PATH = "/v1/ragblend/documents", "/v1/ragblend/lookup"


class ForbiddenError(UsageError):
    """Request that the API key does not allow."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Namespace and rights of one key. `name`: for the audit log, "" if the key has none."""

    namespace: str
    rights: frozenset[Right]
    name: str = ""

    def has_right(self, right: Right) -> bool:
        """Return True if the key has `right`."""
        return right in self.rights or "admin" in self.rights

    def require_right(self, right: Right, what: str) -> None:
        """Raise ForbiddenError unless the key has `right`. `what`: the action that needs it, for the message."""
        if not self.has_right(right):
            has = ", ".join(sorted(self.rights)) or "none"
            raise ForbiddenError(f"{what} needs the right {right!r}, and this API key has: {has}")

    def check_namespace(self, named: str) -> None:
        """Raise ForbiddenError if a request names another namespace than the key's.

        `named` is the namespace in the request; "" if it names none.
        """
        if named not in ("", self.namespace):
            raise ForbiddenError(
                f"the request names the namespace {named!r}, but its API key is bound to {self.namespace!r}; leave the "
                "namespace out, or send a key of that namespace"
            )


@dataclass(slots=True)
class AuthContext:
    """Rights of an HTTP request that the server is answering, and the reason if its prompt was refused."""

    grant: Grant  # of the request's API key
    rejection_reason: str = ""  # why the engine client refused to run the prompt; "" if it did not refuse


current_auth: ContextVar[AuthContext | None] = ContextVar("ragblend_auth", default=None)
"""HTTP request that the current task serves. It is set before vLLM gets the request, and tasks that vLLM starts for the
request inherit it."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """API keys of a server."""

    grants: Mapping[bytes, Grant]  # by the key's SHA-256
    open_paths: frozenset[str] = field(default_factory=frozenset)  # paths that need no key for GET and HEAD

    def is_public_route(self, method: str, path: str) -> bool:
        """Return True if a request to the path needs no key."""
        return method in ("GET", "HEAD") and path in self.open_paths

    def grant_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Grant | None:
        """Return the grant of a request's key (`Authorization: Bearer` or `x-api-key`); None without a valid key."""
        header_values = {name.lower(): value for name, value in headers}
        scheme, _, token = header_values.get(b"authorization", b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else header_values.get(b"x-api-key", b"")
        return self.grants.get(hashlib.sha256(key).digest()) if key else None

    def check_route(self, grant: Grant, method: str, path: str) -> None:
        """Raise ForbiddenError if the key may not call the route. A route unknown to this module requires "admin"."""
        if ("GET" if method == "HEAD" else method, path) in _ANY_KEY:
            return
        if method == "POST" and path in _ENGINE and (grant.has_right("ask") or grant.has_right("ingest")):
            return
        if (method, path) == ("POST", LOOKUP_PATH):
            grant.require_right("ask", f"{method} {path}")
            return
        if path == DOCUMENTS_PATH or path.startswith(f"{DOCUMENTS_PATH}/"):
            grant.require_right("ingest", f"{method} {DOCUMENTS_PATH}")
            return
        grant.require_right("admin", f"{method} {path}")


class KeysFile:
    """The API keys in a file, which is read again after it has changed. Not thread-safe.

    The constructor raises the errors of `read_keys`. If a changed file cannot be read, the earlier keys stay valid.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._state, self._looked_s = self._file_state(), time.monotonic()
        self._keys = read_keys(path)

    def current(self) -> ApiKeys:
        """Return the keys of the file as it was at most `_LOOK_S` seconds ago."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, state = now_s, self._file_state()
            if state != self._state:
                self._state = state
                try:
                    self._keys = read_keys(self._path)
                except RagblendError as error:
                    log.error("the API keys stay as they were: %s", error)
                else:
                    log.info("%d API keys were read from the changed keys file", len(self._keys.grants))
        return self._keys

    def _file_state(self) -> tuple[int, ...]:
        """Return what differs once the file was written or replaced, as Kubernetes replaces mounted secrets."""
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def bind_namespace(transfer_params: object, grant: Grant) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the engine: those of a request, with the namespace of its API key.

    The field `ragblend_tenant` passes this namespace to the connector. Fields of other connectors are dropped. Raises
    ForbiddenError if the request names another namespace, or if the key lacks the right for the request's mode.

    >>> acme = Grant("acme", frozenset({"ask"}))
    >>> bind_namespace({"ragblend": {"mode": "prefix"}}, acme)
    {'ragblend_tenant': 'acme', 'ragblend': {'mode': 'prefix', 'namespace': 'acme'}}
    """
    params = transfer_params.get(PARAMS_KEY) if isinstance(transfer_params, Mapping) else None
    ingests = isinstance(params, Mapping) and params.get("mode") == "ingest"
    grant.require_right("ingest" if ingests else "ask", "mode 'ingest'" if ingests else "a prompt")
    sent: dict[str, Any] = {TENANT_KEY: grant.namespace}
    if params is None:
        return sent
    if isinstance(params, Mapping):
        grant.check_namespace(params.get("namespace") or "")
        params = {**params, "namespace": grant.namespace}
    return {**sent, PARAMS_KEY: params}


def read_keys(path: str | Path) -> ApiKeys:
    """Return the keys of a TOML or JSON file.

    Raises NotFoundError without the file. Raises UsageError for an unreadable or invalid file, or unsafe permissions
    (see `read_private_file`).
    """
    path = expand_user_path(path, "--api-keys-file")
    missing = f"there is no keys file at {path}; ragblend serve --api-keys-file FILE needs one"
    data = read_private_file(path, "the keys file", missing, _MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"the keys file {path} holds more than {_MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
        values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return parse_keys(values)
    except UsageError as error:
        raise UsageError(f"the keys file {path}: {error}") from None
    except (ValueError, RecursionError):  # the parser's message may quote a key
        raise UsageError(f"the keys file {path} is neither TOML nor JSON") from None


def parse_keys(values: object) -> ApiKeys:
    """Return the keys in a file's contents. Raises UsageError, whose message contains no key."""
    if not isinstance(values, dict) or not isinstance(values.get("keys"), dict) or not values["keys"]:
        raise UsageError(
            'it contains no keys; write a table for each: [keys."KEY"], namespace = "NAME", rights = ["ask", "ingest"]'
        )
    unknown = sorted(set(values) - {"keys", "open"})
    if unknown:
        raise UsageError(f"it contains {', '.join(unknown)}; known: keys, open")
    opened = values.get("open", [])
    if not isinstance(opened, list) or not all(isinstance(path, str) and path.startswith("/") for path in opened):
        raise UsageError(f'open is {opened!r}; give paths, such as ["/health"]')
    grants: dict[bytes, Grant] = {}
    for number, (key, facts) in enumerate(values["keys"].items(), start=1):
        digest = _digest_of(key, number)
        if digest in grants:
            raise UsageError(f"key {number} is given twice, once as its SHA-256; remove one of them")
        grants[digest] = _grant(facts, number)
    return ApiKeys(grants, frozenset(opened))


def _digest_of(key: str, number: int) -> bytes:
    if not key.startswith(_SHA256):
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"key {number} is no API key; use 8 or more ASCII characters without blanks")
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_SHA256))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise UsageError(f"key {number} is no SHA-256; write sha256: and 64 hex digits")
    return digest


def _grant(facts: object, number: int) -> Grant:
    if not isinstance(facts, dict) or set(facts) - {"name"} != {"namespace", "rights"}:
        raise UsageError(f'key {number} needs exactly namespace = "NAME" and rights = [...], and may have name = "..."')
    namespace, rights, name = facts["namespace"], facts["rights"], facts.get("name", "")
    if not isinstance(namespace, str):
        raise UsageError(f"the namespace of key {number} is {namespace!r}; it must be text")
    check_namespace(namespace)
    if not isinstance(rights, list) or not rights or not all(right in RIGHTS for right in rights):
        raise UsageError(f"the rights of key {number} are {rights!r}; choose from {', '.join(RIGHTS)}")
    if not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
        raise UsageError(f"the name of key {number} must be text of at most {_MAX_NAME_CHARS} characters")
    return Grant(namespace, frozenset(rights), name)
