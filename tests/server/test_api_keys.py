"""API keys bound to namespaces: the file, the routes, the gate in front of an application. Needs no vLLM.

`tests/inside_vllm/test_tenants.py` asks a real server.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.config import Settings
from ragblend.engine.namespaces import equals_ignoring_salt, salted_namespace, vllm_cache_salt
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.params import TENANT_KEY, parse_params
from ragblend.errors import BackendUnreachableError, NotFoundError, RagblendError, StoreFullError, UsageError
from ragblend.operations.serve import build_server_command
from ragblend.redaction import redact_url
from ragblend.server import api_keys
from ragblend.server.api_keys import (
    ApiKeys,
    ForbiddenError,
    Grant,
    KeysFile,
    bind_namespace,
    parse_keys,
    read_keys,
)
from ragblend.server.auth_gate import guard_engine, wrap_app
from ragblend.server.limits import BodyLimits

KEY, OTHER = "sk-acme-0123", "sk-globex-0123"
FACTS = {"namespace": "acme", "rights": ["ask", "ingest"]}


def keys_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_toml_and_json_and_a_keys_hash_say_the_same(tmp_path):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    toml = f'open = ["/health"]\n[keys."sha256:{digest}"]\nnamespace = "acme"\nrights = ["ask", "ingest"]\n'
    in_toml = read_keys(keys_file(tmp_path, toml))
    in_json = read_keys(keys_file(tmp_path, json.dumps({"open": ["/health"], "keys": {KEY: FACTS}})))
    assert in_toml == in_json
    for headers in (bearer(KEY), [(b"X-API-Key", KEY.encode())]):
        assert in_toml.grant_of(headers) == Grant("acme", frozenset({"ask", "ingest"}))
    for headers in ([], bearer(""), bearer(OTHER), bearer(digest), [(b"authorization", KEY.encode())]):
        assert in_toml.grant_of(headers) is None


def test_a_keys_file_that_others_may_read_is_refused(tmp_path):
    text = json.dumps({"keys": {KEY: FACTS}})
    for mode in (0o644, 0o604, 0o620):
        with pytest.raises(UsageError, match="chmod 600"):
            read_keys(keys_file(tmp_path, text, mode))
    assert read_keys(keys_file(tmp_path, text, 0o640))  # a group that may read it, as mounted secrets have
    with pytest.raises(NotFoundError, match="--api-keys-file FILE"):
        read_keys(tmp_path / "none")


@pytest.mark.parametrize(
    "values",
    [
        "nonsense",
        f"keys = {KEY}",
        {},
        {"keys": {}},
        {"keys": {"short": FACTS}},
        {"keys": {"sha256:12": FACTS}},
        {"keys": {KEY: {"namespace": "acme"}}},
        {"keys": {KEY: {**FACTS, "rights": []}}},
        {"keys": {KEY: {**FACTS, "rights": ["all"]}}},
        {"keys": {KEY: {**FACTS, "name": 3}}},
        {"keys": {KEY: {**FACTS, "name": "n" * 201}}},
        {"keys": {KEY: {**FACTS, "namespace": 3}}},
        {"keys": {KEY: {**FACTS, "namespace": "a#salt:b"}}},
        {"keys": {KEY: FACTS}, "open": "/health"},
        {"keys": {KEY: FACTS}, "more": 1},
    ],
)
def test_an_invalid_keys_file_is_rejected_and_no_key_is_quoted(tmp_path, values):
    text = values if isinstance(values, str) else json.dumps(values)
    with pytest.raises(UsageError, match="neither TOML nor JSON" if values is text else None) as error:
        read_keys(keys_file(tmp_path, text))
    assert KEY not in str(error.value)


def test_a_changed_keys_file_counts_within_seconds_and_an_invalid_one_never(tmp_path, monkeypatch, caplog):
    def has(key: str) -> bool:
        return keys.current().grant_of(bearer(key)) is not None

    for folder, key in (("v1", KEY), ("v2", OTHER)):
        (tmp_path / folder).mkdir()
        keys_file(tmp_path / folder, json.dumps({"keys": {key: FACTS}}))
    for name, target in (("data", "v1"), ("next", "v2"), ("keys", "data/keys")):  # as Kubernetes mounts secrets
        (tmp_path / name).symlink_to(target)
    path = tmp_path / "keys"
    keys = KeysFile(path)
    (tmp_path / "next").rename(tmp_path / "data")
    assert has(KEY)
    now_s = api_keys.time.monotonic()
    monkeypatch.setattr(api_keys.time, "monotonic", lambda: now_s + 3)
    assert (has(KEY), has(OTHER)) == (False, True)
    monkeypatch.setattr(api_keys, "_LOOK_S", 0.0)
    for change in (
        lambda: path.write_text("half of a"),
        lambda: keys_file(tmp_path, json.dumps({"keys": {KEY: FACTS}}), 0o644),
        path.unlink,
    ):
        change()
        assert (has(KEY), has(OTHER)) == (False, True)
        assert "the API keys stay as they were" in caplog.messages[-1]
        assert KEY not in caplog.text
    keys_file(tmp_path, json.dumps({"keys": {KEY: FACTS}}))
    assert (has(KEY), has(OTHER)) == (True, False)


@given(
    named=st.none() | st.text(max_size=8) | st.integers(),
    mode=st.sampled_from(["blend", "reuse", "full", "prefix", "ingest", "nonsense"]),
    rights=st.frozensets(st.sampled_from(["ask", "ingest", "admin"]), min_size=1),
)
def test_what_reaches_the_engine_has_the_keys_namespace_or_is_refused(named, mode, rights):
    grant = Grant("acme", rights)
    given = {"ragblend": {"mode": mode, "namespace": named}, TENANT_KEY: "globex", "do_remote_prefill": True}
    try:
        sent = bind_namespace(given, grant)
    except ForbiddenError:
        assert (named and named != "acme") or not rights & {"admin", "ingest" if mode == "ingest" else "ask"}
        return
    assert sent == {TENANT_KEY: "acme", "ragblend": {"mode": mode, "namespace": "acme"}}


def test_plain_prompts_are_stamped_too():
    for sent in (None, {}, "nonsense", {"do_remote_decode": True}):
        assert bind_namespace(sent, Grant("acme", frozenset({"ask"}))) == {TENANT_KEY: "acme"}
        with pytest.raises(ForbiddenError, match="'ask'"):
            bind_namespace(sent, Grant("acme", frozenset({"ingest"})))


class Engine:
    """Where vLLM's requests end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> None:
        self.seen.append(sampling_params.extra_args)

    def encode(self, prompt: Any) -> None:
        self.seen.append(None)


def asked(keys: ApiKeys, engine: Engine, key: str, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """Status and body of an application that hands a body's `extra_args` to the engine, and makes errors a 500."""
    sent: list[Any] = []
    raw = json.dumps(body).encode()
    parts = [
        {"type": "http.request", "body": raw[:7], "more_body": True},
        {"type": "http.request", "body": raw[7:], "more_body": False},
    ]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, read = 200, b""
        while message := await receive():
            read += message["body"]
            if not message["more_body"]:
                break
        params = SimpleNamespace(extra_args=json.loads(read).get("extra_args"))
        given = copy.deepcopy(params.extra_args)
        try:
            await asyncio.create_task(as_task(lambda: engine.generate("prompt", params, "id")))
        except RagblendError:
            status = 500
        assert params.extra_args == given  # it may be another request's as well
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'"app"'})

    async def as_task(call: Any) -> None:
        call()

    scope = {"type": "http", "method": method, "path": path, "headers": bearer(key)}
    asyncio.run(wrap_app(app, keys, BodyLimits())(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_the_gate_binds_what_any_body_hands_to_the_engine():
    engine = Engine()
    guard_engine(engine)
    keys = parse_keys({"keys": {KEY: FACTS}})
    forged = {"kv_transfer_params": {"ragblend": {"namespace": "globex"}}}
    for path in ("/v1/completions", "/invocations", "/inference/v1/generate"):
        status, body = asked(keys, engine, KEY, path, {"extra_args": forged})  # in no place that is known
        assert status == 403
        assert "'globex'" in body["error"]["message"]
        assert asked(keys, engine, KEY, path, forged)[0] == 403
    assert engine.seen == []
    assert asked(keys, engine, KEY, "/v1/completions", {"extra_args": {"mine": 1}}) == (200, "app")
    assert engine.seen == [{"mine": 1, "kv_transfer_params": {TENANT_KEY: "acme"}}]
    for key, path, status in ((OTHER, "/v1/completions", 401), (KEY, "/metrics", 403), (KEY, "//v1/completions", 403)):
        assert asked(keys, engine, key, path, {})[0] == status
    with pytest.raises(ForbiddenError):  # a task without a request
        engine.generate("prompt", SimpleNamespace(extra_args=None), "id")
    with pytest.raises(ForbiddenError):
        engine.encode("prompt")


def test_a_salt_makes_a_namespace_of_its_own_and_is_not_shown():
    namespaces = [salted_namespace(name, salt) for name in ("", "a", "ab") for salt in (None, "s", "t")]
    assert len(set(namespaces)) == len({vllm_cache_salt(each) for each in namespaces}) == 9
    assert equals_ignoring_salt(salted_namespace("a", "s"), "a")
    assert not equals_ignoring_salt(salted_namespace("ab", "s"), "a")
    for namespace in (salted_namespace("a", "s"), "x" * 300, "\ud800"):
        with pytest.raises(UsageError):
            parse_params({"namespace": namespace})


def test_errors_that_go_out_name_no_place(tmp_path):
    remote = "redis://:secret@cache.internal:6379/0"
    config = ConnectorConfig(store=str(tmp_path / "kv"), remote=remote)
    message = config.message_for_clients(StoreFullError(f"{tmp_path}/kv/aa/b needs 9 bytes; {remote} is away"))
    assert message.startswith("STORE/aa/b needs 9 bytes")
    for hidden in (str(tmp_path), "secret", "cache.internal"):
        assert hidden not in message
    for name, url in (
        ("catalog", "postgresql://ragblend:secret@cache.internal:5432/ragblend"),  # user and database of one name
        ("catalog", "postgresql://cache.internal/ragblend"),
        ("catalog", "postgresql://ragblend:secret@cache.internal:1,cache.internal:2/ragblend?sslmode=require"),
        ("catalog", "postgresql:///ragblend?host=cache.internal"),
        ("remote", "redis://ragblend:secret@cache.internal"),
    ):
        config = ConnectorConfig(store=str(tmp_path / "kv"), **{name: url})
        for shown in (url, redact_url(url), "cache.internal:6379", "cache.internal", '"cache.internal", port 5432'):
            error = BackendUnreachableError(f"{shown} does not answer; check it: ragblend doctor --remote URL")
            message = config.message_for_clients(error)
            assert message.startswith((name.upper(), f'"{name.upper()}", port'))
            assert message.endswith("check it: ragblend doctor --remote URL")
            for hidden in ("secret", "cache.internal", "***"):
                assert hidden not in message
    assert "/etc" not in config.message_for_clients(OSError(13, "Permission denied", "/etc/passwd"))


def test_entries_and_notes_of_a_store_are_their_owners_alone(tmp_path):
    def modes(root: Path) -> set[int]:
        return {path.stat().st_mode & 0o777 for path in root.rglob("*")}

    DiskStore(tmp_path / "own").put_model("0" * 32, {"model": "m"})
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert modes(tmp_path / "own") == {0o700, 0o600}
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)  # the owner lets the group write
    DiskStore(shared).put_model("0" * 32, {"model": "m"})
    assert modes(shared) == {0o770, 0o660}


def test_serve_takes_a_keys_file_and_no_other_key(tmp_path, monkeypatch):
    for name in ("VLLM_API_KEY", "RAGBLEND_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    path = keys_file(tmp_path, json.dumps({"keys": {KEY: FACTS}}))
    options = {"settings": Settings(model="demo", store=str(tmp_path / "kv")), "keys": path}
    made = build_server_command(**options, check=False)
    transfer = json.loads(made.command[made.command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["keys"] == str(path)
    assert KEY not in made.display_command()
    with pytest.raises(UsageError, match="both"):
        build_server_command(**options, api_key="k", check=False)
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    with pytest.raises(UsageError, match="RESPONSES"):
        build_server_command(**options, check=False)
    monkeypatch.delenv("VLLM_ENABLE_RESPONSES_API_STORE")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        build_server_command(**options, check=False)
