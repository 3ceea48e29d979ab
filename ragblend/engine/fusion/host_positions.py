"""Rows of a prompt as the host knows them, asked of the device once for all layers.

A forward pass of a layer is queued, not waited for: the host should be done with the last layer while a GPU still
computes the first. Whoever looks into a tensor on the device (`int`, `bool`, `tolist`, a mask as an index) waits until
all that is queued has run. So what a layer's work depends on, the positions of its rows, is looked at once, and known
from then on for that tensor.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_KNOWN = WeakTensorKeyDictionary()


def on_host(rows: Tensor) -> tuple[int, ...]:
    """The positions `rows` [R] int64, which nobody may write to any more. Waits for the device the first time."""
    known: tuple[int, ...] | None = _KNOWN.get(rows)  # type: ignore[no-untyped-call]
    if known is None:
        known = _KNOWN[rows] = tuple(rows.tolist())
    return known
