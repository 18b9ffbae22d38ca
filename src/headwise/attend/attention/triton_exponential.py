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

from headwise.attend.attention.triton_head_rows import at_rows, rows, sizes, strides


@triton.jit
def exponential_kernel(
    v_at, m_at, e_at, low, high, vb, vh, vt, eb, eh, et, H, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Write exp(v - m + high), with exponents from `low` to `high`."""
    blocks = tl.cdiv(T, BT)
    first = tl.program_id(0) % blocks * BT
    head = tl.program_id(0) // blocks
    b, h, d = head // H, head % H, tl.arange(0, BD)
    inside = (first + tl.arange(0, BT)[:, None] < T) & (d[None, :] < D)
    v = tl.load(at_rows(v_at, b, h, first, vb, vh, vt, BT, BD), mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_at + tl.cast(head, tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32) - high
    x = tl.maximum(v - m[None, :], low, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at_rows(e_at, b, h, first, eb, eh, et, BT, BD), tl.exp(x).to(e_at.dtype.element_ty), mask=inside)


@triton.jit
def exponential_back_kernel(
    g_at, v_at, m_at, dv_at, low, high, gb, gh, gt, vb, vh, vt, db, dh, dt, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write g·exp(v - m + high), and 0 where the exponent was cut."""
    blocks = tl.cdiv(T, BT)
    first = tl.program_id(0) % blocks * BT
    head = tl.program_id(0) // blocks
    b, h, d = head // H, head % H, tl.arange(0, BD)
    inside = (first + tl.arange(0, BT)[:, None] < T) & (d[None, :] < D)
    v = tl.load(at_rows(v_at, b, h, first, vb, vh, vt, BT, BD), mask=inside, other=0.0).to(tl.float32)
    g = tl.load(at_rows(g_at, b, h, first, gb, gh, gt, BT, BD), mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_at + tl.cast(head, tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32) - high
    x = v - m[None, :]
    # Not (x < low) | (x > high): a value that is nan has a gradient of nan.
    dv = tl.where((x < low) | (x > high), 0.0, g * tl.exp(x))
    tl.store(at_rows(dv_at, b, h, first, db, dh, dt, BT, BD), dv.to(dv_at.dtype.element_ty), mask=inside)


@triton.jit
def logarithm_kernel(
    o_at, m_at, y_at, high, ob, oh, ot, yb, yh, yt, H, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Write log(o) + m - high, and 0 where o is 0."""
    blocks = tl.cdiv(T, BT)
    first = tl.program_id(0) % blocks * BT
    head = tl.program_id(0) // blocks
    b, h, d = head // H, head % H, tl.arange(0, BD)
    inside = (first + tl.arange(0, BT)[:, None] < T) & (d[None, :] < D)
    o = tl.load(at_rows(o_at, b, h, first, ob, oh, ot, BT, BD), mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_at + tl.cast(head, tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32) - high
    y = tl.where(o == 0.0, 0.0, tl.log(tl.where(o == 0.0, 1.0, o)) + m[None, :])
    tl.store(at_rows(y_at, b, h, first, yb, yh, yt, BT, BD), y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def logarithm_back_kernel(
    g_at, o_at, do_at, gb, gh, gt, ob, oh, ot, db, dh, dt, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write g / o, and 0 where o is 0."""
    blocks = tl.cdiv(T, BT)
    first = tl.program_id(0) % blocks * BT
    b, h = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    inside = (first + tl.arange(0, BT)[:, None] < T) & (tl.arange(0, BD)[None, :] < D)
    o = tl.load(at_rows(o_at, b, h, first, ob, oh, ot, BT, BD), mask=inside, other=0.0).to(tl.float32)
    g = tl.load(at_rows(g_at, b, h, first, gb, gh, gt, BT, BD), mask=inside, other=0.0).to(tl.float32)
    do = tl.where(o == 0.0, 0.0, g / tl.where(o == 0.0, 1.0, o))
    tl.store(at_rows(do_at, b, h, first, db, dh, dt, BT, BD), do.to(do_at.dtype.element_ty), mask=inside)


def exponential_rows(v: Tensor, m: Tensor, low: float, high: float, e: Tensor) -> None:
    """Fill e with exp(v - m + high), for m (B, H, 1, D) and exponents from `low` to `high`."""
    v, m = rows(v), m.contiguous()
    with torch.cuda.device_of(v):
        exponential_kernel[_grid(v)](v, m, e, low, high, *strides(v, e), v.shape[1], v.shape[2], **sizes(v))


def exponential_rows_backward(g: Tensor, v: Tensor, m: Tensor, low: float, high: float, made: list[Tensor]) -> None:
    """Fill `made`, the gradient of v."""
    (dv,), g, v, m = made, rows(g), rows(v), m.contiguous()
    with torch.cuda.device_of(v):
        exponential_back_kernel[_grid(v)](
            g, v, m, dv, low, high, *strides(g, v, dv), v.shape[1], v.shape[2], **sizes(v)
        )


def logarithm_rows(o: Tensor, m: Tensor, high: float, y: Tensor) -> None:
    """Fill y with log(o) + m - high, and 0 where o is 0."""
    o, m = rows(o), m.contiguous()
    with torch.cuda.device_of(o):
        logarithm_kernel[_grid(o)](o, m, y, high, *strides(o, y), o.shape[1], o.shape[2], **sizes(o))


def logarithm_rows_backward(g: Tensor, o: Tensor, m: Tensor, high: float, made: list[Tensor]) -> None:
    """Fill `made`, the gradient of o, which m and `high` do not change."""
    (do,), g, o = made, rows(g), rows(o)
    with torch.cuda.device_of(o):
        logarithm_back_kernel[_grid(o)](g, o, do, *strides(g, o, do), o.shape[1], o.shape[2], **sizes(o))


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.shape[2], sizes(x)["BT"]) * x.shape[0] * x.shape[1],)
