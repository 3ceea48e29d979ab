"""One stored chunk as one file: a safetensors file, readable layer by layer, every byte under a checksum.

A file's metadata is one JSON string (safetensors writes several keys in random order, one is deterministic). Its
first field is the xxh3_128 of length prefix and header, taken with that field's own digits zeroed, so it sits at a
fixed offset and is checked before anything is parsed; every later format version keeps this rule. Each layer's
tensors lie side by side under one checksum: keys and values as computed (format version 1), or scales, first tokens
and codes of KV in eight bits (version 2, `QuantizedLayer`). Token ids are plain JSON numbers: about as many bytes as
base64 for five-digit ids, and `jq` shows them.

Works on headers, tensors and one file, or the bytes of one, at a time. Knows nothing about directories, eviction,
models or prompts.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from ragblend.engine.kv import (
    LAYOUT_VERSION,
    KVHeader,
    LayerKV,
    MemoryKV,
    StoredLayer,
    TensorSpec,
    restored,
    tensor_specs,
)
from ragblend.engine.quantize import CODE_DTYPES, QuantizedLayer
from ragblend.errors import DamagedEntryError

FORMAT_VERSION = 1
"""Version of how an entry is written; LAYOUT_VERSION says what its tensors mean."""
QUANTIZED_FORMAT_VERSION = 2
"""The same of an entry in eight bits. One as computed is written as ever, for readers that know no other."""

_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_OPENING = b'{"__metadata__":{"ragblend":"{\\"header_xxh3_128\\":\\"'
_DIGITS = slice(8 + len(_OPENING), 8 + len(_OPENING) + 32)
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class UnreadableError(Exception):
    """These bytes are not an entry, or not the one asked for. A store turns it into a miss; no user meets it."""


class MismatchError(UnreadableError):
    """An intact entry that is not for this reader: of another version, or of other tokens."""


# --- writing: facts -> header bytes, then one layer after the other ---


def header_nbytes(kv: MemoryKV) -> int:
    """Bytes of length prefix and header, which is where the tensors of a chunk's file start."""
    return len(_encode_header(kv.header, kv.layers, ["0" * 32] * len(kv.layers)))


def write_chunk(stream: BinaryIO, kv: MemoryKV, data_offset: int) -> None:
    """Write a chunk's file to an empty, seekable stream; `data_offset` is its `header_nbytes`."""
    # Checksums belong in the header but come from the data: write that first, so each layer is copied once.
    stream.seek(data_offset)
    checksums = []
    for layer in kv.layers:
        data = [_tensor_bytes(tensor) for tensor in layer]
        checksums.append(_checksum(*data))
        stream.writelines(data)
    stream.seek(0)
    header = _encode_header(kv.header, kv.layers, checksums)
    assert len(header) == data_offset
    stream.write(header)


def encode_chunk(kv: MemoryKV) -> bytes:
    """The bytes of a chunk's file, for stores that keep values instead of files."""
    stream = io.BytesIO()
    write_chunk(stream, kv, header_nbytes(kv))
    return stream.getvalue()


def _encode_header(header: KVHeader, layers: Sequence[StoredLayer], checksums: Sequence[str]) -> bytes:
    """Length prefix and header. Its length depends on shapes and facts, not on the checksums' digits."""
    facts = {
        "header_xxh3_128": "0" * 32,  # first, so that its digits sit at _DIGITS
        "format_version": FORMAT_VERSION if header.is_lossless else QUANTIZED_FORMAT_VERSION,
        "layout_version": header.layout_version,
        "key": header.key,
        "fingerprint": header.fingerprint,
        "namespace": header.namespace,
        "dtype": header.dtype,
        **({} if header.is_lossless else {"kv_dtype": header.kv_dtype}),
        "num_layers": header.num_layers,
        "prefix_ids": [int(token) for token in header.prefix_ids],
        "token_ids": [int(token) for token in header.token_ids],
        "layers_xxh3_128": list(checksums),
    }
    table: dict[str, Any] = {"__metadata__": {"ragblend": json.dumps(facts, separators=(",", ":"))}}
    end = 0
    for index, layer in enumerate(layers):
        *_, keys, values = layer
        for spec, tensor in zip(tensor_specs(header, keys.shape, values.shape), layer, strict=True):
            start, end = end, end + tensor.nbytes
            table[f"layer.{index:03d}.{spec.name}"] = {
                "dtype": _SAFETENSORS_DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors does: tensor data starts 8-byte aligned
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    raw[_DIGITS] = xxh3_128_hexdigest(raw).encode()
    return bytes(raw)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order; no copy when it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(*parts: memoryview) -> str:
    """xxh3_128 of the parts, one after the other."""
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# --- reading: header bytes -> facts and positions ---


class _Span(NamedTuple):
    """Where one layer lies in the file."""

    offset: int
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    checksum: str


def _decode_header(raw: bytes, file_nbytes: int) -> tuple[KVHeader, tuple[_Span, ...]]:
    """Facts and layer positions of a file that starts with `raw` and has `file_nbytes` bytes."""
    if raw[8 : _DIGITS.start] != _OPENING:
        raise UnreadableError("not written by ragblend")
    zeroed = bytearray(raw)
    zeroed[_DIGITS] = b"0" * 32
    if xxh3_128_hexdigest(zeroed).encode() != raw[_DIGITS]:
        raise UnreadableError("the header does not match its checksum")
    try:
        table = json.loads(raw[8:])
        facts = json.loads(table.pop("__metadata__")["ragblend"])
        versions = (facts["format_version"], facts["layout_version"])
        known = [(version, LAYOUT_VERSION) for version in (FORMAT_VERSION, QUANTIZED_FORMAT_VERSION)]
        kv_dtype = facts.get("kv_dtype")
        if versions not in known or kv_dtype not in (None, *CODE_DTYPES):
            found = f"{versions}{f' with {kv_dtype}' if kv_dtype else ''}"
            raise MismatchError(f"format and layout versions {found}, this ragblend reads {known}")
        header = KVHeader(
            key=facts["key"],
            fingerprint=facts["fingerprint"],
            prefix_ids=tuple(facts["prefix_ids"]),
            token_ids=tuple(facts["token_ids"]),
            num_layers=facts["num_layers"],
            dtype=facts["dtype"],
            namespace=facts["namespace"],
            layout_version=facts["layout_version"],
            kv_dtype=kv_dtype,
        )
        spans = _layer_spans(header, table, facts["layers_xxh3_128"], start=len(raw))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"the header does not describe an entry: {error!r}") from error
    end = spans[-1].offset + spans[-1].nbytes if spans else len(raw)
    if end != file_nbytes:
        raise UnreadableError(f"the file has {file_nbytes} bytes, its header says {end}")
    return header, spans


def _layer_spans(header: KVHeader, table: Mapping[str, Any], checksums: Sequence[str], start: int) -> tuple[_Span, ...]:
    """Position of every layer; ValueError unless the tensors follow each other without a gap, of the right shapes."""
    spans, end, num_tensors = [], 0, 0
    for index, checksum in enumerate(checksums):
        layer_start, layer = end, f"layer.{index:03d}"
        specs = tensor_specs(header, *(table[f"{layer}.{name}"]["shape"] for name in ("keys", "values")))
        for name, dtype, shape in specs:
            tensor = table[f"{layer}.{name}"]
            nbytes = math.prod(shape) * dtype.itemsize
            if tensor["data_offsets"] != [end, end + nbytes] or tuple(tensor["shape"]) != shape or min(shape) < 0:
                raise ValueError(f"{layer}.{name} at {tensor['data_offsets']}, shape {tensor['shape']}")
            end += nbytes
        num_tensors += len(specs)
        spans.append(_Span(start + layer_start, end - layer_start, specs, checksum))
    if len(checksums) != header.num_layers or len(table) != num_tensors:
        raise ValueError(f"{len(table)} tensors and {len(checksums)} checksums for {header.num_layers} layers")
    return tuple(spans)


# --- reading: one open file, one layer at a time ---


class OpenFile:
    """A read-only descriptor that closes when the last reader lets go of it, so no read meets a reused number."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1  # __del__ runs even when the next line raises
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def keepable(self) -> bool:
        """Whether half of the process's descriptors are still free (the kernel hands out the lowest number)."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit == resource.RLIM_INFINITY or self.fd < limit // 2

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on; UnreadableError when the file ends first."""
        while buffer.nbytes:
            count = os.preadv(self.fd, [buffer], offset)
            if count == 0:
                raise UnreadableError(f"the file ends at byte {offset}, {buffer.nbytes} bytes early")
            buffer, offset = buffer[count:], offset + count

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return os.fstat(self.fd).st_size


class _Bytes:
    """A chunk's file that came as one value."""

    __slots__ = ("_data", "nbytes")

    def __init__(self, data: bytes) -> None:
        self._data, self.nbytes = memoryview(data), len(data)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on; UnreadableError when the bytes end first."""
        part = self._data[offset : offset + buffer.nbytes]
        if part.nbytes < buffer.nbytes:
            raise UnreadableError(f"it ends at byte {self.nbytes}, {buffer.nbytes - part.nbytes} bytes early")
        buffer[:] = part


class _Source(Protocol):
    @property
    def nbytes(self) -> int: ...
    def read(self, buffer: memoryview, offset: int) -> None: ...


def _header_bytes(source: _Source) -> tuple[bytes, int]:
    """Length prefix with header, unverified, and the size of the whole in bytes."""
    size = source.nbytes
    prefix = bytearray(8)
    source.read(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if not len(_OPENING) + 32 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise UnreadableError(f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    source.read(memoryview(text), 8)
    return bytes(prefix + text), size


def _read_layer(source: _Source, header: KVHeader, span: _Span, index: int) -> StoredLayer:
    """One layer as it is stored, verified, in memory of its own."""
    # Normal tensors even under inference_mode: only those count in-place writes, which MemoryStore checks.
    with torch.inference_mode(False):
        buffer = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")  # not zeroed first, as bytearray is
        data = buffer.numpy().data
        source.read(data, span.offset)
        if xxh3_128_hexdigest(data) != span.checksum:
            raise UnreadableError(f"layer {index} does not match its checksum")
        tensors, end = [], 0
        for _, dtype, shape in span.tensors:  # the widest dtypes come first, so that each starts aligned
            start, end = end, end + math.prod(shape) * dtype.itemsize
            tensors.append(buffer[start:end].view(dtype).view(shape))
        return LayerKV(*tensors) if header.is_lossless else QuantizedLayer(*tensors)


def decode_chunk(data: bytes, key: str) -> MemoryKV:
    """The chunk in the bytes of its file, every byte of them verified.

    Raises UnreadableError for damage and for another key's chunk, MismatchError for another version's.
    """
    source = _Bytes(data)
    raw, nbytes = _header_bytes(source)
    header, spans = _decode_header(raw, nbytes)
    if header.key != key:
        raise UnreadableError(f"it holds the KV of {header.key}")
    return MemoryKV(header, tuple(_read_layer(source, header, span, index) for index, span in enumerate(spans)))


class DiskKV:
    """ChunkKV in a file. Each `layer` call reads and verifies that layer alone, into memory of its own.

    The file stays open, so deleting or replacing the entry does not disturb a reader. `close`, leaving a `with`
    block or garbage collection lets it go; after that, and when the process is short of descriptors, `layer` opens
    the file again and accepts it if its header, and so every checksum, is the same. Safe to share between threads.
    """

    def __init__(self, key: str, path: Path, file: OpenFile, on_damage: Callable[[str, Path, OpenFile, str], None]):
        raw, file_nbytes = _header_bytes(file)
        self.header, self._spans = _decode_header(raw, file_nbytes)
        if self.header.key != key:
            raise UnreadableError(f"it holds the KV of {self.header.key}")
        self._path, self._digits, self._on_damage = path, raw[_DIGITS], on_damage
        self._file: OpenFile | None = file if file.keepable else None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(span.nbytes for span in self._spans)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer, [H, T, D] each, on the CPU; see `stored_layer`."""
        return restored(self.stored_layer(index))

    def stored_layer(self, index: int) -> StoredLayer:
        """One layer as it is stored, on the CPU. Read-only by contract: its tensors share one buffer.

        Raises DamagedEntryError when its bytes fail their checksum, or the file is gone and was not kept open.
        """
        file = None
        try:
            file = self._file or self._reopen()
            return self._read(file, index)
        except UnreadableError as error:
            if file is not None:
                self._on_damage(self.header.key, self._path, file, str(error))
            raise DamagedEntryError(self.header.key, str(error)) from error
        except OSError as error:
            raise DamagedEntryError(self.header.key, f"layer {index} cannot be read: {error}") from error

    def verify(self, file: OpenFile) -> None:
        """Read every layer from `file`, the one this was made of; UnreadableError at the first that is damaged."""
        for index in range(self.header.num_layers):
            self._read(file, index)

    def close(self) -> None:
        """Let the file go; a read under way in another thread still finishes."""
        self._file = None

    def __enter__(self) -> DiskKV:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reopen(self) -> OpenFile:
        file = OpenFile(self._path)
        if _header_bytes(file)[0][_DIGITS] != self._digits:
            raise OSError(errno.ESTALE, "the entry was replaced by another one")
        return file

    def _read(self, file: OpenFile, index: int) -> StoredLayer:
        return _read_layer(file, self.header, self._spans[index], index)
