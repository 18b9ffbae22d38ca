"""`low_rank_gated` as Triton kernels: one pass over rows each way, with the gates' logits in registers.

Forward writes f·x·σ(z), z = Σ silu(a)·U + b, for rows x (B, H, T, D), one or two a (B, H, T, r) with their U (H, r, D),
and b (H, D). Backward computes z again and writes dx = f·g·σ(z), with dz = dx·x·(1 - σ(z)) da = dz·Uᵀ·silu'(a), and for
each program its part of dU = silu(a)ᵀ·dz and db, which are summed after it in a fixed order. A program has up to ROWS
rows of one head of one sample; products are three of TF32.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.triton_head_rows import read_rows, rows, rows_of, strides, write_rows

# rows of a tile, and of a program in backward
BT, ROWS = 16, 1024


@triton.jit
def _up(u_at, h, R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Load U (BR, BD) of a head in fp32; 0 beyond its rank and size."""
    r, d = tl.arange(0, BR)[:, None], tl.arange(0, BD)[None, :]
    return tl.load(u_at + (h * R + r) * D + d, mask=(r < R) & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _bias(bias_at, h, BIASED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    bias = tl.zeros([BD], tl.float32)
    if BIASED:
        bias = tl.load(bias_at + h * D + d, mask=d < D, other=0.0).to(tl.float32)
    return bias


@triton.jit
def low_rank_gate_kernel(
    x_at, a_at, c_at, u_at, v_at, bias_at, y_at, factor, xb, xh, xt, ab, ah, at, cb, ch, ct, yb, yh, yt, H, T,
    TWO: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write f·x·σ(z)."""
    b, h, first = rows_of(T, H, BT)
    a = read_rows(a_at, b, h, first, ab, ah, at, T, R, BT, BR)
    z = tl.dot(a * tl.sigmoid(a), _up(u_at, h, R, D, BR, BD), input_precision="tf32x3")
    if TWO:
        c = read_rows(c_at, b, h, first, cb, ch, ct, T, R, BT, BR)
        z = tl.dot(c * tl.sigmoid(c), _up(v_at, h, R, D, BR, BD), z, input_precision="tf32x3")
    z += _bias(bias_at, h, BIASED, D, BD)[None, :]
    x = read_rows(x_at, b, h, first, xb, xh, xt, T, D, BT, BD)
    y = x * (tl.sigmoid(z) * factor)
    write_rows(y_at, y, b, h, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def _slope_of_inner(
    a, dz, up, da_at, b, h, first, db, dh, dt, T, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Write the gradient of a."""
    s = tl.sigmoid(a)
    da = tl.dot(dz, tl.trans(up), input_precision="tf32x3") * (s * (1.0 + a * (1.0 - s)))
    write_rows(da_at, da, b, h, first, db, dh, dt, T, R, BT, BR)


@triton.jit
def low_rank_gate_back_kernel(
    g_at, x_at, a_at, c_at, u_at, v_at, bias_at, dx_at, da_at, dc_at, du_at, dv_at, dbias_at, factor,
    gb, gh, gt, xb, xh, xt, ab, ah, at, cb, ch, ct, db, dh, dt, eb, eh, et, fb, fh, ft, H, T,
    TWO: tl.constexpr, BIASED: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of each a, and a program's part of those of each U and of the bias."""
    parts = tl.cdiv(T, ROWS)
    start = tl.program_id(0) % parts * ROWS
    b, h = tl.program_id(0) // parts // H, tl.program_id(0) // parts % H
    up = _up(u_at, h, R, D, BR, BD)
    du, dv, dbias = tl.zeros([BR, BD], tl.float32), tl.zeros([BR, BD], tl.float32), tl.zeros([BD], tl.float32)
    bias = _bias(bias_at, h, BIASED, D, BD)
    other = up
    if TWO:
        other = _up(v_at, h, R, D, BR, BD)
    for first in range(start, tl.minimum(start + ROWS, T), BT):
        a = read_rows(a_at, b, h, first, ab, ah, at, T, R, BT, BR)
        c = a
        z = tl.dot(a * tl.sigmoid(a), up, input_precision="tf32x3")
        if TWO:
            c = read_rows(c_at, b, h, first, cb, ch, ct, T, R, BT, BR)
            z = tl.dot(c * tl.sigmoid(c), other, z, input_precision="tf32x3")
        gate = tl.sigmoid(z + bias[None, :])
        g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
        x = read_rows(x_at, b, h, first, xb, xh, xt, T, D, BT, BD)
        dx = g * (gate * factor)
        write_rows(dx_at, dx, b, h, first, db, dh, dt, T, D, BT, BD)
        dz = dx * x * (1.0 - gate)
        _slope_of_inner(a, dz, up, da_at, b, h, first, eb, eh, et, T, R, BT, BR)
        du = tl.dot(tl.trans(a * tl.sigmoid(a)), dz, du, input_precision="tf32x3")
        if TWO:
            _slope_of_inner(c, dz, other, dc_at, b, h, first, fb, fh, ft, T, R, BT, BR)
            dv = tl.dot(tl.trans(c * tl.sigmoid(c)), dz, dv, input_precision="tf32x3")
        if BIASED:
            dbias += tl.sum(dz, 0)
    r, d = tl.arange(0, BR)[:, None], tl.arange(0, BD)[None, :]
    # of the sample's part first, then of the head
    own = ((b * parts + tl.program_id(0) % parts) * H + h).to(tl.int64)
    tl.store(du_at + (own * R + r) * D + d, du, mask=(r < R) & (d < D))
    if TWO:
        tl.store(dv_at + (own * R + r) * D + d, dv, mask=(r < R) & (d < D))
    if BIASED:
        tl.store(dbias_at + own * D + tl.arange(0, BD), dbias, mask=tl.arange(0, BD) < D)


def gate(x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, y: Tensor, factor: float) -> None:
    """Fill y with factor·x·σ(Σ silu(inner)·up + bias)."""
    x, a, c = rows(x), rows(inner[0]), rows(inner[-1])
    ups, biased = [u.contiguous() for u in up], _given(bias, x)
    grid = (triton.cdiv(x.shape[2], BT) * x.shape[0] * x.shape[1],)
    with torch.cuda.device_of(x):
        low_rank_gate_kernel[grid](
            x, a, c, ups[0], ups[-1], biased, y, factor, *strides(x, a, c, y), x.shape[1], x.shape[2],
            TWO=len(inner) > 1, BIASED=bias is not None, **_sizes(x, a),
        )  # fmt: skip


def gate_backward(
    g: Tensor, x: Tensor, inner: list[Tensor], up: list[Tensor], bias: Tensor | None, made: list[Tensor], factor: float
) -> None:
    """Fill the gradients of x, of each inner, of each up, and of the bias."""
    g, x, a, c = rows(g), rows(x), rows(inner[0]), rows(inner[-1])
    ups, many = [u.contiguous() for u in up], len(inner)
    parts = x.shape[0] * triton.cdiv(x.shape[2], ROWS)
    sums = [x.new_empty(parts, *u.shape, dtype=torch.float32) for u in made[1 + many :]]
    of_bias = sums[-1] if bias is not None else sums[0]
    with torch.cuda.device_of(x):
        low_rank_gate_back_kernel[(parts * x.shape[1],)](
            g, x, a, c, ups[0], ups[-1], _given(bias, x), made[0], made[1], made[many], sums[0], sums[many - 1],
            of_bias, factor, *strides(g, x, a, c, made[0], made[1], made[many]), x.shape[1], x.shape[2],
            TWO=many > 1, BIASED=bias is not None, ROWS=ROWS, **_sizes(x, a),
        )  # fmt: skip
    for target, part in zip(made[1 + many :], sums, strict=True):
        target.copy_(part.sum(0))


def _given(bias: Tensor | None, x: Tensor) -> Tensor:
    """Return the bias, or any tensor where there is none."""
    return x if bias is None else bias.contiguous()


def _sizes(x: Tensor, a: Tensor) -> dict[str, int]:
    size, rank = x.shape[3], a.shape[3]
    padded = max(16, triton.next_power_of_2(size))
    ranks = max(16, triton.next_power_of_2(rank))
    return {
        "R": rank, "D": size, "BT": BT, "BR": ranks, "BD": padded,
        "num_warps": 8 if padded * ranks > 1024 else 4, "num_stages": 1,
    }  # fmt: skip
