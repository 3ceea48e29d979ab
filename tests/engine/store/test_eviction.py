"""What leaves the disk first, by last use; and the limit of a store of which nobody set one."""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import small_disk
from tier_support import assert_same, make_kv, path_of, run_threads

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.eviction import DiskEvictor, auto_limit
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.store.open import open_store
from ragblend.errors import StoreFullError


def file_bytes(kv: MemoryKV, tmp_path: Path) -> int:
    store = DiskStore(tmp_path / "measure", fsync=False)
    store.put(kv)
    return store.nbytes()


# --- disk ---


def test_the_disk_budget_holds_after_every_put(tmp_path):
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


def test_damaged_files_leave_before_any_entry_does(tmp_path):
    kvs = [make_kv(seed) for seed in range(4)]
    size = file_bytes(kvs[0], tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=3 * size + size // 2)
    for kv in kvs[:3]:
        store.put(kv)
    path = path_of(store.root, kvs[0].header.key)
    path.rename(path.with_suffix(".damaged"))
    store.put(kvs[3])
    assert [store.contains(kv.header.key) for kv in kvs] == [False, True, True, True]
    assert store.nbytes() <= 3 * size + size // 2


def test_damaged_files_that_cannot_be_deleted_count_against_the_budget(tmp_path):
    kv = make_kv()
    path = path_of(tmp_path / "kv", kv.header.key).with_suffix(".damaged")
    (path / "file").mkdir(parents=True)  # a folder is not deleted
    room = file_bytes(kv, tmp_path) + path.stat().st_size - 1
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    with pytest.raises(StoreFullError, match=r"delete its \*.damaged files, or raise disk_gib"):
        store.put(kv)
    assert list(store.keys()) == []


@pytest.mark.parametrize("again", [False, True])
def test_disk_evicts_the_least_recently_used(tmp_path, again):
    """`again`: by another process. Both know from the times on disk what a memory tier answered."""
    kvs = [make_kv(seed) for seed in range(5)]
    room = 4 * file_bytes(kvs[0], tmp_path) + 100
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    for seed, kv in enumerate(kvs[:4]):
        store.put(kv)
        os.utime(path_of(store.root, kv.header.key), (0, 1_000_000 + seed))
    store.touch(kvs[0].header.key)
    if again:
        store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    store.put(kvs[4])
    assert [store.contains(kv.header.key) for kv in kvs] == [True, False, True, True, True]


def test_entries_that_another_process_uses_are_not_evicted(tmp_path):
    kvs = [make_kv(seed) for seed in range(5)]
    room = 4 * file_bytes(kvs[0], tmp_path) + 100
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=room)
    for kv in kvs[:4]:
        store.put(kv)
    first = path_of(store.root, kvs[0].header.key)
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
def looks(monkeypatch):
    counted = Looks(monkeypatch)
    yield counted
    counted.is_on = False


def test_a_put_under_a_budget_looks_at_no_other_entry(tmp_path, looks):
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
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=35 * size)
    for seed in range(200, 400):  # most of these push others out, and read none of them
        store.put(make_kv(seed, namespace=str(seed % 5)))
    assert store.counters.num_evicted == 400 - len(list(store.keys())) >= 360
    assert looks.headers == []


def test_an_entry_that_fits_is_written_without_listing_the_disk(tmp_path, looks, monkeypatch):
    """Of a disk that is less than half full, "auto" leaves as much free as it holds."""
    disk = SimpleNamespace(total=100 * MIB, free=80 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    for capacity, used in (("auto", 49 * MIB), (60 * MIB, 59 * MIB)):
        root = tmp_path / str(capacity)
        DiskStore(root, fsync=False).put(make_kv(0))
        store = DiskStore(root, fsync=False, capacity_bytes=capacity)
        disk.free = disk.total - used
        looks.listed.clear()
        store.put(make_kv(1))
        assert looks.listed == []
        disk.free -= MIB
        store.put(make_kv(2))
        assert str(root / "kv") in looks.listed
        looks.listed.clear()
        nbytes = store.nbytes(max_age_s=60.0)
        assert looks.listed == []
        assert nbytes == store.nbytes() == sum(entry.nbytes for entry in store.entries())


def test_two_processes_keep_a_budget_up_to_a_sixteenth(tmp_path):
    size = file_bytes(make_kv(namespace="mine"), tmp_path) + 64
    one, two = (DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=32 * size) for _ in range(2))
    for seed in range(0, 200, 2):
        one.put(make_kv(seed, namespace="mine"))
        two.put(make_kv(seed + 1, namespace="mine"))
        assert len(list(one.keys())) <= 32 + 2 + 2
    assert len(list(one.keys())) >= 24


def test_a_store_that_others_change_is_followed(tmp_path):
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


def test_a_clock_that_went_back_costs_no_entry_and_no_answer(tmp_path, counted):
    """Entries stamped a day ahead neither stay for ever nor push out what is written now."""
    kvs = [make_kv(seed) for seed in range(8)]
    size = file_bytes(kvs[0], tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=4 * size + size // 2)
    for kv in kvs[:4]:
        store.put(kv)
        os.utime(path_of(store.root, kv.header.key), (0, time.time() + 86_400))
    for kv in kvs[:4]:
        assert_same(store.get(kv.header.key), kv)
    for kv in kvs[4:]:
        store.put(kv)
        time.sleep(0.01)
    assert all(entry.last_used_s < time.time() + 60 for entry in store.entries())
    assert [store.contains(kv.header.key) for kv in kvs[5:]] == [True] * 3
    counted("a clock that went back a day: 4 entries stamped ahead, no answer lost, the budget kept")


def test_a_reader_keeps_what_is_evicted_under_it(tmp_path, counted):
    """50 times: an entry is opened, pushed out by others, and read to its end."""
    size = file_bytes(make_kv(num_layers=3), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=2 * size + size // 2)
    for seed in range(50):
        store.put(kv := make_kv(seed, num_layers=3))
        held = store.get(kv.header.key)
        held.layer(0)
        for other in (1000 + seed, 2000 + seed, 3000 + seed):
            store.put(make_kv(other, num_layers=3))
        assert not store.contains(kv.header.key)
        assert_same(held, kv)
    counted("50 entries pushed out while a reader held them: all read to their end")


def test_threads_that_write_at_once_stay_within_the_budget(tmp_path):
    size = file_bytes(make_kv(), tmp_path)
    store = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes=5 * size + size // 2)

    def work(number: int) -> None:
        for seed in range(100 * number, 100 * number + 10):
            store.put(kv := make_kv(seed))
            if (found := store.get(kv.header.key)) is not None:
                assert_same(found, kv)

    run_threads(4, work)
    assert store.nbytes() <= store.capacity_bytes


def test_two_writing_threads_never_reserve_the_same_space(tmp_path):
    evictor = DiskEvictor(tmp_path, 1000, evicted=lambda key: None, touched_s={})
    has_room = threading.Event()

    def write_second() -> None:
        with evictor.reserve("second", 600):
            has_room.set()

    second = threading.Thread(target=write_second)
    with evictor.reserve("first", 600):
        second.start()
        assert not has_room.wait(0.1)
    second.join(30)
    assert has_room.is_set()


# --- no limit set: a store holds as much as it leaves free. On real, small file systems ---


MIB = 1 << 20


def kv_of(seed: int, tokens: int = 512) -> MemoryKV:
    return make_kv(seed, tokens=tokens)


def free(path: Path) -> int:
    return shutil.disk_usage(path).free


@pytest.fixture
def small(tmp_path):
    """A file system of 8 MiB."""
    with small_disk(tmp_path / "small", "8m") as folder:
        yield folder


@pytest.fixture
def fill(small):
    """What others write: a file that leaves so many bytes free."""

    def write(free_bytes: int) -> Path:
        path = small / "theirs"
        with path.open("wb", buffering=0) as file:
            file.write(bytes(max(0, free(small) - free_bytes)))
        return path

    return write


def auto(root: Path) -> DiskStore:
    return DiskStore(root / "kv", fsync=False, capacity_bytes="auto")


def put_until(store: DiskStore, is_enough: Callable[[], bool], first: int = 0) -> int:
    """Put entries until that is so; the number of the next one."""
    for seed in range(first, first + 10_000):
        if is_enough():
            return seed
        store.put(kv_of(seed))
    raise AssertionError("it grows without end")


def test_a_store_grows_until_it_holds_as_much_as_it_leaves_free(small):
    store, size = auto(small), kv_of(0).nbytes + 2 * 4096
    put_until(store, lambda: store.counters.num_evicted >= 20)
    assert free(small) - 2 * size < store.nbytes() <= free(small) + size
    assert store.limit_bytes() == pytest.approx(store.nbytes(), abs=2 * size)


def test_a_store_above_a_lowered_limit_evicts_only_for_new_entries(small):
    """A store from before there was a limit: three quarters of the disk."""
    before = DiskStore(small / "kv", fsync=False)
    number = put_until(before, lambda: before.nbytes() >= 6 * MIB)
    keys = set(before.keys())
    store = auto(small)
    assert store.limit_bytes() == before.nbytes() > free(small)
    assert all(store.get(key) is not None for key in keys)
    assert set(store.keys()) == keys
    for count in range(1, 31):
        store.put(kv_of(number + count))
        assert store.counters.num_evicted <= count + 1  # headers differ by a few bytes
        assert len(list(store.keys())) >= len(keys) - 1
        store._evictor._looked_s = -10.0  # as after a second: it is looked before each eviction
    assert store.nbytes() <= before.nbytes() <= 6 * MIB + kv_of(0).nbytes + 4096


def test_other_programs_that_fill_the_disk_evict_no_entry(small, fill):
    store = auto(small)
    number = put_until(store, lambda: store.nbytes() >= 2 * MIB)
    held = len(list(store.keys()))
    theirs = fill(64 * 1024)  # less than one entry
    for count in range(1, 21):
        store.put(kv_of(number + count))
        store._evictor._looked_s = -10.0
        assert held - 1 <= len(list(store.keys())) <= held
        assert count <= store.counters.num_evicted + 1 <= count + 2
    evicted = store.counters.num_evicted
    theirs.unlink()
    put_until(store, lambda: store.nbytes() >= 3 * MIB, number + 100)  # and it grows again
    assert store.counters.num_evicted == evicted


def test_two_stores_on_one_disk_leave_each_other_room(small):
    one, two = (DiskStore(small / name, fsync=False, capacity_bytes="auto") for name in "ab")
    put_until(one, lambda: one.counters.num_evicted > 0)
    put_until(two, lambda: two.counters.num_evicted > 0)
    assert two.nbytes() >= MIB
    assert free(small) >= MIB


def test_a_number_wins_and_zero_is_no_limit(small):
    chosen = open_store(small / "kv", memory_gib=0, disk_gib=1 / 1024, fsync=False)
    disk = chosen.find_tier(DiskStore)
    assert disk is not None
    put_until(disk, lambda: disk.counters.num_evicted > 0)
    assert disk.limit_bytes() == MIB >= disk.nbytes()
    unlimited = open_store(small / "kv", memory_gib=0, disk_gib=0, fsync=False).find_tier(DiskStore)
    assert unlimited is not None
    with pytest.raises(StoreFullError, match="no space is left"):
        put_until(unlimited, lambda: False, 1000)
    assert (unlimited.limit_bytes(), unlimited.counters.num_evicted) == (None, 0)
    default = open_store(small / "kv").find_tier(DiskStore)
    assert default.capacity_bytes == "auto"


def test_an_entry_larger_than_the_limit_is_refused_with_the_way_out(small, fill):
    fill(kv_of(0).nbytes)
    with pytest.raises(StoreFullError, match=r"as much as it leaves free.*raise disk_gib"):
        auto(small).put(kv_of(0))


def test_a_file_system_that_tells_no_size_sets_no_limit(tmp_path):
    assert shutil.disk_usage("/proc").total == 0, "another example is needed"
    assert auto_limit(Path("/proc"), 5) == math.inf == auto_limit(tmp_path / "no" / "where", 5)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 1500)),  # tokens
        st.tuples(st.just("fill"), st.integers(0, 8 * MIB)),  # bytes that others leave free
        st.tuples(st.just("delete"), st.integers(0, 99)),
        st.tuples(st.just("open"), st.just(0)),
    ),
    max_size=60,
)


def test_a_put_evicts_its_own_size_and_grows_into_free_space(small, fill):
    @settings(deadline=None, max_examples=40)
    @given(steps=STEPS)
    def hold(steps: list[tuple[str, int]]) -> None:
        for path in small.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        store = auto(small)
        for number, (step, amount) in enumerate(steps):
            before, sizes = store.nbytes(), [stat.st_size for _, stat in store._stats(".safetensors")]
            if step == "fill":
                fill(amount)
            elif step == "open":
                store = auto(small)
            elif step == "delete":
                keys = sorted(store.keys())
                store.delete(keys[amount % len(keys)] if keys else "none")
            else:
                kv = kv_of(number, tokens=amount)
                try:
                    store.put(kv)
                except StoreFullError:
                    assert store.nbytes() == before
                    continue
                came = kv.nbytes + 8192
                assert store.nbytes() > before + kv.nbytes - came - max(sizes, default=0)
                assert store.nbytes() <= max(before, free(small)) + came

    hold()


def test_a_root_that_is_removed_under_a_store_is_made_again(tmp_path):
    store, kv = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes="auto"), make_kv(1)
    store.put(kv)
    shutil.rmtree(tmp_path / "kv")
    store.put(kv)
    assert store.get(kv.header.key) is not None
