"""The operators of `means` as Triton kernels: sums of chunks of rows, then one pass over them.

A program holds a chunk of rows (T, D) of one head of one sample. The mean over keys, or over the keys up to each query,
comes from the sums of the chunks before it and a scan inside it; backward runs the same way from the end. Chunks are
added in a fixed order.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.triton_head_rows import rows, strides, total

# What moves rows to their mean: one share, a gain per head, two gains per channel (`means`).
SHARE, HEADS, CHANNELS = 0, 1, 2
# Rows and columns of a program, of 256 threads.
CHUNK, COLUMNS = 128, 64


@triton.jit
def _program(H, T, BT: tl.constexpr, BD: tl.constexpr):
    """Return the chunk, sample, head and first column of this program."""
    chunks = tl.cdiv(T, BT)
    place = tl.program_id(0) // chunks
    return tl.program_id(0) % chunks, (place // H).to(tl.int64), (place % H).to(tl.int64), tl.program_id(1) * BD


@triton.jit
def _chunk_of(at, b, h, first, column, sb, sh, st, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return rows from `first` and columns from `column` on, (BT, BD) in fp32 with zeros outside."""
    row, d = tl.arange(0, BT), column + tl.arange(0, BD)
    places = at + b * sb + h * sh + first.to(tl.int64) * st + row[:, None] * st + d[None, :]
    return tl.load(places, mask=(first + row[:, None] < T) & (d[None, :] < D), other=0.0).to(tl.float32)


@triton.jit
def _store_chunk(at, x, b, h, first, column, sb, sh, st, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    row, d = tl.arange(0, BT), column + tl.arange(0, BD)
    places = at + b * sb + h * sh + first.to(tl.int64) * st + row[:, None] * st + d[None, :]
    tl.store(places, x.to(at.dtype.element_ty), mask=(first + row[:, None] < T) & (d[None, :] < D))


@triton.jit
def _sum_of_chunks(at, head, chunks, first, last, column, D: tl.constexpr, BD: tl.constexpr):
    """Return the sum of the chunks' sums (B·H, chunks, D) from `first` to before `last`, (BD,)."""
    d = column + tl.arange(0, BD)
    found = tl.zeros([BD], tl.float32)
    for start in tl.range(first, last, 16):
        i = start + tl.arange(0, 16)
        places = at + (head * chunks + i[:, None]) * D + d[None, :]
        found += tl.sum(tl.load(places, mask=(i[:, None] < last) & (d[None, :] < D), other=0.0), 0)
    return found


@triton.jit
def sums_kernel(
    x_at, out_at, sb, sh, st, H, T,
    WEIGHTED: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the sum of each chunk of rows; WEIGHTED divides row i by i + 1."""
    chunk, b, h, column = _program(H, T, BT, BD)
    first = chunk * BT
    x = _chunk_of(x_at, b, h, first, column, sb, sh, st, T, D, BT, BD)
    if WEIGHTED:
        x = x / (first + tl.arange(0, BT) + 1).to(tl.float32)[:, None]
    d = column + tl.arange(0, BD)
    tl.store(out_at + tl.program_id(0).to(tl.int64) * D + d, tl.sum(x, 0), mask=d < D)


@triton.jit
def _factors(share_at, second_at, number, h, d, KIND: tl.constexpr, KEYED: tl.constexpr, D: tl.constexpr):
    """Return the factors of the rows and of their mean, (1,) or (BD,)."""
    if KIND == 0:
        share = number
        if KEYED:
            share = tl.load(share_at).to(tl.float32)
        own = 1.0 - share
    elif KIND == 1:
        share = -tl.load(share_at + h).to(tl.float32)
        own = 1.0 - share
    else:
        rest = tl.load(second_at + d, mask=d < D, other=0.0).to(tl.float32)
        share = tl.load(share_at + d, mask=d < D, other=0.0).to(tl.float32) - rest
        own = 1.0 + rest
    return own, share


@triton.jit
def towards_kernel(
    o_at, v_at, y_at, sums_at, share_at, second_at, number, sb, sh, st, vb, vh, vt, yb, yh, yt, H, T, N, chunks,
    KIND: tl.constexpr, KEYED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write own·o + share·mean; `sums_at` has the sums of the chunks of v."""
    chunk, b, h, column = _program(H, T, BT, BD)
    first, d = chunk * BT, column + tl.arange(0, BD)
    own, share = _factors(share_at, second_at, number, h, d, KIND, KEYED, D)
    o = _chunk_of(o_at, b, h, first, column, sb, sh, st, T, D, BT, BD)
    if CAUSAL:
        v = _chunk_of(v_at, b, h, first, column, vb, vh, vt, T, D, BT, BD)
        before = _sum_of_chunks(sums_at, b * H + h, chunks, 0, chunk, column, D, BD)
        mean = (tl.cumsum(v, 0) + before[None, :]) / (first + tl.arange(0, BT) + 1).to(tl.float32)[:, None]
    else:
        mean = (_sum_of_chunks(sums_at, b * H + h, chunks, 0, chunks, column, D, BD) / N)[None, :]
    if KIND == 2:
        y = own[None, :] * o + share[None, :] * mean
    else:
        y = own * o + share * mean
    _store_chunk(y_at, y, b, h, first, column, yb, yh, yt, T, D, BT, BD)


@triton.jit
def towards_back_kernel(
    g_at, o_at, v_at, do_at, dv_at, sums_at, grads_at, part_at, share_at, second_at, number,
    gb, gh, gt, sb, sh, st, vb, vh, vt, db, dh, dt, eb, eh, et, H, T, N, chunks,
    KIND: tl.constexpr, KEYED: tl.constexpr, CAUSAL: tl.constexpr, SAME: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of o and of v, of the gains each program's part; `grads_at` has the sums of the chunks of g.

    Not causal, the gradient of v is the same for all keys: one row. SAME: o is v, and its gradient holds both.
    """
    chunk, b, h, column = _program(H, T, BT, BD)
    first, d = chunk * BT, column + tl.arange(0, BD)
    own_chunks = tl.cdiv(T, BT)
    own, share = _factors(share_at, second_at, number, h, d, KIND, KEYED, D)
    g = _chunk_of(g_at, b, h, first, column, gb, gh, gt, T, D, BT, BD)
    if CAUSAL:
        # Value i is part of the means of query i and all later ones.
        weighted = g / (first + tl.arange(0, BT) + 1).to(tl.float32)[:, None]
        after = _sum_of_chunks(grads_at, b * H + h, own_chunks, chunk + 1, own_chunks, column, D, BD)
        later = tl.cumsum(weighted, 0, reverse=True) + after[None, :]
        _store_chunk(dv_at, share * later, b, h, first, column, eb, eh, et, T, D, BT, BD)
        _store_chunk(do_at, own * g, b, h, first, column, db, dh, dt, T, D, BT, BD)
        if KIND == 1:
            o = _chunk_of(o_at, b, h, first, column, sb, sh, st, T, D, BT, BD)
            v = _chunk_of(v_at, b, h, first, column, vb, vh, vt, T, D, BT, BD)
            part = tl.sum(tl.sum(g * o - v * later, 1), 0)
            tl.store(part_at + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), part)
    else:
        whole = _sum_of_chunks(grads_at, b * H + h, own_chunks, 0, own_chunks, column, D, BD)
        if KIND == 2:
            do = own[None, :] * g
        else:
            do = own * g
        if SAME:
            do += (share * whole / N)[None, :]
        _store_chunk(do_at, do, b, h, first, column, db, dh, dt, T, D, BT, BD)
        if not SAME:
            row = (share * whole / N).to(dv_at.dtype.element_ty)
            tl.store(dv_at + b * eb + h * eh + d, row, mask=(d < D) & (chunk == 0))
        if KIND != 0:
            mean = _sum_of_chunks(sums_at, b * H + h, chunks, 0, chunks, column, D, BD) / N
            o = _chunk_of(o_at, b, h, first, column, sb, sh, st, T, D, BT, BD)
            inside = first + tl.arange(0, BT)[:, None] < T
            along = tl.where(inside, g * (o - mean[None, :]), 0.0)
            if KIND == 1:
                part = tl.sum(tl.sum(along, 1), 0)
                tl.store(part_at + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), part)
            else:
                at = part_at + tl.program_id(0).to(tl.int64) * 2 * D + d
                tl.store(at, tl.where(chunk == 0, mean * whole, 0.0), mask=d < D)
                tl.store(at + D, tl.sum(along, 0), mask=d < D)


def sums(x: Tensor, weighted: bool) -> Tensor:
    """Return the sums of the chunks of rows of x (B, H, T, D), (B, H, chunks, D) in fp32."""
    grid, constants = _grid(x)
    chunks = triton.cdiv(x.shape[2], constants["BT"])
    out = torch.empty(*x.shape[:2], chunks, x.shape[3], dtype=torch.float32, device=x.device)
    sums_kernel[grid](x, out, *strides(x), x.shape[1], x.shape[2], WEIGHTED=weighted, **constants)
    return out


def _grid(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    columns = min(COLUMNS, triton.next_power_of_2(x.shape[3]))
    grid = (triton.cdiv(x.shape[2], CHUNK) * x.shape[0] * x.shape[1], triton.cdiv(x.shape[3], columns))
    return grid, {"D": x.shape[3], "BT": CHUNK, "BD": columns, "num_warps": 8}


def towards(o: Tensor, v: Tensor, gains: Sequence[Tensor], number: float, kind: int, causal: bool, y: Tensor) -> Tensor:
    """Fill y with o moved to the mean of v, and return the sums of the chunks of v."""
    o, v = rows(o), rows(v)
    grid, constants = _grid(o)
    with torch.cuda.device_of(o):
        of_v = sums(v, False)
        towards_kernel[grid](
            o, v, y, of_v, *_readable(gains, o), number, *strides(o, v, y), o.shape[1], o.shape[2], v.shape[2],
            of_v.shape[2], KIND=kind, KEYED=bool(gains), CAUSAL=causal, **constants,
        )  # fmt: skip
    return of_v


def towards_backward(
    g: Tensor,
    o: Tensor,
    v: Tensor,
    of_v: Tensor,
    gains: Sequence[Tensor],
    number: float,
    kind: int,
    causal: bool,
    keys: int,
    same: bool,
    made: Sequence[Tensor],
) -> None:
    """Fill `made`: the gradients of o, of v unless it is the same, and of the gains.

    Not causal, the gradient of v is one row for all keys. Two gains per channel have one gradient, (2, D).
    """
    g, o, v = rows(g), rows(o), rows(v)
    grid, constants = _grid(o)
    with torch.cuda.device_of(o):
        of_g = sums(g, causal)
        part, dv = g, made[0 if same else 1]
        if kind == HEADS:
            part = torch.empty(grid, dtype=torch.float32, device=g.device)
        if kind == CHANNELS:
            part = torch.empty(grid[0], 2, o.shape[3], dtype=torch.float32, device=g.device)
        towards_back_kernel[grid](
            g, o, v, made[0], dv, of_v, of_g, part, *_readable(gains, o), number,
            *strides(g, o, v, made[0], dv), o.shape[1], o.shape[2], keys, of_v.shape[2],
            KIND=kind, KEYED=bool(gains), CAUSAL=causal, SAME=same, **constants,
        )  # fmt: skip
        if kind == HEADS:
            total(part, made[-1], o.shape[0], part.numel() // (o.shape[0] * o.shape[1]))
        if kind == CHANNELS:
            made[-1].copy_(part.sum(0))


def _readable(gains: Sequence[Tensor], o: Tensor) -> tuple[Tensor, Tensor]:
    """Return two addresses of gains; those that are not given are never read."""
    return (gains[0] if gains else o), (gains[1] if len(gains) > 1 else o)
