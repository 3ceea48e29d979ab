"""Entries of a remote tier while they arrive: readable layer by layer, verified layer by layer, late or damaged."""

from __future__ import annotations

import threading

import pytest
from servers import point_s3_at, wait_until
from tier_support import DictValues, as_bytes, assert_same, make_kv

from ragblend.engine.store.base import ByteRange
from ragblend.engine.store.format.chunk_bytes import PartialChunk
from ragblend.engine.store.format.chunk_file import UnreadableEntryError, encode_chunk
from ragblend.engine.store.format.kv import ChunkKV, MemoryKV
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.engine.store.remote import fetch as remote_fetch
from ragblend.engine.store.remote.fetch import RemoteFetch
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore, is_readable, read_ahead
from ragblend.errors import DamagedEntryError, LateEntryError

pytestmark = pytest.mark.timeout(120)
KV = make_kv(1, tokens=200, num_layers=6, dim=16)
KEY = KV.header.key


class GatedValues(DictValues):
    """DictValues that answers a range only as far as `num_allowed` ranges have been allowed."""

    def __init__(self, *kvs: MemoryKV) -> None:
        super().__init__()
        self.data = {kv.header.key: encode_chunk(kv) for kv in kvs}
        self.ranges: list[tuple[str, int, int]] = []
        self._allowed = threading.Semaphore(0)

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def get_range(self, name: str, start: int, end: int) -> ByteRange | None:
        self.ranges.append((name, start, end))
        assert self._allowed.acquire(timeout=60)
        return super().get_range(name, start, end)


@pytest.fixture(autouse=True)
def small_start(monkeypatch):
    """The first range has little more than the header."""
    monkeypatch.setattr(remote_fetch, "START_BYTES", 64)


def same_layer(kv: ChunkKV, index: int) -> bool:
    pairs = zip(kv.stored_layer(index), KV.layers[index], strict=True)
    return all(as_bytes(got) == as_bytes(expected) for got, expected in pairs)


def test_a_layer_can_be_read_before_later_ones_have_arrived():
    values = GatedValues(KV)
    store = RemoteStore(values, timeout_s=60)
    values.allow(2)  # the length of the header, and the header
    (kv,) = store.fetch_from_remote([KEY]).values()
    assert isinstance(kv, RemoteFetch)
    assert (kv.header, kv.nbytes, kv.whole) == (KV.header, KV.nbytes, None)
    read_ahead(kv)
    for index in range(KV.header.num_layers):
        values.allow(1)
        assert same_layer(kv, index)
    assert_same(kv.whole, KV)
    assert len(values.ranges) == 8
    assert_same(store.get(KEY), KV)
    store.close()


def test_no_layer_is_fetched_before_somebody_wants_it():
    values = GatedValues(KV)
    values.allow(100)
    store = RemoteStore(values, timeout_s=60)
    (kv,) = store.fetch_from_remote([KEY]).values()
    wait_until(lambda: kv.is_paused, 30, "the header has arrived")
    assert len(values.ranges) == 2
    assert same_layer(kv, 3)
    assert_same(store.get(KEY), KV)
    store.close()


def test_the_chunks_of_a_request_arrive_in_turns(monkeypatch):
    """With one thread, layer 0 of every chunk comes before layer 1 of any."""
    monkeypatch.setattr("ragblend.engine.store.remote.tier.NUM_FETCHES", 1)
    kvs = [make_kv(seed, tokens=200, num_layers=4, dim=16) for seed in range(3)]
    values = GatedValues(*kvs)
    values.allow(100)
    store = RemoteStore(values, timeout_s=60)
    fetched = store.fetch_from_remote([kv.header.key for kv in kvs])
    wait_until(lambda: all(kv.is_paused for kv in fetched.values()), 30, "the headers have arrived")
    for kv in fetched.values():
        read_ahead(kv)
    wait_until(lambda: all(kv.is_over for kv in fetched.values()), 30, "all has arrived")
    layers = [(name, start) for name, start, _ in values.ranges if start]
    assert [name for name, _ in layers] == [kv.header.key for kv in kvs] * 4
    assert [start for _, start in layers] == sorted(start for _, start in layers)
    for kv in kvs:
        assert_same(store.get(kv.header.key), kv)
    store.close()


def test_a_layer_that_is_damaged_or_late_ends_the_entry():
    values = GatedValues(KV)
    values.data[KEY] = values.data[KEY][:-1] + bytes([values.data[KEY][-1] ^ 1])  # in the last layer
    values.allow(100)
    store = TieredStore(MemoryStore(1 << 30), RemoteStore(values, timeout_s=60))
    fetched = store.fetch_from_remote([KEY])
    assert same_layer(fetched[KEY], 1)
    with pytest.raises(DamagedEntryError) as caught:
        fetched[KEY].stored_layer(5)
    assert not isinstance(caught.value, LateEntryError)
    assert not is_readable(fetched[KEY])
    assert store.get_local(KEY, None, fetched) is None
    assert (store.counters.num_damaged, store.counters.num_failures) == (1, 0)
    slow = GatedValues(KV)
    slow.allow(3)
    late = TieredStore(MemoryStore(1 << 30), RemoteStore(slow, timeout_s=0.5))
    fetched = late.fetch_from_remote([KEY])
    assert same_layer(fetched[KEY], 0)
    with pytest.raises(LateEntryError):
        fetched[KEY].stored_layer(1)
    assert late.get_local(KEY, None, fetched) is None
    slow.allow(100)
    wait_until(lambda: late.counters.num_failures == 1, 30, "it is counted")
    for each in (store, late):
        each.close()


def test_what_was_read_layer_by_layer_is_promoted_unless_it_was_deleted():
    for deletes in (False, True):
        values = GatedValues(KV)
        values.allow(100)
        store = TieredStore(MemoryStore(1 << 30), RemoteStore(values, timeout_s=60))
        kv = store.fetch_from_remote([KEY])[KEY]
        assert same_layer(kv, 1)
        wait_until(lambda: kv.source.is_over, 30, "all of it has arrived")  # noqa: B023 (called at once)
        if deletes:
            store.delete(KEY)
        for index in range(KV.header.num_layers):
            assert same_layer(kv, index)
        assert store.tiers[0].contains(KEY) == (not deletes)
        store.close()


@pytest.mark.parametrize("name", ["redis", "s3", "file"])
def test_ranges_of_real_servers_are_the_values_bytes(name, request, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/shared"
    if name == "redis":
        url = request.getfixturevalue("redis_server").url
    elif name == "s3":
        import boto3

        point_s3_at(request.getfixturevalue("s3_port"), monkeypatch)
        boto3.client("s3").create_bucket(Bucket="ranges")
        url = "s3://ranges/kv"
    store = open_remote(url, timeout_s=60)
    store.put_and_wait(KV)
    data = encode_chunk(KV)
    for start, end in ((0, 8), (5, 1000), (len(data) - 10, len(data)), (0, len(data) + 1000)):
        assert store.values.get_range(KEY, start, end) == ByteRange(data[start:end], len(data))
    assert store.values.get_range("f" * 32, 0, 8) is None
    other = open_remote(url, timeout_s=60)
    (kv,) = other.fetch_from_remote([KEY]).values()
    assert all(same_layer(kv, index) for index in range(KV.header.num_layers))
    assert other.read_speed.latency_s > 0
    store.delete(KEY)
    for each in (store, other):
        each.close()


def test_a_part_of_a_file_is_checked_like_the_whole():
    data = encode_chunk(KV)
    chunk = PartialChunk(data[: len(data) - KV.nbytes], len(data), KEY)
    for index in range(KV.header.num_layers):
        start, end = chunk.layer_range(index)
        part = data[start:end]
        assert all(map(_equal, chunk.decode_layer(index, part, start), KV.layers[index]))
        for wrong in (part[:-1], bytes([part[0] ^ 1]) + part[1:]):
            with pytest.raises(UnreadableEntryError):
                chunk.decode_layer(index, wrong, start)
    with pytest.raises(UnreadableEntryError):
        PartialChunk(data[: len(data) - KV.nbytes], len(data) + 1, KEY)


def _equal(got: object, expected: object) -> bool:
    return as_bytes(got) == as_bytes(expected)


def test_a_speed_is_that_of_all_reads_which_run_together(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("ragblend.engine.store.read_speed.monotonic", lambda: clock[0])
    speed = ReadSpeed()
    assert (speed.bytes_per_s, speed.latency_s, speed.num_reads) == (None, 0.0, 0)
    speed.begin()
    speed.begin()  # two of a megabyte in the same 2 s
    clock[0] = 1.9
    speed.end(1 << 20)
    assert speed.num_reads == 0, "the other still runs"
    clock[0] = 2.0
    speed.end(1 << 20)
    assert (speed.bytes_per_s, speed.num_reads) == (float(1 << 20), 1)
    clock[0] = 10.0
    speed.begin()
    clock[0] = 10.9
    speed.end(1000)
    assert speed.num_reads == 1, "too little and too short"
    clock[0] = 20.0
    speed.begin()
    clock[0] = 20.1
    speed.end(1000)
    assert (speed.bytes_per_s, speed.num_reads) == ((2000.0 + (1 << 20)) / 2, 2)
    for _ in range(5):
        speed.record(1000, 10.0)
        speed.record_latency(0.1)
    assert (speed.bytes_per_s, speed.latency_s) == (100.0, 0.1)
