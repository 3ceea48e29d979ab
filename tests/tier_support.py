"""Chunks, a ByteStore in a dict and small checks that the tests of the tiers share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import ChunkKV, KVHeader, LayerKV, MemoryKV
from ragblend.errors import BackendUnreachableError


def make_kv(
    seed: int = 0, tokens: int = 4, num_layers: int = 2, namespace: str = "", prefix: tuple[int, ...] = (1,)
) -> MemoryKV:
    """A chunk whose key, ids and bits follow from `seed` and `namespace`."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {namespace}".encode()))
    token_ids = tuple(range(10 * seed + 100, 10 * seed + 100 + tokens))
    layers = tuple(
        LayerKV(*(torch.randn(2, tokens, 4, generator=generator) for _ in range(2))) for _ in range(num_layers)
    )
    key = chunk_key("model", prefix, token_ids, namespace)
    return MemoryKV(KVHeader(key, "model", prefix, token_ids, num_layers, "float32", namespace), layers)


def assert_same(got: ChunkKV | None, expected: MemoryKV) -> None:
    assert got is not None
    assert got.header == expected.header
    for index in range(expected.header.num_layers):
        assert torch.equal(got.layer(index).keys, expected.layer(index).keys)
        assert torch.equal(got.layer(index).values, expected.layer(index).values)


class DictValues:
    """A ByteStore in a dict, down when told so; counts what it was asked."""

    url, max_value_bytes = "dict://", 1 << 30

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

    def list_metadata(self) -> list[str]:
        self._ask("notes")
        return list(self.noted)

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
