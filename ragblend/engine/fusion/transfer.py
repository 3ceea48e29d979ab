"""Stored KV on its way from host memory to the model's device.

On a GPU the bytes go through pinned memory and on a stream of their own, so that they travel while the GPU computes.
Knows tensors and streams; not what is read or where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.store.kv import StoredLayer

_ALIGNMENT = 256  # bytes, of each tensor in a block


class HostToDeviceCopier:
    """Brings layers to `device` for the thread that made this one, whichever thread brings them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing: Any = None
        self._copying: Any = None
        if self.overlaps_compute:
            self._computing = torch.cuda.current_stream(device)
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def overlaps_compute(self) -> bool:
        """Whether a copy can run while the device computes, so that even KV in host memory is worth a thread."""
        return self._device.type == "cuda"

    def in_compute_order(self) -> AbstractContextManager[Any]:
        """What is run inside goes to the stream of the thread that made this one, behind what that has queued.

        A thread starts on the device's default stream, which vLLM for one does not compute on: what it wrote there
        could be read before it is written.
        """
        return torch.cuda.stream(self._computing) if self.overlaps_compute else nullcontext()

    def copy_to_device(self, layers: Sequence[StoredLayer]) -> list[StoredLayer]:
        """The layers on the device, ready to be used there; the same tensors where they are there already.

        They travel as one block: a GPU is far slower with many copies of a megabyte than with one of many, and each
        costs the host a wait.
        """
        tensors = [tensor for layer in layers for tensor in layer]
        if not self.overlaps_compute or all(tensor.is_cuda for tensor in tensors):
            there = [tensor.to(self._device) for tensor in tensors]
        else:
            there = self._copy_as_block(tensors)
        arrived = iter(there)
        return [type(layer)(*(next(arrived) for _ in layer)) for layer in layers]

    def _copy_as_block(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        # torch keeps pinned blocks for the next layer, and hands none out before the copy from it is through.
        staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        for tensor, span in zip(tensors, spans, strict=True):
            _view_as(staged[span], tensor).copy_(tensor)
        with torch.cuda.stream(self._copying):
            block = staged.to(self._device, non_blocking=True)
        self._copying.synchronize()  # of the two streams only the copies': the other one computes on
        block.record_stream(self._computing)  # or its memory would be the next copy's while it is still read
        return [_view_as(block[span], tensor) for tensor, span in zip(tensors, spans, strict=True)]


def _view_as(raw: Tensor, like: Tensor) -> Tensor:
    """The first bytes of `raw` [N] uint8 as a tensor of the dtype and shape of `like`."""
    return raw[: like.nbytes].view(like.dtype).view(like.shape)
