"""Hostile requests at the FastAPI router of documents: each gets a 4xx with a reason, and nothing is stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hostile_bodies import HOSTILE, JSON, LINES, Hostile

from ragblend.server.documents import DocumentIngester
from ragblend.server.routes import documents_router, make_request_handler

pytestmark = pytest.mark.smoke

PATH = "/v1/ragblend/documents"
ONE = b'{"text": "a"}'
ADDRESSES = {
    "a long namespace": Hostile("POST", ONE, "namespace", LINES, f"namespace={'a' * 300}"),
    "a salted namespace": Hostile("POST", ONE, "namespace", LINES, "namespace=a%23salt:b"),
    "a long namespace to look at": Hostile("GET", b"", "namespace", JSON, f"namespace={'a' * 300}"),
    "a salted namespace to remove from": Hostile("DELETE", b'{"ids": ["a"]}', "namespace", JSON, "namespace=%23salt:b"),
    "a collection in the address": Hostile(
        "POST", b'{"documents": [{"text": "a"}]}', "collection", JSON, "collection=kb"
    ),
    "a long collection": Hostile("POST", ONE, "collection", LINES, f"collection={'a' * 1000}"),
    "another tenant's collection": Hostile("POST", ONE, "collection", LINES, "collection=@globex/kb"),
    "a collection with a NUL": Hostile("POST", ONE, "collection", LINES, "collection=a%00b"),
    "a collection with a line break": Hostile("POST", ONE, "collection", LINES, "collection=a%0Ab"),
}
CASES = HOSTILE | {f"address: {name}": case for name, case in ADDRESSES.items()}


class Site:
    """The routes over documents that are kept in a folder; no engine is made, because nothing is stored."""

    def __init__(self, root: Path) -> None:
        self.documents = DocumentIngester(root, make_engine=lambda namespace: 1 // 0)
        app = FastAPI()
        app.include_router(documents_router(self.documents, make_request_handler(str)))
        self.http = TestClient(app, raise_server_exceptions=False)

    def ask(self, case: Hostile) -> httpx.Response:
        headers = {"Content-Type": case.content_type}
        answer: Any = self.http.request(case.method, f"{PATH}?{case.query}", content=case.body, headers=headers)
        return answer


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("kv"))
    yield made
    for namespace in ("", "a", "acme"):
        assert made.documents.summary(namespace, None, None)["collections"] == {}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_request_gets_a_reason(site, name):
    answer = site.ask(CASES[name])
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert 10 < len(message) < 1000
    assert re.search(rf"\b{re.escape(CASES[name].named)}\b", message)


def test_there_are_many_and_no_two_are_the_same():
    assert len({(case.method, case.query, case.content_type, case.body) for case in CASES.values()}) == len(CASES)
    assert len(CASES) >= 310


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", PATH), ("PATCH", PATH), ("POST", f"{PATH}/a"), ("DELETE", f"{PATH}/a")]
)
def test_other_methods_are_refused(site, method, path):
    answer = site.http.request(method, path, content=ONE)
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize("name", ["unknown", "a" * 5000, "%00", "..%2F..%2Fetc%2Fpasswd", "%ff%fe", "%F0%9F%92%A9"])
def test_documents_that_are_not_there_are_not_found(site, name):
    answer = site.http.get(f"{PATH}/{name}")
    assert answer.status_code == 404
    assert "there is no document" in answer.json()["error"]["message"]
