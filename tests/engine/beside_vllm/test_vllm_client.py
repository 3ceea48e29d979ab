"""The engine over HTTP against a scripted server: what is sent, what comes back, and every way it can go wrong.

The server is a real HTTP server on a real socket; only vLLM behind it is a script.
`tests/inside_vllm/test_serve.py` runs the same engine against vLLM itself.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage

from ragblend import Prompt, load_engine
from ragblend.cli import app as cli
from ragblend.config import Settings
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.api import Engine
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.vllm.api_keys import DOCUMENTS_PATH
from ragblend.engine.vllm.client import Connection, VllmClient, events
from ragblend.engine.vllm.params import PARAMS_KEY, parse_params, report_to_json
from ragblend.errors import (
    BackendUnreachableError,
    EngineClosedError,
    NotFoundError,
    PromptTooLongError,
    RagblendError,
    StoreMismatchError,
    UsageError,
)
from ragblend.frameworks.conversation import ChatSession
from ragblend.llm import ChatBlend
from ragblend.operations.doctor import run_vllm_diagnostics
from ragblend.precompute import delete_precomputed, ingest, precompute_documents
from ragblend.prompt.render import Renderer
from ragblend.server.requests import read_documents

A, B = "George Keller lives in Kinport. He sells knives.", "Julia Bishop works for Synon. She was born in Calville."
PROMPT = Prompt([A, B], "Where does George Keller live?")
FINGERPRINT = "0123456789abcdef"
HIT, MISS = ChunkReport("", 0, True, "exact"), ChunkReport("", 0, False)
END = 2  # the demo model's end token


def event(token_ids: list[int] = (), finish: str | None = None, **more: Any) -> str:  # type: ignore[assignment]
    choice = {"index": 0, "text": "", "token_ids": list(token_ids), "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n"


class Script:
    """What the server says: tokens of the answer, statuses to give first, and where to hang up."""

    def __init__(self) -> None:
        self.blends = True
        self.api_key: str | None = None
        self.answer: list[int] = []
        self.full_answer: list[int] | None = None  # to requests of mode "full", where that is another one
        self.finish = "stop"
        self.report: BlendReport | None = None
        self.statuses: list[tuple[int, str]] = []  # given to completions, one each, before the first answer
        self.hang_up_after: int | None = None  # events of a stream
        self.extra_events: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.stored: set[str] = set()
        self.prefetches = True  # False: a server that was started before there was a prefetch
        self.prefetched: list[str] = []
        self.stores = True  # whether an ingested chunk appears in the store
        self.sent: list[dict[str, Any]] = []  # bodies of documents
        self.removed: list[dict[str, Any]] = []
        self.states: list[str] = []  # of an ingestion, one for each look; then it is done
        self.reasons: list[dict[str, str]] = []
        self.default_prefix: tuple[int, ...] = ()
        self.gate: threading.Event | None = None
        self.broken = threading.Event()  # a client went away while we wrote
        self.num_requests = 0

    def key(self, body: dict[str, Any]) -> str:
        params = parse_params(body["kv_transfer_params"][PARAMS_KEY])
        ((start, end),) = params.spans
        return chunk_key(FINGERPRINT, body["prompt"][:start], body["prompt"][start:end], params.namespace)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *arguments: Any) -> None: ...

    def send_json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        self.script.num_requests += 1
        if self.script.api_key and self.headers.get("Authorization") != f"Bearer {self.script.api_key}":
            self.send_json({"error": "Unauthorized"}, 401)
            return False
        return True

    def do_GET(self) -> None:
        if not self.allowed():
            return
        if self.path == "/v1/models":
            self.send_json({"data": [{"id": "demo", "root": "/weights", "max_model_len": 512}]})
        elif self.path == "/v1/ragblend" and self.script.blends:
            self.send_json({"fingerprint": FINGERPRINT, "bytes_per_token": 100, "context_length": 512})
        elif self.path.startswith(DOCUMENTS_PATH):
            self.send_json(self.documents())
        else:
            self.send_json({"detail": "Not Found"}, 404)

    def documents(self) -> dict[str, Any]:
        query = dict(parse_qsl(urlsplit(self.path).query))
        script, body = self.script, self.script.sent[int(query["ingestion"])]
        state = script.states.pop(0) if script.states else "done"
        num_chunks = sum(len(document["chunks"]) for document in body["documents"])
        counts = {"num_waiting": int(state == "waiting"), "num_chunks": num_chunks, "num_tokens": 7, "num_known_kv": 1}
        counts |= {"num_new_kv": num_chunks - 1, "new_kv_bytes": 700}
        collections = {} if state == "unknown" else {query["collection"]: counts}
        return {"collections": collections, "reasons": script.reasons, "batch": {"num_done": 1, "num_chunks": 2}}

    def do_DELETE(self) -> None:
        self.script.removed.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_json({"num_documents": 1, "num_kv": 2})

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.path == "/v1/ragblend/prefetch":
            script.prefetched += body["keys"]
            found = {"num_keys": len(body["keys"])}
            self.send_json(*((found,) if script.prefetches else ({"detail": "Not Found"}, 404)))
        elif self.path.startswith(DOCUMENTS_PATH):
            read_documents(json.dumps(body).encode(), "application/json", None)
            script.sent.append(body)
            self.send_json({"ingestion": str(len(script.sent) - 1), "num_documents": len(body["documents"])}, 202)
        elif self.path == "/v1/ragblend/stored":
            self.send_json({"stored": [key in script.stored for key in body["keys"]]})
        elif self.path == "/v1/ragblend/forget":
            found = script.stored.intersection(body["keys"])
            script.stored -= found
            self.send_json({"num_removed": len(found)})
        else:
            script.bodies.append(body)
            if script.statuses:
                status, said = script.statuses.pop(0)
                self.send_json({"error": {"message": said, "code": status}}, status)
            else:
                self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        script = self.script
        mode = body.get("kv_transfer_params", {}).get(PARAMS_KEY, {}).get("mode")
        answer = script.full_answer if mode == "full" and script.full_answer is not None else script.answer
        ingest = mode == "ingest"
        if ingest:
            answer = [7]
            if script.stores:
                script.stored.add(script.key(body))
        pieces = [event([token]) for token in answer[:-1]] + [event(answer[-1:], script.finish)]
        if script.report is not None and not ingest:
            told = {"choices": [], "kv_transfer_params": {PARAMS_KEY: report_to_json(script.report)}}
            pieces += [f"data: {json.dumps(told)}", "\n\n"]
        pieces += [*script.extra_events, "data: [DONE]\n\n"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, piece in enumerate(pieces):
            if number == script.hang_up_after:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if number and script.gate is not None:
                script.gate.wait(20)
            data = piece.encode()
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            except OSError:
                script.broken.set()
                return
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hangs up is what some tests are about
            super().handle_error(request, client_address)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    server = Server(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmClient]:
    monkeypatch.setattr("ragblend.engine.vllm.client._FIRST_PAUSE_S", 0.01)
    engine = load_engine("demo", backend=url, on_miss="inline")
    assert isinstance(engine, VllmClient)
    engine.connection._first_pause_s = 0.01
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer, _ = load_tokenizer("demo")
    return Renderer(tokenizer)


def ids(renderer: Renderer, text: str) -> list[int]:
    return renderer.text_ids(" " + text)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [None, "auto", 0, 1])
def test_a_ratio_that_is_left_open_is_the_servers_to_fill_in(client: VllmClient, script: Script, ratio: Any) -> None:
    script.report = BlendReport("blend", "cacheblend_k", 0.05, predicted_agreement=0.97)
    report = client.generate(PROMPT, recompute_ratio=ratio, max_tokens=3).report
    assert script.bodies[0]["kv_transfer_params"][PARAMS_KEY]["ratio"] == ratio
    assert (report.rule, report.recompute_ratio, report.predicted_agreement) == ("cacheblend_k", 0.05, 0.97)


def test_a_request_carries_ids_spans_and_every_option(client: VllmClient, script: Script, renderer: Renderer) -> None:
    script.answer = [*ids(renderer, "Kinport"), END]
    answer = client.generate(
        PROMPT, mode="blend", rule="random", recompute_ratio=0.3, max_tokens=9, temperature=0.5, top_p=0.9, seed=4,
        stop=["."],
    )  # fmt: skip
    (body,) = script.bodies
    assert body["prompt"] == renderer.render(PROMPT)
    expected = {"model": "demo", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 4, "stop": ["."]}
    assert {name: body[name] for name in expected} == expected
    assert body["stream"] is body["return_token_ids"] is True
    params = parse_params(body["kv_transfer_params"][PARAMS_KEY])
    assert (params.mode, params.rule, params.ratio, params.seed) == ("blend", "random", 0.3, 4)
    assert params.num_prefix == len(renderer.prefix_ids())
    for span, chunk in zip(params.spans, (A, B), strict=True):
        assert tuple(body["prompt"][slice(*span)]) == renderer.chunk_ids(chunk)
    assert (answer.text, answer.finish_reason) == ("Kinport", "stop")
    assert answer.token_ids == script.answer[:-1]  # the end token is no part of the answer


def test_parts_of_a_chunk_are_sent_with_the_ids_around_them_and_reported_as_one(
    client: VllmClient, script: Script, renderer: Renderer
) -> None:
    people = ("George Keller", "Julia Bishop", "Arthur Archer", "Ben Howard")
    sentences = [
        f"{name} lives in {place}." for name in people for place in ("Kinport", "Synon", "Calville", "Wesstad")
    ]
    client.add_known([" ".join(sentences)])
    texts = [" ".join(sentences[1:7]), " ".join(sentences[8:])]
    script.report = BlendReport("blend", chunks=[ChunkReport("", 36, True, num_recomputed_tokens=2), MISS])
    report = client.generate(Prompt.from_messages([("user", f"[1] {texts[0]} and {texts[1]}\n\nWhere?")])).report
    (body,) = script.bodies
    params = parse_params(body["kv_transfer_params"][PARAMS_KEY])
    parts = [tuple(body["prompt"][slice(*span)]) for span in params.spans]
    assert parts == [renderer.chunk_ids(text) for text in texts]
    assert {params.chunk_ids(body["prompt"], place) for place in (0, 1)} == {renderer.chunk_ids(" ".join(sentences))}
    assert (params.chunk_start(0), params.num_prefix) == (6, len(renderer.prefix_ids()))
    assert (report.num_chunks, report.num_chunk_hits) == (1, 1)
    assert (report.chunks[0].num_tokens, report.chunks[0].num_recomputed_tokens) == (sum(map(len, parts)), 2)


def test_sampling_goes_to_the_server_by_vllms_names_and_what_is_not_said_does_nothing(
    client: VllmClient, script: Script
) -> None:
    client.generate(PROMPT, max_tokens=2)
    asked: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    client.generate(PROMPT, max_tokens=2, logit_bias={"7": 3}, **asked)  # type: ignore[dict-item]
    plain, full = script.bodies
    assert {name: plain[name] for name in asked} == dict.fromkeys(asked, 0) | {"repetition_penalty": 1}
    assert "logit_bias" not in plain
    assert {name: full[name] for name in (*asked, "logit_bias")} == asked | {"logit_bias": {"7": 3.0}}
    with pytest.raises(UsageError, match="logprobs are given by backend='transformers' alone"):
        client.generate(PROMPT, logprobs=True)


def test_the_answers_length_is_what_the_context_leaves(client: VllmClient, script: Script) -> None:
    script.answer = [END]
    client.generate(PROMPT, max_tokens=10_000)
    assert script.bodies[0]["max_tokens"] == 512 - len(script.bodies[0]["prompt"])


def test_bad_options_and_a_prompt_beyond_the_servers_context_are_refused_before_anything_is_sent(
    client: VllmClient, script: Script
) -> None:
    for options in ({"mode": "fast"}, {"rule": "best"}):
        with pytest.raises(UsageError, match=r"fast|best"):
            client.stream(PROMPT, **options)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match="512"):
        client.stream(Prompt([A] * 200, "who?"))
    assert script.bodies == []


# --- what comes back --------------------------------------------------------------------------------------------------


def test_the_report_is_the_connectors_with_what_only_the_client_knows(
    client: VllmClient, script: Script, renderer: Renderer
) -> None:
    script.answer = [*ids(renderer, "Kinport"), END]
    script.report = BlendReport(
        "blend",
        "cacheblend_k",
        0.15,
        num_chunks=2,
        num_chunk_hits=1,
        num_reused_tokens=20,
        num_recomputed_tokens=3,
        charged_budget=0.25,
        load_s=0.5,
        chunks=[ChunkReport("", 3, True, "exact", True, 2, "similar"), MISS],
    )
    report = client.generate(PROMPT).report
    first, second = (len(renderer.chunk_ids(chunk)) for chunk in (A, B))
    assert report == replace(
        script.report,
        chunks=[replace(script.report.chunks[0], num_tokens=first), replace(MISS, num_tokens=second)],
        prompt_tokens=len(renderer.render(PROMPT)),
        completion_tokens=len(script.answer) - 1,
        match_s=report.match_s,
        ttft_s=report.ttft_s,
        decode_s=report.decode_s,
    )
    assert report.ttft_s > report.match_s > 0


@pytest.mark.parametrize(
    ("said", "first", "whole"), [("Kinport", True, True), ("Kinport or", True, False), ("Synon", False, False)]
)
def test_shadowed_requests_are_asked_again_in_full_and_counted(
    url: str, script: Script, renderer: Renderer, said: str, first: bool, whole: bool
) -> None:
    script.answer = [*ids(renderer, "Kinport"), END]
    script.full_answer = [*ids(renderer, said), END]
    script.report = BlendReport("blend", "random", 0.3, num_chunks=2, chunks=[HIT, HIT])
    with load_engine("demo", backend=url, on_miss="inline", shadow=1.0) as engine:
        report = engine.generate(PROMPT, recompute_ratio=0.3, max_tokens=9).report
        engine.generate(PROMPT, temperature=0.7, max_tokens=9)  # what a sampled answer would have been is not known
        engine.generate(PROMPT, mode="full", max_tokens=9)
        engine.flush_shadow()
        counters = engine.shadow
    assert report.shadow is not None
    assert (report.shadow.first_token_agrees, report.shadow.answers_identical) == (first, whole)
    assert report.shadow.first_token_kl is None
    assert (counters.num_requests, counters.num_shadowed, counters.num_answers_same) == (1, 1, int(whole))
    assert counters.mean_first_token_kl is None
    modes = sorted(parse_params(body["kv_transfer_params"][PARAMS_KEY]).mode for body in script.bodies)
    assert modes == ["blend", "blend", "full", "full"]


def test_a_stop_string_ends_the_text_even_where_the_server_sends_on(
    client: VllmClient, script: Script, renderer: Renderer
) -> None:
    script.answer = ids(renderer, "Kinport Synon Kinport")
    script.finish = "length"
    answer = client.generate(PROMPT, stop=["Synon"])
    assert (answer.text, answer.finish_reason) == ("Kinport ", "stop")


def test_pieces_come_as_they_are_made_and_closing_hangs_up(
    client: VllmClient, script: Script, renderer: Renderer
) -> None:
    script.answer = ids(renderer, "Kinport") * 400
    script.gate = threading.Event()
    stream = client.stream(PROMPT)
    assert next(stream) == "Kinport"  # the server waits at the gate: nothing else has been sent
    stream.close()
    script.gate.set()
    assert script.broken.wait(20)
    assert (stream.result.text, stream.result.finish_reason) == ("Kinport", "cancelled")


def test_events_skip_comments_and_other_fields() -> None:
    lines = [": ping", "event: x", 'data: {"a": 1}', "", 'data:{"a": 2}', "data: [DONE]", 'data: {"a": 3}']
    assert list(events(lines)) == [{"a": 1}, {"a": 2}]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_the_command_line_exits_5_and_says_how_to_start_a_server_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("ragblend.engine.vllm.client.MAX_RETRIES", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ragblend", "ask", "who?", "--backend", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 5
    assert "ragblend serve" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["http://", "http://host:port", "ftp://host", "llama"])
def test_a_backend_that_is_none_is_a_usage_error(backend: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        load_engine("demo", backend=backend)
    with pytest.raises(UsageError):
        Connection(backend)


def test_a_wrong_api_key_says_where_it_goes(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.api_key = "right"
    monkeypatch.delenv("RAGBLEND_API_KEY", raising=False)
    for wrong in ({}, {"api_key": "wrong"}):
        with pytest.raises(RagblendError, match="RAGBLEND_API_KEY"):
            load_engine("demo", backend=url, **wrong)
    load_engine("demo", backend=url, api_key="right").close()
    monkeypatch.setenv("RAGBLEND_API_KEY", "right")
    load_engine("demo", backend=url).close()


@pytest.mark.parametrize(
    ("status", "said", "error", "shown"),
    [
        (400, "prompt is strange", UsageError, "prompt is strange"),
        (400, "This model's maximum context length is 512 tokens", PromptTooLongError, "512"),
        (404, "The model `x` does not exist", NotFoundError, "does not exist"),
        (500, "worker died", RagblendError, "worker died"),
    ],
)
def test_an_error_is_raised_once_with_what_the_server_said(
    client: VllmClient, script: Script, status: int, said: str, error: type[RagblendError], shown: str
) -> None:
    script.statuses = [(status, said)]
    script.answer = [END]
    with pytest.raises(error, match=shown):
        client.generate(PROMPT)
    assert len(script.bodies) == 1


def test_a_busy_server_is_asked_again_and_then_given_up(client: VllmClient, script: Script) -> None:
    script.answer = [5, END]
    script.statuses = [(503, "starting"), (429, "busy")]
    assert client.generate(PROMPT).token_ids == [5]
    assert len(script.bodies) == 3
    script.statuses = [(503, "starting")] * 3
    with pytest.raises(BackendUnreachableError, match="starting"):
        client.generate(PROMPT)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_server_that_dies_mid_stream_is_an_error_not_a_short_answer(
    client: VllmClient, script: Script, after: int
) -> None:
    script.answer = [5, 6, 7, 8, END]
    script.hang_up_after = after
    stream = client.stream(PROMPT)
    with pytest.raises(BackendUnreachableError, match="went away"):
        list(stream)
    assert stream.result.token_ids == script.answer[:after]
    assert len(script.bodies) == 1  # what has begun is not begun again
    script.hang_up_after = None
    assert client.generate(PROMPT).token_ids == [5, 6, 7, 8]


def test_a_stream_without_its_end_mark_is_an_error() -> None:
    with pytest.raises(BackendUnreachableError, match="before it was complete"):
        list(events(['data: {"a": 1}']))
    with pytest.raises(BackendUnreachableError, match="instead of JSON"):
        list(events(["data: <html>"]))


def test_an_error_inside_a_stream_is_raised(client: VllmClient, script: Script) -> None:
    script.answer = [5, 6]
    script.extra_events = ['data: {"error": {"message": "out of blocks"}}\n\n']
    with pytest.raises(RagblendError, match="out of blocks"):
        client.generate(PROMPT)


def test_a_chat_model_without_a_name_is_the_servers(url: str, tmp_path: Path) -> None:
    chat = ChatBlend(backend=url, store=str(tmp_path / "texts"))
    assert chat.model == chat.engine.name == "demo"
    chat.engine.close()


def test_a_model_the_server_does_not_run_is_refused(url: str) -> None:
    with pytest.raises(NotFoundError):
        load_engine("some/where/else", backend=url)
    with pytest.raises(StoreMismatchError, match="`model='demo'`"):
        load_engine(str(load_tokenizer("demo")[1]), backend=url)


def test_a_store_object_cannot_be_sent(url: str) -> None:
    with pytest.raises(UsageError, match="directory"):
        load_engine("demo", object(), backend=url)  # type: ignore[call-overload]


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_precompute_sends_a_missing_chunk_once(client: VllmClient, script: Script) -> None:
    assert not client.is_stored(A)
    assert [client.precompute(chunk) > 0 for chunk in (A, B, A)] == [True, True, False]
    assert len(script.bodies) == 2
    for body in script.bodies:
        params = parse_params(body["kv_transfer_params"][PARAMS_KEY])
        params.check_length(len(body["prompt"]))
        assert (params.mode, body["max_tokens"]) == ("ingest", 1)
    assert client.key(A) in script.stored
    assert client.forget(A)
    assert not client.forget(A)
    assert not client.is_stored(A)


def test_documents_are_sent_as_texts_and_waited_for(client: VllmClient, script: Script) -> None:
    script.states = ["waiting", "unknown", "waiting"]  # "unknown": by another replica behind a balancer
    seen: list[tuple[str, int, int | None]] = []
    report = precompute_documents([A, B, A], client, lambda *told: seen.append(told), ids=["a", "b", "a"])
    assert script.sent == [
        {"collection": "langchain", "documents": [{"id": "a", "chunks": [A, A]}, {"id": "b", "chunks": [B]}]}
    ]
    assert not script.bodies
    assert (report.num_chunks, report.num_tokens, report.num_new_kv, report.new_kv_bytes) == (3, 7, 2, 700)
    assert set(seen) == {("prefill", 1, 2)}
    assert A in client.known_chunks
    assert delete_precomputed(["a", ""], client) == 2
    assert script.removed == [{"collection": "langchain", "ids": ["a"]}]
    assert A not in client.known_chunks
    assert B in client.known_chunks


def test_what_a_server_cannot_store_is_in_the_report(client: VllmClient, script: Script) -> None:
    script.reasons = [
        {"id": "a", "status": "failed", "reason": "it is too long"},
        {"id": "b", "status": "stored", "reason": "it holds no visible text"},
    ]
    documents = [Document(A, id="a", metadata={"source": "a.txt"}), Document(" ", id="b")]
    report = precompute_documents(documents, client)
    assert report.failures == [("a of a.txt", "it is too long")]
    assert report.skipped == [("b", "it holds no visible text")]


def test_an_index_sends_its_documents_with_their_vectors(client: VllmClient, script: Script, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in (("a", A), ("b", B)):
        (docs / f"{name}.txt").write_text(text)
    report = ingest(docs, client, tmp_path / "index", embedder="hashing", chunk_size=128)
    assert (report.num_documents, report.num_chunks, report.num_new_kv, report.new_kv_bytes) == (2, 2, 1, 700)
    (body,) = script.sent
    assert [(each["id"], each["chunks"]) for each in body["documents"]] == [
        (str(docs / f"{name}.txt"), [text]) for name, text in (("a", A), ("b", B))
    ]
    for each in body["documents"]:
        assert each["embedder"] == "hashing 1"
        np.testing.assert_allclose(each["vectors"], HashingEmbedder().embed(each["chunks"]), atol=1e-6)
    (docs / "b.txt").unlink()
    (docs / "a.txt").write_text(A + " He was born in Synon.")
    report = ingest(docs, client, tmp_path / "index")
    assert (report.removed, report.num_removed_kv) == ([str(docs / "b.txt")], 2)
    assert script.removed == [{"collection": body["collection"], "ids": [str(docs / "b.txt")]}]
    assert [each["id"] for each in script.sent[1]["documents"]] == [str(docs / "a.txt")]
    assert ingest(docs, client, tmp_path / "index").num_removed_kv == 0
    assert len(script.removed) == 1
    assert B not in client.known_chunks


def test_documents_that_a_server_has_lost_are_an_error(
    client: VllmClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragblend.engine.vllm.client._LOST_S", 0.3)
    script.states = ["unknown"] * 100
    with pytest.raises(BackendUnreachableError, match="knows no more of documents that it took"):
        precompute_documents([A], client)


def test_many_documents_go_in_several_requests(
    client: VllmClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragblend.engine.vllm.client._BATCH_CHARS", 1000)
    texts = [f"{number}. {A}" for number in range(50)]
    assert precompute_documents(texts, client).num_chunks == 50
    assert len(script.sent) > 3
    assert [document["chunks"][0] for body in script.sent for document in body["documents"]] == texts


def test_prefetch_names_the_chunks_and_is_only_a_hint(
    client: VllmClient, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    client.prefetch([A, B])
    assert script.prefetched == [client.key(A), client.key(B)]
    before = script.num_requests
    client.prefetch([])
    assert script.num_requests == before
    script.prefetches = False
    client.prefetch([A])
    assert "nothing is prefetched" in caplog.text


def test_namespaces_have_keys_of_their_own(url: str, script: Script) -> None:
    with load_engine("demo", backend=url, namespace="ann") as ann, load_engine("demo", backend=url) as nobody:
        ann.precompute(A)
        assert ann.is_stored(A)
        assert not nobody.is_stored(A)


def test_a_chunk_that_does_not_appear_in_the_store_is_an_error(client: VllmClient, script: Script) -> None:
    script.stores = False
    with pytest.raises(RagblendError, match="ragblend doctor"):
        client.precompute(A)


def test_missed_chunks_are_ingested_in_the_background(url: str, script: Script) -> None:
    script.answer = [5, END]
    script.report = BlendReport("blend", "cacheblend_k", 0.15, chunks=[HIT, MISS])
    engine: Any = load_engine("demo", backend=url)
    engine.generate(PROMPT)
    engine.flush()
    assert [engine.is_stored(chunk) for chunk in (A, B)] == [False, True]
    engine.close()


def test_texts_are_remembered_in_a_directory_of_the_client(url: str, script: Script, tmp_path: Path) -> None:
    with load_engine("demo", tmp_path / "texts", backend=url) as engine:
        precompute_documents([A, B], engine)
    script.answer = [5, END]
    script.bodies.clear()
    options = {"on_miss": "inline"}
    chat = ChatBlend(model="demo", store=str(tmp_path / "texts"), backend=url, engine_options=options, api_key="k")
    message = chat.invoke(f"Context:\n\n{A}\n\n{B}\n\nWhere does George Keller live?")
    assert isinstance(message, AIMessage)
    assert len(script.bodies[-1]["kv_transfer_params"][PARAMS_KEY]["spans"]) == 2
    assert chat.api_key is None
    again = ChatBlend(**chat.model_dump(exclude_none=True), api_key="k")
    assert again.engine is chat.engine
    chat.engine.close()
    with pytest.raises(RagblendError, match="load it again"):
        again.invoke("who?")
    anew = ChatBlend(**chat.model_dump(exclude_none=True), api_key="k")
    assert anew.invoke("who?").response_metadata["finish_reason"] == "stop"
    anew.engine.close()


# --- what is said, and how it ends ------------------------------------------------------------------------------------


def test_a_server_that_has_none_of_the_chunks_is_said_once_after_three_requests(
    url: str, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.answer, script.report = [5, END], BlendReport("blend", chunks=[MISS, MISS])
    with load_engine("demo", backend=url, on_miss="inline") as engine:
        for number in range(5):
            engine.generate(PROMPT)
            assert len(caplog.records) == (number >= 2)
    line = caplog.records[0].getMessage()
    assert line.startswith("nothing was reused: nothing in 3 prompts is stored")
    assert f"ragblend ingest DOCS --model demo --backend {url}" in line


@pytest.mark.timeout(60)
def test_a_stream_whose_engine_is_closed_ends_quietly(url: str, script: Script, renderer: Renderer) -> None:
    """Read to its middle, by a thread that waits for the server, and not begun."""
    script.answer = ids(renderer, "Kinport") * 4
    script.gate = threading.Event()  # the server holds back all but the first token
    engine: Any = load_engine("demo", backend=url)
    waiting, unread = engine.stream(PROMPT), engine.stream(PROMPT)
    next(waiting)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.extend(waiting))
    thread.start()
    half = engine.stream(PROMPT)
    next(half)
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert (ended, list(half), list(unread)) == ([], [], [])
    assert [stream.result.finish_reason for stream in (waiting, half, unread)] == ["cancelled"] * 3
    assert waiting.result.text == half.result.text == "Kinport"
    with pytest.raises(EngineClosedError, match="load it again"):
        engine.generate(PROMPT)
    engine.close()
    script.gate.set()


# --- a vLLM without ragblend ------------------------------------------------------------------------------------------


def test_plain_vllm_answers_and_says_that_it_reuses_nothing(
    url: str, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.blends = False
    script.answer = [5, END]
    with load_engine("demo", backend=url) as engine:
        assert "reuses no chunks" in caplog.text
        answer = engine.generate(PROMPT)
        assert (answer.token_ids, answer.report.mode, answer.report.num_chunk_hits) == ([5], "full", 0)
        assert "kv_transfer_params" not in script.bodies[0]
        before = script.num_requests
        engine.prefetch([A])
        assert script.num_requests == before, "it is not asked for what it has not"
        assert not engine.is_stored(A)
        for store in (engine.precompute, lambda text: precompute_documents([text], engine)):
            with pytest.raises(RagblendError, match="ragblend serve"):
                store(A)


# --- around it --------------------------------------------------------------------------------------------------------


def test_a_chat_sends_the_whole_conversation_each_time(client: VllmClient, script: Script) -> None:
    script.answer = [5, END]
    precompute_documents([A, B], client)
    script.bodies.clear()
    session = ChatSession(client)
    list(session.stream([A], "Where?"))
    list(session.stream([A, B], "And who?"))
    first, second = (body["kv_transfer_params"][PARAMS_KEY]["spans"] for body in script.bodies)
    assert (len(first), len(second)) == (1, 2)
    assert script.bodies[1]["prompt"][: len(script.bodies[0]["prompt"])] == script.bodies[0]["prompt"]


@pytest.mark.parametrize(("blends", "shown"), [(True, "blends demo"), (False, "without ragblend")])
def test_doctor_looks_at_the_server(url: str, script: Script, blends: bool, shown: str) -> None:
    script.blends = blends
    (check,) = run_vllm_diagnostics(Settings(backend=url))
    assert check.ok is blends
    assert shown in check.finding


def test_a_client_is_an_engine(client: VllmClient) -> None:
    engine: Engine = client  # mypy looks at its methods
    assert (engine.name, engine.context_length, engine.bytes_per_token) == ("demo", 512, 100)


def test_settings_of_the_servers_store_are_refused_with_the_way_to_set_them(script: Script, url: str) -> None:
    defaults = {"memory_gib": 2.0, "disk_gib": "auto", "remote": None, "kv_dtype": "auto"}
    load_engine("demo", backend=url, **defaults).close()  # what the command line passes when nothing is set
    for setting in ({"remote": "redis://cache:6379/0"}, {"disk_gib": 5.0}, {"disk_gib": 0}, {"memory_gib": 0.0}):
        [name] = setting
        with pytest.raises(UsageError, match=f"RAGBLEND_{name.upper()}=... ragblend serve"):
            load_engine("demo", backend=url, **setting)
