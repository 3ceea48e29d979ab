"""Splitting of scattered rows into attention calls.

vLLM's attention backend takes each run of consecutive rows as a separate request, and reads all KV before the run again
for each. On a GPU, where reading memory takes most of the time, all rows of a request share one read instead: by
Triton's kernels, or if the layer's KV is resident as a tensor, by `attention.attend_rows`. Depends on positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class RequestRows(NamedTuple):
    """Rows of one request in an attention call."""

    owner: int  # index of the request
    span: slice  # indices among the call's rows
    rows: Tensor  # positions in the request's prompt, [R] int64


class AttentionCall(NamedTuple):
    """Rows of one or several requests that run through a layer in one attention call.

    If `parts` is set, the rows attend by Triton's kernels or to the requests' resident layers (see `PagedKV`).
    Otherwise they attend by vLLM's backend, and `slots` and `metadata` are set.
    """

    span: slice  # indices of the call's rows among all rows
    positions: Tensor  # [R] int64
    slots: Tensor | None = None  # [R] int64, indices into the paged cache
    metadata: Any = None  # the attention backend's
    parts: tuple[RequestRows, ...] = ()


def cut_runs(rows: Sequence[int], max_rows: int, max_runs: int) -> list[list[tuple[int, int]]]:
    """Split rows into attention calls. A call is a list of runs, each a pair [start, end) of indices into `rows`.

    The positions in a run are consecutive. A call spans at most `max_rows` rows and has at most `max_runs` runs. A run
    of more than `max_rows` rows is cut into consecutive parts, and each part still attends to everything before it.

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
