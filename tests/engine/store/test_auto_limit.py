"""The limit of a store of which nobody set one: it holds as much as it leaves free. On real, small file systems."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_support import make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.eviction import auto_limit
from ragblend.engine.store.kv import MemoryKV
from ragblend.engine.store.open import open_store
from ragblend.engine.store.tiered import disk_tier
from ragblend.errors import StoreFullError

MIB = 1 << 20


def kv_of(seed: int, tokens: int = 512) -> MemoryKV:
    return make_kv(seed, tokens=tokens)


def free(path: Path) -> int:
    return shutil.disk_usage(path).free


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(target)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def fill(small: Path) -> Callable[[int], Path]:
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


def test_a_store_grows_until_it_holds_as_much_as_it_leaves_free(small: Path) -> None:
    store, size = auto(small), kv_of(0).nbytes + 2 * 4096
    put_until(store, lambda: store.counters.num_evicted >= 20)
    assert free(small) - 2 * size < store.nbytes() <= free(small) + size
    assert store.limit_bytes() == pytest.approx(store.nbytes(), abs=2 * size)


def test_what_it_holds_counts_as_its_own_space_when_it_is_opened_again(small: Path) -> None:
    store = auto(small)
    put_until(store, lambda: store.counters.num_evicted > 0)
    limit, held = store.limit_bytes(), set(store.keys())
    again = auto(small)
    assert again.limit_bytes() == limit
    for seed in range(1000, 1010):
        again.put(kv_of(seed))
    assert len(held & set(again.keys())) >= len(held) - 10


def test_a_store_that_is_larger_than_its_limit_would_be_loses_only_the_room_of_what_comes(small: Path) -> None:
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
        store._room._looked_s = -10.0  # as after a second: it is looked before each eviction
    assert store.nbytes() <= before.nbytes() <= 6 * MIB + kv_of(0).nbytes + 4096


def test_others_who_fill_the_disk_end_its_growth_and_take_nothing_of_it(
    small: Path, fill: Callable[[int], Path]
) -> None:
    store = auto(small)
    number = put_until(store, lambda: store.nbytes() >= 2 * MIB)
    held = len(list(store.keys()))
    theirs = fill(64 * 1024)  # less than one entry
    for count in range(1, 21):
        store.put(kv_of(number + count))
        store._room._looked_s = -10.0
        assert held - 1 <= len(list(store.keys())) <= held
        assert count <= store.counters.num_evicted + 1 <= count + 2
    evicted = store.counters.num_evicted
    theirs.unlink()
    put_until(store, lambda: store.nbytes() >= 3 * MIB, number + 100)  # and it grows again
    assert store.counters.num_evicted == evicted


def test_two_stores_on_one_disk_leave_each_other_room(small: Path) -> None:
    one, two = (DiskStore(small / name, fsync=False, capacity_bytes="auto") for name in "ab")
    put_until(one, lambda: one.counters.num_evicted > 0)
    put_until(two, lambda: two.counters.num_evicted > 0)
    assert two.nbytes() >= MIB
    assert free(small) >= MIB


def test_a_number_wins_and_zero_is_no_limit(small: Path) -> None:
    chosen = open_store(small / "kv", memory_gib=0, disk_gib=1 / 1024, fsync=False)
    disk = disk_tier(chosen)
    assert disk is not None
    put_until(disk, lambda: disk.counters.num_evicted > 0)
    assert disk.limit_bytes() == MIB >= disk.nbytes()
    unlimited = disk_tier(open_store(small / "kv", memory_gib=0, disk_gib=0, fsync=False))
    assert unlimited is not None
    with pytest.raises(StoreFullError, match="no space is left"):
        put_until(unlimited, lambda: False, 1000)
    assert (unlimited.limit_bytes(), unlimited.counters.num_evicted) == (None, 0)
    default = disk_tier(open_store(small / "kv"))
    assert default is not None
    assert default.capacity_bytes == "auto"


def test_an_entry_larger_than_the_limit_is_refused_with_the_way_out(small: Path, fill: Callable[[int], Path]) -> None:
    fill(kv_of(0).nbytes)
    with pytest.raises(StoreFullError, match=r"as much as it leaves free.*raise disk_gib"):
        auto(small).put(kv_of(0))


def test_a_file_system_that_tells_no_size_sets_no_limit(tmp_path: Path) -> None:
    assert shutil.disk_usage("/proc").total == 0, "another example is needed"
    assert auto_limit(Path("/proc"), 5) == math.inf == auto_limit(tmp_path / "nowhere", 5)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 1500)),  # tokens
        st.tuples(st.just("fill"), st.integers(0, 8 * MIB)),  # bytes that others leave free
        st.tuples(st.just("delete"), st.integers(0, 99)),
        st.tuples(st.just("open"), st.just(0)),
    ),
    max_size=60,
)


def test_a_put_takes_no_more_than_its_own_room_and_grows_only_into_the_free_half(
    small: Path, fill: Callable[[int], Path]
) -> None:
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


def test_a_root_that_is_removed_under_a_store_is_made_again(tmp_path: Path) -> None:
    store, kv = DiskStore(tmp_path / "kv", fsync=False, capacity_bytes="auto"), make_kv(1)
    store.put(kv)
    shutil.rmtree(tmp_path / "kv")
    store.put(kv)
    assert store.get(kv.header.key) is not None
