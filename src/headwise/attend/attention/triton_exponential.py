"""`exponential` as Triton kernels: one pass over values or outputs each way, in fp32 inside.

Forward writes exp(v - m + high) and log(out) + m - high for rows (B, H, T, D) and numbers m (B, H, D); backward
g·exp(v - m + high) and g / out. A program holds a block of rows of one head of one sample.
Source: Duvvuri and Dhillon 2025, arXiv 2411.03493.
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
def _largest(m_at, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return the numbers m of this program's head, (1, BD)."""
    head, d = tl.cast(tl.program_id(0) // tl.cdiv(T, BT), tl.int64), tl.arange(0, BD)
    return tl.load(m_at + head * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def exponential_kernel(
    v_at, m_at, e_at, low, high, vb, vh, vt, eb, eh, et, H, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Write exp(v - m + high), with exponents from `low` to `high`."""
    b, h, first = rows_of(T, H, BT)
    v = read_rows(v_at, b, h, first, vb, vh, vt, T, D, BT, BD)
    m = _largest(m_at, T, D, BT, BD) - high
    x = tl.maximum(v - m, low, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)
    write_rows(e_at, tl.exp(x), b, h, first, eb, eh, et, T, D, BT, BD)


@triton.jit
def exponential_back_kernel(
    g_at, v_at, m_at, dv_at, low, high, gb, gh, gt, vb, vh, vt, db, dh, dt, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write g·exp(v - m + high), and 0 where the exponent was cut."""
    b, h, first = rows_of(T, H, BT)
    v = read_rows(v_at, b, h, first, vb, vh, vt, T, D, BT, BD)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    m = _largest(m_at, T, D, BT, BD) - high
    x = v - m
    # Not (x < low) | (x > high): a value that is nan has a gradient of nan.
    dv = tl.where((x < low) | (x > high), 0.0, g * tl.exp(x))
    write_rows(dv_at, dv, b, h, first, db, dh, dt, T, D, BT, BD)


@triton.jit
def logarithm_kernel(
    o_at, m_at, y_at, high, ob, oh, ot, yb, yh, yt, H, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Write log(o) + m - high, and 0 where o is 0."""
    b, h, first = rows_of(T, H, BT)
    o = read_rows(o_at, b, h, first, ob, oh, ot, T, D, BT, BD)
    m = _largest(m_at, T, D, BT, BD) - high
    y = tl.where(o == 0.0, 0.0, tl.log(tl.where(o == 0.0, 1.0, o)) + m)
    write_rows(y_at, y, b, h, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def logarithm_back_kernel(
    g_at, o_at, do_at, gb, gh, gt, ob, oh, ot, db, dh, dt, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write g / o, and 0 where o is 0."""
    b, h, first = rows_of(T, H, BT)
    o = read_rows(o_at, b, h, first, ob, oh, ot, T, D, BT, BD)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    do = tl.where(o == 0.0, 0.0, g / tl.where(o == 0.0, 1.0, o))
    write_rows(do_at, do, b, h, first, db, dh, dt, T, D, BT, BD)


def exponential_rows(v: Tensor, m: Tensor, low: float, high: float, e: Tensor) -> None:
    """Fill e with exp(v - m + high), for m (B, H, 1, D) and exponents from `low` to `high`."""
    v, m = rows(v), m.contiguous()
    with torch.cuda.device_of(v):
        exponential_kernel[grid_of(v)](v, m, e, low, high, *strides(v, e), v.shape[1], v.shape[2], **sizes(v))


def exponential_rows_backward(g: Tensor, v: Tensor, m: Tensor, low: float, high: float, made: list[Tensor]) -> None:
    """Fill `made`, the gradient of v."""
    (dv,), g, v, m = made, rows(g), rows(v), m.contiguous()
    with torch.cuda.device_of(v):
        exponential_back_kernel[grid_of(v)](
            g, v, m, dv, low, high, *strides(g, v, dv), v.shape[1], v.shape[2], **sizes(v)
        )


def logarithm_rows(o: Tensor, m: Tensor, high: float, y: Tensor) -> None:
    """Fill y with log(o) + m - high, and 0 where o is 0."""
    o, m = rows(o), m.contiguous()
    with torch.cuda.device_of(o):
        logarithm_kernel[grid_of(o)](o, m, y, high, *strides(o, y), o.shape[1], o.shape[2], **sizes(o))


def logarithm_rows_backward(g: Tensor, o: Tensor, m: Tensor, high: float, made: list[Tensor]) -> None:
    """Fill `made`, the gradient of o, which m and `high` do not change."""
    (do,), g, o = made, rows(g), rows(o)
    with torch.cuda.device_of(o):
        logarithm_back_kernel[grid_of(o)](g, o, do, *strides(g, o, do), o.shape[1], o.shape[2], **sizes(o))
