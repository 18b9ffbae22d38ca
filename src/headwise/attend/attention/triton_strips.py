"""Strips of matrices of attention weights as Triton kernels: written once, read by products, in bounded memory.

A strip holds some queries of some samples for all heads, X (samples, H, ROWS, STEP) with a STEP of at least N:

- `weights_kernel` writes the weights exp(s - L) of known log-sum-exps L, and the products dO V^T if asked to;
- `rows_kernel` multiplies a strip with rows of keys, X Y;
- `columns_kernel` multiplies its transpose with rows of queries, X^T Y.

In causal calls the row of a query ends soon behind it (`row_end`), and nothing beyond is read or written. Sums are in a
fixed order: there are no atomics, and results repeat to the bit.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.strips import step_of
from headwise.numerics.triton_tiles import head_of, inside, mask_tile, padded, place, precision, readable, tile


@triton.jit
def levels(lse_at, real_at, sink_at, b, h, row, H, T, rb, rt, REAL: tl.constexpr, SINK: tl.constexpr, BT: tl.constexpr):
    """Return what exponents of rows are relative to, in units of log 2; that of a row that does not count is 1e30."""
    i = row + tl.arange(0, BT)
    counts = i < T
    level = tl.load(lse_at + (b.to(tl.int64) * H + h) * T + i, mask=counts, other=0.0)
    if SINK:
        sink = tl.load(sink_at + h).to(tl.float32)
        top = tl.maximum(level, sink)
        level = top + tl.log(tl.exp(level - top) + tl.exp(sink - top))
    if REAL:
        counts = counts & (tl.load(real_at + b.to(tl.int64) * rb + i * rt, mask=counts, other=0) != 0)
    return tl.where(counts, level * 1.4426950408889634, 1e30)


@triton.jit
def weights(
    q, k, level, mask_at, row, key, mt, mn, T, N, factor,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return a tile of weights (BT, BN)."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    seen = inside(row, key, N, BT, BN, CAUSAL)
    if MASK != 0:
        entries = mask_tile(mask_at, row, key, mt, mn, T, N, BT, BN)
        if MASK == 1:
            seen = seen & (entries != 0)
        else:
            # The lowest number of a dtype stays finite, so that a row of it is a mean, as in PyTorch.
            s += tl.maximum(entries.to(tl.float32) * 1.4426950408889634, -1e30)
            seen = seen & (entries.to(tl.float32) > float("-inf"))
    return tl.exp2(tl.where(seen, s, float("-inf")) - level[:, None])


@triton.jit
def row_end(query, N, CAUSAL: tl.constexpr):
    """Return the end of what a strip holds of queries' rows: 16 of them end together, at 32 bytes of memory or more."""
    end = query * 0 + N
    if CAUSAL:
        end = tl.minimum(N, query // 16 * 16 + 16)
    return end


@triton.jit
def weights_kernel(
    q_at, k_at, v_at, g_at, mask_at, lse_at, real_at, sink_at, p_at, d_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, gb, gh, gt, gd, mb, mh, mt, mn, rb, rt,
    H, G, T, N, factor, start, ROWS, STEP,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr,
    SINK: tl.constexpr, FLAT: tl.constexpr, SLOPES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Write a block of weights times UNIT, and with SLOPES one of dO V^T, for one head of one sample.

    FLAT: a query that an additive mask forbids everything by the lowest number of a dtype attends to all keys alike, as
    in PyTorch; else it has no weights.
    """
    columns = tl.cdiv(N, BN)
    key = tl.program_id(0) % columns * BN
    blocks = tl.cdiv(ROWS, BT)
    at = tl.program_id(0) // columns
    block = at % blocks
    b, h = at // blocks // H, at // blocks % H
    row = start + block * BT
    if (not CAUSAL) or key < row + BT:
        i, n = block * BT + tl.arange(0, BT), key + tl.arange(0, BN)
        written = (i[:, None] < ROWS) & (n[None, :] < row_end(start + i, N, CAUSAL)[:, None])
        places = (b.to(tl.int64) * H + h) * ROWS * STEP + i[:, None] * STEP + n[None, :]
        q = tile(head_of(q_at, b, h, qb, qh), row, qt, qd, T, D, BT, BD, False, UPCAST)
        k = tile(head_of(k_at, b, h // G, kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
        level = levels(lse_at, real_at, sink_at, b, h, row, H, T, rb, rt, REAL, SINK, BT)
        p = weights(
            q, k, level, head_of(mask_at, b, h, mb, mh), row, key, mt, mn, T, N, factor, MASK, CAUSAL, PRECISION, BT, BN
        )
        if MASK == 2:
            alike = 0.0
            if FLAT:
                alike = 1.0 / N
                if CAUSAL:
                    alike = (1.0 / tl.minimum(row + tl.arange(0, BT) + 1, N).to(tl.float32))[:, None]
            p = tl.where(level[:, None] < -1e29, tl.where(inside(row, key, N, BT, BN, CAUSAL), alike, 0.0), p)
        tl.store(p_at + places, (p * UNIT).to(p_at.dtype.element_ty), mask=written)
        if SLOPES:
            g = tile(head_of(g_at, b, h, gb, gh), row, gt, gd, T, DV, BT, BDV, False, UPCAST)
            v = tile(head_of(v_at, b, h // G, vb, vh), key, vn, vd, N, DV, BN, BDV, False, UPCAST)
            d = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            tl.store(d_at + places, d.to(d_at.dtype.element_ty), mask=written)


@triton.jit
def seen_tile(
    seen_at, b, row, key, sb, st, sn, T, N, SEEN: tl.constexpr, CAUSAL: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Return which keys queries see, for a mask of all heads: none, bool, or additive, which forbids by -9,000."""
    seen = inside(row, key, N, BT, BN, CAUSAL)
    if SEEN != 0:
        entries = mask_tile(seen_at + b.to(tl.int64) * sb, row, key, st, sn, T, N, BT, BN)
        if SEEN == 1:
            seen = seen & (entries != 0)
        else:
            seen = seen & (entries.to(tl.float32) > -9000.0)
    return seen


@triton.jit
def rows_kernel(
    x_at, y_at, out_at, total_at, seen_at, yb, yh, yn, yd, ob, oh, ot, od, tb, th, tt, td, sb, st, sn,
    H, G, T, N, scale, start, ROWS, STEP,
    D: tl.constexpr, CAUSAL: tl.constexpr, SEEN: tl.constexpr, TOTAL: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write scale X Y for a block of queries, and with TOTAL the sum of the rows of Y that each of them sees."""
    block, b, h = place(tl.cdiv(ROWS, BT), H)
    row = start + block * BT
    i, n, d = block * BT + tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BD)
    x_at += (b.to(tl.int64) * H + h) * ROWS * STEP
    y_here = head_of(y_at, b, h // G, yb, yh)
    acc, total = tl.zeros([BT, BD], tl.float32), tl.zeros([BT, BD], tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, row + BT)
    for key in range(0, end, BN):
        read = (i[:, None] < ROWS) & ((key + n)[None, :] < row_end(start + i, N, CAUSAL)[:, None])
        x = tl.load(x_at + i[:, None].to(tl.int64) * STEP + (key + n)[None, :], mask=read, other=0.0)
        y = tile(y_here, key, yn, yd, N, D, BN, BD, False, UPCAST)
        acc += tl.dot(x.to(y.dtype), y, input_precision=PRECISION)
        if TOTAL:
            seen = seen_tile(seen_at, b, row, key, sb, st, sn, T, N, SEEN, CAUSAL, BT, BN)
            total += tl.dot(tl.where(seen, 1.0, 0.0).to(y.dtype), y, input_precision=PRECISION)
    written = (i[:, None] < ROWS) & (d[None, :] < D)
    places = head_of(out_at, b, h, ob, oh) + (row + tl.arange(0, BT)).to(tl.int64)[:, None] * ot + d[None, :] * od
    tl.store(places, (acc * scale).to(out_at.dtype.element_ty), mask=written)
    if TOTAL:
        places = head_of(total_at, b, h, tb, th) + (row + tl.arange(0, BT)).to(tl.int64)[:, None] * tt + d[None, :] * td
        tl.store(places, total.to(total_at.dtype.element_ty), mask=written)


@triton.jit
def columns_kernel(
    x_at, y_at, out_at, yb, yh, yt, yd, ob, oh, on, od, H, G, T, N, scale, start, ROWS, STEP,
    D: tl.constexpr, CAUSAL: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write scale X^T Y for a block of keys, a sum over the heads that share them; ADD: to what is there."""
    block, b, g = place(tl.cdiv(N, BN), H // G)
    key = block * BN
    n, d = key + tl.arange(0, BN), tl.arange(0, BD)
    acc = tl.zeros([BN, BD], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(key - start, 0) // BT * BT
    for member in range(G):
        h = g * G + member
        x_here = x_at + (b.to(tl.int64) * H + h) * ROWS * STEP
        y_here = head_of(y_at, b, h, yb, yh)
        for row in range(first, ROWS, BT):
            i = row + tl.arange(0, BT)
            read = (i[None, :] < ROWS) & (n[:, None] < row_end(start + i, N, CAUSAL)[None, :])
            x = tl.load(x_here + i[None, :].to(tl.int64) * STEP + n[:, None], mask=read, other=0.0)
            y = tile(y_here, start + row, yt, yd, T, D, BT, BD, False, UPCAST)
            acc += tl.dot(x.to(y.dtype), y, input_precision=PRECISION)
    written = (n[:, None] < N) & (d[None, :] < D)
    places = head_of(out_at, b, g, ob, oh) + n[:, None].to(tl.int64) * on + d[None, :] * od
    acc *= scale
    if ADD:
        acc += tl.load(places, mask=written, other=0.0).to(tl.float32)
    tl.store(places, acc.to(out_at.dtype.element_ty), mask=written)


def write_weights(
    q: Tensor, k: Tensor, lse: Tensor, mask: Tensor | None, real: Tensor | None, sinks: Tensor | None,
    causal: bool, scale: float, start: int, p: Tensor, unit: float = 1.0, flat: bool = False,
    slopes: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill a strip (B, H, ROWS, STEP) with the weights of queries from `start` on, times `unit`.

    `slopes` are dO, v and the strip to fill with dO V^T.
    """
    (batch, heads, queries, size), keys, rows = q.shape, k.shape[2], p.shape[2]
    g, v, d = (q, k, p) if slopes is None else slopes
    mask_read, of_mask, kind = readable(mask, q, k)
    counted = q if real is None else real.view(torch.uint8)
    of_real = (0, 0) if real is None else counted.expand(batch, queries).stride()
    block = _block(q.dtype)
    end = min(keys, start + step_of(rows)) if causal else keys
    columns = block if max(size, v.shape[3]) > 128 or q.dtype == torch.float32 else 128
    weights_kernel[(batch * heads * triton.cdiv(rows, block) * triton.cdiv(end, columns),)](
        q, k, v, g, mask_read, lse, counted, q if sinks is None else sinks, p, d,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *of_mask, *of_real,
        heads, heads // k.shape[1], queries, end, scale * 1.4426950408889634, start, rows, p.shape[3],
        D=size, DV=v.shape[3], MASK=kind, CAUSAL=causal, REAL=real is not None, SINK=sinks is not None, FLAT=flat,
        SLOPES=slopes is not None, UNIT=unit, **precision(q.dtype), BT=block, BN=columns, BD=padded(size),
        BDV=padded(v.shape[3]), num_warps=4 if q.dtype == torch.float32 else 8, num_stages=1,
    )  # fmt: skip


def times_rows(
    x: Tensor, y: Tensor, out: Tensor, causal: bool, scale: float, start: int,
    total: Tensor | None = None, seen: tuple[Tensor, tuple[int, ...], int] | None = None,
) -> None:  # fmt: skip
    """Write scale X Y of a strip into rows from `start` on of `out` (B, H, T, D), for y (B, Hkv, N, D).

    With `total` (B, H, T, D) also the sum of the rows of y that each query sees; `seen` is what `seen_of` returns.
    """
    heads, rows, size = x.shape[1], x.shape[2], y.shape[3]
    other = out if total is None else total
    mask, (sb, st, sn), kind = seen or (y, (0, 0, 0), 0)
    block = _block(x.dtype)
    rows_kernel[(x.shape[0] * heads * triton.cdiv(rows, block),)](
        x, y, out, other, mask, *y.stride(), *out.stride(), *other.stride(), sb, st, sn,
        heads, heads // y.shape[1], out.shape[2], y.shape[2], scale, start, rows, x.shape[3],
        D=size, CAUSAL=causal, SEEN=kind, TOTAL=total is not None, **precision(x.dtype), BT=block,
        BN=block, BD=padded(size), **_warps(x.dtype, size),
    )  # fmt: skip


def times_columns(x: Tensor, y: Tensor, out: Tensor, causal: bool, scale: float, start: int) -> None:
    """Write scale X^T Y of a strip into `out` (B, Hkv, N, D), for y (B, H, T, D); later strips are added."""
    heads, rows, size = x.shape[1], x.shape[2], y.shape[3]
    keys = min(out.shape[2], start + rows) if causal and start > 0 else out.shape[2]
    block = _block(x.dtype)
    columns_kernel[(out.shape[0] * out.shape[1] * triton.cdiv(keys, block),)](
        x, y, out, *y.stride(), *out.stride(), heads, heads // out.shape[1], y.shape[2], keys, scale, start, rows,
        x.shape[3], D=size, CAUSAL=causal, ADD=start > 0, **precision(x.dtype), BT=block, BN=block, BD=padded(size),
        **_warps(x.dtype, size),
    )  # fmt: skip


def _block(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


def _warps(dtype: torch.dtype, size: int) -> dict[str, Any]:
    return {"num_warps": 8 if size > 128 else 4, "num_stages": 1 if dtype == torch.float32 or size > 128 else 3}


def seen_of(mask: Tensor | None, batch: int, queries: int, keys: int) -> tuple[Tensor, tuple[int, ...], int] | None:
    """Return a mask of all heads, bool or additive, as kernels read it: with strides of samples, queries and keys."""
    if mask is None:
        return None
    read = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    sb, _, st, sn = read.expand(batch, 1, queries, keys).stride()
    return read, (sb, st, sn), 1 if mask.dtype == torch.bool else 2
