"""Attention with edited logits as Triton kernels: one pass over the keys in forward, two in backward, O(T) memory.

With s the scaled products of queries and keys plus an additive mask, the logits are one of

- CAP: c tanh(s / c), with slope 1 - tanh^2 in backward;
- PAST, BETWEEN: s + c_i - c_j or s - |c_i - c_j|, for one number c of each token and head, whose gradients are the sums
  of the logits' gradients over a row and over a column;
- STABLE: s itself, with exponents relative to a number r that is not the running maximum m where m repeats, so that at
  most one weight of a tile is exactly 1. The two largest logits so far tell whether m repeats;
- PICK: s itself, with weights relu(e^s - 1) over Z = c + the row's sum of |e^s - 1|. Its log-sum-exp L is log Z, and
  the gradient of a logit e^(s - L) (g v + l) above 0 and -e^(s - L) l below, with l what the row has in common.

Logits are in units of log 2. The queries' kernel also computes what a row of gradients has in common, -<dO, O> + dL,
and writes it and the log-sum-exp in these units for the keys' kernel, which follows it. That one works on (keys,
queries), so that all products of a kernel have the same number of rows, and sums over queries in a fixed order: there
are no atomics, and results repeat to the bit. Outputs and gradients lie in memory as (B, T, H, D), which hosts read as
(B, T, H D) without a copy.
Source: Dao 2023, arXiv 2307.08691.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.kernels import as_hosts
from headwise.numerics.triton_tiles import (
    blocks_of,
    head_of,
    inside,
    mask_tile,
    padded,
    place,
    precision,
    readable,
    spans,
    tile,
)

# What the kernels' constant EDIT says; backward of STABLE is PLAIN.
PLAIN, CAP, PAST, BETWEEN, STABLE, PICK = range(6)
KINDS = {"cap": CAP, "past": PAST, "between": BETWEEN, "stable": STABLE, "pick": PICK}


@triton.jit
def tanh(x):
    """Return tanh(x) in fp32 with a relative error below 1e-6 everywhere; nan stays nan.

    A minimax quotient of polynomials of x^2, fitted on [0, 9.02], where tanh is 1 in fp32. It takes one inverse root, a
    single instruction; a power and a division take more of those that a GPU computes eight times slower than products.
    """
    x = tl.minimum(tl.maximum(x, -9.02, propagate_nan=tl.PropagateNan.ALL), 9.02, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    above = (((1.3319024889e-08 * y + 2.0583445506e-05) * y + 3.4940323316e-03) * y + 1.3379703672e-01) * y + 1.0
    below = (((7.7619996356e-07 * y + 3.2830892260e-04) * y + 2.5871064718e-02) * y + 4.6713031323e-01) * y + 1.0
    root = tl.rsqrt(below)
    return (x * above) * (root * root)


@triton.jit
def _factors(by_at, number, scale, EDIT: tl.constexpr, HELD: tl.constexpr):
    """Return the factors of products, of an additive mask, and of the result in units of log 2; HELD: on the device."""
    if EDIT == 1:
        if HELD:
            number = tl.load(by_at)
        return scale / number, 1.0 / number, number * 1.4426950408889634
    return scale * 1.4426950408889634, 1.4426950408889634, 1.0


@triton.jit
def _edited(
    s, own, past, mask_at, query, key, mt, mn, T, N, of_product, of_mask, of_result,
    EDIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the edited logits of a tile in units of log 2, -inf for keys that are not seen, and their slope or sign.

    s, own and past are the products and the numbers of queries and keys. KEYS_FIRST: the tile is (keys, queries).
    """
    s = s * of_product
    if MASK == 2:
        entries = mask_tile(mask_at, query, key, mt, mn, T, N, BT, BN, KEYS_FIRST).to(tl.float32)
        # The lowest number of a dtype stays finite: a row that has nothing else is a mean, as in PyTorch.
        s += tl.maximum(entries * of_mask, -1e30)
    slope = s
    if EDIT == 1:
        slope = tanh(s)
        s = slope * of_result
        slope = 1.0 - slope * slope
    elif EDIT == 2:
        s += (own - past) * 1.4426950408889634
    elif EDIT == 3:
        between = own - past
        s -= tl.abs(between) * 1.4426950408889634
        # For equal numbers too: those of one token cancel, and others have gates that are 1, which do not move.
        slope = tl.where(between > 0.0, -1.0, 1.0)
    if not WHOLE:
        seen = inside(query, key, N, BT, BN, CAUSAL, KEYS_FIRST)
        if MASK == 1:
            seen = seen & (mask_tile(mask_at, query, key, mt, mn, T, N, BT, BN, KEYS_FIRST) != 0)
        if MASK == 2:
            # tanh would make such a number a logit like others, and a sum of sizes counts it.
            seen = seen & (entries > (-9000.0 if EDIT == 1 or EDIT == 5 else float("-inf")))
        s = tl.where(seen, s, float("-inf"))
    return s, slope


@triton.jit
def _reference(s, m, second, number, near, half, BT: tl.constexpr):
    """Return the running largest and second logit of rows, and the number that exponents are relative to.

    The largest is lowered if the second is within `near` of it: both weights would be rounded to 1.
    """
    largest = tl.max(s, 1)
    equal = s == largest[:, None]
    other = tl.max(tl.where(equal, float("-inf"), s), 1)
    other = tl.where(tl.sum(equal.to(tl.int32), 1) > 1, largest, other)
    second = tl.maximum(tl.minimum(m, largest), tl.maximum(second, other))
    m = tl.maximum(m, largest)
    lower = tl.minimum(tl.where(m > 0.0, (number - 1.0) * m, -m), half)
    return m, second, tl.where(second >= m - near, m + lower, m)


@triton.jit
def _numbers(at, b, h, H, first, ROWS, BLOCK: tl.constexpr, USED: tl.constexpr):
    """Return the numbers (B, ROWS, H) of tokens from `first` on, zeros outside of them and where they are not used."""
    i = first + tl.arange(0, BLOCK)
    at += (b.to(tl.int64) * ROWS + i) * H + h
    return tl.load(at, mask=i < ROWS, other=0.0) if USED else tl.zeros([BLOCK], tl.float32)


@triton.jit
def _add_tile(
    m, second, r, z, acc, q, own, k_at, v_at, mask_at, by_at, b, h, H, query, key, kn, kd, vn, vd, mt, mn, T, N,
    of_product, of_mask, of_result, number, near, half,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the running maximum, reference and sums with one tile of keys added."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    past = _numbers(by_at, b, h, H, key, N, BN, EDIT == 2 or EDIT == 3)
    s, _ = _edited(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), own[:, None], past[None, :], mask_at, query, key, mt, mn,
        T, N, of_product, of_mask, of_result, EDIT, MASK, CAUSAL, WHOLE, False, BT, BN,
    )  # fmt: skip
    v = tile(v_at, key, vn, vd, N, DV, BN, BDV, WHOLE, UPCAST)
    if EDIT == 4:
        m, second, now = _reference(s, m, second, number, near, half, BT)
    else:
        m = tl.maximum(m, tl.max(s, 1))
        now = m
    # Rows without an allowed key so far have m = -inf; avoid -inf - (-inf).
    seen = tl.where(m == float("-inf"), 0.0, now)
    a = tl.exp2(r - seen)
    e = tl.exp2(s - seen[:, None])
    if EDIT == 5:
        # Keys that are not seen have no part in the sum.
        e = tl.where(s == float("-inf"), 0.0, e - tl.exp2(-seen)[:, None])
        weights = tl.maximum(e, 0.0).to(v.dtype)
        e = tl.abs(e)
    else:
        weights = e.to(v.dtype)
    if EDIT == 4:
        # The sum is that of the rounded weights.
        e = weights.to(tl.float32)
    z = a * z + tl.sum(e, 1)
    acc = tl.dot(weights, v, acc * a[:, None], input_precision=PRECISION)
    return m, second, now, z, acc


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, mask_at, by_at, out_at, lse_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, H, G, T, N, scale, number, near, half,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, HELD: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute A v and the log-sum-exp of each row, for one block of queries of one head."""
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        # The longest rows first, so that none is left at the end.
        block = blocks - 1 - block
    query = block * BT
    q = tile(head_of(q_at, b, h, qb, qh), query, qt, qd, T, D, BT, BD, False, UPCAST)
    k_at, v_at = head_of(k_at, b, h // G, kb, kh), head_of(v_at, b, h // G, vb, vh)
    mask_at = head_of(mask_at, b, h, mb, mh)
    of_product, of_mask, of_result = _factors(by_at, number, scale, EDIT, HELD)
    own = _numbers(by_at, b, h, H, query, T, BT, EDIT == 2 or EDIT == 3)
    # At least 0 where e^0 is subtracted from each exponential.
    m = tl.full([BT], 0.0 if EDIT == 5 else float("-inf"), tl.float32)
    second, r, z = m, m, tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, BDV], tl.float32)
    whole, last = spans(query, T, N, BT, BN, CAUSAL, MASK)
    for CUT in tl.static_range(2):
        for key in range(whole if CUT else 0, last if CUT else whole, BN):
            m, second, r, z, acc = _add_tile(
                m, second, r, z, acc, q, own, k_at, v_at, mask_at, by_at, b, h, H, query, key, kn, kd, vn, vd, mt, mn,
                T, N, of_product, of_mask, of_result, number, near, half,
                D, DV, EDIT, MASK, CAUSAL, not CUT, PRECISION, UPCAST, BT, BN, BD, BDV,
            )  # fmt: skip
    if EDIT == 5:
        z += number * tl.exp2(-r)
    full = tl.where(z == 0.0, 1.0, z)
    i = query + tl.arange(0, BT)
    lse = tl.where(z == 0.0, 0.0, (r + tl.log2(full)) * 0.6931471805599453)
    tl.store(lse_at + (b.to(tl.int64) * H + h) * T + i, lse, mask=i < T)
    _put(out_at, acc / full[:, None], b, h, H, query, T, DV, BT, BDV)


@triton.jit
def _put(at, x, b, h, H, first, ROWS, SIZE: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr):
    """Write a tile into rows from `first` on of one head of a tensor that lies in memory as (B, ROWS, H, SIZE)."""
    row, d = first + tl.arange(0, BLOCK), tl.arange(0, BD)
    at += ((b.to(tl.int64) * ROWS + row) * H + h)[:, None] * SIZE + d[None, :]
    tl.store(at, x.to(at.dtype.element_ty), mask=(row < ROWS)[:, None] & (d[None, :] < SIZE))


@triton.jit
def _log2_sums(at, row, rows):
    """Return the log-sum-exps of rows in units of log 2.

    Infinity, which makes all weights 0, stands for rows that the lowest number of a dtype forbids as a whole, whose
    log-sum-exp has lost the logits.
    """
    lse = tl.load(at + row, mask=rows, other=0.0)
    return tl.where(lse < -1e6, float("inf"), lse * 1.4426950408889634)


@triton.jit
def queries_kernel(
    q_at, k_at, v_at, mask_at, by_at, g_at, g_lse_at, out_at, lse_at, level_at, lse2_at, dq_at, dby_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd, H, G, T, N, scale, number,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, HELD: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, OF_LSE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries, a sum over the keys, and two numbers of each of its rows."""
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        block = blocks - 1 - block
    query = block * BT
    q = tile(head_of(q_at, b, h, qb, qh), query, qt, qd, T, D, BT, BD, False, UPCAST)
    g = tile(head_of(g_at, b, h, gb, gh), query, gt, gd, T, DV, BT, BDV, False, UPCAST)
    out = tile(
        head_of(out_at, b, h, tl.cast(T, tl.int64) * H * DV, DV), query, H * DV, 1, T, DV, BT, BDV, False, UPCAST
    )
    k_at, v_at = head_of(k_at, b, h // G, kb, kh), head_of(v_at, b, h // G, vb, vh)
    mask_at = head_of(mask_at, b, h, mb, mh)
    of_product, of_mask, of_result = _factors(by_at, number, scale, EDIT, HELD)
    own = _numbers(by_at, b, h, H, query, T, BT, EDIT == 2 or EDIT == 3)
    i = query + tl.arange(0, BT)
    row, rows = (b.to(tl.int64) * H + h) * T + i, i < T
    level = -tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    if OF_LSE:
        level += tl.load(g_lse_at + row, mask=rows, other=0.0)
    tl.store(level_at + row, level, mask=rows)
    lse = _log2_sums(lse_at, row, rows)
    tl.store(lse2_at + row, lse, mask=rows)
    dq, down = tl.zeros([BT, BD], tl.float32), tl.zeros([BT], tl.float32)
    whole, last = spans(query, T, N, BT, BN, CAUSAL, MASK)
    for CUT in tl.static_range(2):
        for key in range(whole if CUT else 0, last if CUT else whole, BN):
            dq, down = _add_keys(
                dq, down, q, g, own, level, lse, k_at, v_at, mask_at, by_at, b, h, H, query, key, kn, kd, vn, vd,
                mt, mn, T, N, of_product, of_mask, of_result,
                D, DV, EDIT, MASK, CAUSAL, not CUT, PRECISION, UPCAST, BT, BN, BD, BDV,
            )  # fmt: skip
    _put(dq_at, dq * scale, b, h, H, query, T, D, BT, BD)
    if EDIT == 2 or EDIT == 3:
        tl.store(dby_at + (b.to(tl.int64) * T + i) * H + h, down, mask=rows)


@triton.jit
def _add_keys(
    dq, down, q, g, own, level, lse, k_at, v_at, mask_at, by_at, b, h, H, query, key, kn, kd, vn, vd, mt, mn,
    T, N, of_product, of_mask, of_result,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the gradients of queries and of their numbers with those of one block of keys added."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    v = tile(v_at, key, vn, vd, N, DV, BN, BDV, WHOLE, UPCAST)
    past = _numbers(by_at, b, h, H, key, N, BN, EDIT == 2 or EDIT == 3)
    s, slope = _edited(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), own[:, None], past[None, :], mask_at, query, key, mt, mn,
        T, N, of_product, of_mask, of_result, EDIT, MASK, CAUSAL, WHOLE, False, BT, BN,
    )  # fmt: skip
    p, of_weight = tl.exp2(s - lse[:, None]), tl.dot(g, tl.trans(v), input_precision=PRECISION)
    if EDIT == 5:
        ds = p * _picked(s, of_weight, level[:, None])
    else:
        ds = p * (of_weight + level[:, None])
    if EDIT == 1:
        ds *= slope
    elif EDIT == 2:
        down += tl.sum(ds, 1)
    elif EDIT == 3:
        down += tl.sum(ds * slope, 1)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), down


@triton.jit
def _picked(s, of_weight, level):
    """Return the gradients of logits over e^(s - L), from those of the weights and what their rows have in common."""
    return tl.where(s > 0.0, of_weight + level, tl.where(s < 0.0, -level, 0.0))


@triton.jit
def _add_queries(
    dk, dvalue, dpast, k, v, past, q_at, g_at, level_at, lse_at, mask_at, by_at, b, h, H, query, key,
    qt, qd, gt, gd, mt, mn, T, N, of_product, of_mask, of_result,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the gradients of keys, values and the keys' numbers with those of one block of queries added."""
    i = query + tl.arange(0, BT)
    row, rows = (b.to(tl.int64) * H + h) * T + i, i < T
    q = tile(q_at, query, qt, qd, T, D, BT, BD, False, UPCAST)
    g = tile(g_at, query, gt, gd, T, DV, BT, BDV, False, UPCAST)
    own = _numbers(by_at, b, h, H, query, T, BT, EDIT == 2 or EDIT == 3)
    s, slope = _edited(
        tl.dot(k, tl.trans(q), input_precision=PRECISION), own[None, :], past[:, None], mask_at, query, key, mt, mn,
        T, N, of_product, of_mask, of_result, EDIT, MASK, CAUSAL, WHOLE, True, BT, BN,
    )  # fmt: skip
    # Infinity makes the weights of queries beyond the last 0.
    lse = tl.load(lse_at + row, mask=rows, other=float("inf"))
    p = tl.exp2(s - lse[None, :])
    weights = tl.maximum(p - tl.exp2(-lse)[None, :], 0.0) if EDIT == 5 else p
    dvalue = tl.dot(weights.to(g.dtype), g, dvalue, input_precision=PRECISION)
    level = tl.load(level_at + row, mask=rows, other=0.0)
    of_weight = tl.dot(v, tl.trans(g), input_precision=PRECISION)
    if EDIT == 5:
        ds = p * _picked(s, of_weight, level[None, :])
    else:
        ds = p * (of_weight + level[None, :])
    if EDIT == 1:
        ds *= slope
    elif EDIT == 2:
        dpast -= tl.sum(ds, 1)
    elif EDIT == 3:
        dpast -= tl.sum(ds * slope, 1)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dvalue, dpast


@triton.jit
def keys_kernel(
    q_at, k_at, v_at, mask_at, by_at, g_at, lse_at, level_at, dk_at, dv_at, dby_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd, H, G, T, N, scale, number,
    D: tl.constexpr, DV: tl.constexpr, EDIT: tl.constexpr, HELD: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, sums over the queries of all heads that share them."""
    groups = H // G
    block, b, group = place(tl.cdiv(N, BN), groups)
    key = block * BN
    k = tile(head_of(k_at, b, group, kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
    v = tile(head_of(v_at, b, group, vb, vh), key, vn, vd, N, DV, BN, BDV, False, UPCAST)
    of_product, of_mask, of_result = _factors(by_at, number, scale, EDIT, HELD)
    dk, dvalue = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    # Keys beyond the last get gradients that are not written.
    first = 0
    whole = 0
    if CAUSAL:
        first = key // BT * BT
        whole = tl.cdiv(key + BN - 1, BT) * BT
    if MASK != 0:
        whole = T
    for member in range(G):
        h = group * G + member
        past = _numbers(by_at, b, h, H, key, N, BN, EDIT == 2 or EDIT == 3)
        dpast = tl.zeros([BN], tl.float32)
        q_h, g_h = head_of(q_at, b, h, qb, qh), head_of(g_at, b, h, gb, gh)
        mask_h = head_of(mask_at, b, h, mb, mh)
        for WHOLE in tl.static_range(2):
            for query in range(whole if WHOLE else first, T if WHOLE else tl.minimum(whole, T), BT):
                dk, dvalue, dpast = _add_queries(
                    dk, dvalue, dpast, k, v, past, q_h, g_h, level_at, lse_at, mask_h, by_at, b, h, H, query, key,
                    qt, qd, gt, gd, mt, mn, T, N, of_product, of_mask, of_result,
                    D, DV, EDIT, MASK, CAUSAL, WHOLE, PRECISION, UPCAST, BT, BN, BD, BDV,
                )  # fmt: skip
        if EDIT == 2 or EDIT == 3:
            # Queries and keys are the same tokens; the queries' kernel wrote its part here.
            j = key + tl.arange(0, BN)
            at = dby_at + (b.to(tl.int64) * N + j) * H + h
            tl.store(at, tl.load(at, mask=j < N, other=0.0) + dpast, mask=j < N)
    _put(dk_at, dk * scale, b, group, groups, key, N, D, BN, BD)
    _put(dv_at, dvalue, b, group, groups, key, N, DV, BN, BDV)


def settings(kernel: str, dtype: torch.dtype, size: int, size_v: int) -> dict[str, Any]:
    """Return block sizes of queries and keys whose tiles fit the shared memory of sm_80 (163 KiB) and sm_90.

    All products of a kernel have the same number of rows, 16 for each warp on Hopper, so that they are of one kind of
    tensor instruction; with fewer rows warps would compute the same. Heads of 256 leave registers for half as many.
    """
    wide = padded(max(size, size_v))
    if dtype == torch.float32:
        bt, bn, warps, stages = (32, 32, 4, 2) if wide <= 128 else (16, 16, 4, 1)
    elif wide <= 64:
        bt, bn, warps, stages = 64, 64, 4, 2
    else:
        rows, warps, stages = (128, 8, 2) if wide == 128 else (32, 4, 1)
        bt, bn = (32, rows) if kernel == "keys" else (rows, 64)
    return {"BT": bt, "BN": bn, "BD": padded(size), "BDV": padded(size_v), "num_warps": warps, "num_stages": stages}


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, kind: str, by: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result of `edited_logits.attend_edited` for a call for which `edits_run` is True."""
    batch, heads, queries, size = q.shape
    out = as_hosts(v, heads, queries)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    blocks = settings("forward", q.dtype, size, v.shape[3])
    tensors, strides, tail, constants = _common(q, k, v, mask, causal, scale, KINDS[kind], by)
    eps, tiny = torch.finfo(v.dtype).eps, torch.finfo(v.dtype).tiny
    # In units of log 2: below 1 by a quarter of eps is rounded to 1; and half of the dtype's range.
    limits = (-math.log2(1 - eps / 4), -math.log2(tiny) / 2)
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        forward_kernel[blocks_of(q, blocks["BT"])](*tensors, out, lse, *strides, *tail, *limits, **constants, **blocks)
    return out, lse


def backward(
    g_out: Tensor | None,
    g_lse: Tensor | None,
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the numbers of tokens, the last empty but for "past" and "between".

    Args:
        g_out, g_lse: gradients of the outputs; None for unused ones.
        saved: q, k, v, the outputs of `forward`, and `by`.
        mask, causal, scale, kind: as in `forward`.
    """
    q, k, v, out, lse, by = saved
    edit = PLAIN if kind == "stable" else KINDS[kind]
    g_out = torch.zeros_like(out) if g_out is None else g_out.to(out.dtype)
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    level, lse2 = lse.new_empty(2, *lse.shape)
    dby = by.new_empty(by.shape if edit in (PAST, BETWEEN) else (0,))
    of_lse = lse if g_lse is None else g_lse.contiguous()
    for_queries, for_keys = (settings(x, q.dtype, q.shape[3], v.shape[3]) for x in ("queries", "keys"))
    if mask is not None:
        # The mask's tile in a second stage would take the registers of sm_80.
        for_keys["num_stages"] = 1
    tensors, strides, tail, constants = _common(q, k, v, mask, causal, scale, edit, by)
    tail = (*strides, *g_out.stride(), *tail)
    with torch.cuda.device_of(q):
        queries_kernel[blocks_of(q, for_queries["BT"])](
            *tensors, g_out, of_lse, out, lse, level, lse2, dq, dby, *tail,
            **constants, OF_LSE=g_lse is not None, **for_queries,
        )  # fmt: skip
        keys_kernel[blocks_of(k, for_keys["BN"])](
            *tensors, g_out, lse2, level, dk, dv, dby, *tail, **constants, **for_keys
        )  # fmt: skip
    return dq, dk, dv, dby


def _common(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, edit: int, by: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the tensors, strides, sizes and numbers, and constants that all kernels take."""
    mask, of_mask, kind = readable(mask, q, k)
    heads = q.shape[1]
    # Reading a number that lies on the host waits for nothing.
    numbers, held = by.dim() > 0, by.dim() == 0 and by.device.type == "cuda"
    number = 0.0 if numbers or held or edit == PLAIN else float(by)
    tail = (heads, heads // k.shape[1], q.shape[2], k.shape[2], scale, number)
    constants = {
        "D": q.shape[3], "DV": v.shape[3], "EDIT": edit, "HELD": held, "MASK": kind, "CAUSAL": causal,
        **precision(q.dtype),
    }  # fmt: skip
    tensors = (q, k, v, mask, by if numbers or held else q)
    return tensors, (*q.stride(), *k.stride(), *v.stride(), *of_mask), tail, constants
