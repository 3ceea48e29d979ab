"""Engine over HTTP: an OpenAI client of a vLLM server that `ragblend serve` started.

Messages go to `/v1/chat/completions`, plain text to `/v1/completions`, documents to `/v1/ragblend/documents`. The
server renders and tokenizes prompts and finds the chunks in them; the client needs no token ids for that. Read
`ServedStream._run` first. Depends on HTTP, server-sent events and vLLM's fields.
"""

from __future__ import annotations

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

from ragblend.catalog.schema import text_id
from ragblend.engine.base import EngineBase
from ragblend.engine.report import BlendReport, Generation
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.vllm.params import (
    BlendParams,
    report_from_params,
    vllm_filters_and_penalties,
    vllm_structured_outputs,
)
from ragblend.engine.vllm.streams import AnswerStream, checked_options, finish_reason
from ragblend.errors import (
    BackendUnreachableError,
    EngineClosedError,
    NotFoundError,
    PromptTooLongError,
    RagblendError,
    UsageError,
)
from ragblend.option_fields import default_of
from ragblend.option_keywords import GenerationKeywords
from ragblend.options import CONTEXT, RETRIES, SECONDS, ContextPolicy, GenerationOptions, LoadOptions, is_server_url
from ragblend.prompt.render import Renderer
from ragblend.prompt.tools import CallFormat, tool_use_as_text
from ragblend.prompt.types import Message, Part, Prompt, as_chunk
from ragblend.redaction import redact_url

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "RAGBLEND_API_KEY"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0  # a long prompt in a full queue may get no byte for minutes
MAX_RETRIES = 2
RETRY_STATUS = frozenset({408, 429, 502, 503, 504})
CHUNK_COLLECTION = "langchain"
"""Collection of chunks that are stored without a document. `precompute_documents` uses it for texts without ids."""
_FIRST_PAUSE_S = 0.5  # before the first retry; doubled with every retry
_POLL_S = 0.2  # between two requests for the progress of an ingestion
_LOST_S = 30.0  # an ingestion that every replica reports as unknown for so long has failed


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return is_server_url(url) and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        return False


class ServerFacts(NamedTuple):
    """Facts that a server reports about itself. `fingerprint` is empty for a vLLM without ragblend."""

    model: str  # the name that requests must contain
    root: str  # the model's Hugging Face id or path, as the server was started with
    context_length: int
    fingerprint: str = ""
    bytes_per_token: int = 0
    context: ContextPolicy = "none"  # of the server's store
    namespace: str = ""  # the API key's
    answer_lead: str = ""  # whitespace that the model writes before an answer
    knows_tools: bool = True  # True if the model's chat template supports tools
    calls: Mapping[str, str | None] | None = None  # CallFormat of tool calls in the model's tokens
    calls_shown: Mapping[str, str | None] | None = None  # CallFormat of tool calls in its text without special tokens


class Connection:
    """HTTP connection to one server. Thread-safe. It sends the API key, retries requests, and raises RagblendErrors."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        if not _is_address(url):
            raise UsageError(f"backend is {redact_url(url)!r}; choose 'transformers', 'vllm' or http://HOST:PORT")
        RETRIES.validate("max_retries", max_retries)
        SECONDS.validate("read_timeout_s", read_timeout_s)
        base_url = url.rstrip("/").removesuffix("/v1")
        self.url = redact_url(base_url)  # for messages
        key = api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("VLLM_API_KEY")
        self._max_retries = max_retries
        self._first_pause_s = _FIRST_PAUSE_S
        self._closed = threading.Event()
        self._streams: WeakSet[Any] = WeakSet()  # open network streams, whose readers `close` wakes
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    @contextmanager
    def stream(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        """Send a request and yield its response, whose body is still unread. Raises RagblendError for an error status.

        The request is sent again if the connection fails before response headers arrive, or if the status is in
        RETRY_STATUS.
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

    def request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON object in its response. Raises RagblendError if there is none."""
        with self.stream(method, path, body) as response:
            try:
                value = json.loads(response.read())
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise RagblendError(f"{self.url}{path} returned no JSON object; is it a vLLM server?")
            return value

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
                # No part of a response has arrived, so a second request cannot give a second answer.
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
        except Exception as error:  # a socket that is shut down during a read raises several kinds of errors
            if self._closed.is_set():
                raise EngineClosedError(f"the engine over {self.url} was closed during an answer") from error
            if isinstance(error, httpx.TimeoutException):
                reason = (
                    f"{self.url} did not answer in time ({type(error).__name__}); see its log, or raise read_timeout_s"
                )
            elif isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
                reason = f"{self.url} ended the connection during an answer ({error}); look at its log and try again"
            elif isinstance(error, httpx.TransportError):
                reason = f"no server answers at {self.url} ({error}); start one: ragblend serve MODEL --store DIR"
            else:
                raise
            raise BackendUnreachableError(reason) from error

    def _error(self, response: httpx.Response, path: str) -> RagblendError:
        status, message = response.status_code, _message(response.text)
        if status == 403 and message:
            return RagblendError(f"{self.url} does not allow the request for this API key: {message}")
        if status in (401, 403):
            return RagblendError(
                f"{self.url} rejects the API key ({status}); set the server's key: export {API_KEY_VARIABLE}=KEY, or "
                "api_key=..."
            )
        if status == 404:
            return NotFoundError(
                f"{self.url} has no {path} ({message}); is it a vLLM server? Start one: ragblend serve MODEL "
                "--store DIR"
            )
        if status in RETRY_STATUS:
            return BackendUnreachableError(
                f"{self.url} is busy or starting ({status}: {message}); try again, or add replicas"
            )
        if status == 400 and "context length" in message:
            fix = "retrieve fewer chunks (`k`), or start the server with a larger --max-model-len"
            return PromptTooLongError(f"{message}; {fix}")
        if status < 500:
            return UsageError(f"{self.url} rejects the request ({status}): {message}")
        return RagblendError(f"{self.url} failed ({status}): {message}; look at the server's log")


def request_server_facts(connection: Connection, model: str = "") -> ServerFacts:
    """Request a server's facts, and return them. `model` selects one of several served models by name or root.

    Raises BackendUnreachableError if nothing answers.
    """
    models = connection.request_json("GET", "/v1/models").get("data")
    if not isinstance(models, list) or not models or not all(isinstance(entry, dict) for entry in models):
        raise RagblendError(f"{connection.url}/v1/models lists no model; is it a vLLM server?")
    first = next((entry for entry in models if model in (entry.get("id"), entry.get("root"))), models[0])
    length = first.get("max_model_len")
    facts = ServerFacts(
        str(first.get("id")), str(first.get("root") or first.get("id")), length if isinstance(length, int) else 2**31
    )
    try:
        server_facts = connection.request_json("GET", "/v1/ragblend")
    except NotFoundError:
        return facts
    context: Any = server_facts.get("context")
    return facts._replace(
        fingerprint=str(server_facts.get("fingerprint", "")),
        bytes_per_token=int(server_facts.get("bytes_per_token") or 0),
        context=context if CONTEXT.accepts(context) else "none",
        namespace=str(server_facts.get("namespace") or ""),
        answer_lead=str(server_facts.get("answer_lead") or ""),
        knows_tools=server_facts.get("knows_tools") is not False,
        calls=server_facts.get("calls"),
        calls_shown=server_facts.get("calls_shown"),
    )


class ServerModelRenderer:
    """Renderer for the model of a server. It calls `load`, which loads the model's tokenizer, only when needed.

    The formats of tool calls come from `facts`. All other attributes are those of the loaded Renderer. The tokenizer
    is needed to split documents and to count tokens, but not to answer prompts. Exception: a server without
    ragblend reports no formats, so prompts with tools need the tokenizer.
    """

    def __init__(self, facts: ServerFacts, load: Callable[[], Renderer]) -> None:
        self._load = load
        if facts.calls and facts.calls_shown:
            self.call_format = CallFormat(**facts.calls)  # type: ignore[arg-type]
            self.call_format_in_text = CallFormat(**facts.calls_shown)  # type: ignore[arg-type]

    @cached_property
    def _loaded(self) -> Renderer:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded, name)


class ServedStream(AnswerStream):
    """Answer in progress, received as server-sent events.

    If the engine is closed, the answer ends at once with its text so far and finish reason "cancelled".
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
                engine.connection.stream("POST", path, engine.request_body(self._prompt, self._options)) as response,
            ):
                for event in sse_events(response.iter_lines()):
                    if not engine.is_usable:
                        return
                    if "error" in event:
                        message = _message(json.dumps(event))
                        raise RagblendError(
                            f"{engine.connection.url} failed during an answer: {message}; look at the server's log"
                        )
                    report = report_from_params(event.get("kv_transfer_params")) or report
                    num_prompt = (event.get("usage") or {}).get("prompt_tokens", num_prompt)
                    for choice in event.get("choices") or ():
                        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                        if not ttft_s and (piece or choice.get("token_ids")):
                            ttft_s, first_s = perf_counter() - self._start_s, perf_counter()
                        result.token_ids += choice.get("token_ids") or ()
                        if reason := choice.get("finish_reason"):
                            result.finish_reason = finish_reason(reason)
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
                engine.send_missing_after_answer(self._prompt, self._options, result)


class VllmClient(EngineBase):
    """Engine over a vLLM server, as `load_engine(model, backend="http://HOST:PORT")` returns it.

    If `on_miss` is "store", chunks that the server has not stored are sent to it as documents, in the background. A
    vLLM server without ragblend answers without reuse. `load_renderer` loads the model's tokenizer. It is called once,
    when the tokenizer is first needed (see `ServerModelRenderer`).
    """

    def __init__(
        self,
        connection: Connection,
        facts: ServerFacts,
        load_renderer: Callable[[], Renderer],
        *,
        name: str,
        on_miss: str = default_of(LoadOptions, "on_miss"),
        context: ContextPolicy | None = None,
        **options: Any,
    ) -> None:
        self.connection, self.facts = connection, facts
        self.context_length, self.bytes_per_token = facts.context_length, facts.bytes_per_token
        self.blends = bool(facts.fingerprint)
        if not self.blends:
            log.warning(
                "the server at %s is a vLLM without ragblend and reuses no chunks; start it with: ragblend serve %s",
                connection.url,
                facts.root,
            )
        options["namespace"] = options.get("namespace") or facts.namespace  # the server rejects any other
        super().__init__(
            name=name, fingerprint=facts.fingerprint or f"served-{facts.model}", on_miss=on_miss, **options
        )
        self.renderer: Any = ServerModelRenderer(facts, load_renderer)
        self.store = MemoryStore(0)  # empty, because the KV is on the server
        self.store.is_remote = True
        self.context = facts.context
        if context is not None:
            self.set_context_policy(context)
        self._sends_missing = on_miss == "store" and self.blends
        self._sent: set[str] = set()  # ids of the missing chunks that were sent

    def set_context_policy(self, policy: ContextPolicy) -> None:
        """Raise UsageError unless `policy` is the server's own, which a client cannot change."""
        if policy != self.context:
            raise UsageError(
                f"the context policy is {policy!r}, but the store of the server at {self.connection.url} has "
                f"{self.context!r}; on the server's machine run: ragblend precompute --context {policy} --store DIR"
            )

    # -- answering

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> Generation:
        """Return the answer to `prompt`, up to an end token or a stop string.

        `options`: fields of GenerationOptions.
        """
        return self.stream(prompt, **options).finish()

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKeywords]) -> ServedStream:
        """Start an answer and return its stream. Iterating yields text; afterwards `.result` has answer and report.

        Options are checked first; the server checks the prompt's length. Closing the stream early aborts the request.
        """
        checked = checked_options(options)
        self._check_prompt(prompt, checked.stop_strings)
        return ServedStream(self, prompt, checked)

    def request_body(self, prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
        """Return the JSON body of a completion request, with OpenAI's fields and vLLM's own."""
        if prompt.uses_tools and not self.facts.knows_tools:
            prompt = tool_use_as_text(prompt)
        body: dict[str, Any] = {
            "model": self.facts.model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **vllm_filters_and_penalties(options),
        }
        if prompt.is_chat:
            body["messages"] = [_openai_message(message) for message in prompt.messages]
            if prompt.tools:  # the client parses calls itself, and constrains them with structured_outputs
                body |= {"tools": list(prompt.tools), "tool_choice": "none"}
        else:
            body["prompt"] = prompt.messages[0].content
        if options.seed is not None:
            body["seed"] = options.seed
        if options.stop_strings:
            body["stop"] = list(options.stop_strings)
        if options.structured_outputs is not None:
            body["structured_outputs"] = vllm_structured_outputs(options.structured_outputs)
        if self.blends:
            body["kv_transfer_params"] = BlendParams.from_options(options, self.namespace).as_dict()
        return body

    def send_missing_after_answer(self, prompt: Prompt, options: GenerationOptions, answer: Generation) -> None:
        """After an answer, warn if no chunk was reused, and send missing chunks to the server in the background.

        Some greedy answers are also compared with full prefill in the background (shadow comparison).
        """
        report = answer.report
        if options.mode not in ("blend", "reuse") or report.refused_reason:
            return
        self.notices.record_lookup(report.prompt_tokens, [chunk.hit for chunk in report.chunks])
        if self._sends_missing and report.num_chunk_hits < len(prompt.chunks):
            self._send_missing(prompt)
        if not options.temperature:
            full = replace(options, mode="full")
            self._shadow.sample_vllm_answer(lambda: ServedStream(self, prompt, full), answer)

    # -- documents

    def precompute(self, chunk: Part) -> int:
        """Send one chunk to the server as a separate document, and wait until it is stored.

        Returns the number of bytes stored, 0 if the KV was stored already. Raises RagblendError if the server has not
        stored the chunk, or if it runs vLLM without ragblend.
        """
        text = as_chunk(chunk).text.strip()
        counts, reasons = self.send_documents(CHUNK_COLLECTION, [{"id": text_id(text), "chunks": [text]}])
        if reasons and reasons[0]["status"] != "stored":
            raise RagblendError(f"the chunk was not stored: {reasons[0]['reason']}")
        return counts["new_kv_bytes"]

    def is_stored(self, chunk: Part) -> bool:
        """Return True if the server has KV of the document that `precompute` sends for the chunk.

        A chunk that the server has only as a part of another document gives False.
        """
        if not self.blends:
            return False
        path = self._documents_path(text_id(as_chunk(chunk).text), collection=CHUNK_COLLECTION)
        try:
            return bool(self.connection.request_json("GET", path)["num_kv"])
        except NotFoundError:
            return False

    def forget(self, chunk: Part) -> bool:
        """Delete the chunk that `precompute` stored. Return True if an entry was deleted."""
        return self.remove_documents(CHUNK_COLLECTION, [text_id(as_chunk(chunk).text)]) > 0

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Let the server load the chunks of a later request into its workers' memory, in the background.

        Returns at once.
        """
        # With a question, because a chunk at the end of a prompt is computed, not matched.
        prompt, options = Prompt([as_chunk(chunk) for chunk in chunks], "?"), GenerationOptions()

        def send() -> None:
            try:
                path = "/v1/ragblend/lookup?prefetch=true"
                self.connection.request_json("POST", path, self.request_body(prompt, options))
            except RagblendError as error:  # the request then reads them itself
                log.debug("nothing was prefetched: %s", error)

        if chunks and self.blends:
            with suppress(RuntimeError):  # the engine is closed, or the interpreter exits
                self._worker.submit(send)

    def add_known_chunks(self, chunks: Iterable[Part]) -> None:
        """Do nothing, because the server matches prompts with the chunks in its own ledger."""

    def _send_missing(self, prompt: Prompt) -> None:
        text_of = {text_id(text): text for chunk in prompt.chunks if (text := chunk.text.strip())}
        new = text_of.keys() - self._sent
        self._sent |= new
        documents = [{"id": name, "chunks": [text_of[name]]} for name in sorted(new)]

        def send() -> None:
            try:
                _, reasons = self.send_documents(CHUNK_COLLECTION, documents)
                for reason in reasons:
                    what = "was stored" if reason["status"] == "stored" else "was not stored"
                    log.warning("a missed chunk %s: %s", what, reason["reason"])
            except RagblendError as error:  # the answer is complete already; the next miss sends them again
                self._sent -= new
                level = logging.DEBUG if isinstance(error, EngineClosedError) else logging.WARNING
                log.log(level, "a missed chunk was not stored: %s", error)

        if documents:
            with suppress(RuntimeError):  # the engine is closed, or the interpreter exits
                self._worker.submit(send)

    def send_documents(
        self,
        collection: str,
        documents: Sequence[Mapping[str, Any]],
        progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
    ) -> tuple[Counter[str], list[dict[str, str]]]:
        """Send documents in one request to `POST /v1/ragblend/documents`, and wait until the server has stored them.

        Return the server's counts (`DocumentCounts`), and a DocumentReason for each document that has a reason.
        `progress` is called with "prefill", the number of stored chunks, and the number of all chunks. Raises
        RagblendError for a server without ragblend, and for a failed request.
        """
        if not self.blends:
            raise RagblendError(
                f"the server at {self.connection.url} is a vLLM without ragblend and stores no KV; "
                "start it with: ragblend serve MODEL --store DIR"
            )
        body = {"collection": collection, "documents": documents}
        ingestion = self.connection.request_json("POST", self._documents_path(), body)["ingestion"]
        path = self._documents_path(collection=collection, ingestion=ingestion)
        num_chunks = sum(len(document["chunks"]) for document in documents)
        seen_s = time.monotonic()
        while True:
            summary = self.connection.request_json("GET", path)
            if counts := summary["collections"].get(collection):  # none if another replica answered
                seen_s = time.monotonic()
                if not counts["num_waiting"]:
                    return Counter(counts), summary["reasons"]
                num_stored, batch = counts["num_chunks"], summary["batch"]  # the batch counts variants of chunks
                share = min(1.0, (num_chunks - num_stored) / (batch["num_chunks"] or 1))
                progress("prefill", num_stored + int(batch["num_done"] * share), num_chunks)
            elif time.monotonic() - seen_s > _LOST_S:
                raise BackendUnreachableError(
                    f"{self.connection.url} no longer reports documents that it accepted, because they were sent again "
                    "or removed, or another server answers; send them again"
                )
            time.sleep(_POLL_S)

    def remove_documents(self, collection: str, ids: Sequence[str]) -> int:
        """Delete documents from the server. Return the number of deleted entries."""
        if not ids or not self.blends:
            return 0
        body = {"collection": collection, "ids": list(ids)}
        return int(self.connection.request_json("DELETE", self._documents_path(), body)["num_kv"])

    def list_documents(self) -> Iterator[dict[str, Any]]:
        """Yield the documents of the server's store, with the fields of `DocumentDetails`, by collection and id."""
        after = ""
        while self.blends:
            page = self.connection.request_json("GET", self._documents_path(limit="500", after=after))
            yield from page["documents"]
            if not (after := page["next"]):
                return

    def _documents_path(self, document: str = "", **query: str) -> str:
        parameters = {**query, **({"namespace": self.namespace} if self.namespace else {})}
        place = "/v1/ragblend/documents" + (f"/{document}" if document else "")
        return place + (f"?{urlencode(parameters)}" if parameters else "")

    # -- what needs token ids, which only the server has

    def match(self, prompt: Prompt) -> NoReturn:
        """Raise UsageError, because only the server matches prompts."""
        self._reject("matching a prompt's chunks")

    def key(self, chunk: Part) -> NoReturn:
        """Raise UsageError, because a chunk's key is computed from its token ids, which only the server has."""
        self._reject("computing a chunk's key")

    def has_kv(self, chunk_ids: Sequence[int]) -> NoReturn:
        """Raise UsageError, because the server looks up texts, not token ids."""
        self._reject("looking up the KV of token ids")

    def _reject(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} is not possible through {self.connection.url}; run it on the server's machine, with the server's "
            "store and backend='transformers' or 'vllm'"
        )

    def close(self) -> None:
        """Close the sockets and end the background threads. Pending requests end with EngineClosedError."""
        if self.is_usable:  # not in a forked process, which shares the sockets with its parent
            self.connection.close()
        super().close()


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


def sse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream. Raises BackendUnreachableError if it ends without `[DONE]`.

    >>> list(sse_events(['data: {"a": 1}', '', ': keep-alive', 'data: [DONE]']))
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
            raise BackendUnreachableError(f"the server sent {value[:80]!r} instead of JSON; send the request again")
        yield event
    raise BackendUnreachableError("the server ended the answer early; look at its log and send the request again")


def _message(text: str) -> str:
    """Return the message in the body of an error response in vLLM's or OpenAI's form, else the body's beginning.

    >>> _message('{"error": {"message": "too long"}}'), _message("oops")
    ('too long', 'oops')
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:300]
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner
    return str(message)[:300]
