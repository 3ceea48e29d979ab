"""Tiers: the byte budget holds, the least recently used goes first, and entries move up without losing a bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chunk_file import flip, note_reads, run_threads
from tier_support import assert_same, make_kv

from ragblend.engine.store.disk import DiskKV, DiskStore
from ragblend.engine.store.kv import ChunkKV, KVHeader, LayerKV, MemoryKV
from ragblend.engine.store.tiered import MemoryStore, TieredStore, disk_tier, format_bytes, parse_bytes
from ragblend.errors import DamagedEntryError, StoreFullError, UsageError


def read_all(kv: ChunkKV | None) -> None:
    assert kv is not None
    for index in range(kv.header.num_layers):
        kv.layer(index)


def damage_last_byte(store: DiskStore, key: str) -> None:
    flip(store.root / key[:2] / f"{key}.safetensors", -1)


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", fsync=False)


# --- memory ---


@settings(deadline=None)
@given(
    capacity=st.integers(0, 6),
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "contains"]), st.integers(0, 5)), max_size=40),
)
def test_memory_behaves_like_a_list_ordered_by_use(capacity: int, steps: list[tuple[str, int]]) -> None:
    kvs = [make_kv(seed, tokens=1 + seed % 3) for seed in range(6)]
    unit = make_kv(tokens=1).nbytes
    store, num_evicted = MemoryStore(capacity * unit), 0
    model: list[int] = []  # least recently used first
    for step, number in steps:
        kv = kvs[number]
        held = number in model
        if step == "put" and kv.nbytes > store.capacity_bytes:
            with pytest.raises(StoreFullError, match="memory tier holds"):
                store.put(kv)
        elif step == "put":
            store.put(kv)
            model = [*(other for other in model if other != number), number]
            while sum(kvs[other].nbytes for other in model) > store.capacity_bytes:
                model.pop(0)
                num_evicted += 1
        elif step == "get":
            assert (store.get(kv.header.key) is not None) == held
            if held:
                model.remove(number)
                model.append(number)
        elif step == "delete":
            assert store.delete(kv.header.key) == held
            model = [other for other in model if other != number]
        else:
            assert store.contains(kv.header.key) == held
        assert list(store.keys()) == [kvs[other].header.key for other in model]
        assert store.nbytes() == sum(kvs[other].nbytes for other in model) <= store.capacity_bytes
    assert store.counters.num_evicted == num_evicted


def test_memory_returns_what_was_put_and_refuses_other_token_ids(caplog: pytest.LogCaptureFixture) -> None:
    store, kv = MemoryStore(10_000), make_kv()
    store.put(kv)
    assert store.get("f" * 32) is None
    assert store.get(kv.header.key, [9, 9, 9, 9]) is None
    assert "token ids differ" in caplog.text
    assert_same(store.get(kv.header.key, list(kv.header.token_ids)), kv)
    counters = store.counters
    assert (counters.num_hits, counters.num_misses, counters.num_puts, counters.num_damaged) == (1, 2, 1, 1)


def test_memory_does_not_keep_what_a_slice_was_cut_from() -> None:
    whole = torch.randn(2, 1000, 4)
    cut = LayerKV(whole[:, :3], whole[:, 3:6])
    store = MemoryStore(10_000)
    store.put(MemoryKV(KVHeader("a" * 32, "m", (), (1, 2, 3), 1, "float32"), (cut,)))
    found = store.get("a" * 32)
    assert found is not None
    assert [tensor.untyped_storage().nbytes() for tensor in found.layer(0)] == [96, 96]
    expected = cut.keys.clone()
    whole.zero_()  # the cache the chunk was cut from goes on living
    assert torch.equal(found.layer(0).keys, expected)


@pytest.mark.parametrize("under_inference", [False, True])
@pytest.mark.parametrize("from_disk", [False, True])
def test_a_written_into_entry_is_dropped_never_answered(
    disk: DiskStore, caplog: pytest.LogCaptureFixture, under_inference: bool, from_disk: bool
) -> None:
    memory = MemoryStore(10_000)
    with torch.inference_mode(under_inference):
        kv: ChunkKV = make_kv()
        disk.put(kv)
        if from_disk:
            kv = disk.get(kv.header.key) or pytest.fail("a miss")
        memory.put(kv)
        found = memory.get(kv.header.key)
        assert found is not None
        found.layer(1).keys[0, 2:].mul_(2)  # what a rotation in place would do
    assert memory.get(kv.header.key) is None
    assert "read-only" in caplog.text
    assert (memory.counters.num_damaged, memory.nbytes()) == (1, 0)


def test_memory_is_safe_to_share_between_threads() -> None:
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


def test_put_writes_through_to_every_tier(disk: DiskStore) -> None:
    memory, kv = MemoryStore(10_000), make_kv()
    tiers = TieredStore(memory, disk)
    tiers.put(kv)
    assert_same(memory.get(kv.header.key), kv)
    assert_same(disk.get(kv.header.key), kv)
    disk.put(below := make_kv(2))
    assert sorted(tiers.keys()) == sorted([kv.header.key, below.header.key]), "each once"
    assert tiers.nbytes() == memory.nbytes() + disk.nbytes()
    assert tiers.counters.num_puts == 1


def test_a_chunk_too_large_for_memory_is_stored_below_and_stays_there(disk: DiskStore) -> None:
    memory, kv = MemoryStore(10), make_kv()
    tiers = TieredStore(memory, disk)
    tiers.put(kv)
    found = tiers.get(kv.header.key)
    assert isinstance(found, DiskKV), "nothing gathers layers that would not fit"
    assert_same(found, kv)
    assert list(memory.keys()) == []


def test_an_entry_moves_up_once_all_its_layers_were_read(disk: DiskStore) -> None:
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


def test_streaming_through_tiers_reads_one_layer_at_a_time(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(num_layers=4)
    disk.put(kv)
    found = TieredStore(MemoryStore(10_000), disk).get(kv.header.key)
    assert found is not None
    reads = note_reads(monkeypatch)
    found.layer(3)
    assert [count for _, count in reads] == [kv.layer(3).nbytes]


def test_an_entry_written_into_while_it_was_streamed_does_not_move_up(disk: DiskStore) -> None:
    memory, kv = MemoryStore(10_000), make_kv()
    disk.put(kv)
    found = TieredStore(memory, disk).get(kv.header.key)
    assert found is not None
    found.layer(0).keys.zero_()
    found.layer(1)
    assert not memory.contains(kv.header.key)


def test_an_entry_deleted_while_it_is_read_does_not_come_back(disk: DiskStore) -> None:
    memory, kv = MemoryStore(10_000), make_kv()
    tiers = TieredStore(memory, disk)
    disk.put(kv)
    found = tiers.get(kv.header.key)
    assert tiers.delete(kv.header.key)
    assert_same(found, kv)
    assert not tiers.contains(kv.header.key)
    assert not tiers.delete(kv.header.key)


def test_damage_below_is_an_error_then_a_miss_and_never_moves_up(disk: DiskStore) -> None:
    memory, kv = MemoryStore(10_000), make_kv()
    tiers = TieredStore(memory, disk)
    disk.put(kv)
    damage_last_byte(disk, kv.header.key)
    found = tiers.get(kv.header.key)
    assert found is not None
    found.layer(0)
    with pytest.raises(DamagedEntryError):
        found.layer(1)
    assert not memory.contains(kv.header.key)
    assert tiers.get(kv.header.key) is None
    assert (tiers.counters.num_hits, tiers.counters.num_misses, tiers.counters.num_damaged) == (1, 1, 1)


def test_a_damaged_tier_is_healed_from_the_one_below(disk: DiskStore, tmp_path: Path) -> None:
    memory, archive, kv = MemoryStore(10_000), DiskStore(tmp_path / "archive", fsync=False), make_kv()
    archive.put(kv)
    disk.put(kv)
    damage_last_byte(disk, kv.header.key)
    tiers = TieredStore(memory, disk, archive)
    with pytest.raises(DamagedEntryError):
        read_all(tiers.get(kv.header.key))
    assert_same(tiers.get(kv.header.key), kv)
    assert tiers.flush(10)
    for tier in tiers.tiers:
        assert_same(tier.get(kv.header.key), kv)


def test_a_full_disk_is_reported_after_the_other_tiers_were_written(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, kv = MemoryStore(10_000), make_kv()

    def full(_: ChunkKV) -> None:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(disk, "put", full)
    with pytest.raises(StoreFullError, match="the disk is full"):
        TieredStore(memory, disk).put(kv)
    assert_same(memory.get(kv.header.key), kv)


def test_a_faster_tier_that_refuses_costs_no_answer(disk: DiskStore, tmp_path: Path) -> None:
    kv = make_kv()
    archive = DiskStore(tmp_path / "archive", fsync=False)
    archive.put(kv)
    disk.root.rmdir()
    disk.root.write_text("no longer a directory")
    found = TieredStore(disk, archive).get(kv.header.key)
    assert_same(found, kv)


def test_a_hit_in_memory_counts_as_a_use_on_disk(disk: DiskStore) -> None:
    memory, hot, cold = MemoryStore(10_000), make_kv(1), make_kv(2)
    tiers = TieredStore(memory, disk)
    for kv in (hot, cold):
        tiers.put(kv)
        os.utime(disk.root / kv.header.key[:2] / f"{kv.header.key}.safetensors", (0, 1000))
    assert isinstance(tiers.get(hot.header.key), MemoryKV)
    assert disk.gc(max_bytes=disk.nbytes() - 1).evicted == (cold.header.key,)


def test_no_tier_and_a_negative_capacity_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="at least one"):
        TieredStore()
    with pytest.raises(UsageError, match="capacity_bytes is -1"):
        MemoryStore(-1)


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
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 gigs", "1e9", "1,5GB", "8GiB/s", "nan"])
def test_what_is_not_a_size_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a size.*8GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**59))
def test_a_formatted_size_reads_back_within_its_precision(nbytes: int) -> None:
    text = format_bytes(nbytes)
    assert abs(parse_bytes(text) - nbytes) <= 0.051 * max(nbytes, 1)
    assert not text.startswith("1024")


def test_the_disk_tier_of_a_store_is_found_alone_and_under_others(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, fsync=False)
    assert disk_tier(disk) is disk_tier(TieredStore(MemoryStore(1), disk)) is disk
    assert disk_tier(MemoryStore(1)) is None
