"""The softmax of a block of products, and its gradient, as Triton kernels: one pass each, a row to a program."""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Longest row.
LONGEST = 8192


@triton.jit
def softmax_kernel(
    s_at, allowed_at, p_at, ab, at, an, scale, T, N, start,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the softmax of scale·s over the keys that a row may see, 0 for a row without any."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    key = tl.arange(0, BLOCK)
    seen = key < N
    if CAUSAL:
        seen = seen & (key <= t + start)
    if MASKED:
        seen = seen & (tl.load(allowed_at + b * ab + t * at + key * an, mask=seen, other=0) != 0)
    s = tl.load(s_at + row * N + key, mask=seen, other=float("-inf")).to(tl.float32) * scale
    s = tl.where(seen, s, float("-inf"))
    top = tl.max(s, 0)
    e = tl.where(seen, tl.exp(s - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    z = tl.sum(e, 0)
    p = e / tl.where(z == 0.0, 1.0, z)
    tl.store(p_at + row * N + key, p.to(p_at.dtype.element_ty), mask=key < N)


@triton.jit
def slope_kernel(dp_at, p_at, ds_at, scale, N, BLOCK: tl.constexpr):
    """Write scale·p(dp - Σ p·dp), the gradient of s."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, BLOCK)
    dp = tl.load(dp_at + row * N + key, mask=key < N, other=0.0).to(tl.float32)
    p = tl.load(p_at + row * N + key, mask=key < N, other=0.0).to(tl.float32)
    ds = p * (dp - tl.sum(p * dp, 0)) * scale
    tl.store(ds_at + row * N + key, ds.to(ds_at.dtype.element_ty), mask=key < N)


def softmax(s: Tensor, allowed: Tensor | None, causal: bool, scale: float, start: int, p: Tensor) -> None:
    """Fill p (B, t, N) with the softmax of scale·s; `allowed` is broadcastable, query 0 of the block is `start`."""
    seen = None if allowed is None else allowed.view(torch.uint8).expand(s.shape)
    steps = (0, 0, 0) if seen is None else seen.stride()
    with torch.cuda.device_of(s):
        softmax_kernel[(s.shape[0] * s.shape[1],)](
            s, s if seen is None else seen, p, *steps, scale, s.shape[1], s.shape[2], start,
            CAUSAL=causal, MASKED=seen is not None, **_block(s),
        )  # fmt: skip


def slope(dp: Tensor, p: Tensor, scale: float, ds: Tensor) -> None:
    """Fill ds (B, t, N) with the gradient of the products, from that of the weights p."""
    with torch.cuda.device_of(dp):
        slope_kernel[(dp.shape[0] * dp.shape[1],)](dp, p, ds, scale, dp.shape[2], **_block(dp))


def _block(s: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(s.shape[2])
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}
