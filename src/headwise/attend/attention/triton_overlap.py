"""The overlap of heads in columns and its gradients as Triton kernels, in strips of queries: O(T) memory.

With G_h = A_h A_h^T and S = sum over heads of G_h, the overlap of a sample is (||S||^2 - sum ||G_h||^2) / 2, and the
gradient of A_h is 2 (S - G_h) A_h. For one strip of queries after another:

- `grams_kernel` multiplies tiles of weights to the strip's rows of every G_h, and sums them over heads;
- `rests_kernel` replaces G_h by S - G_h and writes d = 2 rowsum((S - G_h) G_h) of each row, whose sum is four times the
  overlap, and which is rowsum(A dA) of the softmax;
- `slopes_kernel` multiplies the strip's rows of S - G_h with weights to dA, writes A (dA - d), the gradients
  of the logits, and multiplies them with the keys;
- `keys_kernel` multiplies them with the queries and adds the result to what earlier strips gave.

The weights are those of some samples, stored in memory of a fixed size (`triton_strips`), or computed again in each
tile where one sample has too many. Sums are in a fixed order: there are no atomics, and results repeat to the bit.
Weights in half precision are taken times 2^15, so that what is below 2^-29 alone loses digits.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.strips import part_of, rows_of_a_strip, step_of, strips
from headwise.attend.attention.triton_strips import levels, row_end, weights, write_weights
from headwise.numerics.triton_tiles import head_of, padded, place, precision, readable, tile

# Programs that fill a large GPU: their registers leave room for one on each multiprocessor.
PROGRAMS = 132
# Weights in half precision are taken times this.
UNIT = 2.0**15


@triton.jit
def _stored(p_at, row, key, T, N, STEP, CAUSAL: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Return a tile (BT, BN) of the stored weights of one head."""
    i, n = row + tl.arange(0, BT), key + tl.arange(0, BN)
    there = (i < T)[:, None] & (n[None, :] < row_end(i, N, CAUSAL)[:, None])
    return tl.load(p_at + i.to(tl.int64)[:, None] * STEP + n[None, :], mask=there, other=0.0)


@triton.jit
def grams_kernel(
    q_at, k_at, mask_at, lse_at, real_at, sink_at, p_at, gram_at, sum_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, rb, rt,
    H, G, T, N, factor, PSTEP, start, ROWS, BLOCKS, STEP,
    D: tl.constexpr, STORED: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr,
    SINK: tl.constexpr, UNIT: tl.constexpr, KEPT: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write a block of the Gram matrix of every head times KEPT, (B, H, ROWS, STEP), and of their sum."""
    other_blocks = tl.cdiv(T, BT)
    at = tl.program_id(0) // other_blocks
    other = tl.program_id(0) % other_blocks * BT
    row = start + at % BLOCKS * BT
    b = at // BLOCKS
    i, j = row - start + tl.arange(0, BT), other + tl.arange(0, BT)
    end = N
    if CAUSAL:
        # Of two rows, the first sees the keys that both see.
        end = tl.minimum(N, tl.minimum(row, other) + BT)
    places = i[:, None] * STEP + j[None, :]
    written = (i[:, None] < ROWS) & (j[None, :] < STEP)
    total = tl.zeros([BT, BT], tl.float32)
    for at_head in range(H):
        h = tl.cast(at_head, tl.int32)
        q = tile(head_of(q_at, b, h, qb, qh), row, qt, qd, T, D, BT, BD, False, UPCAST)
        p = tile(head_of(q_at, b, h, qb, qh), other, qt, qd, T, D, BT, BD, False, UPCAST)
        k_here, mask_here = head_of(k_at, b, h // (H // G), kb, kh), head_of(mask_at, b, h, mb, mh)
        level = levels(lse_at, real_at, sink_at, b, h, row, H, T, rb, rt, REAL, SINK, BT)
        other_level = levels(lse_at, real_at, sink_at, b, h, other, H, T, rb, rt, REAL, SINK, BT)
        gram = tl.zeros([BT, BT], tl.float32)
        for key in range(0, end, BN):
            if STORED:
                p_here = p_at + (b.to(tl.int64) * H + h) * T * PSTEP
                one = _stored(p_here, row, key, T, N, PSTEP, CAUSAL, BT, BN)
                two = _stored(p_here, other, key, T, N, PSTEP, CAUSAL, BT, BN)
            else:
                k = tile(k_here, key, kn, kd, N, D, BN, BD, False, UPCAST)
                one = weights(q, k, level, mask_here, row, key, mt, mn, T, N, factor, MASK, CAUSAL, PRECISION, BT, BN)
                two = weights(
                    p, k, other_level, mask_here, other, key, mt, mn, T, N, factor, MASK, CAUSAL, PRECISION, BT, BN
                )
                one, two = one * UNIT, two * UNIT
                if HALF:
                    one, two = one.to(tl.float16), two.to(tl.float16)
            gram += tl.dot(one, tl.trans(two), input_precision=PRECISION)
        gram = gram * (KEPT / (UNIT * UNIT))
        gram_here = gram_at + (b.to(tl.int64) * H + h) * ROWS * STEP
        tl.store(gram_here + places, gram.to(gram_at.dtype.element_ty), mask=written)
        total += gram
    tl.store(sum_at + b.to(tl.int64) * ROWS * STEP + places, total, mask=written)


@triton.jit
def rests_kernel(
    gram_at, sum_at, delta_at, H, T, start, ROWS, STEP, KEPT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Replace the rows of the Gram matrices by those of the other heads, and write their products, (B, H, T)."""
    block, b, h = place(tl.cdiv(ROWS, BT), H)
    i = block * BT + tl.arange(0, BT)
    gram_at += (b.to(tl.int64) * H + h) * ROWS * STEP
    sum_at += b.to(tl.int64) * ROWS * STEP
    total = tl.zeros([BT], tl.float32)
    for other in range(0, STEP, BN):
        j = other + tl.arange(0, BN)
        places = i[:, None] * STEP + j[None, :]
        written = (i[:, None] < ROWS) & (j[None, :] < STEP)
        gram = tl.load(gram_at + places, mask=written, other=0.0).to(tl.float32)
        # Rounded as the products below take it, so that the two parts of a gradient cancel.
        rest = tl.load(sum_at + places, mask=written, other=0.0) - gram
        rest = rest.to(gram_at.dtype.element_ty)
        tl.store(gram_at + places, rest, mask=written)
        total += tl.sum(rest.to(tl.float32) * gram, 1)
    tl.store(delta_at + (b.to(tl.int64) * H + h) * T + start + i, total * (2.0 / (KEPT * KEPT)), mask=i < ROWS)


@triton.jit
def slopes_kernel(
    q_at, k_at, mask_at, lse_at, real_at, sink_at, p_at, rest_at, delta_at, slope_at, dq_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, rb, rt,
    H, G, T, N, factor, PSTEP, scale, start, ROWS, BLOCKS, STEP, SLOPES, SPLITS, SPLIT_STEP,
    D: tl.constexpr, STORED: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr,
    SINK: tl.constexpr, UNIT: tl.constexpr, KEPT: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, EXACT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the logits of a block of queries, (B, H, ROWS, SLOPES), and of its queries.

    A program takes every SPLITS-th block of keys; its part of the queries' gradients is (B, H, T, D).
    """
    block, b, h = place(BLOCKS * SPLITS, H)
    split, block = block % SPLITS, block // SPLITS
    row = start + block * BT
    i, j, n, d = block * BT + tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BN), tl.arange(0, BD)
    q_here, k_here = head_of(q_at, b, h, qb, qh), head_of(k_at, b, h // (H // G), kb, kh)
    mask_here = head_of(mask_at, b, h, mb, mh)
    at = b.to(tl.int64) * H + h
    p_at += at * T * PSTEP
    rest_at += at * ROWS * STEP
    slope_at += at * ROWS * SLOPES
    q = tile(q_here, row, qt, qd, T, D, BT, BD, False, UPCAST)
    level = levels(lse_at, real_at, sink_at, b, h, row, H, T, rb, rt, REAL, SINK, BT)
    delta = tl.load(delta_at + at * T + start + i, mask=i < ROWS, other=0.0)
    dq = tl.zeros([BT, BD], tl.float32)
    for key in range(split * BN, SLOPES, SPLITS * BN):
        slope = tl.zeros([BT, BN], tl.float32)
        k = tile(k_here, key, kn, kd, N, D, BN, BD, False, UPCAST)
        first = 0
        last = T
        if CAUSAL:
            # Earlier queries see none of these keys, and neither do these if they are earlier.
            first = key
            last = tl.where(key < row + BT, T, 0)
        for other in range(first, last, BN):
            if STORED:
                a = _stored(p_at, other, key, T, N, PSTEP, CAUSAL, BN, BN)
            else:
                p = tile(q_here, other, qt, qd, T, D, BN, BD, False, UPCAST)
                other_level = levels(lse_at, real_at, sink_at, b, h, other, H, T, rb, rt, REAL, SINK, BN)
                a = weights(
                    p, k, other_level, mask_here, other, key, mt, mn, T, N, factor, MASK, CAUSAL, PRECISION, BN, BN
                )
                a *= UNIT
                if HALF:
                    a = a.to(tl.float16)
            rest = tl.load(
                rest_at + i[:, None] * STEP + (other + j)[None, :],
                mask=(i[:, None] < ROWS) & ((other + j)[None, :] < STEP), other=0.0,
            )  # fmt: skip
            slope += tl.dot(rest, a, input_precision=PRECISION)
        if STORED:
            a = _stored(p_at, row, key, T, N, PSTEP, CAUSAL, BT, BN).to(tl.float32) * (1.0 / UNIT)
        else:
            a = weights(q, k, level, mask_here, row, key, mt, mn, T, N, factor, MASK, CAUSAL, PRECISION, BT, BN)
        slope = a * (slope * (2.0 / (UNIT * KEPT)) - delta[:, None])
        rounded = slope.to(slope_at.dtype.element_ty)
        written = (i[:, None] < ROWS) & ((key + n)[None, :] < SLOPES)
        tl.store(slope_at + i[:, None] * SLOPES + (key + n)[None, :], rounded, mask=written)
        if EXACT:
            rounded = rounded.to(tl.float32)
        dq += tl.dot(rounded, k.to(rounded.dtype), input_precision=PRECISION)
    dq_at += split.to(tl.int64) * SPLIT_STEP + (at * T + start) * D
    written = (i[:, None] < ROWS) & (d[None, :] < D)
    tl.store(dq_at + i[:, None] * D + d[None, :], (dq * scale).to(dq_at.dtype.element_ty), mask=written)


@triton.jit
def keys_kernel(
    q_at, slope_at, dk_at, qb, qh, qt, qd, H, G, T, N, scale, start, ROWS, SLOPES,
    D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys that a strip of queries gives, (B, G, N, D) in fp32."""
    block, b, g = place(tl.cdiv(SLOPES, BN), G)
    key = block * BN
    n, d = key + tl.arange(0, BN), tl.arange(0, BD)
    dk = tl.zeros([BN, BD], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(key - start, 0) // BT * BT
    for at_head in range(H // G):
        h = tl.cast(g * (H // G) + at_head, tl.int32)
        q_here = head_of(q_at, b, h, qb, qh)
        slope_here = slope_at + (b.to(tl.int64) * H + h) * ROWS * SLOPES
        for row in range(first, ROWS, BT):
            i = row + tl.arange(0, BT)
            places = i[None, :] * SLOPES + n[:, None]
            slope = tl.load(slope_here + places, mask=(i[None, :] < ROWS) & (n[:, None] < SLOPES), other=0.0)
            q = tile(q_here, start + row, qt, qd, T, D, BT, BD, False, UPCAST)
            if EXACT:
                slope = slope.to(tl.float32)
            dk += tl.dot(slope, q.to(slope.dtype), input_precision=PRECISION)
    places = dk_at + (b.to(tl.int64) * G + g) * N * D + n[:, None] * D + d[None, :]
    written = (n[:, None] < N) & (n[:, None] < SLOPES) & (d[None, :] < D)
    tl.store(places, tl.load(places, mask=written, other=0.0) + dk * scale, mask=written)


def settings(dtype: torch.dtype, size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return block sizes of `grams_kernel`, and of the other products, that fit the shared memory of sm_80 (163 KiB).

    The larger the blocks, the fewer weights are recomputed.
    """
    if dtype == torch.float32:
        small = {"BT": 32, "BN": 32 if size <= 128 else 16, "num_warps": 4, "num_stages": 1}
        return small, small
    if size <= 128:
        both = {"BT": 128, "BN": 64, "num_warps": 8, "num_stages": 2}
        return both, both
    return ({"BT": 64, "BN": 32, "num_warps": 8, "num_stages": 1},) * 2


def head_overlap(
    q: Tensor, k: Tensor, lse: Tensor, mask: Tensor | None, real: Tensor | None, sinks: Tensor | None,
    causal: bool, scale: float, slopes: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return rowsum(A dA) (B, H, T) in fp32, and the gradients of q and k, without numbers unless `slopes`.

    A quarter of a sample's sum of the first is its overlap, whose gradients these are.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    delta = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    dq = torch.empty(q.shape if slopes else (0,), dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape if slopes else (0,), device=q.device, dtype=torch.float32)
    samples = list(strips(batch, heads, queries, keys, q.element_size()))
    if samples[0][3] < queries:
        # The weights of one sample are too many to be stored.
        _overlap(q, k, lse, mask, real, sinks, causal, scale, None, delta, dq, dk)
        return delta, dq, dk.to(k.dtype)
    for b, last, _, _ in samples:
        of_q, of_k, of_lse = (x[b:last] for x in (q, k, lse))
        of_mask, of_real = part_of(mask, b, last), part_of(real, b, last)
        half = q.dtype != torch.float32
        size = (last - b, heads, queries, step_of(keys))
        p = torch.empty(size, dtype=torch.float16 if half else torch.float32, device=q.device)
        with torch.cuda.device_of(q):
            write_weights(of_q, of_k, of_lse, of_mask, of_real, sinks, causal, scale, 0, p, UNIT if half else 1.0)
        made = (delta[b:last], dq[b:last] if slopes else dq, dk[b:last] if slopes else dk)
        _overlap(of_q, of_k, of_lse, of_mask, of_real, sinks, causal, scale, p, *made)
    return delta, dq, dk.to(k.dtype)


def _overlap(
    q: Tensor, k: Tensor, lse: Tensor, mask: Tensor | None, real: Tensor | None, sinks: Tensor | None,
    causal: bool, scale: float, p: Tensor | None, delta: Tensor, dq: Tensor, dk: Tensor,
) -> None:  # fmt: skip
    """Fill rowsum(A dA), and unless they have no numbers dq and dk, which is 0 and in fp32; p: the stored weights."""
    (batch, heads, queries, size), (groups, keys) = q.shape, k.shape[1:3]
    rows = rows_of_a_strip(batch * heads, max(queries, keys), queries, q.element_size())
    mask_read, of_mask, kind = readable(mask, q, k)
    half = q.dtype != torch.float32
    grams = torch.empty(batch, heads, rows, queries, dtype=torch.float16 if half else torch.float32, device=q.device)
    sums = torch.empty(batch, rows, queries, device=q.device, dtype=torch.float32)
    first, second = settings(q.dtype, size)
    counted = q if real is None else real.view(torch.uint8)
    of_real = (0, 0) if real is None else counted.expand(batch, queries).stride()
    # A sum over heads is at most their number.
    units = {"UNIT": UNIT, "KEPT": 2.0 ** (15 - heads.bit_length())} if half else {"UNIT": 1.0, "KEPT": 1.0}
    constants = {
        "D": size, "BD": padded(size), "MASK": kind, "CAUSAL": causal, "REAL": real is not None,
        "SINK": sinks is not None, "HALF": half, "STORED": p is not None, **units, **precision(q.dtype),
    }  # fmt: skip
    given = (q, k, mask_read, lse, counted, q if sinks is None else sinks, grams if p is None else p)
    sizes = (heads, groups, queries, keys, scale * 1.4426950408889634, 0 if p is None else p.shape[3])
    steps = (*q.stride(), *k.stride(), *of_mask, *of_real, *sizes)
    # Triton's interpreter computes bf16 products incorrectly.
    exact = precision(torch.bfloat16)["UPCAST"]
    slope, parts, splits = grams, dq, 1
    if dq.numel():
        # The gradients of logits of uniform and of collapsed weights are too far apart for fp16.
        slope_dtype = torch.bfloat16 if half else torch.float32
        slope = torch.empty(batch * heads * rows * keys, dtype=slope_dtype, device=q.device)
        splits = max(1, min(PROGRAMS // (batch * heads * triton.cdiv(rows, second["BT"])), triton.cdiv(keys, 256)))
        if splits > 1:
            parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        for start in range(0, queries, rows):
            here = min(rows, queries - start)
            blocks = triton.cdiv(here, first["BT"])
            grams_kernel[(batch * blocks * triton.cdiv(queries, first["BT"]),)](
                *given, grams, sums, *steps, start, here, blocks, queries, **constants, **first
            )
            rests_kernel[(batch * heads * triton.cdiv(here, 16),)](
                grams, sums, delta, heads, queries, start, here, queries, KEPT=units["KEPT"], BT=16, BN=128
            )
            if not dq.numel():
                continue
            blocks, seen = triton.cdiv(here, second["BT"]), min(keys, start + here) if causal else keys
            slopes_kernel[(batch * heads * blocks * splits,)](
                *given, grams, delta, slope, parts, *steps, scale, start, here, blocks, queries, seen,
                splits, q.numel(), EXACT=exact, **constants, **second,
            )  # fmt: skip
            keys_kernel[(batch * groups * triton.cdiv(seen, 64),)](
                q, slope, dk, *q.stride(), heads, groups, queries, keys, scale, start, here, seen,
                D=size, BD=padded(size), CAUSAL=causal, EXACT=exact, **precision(q.dtype),
                BT=64 if half else 32, BN=64, num_warps=4 if size <= 128 else 8, num_stages=2,
            )  # fmt: skip
    if splits > 1:
        dq.copy_(parts.sum(0))
