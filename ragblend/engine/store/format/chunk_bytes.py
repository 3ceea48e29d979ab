"""Chunk files as bytes, for stores without files such as Redis: decoded whole, or range by range while they arrive.

Every layer is checked against the checksum in the verified header, so that a part of a file is as safe as the whole.
Depends on `chunk_file`, which has the format. Read `PartialChunk` first.
"""

from __future__ import annotations

from ragblend.engine.store.format.chunk_file import (
    MAX_HEADER_BYTES,
    NOTHING_MORE,
    ReadRequirements,
    UnreadableEntryError,
    decode_header,
    read_header,
    read_layer,
)
from ragblend.engine.store.format.kv import KVHeader, MemoryKV, StoredLayer


class _Bytes:
    """The bytes of a chunk file from `offset` on. The whole file has `nbytes` bytes."""

    __slots__ = ("_data", "_offset", "nbytes")

    def __init__(self, data: bytes, offset: int, nbytes: int) -> None:
        self._data, self._offset, self.nbytes = memoryview(data), offset, nbytes

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` of the file. Raises UnreadableEntryError if the bytes end first."""
        start = offset - self._offset
        part = self._data[start : start + buffer.nbytes]
        if part.nbytes < buffer.nbytes:
            end = self._offset + len(self._data)
            raise UnreadableEntryError(f"it ends at byte {end}, {buffer.nbytes - part.nbytes} bytes early")
        buffer[:] = part


class PartialChunk:
    """A chunk file whose layers are decoded from ranges of its bytes.

    `start`: its first bytes, at least `header_end(start)` of them. `file_nbytes`: the size of the file. Raises
    UnreadableEntryError if the header is damaged, or does not meet `requirements`.
    """

    def __init__(self, start: bytes, file_nbytes: int, key: str, requirements: ReadRequirements = NOTHING_MORE) -> None:
        self._entry = decode_header(*read_header(_Bytes(start, 0, file_nbytes)), key, requirements)

    @property
    def header(self) -> KVHeader:
        """The verified header."""
        return self._entry.header

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(span.nbytes for span in self._entry.spans)

    def layer_range(self, index: int) -> tuple[int, int]:
        """Return the offsets in the file at which a layer begins and ends."""
        span = self._entry.spans[index]
        return span.offset, span.offset + span.nbytes

    def decode_layer(self, index: int, data: bytes, offset: int) -> StoredLayer:
        """Return a layer from `data`, the bytes of the file from `offset` on. Raises UnreadableEntryError."""
        return read_layer(_Bytes(data, offset, offset + len(data)), self._entry, index)


def header_end(start: bytes) -> int:
    """Return the offset at which the header ends, from the first bytes of a file. It is at most MAX_HEADER_BYTES + 8.

    >>> header_end((1000).to_bytes(8, "little") + b"{...}")
    1008
    """
    return 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES)


def decode_chunk(data: bytes, key: str, requirements: ReadRequirements = NOTHING_MORE) -> MemoryKV:
    """Decode and verify `data`, the bytes of a chunk file. Return the chunk.

    Raises UnreadableEntryError if the bytes are damaged, have another key than `key`, or do not meet `requirements`.
    For another format version, the error is the subclass IncompatibleEntryError.
    """
    chunk = PartialChunk(data, len(data), key, requirements)
    layers = range(chunk.header.num_layers)
    return MemoryKV(chunk.header, tuple(chunk.decode_layer(index, data, 0) for index in layers))
