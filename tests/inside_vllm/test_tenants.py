"""`ragblend serve --api-keys-file` for real: every route needs a key, and a key sees its namespace's chunks alone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from demo_texts import QUESTION, A
from served import metrics, served_demo

from ragblend import Prompt, load_engine
from ragblend.catalog.ledger import Ledger
from ragblend.engine.namespaces import salted_namespace
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.errors import RagblendError
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.render import Renderer

B = "Ben Howard lives in Easton."
ACME, GLOBEX, ASKER, INGESTER, ADMIN = (f"a-key-of-{name}" for name in ("acme", "globex", "asker", "ingester", "admin"))
KEYS = {
    ACME: {"namespace": "acme", "rights": ["ask", "ingest"]},
    GLOBEX: {"namespace": "globex", "rights": ["ask", "ingest"]},
    ASKER: {"namespace": "acme", "rights": ["ask"]},
    INGESTER: {"namespace": "acme", "rights": ["ingest"]},
    ADMIN: {"namespace": "ops", "rights": ["admin"]},
}
ROUTES = """
import json
from pathlib import Path
class RecordRoutes:
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            routes = [(route.path, sorted(getattr(route, "methods", None) or ["GET"])) for route in scope["app"].routes]
            Path("routes.json").write_text(json.dumps(routes))
        await self.app(scope, receive, send)
"""


class Served(NamedTuple):
    url: str
    home: Path
    http: httpx.Client

    def ask(self, key: str, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
        return self.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

    def metrics(self) -> dict[str, float]:
        return metrics(self.url, ADMIN)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("tenants")
    keys = home / "keys.json"
    keys.write_text(json.dumps({"keys": KEYS, "open": ["/health"]}))
    keys.chmod(0o600)
    (home / "recorded_routes.py").write_text(ROUTES)
    options = ("--api-keys-file", str(keys), "--max-model-len", "1024", "--block-size", "32", "--enable-scale-out")
    options += ("--middleware", "recorded_routes.RecordRoutes")
    path = os.pathsep.join([str(home), str(Path(__file__).parents[2])])
    with (
        served_demo(home, *options, PYTHONPATH=path) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield Served(server.url, home, http)


def engine(served: Served, key: str, **options: Any) -> Any:
    return load_engine("demo", backend=served.url, api_key=key, on_miss="inline", **options)


def hits(engine: Any) -> int:
    return int(engine.generate(Prompt([A], QUESTION), max_tokens=4).report.num_chunk_hits)


def num_matched(served: Served, key: str) -> int:
    """Stored chunks that the server finds in a plain client's prompt."""
    messages = [{"role": "user", "content": f"{A}\n\n{QUESTION}"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = served.ask(key, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    got = answer.json().get("kv_transfer_params")
    return int(got["ragblend"]["num_chunk_hits"]) if got else 0


def test_two_keys_find_nothing_of_each_others_chunks(served):
    with engine(served, ACME) as acme, engine(served, GLOBEX) as globex:
        assert (acme.namespace, globex.namespace) == ("acme", "globex")
        acme.precompute(A)
        assert (hits(acme), hits(globex)) == (1, 0)
        assert (acme.is_stored(A), globex.is_stored(A)) == (True, False)
        assert [num_matched(served, key) for key in (ACME, GLOBEX)] == [1, 0]
        assert {header.namespace for header in DiskStore(served.home / "kv").headers()} == {"acme"}
        assert not globex.forget(A)
        assert hits(acme) == 1
        globex.precompute(A)
        assert (hits(acme), hits(globex)) == (1, 1)
        assert globex.forget(A)
        assert (hits(acme), hits(globex)) == (1, 0)


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": [1, 5, 6, 7, 8, 9], "max_tokens": 1},
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1},
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1},
    "/v1/responses": {"model": "demo", "input": QUESTION, "max_output_tokens": 1},
    "/invocations": {"model": "demo", "prompt": [1, 5, 6, 7, 8, 9], "max_tokens": 1},
    "/inference/v1/generate": {"model": "demo", "token_ids": [1, 5, 6, 7, 8, 9], "sampling_params": {"max_tokens": 1}},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_a_forged_namespace_is_refused_with_the_reason(served, path):
    own, forged = (
        {"kv_transfer_params": {"ragblend": {"mode": "prefix", "namespace": name}}} for name in ("acme", "globex")
    )
    assert (answer := served.ask(ACME, path, PROMPTS[path])).status_code == 200, answer.text  # plain vLLM goes on
    assert served.ask(ACME, path, {**PROMPTS[path], **own}).status_code == 200
    for more in ({}, {"stream": True}):
        answer = served.ask(ACME, path, {**PROMPTS[path], **forged, **more})
        assert answer.status_code == 403, answer.text
        assert "'globex'" in answer.json()["error"]["message"]
        assert "'acme'" in answer.json()["error"]["message"]


def test_parameters_that_come_another_way_are_bound_too(served):
    forged = {"kv_transfer_params": {"ragblend": {"mode": "prefix", "namespace": "globex"}}}
    hidden = {"max_tokens": 1, "extra_args": forged}
    body = {**PROMPTS["/inference/v1/generate"], "sampling_params": hidden}
    answer = served.ask(ACME, "/inference/v1/generate", body)
    assert (answer.status_code, "'globex'" in answer.text) == (403, True)
    stamp = {"kv_transfer_params": {"ragblend_tenant": "globex", "ragblend": {"mode": "prefix"}}}
    before = served.metrics()["vllm:ragblend_requests_total"]
    assert served.ask(ACME, "/v1/completions", {**PROMPTS["/v1/completions"], **stamp}).status_code == 200
    assert served.metrics()["vllm:ragblend_requests_total"] == before + 1


def test_every_route_without_a_key_is_refused(served):
    served.http.get("/health")
    routes = json.loads((served.home / "routes.json").read_text())
    paths = {path for path, _ in routes}
    assert {"/v1/completions", "/invocations", "/metrics", "/tokenize", "/v1/ragblend/documents"} <= paths
    for path, methods in routes:
        place = re.sub(r"\{[^}]*\}", "x", path)
        for method in {*methods, "GET", "POST", "HEAD"} - {"OPTIONS"}:
            for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": f"Basic {ACME}"}):
                if path == "/health" and method in ("GET", "HEAD"):  # the keys file opens it
                    continue
                answer = served.http.request(method, place, headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, path, answer.status_code)
    assert served.http.get("/health").status_code == 200
    assert served.http.get(f"{served.url}//health").status_code == 401


def test_what_a_key_has_no_right_to_is_refused(served):
    for method, path in (("GET", "/metrics"), ("GET", "/openapi.json"), ("POST", "/v1/load_lora_adapter")):
        answer = served.ask(ACME, path, {}, method)
        assert answer.status_code == 403, path
        assert "admin" in answer.json()["error"]["message"]
    assert served.ask(INGESTER, "/v1/completions", PROMPTS["/v1/completions"]).status_code == 403
    with engine(served, ASKER) as asker, pytest.raises(RagblendError, match="'ingest'"):
        asker.precompute(B)
    with engine(served, INGESTER) as ingester:
        ingester.precompute(B)
        assert ingester.is_stored(B)
    with engine(served, ACME, namespace="globex") as forger, pytest.raises(RagblendError, match="globex"):
        forger.generate(Prompt([A], QUESTION), max_tokens=1)


def test_vllms_own_prefix_cache_is_not_shared_either(served):
    body = {"model": "demo", "prompt": [1, *range(10, 110)], "max_tokens": 1}

    def cached(key: str, **more: Any) -> float:
        before = served.metrics()["vllm:prefix_cache_hits_total"]
        assert served.ask(key, "/v1/completions", {**body, **more}).status_code == 200
        return served.metrics()["vllm:prefix_cache_hits_total"] - before

    assert cached(ACME) == 0
    assert cached(ACME) == 96
    assert cached(GLOBEX) == 0
    assert cached(ASKER) == 96  # of the same namespace
    assert cached(ACME, cache_salt="s") == 0
    assert cached(GLOBEX, cache_salt="s") == 0
    assert cached(ACME, cache_salt="s") == 96


def test_a_cache_salt_is_part_of_the_namespace(served):
    ids = list(range(40, 80))
    body = {"model": "demo", "prompt": [1, *ids, 7], "max_tokens": 1, "temperature": 0}

    def ask(mode: str, **more: Any) -> dict[str, Any]:
        span = {"span": [1, 41]} if mode == "ingest" else {}
        params = {"kv_transfer_params": {"ragblend": {"mode": mode, **span}}}
        return dict(served.ask(ACME, "/v1/completions", {**body, **params, **more}).json()["kv_transfer_params"])

    with Ledger(served.home / "kv" / CATALOG_FILE) as ledger:
        fingerprint = Renderer(load_tokenizer("demo")[0]).fingerprint
        for salt in (None, "other", "s3cret"):
            ledger.add_ids([("text", ids)], fingerprint, salted_namespace("acme", salt))
    ask("ingest", cache_salt="s3cret")
    found = [ask("blend", **salt)["ragblend"]["num_chunk_hits"] for salt in ({}, {"cache_salt": "other"})]
    assert found == [0, 0]
    assert ask("blend", cache_salt="s3cret")["ragblend"]["num_chunk_hits"] == 1
    assert not any("s3cret" in header.namespace for header in DiskStore(served.home / "kv").headers())


def test_where_the_store_is_is_not_told(served):
    for path in ("/v1/ragblend", "/v1/models", "/metrics", "/openapi.json", "/version", "/load"):
        answer = served.ask(ADMIN, path, method="GET")
        assert answer.status_code == 200, path
        assert str(served.home) not in answer.text, path
    store = served.home / "kv"
    entries = [path for path in store.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in entries} == {0o600}
    body = {"model": "demo", "prompt": [1, *range(90, 130), 7], "max_tokens": 1}
    params = {"kv_transfer_params": {"ragblend": {"mode": "ingest", "span": [1, 41]}}}
    for folder in [store, *(path for path in store.rglob("*") if path.is_dir())]:
        folder.chmod(0o500)
    try:
        got = served.ask(ACME, "/v1/completions", {**body, **params})
    finally:
        for folder in [store, *(path for path in store.rglob("*") if path.is_dir())]:
            folder.chmod(0o700)
    if os.getuid():  # root writes everywhere
        assert "not stored" in got.json()["kv_transfer_params"]["ragblend"]["refused_reason"]
    assert str(served.home) not in got.text
