"""Triton programs that write rows of a layer: stored rows, and fresh rows with drift correction.

`kernels` starts them, and its functions state the shapes. Keys and values of a layer are `KEYS` and `VALUES`; `k_page`,
`k_slot`, `k_head` and `k_dim` are the keys' strides, in numbers, of a page, a token in it, a head and a dimension. A
vector of a dimension is padded to a power of two. Positions are those of the prompt.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM108  # constants of the compiler are written in capitals, and decide statements

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_offsets(TABLE, t, ok, page, slot, PAGE: tl.constexpr):
    """Return the offset of each token `t` in a layer, without its head."""
    if PAGE:
        pages = tl.load(TABLE + t // PAGE, mask=ok, other=0).to(tl.int64)
        return pages * page + (t % PAGE).to(tl.int64) * slot
    return t.to(tl.int64) * slot


@triton.jit
def _partner(d, ROTARY: tl.constexpr, ADJACENT: tl.constexpr):
    """Return the dimension that is rotated together with each dimension `d`."""
    if ADJACENT:
        other = d ^ 1
    else:
        other = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
    return tl.where(d < ROTARY, other, d)


@triton.jit
def _angles(COS, SIN, t, ok, d, ROTARY: tl.constexpr, ADJACENT: tl.constexpr):
    """Return the factors [tokens, D] of each dimension and of its partner: 1 and 0 for those that do not rotate."""
    rotates = ok[:, None] & (d < ROTARY)[None, :]
    at = t[:, None].to(tl.int64) * ROTARY + d[None, :]
    cos = tl.load(COS + at, mask=rotates, other=1.0)
    sin = tl.load(SIN + at, mask=rotates, other=0.0)
    if ADJACENT:
        is_first = d % 2 == 0
    else:
        is_first = d < ROTARY // 2
    return cos, tl.where(is_first[None, :], -sin, sin)


@triton.jit
def _inverse(cos, sin, ROTARY: tl.constexpr):
    """Return the factors of the inverse rotation, and of the tables' attention scaling."""
    scaling = cos * cos + sin * sin
    return cos / scaling, -sin / scaling


@triton.jit
def _drift(
    SHARES, DRIFT, t, ok, h, d, num_landmarks, DIM: tl.constexpr, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the estimated change [tokens, D] of tokens `t` in dimensions `d`."""
    m = tl.arange(0, LANDMARKS)
    is_landmark = m < num_landmarks
    at = t[:, None].to(tl.int64) * num_landmarks + m[None, :]
    shares = tl.load(SHARES + at, mask=ok[:, None] & is_landmark[None, :], other=0.0)
    at = (h * num_landmarks + m)[:, None] * DIM + d[None, :]
    drift = tl.load(DRIFT + at, mask=is_landmark[:, None] & (d < DIM)[None, :], other=0.0)
    return tl.dot(shares, drift, input_precision=PRECISION)


@triton.jit
def _stored(address, scales, kind, i, ok, d, dim, by_token: tl.constexpr, KV):
    """Return stored numbers [tokens, D] of one head in float32: as computed (kind 0), or int8 (1) or fp8 codes (2).

    `address`, `scales`: of the head. `by_token`: scales are of tokens, and not of dimensions.
    """
    seen = ok[:, None] & (d < dim)[None, :]
    at = i[:, None].to(tl.int64) * dim + d[None, :]
    if kind == 0:
        stored = tl.load(address.to(KV.dtype) + at, mask=seen, other=0.0).to(tl.float32)
    else:
        codes = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask=seen, other=0)
        if by_token:
            scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + i, mask=ok, other=0.0)[:, None]
        else:
            scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + d, mask=d < dim, other=0.0)[None, :]
        if kind == 1:
            numbers = codes.to(tl.float32)
        else:
            # Bits of the code, moved to their place in float16, are the number / 256 (see `quantize`).
            bits = (codes.to(tl.int32) << 7) & 0xBFFF
            numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            scale = scale * 256.0
        stored = (numbers * scale).to(KV.dtype.element_ty).to(tl.float32)
    return stored


@triton.jit
def place(
    PIECES, TILES, base,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
    SHARES, DRIFT_K, DRIFT_V, num_landmarks, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write TOKENS stored tokens of one head: dequantised, corrected, rotated."""
    tile, h = tl.program_id(0), tl.program_id(1)
    piece = PIECES + tl.load(TILES + 2 * tile) * 10
    i = tl.load(TILES + 2 * tile + 1) + tl.arange(0, TOKENS)
    start, count, kind = tl.load(piece + 7), tl.load(piece + 8), tl.load(piece + 9)
    ok = i < count
    t = start + i
    itemsize = tl.where(kind == 0, KEYS.dtype.element_ty.primitive_bitwidth // 8, 1)
    d = tl.arange(0, DIM_K_PADDED)
    address = base + tl.load(piece) + h * tl.load(piece + 4) * itemsize
    scales = base + tl.load(piece + 2) + h * DIM_K * 4
    other = _partner(d, ROTARY, ADJACENT)
    keys = _stored(address, scales, kind, i, ok, d, DIM_K, False, KEYS)
    partner = _stored(address, scales, kind, i, ok, other, DIM_K, False, KEYS)
    if LANDMARKS:
        keys += _drift(SHARES, DRIFT_K, t, ok, h, d, num_landmarks, DIM_K, LANDMARKS, PRECISION)
        partner += _drift(SHARES, DRIFT_K, t, ok, h, other, num_landmarks, DIM_K, LANDMARKS, PRECISION)
    cos, sin = _angles(COS, SIN, t, ok, d, ROTARY, ADJACENT)
    keys = (keys * cos + partner * sin).to(KEYS.dtype.element_ty)
    if HAS_WEIGHT:
        keys = keys.to(tl.float32) * tl.load(WEIGHT + d, mask=d < DIM_K, other=0.0).to(tl.float32)[None, :]
    at = token_offsets(TABLE, t, ok, k_page, k_slot, PAGE)[:, None] + h * k_head + d[None, :] * k_dim
    tl.store(KEYS + at, keys.to(KEYS.dtype.element_ty), mask=ok[:, None] & (d < DIM_K)[None, :])
    d = tl.arange(0, DIM_V_PADDED)
    address = base + tl.load(piece + 1) + h * tl.load(piece + 5) * itemsize
    scales = base + tl.load(piece + 3) + h * tl.load(piece + 6) * 4
    values = _stored(address, scales, kind, i, ok, d, DIM_V, True, VALUES)
    if LANDMARKS:
        values += _drift(SHARES, DRIFT_V, t, ok, h, d, num_landmarks, DIM_V, LANDMARKS, PRECISION)
    at = token_offsets(TABLE, t, ok, v_page, v_slot, PAGE)[:, None] + h * v_head + d[None, :] * v_dim
    tl.store(VALUES + at, values.to(VALUES.dtype.element_ty), mask=ok[:, None] & (d < DIM_V)[None, :])


@triton.jit
def write_rows(
    FRESH_K, FRESH_V, SOURCE, num_tokens, fk_head, fk_row, fv_head, fv_row,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
    SHARES, DRIFT_K, DRIFT_V, num_landmarks, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the fresh rows of one head among TOKENS tokens, and add the drift to the others.

    With a drift, SOURCE [num_tokens] is each token's row in the fresh KV, -1 without one, and -2 for a token that stays
    as it is. Without a drift, it is each row's position.
    """
    i, h = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    ok = i < num_tokens
    if LANDMARKS:
        t = i
        row = tl.load(SOURCE + i, mask=ok, other=-2)
        ok = row >= -1
    else:
        t = tl.load(SOURCE + i, mask=ok, other=0)
        row = i
    is_fresh = ok & (row >= 0)
    d = tl.arange(0, DIM_K_PADDED)
    seen = (d < DIM_K)[None, :]
    at = token_offsets(TABLE, t, ok, k_page, k_slot, PAGE)[:, None] + h * k_head + d[None, :] * k_dim
    fresh_at = h * fk_head + row.to(tl.int64)[:, None] * fk_row + d[None, :]
    keys = tl.load(FRESH_K + fresh_at, mask=is_fresh[:, None] & seen, other=0.0)
    if LANDMARKS:
        other = _partner(d, ROTARY, ADJACENT)
        cos, sin = _angles(COS, SIN, t, ok, d, ROTARY, ADJACENT)
        change = _drift(SHARES, DRIFT_K, t, ok, h, d, num_landmarks, DIM_K, LANDMARKS, PRECISION) * cos
        change += _drift(SHARES, DRIFT_K, t, ok, h, other, num_landmarks, DIM_K, LANDMARKS, PRECISION) * sin
        if HAS_WEIGHT:
            change = change * tl.load(WEIGHT + d, mask=d < DIM_K, other=0.0).to(tl.float32)[None, :]
        kept = tl.load(KEYS + at, mask=ok[:, None] & seen, other=0.0).to(tl.float32) + change
        keys = tl.where(is_fresh[:, None], keys, kept.to(KEYS.dtype.element_ty))
    tl.store(KEYS + at, keys, mask=ok[:, None] & seen)
    d = tl.arange(0, DIM_V_PADDED)
    seen = (d < DIM_V)[None, :]
    at = token_offsets(TABLE, t, ok, v_page, v_slot, PAGE)[:, None] + h * v_head + d[None, :] * v_dim
    fresh_at = h * fv_head + row.to(tl.int64)[:, None] * fv_row + d[None, :]
    values = tl.load(FRESH_V + fresh_at, mask=is_fresh[:, None] & seen, other=0.0)
    if LANDMARKS:
        change = _drift(SHARES, DRIFT_V, t, ok, h, d, num_landmarks, DIM_V, LANDMARKS, PRECISION)
        kept = tl.load(VALUES + at, mask=ok[:, None] & seen, other=0.0).to(tl.float32) + change
        values = tl.where(is_fresh[:, None], values, kept.to(VALUES.dtype.element_ty))
    tl.store(VALUES + at, values, mask=ok[:, None] & seen)


@triton.jit
def _change(
    FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, of_dim, PAGE: tl.constexpr
):
    """Return fresh minus placed KV [tokens, D] of the recomputed tokens `n`, in dimensions `d`."""
    seen = ok[:, None] & (d < DIM)[None, :]
    index = tl.load(INDICES + n, mask=ok, other=0)
    t = tl.load(ROWS + n, mask=ok, other=0)
    fresh = tl.load(FRESH + h * head + index[:, None] * row + d[None, :], mask=seen, other=0.0)
    at = token_offsets(TABLE, t, ok, page, slot, PAGE)[:, None] + h * of_head + d[None, :] * of_dim
    return fresh.to(tl.float32) - tl.load(STORED + at, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _key_change(
    FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, of_dim, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Return `_change` of keys before their rotation: the rotation is linear."""
    other = _partner(d, ROTARY, ADJACENT)
    change = _change(
        FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, of_dim, PAGE
    )
    partner = _change(
        FRESH, INDICES, ROWS, n, ok, h, other, DIM, head, row, STORED, TABLE, page, slot, of_head, of_dim, PAGE
    )
    if HAS_WEIGHT:
        change = change / tl.load(WEIGHT + d, mask=d < DIM, other=1.0).to(tl.float32)[None, :]
        partner = partner / tl.load(WEIGHT + other, mask=other < DIM, other=1.0).to(tl.float32)[None, :]
    t = tl.load(ROWS + n, mask=ok, other=0)
    cos, sin = _angles(COS, SIN, t, ok, d, ROTARY, ADJACENT)
    cos, sin = _inverse(cos, sin, ROTARY)
    return change * cos + partner * sin


@triton.jit
def change_lengths(
    FRESH_K, FRESH_V, INDICES, ROWS, num_rows, fk_head, fk_row, fv_head, fv_row, LENGTHS,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the length of each recomputed token's change, of one head's keys or values, in LENGTHS [2, H, N]."""
    n, h, which = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1), tl.program_id(2)
    ok = n < num_rows
    if which == 0:
        d = tl.arange(0, DIM_K_PADDED)
        keys = _key_change(
            FRESH_K, INDICES, ROWS, n, ok, h, d, DIM_K, fk_head, fk_row, KEYS, TABLE, k_page, k_slot, k_head, k_dim,
            PAGE, COS, SIN, WEIGHT, HAS_WEIGHT, ROTARY, ADJACENT,
        )  # fmt: skip
        squares = tl.sum(keys * keys, 1)
    else:
        d = tl.arange(0, DIM_V_PADDED)
        values = _change(
            FRESH_V, INDICES, ROWS, n, ok, h, d, DIM_V, fv_head, fv_row, VALUES, TABLE, v_page, v_slot, v_head,
            v_dim, PAGE,
        )  # fmt: skip
        squares = tl.sum(values * values, 1)
    tl.store(LENGTHS + (which * tl.num_programs(1) + h) * num_rows + n, tl.sqrt(squares), mask=ok)


@triton.jit
def _median(LENGTHS, num_rows, ROWS_PADDED: tl.constexpr):
    """Return the lower median of `num_rows` lengths: the least whose rank is at least half, found bit by bit."""
    n = tl.arange(0, ROWS_PADDED)
    ok = n < num_rows
    # The bits of floats that are not negative are in the order of the floats.
    bits = tl.load(LENGTHS + n, mask=ok, other=0.0).to(tl.int32, bitcast=True)
    low = tl.min(tl.where(ok, bits, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(ok, bits, 0), 0)
    while low < high:
        middle = low + (high - low) // 2
        if 2 * tl.sum(tl.where(ok & (bits <= middle), 1, 0), 0) >= num_rows:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.float32, bitcast=True)


@triton.jit
def fit_drift(
    FRESH_K, FRESH_V, INDICES, ROWS, num_rows, fk_head, fk_row, fv_head, fv_row, LENGTHS, WEIGHTS, DRIFT_K, DRIFT_V,
    num_landmarks,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, ROWS_PADDED: tl.constexpr, LANDMARKS: tl.constexpr,
    MAX_RATIO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store BLOCK dimensions of the drift of one head's keys or values: WEIGHTS times the limited changes."""
    d, h, which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    LENGTHS += (which * tl.num_programs(1) + h) * num_rows
    most = MAX_RATIO * _median(LENGTHS, num_rows, ROWS_PADDED)
    m = tl.arange(0, LANDMARKS)
    drift = tl.zeros([LANDMARKS, BLOCK], tl.float32)
    for first in range(0, num_rows, TOKENS):
        n = first + tl.arange(0, TOKENS)
        ok = n < num_rows
        if which == 0:
            change = _key_change(
                FRESH_K, INDICES, ROWS, n, ok, h, d, DIM_K, fk_head, fk_row, KEYS, TABLE, k_page, k_slot, k_head, k_dim,
                PAGE, COS, SIN, WEIGHT, HAS_WEIGHT, ROTARY, ADJACENT,
            )  # fmt: skip
        else:
            change = _change(
                FRESH_V, INDICES, ROWS, n, ok, h, d, DIM_V, fv_head, fv_row, VALUES, TABLE, v_page, v_slot, v_head,
                v_dim, PAGE,
            )  # fmt: skip
        lengths = tl.load(LENGTHS + n, mask=ok, other=1.0)
        limit = tl.minimum(most / tl.maximum(lengths, 1.1754943508222875e-38), 1.0)
        at = m[:, None] * num_rows + n[None, :]
        weights = tl.load(WEIGHTS + at, mask=(m < num_landmarks)[:, None] & ok[None, :], other=0.0)
        drift += tl.dot(weights, change * limit[:, None], input_precision=PRECISION)
    is_landmark = (m < num_landmarks)[:, None]
    row = (h * num_landmarks + m)[:, None]
    if which == 0:
        tl.store(DRIFT_K + row * DIM_K + d[None, :], drift, mask=is_landmark & (d < DIM_K)[None, :])
    else:
        tl.store(DRIFT_V + row * DIM_V + d[None, :], drift, mask=is_landmark & (d < DIM_V)[None, :])
