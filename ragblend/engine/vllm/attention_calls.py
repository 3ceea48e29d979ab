"""How scattered rows are cut into calls of a layer, and what reading their keys and values costs either way.

To vLLM's backend each run of rows is a request of its own, so each reads all that stands before it once more. Where the
layer is at hand, many rows can share one reading instead (`attention.attend_rows`): that is the cheaper way where there
are many short runs far down a prompt, and a device waits for its memory. Knows positions, nothing of tensors' contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORKSPACE_BYTES = 1 << 22

TILE_ROWS = 64
"""Rows that share one reading of keys: in attention kernels, and in `attention.attend_rows` on a CPU."""


class RequestRows(NamedTuple):
    """One request's rows of a piece."""

    owner: int  # which request
    span: slice  # of the piece's rows
    rows: Tensor  # positions [R] int64
    places: Sequence[int]  # the same, on the host


class AttentionCall(NamedTuple):
    """Rows that go through a layer in one call: over the paged cache, or with `parts` over what is at hand."""

    span: slice  # of the rows
    positions: Tensor  # [R] int64
    slots: Tensor | None = None  # [R] int64, places in the paged cache
    metadata: Any = None  # what the attention backend wants to know
    parts: tuple[RequestRows, ...] = ()


def cut_runs(rows: Sequence[int], max_rows: int, max_runs: int) -> list[list[tuple[int, int]]]:
    """Indices [start, end) of runs of consecutive positions, grouped into calls of bounded size.

    A run longer than `max_rows` is cut; its parts are consecutive, so each still sees all that comes before it.

    >>> cut_runs([0, 1, 2, 7, 9], max_rows=2, max_runs=2)
    [[(0, 2)], [(2, 3), (3, 4)], [(4, 5)]]
    """
    groups: list[list[tuple[int, int]]] = []
    start = 0
    for index in range(1, len(rows) + 1):
        if index < len(rows) and rows[index] == rows[index - 1] + 1 and index - start < max_rows:
            continue
        run = (start, index)
        if groups and len(groups[-1]) < max_runs and index - groups[-1][0][0] <= max_rows:
            groups[-1].append(run)
        else:
            groups.append([run])
        start = index
    return groups


def plan_state(metadata: Any) -> object:
    """Return what `metadata` of an attention backend contains, to compare with what it contains later.

    Small tensors are compared by their bytes, larger ones by their place: those are workspaces.
    """
    seen: set[int] = set()

    def state(value: Any) -> object:
        if isinstance(value, Tensor):
            if value.nbytes > _WORKSPACE_BYTES:
                return value.data_ptr(), tuple(value.shape)
            return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), tuple(value.shape)
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if value is None or isinstance(value, int | float | complex | str | bytes):
            return repr(value)  # NaN equals itself here
        if id(value) in seen or callable(value) or isinstance(value, ModuleType):
            return id(value)
        seen.add(id(value))
        if isinstance(value, Mapping):
            return [(repr(name), state(each)) for name, each in value.items()]
        if isinstance(value, list | tuple | deque):
            return [state(each) for each in value]
        slots = (name for each in type(value).__mro__ for name in getattr(each, "__slots__", ()))
        names = [*getattr(value, "__dict__", ()), *slots]
        return id(value), [(name, state(getattr(value, name, None))) for name in names]

    return state(metadata)


def kv_reads_per_run(places: Sequence[int]) -> int:
    """Tokens whose keys and values are read where every run of `places`, ascending, reads for itself.

    A long run is read for in tiles, as in attention kernels.

    >>> kv_reads_per_run([9, 19, 20, 21])
    32
    """
    return sum(
        places[end - 1] + 1 for group in cut_runs(places, max_rows=TILE_ROWS, max_runs=len(places)) for _, end in group
    )


def kv_reads_shared(places: Sequence[int]) -> int:
    """Tokens whose keys and values are read where TILE_ROWS of the rows, ascending, share one reading.

    >>> kv_reads_shared([9, 19, 20, 21])
    22
    """
    return sum(places[min(start + TILE_ROWS, len(places)) - 1] + 1 for start in range(0, len(places), TILE_ROWS))
