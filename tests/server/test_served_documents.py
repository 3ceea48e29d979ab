"""A server's documents over real engines, without HTTP: stored in order, again, at the same time, after a kill."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import CommandRunner
from demo_texts import QUESTION, A, B, C
from langchain_core.documents import Document as LangChainDocument
from places import fill_disk, small_disk
from servers import wait_until

from ragblend import Prompt, ingest, load_engine
from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.sent_documents import SentDocument
from ragblend.engine.namespaces import salted_namespace
from ragblend.engine.store import eviction
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import (
    BackendUnreachableError,
    BacklogFullError,
    EngineClosedError,
    NotFoundError,
    RagblendError,
    StoreFullError,
    UsageError,
)
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.ingestion import server_documents
from ragblend.ingestion.report import IngestReport
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk
from ragblend.server import documents as served_documents
from ragblend.server import limits
from ragblend.server.admin import clear_namespace
from ragblend.server.documents import BUDGET_TOO_SMALL, DocumentIngester
from ragblend.server.front_end import FrontEndEngine
from ragblend.server.readiness import _disk_state
from ragblend.server.requests import read_cursor, read_documents


class Server:
    """Documents over a folder, and the engines behind them."""

    def __init__(self, root: Path, context: str = "none", **options: Any) -> None:
        self.root = root
        self.engines: dict[str, TransformersEngine] = {}

        def make_engine(namespace: str) -> TransformersEngine:
            engine = load_engine("demo", root, namespace=namespace, context=context, on_miss="inline", **options)
            self.engines[namespace] = engine
            return engine

        self.documents = DocumentIngester(root, make_engine)

    def engine(self, namespace: str = "") -> TransformersEngine:
        engine: Any = self.documents._engine(namespace)
        return engine

    def send(self, *sent: dict[str, Any], collection: str = "kb", namespace: str = "") -> str:
        documents = [_sent(each, collection) for each in sent]
        return self.documents.add(namespace, documents)

    def counts(self, ingestion: str | None = None, namespace: str = "", collection: str = "kb") -> dict[str, int]:
        found = self.documents.summary(namespace, collection, ingestion)["collections"]
        return dict(found.get(collection, {"num_stored": 0, "num_waiting": 0}))

    def wait(self, ingestion: str, namespace: str = "", collection: str = "kb") -> dict[str, int]:
        wait_until(lambda: not self.counts(ingestion, namespace, collection)["num_waiting"], 60, "all are stored")
        return self.counts(ingestion, namespace, collection)

    def hits(self, text: str, namespace: str = "") -> int:
        return int(self.engine(namespace).generate(Prompt([text], QUESTION), max_tokens=1).report.num_chunk_hits)


def _sent(document: dict[str, Any], collection: str) -> SentDocument:
    (sent,), _ = read_documents(json.dumps(document).encode(), "application/x-ndjson", collection)
    return sent


@contextmanager
def serving(root: Path, context: str = "none", **options: Any) -> Iterator[Server]:
    server = Server(root, context, **options)
    server.documents.start()
    try:
        yield server
    finally:
        server.documents.close()
        for engine in server.engines.values():
            engine.close()


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "kv") as server:
        yield server


def test_documents_are_cut_stored_and_found_in_prompts(server):
    counts = server.wait(server.send({"id": "a", "chunks": [A, B]}, {"id": "c", "text": C, "metadata": {"page": 3}}))
    assert (counts["num_stored"], counts["num_chunks"], counts["num_new_kv"]) == (2, 3, 3)
    assert counts["num_tokens"] == sum(map(server.engine().renderer.count_tokens, (A, B, C)))
    assert counts["new_kv_bytes"] == counts["num_tokens"] * server.engine().bytes_per_token
    assert [server.hits(text) for text in (A, B, C)] == [1, 1, 1]
    assert {path.stat().st_mode & 0o777 for path in server.root.rglob("*") if path.is_file()} == {0o600}
    found = server.documents.get("", "kb", "c")
    assert (found["status"], found["metadata"], found["num_kv"], found["reason"]) == ("stored", {"page": 3}, 1, "")
    with pytest.raises(NotFoundError, match="no document 'a' in the collection 'other'"):
        server.documents.get("", "other", "a")


def test_long_texts_are_cut_in_the_models_tokens(server):
    text = " ".join([A, B, C] * 40)
    counts = server.wait(server.send({"id": "long", "text": text, "chunk_size": 64}))
    entries = list(DiskStore(server.root).headers())
    assert counts["num_chunks"] > 10
    assert {len(entry.token_ids) <= 66 for entry in entries} == {True}
    assert server.documents.get("", "kb", "long")["num_kv"] == len({entry.token_ids for entry in entries})


def test_what_has_not_changed_costs_nothing_and_what_has_is_replaced(server):
    server.wait(server.send({"id": "a", "chunks": [A, B]}))
    again = server.send({"id": "a", "chunks": [A, B]})
    assert server.counts(again)["num_stored"] == 1  # while it is looked at, too
    assert (counts := server.wait(again))["num_new_kv"] == 0
    assert counts["num_known_kv"] == 2
    counts = server.wait(server.send({"id": "a", "chunks": [A, C]}))
    assert (counts["num_new_kv"], counts["num_known_kv"]) == (1, 1)
    assert [server.engine().is_stored(text) for text in (A, B, C)] == [True, False, True]
    assert B not in {text.strip() for text in Ledger(server.root / CATALOG_FILE).texts()}


def test_chunks_of_a_version_come_to_those_it_has(server):
    for text in (A, B):
        server.wait(server.send({"id": "a", "chunks": [text], "version": "one"}))
    assert [server.engine().is_stored(text) for text in (A, B)] == [True, True]
    first, last = (server.send({"id": "a", "chunks": [text], "version": "two"}) for text in (B, C))
    server.wait(last)
    assert server.counts(first)["num_waiting"] == 0
    assert [server.engine().is_stored(text) for text in (A, B, C)] == [False, True, True]
    last = server.send({"id": "b", "chunks": [A], "version": "one"}, {"id": "b", "chunks": [B], "version": "one"})
    assert server.wait(last)["num_stored"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents",
    [[{"id": str(number), "chunks": ["a"]} for number in range(120_000)], [{"id": "a", "chunks": ["a"] * 120_000}]],
    ids=["many documents", "many chunks"],
)
def test_a_server_accepts_every_request_of_many_short_texts(documents):
    bodies = [
        json.dumps({"collection": "c", "documents": batch}).encode() for batch in server_documents._batches(documents)
    ]
    assert len(bodies) > 1
    assert not any(map(limits.has_too_many_values, bodies))
    received = [each for body in bodies for each in read_documents(body, "", None)[0]]
    assert sum(len(each.body["chunks"]) for each in received) == 120_000


@pytest.mark.parametrize("from_index", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_document_too_long_for_one_request_is_sent_in_parts(tmp_path, server, from_index, monkeypatch):
    """All of its chunks are stored, progress counts them, and a changed version replaces all of them."""
    monkeypatch.setattr(server_documents, "_BATCH_CHARS", most := 1000)
    monkeypatch.setattr(server_documents, "_DOCUMENT_CHARS", most)
    sizes, seen = list[int](), list[tuple[str, int, int | None]]()

    def send(collection: str, documents: list[dict[str, Any]], progress: Any) -> tuple[Any, list[Any]]:
        body = json.dumps({"collection": collection, "documents": documents}, separators=(",", ":"))
        sizes.append(len(body))
        ingestion = server.documents.add("", read_documents(body.encode(), "", None)[0])
        counts = server.wait(ingestion, collection=collection)
        progress("prefill", counts["num_chunks"], counts["num_chunks"])
        return Counter(counts), []

    engine = server.engine()
    client: Any = SimpleNamespace(
        bytes_per_token=1, renderer=engine.renderer, name="demo", context="none", namespace="",
        context_length=engine.context_length, check_not_forked=lambda: None, send_documents=send,
        remove_documents=lambda *_: 0, store=MemoryStore(0), refuse_context_change=None,
    )  # fmt: skip

    def ingest_texts(texts: list[str]) -> IngestReport:
        if not from_index:
            return precompute_documents(texts, client, lambda *args: seen.append(args), ids=["long"] * len(texts))
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / "long.txt").write_text("\n\n".join(texts))
        options: dict[str, Any] = {"embedder": "hashing", "chunk_size": 24, "progress": lambda *args: seen.append(args)}
        return ingest(tmp_path / "docs", client, tmp_path / "index", **options)

    texts = [f"Room {number}: {A}" for number in range(40)]
    num_chunks = ingest_texts(texts).num_chunks
    assert len(sizes) >= 3
    assert max(sizes) < most + 200
    done = [step[1:] for step in seen if step[0] == "prefill"]
    assert (done[0], done[-1]) == ((0, num_chunks), (num_chunks, num_chunks))
    assert done == sorted(done)
    with open_ledger(engine.store) as ledger:
        assert ledger.count_tokenized_texts(engine.renderer.fingerprint, "") == num_chunks
        assert len(list(engine.store.find_tier(DiskStore).keys())) == num_chunks
        ingest_texts([*texts[:20], f"Changed: {B}"])
        wanted = {text.strip() for text in ledger.texts()}
        assert any(B in text for text in wanted)
        assert not any("Room 39" in text for text in wanted)
    assert len(list(engine.store.find_tier(DiskStore).keys())) == len(wanted) < num_chunks


def test_a_version_that_was_given_up_leaves_nothing(tmp_path):
    """The same texts as before come back while others were being stored in their place."""
    with serving(tmp_path / "kv") as server:
        server.wait(server.send({"id": "a", "chunks": [A]}))
        server.send({"id": "a", "chunks": [f"{number}. {B}" for number in range(200)]})
        wait_until(lambda: server.documents.summary("", None, None)["batch"]["num_done"] > 2, 60, "it has begun")
    server = Server(tmp_path / "kv")
    ingestion = server.send({"id": "a", "chunks": [A]})
    with serving(tmp_path / "kv") as server:
        counts = server.wait(ingestion)
        assert (counts["num_stored"], counts["num_new_kv"]) == (1, 0)
        assert list(DiskStore(server.root).keys()) == [server.engine().key(A)]
        assert list(Ledger(server.root / CATALOG_FILE).texts()) == [A]


def test_removal_leaves_nothing(server):
    server.wait(server.send({"id": "a", "chunks": [A, B]}, {"id": "b", "chunks": [B]}))
    server.wait(server.send({"id": "a", "chunks": [C]}, collection="other"), collection="other")
    assert server.documents.remove("", "kb", ["a", "unknown"]) == (1, 1)
    assert [server.engine().is_stored(text) for text in (A, B, C)] == [False, True, True]
    assert server.documents.remove("", "kb", None) == (1, 1)
    assert server.documents.remove("", "other", None) == (1, 1)
    assert not list(DiskStore(server.root).keys())
    left = [path.read_bytes() for path in server.root.rglob("*") if path.is_file()]
    assert not any(word.encode() in data for data in left for word in ("Keller", "Wesstad", "Archer"))
    assert server.documents.summary("", None, None)["collections"] == {}


def test_a_removal_does_not_wait_for_what_is_being_stored(server):
    many = [{"id": f"{number}", "chunks": [f"{number}. {A}"]} for number in range(300)]
    ingestion = server.send({"id": "a", "chunks": [A]}, *many)
    wait_until(lambda: server.documents.summary("", None, None)["batch"]["num_done"] > 3, 60, "it has begun")
    assert server.documents.remove("", "kb", ["a", "7", "299"])[0] == 3
    assert server.counts(ingestion)["num_waiting"] > 0
    assert server.documents.remove("", "kb", [str(number) for number in range(30, 300)])[0] == 269
    assert server.wait(ingestion)["num_stored"] == 29
    assert len(list(DiskStore(server.root).keys())) == 29
    assert not any(server.engine().is_stored(text) for text in (A, f"7. {A}", f"299. {A}"))


@pytest.mark.parametrize("context", ["none", "neutral"])
def test_two_namespaces_have_their_own(tmp_path, context):
    with serving(tmp_path / "kv", context) as server:
        for namespace in ("", "acme", "a/c%"):
            server.wait(server.send({"id": "a", "chunks": [A, B, C]}, namespace=namespace), namespace)
        assert [server.hits(A, namespace) for namespace in ("", "acme", "a/c%", "globex")] == [1, 1, 1, 0]
        assert server.documents.summary("globex", None, None)["collections"] == {}
        with pytest.raises(NotFoundError):
            server.documents.get("globex", "kb", "a")
        assert server.documents.remove("globex", "kb", None) == (0, 0)
        per_namespace = 3 if context == "none" else 6
        assert server.documents.remove("acme", "kb", ["a"]) == (1, per_namespace)
        namespaces = [header.namespace for header in DiskStore(server.root).headers()]
        assert sorted(namespaces) == [""] * per_namespace + ["a/c%"] * per_namespace
        assert [server.hits(A, namespace) for namespace in ("", "acme", "a/c%")] == [1, 0, 1]
        server.wait(server.send({"id": "d", "chunks": ["Something else."]}, namespace="acme"), "acme")
        assert not any(server.engine("acme").is_stored(Chunk(A, context=each)) for each in ("none", "neutral"))


def test_progress_is_told_to_the_own_namespace_alone(server):
    server.send({"id": "a", "chunks": [f"{number}. {A}" for number in range(40)]}, namespace="acme")
    seen: dict[str, int] = {"acme": 0, "globex": 0, "": 0}
    while server.counts(namespace="acme")["num_waiting"]:
        for namespace in seen:
            batch = server.documents.summary(namespace, None, None)["batch"]
            seen[namespace] = max(seen[namespace], *batch.values())
    assert seen == {"acme": 40, "globex": 0, "": 0}


def test_a_document_that_fails_says_why_and_stops_no_other(server):
    ingestion = server.send(
        {"id": "short", "chunks": ["So it is."]},
        {"id": "blank", "text": " \n"},
        {"id": "long", "chunks": [A, "word " * 5000]},
        {"id": "b", "chunks": [B]},
    )
    counts = server.wait(ingestion)
    assert (counts["num_stored"], counts["num_failed"]) == (3, 1)
    long, short, blank = server.documents.summary("", "kb", ingestion)["reasons"]  # failed documents come first
    assert "split it into chunks" in long["reason"]
    assert (short["id"], short["status"], short["reason"][:25]) == ("short", "stored", "'So it is.' has 5 tokens;")
    assert (blank["id"], blank["status"], blank["reason"]) == ("blank", "stored", "it has no visible text")
    assert server.wait(server.send({"id": "long", "chunks": [A]}))["num_failed"] == 0


@pytest.mark.parametrize("budget", ["auto", "number"])
def test_a_store_without_room_keeps_what_it_reports_as_stored(tmp_path, budget, monkeypatch, caplog):
    """Documents that come later fail with the reason; none of those that are stored is evicted for them."""
    root, most = tmp_path / "kv", 6.5 * 100_000
    monkeypatch.setattr(eviction, "_disk_size", lambda _: (10 * most, 2 * most - _size_of(root)))
    disk_gib: Any = "auto" if budget == "auto" else most / 2**30
    with serving(root, disk_gib=disk_gib) as server:
        for first in (0, 3, 7):
            server.wait(server.send(*({"id": f"{n}", "chunks": [f"{n}. {A} {C}"]} for n in range(first, first + 4))))
        documents = [server.documents.get("", "kb", f"{n}") for n in range(11)]
        stored = [document["id"] for document in documents if document["status"] == "stored"]
        assert stored == [document["id"] for document in documents if document["num_kv"]]
        assert stored == [str(number) for number in range(len(stored))]
        assert 3 <= len(stored) == len(list(DiskStore(root).keys())) < 8
        assert {document["reason"] for document in documents if document["status"] == "failed"} == {BUDGET_TOO_SMALL}
        assert caplog.text.count("documents are not stored any more") == 1
        assert server.wait(server.send({"id": "0", "chunks": [f"New. {A} {C}"]}))["num_stored"] == 1
        server.documents.remove("", "kb", ["1"])
        server.wait(server.send({"id": "10", "chunks": [f"10. {A} {C}"]}))
        assert server.documents.get("", "kb", "10")["status"] == "stored"


def test_a_full_disk_is_reported_and_removals_free_it(tmp_path):
    """Each deletion finds no byte free, also that of a pending document, which has no KV."""
    with small_disk(tmp_path / "small", "24m") as disk, serving(disk / "kv") as server:
        namespaces = ("", "acme")
        for namespace in namespaces:
            sent = [{"id": f"{n}", "chunks": [f"{n}. {A}"]} for n in range(4)]
            server.wait(server.send(*sent, namespace=namespace), namespace)
        server.documents.close()
        server.send({"id": "pending", "text": f"{A} " * 1000})
        store = DiskStore(disk / "kv")
        assert _disk_state(store) == "ok"
        fill_disk(disk)
        assert _disk_state(store) == "full"
        with pytest.raises(StoreFullError):
            server.send({"id": "more", "chunks": [B]})
        assert server.documents.remove("", "kb", ["pending"]) == (1, 0)
        fill_disk(disk)
        assert server.documents.remove("", "kb", None) == (4, 4)
        fill_disk(disk)
        assert clear_namespace(server.engine().store, {"namespace": "acme"})["num_removed"] == 4
        assert not list(store.keys())


def _size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


def test_the_same_variants_as_a_program_of_its_own(tmp_path):
    texts = {"a": [A, B], "c": [C], "d": ["Keller sells knives in Wesstad."]}
    with load_engine("demo", tmp_path / "own", context="neutral") as engine:
        chunks = [text for each in texts.values() for text in each]
        ids = [name for name, each in texts.items() for _ in each]
        precompute_documents(chunks, engine, ids=ids, collection="kb")
    with serving(tmp_path / "kv", "neutral") as server:
        counts = server.wait(server.send(*({"id": name, "chunks": each} for name, each in texts.items())))
    own, served = (set(DiskStore(tmp_path / place).keys()) for place in ("own", "kv"))
    assert own == served
    assert counts["num_new_kv"] == len(served) == 8


def test_two_processes_of_a_folder_store_each_others_documents_once(tmp_path):
    with serving(tmp_path / "kv") as one, serving(tmp_path / "kv") as other:
        sent = [{"id": f"{number}", "chunks": [f"{number}. {A}"]} for number in range(40)]
        ingestions = [one.send(*sent[:20]), other.send(*sent[20:])]
        counts = [server.wait(ingestion) for server, ingestion in zip((other, one), ingestions, strict=True)]
        assert [each["num_new_kv"] for each in counts] == [20, 20]
        assert len(list(DiskStore(tmp_path / "kv").keys())) == 40


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/server"]
from langchain_core.documents import Document as LangChainDocument
from demo_texts import A
from test_served_documents import Server
server = Server(Path({root!r}), "neutral")
server.documents.start()
server.send({{"id": "old", "chunks": [A]}})
server.send(*({{"id": str(n), "chunks": [f"{{n}}. {{A}}", f"{{n}} and so on. {{A}}"]}} for n in range(100)))
print("sent", flush=True)
import time; time.sleep(600)
"""


@pytest.mark.parametrize("num_stored", [0, 1, 40, 150])
def test_killed_it_reports_nothing_that_is_not_there_and_goes_on(tmp_path, num_stored):
    root = tmp_path / "kv"
    command = [sys.executable, "-c", KILLED.format(tests=str(Path(__file__).parents[1]), root=str(root))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout.readline() == b"sent\n"
        wait_until(lambda: len(list(DiskStore(root).keys())) >= num_stored, 120, "some are stored")
        process.kill()
    table = DocumentIngester(root, lambda namespace: load_engine("demo", root, namespace=namespace, context="neutral"))
    engine = table._engine("")
    stored = [each for each in ["old", *map(str, range(100))] if table.get("", "kb", each)["status"] == "stored"]
    assert table.summary("", "kb", None)["collections"]["kb"]["num_pending"] == 101 - len(stored)
    for each in stored:
        assert table.get("", "kb", each)["num_kv"] >= 1
    with serving(root, "neutral") as server:
        wait_until(lambda: not server.counts()["num_waiting"], 120, "the rest is stored")
        assert server.counts()["num_stored"] == 101
        assert engine.is_stored(A)
        keys = set(DiskStore(root).keys())
        assert all(server.engine().is_stored(f"{n} and so on. {A}") for n in range(100))
        assert server.documents.remove("", "kb", None)[0] == 101
        assert keys
        assert not list(DiskStore(root).keys())
    engine.close()


def test_others_wait_while_one_process_stores_for_long(server, monkeypatch):
    import fcntl

    monkeypatch.setattr("ragblend.server.documents._REMOVAL_WAIT_S", 0.2)
    with (server.root / "documents.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BackendUnreachableError, match="is storing documents; try again"):
            server.documents.remove("", "kb", ["a"])
        ingestion = server.send({"id": "a", "chunks": [A]})
        time.sleep(0.3)
        assert server.counts(ingestion)["num_pending"] == 1
    assert server.wait(ingestion)["num_stored"] == 1


@pytest.mark.parametrize("error", [RagblendError("vLLM rejects the chunk: "), ValueError("no output"), OSError("pipe")])
def test_a_stopping_engines_answer_does_not_fail_a_document(tmp_path, error):
    """Ten documents stay pending, the one that is being stored included, and are stored after the next start."""
    server = Server(tmp_path / "kv")
    has_begun, is_stopping = threading.Event(), threading.Event()

    def precompute(chunk: Chunk) -> int:
        has_begun.set()
        is_stopping.wait(60)
        raise error

    server.engine().precompute = precompute
    ingestion = server.send(*({"id": f"{number}", "chunks": [f"{number}. {A}"]} for number in range(10)))
    server.documents.start()
    assert has_begun.wait(60)
    server.documents.close(0.0)
    is_stopping.set()
    server.documents.close()
    counts = server.counts(ingestion)
    assert (counts["num_pending"], counts["num_failed"]) == (10, 0)
    with serving(tmp_path / "kv") as again:
        assert again.wait(ingestion)["num_stored"] == 10


@pytest.mark.parametrize("documents", [[("x", 100)], [(f"{number}", 1) for number in range(100)]], ids=["long", "many"])
def test_namespaces_take_turns(tmp_path, documents, monkeypatch):
    """Those of two namespaces that come later are stored while a long document, or many, of another one are."""
    monkeypatch.setattr("ragblend.server.documents._TURN_S", 0.05)
    with serving(tmp_path / "kv") as server:
        sent = [{"id": name, "chunks": [f"{name} {n}. {A}" for n in range(count)]} for name, count in documents]
        server.send(*sent, namespace="acme")
        wait_until(lambda: server.documents.summary("acme", None, None)["batch"]["num_done"] > 3, 60, "it has begun")
        others = {name: server.send({"id": "a", "chunks": [B, C]}, namespace=name) for name in ("", "globex")}
        for name, ingestion in others.items():
            counts = server.wait(ingestion, name)
            assert (counts["num_stored"], counts["num_new_kv"]) == (1, 2)
        assert server.counts(namespace="acme")["num_waiting"] == len(documents)  # of one batch, which is not complete
        wait_until(lambda: not server.counts(namespace="acme")["num_waiting"], 60, "all are stored")
        counts = server.counts(namespace="acme")
        assert (counts["num_stored"], counts["num_new_kv"]) == (len(documents), 100)


@pytest.mark.parametrize(("most", "value"), [("MAX_WAITING", 5), ("MAX_WAITING_CHARS", 1000)])
def test_a_namespace_with_too_many_waiting_documents_sends_more_later(tmp_path, most, value, monkeypatch):
    monkeypatch.setattr(limits, most, value)
    server = Server(tmp_path / "kv")
    sent = [{"id": f"{number}", "chunks": [f"{number}. {A * 4}"]} for number in range(8)]
    server.send(*sent, namespace="acme")  # one request is never too large
    with pytest.raises(BacklogFullError, match=r"8 documents of this namespace, of .* Send more in 10 seconds"):
        server.send({"id": "more", "chunks": [A]}, namespace="acme")
    server.send({"id": "a", "chunks": [A]}, namespace="globex")
    monkeypatch.setattr(limits, "RETRY_AFTER_S", 0)
    server.documents.start()
    wait_until(lambda: not server.counts(namespace="acme")["num_waiting"], 60, "all are stored")
    server.send({"id": "more", "chunks": [A]}, namespace="acme")
    server.documents.close()
    server.engine().close()


class AbortingClient:
    """vLLM's engine client, whose engine process has received SIGTERM: it aborts each request."""

    errored = False
    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))

    async def generate(self, *given: Any, **named: Any) -> AsyncIterator[Any]:
        completion = SimpleNamespace(token_ids=(), finish_reason="abort")
        yield SimpleNamespace(outputs=[completion], num_cached_tokens=0)


def test_a_chunk_that_vllm_aborts_is_no_verdict_on_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr("ragblend.server.front_end.sampling_params", lambda *given: None)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with load_engine("demo", tmp_path / "kv") as demo:
        facts = {name: getattr(demo, name) for name in ("name", "fingerprint", "bytes_per_token")}
        engine = FrontEndEngine(
            AbortingClient(),
            loop,
            demo.renderer,
            demo.store,
            (),
            context="none",
            num_layers=2,
            context_length=4096,
            **facts,
        )
        with pytest.raises(EngineClosedError, match="stopping or paused"):
            engine.precompute(A)
        engine.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Busy:
    """Engine whose front end reports that requests generate."""

    def __init__(self, engine: Any) -> None:
        self._inner, self.until_s, self.times = engine, 0.0, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_generating(self) -> bool:
        return time.monotonic() < self.until_s

    def precompute(self, chunk: Any) -> int:
        self.times.append(time.monotonic())
        return int(self._inner.precompute(chunk))


def test_while_others_generate_chunks_come_with_rests(tmp_path):
    made: list[Busy] = []

    def make_engine(namespace: str) -> Any:
        made.append(Busy(load_engine("demo", tmp_path / "kv", namespace=namespace)))
        made[0].until_s = time.monotonic() + 3.2
        return made[0]

    documents = DocumentIngester(tmp_path / "kv", make_engine)
    documents.start()
    chunks: Callable[[int], list[str]] = lambda count: [f"{number}. {A}" for number in range(count)]  # noqa: E731
    ingestion = documents.add("", [_sent({"id": "a", "chunks": chunks(30)}, "kb")])
    wait_until(lambda: not documents.summary("", "kb", ingestion)["collections"]["kb"]["num_waiting"], 60, "done")
    documents.close()
    early = [each for each in made[0].times if each < made[0].until_s]
    assert len(made[0].times) == 30
    assert 1 <= len(early) <= 4
    made[0].close()


def test_all_documents_of_the_store_are_listed_page_by_page_and_removed(server):
    with load_engine("demo", server.root, on_miss="inline") as engine:
        precompute_documents([LangChainDocument(B, metadata={"source": "b.txt"})], engine, collection="local")
        (server.root.parent / "c.txt").write_text(C)
        ingest(server.root.parent / "c.txt", engine, server.root, embedder="hashing")
    server.wait(server.send({"id": "a", "chunks": [A], "metadata": {"source": "a.pdf"}}))
    server.engine("other")
    server.wait(server.send({"id": "theirs", "chunks": [A]}, namespace="other"), namespace="other")
    found, after = list[dict[str, Any]](), ("", "")
    while True:
        page = server.documents.list("", None, after, 1)
        assert len(page["documents"]) == 1
        found += page["documents"]
        if not page["next"]:
            break
        after = read_cursor(page["next"])
    assert [each["collection"][:5] for each in found] == ["index", "kb", "local"]
    assert [each["source"] for each in found] == [f"{server.root.parent}/c.txt", "a.pdf", "b.txt"]
    assert all((each["state"], each["num_chunks"], each["kv_bytes"] > 0) == ("stored", 1, True) for each in found)
    assert server.documents.list("", "local", ("", ""), 9)["documents"] == found[2:]
    with pytest.raises(UsageError, match="`after` is invalid"):
        read_cursor("kb/a")
    for each in found:
        assert server.documents.remove("", each["collection"], [each["id"]]) == (1, 1)
    assert server.documents.list("", None, ("", ""), 9) == {"documents": [], "next": ""}
    assert [each["id"] for each in server.documents.list("other", None, ("", ""), 9)["documents"]] == ["theirs"]


@pytest.mark.parametrize("context", ["none", pytest.param("neutral", marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", ["changed", pytest.param("removed", marks=pytest.mark.slow)])
def test_a_repair_lets_the_server_store_again_what_it_lost(tmp_path, context, damage, capsys):
    """Of every namespace, also of a cache salt; what a program has added beside it is prefilled by the command."""
    root, run = tmp_path / "kv", CommandRunner(capsys)
    salted = salted_namespace("acme", "s3cret")
    with serving(root, context) as server:
        for namespace in ("", "acme", salted):
            sent = server.send({"id": "a", "chunks": [A, B]}, {"id": "c", "text": C}, namespace=namespace)
            server.wait(sent, namespace)
        precompute_documents(["The old mill burnt down in May.", C], server.engine(), ids=["p", "p"])
        keys = set(server.engine().store.find_tier(DiskStore).keys())
    for number, path in enumerate(sorted((root / "kv").rglob("*.safetensors"))):
        if damage == "removed":
            path.unlink()
        elif number % 3:
            path.write_bytes(path.read_bytes()[:-9] + b"\1" * 9)
    code, out, _ = run("verify", "--store", str(root))
    assert (code, "None" in out) == (4, False)
    code, out, err = run("verify", "--repair", "--store", str(root))
    assert (code, re.search("[56] documents of clients of a server: it stores", out) is not None) == (0, True), err
    assert "ragblend precompute" not in out
    with serving(root, context) as server:
        wait_until(
            lambda: not any(server.counts(namespace=each)["num_waiting"] for each in ("", "acme", salted)), 60, "again"
        )
        assert set(server.engine().store.find_tier(DiskStore).keys()) == keys
        assert [server.hits(text, each) for text in (A, B, C) for each in ("", "acme", salted)] == [1] * 9
    report = json.loads(run("verify", "--json", "--store", str(root))[1])
    assert (report["damaged"], report["missing"], report["num_without_kv"], report["num_sent_again"]) == (0, 0, 0, 0)


def test_each_change_of_documents_is_in_the_audit_log(server, caplog):
    caplog.set_level("INFO", "ragblend.audit")
    for texts in ({"a": A, "b": B}, {"a": C, "c": C}):
        server.send(*({"id": name, "chunks": [text]} for name, text in texts.items()), namespace="acme")
    server.documents.remove("acme", "kb", ["a", "unknown"])
    clear_namespace(server.engine("acme").store, {"namespace": "acme"})
    logged = [json.loads(each.getMessage()) for each in caplog.records if each.name == "ragblend.audit"]
    assert [(each["action"], each["namespace"], each.get("ids")) for each in logged] == [
        ("add", "acme", ["a", "b"]),
        ("add", "acme", ["c"]),
        ("replace", "acme", ["a"]),
        ("delete", "acme", ["a"]),
        ("clear", "acme", None),
    ]


def test_a_server_started_without_its_catalogue_accepts_documents_later(tmp_path, monkeypatch):
    made, is_down = served_documents.Ledger, True

    def connect(place: Any) -> Any:
        if is_down:
            raise BackendUnreachableError("the catalogue does not answer")
        return made(place)

    monkeypatch.setattr(served_documents, "Ledger", connect)
    monkeypatch.setattr(served_documents, "_RETRY_S", 0.01)
    with serving(tmp_path / "kv") as server:
        for use in (lambda: server.send({"id": "a", "text": A}), server.counts):
            with pytest.raises(BackendUnreachableError):
                use()
        is_down = False
        assert server.wait(server.send({"id": "a", "text": A}))["num_stored"] == 1


def test_changed_documents_are_counted_and_chunks_too_short_to_find_are_listed(server):
    engine = server.engine()
    first = precompute_documents([A, B, "So."], engine, ids=["a", "b", "so"])
    again = precompute_documents([C, B, A, "So."], engine, ids=["a", "b", "a", "so"])
    assert [(each.num_updated, each.num_unchanged) for each in (first, again)] == [(0, 0), (1, 2)]
    server.wait(server.send({"id": "so", "chunks": ["So."]}))
    reasons = {each["id"]: each["reason"] for each in server.documents.list("", None, ("", ""), 10)["documents"]}
    short = "1 of 1 chunks have fewer than 8 tokens; prompts do not reuse them"
    listed = server.documents.list("", "kb", ("", ""), 10)["documents"]
    assert (reasons["a"], reasons["b"]) == ("", "")
    assert [each["reason"] for each in listed] == [short]
    assert [each["reason"] for each in server.documents.list("", "langchain", ("", ""), 10)["documents"]] == [
        "",
        "",
        short,
    ]
