"""Splitting of scattered rows into attention calls, and the number of keys and values that the calls read.

vLLM's backend runs each run of adjacent rows as a separate request, which reads all KV before the run again. If the
layer's KV is resident as a tensor, many rows can share one reading instead (`attention.attend_rows`). Sharing is
cheaper for many short runs late in a long prompt, on a device whose speed is limited by its memory. Depends on
positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

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


def kv_reads_per_run(positions: Sequence[int]) -> int:
    """Return the number of tokens whose KV is read if every run of the ascending positions reads separately.

    A long run reads once per tile, as in attention kernels.

    >>> kv_reads_per_run([9, 19, 20, 21])
    32
    """
    return sum(
        positions[end - 1] + 1
        for group in cut_runs(positions, max_rows=TILE_ROWS, max_runs=len(positions))
        for _, end in group
    )


def kv_reads_shared(positions: Sequence[int]) -> int:
    """Return the number of tokens whose KV is read if every TILE_ROWS of the ascending positions share one reading.

    >>> kv_reads_shared([9, 19, 20, 21])
    22
    """
    return sum(
        positions[min(start + TILE_ROWS, len(positions)) - 1] + 1 for start in range(0, len(positions), TILE_ROWS)
    )
