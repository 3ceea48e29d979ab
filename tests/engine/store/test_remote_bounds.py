"""What a remote tier may cost a request: one time limit for all its chunks, and the memory that values may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from servers import TalkingServer, TcpProxy
from tier_support import DictValues, SlowValues, assert_same, make_kv

from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.remote import redis_values as remote_redis
from ragblend.engine.store.remote import tier as remote
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.limits import connect_timeout_s
from ragblend.engine.store.remote.object_values import ObjectValues
from ragblend.engine.store.remote.redis_values import RedisValues
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import BackendUnreachableError
from ragblend.lab.bench.common.hardware import peak_rss_bytes, reset_peak_rss

pytestmark = pytest.mark.timeout(120)

TERABYTE = 10**12
LATE_S = 0.6  # a busy machine may be late by this much


@pytest.fixture
def proxy(redis_server):
    proxy = TcpProxy(redis_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def talking():
    """`talking(reply, **options)`: the port of a TalkingServer."""
    servers: list[TalkingServer] = []

    def start(reply: Callable[[list[bytes]], Iterable[bytes]], **options: bool) -> int:
        servers.append(TalkingServer(reply, **options))
        return servers[-1].port

    yield start
    for server in servers:
        server.close()


@contextmanager
def within(seconds: float, memory_bytes: int | None = None) -> Iterator[None]:
    """What is done takes no longer, and no more memory."""
    reset_peak_rss()
    before, start_s = peak_rss_bytes(), time.perf_counter()
    yield
    assert time.perf_counter() - start_s < seconds
    assert memory_bytes is None or peak_rss_bytes() - before < memory_bytes


# --- time ---


def test_a_request_waits_one_timeout_for_all_its_chunks():
    """40 chunks from a server that takes 0.2 s for each, 8 at a time: what has come after 0.5 s is used, the rest not
    asked for again."""
    values, kvs = SlowValues(), [make_kv(seed) for seed in range(40)]
    values.data.update({kv.header.key: encode_chunk(kv) for kv in kvs})
    values.wait_s = 0.2
    store = TieredStore(MemoryStore(1 << 20), RemoteStore(values, timeout_s=0.5))
    with within(0.5 + LATE_S):
        fetched = store.fetch_from_remote([kv.header.key for kv in kvs])
        found = [store.get_local(kv.header.key, kv.header.token_ids, fetched) for kv in kvs]
    num_answered = values.calls.count("get")
    assert 8 <= sum(kv is not None for kv in found) <= 16
    for kv, expected in zip(found, kvs, strict=True):
        if kv is not None:
            assert_same(kv, expected)
    time.sleep(0.5)
    assert values.calls.count("get") <= num_answered + 8  # those that were on their way
    store.close()


def test_what_arrived_lately_is_let_go_by_a_later_request(monkeypatch):
    store = RemoteStore(DictValues())
    for seed in range(50):
        assert store.get(f"{seed:032x}") is None
    monkeypatch.setattr(remote, "RESULT_TTL_S", 0.0)
    time.sleep(0.01)
    assert store.get("f" * 32) is None
    assert list(store._flights) == ["f" * 32]
    store.close()


def test_a_second_remote_tier_has_only_what_time_the_first_has_left():
    first, second = SlowValues(), SlowValues()
    first.wait_s = second.wait_s = 5.0
    store = TieredStore(RemoteStore(first, timeout_s=1.0), RemoteStore(second, timeout_s=1.0))
    with within(1.0 + LATE_S):
        assert store.fetch_from_remote(["0" * 32]) == {}
    store.close()


def test_a_server_that_always_answers_but_too_late_is_left_alone(monkeypatch):
    """Its late answers are no successes: three of them, and requests stop asking, though writes go well meanwhile."""
    monkeypatch.setattr(remote, "RESULT_TTL_S", 0.0)
    values = SlowValues()
    values.wait_s = 0.3
    store = RemoteStore(values, timeout_s=0.1, breaker=CircuitBreaker(pause_s=100))
    for seed in range(6):
        assert store.get(f"{seed:032x}") is None
        if store.breaker.is_closed:
            store.put(make_kv(seed))
            assert store.flush(10)
        time.sleep(0.25)  # the late answer comes
    assert store.breaker.num_opened == 1
    assert values.calls.count("get") == 3
    assert (store.counters.num_failures, store.counters.num_misses) == (3, 6)
    store.close()


@pytest.mark.parametrize("mode", ["delay", "drip", "hang"])
def test_a_redis_call_ends_at_its_timeout_however_slow_the_bytes(redis_server, proxy, mode):
    """A socket's own time limit begins anew with every byte."""
    kv = make_kv(1, tokens=40)
    writer = RedisValues(redis_server.url, 5.0)
    writer.put(kv.header.key, encode_chunk(kv))
    values = RedisValues(f"redis://127.0.0.1:{proxy.port}/0", 0.4)
    values.ping()  # connected
    proxy.mode, proxy.delay_s = mode, 3.0
    for call in (values.get, values.contains):
        with within(0.4 + LATE_S), pytest.raises(BackendUnreachableError):
            call(kv.header.key)
    proxy.mode = "pass"
    assert values.get(kv.header.key) == encode_chunk(kv)


def test_one_get_that_hangs_does_not_cost_the_others():
    """Their connections are their own, and are not cut with that of the one that is given up."""
    kvs = [make_kv(seed) for seed in range(4)]
    values = DictValues()
    values.data.update({kv.header.key: encode_chunk(kv) for kv in kvs})
    ask, gate = values.get, threading.Event()
    values.get = lambda name: (name == kvs[0].header.key and gate.wait(2), ask(name))[1]
    store = RemoteStore(values, timeout_s=0.3)
    assert sorted(store.fetch_from_remote([kv.header.key for kv in kvs])) == sorted(kv.header.key for kv in kvs[1:])
    gate.set()
    store.close()


# --- sizes ---


def endless(head: bytes) -> Iterator[bytes]:
    yield head
    while True:
        yield bytes(1 << 20)


def test_reading_an_endless_redis_value_stops_at_the_largest_entrys_size(talking, monkeypatch):
    monkeypatch.setattr(remote_redis, "_MAX_REPLY_BYTES", 4 << 20)

    def reply(words: list[bytes]) -> Iterable[bytes]:
        return endless(b"$%d\r\n" % TERABYTE) if words[0] == b"GET" else [b"+OK\r\n"]

    store = open_remote(f"redis://127.0.0.1:{talking(reply)}/0", timeout_s=5.0)
    with within(2, memory_bytes=200 << 20):
        assert store.fetch_from_remote([f"{number:032x}" for number in range(8)]) == {}
    with pytest.raises(BackendUnreachableError, match="the reply has more than 4194304 bytes"):
        store.values.get("a" * 32)
    store.close()


def test_a_large_value_of_redis_arrives_whole(redis_server, monkeypatch):
    monkeypatch.setattr(remote_redis, "_MAX_REPLY_BYTES", 4 << 20)
    values = RedisValues(redis_server.url, 5.0)
    values.put("large", bytes(3 << 20))
    for _ in range(2):  # each call has the limit anew
        assert len(values.get("large") or b"") == 3 << 20


@pytest.mark.parametrize(
    "said", [b"*999999999\r\n", b"+" + b"x" * 100_000, b"$" + b"9" * 5000 + b"\r\n", b"$x\r\n", b"\r\n"]
)
def test_other_lies_about_sizes_are_failures_too(said, talking):
    port = talking(lambda words: [said if words[0] == b"GET" else b"+OK\r\n"])
    values = RedisValues(f"redis://127.0.0.1:{port}/0", 0.5)
    with pytest.raises(BackendUnreachableError):
        values.get("a" * 32)


def test_an_object_that_announces_a_terabyte_is_rejected_unread(talking, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'ragblend[s3]'")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % TERABYTE
    port = talking(lambda words: endless(head), is_http=True)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    values = ObjectValues("s3://bucket/kv", 5.0)
    with within(4, memory_bytes=100 << 20), pytest.raises(BackendUnreachableError, match="1000000000000"):
        values.get("a" * 32)


def test_a_file_larger_than_any_entry_is_rejected_unread(tmp_path):
    values = ObjectValues(f"file://{tmp_path}", 5.0)
    values.put("ab", b"x")
    values.max_value_bytes = 10
    with (tmp_path / "ab" / "ab.safetensors").open("wb") as file:
        file.truncate(TERABYTE)  # sparse
    with pytest.raises(BackendUnreachableError, match="1000000000000"):
        values.get("ab")


# --- walks ---


@pytest.mark.parametrize("cursors", ["go round", "never end"])
def test_a_walk_over_a_server_that_never_says_it_is_done_ends(cursors, talking, monkeypatch):
    monkeypatch.setattr(remote_redis, "WALK_TIMEOUT_S", 1.0)
    num_scans = 0

    def reply(words: list[bytes]) -> Iterable[bytes]:
        nonlocal num_scans
        if words[0] == b"STRLEN":
            return [b":5\r\n"]
        if words[0] != b"SCAN":
            return [b"+OK\r\n"]
        num_scans += 1
        cursor = b"%d" % (7 + num_scans % 3 if cursors == "go round" else num_scans)
        name = b"ragblend:kv:%032x" % num_scans
        return [b"*2\r\n$%d\r\n%b\r\n*1\r\n$%d\r\n%b\r\n" % (len(cursor), cursor, len(name), name)]

    store = open_remote(f"redis://127.0.0.1:{talking(reply)}/0", timeout_s=5.0)
    with within(1 + LATE_S):
        assert store.nbytes() > 0
    assert num_scans > 1
    assert store.counters.num_failures == 1
    store.close()


@pytest.mark.parametrize(("call_s", "connect_s"), [(0.2, 0.2), (5.0, 1.0), (60.0, 6.0)])
def test_whoever_allows_a_call_minutes_allows_a_connection_more_than_a_second(call_s, connect_s):
    assert connect_timeout_s(call_s) == connect_s
