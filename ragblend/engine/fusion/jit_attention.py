"""Triton programs of attention: scattered rows over a layer, and a question's attention probabilities.

`kernels` starts them. Their arguments are named as in `jit_rows`.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  # constants of the compiler are written in capitals, and decide statements

from __future__ import annotations

import triton
import triton.language as tl

from ragblend.engine.fusion.jit_rows import token_offsets


@triton.jit
def _scores(
    q, k, t, pos, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
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
def _load_rows(BASE, at, ok, d, dim, DIM: tl.constexpr, INTERPRETS: tl.constexpr):
    """Return rows [N, D] at offsets `at`, whose numbers are `dim` apart. In the interpreter, which multiplies no
    bfloat16, they are float32."""
    rows = tl.load(BASE + at[:, None] + d[None, :] * dim, mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
    if INTERPRETS:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def attend(
    QUERY, ROWS, SINKS, num_rows, q_head, q_row, PARTS, SUMS, span,
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
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
    q = _load_rows(QUERY, head * q_head + row.to(tl.int64) * q_row, ok, d, 1, DIM_K, INTERPRETS)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    if HAS_SINKS:
        if part == 0:
            peak = tl.load(SINKS + head, mask=ok, other=0.0).to(tl.float32)
            total = tl.full([PAIRS], 1.0, tl.float32)
    output = tl.zeros([PAIRS, DIM_V_PADDED], tl.float32)
    begin = part * span
    end = tl.minimum(begin + span, greatest + 1)
    whole = ((tl.minimum(end, least + 1) - begin) // NUM_KEYS) * NUM_KEYS + begin  # keys before it are seen by all
    if WINDOW:
        begin = tl.maximum(begin, (tl.maximum(least + 1 - WINDOW, 0) // NUM_KEYS) * NUM_KEYS)
        whole = begin  # each block of keys is masked
    for first in range(begin, whole, NUM_KEYS):
        t = first + tl.arange(0, NUM_KEYS)
        real = t < end
        at = token_offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
        k = _load_rows(KEYS, at, real, d, k_dim, DIM_K, INTERPRETS)
        scores = _scores(q, k, t, pos, scale, WINDOW, SOFTCAP, False, PRECISION)
        at = token_offsets(TABLE, t, real, v_page, v_slot, PAGE) + h * v_head
        v = _load_rows(VALUES, at, real, dv, v_dim, DIM_V, INTERPRETS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, less = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        total = total * less + tl.sum(weights, 1)
        output = output * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    for first in range(tl.maximum(begin, whole), end, NUM_KEYS):
        t = first + tl.arange(0, NUM_KEYS)
        real = t < end
        at = token_offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
        k = _load_rows(KEYS, at, real, d, k_dim, DIM_K, INTERPRETS)
        scores = _scores(q, k, t, pos, scale, WINDOW, SOFTCAP, True, PRECISION)
        scores = tl.where(real[None, :], scores, float("-inf"))
        at = token_offsets(TABLE, t, real, v_page, v_slot, PAGE) + h * v_head
        v = _load_rows(VALUES, at, real, dv, v_dim, DIM_V, INTERPRETS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher > float("-inf"), higher, 0.0)  # a row may have seen no key yet
        weights, less = tl.exp(scores - base[:, None]), tl.exp(peak - base)
        total = total * less + tl.sum(weights, 1)
        output = output * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    at = (part * num_rows + row).to(tl.int64) * (HEADS * GROUPS) + head
    output = output / tl.where(total > 0, total, 1.0)[:, None]
    seen = ok[:, None] & (dv < DIM_V)[None, :]
    tl.store(PARTS + at[:, None] * DIM_V + dv[None, :], output.to(PARTS.dtype.element_ty), mask=seen)
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
    KEYS, VALUES, TABLE, k_page, k_slot, k_head, k_dim, v_page, v_slot, v_head, v_dim, PAGE: tl.constexpr,
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
            at = token_offsets(TABLE, t, real, k_page, k_slot, PAGE) + h * k_head
            k = _load_rows(KEYS, at, real, d, k_dim, DIM_K, INTERPRETS)
            for first in range(0, num_question_rows * GROUPS, PAIRS):
                pair = first + tl.arange(0, PAIRS)
                row, head = before + pair // GROUPS, h * GROUPS + pair % GROUPS
                ok = row < num_rows
                pos = tl.load(ROWS + row, mask=ok, other=-1)
                q = _load_rows(QUERY, head * q_head + row.to(tl.int64) * q_row, ok, d, 1, DIM_K, INTERPRETS)
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
        output = tl.sum(parts * tl.exp(sums - whole[None, :]), 0)
        at = (program - num_mass_tiles).to(tl.int64) * DIM_V + d
        tl.store(OUTPUT + at, output.to(OUTPUT.dtype.element_ty), mask=d < DIM_V)
