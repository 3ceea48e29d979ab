"""Tiers against servers that die, lie and lag, and processes that share a store. `RAGBLEND_FAULTS=full` raises counts.

Every test reads each answer bit by bit: a miss is allowed where it says so, another chunk's bits never are.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import boto3
import pytest
import torch
from servers import TcpProxy, point_s3_at, running_redis, wait_until
from tier_support import assert_same, make_kv, quick_breaker

from ragblend.engine.store.base import ByteStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.store.remote.object_values import ObjectValues
from ragblend.engine.store.remote.redis_values import RedisValues
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import StoreNotWritableError

pytestmark = pytest.mark.timeout(600)


FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_KILLS = 20 if FULL else 3
NUM_PROCESSES, NUM_REQUESTS = 8, 200 if FULL else 25
NUM_ROUNDS = 60 if FULL else 10
NUM_WRITES = 200 if FULL else 30


@contextmanager
def load(num_threads: int, work: Callable[[random.Random], None]) -> Iterator[list[int]]:
    """Threads that call `work` again and again until the block ends; yields the calls made so far, per thread."""
    stop, failures, counts = threading.Event(), [], [0] * num_threads

    def run(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                work(rng)
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert all(counts), "a thread did nothing: the test shows nothing"


@pytest.fixture
def redis_server(tmp_path):
    yield from running_redis(tmp_path)


def wait_for_more(count: Callable[[], int], than: int | None = None) -> None:
    """Until `count()` is above `than`, or above what it is now: a fixed pause is too short on a busy machine."""
    before = count() if than is None else than
    wait_until(lambda: count() > before, 30, f"more than {before}")


def ask(store: RemoteStore, kv: MemoryKV, outcomes: dict[str, int]) -> None:
    """Count a hit, which must have the bits that were stored, or a miss."""
    found = store.get(kv.header.key, kv.header.token_ids)
    outcomes["miss" if found is None else "hit"] += 1
    if found is not None:
        assert_same(found, kv)


def test_redis_restarts_under_load_cause_no_wrong_answer_and_no_local_miss(redis_server, tmp_path, counted):
    """3 (full: 20) kill -9 under 4 threads that ask all tiers, which must hit, and Redis alone, which may miss."""
    kvs = [make_kv(seed, tokens=50) for seed in range(12)]
    far = RemoteStore(RedisValues(redis_server.url, 1.0), timeout_s=1.0, breaker=quick_breaker())
    alone = RemoteStore(RedisValues(redis_server.url, 1.0), timeout_s=1.0, breaker=quick_breaker())
    store = TieredStore(MemoryStore(4 * kvs[0].nbytes), DiskStore(tmp_path / "kv", fsync=False), far)
    for kv in kvs:
        store.put(kv)
    outcomes = {"hit": 0, "miss": 0}

    def work(rng: random.Random) -> None:
        kv = rng.choice(kvs)
        assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
        if rng.random() < 0.3:
            store.put(kv)
        ask(alone, kv, outcomes)
        time.sleep(0.001)

    with load(4, work) as counts:
        for number in range(NUM_KILLS):
            wait_for_more(lambda: outcomes["hit"])
            redis_server.kill()
            wait_for_more(lambda: outcomes["miss"])
            wait_for_more(lambda: far.breaker.num_opened + alone.breaker.num_opened, number)
            redis_server.start()
        wait_for_more(lambda: outcomes["hit"])
    assert store.counters.num_misses == store.counters.num_damaged == alone.counters.num_damaged == 0
    assert far.breaker.num_opened + alone.breaker.num_opened >= NUM_KILLS
    for kv in kvs:
        store.put(kv)
    assert store.close(30)
    assert alone.close()
    assert sorted(open_remote(redis_server.url).keys()) == sorted(kv.header.key for kv in kvs)
    asked = f"{outcomes['hit']} hits and {outcomes['miss']} misses of Redis alone"
    counted(f"{NUM_KILLS} kill -9 of Redis under 4 threads: {sum(counts)} local hits, {asked}, every answer right")


@pytest.mark.slow
def test_entries_stored_during_a_redis_outage_are_uploaded_after_it(redis_server, tmp_path, counted):
    """30 chunks over 3 (full: 20) outages, the first of each written into a dead server, room in the queue for two."""
    kvs = [make_kv(seed, tokens=50) for seed in range(30)]
    far = RemoteStore(RedisValues(redis_server.url, 1.0), queue_bytes=2 * kvs[0].nbytes, breaker=quick_breaker())
    store = TieredStore(MemoryStore(4 * kvs[0].nbytes), DiskStore(tmp_path / "kv", fsync=False), far)
    for number in range(NUM_KILLS):
        redis_server.kill()
        redis_server.start()  # empty
        for kv in kvs[:10]:
            store.put(kv)
        assert store.flush(60)
        redis_server.kill()
        for kv in kvs[10:]:
            store.put(kv)
        wait_for_more(lambda: far.counters.num_failures, number)
        assert 1 <= far.num_waiting <= 20
        redis_server.start()
        assert store.flush(120)
        there = open_remote(redis_server.url)
        for kv in kvs[10:]:
            assert_same(there.get(kv.header.key, kv.header.token_ids), kv)
        there.close()
    assert (far.counters.num_dropped, far.num_waiting) == (0, 0)
    assert store.close()
    counted(f"{NUM_KILLS} outages of Redis with 20 chunks written into each: every one arrived afterwards")


@pytest.mark.slow
def test_a_failing_s3_under_load_causes_misses_only(s3_port, monkeypatch, counted):
    """10 (full: 60) rounds of 500s, bodies cut at a random byte, closed connections and quiet, under 3 threads."""
    proxy = TcpProxy(s3_port)
    point_s3_at(proxy.port, monkeypatch)
    patient = ObjectValues("s3://faults/kv", 60.0)
    boto3.client("s3").create_bucket(Bucket="faults")
    kvs = [make_kv(seed, tokens=50) for seed in range(8)]
    writer = RemoteStore(patient, timeout_s=60.0)
    for kv in kvs:
        writer.put(kv)
    assert writer.close(120)
    # No fault here is a silent one, so the time limit may be one that a busy machine keeps.
    store = RemoteStore(ObjectValues("s3://faults/kv", 10.0), timeout_s=10.0, breaker=quick_breaker())
    outcomes = {"hit": 0, "miss": 0}

    def work(rng: random.Random) -> None:
        ask(store, rng.choice(kvs), outcomes)
        time.sleep(0.002)

    rng = random.Random(0)
    monkeypatch.setattr("ragblend.engine.store.remote.tier.RESULT_TTL_S", 0.0)
    with load(3, work):
        for _ in range(NUM_ROUNDS):
            proxy.cut_after = rng.randrange(1, 8000)
            proxy.mode = rng.choice(["error", "cut", "refuse"])
            time.sleep(0.15)
            proxy.mode = "pass"
            time.sleep(0.15)
    assert min(outcomes.values()) > 0
    assert (store.counters.num_damaged, store.counters.num_failures > 0) == (0, True)
    counted(f"{NUM_ROUNDS} rounds of a failing S3 under 3 threads: {outcomes['hit']} hits, {outcomes['miss']} misses")
    store.close()
    proxy.close()


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_two_writers_of_one_key_never_show_half_an_entry(kind, tmp_path, request, counted):
    """30 (full: 200) writes by each of two writers, read all the while."""
    kv = make_kv(3, tokens=200, num_layers=3)
    url = request.getfixturevalue("redis_server").url if kind == "redis" else f"file://{tmp_path}/shared"
    values = [open_remote(url, timeout_s=60).values for _ in range(2)]
    values[0].put(kv.header.key, encode_chunk(kv))

    def write(to: ByteStore) -> None:
        for _ in range(NUM_WRITES):
            to.put(kv.header.key, encode_chunk(kv))

    num_reads = 0
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(write, to) for to in values]
        while not num_reads or not all(each.done() for each in done):
            assert_same(open_remote(url, timeout_s=60).get(kv.header.key), kv)
            num_reads += 1
    assert not [each.exception() for each in done if each.exception()]
    counted(f"2 writers of one key x {NUM_WRITES} writes ({kind}): {num_reads} reads, every one whole")


def work_on_one_store(number: int, root: Path, url: str) -> list[int]:
    """Ask for chunks and store those that are missing: hits, damaged, dropped, failures, drained, evicted."""
    kvs = [make_kv(seed, tokens=20, num_layers=3, namespace="ab"[seed % 2]) for seed in range(40)]
    torch.set_num_threads(1)
    rng, hits = random.Random(number), 0
    disk = DiskStore(root, fsync=False, capacity_bytes=20 * 4000)
    store = TieredStore(MemoryStore(5 * kvs[0].nbytes), disk, open_remote(url, timeout_s=60))
    for _ in range(NUM_REQUESTS):
        kv = kvs[min(rng.randrange(40), rng.randrange(40))]
        found = store.get(kv.header.key, kv.header.token_ids)
        if found is None:
            store.put(kv)
        else:
            assert_same(found, kv)
            hits += 1
    drained, counters = store.close(60), store.counters
    faults = [counters.num_damaged, counters.num_dropped, counters.num_failures]
    return [hits, *faults, int(drained), disk.counters.num_evicted]


@pytest.mark.slow
def test_eight_processes_on_one_store_lose_nothing_and_mix_nothing_up(redis_server, tmp_path, counted):
    """8 processes x 25 (full: 200) requests over memory, one directory with a budget, and one Redis."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    work = partial(work_on_one_store, root=tmp_path / "kv", url=redis_server.url)
    with ProcessPoolExecutor(NUM_PROCESSES, context) as pool:
        results = list(pool.map(work, range(NUM_PROCESSES)))
    hits, damaged, dropped, failures, drained, evicted = (sum(column) for column in zip(*results, strict=True))
    assert (damaged, dropped, drained, failures) == (0, 0, NUM_PROCESSES, 0)
    assert hits > NUM_PROCESSES * NUM_REQUESTS / 4
    assert evicted > 0
    disk = DiskStore(tmp_path / "kv")
    assert all(result.ok for result in disk.verify())
    assert disk.nbytes() <= 20 * 4000 * (1 + NUM_PROCESSES / 16) + NUM_PROCESSES * 8000
    assert not list(disk.root.glob("*/.*")), "temp files were left behind"
    counted(
        f"{NUM_PROCESSES} processes x {NUM_REQUESTS} requests on one store: {hits} hits, {evicted} evictions, 0 wrong"
    )


# --- directories that refuse ---


@contextmanager
def somebody_else() -> Iterator[None]:
    """The process's rights become those of nobody: root may do everything."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_directory():
    """A directory that anyone can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name) / "kv"


def test_a_store_that_may_not_be_written_still_answers_and_refuses_clearly(open_directory, redis_server, counted):
    """10 chunks: 5 in a directory of somebody else's, 5 only in Redis, which cannot be promoted there."""
    kvs = [make_kv(seed) for seed in range(10)]
    owner = DiskStore(open_directory, fsync=False)
    writer = open_remote(redis_server.url, timeout_s=60)
    for kv in kvs[:5]:
        owner.put(kv)
    for kv in kvs[5:]:
        writer.put(kv)
    assert writer.flush(30)
    for path in open_directory.glob("kv/??/*"):
        path.chmod(0o444)  # they are written for their owner alone
    for path in (open_directory, open_directory / "kv", *open_directory.glob("kv/??")):
        path.chmod(0o555)
    with somebody_else():
        disk = DiskStore(open_directory, create=False, capacity_bytes=10_000)
        store = TieredStore(MemoryStore(3 * kvs[0].nbytes), disk, open_remote(redis_server.url, timeout_s=60))
        for kv in kvs * 3:
            assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
        with pytest.raises(StoreNotWritableError, match=r"another place .`store`"):
            store.put(make_kv(99))
        with pytest.raises(StoreNotWritableError):
            disk.put_model("0123456789abcdef", {"model": "doc"})
        assert_same(store.get(make_kv(99).header.key), make_kv(99))  # memory and Redis took it
        assert store.close(30)
    for path in (open_directory, open_directory / "kv", *open_directory.glob("kv/??")):
        path.chmod(0o755)
    assert sorted(owner.keys()) == sorted(kv.header.key for kv in kvs[:5])
    counted(f"a store that may not be written: {3 * len(kvs)} answers right, writes refused")


def test_entries_that_may_not_be_read_are_misses_and_stay(open_directory, caplog, counted):
    """5 of 10 entries are unreadable: those miss with a warning, and are there again when the permission is."""
    kvs = [make_kv(seed) for seed in range(10)]
    owner = DiskStore(open_directory, fsync=False)
    for kv in kvs:
        owner.put(kv)
    for path in (open_directory, *open_directory.rglob("*")):
        path.chmod(0o755)
    for kv in kvs[:5]:
        owner._path(kv.header.key).chmod(0)
    with somebody_else():
        store = TieredStore(MemoryStore(1 << 20), DiskStore(open_directory, create=False))
        found = [store.get(kv.header.key) for kv in kvs]
        assert [kv is not None for kv in found] == [False] * 5 + [True] * 5
        for kv, got in zip(kvs[5:], found[5:], strict=True):
            assert_same(got, kv)
    assert caplog.text.count("cannot be read") == 5
    for kv in kvs[:5]:
        owner._path(kv.header.key).chmod(0o644)
        assert_same(owner.get(kv.header.key), kv)
    counted("5 of 10 entries that may not be read: 5 misses, there again with the permission")
