"""The engine over HTTP against a scripted server: what is sent, what comes back, and every way it can go wrong.

The server is a real HTTP server on a real socket; only vLLM behind it is a script.
`tests/inside_vllm/test_serve.py` runs the same engine against vLLM itself.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage

from ragblend import Prompt, load_engine
from ragblend.cli import app as cli
from ragblend.config import Settings
from ragblend.engine.api import Engine
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.engine.vllm.client import Connection, VllmClient, sse_events
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
from ragblend.frameworks.strict import ChunkNotReusedError
from ragblend.ingestion.documents import delete_precomputed
from ragblend.llm import ChatBlend
from ragblend.operations.doctor import run_vllm_diagnostics
from ragblend.precompute import ingest, precompute_documents
from ragblend.server.api_keys import DOCUMENTS_PATH
from ragblend.server.requests import read_documents

A, B = "George Keller lives in Kinport. He sells knives.", "Julia Bishop works for Synon. She was born in Calville."
PROMPT = Prompt([A, B], "Where does George Keller live?")
FINGERPRINT = "0123456789abcdef"
HIT, MISS = ChunkReport("", 0, True, "exact"), ChunkReport("", 0, False)
END = 2  # the model's end token, which ends every answer
PROMPT_TOKENS = 40


def data(**values: Any) -> str:
    return f"data: {json.dumps(values)}\n\n"


def event(is_chat: bool, text: str, token: int, finish: str | None = None) -> str:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return data(choices=[{"index": 0, **said, "token_ids": [token], "finish_reason": finish, "stop_reason": None}])


class Script:
    """What the server says: pieces of the answer, statuses to give first, and where to hang up."""

    def __init__(self) -> None:
        self.blends = True
        self.api_key: str | None = None
        self.answer: list[str] = []  # a token each; the end token follows
        self.full_answer: list[str] | None = None  # to requests of mode "full", where that is another one
        self.finish = "stop"
        self.report: BlendReport | None = None
        self.statuses: list[tuple[int, str]] = []  # given to completions, one each, before the first answer
        self.hang_up_after: int | None = None  # events of a stream
        self.extra_events: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.facts: dict[str, Any] = {"fingerprint": FINGERPRINT, "bytes_per_token": 100, "answer_lead": " "}
        self.sent: list[dict[str, Any]] = []  # bodies of documents
        self.removed: list[dict[str, Any]] = []
        self.states: list[str] = []  # of an ingestion, one for each look; then it is done
        self.reasons: list[dict[str, str]] = []
        self.gate: threading.Event | None = None
        self.broken = threading.Event()  # a client went away while we wrote
        self.num_requests = 0


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
            self.send_json(self.script.facts)
        elif self.path.startswith(f"{DOCUMENTS_PATH}/"):
            known = {each["id"] for body in self.script.sent for each in body["documents"]}
            known -= {each for body in self.script.removed for each in body["ids"]}
            is_known = urlsplit(self.path).path.rpartition("/")[2] in known
            self.send_json(*(({"num_kv": 2},) if is_known else ({"detail": "Not Found"}, 404)))
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
        if self.path.startswith(DOCUMENTS_PATH):
            read_documents(json.dumps(body).encode(), "application/json", None)
            script.sent.append(body)
            self.send_json({"ingestion": str(len(script.sent) - 1), "num_documents": len(body["documents"])}, 202)
        else:
            script.bodies.append(body)
            script.paths.append(self.path)
            if script.statuses:
                status, said = script.statuses.pop(0)
                self.send_json({"error": {"message": said, "code": status}}, status)
            else:
                self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        script = self.script
        mode = body.get("kv_transfer_params", {}).get(PARAMS_KEY, {}).get("mode")
        answer = script.full_answer if mode == "full" and script.full_answer is not None else script.answer
        is_chat = self.path == "/v1/chat/completions"
        pieces = [event(is_chat, text, 10 + number) for number, text in enumerate(answer)]
        pieces.append(event(is_chat, "", END, "stop"))
        if script.finish != "stop":
            pieces = [*pieces[:-2], event(is_chat, answer[-1], 9 + len(answer), script.finish)]
        pieces.append(data(choices=[], usage={"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(answer) + 1}))
        if script.report is not None:
            pieces.append(data(choices=[], kv_transfer_params={PARAMS_KEY: report_to_json(script.report)}))
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
            line = piece.encode()
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            except OSError:
                script.broken.set()
                return
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hangs up is what some tests are about
            super().handle_error(request, client_address)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def url(script):
    server = Server(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(url, monkeypatch):
    monkeypatch.setattr("ragblend.engine.vllm.client._FIRST_PAUSE_S", 0.01)
    engine = load_engine("demo", backend=url, on_miss="inline")
    assert isinstance(engine, VllmClient)
    engine.connection._first_pause_s = 0.01
    yield engine
    engine.close()


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [None, "auto", 0, 1])
def test_a_ratio_that_is_left_open_is_the_servers_to_fill_in(client, script, ratio):
    script.report = BlendReport("blend", "cacheblend_k", 0.05, predicted_agreement=0.97)
    report = client.generate(PROMPT, recompute_ratio=ratio, max_tokens=3).report
    assert script.bodies[0]["kv_transfer_params"][PARAMS_KEY]["ratio"] == ratio
    assert (report.rule, report.recompute_ratio, report.predicted_agreement) == ("cacheblend_k", 0.05, 0.97)


def test_a_request_carries_messages_and_every_option(client, script):
    script.answer = [" Kin", "port"]
    answer = client.generate(
        PROMPT, mode="blend", rule="random", recompute_ratio=0.3, max_tokens=9, temperature=0.5, top_p=0.9, seed=4,
        stop=["."],
    )  # fmt: skip
    (body,) = script.bodies
    assert script.paths == ["/v1/chat/completions"]
    assert body["messages"] == [{"role": "user", "content": PROMPT.messages[0].content}]
    expected = {"model": "demo", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 4, "stop": ["."]}
    assert {name: body[name] for name in expected} == expected
    assert body["stream"] is body["return_token_ids"] is True
    params = parse_params(body["kv_transfer_params"][PARAMS_KEY])
    assert (params.mode, params.rule, params.ratio, params.seed, params.span) == ("blend", "random", 0.3, 4, None)
    # The end token is no part of the answer, nor is what the template writes before it.
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Kinport", [10, 11], "stop")


def test_text_without_a_template_goes_to_completions(client, script):
    script.answer = ["Kinport"]
    assert client.generate(Prompt.from_text(f"{A} Where?")).text == "Kinport"
    assert (script.paths, script.bodies[0]["prompt"]) == (["/v1/completions"], f"{A} Where?")


def test_tools_are_shown_to_the_model_and_its_calls_are_read_here(url, script):
    form = {"begin": "<call>", "middle": "(", "end": ")", "delimiter": "", "opening": "", "closing": ""}
    script.facts |= {"calls": form, "calls_shown": form}
    script.answer = ["<call>look_up(", '{"name": "George"}', ")"]
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    asked = {"role": "user", "content": "Who?"}
    said = AIMessage("", tool_calls=[{"name": "look_up", "args": {"name": "Julia"}, "id": "c1"}])
    chat = ChatBlend(backend=url, max_tokens=20)
    with chat.engine:
        message = chat.bind_tools([tool]).invoke([asked, said, {"role": "tool", "content": B, "tool_call_id": "c1"}])
    (body,) = script.bodies
    function = {"name": "look_up", "arguments": '{"name": "Julia"}'}
    assert body["messages"] == [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": B, "tool_call_id": "c1"},
    ]
    assert (body["tools"][0]["function"]["name"], body["tool_choice"]) == ("look_up", "none")
    assert "structural_tag" in body["structured_outputs"]
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("look_up", {"name": "George"})]


def test_sampling_uses_vllms_names_and_unset_options_have_no_effect(client, script):
    client.generate(PROMPT, max_tokens=2)
    asked: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    client.generate(PROMPT, max_tokens=2, logit_bias={"7": 3}, **asked)
    plain, full = script.bodies
    assert {name: plain[name] for name in asked} == dict.fromkeys(asked, 0) | {"repetition_penalty": 1}
    assert "logit_bias" not in plain
    assert {name: full[name] for name in (*asked, "logit_bias")} == asked | {"logit_bias": {"7": 3.0}}
    with pytest.raises(UsageError, match="logprobs are only available with backend='transformers'"):
        client.generate(PROMPT, logprobs=True)


def test_bad_options_are_refused_before_anything_is_sent(client, script):
    for options in ({"mode": "fast"}, {"rule": "best"}):
        with pytest.raises(UsageError, match=r"fast|best"):
            client.stream(PROMPT, **options)
    assert script.bodies == []


def test_what_needs_ids_is_refused_with_where_to_do_it(client):
    for ask in (lambda: client.match(PROMPT), lambda: client.key(A), lambda: client.has_kv([1, 2])):
        with pytest.raises(UsageError, match="run it on the server's machine"):
            ask()


# --- what comes back --------------------------------------------------------------------------------------------------


def test_the_report_is_the_connectors_with_what_only_the_client_knows(client, script):
    script.answer = ["Kin", "port"]
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
        match_s=0.001,
        chunks=[ChunkReport("a.txt", 3, True, "exact", True, 2, "neutral"), MISS],
    )
    report = client.generate(PROMPT).report
    assert report == replace(
        script.report,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=2,
        ttft_s=report.ttft_s,
        decode_s=report.decode_s,
    )
    assert report.ttft_s > 0


@pytest.mark.parametrize(("said", "first", "whole"), [(["Kinport"], True, True), (["Kinport", " or"], True, False)])
def test_shadowed_requests_are_asked_again_in_full_and_counted(url, script, said, first, whole):
    script.answer, script.full_answer = ["Kinport"], said
    script.report = BlendReport("blend", "random", 0.3, num_chunks=2, chunks=[HIT, HIT])
    with load_engine("demo", backend=url, on_miss="inline", shadow=1.0) as engine:
        report = engine.generate(PROMPT, recompute_ratio=0.3, max_tokens=9).report
        engine.generate(PROMPT, temperature=0.7, max_tokens=9)  # what a sampled answer would have been is not known
        engine.generate(PROMPT, mode="full", max_tokens=9)
        engine.flush_shadow()
        counters = engine.shadow
    assert (report.shadow.first_token_agrees, report.shadow.answers_identical) == (first, whole)
    assert report.shadow.first_token_kl is None
    assert (counters.num_requests, counters.num_shadowed, counters.num_answers_same) == (1, 1, int(whole))
    assert counters.mean_first_token_kl is None
    modes = sorted(parse_params(body["kv_transfer_params"][PARAMS_KEY]).mode for body in script.bodies)
    assert modes == ["blend", "blend", "full", "full"]


def test_pieces_come_as_they_are_made_and_closing_hangs_up(client, script):
    script.answer = ["Kinport"] * 400
    script.gate = threading.Event()
    stream = client.stream(PROMPT)
    assert next(stream) == "Kinport"  # the server waits at the gate: nothing else has been sent
    stream.close()
    script.gate.set()
    assert script.broken.wait(20)
    assert (stream.result.text, stream.result.finish_reason) == ("Kinport", "cancelled")


def test_events_skip_comments_and_other_fields():
    lines = [": ping", "event: x", 'data: {"a": 1}', "", 'data:{"a": 2}', "data: [DONE]", 'data: {"a": 3}']
    assert list(sse_events(lines)) == [{"a": 1}, {"a": 2}]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_the_command_exits_5_with_the_server_command_if_none_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("ragblend.engine.vllm.client.MAX_RETRIES", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ragblend", "ask", "who?", "--backend", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 5
    assert "ragblend serve" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["http://", "http://host:port", "ftp://host", "llama"])
def test_a_backend_that_is_none_is_a_usage_error(backend):
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        load_engine("demo", backend=backend)
    with pytest.raises(UsageError):
        Connection(backend)


def test_a_wrong_api_key_says_where_it_goes(url, script, monkeypatch):
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
        (400, "the model's context length is only 512 tokens", PromptTooLongError, "512"),
        (404, "The model `x` does not exist", NotFoundError, "does not exist"),
        (500, "worker died", RagblendError, "worker died"),
    ],
)
def test_an_error_is_raised_once_with_what_the_server_said(client, script, status, said, error, shown):
    script.statuses = [(status, said)]
    script.answer = ["Kinport"]
    with pytest.raises(error, match=shown):
        client.generate(PROMPT)
    assert len(script.bodies) == 1


def test_a_busy_server_is_asked_again_and_then_given_up(client, script):
    script.answer = ["Kinport"]
    script.statuses = [(503, "starting"), (429, "busy")]
    assert client.generate(PROMPT).text == "Kinport"
    assert len(script.bodies) == 3
    script.statuses = [(503, "starting")] * 3
    with pytest.raises(BackendUnreachableError, match="starting"):
        client.generate(PROMPT)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_server_that_dies_during_a_stream_raises_an_error(client, script, after):
    script.answer = list("abcd")
    script.hang_up_after = after
    stream = client.stream(PROMPT)
    with pytest.raises(BackendUnreachableError, match="ended the connection"):
        list(stream)
    assert stream.result.text == "abcd"[:after]
    assert len(script.bodies) == 1  # what has begun is not begun again
    script.hang_up_after = None
    assert client.generate(PROMPT).text == "abcd"


def test_a_stream_without_its_end_mark_is_an_error():
    with pytest.raises(BackendUnreachableError, match="ended the answer early"):
        list(sse_events(['data: {"a": 1}']))
    with pytest.raises(BackendUnreachableError, match="instead of JSON"):
        list(sse_events(["data: <html>"]))


def test_an_error_inside_a_stream_is_raised(client, script):
    script.answer = ["Kinport"]
    script.extra_events = ['data: {"error": {"message": "out of blocks"}}\n\n']
    with pytest.raises(RagblendError, match="out of blocks"):
        client.generate(PROMPT)


def test_a_chat_model_without_a_name_is_the_servers(url):
    chat = ChatBlend(backend=url)
    assert chat.model == chat.engine.name == "demo"
    chat.engine.close()


def test_a_model_the_server_does_not_run_is_refused(url):
    with pytest.raises(StoreMismatchError, match="`model='demo'`"):
        load_engine("some/where/else", backend=url)


def test_a_store_object_cannot_be_sent(url):
    with pytest.raises(UsageError, match="leave `store` out"):
        load_engine("demo", object(), backend=url)


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_a_document_of_its_own(client, script):
    assert not client.is_stored(A)
    assert client.precompute(A) == 700
    (body,) = script.sent
    assert (body["collection"], [each["chunks"] for each in body["documents"]]) == ("langchain", [[A]])
    assert client.is_stored(f" {A}\n")
    assert client.forget(A)
    assert not client.is_stored(A)
    precompute_documents([A], client)  # has the same id
    assert script.sent[1]["documents"] == body["documents"]
    script.reasons = [{"id": "a", "status": "failed", "reason": "it is too long"}]
    with pytest.raises(RagblendError, match="it is too long"):
        client.precompute(B)


def test_documents_are_sent_as_texts_and_waited_for(client, script):
    script.states = ["waiting", "unknown", "waiting"]  # "unknown": by another replica behind a balancer
    seen: list[tuple[str, int, int | None]] = []
    report = precompute_documents([A, B, A], client, lambda *args: seen.append(args), ids=["a", "b", "a"])
    assert script.sent == [
        {"collection": "langchain", "documents": [{"id": "a", "chunks": [A, A]}, {"id": "b", "chunks": [B]}]}
    ]
    assert not script.bodies
    assert (report.num_chunks, report.num_tokens, report.num_new_kv, report.new_kv_bytes) == (3, 7, 2, 700)
    assert (seen[0], seen[-1], {stage for stage, _, _ in seen}) == (("prefill", 0, 3), ("prefill", 3, 3), {"prefill"})
    assert delete_precomputed(["a", ""], client) == 2
    assert script.removed == [{"collection": "langchain", "ids": ["a"]}]


def test_what_a_server_cannot_store_is_in_the_report(client, script):
    script.reasons = [
        {"id": "a", "status": "failed", "reason": "it is too long"},
        {"id": "b", "status": "stored", "reason": "it has no visible text"},
        {"id": "c", "status": "stored", "reason": "'So.' has 2 tokens"},
    ]
    documents = [Document(A, id="a", metadata={"source": "a.txt"}), Document(" ", id="b"), Document("So.", id="c")]
    report = precompute_documents(documents, client)
    assert report.failures == [("a of a.txt", "it is too long")]
    assert report.skipped == [("b", "it has no visible text")]
    assert report.notes == [("c", "'So.' has 2 tokens")]


def test_an_index_sends_its_documents_and_no_vectors(client, script, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in (("a", A), ("b", B)):
        (docs / f"{name}.txt").write_text(text)
    report = ingest(docs, client, tmp_path / "index", embedder="hashing", chunk_size=128)
    assert (report.num_documents, report.num_chunks, report.num_new_kv, report.new_kv_bytes) == (2, 2, 1, 700)
    (body,) = script.sent
    assert body["documents"] == [
        {"id": str(docs / f"{name}.txt"), "chunks": [text]} for name, text in (("a", A), ("b", B))
    ]
    (docs / "b.txt").unlink()
    (docs / "a.txt").write_text(A + " He was born in Synon.")
    report = ingest(docs, client, tmp_path / "index")
    assert (report.removed, report.num_removed_kv) == ([str(docs / "b.txt")], 2)
    assert script.removed == [{"collection": body["collection"], "ids": [str(docs / "b.txt")]}]
    assert [each["id"] for each in script.sent[1]["documents"]] == [str(docs / "a.txt")]
    assert ingest(docs, client, tmp_path / "index").num_removed_kv == 0
    assert len(script.removed) == 1


def test_missing_chunks_are_sent_once_and_again_after_a_failure(url, script, monkeypatch, caplog):
    monkeypatch.setattr("ragblend.engine.vllm.client._LOST_S", 0.1)
    script.report = BlendReport("blend", "ask", 0.05, chunks=[HIT, MISS], num_chunks=2, num_chunk_hits=1)
    script.states = ["unknown"] * 2  # the first batch is lost
    with load_engine("demo", backend=url) as engine:
        for num_sent in (1, 2, 2):
            engine.generate(PROMPT, max_tokens=3)
            engine.wait_for_precompute()
            script.states.clear()
            assert len(script.sent) == num_sent
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["a missed chunk was not stored"]
    assert all({each["chunks"][0] for each in body["documents"]} == {A, B} for body in script.sent)


def test_documents_that_a_server_has_lost_are_an_error(client, script, monkeypatch):
    monkeypatch.setattr("ragblend.engine.vllm.client._LOST_S", 0.3)
    script.states = ["unknown"] * 100
    with pytest.raises(BackendUnreachableError, match="no longer reports documents that it accepted"):
        precompute_documents([A], client)


def test_many_documents_go_in_several_requests(client, script, monkeypatch):
    monkeypatch.setattr("ragblend.ingestion.server_documents._BATCH_CHARS", 1000)
    texts = [f"{number}. {A}" for number in range(50)]
    assert precompute_documents(texts, client).num_chunks == 50
    assert len(script.sent) > 3
    assert [document["chunks"][0] for body in script.sent for document in body["documents"]] == texts


def test_a_namespace_goes_with_every_request(url, script):
    with load_engine("demo", backend=url, namespace="ann") as engine:
        engine.generate(PROMPT)
    assert parse_params(script.bodies[0]["kv_transfer_params"][PARAMS_KEY]).namespace == "ann"


def test_models_of_one_server_share_an_engine_until_it_is_closed(url, script):
    script.answer = ["Kinport"]
    chat = ChatBlend(model="demo", backend=url, engine_options={"on_miss": "inline"}, api_key="k")
    assert isinstance(chat.invoke("who?"), AIMessage)
    assert chat.api_key is None
    again = ChatBlend(**chat.model_dump(exclude_none=True), api_key="k")
    assert again.engine is chat.engine
    chat.engine.close()
    with pytest.raises(RagblendError, match="load it again"):
        again.invoke("who?")
    copied = ChatBlend(**chat.model_dump(exclude_none=True), api_key="k")
    assert copied.invoke("who?").response_metadata["finish_reason"] == "stop"
    copied.engine.close()


@pytest.mark.parametrize(("hits", "is_right"), [([True, True], True), ([True, False], False), ([], False)])
def test_strict_is_checked_by_the_report(url, script, hits, is_right):
    script.answer = ["Kinport"]
    chunks = [HIT if hit else MISS for hit in hits]
    script.report = BlendReport("blend", num_chunks=len(hits), num_chunk_hits=sum(hits), chunks=chunks)
    chat = ChatBlend(backend=url, strict=True)
    with chat.engine, nullcontext() if is_right else pytest.raises(ChunkNotReusedError, match="the server reused"):
        assert chat.invoke(PROMPT.messages[0].content).content == "Kinport"


# --- logs and closing ------------------------------------------------------------------------------------


def test_a_server_without_the_chunks_is_reported_once_after_three_requests(url, script, caplog):
    script.answer, script.report = ["Kinport"], BlendReport("blend", chunks=[MISS, MISS])
    with load_engine("demo", backend=url, on_miss="inline") as engine:
        for number in range(5):
            engine.generate(PROMPT)
            assert len(caplog.records) == (number >= 2)
    line = caplog.records[0].getMessage()
    assert line.startswith("nothing was reused: 3 prompts contained no stored chunk")
    assert f"ragblend ingest DOCS --model demo --backend {url}" in line


@pytest.mark.timeout(60)
def test_a_stream_whose_engine_is_closed_ends_quietly(url, script):
    """Read to its middle, by a thread that waits for the server, and not begun."""
    script.answer = ["Kinport"] * 4
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


def test_plain_vllm_answers_and_says_that_it_reuses_nothing(url, script, caplog):
    script.blends = False
    script.answer = ["Kinport"]
    with load_engine("demo", backend=url) as engine:
        assert "reuses no chunks" in caplog.text
        answer = engine.generate(PROMPT)
        assert (answer.text, answer.report.mode, answer.report.num_chunk_hits) == ("Kinport", "full", 0)
        assert "kv_transfer_params" not in script.bodies[0]
        assert not engine.is_stored(A)
        for store in (engine.precompute, lambda text: precompute_documents([text], engine)):
            with pytest.raises(RagblendError, match="ragblend serve"):
                store(A)


# --- around it --------------------------------------------------------------------------------------------------------


def test_a_chat_sends_the_whole_conversation_each_time(client, script):
    script.answer = ["Kinport"]
    session = ChatSession(client)
    list(session.stream([A], "Where?"))
    list(session.stream([A, B], "And who?"))
    first, second = (body["messages"] for body in script.bodies)
    assert second[: len(first)] == first
    assert [message["role"] for message in second[len(first) :]] == ["assistant", "user"]


@pytest.mark.parametrize(("blends", "shown"), [(True, "blends demo"), (False, "without ragblend")])
def test_doctor_looks_at_the_server(url, script, blends, shown):
    script.blends = blends
    check = run_vllm_diagnostics(Settings(backend=url))[0]
    assert check.ok is blends
    assert shown in check.finding


def test_a_client_is_an_engine(client):
    engine: Engine = client  # mypy looks at its methods
    assert (engine.name, engine.context_length, engine.bytes_per_token) == ("demo", 512, 100)


def test_settings_of_the_servers_store_are_rejected_with_a_fix(script, url):
    defaults = {"memory_gib": 2.0, "disk_gib": "auto", "remote": None, "kv_dtype": "auto"}
    load_engine("demo", backend=url, **defaults).close()  # what the command line passes when nothing is set
    for setting in ({"remote": "redis://cache:6379/0"}, {"disk_gib": 5.0}, {"disk_gib": 0}, {"memory_gib": 0.0}):
        [name] = setting
        with pytest.raises(UsageError, match=f"RAGBLEND_{name.upper()}=... ragblend serve"):
            load_engine("demo", backend=url, **setting)
