"""The row statistics' operator as Triton kernels: one pass over the keys in forward, two in backward, O(T) memory.

The formulas are those of `row_statistics`. Forward keeps, per query, the running maximum m and the sums z of
e = exp(s - m), u of e (s - m) and w of e^2. A new maximum m' turns z into a z with a = exp(m - m'), w into a^2 w, and u
into a (u + (m - m') z). Backward recomputes the weights from the log-sum-exp: one kernel computes the gradient of the
queries, another those of the keys and values. Powers are of 2, with log2(e) folded into the factor of the logits, and
tiles whose keys are all seen by all queries are computed without a look at each entry. `keys_kernel` sums over queries
in a fixed order: there are no atomics, and results repeat to the bit.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.kernels import as_hosts, plain
from headwise.numerics.triton_tiles import (
    ADDED,
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

LOG2_E = 1.4426950408889634


@triton.jit
def _logits(
    left, right, mask_at, query, key, T, N, scale, mt, mn,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile, -inf for forbidden keys, in the unit that the factor of `_common` turns into log2.

    `left` and `right` are the queries and the keys, or with KEYS_FIRST the keys and the queries.
    """
    s = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    if not WHOLE:
        seen = inside(query, key, N, BT, BN, CAUSAL, KEYS_FIRST)
        if MASK != 0:
            entries = mask_tile(mask_at, query, key, mt, mn, T, N, BT, BN, KEYS_FIRST)
            if MASK == 1:
                seen = seen & (entries != 0)
            else:
                s = s * scale + entries.to(tl.float32)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _add_tile(
    m, z, u, w, acc, q, k_at, v_at, mask_at, query, key, kn, kd, vn, vd, mt, mn, T, N, scale, factor,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the running maximum and sums with one tile of keys added."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    s = _logits(q, k, mask_at, query, key, T, N, scale, mt, mn, MASK, CAUSAL, WHOLE, PRECISION, BT, BN, False)
    top = tl.maximum(m, tl.max(s, 1))
    # Rows without an allowed key so far have m = -inf; avoid -inf - (-inf).
    seen = tl.where(top == float("-inf"), 0.0, top)
    step = tl.where(m == float("-inf"), 0.0, (m - seen) * factor)
    a = tl.where(m == float("-inf"), 0.0, tl.exp2(step))
    if MASK == 2:
        # The mask may hold the lowest number of a dtype: multiplied, it would be infinite.
        x = (s - seen[:, None]) * factor
    else:
        x = s * factor - (seen * factor)[:, None]
    e = tl.exp2(x)
    if not WHOLE:
        x = tl.where(x == float("-inf"), 0.0, x)
    u = a * (u + step * z) + tl.sum(e * x, 1)
    z = a * z + tl.sum(e, 1)
    w = a * a * w + tl.sum(e * e, 1)
    v = tile(v_at, key, vn, vd, N, DV, BN, BDV, WHOLE, UPCAST)
    acc = acc * a[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
    return top, z, u, w, acc


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, mask_at, out_at, lse_at, entropy_at, square_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, ob, oh, ot, od,
    H, G, T, N, scale, factor,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute A v and the three statistics of each row, for one block of queries of one head."""
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        # The longest rows first, so that none is left at the end.
        block = blocks - 1 - block
    query = block * BT
    q = tile(head_of(q_at, b, h, qb, qh), query, qt, qd, T, D, BT, BD, False, UPCAST)
    k_at, v_at = head_of(k_at, b, h // G, kb, kh), head_of(v_at, b, h // G, vb, vh)
    mask_at = head_of(mask_at, b, h, mb, mh)
    m = tl.full([BT], float("-inf"), tl.float32)
    z, u, w = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, BDV], tl.float32)
    whole, last = spans(query, T, N, BT, BN, CAUSAL, MASK)
    for CUT in tl.static_range(2):
        for key in range(whole if CUT else 0, last if CUT else whole, BN):
            m, z, u, w, acc = _add_tile(
                m, z, u, w, acc, q, k_at, v_at, mask_at, query, key, kn, kd, vn, vd, mt, mn, T, N, scale, factor,
                D, DV, MASK, CAUSAL, not CUT, PRECISION, UPCAST, BT, BN, BD, BDV,
            )  # fmt: skip
    full = tl.where(z == 0.0, 1.0, z)
    i, dv = query + tl.arange(0, BT), tl.arange(0, BDV)
    row, rows = (b.to(tl.int64) * H + h) * T + i, i < T
    # The factor counts in log2; 0.693… is log(2).
    unit = factor * 0.6931471805599453
    tl.store(lse_at + row, tl.where(z == 0.0, 0.0, m * unit + tl.log(full)), mask=rows)
    tl.store(entropy_at + row, tl.log(full) - 0.6931471805599453 * (u / full), mask=rows)
    tl.store(square_at + row, w / (full * full), mask=rows)
    at = head_of(out_at, b, h, ob, oh) + i[:, None].to(tl.int64) * ot + dv[None, :] * od
    tl.store(at, (acc / full[:, None]).to(out_at.dtype.element_ty), mask=rows[:, None] & (dv[None, :] < DV))


@triton.jit
def _slope(
    left, right, left_v, right_v, level, lse, g_entropy, g_square, mask_at, query, key, T, N, scale, factor, mt, mn,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, ENTROPY: tl.constexpr, SQUARE: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the weights p and the gradient of the logits of one tile.

    `left` and `right` are queries and keys, `left_v` and `right_v` gradients of the output and values; KEYS_FIRST turns
    both pairs around, and the tile with them. Numbers of rows are broadcast against it. The gradient of the entropy
    comes times log(2), as the logarithm of p is in log2.
    """
    s = _logits(
        left, right, mask_at, query, key, T, N, scale, mt, mn, MASK, CAUSAL, WHOLE, PRECISION, BT, BN, KEYS_FIRST
    )
    if MASK == 2:
        # As in `_add_tile`.
        logp = (s - lse) * factor
    else:
        logp = s * factor - lse * 1.4426950408889634
    p = tl.exp2(logp)
    slope = tl.dot(left_v, tl.trans(right_v), input_precision=PRECISION) + level
    if ENTROPY:
        if not WHOLE:
            logp = tl.where(logp == float("-inf"), 0.0, logp)
        slope -= g_entropy * logp
    if SQUARE:
        slope += g_square * p
    return p, p * slope


@triton.jit
def _rows(at, row, rows, USED: tl.constexpr):
    """Return numbers of rows, zeros outside of them and where they are not used."""
    return tl.load(at + row, mask=rows, other=0.0) if USED else tl.zeros(row.shape, tl.float32)


@triton.jit
def queries_kernel(
    q_at, k_at, v_at, mask_at, g_at, level_at, lse_at, entropy_at, square_at, dq_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, G, T, N, scale, factor,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries, a sum over the keys.

    `entropy_at` and `square_at` point to the gradients of these statistics.
    """
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        block = blocks - 1 - block
    query = block * BT
    q = tile(head_of(q_at, b, h, qb, qh), query, qt, qd, T, D, BT, BD, False, UPCAST)
    g = tile(head_of(g_at, b, h, gb, gh), query, gt, gd, T, DV, BT, BDV, False, UPCAST)
    k_at, v_at = head_of(k_at, b, h // G, kb, kh), head_of(v_at, b, h // G, vb, vh)
    mask_at = head_of(mask_at, b, h, mb, mh)
    i = query + tl.arange(0, BT)
    row, rows = (b.to(tl.int64) * H + h) * T + i, i < T
    level, lse = _rows(level_at, row, rows, True), _rows(lse_at, row, rows, True)
    g_entropy = _rows(entropy_at, row, rows, ENTROPY) * 0.6931471805599453
    g_square = _rows(square_at, row, rows, SQUARE) * 2.0
    dq = tl.zeros([BT, BD], tl.float32)
    whole, last = spans(query, T, N, BT, BN, CAUSAL, MASK)
    for CUT in tl.static_range(2):
        for key in range(whole if CUT else 0, last if CUT else whole, BN):
            k = tile(k_at, key, kn, kd, N, D, BN, BD, not CUT, UPCAST)
            v = tile(v_at, key, vn, vd, N, DV, BN, BDV, not CUT, UPCAST)
            _, ds = _slope(
                q, k, g, v, level[:, None], lse[:, None], g_entropy[:, None], g_square[:, None], mask_at, query, key,
                T, N, scale, factor, mt, mn, MASK, CAUSAL, not CUT, ENTROPY, SQUARE, PRECISION, BT, BN, False,
            )  # fmt: skip
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    at, d = (b.to(tl.int64) * T + i) * H + h, tl.arange(0, BD)
    tl.store(dq_at + at[:, None] * D + d[None, :], (dq * scale).to(dq_at.dtype.element_ty),
             mask=rows[:, None] & (d[None, :] < D))  # fmt: skip


@triton.jit
def _add_queries(
    dk, dvalue, k, v, q_at, g_at, level_at, lse_at, entropy_at, square_at, mask_at, row, query, key,
    qt, qd, gt, gd, mt, mn, T, N, scale, factor,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the gradients of keys and values with those of one block of queries added.

    Queries beyond the last are zeros, and so is what they add.
    """
    i = query + tl.arange(0, BT)
    rows = i < T
    q = tile(q_at, query, qt, qd, T, D, BT, BD, False, UPCAST)
    g = tile(g_at, query, gt, gd, T, DV, BT, BDV, False, UPCAST)
    row += i
    level, lse = _rows(level_at, row, rows, True), _rows(lse_at, row, rows, True)
    g_entropy = _rows(entropy_at, row, rows, ENTROPY) * 0.6931471805599453
    g_square = _rows(square_at, row, rows, SQUARE) * 2.0
    # Keys first: the weights come in the layout in which the next products take them, without a transposition through
    # shared memory. With queries first, Triton 3.6 and 3.7 overwrite q on sm_90 while a product still reads it.
    p, ds = _slope(
        k, q, v, g, level[None, :], lse[None, :], g_entropy[None, :], g_square[None, :], mask_at, query, key,
        T, N, scale, factor, mt, mn, MASK, CAUSAL, WHOLE, ENTROPY, SQUARE, PRECISION, BT, BN, True,
    )  # fmt: skip
    dvalue += tl.dot(p.to(g.dtype), g, input_precision=PRECISION)
    dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    return dk, dvalue


@triton.jit
def keys_kernel(
    q_at, k_at, v_at, mask_at, g_at, level_at, lse_at, entropy_at, square_at, dk_at, dv_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, G, T, N, scale, factor,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, sums over the queries of all heads that share them."""
    groups = H // G
    block, b, group = place(tl.cdiv(N, BN), groups)
    key = block * BN
    k = tile(head_of(k_at, b, group, kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
    v = tile(head_of(v_at, b, group, vb, vh), key, vn, vd, N, DV, BN, BDV, False, UPCAST)
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
        row = (b.to(tl.int64) * H + h) * T
        q_h, g_h = head_of(q_at, b, h, qb, qh), head_of(g_at, b, h, gb, gh)
        mask_h = head_of(mask_at, b, h, mb, mh)
        for WHOLE in tl.static_range(2):
            for query in range(whole if WHOLE else first, T if WHOLE else tl.minimum(whole, T), BT):
                dk, dvalue = _add_queries(
                    dk, dvalue, k, v, q_h, g_h, level_at, lse_at, entropy_at, square_at, mask_h, row, query, key,
                    qt, qd, gt, gd, mt, mn, T, N, scale, factor,
                    D, DV, MASK, CAUSAL, WHOLE, ENTROPY, SQUARE, PRECISION, UPCAST, BT, BN, BD, BDV,
                )  # fmt: skip
    j, d, dv = key + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    row, keys = (b.to(tl.int64) * N + j) * groups + group, j < N
    at = dk_at + row[:, None] * D + d[None, :]
    tl.store(at, (dk * scale).to(dk_at.dtype.element_ty), mask=keys[:, None] & (d[None, :] < D))
    at = dv_at + row[:, None] * DV + dv[None, :]
    tl.store(at, dvalue.to(dv_at.dtype.element_ty), mask=keys[:, None] & (dv[None, :] < DV))


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels support this call.

    They need one dtype of fp32, fp16 and bf16, head sizes up to 256, and a number of key heads that divides that of the
    query heads.
    """
    return plain(q, k, v)


def settings(kernel: str, dtype: torch.dtype, size: int, size_v: int) -> dict[str, Any]:
    """Return block sizes of queries and keys whose tiles fit the shared memory of sm_80 (163 KiB) and sm_90."""
    wide = padded(max(size, size_v))
    heavy = wide >= 128 or dtype == torch.float32
    if kernel == "forward":
        bt, bn = (32, 32) if wide == 256 else (64, 32) if heavy else (128, 64)
    elif heavy:
        bt, bn = (16, 16) if wide == 256 and dtype == torch.float32 else (32, 32)
    else:
        bt, bn = (128, 64) if kernel == "queries" else (32, 128)
    return {
        "BT": bt,
        "BN": bn,
        "BD": padded(size),
        "BDV": padded(size_v),
        "num_warps": 4 if max(bt, bn) <= 64 else 8,
        # A second pipeline stage doubles the tiles in shared memory.
        "num_stages": 1 if wide == 256 else 2,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `row_statistics.attend_rows` for a call that `supports` accepts."""
    batch, heads, queries = q.shape[:3]
    out = as_hosts(v, heads, queries)
    lse, entropy, square = (torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device) for _ in range(3))
    blocks = settings("forward", q.dtype, q.shape[-1], v.shape[-1])
    mask, strides, sizes, constants = _common(q, k, v, mask, causal, scale)
    arguments = (q, k, v, mask, out, lse, entropy, square, *strides, *out.stride(), *sizes)
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        forward_kernel[blocks_of(q, blocks["BT"])](*arguments, **constants, **blocks)
    return out, lse, entropy, square


def backward(
    gradients: tuple[Tensor | None, ...],
    level: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        gradients: of the output, the log-sum-exp, the entropy and the sum of squares; None for unused ones.
        level: the result of `row_statistics.levels`, (B, H, T) in fp32.
        saved: q, k, v and the outputs of `forward`.
        mask, causal, scale: as in `forward`.
    """
    q, k, v, out, lse = saved[:5]
    g_out, _, g_entropy, g_square = gradients
    g_out = torch.zeros_like(out) if g_out is None else g_out.to(out.dtype)
    used = {"ENTROPY": g_entropy is not None, "SQUARE": g_square is not None}
    # An unused gradient is not read.
    g_entropy, g_square = (lse if g is None else g.contiguous() for g in (g_entropy, g_square))
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    for_queries, for_keys = (settings(x, q.dtype, q.shape[-1], v.shape[-1]) for x in ("queries", "keys"))
    mask, strides, sizes, constants = _common(q, k, v, mask, causal, scale)
    tensors = (q, k, v, mask, g_out, level.contiguous(), lse, g_entropy, g_square)
    tail = (*strides, *g_out.stride(), *sizes)
    with torch.cuda.device_of(q):
        queries_kernel[blocks_of(q, for_queries["BT"])](*tensors, dq, *tail, **constants, **used, **for_queries)
        keys_kernel[blocks_of(k, for_keys["BN"])](*tensors, dk, dv, *tail, **constants, **used, **for_keys)
    return dq, dk, dv


def _common(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the mask in the form the kernels read, all strides, the sizes and factors, and the compile constants."""
    mask, strides, kind = readable(mask, q, k)
    heads = q.shape[1]
    # Added masks need scaled logits; others fold the scale into the factor.
    factor = LOG2_E if kind == ADDED else scale * LOG2_E
    sizes = (heads, heads // k.shape[1], q.shape[2], k.shape[2], scale, factor)
    constants = {"D": q.shape[3], "DV": v.shape[3], "MASK": kind, "CAUSAL": causal, **precision(q.dtype)}
    return mask, (*q.stride(), *k.stride(), *v.stride(), *strides), sizes, constants
