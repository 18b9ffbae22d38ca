"""The operators of `pairs` as Triton kernels: pairs of heads, and all heads of a token, in one pass each way."""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.triton_head_rows import read_rows, rows, rows_of, strides, total, write_rows

# Numbers of a tile, of 128 threads, of which a program holds four or more.
TILE = 2048


@triton.jit
def difference_kernel(
    own_at, other_at, factor_at, y_at, fb, fp, ft, sb, sh, st, ob, oh, ot, yb, yh, yt, PAIRS, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write own₀ - factor·other₁ and other₀ - factor·own₁ for the two heads of a pair."""
    b, pair, first = rows_of(T, PAIRS, BT)
    row = first + tl.arange(0, BT)
    factor = tl.load(factor_at + b * fb + pair * fp + row * ft, mask=row < T, other=0.0).to(tl.float32)[:, None]
    own = read_rows(own_at, b, 2 * pair, first, sb, sh, st, T, D, BT, BD)
    other = read_rows(other_at, b, 2 * pair + 1, first, ob, oh, ot, T, D, BT, BD)
    write_rows(y_at, own - factor * other, b, 2 * pair, first, yb, yh, yt, T, D, BT, BD)
    own = read_rows(own_at, b, 2 * pair + 1, first, sb, sh, st, T, D, BT, BD)
    other = read_rows(other_at, b, 2 * pair, first, ob, oh, ot, T, D, BT, BD)
    write_rows(y_at, other - factor * own, b, 2 * pair + 1, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def difference_back_kernel(
    g_at, own_at, other_at, factor_at, down_at, dother_at, dfactor_at,
    fb, fp, ft, gb, gh, gt, sb, sh, st, ob, oh, ot, db, dh, dt, eb, eh, et, PAIRS, T,
    PER_ROW: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both, and of the factor: one per row, or each program's part of it."""
    b, pair, first = rows_of(T, PAIRS, BT)
    row = first + tl.arange(0, BT)
    factor = tl.load(factor_at + b * fb + pair * fp + row * ft, mask=row < T, other=0.0).to(tl.float32)[:, None]
    g = read_rows(g_at, b, 2 * pair, first, gb, gh, gt, T, D, BT, BD)
    other = read_rows(other_at, b, 2 * pair + 1, first, ob, oh, ot, T, D, BT, BD)
    along = tl.sum(g * other, 1)
    write_rows(down_at, g, b, 2 * pair, first, db, dh, dt, T, D, BT, BD)
    write_rows(dother_at, -factor * g, b, 2 * pair + 1, first, eb, eh, et, T, D, BT, BD)
    g = read_rows(g_at, b, 2 * pair + 1, first, gb, gh, gt, T, D, BT, BD)
    own = read_rows(own_at, b, 2 * pair + 1, first, sb, sh, st, T, D, BT, BD)
    along = -along - tl.sum(g * own, 1)
    write_rows(dother_at, g, b, 2 * pair, first, eb, eh, et, T, D, BT, BD)
    write_rows(down_at, -factor * g, b, 2 * pair + 1, first, db, dh, dt, T, D, BT, BD)
    if PER_ROW:
        at = dfactor_at + (b * PAIRS + pair) * T + row
        tl.store(at, along.to(dfactor_at.dtype.element_ty), mask=row < T)
    else:
        tl.store(dfactor_at + tl.program_id(0), tl.sum(along, 0))


@triton.jit
def pair_norm_kernel(
    x_at, gain_at, y_at, scale, eps, sb, sh, st, yb, yh, yt, PAIRS, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the rows of both heads of a pair over their common root mean square, times the gains and the scale."""
    b, pair, first = rows_of(T, PAIRS, BT)
    d = tl.arange(0, BD)
    x0 = read_rows(x_at, b, 2 * pair, first, sb, sh, st, T, D, BT, BD)
    x1 = read_rows(x_at, b, 2 * pair + 1, first, sb, sh, st, T, D, BT, BD)
    inverse = (tl.rsqrt((tl.sum(x0 * x0, 1) + tl.sum(x1 * x1, 1)) / (2 * D) + eps) * scale)[:, None]
    gain0 = tl.load(gain_at + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    gain1 = tl.load(gain_at + D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    write_rows(y_at, x0 * inverse * gain0, b, 2 * pair, first, yb, yh, yt, T, D, BT, BD)
    write_rows(y_at, x1 * inverse * gain1, b, 2 * pair + 1, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def pair_norm_back_kernel(
    g_at, x_at, gain_at, dx_at, part_at, scale, eps, gb, gh, gt, sb, sh, st, yb, yh, yt, PAIRS, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows, and each program's part of those of the gains."""
    b, pair, first = rows_of(T, PAIRS, BT)
    d = tl.arange(0, BD)
    x0 = read_rows(x_at, b, 2 * pair, first, sb, sh, st, T, D, BT, BD)
    x1 = read_rows(x_at, b, 2 * pair + 1, first, sb, sh, st, T, D, BT, BD)
    g0 = read_rows(g_at, b, 2 * pair, first, gb, gh, gt, T, D, BT, BD) * scale
    g1 = read_rows(g_at, b, 2 * pair + 1, first, gb, gh, gt, T, D, BT, BD) * scale
    inverse = tl.rsqrt((tl.sum(x0 * x0, 1) + tl.sum(x1 * x1, 1)) / (2 * D) + eps)[:, None]
    x0, x1 = x0 * inverse, x1 * inverse
    at = part_at + tl.program_id(0).to(tl.int64) * 2 * D + d
    tl.store(at, tl.sum(g0 * x0, 0), mask=d < D)
    tl.store(at + D, tl.sum(g1 * x1, 0), mask=d < D)
    g0 = g0 * tl.load(gain_at + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    g1 = g1 * tl.load(gain_at + D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    along = ((tl.sum(g0 * x0, 1) + tl.sum(g1 * x1, 1)) / (2 * D))[:, None]
    write_rows(dx_at, (g0 - x0 * along) * inverse, b, 2 * pair, first, yb, yh, yt, T, D, BT, BD)
    write_rows(dx_at, (g1 - x1 * along) * inverse, b, 2 * pair + 1, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def _mean_direction(
    x_at, b, first, sb, sh, st, H, T, tiny, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Return the mean over heads of the rows at length 1, (BT, BD)."""
    mean = tl.zeros([BT, BD], tl.float32)
    for h in tl.range(0, H):
        x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
        mean += x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), tiny)[:, None]
    return mean / H


@triton.jit
def agreement_kernel(
    x_at, y_at, sb, sh, st, H, T, tiny, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the mean cosine of all pairs of heads in each token."""
    b, _, first = rows_of(T, 1, BT)
    mean = _mean_direction(x_at, b, first, sb, sh, st, H, T, tiny, D, BT, BD)
    row = first + tl.arange(0, BT)
    tl.store(y_at + b * T + row, tl.sum(mean * mean, 1), mask=row < T)


@triton.jit
def agreement_back_kernel(
    g_at, up_at, x_at, dx_at, ub, uh, ut, sb, sh, st, yb, yh, yt, H, T, tiny,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows: that of their agreement, and what comes from elsewhere."""
    b, _, first = rows_of(T, 1, BT)
    row = first + tl.arange(0, BT)
    g = tl.load(g_at + b * T + row, mask=row < T, other=0.0)[:, None]
    mean = _mean_direction(x_at, b, first, sb, sh, st, H, T, tiny, D, BT, BD)
    for h in tl.range(0, H):
        x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
        norm = tl.sqrt(tl.sum(x * x, 1))
        size = tl.maximum(norm, tiny)[:, None]
        along = tl.where(norm < tiny, 0.0, tl.sum(mean * x, 1))[:, None]
        dx = 2.0 / H * g * (mean - along / size * (x / size)) / size
        # Tokens that do not count may hold anything.
        dx = tl.where(g == 0.0, 0.0, dx) + read_rows(up_at, b, h, first, ub, uh, ut, T, D, BT, BD)
        write_rows(dx_at, dx, b, h, first, yb, yh, yt, T, D, BT, BD)


def _sizes(x: Tensor, heads: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and constants of a launch whose programs hold blocks of rows of `heads` heads of x."""
    width = triton.next_power_of_2(x.shape[3])
    block = max(1, min(TILE // width, triton.next_power_of_2(x.shape[2])))
    count = triton.cdiv(x.shape[2], block) * x.shape[0] * (x.shape[1] // heads)
    return (count,), {"D": x.shape[3], "BT": block, "BD": width}


def pair_difference(own: Tensor, other: Tensor, factor: Tensor, y: Tensor) -> None:
    """Fill y with what `pairs.difference` returns; the factor is 0-d, or (B, H/2, T, 1)."""
    own, other = rows(own), rows(other)
    grid, constants = _sizes(own, 2)
    with torch.cuda.device_of(own):
        difference_kernel[grid](
            own, other, factor, y, *_steps(factor), *strides(own, other, y), own.shape[1] // 2, own.shape[2],
            **constants,
        )  # fmt: skip


def pair_difference_backward(g: Tensor, own: Tensor, other: Tensor, factor: Tensor, made: Sequence[Tensor]) -> None:
    """Fill `made`, the gradients of own, other and the factor."""
    g, own, other = rows(g), rows(own), rows(other)
    grid, constants = _sizes(own, 2)
    per_row = factor.dim() > 0
    part = made[2] if per_row else torch.empty(grid, dtype=torch.float32, device=g.device)
    with torch.cuda.device_of(own):
        difference_back_kernel[grid](
            g, own, other, factor, made[0], made[1], part, *_steps(factor),
            *strides(g, own, other, made[0], made[1]), own.shape[1] // 2, own.shape[2],
            PER_ROW=per_row, **constants,
        )  # fmt: skip
        if not per_row:
            total(part, made[2].view(1), 1, part.numel())


def _steps(factor: Tensor) -> tuple[int, ...]:
    return factor.stride()[:3] if factor.dim() > 0 else (0, 0, 0)


def pair_norm_rows(x: Tensor, gain: Tensor, scale: float, eps: float, y: Tensor) -> None:
    """Fill y with what `pairs.pair_norm` returns."""
    x = rows(x)
    grid, constants = _sizes(x, 2)
    with torch.cuda.device_of(x):
        pair_norm_kernel[grid](x, gain, y, scale, eps, *strides(x, y), x.shape[1] // 2, x.shape[2], **constants)


def pair_norm_rows_backward(
    g: Tensor, x: Tensor, gain: Tensor, scale: float, eps: float, made: Sequence[Tensor]
) -> None:
    """Fill `made`, the gradients of x and the gain."""
    g, x = rows(g), rows(x)
    grid, constants = _sizes(x, 2)
    part = torch.empty(grid[0], 2 * x.shape[3], dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        pair_norm_back_kernel[grid](
            g, x, gain, made[0], part, scale, eps, *strides(g, x, made[0]), x.shape[1] // 2, x.shape[2], **constants
        )
        made[1].copy_(part.sum(0))


def agreement(x: Tensor, y: Tensor, tiny: float) -> None:
    """Fill y (B, T) with what `pairs.agreement` returns."""
    x = rows(x)
    grid, constants = _sizes(x, x.shape[1])
    with torch.cuda.device_of(x):
        agreement_kernel[grid](x, y, *strides(x), x.shape[1], x.shape[2], tiny, **constants)


def agreement_backward(g: Tensor, up: Tensor, x: Tensor, dx: Tensor, tiny: float) -> None:
    """Fill dx with `up` and the gradient of x by its agreement, from g (B, T) in fp32."""
    up, x = rows(up), rows(x)
    grid, constants = _sizes(x, x.shape[1])
    with torch.cuda.device_of(x):
        agreement_back_kernel[grid](
            g.contiguous(), up, x, dx, *strides(up, x, dx), x.shape[1], x.shape[2], tiny, **constants
        )
