"""The loader places what the store holds, a bounded number of layers ahead, and leaves no thread behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV, StoredLayer, dequantized
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import DamagedEntryError

pytestmark = pytest.mark.timeout(60)  # a reader that does not stop would hang its join

LAYERS, TOKENS, HEADS, DIM = 6, 5, 2, 4
IDS = tuple(range(TOKENS))
KEYS = (chunk_key("model", (), IDS), chunk_key("model", (), IDS, "other"))


def make_kv(key: str = KEYS[0], seed: int = 0) -> MemoryKV:
    generator = torch.Generator().manual_seed(seed)
    header = KVHeader(key, "model", (), IDS, LAYERS, "float32", namespace="other" if key == KEYS[1] else "")
    layers = tuple(
        LayerKV(*(torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(2))) for _ in range(LAYERS)
    )
    return MemoryKV(header, layers)


class SlowKV:
    """A ChunkKV that is not in memory: notes what is read, and fails at one layer if told to."""

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
    """Stands for the rotation: makes the result depend on layer and rows."""
    return keys + 10 * layer + 0.01 * rows[None, :, None]


def destination() -> FusedKV:
    fused = FusedKV.allocate([(HEADS, DIM, DIM)] * LAYERS, 20, torch.empty(0))
    for layer in range(LAYERS):
        fused.keys(layer).fill_(torch.nan)
        fused.values(layer).fill_(torch.nan)
    return fused


def loader(placements: list[Placement], fused: FusedKV, **options: Any) -> LayerLoader:
    return LayerLoader(placements, LAYERS, place, fused, torch.device("cpu"), **options)


def load_all(placements: list[Placement], **options: Any) -> tuple[FusedKV, LayerLoader]:
    fused = destination()
    with loader(placements, fused, **options) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
    return fused, layers


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragblend-loader"]


def eventually(claim: object) -> bool:
    """Whether `claim()` becomes true within two seconds."""
    for _ in range(200):
        if claim():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_each_layer_is_placed_where_its_chunk_stands():
    kv = make_kv()
    fused, _ = load_all([Placement(kv, 7, exact=False)])
    rows = torch.arange(7, 7 + TOKENS)
    for layer in range(LAYERS):
        assert torch.equal(fused.keys(layer)[:, rows], place(layer, kv.layer(layer).keys, rows))
        assert torch.equal(fused.values(layer)[:, rows], kv.layer(layer).values)
        assert fused.keys(layer)[:, :7].isnan().all()
        assert fused.keys(layer)[:, 12:].isnan().all()


def test_the_reader_thread_gives_what_inline_loading_gives(tmp_path: Path):
    store = DiskStore(tmp_path, fsync=False)
    kvs = [make_kv(key, seed) for seed, key in enumerate(KEYS)]
    for kv in kvs:
        store.put(kv)
    inline, _ = load_all([Placement(kvs[0], 2, exact=True), Placement(kvs[1], 9, exact=False)])
    stored = [Placement(store.get(KEYS[0]), 2, exact=True), Placement(store.get(KEYS[1]), 9, exact=False)]
    threaded, layers = load_all(stored)
    assert [event.layer for event in layers.events] == list(range(LAYERS))
    for layer in range(LAYERS):
        torch.testing.assert_close(threaded.keys(layer), inline.keys(layer), atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(threaded.values(layer), inline.values(layer), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("starts", [(2,), (2, 7), (2, 9), (2, 7, 14), (0, 5, 10)])
@pytest.mark.parametrize("make", [make_kv, lambda *of: SlowKV(make_kv(*of))], ids=["inline", "thread"])
def test_chunks_placed_together_stand_where_they_would_one_by_one(starts, make):
    placements = [Placement(make(str(seed) * 32, seed), start, exact=False) for seed, start in enumerate(starts)]
    alone, _ = load_all(placements)
    together, _ = load_all(placements, together=True)
    for layer in range(LAYERS):
        torch.testing.assert_close(together.keys(layer), alone.keys(layer), atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(together.values(layer), alone.values(layer), atol=0, rtol=0, equal_nan=True)


def test_chunks_placed_together_cost_one_rotation_per_layer_and_one_write_per_run(monkeypatch: pytest.MonkeyPatch):
    fused, placed, written = destination(), [], []
    write = fused.write
    monkeypatch.setattr(
        fused, "write", lambda layer, rows, *kv: (written.append((layer, rows)), write(layer, rows, *kv))
    )

    def noting(layer: int, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        placed.append((layer, rows))
        return place(layer, keys, rows)

    placements = [Placement(make_kv(), start, exact=False) for start in (1, 6, 13)]
    with LayerLoader(placements, LAYERS, noting, fused, torch.device("cpu"), together=True) as layers:
        for layer in range(LAYERS):
            layers.wait(layer)
    assert [layer for layer, _ in placed] == list(range(LAYERS))
    assert len({id(rows) for _, rows in placed}) == 1, "a new tensor of rows has its rotation gathered anew"
    assert placed[0][1].tolist() == [*range(1, 11), *range(13, 18)]
    assert written == [(layer, rows) for layer in range(LAYERS) for rows in (slice(1, 11), slice(13, 18))]


def test_damage_among_chunks_placed_together_names_its_chunk():
    placements = [
        Placement(SlowKV(make_kv()), 0, exact=False),
        Placement(SlowKV(make_kv(KEYS[1]), fail_at=2), 5, exact=False),
    ]
    with pytest.raises(DamagedEntryError) as caught:
        load_all(placements, together=True)
    assert caught.value.key == KEYS[1]


def test_kv_in_memory_is_placed_without_a_thread():
    with loader([Placement(make_kv(), 0, exact=False)], destination()) as layers:
        assert loader_threads() == []
        layers.wait(0)


def test_one_slow_chunk_is_enough_to_read_in_the_background():
    slow = SlowKV(make_kv())
    load_all([Placement(make_kv(KEYS[1]), 6, exact=False), Placement(slow, 0, exact=False)])
    assert slow.read_layers() == list(range(LAYERS))
    assert {name for _, name in slow.reads} == {"ragblend-loader"}


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_bounds_how_far_the_reader_is_ahead(depth):
    slow = SlowKV(make_kv())
    with loader([Placement(slow, 0, exact=False)], destination(), depth=depth) as layers:
        for waited in range(LAYERS):
            expected = min(LAYERS, waited + depth)
            assert eventually(lambda: len(slow.reads) == expected), "the reader does not run ahead"  # noqa: B023
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


@pytest.mark.parametrize("fail_at", [0, 3, LAYERS - 1])
def test_a_readers_error_surfaces_in_wait(fail_at):
    slow = SlowKV(make_kv(), fail_at=fail_at)
    with pytest.raises(DamagedEntryError) as caught:
        load_all([Placement(slow, 0, exact=False)])
    assert caught.value.key == KEYS[0]
    assert loader_threads() == []


def test_a_damaged_file_surfaces_in_wait(tmp_path: Path):
    store = DiskStore(tmp_path, fsync=False)
    store.put(make_kv())
    stored = store.get(KEYS[0])
    path = tmp_path / KEYS[0][:2] / f"{KEYS[0]}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last layer's values
    with path.open("r+b") as stream:
        stream.write(data)
    with pytest.raises(DamagedEntryError, match=KEYS[0]):
        load_all([Placement(stored, 0, exact=False)])
    with loader([Placement(SlowKV(make_kv(), fail_at=5), 0, exact=False)], destination(), depth=1) as layers:
        layers.wait(0)  # intact layers are usable until the damage is met
        layers.wait(1)


def test_leaving_early_stops_the_reader():
    slow = SlowKV(make_kv(), delay_s=0.005)
    with loader([Placement(slow, 0, exact=False)], destination()) as layers:
        layers.wait(0)
    assert loader_threads() == []
    assert len(slow.reads) < LAYERS


def test_an_error_in_the_fusor_stops_the_reader_and_passes_through():
    with pytest.raises(ZeroDivisionError), loader([Placement(SlowKV(make_kv()), 0, exact=False)], destination()):
        raise ZeroDivisionError
    assert loader_threads() == []


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


@pytest.mark.parametrize("together", [False, True])
def test_nothing_to_load_is_no_wait(together):
    _, layers = load_all([], together=together)
    assert layers.load_s < 0.1


@pytest.mark.parametrize("make", [make_kv, lambda: SlowKV(make_kv(), delay_s=0.005)], ids=["inline", "thread"])
def test_a_timeline_says_when_each_layer_was_loaded_and_when_it_was_fused(make):
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


def first_layer(token_ids: torch.Tensor) -> LayerKV:
    """Stands for the projection: keys and values that tell the tokens apart."""
    keys = token_ids[None, :, None].float().expand(HEADS, -1, DIM)
    return LayerKV(keys, -keys)


@pytest.mark.parametrize("together", [False, True])
def test_layer_0_is_there_before_anything_was_read(together):
    kvs, fused = [SlowKV(make_kv(key, seed)) for seed, key in enumerate(KEYS)], destination()
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


def test_a_store_sees_every_layer_read_and_moves_the_chunk_up(tmp_path: Path):
    """The layer that nobody needed comes last, and leaving waits for it."""
    slow = SlowKV(make_kv(), delay_s=0.005)
    load_all([Placement(slow, 0, exact=False)], depth=1, first_layer=first_layer)
    assert slow.read_layers() == [*range(1, LAYERS), 0]
    disk, memory = DiskStore(tmp_path, fsync=False), MemoryStore(1 << 20)
    disk.put(make_kv())
    load_all([Placement(TieredStore(memory, disk).get(KEYS[0]), 0, exact=False)], first_layer=first_layer)
    moved = memory.get(KEYS[0])
    assert moved is not None
    for layer in range(LAYERS):
        assert torch.equal(moved.layer(layer).keys, make_kv().layer(layer).keys)
        assert torch.equal(moved.layer(layer).values, make_kv().layer(layer).values)


@pytest.mark.parametrize("fail_at", range(LAYERS))
def test_damage_is_met_wherever_it_is(fail_at):
    """Also in layer 0, which was computed: the entry is as damaged as any, and a miss from now on."""
    placements = [
        Placement(SlowKV(make_kv()), 0, exact=False),
        Placement(SlowKV(make_kv(KEYS[1]), fail_at=fail_at), 5, exact=False),
    ]
    with pytest.raises(DamagedEntryError) as caught:
        load_all(placements, together=True, first_layer=first_layer)
    assert caught.value.key == KEYS[1]
    assert loader_threads() == []


@pytest.mark.parametrize("num_waited", [0, 1, LAYERS])
def test_an_error_in_the_fusor_stops_the_reader_whatever_the_store_says_of_layer_0(num_waited):
    slow = SlowKV(make_kv(), fail_at=0, delay_s=0.005)

    def fail() -> None:
        with loader([Placement(slow, 0, exact=False)], destination(), first_layer=first_layer) as layers:
            for layer in range(num_waited):
                layers.wait(layer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert loader_threads() == []
    assert num_waited == LAYERS or len(slow.reads) < LAYERS


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_bounds_the_reader_that_starts_at_layer_1(depth):
    slow = SlowKV(make_kv())
    with loader([Placement(slow, 0, exact=False)], destination(), depth=depth, first_layer=first_layer) as layers:
        for waited in range(LAYERS):
            expected = min(LAYERS, max(0, waited - 1) + depth)
            assert eventually(lambda: len(slow.reads) == expected), "the reader does not run ahead"  # noqa: B023
            time.sleep(0.02)
            assert len(slow.reads) == expected, "the reader runs too far ahead"
            layers.wait(waited)


def test_what_is_in_memory_is_not_computed():
    def refuse(token_ids: torch.Tensor) -> LayerKV:
        raise AssertionError(f"computed for {token_ids}")

    kv = make_kv()
    fused, layers = load_all([Placement(kv, 0, exact=False)], first_layer=refuse)
    assert torch.equal(fused.values(0)[:, :TOKENS], kv.layer(0).values)
    assert layers.num_computed == 0


@pytest.mark.parametrize("together", [False, True])
def test_beside_what_is_in_memory_only_the_rest_is_computed_all_at_once(together):
    held, asked = make_kv(), []
    far = [SlowKV(make_kv(key, seed)) for key, seed in (("2" * 32, 2), ("3" * 32, 3))]

    def noting(token_ids: torch.Tensor) -> LayerKV:
        asked.append(token_ids.tolist())
        return first_layer(token_ids)

    placements = [
        Placement(kv, start, exact=False) for kv, start in zip((far[0], held, far[1]), (0, 5, 12), strict=True)
    ]
    fused, layers = load_all(placements, together=together, first_layer=noting)
    assert asked == [[*range(TOKENS), *range(TOKENS)]]
    assert layers.num_computed == 2 * TOKENS
    values = first_layer(torch.arange(TOKENS)).values
    for placement in placements:
        rows = slice(placement.start, placement.end)
        assert torch.equal(fused.values(0)[:, rows], held.layer(0).values if placement.kv is held else values)


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
