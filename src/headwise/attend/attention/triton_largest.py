"""The largest logit of each head as a Triton kernel: products of queries and keys, and their running maximum.

max over allowed (i, j) of scale·q_i·k_j, without exp, sums or values: about a third of the instructions of a fused
forward. No logit of a block of queries exceeds scale·max‖q_i‖·max‖k_j‖ (Cauchy and Schwarz), so a block that cannot
pass the caller's `enough` is not read further. Maxima do not depend on their order: results repeat to the bit.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.kernels import plain
from headwise.numerics.triton_tiles import (
    blocks_of,
    head_of,
    inside,
    mask_tile,
    padded,
    place,
    precision,
    readable,
    spans,
    tile,
)

# Keys whose largest norm one program finds, and the keys of its tiles.
CHUNK, ROWS = 1024, 64


@triton.jit
def norms_kernel(
    k_at, norm_at, kb, kh, kn, kd, HEADS, N, CHUNKS,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the largest norm of each chunk of keys of each head, (B, Hkv, CHUNKS). A nan has no norm."""
    chunk, b, h = place(CHUNKS, HEADS)
    k_at = head_of(k_at, b, h, kb, kh)
    square = tl.zeros([BN], tl.float32)
    for start in range(chunk * CHUNK, tl.minimum(N, (chunk + 1) * CHUNK), BN):
        k = tile(k_at, start, kn, kd, N, D, BN, BD, False, True)
        square = tl.maximum(square, tl.sum(k * k, 1))
    tl.store(norm_at + tl.program_id(0), tl.sqrt(tl.max(square, 0)))


@triton.jit
def _higher(
    best, q, k_at, mask_at, query, key, kn, kd, mt, mn, T, N,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return `best` raised by the products of one tile, entry by entry: the maximum along keys is taken once, after."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not WHOLE:
        seen = inside(query, key, N, BT, BN, CAUSAL)
        if MASK != 0:
            seen = seen & (mask_tile(mask_at, query, key, mt, mn, T, N, BT, BN) != 0)
        s = tl.where(seen, s, float("-inf"))
    return tl.maximum(best, s)


@triton.jit
def largest_kernel(
    q_at, k_at, mask_at, real_at, norm_at, top_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, rb, rt,
    H, G, T, N, CHUNKS, scale, enough,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Raise the largest logit of a head to that of one block of queries."""
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        # The longest rows first, so that none is left at the end.
        block = blocks - 1 - block
    query = block * BT
    q = tile(head_of(q_at, b, h, qb, qh), query, qt, qd, T, D, BT, BD, False, UPCAST)
    counted = query + tl.arange(0, BT) < T
    if REAL:
        counted = counted & (tl.load(real_at + b.to(tl.int64) * rb + (query + tl.arange(0, BT)) * rt, counted, 0) != 0)
    reach = float("inf")
    if BOUNDED:
        chunk = tl.arange(0, BC)
        norms = tl.load(norm_at + (b.to(tl.int64) * (H // G) + h // G) * CHUNKS + chunk, chunk < CHUNKS, 0.0)
        wide = q.to(tl.float32)
        square = tl.where(counted, tl.sum(wide * wide, 1), 0.0)
        reach = tl.sqrt(tl.max(square, 0)) * tl.max(norms, 0) * scale
    if not (reach <= enough):
        k_at, mask_at = head_of(k_at, b, h // G, kb, kh), head_of(mask_at, b, h, mb, mh)
        best = tl.full([BT, BN], float("-inf"), tl.float32)
        whole, last = spans(query, T, N, BT, BN, CAUSAL, MASK)
        for CUT in tl.static_range(2):
            for key in range(whole if CUT else 0, last if CUT else whole, BN):
                best = _higher(best, q, k_at, mask_at, query, key, kn, kd, mt, mn, T, N,
                               D, MASK, CAUSAL, not CUT, PRECISION, UPCAST, BT, BN, BD)  # fmt: skip
        reach = tl.max(tl.where(counted, tl.max(best, 1), float("-inf")), 0) * scale
    tl.atomic_max(top_at + b * H + h, reach)


def supports(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernels read these tensors."""
    return plain(q, k)


def settings(dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Return block sizes whose tiles fit the shared memory of sm_80 (163 KiB)."""
    wide = padded(size)
    if dtype == torch.float32:
        rows, keys, warps, stages = (64, 32, 4, 2) if wide <= 64 else (32, 32, 4, 2) if wide == 128 else (16, 16, 4, 1)
    else:
        rows, keys, warps, stages = (128, 128, 8, 3) if wide <= 64 else (128, 64, 8, 2)
    return {"BT": rows, "BN": keys, "BD": wide, "num_warps": warps, "num_stages": stages}


def largest(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, real: Tensor | None, enough: float
) -> Tensor:
    """Return the result of `largest_logits.largest_logits` for tensors that `supports` accepts."""
    (batch, heads, queries, size), groups, keys = q.shape, k.shape[1], k.shape[2]
    top = torch.full((batch, heads), float("-inf"), device=q.device, dtype=torch.float32)
    mask, strides, kind = readable(mask, q, k)
    counted = q if real is None else real.view(torch.uint8).expand(batch, queries)
    chunks, bounded = triton.cdiv(keys, CHUNK), enough > float("-inf")
    norms = torch.empty(batch, groups, chunks, device=q.device, dtype=torch.float32) if bounded else top
    chosen = settings(q.dtype, size)
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        if bounded:
            norms_kernel[(batch * groups * chunks,)](
                k, norms, *k.stride(), groups, keys, chunks, D=size, BN=ROWS, BD=chosen["BD"], CHUNK=CHUNK
            )
        largest_kernel[blocks_of(q, chosen["BT"])](
            q, k, mask, counted, norms, top,
            *q.stride(), *k.stride(), *strides, *counted.stride()[:2],
            heads, heads // groups, queries, keys, chunks, scale, enough,
            D=size, MASK=kind, CAUSAL=causal, REAL=real is not None, BOUNDED=bounded,
            **precision(q.dtype), BC=triton.next_power_of_2(chunks), **chosen,
        )  # fmt: skip
    return top
