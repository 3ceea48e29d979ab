"""Stored KV on its way from host memory to the model's device.

On a GPU the bytes go through pinned memory and on a stream of their own, so that they travel while the GPU computes.
Knows tensors and streams; not what is read or where it goes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ragblend.engine.store.kv import StoredLayer


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

    def copy_to_device(self, layer: StoredLayer) -> StoredLayer:
        """The layer on the device, ready to be used there; the same tensors where they are there already."""
        if not self.overlaps_compute:
            return type(layer)(*(tensor.to(self._device) for tensor in layer))
        with torch.cuda.stream(self._copying):
            # torch keeps pinned blocks for the next layer, and hands none out before the copy from it is through.
            there = [
                tensor if tensor.is_cuda else tensor.contiguous().pin_memory().to(self._device, non_blocking=True)
                for tensor in layer
            ]
        self._copying.synchronize()  # of the two streams only the copies': the other one computes on
        for tensor in there:
            tensor.record_stream(self._computing)  # or its memory would be the next copy's while it is still read
        return type(layer)(*there)
