"""Bring stored KV into the prompt's KV, a layer at a time, ahead of the fusor.

One background reader reads and places layer i+1 while layer i is fused; KV that is in memory already is placed
without a thread. Knows ChunkKV and tensors; not where they come from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ragblend.engine.kv import ChunkKV, MemoryKV


class _Destination(Protocol):
    def write(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None: ...


class _Placed(Protocol):
    @property
    def kv(self) -> ChunkKV: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class LayerEvent(NamedTuple):
    """When one layer was read and placed, in `perf_counter` seconds."""

    layer: int
    start_s: float
    end_s: float


class LayerLoader:
    """Context manager around one request's loading. Leaving it stops the reader and joins it.

    `wait(layer)` returns when that layer of every placement is in the destination, and raises what the reader
    raised (DamagedEntryError for a damaged entry). `place(layer, keys, rows)` rotates keys to their positions.
    `depth` bounds how many layers the reader may be ahead of the fusor.
    """

    def __init__(
        self,
        placements: Sequence[_Placed],
        num_layers: int,
        place: Callable[[int, Tensor, Tensor], Tensor],
        destination: _Destination,
        device: torch.device,
        depth: int = 2,
    ) -> None:
        self._placements = placements
        self._num_layers = num_layers
        self._place = place
        self._destination = destination
        self._device = device
        self._ahead = threading.Semaphore(depth)
        self._ready = [threading.Event() for _ in range(num_layers)]
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._threaded = any(not isinstance(placement.kv, MemoryKV) for placement in placements)
        self._thread: threading.Thread | None = None
        self._rows = [torch.arange(placement.start, placement.end, device=device) for placement in placements]
        self._num_waited = 0
        self.events: list[LayerEvent] = []
        self.stall_s = 0.0

    @property
    def load_s(self) -> float:
        """Seconds spent reading and placing, overlapped or not."""
        return sum(event.end_s - event.start_s for event in self.events)

    def __enter__(self) -> LayerLoader:
        if self._threaded:
            self._thread = threading.Thread(target=self._read_all, name="ragblend-loader", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._ahead.release()
        if self._thread is not None:
            self._thread.join()

    def wait(self, layer: int) -> None:
        """Block until `layer` is placed; re-raises the reader's error. A layer waited for before is there at once."""
        if layer < self._num_waited:
            return
        start_s = perf_counter()
        if self._thread is None:
            self._load(layer)
        else:
            self._ready[layer].wait()
            if self._error is not None:
                raise self._error
            self._ahead.release()
        self._num_waited = layer + 1
        self.stall_s += perf_counter() - start_s

    def _read_all(self) -> None:
        try:
            with torch.inference_mode():
                for layer in range(self._num_layers):
                    self._ahead.acquire()
                    if self._stopped.is_set():
                        return
                    self._load(layer)
                    self._ready[layer].set()
        except BaseException as error:  # handed to the caller by wait()
            self._error = error
            for event in self._ready:
                event.set()

    def _load(self, layer: int) -> None:
        start_s = perf_counter()
        for placement, rows in zip(self._placements, self._rows, strict=True):
            keys, values = placement.kv.layer(layer)
            keys, values = keys.to(self._device), values.to(self._device)
            self._destination.write(
                layer, slice(placement.start, placement.end), self._place(layer, keys, rows), values
            )
        self.events.append(LayerEvent(layer, start_s, perf_counter()))
