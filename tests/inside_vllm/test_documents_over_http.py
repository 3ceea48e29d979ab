"""Documents over HTTP for real: a server's own process is sent texts, prefills them, and finds them in prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo_texts import QUESTION, A, B, C
from openai import OpenAI
from served import start_demo
from servers import HttpServer, wait_until

from benchmarks.servers import free_port
from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore

pytestmark = pytest.mark.smoke

ACME, GLOBEX, ASKER, OPS = (f"a-key-of-{name}" for name in ("acme", "globex", "asker", "ops"))
KEYS = {
    ACME: {"namespace": "acme", "rights": ["ask", "ingest"]},
    GLOBEX: {"namespace": "globex", "rights": ["ask", "ingest"]},
    ASKER: {"namespace": "acme", "rights": ["ask"]},
    OPS: {"namespace": "ops", "rights": ["admin"]},
}
PATH = "/v1/ragblend/documents"


class Served:
    """A server that can be killed and started again over the same store."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.server: HttpServer | None = None
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        keys = home / "keys.json"
        keys.write_text(json.dumps({"keys": KEYS, "open": ["/health"]}))
        keys.chmod(0o600)

    def start(self) -> None:
        options = ("--api-keys-file", str(self.home / "keys.json"), "--max-model-len", "1024", "--block-size", "32")
        self.server = start_demo(self.home, *options, port=self.port)
        self.server.wait(900)

    def call(self, method: str, path: str = PATH, body: Any = None, key: str = ACME, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return self.http.request(method, path, content=content, headers=headers, **more)

    def send(self, *documents: dict[str, Any], collection: str = "kb", key: str = ACME) -> str:
        answer = self.call("POST", body={"collection": collection, "documents": documents}, key=key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["ingestion"])

    def counts(self, ingestion: str | None = None, collection: str = "kb", key: str = ACME) -> dict[str, int]:
        params = {"collection": collection} | ({"ingestion": ingestion} if ingestion is not None else {})
        return dict(self.call("GET", key=key, params=params).json()["collections"].get(collection, {"num_waiting": 0}))

    def wait(self, ingestion: str, collection: str = "kb", key: str = ACME) -> dict[str, int]:
        wait_until(lambda: not self.counts(ingestion, collection, key)["num_waiting"], 120, "all are stored")
        return self.counts(ingestion, collection, key)

    def hits(self, text: str, key: str = ACME, **more: str) -> int:
        prompt = f"<s><doc> {text}<q> {QUESTION}<a>"
        with OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0) as client:
            extra = {"add_special_tokens": False, **more}
            answer = client.completions.create(
                model="demo", prompt=prompt, max_tokens=4, temperature=0, extra_body=extra
            )
        params = (answer.model_extra or {})["kv_transfer_params"]  # none for a prompt without a stored chunk
        return 0 if params is None else int(params["ragblend"]["num_chunk_hits"])

    def keys(self) -> list[str]:
        return list(DiskStore(self.home / "kv").keys())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("documents"))
    served.start()
    yield served
    if served.server is not None:
        served.server.stop()


@pytest.fixture(autouse=True)
def empty(served):
    """Each test begins and ends with nothing."""
    yield
    for key in (ACME, GLOBEX):
        for collection in served.call("GET", key=key).json()["collections"]:
            assert served.call("DELETE", body={"collection": collection}, key=key).status_code == 200
    assert served.keys() == []


def test_documents_are_stored_and_any_client_finds_them(served):
    counts = served.wait(served.send({"id": "a", "chunks": [A, B]}, {"id": "c", "text": C, "metadata": {"page": 3}}))
    assert (counts["num_stored"], counts["num_chunks"], counts["num_new_kv"]) == (2, 3, 3)
    assert [served.hits(text) for text in (A, B, C)] == [1, 1, 1]
    found = served.call("GET", f"{PATH}/c", params={"collection": "kb"}).json()
    assert (found["status"], found["metadata"], found["num_kv"]) == ("stored", {"page": 3}, 1)
    page = served.call("GET", params={"limit": 1}).json()
    rest = served.call("GET", params={"limit": 1, "after": page["next"]}).json()
    listed = [*page["documents"], *rest["documents"]]
    assert [(each["id"], each["state"], each["num_chunks"]) for each in listed] == [
        ("a", "stored", 2),
        ("c", "stored", 1),
    ]
    assert (rest["next"], served.call("GET", params={"limit": 1001}).status_code) == ("", 400)
    assert served.call("GET", key=GLOBEX, params={"limit": 1}).json()["documents"] == []
    with load_engine("demo", backend=served.url, api_key=ACME, on_miss="inline") as client:
        assert list(client.list_documents()) == listed
        answer = client.generate(Prompt([A, B], QUESTION), max_tokens=8)
        assert (answer.text, answer.report.num_chunk_hits) == ("Kinport", 2)
        assert [chunk.source for chunk in answer.report.chunks] == ["a", "a"]
    # What is computed there is what a program computes over the folder.
    with load_engine("demo", served.home / "kv", namespace="acme", on_miss="inline") as own:
        assert all(own.is_stored(text) for text in (A, B, C))
        assert counts["num_tokens"] == sum(map(own.renderer.count_tokens, (A, B, C)))
        assert counts["new_kv_bytes"] == counts["num_tokens"] * own.bytes_per_token
        assert own.generate(Prompt([A, B], QUESTION), max_tokens=8).token_ids == answer.token_ids
        assert set(own.match(Prompt([], f"{B}\n\n{C}\n\n{QUESTION}")).runs) != set()


def test_a_router_learns_how_many_tokens_each_tier_has(served):
    def lookup(key: str = ACME, **body: Any) -> Any:
        return served.call("POST", "/v1/ragblend/lookup", {"model": "demo", **body}, key).json()

    counts = served.wait(served.send({"id": "a", "chunks": [A, B]}))
    text = {"prompt": f"<s><doc> {A} <doc> {B}<q> {QUESTION}<a>", "add_special_tokens": False}
    served.hits(A)
    found = lookup(**text)
    assert found["num_chunks"] == 2
    assert found["tokens"] == {"memory": counts["num_tokens"], "disk": counts["num_tokens"], "remote": 0}
    as_json = {"Content-Type": "application/json"}
    ids = served.call("POST", "/tokenize", {"model": "demo", **text}, headers=as_json).json()["tokens"]
    assert lookup(prompt=ids) == found
    assert lookup(messages=[{"role": "user", "content": f"{A}\n\n{QUESTION}"}])["num_chunks"] == 1
    for other in (lookup(GLOBEX, **text), lookup(**text, cache_salt="s")):
        assert (other["num_tokens"], other["num_chunks"]) == (len(ids), 0)
    assert lookup(GLOBEX, **text, kv_transfer_params={"ragblend": {"namespace": "acme"}})["error"]["code"] == 403


def test_prefetch_loads_chunks_of_its_namespace_into_memory(served):
    def in_memory(key: str = ACME, query: str = "") -> int:
        text = f"<s><doc> {A} <doc> {B}<q> {QUESTION}<a>"
        body = {"model": "demo", "prompt": text, "add_special_tokens": False}
        return int(served.call("POST", f"/v1/ragblend/lookup{query}", body, key).json()["tokens"]["memory"])

    counts = served.wait(served.send({"id": "a", "chunks": [A, B]}))
    served.server.stop()
    served.start()  # its memory is empty
    assert in_memory(GLOBEX, "?prefetch=true") == in_memory() == 0
    with load_engine("demo", backend=served.url, api_key=ASKER, on_miss="inline") as client:
        client.prefetch([A, B])
        wait_until(lambda: in_memory() == counts["num_tokens"], 120, "A and B are in memory")


def test_lines_long_texts_and_what_has_not_changed(served):
    lines = b"\n".join(
        json.dumps({"id": f"{n}", "text": f"{n}. {A} {B}" * 12, "chunk_size": 64}).encode() for n in range(4)
    )
    options: dict[str, Any] = {"params": {"collection": "bulk"}, "headers": {"Content-Type": "application/x-ndjson"}}
    first, again = (served.call("POST", body=lines, **options).json()["ingestion"] for _ in range(2))
    counts = served.wait(again, "bulk")
    assert counts["num_stored"] == 4
    assert served.counts(first, "bulk")["num_waiting"] == 0
    num_entries = len(served.keys())
    assert num_entries > 8
    counts = served.wait(served.call("POST", body=lines, **options).json()["ingestion"], "bulk")
    assert (counts["num_new_kv"], counts["num_known_kv"], len(served.keys())) == (0, num_entries, num_entries)


def test_a_new_version_replaces_and_removal_leaves_nothing(served):
    served.wait(served.send({"id": "a", "chunks": [A, B]}))
    assert served.wait(served.send({"id": "a", "chunks": [A, C]}))["num_new_kv"] == 1
    assert [served.hits(text) for text in (A, B, C)] == [1, 0, 1]
    assert served.call("DELETE", body={"collection": "kb", "ids": ["a", "b"]}).json() == {
        "num_documents": 1,
        "num_kv": 2,
    }
    assert served.hits(A) == 0
    left = [path.read_bytes() for path in (served.home / "kv").rglob("*") if path.is_file()]
    assert not any(word.encode() in data for data in left for word in ("Keller", "Wesstad", "Archer"))
    assert served.call("GET", f"{PATH}/a", params={"collection": "kb"}).status_code == 404


def test_keys_keep_namespaces_apart(served):
    for key in (ACME, GLOBEX):
        served.wait(served.send({"id": "a", "chunks": [A]}, key=key), key=key)
    assert (served.hits(A), served.hits(A, GLOBEX)) == (1, 1)
    assert {header.namespace for header in DiskStore(served.home / "kv").headers()} == {"acme", "globex"}
    served.wait(served.send({"id": "b", "chunks": [B]}))
    assert served.call("GET", f"{PATH}/b", key=GLOBEX, params={"collection": "kb"}).status_code == 404
    assert served.call("DELETE", body={"collection": "kb", "ids": ["b"]}, key=GLOBEX).json()["num_documents"] == 0
    assert served.counts(key=GLOBEX)["num_stored"] == 1
    assert served.call("DELETE", body={"collection": "kb", "ids": ["a"]}, key=GLOBEX).json()["num_kv"] == 1
    assert (served.hits(A), served.hits(A, GLOBEX), served.hits(B)) == (1, 0, 1)
    for method in ("POST", "GET", "DELETE"):
        assert served.call(method, key=ASKER, body=b"{}").status_code == 403
        assert served.call(method, key="none", body=b"{}").status_code == 401
        answer = served.call(method, body={"documents": [{"text": A}], "ids": ["a"]}, params={"namespace": "globex"})
        assert answer.status_code in (400, 403)
    assert served.call("GET", params={"namespace": "globex"}).status_code == 403


def test_documents_with_a_cache_salt_are_found_with_it_alone(served):
    """In JSON and JSON lines, by the answer's hits, by GET, and by DELETE; and by no namespace that a client names."""
    body = {"collection": "kb", "cache_salt": "s3cret", "documents": [{"id": "a", "chunks": [A]}]}
    lines, kind = json.dumps({"id": "b", "text": B}).encode(), {"Content-Type": "application/x-ndjson"}
    salted = {"X-Cache-Salt": "s3cret"}
    where: dict[str, Any] = {"params": {"collection": "kb"}}
    sent = [served.call("POST", body=body), served.call("POST", body=lines, headers=kind | salted, **where)]
    assert [answer.status_code for answer in sent] == [202, 202]
    wait_until(
        lambda: not served.call("GET", headers=salted, **where).json()["collections"]["kb"]["num_waiting"],
        120,
        "both are stored",
    )
    served.wait(served.send({"id": "c", "chunks": [C]}))
    assert served.counts()["num_stored"] == 1
    assert served.call("GET", headers=salted, **where).json()["collections"]["kb"]["num_stored"] == 2
    with_salt = [served.hits(text, cache_salt="s3cret") for text in (A, B, C)]
    assert (with_salt, [served.hits(text) for text in (A, B, C)]) == ([1, 1, 0], [0, 0, 1])
    assert [served.hits(A, cache_salt="other"), served.hits(A, GLOBEX, cache_salt="s3cret")] == [0, 0]
    for headers, found in ((salted, 200), ({}, 404), ({"X-Cache-Salt": "other"}, 404)):
        assert served.call("GET", f"{PATH}/a", headers=headers, **where).status_code == found
    name = next(name for header in DiskStore(served.home / "kv").headers() if "#" in (name := header.namespace))
    assert (name[:11], "s3cret" in name) == ("acme#salt:" + name[10], False)
    assert served.call("GET", params={"collection": "kb", "namespace": name}).status_code in (400, 403)
    for mode in ("blend", "ingest"):
        params = {"kv_transfer_params": {"ragblend": {"mode": mode, "namespace": name}}}
        assert served.call("POST", "/v1/completions", {"model": "demo", "prompt": "a", **params}).status_code == 403
    differing = served.call("DELETE", body={"collection": "kb", "cache_salt": "other"}, headers=salted)
    assert differing.status_code == 400
    assert served.call("DELETE", body={"collection": "kb", "ids": ["a", "b"]}).json()["num_documents"] == 0
    removed = served.call("DELETE", body={"collection": "kb", "cache_salt": "s3cret"}).json()
    assert removed == {"num_documents": 2, "num_kv": 2}
    assert served.hits(A, cache_salt="s3cret") == 0


def test_the_openapi_page_shows_the_routes(served):
    paths = served.call("GET", "/openapi.json", key=OPS).json()["paths"]
    assert set(paths[PATH]) == {"get", "post", "delete"}
    body = paths[PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"id", "text", "chunks"} <= set(body["properties"]["documents"]["items"]["properties"])


def test_killed_while_it_stores_it_reports_nothing_that_is_not_there(served):
    documents = [{"id": f"{n}", "chunks": [f"{n}. {A}", f"{n} and so on. {B}"]} for n in range(300)]
    served.wait(served.send({"id": "old", "chunks": [C]}))
    served.send(*documents)
    wait_until(lambda: len(served.keys()) > 20, 60, "some are stored")
    served.server.kill()
    assert 20 < len(served.keys()) < 601
    served.start()
    while (counts := served.counts())["num_waiting"]:
        assert counts["num_stored"] + counts["num_pending"] == 301
        assert counts["num_chunks"] <= len(served.keys())
        time.sleep(0.2)
    assert (counts["num_stored"], len(served.keys())) == (301, 601)
    assert served.wait(served.send(*documents))["num_new_kv"] == 0
    assert [served.hits(text) for text in (C, f"299 and so on. {B}")] == [1, 1]
