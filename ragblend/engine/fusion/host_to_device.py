"""Copies of stored layers from the host's memory to the device that computes.

On a GPU the copies run on a separate stream, so that they overlap with computing. `HostToDeviceCopier` copies layers
that a thread reads from slower tiers, and waits for each copy. `LayerCopies` queues copies of chunks in page-locked
memory ahead of their use, and never makes the host wait. Depends on tensors, not on tiers and plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.format.kv import StoredLayer, aligned_nbytes, view_as


@cache
def _copying_stream(device: torch.device) -> Any:
    """Return the stream of all copies to a device. torch keeps freed memory for the stream that allocated it, so that
    one stream per request would keep as much memory for each.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostToDeviceCopier:
    """Copies layers from host memory to `device`. Any thread may call it.

    On a GPU, only work on the stream `computing` may use the copies (see `in_compute_order`). Their memory could be
    used again while another stream still reads them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.overlaps_compute = device.type == "cuda"
        """True if a copy can run while the device computes, so that a thread helps even for KV in host memory."""
        self.computing: Any = torch.cuda.current_stream(device) if self.overlaps_compute else None
        """The stream of the thread that created the copier; None if the device has no streams."""
        self.copying: Any = _copying_stream(device) if self.overlaps_compute else None
        """The stream of the copies; None if the device has no streams."""

    def in_compute_order(self) -> AbstractContextManager[Any]:
        """Return a context manager in which GPU work is queued on the stream `computing`, on which the model runs.

        Without it, another thread queues its work on the device's default stream. The model could then read KV before
        that thread has written the KV.
        """
        return torch.cuda.stream(self.computing) if self.overlaps_compute else nullcontext()

    def copy_to_device(self, layers: Sequence[StoredLayer]) -> list[StoredLayer]:
        """Return the layers on the device, ready for use; the same tensors if they are there already."""
        tensors = _tensors_of(layers)
        if not self.overlaps_compute or all(tensor.is_cuda for tensor in tensors):
            return _as_layers([tensor.to(self._device) for tensor in tensors], layers)
        sources = list(map(_page_locked, tensors))
        copies = self.allocate(sources)
        with torch.cuda.stream(self.copying):
            torch._foreach_copy_(copies, sources, non_blocking=True)
        self.copying.synchronize()  # waits for the copies alone, not for the computing stream
        return _as_layers(copies, layers)

    def allocate(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the device like `sources`, in one block of memory. The copying stream may write to this
        block without waiting for the computing stream.
        """
        starts = list(accumulate(map(aligned_nbytes, sources), initial=0))
        with torch.cuda.stream(self.copying):
            block = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        block.record_stream(self.computing)  # else its memory could be used again while the computing stream reads it
        return [view_as(block[start:], source) for start, source in zip(starts, sources, strict=False)]


class _Copy(NamedTuple):
    """Layers that are being copied, and the event after their copy."""

    layers: list[StoredLayer]
    copies: list[Tensor]
    is_copied: Any


class LayerCopies:
    """The layers of some chunks in page-locked memory, copied to a GPU `depth` layers ahead of their use.

    `read(layer)` returns the layers of all chunks as they are stored. The thread that created `copier` calls
    `next_layer` for each layer in order. It must queue all GPU work on the returned tensors before it calls
    `next_layer` again. Once that work is done, later layers are copied into the same memory. At most `depth` + 1 layers
    are on the device.
    """

    def __init__(
        self, copier: HostToDeviceCopier, read: Callable[[int], list[StoredLayer]], num_layers: int, depth: int
    ) -> None:
        self._copier, self._read, self._num_layers, self._depth = copier, read, num_layers, depth
        self._queued: deque[_Copy] = deque()
        self._free: deque[tuple[list[Tensor], Any]] = deque()  # tensors, and the event after their last use
        self._num_started = 0
        self._taken: _Copy | None = None

    def next_layer(self) -> list[StoredLayer]:
        """Return the next layer of all chunks on the device, and queue the copies of later ones."""
        if self._taken is not None:
            self._free.append((self._taken.copies, self._copier.computing.record_event()))
        while self._num_started < self._num_layers and len(self._queued) <= self._depth:
            self._queued.append(self._start(self._num_started))
            self._num_started += 1
        self._taken = self._queued.popleft()
        self._copier.computing.wait_event(self._taken.is_copied)
        return self._taken.layers

    def _start(self, layer: int) -> _Copy:
        layers = self._read(layer)
        sources = [each if each.is_contiguous() else _page_locked(each) for each in _tensors_of(layers)]
        copies, is_free = self._free.popleft() if self._free else ([], None)
        if is_free is not None and [each.shape for each in copies] == [each.shape for each in sources]:
            self._copier.copying.wait_event(is_free)
        else:
            copies = self._copier.allocate(sources)
        with torch.cuda.stream(self._copier.copying):
            # One call for all tensors, because for short prompts the host's time limits.
            torch._foreach_copy_(copies, sources, non_blocking=True)
            is_copied = self._copier.copying.record_event()
        return _Copy(_as_layers(copies, layers), copies, is_copied)


def is_page_locked(layer: StoredLayer) -> bool:
    """Return True if a GPU can read the layer's tensors from host memory without another copy."""
    return all(tensor.is_pinned() for tensor in layer)


def _page_locked(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, contiguous in page-locked memory.

    torch keeps page-locked blocks for later use, and uses none again before the copy from it has ended.
    """
    if tensor.is_contiguous() and tensor.is_pinned():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _tensors_of(layers: Sequence[StoredLayer]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in layer]


def _as_layers(tensors: Sequence[Tensor], like: Sequence[StoredLayer]) -> list[StoredLayer]:
    """Return the tensors as layers of the types of `like`."""
    each = iter(tensors)
    return [type(layer)(*(next(each) for _ in layer)) for layer in like]
