"""The durable tier: what was put comes back bit for bit or not at all, whatever happens to files, disks and writers."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import small_disk
from safetensors.torch import save
from tier_support import as_bytes, assert_same, flip, make_random_kv, note_reads, path_of, run_threads

from ragblend.engine.store import disk
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format import chunk_file
from ragblend.engine.store.format.chunk_file import DiskKV
from ragblend.engine.store.format.kv import DTYPES, KVHeader, LayerKV, MemoryKV
from ragblend.errors import (
    DamagedEntryError,
    NotFoundError,
    StoreFullError,
    StoreNotWritableError,
    UsageError,
)
from ragblend.files.directory import _HOST

real_utime = os.utime


def answer(store: DiskStore, kv: MemoryKV) -> str:
    """What a reader of every layer meets: "miss", "damaged" or "answer"."""
    found = store.get(kv.header.key)
    if found is None:
        return "miss"
    try:
        for index in range(found.header.num_layers):
            found.layer(index)
    except DamagedEntryError:
        return "damaged"
    return "answer"


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path / "kv", fsync=False)


@pytest.fixture
def small(tmp_path):
    """A real file system of 300 KiB."""
    with small_disk(tmp_path / "small", "300k") as folder:
        yield folder


# --- round trips ---


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 40),
    dim=st.integers(1, 33),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_get_returns_bit_for_bit_what_put_took(store, seed, num_layers, heads, tokens, dim, dtype):
    kv = make_random_kv(seed, num_layers, heads, tokens, dim, dtype)
    store.put(kv)
    assert_same(store.get(kv.header.key, kv.header.token_ids), kv)


# --- damage ---


def test_damage_in_one_layer_leaves_the_others_readable(store, caplog):
    kv = make_random_kv(num_layers=3)
    store.put(kv)
    flip(path_of(store.root, kv.header.key), -kv.layer(2).nbytes - 1)  # the last byte of layer 1
    found = store.get(kv.header.key)
    assert found is not None
    with pytest.raises(DamagedEntryError, match="layer 1 does not match its checksum") as caught:
        found.layer(1)
    assert caught.value.key == kv.header.key
    assert as_bytes(found.layer(2).values) == as_bytes(kv.layer(2).values)
    assert store.counters.num_damaged == 1
    assert "ragblend verify --repair" in caplog.text
    assert store.get(kv.header.key) is None, "a damaged file is not met again"


def test_every_flipped_byte_is_noticed(store, caplog):
    caplog.set_level(logging.CRITICAL)
    kv = make_random_kv()
    store.put(kv)
    path = path_of(store.root, kv.header.key)
    good = path.read_bytes()
    for position in range(len(good)):
        for change in (1 << position % 8, 0x20, 0xFF):  # 0x20 turns hexadecimal letters into capitals
            damaged = bytearray(good)
            damaged[position] ^= change
            path.write_bytes(damaged)
            assert answer(store, kv) != "answer", (
                f"byte {position} of {len(good)} flipped by {change:#x} went unnoticed"
            )
    assert store.counters.num_damaged == 3 * len(good)
    path.write_bytes(good)
    assert answer(store, kv) == "answer"


def test_every_truncation_and_trailing_bytes_are_a_miss(store, caplog):
    caplog.set_level(logging.CRITICAL)
    kv = make_random_kv()
    store.put(kv)
    path = path_of(store.root, kv.header.key)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert store.get(kv.header.key) is None, f"cut to {length} of {len(good)} bytes and still a hit"
    for tail in (b"\0", b"garbage" * 1000):
        path.write_bytes(good + tail)
        assert store.get(kv.header.key) is None
    assert store.counters.num_damaged == len(good) + 2


def test_another_keys_file_under_this_name_is_a_miss(store, caplog):
    mine, other = make_random_kv(1), make_random_kv(2)
    store.put(mine)
    store.put(other)
    shutil.copy(path_of(store.root, other.header.key), path_of(store.root, mine.header.key))
    assert not store.contains(mine.header.key)
    assert store.get(mine.header.key) is None
    assert other.header.key in caplog.text
    assert store.counters.num_damaged == 1
    assert_same(store.get(other.header.key), other)


def test_other_token_ids_are_a_miss_and_the_entry_stays(store, caplog):
    kv = make_random_kv()
    store.put(kv)
    wrong = [*kv.header.token_ids[:-1], kv.header.token_ids[-1] + 1]
    assert store.get(kv.header.key, wrong) is None
    assert "token ids differ" in caplog.text
    assert (store.counters.num_misses, store.counters.num_damaged) == (1, 1)
    assert_same(store.get(kv.header.key, list(kv.header.token_ids)), kv)


@pytest.mark.parametrize(
    "content",
    [
        save({"weight": torch.zeros(3)}),
        save({"weight": torch.zeros(3)}, {"ragblend": "{}"}),
        b"not a safetensors file, but longer than any header could be" * 9,
        b"",
    ],
    ids=["safetensors", "metadata", "text", "empty"],
)
def test_a_foreign_file_is_a_miss(store, content):
    kv = make_random_kv()
    path = path_of(store.root, kv.header.key)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert not store.contains(kv.header.key)
    assert store.get(kv.header.key, kv.header.token_ids) is None
    assert store.counters.num_damaged == 1
    store.put(kv)
    assert_same(store.get(kv.header.key), kv)


@pytest.mark.parametrize("name", ["FORMAT_VERSION", "LAYOUT_VERSION"])
def test_another_version_is_a_miss_and_stays(store, monkeypatch, name):
    kv = make_random_kv()
    store.put(kv)
    monkeypatch.setattr(chunk_file, name, 2)  # the reader of tomorrow
    assert store.get(kv.header.key) is None
    assert not store.contains(kv.header.key)
    assert [result.ok for result in store.verify()] == [False]
    assert store.counters.num_damaged == 1
    monkeypatch.undo()
    assert_same(store.get(kv.header.key), kv)


def test_put_heals_a_damaged_entry(store):
    kv = make_random_kv()
    store.put(kv)
    flip(path_of(store.root, kv.header.key), 0, 0xFF)
    assert store.get(kv.header.key) is None
    assert [(result.key, result.ok) for result in store.verify()] == [(kv.header.key, False)]
    assert list(store.keys()) == []
    store.put(kv)
    assert [tuple(result) for result in store.verify()] == [(kv.header.key, True, "")]
    assert_same(store.get(kv.header.key), kv)


def test_quarantine_spares_a_file_that_another_writer_has_just_repaired(store):
    kv = make_random_kv()
    store.put(kv)
    flip(path_of(store.root, kv.header.key), -1)
    found = store.get(kv.header.key)
    assert found is not None
    store.put(kv)
    with pytest.raises(DamagedEntryError):
        found.layer(1)
    assert_same(store.get(kv.header.key), kv)


@pytest.mark.parametrize("key", ["", "a", "../../etc/passwd", "aa/bb", ".hidden", "a" * 200, "nul\0byte"])
def test_a_name_that_is_not_a_key_never_becomes_a_path(store, key):
    header = KVHeader(key, "m", (), (1,), 1, "float32")
    with pytest.raises(UsageError, match="cannot name a file"):
        store.put(MemoryKV(header, (LayerKV(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)),)))
    assert store.get(key) is None
    assert not store.contains(key)
    assert not store.delete(key)


# --- readers that hold an entry ---


def test_a_held_entry_survives_replacement_deletion_and_gc(store):
    kv = make_random_kv()
    other = MemoryKV(kv.header, tuple(LayerKV(k + 1, v + 1) for k, v in make_random_kv(9).layers))
    store.put(kv)
    held = store.get(kv.header.key)
    assert isinstance(held, DiskKV)
    store.put(other)
    assert_same(held, kv)
    assert_same(store.get(kv.header.key), other)
    assert store.delete(kv.header.key)
    assert not store.delete(kv.header.key)
    assert_same(held, kv)
    store.put(kv)
    collected = store.get(kv.header.key)
    assert store.gc(max_bytes=0).evicted == (kv.header.key,)
    assert_same(collected, kv)


def test_no_descriptor_left_is_a_miss_not_a_crash_and_is_counted(store, monkeypatch):
    kv = make_random_kv()
    store.put(kv)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert store.get(kv.header.key) is None
    assert_same(store.get(kv.header.key), kv)
    assert_same(store.get(kv.header.key), kv)
    counters = store.counters
    assert (counters.num_hits, counters.num_misses, counters.num_puts, counters.num_damaged) == (2, 1, 1, 0)


# --- writers ---


def test_threads_writing_and_reading_one_key_never_meet_half_an_entry(store):
    kv = make_random_kv(tokens=50)
    store.put(kv)

    def work(number: int) -> None:
        for _ in range(15):
            if number % 2:
                store.put(kv)
            else:
                assert_same(store.get(kv.header.key, kv.header.token_ids), kv)

    run_threads(6, work)
    assert store.counters.num_damaged == 0
    path = path_of(store.root, kv.header.key)
    assert list(path.parent.iterdir()) == [path]


KILL_WRITERS = """
import json, os, random, signal, sys, time
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
from test_disk import DiskStore, assert_same, make_random_kv
root, amount = sys.argv[3], int(sys.argv[4])
kvs = [make_random_kv(seed, num_layers=4, heads=4, tokens=200, dim=64) for seed in range(3)]
store, rng = DiskStore(root), random.Random(0)
num_kills = num_leftovers = num_visible = 0
# On a busy machine many are killed before they have begun: it goes on until some have met writers at work.
while num_kills < amount or not (num_leftovers and num_visible):
    num_kills += 1
    pid = os.fork()
    if pid == 0:
        while True:
            for kv in kvs:
                store.put(kv)
    time.sleep(rng.uniform(0.0, 0.04))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for kv in kvs:
        if store.contains(kv.header.key):
            assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
            num_visible += 1
    assert all(result.ok for result in store.verify())
    assert set(store.keys()) <= {kv.header.key for kv in kvs}
    num_leftovers += store.delete_temporary_files()
    assert not list(store.root.glob("*/.*")), "a dead writer's temp file was not cleaned"
    if rng.random() < 0.5:
        store.gc(max_bytes=0)
assert store.counters.num_damaged == 0
print(json.dumps({"num_kills": num_kills, "num_leftovers": num_leftovers, "num_visible": num_visible}))
"""


@pytest.mark.timeout(600)
def test_a_killed_writer_leaves_whole_entries_and_temp_files_that_are_cleaned(tmp_path, counted):
    num_kills = 100 if os.environ.get("RAGBLEND_FAULTS") == "full" else 8
    here = Path(__file__)
    command = [sys.executable, "-c", KILL_WRITERS, here.parent, here.parents[2], tmp_path, str(num_kills)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    found = f"{outcome['num_visible']} entries whole, {outcome['num_leftovers']} temp files cleaned"
    counted(f"{outcome['num_kills']} kill -9 of a writer: {found}")


def test_clean_spares_writers_that_may_be_alive(store):
    kv = make_random_kv()
    store.put(kv)
    directory = path_of(store.root, kv.header.key).parent
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = {
        "alive": f".{kv.header.key}.{_HOST}.{os.getpid()}.00000000.tmp",
        "dead": f".{kv.header.key}.{_HOST}.{dead.pid}.00000000.tmp",
        "elsewhere": f".{kv.header.key}.00000000.{dead.pid}.00000000.tmp",
        "old": f".{kv.header.key}.00000000.1.11111111.tmp",
        "odd": ".tmp",
    }
    for name in names.values():
        (directory / name).write_bytes(b"half an entry")
    os.utime(directory / names["old"], (0, time.time() - 4000))
    assert list(store.keys()) == [kv.header.key]
    assert store.delete_temporary_files() == 2
    assert {path.name for path in directory.glob(".*")} == {names[kind] for kind in ("alive", "elsewhere", "odd")}


# --- disks that refuse ---


def test_a_full_disk_is_an_error_that_keeps_every_earlier_entry(small, counted):
    store, taken = DiskStore(small), []

    def fill() -> None:
        for seed in range(100):
            store.put(kv := make_random_kv(seed, tokens=100))
            taken.append(kv)

    with pytest.raises(StoreFullError, match=rf"needs \d+ bytes, \d+ are free.*ragblend gc --store {store.root}"):
        fill()
    assert {path for path in small.rglob("*") if path.is_file()} == {path_of(store.root, kv.header.key) for kv in taken}
    assert taken
    for kv in taken:
        assert_same(store.get(kv.header.key), kv)
    store.gc(max_bytes=store.nbytes() // 2)
    store.put(make_random_kv(1000, tokens=100))
    counted(f"a disk that fills up: {len(taken)} entries taken, all whole, the next refused")


def test_a_read_only_disk_still_answers_and_says_what_to_do(small):
    store, kv = DiskStore(small), make_random_kv()
    store.put(kv)
    os.utime(path_of(store.root, kv.header.key), (0, 0))
    subprocess.run(["mount", "-o", "remount,ro", str(store.root)], check=True)
    assert_same(DiskStore(store.root, create=False).get(kv.header.key), kv)
    with pytest.raises(StoreNotWritableError, match=r"cannot be written.*`store`"):
        store.put(make_random_kv(1))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_every_failing_step_of_a_put_is_an_error_without_traces(tmp_path, monkeypatch, code, step):
    store, kv = DiskStore(tmp_path / "kv"), make_random_kv()
    store.put(make_random_kv(1))

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace"), "open": (Path, "open")}[step], fail)
        full = code in (errno.ENOSPC, errno.EDQUOT)
        reason = {errno.ENOSPC: "no space is left", errno.EDQUOT: "quota is used up"}.get(code, os.strerror(code))
        with pytest.raises(StoreFullError if full else StoreNotWritableError, match=reason):
            store.put(kv)
    assert not store.contains(kv.header.key)
    assert not list(store.root.rglob(".*"))
    store.put(kv)
    assert_same(store.get(kv.header.key), kv)


def test_a_put_is_on_disk_before_it_is_visible(tmp_path, monkeypatch):
    store = DiskStore(tmp_path)
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(fd: int) -> None:
        steps.append("fsync " + ("directory" if os.path.samestat(os.fstat(fd), directory.stat()) else "file"))
        fsync(fd)

    def noting_replace(source: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(source, target)

    kv = make_random_kv()
    directory = path_of(store.root, kv.header.key).parent
    directory.mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    store.put(kv)
    assert steps == ["fsync file", "replace", "fsync directory"]


def test_an_interrupted_put_leaves_no_trace(store, monkeypatch):
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(chunk_file, "_checksum", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(make_random_kv())
    assert not [path for path in store.root.rglob("*") if path.is_file()]


def test_a_missing_root_is_created_or_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"ragblend ingest DOCS --store .*deep"):
        DiskStore(tmp_path / "a" / "deep", create=False)
    assert list(DiskStore(tmp_path / "a" / "deep").keys()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritableError, match="file cannot be written"):
        DiskStore(tmp_path / "file")


# --- housekeeping ---


def test_listing_counts_entries_and_ignores_what_is_not_one(store):
    kvs = [make_random_kv(seed) for seed in range(3)]
    for kv in kvs:
        store.put(kv)
    directory = path_of(store.root, kvs[0].header.key).parent
    (directory / "notes.txt").write_text("mine")
    (directory / "elsewhere.safetensors").write_text("its name belongs into another directory")
    (directory / f".{kvs[0].header.key}.h.1.r.tmp").write_text("half")
    assert sorted(store.keys()) == sorted(kv.header.key for kv in kvs)
    assert {entry.key: entry.header for entry in store.entries()} == {kv.header.key: kv.header for kv in kvs}
    assert sum(entry.nbytes for entry in store.entries()) == store.nbytes() > sum(kv.nbytes for kv in kvs)
    assert all(abs(entry.last_used_s - time.time()) < 60 for entry in store.entries())
    assert store.header("f" * 32) is None


def test_last_use_is_noted_once_a_minute_and_never_off_by_more(store, monkeypatch):
    kv = make_random_kv()
    store.put(kv)
    path = path_of(store.root, kv.header.key)
    written_s = path.stat().st_mtime
    noted: list[float] = []
    now_s = written_s
    monkeypatch.setattr(disk.time, "time", lambda: now_s)
    monkeypatch.setattr(disk.os, "utime", lambda target: (noted.append(now_s), real_utime(target, (now_s, now_s))))
    for after_s in (0, 1, 59, 61, 90, 120, 122, 130):
        now_s = written_s + after_s
        store.get(kv.header.key)
        store.touch(kv.header.key)
        assert abs(now_s - path.stat().st_mtime) <= 60
    assert noted == [written_s + 61, written_s + 122]
    now_s = written_s - 3600  # the clock was set back: the time on disk lies ahead, and is put right at once
    store.touch(kv.header.key)
    assert path.stat().st_mtime == pytest.approx(now_s)
    store.touch("f" * 32)  # gone meanwhile
    monkeypatch.setattr(Path, "stat", lambda *_args, **_options: pytest.fail("the disk was asked within the minute"))
    store.touch(kv.header.key)


def test_verify_reads_every_byte_and_sets_damage_aside(store, monkeypatch):
    kvs = [make_random_kv(seed, num_layers=3) for seed in range(3)]
    for kv in kvs:
        store.put(kv)
    reads = note_reads(monkeypatch)
    assert all(result.ok for result in store.verify())
    assert sum(count for _, count in reads) == store.nbytes()
    flip(path_of(store.root, kvs[0].header.key), -1)
    for prefix in ("", "quarantined: "):  # found, and found again
        bad = [tuple(result) for result in store.verify() if not result.ok]
        assert bad == [(kvs[0].header.key, False, f"{prefix}layer 2 does not match its checksum")]
    assert store.delete(kvs[0].header.key)
    assert [result.ok for result in store.verify()] == [True, True]


def test_models_are_noted_by_fingerprint(store, caplog):
    facts = {"name": "demo", "dtype": "float32", "num_layers": 6}
    store.put_model("ab" * 16, facts)
    store.put_model("ab" * 16, facts)
    store.put_model("cd" * 16, {"name": "other"})
    (store.root / "models" / "broken.json").write_text("{")
    assert store.models() == {"ab" * 16: facts, "cd" * 16: {"name": "other"}}
    assert "broken.json" in caplog.text
    assert list(store.keys()) == []
    with pytest.raises(UsageError):
        store.put_model("../up", facts)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    share=st.floats(0, 1.2),
    unwanted=st.sets(st.integers(0, 7)),
)
def test_gc_keeps_the_most_recently_used_within_the_budget(tokens, order, share, unwanted):
    with tempfile.TemporaryDirectory() as root:
        store = DiskStore(root, fsync=False)
        kvs = [make_random_kv(seed, tokens=count) for seed, count in enumerate(tokens)]
        for kv in kvs:
            store.put(kv)
        ages = list(range(len(kvs)))
        order.shuffle(ages)
        for kv, age in zip(kvs, ages, strict=True):
            os.utime(path_of(store.root, kv.header.key), (0, 1_000_000 - age))
        sizes = {entry.key: entry.nbytes for entry in store.entries()}
        budget = int(share * sum(sizes.values()))
        dropped = {kvs[number].header.key for number in unwanted if number < len(kvs)}

        kept, used = [], sum(size for key, size in sizes.items() if key not in dropped)
        for _, kv in sorted(zip(ages, kvs, strict=True), key=lambda item: -item[0]):  # oldest first
            if kv.header.key in dropped:
                continue
            if used > budget:
                used -= sizes[kv.header.key]
            else:
                kept.append(kv.header.key)

        forecast = store.gc(budget, is_needed=lambda key: key not in dropped, dry_run=True)
        assert sorted(store.keys()) == sorted(sizes)
        result = store.gc(budget, is_needed=lambda key: key not in dropped)
        assert result == forecast
        assert sorted(store.keys()) == sorted(kept)
        assert result.kept_bytes == store.nbytes() == used <= budget
        assert result.freed_bytes == sum(sizes.values()) - used
        assert store.counters.num_evicted == len(result.evicted) == len(sizes) - len(kept)


def test_gc_removes_damaged_files_and_leftovers(store):
    kv = make_random_kv()
    store.put(kv)
    path = path_of(store.root, kv.header.key)
    path.with_suffix(".damaged").write_bytes(b"x" * 10)
    leftover = path.with_name(f".{kv.header.key}.h.1.r.tmp")
    leftover.write_bytes(b"y" * 5)
    os.utime(leftover, (0, 0))
    result = store.gc()
    assert (result.evicted, result.num_quarantined, result.num_temp_files, result.freed_bytes) == ((), 1, 1, 15)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(UsageError, match="max_bytes is -1"):
        store.gc(-1)


def test_a_stores_size_includes_the_writes_of_other_processes(tmp_path):
    """Also where no budget is kept: folders that did not change are not listed again."""
    store, other = DiskStore(tmp_path / "kv"), DiskStore(tmp_path / "kv", capacity_bytes=1 << 30)
    for number in range(3):
        (store if number % 2 else other).put(make_random_kv(number))
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "kv").glob("kv/??/*.safetensors")}
        assert store.nbytes() == other.nbytes() == sum(sizes.values()) > 0
    damaged = next((tmp_path / "kv").glob("kv/??/*.safetensors"))
    damaged.rename(damaged.with_suffix(".damaged"))
    assert store.nbytes() == sum(sizes.values())
    assert damaged.with_suffix(".damaged").exists(), "asking for the size removes nothing"
    left = store.nbytes()
    (tmp_path / "kv").rename(tmp_path / "gone")
    (tmp_path / "kv").write_text("a file in its place")
    assert store.nbytes() in (0, left)
