"""Engine over HTTP: an OpenAI client of a vLLM server, started by `ragblend serve`.

Messages go to `/v1/chat/completions` as they are, plain text to `/v1/completions`, documents to
`/v1/ragblend/documents`. The server renders, tokenizes and finds the chunks; here are neither ids nor a tokenizer.
Read `ServedStream._run` first. Depends on HTTP, server-sent events and vLLM's fields.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Unpack
from urllib.parse import urlencode, urlsplit
from weakref import WeakSet

import httpx

from ragblend.engine.base import EngineBase
from ragblend.engine.report import BlendReport, Generation
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.vllm.params import BlendParams, report_from, sampling, vllm_structure
from ragblend.engine.vllm.streams import AnswerStream, checked_options
from ragblend.errors import (
    BackendUnreachableError,
    EngineClosedError,
    NotFoundError,
    PromptTooLongError,
    RagblendError,
    UsageError,
)
from ragblend.options import CONTEXT, RETRIES, SECONDS, ContextPolicy, GenerationKeywords, GenerationOptions, is_url
from ragblend.prompt.render import Renderer
from ragblend.prompt.tools import CallFormat, without_tools
from ragblend.prompt.types import MatchedPrompt, Message, Part, Prompt, as_chunk
from ragblend.redaction import redact

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "RAGBLEND_API_KEY"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0  # a long prompt behind a full queue may be silent for minutes
MAX_RETRIES = 2
RETRY_STATUS = frozenset({408, 429, 502, 503, 504})
CHUNK_COLLECTION = "langchain"
"""Collection of chunks that are stored without a document; `precompute_documents` puts texts without ids there, too."""
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
    context: ContextPolicy = "none"  # what its store's chunks are computed behind
    namespace: str = ""  # that the API key is bound to
    answer_lead: str = ""  # whitespace that the model writes before an answer
    knows_tools: bool = True  # whether the model's template shows tools
    calls: Mapping[str, str | None] | None = None  # how the model writes tool calls, and how they look in its text
    calls_shown: Mapping[str, str | None] | None = None


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
        for stream in list(self._streams):
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
        if status == 400 and "context length" in said:
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
    context: Any = own.get("context")
    return facts._replace(
        fingerprint=str(own.get("fingerprint", "")),
        bytes_per_token=int(own.get("bytes_per_token") or 0),
        context=context if CONTEXT.accepts(context) else "none",
        namespace=str(own.get("namespace") or ""),
        answer_lead=str(own.get("answer_lead") or ""),
        knows_tools=own.get("knows_tools") is not False,
        calls=own.get("calls"),
        calls_shown=own.get("calls_shown"),
    )


class ServedRenderer:
    """What a server tells of its model's Renderer. The rest is the tokenizer's, which `load` loads when it is needed:
    to cut documents and to count tokens, not to ask.
    """

    def __init__(self, facts: ServerFacts, load: Callable[[], Renderer]) -> None:
        self._load = load
        if facts.calls and facts.calls_shown:
            self.calls, self.calls_shown = CallFormat(**facts.calls), CallFormat(**facts.calls_shown)  # type: ignore[arg-type]

    @cached_property
    def _loaded(self) -> Renderer:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded, name)


class ServerStore(MemoryStore):
    """The store of an engine over HTTP, empty: KV and the registry of its chunks are the server's."""

    is_remote = True


class ServedStream(AnswerStream):
    """An answer in progress, over server-sent events.

    When the engine is closed, the answer ends at once with its text so far, finish reason "cancelled" and no error.
    """

    def __init__(self, engine: VllmClient, prompt: Prompt, options: GenerationOptions) -> None:
        self._engine, self._prompt, self._options = engine, prompt, options
        super().__init__(options)

    def _run(self) -> Generator[str]:
        engine, result = self._engine, self.result
        report: BlendReport | None = None
        num_prompt, ttft_s, first_s = 0, 0.0, perf_counter()
        if engine.closed:
            return
        path = "/v1/chat/completions" if self._prompt.is_chat else "/v1/completions"
        try:
            with (
                suppress(EngineClosedError),
                engine.connection.open("POST", path, engine.body(self._prompt, self._options)) as response,
            ):
                for event in events(response.iter_lines()):
                    if not engine.is_usable:
                        return
                    if "error" in event:
                        said = _message(json.dumps(event))
                        raise RagblendError(
                            f"{engine.connection.url} failed while answering: {said}; look at the server's log"
                        )
                    report = report_from(event.get("kv_transfer_params")) or report
                    num_prompt = (event.get("usage") or {}).get("prompt_tokens", num_prompt)
                    for choice in event.get("choices") or ():
                        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                        if not ttft_s and (piece or choice.get("token_ids")):
                            ttft_s, first_s = perf_counter() - self._start_s, perf_counter()
                        result.token_ids += choice.get("token_ids") or ()
                        if reason := choice.get("finish_reason"):
                            result.finish_reason = reason if reason in ("length", "stop") else "cancelled"
                            if reason == "stop" and not isinstance(choice.get("stop_reason"), str):
                                result.token_ids = result.token_ids[:-1]  # the token that ended it
                        if not result.text:
                            piece = piece.removeprefix(engine.facts.answer_lead)
                        if piece:
                            result.text += piece
                            yield piece
        finally:
            if not engine.blends:
                result.report = BlendReport("full", "none", 1.0)
            self._set_report(report, num_prompt, ttft_s, first_s)
            if report is not None and result.finish_reason != "cancelled":
                engine.on_answer(self._prompt, self._options, result)


class VllmClient(EngineBase):
    """Engine over a vLLM server. Made by `load_engine(model, backend="http://HOST:PORT")`.

    A server without ragblend answers as ordinary vLLM. `load_renderer` loads the model's tokenizer, which is needed to
    cut documents into chunks and to count tokens. Chunks that a prompt names and the server has not are sent to it as
    documents, in the background, unless `on_miss` is "inline".
    """

    def __init__(
        self,
        connection: Connection,
        facts: ServerFacts,
        load_renderer: Callable[[], Renderer],
        *,
        name: str,
        on_miss: str = "store",
        context: ContextPolicy | None = None,
        **options: Any,
    ) -> None:
        self.connection, self.facts, self.context_length = connection, facts, facts.context_length
        self.blends = bool(facts.fingerprint)
        if not self.blends:
            log.warning(
                "the server at %s is vLLM without ragblend and reuses no chunks; start it with: ragblend serve %s",
                connection.url,
                facts.root,
            )
        options["namespace"] = options.get("namespace") or facts.namespace  # another one is refused by the server
        super().__init__(
            name=name, fingerprint=facts.fingerprint or f"served-{facts.model}", on_miss=on_miss, **options
        )
        self.renderer: Any = ServedRenderer(facts, load_renderer)
        self.store = ServerStore(0)
        self.context = self.default_context = facts.context
        if context is not None:
            self.set_context_policy(context)
        self._sends_missing = on_miss == "store" and self.blends
        self._sent: set[str] = set()  # ids of the chunks that were sent because the server lacked them

    @property
    def bytes_per_token(self) -> int:
        """Bytes of stored KV per chunk token, all layers."""
        return self.facts.bytes_per_token

    def set_context_policy(self, policy: ContextPolicy) -> None:
        """Raise UsageError for another policy than the server's."""
        if policy != self.context:
            raise UsageError(
                f"the store of the server at {self.connection.url} keeps its chunks in the context {self.context!r}; "
                f"change it where the server runs: ragblend precompute --context {policy} --store DIR"
            )

    # -- answering

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Answer `prompt`; `options` are GenerationOptions. Ends at the model's end token or a stop string."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> ServedStream:
        """Start an answer and return its stream. Iterating yields text; `.result` holds answer and report at its end.

        Options are checked before the request is sent, the prompt's length by the server. Closing the stream early
        aborts the request.
        """
        checked = checked_options(options)
        self._check_prompt(prompt, checked.stops)
        return ServedStream(self, prompt, checked)

    def body(self, prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
        """Return the JSON body of a request, with vLLM's own fields beside OpenAI's."""
        if prompt.uses_tools and not self.facts.knows_tools:
            prompt = without_tools(prompt)
        body: dict[str, Any] = {
            "model": self.facts.model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **sampling(options),
        }
        if prompt.is_chat:
            body["messages"] = [_openai_message(message) for message in prompt.messages]
            if prompt.tools:  # calls are read here, and what holds the answer to them is in structured_outputs
                body |= {"tools": list(prompt.tools), "tool_choice": "none"}
        else:
            body["prompt"] = prompt.messages[0].content
        if options.seed is not None:
            body["seed"] = options.seed
        if options.stops:
            body["stop"] = list(options.stops)
        if options.structured_outputs is not None:
            body["structured_outputs"] = vllm_structure(options.structured_outputs)
        if self.blends:
            body["kv_transfer_params"] = BlendParams.of(options, self.namespace).as_dict()
        return body

    def on_answer(self, prompt: Prompt, options: GenerationOptions, answer: Generation) -> None:
        """After a complete answer of a server that blends, log warnings, send chunks that the prompt names and the
        server lacks, and start a shadow comparison.
        """
        report = answer.report
        if options.mode not in ("blend", "reuse") or report.refused_reason:
            return
        self.notices.record_lookup(report.prompt_tokens, [chunk.hit for chunk in report.chunks])
        if self._sends_missing and report.num_chunk_hits < len(prompt.chunks):
            self._send_missing(prompt)
        if not options.temperature:
            full = replace(options, mode="full")
            self._shadow.sample_repeat(lambda: ServedStream(self, prompt, full), answer)

    # -- documents

    def precompute(self, chunk: Part) -> int:
        """Have the server store one chunk, as a document of its own. Return the bytes stored, 0 if it was stored
        already.

        Raises RagblendError if the server did not store it, or is a vLLM without ragblend.
        """
        text = as_chunk(chunk).text.strip()
        counts, reasons = self.send_documents(CHUNK_COLLECTION, [{"id": _chunk_id(text), "chunks": [text]}])
        if reasons:
            raise RagblendError(f"the chunk was not stored: {reasons[0]['reason']}")
        return counts["new_kv_bytes"]

    def is_stored(self, chunk: Part) -> bool:
        """Return True if the server has stored the chunk as a document of its own."""
        if not self.blends:
            return False
        path = self._documents_path(_chunk_id(as_chunk(chunk).text), collection=CHUNK_COLLECTION)
        try:
            return bool(self.connection.json("GET", path)["num_kv"])
        except NotFoundError:
            return False

    def forget(self, chunk: Part) -> bool:
        """Delete the chunk that was stored as a document of its own. Return True if it was there."""
        return self.remove_documents(CHUNK_COLLECTION, [_chunk_id(as_chunk(chunk).text)]) > 0

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Do nothing: a server reads what waiting requests will need by itself."""

    def add_known(self, chunks: Iterable[Part]) -> None:
        """Do nothing: the server knows the chunks of its documents."""

    def flush(self) -> None:
        """Wait until the chunks that prompts named are stored."""
        self._worker.submit(lambda: None).result()

    def _send_missing(self, prompt: Prompt) -> None:
        text_of = {_chunk_id(text): text for chunk in prompt.chunks if (text := chunk.text.strip())}
        new = text_of.keys() - self._sent
        self._sent |= new
        documents = [{"id": name, "chunks": [text_of[name]]} for name in sorted(new)]

        def send() -> None:
            try:
                _, reasons = self.send_documents(CHUNK_COLLECTION, documents)
                for reason in reasons:
                    log.warning("a missed chunk was not stored: %s", reason["reason"])
            except RagblendError as error:  # the answer is out already; the next miss sends them again
                self._sent -= new
                level = logging.DEBUG if isinstance(error, EngineClosedError) else logging.WARNING
                log.log(level, "a missed chunk was not stored: %s", error)

        if documents:
            with suppress(RuntimeError):  # the engine is closed, or the interpreter ends
                self._worker.submit(send)

    def send_documents(
        self,
        collection: str,
        documents: Sequence[Mapping[str, Any]],
        progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
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

    def _documents_path(self, document: str = "", **query: str) -> str:
        given = {**query, **({"namespace": self.namespace} if self.namespace else {})}
        place = "/v1/ragblend/documents" + (f"/{document}" if document else "")
        return place + (f"?{urlencode(given)}" if given else "")

    def _check_blends(self) -> None:
        if not self.blends:
            raise RagblendError(
                f"the server at {self.connection.url} is vLLM without ragblend and stores no KV; "
                "start it with: ragblend serve MODEL --store DIR"
            )

    # -- what needs the tokenizer, and the ids that a prompt becomes

    def match(self, prompt: Prompt) -> MatchedPrompt:
        """Raise UsageError: the server finds the chunks of a prompt."""
        self._refuse("finding chunks in a prompt's ids")

    def key(self, chunk: Part) -> str:
        """Raise UsageError: keys are made of ids."""
        self._refuse("the key of a chunk")

    def has_kv(self, chunk_ids: Sequence[int]) -> bool:
        """Raise UsageError: ids are the server's."""
        self._refuse("looking for the KV of token ids")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} is done where the KV is, not through {self.connection.url}; run it on that machine, with its "
            "store and backend='transformers' or 'vllm'"
        )

    def close(self) -> None:
        """Close the sockets, which ends what waits for the server, and the threads of background work."""
        if self.is_usable:  # not in a forked process: the sockets are its parent's as well
            self.connection.close()
        super().close()


def _chunk_id(text: str) -> str:
    """Return the id of a text that is stored without a document: that of the chunk registry."""
    return hashlib.blake2b(text.strip().encode(), digest_size=16).hexdigest()


def _openai_message(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form.

    >>> _openai_message(Message("user", "Why?"))
    {'role': 'user', 'content': 'Why?'}
    """
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role == "tool":
        sent["tool_call_id"] = message.call_id
    return sent


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
