"""Triton kernels of `sink_rows`: outputs and totals lowered in place, and the gradient of the sinks' logits."""

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
def lower_kernel(
    out_at, lse_at, sinks_at, ob, oh, ot, lb, lh, H, T, ALL,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Overwrite rows of the output and of the log-sum-exp; rows are taken in the order (B, T, H) of memory."""
    row, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    b, t, h = row // H // T, row // H % T, row % H
    rows = row < ALL
    at = out_at + (b * ob + t * ot + h * oh)[:, None] + d[None, :]
    entries = rows[:, None] & (d[None, :] < D)
    out = tl.load(at, mask=entries, other=0.0).to(tl.float32)
    lse = tl.load(lse_at + b * lb + h * lh + t, mask=rows, other=0.0)
    sink = tl.load(sinks_at + h, mask=rows, other=0.0).to(tl.float32)
    # log(exp(lse) + exp(sink)), from the larger of both: neither exponential overflows
    total = tl.maximum(lse, sink) + tl.log(1 + tl.exp(-tl.abs(lse - sink)))
    tl.store(at, (out * tl.exp(lse - total)[:, None]).to(out_at.dtype.element_ty), mask=entries)
    tl.store(lse_at + b * lb + h * lh + t, total, mask=rows)


@triton.jit
def slope_kernel(
    g_at, out_at, total_at, sinks_at, partial_at, gb, gh, gt, gd, ob, oh, ot, od, tb, th, H, T, BLOCKS, PARTS,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum -exp(s - T) <dO, O> over the tokens of one block of a head."""
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    t, d = block.to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    rows = t < T
    entries = rows[:, None] & (d[None, :] < D)
    g = tl.load(g_at + b * gb + h * gh + t[:, None] * gt + d[None, :] * gd, mask=entries, other=0.0).to(tl.float32)
    out = tl.load(out_at + b * ob + h * oh + t[:, None] * ot + d[None, :] * od, mask=entries, other=0.0)
    total = tl.load(total_at + b * tb + h * th + t, mask=rows, other=float("inf"))
    sink = tl.load(sinks_at + h).to(tl.float32)
    product = tl.sum(g * out.to(tl.float32), 1)
    tl.store(partial_at + h * PARTS + b * BLOCKS + block, -tl.sum(tl.exp(sink - total) * product, 0))


def lowered(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `sink_rows.lowered`, in the memory of `out` and `lse`, which are the caller's own."""
    batch, heads, queries, size = out.shape
    rows, wide = batch * heads * queries, padded(size)
    block = max(1, ENTRIES // wide)
    # Triton launches on the current device, which differs from out's in a model spread over several devices.
    with torch.cuda.device_of(out):
        lower_kernel[(triton.cdiv(rows, block),)](
            out, lse, sinks.contiguous(), *out.stride()[:3], *lse.stride()[:2], heads, queries, rows,
            D=size, BR=block, BD=wide, num_warps=4,
        )  # fmt: skip
    return out, lse


def slopes(g_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the result of `sink_rows.slopes`, of partial sums in a fixed order."""
    batch, heads, queries, size = out.shape
    wide = padded(size)
    block = max(1, ENTRIES // wide)
    blocks = triton.cdiv(queries, block)
    partial = torch.empty(heads, batch * blocks, dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        slope_kernel[(blocks * batch * heads,)](
            g_out, out, total, sinks.contiguous(), partial, *g_out.stride(), *out.stride(), *total.stride()[:2],
            heads, queries, blocks, batch * blocks, D=size, BR=block, BD=wide, num_warps=4,
        )  # fmt: skip
    return partial.sum(1).to(sinks.dtype)
