"""How scattered rows are cut into calls of a layer, and what reading their keys and values costs either way.

To vLLM's backend each run of rows is a request of its own, so each reads all that stands before it once more. Where the
layer is at hand, many rows can share one reading instead (`attention.attend_rows`): that is the cheaper way where there
are many short runs far down a prompt, and a device waits for its memory. Knows positions, nothing of tensors' contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ragblend.engine.fusion.attention import BLOCK_ROWS


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


def kv_reads_per_run(places: Sequence[int]) -> int:
    """Tokens whose keys and values are read where every run of `places`, ascending, reads for itself.

    A long run is read for in tiles, as in attention kernels.

    >>> read_by_runs([9, 19, 20, 21])
    32
    """
    return sum(
        places[end - 1] + 1 for group in cut_runs(places, max_rows=BLOCK_ROWS, max_runs=len(places)) for _, end in group
    )


def kv_reads_shared(places: Sequence[int]) -> int:
    """Tokens whose keys and values are read where BLOCK_ROWS of the rows, ascending, share one reading.

    >>> read_together([9, 19, 20, 21])
    22
    """
    return sum(places[min(start + BLOCK_ROWS, len(places)) - 1] + 1 for start in range(0, len(places), BLOCK_ROWS))
