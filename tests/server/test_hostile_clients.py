"""What clients can write into logs and errors of a server, and how much of it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.vllm import plugin
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import parse_params
from ragblend.errors import UsageError
from ragblend.server.api import RoutesMiddleware
from ragblend.server.api_keys import AuthContext, Grant, current_auth
from ragblend.server.auth_gate import log_change

FORGED = "\x1b[31m\nERROR forged\r\u202e\ud800"
HUGE = "x" * (1 << 20)


def vllm_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of vLLM's logger after this call. ragblend's records go there if the root logger has no handlers."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    for name in ("", "ragblend"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    caplog.set_level(logging.DEBUG, "ragblend")  # so that the level is restored after the test
    plugin.use_vllm_logger()
    return seen


@pytest.mark.parametrize("sent", [FORGED, HUGE], ids=["control characters", "1 MiB"])
@pytest.mark.parametrize("field", ["mode", "rule", "ratio", "version", "seed", "span", "namespace", "a name"])
def test_what_a_client_sends_is_quoted_short_and_escaped(field, sent, monkeypatch, caplog):
    logged = vllm_log(monkeypatch, caplog)
    raw: Any = {sent: 1, **{f"{sent}{number}": 1 for number in range(20)}} if field == "a name" else {field: sent}
    try:
        find_rule(parse_params(raw).rule)
    except UsageError as error:
        answered = ConnectorConfig().message_for_clients(error)
        logging.getLogger("ragblend.engine").warning("request %s is refused: %s", sent, error)
        assert all(text.isprintable() and len(text) < 2100 for text in (answered, *logged))
        assert logged
    else:
        assert field == "namespace", "a namespace may have any letters that JSON has"


def test_a_statement_that_logs_for_each_document_logs_five_times_a_minute(monkeypatch, caplog):
    logged = vllm_log(monkeypatch, caplog)
    log = logging.getLogger("ragblend.server")
    for second in range(200):
        monkeypatch.setattr("time.time", lambda second=second: 1e9 + second)
        monkeypatch.setattr("time.time_ns", lambda second=second: int(1e9 + second) * 10**9)
        log.warning("document %d is not stored: the disk is full", second)
        if second == 99:
            log.warning("something else")
    assert len(logged) == 4 * 5 + 1
    assert logged[4] == "document 4 is not stored: the disk is full"
    assert logged[5].startswith("document 61 is not stored: the disk is full (56 more like it since ")


def test_a_client_that_closes_an_upload_costs_one_line(caplog):
    from starlette.requests import Request

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    caplog.set_level(logging.INFO)
    routes = RoutesMiddleware(app)
    routes._equipped = True
    scope = {"type": "http", "method": "POST", "path": "/v1/ragblend/documents", "headers": []}
    asyncio.run(routes(scope, receive, lambda message: pytest.fail("answered")))
    assert [record.exc_info for record in caplog.records if record.name.startswith("ragblend")] == [None]


def test_the_audit_log_has_every_change_with_its_keys_name(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "vllm")
    logged = vllm_log(monkeypatch, caplog)
    current_auth.set(AuthContext(Grant("acme", frozenset({"ingest"}), "the crawler")))
    for _ in range(9):  # beyond what other lines may have in a minute
        log_change("add", "acme", "kb", [f"{FORGED}{number:08}" * 10 for number in range(150)])
    log_change("replace", "acme", "kb", [])
    current_auth.set(None)
    log_change("clear", "acme", "", (), num_kv=3)
    changes = [json.loads(line) for line in logged]
    assert all(line.isprintable() for line in logged)
    assert [len(each["ids"]) for each in changes[:-1]] == [100, 50] * 9
    assert changes[0]["ids"][0] == f"{FORGED}00000000" * 10
    assert {**changes[0], "ids": []} == {
        "audit": "documents", "action": "add", "namespace": "acme", "key": "the crawler", "collection": "kb", "ids": [],
    }  # fmt: skip
    assert changes[-1] == {"audit": "documents", "action": "clear", "namespace": "acme", "key": None, "num_kv": 3}
