"""What leaves first: by last use, or by what its bytes save; namespaces pay for themselves; pinned entries stay."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_support import assert_same, make_kv

from ragblend.engine.disk import DiskStore
from ragblend.engine.eviction import Candidate, Policy, Ranking, choose_victims, recompute_cost
from ragblend.engine.kv import MemoryKV
from ragblend.engine.memory import MemoryStore
from ragblend.errors import StoreFullError, UsageError

SIZE = make_kv().nbytes


def file_bytes(kv: MemoryKV, tmp_path: Path) -> int:
    store = DiskStore(tmp_path / "measure", fsync=False)
    store.put(kv)
    return store.nbytes()


# --- the order ---


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 10)), max_size=60), st.sampled_from(["lru", "gdsf"]))
def test_the_order_is_that_of_the_formula(uses: list[tuple[int, float]], policy: Policy) -> None:
    ranking, clock = Ranking(policy), 0.0
    priority: dict[str, tuple[float, int]] = {}
    count: dict[str, int] = {}
    for tick, (number, worth) in enumerate(uses):
        key = str(number)
        ranking.use(key, worth)
        count[key] = count.get(key, 0) + 1
        priority[key] = (clock + count[key] * worth if policy == "gdsf" else 0.0, tick)
        if tick % 7 == 6:
            first = next(iter(ranking))
            ranking.evicted(first)
            clock = max(clock, priority.pop(first)[0])
            del count[first]
        expected = sorted(priority, key=lambda key: priority[key])
        assert list(ranking) == expected
        assert list(ranking) == expected, "looking changes nothing"


def test_victims_are_the_namespaces_own_first_and_never_pinned() -> None:
    entries = [Candidate(str(number), 10, "ab"[number % 2]) for number in range(6)]
    assert choose_victims(lambda: entries, {"0"}, 15, {}) == ["1", "2"]
    assert choose_victims(lambda: entries, {"1"}, 25, {"b": 5}) == ["3", "0", "2"]
    assert choose_victims(lambda: entries, {"1", "3", "5"}, 0, {"b": 5}) == []
    assert choose_victims(lambda: entries, set(), 0, {"a": -5}) == []


def test_long_chunks_cost_more_per_byte() -> None:
    short, long = make_kv(tokens=100), make_kv(tokens=4000)
    assert recompute_cost(long.header) / long.nbytes > 1.1 * recompute_cost(short.header) / short.nbytes


def hits(policy: Policy, requests: list[MemoryKV], capacity_bytes: int) -> int:
    store, num_hits = MemoryStore(capacity_bytes, policy=policy), 0
    for kv in requests:
        if store.get(kv.header.key) is None:
            store.put(kv)
        else:
            num_hits += 1
    return num_hits


def test_gdsf_keeps_the_hot_ones_through_a_scan_where_lru_does_not() -> None:
    """20 hot chunks asked for 40 times, each round followed by a scan of 30 that come once; room for 40."""
    rng = random.Random(0)
    hot = [make_kv(seed) for seed in range(20)]
    requests: list[MemoryKV] = []
    for round_ in range(40):
        requests += rng.sample(hot, len(hot))
        requests += [make_kv(1000 + 30 * round_ + number) for number in range(30)]
    lru, gdsf = (hits(policy, requests, 40 * SIZE) for policy in ("lru", "gdsf"))
    assert gdsf > 2 * lru > 0, (gdsf, lru)  # 322 and 119 of 2,000 requests, 800 of them for hot chunks


# --- memory ---


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "pin", "unpin"]), st.integers(0, 7)), max_size=60),
    policy=st.sampled_from(["lru", "gdsf"]),
)
def test_memory_keeps_budget_quotas_and_pins(steps: list[tuple[str, int]], policy: Policy) -> None:
    kvs = [make_kv(seed, tokens=1 + seed % 3, namespace="ab"[seed % 2]) for seed in range(8)]
    unit = make_kv(tokens=1).nbytes
    store = MemoryStore(8 * unit, policy=policy, quotas={"b": 5 * unit})
    pinned: set[int] = set()
    held: set[str] = set()
    for step, number in steps:
        kv = kvs[number]
        if step == "put":
            try:
                store.put(kv)
            except StoreFullError as error:
                assert pinned, error  # noqa: PT017
        elif step == "get":
            store.get(kv.header.key)
        elif step == "pin":
            store.pin(str(number), [kv.header.key])
            pinned.add(number)
        else:
            assert store.unpin(str(number)) == (number in pinned)
            pinned.discard(number)
        now = set(store.keys())
        gone = held - now
        assert not gone & {kvs[other].header.key for other in pinned if other != number}
        held = now
        assert store.nbytes() <= 8 * unit
        assert (
            sum(other.nbytes for other in kvs if other.header.namespace == "b" and other.header.key in now) <= 5 * unit
        )


def test_one_namespace_never_evicts_anothers_by_its_quota() -> None:
    store = MemoryStore(100 * SIZE, quotas=2 * SIZE)
    theirs = [make_kv(seed, namespace="theirs") for seed in range(2)]
    for kv in theirs:
        store.put(kv)
    for seed in range(20):
        store.put(make_kv(seed, namespace="mine"))
    assert [store.contains(kv.header.key) for kv in theirs] == [True, True]
    assert store.nbytes() == 4 * SIZE
    with pytest.raises(StoreFullError):
        store.put(make_kv(tokens=100, namespace="mine"))


# --- disk ---


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_the_disk_budget_holds_after_every_put(tmp_path: Path, policy: Policy) -> None:
    """60 puts of mixed sizes into room for about 8."""
    room = 8 * file_bytes(make_kv(tokens=60), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room, policy=policy)
    for seed in range(60):
        store.put(kv := make_kv(seed, tokens=20 + 7 * (seed % 12)))
        assert store.nbytes() <= room
        assert_same(store.get(kv.header.key), kv)
    assert store.counters.num_evicted == 60 - len(list(store.keys())) > 40
    assert store.nbytes() > room // 2
    with pytest.raises(StoreFullError, match=r"disk budget.*raise disk_gib"):
        store.put(make_kv(tokens=5000))


def test_damaged_files_leave_before_any_entry_does(tmp_path: Path) -> None:
    kvs = [make_kv(seed) for seed in range(4)]
    size = file_bytes(kvs[0], tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=3 * size + size // 2)
    for kv in kvs[:3]:
        store.put(kv)
    path = store.root / kvs[0].header.key[:2] / f"{kvs[0].header.key}.safetensors"
    path.rename(path.with_suffix(".damaged"))
    store.put(kvs[3])
    assert [store.contains(kv.header.key) for kv in kvs] == [False, True, True, True]
    assert store.nbytes() <= 3 * size + size // 2


def test_disk_evicts_the_least_recently_used_or_the_least_useful(tmp_path: Path) -> None:
    kvs = [make_kv(seed) for seed in range(5)]
    size = file_bytes(kvs[0], tmp_path)
    for policy, gone in (("lru", 0), ("gdsf", 1)):
        store = DiskStore(tmp_path / policy, fsync=False, capacity_bytes=4 * size + size // 2, policy=policy)  # type: ignore[arg-type]
        for seed, kv in enumerate(kvs[:4]):
            store.put(kv)
            os.utime(store.root / kv.header.key[:2] / f"{kv.header.key}.safetensors", (0, 1_000_000 + seed))
        for _ in range(3):
            store.touch(kvs[0].header.key)  # asked for most often, but not noted on disk: a memory tier answered
            os.utime(store.root / kvs[0].header.key[:2] / f"{kvs[0].header.key}.safetensors", (0, 1_000_000))
        store.put(kvs[4])
        assert [store.contains(kv.header.key) for kv in kvs] == [number != gone for number in range(5)], policy


def test_disk_quotas_hold_and_spare_the_neighbours(tmp_path: Path) -> None:
    size = file_bytes(make_kv(namespace="mine"), tmp_path) + 16
    store = DiskStore(tmp_path / "kv", fsync=False, quotas={"mine": 3 * size})
    theirs = [make_kv(seed, namespace="theirs") for seed in range(5)]
    for kv in theirs:
        store.put(kv)
    for seed in range(10):
        store.put(make_kv(seed, namespace="mine"))
        namespaces = [entry.header.namespace for entry in DiskStore(store.root).entries()]
        assert namespaces.count("mine") == min(3, seed + 1)
        assert namespaces.count("theirs") == 5


def test_pins_survive_restarts_and_hold_against_budget_and_gc(tmp_path: Path) -> None:
    kvs = [make_kv(seed) for seed in range(12)]
    size = file_bytes(kvs[0], tmp_path)
    first = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=4 * size + size // 2)
    for kv in kvs[:2]:
        first.put(kv)
    first.pin("docs/contract.md", [kv.header.key for kv in kvs[:2]])
    again = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=4 * size + size // 2)
    assert again.pins() == {"docs/contract.md": tuple(sorted(kv.header.key for kv in kvs[:2]))}
    for kv in kvs[2:]:
        again.put(kv)
    for kv in kvs[:2]:
        assert_same(again.get(kv.header.key), kv)
    assert set(again.gc(max_bytes=0).evicted) == {kv.header.key for kv in kvs[-2:]}
    assert len(list(again.keys())) == 2
    assert first.unpin("docs/contract.md")
    assert not again.unpin("docs/contract.md")
    assert len(again.gc(max_bytes=0).evicted) == 2
    again.pin("everything", [kv.header.key for kv in kvs[:4]])
    for kv in kvs[:4]:
        again.put(kv)
    with pytest.raises(StoreFullError, match="ragblend unpin DOC"):
        again.put(kvs[5])
    assert len(list(again.keys())) == 4


def test_a_clock_that_went_back_costs_no_entry_and_no_answer(tmp_path: Path, counted: Callable[[str], None]) -> None:
    """Entries stamped a day ahead neither stay for ever nor push out what is written now."""
    kvs = [make_kv(seed) for seed in range(8)]
    size = file_bytes(kvs[0], tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=4 * size + size // 2)
    for kv in kvs[:4]:
        store.put(kv)
        os.utime(store.root / kv.header.key[:2] / f"{kv.header.key}.safetensors", (0, time.time() + 86_400))
    for kv in kvs[:4]:
        assert_same(store.get(kv.header.key), kv)
    for kv in kvs[4:]:
        store.put(kv)
        time.sleep(0.01)
    assert all(entry.last_used_s < time.time() + 60 for entry in store.entries())
    assert [store.contains(kv.header.key) for kv in kvs[5:]] == [True] * 3
    counted("a clock that went back a day: 4 entries stamped ahead, no answer lost, the budget kept")


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_reader_keeps_what_is_evicted_under_it(
    tmp_path: Path, policy: Policy, counted: Callable[[str], None]
) -> None:
    """50 times: an entry is opened, pushed out by others, and read to its end."""
    size = file_bytes(make_kv(num_layers=3), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=2 * size + size // 2, policy=policy)
    for seed in range(50):
        store.put(kv := make_kv(seed, num_layers=3))
        held = store.get(kv.header.key)
        assert held is not None
        held.layer(0)
        for other in (1000 + seed, 2000 + seed, 3000 + seed):
            store.put(make_kv(other, num_layers=3))
        if policy == "lru":
            assert not store.contains(kv.header.key)
        assert_same(held, kv)
    counted(f"50 entries pushed out while a reader held them ({policy}): all read to their end")


def test_threads_that_write_at_once_stay_within_the_budget(tmp_path: Path) -> None:
    size = file_bytes(make_kv(), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=5 * size + size // 2)
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for seed in range(first, first + 10):
                store.put(kv := make_kv(seed))
                if (found := store.get(kv.header.key)) is not None:
                    assert_same(found, kv)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert store.nbytes() <= store.capacity_bytes  # type: ignore[operator]


def test_bad_settings_are_named() -> None:
    with pytest.raises(UsageError, match="eviction is 'fifo'; choose one of lru, gdsf"):
        MemoryStore(10, policy="fifo")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="quota of namespace 'a' is -1"):
        MemoryStore(10, quotas={"a": -1})
