"""Counter of host reads: operations that make the host wait for the GPU, because they read a tensor's values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ragblend

PACKAGE_DIR = str(Path(ragblend.__file__).parent)
LOOKS = {"item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "argwhere", "equal", "allclose"}
CASTS = {"__bool__", "__int__", "__float__", "__index__", "__contains__"}


class DeviceLooks(TorchFunctionMode):
    """Context in which `places` counts this thread's host reads of tensors, by file and line of the package.

    Reads by a model's code do not count, nor do copies to the device, which do not wait for its computation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count `func` if it is a host read, and run it."""
        if _looks(getattr(func, "__name__", ""), args, kwargs or {}):
            place = _caller()
            if place:
                self.places[place] += 1
        return func(*args, **(kwargs or {}))


def _looks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in LOOKS or name in CASTS:
        return True
    if name == "__getitem__":
        return _has_mask(args[1])
    if name == "__setitem__":
        return _has_mask(args[1]) and isinstance(args[2], Tensor) and args[2].dim() > 0
    return name == "repeat_interleave" and isinstance(args[1], Tensor) and kwargs.get("output_size") is None


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _caller() -> str:
    """Return file and line of the package's call of torch; "" if other code called torch."""
    frame = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return f"{name[len(PACKAGE_DIR) + 1 :]}:{frame.f_lineno}" if name.startswith(PACKAGE_DIR) else ""
