"""One entry on its way from a remote tier, readable while it arrives: `RemoteFetch`.

The first range of the value has the header. The layers follow in their order, several in a range if they are small.
Each is verified when it arrives.
Works on a ByteStore and the format; does not depend on threads that fetch, on other tiers or on models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic

from ragblend.engine.store.base import ByteStore
from ragblend.engine.store.format.chunk_bytes import PartialChunk, header_end
from ragblend.engine.store.format.chunk_file import ReadRequirements
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, StoredLayer, dequantized
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.errors import DamagedEntryError, LateEntryError

START_BYTES = 1 << 16
"""Bytes of the first range: the header of a chunk of some thousand tokens, or the whole of a small value."""


class RemoteFetch:
    """An entry of a remote tier while it arrives, and afterwards. A ChunkKV once `wait_for_header` returned True.

    The tier calls `read_next` while `continues`, in one thread at a time: first for the header, and for the layers once
    an engine wants them (`read_ahead`). `resume` is called when there is more to read again. Any thread may read.
    `stored_layer` waits until the layer has arrived, at the latest until `until_s` on the monotonic clock. It then
    raises LateEntryError, and DamagedEntryError for a damaged layer.
    """

    def __init__(
        self,
        key: str,
        requirements: ReadRequirements,
        timeout_s: float,
        resume: Callable[[RemoteFetch], object] = lambda fetch: None,
    ) -> None:
        self.key = key
        self._resume = resume
        self._is_wanted = self.is_paused = False
        self.started_s = monotonic()
        self.until_s = self.started_s + timeout_s
        self.is_over = False
        """True once the whole entry has arrived, or no more of it will."""
        self.is_damaged = False
        self.whole: MemoryKV | None = None
        """The entry, once all of it has arrived."""
        self._requirements, self._timeout_s = requirements, timeout_s
        self._chunk: PartialChunk | None = None
        self._layers: dict[int, StoredLayer] = {}
        self._left: list[tuple[int, ...]] = []  # layers still to read, in ranges
        self._changed = threading.Condition()

    # -- reading, for an engine

    @property
    def header(self) -> KVHeader:
        """The verified header."""
        assert self._chunk is not None
        return self._chunk.header

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        assert self._chunk is not None
        return self._chunk.nbytes

    @property
    def is_readable(self) -> bool:
        """True if the header has arrived, and the rest has arrived or may still arrive in time."""
        has_time = self._chunk is not None and not self.is_over and monotonic() < self.until_s
        return self.whole is not None or has_time

    def wait_for_header(self, until_s: float) -> bool:
        """Wait until the header has arrived, or the entry is known to be missing. Return True if it is readable."""
        self._wait(lambda: self._chunk is not None, until_s)
        return self.is_readable

    def read_ahead(self) -> None:
        """Let the layers arrive in the background."""
        with self._changed:
            self._is_wanted, resumes, self.is_paused = True, self.is_paused, False
        if resumes:
            self._resume(self)

    def wait_until_over(self, until_s: float) -> bool:
        """Wait until no more of the entry arrives. Return False if it still does at `until_s`."""
        self.read_ahead()
        return self._wait(lambda: self.is_over, until_s)

    def layer(self, index: int) -> LayerKV:
        """Return keys and values of one layer, in the dtype of the computation; see `stored_layer`."""
        return dequantized(self.stored_layer(index))

    def stored_layer(self, index: int) -> StoredLayer:
        """Return one layer as it is stored. Waits until it has arrived."""
        self.read_ahead()
        self._wait(lambda: index in self._layers, self.until_s)
        if index in self._layers:
            return self._layers[index]
        if self.is_damaged:
            raise DamagedEntryError(self.key, f"layer {index} did not arrive intact")
        reason = f"layer {index} did not arrive: it was deleted, or takes longer than {self._timeout_s:g} s"
        raise LateEntryError(self.key, reason)

    def _wait(self, has_come: Callable[[], bool], until_s: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: has_come() or self.is_over, max(0.0, until_s - monotonic())))

    # -- fetching, for the tier

    @property
    def continues(self) -> bool:
        """True if `read_next` has more to read now. Once False, `resume` is called when that changes."""
        with self._changed:
            self.is_paused = not self.is_over and not self._is_wanted and self._chunk is not None
            return not self.is_over and not self.is_paused

    def read_next(self, values: ByteStore, speed: ReadSpeed) -> None:
        """Read and verify the next range of the value. Raises UnreadableEntryError, and the errors of `values`."""
        if self._chunk is None:
            self._read_start(values, speed)
            return
        indices = self._left[0]
        start, end = self._chunk.layer_range(indices[0])[0], self._chunk.layer_range(indices[-1])[1]
        speed.begin()
        byte_range = None
        try:
            byte_range = values.get_range(self.key, start, end)
        finally:
            speed.end(0 if byte_range is None else len(byte_range.data))
        if byte_range is None:  # it was deleted or evicted while it was read
            self.stop()
            return
        self._decode(self._chunk, indices, byte_range.data, start)
        self._left.pop(0)
        self._publish()

    def stop(self, *, is_damaged: bool = False) -> None:
        """No more of the entry arrives."""
        with self._changed:
            self.is_over, self.is_damaged = True, self.is_damaged or is_damaged
            self._changed.notify_all()

    def _read_start(self, values: ByteStore, speed: ReadSpeed) -> None:
        start_s = monotonic()
        byte_range = values.get_range(self.key, 0, START_BYTES)
        speed.record_latency(monotonic() - start_s)
        if byte_range is not None and (end := header_end(byte_range.data)) > len(byte_range.data):
            byte_range = values.get_range(self.key, 0, end)
        if byte_range is None:
            self.stop()
            return
        chunk = PartialChunk(byte_range.data, byte_range.size, self.key, self._requirements)
        if byte_range.size <= len(byte_range.data):
            self._decode(chunk, range(chunk.header.num_layers), byte_range.data, 0)
        else:
            self._left = list(_layer_ranges(chunk, values.min_range_bytes))
        self._chunk = chunk
        self._publish()

    def _decode(self, chunk: PartialChunk, indices: range | tuple[int, ...], data: bytes, offset: int) -> None:
        for index in indices:
            self._layers[index] = chunk.decode_layer(index, data, offset)

    def _publish(self) -> None:
        if not self._left:
            self.whole = MemoryKV(self.header, tuple(self._layers[index] for index in range(self.header.num_layers)))
        with self._changed:
            self.is_over = not self._left
            self._changed.notify_all()


def _layer_ranges(chunk: PartialChunk, min_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield the layers in groups that are adjacent in the file, of `min_bytes` or more."""
    group: list[int] = []
    for index in range(chunk.header.num_layers):
        group.append(index)
        if chunk.layer_range(index)[1] - chunk.layer_range(group[0])[0] >= min_bytes:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)
