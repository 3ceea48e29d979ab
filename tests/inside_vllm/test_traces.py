"""vLLM's spans say what ragblend did, as an OTLP receiver gets them over HTTP from a real server."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import served_demo

from ragblend import SegmentedPrompt, load_engine

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = pytest.mark.timeout(1200)
TEXT = "George Keller lives in Kinport. George Keller works for Synon."


class Receiver(ThreadingHTTPServer):
    """Takes what an exporter posts, as a collector does; `spans` are the attributes of those named `llm_request`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = trace_service.ExportTraceServiceRequest.FromString(body)
        assert isinstance(self.server, Receiver)
        for resource in sent.resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans if span.name == "llm_request"):
                values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
                self.server.spans.append(values)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(trace_service.ExportTraceServiceResponse().SerializeToString())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def url(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    options = ("--max-model-len", "2048")
    options += ("--otlp-traces-endpoint", f"http://127.0.0.1:{receiver.server_port}/v1/traces")
    with served_demo(tmp_path_factory.mktemp("traced"), *options, **own) as server:
        yield server.url


def test_a_request_s_span_says_what_was_reused_and_what_it_cost(url: str, receiver: Receiver, tmp_path: Path) -> None:
    with load_engine("demo", tmp_path, backend=url) as engine:
        engine.precompute(TEXT)
        ask = SegmentedPrompt([TEXT, "Nobody has stored this."], "Where does George Keller live?", system="Be brief.")
        report = engine.generate(ask, recompute_ratio=0.5, max_tokens=4).report
        engine.generate(ask, mode="full", max_tokens=4)
    # Chunks that were stored before and after have spans, too, in mode full: asked for are those of this prompt.
    deadline_s, asked = time.monotonic() + 60, list[dict[str, Any]]()
    while len(asked) < 2:
        assert time.monotonic() < deadline_s, receiver.spans
        time.sleep(0.1)
        asked = [span for span in receiver.spans if span["gen_ai.usage.prompt_tokens"] == report.prompt_tokens]
    blend, full = asked
    assert [span["ragblend.mode"] for span in asked] == ["blend", "full"]
    for name in (
        "rule",
        "recompute_ratio",
        "num_chunks",
        "num_chunk_hits",
        "num_recomputed_tokens",
        "load_s",
        "fuse_s",
    ):
        assert blend[f"ragblend.{name}"] == getattr(report, name), name
    assert blend["ragblend.num_chunk_hits"] >= 1
    assert blend["ragblend.fuse_s"] > 0
    assert full["ragblend.num_chunk_hits"] == 0
