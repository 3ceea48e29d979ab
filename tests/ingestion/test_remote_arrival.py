"""An ingestion ends only when the remote tier has its KV, and says what did not arrive there."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from commands import INGEST, CommandRunner
from demo_texts import A, B
from servers import free_port, point_s3_at, running_redis, wait_until

from ragblend import load_engine
from ragblend.catalog.sent_documents import SentDocument
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.store import write_queue
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.store.tiered import TieredStore
from ragblend.operations.maintenance import push_store
from ragblend.precompute import precompute_documents
from ragblend.server.documents import DocumentIngester

FULL, DOWN = 1, 5  # exit codes of `push`


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Retry at once, and do not wait at the end for a tier that does not answer."""
    close = TieredStore.close
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    monkeypatch.setattr(TieredStore, "close", lambda store, timeout_s=0.0: close(store, 0.0))


@pytest.fixture(scope="module")
def full_redis(tmp_path_factory):
    """A Redis that has no space for a chunk and evicts nothing."""
    yield from running_redis(tmp_path_factory.mktemp("redis"), "--maxmemory", "1", "--maxmemory-policy", "noeviction")


@pytest.fixture(params=["full Redis", "no Redis", "no S3", "a file", "a file system that cannot be written"])
def broken(request, tmp_path, monkeypatch):
    """URL of a remote tier that nothing can be sent to, and the exit code of `push`."""
    if request.param == "full Redis":
        return request.getfixturevalue("full_redis").url, FULL
    if request.param == "no S3":
        point_s3_at(free_port(), monkeypatch)
    (tmp_path / "file").touch()
    urls = {
        "no Redis": f"redis://127.0.0.1:{free_port()}/0",
        "no S3": "s3://bucket/kv",
        "a file": f"file://{tmp_path}/file/kv",
        "a file system that cannot be written": "file:///proc/kv",
    }
    return urls[request.param], DOWN


def test_exit_code_and_report_are_those_of_push_at_every_repetition(broken, tmp_path, monkeypatch, capsys):
    url, code = broken
    monkeypatch.chdir(tmp_path)
    sample_corpus().first_records(2).write(tmp_path / "docs")
    run = CommandRunner(capsys)
    assert run("push", "--store", "s", "--remote", url)[0] != 0
    for command in (INGEST, INGEST, ("precompute",)):
        facts = run.facts(*command, "--store", "s", "--remote", url, code=code)
        num_kv = facts["num_new_kv"] + facts["num_known_kv"]
        assert (facts["num_dropped"], facts["is_full"]) == (num_kv, code == FULL)
        assert [failure["path"] for failure in facts["failures"]] == [url]
        assert facts["problem"] in facts["failures"][0]["reason"]
    assert run("push", "--store", "s", "--remote", url)[0] == code


def test_precompute_documents_reports_it_and_sends_it_once_the_tier_is_back(full_redis, tmp_path, caplog):
    with load_engine("demo", tmp_path / "s", remote=full_redis.url, context="none") as engine:
        report = precompute_documents([A, B], engine)
        assert (report.num_new_kv, report.num_dropped, report.is_full) == (2, 2, True)
        assert [failure.path for failure in report.failures] == [full_redis.url]
        assert "2 of 2 KV caches did not reach the remote tier" in caplog.text
        assert caplog.text.count("is not written by") == 1, "one line says that the tier is full"
    with load_engine("demo", tmp_path / "s", remote=f"file://{tmp_path}/there", context="none") as engine:
        report = precompute_documents([A, B], engine)
        assert (report.num_known_kv, report.num_dropped, report.failures) == (2, 0, [])
    pushed = push_store(tmp_path / "s", open_remote(f"file://{tmp_path}/there"))
    assert (pushed.num_known, pushed.num_sent) == (2, 0)


def test_a_servers_documents_say_it_to_its_clients(full_redis, tmp_path):
    engine = load_engine("demo", tmp_path / "s", remote=full_redis.url, context="none", on_miss="inline")
    documents = DocumentIngester(tmp_path / "s", lambda namespace: engine)
    documents.start()
    try:
        documents.add("", [SentDocument("kb", "a", "", {"chunks": [A, B]}, {})])
        wait_until(lambda: not documents.summary("", "kb", None)["collections"]["kb"]["num_waiting"], 60, "stored")
        (reason,) = documents.summary("", "kb", None)["reasons"]
    finally:
        documents.close()
        engine.close()
    assert reason["reason"] == ("it is stored, but not in the server's remote tier, which is full: 2 of 2 KV caches")
    blank = {"id": "b", "status": "stored", "reason": "it has no visible text"}
    server: Any = SimpleNamespace(
        bytes_per_token=1,
        check_not_forked=lambda: None,
        send_documents=lambda *_: (Counter(num_chunks=2), [reason, blank]),
        remove_documents=lambda *_: 0,
        store=SimpleNamespace(find_tier=lambda kind: None),
        context="none",
    )
    report = precompute_documents([A], server, ids=["a"])
    assert [failure.reason for failure in report.failures] == [reason["reason"]]
    assert [skipped.path for skipped in report.skipped] == ["b"]
