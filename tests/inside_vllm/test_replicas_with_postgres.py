"""Two vLLM servers with a disk each, one catalogue in PostgreSQL and one Redis: nothing is lost or stale.

The tests are one story and run in order. Every text is stored alone and after a neutral text.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count, cycle
from pathlib import Path

import httpx
import pytest
from postgres import PostgresServer, fresh_schema, start_postgres
from served import metrics, start_demo
from servers import HttpServer, RedisServer, wait_until

from benchmarks.servers import free_port
from ragblend.catalog.ledger import Ledger
from ragblend.engine.store import tombstones
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.prompt.render import Renderer

pytestmark = pytest.mark.timeout(900)
PATH = "/v1/ragblend/documents"
WORDS = """George Keller Julia Bishop Arthur Archer Ben Howard Tom Ashby Lisa Carter Kinport Wesstad Calville Easton
Synon sells knives drones clocks lives works office company firm town harbour flute"""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
WAIT_S = 180.0


def text_of(number: int) -> str:
    """The only chunk of document `number`, which has no eight words in a row with another one."""
    return f"{number} {' '.join(random.Random(number).sample(WORDS.split(), 16))}."


class Replica:
    """`ragblend serve demo` over its own disk."""

    def __init__(self, home: Path, cache: RedisServer, catalog: str) -> None:
        home.mkdir()
        self.home, self.port = home, free_port()
        self.own = {"RAGBLEND_REMOTE": cache.url, "RAGBLEND_CATALOG": catalog, "RAGBLEND_CONTEXT": "neutral"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self.start()

    def start(self) -> None:
        self.server: HttpServer = start_demo(self.home, "--max-model-len", "2048", port=self.port, **self.own)

    def send(self, *numbers: int) -> httpx.Response:
        documents = [{"id": str(number), "chunks": [text_of(number)]} for number in numbers]
        return self.http.post(PATH, json={"collection": "kb", "documents": documents})

    def remove(self, *numbers: int) -> httpx.Response:
        return self.http.request("DELETE", PATH, json={"collection": "kb", "ids": [*map(str, numbers)]})

    def counts(self) -> dict[str, int]:
        answer = self.http.get(PATH, params={"collection": "kb"}).raise_for_status().json()
        return dict(answer["collections"].get("kb", {"num_stored": 0, "num_waiting": 0, "num_failed": 0}))

    def hits(self, number: int) -> int:
        """Number of stored chunks in a prompt about a document."""
        prompt = f"<s><doc> {text_of(number)}<q> What does the firm sell?<a>"
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0, "add_special_tokens": False}
        answer = self.http.post("/v1/completions", json=body).raise_for_status().json()
        return int(((answer["kv_transfer_params"] or {}).get("ragblend") or {}).get("num_chunk_hits", 0))

    def num_computed(self) -> int:
        """Entries that this process has computed."""
        return int(metrics(f"http://127.0.0.1:{self.port}")["vllm:ragblend_ingested_chunks_total"])

    def headers(self) -> list[KVHeader]:
        return list(DiskStore(self.home / "kv").headers())


class Fleet:
    """Both replicas, their servers, and the numbers of the documents that should be stored."""

    def __init__(self, home: Path, postgres: PostgresServer, catalog: str) -> None:
        self.postgres, self.catalog, self.cache = postgres, catalog, RedisServer(home)
        self.cache.start(*DURABLE)
        self.replicas = tuple(Replica(home / name, self.cache, catalog) for name in ("one", "two"))
        self.documents: set[int] = set()
        tokenizer, _ = load_tokenizer(str(find_checkpoint("demo").path))
        self.renderer = Renderer(tokenizer)

    def wait_stored(self, replica: Replica) -> None:
        def is_stored() -> bool:
            counts = replica.counts()
            assert counts["num_failed"] == 0, counts
            return counts["num_waiting"] == 0 and counts["num_stored"] == len(self.documents)

        wait_until(is_stored, WAIT_S, "all documents are stored")

    def headers(self) -> dict[str, list[KVHeader]]:
        """Headers of the entries on each disk and in the remote tier."""
        with closing(open_remote(self.cache.url)) as remote:
            there = [kv.header for key in remote.keys() if (kv := remote.get(key)) is not None]  # noqa: SIM118
        return {"one": self.replicas[0].headers(), "two": self.replicas[1].headers(), "redis": there}

    def is_neutral(self, header: KVHeader) -> bool:
        return len(header.prefix_ids) >= len(self.renderer.neutral_ids)

    def stale(self) -> list[str]:
        """Entries of a text that no document has, each with its place."""
        live = {self.renderer.chunk_ids(text_of(number)) for number in self.documents}
        return [
            f"{place}: {header}"
            for place, headers in self.headers().items()
            for header in headers
            if header.token_ids not in live
        ]

    def assert_whole(self) -> dict[str, int]:
        """Nothing is lost or stale. Return the number of entries in each place."""
        # A replica whose remote tier did not answer tries again after up to a minute, and then looks for tombstones.
        wait_until(lambda: not self.stale(), 150, f"nothing is stale: {self.stale()}")
        with Ledger(self.catalog) as ledger:
            assert set(ledger.texts()) == {text_of(number) for number in self.documents}
        found = self.headers()
        live = {self.renderer.chunk_ids(text_of(number)) for number in self.documents}
        for is_neutral in (False, True):
            held = {header.token_ids for header in found["redis"] if self.is_neutral(header) == is_neutral}
            assert held == live
        assert [[each.hits(number) for number in sorted(self.documents)] for each in self.replicas] == [
            [1] * len(self.documents)
        ] * 2
        return {place: len(headers) for place, headers in found.items()}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with start_postgres() as postgres, fresh_schema(postgres.url) as catalog:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), postgres, catalog)
        try:
            for each in fleet.replicas:
                each.server.wait(600)
            yield fleet
        finally:
            for each in fleet.replicas:
                each.server.kill()
            fleet.cache.kill()


def test_what_one_stores_the_other_finds(fleet, counted):
    one, two = fleet.replicas
    fleet.documents = set(range(40))
    assert one.send(*range(40)).status_code == 202
    fleet.wait_stored(two)
    num_entries, num_computed = fleet.assert_whole()["redis"], [each.num_computed() for each in fleet.replicas]
    # An entry that waits to be sent to Redis may be computed by the other replica as well.
    assert num_entries <= sum(num_computed) <= 1.25 * num_entries
    counted(f"40 documents sent to one of two vLLM servers: {num_entries} entries, computed {num_computed}")


def test_what_one_removes_leaves_both_disks_and_what_is_sent_again_stays(fleet):
    one, two = fleet.replicas
    fleet.documents -= set(range(10))
    assert two.remove(*range(10)).json()["num_documents"] == 10
    assert [each.hits(number) for each in (one, two) for number in range(10)] == [0] * 20
    wait_until(lambda: not fleet.stale(), 60, "no disk has what was removed")
    assert one.remove(*range(10, 20)).json()["num_documents"] == 10
    assert two.send(*range(10, 20)).status_code == 202  # before either replica looks for tombstones
    fleet.wait_stored(one)
    time.sleep(tombstones.POLL_INTERVAL_S + 1)
    fleet.assert_whole()


def test_a_replica_is_killed_while_it_stores(fleet, counted):
    one, two = fleet.replicas
    before = len(two.headers())
    fleet.documents |= set(range(100, 180))
    assert two.send(*range(100, 180)).status_code == 202
    wait_until(lambda: len(two.headers()) > before + 5, 60, "the second stores some")
    two.server.kill()
    counts = one.counts()
    assert counts["num_waiting"] > 0, "it was killed too late"
    two.start()
    two.server.wait(600)
    counted(f"a vLLM server killed with {counts['num_waiting']} of 80 documents waiting")


def test_postgres_and_redis_restart_under_load(fleet, counted):
    """Prompts are answered at all times. What is sent or removed is done, or refused and repeated.

    In the end all is stored, also the documents that the killed replica had leased.
    """
    ended, failures, asked, num_refused = threading.Event(), list[str](), list[int](), 0
    staying = sorted(number for number in fleet.documents if number < 20)

    def ask(replica: Replica) -> None:
        for number in cycle(staying):
            if ended.is_set():
                return
            try:
                asked.append(replica.hits(number))
            except Exception as error:
                failures.append(repr(error))

    def change(call: Callable[[int], httpx.Response], number: int) -> int:
        """Call until it is done. Return how often it was refused."""
        deadline_s = time.monotonic() + WAIT_S
        for num_refusals in count():
            if not (answer := call(number)).is_error:
                return num_refusals
            assert answer.status_code == 503, answer.text
            assert time.monotonic() < deadline_s, answer.text
            time.sleep(0.5)
        raise AssertionError

    threads = [threading.Thread(target=ask, args=(replica,)) for replica in fleet.replicas]
    for thread in threads:
        thread.start()
    try:
        for numbers, stop, start in (
            (range(20, 30), fleet.postgres.stop, fleet.postgres.start),
            (range(30, 40), fleet.cache.kill, partial(fleet.cache.start, *DURABLE)),
        ):
            for number in numbers:
                if number == numbers[3]:
                    stop()
                    restart = threading.Timer(3.0, start)
                    restart.start()
                replica = fleet.replicas[number % 2]
                num_refused += change(replica.remove, number) + change(replica.send, 200 + number)
                fleet.documents = (fleet.documents - {number}) | {200 + number}
            restart.join()
        fleet.wait_stored(fleet.replicas[0])
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []
    found = fleet.assert_whole()
    counted(
        f"PostgreSQL and Redis restarted under load of two vLLM servers: {len(asked)} prompts answered, {sum(asked)} "
        f"with stored KV, none failed; 20 documents removed, 20 sent, {num_refused} times refused, then done; {found}"
    )
