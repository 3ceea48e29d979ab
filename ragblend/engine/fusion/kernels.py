"""Triton kernels of a blended request: stored rows are placed, recomputed rows written, scattered rows attend.

On a GPU the host starts each operation, and that takes longer than the operation over the few rows that a blend
recomputes. Each function here starts one or two kernels for all heads and chunks of a layer, where torch starts 10 to
40. Its reference is the torch function that its docstring names; without Triton, and on CPUs, that function is used.

A layer's KV is contiguous, or in pages of a paged cache (`PagedLayer`). Depends on tensors, not on models and plans.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ragblend.engine.fusion import jit_attention, jit_rows
from ragblend.engine.fusion.attention import (
    PLAIN,
    AttentionExtras,
    PagedLayer,
    ProbeQueries,
    Rotation,
    position_end,
)
from ragblend.engine.fusion.protocols import FreshRowsCallback
from ragblend.engine.fusion.rules import MAX_DRIFT_RATIO, DriftCorrection
from ragblend.engine.store.format.kv import LayerKV, StoredLayer

MAX_SPLITS = 16
LEAST_SPLIT_KEYS = 256  # keys per part, if the keys of few rows are split over programs
PLACED_TOKENS = 32  # tokens per program of `place` and `write_rows`


def _rotation_arguments(rotation: Rotation, dim: int) -> dict[str, Any]:
    """Return the arguments that kernels take for the rotation of keys of `dim` dimensions."""
    cos, sin, adjacent, weight = rotation
    return {
        "COS": cos, "SIN": sin, "WEIGHT": cos if weight is None else weight, "HAS_WEIGHT": weight is not None,
        "ROTARY": cos.shape[1], "ADJACENT": adjacent, "DIM_K": dim, "DIM_K_PADDED": _padded(dim),
    }  # fmt: skip


class Pieces:
    """Addresses of stored tokens, by which `place` reads any number of chunks in one launch.

    `starts`: position of each chunk's first token. The table of addresses is copied to the device again only if the
    chunks lie otherwise in memory relative to the first one. An instance belongs to one request.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        self._starts = starts
        self._known: list[list[int]] = []
        self.table = self.tiles = torch.empty(0)
        self.base = 0

    def locate(self, parts: Sequence[StoredLayer], device: torch.device) -> None:
        """Set `table` [P, 10] int64, `tiles` [N, 2] int32, and `base`, the address that the table's are relative to."""
        self.base = min(tensor.data_ptr() for part in parts for tensor in part if tensor.numel())
        rows = [
            row for start, part in zip(self._starts, parts, strict=True) for row in _rows_of(part, start, self.base)
        ]
        if rows == self._known:
            return
        self._known = rows
        tiles = [(index, first) for index, row in enumerate(rows) for first in range(0, row[8], PLACED_TOKENS)]
        self.table = torch.from_numpy(np.array(rows, np.int64)).to(device, non_blocking=True)
        self.tiles = torch.from_numpy(np.array(tiles, np.int32)).to(device, non_blocking=True)


def _rows_of(part: StoredLayer, start: int, base: int) -> list[list[int]]:
    """Return the rows of one chunk for `Pieces.table`: addresses, strides of heads, position, count, and kind."""
    if isinstance(part, LayerKV):
        whole = [part.keys, part.values]
        return [[*(each.data_ptr() - base for each in whole), 0, 0, *(each.stride(0) for each in whole), 0,
                 start, part.keys.shape[1], 0]]  # fmt: skip
    first, codes = (part.first_keys, part.first_values), (part.key_codes, part.value_codes)
    rows = _rows_of(LayerKV(*first), start, base) if first[0].shape[1] else []
    if not codes[0].shape[1]:
        return rows
    addresses = [each.data_ptr() - base for each in (*codes, part.key_scales, part.value_scales)]
    strides = [each.stride(0) for each in (*codes, part.value_scales)]
    kind = 1 if codes[0].dtype == torch.int8 else 2
    return [*rows, [*addresses, *strides, start + first[0].shape[1], codes[0].shape[1], kind]]


def place(
    target: PagedLayer,
    parts: Sequence[StoredLayer],
    pieces: Pieces,
    rotation: Rotation,
    drift: LayerKV | None = None,
    shares: Tensor | None = None,
) -> None:
    """Write one stored layer of some chunks into `target`: dequantised, corrected for drift, rotated to its positions.

    Reference: `dequantized`, `DriftCorrection`, `rotate`. `parts`: tensors [H, T, D] of each chunk, on the target's
    device. `drift` [H, M, D] and `shares` [positions, M] as in DriftCorrection.
    """
    # The copies must exist until the launch, which reads them by address.
    parts = [type(part)(*map(_with_packed_tokens, part)) for part in parts]
    pieces.locate(parts, target.keys.device)
    heads, dim_k, dim_v = target.keys.shape[2], target.keys.shape[3], target.values.shape[3]
    _launch(
        jit_rows.place, (len(pieces.tiles), heads), pieces.table, pieces.tiles, pieces.base,
        **target.arguments, **_rotation_arguments(rotation, dim_k), **_drift_arguments(target, drift, shares),
        DIM_V=dim_v, DIM_V_PADDED=_padded(dim_v), TOKENS=PLACED_TOKENS,
    )  # fmt: skip


def _with_packed_tokens(tensor: Tensor) -> Tensor:
    """Return [H, T, D] whose heads are T * D adjacent numbers each: the tensor, or a copy."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def write_rows(
    target: PagedLayer,
    rows: Tensor,
    fresh: LayerKV,
    rotation: Rotation | None = None,
    correction: DriftCorrection | None = None,
    drift: LayerKV | None = None,
) -> None:
    """Write `fresh`, rotated keys and values [H, R, D], at positions `rows` [R] of `target`.

    With `correction`, all other rows of `target` also get its change, from `drift` (see `fit_drift`). Reference:
    `PromptKVBuffer.write` after `LayerSource.apply_drift`.
    """
    num_tokens = len(rows) if correction is None else len(correction.shares)
    source = rows if correction is None else correction.sources
    dim_k, dim_v = target.keys.shape[3], target.values.shape[3]
    rotation = rotation if rotation is not None else Rotation(_no_table(rows.device), _no_table(rows.device))
    _launch(
        jit_rows.write_rows, (triton.cdiv(num_tokens, PLACED_TOKENS), target.keys.shape[2]), *fresh, source, num_tokens,
        *fresh.keys.stride()[:2], *fresh.values.stride()[:2],
        **target.arguments, **_rotation_arguments(rotation, dim_k),
        **_drift_arguments(target, drift, None if correction is None else correction.shares),
        DIM_V=dim_v, DIM_V_PADDED=_padded(dim_v), TOKENS=PLACED_TOKENS,
    )  # fmt: skip


def write_fresh_rows(
    target: PagedLayer, rows: Tensor, fresh: LayerKV, rotation: Rotation, hook: FreshRowsCallback | None
) -> None:
    """Write `fresh` at `rows` as `write_rows` does, after the drift correction of `hook`, if it has one."""
    if hook is None or hook.correction is None:
        write_rows(target, rows, fresh)
        return
    drift = fit_drift(target, fresh, hook.row_indices, hook.correction, rotation)
    write_rows(target, rows, fresh, rotation, hook.correction, drift)


def add_drift(target: PagedLayer, drift: LayerKV, shares: Tensor, rotation: Rotation) -> None:
    """Add `shares` [T, M] times `drift` [H, M, D] float32 to those of the first T tokens of `target` with a share.

    Reference: `LayerSource.apply_drift`.
    """
    sources = torch.where((shares != 0).any(1), -1, -2).to(torch.int32)
    heads, dim_k, dim_v = target.keys.shape[2], target.keys.shape[3], target.values.shape[3]
    nothing = LayerKV(*(target.keys.new_empty(heads, 0, dim) for dim in (dim_k, dim_v)))
    correction = DriftCorrection(sources, shares, shares, sources)
    write_rows(target, sources, nothing, rotation, correction, drift)


def fit_drift(
    target: PagedLayer, fresh: LayerKV, indices: Tensor, correction: DriftCorrection, rotation: Rotation
) -> LayerKV:
    """Return the drift [H, M, D] float32 of pre-RoPE keys and of values, in two launches. It is valid until the next
    call of this thread.

    `fresh` [H, R, D]: rotated keys and values, of which those at `indices` [N] are the recomputed tokens of
    `correction`. `target`: the layer as it was placed. Reference: `DriftCorrection.estimate_drift`.
    """
    num_landmarks, num_rows = correction.weights.shape
    heads, dim_k, dim_v = fresh.keys.shape[0], fresh.keys.shape[2], fresh.values.shape[2]
    device = fresh.keys.device
    lengths = _scratch("lengths", (2, heads, num_rows), device)
    drift = LayerKV(
        *(_scratch(name, (heads, num_landmarks, dim), device) for name, dim in (("k", dim_k), ("v", dim_v)))
    )
    arguments = {
        **target.arguments, **_rotation_arguments(rotation, dim_k), "DIM_V": dim_v, "DIM_V_PADDED": _padded(dim_v),
    }  # fmt: skip
    rows = (*fresh, indices, correction.rows, num_rows, *fresh.keys.stride()[:2], *fresh.values.stride()[:2], lengths)
    _launch(jit_rows.change_lengths, (triton.cdiv(num_rows, 32), heads, 2), *rows, **arguments, TOKENS=32)
    block = 32
    _launch(
        jit_rows.fit_drift, (triton.cdiv(max(dim_k, dim_v), block), heads, 2), *rows, correction.weights, *drift,
        num_landmarks, **arguments, TOKENS=32, BLOCK=block, ROWS_PADDED=_padded(num_rows),
        LANDMARKS=_padded(num_landmarks), MAX_RATIO=MAX_DRIFT_RATIO, PRECISION=_precision(fresh.keys),
    )  # fmt: skip
    return drift


def attend(
    query: Tensor,
    layer: PagedLayer,
    rows: Tensor,
    scale: float | None = None,
    params: AttentionExtras = PLAIN,
    *,
    mass: Tensor | None = None,
    num_question_rows: int = 0,
    num_splits: int | None = None,
) -> Tensor:
    """Return the causal attention [1, R, Hq, Dv] of `query` [1, Hq, R, Dk] at positions `rows` [R], ascending.

    References: `attend_rows` and `attention_mass`. A row attends to positions 0 .. its own of `layer`, within its
    window. `mass` [T] float32 is set to the attention probability of the first T keys, mean over heads and the last
    `num_question_rows` rows. `num_splits`: parts of the keys that separate programs compute; None: as many as fill the
    device.
    """
    _, num_heads, num_rows, dim_k = query.shape
    heads, dim_v = layer.keys.shape[2], layer.values.shape[3]
    groups = num_heads // heads
    pairs, keys = _attention_tile(max(dim_k, dim_v), num_rows * groups)
    tiles, num_keys = triton.cdiv(num_rows * groups, pairs), position_end(rows)
    if num_splits is None:
        num_splits = _num_splits(tiles * heads, num_keys, query.device)
    span = triton.cdiv(triton.cdiv(num_keys, num_splits), keys) * keys
    output = torch.empty(1, num_rows, num_heads, dim_v, dtype=query.dtype, device=query.device)
    has_weights, is_split = mass is not None, num_splits > 1
    device = query.device
    # Sums of the exponentials of each part's scores, as logarithms.
    sums = _scratch("sums", (num_splits, num_heads, num_rows), device) if has_weights or is_split else output
    parts = _scratch("parts", (num_splits, num_rows, num_heads, dim_v), device) if is_split else output
    arguments = {
        **layer.arguments, "scale": dim_k**-0.5 if scale is None else scale, "HAS_SINKS": params.sinks is not None,
        "WINDOW": params.window or 0, "SOFTCAP": params.softcap or 0.0, "GROUPS": groups, "HEADS": heads,
        "DIM_K": dim_k, "DIM_K_PADDED": _padded(dim_k), "PAIRS": pairs, "NUM_KEYS": keys,
        "PRECISION": _precision(query), "INTERPRETS": INTERPRETS,
    }  # fmt: skip
    sinks = params.sinks if params.sinks is not None else output
    queries = (query, rows, sinks, num_rows, *query.stride()[1:3])
    _launch(
        jit_attention.attend, (tiles, heads, num_splits), *queries, parts, sums, span, **arguments,
        DIM_V=dim_v, DIM_V_PADDED=_padded(dim_v), STORES_SUMS=has_weights or is_split,
        num_warps=8 if max(dim_k, dim_v) > 128 else 4,
    )  # fmt: skip
    if is_split or mass is not None:
        num_masses, mass = (0, parts) if mass is None else (len(mass), mass)
        num_mass_tiles = triton.cdiv(num_masses, keys)
        _launch(
            jit_attention.finish, (num_mass_tiles + is_split * num_rows * num_heads,), *queries, parts, sums, output,
            mass, num_mass_tiles, num_masses, num_question_rows, **arguments, DIM_V=dim_v, DIM_V_PADDED=_padded(dim_v),
            SPLITS=num_splits, SPLITS_PADDED=triton.next_power_of_2(num_splits),
        )  # fmt: skip
    return output


def attend_with_weights(queries: ProbeQueries, num_question_rows: int, mass: Tensor) -> Tensor:
    """Return the attention output [Hq, Q, Dv] of all queries over `queries.pages`, and set `mass` [T].

    Reference: `attention.attend_with_weights`.
    """
    states, rows, scale, params, _, pages = queries
    assert pages is not None
    output = attend(states[None], pages, rows, scale, params, mass=mass, num_question_rows=num_question_rows)
    return output[0].transpose(0, 1)


def _drift_arguments(target: PagedLayer, drift: LayerKV | None, shares: Tensor | None) -> dict[str, Any]:
    if drift is None or shares is None:
        nothing = target.keys
        return {"SHARES": nothing, "DRIFT_K": nothing, "DRIFT_V": nothing, "num_landmarks": 0, "LANDMARKS": 0,
                "PRECISION": "ieee"}  # fmt: skip
    count = shares.shape[1]
    return {"SHARES": shares, "DRIFT_K": drift.keys, "DRIFT_V": drift.values, "num_landmarks": count,
            "LANDMARKS": _padded(count), "PRECISION": _precision(target.keys)}  # fmt: skip


INTERPRETS = not isinstance(jit_rows.place, triton.runtime.JITFunction)
"""True if the kernels run in Triton's interpreter, on tensors of the CPU."""

_LOCAL = threading.local()


def _scratch(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a float32 tensor that is used again by this thread's next call with the same name.

    The kernels that read it are on the same stream as those that write to it next. Allocations take the host's time,
    and the address stays the same from layer to layer.
    """
    tensors: dict[tuple[str, torch.device], Tensor] = _LOCAL.__dict__.setdefault("tensors", {})
    count = int(np.prod(shape))
    block = tensors.get((name, device))
    if block is None or block.numel() < count:
        block = tensors[name, device] = torch.empty(count, dtype=torch.float32, device=device)
    return block[:count].view(shape)


@cache
def _no_table(device: torch.device) -> Tensor:
    """Return a rotary table of no dimension."""
    return torch.empty(0, 0, dtype=torch.float32, device=device)


def _padded(count: int) -> int:
    """Return the least power of two that holds `count`, and that `tl.dot` takes."""
    return max(16, int(triton.next_power_of_2(count)))


def _precision(like: Tensor) -> str:
    """Return how products of float32 tensors are computed: exactly, if the KV is float32."""
    return "ieee" if like.dtype == torch.float32 else "tf32"


def _attention_tile(dim: int, num_pairs: int) -> tuple[int, int]:
    """Return the pairs of row and head, and the keys, that one program of `attend` has at a time."""
    return min(64, _padded(num_pairs)), 64 if dim <= 128 else 32


def _num_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Return into how many parts keys are split, so that few rows occupy the whole device."""
    processors = num_processors(device)
    if 2 * num_programs > processors:
        return 1
    return max(1, min(MAX_SPLITS, processors // num_programs, num_keys // LEAST_SPLIT_KEYS))


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_INTERPRETER = threading.Lock()  # the interpreter runs one kernel at a time


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start one kernel on a grid of programs, on the current stream of its tensors' device."""
    if INTERPRETS:
        with _INTERPRETER:
            kernel[grid](*args, **options)
        return
    with torch.cuda.device(args[0].device):  # Triton launches on the current device
        kernel[grid](*args, **options)
