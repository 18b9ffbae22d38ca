"""The figures of tokens as Triton kernels: one reading of them, and a program for each sample that adds its parts up.

Both figures are sums over tokens. With x̂ = x/‖x‖, the mean cosine of all pairs of different tokens is
(‖Σ x̂‖² − number of x̂)/(T(T − 1)), and ‖x − mean‖_F² = Σ‖x‖² − ‖Σ x‖²/T. Sums of x and of its squares are kept in fp64:
what the difference leaves of alike tokens is right to 1e-7 of their norm, and squares of fp32 numbers stay in range.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# entries of a tile, and its tokens at most
TILE, ROWS = 4096, 16


@triton.jit
def tokens_kernel(
    x_at, real_at, sums_at, units_at, scalars_at, xb, xt, xc, rb, rt, T, C, parts, chunk,
    REAL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the sums over one part of a sample's tokens: of x, of x̂, of squares, and of tokens; and the largest |x|."""
    b, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    c = tl.arange(0, BC)
    sums, units = tl.zeros([BT, BC], tl.float64), tl.zeros([BT, BC], tl.float32)
    squares, nonzero, count = tl.zeros([BT], tl.float64), tl.zeros([BT], tl.float64), tl.zeros([BT], tl.float64)
    largest = tl.zeros([BT], tl.float64)
    end = tl.minimum(T, (part + 1) * chunk)
    for start in range(part * chunk, end, BT):
        i = start + tl.arange(0, BT)
        rows = i < end
        if REAL:
            # Padding may hold any number.
            rows = rows & (tl.load(real_at + b * rb + i * rt, mask=rows, other=0) != 0)
        at = x_at + b * xb + i[:, None].to(tl.int64) * xt + c[None, :] * xc
        x = tl.load(at, mask=rows[:, None] & (c[None, :] < C), other=0.0).to(tl.float64)
        square = tl.sum(x * x, 1)
        sums += x
        units += (x * (1.0 / tl.sqrt(tl.where(square == 0.0, 1.0, square)))[:, None]).to(tl.float32)
        squares += square
        nonzero += (square != 0.0).to(tl.float64)
        count += rows.to(tl.float64)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    at = tl.program_id(0).to(tl.int64) * C + c
    tl.store(sums_at + at, tl.sum(sums, 0), mask=c < C)
    tl.store(units_at + at, tl.sum(units, 0), mask=c < C)
    at = scalars_at + tl.program_id(0) * 4
    tl.store(at, tl.sum(squares, 0))
    tl.store(at + 1, tl.sum(nonzero, 0))
    tl.store(at + 2, tl.sum(count, 0))
    tl.store(at + 3, tl.max(largest, 0))


@triton.jit
def figures_kernel(sums_at, units_at, scalars_at, out_at, B, C, parts, BC: tl.constexpr):
    """Write the figures of one sample."""
    b = tl.program_id(0)
    c = tl.arange(0, BC)
    sums, units = tl.zeros([BC], tl.float64), tl.zeros([BC], tl.float64)
    first = b.to(tl.int64) * parts
    squares = tl.zeros([], tl.float64)
    nonzero, count, largest = squares, squares, squares
    for part in range(parts):
        at = (first + part) * C + c
        sums += tl.load(sums_at + at, mask=c < C, other=0.0)
        units += tl.load(units_at + at, mask=c < C, other=0.0).to(tl.float64)
        at = scalars_at + (first + part) * 4
        squares += tl.load(at)
        nonzero += tl.load(at + 1)
        count += tl.load(at + 2)
        largest = tl.maximum(largest, tl.load(at + 3))
    pairs = count * (count - 1.0)
    cosine = (tl.sum(units * units, 0) - nonzero) / tl.where(pairs > 0.0, pairs, float("nan"))
    rest = squares - tl.sum(sums * sums, 0) / tl.where(count > 0.0, count, 1.0)
    # What is not a number stays so.
    rest = tl.where(rest < 0.0, 0.0, rest)
    share = tl.sqrt(rest / tl.where(squares > 0.0, squares, float("nan")))
    tl.store(out_at + b, cosine.to(tl.float32))
    tl.store(out_at + B + b, share.to(tl.float32))
    tl.store(out_at + 2 * B + b, tl.where(squares == squares, largest, float("nan")).to(tl.float32))


def figures(x: Tensor, real: Tensor | None, parts: int) -> Tensor:
    """Return of each sample the mean cosine of pairs, ‖x − mean‖_F/‖x‖_F and the largest |x|, (3, B) in fp32.

    Args:
        x: tokens (B, T, C) in fp32, fp16 or bf16.
        real: (B, T) False on padding; None for all.
        parts: how many programs share the tokens of a sample.
    """
    batch, tokens, size = x.shape
    width = triton.next_power_of_2(size)
    block = max(1, min(TILE // width, ROWS, triton.next_power_of_2(tokens)))
    chunk = triton.cdiv(triton.cdiv(tokens, parts), block) * block
    sums = torch.empty(batch * parts, size, dtype=torch.float64, device=x.device)
    units = torch.empty(batch * parts, size, dtype=torch.float32, device=x.device)
    scalars = torch.empty(batch * parts, 4, dtype=torch.float64, device=x.device)
    out = torch.empty(3, batch, dtype=torch.float32, device=x.device)
    seen = x if real is None else real.view(torch.uint8)
    steps = (0, 0) if real is None else real.stride()
    warps = 16 if width > TILE else 8
    # Triton launches on the current device, which differs from x's in a model spread over several devices.
    with torch.cuda.device_of(x):
        tokens_kernel[(batch * parts,)](
            x, seen, sums, units, scalars, *x.stride(), *steps, tokens, size, parts, chunk,
            REAL=real is not None, BT=block, BC=width, num_warps=warps,
        )  # fmt: skip
        figures_kernel[(batch,)](sums, units, scalars, out, batch, size, parts, BC=width, num_warps=warps)
    return out
