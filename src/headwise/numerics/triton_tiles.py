"""What the attention kernels share: tiles of tensors and masks, the program's place, and the arguments of a launch.

Addresses inside of a tile are 32-bit offsets from a 64-bit base, so that a tensor may have more than 2^31 entries.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# The kinds of mask: none, bool, additive.
NO_MASK, ALLOWED, ADDED = 0, 1, 2


@triton.jit
def place(blocks, heads):
    """Return the block of rows, the sample and the head of this program; blocks of the same head are adjacent."""
    at = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, at // heads, at % heads


@triton.jit
def head_of(at, b, h, sb, sh):
    """Return the address of one head of one sample."""
    return at + b.to(tl.int64) * sb + h.to(tl.int64) * sh


@triton.jit
def tile(
    at, first, s0, s1, ROWS, SIZE: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return rows first, …, first + BLOCK - 1 of a (ROWS, SIZE) matrix as (BLOCK, BD), with zeros outside of it.

    WHOLE: no row lies outside. UPCAST: as fp32.
    """
    row, column = tl.arange(0, BLOCK), tl.arange(0, BD)
    pointers = at + tl.cast(first, tl.int64) * s0 + (row[:, None] * s0 + column[None, :] * s1)
    if WHOLE and SIZE == BD:
        x = tl.load(pointers)
    elif WHOLE:
        x = tl.load(pointers, mask=column[None, :] < SIZE, other=0.0)
    elif SIZE == BD:
        x = tl.load(pointers, mask=first + row[:, None] < ROWS, other=0.0)
    else:
        x = tl.load(pointers, mask=(first + row[:, None] < ROWS) & (column[None, :] < SIZE), other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def mask_tile(mask_at, query, key, s0, s1, T, N, BT: tl.constexpr, BN: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Return the entries of a mask at queries from `query` and keys from `key` on, 0 outside of it.

    They come as (BT, BN), or with KEYS_FIRST as (BN, BT).
    """
    i, j = _both(tl.arange(0, BT), tl.arange(0, BN), KEYS_FIRST)
    pointers = mask_at + tl.cast(query, tl.int64) * s0 + tl.cast(key, tl.int64) * s1 + (i * s0 + j * s1)
    return tl.load(pointers, mask=(query + i < T) & (key + j < N), other=0)


@triton.jit
def _both(i, j, KEYS_FIRST: tl.constexpr):
    """Return numbers of queries (BT,) and of keys (BN,) to be broadcast to (BT, BN), or to (BN, BT)."""
    if KEYS_FIRST:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    return i, j


@triton.jit
def inside(query, key, N, BT: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Return which entries of the tile of queries from `query` and keys from `key` on are keys that a query may see.

    They come as (BT, BN), or with KEYS_FIRST as (BN, BT).
    """
    i, j = _both(query + tl.arange(0, BT), key + tl.arange(0, BN), KEYS_FIRST)
    seen = (j < N) & (i >= 0)
    if CAUSAL:
        seen = seen & (j <= i)
    return seen


@triton.jit
def spans(query, T, N, BT: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Return the ends of the keys that queries from `query` on see without and with a look at each entry.

    Tiles before the first end are whole: all their keys are seen by all queries.
    """
    last = N
    whole = N
    if CAUSAL:
        last = tl.minimum(N, tl.minimum(T, query + BT))
        whole = tl.minimum(N, query + 1)
    if MASK != 0:
        whole = 0
    return whole // BN * BN, last


def padded(size: int) -> int:
    """Return the head size of the tiles: a power of two and at least 16, as Triton's matrix product requires."""
    return max(16, triton.next_power_of_2(size))


def blocks_of(x: Tensor, rows: int) -> tuple[int]:
    """Return a grid of one program for each block of rows of each head and sample of x (B, H, T, D)."""
    # On the first axis, where CUDA allows 2^31 - 1 programs: windowed models have more windows than the 65,535 of the
    # others.
    return (triton.cdiv(x.shape[2], rows) * x.shape[0] * x.shape[1],)


def readable(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """Return a mask in the form that kernels read, its strides when expanded to (B, H, T, N), and its kind."""
    if mask is None:
        # The address is never read.
        return q, (0, 0, 0, 0), NO_MASK
    seen = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return seen, seen.expand(*q.shape[:3], k.shape[2]).stride(), ALLOWED if mask.dtype == torch.bool else ADDED


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of products in a dtype."""
    return {
        # Tensor cores round fp32 to TF32; allowed only if the user allows it for matrix products.
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        # Triton's interpreter computes bf16 products incorrectly.
        "UPCAST": bool(knobs.runtime.interpret) and dtype == torch.bfloat16,
    }
