"""Uploads of stored KV, on simulated streams: every byte is copied once, and nothing is read too early."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragblend.engine.fusion.host_to_device import LAYERS_PER_COPY, HostToDeviceCopier, LayerCopies, plan_upload
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, aligned_nbytes, convert_kv_dtype, slice_kv_rows
from ragblend.engine.store.memory import MemoryStore

HEADS, DIM = 2, 8


class Event:
    """Set when its stream gets there."""

    is_set = False


@dataclass
class Stream:
    """Work that was queued, and has not run."""

    queue: deque[Callable[[], bool]] = field(default_factory=deque)  # each returns False if it must wait

    def add(self, work: Callable[[], Any]) -> None:
        self.queue.append(lambda: work() is not False)

    def record_event(self) -> Event:
        event = Event()
        self.add(lambda: setattr(event, "is_set", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.add(lambda: event.is_set)


class SimulatedCopier:
    """Its copies run later, in any order in which two streams of a GPU may run them."""

    def __init__(self, draw: random.Random) -> None:
        self.computing, self.copying = Stream(), Stream()
        self.num_blocks = 0
        self._draw = draw

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.num_blocks += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def queue_copies(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], after: Event | None = None
    ) -> Event:
        if after is not None:
            self.copying.wait_event(after)
        for target, source in zip(targets, sources, strict=True):
            self.copying.add(lambda target=target, source=source: target.copy_(source))
        return self.copying.record_event()

    def run(self, num_steps: int | None = None) -> None:
        """Run the next work of a stream, `num_steps` times, or until nothing can run."""
        while num_steps is None or num_steps > 0:
            ready = [stream for stream in (self.computing, self.copying) if stream.queue]
            self._draw.shuffle(ready)
            for stream in ready:
                if stream.queue[0]():
                    stream.queue.popleft()
                    break
            else:
                return
            num_steps = num_steps - 1 if num_steps is not None else None


@pytest.fixture(autouse=True)
def page_locked(monkeypatch):
    """Without a GPU there is no page-locked memory; ordinary memory stands in for it."""
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: real(*args, **options))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)


def stored(num_tokens: int, num_layers: int, kv_dtype: str = "auto", *, dims: Sequence[int] = (DIM, DIM)) -> MemoryKV:
    """Return a chunk as the memory tier of a GPU holds it. dims: dimensions of keys and values."""
    ids = tuple(range(num_tokens))
    header = KVHeader(chunk_key("model", (), ids), "model", (), ids, num_layers, "float32")
    layers = [LayerKV(*(torch.randn(HEADS, num_tokens, dim) for dim in dims)) for _ in range(num_layers)]
    store = MemoryStore(1 << 30)
    store.page_locked = True
    store.put(convert_kv_dtype(MemoryKV(header, tuple(layers)), kv_dtype))
    kv = store.get(header.key)
    assert kv is not None
    return kv


@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 11),
    st.integers(1, 8),
    st.sampled_from(["auto", "int8"]),
    st.integers(0, 1 << 30),
)
def test_layers_arrive_whole_in_every_order_of_the_streams(chunks, num_layers, depth, kv_dtype, seed):
    draw = random.Random(seed)
    kvs = []
    for num_tokens, is_part in chunks:
        kv = stored(num_tokens, num_layers, kv_dtype)
        kvs.append(slice_kv_rows(kv, num_tokens // 3, num_tokens) if is_part else kv)
    copier, results = SimulatedCopier(draw), list[bool]()
    copies = LayerCopies(copier, kvs, num_layers, depth)
    for layer in range(num_layers):
        arrived = copies.next_layer()

        def compare(layer: int = layer, arrived: list[Any] = arrived) -> None:
            expected = [kv.stored_layer(layer) for kv in kvs]
            assert [type(each) for each in arrived] == [type(each) for each in expected]
            pairs = zip(arrived, expected, strict=True)
            results.append(all(torch.equal(*tensors) for pair in pairs for tensors in zip(*pair, strict=True)))

        copier.computing.add(compare)
        copier.run(draw.randrange(6))
    copier.run()
    assert results == [True] * num_layers
    assert not copier.copying.queue


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_layers_read_from_slower_tiers_arrive_whole(kv_dtype, monkeypatch):
    simulated, copier = SimulatedCopier(random.Random(0)), HostToDeviceCopier(torch.device("cpu"))
    for name in ("allocate", "queue_copies"):
        monkeypatch.setattr(copier, name, getattr(simulated, name))
    copier.overlaps_compute, copier.copying = True, SimpleNamespace(synchronize=simulated.run)
    kv = stored(70, 3, kv_dtype)
    layers = [part.stored_layer(layer) for layer in range(3) for part in (kv, slice_kv_rows(kv, 5, 69))]
    arrived = copier.copy_to_device(layers)
    assert [type(layer) for layer in arrived] == [type(layer) for layer in layers]
    assert all(
        torch.equal(*tensors) for pair in zip(arrived, layers, strict=True) for tensors in zip(*pair, strict=True)
    )


def test_larger_layers_take_larger_blocks():
    small, large = stored(9, 12), stored(9, 12, dims=(3 * DIM, DIM))
    kv = MemoryKV(large.header, (*small.layers[:6], *large.layers[6:]))
    copier = SimulatedCopier(random.Random(0))
    copies = LayerCopies(copier, [kv], 12, 1)
    for layer in range(12):
        [arrived] = copies.next_layer()
        copier.run()
        assert torch.equal(arrived.keys, kv.layer(layer).keys)


def test_blocks_on_the_device_are_used_again():
    copier, depth = SimulatedCopier(random.Random(0)), 2 * LAYERS_PER_COPY
    copies = LayerCopies(copier, [stored(9, 40)], 40, depth)
    for _ in range(40):
        copies.next_layer()
    assert copier.num_blocks == depth // LAYERS_PER_COPY + 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 12), st.sampled_from(["auto", "int8"]))
def test_every_byte_is_copied_once_by_few_copies(sizes, num_layers, kv_dtype):
    kvs = [stored(size, num_layers, kv_dtype) for size in sizes]
    blocks = sum(len({tensor.untyped_storage().data_ptr() for layer in kv.layers for tensor in layer}) for kv in kvs)
    groups = [range(at, min(at + LAYERS_PER_COPY, num_layers)) for at in range(0, num_layers, LAYERS_PER_COPY)]
    copied = list[tuple[int, int]]()
    for group in groups:
        for source, _ in plan_upload(kvs, group).copies:
            copied.append((source.data_ptr(), source.data_ptr() + source.nbytes))
    copied.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(copied)), "copied twice"
    tensors = [tensor for kv in kvs for layer in kv.layers for tensor in layer if tensor.nbytes]
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for start, end in copied)
    assert sum(end - start for start, end in copied) <= sum(map(aligned_nbytes, tensors))
    assert len(copied) <= len(kvs) * len(groups) + blocks - len(kvs)


def test_latent_kv_without_values_is_uploaded():
    kv = stored(5, 4, dims=(DIM, 0))
    upload = plan_upload([kv], range(4))
    block = torch.zeros(upload.nbytes, dtype=torch.uint8)
    for source, offset in upload.copies:
        block[offset : offset + source.nbytes] = source
    for layer, [arrived] in enumerate(upload.layers_in(block)):
        assert torch.equal(arrived.keys, kv.layer(layer).keys)
        assert arrived.values.shape == (HEADS, 5, 0)
