"""The shared tier: bit for bit or a miss, over real servers, whatever the other side does."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import redis
from servers import RedisNodes, RedisServer, TcpProxy, point_s3_at, wait_until
from tier_support import DictValues, SlowValues, assert_same, make_kv, quick_breaker, run_threads

from benchmarks.servers import free_port
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.store.remote import tier as remote
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.engine.store.remote.redis_values import PREFIX, RedisValues
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.redaction import redact_url

pytestmark = pytest.mark.timeout(120)


def eventually(store: RemoteStore, kv: MemoryKV) -> None:
    """It comes, once the breaker has let requests in again; a busy machine may be late once more."""
    wait_until(lambda: store.get(kv.header.key, kv.header.token_ids) is not None, 60, "it is found")
    wait_until(lambda: (found := store.get(kv.header.key)) is not None and assert_same(found, kv) is None, 60, "again")


def put_all(store: RemoteStore, *kvs: MemoryKV) -> None:
    """Put them, and wait until they are there."""
    for kv in kvs:
        store.put(kv)
    assert store.flush(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    nodes = RedisNodes(tmp_path_factory.mktemp("cluster"))
    nodes.start()
    yield nodes
    nodes.kill()


@pytest.fixture
def s3(s3_port, monkeypatch):
    """moto behind a proxy, where the environment says that S3 is, with a fresh bucket `tests`."""
    proxy = TcpProxy(s3_port)
    point_s3_at(proxy.port, monkeypatch)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="tests")
    yield proxy
    proxy.mode = "pass"
    for item in client.list_objects_v2(Bucket="tests").get("Contents", []):
        client.delete_object(Bucket="tests", Key=item["Key"])
    proxy.close()


@pytest.fixture(params=["redis", pytest.param("cluster", marks=pytest.mark.slow), "s3", "file", "dict"])
def place(request, tmp_path):
    """Opens a RemoteStore over the same place again and again: what one process after the other would do."""
    values = DictValues()
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url.replace("/0", "/1")
    elif request.param == "cluster":
        url = request.getfixturevalue("cluster").url
    elif request.param == "s3":
        request.getfixturevalue("s3")
        url = "s3://tests/kv"
    else:
        url = f"file://{tmp_path}/shared"
    made: list[RemoteStore] = []

    def build() -> RemoteStore:
        made.append(RemoteStore(values) if request.param == "dict" else open_remote(url, timeout_s=60))
        return made[-1]

    yield build
    for store in made:
        for key in list(store.keys()):
            store.delete(key)
        store.close()


# --- every backend ---


def test_what_was_put_comes_back_bit_for_bit_until_it_is_deleted(place):
    store, kvs = place(), [make_kv(seed, tokens=1 + 40 * seed) for seed in range(3)]
    put_all(store, *kvs)
    other = place()
    for kv in kvs:
        assert_same(other.get(kv.header.key, kv.header.token_ids), kv)
        assert other.values.get(kv.header.key) == encode_chunk(kv)  # the disk tier's file
    assert sorted(other.keys()) == sorted(kv.header.key for kv in kvs)
    assert other.nbytes() == sum(len(encode_chunk(kv)) for kv in kvs)
    assert other.get("f" * 32) is None
    assert place().get(kvs[0].header.key, [1, 2, 3, 4]) is None  # other token ids
    assert (other.counters.num_hits, other.counters.num_misses, other.counters.num_failures) == (3, 1, 0)
    status = other.status()
    assert (status.reachable, status.breaker, status.problem) == (True, "closed", "")
    assert status.latency_s is not None
    assert place().delete(kvs[0].header.key)
    assert not store.contains(kvs[0].header.key)
    assert store.get(kvs[0].header.key) is None
    assert not store.delete(kvs[0].header.key)


def test_many_are_asked_for_as_each_would_be(place, monkeypatch):
    monkeypatch.setattr(remote, "CONTAINS_BATCH", 7)
    store, kvs = place(), [make_kv(seed) for seed in range(12)]
    put_all(store, *kvs)
    keys = [kv.header.key for kv in kvs]
    asked = [*keys, *(f"{number:032x}" for number in range(10)), keys[0]]
    store.put(waiting := make_kv(99))  # on its way there, perhaps
    other = place()
    assert other.contains_many(asked) == [other.contains(key) for key in asked] == [*[True] * 12, *[False] * 10, True]
    assert store.contains_many([waiting.header.key]) == [True]
    assert other.contains_many([]) == []
    assert other.contains_many(keys, until_s=time.monotonic() - 1) == [False] * 12


def test_damaged_truncated_and_foreign_values_are_misses_until_written_anew(place, monkeypatch):
    """12 bad values: 8 flipped bytes, 2 truncations, another key's entry, a forged header; all counted."""
    monkeypatch.setattr(remote, "RESULT_TTL_S", 0.0)
    store, kv, other = place(), make_kv(1, num_layers=3), make_kv(2)
    good = encode_chunk(kv)
    places = range(8, len(good), len(good) // 8)
    flipped = [good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :] for at in places][:8]
    forged = MemoryKV(replace(kv.header, token_ids=(7, 7, 7, 7)), kv.layers)
    bad = [*flipped, good[:-1], good[:5], encode_chunk(other), encode_chunk(forged)]
    assert len(bad) == 12
    for number, value in enumerate(bad, start=1):
        store.values.put(kv.header.key, value)
        assert store.get(kv.header.key) is None
        counters = store.counters
        assert (counters.num_misses, counters.num_damaged, counters.num_failures) == (number, number, 0)
        assert not store.contains(kv.header.key), "an ingestion must not take it for stored"
    put_all(store, kv)
    assert_same(place().get(kv.header.key), kv)


# --- slow, down, lying ---


def test_a_remote_that_is_down_costs_misses_then_nothing_then_comes_back():
    values, kv = DictValues(), make_kv()
    store = RemoteStore(values, breaker=quick_breaker())
    values.data[kv.header.key] = encode_chunk(kv)
    values.is_down = True
    assert [store.get(f"{number:032x}") for number in range(10)] == [None] * 10
    assert values.calls.count("get") == 3, "the breaker opens at the third failure"
    assert store.counters.num_failures >= 3  # probes fail, too
    assert store.counters.num_misses == 10
    assert store.breaker.num_opened == 1
    values.is_down = False
    eventually(store, kv)
    assert values.calls.count("ping") >= 1


def test_failures_are_counted_for_as_long_as_it_is_down():
    values = DictValues()
    store = RemoteStore(values, breaker=quick_breaker())
    values.is_down = True
    # The alert RagblendRemoteFailing needs a growing counter for ten minutes; an open breaker sends probes only.
    wait_until(lambda: store.get("0" * 32) is None and store.counters.num_failures >= 6, 30, "probes are counted")
    assert values.calls.count("get") == 3


def test_many_keys_need_few_round_trips_and_none_during_an_outage():
    values = DictValues()
    store = RemoteStore(values, breaker=quick_breaker(threshold=1))
    keys = [f"{number:032x}" for number in range(1000)]
    values.data = dict.fromkeys(keys[::3], b"")
    assert store.contains_many(keys) == [number % 3 == 0 for number in range(1000)]
    assert values.calls == ["contains_many"] * 5
    values.is_down = True
    assert store.contains_many(keys) == [False] * 1000
    assert values.calls.count("contains_many") == 6
    assert store.counters.num_failures == 1


@pytest.mark.slow
def test_a_cluster_whose_node_dies_answers_from_its_replica(tmp_path):
    nodes = RedisNodes(tmp_path)
    nodes.start()
    try:
        kvs = [make_kv(at) for at in range(24)]
        store = RemoteStore(open_remote(nodes.url).values, breaker=quick_breaker())
        put_all(store, *kvs)
        at_last = redis.Redis(port=nodes.last.port).dbsize()
        assert 0 < at_last < len(kvs)
        wait_until(lambda: redis.Redis(port=nodes.last.port).wait(1, 1000) == 1, 60, "the replica has them")
        nodes.last.kill()
        num_found = sum(store.get(kv.header.key) is not None for kv in kvs)
        assert num_found <= len(kvs) - at_last  # and no more is asked of it
        for kv in kvs:
            eventually(store, kv)
        assert sorted(store.keys()) == sorted(kv.header.key for kv in kvs)
        nodes.kill()
        assert store.get(kvs[0].header.key) is None
        nodes.start()  # empty, at the same ports
        put_all(store, kvs[0])
        eventually(store, kvs[0])
    finally:
        nodes.kill()


def test_a_redis_with_other_types_at_its_keys_says_what_is_there(redis_server):
    values = RedisValues(redis_server.url.replace("/0", "/5"), 5.0)
    values.put("there", b"bytes")
    values._client.lpush(PREFIX + "list", b"not ours")
    assert values.contains_many(["there", "list", "nowhere"]) == [True, False, False]
    values.close()


def test_the_probe_is_sent_in_the_background():
    values = DictValues()
    store = RemoteStore(values, breaker=CircuitBreaker(threshold=1, pause_s=0.01))
    values.is_down = True
    store.get("a" * 32)
    values.is_down = False
    pinged = threading.Event()
    values.ping = lambda: pinged.wait(10) and None
    time.sleep(0.02)
    assert store.get("b" * 32) is None
    assert store.breaker.state == "half-open", "the probe has ended, so somebody waited for it"
    pinged.set()
    wait_until(lambda: store.breaker.is_closed, 60, "the breaker closes")
    store.close()


@pytest.mark.parametrize("threshold", [1, 3])
def test_writes_wait_out_an_outage_and_arrive(threshold):
    values = DictValues()
    store = RemoteStore(values, breaker=quick_breaker(threshold))
    values.is_down = True
    kvs = [make_kv(seed) for seed in range(5)]
    for kv in kvs:
        store.put(kv)
    assert not store.flush(0.1)
    assert_same(store.get(kvs[4].header.key), kvs[4])  # reads see what is queued
    assert store.contains(kvs[4].header.key)
    values.is_down = False
    assert store.flush(10)
    assert sorted(values.data) == sorted(kv.header.key for kv in kvs)
    assert store.counters.num_dropped == 0


def test_a_delete_that_reaches_nobody_is_an_error():
    values = DictValues()
    values.is_down = True
    with pytest.raises(BackendUnreachableError):
        RemoteStore(values).delete("a" * 32)


@pytest.mark.parametrize("mode", ["hang", "drip", "refuse", "cut"])
def test_a_misbehaving_redis_costs_one_timeout_and_never_fails_a_get(redis_server, mode):
    """8 gets, side by side, of 4 KiB values over a broken line; then the line is mended."""
    proxy = TcpProxy(redis_server.port)
    url, limit_s = f"redis://127.0.0.1:{proxy.port}/2", 1.0
    kvs = [make_kv(seed, tokens=30) for seed in range(8)]
    writer = open_remote(redis_server.url.replace("/0", "/2"))
    put_all(writer, *kvs)
    values = RedisValues(url, limit_s)
    store = RemoteStore(values, timeout_s=limit_s, breaker=quick_breaker())
    proxy.mode, proxy.cut_after = mode, 100
    start_s = time.perf_counter()
    store.fetch_from_remote([kv.header.key for kv in kvs])
    assert [store.get(kv.header.key) for kv in kvs] == [None] * 8
    assert time.perf_counter() - start_s < 8 * limit_s, "8 waits, one after the other"
    assert store.counters.num_failures >= 3
    assert store.counters.num_damaged == 0
    assert store.breaker.num_opened >= 1
    proxy.mode = "pass"
    for kv in kvs:
        eventually(store, kv)
    for part in (store, writer):
        part.close()
    proxy.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["error", "cut", "hang", "refuse"])
def test_an_s3_that_misbehaves_is_a_miss_and_a_count(s3, mode, monkeypatch):
    """500 to everything, bodies cut short, silence, closed connections: 6 gets each, then the line is mended."""
    kvs = [make_kv(seed, tokens=100) for seed in range(6)]
    writer = open_remote("s3://tests/kv", timeout_s=60)
    put_all(writer, *kvs)
    store = open_remote("s3://tests/kv", timeout_s=1.0)
    store.breaker = quick_breaker()
    s3.mode, s3.cut_after = mode, 2000
    assert [store.get(kv.header.key) for kv in kvs] == [None] * 6
    assert store.counters.num_misses == 6
    assert store.counters.num_failures >= 3
    assert store.breaker.num_opened >= 1
    s3.mode = "pass"
    monkeypatch.setattr(remote, "RESULT_TTL_S", 0.0)
    for kv in kvs:
        eventually(store, kv)
    for part in (store, writer):
        part.close()


def test_a_bucket_that_is_not_there_is_unreachable_and_harmless(s3, caplog):
    store = open_remote("s3://nobody/kv")
    status = store.status()
    assert not status.reachable
    assert "nobody" in status.problem
    assert store.get("a" * 32) is None
    put_all(store, make_kv())
    assert store.counters.num_dropped == 1
    assert "does not exist" in caplog.text
    assert "ragblend push --remote s3://nobody/kv" in caplog.text


def test_a_full_redis_drops_writes_and_goes_on_answering(tmp_path, caplog):
    server = RedisServer(tmp_path)
    server.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    store = open_remote(server.url)
    kvs = [make_kv(seed, tokens=4000) for seed in range(8)]  # 0.5 MB each
    put_all(store, *kvs)
    assert 1 <= store.counters.num_dropped < 8
    assert "allkeys-lru" in caplog.text
    assert store.breaker.is_closed
    assert_same(store.get(kvs[0].header.key), kvs[0])
    store.close()
    server.kill()


# --- one fetch for all, several at once ---


def test_requests_that_share_a_chunk_fetch_it_once():
    values, kv = SlowValues(), make_kv()
    values.data[kv.header.key] = encode_chunk(kv)
    store = RemoteStore(values)
    found: list[MemoryKV | None] = []
    run_threads(8, lambda _: found.append(store.get(kv.header.key)))
    assert [part is found[0] for part in found] == [True] * 8
    assert values.calls.count("get") == 1
    store.close()


def test_a_requests_chunks_come_side_by_side():
    values, kvs = SlowValues(), [make_kv(seed) for seed in range(6)]
    values.data.update({kv.header.key: encode_chunk(kv) for kv in kvs})
    store = RemoteStore(values)
    store.fetch_from_remote([kv.header.key for kv in kvs])
    for kv in kvs:
        assert_same(store.get(kv.header.key), kv)
    assert values.num_most >= 3
    assert values.calls.count("get") == 6
    store.close()


# --- URLs ---


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, r"redis://HOST|s3://BUCKET") for url in ("", "kv/", "redis", "redis://host:port/0", "nosuch://b/kv")),
        *((url, r"redis\+cluster://HOST:PORT") for url in ("redis+cluster://h:7000/3", "rediss+cluster://h:abc")),
    ],
)
def test_what_is_no_url_is_named_with_what_to_type(url, said):
    with pytest.raises(UsageError, match=said):
        open_remote(url)


def test_passwords_stay_out_of_messages_and_connections_open_at_first_use():
    url = f"redis://user:geheim@127.0.0.1:{free_port()}/0?socket_timeout=1"
    assert redact_url(url) == f"redis://***@{url.partition('@')[2].partition('?')[0]}"
    store = open_remote(url)
    assert store.counters.num_failures == 0
    status = store.status()
    assert not status.reachable
    assert "geheim" not in str(status)


def test_foreign_values_in_the_same_database_are_left_alone(redis_server):
    client = redis.Redis.from_url(redis_server.url.replace("/0", "/3"))
    client.set("session:1", "somebody's")
    store, kv = open_remote(redis_server.url.replace("/0", "/3")), make_kv()
    put_all(store, kv)
    assert list(store.keys()) == [kv.header.key]
    assert client.exists(PREFIX + kv.header.key)
    store.delete(kv.header.key)
    assert client.get("session:1") == b"somebody's"
    store.close()


def test_a_missing_package_says_its_install_line(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "ragblend.engine.store.remote.redis_values", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install 'ragblend\[redis\]'"):
        open_remote("redis://127.0.0.1:1/0")
