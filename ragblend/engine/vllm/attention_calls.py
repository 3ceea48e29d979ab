"""Splitting of scattered rows into attention calls, and the number of keys and values that the calls read.

vLLM's backend runs each run of adjacent rows as a separate request, which reads all KV before the run again. If the
layer's KV is resident as a tensor, many rows can share one reading instead (`attention.attend_rows`). Sharing is
cheaper for many short runs late in a long prompt, on a device whose speed is limited by its memory. Depends on
positions only.
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
"""Rows that share one reading of keys, in attention kernels and in `attention.attend_rows` on a CPU."""


class RequestRows(NamedTuple):
    """Rows of one request in an attention call."""

    owner: int  # index of the request
    span: slice  # indices among the call's rows
    rows: Tensor  # positions in the request's prompt, [R] int64
    positions: Sequence[int]  # the same positions, on the host


class AttentionCall(NamedTuple):
    """Rows of one or several requests that run through a layer in one attention call.

    Their KV is read from vLLM's paged cache, or from resident tensors if `parts` is set.
    """

    span: slice  # indices of the call's rows among all rows
    positions: Tensor  # [R] int64
    slots: Tensor | None = None  # [R] int64, indices into the paged cache
    metadata: Any = None  # the attention backend's
    parts: tuple[RequestRows, ...] = ()


def cut_runs(rows: Sequence[int], max_rows: int, max_runs: int) -> list[list[tuple[int, int]]]:
    """Return index pairs [start, end) of runs of consecutive positions, grouped into calls of bounded size.

    A run longer than `max_rows` is cut into consecutive parts, so each part still attends to everything before it.

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


def metadata_snapshot(metadata: Any) -> object:
    """Return the contents of an attention backend's `metadata` as a value that can be compared with later contents.

    Small tensors are represented by their bytes, larger ones by their address, because those are workspaces.
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


def kv_reads_by_run(positions: Sequence[int]) -> int:
    """Return how many tokens' KV is read if every run of the ascending positions reads the KV separately.

    A long run reads once per tile, as in attention kernels.

    >>> kv_reads_by_run([9, 19, 20, 21])
    32
    """
    return sum(
        positions[end - 1] + 1
        for group in cut_runs(positions, max_rows=TILE_ROWS, max_runs=len(positions))
        for _, end in group
    )


def kv_reads_by_tile(positions: Sequence[int]) -> int:
    """Return how many tokens' KV is read if every TILE_ROWS of the ascending positions share a tile, and each tile
    reads the KV up to its last position once.

    >>> kv_reads_by_tile([9, 19, 20, 21])
    22
    """
    return sum(
        positions[min(start + TILE_ROWS, len(positions)) - 1] + 1 for start in range(0, len(positions), TILE_ROWS)
    )
