"""What one store deletes everywhere is deleted by the others, over real Redis and a real folder; also by one that was
down."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import TcpProxy, point_s3_at, running_redis, wait_until
from tier_support import DictValues, make_kv

from ragblend.engine.store import tombstones
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.signing import StoreKey
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import BackendUnreachableError, StoreFullError

KVS = [make_kv(seed, namespace="ab"[seed % 2]) for seed in range(6)]


@pytest.fixture
def server(tmp_path):
    yield from running_redis(tmp_path)


@pytest.fixture(params=["redis", "folder"])
def remotes(request, tmp_path, monkeypatch):
    """Opens the one remote tier as another machine would."""
    url = request.getfixturevalue("server").url if request.param == "redis" else f"file://{tmp_path}/far"
    if request.param == "s3":
        point_s3_at(request.getfixturevalue("s3_port"), monkeypatch)
        import boto3

        boto3.client("s3").create_bucket(Bucket=tmp_path.name.replace("_", "-"))
        url = f"s3://{tmp_path.name.replace('_', '-')}/kv"
    opened: list[RemoteStore] = []

    def open_one() -> RemoteStore:
        opened.append(open_remote(url, timeout_s=5))
        return opened[-1]

    yield open_one
    for remote in opened:
        remote.close(timeout_s=1)


def machine(root: Path, remote: RemoteStore) -> TieredStore:
    """The tiers of one machine."""
    return TieredStore(MemoryStore(1 << 30), DiskStore(root, fsync=False), remote)


def keys_of(*numbers: int) -> list[str]:
    return [KVS[number].header.key for number in numbers]


def on_disk(store: TieredStore) -> set[str]:
    return set(store.find_tier(DiskStore).keys())


def in_memory(store: TieredStore) -> set[str]:
    return set(store.find_tier(MemoryStore).keys())


def test_every_machine_applies_a_deletion_even_one_that_was_down(remotes, tmp_path):
    one, up, down = (machine(tmp_path / name, remotes()) for name in ("one", "up", "down"))
    for store in (one, up, down):
        for kv in KVS:
            store.put(kv)
        assert store.flush(10)
        store.apply_deletions()
    assert one.delete_everywhere(keys_of(0, 1)) == {*keys_of(0, 1)}
    assert one.delete_everywhere(keys_of(3, 5), whole_namespace="b") == {*keys_of(3, 5)}
    up.apply_deletions()
    for store in (one, up):
        assert on_disk(store) == in_memory(store) == {*keys_of(2, 4)}
    assert {*remotes().keys()} == {*keys_of(2, 4)}
    again = machine(tmp_path / "down", remotes())
    again.watch_deletions(60)
    assert on_disk(again) == {*keys_of(2, 4)}, "before it answers anybody"
    again.close()


def test_what_is_stored_again_after_a_deletion_stays(remotes, tmp_path):
    """Here and there, in each process over the disk, and in the remote tier."""
    one, two, other_process = (machine(tmp_path / name, remotes()) for name in ("one", "two", "two"))
    for store in (one, two, other_process):
        store.put(KVS[0])
        assert store.flush(10)
        store.apply_deletions()
    one.delete_everywhere(keys_of(0))
    two.apply_deletions()
    assert not two.contains(*keys_of(0))
    for store in (two, one):
        store.put(KVS[0])
        assert store.flush(10)
    for store in (one, two, other_process, machine(tmp_path / "one", remotes()), machine(tmp_path / "two", remotes())):
        store.apply_deletions()
        store.apply_deletions()
        assert on_disk(store) == {*keys_of(0)}
    assert {*remotes().keys()} == {*keys_of(0)}


@pytest.mark.parametrize("days", [100, -100])
def test_an_entry_stored_after_an_applied_deletion_stays(remotes, tmp_path, days):
    """Whatever time the file system gives to files."""
    one, applying, storing = (machine(tmp_path / name, remotes()) for name in ("one", "two", "two"))
    storing.put(KVS[0])
    assert storing.flush(10)
    one.delete_everywhere(keys_of(0))
    applying.apply_deletions()
    for path in (tmp_path / "two" / "forgotten").iterdir():
        os.utime(path, (time.time() + days * 86_400,) * 2)
    storing.put(KVS[2])
    storing.put(KVS[0])
    assert storing.flush(10)
    storing.apply_deletions()
    assert on_disk(storing) == {*remotes().keys()} == {*keys_of(0, 2)}


def test_two_processes_over_one_disk_both_clear_their_memory(remotes, tmp_path):
    one, two = (machine(tmp_path / "shared", remotes()) for _ in range(2))
    for store in (one, two):
        store.apply_deletions()
        store.put(KVS[0])
        assert store.flush(10)
    machine(tmp_path / "third", remotes()).delete_everywhere(keys_of(0))
    for store in (one, two):
        store.apply_deletions()
        assert in_memory(store) == set()
    assert on_disk(one) == set()


def test_a_write_that_ends_after_the_deletion_does_not_stay(tmp_path):
    """An entry that waits for the remote tier, and one that is fetched, while another machine deletes it."""
    values = DictValues()
    one, two = (machine(tmp_path / name, RemoteStore(values)) for name in ("one", "two"))
    assert two.tiers[-1].flush(10)
    sent, may_send = threading.Event(), threading.Event()
    put = values.put

    def put_late(name: str, data: bytes) -> None:
        sent.set()
        assert may_send.wait(60)
        put(name, data)

    values.put = put_late
    two.put(KVS[0])
    assert sent.wait(60)
    two.apply_deletions()
    one.delete_everywhere(keys_of(0))
    may_send.set()
    assert two.flush(10)
    assert keys_of(0) == [*values.data]
    two.apply_deletions()
    assert (on_disk(two), values.data) == (set(), {})
    values.put = put
    one.put(KVS[1])
    assert one.flush(10)
    fetched = RemoteStore(values).fetch_from_remote(keys_of(1))
    one.delete_everywhere(keys_of(1))
    machine(tmp_path / "two", RemoteStore(values)).apply_deletions()  # another process over the same disk
    with two.recorded_write(KVS[1].header, is_copy=True):
        two.tiers[1].put(fetched[KVS[1].header.key])
    assert on_disk(two) == {*keys_of(1)}
    two.apply_deletions()
    assert on_disk(two) == in_memory(two) == set()


def test_an_entry_between_a_deletion_and_its_tombstone_is_deleted(remotes, tmp_path, monkeypatch):
    one, two = (machine(tmp_path / name, remotes()) for name in ("one", "two"))
    publish = tombstones.Tombstones.publish

    def publish_late(self, *arguments, **options):
        two.put(KVS[0])
        assert two.flush(10)
        two.apply_deletions()  # nothing is being written any more, and there is no tombstone yet
        publish(self, *arguments, **options)

    monkeypatch.setattr(tombstones.Tombstones, "publish", publish_late)
    one.delete_everywhere(keys_of(0))
    two.apply_deletions()
    assert (on_disk(two), in_memory(two), [*remotes().keys()]) == (set(), set(), [])


def test_a_recent_fetch_does_not_bring_back_what_was_deleted(tmp_path):
    """A remote tier keeps results of fetches for other requests. One of two processes leaves the disk to the other."""
    values = DictValues()
    one, two, worker = (machine(tmp_path / name, RemoteStore(values)) for name in ("one", "two", "two"))
    one.put(KVS[0])
    assert one.flush(10)
    for store in (two, worker):
        store.watch_deletions(60, skip_disk=store is worker)
        store.fetch_from_remote(keys_of(0))
        assert store.flush(10)
    one.delete_everywhere(keys_of(0))
    worker.apply_deletions()
    assert (on_disk(worker), in_memory(worker)) == ({*keys_of(0)}, set())
    two.apply_deletions()
    assert two.fetch_from_remote(keys_of(0)) == {}
    assert on_disk(two) == set()
    for store in (two, worker):
        store.close()


def test_a_lost_tombstone_is_restored_by_a_machine_that_applied_it(server, tmp_path):
    """Redis without persistence, killed: a machine that was down the whole time still learns of it."""
    remote = open_remote(server.url, timeout_s=5)
    up, down = (machine(tmp_path / name, remote) for name in ("up", "down"))
    down.put(KVS[0])
    assert down.flush(10)
    up.delete_everywhere(keys_of(0))
    server.kill()
    up.apply_deletions()  # costs nothing but a warning
    server.start()
    assert remote.values.list_metadata() == []
    up.apply_deletions()
    assert len(remote.values.list_metadata()) == 1
    down.apply_deletions()
    assert not down.contains(*keys_of(0))
    remote.close(timeout_s=1)


@pytest.mark.parametrize("remotes", ["redis", "folder", "s3"], indirect=True)
@pytest.mark.parametrize("days", [100, -100])
@pytest.mark.parametrize("who", ["publisher", "holder"])
def test_deletion_does_not_depend_on_the_clocks_of_machines(remotes, tmp_path, monkeypatch, who, days):
    """A deletion reaches every disk, and a machine that was down, whichever clock is wrong; also the next deletions."""
    skew_s = {"publisher": 0.0, "holder": 0.0} | {who: days * 86_400.0}
    monkeypatch.setattr(tombstones, "time", clock := SimpleNamespace(monotonic=time.monotonic))

    def at(name: str) -> TieredStore:
        clock.time = lambda: time.time() + skew_s.get(name, 0.0)
        return stores[name]

    stores = {name: machine(tmp_path / name, remotes()) for name in ("publisher", "holder", "down", "third")}
    for name in stores:
        for kv in KVS[:3]:
            at(name).put(kv)
        assert stores[name].flush(10)
    for name in ("publisher", "holder", "third"):
        at(name).apply_deletions()
    for number, publisher in enumerate(("publisher", "third", "holder")):
        at(publisher).delete_everywhere(keys_of(number))
        for name in ("publisher", "holder", "third"):
            at(name).apply_deletions()
            assert on_disk(stores[name]) == {*keys_of(*range(number + 1, 3))}, name
    stores["down"] = machine(tmp_path / "down", remotes())
    at("down").apply_deletions()
    assert on_disk(stores["down"]) == set()


def test_a_machine_that_missed_tombstones_deletes_what_the_remote_tier_lacks(remotes, tmp_path, monkeypatch, caplog):
    """The remote tier and the disks keep only the newest ones."""
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 2)
    one, down = (machine(tmp_path / name, remotes()) for name in ("one", "down"))
    for store in (one, down):
        for kv in KVS:
            store.put(kv)
        assert store.flush(10)
        store.apply_deletions()
    for number in (0, 1):
        one.delete_everywhere(keys_of(number))
    one._tombstones[0]._list_all_at_s = 0.0
    one.apply_deletions()
    assert [on_disk(machine(tmp_path / "down", remotes()))] == [{*keys_of(*range(6))}]
    for number in (2, 3):
        one.delete_everywhere(keys_of(number))
    one._tombstones[0]._list_all_at_s = 0.0
    one.apply_deletions()
    assert len(remotes().values.list_metadata()) == len(list((tmp_path / "one" / "forgotten").iterdir())) == 2
    again = machine(tmp_path / "down", remotes())
    again.apply_deletions()
    assert on_disk(again) == on_disk(one) == {*keys_of(4, 5)}
    assert "4 KV caches that the remote tier does not have were deleted" in caplog.text
    again.put(KVS[0])
    assert again.flush(10)
    again.apply_deletions()
    assert on_disk(again) == {*keys_of(0, 4, 5)}


def test_polls_list_new_tombstones_and_periodically_all(remotes, tmp_path, monkeypatch):
    """So the cost of an addition does not depend on how many tombstones there are."""
    remote, listed = remotes(), list[int]()
    store, other = machine(tmp_path / "one", remote), machine(tmp_path / "two", remotes())
    list_metadata = remote.values.list_metadata

    def delete_with_an_earlier_name(number: int) -> None:
        """Another machine had chosen the name before, and its tombstone arrives late."""
        with monkeypatch.context() as patch:
            patch.setattr(other._tombstones[0], "_next_name", lambda: f"{number:013d}-{'a' * 16}")
            other.delete_everywhere(keys_of(number))

    def list_and_count(after: str = "") -> list[str]:
        names = list_metadata(after)
        listed.append(len(names))
        return names

    monkeypatch.setattr(remote.values, "list_metadata", list_and_count)
    for number in (0, 1):
        delete_with_an_earlier_name(number)
    for kv in KVS:
        store.put(kv)
    assert store.flush(10)
    store.apply_deletions()
    store.apply_deletions()
    other.delete_everywhere(keys_of(2))
    store.apply_deletions()
    assert (listed, on_disk(store)) == ([2, 0, 1], {*keys_of(3, 4, 5)})
    delete_with_an_earlier_name(3)
    store.apply_deletions()
    assert (listed[-1], on_disk(store)) == (0, {*keys_of(3, 4, 5)})
    later_s = time.monotonic() + tombstones.POLL_INTERVAL_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    store.apply_deletions()
    assert (listed[-1], on_disk(store)) == (4, {*keys_of(4, 5)})


def test_many_keys_are_one_tombstone_and_very_many_are_few(tmp_path, monkeypatch):
    values = DictValues()
    one, two = (machine(tmp_path / name, RemoteStore(values)) for name in ("one", "two"))
    for kv in KVS:
        two.put(kv)
    assert two.flush(10)
    one.delete_everywhere(keys_of(0, 1, 2))
    assert len(values.noted) == 1
    monkeypatch.setattr(tombstones, "MAX_KEYS", 2)
    one.delete_everywhere(keys_of(3, 4, 5))
    assert len(values.noted) == 3
    two.apply_deletions()
    assert on_disk(two) == set()


def test_without_an_answer_of_the_remote_tier_the_entries_are_deleted_here(tmp_path):
    values = DictValues()
    store = machine(tmp_path, RemoteStore(values))
    for kv in KVS[:2]:
        store.put(kv)
    assert store.flush(10)
    values.is_down = True
    with pytest.raises(BackendUnreachableError):
        store.delete_everywhere(keys_of(0, 1))
    store.apply_deletions()
    assert (on_disk(store), len(values.data), values.noted) == (set(), 2, {})
    values.is_down = False
    assert store.delete_everywhere(keys_of(0, 1)) == {*keys_of(0, 1)}
    assert (values.data, len(values.noted)) == ({}, 1)


def test_on_a_full_disk_entries_are_deleted(tmp_path, monkeypatch):
    values = DictValues()
    one, two = (machine(tmp_path / name, RemoteStore(values)) for name in ("one", "two"))
    for store in (one, two):
        store.put(KVS[0])
        assert store.flush(10)

    def write(self: object, path: Path, data: bytes) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(tombstones.Directory, "write", write)
    one.delete_everywhere(keys_of(0))
    two.apply_deletions()
    assert (on_disk(one), on_disk(two), values.data, len(values.noted)) == (set(), set(), {}, 1)


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=200), flip=st.integers(0, 400))
def test_a_damaged_forged_or_foreign_tombstone_deletes_nothing(tmp_path_factory, data, flip):
    values = DictValues()
    remote = RemoteStore(values, store_key=StoreKey(b"k" * 32))
    store = TieredStore(DiskStore(tmp_path_factory.mktemp("kv"), fsync=False, store_key=None), remote)
    TieredStore(remote).delete_everywhere(keys_of(0))
    (name,) = values.noted
    changed = bytearray(values.noted[name])
    changed[flip % len(changed)] ^= 1
    values.noted[name] = bytes(changed)
    values.noted["0" * 13 + "-" + "1" * 16] = data
    values.noted["../../escape"] = values.noted[f"{10**12}-{'a' * 16}"] = data
    TieredStore(RemoteStore(values, store_key=None)).delete_everywhere(keys_of(0))
    store.tiers[0].put(KVS[0])
    store.apply_deletions()
    assert store.tiers[0].contains(*keys_of(0))


def test_a_remote_that_is_silent_keeps_no_server_from_starting(server, tmp_path, monkeypatch):
    """Its own time limit is the requests' affair, and may be long; its tombstones are applied once it answers."""
    monkeypatch.setattr(tombstones, "POLL_INTERVAL_S", 0.1)
    proxy = TcpProxy(server.port)
    far = open_remote(server.url, timeout_s=5)
    silent = open_remote(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=600)
    store = machine(tmp_path / "here", silent)
    again = machine(tmp_path / "here", far)
    try:
        store.find_tier(DiskStore).put(KVS[0])
        TieredStore(far).delete_everywhere(keys_of(0))
        proxy.mode = "hang"
        started_s = time.monotonic()
        store.watch_deletions(0.2)
        assert time.monotonic() - started_s < 60
        assert on_disk(store) == {*keys_of(0)}
        proxy.close()  # what hung breaks off
        again.watch_deletions()
        wait_until(lambda: not on_disk(store), 60, "the deletion is applied")
    finally:
        proxy.close()
        for each in (store, again):
            each.close(timeout_s=0)


def test_the_thread_that_watches_ends_with_its_store(tmp_path, monkeypatch):
    monkeypatch.setattr(tombstones, "POLL_INTERVAL_S", 0.05)
    closed, dropped = (machine(tmp_path / name, RemoteStore(DictValues())) for name in ("closed", "dropped"))

    def watching() -> int:
        return sum(thread.name == "ragblend-deletions" for thread in threading.enumerate())

    before = watching()
    for store in (closed, dropped):
        store.watch_deletions()
        store.watch_deletions()
    assert watching() == before + 2
    closed.close()
    del dropped, store
    wait_until(lambda: gc.collect() >= 0 and watching() == before, 60, "the threads have ended")


def test_a_tombstone_whose_write_failed_is_never_applied(server, tmp_path):
    """Otherwise it would delete what is stored after the failed removal."""
    import redis

    one, two = (machine(tmp_path / name, open_remote(server.url)) for name in ("one", "two"))
    with closing(redis.Redis(port=server.port)) as client:
        two.apply_deletions()
        client.acl_setuser("default", enabled=True, nopass=True, commands=["-zadd"])
        with pytest.raises(BackendUnreachableError):
            one.delete_everywhere(keys_of(0))
        two.put(KVS[0])
        client.acl_setuser("default", enabled=True, nopass=True, commands=["+zadd"])
    machine_again = machine(tmp_path / "two", open_remote(server.url))  # which lists all tombstones
    machine_again.apply_deletions()
    assert on_disk(machine_again) == {*keys_of(0)}
