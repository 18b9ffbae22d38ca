"""The operator of `dropped_elements` as Triton kernels: one pass over the keys in forward, two in backward.

With S the logits, P = exp(S - L) the softmax, M which elements stay (hashed in registers, never stored): forward gives
O = (P M) V / (1 - p), or with RENORMALIZE the softmax over the elements with M = 1. Backward recomputes P from L and M
from the hash: dV = A^T dO, dS = P (M dP / (1 - p) + level) or A (dP + level) with dP = dO V^T; one kernel computes the
gradient of the queries, another those of the keys and values. No sum depends on an order of programs.
Source: Dao 2023, arXiv 2307.08691.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.element_draw import Drawn
from headwise.attend.core.triton_draws import element_hash, hashed, key_of, signed
from headwise.numerics.kernels import as_hosts
from headwise.numerics.triton_tiles import blocks_of, padded, place, precision, readable


@triton.jit
def _rows(at, row, column, stride, stride_d, ROWS, D, WHOLE: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """Return rows (row, column) from `at`; zeros outside of (ROWS, D) unless WHOLE rows and EVEN columns have none."""
    places = at + row[:, None] * stride + column[None, :] * stride_d
    if WHOLE and EVEN:
        x = tl.load(places)
    elif WHOLE:
        x = tl.load(places, mask=column[None, :] < D, other=0.0)
    else:
        x = tl.load(places, mask=(row[:, None] < ROWS) & (column[None, :] < D), other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _kept(row_hash, key, least, WINDOW: tl.constexpr):
    """Return which elements stay, for the hashes of rows and the numbers of keys, broadcast against each other."""
    keep = element_hash(row_hash, key) >= least
    for step in tl.static_range(1, WINDOW):
        keep = keep & ((element_hash(row_hash, key - step) >= least) | (key < step))
    return keep


@triton.jit
def _draw_of(key_at, p_at, number, p, KEYED: tl.constexpr):
    """Return the key, the least hash that stays, and p."""
    if KEYED:
        p = tl.load(p_at)
    # Exact, as p is a multiple of 2^-24 between other fp32 numbers.
    least = (tl.ceil(p * 16777216.0).to(tl.int32) << 8) ^ -2147483648
    return key_of(key_at, number, KEYED), least, p


@triton.jit
def _logits(
    products, mask_at, query, key, sm0, sm1, T, N, unit,
    MASK: tl.constexpr, CUT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the masked logits in units of log 2 / unit, and which may be seen; CUT tiles meet an end or the diagonal.

    `query` and `key` are broadcast against each other.
    """
    s = products
    inside = (key < N) & (query < T)
    if CAUSAL and CUT:
        inside = inside & (key <= query)
    allowed = inside
    if MASK != 0:
        entries = tl.load(mask_at + query.to(tl.int64) * sm0 + key.to(tl.int64) * sm1, mask=inside, other=0)
        if MASK == 1:
            inside = inside & (entries != 0)
            allowed = inside
        else:
            entries = entries.to(tl.float32)
            allowed = inside & (entries > -9000.0)
            # The lowest number of a dtype stays finite: a row that has nothing else is a mean, as in PyTorch.
            added = tl.maximum(entries * 1.4426950408889634, -1e30)
            s = s * unit + tl.where(entries == float("-inf"), entries, added)
    if CUT or MASK != 0:
        s = tl.where(inside, s, float("-inf"))
    return s, allowed


@triton.jit
def _forward_tile(
    q, k_at, v_at, mask_at, query, start, row_hash, least, m, z, met, acc,
    kn, kd, vn, vd, mt, mn, T, N, D, DV, scale2,
    MASK: tl.constexpr, CUT: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running maximum m, sum z and product acc of a block of queries."""
    key = start + tl.arange(0, BN)
    k = _rows(k_at, key.to(tl.int64), tl.arange(0, BD), kn, kd, N, D, not CUT, EVEN, UPCAST)
    v = _rows(v_at, key.to(tl.int64), tl.arange(0, BDV), vn, vd, N, DV, not CUT, EVEN, UPCAST)
    unit = scale2
    s, allowed = _logits(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), mask_at, query[:, None], key[None, :], mt, mn, T, N, unit,
        MASK, CUT, CAUSAL,
    )  # fmt: skip
    if MASK == 2:
        unit = 1.0
    keep = _kept(row_hash[:, None], key[None, :], least, WINDOW)
    if RENORMALIZE:
        s = tl.where(keep, s, float("-inf"))
        if MASK == 2:
            met = tl.maximum(met, tl.max((keep & allowed).to(tl.int32), 1))
    top = tl.maximum(m, tl.max(s, 1))
    seen = top
    if CUT or RENORMALIZE or MASK != 0:
        # Rows without a key so far have the maximum -inf; avoid -inf - (-inf).
        seen = tl.where(top == float("-inf"), 0.0, top)
    a = tl.exp2((m - seen) * unit)
    e = tl.exp2(s * unit - (seen * unit)[:, None])
    z = z * a + tl.sum(e, 1)
    if not RENORMALIZE:
        e = tl.where(keep, e, 0.0)
    acc = acc * a[:, None]
    acc += tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
    return top, z, met, acc


@triton.jit
def _first_allowed(
    lost, mask_at, query, mt, mn, T, N, last, unit,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the first key that each row may see if it lost all of them, else -1."""
    if MASK == 0:
        return tl.where(lost & (N > 0), 0, -1)
    found = tl.zeros([BT], tl.int32) + N
    for start in tl.range(0, last, BN):
        n = start + tl.arange(0, BN)
        _, allowed = _logits(
            tl.zeros([BT, BN], tl.float32), mask_at, query[:, None], n[None, :], mt, mn, T, N, unit, MASK, True, CAUSAL,
        )  # fmt: skip
        found = tl.minimum(found, tl.min(tl.where(allowed, n[None, :], N), 1))
    return tl.where(lost & (found < N), found, -1)


@triton.jit
def _rows_at(at, row, there, stride, stride_d, SIZE, BD: tl.constexpr):
    """Return rows (BT,) of a matrix in fp32, (BT, BD), zeros where they are not `there`."""
    d = tl.arange(0, BD)
    places = at + row.to(tl.int64)[:, None] * stride + d[None, :] * stride_d
    return tl.load(places, mask=there[:, None] & (d[None, :] < SIZE), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["number", "salt"])
def forward_kernel(
    q_at, k_at, v_at, mask_at, key_at, p_at, out_at, lse_at, first_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, ob, oh, ot, od,
    H, T, N, D, DV, scale, number, salt, p, PER_DRAW,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr, KEYED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, EVEN: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the output (B, H, T, DV), the log-sum-exps and the keys that come back, of one block of queries."""
    block, b, h = place(tl.cdiv(T, BT), H)
    b, h = b.to(tl.int64), h.to(tl.int64)
    query = block * BT + tl.arange(0, BT)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    q = _rows(q_at + b * qb + h * qh, query.to(tl.int64), d, qt, qd, T, D, False, EVEN, UPCAST)
    k_at += b * kb + h * kh
    v_at += b * vb + h * vh
    mask_at += b * mb + h * mh
    key, least, p = _draw_of(key_at, p_at, number, p, KEYED)
    row_hash = hashed((((b // PER_DRAW) * H + h) * T + query).to(tl.uint32), key, salt.to(tl.uint32, bitcast=True))
    scale2 = scale * 1.4426950408889634
    m = tl.full([BT], float("-inf"), tl.float32)
    z, met = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.int32)
    acc = tl.zeros([BT, BDV], tl.float32)
    last = N
    whole = (N // BN) * BN
    if CAUSAL:
        last = tl.minimum(N, (block + 1) * BT)
        whole = tl.minimum(whole, (block * BT // BN) * BN)
    for CUT in tl.static_range(2):
        for start in tl.range(whole if CUT else 0, last if CUT else whole, BN):
            m, z, met, acc = _forward_tile(
                q, k_at, v_at, mask_at, query, start, row_hash, least, m, z, met, acc, kn, kd, vn, vd, mt, mn,
                T, N, D, DV, scale2, MASK, CUT, CAUSAL, RENORMALIZE, WINDOW, PRECISION, UPCAST, BN, BD, BDV, EVEN,
            )  # fmt: skip
    unit = scale2
    if MASK == 2:
        unit = 1.0
    inside = query < T
    full = tl.where(z == 0.0, 1.0, z)
    lse = tl.where(z == 0.0, 0.0, (m * unit + tl.log2(full)) * 0.6931471805599453)
    if RENORMALIZE:
        out = acc / full[:, None]
        lost = inside & (z == 0.0)
        if MASK == 2:
            lost = inside & (met == 0)
        first = tl.full([BT], -1, tl.int32)
        if tl.max(lost.to(tl.int32), 0) > 0:
            first = _first_allowed(lost, mask_at, query, mt, mn, T, N, last, unit, MASK, CAUSAL, BT, BN)
            back = first >= 0
            k = _rows_at(k_at, first, back, kn, kd, D, BD)
            logit = tl.sum(q.to(tl.float32) * k, 1) * scale
            if MASK == 2:
                added = mask_at + query.to(tl.int64) * mt + first.to(tl.int64) * mn
                logit += tl.load(added, mask=back, other=0.0).to(tl.float32)
            v = _rows_at(v_at, first, back, vn, vd, DV, BDV)
            lse = tl.where(back, logit, lse)
            out = tl.where(back[:, None], v, out)
        tl.store(first_at + (b * H + h) * T + query, first, mask=inside)
    else:
        out = acc / (full * (1.0 - p))[:, None]
    tl.store(lse_at + (b * H + h) * T + query, lse, mask=inside)
    at = out_at + b * ob + h * oh + query[:, None].to(tl.int64) * ot + dv[None, :] * od
    tl.store(at, out.to(out_at.dtype.element_ty), mask=inside[:, None] & (dv[None, :] < DV))


@triton.jit
def _slope(s, dp, level, lse2, keep, back, inverse, unit, RENORMALIZE: tl.constexpr):
    """Return the weights A and the gradient of the logits; the arguments are broadcast against each other."""
    p = tl.exp2(s * unit - lse2)
    if RENORMALIZE:
        # A dropped logit may lie so far above the others that its p is inf.
        a = tl.where(keep | back, p, 0.0)
        return a, a * (dp + level)
    kept = tl.where(keep, inverse, 0.0)
    return p * kept, p * (kept * dp + level)


@triton.jit
def _queries_tile(
    q, g, k_at, v_at, mask_at, query, start, row_hash, least, level, lse2, first, inverse, dq,
    kn, kd, vn, vd, mt, mn, T, N, D, DV, scale2,
    MASK: tl.constexpr, CUT: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the gradient of a block of queries."""
    key = start + tl.arange(0, BN)
    k = _rows(k_at, key.to(tl.int64), tl.arange(0, BD), kn, kd, N, D, not CUT, EVEN, UPCAST)
    v = _rows(v_at, key.to(tl.int64), tl.arange(0, BDV), vn, vd, N, DV, not CUT, EVEN, UPCAST)
    unit = scale2
    s, _ = _logits(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), mask_at, query[:, None], key[None, :], mt, mn, T, N, unit,
        MASK, CUT, CAUSAL,
    )  # fmt: skip
    if MASK == 2:
        unit = 1.0
    keep = _kept(row_hash[:, None], key[None, :], least, WINDOW)
    dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    back = key[None, :] == first[:, None]
    _, ds = _slope(s, dp, level[:, None], lse2[:, None], keep, back, inverse, unit, RENORMALIZE)
    return dq + tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)


@triton.jit(do_not_specialize=["number", "salt"])
def queries_kernel(
    q_at, k_at, v_at, mask_at, key_at, p_at, g_at, level_at, lse_at, first_at, dq_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, T, N, D, DV, scale, number, salt, p, PER_DRAW,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr, KEYED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, EVEN: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries, a sum over the keys."""
    block, b, h = place(tl.cdiv(T, BT), H)
    b, h = b.to(tl.int64), h.to(tl.int64)
    query = block * BT + tl.arange(0, BT)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    inside, row = query < T, (b * H + h) * T + query
    q = _rows(q_at + b * qb + h * qh, query.to(tl.int64), d, qt, qd, T, D, False, EVEN, UPCAST)
    g = _rows(g_at + b * gb + h * gh, query.to(tl.int64), dv, gt, gd, T, DV, False, EVEN, UPCAST)
    k_at += b * kb + h * kh
    v_at += b * vb + h * vh
    mask_at += b * mb + h * mh
    key, least, p = _draw_of(key_at, p_at, number, p, KEYED)
    row_hash = hashed((((b // PER_DRAW) * H + h) * T + query).to(tl.uint32), key, salt.to(tl.uint32, bitcast=True))
    level = tl.load(level_at + row, mask=inside, other=0.0)
    lse2 = tl.load(lse_at + row, mask=inside, other=float("inf")) * 1.4426950408889634
    first = tl.full([BT], -1, tl.int32)
    if RENORMALIZE:
        first = tl.load(first_at + row, mask=inside, other=-1)
    inverse, scale2 = 1.0 / (1.0 - p), scale * 1.4426950408889634
    dq = tl.zeros([BT, BD], tl.float32)
    last = N
    whole = (N // BN) * BN
    if CAUSAL:
        last = tl.minimum(N, (block + 1) * BT)
        whole = tl.minimum(whole, (block * BT // BN) * BN)
    for CUT in tl.static_range(2):
        for start in tl.range(whole if CUT else 0, last if CUT else whole, BN):
            dq = _queries_tile(
                q, g, k_at, v_at, mask_at, query, start, row_hash, least, level, lse2, first, inverse, dq,
                kn, kd, vn, vd, mt, mn, T, N, D, DV, scale2,
                MASK, CUT, CAUSAL, RENORMALIZE, WINDOW, PRECISION, UPCAST, BN, BD, BDV, EVEN,
            )  # fmt: skip
    at = dq_at + ((b * T + query) * H + h)[:, None] * D + d[None, :]
    tl.store(at, (dq * scale).to(dq_at.dtype.element_ty), mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def _keys_tile(
    k, v, q_at, g_at, mask_at, level_at, lse_at, first_at, key, start, first_row, draw_key, salt, least, inverse,
    dk, dvalue, qt, qd, gt, gd, mt, mn, T, N, D, DV, scale2,
    MASK: tl.constexpr, CUT: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to the gradients of a block of keys and values; its matrices are (keys, queries)."""
    query = start + tl.arange(0, BT)
    inside = query < T
    q = _rows(q_at, query.to(tl.int64), tl.arange(0, BD), qt, qd, T, D, False, EVEN, UPCAST)
    g = _rows(g_at, query.to(tl.int64), tl.arange(0, BDV), gt, gd, T, DV, False, EVEN, UPCAST)
    level = tl.load(level_at + query, mask=inside, other=0.0)
    # The weights of queries past the end are exp(-inf).
    lse2 = tl.load(lse_at + query, mask=inside, other=float("inf")) * 1.4426950408889634
    back = key[:, None] < 0
    if RENORMALIZE:
        back = key[:, None] == tl.load(first_at + query, mask=inside, other=-1)[None, :]
    row_hash = hashed((first_row + query).to(tl.uint32), draw_key, salt)
    unit = scale2
    s, _ = _logits(
        tl.dot(k, tl.trans(q), input_precision=PRECISION), mask_at, query[None, :], key[:, None], mt, mn, T, N, unit,
        MASK, CUT, CAUSAL,
    )  # fmt: skip
    if MASK == 2:
        unit = 1.0
    keep = _kept(row_hash[None, :], key[:, None], least, WINDOW)
    dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
    a, ds = _slope(s, dp, level[None, :], lse2[None, :], keep, back, inverse, unit, RENORMALIZE)
    dvalue += tl.dot(a.to(g.dtype), g, input_precision=PRECISION)
    dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    return dk, dvalue


@triton.jit(do_not_specialize=["number", "salt"])
def keys_kernel(
    q_at, k_at, v_at, mask_at, key_at, p_at, g_at, level_at, lse_at, first_at, dk_at, dv_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, T, N, D, DV, scale, number, salt, p, PER_DRAW,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, RENORMALIZE: tl.constexpr, WINDOW: tl.constexpr, KEYED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, EVEN: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, sums over the queries."""
    block, b, h = place(tl.cdiv(N, BN), H)
    b, h = b.to(tl.int64), h.to(tl.int64)
    key = block * BN + tl.arange(0, BN)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    k = _rows(k_at + b * kb + h * kh, key.to(tl.int64), d, kn, kd, N, D, False, EVEN, UPCAST)
    v = _rows(v_at + b * vb + h * vh, key.to(tl.int64), dv, vn, vd, N, DV, False, EVEN, UPCAST)
    q_at += b * qb + h * qh
    g_at += b * gb + h * gh
    mask_at += b * mb + h * mh
    rows = (b * H + h) * T
    draw_key, least, p = _draw_of(key_at, p_at, number, p, KEYED)
    salt, first_row = salt.to(tl.uint32, bitcast=True), ((b // PER_DRAW) * H + h) * T
    inverse, scale2 = 1.0 / (1.0 - p), scale * 1.4426950408889634
    dk, dvalue = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    begin = 0
    cut = 0
    if CAUSAL:
        begin = (block * BN // BT) * BT
        # The first block of queries that all see all keys of this block.
        cut = tl.minimum(tl.cdiv((block + 1) * BN, BT) * BT, tl.cdiv(T, BT) * BT)
    for WHOLE in tl.static_range(0 if CAUSAL else 1, 2):
        for start in tl.range(cut if WHOLE else begin, T if WHOLE else cut, BT):
            dk, dvalue = _keys_tile(
                k, v, q_at, g_at, mask_at, level_at + rows, lse_at + rows, first_at + rows, key, start, first_row,
                draw_key, salt, least, inverse, dk, dvalue, qt, qd, gt, gd, mt, mn, T, N, D, DV, scale2,
                MASK, not WHOLE, CAUSAL, RENORMALIZE, WINDOW, PRECISION, UPCAST, BT, BD, BDV, EVEN,
            )  # fmt: skip
    inside = key[:, None] < N
    row = (b * N + key) * H + h
    at = dk_at + row[:, None] * D + d[None, :]
    tl.store(at, (dk * scale).to(dk_at.dtype.element_ty), mask=inside & (d[None, :] < D))
    at = dv_at + row[:, None] * DV + dv[None, :]
    tl.store(at, dvalue.to(dv_at.dtype.element_ty), mask=inside & (dv[None, :] < DV))


def settings(dtype: torch.dtype, size: int, size_v: int, kernel: str) -> dict[str, Any]:
    """Return block sizes whose tiles fit the registers and the shared memory of sm_80 (163 KiB) and sm_90."""
    wide = padded(max(size, size_v))
    if dtype == torch.float32 or wide > 128:
        rows = {"BT": 32, "BN": 32, "num_warps": 4, "num_stages": 1 if wide > 128 else 2}
    elif kernel == "forward":
        rows = {"BT": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    else:
        warps = 8 if kernel == "keys" and wide > 64 else 4
        rows = {"BT": 64, "BN": 64, "num_warps": warps, "num_stages": 3 if wide <= 64 else 2}
    return {**rows, "BD": padded(size), "BDV": padded(size_v)}


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, drawn: Drawn, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `dropped_elements.attend_dropped` for a call that its `_kernels` accepts."""
    out = as_hosts(v, q.shape[1], q.shape[2])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    first = torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
    blocks = settings(q.dtype, q.shape[-1], v.shape[-1], "forward")
    tensors, strides, tail, constants = _common(q, k, v, mask, causal, scale, drawn, renormalize, blocks)
    with torch.cuda.device_of(q):
        grid = blocks_of(q, blocks["BT"])
        forward_kernel[grid](*tensors, out, lse, first, *strides, *out.stride(), *tail, **constants, **blocks)
    return out, lse, first


def backward(
    g_out: Tensor,
    level: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    first: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    drawn: Drawn,
    renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; the arguments are those of `attend_dropped_backward`."""
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    g_out = g_out.to(v.dtype)
    rows = (g_out, level.contiguous(), lse, first)
    with torch.cuda.device_of(q):
        for kernel, made, of, side in ((queries_kernel, (dq,), q, "BT"), (keys_kernel, (dk, dv), k, "BN")):
            blocks = settings(q.dtype, q.shape[-1], v.shape[-1], "queries" if side == "BT" else "keys")
            tensors, strides, tail, constants = _common(q, k, v, mask, causal, scale, drawn, renormalize, blocks)
            grid = blocks_of(of, blocks[side])
            kernel[grid](*tensors, *rows, *made, *strides, *g_out.stride(), *tail, **constants, **blocks)
    return dq, dk, dv


def _common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    drawn: Drawn,
    renormalize: bool,
    blocks: dict[str, Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the tensors, strides, sizes and constants that all three kernels take."""
    seen, of_mask, kind = readable(mask, q, k)
    # Both are on the host, where reading them waits for nothing, or both on the device.
    keyed = drawn.key.device.type == drawn.p.device.type == "cuda"
    key, p = (drawn.key, drawn.p) if keyed else (q, q)
    numbers = (0, 0.0) if keyed else (signed(int(drawn.key)), float(drawn.p))
    shared = drawn.q.shape[0] // drawn.samples
    constants = {
        "MASK": kind,
        "CAUSAL": causal,
        "RENORMALIZE": renormalize,
        "WINDOW": min(drawn.window, k.shape[2]),
        "KEYED": keyed,
        **precision(q.dtype),
        "EVEN": blocks["BD"] == q.shape[3] and blocks["BDV"] == v.shape[3],
    }
    sizes = (q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], scale)
    tail = (*sizes, numbers[0], signed(drawn.salt), numbers[1], shared)
    return (q, k, v, seen, key, p), (*q.stride(), *k.stride(), *v.stride(), *of_mask), tail, constants
