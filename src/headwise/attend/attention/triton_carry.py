"""The operation of `flash_rows.carry` as one Triton kernel: dO and O are read once, dO and O' written once."""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.triton_tiles import padded

# Of one block; more would not fit the registers.
ENTRIES = 4096


@triton.jit
def carry_kernel(
    g_at, out_at, lse_at, new_g_at, moved_at,
    gb, gh, gt, gd, ob, oh, ot, od, lb, lh, lt, H, T, ALL,
    D: tl.constexpr, TINY: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute both results for one block of rows; they are (B, T, H, D), with the rows in this order."""
    row, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    b, t, h = row // H // T, row // H % T, row % H
    rows = row < ALL
    entries = rows[:, None] & (d[None, :] < D)
    g = tl.load(g_at + (b * gb + t * gt + h * gh)[:, None] + d[None, :] * gd, mask=entries, other=0.0).to(tl.float32)
    out = tl.load(out_at + (b * ob + t * ot + h * oh)[:, None] + d[None, :] * od, mask=entries, other=0.0)
    g_lse = tl.load(lse_at + b * lb + t * lt + h * lh, mask=rows, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(g), 1)
    none = size < TINY
    unit = g / tl.where(none, 1.0, size)[:, None]
    unit = tl.where(none[:, None], tl.where(d[None, :] == 0, 1.0, 0.0), unit)
    size = tl.where(none, TINY, size)
    step = g_lse / size / tl.sum(unit * unit, 1)
    at = row[:, None] * D + d[None, :]
    tl.store(
        new_g_at + at, tl.where(none[:, None], unit * size[:, None], g).to(new_g_at.dtype.element_ty), mask=entries
    )
    moved = out.to(tl.float32) - unit * step[:, None]
    tl.store(moved_at + at, moved.to(moved_at.dtype.element_ty), mask=entries)


def carry(g_out: Tensor, out: Tensor, g_lse: Tensor, tiny: float) -> tuple[Tensor, Tensor]:
    """Return the result of `flash_rows.carry`; `tiny` is the length of dO in rows where it is 0."""
    batch, heads, queries, size = out.shape
    # The order of memory in which the fused kernels return and take them.
    new_g, moved = (
        torch.empty(batch, queries, heads, size, dtype=x.dtype, device=x.device).transpose(1, 2) for x in (g_out, out)
    )
    rows, wide = batch * heads * queries, padded(size)
    block = max(1, ENTRIES // wide)
    # Triton launches on the current device, which differs from out's in a model spread over several devices.
    with torch.cuda.device_of(out):
        carry_kernel[(triton.cdiv(rows, block),)](
            g_out, out, g_lse, new_g, moved, *g_out.stride(), *out.stride(), *g_lse.stride(), heads, queries, rows,
            D=size, TINY=tiny, BR=block, BD=wide, num_warps=4,
        )  # fmt: skip
    return new_g, moved
