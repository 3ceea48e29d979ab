"""`ragblend top`: what it makes of `/metrics`, written by Prometheus' own client and served over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from typer.testing import CliRunner

from ragblend.cli import top as command
from ragblend.cli.app import app
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.upkeep.top import Look, between, look, quantile

LABELS = {"model_name": "m", "engine": "0"}


@dataclass
class Server:
    """Counts like a server of vLLM's; `key`, what it wants to be shown."""

    url: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.series: dict[str, Any] = {}
        for name in ("requests", "chunk_hits", "chunk_misses", "reused_tokens", "damaged_entries"):
            self.series[name] = Counter(f"vllm:ragblend_{name}", name, [*LABELS], registry=self.registry)
        self.series["waiting"] = Gauge("vllm:num_requests_waiting", "", [*LABELS], registry=self.registry)
        self.series["tier_hits"] = Counter("vllm:ragblend_tier_hits", "", [*LABELS, "tier"], registry=self.registry)
        self.series["store_bytes"] = Gauge("vllm:ragblend_store_bytes", "", [*LABELS, "tier"], registry=self.registry)
        self.series["ttft"] = Histogram(
            "vllm:ragblend_request_ttft_seconds",
            "",
            [*LABELS, "mode"],
            buckets=(0.1, 0.5, 1.0),
            registry=self.registry,
        )
        Counter("process_starts", "of nobody", registry=self.registry).inc()

    def of(self, name: str, **labels: str) -> Any:
        return self.series[name].labels(**{**LABELS, **labels})


@pytest.fixture
def server() -> Iterator[Server]:
    counting = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = not counting.key or self.headers["Authorization"] == f"Bearer {counting.key}"
            self.send_response(200 if allowed and self.path == "/metrics" else 401)
            self.end_headers()
            if allowed:
                self.wfile.write(generate_latest(counting.registry))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        counting.url = f"http://127.0.0.1:{http.server_address[1]}"
        yield counting
        http.shutdown()


def at(seen: Look, at_s: float) -> Look:
    return Look(seen.samples, seen.models, at_s)


def test_a_first_look_tells_totals(server: Server) -> None:
    server.of("requests").inc(7)
    server.of("chunk_hits").inc(30)
    server.of("chunk_misses").inc(10)
    server.of("waiting").set(3)
    server.of("store_bytes", tier="disk").set(5 << 30)
    now = between(None, look([server.url]))
    assert (now.models, now.seconds, now.asked_s, now.found, now.waiting) == (("m",), None, 7, 0.75, 3)
    assert (now.tiers["disk"].nbytes, now.tiers["disk"].hits_s) == (5 << 30, 0)


def test_two_looks_tell_what_happened_between_them(server: Server) -> None:
    server.of("requests").inc(100)
    server.of("ttft", mode="full").observe(0.7)
    before = at(look([server.url]), 10.0)
    server.of("requests").inc(8)
    for seconds in (0.2, 0.2, 0.3, 0.9):
        server.of("ttft", mode="blend").observe(seconds)
    now = between(before, at(look([server.url]), 14.0))
    assert (now.seconds, now.asked_s) == (4.0, 2.0)
    assert (now.ttft["blend"].count, now.ttft["full"].count) == (4, 0)
    assert now.ttft["blend"].median == pytest.approx(0.1 + 0.4 * 2 / 3)
    assert now.ttft["full"].median is None


def test_a_server_that_began_anew_counts_from_nothing(server: Server) -> None:
    server.of("requests").inc(100)
    before = at(look([server.url]), 0.0)
    server.__post_init__()
    server.of("requests").inc(6)
    assert between(before, at(look([server.url]), 2.0)).asked_s == 3.0


def test_servers_are_summed(server: Server) -> None:
    server.of("tier_hits", tier="memory").inc(2)
    server.of("ttft", mode="blend").observe(0.05)
    now = between(None, look([server.url, server.url]))
    assert now.tiers["memory"].hits_s == 4
    assert now.ttft["blend"].count == 2


def test_quantiles_stay_within_the_buckets() -> None:
    assert quantile([(0.1, 0.0), (1.0, 0.0), (float("inf"), 3.0)], 0.5) == 1.0
    assert quantile([(0.1, 4.0), (1.0, 4.0)], 1.0) == 0.1


def test_who_does_not_answer_is_told_with_what_to_do(server: Server) -> None:
    server.key = "secret"
    with pytest.raises(BackendUnreachableError, match=r"401.*--api-key"):
        look([server.url])
    server.of("requests").inc()
    assert look([server.url], "secret").value("vllm:ragblend_requests_total") == 1
    with pytest.raises(BackendUnreachableError, match="is the server running"):
        look(["http://127.0.0.1:9"])
    with pytest.raises(BackendUnreachableError) as raised:
        look(["http://user:secret@127.0.0.1:9"])
    assert "secret" not in str(raised.value)


def test_metrics_of_something_else_are_refused(server: Server) -> None:
    server.registry = CollectorRegistry()
    with pytest.raises(UsageError, match="none of vLLM's"):
        look([server.url])


def test_the_command_prints_one_look_where_there_is_no_terminal(server: Server) -> None:
    server.of("chunk_hits").inc(9)
    server.of("chunk_misses").inc(1)
    printed = CliRunner().invoke(app, ["top", server.url])
    assert printed.exit_code == 0, printed.output
    assert "90.0% found" in printed.output
    told = json.loads(CliRunner().invoke(app, ["top", server.url, "--once", "--json"]).output)
    assert (told["schema_version"], told["chunk_hits_s"], told["servers"]) == (1, 9, [server.url])


def test_a_server_that_is_away_for_a_moment_ends_nothing(server: Server) -> None:
    server.of("requests").inc()
    before, errors = look([server.url]), list[Exception]()
    watched = command._watch([server.url], None, 0.01, before, lambda error: (errors.append(error), back())[1])

    def back() -> None:
        server.key = ""

    server.key = "away"
    assert next(watched).asked_s == 0
    assert len(errors) == 1
