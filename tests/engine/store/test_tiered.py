"""Memory, disk and remote as one store: budgets hold, no bit is lost, nothing crosses namespaces, nothing waits."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import wait_until
from tier_support import DictValues, assert_same, flip, make_kv, path_of, run_threads

from benchmarks.servers import free_port
from ragblend.engine.load import load_engine
from ragblend.engine.store.base import KVStore, StoreCounters
from ragblend.engine.store.disk import DiskKV, DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import (
    ChunkKV,
    KVHeader,
    LayerKV,
    MemoryKV,
    StoredLayer,
    convert_kv_dtype,
    dequantized,
    load_into_memory,
)
from ragblend.engine.store.memory import READ_AGAIN_SHARE
from ragblend.engine.store.open import open_store
from ragblend.engine.store.remote import tier as remote
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore, format_bytes, parse_bytes
from ragblend.errors import BackendUnreachableError, DamagedEntryError, StoreFullError, UsageError
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def disk(tmp_path):
    return DiskStore(tmp_path / "kv", fsync=False)


# --- memory ---


@settings(deadline=None)
@given(
    capacity=st.integers(0, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "put", "get", "delete", "contains"]), st.integers(0, 5)),
        max_size=40,
    ),
)
def test_memory_behaves_like_two_lists_ordered_by_use(capacity, steps):
    kvs = [make_kv(seed, tokens=1 + seed % 3) for seed in range(6)]
    unit = make_kv(tokens=1).nbytes
    store, num_evicted = MemoryStore(capacity * unit), 0
    new, again, evicted = list[int](), list[int](), list[int]()  # least recently used first

    def nbytes(*numbers: int) -> int:
        return sum(kvs[each].nbytes for each in numbers)

    def leave(number: int) -> bool:
        left = [some.remove(number) for some in (new, again) if number in some]
        return bool(left)

    def read_again(number: int) -> None:
        leave(number)
        again.append(number)
        while nbytes(*again) > READ_AGAIN_SHARE * store.capacity_bytes:
            new.append(again.pop(0))

    for step, number in steps:
        kv = kvs[number]
        if step == "put" and kv.nbytes > store.capacity_bytes:
            with pytest.raises(StoreFullError, match="memory tier holds"):
                store.put(kv)
        elif step == "put":
            leave(number)
            while nbytes(*new, *again, number) > store.capacity_bytes:
                evicted.append((new or again).pop(0))
                num_evicted += 1
                evicted = evicted[-len(new + again) :] if new or again else []
            store.put(kv)
            new.append(number)
            if number in evicted:
                evicted.remove(number)
                read_again(number)
        elif step == "get":
            contained = number in new + again
            assert (store.get(kv.header.key) is not None) == contained
            if contained:
                read_again(number)
        elif step == "delete":
            assert store.delete(kv.header.key) == leave(number)
        else:
            assert store.contains(kv.header.key) == (number in new + again)
        assert list(store.keys()) == [kvs[other].header.key for other in (*new, *again)]
        assert store.nbytes() == nbytes(*new, *again) <= store.capacity_bytes
    assert store.counters.num_evicted == num_evicted


def test_memory_returns_what_was_put_and_refuses_other_token_ids(caplog):
    store, kv = MemoryStore(10_000), make_kv()
    store.put(kv)
    assert store.get("f" * 32) is None
    assert store.get(kv.header.key, [9, 9, 9, 9]) is None
    assert "token ids differ" in caplog.text
    assert_same(store.get(kv.header.key, list(kv.header.token_ids)), kv)
    counters = store.counters
    assert (counters.num_hits, counters.num_misses, counters.num_puts, counters.num_damaged) == (1, 2, 1, 1)


def test_memory_does_not_keep_what_a_slice_was_cut_from():
    whole = torch.randn(2, 1000, 4)
    cut = LayerKV(whole[:, :3], whole[:, 3:6])
    store = MemoryStore(10_000)
    store.put(MemoryKV(KVHeader("a" * 32, "m", (), (1, 2, 3), 1, "float32"), (cut,)))
    found = store.get("a" * 32)
    assert [tensor.untyped_storage().nbytes() for tensor in found.layer(0)] == [96, 96]
    expected = cut.keys.clone()
    whole.zero_()  # the cache the chunk was cut from goes on living
    assert torch.equal(found.layer(0).keys, expected)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 7, 300, 512])
def test_page_locked_memory_returns_what_was_put_and_wastes_little(num_tokens, kv_dtype, monkeypatch):
    """Without a GPU there is no page-locked memory; ordinary memory stands in for it, and its blocks are counted."""
    real, blocks = torch.empty, list[int]()

    def allocate(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        block = real(*args, **options)
        if pin_memory:
            blocks.append(1 << (block.nbytes - 1).bit_length())  # what torch allocates for it
        return block

    shape = (4, num_tokens, 32)
    header = KVHeader("a" * 32, "m", (), tuple(range(num_tokens)), 24, "float32")
    layers = tuple(LayerKV(torch.randn(shape), torch.randn(shape)) for _ in range(24))
    kv = convert_kv_dtype(MemoryKV(header, layers), kv_dtype)
    store = MemoryStore(1 << 40)
    store.page_locked = True
    monkeypatch.setattr(torch, "empty", allocate)
    store.put(kv)
    found = store.get("a" * 32)
    assert found is not None
    assert_same(found, kv)
    assert len(blocks) < 10
    assert sum(blocks) < (1.2 if num_tokens > 1 else 1.5) * kv.nbytes
    found.layers[3][0].zero_()
    assert store.get("a" * 32) is None  # writing into an entry is detected here, too


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_page_locked_memory_entries_are_in_ordinary_memory(caplog):
    store, kv = MemoryStore(10_000), make_kv()
    store.page_locked = True
    store.put(kv)
    assert_same(store.get(kv.header.key), kv)
    assert "no page-locked memory" in caplog.text
    assert "memory_gib" in caplog.text


@pytest.mark.parametrize("under_inference", [False, True])
@pytest.mark.parametrize("from_disk", [False, True])
def test_a_written_into_entry_is_dropped_never_answered(disk, caplog, under_inference, from_disk):
    memory = MemoryStore(10_000)
    with torch.inference_mode(under_inference):
        kv: ChunkKV = make_kv()
        disk.put(kv)
        if from_disk:
            kv = disk.get(kv.header.key) or pytest.fail("a miss")
        memory.put(kv)
        found = memory.get(kv.header.key)
        found.layer(1).keys[0, 2:].mul_(2)  # what a rotation in place would do
    assert memory.get(kv.header.key) is None
    assert "read-only" in caplog.text
    assert (memory.counters.num_damaged, memory.nbytes()) == (1, 0)


def test_memory_is_safe_to_share_between_threads():
    kvs = [make_kv(seed) for seed in range(6)]
    store = MemoryStore(3 * kvs[0].nbytes)

    def work(_: int) -> None:
        for round_ in range(100):
            kv = kvs[round_ % 6]
            found = store.get(kv.header.key)
            if found is None:
                store.put(kv)
            else:
                assert_same(found, kv)
            if round_ % 17 == 0:
                store.delete(kv.header.key)

    run_threads(6, work)
    assert store.nbytes() == kvs[0].nbytes * len(list(store.keys())) <= store.capacity_bytes


# --- tiers ---


def test_a_chunk_too_large_for_memory_is_stored_below_and_stays_there(disk):
    kv = make_kv()
    memory = MemoryStore(kv.nbytes - 1)
    tiers = TieredStore(memory, disk)
    tiers.put(kv)
    found = tiers.get(kv.header.key)
    assert isinstance(found, DiskKV), "nothing gathers layers that would not fit"
    assert_same(found, kv)
    assert list(memory.keys()) == []


def test_an_entry_moves_up_once_all_its_layers_were_read(disk):
    memory, kv = MemoryStore(10_000), make_kv(num_layers=3)
    disk.put(kv)
    tiers = TieredStore(memory, disk)
    found = tiers.get(kv.header.key, kv.header.token_ids)
    assert found is not None
    for index in (2, 0, 0, 2):
        found.layer(index)
        assert not memory.contains(kv.header.key)
    found.layer(1)
    assert_same(memory.get(kv.header.key), kv)
    disk.delete(kv.header.key)
    assert_same(tiers.get(kv.header.key, kv.header.token_ids), kv)
    assert (tiers.counters.num_hits, tiers.counters.num_misses) == (2, 0)


def test_an_entry_written_into_while_it_was_streamed_does_not_move_up(disk):
    memory, kv = MemoryStore(10_000), make_kv()
    disk.put(kv)
    found = TieredStore(memory, disk).get(kv.header.key)
    found.layer(0).keys.zero_()
    found.layer(1)
    assert not memory.contains(kv.header.key)


def test_an_entry_deleted_while_it_is_read_does_not_come_back(disk):
    memory, kv = MemoryStore(10_000), make_kv()
    tiers = TieredStore(memory, disk)
    disk.put(kv)
    found = tiers.get(kv.header.key)
    assert tiers.delete(kv.header.key)
    assert_same(found, kv)
    assert not tiers.contains(kv.header.key)
    assert not tiers.delete(kv.header.key)


@pytest.mark.parametrize("is_archived", [False, True])
def test_damage_is_a_miss_or_healed_from_below_and_never_promoted(disk, tmp_path, is_archived):
    memory, archive, kv = MemoryStore(10_000), DiskStore(tmp_path / "archive", fsync=False), make_kv()
    tiers = TieredStore(memory, disk, archive) if is_archived else TieredStore(memory, disk)
    for tier in tiers.tiers[1:]:
        tier.put(kv)
    flip(path_of(disk.root, kv.header.key), -1)
    found = tiers.get(kv.header.key)
    found.layer(0)
    with pytest.raises(DamagedEntryError):
        found.layer(1)
    assert not memory.contains(kv.header.key)
    if not is_archived:
        assert tiers.get(kv.header.key) is None
        assert (tiers.counters.num_hits, tiers.counters.num_misses, tiers.counters.num_damaged) == (1, 1, 1)
        return
    assert_same(tiers.get(kv.header.key), kv)
    assert tiers.flush(10)
    for tier in tiers.tiers:
        assert_same(tier.get(kv.header.key), kv)


def test_a_full_disk_is_reported_after_the_other_tiers_were_written(disk, monkeypatch):
    memory, kv = MemoryStore(10_000), make_kv()

    def full(_: ChunkKV) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(disk, "put", full)
    with pytest.raises(StoreFullError, match="the disk is full"):
        TieredStore(memory, disk).put(kv)
    assert_same(memory.get(kv.header.key), kv)


def test_a_faster_tier_that_refuses_costs_no_answer(disk, tmp_path):
    kv = make_kv()
    archive = DiskStore(tmp_path / "archive", fsync=False)
    archive.put(kv)
    disk.root.rmdir()
    disk.root.write_text("no longer a directory")
    found = TieredStore(disk, archive).get(kv.header.key)
    assert_same(found, kv)


def test_a_hit_in_memory_counts_as_a_use_on_disk(disk):
    memory, hot, cold = MemoryStore(10_000), make_kv(1), make_kv(2)
    tiers = TieredStore(memory, disk)
    for kv in (hot, cold):
        tiers.put(kv)
        os.utime(path_of(disk.root, kv.header.key), (0, 1000))
    assert isinstance(tiers.get(hot.header.key), MemoryKV)
    assert disk.gc(max_bytes=disk.nbytes() - 1).evicted == (cold.header.key,)


def test_no_tier_and_a_negative_capacity_are_usage_errors():
    with pytest.raises(UsageError, match="at least one"):
        TieredStore()
    with pytest.raises(UsageError, match="capacity_bytes is -1"):
        MemoryStore(-1)


# --- with a remote tier ---


class Tiers:
    """A TieredStore over a directory and a dict, with its parts at hand."""

    def __init__(self, root: Path, memory_bytes: int = 1 << 20, values: DictValues | None = None) -> None:
        self.memory = MemoryStore(memory_bytes)
        self.disk = DiskStore(root, fsync=False)
        self.values = values or DictValues()
        self.remote = RemoteStore(self.values, timeout_s=60)
        self.store = TieredStore(self.memory, self.disk, self.remote)


@pytest.fixture
def tiers(tmp_path):
    return Tiers(tmp_path / "kv")


# --- namespaces ---

OPERATIONS = ["put", "get", "get", "drop memory", "drop disk", "delete", "swap on the remote", "swap on disk", "flush"]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.sampled_from(["red", "blue"])), max_size=40
    )
)
def test_no_request_in_one_namespace_ever_reads_anothers_entry(steps):
    """Random traffic of two tenants over the same texts, on tiers that lose entries and get them swapped."""
    remote.RESULT_TTL_S, linger_s = 0.0, remote.RESULT_TTL_S
    with tempfile.TemporaryDirectory() as root:
        tiers = Tiers(Path(root), memory_bytes=3 * make_kv().nbytes)
        kvs = {(seed, name): make_kv(seed, namespace=name) for seed in range(4) for name in ("red", "blue")}
        put: set[tuple[int, str]] = set()
        for step, seed, namespace in steps:
            kv = kvs[seed, namespace]
            other = kvs[seed, "blue" if namespace == "red" else "red"]
            key = chunk_key("model", kv.header.prefix_ids, kv.header.token_ids, namespace)
            if step == "put":
                tiers.store.put(kv)
                put.add((seed, namespace))
            elif step == "get":
                found = tiers.store.get(key, kv.header.token_ids)
                if found is not None:
                    assert (seed, namespace) in put
                    assert_same(found, kv)
            elif step == "drop memory":
                tiers.memory.delete(key)
            elif step == "drop disk":
                tiers.store.flush(10)
                tiers.disk.delete(key)
            elif step == "delete":
                tiers.store.delete(key)
                put.discard((seed, namespace))
                assert tiers.store.get(key) is None
            elif step == "flush":
                assert tiers.store.flush(10)
            elif step == "swap on the remote" and (value := tiers.values.data.get(other.header.key)) is not None:
                tiers.store.flush(10)
                tiers.values.data[key] = value
            elif step == "swap on disk":
                tiers.store.flush(10)
                source = tiers.disk._path(other.header.key)
                if source.exists() and tiers.disk._path(key).parent.exists():
                    tiers.disk._path(key).write_bytes(source.read_bytes())
        tiers.store.close()
    remote.RESULT_TTL_S = linger_s


# --- reading ---


def test_a_remote_hit_is_in_memory_at_once_and_on_disk_later(tiers):
    kv = make_kv(num_layers=3)
    writer = RemoteStore(tiers.values)
    writer.put(kv)
    assert writer.flush(10)
    slow = threading.Event()
    put = tiers.disk.put

    def slow_put(chunk: ChunkKV) -> None:
        slow.wait(10)
        put(chunk)

    tiers.disk.put = slow_put
    store = TieredStore(tiers.memory, tiers.disk, tiers.remote)
    assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
    assert tiers.memory.contains(kv.header.key)
    assert not tiers.disk.contains(kv.header.key)
    tiers.memory.delete(kv.header.key)
    tiers.values.data.clear()
    assert_same(store.get(kv.header.key, kv.header.token_ids), kv)  # on its way to the disk
    slow.set()
    assert store.close()
    assert_same(tiers.disk.get(kv.header.key), kv)


def test_an_entry_deleted_while_the_remote_sends_it_does_not_come_back(tiers, monkeypatch):
    kv, ask = make_kv(), tiers.values.get
    tiers.values.data[kv.header.key] = encode_chunk(kv)

    def answer(name: str) -> bytes | None:
        data = ask(name)
        tiers.store.delete(name)
        return data

    monkeypatch.setattr(tiers.values, "get", answer)
    assert_same(tiers.store.get(kv.header.key), kv)
    assert tiers.store.flush(10)
    assert not tiers.store.contains(kv.header.key)


def test_an_entry_that_the_catalogue_cannot_record_is_in_no_tier(tmp_path):
    """A removal looks for entries in the catalogue: it would not find this one."""
    values, disk = DictValues(), DiskStore(tmp_path, fsync=False)
    store = TieredStore(MemoryStore(1 << 20), disk, RemoteStore(values))

    def unreachable(header: KVHeader) -> None:
        raise BackendUnreachableError("the catalogue does not answer")

    kv = make_kv()
    disk.on_put = unreachable
    with pytest.raises(BackendUnreachableError, match="the catalogue does not answer"):
        store.put(kv)
    assert store.flush(5)
    assert [list(tier.keys()) for tier in store.tiers] == [[], [], []]
    disk.on_put = None
    store.put(kv)
    assert store.flush(5)
    assert [list(tier.keys()) for tier in store.tiers] == [[kv.header.key]] * 3


def test_put_writes_through_and_a_second_machine_finds_it(tiers, tmp_path):
    kvs = [make_kv(seed) for seed in range(5)]
    for kv in kvs:
        tiers.store.put(kv)
    assert tiers.store.flush(10)
    assert sorted(tiers.store.keys()) == sorted(kv.header.key for kv in kvs), "each once"
    assert tiers.store.nbytes() == sum(tier.nbytes() for tier in tiers.store.tiers)
    other = Tiers(tmp_path / "other", values=tiers.values)
    for kv in kvs:
        assert other.store.contains(kv.header.key)
        assert_same(other.store.get(kv.header.key, kv.header.token_ids), kv)
    assert other.store.counters.num_hits == 5
    assert other.store.close()
    assert sorted(other.disk.keys()) == sorted(kv.header.key for kv in kvs)


class CountingKV:
    """A ChunkKV of a slower tier that notes each layer read and takes its time."""

    def __init__(self, kv: MemoryKV) -> None:
        self.header, self.nbytes, self._kv = kv.header, kv.nbytes, kv
        self.reads: list[int] = []

    def stored_layer(self, index: int) -> StoredLayer:
        self.reads.append(index)
        time.sleep(0.01)
        layer = self._kv.stored_layer(index)
        return type(layer)(*(tensor.clone() for tensor in layer))

    def layer(self, index: int) -> LayerKV:
        return dequantized(self.stored_layer(index))


def test_requests_that_share_a_chunk_read_each_layer_once(tiers, monkeypatch):
    """6 readers at once, 5 layers on disk."""
    kv = make_kv(num_layers=5)
    counting = CountingKV(kv)
    tiers.disk.put(kv)
    monkeypatch.setattr(tiers.disk, "get", lambda key, token_ids=None: counting)
    held = tiers.store.get(kv.header.key)  # the first request has begun
    run_threads(6, lambda _: assert_same(tiers.store.get(kv.header.key, kv.header.token_ids), kv))
    assert_same(held, kv)
    assert sorted(counting.reads) == [0, 1, 2, 3, 4]
    assert tiers.memory.contains(kv.header.key)


def test_a_layer_one_reader_wrote_into_is_read_again_for_the_next(tiers):
    kv = make_kv(num_layers=2)
    tiers.disk.put(kv)
    first, second = (tiers.store.get(kv.header.key) for _ in range(2))
    assert first is not None
    assert second is first
    first.layer(0).keys.zero_()
    assert_same(second, kv)


def test_prefetch_brings_entries_into_memory_from_every_tier(tiers):
    on_disk, far = make_kv(1), make_kv(2)
    tiers.disk.put(on_disk)
    tiers.remote.put(far)
    assert tiers.remote.flush(10)
    tiers.store.prefetch([on_disk.header.key, far.header.key, "f" * 32])
    wait_until(lambda: all(tiers.memory.contains(kv.header.key) for kv in (on_disk, far)), 10, "both in memory")
    tiers.store.close()
    assert tiers.store.counters.num_hits == tiers.store.counters.num_misses == 0, "nobody has asked yet"
    assert_same(tiers.store.get(far.header.key), far)


def test_fetch_ahead_asks_the_remote_only_for_what_is_not_here(tiers):
    here, near, far = make_kv(1), make_kv(2), make_kv(3)
    for store, kv in ((tiers.memory, here), (tiers.disk, near), (tiers.remote, far)):
        store.put(kv)
    assert tiers.remote.flush(10)
    tiers.values.calls.clear()
    tiers.store.fetch_from_remote([kv.header.key for kv in (here, near, far)])
    for kv in (here, near, far):
        assert_same(tiers.store.get(kv.header.key), kv)
    assert tiers.values.calls.count("get") == 1


# --- a remote that is down ---


def test_without_the_remote_the_local_tiers_go_on(tiers):
    """200 requests while it is down: every stored chunk is found, nothing raises, the breaker keeps it out."""
    kvs = [make_kv(seed) for seed in range(10)]
    tiers.values.is_down = True
    for kv in kvs:
        tiers.store.put(kv)
    for number in range(200):
        kv = kvs[number % 10]
        assert_same(tiers.store.get(kv.header.key, kv.header.token_ids), kv)
        assert tiers.store.get(f"{number:032x}") is None
    counters = tiers.store.counters
    assert (counters.num_hits, counters.num_misses, counters.num_damaged) == (200, 200, 0)
    assert tiers.values.calls.count("get") <= 6
    assert counters.num_failures <= 12 + tiers.values.calls.count("ping")
    assert not tiers.store.close(0.2)
    assert tiers.store.counters.num_dropped == 10


def test_a_local_delete_reports_that_the_remote_tier_keeps_the_entry(tiers):
    kv = make_kv()
    tiers.store.put(kv)
    assert tiers.store.flush(10)
    tiers.values.is_down = True
    with pytest.raises(BackendUnreachableError):
        tiers.store.delete(kv.header.key)
    assert not tiers.memory.contains(kv.header.key)
    assert not tiers.disk.contains(kv.header.key)


# --- composition ---


def test_open_store_makes_the_tiers_that_are_asked_for(tmp_path):
    url = f"redis://127.0.0.1:{free_port()}/0"
    store = open_store(tmp_path, memory_gib=1, disk_gib=2, remote=url)
    assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore, RemoteStore]
    assert store.tiers[1].capacity_bytes == 2 << 30
    assert [type(tier) for tier in open_store(None, remote=url).tiers] == [MemoryStore, RemoteStore]


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("memory_gib", 1, "memory_gib=1"),
        ("disk_gib", 3, "disk_gib=3"),
        ("kv_dir", "/fast", "kv_dir=/fast"),
        ("remote", "redis://:secret@cache:6379/0", r"remote=redis://\*\*\*@cache:6379/0"),
        ("remote_timeout_s", 2.0, "remote_timeout_s=2.0"),
        ("catalog", "postgresql://me:secret@db/rag", r"catalog=postgresql://\*\*\*@db/rag"),
        ("kv_dtype", "int8", "kv_dtype=int8"),
    ],
)
def test_a_store_that_is_passed_has_its_own_tiers(option, value, shown):
    message = f"^{shown} cannot be set here: store is a MemoryStore.*open_store\\(PATH, {option}=\\.\\.\\.\\)"
    with pytest.raises(UsageError, match=message) as error:
        load_engine("demo", MemoryStore(10), **{option: value})
    assert "secret" not in str(error.value)


class OwnStore(KVStore):
    """The least that a store of somebody else's has: a dictionary."""

    def __init__(self) -> None:
        self._entries: dict[str, MemoryKV] = {}
        self._counters = StoreCounters()

    @property
    def counters(self) -> StoreCounters:
        return self._counters

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> ChunkKV | None:
        return self._entries.get(key)

    def put(self, kv: ChunkKV) -> None:
        self._entries[kv.header.key] = load_into_memory(kv)

    def contains(self, key: str) -> bool:
        return key in self._entries

    def delete(self, key: str) -> bool:
        return self._entries.pop(key, None) is not None

    def keys(self) -> Iterator[str]:
        return iter(list(self._entries))

    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in self._entries.values())


@pytest.mark.parametrize("place", ["alone", "below memory"])
def test_a_store_of_ones_own_needs_the_abstract_methods_only(place, tiny_engine):
    own = OwnStore()
    store = own if place == "alone" else TieredStore(MemoryStore(1 << 28), own)
    engine, chunks = (
        tiny_engine("llama", store),
        ["the first chunk of the theory", "another chunk: that is the question"],
    )
    for chunk in chunks:
        engine.precompute(chunk)
    assert {header.key for header in store.headers()} == set(own.keys())
    engine.prefetch(chunks)
    assert store.flush(10)
    prompt = Prompt(chunks, "what is that?")
    answer = engine.generate(prompt, recompute_ratio=1.0, max_tokens=8)
    assert answer.token_ids == engine.generate(prompt, mode="full", max_tokens=8).token_ids
    assert answer.report.num_chunk_hits == len(chunks) == len(store.contains_many(list(own.keys())))
    for key in list(own.keys()):
        assert store.delete(key)
    assert engine.generate(prompt, max_tokens=8).report.num_chunk_hits == 0
    assert store.close()


def test_answers_from_a_remote_tier_are_those_of_the_full_prefill(tiny_engine, tmp_path):
    """One machine ingests, another that has only the remote tier answers at ratio 1.0."""
    values = DictValues()
    first = tiny_engine(store=TieredStore(MemoryStore(1 << 26), RemoteStore(values)))
    chunks = ["the first chunk of the theory", "another chunk: that is the question"]
    list(first.precompute_all(chunks))
    first.close()
    assert len(values.data) == 2
    second = tiny_engine(store=Tiers(tmp_path / "kv", 1 << 26, values).store)
    prompt = Prompt(chunks, "what is that?")
    request = second.request(prompt, recompute_ratio=1.0)
    full = second.prefill(second.request(prompt, mode="full"))
    values.calls.clear()
    blend = second.prefill(request)
    torch.testing.assert_close(blend.logits, full.logits, atol=1e-4, rtol=0)
    assert sum(chunk.hit for chunk in blend.report.chunks) == 2
    assert values.calls.count("get") == 2
    values.is_down = True
    again = second.prefill(request)
    torch.testing.assert_close(again.logits, full.logits, atol=1e-4, rtol=0)
    second.close()


def test_waiting_requests_that_share_chunks_read_each_chunk_once(tiny_engine, tmp_path):
    chunks = ["the first chunk of the theory", "another chunk: that is the question", "a third chunk is here"]
    list(tiny_engine(store=DiskStore(tmp_path / "kv", fsync=False)).precompute_all(chunks))
    disk, hits = DiskStore(tmp_path / "kv", fsync=False), list[int]()
    engine = tiny_engine(store=TieredStore(MemoryStore(1 << 26), disk))

    def ask(number: int) -> None:
        order = chunks[number % 3 :] + chunks[: number % 3]
        hits.append(engine.generate(Prompt(order, "what is that?"), max_tokens=2).report.num_chunk_hits)

    run_threads(6, ask)
    assert hits == [3] * 6
    assert disk.counters.num_hits == 3
    engine.close()


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("2K", 2048),
        ("2kB", 2000),
        ("0.5MB", 500_000),
        ("1TiB", 2**40),
        ("17", 17),
        (17, 17),
        ("17 B", 17),
        ("0", 0),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "1,5GB", "8GiB/s", "nan"])
def test_what_is_not_a_size_is_named(text):
    with pytest.raises(UsageError, match=r"is not a size.*8GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**59))
def test_a_formatted_size_reads_back_within_its_precision(nbytes):
    text = format_bytes(nbytes)
    assert abs(parse_bytes(text) - nbytes) <= 0.051 * max(nbytes, 1)
    assert not text.startswith("1024")
