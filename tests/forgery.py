"""Forged entries: files that an attacker with write access to a store may put under a requested key.

`FORGERIES` are the bytes of entries, for every tier. `PLANTS` are objects of the file system in place of an entry. The
attacker knows the format, and recomputes every checksum that does not depend on a key.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from xxhash import xxh3_128_hexdigest

from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, convert_kv_dtype
from ragblend.engine.store.format.signing import StoreKey


class Victim(NamedTuple):
    """The requested entry, the forged one in its place, another entry, and the keys."""

    true: MemoryKV
    lie: MemoryKV  # the header of `true`, with the KV of another text
    other: MemoryKV  # of another chunk
    own: StoreKey
    other_key: StoreKey

    @property
    def signed(self) -> bytes:
        """Return the true entry, signed with the own key."""
        return encode_chunk(self.true, self.own)

    @property
    def key(self) -> str:
        return self.true.header.key

    def in_namespace(self, namespace: str) -> MemoryKV:
        """Return the lie with another namespace, and with the key of an entry there."""
        return self._rekeyed(replace(self.true.header, namespace=namespace))

    def of_model(self, fingerprint: str) -> MemoryKV:
        """Return the lie with another model's fingerprint, and with the key of an entry of that model."""
        return self._rekeyed(replace(self.true.header, fingerprint=fingerprint))

    def _rekeyed(self, header: KVHeader) -> MemoryKV:
        key = chunk_key(header.fingerprint, header.prefix_ids, header.token_ids, header.namespace)
        return MemoryKV(replace(header, key=key), self.lie.layers)


def parts(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split an entry into header fields, tensor table and payload."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    return json.loads(table.pop("__metadata__")["ragblend"]), table, data[8 + length :]


def whole(facts: Mapping[str, Any], table: Mapping[str, Any], payload: bytes) -> bytes:
    """Return an entry with these parts and a valid header checksum."""
    facts = {"header_xxh3_128": "0" * 32, **{name: value for name, value in facts.items() if name != "header_xxh3_128"}}
    text = json.dumps(
        {"__metadata__": {"ragblend": json.dumps(facts, separators=(",", ":"))}, **table}, separators=(",", ":")
    )
    return sealed_header(text.encode()) + payload


def sealed_header(text: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    start = bytes(raw).find(b"0" * 32)
    raw[start : start + 32] = xxh3_128_hexdigest(raw).encode()
    return bytes(raw)


def edited(data: bytes, **changes: Any) -> bytes:
    """Return the entry with changed header fields."""
    facts, table, payload = parts(data)
    return whole({**facts, **changes}, table, payload)


def retold(data: bytes, change: Callable[[dict[str, Any], bytearray], None]) -> bytes:
    """Return the entry after `change` of its table and payload, with recomputed checksums of the layers."""
    facts, table, old = parts(data)
    payload = bytearray(old)
    change(table, payload)
    return whole({**facts, **digests(facts, table, bytes(payload))}, table, bytes(payload))


def digests(facts: Mapping[str, Any], table: Mapping[str, Any], payload: bytes) -> dict[str, list[str]]:
    layers: dict[str, list[int]] = {}
    for name, tensor in table.items():
        start, end = tensor["data_offsets"]
        known = layers.setdefault(name[:9], [start, end])
        known[:] = [min(known[0], start), max(known[1], end)]
    spans = [payload[start:end] for start, end in layers.values()]
    if "layers_blake3" in facts:
        return {"layers_blake3": [blake3(span).hexdigest() for span in spans]}
    return {"layers_xxh3_128": [xxh3_128_hexdigest(span) for span in spans]}


def cut(kv: MemoryKV, num_layers: int) -> MemoryKV:
    layers = (kv.layers * 2)[:num_layers]
    return MemoryKV(replace(kv.header, num_layers=num_layers), layers)


def shaped(kv: MemoryKV, of: Callable[[torch.Tensor], torch.Tensor], of_values: Any = None) -> MemoryKV:
    layers = tuple(LayerKV(of(keys), (of_values or of)(values)) for keys, values in map(tuple, kv.layers))
    return MemoryKV(kv.header, layers)


def with_value(kv: MemoryKV, value: float, layer: int) -> MemoryKV:
    layers = list(kv.layers)
    keys, values = (tensor.clone() for tensor in layers[layer])
    values[0, 0, 0] = value
    layers[layer] = LayerKV(keys, values)
    return MemoryKV(kv.header, tuple(layers))


def as_dtype(kv: MemoryKV, dtype: str) -> MemoryKV:
    layers = tuple(LayerKV(*(tensor.to(getattr(torch, dtype)) for tensor in layer)) for layer in kv.layers)
    return MemoryKV(replace(kv.header, dtype=dtype), layers)


def poisoned_codes(kv: MemoryKV, kv_dtype: str) -> bytes:
    """Eight-bit KV whose codes or scales are no numbers."""
    data = encode_chunk(convert_kv_dtype(kv, kv_dtype))

    def change(table: dict[str, Any], payload: bytearray) -> None:
        place = table["layer.002.keys" if kv_dtype == "fp8" else "layer.002.keys.scales"]["data_offsets"][0]
        payload[place : place + 4] = b"\x7f" * 4 if kv_dtype == "fp8" else b"\0\0\x80\x7f"

    return retold(data, change)


def moved(table: dict[str, Any], name: str, **facts: Any) -> None:
    table[name] = {**table[name], **facts}


def _swapped(victim: Victim) -> bytes:
    """Return an entry with the true, signed header and the tensors of the lie."""
    facts, table, _ = parts(victim.signed)
    return whole(facts, table, parts(encode_chunk(victim.lie))[2])


def _resummed(data: bytes, *dropped: str, **changes: Any) -> bytes:
    """Return the entry without the fields `dropped`, with changed fields, and with recomputed digests of its layers."""
    facts, table, payload = parts(data)
    facts = {name: value for name, value in facts.items() if name not in dropped} | changes
    return whole({**facts, **digests(facts, table, payload)}, table, payload)


def _nested() -> bytes:
    text = b'{"__metadata__":{"ragblend":"{\\"header_xxh3_128\\":\\"' + b"0" * 32 + b'\\"}"},"x":' + b"[" * 200_000
    return sealed_header(text)


def _huge_table(table: dict[str, Any], payload: bytearray) -> None:
    for name, tensor in table.items():
        moved(table, name, shape=[2, tensor["shape"][1], 1 << 30], data_offsets=[0, 1 << 40])


FORGERIES: dict[str, Callable[[Victim], bytes]] = {
    "the truth, unsigned": lambda v: encode_chunk(v.true),
    "a lie with redone checksums": lambda v: encode_chunk(v.lie),
    "a lie in eight bits": lambda v: encode_chunk(convert_kv_dtype(v.lie, "int8")),
    "the truth, signed by another key": lambda v: encode_chunk(v.true, v.other_key),
    "a lie, signed by another key": lambda v: encode_chunk(v.lie, v.other_key),
    "another chunk's entry, renamed": lambda v: encode_chunk(v.other, v.own),
    "another key's entry of another chunk, renamed": lambda v: encode_chunk(v.other, v.other_key),
    "another chunk's entry under this one's name": lambda v: edited(encode_chunk(v.other, v.own), key=v.key),
    "another namespace's entry, replayed": lambda v: encode_chunk(v.in_namespace("other"), v.own),
    "another namespace's entry, its namespace edited": lambda v: edited(
        encode_chunk(v.in_namespace("other"), v.own), namespace="", key=v.key
    ),
    "another model's entry, replayed": lambda v: encode_chunk(v.of_model("other"), v.own),
    "another model's entry, its model edited": lambda v: edited(
        encode_chunk(v.of_model("other"), v.own), fingerprint=v.true.header.fingerprint, key=v.key
    ),
    "token ids edited": lambda v: edited(v.signed, token_ids=list(v.lie.header.token_ids)[::-1]),
    "prefix ids edited": lambda v: edited(v.signed, prefix_ids=[7, 7]),
    "dtype edited": lambda v: edited(v.signed, dtype="bfloat16"),
    "an unknown dtype": lambda v: edited(encode_chunk(v.lie), dtype="float64"),
    "other tensors under a signed header": _swapped,
    "other tensors and digests under a signature": lambda v: _resummed(_swapped(v)),
    "a signature of zeros": lambda v: edited(encode_chunk(v.lie, v.own), signature="0" * 64),
    "a signature that is no text": lambda v: edited(encode_chunk(v.lie, v.own), signature="é" * 64),
    "made older than signatures": lambda v: _resummed(_swapped(v), "signature", "layers_blake3", format_version=1),
    "signed over checksums without a key": lambda v: _resummed(encode_chunk(v.lie, v.own), "layers_blake3"),
    "a format version from the future": lambda v: edited(encode_chunk(v.lie), format_version=99),
    "another layout": lambda v: edited(encode_chunk(v.lie), layout_version=2),
    "no layers": lambda v: encode_chunk(cut(v.lie, 0)),
    "one layer": lambda v: encode_chunk(cut(v.lie, 1)),
    "four layers": lambda v: encode_chunk(cut(v.lie, 4)),
    "a layer too many": lambda v: encode_chunk(cut(v.lie, 7)),
    "one head": lambda v: encode_chunk(shaped(v.lie, lambda each: each[:1].contiguous())),
    "half the dimensions": lambda v: encode_chunk(shaped(v.lie, lambda each: each[..., :8].contiguous())),
    "keys and values of different heads": lambda v: encode_chunk(
        shaped(v.lie, lambda each: each, lambda each: each[:1].contiguous())
    ),
    "in another dtype": lambda v: encode_chunk(as_dtype(v.lie, "float16")),
    "NaN": lambda v: encode_chunk(with_value(v.lie, float("nan"), 3)),
    "infinity": lambda v: encode_chunk(with_value(v.lie, float("-inf"), 0)),
    "infinite scales": lambda v: poisoned_codes(v.lie, "int8"),
    "codes that are NaN": lambda v: poisoned_codes(v.lie, "fp8"),
    "negative shapes": lambda v: retold(
        encode_chunk(v.lie), lambda table, _: moved(table, "layer.000.keys", shape=[-2, -1, 16])
    ),
    "a terabyte of tensors": lambda v: retold(encode_chunk(v.lie), _huge_table),
    "a header cut short": lambda v: v.signed[:200],
    "a layer cut short": lambda v: v.signed[:-5],
    "bytes behind the end": lambda v: v.signed + b"\0" * 64,
    "a header of 2^60 bytes": lambda v: (1 << 60).to_bytes(8, "little") + encode_chunk(v.lie)[8:],
    "brackets without end": lambda v: _nested(),
    "nothing": lambda v: b"",
    "no entry at all": lambda v: bytes(range(256)) * 16,
}


def _sparse(path: Path, victim: Victim) -> None:
    """Write a sparse file: a header of 1.7 KB that declares gigabytes of tensors, and a hole of that size."""
    facts, table, _ = parts(encode_chunk(victim.lie))
    end = 0
    for name, tensor in table.items():
        heads, tokens, _ = tensor["shape"]
        dim = (1 << 29) // (heads * tokens * 4)
        moved(table, name, shape=[heads, tokens, dim], data_offsets=[end, end + heads * tokens * dim * 4])
        end += heads * tokens * dim * 4
    path.write_bytes(whole(facts, table, b""))
    os.truncate(path, path.stat().st_size + end)


def _long(path: Path, victim: Victim) -> None:
    path.write_bytes(victim.signed)
    os.truncate(path, 1 << 40)


def _socket(path: Path, victim: Victim) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _linked(path: Path, victim: Victim) -> None:
    place = path.parent.parent / "elsewhere"
    place.write_bytes(encode_chunk(victim.lie))
    path.symlink_to(place)


PLANTS: dict[str, Callable[[Path, Victim], Any]] = {
    "a hole of gigabytes": _sparse,
    "a terabyte behind an entry": _long,
    "a named pipe": lambda path, _: os.mkfifo(path),
    "a folder": lambda path, _: path.mkdir(),
    "a folder that is not empty": lambda path, _: (path / "x").mkdir(parents=True),
    "a socket": _socket,
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to nowhere": lambda path, _: path.symlink_to("nowhere"),
    "a link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to a lie": _linked,
}


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        for below in path.iterdir():
            remove(below)
        path.rmdir()
        return
    with suppress(FileNotFoundError):
        path.unlink()
