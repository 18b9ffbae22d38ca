"""`gated` as Triton kernels: one pass over rows and the numbers of their gates each way, in fp32 inside.

Forward writes f·x·σ(z) for rows (B, H, T, D) and z of the same shape, or one number for each row; z is the sum of two
tensors where there are two. Backward writes f·g·σ(z), and f·g·x·σ(z)(1 - σ(z)), for one number its sum over the row.
A program holds a block of rows of one head of one sample.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.triton_head_rows import grid_of, read_rows, rows, rows_of, sizes, strides, write_rows


@triton.jit
def _gate(
    z_at, w_at, b, h, first, zb, zh, zt, wb, wh, wt, T,
    TWO: tl.constexpr, ONE: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return σ(z) or σ(z + w), (BT, BD) or with one number for each row (BT, 1)."""
    if ONE:
        t = first + tl.arange(0, BT)[:, None]
        at = tl.cast(b, tl.int64) * zb + tl.cast(h, tl.int64) * zh + t.to(tl.int64) * zt
        z = tl.load(z_at + at, mask=t < T, other=0.0).to(tl.float32)
        if TWO:
            at = tl.cast(b, tl.int64) * wb + tl.cast(h, tl.int64) * wh + t.to(tl.int64) * wt
            z += tl.load(w_at + at, mask=t < T, other=0.0).to(tl.float32)
    else:
        z = read_rows(z_at, b, h, first, zb, zh, zt, T, D, BT, BD)
        if TWO:
            z += read_rows(w_at, b, h, first, wb, wh, wt, T, D, BT, BD)
    return tl.sigmoid(z)


@triton.jit
def gate_kernel(
    x_at, z_at, w_at, y_at, factor, xb, xh, xt, zb, zh, zt, wb, wh, wt, yb, yh, yt, H, T,
    TWO: tl.constexpr, ONE: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write f·x·σ(z)."""
    b, h, first = rows_of(T, H, BT)
    x = read_rows(x_at, b, h, first, xb, xh, xt, T, D, BT, BD)
    gate = _gate(z_at, w_at, b, h, first, zb, zh, zt, wb, wh, wt, T, TWO, ONE, D, BT, BD)
    y = x * (gate * factor)
    write_rows(y_at, y, b, h, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def gate_back_kernel(
    g_at, x_at, z_at, w_at, dx_at, dz_at, factor,
    gb, gh, gt, xb, xh, xt, zb, zh, zt, wb, wh, wt, db, dh, dt, eb, eh, et, H, T,
    TWO: tl.constexpr, ONE: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of z."""
    b, h, first = rows_of(T, H, BT)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    x = read_rows(x_at, b, h, first, xb, xh, xt, T, D, BT, BD)
    gate = _gate(z_at, w_at, b, h, first, zb, zh, zt, wb, wh, wt, T, TWO, ONE, D, BT, BD)
    dx = g * (gate * factor)
    write_rows(dx_at, dx, b, h, first, db, dh, dt, T, D, BT, BD)
    if ONE:
        t = first + tl.arange(0, BT)[:, None]
        dz = tl.sum(dx * x, 1)[:, None] * (1.0 - gate)
        at = tl.cast(b, tl.int64) * eb + tl.cast(h, tl.int64) * eh + t.to(tl.int64) * et
        tl.store(dz_at + at, dz.to(dz_at.dtype.element_ty), mask=t < T)
    else:
        dz = dx * x * (1.0 - gate)
        write_rows(dz_at, dz, b, h, first, eb, eh, et, T, D, BT, BD)


def gate(x: Tensor, z: Tensor, w: Tensor | None, y: Tensor, factor: float) -> None:
    """Fill y with factor·x·σ(z + w), for x (B, H, T, D), and z and w (B, H, T, D or 1)."""
    x, z, w = rows(x), rows(z), None if w is None else rows(w)
    with torch.cuda.device_of(x):
        gate_kernel[grid_of(x)](
            x, z, z if w is None else w, y, factor, *strides(x, z, z if w is None else w, y), x.shape[1], x.shape[2],
            TWO=w is not None, ONE=z.shape[3] == 1, **sizes(x),
        )  # fmt: skip


def gate_backward(g: Tensor, x: Tensor, z: Tensor, w: Tensor | None, dx: Tensor, dz: Tensor, factor: float) -> None:
    """Fill dx and dz, the gradients of x, and of z and w, which have the same."""
    g, x, z, w = rows(g), rows(x), rows(z), None if w is None else rows(w)
    with torch.cuda.device_of(x):
        gate_back_kernel[grid_of(x)](
            g, x, z, z if w is None else w, dx, dz, factor, *strides(g, x, z, z if w is None else w, dx, dz),
            x.shape[1], x.shape[2], TWO=w is not None, ONE=z.shape[3] == 1, **sizes(x),
        )  # fmt: skip
