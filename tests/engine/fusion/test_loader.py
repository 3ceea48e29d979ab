"""The loader places what the store holds, a bounded number of layers ahead, and leaves no thread behind."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
from servers import wait_until
from tier_support import make_kv as make_chunk

from ragblend.engine.fusion import loader as loader_module
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import LayerKV, MemoryKV, StoredLayer, convert_kv_dtype, dequantized
from ragblend.engine.store.format.quantize import CODE_DTYPES
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import DamagedEntryError

pytestmark = pytest.mark.timeout(60)  # a reader that does not stop would hang its join

LAYERS, TOKENS, HEADS, DIM = 6, 5, 2, 4


def make_kv(seed: int = 0) -> MemoryKV:
    return make_chunk(seed, TOKENS, LAYERS)


class SlowKV:
    """A ChunkKV that is not in memory: records reads, and fails at layer `fail_at`."""

    def __init__(self, kv: MemoryKV, fail_at: int | None = None, delay_s: float = 0.0) -> None:
        self.header, self.nbytes = kv.header, kv.nbytes
        self.may_read = threading.Event()
        self.may_read.set()
        self.reads: list[tuple[int, str]] = []
        self._kv, self._fail_at, self._delay_s = kv, fail_at, delay_s

    def stored_layer(self, index: int) -> StoredLayer:
        self.may_read.wait()
        time.sleep(self._delay_s)
        self.reads.append((index, threading.current_thread().name))
        if index == self._fail_at:
            raise DamagedEntryError(self.header.key, "flipped")
        return self._kv.stored_layer(index)

    def layer(self, index: int) -> LayerKV:
        return dequantized(self.stored_layer(index))

    def read_layers(self) -> list[int]:
        return [index for index, _ in self.reads]


def place(layer: int, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Replaces the rotation: the result depends on layer and rows."""
    return keys + 10 * layer + 0.01 * rows[None, :, None]


def first_layer(token_ids: torch.Tensor) -> LayerKV:
    """Replaces the projection: keys and values differ by token."""
    keys = token_ids[None, :, None].float().expand(HEADS, -1, DIM)
    return LayerKV(keys, -keys)


def destination() -> FusedKV:
    fused = FusedKV.allocate([(HEADS, DIM, DIM)] * LAYERS, 20, torch.empty(0))
    for layer in range(LAYERS):
        fused.keys(layer).fill_(torch.nan)
        fused.values(layer).fill_(torch.nan)
    return fused


def loader(placements: list[Placement], fused: FusedKV, **options: Any) -> LayerLoader:
    return LayerLoader(placements, LAYERS, place, fused.write, torch.device("cpu"), **options)


def load_all(placements: list[Placement], **options: Any) -> tuple[FusedKV, LayerLoader]:
    fused = destination()
    with loader(placements, fused, **options) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
    return fused, layers


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragblend-loader"]


def assert_same_kv(found: FusedKV, expected: FusedKV) -> None:
    """Bit for bit, NaN where nothing was written included."""
    for layer in range(LAYERS):
        torch.testing.assert_close(found.keys(layer), expected.keys(layer), atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(found.values(layer), expected.values(layer), atol=0, rtol=0, equal_nan=True)


def test_each_layer_is_placed_at_the_rows_of_its_chunk():
    kv = make_kv()
    fused, _ = load_all([Placement(kv, 7, exact=False)])
    rows = torch.arange(7, 7 + TOKENS)
    for layer in range(LAYERS):
        assert torch.equal(fused.keys(layer)[:, rows], place(layer, kv.layer(layer).keys, rows))
        assert torch.equal(fused.values(layer)[:, rows], kv.layer(layer).values)
        assert fused.keys(layer)[:, :7].isnan().all()
        assert fused.keys(layer)[:, 12:].isnan().all()


def test_the_reader_thread_gives_what_inline_loading_gives(tmp_path):
    store = DiskStore(tmp_path, fsync=False)
    kvs = [make_kv(seed) for seed in range(2)]
    for kv in kvs:
        store.put(kv)
    placements = [Placement(kvs[0], 2, exact=True), Placement(kvs[1], 9, exact=False)]
    inline, _ = load_all(placements)
    stored = [each._replace(kv=store.get(each.kv.header.key)) for each in placements]
    threaded, layers = load_all(stored)
    assert [event.layer for event in layers.events] == list(range(LAYERS))
    assert_same_kv(threaded, inline)


@pytest.mark.parametrize("starts", [(2,), (2, 7), (2, 9), (2, 7, 14), (0, 5, 10)])
@pytest.mark.parametrize("make", [make_kv, lambda *of: SlowKV(make_kv(*of))], ids=["inline", "thread"])
def test_chunks_placed_together_have_the_rows_of_chunks_placed_one_by_one(starts, make):
    placements = [Placement(make(seed), start, exact=False) for seed, start in enumerate(starts)]
    alone, _ = load_all(placements)
    together, _ = load_all(placements, together=True)
    assert_same_kv(together, alone)


def test_chunks_placed_together_share_one_rotation_per_layer(monkeypatch):
    fused, placed, written = destination(), [], []
    write = fused.write
    monkeypatch.setattr(
        fused, "write", lambda layer, rows, *kv: (written.append((layer, rows)), write(layer, rows, *kv))
    )

    def noting(layer: int, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        placed.append((layer, rows))
        return place(layer, keys, rows)

    placements = [Placement(make_kv(), start, exact=False) for start in (1, 6, 13)]
    with LayerLoader(placements, LAYERS, noting, fused.write, torch.device("cpu"), together=True) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
    assert [layer for layer, _ in placed] == list(range(LAYERS))
    assert len({id(rows) for _, rows in placed}) == 1, "a new tensor of rows gathers its rotation again"
    assert placed[0][1].tolist() == [*range(1, 11), *range(13, 18)]
    assert written == [(layer, rows) for layer in range(LAYERS) for rows in (slice(1, 11), slice(13, 18))]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_eight_bit_kv_is_converted_by_the_reader_thread_before_placing(kv_dtype, together, monkeypatch):
    packed = convert_kv_dtype(make_chunk(0, 12, LAYERS), kv_dtype)
    whole = MemoryKV(dataclasses.replace(packed.header, kv_dtype=None), tuple(map(packed.layer, range(LAYERS))))
    expected, _ = load_all([Placement(whole, 3, exact=False)], together=together)
    threads: list[str] = []

    def noting(layer: StoredLayer) -> LayerKV:
        threads.append(threading.current_thread().name)
        return dequantized(layer)

    monkeypatch.setattr(loader_module, "dequantized", noting)
    found, _ = load_all([Placement(packed, 3, exact=False)], together=together)
    assert_same_kv(found, expected)
    assert threads == ["ragblend-loader"] * LAYERS


def test_kv_in_memory_is_placed_without_a_thread():
    with loader([Placement(make_kv(), 0, exact=False)], destination()) as layers:
        assert loader_threads() == []
        layers.wait(0)


def test_one_slow_chunk_is_enough_to_read_in_the_background():
    slow = SlowKV(make_kv())
    load_all([Placement(make_kv(1), 6, exact=False), Placement(slow, 0, exact=False)])
    assert slow.read_layers() == list(range(LAYERS))
    assert {name for _, name in slow.reads} == {"ragblend-loader"}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("first_read", [0, 1])
def test_depth_bounds_how_far_the_reader_is_ahead(depth, first_read, monkeypatch):
    """Layer 0 read, or computed."""
    monkeypatch.setattr(loader_module, "DEPTH", depth)
    slow, computed = SlowKV(make_kv()), first_layer if first_read else None
    with loader([Placement(slow, 0, exact=False)], destination(), first_layer=computed) as layers:
        for waited in range(LAYERS):
            expected = min(LAYERS, max(0, waited - first_read) + depth)
            wait_until(lambda: len(slow.reads) == expected, 2, "the reader runs ahead")  # noqa: B023
            time.sleep(0.02)
            assert len(slow.reads) == expected, "the reader runs too far ahead"
            layers.wait(waited)


def test_a_layer_is_complete_when_wait_returns():
    slow, fused = SlowKV(make_kv(), delay_s=0.01), destination()
    with loader([Placement(slow, 3, exact=False)], fused) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
            assert not fused.keys(layer)[:, 3:8].isnan().any()
            assert not fused.values(layer)[:, 3:8].isnan().any()
    assert layers.stall_s > 0.005
    assert layers.load_s >= LAYERS * 0.01


@pytest.mark.parametrize("make", [make_kv, lambda: SlowKV(make_kv())])
def test_a_layer_waited_for_twice_is_placed_once(make):
    """A rule that asks the question waits for its layers before the main pass does; what that wrote must stay."""
    fused = destination()
    with loader([Placement(make(), 0, exact=False)], fused) as layers:
        layers.wait(0)
        fused.write(0, slice(0, 1), torch.full((HEADS, 1, DIM), 7.0), torch.full((HEADS, 1, DIM), 7.0))
        for layer in range(LAYERS):
            layers.wait(layer)
    assert (fused.keys(0)[:, 0] == 7).all()
    assert [event.layer for event in layers.events] == list(range(LAYERS))


@pytest.mark.parametrize("make", [make_kv, lambda: SlowKV(make_kv(), delay_s=0.005)], ids=["inline", "thread"])
def test_a_timeline_has_the_times_of_loading_and_fusing_each_layer(make):
    ends_s = []
    with loader([Placement(make(), 0, exact=False)], destination()) as layers:
        layers.wait(0)  # a rule that asks the question was here first
        time.sleep(0.01)
        for layer in range(LAYERS):
            layers.wait(layer)
            time.sleep(0.002)
            ends_s.append(time.perf_counter())
    timeline = layers.timeline(ends_s)
    assert [event.layer for event in timeline.load] == [event.layer for event in timeline.fuse] == list(range(LAYERS))
    for layer, (load, fuse) in enumerate(zip(timeline.load, timeline.fuse, strict=True)):
        assert load.start_s <= load.end_s <= fuse.start_s
        assert fuse.end_s == ends_s[layer]
        assert fuse.end_s - fuse.start_s >= 0.002
        assert layer == 0 or fuse.start_s >= ends_s[layer - 1], "waiting for a layer counts as fusing it"
    assert timeline.fuse[0].start_s >= timeline.load[0].end_s + 0.01, "the main pass starts after the first look"


# --- layer 0, computed instead of read ---


@pytest.mark.parametrize("together", [False, True])
def test_layer_0_is_there_before_anything_was_read(together):
    kvs, fused = [SlowKV(make_kv(seed)) for seed in range(2)], destination()
    for kv in kvs:
        kv.may_read.clear()
    placements = [Placement(kv, start, exact=False) for kv, start in zip(kvs, (2, 9), strict=True)]
    with loader(placements, fused, together=together, first_layer=first_layer) as layers:
        layers.wait(0)
        assert [kv.read_layers() for kv in kvs] == [[], []]
        for kv in kvs:
            kv.may_read.set()
        for layer in range(1, LAYERS):
            layers.wait(layer)
    for placement in placements:
        rows = torch.arange(placement.start, placement.end)
        keys, values = first_layer(torch.tensor(placement.kv.header.token_ids))
        assert torch.equal(fused.keys(0)[:, rows], place(0, keys, rows))
        assert torch.equal(fused.values(0)[:, rows], values)
        for layer in range(1, LAYERS):
            assert torch.equal(fused.values(layer)[:, rows], placement.kv.layer(layer).values)
    assert fused.keys(0)[:, 7:9].isnan().all()
    assert layers.num_computed == 2 * TOKENS
    timeline = layers.timeline([time.perf_counter()] * LAYERS)
    assert [event.layer for event in timeline.load] == list(range(LAYERS))


def test_a_stored_chunk_is_read_in_every_layer_and_promoted(tmp_path, monkeypatch):
    """The computed layer is read last, and leaving waits for it."""
    monkeypatch.setattr(loader_module, "DEPTH", 1)
    slow = SlowKV(make_kv(), delay_s=0.005)
    load_all([Placement(slow, 0, exact=False)], first_layer=first_layer)
    assert slow.read_layers() == [*range(1, LAYERS), 0]
    disk, memory = DiskStore(tmp_path, fsync=False), MemoryStore(1 << 20)
    disk.put(make_kv())
    load_all([Placement(TieredStore(memory, disk).get(make_kv().header.key), 0, exact=False)], first_layer=first_layer)
    moved = memory.get(make_kv().header.key)
    assert moved is not None
    for layer in range(LAYERS):
        assert torch.equal(moved.layer(layer).keys, make_kv().layer(layer).keys)
        assert torch.equal(moved.layer(layer).values, make_kv().layer(layer).values)


@pytest.mark.parametrize("fail_at", range(LAYERS))
@pytest.mark.parametrize("options", [{}, {"together": True}, {"together": True, "first_layer": first_layer}])
def test_damage_in_any_layer_is_raised(fail_at, options):
    """Also in layer 0 that was computed: the entry is damaged, so it must become a miss."""
    placements = [
        Placement(SlowKV(make_kv()), 0, exact=False),
        Placement(SlowKV(make_kv(1), fail_at=fail_at), 5, exact=False),
    ]
    with pytest.raises(DamagedEntryError) as caught:
        load_all(placements, **options)
    assert caught.value.key == make_kv(1).header.key
    assert loader_threads() == []


@pytest.mark.parametrize("num_waited", [0, 1, LAYERS])
@pytest.mark.parametrize("options", [{}, {"first_layer": first_layer}], ids=["read", "computed"])
def test_an_error_in_the_fusor_stops_the_reader_and_passes_through(num_waited, options):
    """Also if layer 0 was computed and its stored form is damaged."""
    slow = SlowKV(make_kv(), fail_at=0 if options else None, delay_s=0.005)

    def fail() -> None:
        with loader([Placement(slow, 0, exact=False)], destination(), **options) as layers:
            for layer in range(num_waited):
                layers.wait(layer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert loader_threads() == []
    assert num_waited == LAYERS or len(slow.reads) < LAYERS


@pytest.mark.parametrize("together", [False, True])
def test_layer_zero_of_kv_outside_memory_is_computed_in_one_pass(together):
    held, asked = make_kv(), []
    far = [SlowKV(make_kv(seed)) for seed in (2, 3)]

    def noting(token_ids: torch.Tensor) -> LayerKV:
        asked.append(token_ids.tolist())
        return first_layer(token_ids)

    placements = [
        Placement(kv, start, exact=False) for kv, start in zip((far[0], held, far[1]), (0, 5, 12), strict=True)
    ]
    fused, layers = load_all(placements, together=together, first_layer=noting)
    assert asked == [[*far[0].header.token_ids, *far[1].header.token_ids]]
    assert layers.num_computed == 2 * TOKENS
    for placement in placements:
        computed = first_layer(torch.tensor(placement.kv.header.token_ids)).values
        expected = held.layer(0).values if placement.kv is held else computed
        assert torch.equal(fused.values(0)[:, placement.start : placement.end], expected)


def test_waiting_for_the_layer_that_was_computed_is_a_stall():
    slow = SlowKV(make_kv())
    read, may_read_0 = slow.stored_layer, threading.Event()

    def held_back(index: int) -> StoredLayer:
        assert index or may_read_0.wait(10)
        return read(index)

    slow.stored_layer = held_back
    with loader([Placement(slow, 0, exact=False)], destination(), first_layer=first_layer) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
        before_s = layers.stall_s
        threading.Timer(0.1, may_read_0.set).start()
    assert layers.stall_s - before_s > 0.05
