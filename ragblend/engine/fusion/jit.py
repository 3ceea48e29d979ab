"""Programs of `kernels`, compiled by Triton. Their arguments are those that `kernels` passes; shapes are stated there.

Keys and values of a layer are `KEYS` and `VALUES`; `k_page`, `k_slot` and `k_head` are the keys' strides, in elements,
of a page, a token in it and a head. A vector of a dimension is padded to a power of two. Positions are those of the
prompt.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806  # constants of the compiler are written in capitals

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offsets(TABLE, t, ok, page, slot, PAGE: tl.constexpr):
    """Return the offset of each token `t` in a layer, without its head."""
    if PAGE:
        pages = tl.load(TABLE + t // PAGE, mask=ok, other=0).to(tl.int64)
        return pages * page + (t % PAGE).to(tl.int64) * slot
    else:
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
    """Return the factors [tokens, D] of each dimension and of its partner. Dimensions that do not rotate get 1 and 0."""
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
def _drift(SHARES, DRIFT, t, ok, h, d, num_landmarks, DIM: tl.constexpr, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the estimated change [tokens, D] of tokens `t` in dimensions `d`."""
    m = tl.arange(0, LANDMARKS)
    known = m < num_landmarks
    at = t[:, None].to(tl.int64) * num_landmarks + m[None, :]
    shares = tl.load(SHARES + at, mask=ok[:, None] & known[None, :], other=0.0)
    at = (h * num_landmarks + m)[:, None] * DIM + d[None, :]
    drift = tl.load(DRIFT + at, mask=known[:, None] & (d < DIM)[None, :], other=0.0)
    return tl.dot(shares, drift, input_precision=PRECISION)


@triton.jit
def _stored(address, scales, kind, i, ok, d, dim, by_token: tl.constexpr, KV):
    """Return stored numbers [tokens, D] of one head in float32: as computed (kind 0), or int8 (1) or fp8 codes (2).

    `address`, `scales`: of the head. `by_token`: scales are of tokens, and not of dimensions.
    """
    seen = ok[:, None] & (d < dim)[None, :]
    at = i[:, None].to(tl.int64) * dim + d[None, :]
    if kind == 0:
        found = tl.load(address.to(KV.dtype) + at, mask=seen, other=0.0).to(tl.float32)
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
        found = (numbers * scale).to(KV.dtype.element_ty).to(tl.float32)
    return found


@triton.jit
def place(
    PIECES, TILES, base,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
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
        keys = keys * tl.load(WEIGHT + d, mask=d < DIM_K, other=0.0)[None, :]
    at = _offsets(TABLE, t, ok, k_page, k_slot, PAGE)[:, None] + h * k_head + d[None, :]
    tl.store(KEYS + at, keys.to(KEYS.dtype.element_ty), mask=ok[:, None] & (d < DIM_K)[None, :])
    d = tl.arange(0, DIM_V_PADDED)
    address = base + tl.load(piece + 1) + h * tl.load(piece + 5) * itemsize
    scales = base + tl.load(piece + 3) + h * tl.load(piece + 6) * 4
    values = _stored(address, scales, kind, i, ok, d, DIM_V, True, VALUES)
    if LANDMARKS:
        values += _drift(SHARES, DRIFT_V, t, ok, h, d, num_landmarks, DIM_V, LANDMARKS, PRECISION)
    at = _offsets(TABLE, t, ok, v_page, v_slot, PAGE)[:, None] + h * v_head + d[None, :]
    tl.store(VALUES + at, values.to(VALUES.dtype.element_ty), mask=ok[:, None] & (d < DIM_V)[None, :])


@triton.jit
def write_rows(
    FRESH_K, FRESH_V, SOURCE, num_tokens, fk_head, fk_row, fv_head, fv_row,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
    SHARES, DRIFT_K, DRIFT_V, num_landmarks, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the fresh rows of one head among TOKENS tokens, and add the drift to the others.

    With a drift, SOURCE [num_tokens] is each token's row in the fresh KV, or -1. Without, it is each row's position.
    """
    i, h = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    ok = i < num_tokens
    if LANDMARKS:
        t = i
        row = tl.load(SOURCE + i, mask=ok, other=-1)
    else:
        t = tl.load(SOURCE + i, mask=ok, other=0)
        row = i
    is_fresh = ok & (row >= 0)
    d = tl.arange(0, DIM_K_PADDED)
    seen = (d < DIM_K)[None, :]
    at = _offsets(TABLE, t, ok, k_page, k_slot, PAGE)[:, None] + h * k_head + d[None, :]
    fresh_at = h * fk_head + row.to(tl.int64)[:, None] * fk_row + d[None, :]
    keys = tl.load(FRESH_K + fresh_at, mask=is_fresh[:, None] & seen, other=0.0)
    if LANDMARKS:
        other = _partner(d, ROTARY, ADJACENT)
        cos, sin = _angles(COS, SIN, t, ok, d, ROTARY, ADJACENT)
        change = _drift(SHARES, DRIFT_K, t, ok, h, d, num_landmarks, DIM_K, LANDMARKS, PRECISION) * cos
        change += _drift(SHARES, DRIFT_K, t, ok, h, other, num_landmarks, DIM_K, LANDMARKS, PRECISION) * sin
        if HAS_WEIGHT:
            change = change * tl.load(WEIGHT + d, mask=d < DIM_K, other=0.0)[None, :]
        kept = tl.load(KEYS + at, mask=ok[:, None] & seen, other=0.0).to(tl.float32) + change
        keys = tl.where(is_fresh[:, None], keys, kept.to(KEYS.dtype.element_ty))
    tl.store(KEYS + at, keys, mask=ok[:, None] & seen)
    d = tl.arange(0, DIM_V_PADDED)
    seen = (d < DIM_V)[None, :]
    at = _offsets(TABLE, t, ok, v_page, v_slot, PAGE)[:, None] + h * v_head + d[None, :]
    fresh_at = h * fv_head + row.to(tl.int64)[:, None] * fv_row + d[None, :]
    values = tl.load(FRESH_V + fresh_at, mask=is_fresh[:, None] & seen, other=0.0)
    if LANDMARKS:
        change = _drift(SHARES, DRIFT_V, t, ok, h, d, num_landmarks, DIM_V, LANDMARKS, PRECISION)
        kept = tl.load(VALUES + at, mask=ok[:, None] & seen, other=0.0).to(tl.float32) + change
        values = tl.where(is_fresh[:, None], values, kept.to(VALUES.dtype.element_ty))
    tl.store(VALUES + at, values, mask=ok[:, None] & seen)


@triton.jit
def _change(FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, PAGE: tl.constexpr):
    """Return fresh minus placed KV [tokens, D] of the recomputed tokens `n`, in dimensions `d`."""
    seen = ok[:, None] & (d < DIM)[None, :]
    index = tl.load(INDICES + n, mask=ok, other=0)
    t = tl.load(ROWS + n, mask=ok, other=0)
    fresh = tl.load(FRESH + h * head + index[:, None] * row + d[None, :], mask=seen, other=0.0)
    at = _offsets(TABLE, t, ok, page, slot, PAGE)[:, None] + h * of_head + d[None, :]
    return fresh.to(tl.float32) - tl.load(STORED + at, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _key_change(
    FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, PAGE: tl.constexpr,
    COS, SIN, WEIGHT, HAS_WEIGHT: tl.constexpr, ROTARY: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Return `_change` of keys before their rotation: the rotation is linear."""
    other = _partner(d, ROTARY, ADJACENT)
    own = _change(FRESH, INDICES, ROWS, n, ok, h, d, DIM, head, row, STORED, TABLE, page, slot, of_head, PAGE)
    partner = _change(FRESH, INDICES, ROWS, n, ok, h, other, DIM, head, row, STORED, TABLE, page, slot, of_head, PAGE)
    if HAS_WEIGHT:
        own = own / tl.load(WEIGHT + d, mask=d < DIM, other=1.0)[None, :]
        partner = partner / tl.load(WEIGHT + other, mask=other < DIM, other=1.0)[None, :]
    t = tl.load(ROWS + n, mask=ok, other=0)
    cos, sin = _angles(COS, SIN, t, ok, d, ROTARY, ADJACENT)
    cos, sin = _inverse(cos, sin, ROTARY)
    return own * cos + partner * sin


@triton.jit
def change_lengths(
    FRESH_K, FRESH_V, INDICES, ROWS, num_rows, fk_head, fk_row, fv_head, fv_row, LENGTHS,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
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
            FRESH_K, INDICES, ROWS, n, ok, h, d, DIM_K, fk_head, fk_row, KEYS, TABLE, k_page, k_slot, k_head, PAGE,
            COS, SIN, WEIGHT, HAS_WEIGHT, ROTARY, ADJACENT,
        )  # fmt: skip
        squares = tl.sum(keys * keys, 1)
    else:
        d = tl.arange(0, DIM_V_PADDED)
        values = _change(
            FRESH_V, INDICES, ROWS, n, ok, h, d, DIM_V, fv_head, fv_row, VALUES, TABLE, v_page, v_slot, v_head, PAGE
        )
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
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
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
    found = tl.zeros([LANDMARKS, BLOCK], tl.float32)
    for first in range(0, num_rows, TOKENS):
        n = first + tl.arange(0, TOKENS)
        ok = n < num_rows
        if which == 0:
            change = _key_change(
                FRESH_K, INDICES, ROWS, n, ok, h, d, DIM_K, fk_head, fk_row, KEYS, TABLE, k_page, k_slot, k_head, PAGE,
                COS, SIN, WEIGHT, HAS_WEIGHT, ROTARY, ADJACENT,
            )  # fmt: skip
        else:
            change = _change(
                FRESH_V, INDICES, ROWS, n, ok, h, d, DIM_V, fv_head, fv_row, VALUES, TABLE, v_page, v_slot, v_head, PAGE
            )
        lengths = tl.load(LENGTHS + n, mask=ok, other=1.0)
        limit = tl.minimum(most / tl.maximum(lengths, 1.1754943508222875e-38), 1.0)
        at = m[:, None] * num_rows + n[None, :]
        weights = tl.load(WEIGHTS + at, mask=(m < num_landmarks)[:, None] & ok[None, :], other=0.0)
        found += tl.dot(weights, change * limit[:, None], input_precision=PRECISION)
    known = (m < num_landmarks)[:, None]
    row = (h * num_landmarks + m)[:, None]
    if which == 0:
        tl.store(DRIFT_K + row * DIM_K + d[None, :], found, mask=known & (d < DIM_K)[None, :])
    else:
        tl.store(DRIFT_V + row * DIM_V + d[None, :], found, mask=known & (d < DIM_V)[None, :])


@triton.jit
def _scores(q, k, t, pos, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the scores [rows, keys] of queries at `pos` for keys at `t`; -inf where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 / SOFTCAP * scores) + 1.0))  # tanh
    if MASKED:
        seen = t[None, :] <= pos[:, None]
        if WINDOW:
            seen = seen & (t[None, :] > pos[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _load_rows(BASE, at, ok, d, DIM: tl.constexpr, INTERPRETS: tl.constexpr):
    """Return rows [N, D] at offsets `at`. The interpreter multiplies no bfloat16, so there they are float32."""
    rows = tl.load(BASE + at[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
    if INTERPRETS:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def attend(
    QUERY, ROWS, SINKS, num_rows, q_head, q_row, PARTS, SUMS, span,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
    scale, HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, PAIRS: tl.constexpr, NUM_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETS: tl.constexpr,
    DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr, STORES_SUMS: tl.constexpr,
):  # fmt: skip
    """Attend with PAIRS pairs of a row and a query head, which share a KV head, to one part of the keys."""
    tile, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    row, head = pair // GROUPS, h * GROUPS + pair % GROUPS
    ok = row < num_rows
    pos = tl.load(ROWS + row, mask=ok, other=-1)
    # Rows ascend, so the tile's first and last are its least and greatest position.
    least = tl.load(ROWS + tile * PAIRS // GROUPS)
    greatest = tl.load(ROWS + tl.minimum((tile * PAIRS + PAIRS - 1) // GROUPS, num_rows - 1))
    d, dv = tl.arange(0, DIM_K_PADDED), tl.arange(0, DIM_V_PADDED)
    q = _load_rows(QUERY, head * q_head + row.to(tl.int64) * q_row, ok, d, DIM_K, INTERPRETS)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    if HAS_SINKS:
        if part == 0:
            peak = tl.load(SINKS + head, mask=ok, other=0.0).to(tl.float32)
            total = tl.full([PAIRS], 1.0, tl.float32)
    found = tl.zeros([PAIRS, DIM_V_PADDED], tl.float32)
    begin = part * span
    end = tl.minimum(begin + span, greatest + 1)
    whole = ((tl.minimum(end, least + 1) - begin) // NUM_KEYS) * NUM_KEYS + begin  # keys before it are seen by all
    if WINDOW:
        begin = tl.maximum(begin, (tl.maximum(least + 1 - WINDOW, 0) // NUM_KEYS) * NUM_KEYS)
        whole = begin  # each block of keys is masked
    for first in range(begin, whole, NUM_KEYS):
        t = first + tl.arange(0, NUM_KEYS)
        real = t < end
        at = _offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
        k = _load_rows(KEYS, at, real, d, DIM_K, INTERPRETS)
        scores = _scores(q, k, t, pos, scale, WINDOW, SOFTCAP, False, PRECISION)
        at = _offsets(TABLE, t, real, v_page, v_slot, PAGE) + h * v_head
        v = _load_rows(VALUES, at, real, dv, DIM_V, INTERPRETS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, less = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        total = total * less + tl.sum(weights, 1)
        found = found * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    for first in range(tl.maximum(begin, whole), end, NUM_KEYS):
        t = first + tl.arange(0, NUM_KEYS)
        real = t < end
        at = _offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
        k = _load_rows(KEYS, at, real, d, DIM_K, INTERPRETS)
        scores = _scores(q, k, t, pos, scale, WINDOW, SOFTCAP, True, PRECISION)
        scores = tl.where(real[None, :], scores, float("-inf"))
        at = _offsets(TABLE, t, real, v_page, v_slot, PAGE) + h * v_head
        v = _load_rows(VALUES, at, real, dv, DIM_V, INTERPRETS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher > float("-inf"), higher, 0.0)  # a row may have seen no key yet
        weights, less = tl.exp(scores - base[:, None]), tl.exp(peak - base)
        total = total * less + tl.sum(weights, 1)
        found = found * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    at = (part * num_rows + row).to(tl.int64) * (HEADS * GROUPS) + head
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    seen = ok[:, None] & (dv < DIM_V)[None, :]
    tl.store(PARTS + at[:, None] * DIM_V + dv[None, :], found.to(PARTS.dtype.element_ty), mask=seen)
    if STORES_SUMS:
        sums = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(SUMS + (part * HEADS * GROUPS + head) * num_rows + row, sums, mask=ok)


@triton.jit
def _all_sums(SUMS, at, ok, size, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr):
    """Return each part's sum [parts, N] at offsets `at` [N], as a logarithm, and the sum of all parts [N]."""
    part = tl.arange(0, SPLITS_PADDED)
    seen = (part < SPLITS)[:, None] & ok[None, :]
    sums = tl.load(SUMS + part[:, None] * size + at[None, :], mask=seen, other=float("-inf"))
    peak = tl.max(sums, 0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(tl.exp(sums - peak[None, :]), 0)
    return sums, peak + tl.log(tl.where(total > 0, total, 1.0))


@triton.jit
def finish(
    QUERY, ROWS, SINKS, num_rows, q_head, q_row, PARTS, SUMS, OUTPUT, MASS, num_mass_tiles, num_keys, num_question_rows,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, v_page, v_slot, v_head, PAGE: tl.constexpr,
    scale, HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr,
    DIM_K: tl.constexpr, DIM_K_PADDED: tl.constexpr, PAIRS: tl.constexpr, NUM_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETS: tl.constexpr,
    DIM_V: tl.constexpr, DIM_V_PADDED: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """The first programs store the attention probabilities of NUM_KEYS keys in MASS, mean over heads and the question's
    rows. Each of the others stores one row's attention of one head from its parts.
    """
    program = tl.program_id(0)
    size = HEADS * GROUPS * num_rows
    if program < num_mass_tiles:
        t = program * NUM_KEYS + tl.arange(0, NUM_KEYS)
        real = t < num_keys
        d = tl.arange(0, DIM_K_PADDED)
        mass = tl.zeros([NUM_KEYS], tl.float32)
        before = num_rows - num_question_rows
        for h in range(HEADS):
            at = _offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
            k = _load_rows(KEYS, at, real, d, DIM_K, INTERPRETS)
            for first in range(0, num_question_rows * GROUPS, PAIRS):
                pair = first + tl.arange(0, PAIRS)
                row, head = before + pair // GROUPS, h * GROUPS + pair % GROUPS
                ok = row < num_rows
                pos = tl.load(ROWS + row, mask=ok, other=-1)
                q = _load_rows(QUERY, head * q_head + row.to(tl.int64) * q_row, ok, d, DIM_K, INTERPRETS)
                scores = _scores(q, k, t, pos, scale, WINDOW, SOFTCAP, True, PRECISION)
                sums, whole = _all_sums(SUMS, head * num_rows + row, ok, size, SPLITS, SPLITS_PADDED)
                mass += tl.sum(tl.where(ok[:, None], tl.exp(scores - whole[:, None]), 0.0), 0)
        tl.store(MASS + t, mass / (HEADS * GROUPS * num_question_rows), mask=real)
    else:
        pair = program - num_mass_tiles + tl.arange(0, 1)
        row, head = pair // (HEADS * GROUPS), pair % (HEADS * GROUPS)
        sums, whole = _all_sums(SUMS, head * num_rows + row, row < num_rows, size, SPLITS, SPLITS_PADDED)
        part, d = tl.arange(0, SPLITS_PADDED), tl.arange(0, DIM_V_PADDED)
        at = (part * size + pair).to(tl.int64)[:, None] * DIM_V + d[None, :]
        parts = tl.load(PARTS + at, mask=(part < SPLITS)[:, None] & (d < DIM_V)[None, :], other=0.0)
        found = tl.sum(parts * tl.exp(sums - whole[None, :]), 0)
        at = (program - num_mass_tiles).to(tl.int64) * DIM_V + d
        tl.store(OUTPUT + at, found.to(OUTPUT.dtype.element_ty), mask=d < DIM_V)
