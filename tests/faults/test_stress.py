"""Servers add and remove documents that share texts, over one PostgreSQL catalogue and one Redis, under faults.

Servers are killed, stopped and suspended at random moments, PostgreSQL is killed, Redis suspended, and methods of the
store and of the catalogue pause. Then everything runs undisturbed until all documents are stored, and the stores are
compared with a fresh one. `RAGBLEND_FAULTS=full` runs 10 rounds for each context, `RAGBLEND_STRESS_ROUNDS` more.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import stress_server
from postgres import PostgresServer, fresh_schema, start_postgres
from servers import RedisServer, running_redis, wait_until
from tier_support import assert_same

from ragblend import load_engine
from ragblend.catalog.ledger import Ledger
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import MemoryKV, load_into_memory
from ragblend.engine.store.remote.tier import open_remote
from ragblend.options import ContextPolicy
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk

pytestmark = pytest.mark.timeout(7200)

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_ROUNDS = int(os.environ.get("RAGBLEND_STRESS_ROUNDS", 10 if FULL else 1))
ROUND_S = 20.0 if FULL else 30.0
CALM_S = 120.0
# A process that has imported everything forks the servers, so that a killed one is back at once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["stress_server"])
TEXTS = [
    f"{who} keeps the {what} of the town." for who in ("Alice", "Bob", "Tara", "James") for what in ("bees", "keys")
]
IDS = [f"d{number}" for number in range(8)]


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Let the process that forks the servers find their program; it knows only PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


@pytest.fixture(scope="module")
def postgres():
    with start_postgres() as server:
        yield server


class StressServer:
    """A process that runs stress_server.py. It is started again with the same folder when it has ended."""

    def __init__(self, name: str, folder: Path, *places: str) -> None:
        self.name, self.folder, self._places = name, folder / name, places
        self.folder.mkdir()
        self._seeds = count()
        self._start()

    def _start(self) -> None:
        self._connection, theirs = PROCESSES.Pipe()
        arguments = (theirs, self.folder, *self._places, f"{self.name} {next(self._seeds)}")
        self._process = PROCESSES.Process(target=stress_server.serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def send_signal(self, kind: signal.Signals) -> None:
        if (pid := self._process.pid) is not None:  # None while it is being started
            with suppress(ProcessLookupError):
                os.kill(pid, kind)

    def ask(self, **request: Any) -> Any:
        """Send a request. Return the answer's `done`. Raises ConnectionError if there is no such answer."""
        if not self._process.is_alive():
            self._start()
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            raise ConnectionError(self.name) from error
        if "done" not in answer:
            raise ConnectionError(f"{self.name}: {answer}")
        return answer["done"]

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Client(threading.Thread):
    """Adds and removes documents at random. An operation that fails is repeated until it succeeds.

    `documents`: the texts of each document that must exist at the end. No other client has these ids.
    """

    def __init__(self, server: StressServer, ids: list[str], seed: str) -> None:
        super().__init__(daemon=True)
        self.documents: dict[str, list[str]] = {}
        self.num_done, self.stopping = 0, threading.Event()
        self._server, self._ids, self._rng = server, ids, random.Random(seed)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for version in count():
                if self.stopping.is_set():
                    return
                self._change(self._rng.choice(self._ids), str(version))
        except BaseException as error:
            self.error = error

    def _change(self, name: str, version: str) -> None:
        texts = self._rng.sample(TEXTS, self._rng.randint(1, 3)) if self._rng.random() < 0.6 else []
        while True:
            try:
                if texts:
                    self._server.ask(do="add", id=name, version=version, texts=texts)
                    self.documents[name] = texts
                else:
                    self._server.ask(do="remove", id=name)
                    self.documents.pop(name, None)
                self.num_done += 1
                break
            except ConnectionError:
                time.sleep(0.05)
        time.sleep(self._rng.uniform(0, 0.5))


@contextmanager
def faults(
    servers: list[StressServer], postgres: PostgresServer, redis: RedisServer, rng: random.Random
) -> Iterator[dict[str, int]]:
    """Cause one fault at a time until the context ends. Yield how often each happened."""
    counts: dict[str, int] = {}
    stopping = threading.Event()

    def suspend(send: Callable[[signal.Signals], None]) -> None:
        send(signal.SIGSTOP)
        time.sleep(1.5 * stress_server.LEASE_S if rng.random() < 0.2 else rng.uniform(0.1, 1.5))
        send(signal.SIGCONT)

    def restart_postgres() -> None:
        postgres.stop(rng.choice([signal.SIGKILL, signal.SIGQUIT, signal.SIGINT]))
        time.sleep(rng.uniform(0, 1))
        postgres.start()

    def freeze_postgres() -> None:
        with postgres.frozen():
            time.sleep(rng.uniform(0.1, 2))

    assert redis.process
    kinds: dict[str, Callable[[], None]] = {
        "server killed": lambda: rng.choice(servers).send_signal(signal.SIGKILL),
        "server stopped": lambda: rng.choice(servers).send_signal(signal.SIGTERM),
        "server suspended": lambda: suspend(rng.choice(servers).send_signal),
        "PostgreSQL restarted": restart_postgres,
        "PostgreSQL suspended": freeze_postgres,
        "Redis suspended": lambda: suspend(redis.process.send_signal),  # type: ignore[union-attr]
    }

    def run() -> None:
        while not stopping.wait(rng.uniform(0.1, 1.5)):
            kind = rng.choice(sorted(kinds))
            kinds[kind]()
            counts[kind] = counts.get(kind, 0) + 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counts
    finally:
        stopping.set()
        thread.join()


@pytest.fixture(scope="module", params=["none", "neutral"])
def context(request):
    return request.param


@pytest.fixture(scope="module")
def fresh(context, tmp_path_factory):
    """By text, the entries that a new store has of it."""
    root = tmp_path_factory.mktemp("fresh")
    with load_engine("demo", root, context=context, on_miss="inline") as engine:
        return {text: _entries_of(text, engine, DiskStore(root)) for text in TEXTS}


def _entries_of(text: str, engine: Any, disk: DiskStore) -> dict[str, MemoryKV]:
    """Store a text alone in an empty store. Return its entries by their keys, and delete them."""
    precompute_documents([Chunk(text)], engine, ids=["it"])
    entries: dict[str, MemoryKV] = {}
    for key in list(disk.keys()):
        kv = disk.get(key)
        assert kv is not None
        entries[key] = load_into_memory(kv)
        disk.delete(key)
    return entries


@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_nothing_is_lost_stale_or_left_after_faults(number, context, fresh, postgres, tmp_path):
    rng = random.Random(f"{context} {number}")
    (tmp_path / "redis").mkdir()
    with fresh_schema(postgres.url) as catalog:
        for redis in running_redis(tmp_path / "redis"):
            servers = [StressServer(name, tmp_path, catalog, redis.url, context) for name in ("one", "two", "three")]
            try:
                _round(servers, rng, catalog, redis, postgres, context, fresh)
            finally:
                for server in servers:
                    server.close()


def _round(
    servers: list[StressServer],
    rng: random.Random,
    catalog: str,
    redis: RedisServer,
    postgres: PostgresServer,
    context: ContextPolicy,
    fresh: dict[str, dict[str, MemoryKV]],
) -> None:
    clients = [Client(server, IDS[index :: len(servers)], str(rng.random())) for index, server in enumerate(servers)]
    for client in clients:
        client.start()
    with faults(servers, postgres, redis, rng) as counts:
        time.sleep(ROUND_S)
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join(CALM_S)
        assert not client.is_alive(), "an operation does not end"
        assert client.error is None, client.error
    documents = {name: texts for client in clients for name, texts in client.documents.items()}
    texts = {text for each in documents.values() for text in each}
    wait_until(lambda: _counts(servers[0]).get("num_waiting", 0) == 0, CALM_S, "all documents are stored")
    found = _counts(servers[0])
    assert (found.get("num_stored", 0), found.get("num_failed", 0)) == (len(documents), 0), _summary(servers[0])
    for server in servers:
        with _describing(server, texts):
            wait_until(partial(_matches, server, texts), CALM_S, f"the server {server.name} matches what is left")
    ledger = Ledger(catalog)
    assert {*ledger.texts()} == texts
    expected = {key: kv for text in texts for key, kv in fresh[text].items()}
    remote = open_remote(redis.url)
    tiers = {server.name: DiskStore(server.folder) for server in servers} | {"Redis": remote}

    def keys() -> dict[str, set[str]]:
        return {name: {*tier.keys()} for name, tier in tiers.items()}

    def left() -> dict[str, set[str]]:
        return {name: each - expected.keys() for name, each in keys().items() if each - expected.keys()}

    wait_until(lambda: not left(), CALM_S, "removed entries are gone")
    wait_until(lambda: expected.keys() <= set.union(*keys().values()), 30, "no entry is lost")
    for tier in tiers.values():
        for key in list(tier.keys()):
            if (kv := tier.get(key)) is not None:
                assert_same(kv, expected[key])
    done = sum(client.num_done for client in clients)
    print(f"context {context}: {done} operations, {counts}; {len(documents)} documents, {len(expected)} entries")


@contextmanager
def _describing(server: StressServer, texts: set[str]) -> Iterator[None]:
    """Add what the server matches, and what it should, to a failure."""
    try:
        yield
    except AssertionError as error:
        matched = {*server.ask(do="match", texts=TEXTS)}
        raise AssertionError(f"{error}: not matched {texts - matched}, matched {matched - texts}") from error


def _matches(server: StressServer, texts: set[str]) -> bool:
    return {*server.ask(do="match", texts=TEXTS)} == texts


def _counts(server: StressServer) -> dict[str, int]:
    """Return the numbers of documents by their status."""
    counts: dict[str, int] = _summary(server)["collections"].get(stress_server.COLLECTION, {})
    return counts


def _summary(server: StressServer) -> dict[str, Any]:
    """Return the status of the documents, with the reasons of those that failed."""
    while True:
        try:
            summary: dict[str, Any] = server.ask(do="summary")
            return summary
        except ConnectionError:
            time.sleep(0.2)
