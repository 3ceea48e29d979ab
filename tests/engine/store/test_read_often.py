"""Entries that are read often stay in the faster tier, below its limit, and no kill of a reader loses an entry."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from servers import RedisServer, running_redis, wait_until
from tier_support import assert_same, make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import MemoryKV, load_into_memory
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.store.tiered import TieredStore

pytestmark = pytest.mark.timeout(600)

OFTEN = [make_kv(seed, tokens=20) for seed in range(3)]
ONCE = [make_kv(seed, tokens=20) for seed in range(3, 43)]
NUM_IN_MEMORY, NUM_ON_DISK = 6, 9
MEMORY_BYTES = NUM_IN_MEMORY * OFTEN[0].nbytes


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory):
    """The size of an entry's file."""
    disk = DiskStore(tmp_path_factory.mktemp("one"), fsync=False)
    disk.put(OFTEN[0])
    return disk.nbytes()


@pytest.fixture(params=["folder", "redis"])
def far(request, tmp_path) -> Iterator[str]:
    """URL of a remote tier that has all entries: another folder, as on a slower disk, or a real Redis."""
    servers = running_redis(tmp_path) if request.param == "redis" else iter([None])
    for server in servers:
        url = server.url if isinstance(server, RedisServer) else (tmp_path / "far").as_uri()
        tier = open_remote(url)
        for kv in (*OFTEN, *ONCE):
            tier.put(kv)
        assert tier.close()
        yield url


def read(store: TieredStore, kvs: Sequence[MemoryKV]) -> None:
    """Read every layer of entries, as a request does, and compare every bit."""
    fetched = store.fetch_from_remote([kv.header.key for kv in kvs])
    for kv in kvs:
        assert_same(store.get_local(kv.header.key, kv.header.token_ids, fetched), kv)


def test_entries_that_are_read_often_stay_in_memory(tmp_path):
    memory, disk = MemoryStore(MEMORY_BYTES), DiskStore(tmp_path / "kv", fsync=False)
    store = TieredStore(memory, disk)
    for kv in (*OFTEN, *ONCE):
        disk.put(kv)
    read(store, OFTEN)
    read(store, OFTEN)
    num_read = disk.counters.num_hits
    for start in range(0, 40, 8):  # more than memory holds, between two reads
        read(store, ONCE[start : start + 8])
        for number in range(8):
            store.put(make_kv(100 + start + number, tokens=20))  # an ingestion
        assert all(memory.contains(kv.header.key) for kv in OFTEN)
        assert memory.nbytes() <= MEMORY_BYTES
        read(store, OFTEN)
    assert disk.counters.num_hits == num_read + len(ONCE), "those of OFTEN came from memory"


def test_entries_that_are_not_read_any_more_leave_memory(tmp_path):
    memory, disk = MemoryStore(MEMORY_BYTES), DiskStore(tmp_path / "kv", fsync=False)
    store = TieredStore(memory, disk)
    before, now = ONCE[:NUM_IN_MEMORY], ONCE[10 : 10 + NUM_IN_MEMORY - 1]  # nearly all of memory
    for kv in (*before, *now):
        disk.put(kv)
    for _ in range(20):
        read(store, before)
    for _ in range(3):
        read(store, now)
    assert sum(memory.contains(kv.header.key) for kv in now) >= len(now) - 1


def test_entries_that_are_read_often_stay_on_the_faster_disk(far, tmp_path, file_bytes):
    limit = NUM_ON_DISK * file_bytes
    disk = DiskStore(tmp_path / "near", fsync=False, capacity_bytes=limit)
    store = TieredStore(MemoryStore(MEMORY_BYTES), disk, open_remote(far, timeout_s=60))
    for kv in ONCE:  # from the remote tier onto the disk, all within the minute of a file's time
        read(store, OFTEN)
        read(store, [kv])
        assert store.flush(30)
        assert disk.nbytes() <= limit
    assert store.close()
    again = DiskStore(tmp_path / "near", create=False)
    for kv in OFTEN:
        assert_same(again.get(kv.header.key), kv)
    assert len(list(again.keys())) == NUM_ON_DISK


def read_at_random(near: Path, far: str, limit: int, started: str) -> None:
    """Read entries from the fastest tier that has them, until the process is killed."""
    disk = DiskStore(near, fsync=False, capacity_bytes=limit)
    store = TieredStore(MemoryStore(MEMORY_BYTES), disk, open_remote(far, timeout_s=60))
    while True:
        kv = random.choice([*OFTEN, *ONCE])
        assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
        if disk.counters.num_evicted > 3:
            Path(started).touch()


@pytest.mark.slow
def test_a_killed_reader_loses_no_entry(far, tmp_path, file_bytes, counted):
    """kill -9 while entries move between the tiers."""
    near, limit, started = tmp_path / "near", NUM_ON_DISK * file_bytes, tmp_path / "started"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for _ in range(3):
        reader = context.Process(target=read_at_random, args=(near, far, limit, str(started)))
        reader.start()
        wait_until(started.exists, 240, "entries are evicted")
        reader.kill()
        reader.join()
        started.unlink()
        disk = DiskStore(near, fsync=False, capacity_bytes=limit)
        assert all(result.ok for result in disk.verify())
        assert disk.nbytes() <= limit
        store = TieredStore(MemoryStore(MEMORY_BYTES), disk, open_remote(far, timeout_s=60))
        for kv in (*OFTEN, *ONCE):
            read(store, [kv])
            assert store.flush(30)  # a promotion may evict an entry that the next read has found on the disk
        assert store.close()
        assert disk.nbytes() <= limit
        assert load_into_memory(disk.get(next(iter(disk.keys()))))
    counted("3 kill -9 of a reader while entries move between a disk with a budget and a remote tier: none lost")
