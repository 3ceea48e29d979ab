"""What leaves first: by last use; pinned entries stay."""

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
from ragblend.engine.store.kv import MemoryKV
from ragblend.engine.store.memory import MemoryStore
from ragblend.errors import StoreFullError

SIZE = make_kv().nbytes


def file_bytes(kv: MemoryKV, tmp_path: Path) -> int:
    store = DiskStore(tmp_path / "measure", fsync=False)
    store.put(kv)
    return store.nbytes()


# --- memory ---


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "pin", "unpin"]), st.integers(0, 7)), max_size=60),
)
def test_memory_keeps_budget_and_pins_and_drops_what_was_used_longest_ago(steps: list[tuple[str, int]]) -> None:
    kvs = [make_kv(seed, tokens=1 + seed % 3, namespace="ab"[seed % 2]) for seed in range(8)]
    unit = make_kv(tokens=1).nbytes
    store = MemoryStore(8 * unit)
    pinned: set[int] = set()
    held: list[str] = []  # least recently used first
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
        now = list(store.keys())
        kept = {kvs[other].header.key for other in pinned} | {kv.header.key}
        left = [key for key in held if key not in kept]
        gone = [key for key in left if key not in now]
        assert gone == left[: len(gone)]
        assert set(held) & kept - {kv.header.key} <= set(now)
        held = now
        assert store.nbytes() == sum(other.nbytes for other in kvs if other.header.key in now) <= 8 * unit


# --- disk ---


def test_the_disk_budget_holds_after_every_put(tmp_path: Path) -> None:
    """60 puts of mixed sizes into room for about 8."""
    room = 8 * file_bytes(make_kv(tokens=60), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
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


@pytest.mark.parametrize(("again", "gone"), [(False, 1), (True, 0)])
def test_disk_evicts_the_least_recently_used(tmp_path: Path, again: bool, gone: int) -> None:
    """`again`: by another process, which knows uses from the times on disk, noted to the minute."""
    kvs = [make_kv(seed) for seed in range(5)]
    room = 4 * file_bytes(kvs[0], tmp_path) + 100
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    for seed, kv in enumerate(kvs[:4]):
        store.put(kv)
        os.utime(store.root / kv.header.key[:2] / f"{kv.header.key}.safetensors", (0, 1_000_000 + seed))
    for _ in range(3):
        store.touch(kvs[0].header.key)  # asked for most often, but not noted on disk: a memory tier answered
        os.utime(store.root / kvs[0].header.key[:2] / f"{kvs[0].header.key}.safetensors", (0, 1_000_000))
    if again:
        store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
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


def test_a_put_under_a_budget_looks_at_no_other_entry(tmp_path: Path, looks: Looks) -> None:
    """The k-th put costs what the first one did: of 200, only a sixteenth of the budget's bytes later is it looked."""
    size = file_bytes(make_kv(namespace="0"), tmp_path) + 64
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=10_000 * size)
    store.put(make_kv(0, namespace="0"))
    looks.listed.clear()
    looks.opened.clear()
    for seed in range(1, 200):
        store.put(make_kv(seed, namespace=str(seed % 5)))
    assert (looks.headers, looks.listed) == ([], [])
    assert len(looks.opened) == 199  # each its own file


def test_a_put_that_evicts_reads_no_other_entry(tmp_path: Path, looks: Looks) -> None:
    size = file_bytes(make_kv(namespace="0"), tmp_path) + 64
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=35 * size)
    for seed in range(200):
        store.put(make_kv(seed, namespace=str(seed % 2)))
    assert store.counters.num_evicted == 200 - len(list(store.keys())) >= 160
    assert looks.headers == []


def test_two_processes_keep_a_budget_up_to_a_sixteenth(tmp_path: Path) -> None:
    size = file_bytes(make_kv(namespace="mine"), tmp_path) + 64
    one, two = (DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=32 * size) for _ in range(2))
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


def test_a_reader_keeps_what_is_evicted_under_it(tmp_path: Path, counted: Callable[[str], None]) -> None:
    """50 times: an entry is opened, pushed out by others, and read to its end."""
    size = file_bytes(make_kv(num_layers=3), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=2 * size + size // 2)
    for seed in range(50):
        store.put(kv := make_kv(seed, num_layers=3))
        held = store.get(kv.header.key)
        assert held is not None
        held.layer(0)
        for other in (1000 + seed, 2000 + seed, 3000 + seed):
            store.put(make_kv(other, num_layers=3))
        assert not store.contains(kv.header.key)
        assert_same(held, kv)
    counted("50 entries pushed out while a reader held them: all read to their end")


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
