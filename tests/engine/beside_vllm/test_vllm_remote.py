"""The vLLM connector's settings, and chunks that come from the remote tier to the local disk. Needs no vLLM."""

from __future__ import annotations

import threading
import time

import pytest
from servers import TcpProxy, wait_until
from tier_support import DictValues, assert_same, make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.scheduler_side.fetch import PendingFetch, RemoteFetcher
from ragblend.errors import UsageError

pytestmark = pytest.mark.timeout(120)
KVS = [make_kv(seed, tokens=20) for seed in range(12)]
KEYS = [kv.header.key for kv in KVS]


def wait_for(arrival: PendingFetch) -> None:
    wait_until(lambda: arrival.is_over, 110, "the fetch is over")


@pytest.fixture
def made():
    """Closes what a test puts in."""
    made: list[RemoteFetcher] = []
    yield made
    for fetch in made:
        fetch.close()


def test_what_the_remote_has_comes_to_the_disk_bit_for_bit(redis_server, tmp_path, made):
    remote, disk = open_remote(redis_server.url), DiskStore(tmp_path)
    for kv in KVS[:10]:
        remote.put(kv)
    assert remote.flush(30)
    made.append(RemoteFetcher(TieredStore(disk, remote), timeout_s=60))
    wait_for(made[0].start(KEYS))
    for kv in KVS[:10]:
        assert_same(disk.get(kv.header.key, kv.header.token_ids), kv)
    assert not any(disk.contains(key) for key in KEYS[10:])
    assert remote.counters.num_hits == 10


def test_requests_that_want_the_same_chunk_fetch_it_once(tmp_path, made):
    values, gate = DictValues(), threading.Event()
    values.data = {kv.header.key: encode_chunk(kv) for kv in KVS}
    ask = values.get
    values.get = lambda name: (gate.wait(60), ask(name))[1]
    made.append(RemoteFetcher(TieredStore(DiskStore(tmp_path), RemoteStore(values, timeout_s=60)), timeout_s=60))
    arrivals = [made[0].start(KEYS[:3]) for _ in range(20)]
    assert not any(arrival.is_over for arrival in arrivals)
    gate.set()
    for arrival in arrivals:
        wait_for(arrival)
    assert values.calls == ["get"] * 3


def test_a_hanging_remote_tier_delays_a_request_by_its_timeout_only(redis_server, tmp_path, made):
    proxy = TcpProxy(redis_server.port)
    proxy.mode = "hang"
    remote = open_remote(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=0.3)
    made.append(RemoteFetcher(TieredStore(DiskStore(tmp_path), remote), timeout_s=0.3))
    arrival = made[0].start(KEYS)  # more than are fetched at once
    wait_for(arrival)
    assert remote.counters.num_failures >= 1
    assert list(DiskStore(tmp_path).keys()) == []
    proxy.close()


def test_a_slow_remote_is_not_asked_on_after_the_time_limit(tmp_path, made):
    """64 chunks from a server that takes 1 s for each, 8 at a time: those sent within 1.8 s are on the disk, the
    rest is not requested afterwards."""
    values, kvs = DictValues(), [make_kv(seed) for seed in range(64)]
    values.data = {kv.header.key: encode_chunk(kv) for kv in kvs}
    ask = values.get
    values.get = lambda name: (time.sleep(1.0), ask(name))[1]
    disk = DiskStore(tmp_path)
    made.append(RemoteFetcher(TieredStore(disk, RemoteStore(values, timeout_s=1.8)), timeout_s=1.8))
    wait_for(made[0].start([kv.header.key for kv in kvs]))
    time.sleep(1.0)
    assert 8 <= len(list(disk.keys())) <= 16
    assert values.calls.count("get") <= 16


@pytest.mark.parametrize("forgets", [False, True])
def test_what_was_forgotten_while_it_was_on_its_way_does_not_stay(forgets, tmp_path, made):
    """Another replica forgets the chunk after the remote tier has sent it, and before it is on this disk."""
    values, disk = DictValues(), DiskStore(tmp_path)
    values.data = {KEYS[0]: encode_chunk(KVS[0])}
    store, ask = TieredStore(disk, RemoteStore(values, timeout_s=60)), values.get

    def answer(name: str) -> bytes | None:
        data = ask(name)
        if forgets:
            TieredStore(RemoteStore(values)).delete_everywhere([name])
            store.apply_deletions()
        return data

    values.get = answer
    made.append(RemoteFetcher(store, timeout_s=60))
    wait_for(made[0].start(KEYS[:1]))
    assert list(disk.keys()) == ([] if forgets else KEYS[:1])


@pytest.mark.parametrize("trouble", ["down", "damaged"])
def test_a_remote_that_is_down_or_lies_costs_the_chunk_alone(trouble, tmp_path, made):
    values, disk = DictValues(), DiskStore(tmp_path)
    values.data = {key: encode_chunk(KVS[0]) for key in KEYS}  # right for the first key only
    values.is_down = trouble == "down"
    breaker = CircuitBreaker(pause_s=1000)
    remote = RemoteStore(values, timeout_s=60, breaker=breaker)
    made.append(RemoteFetcher(TieredStore(disk, remote), timeout_s=60))
    wait_for(made[0].start(KEYS))
    assert list(disk.keys()) == ([] if trouble == "down" else KEYS[:1])
    counters = made[0].remote.counters
    assert (counters.num_failures > 0, counters.num_damaged) == ((True, 0) if trouble == "down" else (False, 11))
    assert breaker.is_closed == (trouble == "damaged")
    num_asked = len(values.calls)
    wait_for(made[0].start(KEYS[:1]))
    assert len(values.calls) == num_asked  # is stored, or is not requested again


def test_a_full_local_store_costs_reuse_and_nothing_else(tmp_path, made):
    values = DictValues()
    values.data = {KEYS[0]: encode_chunk(KVS[0])}
    made.append(RemoteFetcher(TieredStore(MemoryStore(10), RemoteStore(values)), timeout_s=60))
    wait_for(made[0].start(KEYS[:1]))
    wait_for(made[0].start(KEYS[:1]))


def test_settings_are_read_from_json_values():
    config = ConnectorConfig.from_extra_config({"store": "kv", "prefix_ids": [1, 2], "ratio": 0.2, "rule": "random"})
    assert config.prefix_ids == (1, 2)
    assert config.ratio == 0.2
    assert ConnectorConfig.from_extra_config({"ratio": "auto"}).ratio == "auto"


def test_settings_come_from_the_environment_where_none_are_given(tmp_path, monkeypatch):
    environment = {"REMOTE": "redis://:secret@cache:6379/0", "DISK_GIB": "3", "KV_DTYPE": "int8", "RATIO": "0.9"}
    for name, value in environment.items():
        monkeypatch.setenv(f"RAGBLEND_{name}", value)
    config = ConnectorConfig.from_extra_config({"store": str(tmp_path), "disk_gib": 2})
    assert (config.remote, config.disk_gib, config.kv_dtype) == ("redis://:secret@cache:6379/0", 2, "int8")
    assert config.ratio == ConnectorConfig().ratio  # only the tiers' settings
    assert ConnectorConfig.from_extra_config({"remote": None}).remote is None
    disk = config.open_tiers().find_tier(DiskStore)
    assert disk.capacity_bytes == 2 << 30
    assert [type(tier) for tier in config.open_tiers().tiers] == [DiskStore, RemoteStore]
    assert [type(tier) for tier in config.open_tiers(memory=True).tiers] == [MemoryStore, DiskStore, RemoteStore]
    monkeypatch.setenv("RAGBLEND_DISK_GIB", "much")
    with pytest.raises(UsageError, match="RAGBLEND_DISK_GIB"):
        ConnectorConfig.from_extra_config({})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"shop": "kv"}, "shop"),
        ({"ratio": 2}, "2"),
        ({"rule": "magic"}, "magic"),
        ({"memory_gib": -1}, "memory_gib"),
        ({"remote": "nowhere"}, "remote"),
        ({"remote": "redis://x", "remote_timeout_s": 0}, "remote"),
    ],
)
def test_a_wrong_setting_is_named(extra, named, tmp_path):
    with pytest.raises(UsageError, match=named):
        ConnectorConfig.from_extra_config({"store": str(tmp_path), **extra}).open_tiers()
