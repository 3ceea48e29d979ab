"""What one replica forgets reaches the others, over real Redis and a real folder; also one that was down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import RedisServer, TcpProxy, wait_until
from tier_support import DictValues, make_kv

from ragblend.engine.store import tombstones
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.signing import StoreKey
from ragblend.engine.store.tombstones import AppliedTombstones, TombstoneWatcher, publish_tombstone
from ragblend.engine.vllm.params import is_in_namespace
from ragblend.errors import BackendUnreachableError

KVS = [make_kv(seed, namespace="ab"[seed % 2]) for seed in range(6)]
Remotes = Callable[[], RemoteStore]


@pytest.fixture(params=["redis", "folder"])
def remotes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remotes]:
    """Opens the one remote tier as another replica would."""
    server = None
    if request.param == "redis":
        server = RedisServer(tmp_path)
        server.start()
    url = server.url if server is not None else f"file://{tmp_path}/far"
    opened: list[RemoteStore] = []

    def open_one() -> RemoteStore:
        opened.append(open_remote(url, timeout_s=5))
        return opened[-1]

    yield open_one
    for remote in opened:
        remote.close(timeout_s=1)
    if server is not None:
        server.kill()


def replica(root: Path, remote: RemoteStore) -> tuple[DiskStore, TombstoneWatcher]:
    disk = DiskStore(root, fsync=False)
    return disk, TombstoneWatcher(disk, remote, is_in_namespace)


def keys_of(*numbers: int) -> list[str]:
    return [KVS[number].header.key for number in numbers]


def test_every_replica_forgets_what_one_forgot_and_one_that_was_down_does_at_its_start(
    remotes: Remotes, tmp_path: Path
) -> None:
    up, up_hears = replica(tmp_path / "up", remotes())
    down = DiskStore(tmp_path / "down", fsync=False)
    for kv in KVS:
        up.put(kv)
        down.put(kv)
    publish_tombstone(remotes(), keys=keys_of(0, 1))
    publish_tombstone(remotes(), namespace="b")
    up_hears.poll()
    assert set(up.keys()) == set(keys_of(2, 4))
    heeded = up_hears.take_applied()
    assert set(heeded.keys) == set(heeded.recent_keys) == set(keys_of(0, 1, 3, 5))
    assert heeded.namespaces == ("b",)
    assert up_hears.take_applied() == AppliedTombstones()
    again, hears = replica(tmp_path / "down", remotes())
    hears.start()
    hears.stop()
    assert set(again.keys()) == set(keys_of(2, 4)), "before it answers anybody"


def test_each_record_is_heeded_once_so_that_what_is_stored_again_stays(remotes: Remotes, tmp_path: Path) -> None:
    disk, hears = replica(tmp_path / "one", remotes())
    disk.put(KVS[0])
    publish_tombstone(remotes(), keys=keys_of(0))
    hears.poll()
    assert not disk.contains(*keys_of(0))
    disk.put(KVS[0])
    hears.poll()
    _, restarted = replica(tmp_path / "one", remotes())
    restarted.poll()
    assert disk.contains(*keys_of(0))
    assert restarted.num_applied == 0


def test_two_processes_over_one_disk_both_hear(remotes: Remotes, tmp_path: Path) -> None:
    """Each has memory and late writes of its own."""
    (_, one), (_, two) = (replica(tmp_path / "shared", remotes()) for _ in range(2))
    for each in (one, two):
        each.poll()
    publish_tombstone(remotes(), keys=keys_of(0))
    for each in (one, two):
        each.poll()
        each.poll()
        assert each.take_applied().keys == tuple(keys_of(0))


def test_a_record_that_the_remote_tier_lost_is_put_back_by_who_heeded_it(tmp_path: Path) -> None:
    """Redis without persistence, killed: a replica that was down the whole time still hears."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        remote = open_remote(server.url, timeout_s=5)
        _, hears = replica(tmp_path / "up", remote)
        down = DiskStore(tmp_path / "down", fsync=False)
        down.put(KVS[0])
        publish_tombstone(remote, keys=keys_of(0))
        hears.poll()
        server.kill()
        hears.poll()  # costs nothing but a warning
        server.start()
        assert remote.values.list_metadata() == []
        hears.poll()
        assert len(remote.values.list_metadata()) == 1
        replica(tmp_path / "down", remote)[1].poll()
        assert not down.contains(*keys_of(0))
        remote.close(timeout_s=1)
    finally:
        server.kill()


def test_old_records_go_here_and_there(remotes: Remotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = remotes()
    disk, hears = replica(tmp_path / "one", remote)
    publish_tombstone(remote, keys=keys_of(0))
    hears.poll()
    assert len(remote.values.list_metadata()) == len(list((disk.root / "forgotten").iterdir())) == 1
    monkeypatch.setattr(tombstones, "TOMBSTONE_TTL_S", -1.0)
    hears.poll()
    assert (remote.values.list_metadata(), list((disk.root / "forgotten").iterdir())) == ([], [])


def test_what_was_told_before_this_process_began_is_not_deleted_from_the_remote_tier_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteStore(DictValues())
    publish_tombstone(remote, keys=keys_of(0))
    disk, hears = replica(tmp_path, remote)
    hears._born_s = time.time() + 2 * tombstones._FRESH_S
    hears.poll()
    assert (hears.take_applied().recent_keys, hears.num_applied) == ((), 1)
    assert list(disk.keys()) == []


def test_nobody_is_told_where_the_remote_tier_is_down(tmp_path: Path) -> None:
    values = DictValues()
    values.is_down = True
    with pytest.raises(BackendUnreachableError):
        publish_tombstone(RemoteStore(values), keys=["a"])
    _, hears = replica(tmp_path, RemoteStore(values))
    hears.poll()
    assert hears.num_applied == 0


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=200), flip=st.integers(0, 400))
def test_a_damaged_forged_or_foreign_record_makes_nobody_forget(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, flip: int
) -> None:
    values = DictValues()
    key = StoreKey(b"k" * 32)
    remote = RemoteStore(values, store_key=key)
    disk = DiskStore(tmp_path_factory.mktemp("kv"), fsync=False, store_key=None)
    disk.put(KVS[0])
    name = publish_tombstone(remote, keys=keys_of(0)).name
    told = bytearray(values.noted[name])
    told[flip % len(told)] ^= 1
    values.noted[name] = bytes(told)
    values.noted["0" * 13 + "-" + "1" * 16] = data
    values.noted["../../escape"] = values.noted[f"{10**12}-{'a' * 16}"] = data
    unsigned = RemoteStore(values, store_key=None)
    publish_tombstone(unsigned, keys=keys_of(0))
    TombstoneWatcher(disk, remote, is_in_namespace).poll()
    assert disk.contains(*keys_of(0))


def test_a_remote_that_is_silent_keeps_no_server_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time limit is the requests' affair, and may be long; what it has to say is heeded once it speaks."""
    monkeypatch.setattr(tombstones, "FIRST_POLL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tombstones, "POLL_INTERVAL_S", 0.1)
    server = RedisServer(tmp_path)
    server.start()
    proxy = TcpProxy(server.port)
    teller = open_remote(server.url, timeout_s=5)
    silent = open_remote(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=600)
    disk, hears = replica(tmp_path / "here", silent)
    try:
        disk.put(KVS[0])
        publish_tombstone(teller, keys=keys_of(0))
        proxy.mode = "hang"
        started_s = time.monotonic()
        hears.start()
        assert time.monotonic() - started_s < 60
        assert disk.contains(*keys_of(0))
        proxy.close()  # what hung breaks off
        again = TombstoneWatcher(disk, teller, is_in_namespace)
        again.start()
        wait_until(lambda: not disk.contains(*keys_of(0)), 60, "the deletion is applied")
        again.stop()
    finally:
        hears.stop()
        proxy.close()
        for remote in (teller, silent):
            remote.close(timeout_s=0)
        server.kill()
