"""What leaves first: by last use, or by what its bytes save; namespaces pay for themselves; pinned entries stay."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_support import assert_same, make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.eviction import Candidate, Policy, Ranking, choose_victims, recompute_cost
from ragblend.engine.store.kv import MemoryKV
from ragblend.engine.store.memory import MemoryStore
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

    def candidates(namespace: str | None) -> list[Candidate]:
        return [entry for entry in entries if namespace in (None, entry.namespace)]

    assert choose_victims(candidates, {"0"}, 15, {}) == ["1", "2"]
    assert choose_victims(candidates, {"1"}, 25, {"b": 5}) == ["3", "0", "2"]
    assert choose_victims(candidates, {"1", "3", "5"}, 0, {"b": 5}) == []
    assert choose_victims(candidates, set(), 0, {"a": -5}) == []


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


@pytest.mark.parametrize(("policy", "again", "gone"), [("lru", False, 1), ("lru", True, 0), ("gdsf", False, 1)])
def test_disk_evicts_the_least_recently_used_or_the_least_useful(
    tmp_path: Path, policy: Policy, again: bool, gone: int
) -> None:
    """`again`: by another process, which knows uses from the times on disk, noted to the minute."""
    kvs = [make_kv(seed) for seed in range(5)]
    room = 4 * file_bytes(kvs[0], tmp_path) + 100
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room, policy=policy)
    for seed, kv in enumerate(kvs[:4]):
        store.put(kv)
        os.utime(store.root / kv.header.key[:2] / f"{kv.header.key}.safetensors", (0, 1_000_000 + seed))
    for _ in range(3):
        store.touch(kvs[0].header.key)  # asked for most often, but not noted on disk: a memory tier answered
        os.utime(store.root / kvs[0].header.key[:2] / f"{kvs[0].header.key}.safetensors", (0, 1_000_000))
    if again:
        store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room, policy=policy)
    store.put(kvs[4])
    assert [store.contains(kv.header.key) for kv in kvs] == [number != gone for number in range(5)]


def test_what_another_process_uses_is_not_evicted_by_one_that_did_not_see_it(tmp_path: Path) -> None:
    kvs = [make_kv(seed) for seed in range(5)]
    room = 4 * file_bytes(kvs[0], tmp_path) + 100
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    for kv in kvs[:4]:
        store.put(kv)
    first = store.root / kvs[0].header.key[:2] / f"{kvs[0].header.key}.safetensors"
    os.utime(first, (0, time.time() + 5))  # as the other's `get` leaves it
    store.put(kvs[4])
    assert [store.contains(kv.header.key) for kv in kvs] == [True, False, True, True, True]


# --- what a put looks at ---


class Looks:
    """Headers read, folders listed and files opened, counted from when it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.headers: list[str] = []
        header = DiskStore.header
        monkeypatch.setattr(DiskStore, "header", lambda store, key: (self.headers.append(key), header(store, key))[1])
        self.listed: list[str] = []
        self.opened: list[str] = []
        self.is_on = True
        sys.addaudithook(self.note)  # for good: Python takes none away

    def note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in ("os.scandir", "os.listdir"):
            self.listed.append(str(arguments[0]))
        elif self.is_on and event == "open":
            self.opened.append(str(arguments[0]))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    counted = Looks(monkeypatch)
    yield counted
    counted.is_on = False


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_put_under_quotas_looks_at_no_other_entry(tmp_path: Path, policy: Policy, looks: Looks) -> None:
    """The k-th put costs what the first one costs: of 200, only a sixteenth of a quota's bytes later is it looked."""
    size = file_bytes(make_kv(namespace="0"), tmp_path) + 64
    store = DiskStore(tmp_path / "kv", fsync=False, policy=policy, quotas=10_000 * size)
    store.put(make_kv(0, namespace="0"))
    looks.listed.clear()
    looks.opened.clear()
    for seed in range(1, 200):
        store.put(make_kv(seed, namespace=str(seed % 5)))
    assert (looks.headers, looks.listed) == ([], [])
    assert len(looks.opened) == 2 * 199  # each its own file, and a line in entries.jsonl


def test_a_put_that_evicts_reads_no_other_entry(tmp_path: Path, looks: Looks) -> None:
    size = file_bytes(make_kv(namespace="0"), tmp_path) + 64
    store = DiskStore(tmp_path / "kv", fsync=False, quotas={"0": 20 * size, "1": 20 * size}, capacity_bytes=35 * size)
    for seed in range(200):
        store.put(make_kv(seed, namespace=str(seed % 2)))
    assert store.counters.num_evicted == 200 - len(list(store.keys())) >= 160
    assert looks.headers == []


def test_the_next_process_reads_headers_once_in_a_stores_life(tmp_path: Path, looks: Looks) -> None:
    """A store that was filled without quotas; then quotas are set."""
    kvs = [make_kv(seed, namespace="ab"[seed % 2]) for seed in range(40)]
    plain = DiskStore(tmp_path / "kv", fsync=False)
    for kv in kvs:
        plain.put(kv)
    quota = sum(kv.nbytes for kv in kvs)
    for seed, num_read in ((100, 40), (101, 0), (102, 0)):
        DiskStore(tmp_path / "kv", fsync=False, quotas=quota).put(make_kv(seed, namespace="a"))
        assert len(looks.headers) == num_read
        looks.headers.clear()
    facts = tmp_path / "kv" / "entries.jsonl"
    lines = facts.read_bytes().splitlines(keepends=True)
    assert len(lines) == 43
    facts.write_bytes(b"".join([b'["torn', b"\xff\n", b"[1]\n", *lines[:-1]]))
    DiskStore(tmp_path / "kv", fsync=False, quotas=quota).put(make_kv(103, namespace="a"))
    assert len(looks.headers) == 1, "the one whose line was lost"


def test_the_list_of_namespaces_does_not_grow_for_ever(tmp_path: Path) -> None:
    size = file_bytes(make_kv(namespace="0"), tmp_path) + 64
    for start in range(0, 1500, 300):
        store = DiskStore(tmp_path / "kv", fsync=False, quotas=5 * size)
        for seed in range(start, start + 300):
            store.put(make_kv(seed, namespace="0"))
    assert len((tmp_path / "kv" / "entries.jsonl").read_bytes().splitlines()) < 1400
    assert len(list(store.keys())) == 5


def test_two_processes_keep_a_quota_up_to_a_sixteenth(tmp_path: Path) -> None:
    size = file_bytes(make_kv(namespace="mine"), tmp_path) + 64
    one, two = (DiskStore(tmp_path / "kv", fsync=False, quotas={"mine": 32 * size}) for _ in range(2))
    for seed in range(0, 200, 2):
        one.put(make_kv(seed, namespace="mine"))
        two.put(make_kv(seed + 1, namespace="mine"))
        assert len(list(one.keys())) <= 32 + 2 + 2
    assert len(list(one.keys())) >= 24


def test_a_store_that_others_change_is_followed(tmp_path: Path) -> None:
    """Entries deleted and added by others, and a `gc`, while this one goes on writing under its budget."""
    rng, size = random.Random(0), file_bytes(make_kv(), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=20 * size + 100)
    other = DiskStore(tmp_path / "kv", fsync=False)
    for seed in range(120):
        store.put(make_kv(seed))
        if seed % 10 == 5:
            for key in rng.sample(sorted(other.keys()), 4):
                other.delete(key)
        if seed % 40 == 20:
            other.gc(max_bytes=10 * size)
        assert store.nbytes() <= 20 * size + 100
    store.gc(max_bytes=0)
    for seed in range(20):
        store.put(make_kv(seed))
    assert len(list(store.keys())) == 20


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
