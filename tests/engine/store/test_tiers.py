"""Memory, disk and remote as one store: nothing crosses namespaces, nothing waits, nothing is read twice."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import free_port
from tier_support import DictValues, assert_same, make_kv

from ragblend.engine.load import load_engine
from ragblend.engine.store.chunk_file import DiskKV
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import ChunkKV, LayerKV, MemoryKV, StoredLayer, dequantized, load_into_memory
from ragblend.engine.store.open import open_store
from ragblend.engine.store.remote import tier as remote
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.prompt.prompt import SegmentedPrompt

pytestmark = pytest.mark.timeout(120)


class Tiers:
    """A TieredStore over a directory and a dict, with its parts at hand."""

    def __init__(self, root: Path, memory_bytes: int = 1 << 20, values: DictValues | None = None) -> None:
        self.memory = MemoryStore(memory_bytes)
        self.disk = DiskStore(root, fsync=False)
        self.values = values or DictValues()
        self.remote = RemoteStore(self.values, timeout_s=60)
        self.store = TieredStore(self.memory, self.disk, self.remote)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path / "kv")


def as_bits(kv: ChunkKV) -> list[bytes]:
    return [tensor.numpy().tobytes() for index in range(kv.header.num_layers) for tensor in kv.layer(index)]


# --- namespaces ---

OPERATIONS = ["put", "get", "get", "drop memory", "drop disk", "delete", "swap on the remote", "swap on disk", "flush"]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.sampled_from(["red", "blue"])), max_size=40
    )
)
def test_no_request_in_one_namespace_ever_reads_anothers_entry(steps: list[tuple[str, int, str]]) -> None:
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
                    assert found.header.namespace == namespace
                    assert as_bits(found) == as_bits(kv) != as_bits(other)
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


def test_an_entry_of_the_remote_moves_into_memory_at_once_and_onto_disk_behind_the_readers_back(tiers: Tiers) -> None:
    kv = make_kv(num_layers=3)
    writer = RemoteStore(tiers.values)
    writer.put(kv)
    assert writer.flush(10)
    slow = threading.Event()
    put, tiers_put = tiers.disk.put, []

    def slow_put(chunk: ChunkKV) -> None:
        tiers_put.append(chunk)
        slow.wait(10)
        put(chunk)

    tiers.disk.put = slow_put  # type: ignore[method-assign]
    store = TieredStore(tiers.memory, tiers.disk, tiers.remote)
    start_s = time.perf_counter()
    assert_same(store.get(kv.header.key, kv.header.token_ids), kv)
    assert time.perf_counter() - start_s < 5
    assert tiers.memory.contains(kv.header.key)
    assert not tiers.disk.contains(kv.header.key)
    tiers.memory.delete(kv.header.key)
    tiers.values.data.clear()
    assert_same(store.get(kv.header.key, kv.header.token_ids), kv)  # on its way to the disk
    slow.set()
    assert store.close()
    assert_same(tiers.disk.get(kv.header.key), kv)


def test_put_writes_through_and_a_second_machine_finds_it(tiers: Tiers, tmp_path: Path) -> None:
    kvs = [make_kv(seed) for seed in range(5)]
    for kv in kvs:
        tiers.store.put(kv)
    assert tiers.store.flush(10)
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


def test_requests_that_share_a_chunk_read_each_layer_once(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 readers at once, 5 layers on disk."""
    kv = make_kv(num_layers=5)
    counting = CountingKV(kv)
    tiers.disk.put(kv)
    monkeypatch.setattr(tiers.disk, "get", lambda key, token_ids=None: counting)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            assert_same(tiers.store.get(kv.header.key, kv.header.token_ids), kv)
        except BaseException as error:
            failures.append(error)

    held = tiers.store.get(kv.header.key)  # the first request has begun
    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert_same(held, kv)
    assert sorted(counting.reads) == [0, 1, 2, 3, 4]
    assert tiers.memory.contains(kv.header.key)


def test_a_layer_one_reader_wrote_into_is_read_again_for_the_next(tiers: Tiers) -> None:
    kv = make_kv(num_layers=2)
    tiers.disk.put(kv)
    first, second = (tiers.store.get(kv.header.key) for _ in range(2))
    assert first is not None
    assert second is first
    first.layer(0).keys.zero_()
    assert_same(second, kv)


def test_prefetch_brings_entries_into_memory_from_every_tier(tiers: Tiers) -> None:
    on_disk, far = make_kv(1), make_kv(2)
    tiers.disk.put(on_disk)
    tiers.remote.put(far)
    assert tiers.remote.flush(10)
    tiers.store.prefetch([on_disk.header.key, far.header.key, "f" * 32])
    deadline_s = time.monotonic() + 10
    while not all(tiers.memory.contains(kv.header.key) for kv in (on_disk, far)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    tiers.store.close()
    assert tiers.store.counters.num_hits == tiers.store.counters.num_misses == 0, "nobody has asked yet"
    assert_same(tiers.store.get(far.header.key), far)


def test_fetch_ahead_asks_the_remote_only_for_what_is_not_here(tiers: Tiers) -> None:
    here, near, far = make_kv(1), make_kv(2), make_kv(3)
    for store, kv in ((tiers.memory, here), (tiers.disk, near), (tiers.remote, far)):
        store.put(kv)
    assert tiers.remote.flush(10)
    tiers.values.calls.clear()
    tiers.store.fetch_many([kv.header.key for kv in (here, near, far)])
    for kv in (here, near, far):
        assert_same(tiers.store.get(kv.header.key), kv)
    assert tiers.values.calls.count("get") == 1


def test_the_disk_still_streams_layer_by_layer(tiers: Tiers) -> None:
    kv = make_kv(num_layers=4)
    tiers.disk.put(kv)
    found = tiers.store.get(kv.header.key)
    assert found is not None
    found.layer(0)
    assert not tiers.memory.contains(kv.header.key)
    assert isinstance(tiers.disk.get(kv.header.key), DiskKV)
    load_into_memory(found)
    assert tiers.memory.contains(kv.header.key)


# --- a remote that is down ---


def test_without_the_remote_the_local_tiers_go_on(tiers: Tiers) -> None:
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
    assert counters.num_failures <= 12
    assert not tiers.store.close(0.2)
    assert tiers.store.counters.num_dropped == 10


def test_a_delete_reaches_the_local_tiers_and_says_that_the_remote_keeps_it(tiers: Tiers) -> None:
    kv = make_kv()
    tiers.store.put(kv)
    assert tiers.store.flush(10)
    tiers.values.is_down = True
    with pytest.raises(BackendUnreachableError):
        tiers.store.delete(kv.header.key)
    assert not tiers.memory.contains(kv.header.key)
    assert not tiers.disk.contains(kv.header.key)


def test_a_chunk_pinned_out_of_memory_still_goes_below(tiers: Tiers) -> None:
    first, second = make_kv(1), make_kv(2)
    tiers.memory.capacity_bytes = first.nbytes
    tiers.store.put(first)
    tiers.store.pin("doc", [first.header.key])
    tiers.store.put(second)
    assert not tiers.memory.contains(second.header.key)
    assert_same(tiers.store.get(second.header.key), second)
    assert tiers.store.unpin("doc")
    assert not tiers.store.unpin("doc")


# --- composition ---


def test_open_store_makes_the_tiers_that_are_asked_for(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    store = open_store(tmp_path, memory_gib=1, disk_gib=2, remote=url)
    assert [type(tier) for tier in store.tiers] == [MemoryStore, DiskStore, RemoteStore]
    assert store.tiers[1].capacity_bytes == 2 << 30  # type: ignore[attr-defined]
    assert [type(tier) for tier in open_store(None, remote=url).tiers] == [MemoryStore, RemoteStore]
    with pytest.raises(UsageError, match="open_remote"):
        load_engine("demo", MemoryStore(10), remote=url)


def test_pins_of_an_earlier_run_hold_in_memory_too(tmp_path: Path) -> None:
    kv = make_kv()
    DiskStore(tmp_path).pin("doc", [kv.header.key])
    memory = open_store(tmp_path).tiers[0]
    assert isinstance(memory, MemoryStore)
    memory.capacity_bytes = kv.nbytes
    memory.put(kv)
    TieredStore(memory, MemoryStore(10_000)).put(make_kv(2))
    assert memory.contains(kv.header.key)


def test_answers_from_a_remote_tier_are_those_of_the_full_prefill(tiny_engine, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """One machine ingests, another that has only the remote tier answers at ratio 1.0."""
    values = DictValues()
    first = tiny_engine(store=TieredStore(MemoryStore(1 << 26), RemoteStore(values)))
    chunks = ["the first chunk of the theory", "another chunk: that is the question"]
    for chunk in chunks:
        first.precompute(chunk)
    first.close()
    assert len(values.data) == 2
    second = tiny_engine(store=Tiers(tmp_path / "kv", 1 << 26, values).store)
    prompt = SegmentedPrompt(chunks, "what is that?")
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
