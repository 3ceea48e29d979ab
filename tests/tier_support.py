"""Helpers of the tests of the storage tiers: chunks, their files, a ByteStore in a dict, and assertions."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ragblend.engine.store.base import ByteRange
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import DTYPES, ChunkKV, KVHeader, LayerKV, MemoryKV
from ragblend.engine.store.remote.breaker import CircuitBreaker
from ragblend.errors import BackendUnreachableError


def make_kv(
    seed: int = 0,
    tokens: int = 4,
    num_layers: int = 2,
    namespace: str = "",
    prefix: tuple[int, ...] = (1,),
    dim: int = 4,
    dtype: str = "float32",
) -> MemoryKV:
    """Return the KV of a chunk with two heads. `seed` and `namespace` determine its key, ids and values."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {namespace}".encode()))
    token_ids = tuple(range(10 * seed + 100, 10 * seed + 100 + tokens))
    layers = tuple(
        LayerKV(*(torch.randn(2, tokens, dim, generator=generator).to(DTYPES[dtype]) for _ in range(2)))
        for _ in range(num_layers)
    )
    key = chunk_key("model", prefix, token_ids, namespace)
    return MemoryKV(KVHeader(key, "model", prefix, token_ids, num_layers, dtype, namespace), layers)


def make_random_kv(
    seed: int = 0, num_layers: int = 2, heads: int = 2, tokens: int = 3, dim: int = 4, dtype: str = "float32"
) -> MemoryKV:
    """Return the KV of a chunk whose numbers have any bit pattern. Values are wider than keys by one element."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = tuple(torch.randint(0, 150_000, (tokens,), generator=generator).tolist())
    layers = tuple(
        LayerKV(
            _random_tensor(heads, tokens, dim, dtype=dtype, generator=generator),
            _random_tensor(heads, tokens, dim + 1, dtype=dtype, generator=generator),
        )
        for _ in range(num_layers)
    )
    key = chunk_key("model", [1], token_ids, namespace := f"tests-{seed}")
    return MemoryKV(KVHeader(key, "model", (1,), token_ids, num_layers, dtype, namespace), layers)


def _random_tensor(*shape: int, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern of a number is possible: denormals and -0.0, but neither NaN nor infinity."""
    size = DTYPES[dtype].itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    numbers = raw.view(DTYPES[dtype])
    return torch.where(numbers.isfinite(), numbers, torch.full_like(numbers, -0.0))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(got: ChunkKV | None, expected: MemoryKV) -> None:
    """Fail unless header and size are equal, and each layer bit for bit, as stored and as computed."""
    assert got.header == expected.header
    assert got.nbytes == expected.nbytes
    for index, wanted in enumerate(expected.layers):
        for layer, same in ((got.stored_layer(index), wanted), (got.layer(index), expected.layer(index))):
            assert type(layer) is type(same)
            assert [(tensor.shape, tensor.dtype) for tensor in layer] == [(each.shape, each.dtype) for each in same]
            assert list(map(as_bytes, layer)) == list(map(as_bytes, same))


def run_threads(count: int, work: Callable[[int], object]) -> None:
    """Call `work` with each number below `count`, in one thread per call. Fail if a call raises."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def quick_breaker(threshold: int = 3) -> CircuitBreaker:
    """Return a breaker that probes again after a fraction of a second."""
    return CircuitBreaker(threshold=threshold, pause_s=0.02, max_pause_s=0.1)


def path_of(root: Path, key: str) -> Path:
    """Return the path of an entry's file on the disk tier at `root`."""
    return root / "kv" / key[:2] / f"{key}.safetensors"


def flip(path: Path, position: int, by: int = 1) -> None:
    """XOR one byte of the file with `by`, in place, so that open files and mappings change, too."""
    data = bytearray(path.read_bytes())
    data[position] ^= by
    with path.open("r+b") as stream:
        stream.write(data)


class DictValues:
    """ByteStore in a dict that records its calls. If `is_down`, every call raises BackendUnreachableError."""

    url, max_value_bytes, min_range_bytes = "dict://", 1 << 30, 1

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.noted: dict[str, bytes] = {}
        self.is_down = False
        self.calls: list[str] = []

    def _ask(self, what: str) -> None:
        self.calls.append(what)
        if self.is_down:
            raise BackendUnreachableError("dict:// is down")

    def get(self, name: str) -> bytes | None:
        self._ask("get")
        return self.data.get(name)

    def get_range(self, name: str, start: int, end: int) -> ByteRange | None:
        data = self.get(name)
        return None if data is None else ByteRange(data[start:end], len(data))

    def put(self, name: str, data: bytes) -> None:
        self._ask("put")
        self.data[name] = data

    def contains(self, name: str) -> bool:
        self._ask("contains")
        return name in self.data

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        self._ask("contains_many")
        return [name in self.data for name in names]

    def delete(self, name: str) -> bool:
        self._ask("delete")
        return self.data.pop(name, None) is not None

    def sizes(self) -> Iterator[tuple[str, int]]:
        self._ask("sizes")
        yield from [(name, len(data)) for name, data in self.data.items()]

    def list_metadata(self, after: str = "") -> list[str]:
        self._ask("notes")
        return [name for name in self.noted if name > after]

    def get_metadata(self, name: str) -> bytes | None:
        self._ask("get_note")
        return self.noted.get(name)

    def put_metadata(self, name: str, data: bytes) -> None:
        self._ask("put_note")
        self.noted[name] = data

    def delete_metadata(self, name: str) -> None:
        self._ask("drop_note")
        self.noted.pop(name, None)

    def ping(self) -> None:
        self._ask("ping")

    def close(self) -> None: ...


class SlowValues(DictValues):
    """DictValues whose `get` takes `wait_s`. `num_most`: the largest number of concurrent calls."""

    wait_s = 0.05
    num_now = num_most = 0

    def get(self, name: str) -> bytes | None:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        time.sleep(self.wait_s)
        self.num_now -= 1
        return super().get(name)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which every later read of a file adds its offset and number of bytes."""
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def noting(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noting)
    return reads
