"""Copies of stored layers from the host's memory to the device that computes.

On a GPU the copies run on a separate stream, so that they overlap with computing. `HostToDeviceCopier` copies layers
that a thread reads from slower tiers, and waits for each copy. `LayerCopies` queues copies of chunks in page-locked
memory ahead of their use, and never makes the host wait: `plan_upload` says which bytes go where, some layers at once.
Depends on tensors, not on tiers and plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.format.kv import ChunkKV, StoredLayer, aligned_nbytes, copy_into, layer_view, layer_views

LAYERS_PER_COPY = 3
"""Layers of a chunk that are copied at once. More take fewer copies, and delay the first layer."""


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
            return [type(layer)(*(tensor.to(self._device) for tensor in layer)) for layer in layers]
        copies = layer_views(self.allocate(sum(map(aligned_nbytes, tensors))), layers)
        self.queue_copies(_tensors_of(copies), list(map(_page_locked, tensors)))
        self.copying.synchronize()  # waits for the copies alone, not for the computing stream
        return copies

    def allocate(self, nbytes: int) -> Tensor:
        """Return a block of memory on the device, [nbytes] uint8. The copying stream may write to it without waiting
        for the computing stream.
        """
        with torch.cuda.stream(self.copying):
            block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        block.record_stream(self.computing)  # else its memory could be used again while the computing stream reads it
        return block

    def queue_copies(self, targets: list[Tensor], sources: list[Tensor], after: Any = None) -> Any:
        """Queue copies from page-locked memory on the copying stream. Return the event after them.

        after: an event that they wait for, or None.
        """
        if after is not None:
            self.copying.wait_event(after)
        with torch.cuda.stream(self.copying):
            # One call for all tensors, because for short prompts the host's time limits.
            torch._foreach_copy_(targets, sources, non_blocking=True)
            return self.copying.record_event()


class Copy(NamedTuple):
    """One copy of an upload: the bytes `source` [N] uint8 go to the block of the group, from `offset` on."""

    source: Tensor
    offset: int


class Upload(NamedTuple):
    """The copies of one group of layers of some chunks, and what the block that they fill contains.

    `layers[i][c]`: for layer i of the group and chunk c, its offset in bytes, and the layer in host memory.
    """

    copies: list[Copy]
    nbytes: int
    layers: list[list[tuple[int, StoredLayer]]]

    def layers_in(self, block: Tensor) -> list[list[StoredLayer]]:
        """Return the layers of all chunks, as views of `block` [nbytes] uint8 on the device."""
        return [[layer_view(block[offset:], like) for offset, like in layer] for layer in self.layers]


def plan_upload(chunks: Sequence[ChunkKV], layers: range) -> Upload:
    """Return the copies of some layers of `chunks`, whose KV is in page-locked memory.

    Tensors that follow one another in memory are one copy. So each chunk has one copy, and one more where a block of
    its memory ends. A part of a chunk is first copied together in page-locked memory.
    """
    copies, nbytes = list[Copy](), 0
    planned: list[list[tuple[int, StoredLayer]]] = [[] for _ in layers]
    for kv in chunks:
        stored = [kv.stored_layer(layer) for layer in layers]
        if not all(map(is_page_locked, stored)):
            together = sum(map(aligned_nbytes, _tensors_of(stored)))
            stored = copy_into(torch.empty(together, dtype=torch.uint8, pin_memory=True), stored)
        end = None  # address at which a tensor continues the last copy
        for at, layer in enumerate(stored):
            planned[at].append((nbytes, layer))
            for tensor in (each for each in layer if each.nbytes):
                if tensor.data_ptr() != end:
                    copies.append(Copy(_bytes_from(tensor, tensor.nbytes), nbytes))
                else:
                    source, offset = copies[-1]
                    copies[-1] = Copy(_bytes_from(source, nbytes + tensor.nbytes - offset), offset)
                end = tensor.data_ptr() + aligned_nbytes(tensor)
                nbytes += aligned_nbytes(tensor)
                if end - tensor.untyped_storage().data_ptr() >= tensor.untyped_storage().nbytes():
                    end = None  # what follows in memory is another block
    return Upload(copies, nbytes, planned)


class _Queued(NamedTuple):
    """The layers of an upload, the block on the device that contains them, and the event after its copies."""

    layers: list[list[StoredLayer]]
    block: Tensor
    is_copied: Any


class LayerCopies:
    """The layers of chunks in page-locked memory, copied to a GPU ahead of their use, LAYERS_PER_COPY at a time.

    The thread that created `copier` calls `next_layer` for each layer in order. It must queue all GPU work on the
    returned tensors before it calls `next_layer` again. Once that work is done, later layers are copied into the same
    memory. At most `depth` layers and those of the group in use are on the device.
    """

    def __init__(self, copier: HostToDeviceCopier, chunks: Sequence[ChunkKV], num_layers: int, depth: int) -> None:
        self._copier, self._chunks = copier, chunks
        self._groups = deque(
            range(first, min(first + LAYERS_PER_COPY, num_layers)) for first in range(0, num_layers, LAYERS_PER_COPY)
        )
        self._num_ahead = max(depth // LAYERS_PER_COPY, 1)
        self._queued: deque[_Queued] = deque()
        self._free: deque[tuple[Tensor, Any]] = deque()  # blocks, and the event after their last use
        self._block: Tensor | None = None  # of the group in use
        self._layers: deque[list[StoredLayer]] = deque()  # its layers that were not returned yet

    def next_layer(self) -> list[StoredLayer]:
        """Return the next layer of all chunks on the device, as it is stored, and queue the copies of later ones."""
        if not self._layers:
            if self._block is not None:
                self._free.append((self._block, self._copier.computing.record_event()))
            while self._groups and len(self._queued) <= self._num_ahead:
                self._queued.append(self._start(self._groups.popleft()))
            layers, self._block, is_copied = self._queued.popleft()
            self._layers.extend(layers)
            self._copier.computing.wait_event(is_copied)
        return self._layers.popleft()

    def _start(self, group: range) -> _Queued:
        upload = plan_upload(self._chunks, group)
        block, is_free = self._free.popleft() if self._free else (None, None)
        if block is None or block.nbytes < upload.nbytes:
            block, is_free = self._copier.allocate(upload.nbytes), None
        sources = [each.source for each in upload.copies]
        targets = [block[each.offset : each.offset + each.source.nbytes] for each in upload.copies]
        return _Queued(upload.layers_in(block), block, self._copier.queue_copies(targets, sources, is_free))


def is_page_locked(layer: StoredLayer) -> bool:
    """Return True if a GPU can read the layer's tensors from host memory without another copy."""
    return all(not tensor.nbytes or (tensor.is_contiguous() and tensor.is_pinned()) for tensor in layer)


def _page_locked(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, contiguous in page-locked memory.

    torch keeps page-locked blocks for later use, and uses none again before the copy from it has ended.
    """
    if tensor.is_contiguous() and tensor.is_pinned():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _bytes_from(tensor: Tensor, nbytes: int) -> Tensor:
    """Return `nbytes` bytes of the tensor's memory, from its start on, [nbytes] uint8. It shares the memory."""
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (nbytes,), (1,))


def _tensors_of(layers: Sequence[StoredLayer]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in layer]
