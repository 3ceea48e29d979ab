"""Servers with separate stores, one catalogue in PostgreSQL and one remote tier: all find what one stores."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from demo_texts import A, B, C
from postgres import fresh_schema, start_postgres
from servers import wait_until
from test_served_documents import Server

from ragblend import load_engine
from ragblend.catalog import sent_documents
from ragblend.catalog.ledger import Ledger
from ragblend.catalog.stored_documents import list_documents, open_store_ledgers
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError
from ragblend.ingestion.deletion import keep_only_texts
from ragblend.ingestion.documents import remove_stored_documents
from ragblend.ingestion.report import IngestReport
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk
from ragblend.server import documents
from ragblend.server.documents import DocumentIngester


@pytest.fixture(scope="module")
def postgres():
    with start_postgres() as server:
        yield server


@pytest.fixture
def catalog(postgres):
    with fresh_schema(postgres.url) as url:
        yield url


class Replica(Server):
    """Server with a separate store folder."""

    def __init__(self, folder: Path, name: str, catalog: str, context: str = "none") -> None:
        super().__init__(folder / name, context)
        tiers = {"remote": f"file://{folder}/remote", "catalog": catalog}

        def make_engine(namespace: str) -> Any:
            engine = load_engine("demo", self.root, namespace=namespace, context=context, on_miss="inline", **tiers)
            self.engines[namespace] = engine
            return engine

        self.documents = DocumentIngester(self.root, make_engine, catalog=catalog)

    def matched(self, *texts: str) -> list[bool]:
        """Whether each is matched in prompts; one that a prompt names is found in the replica's own store as well."""
        return [text in self.engine().known_chunks for text in texts]


@contextmanager
def running(folder: Path, catalog: str, *names: str, context: str = "none") -> Iterator[list[Replica]]:
    replicas = [Replica(folder, name, catalog, context) for name in names]
    for each in replicas:
        each.documents.start()
    try:
        yield replicas
    finally:
        for each in replicas:
            each.documents.close()
            for engine in each.engines.values():
                engine.close()


def within(seconds: float, holds: Callable[[], bool]) -> float:
    """After how many seconds it holds; fails where that is later."""
    start_s = time.monotonic()
    while not holds():
        assert time.monotonic() - start_s < seconds
        time.sleep(0.02)
    return time.monotonic() - start_s


@pytest.mark.parametrize("context", ["none", "neutral"])
def test_what_one_stores_another_matches_and_what_another_removes_is_gone(tmp_path, catalog, context):
    with running(tmp_path, catalog, "one", "other", context=context) as (one, other):
        assert other.hits(A) == 0  # its index is built
        one.wait(one.send({"id": "a", "chunks": [A, B]}, {"id": "c", "chunks": [C]}))
        for engine in one.engines.values():
            engine.store.flush()
        found_s = within(2.0, lambda: [other.hits(text) for text in (A, B, C)] == [1, 1, 1])
        assert other.documents.get("", "kb", "a")["status"] == "stored"
        assert other.documents.remove("", "kb", ["a"])[0] == 1
        gone_s = within(2.0, lambda: one.matched(A, B, C) == [False, False, True])
        assert other.matched(A, B, C) == [False, False, True]
        assert list(Ledger(catalog).texts()) == [C]
        print(f"found after {found_s:.2f} s, gone after {gone_s:.2f} s")


def test_servers_divide_the_documents_and_store_each_once(tmp_path, catalog):
    with running(tmp_path, catalog, "one", "other") as replicas:
        sent = [{"id": f"{number}", "chunks": [f"{number}. {A}"]} for number in range(80)]
        ingestion = replicas[0].send(*sent)
        counts = replicas[1].wait(ingestion)
        assert (counts["num_stored"], counts["num_new_kv"]) == (80, 80)
        stored = [len(list(DiskStore(each.root).keys())) for each in replicas]
        assert min(stored) >= 16
        print(f"stored by each: {stored}")


@pytest.mark.parametrize("fault", ["killed", "outage"])
def test_what_is_removed_while_another_computes_it_does_not_stay(tmp_path, catalog, monkeypatch, fault):
    """A program removes it. The server is killed before its batch ends, or cannot ask the catalogue."""
    with running(tmp_path, catalog, "one", "other", context="neutral") as (one, other):
        other.documents.close()
        engine, fails, is_removed = one.engine(), list[bool](), threading.Event()

        def precompute(chunk: Any, compute: Callable[[Any], int] = engine.precompute) -> int:
            if chunk.text == A and chunk.context == "neutral":
                with open_store_ledgers(other.engine().store) as (ledger, index):
                    found = list_documents(ledger, index, "", "kb")
                assert remove_stored_documents(found, other.engine(), None).num_chunks == 1
                engine.store.apply_deletions()  # so that no later call deletes it
                fails.append(fault == "outage")
                is_removed.set()
            return compute(chunk)

        def find_unowned(
            self: Ledger,
            given: Any,
            namespace: str,
            find: Callable[..., list[str]] = Ledger.find_unowned_texts,
        ) -> list[str]:
            if any(fails):
                fails.clear()
                raise BackendUnreachableError("it is down")
            return find(self, given, namespace)

        monkeypatch.setattr(engine, "precompute", precompute)
        monkeypatch.setattr(Ledger, "find_unowned_texts", find_unowned)
        monkeypatch.setattr("ragblend.precompute.delete_stale_kv", lambda *_: 0)
        one.send({"id": "a", "chunks": [A]})
        assert is_removed.wait(60)
        one.documents.close()  # after the chunk
        own = engine.renderer.chunk_ids(A)
        for each in (one, other):
            each.engine().store.flush(30)
            each.engine().store.apply_deletions()
            for header in DiskStore(each.root).headers():
                assert header.token_ids != own
        remote = one.engine().store.find_tiers(RemoteStore)[0]
        assert not remote.contains(engine.key(A))
        assert not remote.contains(engine.key(Chunk(A, context="neutral")))


def test_a_document_waits_while_its_chunks_remote_tier_is_down(tmp_path, catalog, monkeypatch):
    monkeypatch.setattr("ragblend.server.documents._RETRY_S", 0.1)
    reports = list[IngestReport]()
    with running(tmp_path, catalog, "one") as (one,):
        one.wait(one.send({"id": "a", "chunks": [A]}))
        assert one.engine().store.flush(30)

    def precompute(*arguments: Any, **options: Any) -> IngestReport:
        reports.append(precompute_documents(*arguments, **options))
        if len(reports) == 1:  # an outage that outlasts the test: a probe after a second would find the tier again
            breaker = CircuitBreaker(threshold=1, pause_s=600)
            breaker.record_failure()
            other.engine().store.find_tiers(RemoteStore)[0].breaker = breaker
        return reports[-1]

    monkeypatch.setattr(documents, "precompute_documents", precompute)
    with running(tmp_path, catalog, "other") as (other,):
        counts = other.wait(other.send({"id": "b", "chunks": [A]}))
        assert (counts["num_stored"], counts["num_failed"]) == (1, 0)
        assert [report.num_new_kv for report in reports] == [0, 1], "only the second call computes it"


def test_a_document_is_computed_again_if_its_kv_was_deleted_meanwhile(tmp_path, catalog, monkeypatch):
    """By a deletion of the same text that this server learned of late, because the remote tier had not answered."""
    reports = list[IngestReport]()
    with running(tmp_path, catalog, "one", context="neutral") as (one,):

        def precompute(*arguments: Any, **options: Any) -> IngestReport:
            reports.append(precompute_documents(*arguments, **options))
            if len(reports) < documents._ATTEMPTS:
                one.engine().store.delete_everywhere([one.engine().key(A)])
            return reports[-1]

        monkeypatch.setattr(documents, "precompute_documents", precompute)
        counts = one.wait(one.send({"id": "a", "chunks": [A, B]}))
        assert (counts["num_stored"], counts["num_failed"]) == (1, 0)
        assert [report.num_new_kv for report in reports] == [4, 1, 1]
        assert one.engine().is_stored(A)


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/server"]
from demo_texts import A
from test_fleet import Replica
replica = Replica(Path({folder!r}), "killed", {catalog!r}, "neutral")
replica.documents.start()
replica.send(*({{"id": str(n), "chunks": [f"{{n}}. {{A}}", f"{{n}} and so on. {{A}}"]}} for n in range(30)))
print("sent", flush=True)
import time; time.sleep(600)
"""


def test_the_documents_of_a_killed_server_are_stored_by_another(tmp_path, catalog, monkeypatch):
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", KILLED.format(tests=tests, folder=str(tmp_path), catalog=catalog)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout.readline() == b"sent\n"
        wait_until(lambda: len(list(DiskStore(tmp_path / "killed").keys())) >= 5, 60, "some are stored")
        process.kill()
    leased = Ledger(catalog).leased_by_others()
    assert any(name.startswith("[") for name in leased)
    with running(tmp_path, catalog, "other", context="neutral") as (other,):
        time.sleep(3)
        assert {*Ledger(catalog).leased_by_others()} >= leased, "leases of a killed server end by time only"
        with Ledger(catalog)._locked() as connection:  # a minute later
            connection.exec_driver_sql("UPDATE leases SET expires_at = now() - interval '1 s' WHERE name LIKE '[%%' OR "
                "name LIKE 'kv %%'")  # fmt: skip
        wait_until(lambda: not other.counts()["num_waiting"], 60, "all are stored")
        assert (other.counts()["num_stored"], other.counts()["num_failed"]) == (30, 0)
        assert all(other.engine().is_stored(f"{n} and so on. {A}") for n in range(30))
        assert other.documents.remove("", "kb", None)[0] == 30
        assert list(Ledger(catalog).texts()) == []


@pytest.mark.parametrize("resumed", ["before it adds texts", "before it removes earlier texts"])
@pytest.mark.parametrize("then", ["sent again", "removed"])
def test_a_suspended_server_changes_nothing_after_its_lease_expired(tmp_path, catalog, monkeypatch, resumed, then):
    monkeypatch.setattr("ragblend.server.documents._RETRY_S", 0.1)
    monkeypatch.setattr(sent_documents, "LEASE_S", 0.5)
    reached, go_on, resumed_at = threading.Event(), threading.Event(), list[str]()

    def suspend(method: Callable[..., Any], call: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if call == resumed and not reached.is_set():
                reached.set()
                assert go_on.wait(60)
                resumed_at.append(call)
            return method(*arguments, **options)

        return run

    monkeypatch.setattr(Ledger, "add_texts", suspend(Ledger.add_texts, "before it adds texts"))
    remove = suspend(keep_only_texts, "before it removes earlier texts")
    monkeypatch.setattr("ragblend.precompute.keep_only_texts", remove)
    with running(tmp_path, catalog, "one") as (one,):
        one.send({"id": "a", "chunks": [A]})
        assert reached.wait(60)
        with running(tmp_path, catalog, "other") as (other,):
            if then == "removed":
                time.sleep(0.6)
                assert other.documents.remove("", "kb", ["a"])[0] == 1
            else:
                other.wait(other.send({"id": "a", "chunks": [B]}))
            go_on.set()
            one.wait(one.send({"id": "last", "chunks": [C]}))
        assert resumed_at
        assert {*Ledger(catalog).texts()} == ({C} if then == "removed" else {B, C})
        assert one.matched(A, B, C) == [False, then == "sent again", True]


def test_leases_are_one_owner_s_until_they_expire(catalog, monkeypatch):
    one, other = Ledger(catalog), Ledger(catalog)
    assert one.take_leases(["a", "b"]) == {"a", "b"}
    assert other.take_leases(["b", "c"]) == {"c"}
    assert (one.leased_by_others(), other.leased_by_others()) == ({"c"}, {"a", "b"})
    assert one.take_leases(["a", "c"]) == {"a"}
    other.release_leases(["a", "b", "c"])
    assert one.take_leases(["c"]) == {"c"}
    one.release_leases(["b"])
    assert other.take_leases(["b"]) == {"b"}
    monkeypatch.setattr(sent_documents, "LEASE_S", 0.05)
    assert one.take_leases(["a"]) == {"a"}
    time.sleep(0.1)
    assert "a" not in other.leased_by_others()
    assert other.take_leases(["a"]) == {"a"}
    before = Ledger(catalog).change_counter()
    one.take_leases(["d"])
    one.release_leases(["d"])
    assert Ledger(catalog).change_counter()[0] == before[0], "no prompt looks again because of a lease"


def test_a_removal_waits_for_the_server_that_is_storing(tmp_path, catalog, monkeypatch):
    monkeypatch.setattr("ragblend.server.documents._REMOVAL_WAIT_S", 0.3)
    with running(tmp_path, catalog, "one") as (one,):
        one.wait(one.send({"id": "a", "chunks": [A]}))
        busy = Ledger(catalog)
        assert busy.take_leases(['["", "kb", "a"]']) == {'["", "kb", "a"]'}
        with pytest.raises(BackendUnreachableError, match="another server is storing these documents; try again"):
            one.documents.remove("", "kb", ["a"])
        busy.release_leases(['["", "kb", "a"]'])
        assert one.documents.remove("", "kb", ["a"])[0] == 1


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_documents_survive_restarts_of_postgresql(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("ragblend.server.documents._RETRY_S", 0.3)
    monkeypatch.setattr("ragblend.engine.matching._OUTAGE_PAUSE_S", 0.2)
    with start_postgres() as server, running(tmp_path, server.url, "one", "other") as (one, other):
        assert one.hits(B) == other.hits(B) == 0  # the engines, and the catalogue for them, are open before the outage
        one.send(*({"id": f"{number}", "chunks": [f"{number}. {A}"]} for number in range(60)))
        for _ in range(3):
            time.sleep(0.5)
            server.stop(kind)
            assert one.hits(B) == 0  # answered, with full prefill
            server.start()
        wait_until(lambda: not other.counts()["num_waiting"], 60, "all are stored")
        counts = other.counts()
        assert (counts["num_stored"], counts["num_failed"]) == (60, 0)
        held = {*DiskStore(one.root).keys(), *DiskStore(other.root).keys()}
        assert held == {one.engine().key(f"{number}. {A}") for number in range(60)}
        wait_until(lambda: one.hits(f"7. {A}") == 1, 10, "it is matched again")
