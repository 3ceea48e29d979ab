"""Engine over HTTP: drives a vLLM server, started by `ragblend serve`, through `/v1/completions` with token ids.

Text is tokenized and detokenized here; the server receives ids and chunk spans only. Read `VllmClient.deltas` first.
Depends on HTTP, server-sent events and vLLM's fields, not on KV.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit
from weakref import WeakSet

import httpx

from ragblend.engine.fusion.lookup import NO_CONTEXT, IngestionContext
from ragblend.engine.store.base import CONTAINS_BATCH, KVStore, StoreCounters
from ragblend.engine.store.kv import ChunkKV
from ragblend.engine.vllm.base_engine import OutputDelta, ServedModelInfo, VllmEngineBase, VllmRequest, sampling
from ragblend.engine.vllm.params import report_from, vllm_structure
from ragblend.errors import (
    BackendUnreachableError,
    EngineClosedError,
    NotFoundError,
    PromptTooLongError,
    RagblendError,
    UsageError,
)
from ragblend.options import CONTEXT, RETRIES, SECONDS, ContextPolicy, is_url
from ragblend.redaction import redact

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "RAGBLEND_API_KEY"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0  # a long prompt behind a full queue may be silent for minutes
MAX_RETRIES = 2
RETRY_STATUS = frozenset({408, 429, 502, 503, 504})
_FIRST_PAUSE_S = 0.5  # doubled with every retry
_BATCH_CHARS = 8 << 20  # of documents in one request, as JSON in ASCII
_POLL_S = 0.2  # between looks how far the server is
_LOST_S = 30.0  # after which documents that no replica knows are taken to be gone


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return is_url(url) and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        return False


class ServerFacts(NamedTuple):
    """Facts that a server reports about itself. `fingerprint` is empty for a vLLM without ragblend."""

    model: str  # the name requests must give
    root: str  # where the server has it from
    context_length: int
    fingerprint: str = ""
    bytes_per_token: int = 0
    num_layers: int = 0
    context: ContextPolicy | None = None  # what its store's chunks are computed behind
    namespace: str = ""  # that the API key is bound to


class Connection:
    """Connection to one server: sends the API key, retries, raises readable errors. Safe to share between threads."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = READ_TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        if not _is_address(url):
            raise UsageError(f"backend is {redact(url)!r}; choose 'transformers', 'vllm' or http://HOST:PORT")
        RETRIES.validate("max_retries", max_retries)
        SECONDS.validate("timeout", timeout)
        base_url = url.rstrip("/").removesuffix("/v1")
        self.url = redact(base_url)  # for people
        key = api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("VLLM_API_KEY")
        self._max_retries = max_retries
        self._first_pause_s = first_pause_s
        self._closed = threading.Event()
        self._streams: WeakSet[Any] = WeakSet()  # network streams that were opened, to wake whoever reads from them
        self._num_open = 0  # requests under way
        self._lock = threading.Lock()
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    @contextmanager
    def open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        """Yield a response whose body is not read yet. The request is retried until the head has arrived, not
        afterwards.
        """
        with self._counted():
            with self._translated():
                response = self._send(method, path, body)
            try:
                with self._translated():
                    if response.status_code >= 400:
                        response.read()
                        raise self._error(response, path)
                    yield response
            finally:
                response.close()

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that a request answers with."""
        with self.open(method, path, body) as response:
            return self._object(response.read(), path)

    def close(self) -> None:
        """Close the sockets. Threads that wait for the server get EngineClosedError at once."""
        self._closed.set()
        for stream in list(self._streams) if self._num_open else ():
            # Closing a socket does not wake a thread that reads from it; shutting it down does.
            with suppress(OSError, AttributeError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._http.close()

    def _note_stream(self, event: str, info: Mapping[str, Any]) -> None:
        """Record the network streams that a request opens; a trace callback of httpcore."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._streams.add(info["return_value"])

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        pause_s = self._first_pause_s
        for left in range(self._max_retries, -1, -1):
            if self._closed.is_set():
                raise EngineClosedError(f"the engine over {self.url} is closed; load it again")
            try:
                request = self._http.build_request(method, path, json=body, extensions={"trace": self._note_stream})
                response = self._http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.RemoteProtocolError) as error:
                # Nothing of an answer has come: sending it again cannot give two.
                if not left or self._closed.is_set():
                    raise
                log.info("%s: %s; trying again", self.url, error)
            else:
                if response.status_code not in RETRY_STATUS or not left:
                    return response
                response.close()
                log.info("%s answered %d; trying again", self.url, response.status_code)
            self._closed.wait(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except EngineClosedError:
            raise
        except Exception as error:  # of whatever kind: what a socket raises that is shut down while it is read
            if self._closed.is_set():
                raise EngineClosedError(f"the engine over {self.url} was closed while it was answering") from error
            named = self._map_network_error(error)
            if named is None:
                raise
            raise named from error

    def _map_network_error(self, error: Exception) -> RagblendError | None:
        """Return the RagblendError for a network failure; None for any other error."""
        if isinstance(error, httpx.TimeoutException):
            found = (
                f"did not answer in time ({type(error).__name__}); look at its log, or wait longer (timeout=SECONDS)"
            )
            return BackendUnreachableError(f"{self.url} {found}")
        if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
            found = f"went away in the middle of an answer ({error}); look at its log and ask again"
            return BackendUnreachableError(f"{self.url} {found}")
        if isinstance(error, httpx.TransportError):
            found = f"no server answers at {self.url} ({error}); start one: ragblend serve MODEL --store DIR"
            return BackendUnreachableError(found)
        return None

    def _error(self, response: httpx.Response, path: str) -> RagblendError:
        status, said = response.status_code, _message(response.text)
        if status == 403 and said:
            return RagblendError(f"{self.url} refuses what this API key may not: {said}")
        if status in (401, 403):
            return RagblendError(
                f"{self.url} refuses the API key ({status}); give the server's: export {API_KEY_VARIABLE}=KEY, or "
                "api_key=..."
            )
        if status == 404:
            return NotFoundError(
                f"{self.url} has no {path} ({said}); is it a vLLM server? Start one: ragblend serve MODEL --store DIR"
            )
        if status in RETRY_STATUS:
            return BackendUnreachableError(
                f"{self.url} is busy or starting ({status}: {said}); try again, or add replicas behind it"
            )
        if status == 400 and "maximum context length" in said:
            fix = "retrieve fewer chunks (`k`), or start the server with a larger --max-model-len"
            return PromptTooLongError(f"{said}; {fix}")
        if status < 500:
            return UsageError(f"{self.url} refuses the request ({status}): {said}")
        return RagblendError(f"{self.url} failed ({status}): {said}; look at the server's log")

    def _object(self, text: bytes | str, path: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise RagblendError(f"{self.url}{path} answered no JSON object; is it a vLLM server?")
        return value


def server_facts(connection: Connection, model: str = "") -> ServerFacts:
    """Return the facts of the server that `connection` leads to. `model` selects one of several served names.

    Raises BackendUnreachableError if nothing answers.
    """
    models = connection.json("GET", "/v1/models").get("data")
    if not isinstance(models, list) or not models or not all(isinstance(entry, dict) for entry in models):
        raise RagblendError(f"{connection.url}/v1/models names no model; is it a vLLM server?")
    first = next((entry for entry in models if model in (entry.get("id"), entry.get("root"))), models[0])
    length = first.get("max_model_len")
    facts = ServerFacts(
        str(first.get("id")), str(first.get("root") or first.get("id")), length if isinstance(length, int) else 2**31
    )
    try:
        own = connection.json("GET", "/v1/ragblend")
    except NotFoundError:
        return facts
    context = own.get("context")
    return facts._replace(
        fingerprint=str(own.get("fingerprint", "")),
        bytes_per_token=int(own.get("bytes_per_token") or 0),
        num_layers=int(own.get("num_layers") or 0),
        context=context if CONTEXT.accepts(context) else None,
        namespace=str(own.get("namespace") or ""),
    )


class ServerStore(KVStore):
    """Store of a server, queried and changed through its HTTP interface. KV is never transferred.

    `root` is a local directory for the texts of ingested chunks; None keeps them in memory. For a server that does not
    blend, no request is sent and every key is a miss.
    """

    is_remote = True

    def __init__(
        self,
        connection: Connection,
        root: Path | None = None,
        blends: bool = True,
        context: ContextPolicy | None = None,
    ) -> None:
        self._connection, self._blends, self._policy = connection, blends, context
        self.root = root

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connection.url

    @property
    def counters(self) -> StoreCounters:
        """Zero: nothing is counted here."""
        return StoreCounters()

    def contains(self, key: str) -> bool:
        """Return True if the server's store has `key`."""
        stored = self._ask("stored", key).get("stored")
        return bool(stored and stored[0])

    def contains_many(self, keys: Sequence[str], until_s: float = math.inf) -> list[bool]:
        """Return, for each key, True if the server's store has it. The server applies its own timeout; `until_s` is
        ignored.
        """
        found: list[bool] = []
        for start in range(0, len(keys), CONTAINS_BATCH):
            batch = list(keys[start : start + CONTAINS_BATCH])
            flags = [bool(each) for each in self._ask("stored", *batch).get("stored") or ()]
            found += [*flags, *([False] * len(batch))][: len(batch)]
        return found

    def delete(self, key: str) -> bool:
        """Remove `key` from the server's store. Return True if it was stored."""
        return bool(self._ask("forget", key).get("num_removed"))

    def read_context(self) -> ContextPolicy | None:
        """Return the context policy that the server reported; None if it has none. The first ingestion sets it."""
        return self._policy

    def put_context(self, policy: ContextPolicy) -> None:
        """Use `policy` as the server's context policy from now on. Raises UsageError if the server has another one."""
        if policy != (self._policy or policy):
            raise UsageError(
                f"the store of the server at {self._connection.url} keeps its chunks in the context {self._policy!r}; "
                f"change it where the server runs: ragblend precompute --context {policy} --store DIR"
            )
        self._policy = policy

    def _ask(self, route: str, *keys: str) -> dict[str, Any]:
        return self._connection.json("POST", f"/v1/ragblend/{route}", {"keys": keys}) if self._blends else {}

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        """Return None: KV stays on the server."""
        return None

    def put(self, kv: ChunkKV) -> None:
        """Raise RagblendError: the server computes its KV itself."""
        raise RagblendError(f"KV cannot be sent to {self._connection.url}; have it computed there: ragblend ingest")

    def keys(self) -> Iterator[str]:
        """Return no keys: HTTP offers no list of them."""
        return iter(())

    def nbytes(self) -> int:
        """Return 0: the size is not known here."""
        return 0


class VllmClient(VllmEngineBase):
    """Engine over a vLLM server. Made by `load_engine(model, backend="http://HOST:PORT")`.

    A server without ragblend answers as ordinary vLLM. The server's store cannot be listed from here.
    """

    def __init__(
        self,
        connection: Connection,
        facts: ServerFacts,
        renderer: Any,
        *,
        name: str,
        root: Path | None = None,
        stop_ids: Iterable[int] = (),
        **options: Any,
    ) -> None:
        self.connection = connection
        self.served_model = facts.model
        self.blends = bool(facts.fingerprint)
        store = ServerStore(connection, root, self.blends, facts.context)
        own = ServedModelInfo(
            name,
            facts.fingerprint or f"served-{facts.model}",
            facts.context_length,
            facts.bytes_per_token,
            renderer.stop_ids() | frozenset(stop_ids),
            facts.num_layers,
        )
        if not self.blends:
            log.warning(
                "the server at %s is vLLM without ragblend and reuses no chunks; start it with: ragblend serve %s",
                connection.url,
                facts.root,
            )
            options["on_miss"] = "inline"
        options["namespace"] = options.get("namespace") or facts.namespace  # another one is refused by the server
        super().__init__(renderer, store, own, **options)

    def deltas(self, request: VllmRequest) -> Generator[OutputDelta]:
        """Yield the deltas of one streamed completion. Closing the generator closes the connection; the server then
        aborts.
        """
        with self.connection.open("POST", "/v1/completions", self.body(request)) as response:
            for event in events(response.iter_lines()):
                yield delta(event, self.connection.url)

    def body(self, request: VllmRequest) -> dict[str, Any]:
        """Return the JSON body of a completion request."""
        options = request.options
        body: dict[str, Any] = {
            "model": self.served_model,
            "prompt": request.prompt.token_ids,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "stream": True,
            "return_token_ids": True,
            **sampling(options),
        }
        if options.seed is not None:
            body["seed"] = options.seed
        if options.stops:
            body["stop"] = list(options.stops)
        if options.structured_outputs is not None:
            body["structured_outputs"] = vllm_structure(options.structured_outputs)
        if self.facts.stop_ids:
            body["stop_token_ids"] = sorted(self.facts.stop_ids)
        if self.blends:
            body["kv_transfer_params"] = request.kv_transfer_params
        return body

    def prefetch_keys(self, keys: list[str]) -> None:
        """Send one prefetch request, which the server answers at once. With a load balancer, only one replica
        prefetches.
        """
        if not self.blends or not keys:
            return
        try:
            self.connection.json("POST", "/v1/ragblend/prefetch", {"keys": keys})
        except RagblendError as error:
            log.warning("nothing is prefetched: %s", error)

    def send_documents(
        self, collection: str, documents: Sequence[Mapping[str, Any]], progress: Callable[[str, int, int | None], None]
    ) -> tuple[Counter[str], list[dict[str, str]]]:
        """Send documents to `POST /v1/ragblend/documents`, and wait until the server has stored them.

        Return its counts, and the `reasons` of documents that are not stored or have no chunk. Raises RagblendError for
        a server without ragblend, and the errors of the requests.
        """
        self._check_blends()
        total, reasons = Counter[str](), list[dict[str, str]]()
        bodies = [{"collection": collection, "documents": batch} for batch in _batches(documents)]
        waiting = [self.connection.json("POST", self._documents_path(), body)["ingestion"] for body in bodies]
        seen_s = time.monotonic()
        while waiting:
            path = self._documents_path(collection=collection, ingestion=waiting[0])
            summary = self.connection.json("GET", path)
            if counts := summary["collections"].get(collection):  # else behind a balancer another replica has answered
                seen_s = time.monotonic()
                progress("prefill", summary["batch"]["num_done"], summary["batch"]["num_chunks"])
                if not counts["num_waiting"]:
                    del waiting[0]
                    total.update(counts)
                    reasons += summary["reasons"]
                    continue
            elif time.monotonic() - seen_s > _LOST_S:
                raise BackendUnreachableError(
                    f"{self.connection.url} knows no more of documents that it took; were they sent again, or removed "
                    "meanwhile? Send them again to be sure"
                )
            time.sleep(_POLL_S)
        return total, reasons

    def remove_documents(self, collection: str, ids: Sequence[str]) -> int:
        """Delete documents from the server. Return the number of deleted entries."""
        if not ids or not self.blends:
            return 0
        body = {"collection": collection, "ids": list(ids)}
        return int(self.connection.json("DELETE", self._documents_path(), body)["num_kv"])

    def _documents_path(self, **query: str) -> str:
        given = {**query, **({"namespace": self.namespace} if self.namespace else {})}
        return "/v1/ragblend/documents" + (f"?{urlencode(given)}" if given else "")

    def _check_blends(self) -> None:
        if not self.blends:
            raise RagblendError(
                f"the server at {self.connection.url} is vLLM without ragblend and stores no KV; "
                "start it with: ragblend serve MODEL --store DIR"
            )

    def precompute_ids(self, token_ids: tuple[int, ...], behind: IngestionContext = NO_CONTEXT) -> int:
        """Prefill and store a chunk given as token ids. Return the bytes stored. Raises RagblendError for a vLLM
        without ragblend.
        """
        self._check_blends()
        return super().precompute_ids(token_ids, behind)

    def close(self) -> None:
        """Finish background work and free the sockets."""
        if not self.is_usable:
            return
        super().close()
        self.connection.close()


def _batches(documents: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the documents in batches, each small enough for one request."""
    batch: list[Mapping[str, Any]] = []
    num_chars = 0
    for document in documents:
        size = len(json.dumps(document))
        if batch and num_chars + size > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(document)
        num_chars += size
    if batch:
        yield batch


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream. Raises BackendUnreachableError if it ends without `[DONE]`.

    >>> list(events(['data: {"a": 1}', '', ': keep-alive', 'data: [DONE]']))
    [{'a': 1}]
    """
    for line in lines:
        field, _, value = line.partition(":")
        if field != "data":
            continue  # a comment, a blank line between events, or a field that OpenAI's format does not use
        value = value.strip()
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise BackendUnreachableError(f"the server sent {value[:80]!r} instead of JSON; ask again")
        yield event
    raise BackendUnreachableError("the server ended the answer before it was complete; look at its log and ask again")


def delta(event: Mapping[str, Any], url: str = "the server") -> OutputDelta:
    """Return one event of a completion stream as an OutputDelta. Raises RagblendError for an event that reports a
    failure.
    """
    if "error" in event:
        raise RagblendError(f"{url} failed while answering: {_message(json.dumps(event))}; look at the server's log")
    report = report_from(event.get("kv_transfer_params"))
    choices = event.get("choices") or ()
    if not choices:
        return OutputDelta(report=report)
    return OutputDelta(choices[0].get("token_ids") or (), choices[0].get("finish_reason"), report)


def _message(text: str) -> str:
    """Return the message in an error's body, in vLLM's or OpenAI's form, else the beginning of the body.

    >>> _message('{"error": {"message": "too long"}}'), _message("oops")
    ('too long', 'oops')
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:300]
    inner = body.get("error", body) if isinstance(body, dict) else body
    said = inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner
    return str(said)[:300]
