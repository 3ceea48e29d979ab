"""The chunk file: one stored chunk as a safetensors file that is read layer by layer, with every byte under a checksum.

The file's metadata is one JSON string, because safetensors writes several keys in random order and one key
deterministically. Its first field is the xxh3_128 of the length prefix and the header, computed with that field's own
digits zeroed. The field is at a fixed offset and is checked before anything is parsed; every later format version keeps
this rule. The tensors of a layer are adjacent under one checksum: keys and values as computed (format version 1), or
scales, first tokens and codes of KV in eight bits (version 2, `QuantizedLayer`). Token ids are plain JSON numbers:
about as many bytes as base64 for five-digit ids, and `jq` can show them.

xxh3 detects damage but not tampering, because another layer with the same checksum can be constructed. A store with a
key therefore writes version 3: the layer checksums are BLAKE3 digests, and the header's second field is its signature,
computed with the digits of both fields zeroed. The signature authenticates the header and, through the digests, every
layer; layers are still read and checked one at a time. See `signing`.

`ReadRequirements` lists what a reader requires apart from intact bytes. Works on headers, tensors and one file, or its
bytes, at a time. Does not depend on directories, eviction or prompts.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from ragblend.engine.store.format.finite import layer_is_finite
from ragblend.engine.store.format.keys import key_from_header
from ragblend.engine.store.format.kv import (
    LAYOUT_VERSION,
    KVHeader,
    KVSpec,
    LayerKV,
    MemoryKV,
    StoredLayer,
    TensorSpec,
    dequantized,
    tensor_specs,
)
from ragblend.engine.store.format.quantize import CODE_DTYPES, QuantizedLayer
from ragblend.engine.store.format.signing import DIGITS, UNSIGNED, StoreKey
from ragblend.errors import DamagedEntryError, UsageError
from ragblend.files.reading import checked_file_size, open_regular_file

FORMAT_VERSION = 1
"""Version of the file format of KV in the model's dtype. LAYOUT_VERSION is the version of the tensors' meaning."""
QUANTIZED_FORMAT_VERSION = 2
"""Version of the file format of KV in eight bits. Other unsigned entries have version 1."""
SIGNED_FORMAT_VERSION = 3
"""Version of signed entries, in any dtype."""

_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_OPENING = b'{"__metadata__":{"ragblend":"{\\"header_xxh3_128\\":\\"'
_DIGITS = slice(8 + len(_OPENING), 8 + len(_OPENING) + 32)
_SIGNATURE_OPENING = b'\\",\\"signature\\":\\"'
_SIGNATURE = slice(_DIGITS.stop + len(_SIGNATURE_OPENING), _DIGITS.stop + len(_SIGNATURE_OPENING) + DIGITS)
MAX_HEADER_BYTES = 8 << 20  # a million tokens; parsed, it can take twenty times as much memory
_MAX_DIM = 1 << 31


class UnreadableEntryError(Exception):
    """Damaged bytes, or bytes that are not the requested entry. A store's `get` treats this error as a miss."""


class IncompatibleEntryError(UnreadableEntryError):
    """An intact entry with another format version than this reader's, or with other token ids than requested."""


class UnsignedEntryError(UnreadableEntryError):
    """An entry that is not signed with the reader's store key."""


@dataclass(frozen=True, slots=True)
class ReadRequirements:
    """The conditions, other than intact bytes, under which a reader accepts an entry.

    `store_key`: the key that must have signed the entry; None requires no signature. `specs`: the dtype and shapes that
    the KV of each known model must have, by the model's fingerprint. Models may be added while the store is open.
    """

    store_key: StoreKey | None = None
    specs: dict[str, KVSpec] = field(default_factory=dict)


NOTHING_MORE = ReadRequirements()


class _Digest(NamedTuple):
    """A digest algorithm for layers: its header field, its number of hex digits, and a constructor."""

    field: str
    num_digits: int
    of: Callable[[], Any]  # an object with `update` and `hexdigest`


def _blake3() -> Any:
    from blake3 import blake3  # imported here, because a store without a key does not need it

    return blake3()


_CHECKSUM, _SECURE = _Digest("layers_xxh3_128", 32, xxh3_128), _Digest("layers_blake3", 64, _blake3)


# --- writing: facts -> header bytes, then one layer after the other ---


def header_nbytes(kv: MemoryKV, store_key: StoreKey | None = None) -> int:
    """Return the offset in bytes of the first tensor in a chunk's file: the size of the length prefix and the header.

    Raises UsageError if the header is larger than the format allows.
    """
    digest = _digest_for(store_key)
    nbytes = len(_encode_header(kv.header, kv.layers, ["0" * digest.num_digits] * len(kv.layers), store_key))
    if nbytes > MAX_HEADER_BYTES:
        num_tokens = len(kv.header.prefix_ids) + kv.header.num_tokens
        raise UsageError(
            f"a chunk and what it was computed behind, {num_tokens} tokens, are too long to be stored: their ids take "
            f"{nbytes} bytes, {MAX_HEADER_BYTES} are read; split documents into smaller chunks (`chunk_size`)"
        )
    return nbytes


def write_chunk(stream: BinaryIO, kv: MemoryKV, data_offset: int, store_key: StoreKey | None = None) -> None:
    """Write `kv` as a chunk file to an empty, seekable stream.

    data_offset: `header_nbytes(kv, store_key)`. store_key: the key that signs the file; None: no signature.
    """
    # Checksums belong in the header but come from the data: write that first, so each layer is copied once.
    stream.seek(data_offset)
    checksums = []
    for layer in kv.layers:
        data = [_tensor_bytes(tensor) for tensor in layer]
        checksums.append(_checksum(_digest_for(store_key), *data))
        stream.writelines(data)
    stream.seek(0)
    header = _encode_header(kv.header, kv.layers, checksums, store_key)
    assert len(header) == data_offset
    stream.write(header)


def encode_chunk(kv: MemoryKV, store_key: StoreKey | None = None) -> bytes:
    """Return the bytes of the chunk file of `kv`, for stores without files, such as Redis; see `write_chunk`."""
    stream = io.BytesIO()
    write_chunk(stream, kv, header_nbytes(kv, store_key), store_key)
    return stream.getvalue()


def _digest_for(store_key: StoreKey | None) -> _Digest:
    return _CHECKSUM if store_key is None else _SECURE


def _encode_header(
    header: KVHeader, layers: Sequence[StoredLayer], checksums: Sequence[str], store_key: StoreKey | None
) -> bytes:
    """Return the length prefix and the header. Their size in bytes does not depend on the checksums."""
    version = FORMAT_VERSION if header.is_lossless else QUANTIZED_FORMAT_VERSION
    facts = {
        "header_xxh3_128": "0" * 32,  # first, so that its digits sit at _DIGITS
        **({} if store_key is None else {"signature": "0" * DIGITS}),  # second, at _SIGNATURE
        "format_version": version if store_key is None else SIGNED_FORMAT_VERSION,
        "layout_version": LAYOUT_VERSION,
        "key": header.key,
        "fingerprint": header.fingerprint,
        "namespace": header.namespace,
        "dtype": header.dtype,
        **({} if header.is_lossless else {"kv_dtype": header.kv_dtype}),
        "num_layers": header.num_layers,
        "prefix_ids": [int(token) for token in header.prefix_ids],
        "token_ids": [int(token) for token in header.token_ids],
        _digest_for(store_key).field: list(checksums),
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
    if store_key is not None:
        raw[_SIGNATURE] = store_key.sign("entry", header.namespace, raw).encode()
    raw[_DIGITS] = xxh3_128_hexdigest(raw).encode()
    return bytes(raw)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's elements in row-major order; no copy when it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(digest: _Digest, *parts: memoryview) -> str:
    """Return the hex digest of the concatenated parts."""
    made = digest.of()
    for part in parts:
        made.update(part)
    return str(made.hexdigest())


# --- reading: header bytes -> facts and positions ---


class _LayerExtent(NamedTuple):
    """Offset, size, tensors and checksum of one layer in the file."""

    offset: int
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    checksum: str


class ParsedEntry(NamedTuple):
    """The validated header of an entry and the extents of its layers."""

    header: KVHeader
    spans: tuple[_LayerExtent, ...]
    digest: _Digest
    is_trusted: bool  # signed with the reader's key


def decode_header(raw: bytes, file_nbytes: int, key: str, requirements: ReadRequirements) -> ParsedEntry:
    """Parse and validate the header `raw` of a file of `file_nbytes` bytes that should hold the entry `key`.

    Every field is checked: against `key`, which is computed from model, prefix, tokens and namespace; against the
    model's spec if it is known; and the sum of all layers against the file's size. No announced size is allocated
    before these checks. Raises UnreadableEntryError.
    """
    if raw[8 : _DIGITS.start] != _OPENING:
        raise UnreadableEntryError("not written by ragblend")
    zeroed = bytearray(raw)
    zeroed[_DIGITS] = b"0" * 32
    if xxh3_128_hexdigest(zeroed).encode() != raw[_DIGITS]:
        raise UnreadableEntryError("the header does not match its checksum")
    try:
        table = json.loads(raw[8:])
        facts = json.loads(table.pop("__metadata__")["ragblend"])
        version, layout, kv_dtype = facts["format_version"], facts["layout_version"], facts.get("kv_dtype")
        readable_versions = [FORMAT_VERSION, QUANTIZED_FORMAT_VERSION, SIGNED_FORMAT_VERSION]
        if version not in readable_versions or layout != LAYOUT_VERSION or kv_dtype not in (None, *CODE_DTYPES):
            versions = _short(f"{(version, layout)}{f' with {kv_dtype}' if kv_dtype else ''}")
            reads = [(each, LAYOUT_VERSION) for each in readable_versions]
            raise IncompatibleEntryError(f"format and layout versions {versions}, this ragblend reads {reads}")
        is_signed = version == SIGNED_FORMAT_VERSION
        header = KVHeader(
            key=facts["key"],
            fingerprint=facts["fingerprint"],
            prefix_ids=tuple(facts["prefix_ids"]),
            token_ids=tuple(facts["token_ids"]),
            num_layers=facts["num_layers"],
            dtype=facts["dtype"],
            namespace=facts["namespace"],
            kv_dtype=kv_dtype,
        )
        if header.key != key:
            raise UnreadableEntryError(f"it holds the KV of {_short(str(header.key))}")
        if key_from_header(header) != key:
            raise UnreadableEntryError("its token ids, model, prefix and namespace do not make its key")
        is_trusted = is_signed and _is_signed(raw, zeroed, header.namespace, requirements.store_key)
        if requirements.store_key is not None and not is_trusted:
            raise UnsignedEntryError(UNSIGNED)
        digest = _SECURE if is_signed else _CHECKSUM
        spans = _layer_spans(header, table, facts[digest.field], start=len(raw))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise UnreadableEntryError(f"the header does not describe an entry: {_short(repr(error))}") from error
    if (end := spans[-1].offset + spans[-1].nbytes) != file_nbytes:
        raise UnreadableEntryError(f"the file has {file_nbytes} bytes, its header says {end}")
    if (shape := requirements.specs.get(header.fingerprint)) is not None:
        problem = shape.mismatch_reason(header, [_dims(span.tensors) for span in spans])
        if problem:
            raise UnreadableEntryError(problem)
    return ParsedEntry(header, spans, digest, is_trusted)


def _is_signed(raw: bytes, zeroed: bytearray, namespace: str, store_key: StoreKey | None) -> bool:
    """Return True if the header `raw` has the key's signature. `zeroed`: the header with its checksum digits zeroed."""
    if store_key is None or raw[_DIGITS.stop : _SIGNATURE.start] != _SIGNATURE_OPENING:
        return False
    zeroed[_SIGNATURE] = b"0" * DIGITS
    return store_key.has_signed("entry", namespace, zeroed, raw[_SIGNATURE].decode("latin-1"))


def _layer_spans(
    header: KVHeader, table: Mapping[str, Any], checksums: Sequence[str], start: int
) -> tuple[_LayerExtent, ...]:
    """Return the extent of every layer. Raises ValueError for gaps and for wrong shapes."""
    spans, end, num_tensors = [], 0, 0
    for index, checksum in enumerate(checksums):
        layer_start, layer = end, f"layer.{index:03d}"
        specs = tensor_specs(header, *(table[f"{layer}.{name}"]["shape"] for name in ("keys", "values")))
        for name, dtype, shape in specs:
            tensor = table[f"{layer}.{name}"]
            nbytes = math.prod(shape) * dtype.itemsize
            if (
                tensor["data_offsets"] != [end, end + nbytes]
                or tensor["shape"] != list(shape)
                or not all(type(count) is int and 0 < count < _MAX_DIM for count in shape)
            ):
                raise ValueError(f"{layer}.{name} at {tensor['data_offsets']}, shape {tensor['shape']}")
            end += nbytes
        num_tensors += len(specs)
        spans.append(_LayerExtent(start + layer_start, end - layer_start, specs, checksum))
    if not spans or len(spans) != header.num_layers or len(table) != num_tensors:
        raise ValueError(f"{len(table)} tensors and {len(checksums)} checksums for {header.num_layers} layers")
    return tuple(spans)


def _short(text: str) -> str:
    """Return `text` cut to 200 characters; a field of a header may be as long as the header."""
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _dims(tensors: Sequence[TensorSpec]) -> tuple[int, int, int]:
    """Return (H, D of keys, D of values) of a layer; (H, D, 0) if keys and values differ in H."""
    keys, values = tensors[-2].shape, tensors[-1].shape
    return keys[0], keys[2], values[2] if values[0] == keys[0] else 0


# --- reading: one open file, one layer at a time ---


class SharedFile:
    """A file that several readers share, open for reading. The file is closed when no reader refers to it any more.

    As long as a reader refers to it, the system cannot give the number of its descriptor to another file.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1  # __del__ runs even when the next line raises
        self.fd = open_regular_file(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def can_stay_open(self) -> bool:
        """True if the process has enough free file descriptors to keep this file open.

        The kernel assigns the lowest free number, so a high number means that many descriptors are in use. The number
        of this file's descriptor must therefore be below half of the limit.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit == resource.RLIM_INFINITY or self.fd < limit // 2

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises UnreadableEntryError if the file ends first."""
        while buffer.nbytes:
            count = os.preadv(self.fd, [buffer], offset)
            if count == 0:
                raise UnreadableEntryError(f"the file ends at byte {offset}, {buffer.nbytes} bytes early")
            buffer, offset = buffer[count:], offset + count

    @property
    def nbytes(self) -> int:
        """The file's size in bytes. Raises UnreadableEntryError for a sparse file."""
        try:
            return checked_file_size(self.fd)
        except OSError as error:
            raise UnreadableEntryError(error.strerror or str(error)) from error


class Readable(Protocol):
    """A chunk file, or the part of one that has arrived."""

    @property
    def nbytes(self) -> int:
        """The size of the whole file in bytes."""

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises UnreadableEntryError if the bytes end first."""


def read_header(source: Readable) -> tuple[bytes, int]:
    """Return the length prefix with the header, unverified, and the size of the file in bytes."""
    size = source.nbytes
    prefix = bytearray(8)
    source.read(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if not len(_OPENING) + 32 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise UnreadableEntryError(f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    source.read(memoryview(text), 8)
    return bytes(prefix + text), size


def read_layer(source: Readable, entry: ParsedEntry, index: int) -> StoredLayer:
    """Read and verify one layer as it is stored. The tensors share one newly allocated buffer."""
    span = entry.spans[index]
    # Normal tensors even under inference_mode: only those count in-place writes, which MemoryStore checks.
    with torch.inference_mode(False):
        try:
            buffer = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")  # not zeroed first, as bytearray is
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"there is no memory for {span.nbytes} bytes") from error
        data = buffer.numpy().data
        source.read(data, span.offset)
        if _checksum(entry.digest, data) != span.checksum:
            raise UnreadableEntryError(f"layer {index} does not match its checksum")
        layer = _layer_in(buffer, span.tensors, entry.header)
    # `TieredStore.put` stores no infinity or NaN, so a signed entry is finite. An unsigned one may be forged.
    if not entry.is_trusted and not layer_is_finite(layer):
        raise UnreadableEntryError(f"layer {index} holds infinity or NaN")
    return layer


def _layer_in(buffer: Tensor, specs: Sequence[TensorSpec], header: KVHeader) -> StoredLayer:
    """Return the layer whose tensors lie side by side in `buffer`."""
    tensors, end = [], 0
    for _, dtype, shape in specs:  # the widest dtypes come first, so that each starts aligned
        start, end = end, end + math.prod(shape) * dtype.itemsize
        tensors.append(buffer[start:end].view(dtype).view(shape))
    return LayerKV(*tensors) if header.is_lossless else QuantizedLayer(*tensors)


class DiskKV:
    """ChunkKV in a file. Each `layer` call reads and verifies only that layer, into newly allocated memory.

    The file normally stays open, so a reader is not disturbed if the entry is deleted or replaced. If the process has
    few free descriptors, each `layer` call opens the file instead. The call then raises DamagedEntryError if the entry
    was deleted, or replaced by an entry with another header. Safe to share between threads.

    on_damage: called with key, path, open file and reason when a layer is damaged.
    """

    def __init__(
        self,
        key: str,
        path: Path,
        file: SharedFile,
        on_damage: Callable[[str, Path, SharedFile, str], None],
        requirements: ReadRequirements = NOTHING_MORE,
    ) -> None:
        raw, file_nbytes = read_header(file)
        self._entry = decode_header(raw, file_nbytes, key, requirements)
        self.header = self._entry.header
        self._path, self._digits, self._on_damage = path, raw[_DIGITS], on_damage
        self._file: SharedFile | None = file if file.can_stay_open else None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(span.nbytes for span in self._entry.spans)

    def layer(self, index: int) -> LayerKV:
        """Return keys and values of one layer, [H, T, D] each, on the CPU; see `stored_layer`."""
        return dequantized(self.stored_layer(index))

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored, on the CPU. Callers must not write to its tensors, which share one buffer.

        Raises DamagedEntryError if the layer does not match its checksum, or if its file cannot be read.
        """
        file = None
        try:
            file = self._file or self._reopen()
            return read_layer(file, self._entry, index)
        except UnreadableEntryError as error:
            if file is not None:
                self._on_damage(self.header.key, self._path, file, str(error))
            raise DamagedEntryError(self.header.key, str(error)) from error
        except OSError as error:
            raise DamagedEntryError(self.header.key, f"layer {index} cannot be read: {error}") from error

    def verify(self, file: SharedFile) -> None:
        """Read and verify every layer. Raises UnreadableEntryError for damage. file: the open file of this entry."""
        for index in range(self.header.num_layers):
            read_layer(file, self._entry, index)

    def _reopen(self) -> SharedFile:
        file = SharedFile(self._path)
        if read_header(file)[0][_DIGITS] != self._digits:
            raise OSError(errno.ESTALE, "the entry was replaced by another one")
        return file
