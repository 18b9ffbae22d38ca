"""The figures of the rows of attention as Triton kernels: one pass over the keys, and one over the queries for columns.

Per query, over the keys but the query's own (`OWN`), with x = s - m, e = exp(x) and the running maximum m: z = Σe,
u = Σe·x, Σe·|i - j|, Σe over a text; with e rounded as v is, Σe, Σe·‖v_j‖² and Σe·v_j; and Σc, Σc² of the logits about
that of the mean key. A new maximum m' multiplies sums of e by a = exp(m - m') and turns u into a·(u + (m - m')·z). The
own key joins at the end, where the program writes the figures themselves, so that nothing else runs on whole rows.
Columns are sums over queries of exp(s - L), with L from the rows.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.masked import MASKED
from headwise.numerics.triton_tiles import blocks_of, head_of, mask_tile, padded, place, precision, readable, tile

# What `figures` writes for each query, in this order.
WRITTEN = ("top", "entropy", "peak", "distance", "centred", "on_text", "roughness", "lse", "descent")
# Where the kernels write -1e30 for the logit of a forbidden key, it is finite so that differences stay numbers.


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), exact to rounding for x far below 0."""
    t = tl.exp(-tl.abs(x))
    one = 1.0 + t
    small = tl.where(one == 1.0, t, tl.log(one) * t / tl.where(one == 1.0, 1.0, one - 1.0))
    return tl.maximum(x, 0.0) + small


@triton.jit
def rows_at(at, index, inside, s0, s1, SIZE: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr):
    """Return the rows `index` (BT,) of a matrix with SIZE columns as (BT, BD), zeros where not `inside`."""
    column = tl.arange(0, BD)
    pointers = at + index.to(tl.int64)[:, None] * s0 + column[None, :] * s1
    x = tl.load(pointers, mask=inside[:, None] & (column[None, :] < SIZE), other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def seen_logits(
    s, mask_at, row, key, position, mt, mn, T, N, inverse,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, FORBIDDEN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile with an additive mask, and which keys its queries may see."""
    at = key + tl.arange(0, BN)
    seen = (at[None, :] < N) & (position[:, None] >= 0)
    if CAUSAL:
        seen = seen & (at[None, :] <= position[:, None])
    if MASK != 0:
        entries = mask_tile(mask_at, row, key, mt, mn, T, N, BT, BN)
        if MASK == 1:
            seen = seen & (entries != 0)
        else:
            seen = seen & (entries > FORBIDDEN)
            # Logits are kept before the factor.
            s += tl.where(seen, entries.to(tl.float32), 0.0) * inverse
    return s, seen


@triton.jit
def middles_kernel(
    k_at, v_at, real_at, middle_at, rounded_at, length_at, unit_at,
    kb, kh, kn, kd, vb, vh, vn, vd, rb, rn, G, N,
    D: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, REAL: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Write the mean key of one head of one sample; its values about their mean, in their unit, and squared lengths."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    k_at, v_at = head_of(k_at, b, g, kb, kh), head_of(v_at, b, g, vb, vh)
    middle, largest, count = tl.zeros([BD], tl.float32), tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    real_at += b.to(tl.int64) * rb
    for key in range(0, N, BN):
        at = key + tl.arange(0, BN)
        real = at < N
        if REAL:
            # Padding may hold any value.
            real = real & (tl.load(real_at + at * rn, mask=real, other=0) != 0)
        count += real.to(tl.float32)
        middle += tl.sum(rows_at(k_at, at, real, kn, kd, D, BD, True), 0)
        if VALUES:
            largest = tl.maximum(largest, tl.max(tl.abs(rows_at(v_at, at, real, vn, vd, DV, BDV, True)), 1))
    d = tl.arange(0, BD)
    tl.store(middle_at + tl.program_id(0) * D + d, middle / N, mask=d < D)
    if VALUES:
        most = tl.max(largest, 0)
        # The power of two in its exponent; 1 for zeros and what is not finite.
        unit = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
        total = tl.zeros([BDV], tl.float32)
        for key in range(0, N, BN):
            at = key + tl.arange(0, BN)
            real = at < N
            if REAL:
                real = real & (tl.load(real_at + at * rn, mask=real, other=0) != 0)
            total += tl.sum(rows_at(v_at, at, real, vn, vd, DV, BDV, True) / unit, 0)
        mean = total / tl.maximum(tl.sum(count, 0), 1.0)
        d = tl.arange(0, BDV)
        first = tl.program_id(0).to(tl.int64) * N
        for key in range(0, N, BN):
            at = key + tl.arange(0, BN)
            real = at < N
            if REAL:
                real = real & (tl.load(real_at + at * rn, mask=real, other=0) != 0)
            about = rows_at(v_at, at, real, vn, vd, DV, BDV, True) / unit - mean[None, :]
            rounded = tl.where(d[None, :] < DV, about, 0.0).to(rounded_at.dtype.element_ty)
            inside = (at[:, None] < N) & (d[None, :] < DV)
            tl.store(rounded_at + (first + at)[:, None] * DV + d[None, :], rounded, mask=inside)
            wide = rounded.to(tl.float32)
            tl.store(length_at + first + at, tl.sum(wide * wide, 1), mask=at < N)
        tl.store(unit_at + tl.program_id(0), unit)


@triton.jit
def _add_tile(
    m, z, u, far, c1, c2, lengths, text, weight, mixed,
    q, shift, k_at, v_at, square_at, mask_at, row, key, position, kn, kd, mt, mn, T, N, factor, inverse, first, last,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, SPREAD: tl.constexpr, TEXT: tl.constexpr, WHOLE: tl.constexpr, FORBIDDEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the sums with one tile of keys added; `factor` is the logits' factor times log2(e)."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    at = key + tl.arange(0, BN)
    if not WHOLE:
        s, seen = seen_logits(s, mask_at, row, key, position, mt, mn, T, N, inverse, MASK, CAUSAL, FORBIDDEN, BT, BN)
    if OWN and (not WHOLE or not CAUSAL):
        others = at[None, :] != position[:, None]
        seen = seen & others if not WHOLE else others
    # Whole tiles of a causal call end before the own key.
    PART: tl.constexpr = not WHOLE or (OWN and not CAUSAL)
    if SPREAD:
        c = s - shift[:, None]
        if PART:
            c = tl.where(seen, c, 0.0)
        c1 += tl.sum(c, 1)
        c2 += tl.sum(c * c, 1)
    if PART:
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    step = (m - top) * factor
    a = tl.exp2(step)
    x = s * factor - (top * factor)[:, None]
    e = tl.exp2(x)
    if not KEYS:
        if PART:
            x = tl.where(seen, x, 0.0)
        u = a * (u + step * z) + tl.sum(e * x, 1)
        z = a * z + tl.sum(e, 1)
        gap = tl.abs(position[:, None].to(tl.float32) - at[None, :].to(tl.float32))
        far = a * far + tl.sum(e * gap, 1)
    if TEXT:
        text = a * text + tl.sum(tl.where((at >= first) & (at < last), e, 0.0), 1)
    if OWN:
        v = tile(v_at, key, DV, 1, N, DV, BN, BDV, WHOLE, False)
        # All three with the same rounded weights, so that equal values cancel.
        rounded = e.to(v.dtype)
        e = rounded.to(tl.float32)
        if not KEYS:
            square = tl.load(square_at + at, mask=at < N, other=0.0)
            lengths = a * lengths + tl.sum(e * square[None, :], 1)
        weight = a * weight + tl.sum(e, 1)
        mixed = mixed * a[:, None] + tl.dot(rounded, v, input_precision=PRECISION)
    return top, z, u, far, c1, c2, lengths, text, weight, mixed


@triton.jit
def _cosine(own, mixed, other_mixed):
    """Return the cosine of the differences between own values and two mixtures of others, each (BT, BDV)."""
    one, two = own - mixed, own - other_mixed
    size = tl.sqrt(tl.sum(own * own, 1))
    # 0 where a difference is no longer than the rounding of its two parts.
    first_size = size + tl.sqrt(tl.sum((own - one) * (own - one), 1))
    second_size = size + tl.sqrt(tl.sum(other_mixed * other_mixed, 1))
    first_length, second_length = tl.sqrt(tl.sum(one * one, 1)), tl.sqrt(tl.sum(two * two, 1))
    moved = (first_length > 4.8e-7 * first_size) & (second_length > 4.8e-7 * second_size)
    cosine = tl.sum(one * two, 1) / tl.where(moved, first_length * second_length, 1.0)
    return tl.where(moved, tl.minimum(tl.maximum(cosine, -1.0), 1.0), 0.0)


@triton.jit
def _own_logits(
    q, own_k, mask_at, i, position, inside, mt, mn, N, inverse, MASK: tl.constexpr, FORBIDDEN: tl.constexpr
):
    """Return the logits of queries and their own keys, (BT,), before the scale, and which of these keys they see."""
    own = tl.sum(q.to(tl.float32) * own_k, 1)
    seen = inside
    if MASK != 0:
        at = mask_at + i.to(tl.int64) * mt + position.to(tl.int64) * mn
        entry = tl.load(at, mask=inside & (position < N), other=0)
        if MASK == 1:
            seen = entry != 0
        else:
            seen = entry > FORBIDDEN
            own += tl.where(seen, entry.to(tl.float32), 0.0) * inverse
    return own, seen


@triton.jit
def rows_kernel(
    q_at, k_at, v_at, square_at, unit_at, mask_at, position_at, middle_at, count_at, mixed_at, out_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, pb, cb, ch, ct,
    H, G, T, N, factor, scale, inverse, first, last, ROWS,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, MIXED: tl.constexpr, SPREAD: tl.constexpr, TEXT: tl.constexpr,
    FORBIDDEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Write the figures of one block of queries of one head.

    OWN: with values, of the keys but the own. MIXED: keep Σ_j A_ij v_j of the others for the kernel with KEYS, in which
    keys are the queries, and which writes only the cosine of both directions.
    """
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        # The longest rows first, so that none is left at the end.
        block = blocks - 1 - block
    row = block * BT
    i = row + tl.arange(0, BT)
    inside = i < T
    position = tl.load(position_at + b * pb + i, mask=inside, other=0).to(tl.int32)
    group = b.to(tl.int64) * G + h // (H // G)
    k_at, mask_at = head_of(k_at, b, h // (H // G), kb, kh), head_of(mask_at, b, h, mb, mh)
    if KEYS:
        q = rows_at(k_at, position, inside, kn, kd, D, BD, UPCAST)
    else:
        q = rows_at(head_of(q_at, b, h, qb, qh), position, inside, qt, qd, D, BD, UPCAST)
    v_at, square_at = v_at + group * N * DV, square_at + group * N
    at = (b.to(tl.int64) * H + h) * T + i
    shift = tl.zeros([BT], tl.float32)
    if SPREAD:
        d = tl.arange(0, BD)
        middle = tl.load(middle_at + group * D + d, mask=d < D, other=0.0)
        shift = tl.sum(q.to(tl.float32) * middle[None, :], 1)
        shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)
    m = tl.full([BT], -1.0e30, tl.float32)
    z, u, far = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    c1, c2 = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    lengths, text, weight = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    mixed = tl.zeros([BT, BDV], tl.float32)
    end = N
    whole = N
    if CAUSAL:
        end = tl.minimum(N, tl.max(position, 0) + 1)
        whole = tl.minimum(N, tl.min(tl.where(inside, position, N), 0))
    if MASK != 0:
        whole = 0
    whole = whole // BN * BN
    for CUT in tl.static_range(2):
        for key in range(whole if CUT else 0, end if CUT else whole, BN):
            m, z, u, far, c1, c2, lengths, text, weight, mixed = _add_tile(
                m, z, u, far, c1, c2, lengths, text, weight, mixed,
                q, shift, k_at, v_at, square_at, mask_at, row, key, position, kn, kd, mt, mn, T, N, factor, inverse,
                first, last, D, DV, MASK, CAUSAL, OWN, KEYS, SPREAD, TEXT, not CUT, FORBIDDEN, PRECISION, UPCAST,
                BT, BN, BD, BDV,
            )  # fmt: skip
    out_at += at
    d = tl.arange(0, BDV)
    mixed_at += at[:, None] * DV + d[None, :]
    whole_rows = inside[:, None] & (d[None, :] < DV)
    if OWN:
        mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        own_v = rows_at(v_at, position, inside, DV, 1, DV, BDV, True)
    if KEYS:
        of_queries = tl.load(mixed_at, mask=whole_rows, other=0.0)
        tl.store(out_at + 8 * ROWS, _cosine(own_v, of_queries, mixed), mask=inside)
    else:
        if MIXED:
            tl.store(mixed_at, mixed, mask=whole_rows)
        any_key = z > 0.0
        total = tl.where(any_key, z, 1.0)
        log_total = tl.log(total)
        top = tl.where(any_key, m * scale, -1.0e30)
        lse = tl.where(any_key, top + log_total, -1.0e30)
        # u counts in log2.
        entropy = tl.maximum(log_total - 0.6931471805599453 * u / total, 0.0)
        distance, on_text = far / total, text / total
        if OWN:
            own_k = rows_at(k_at, position, inside, kn, kd, D, BD, True)
            own, seen = _own_logits(q, own_k, mask_at, i, position, inside, mt, mn, N, inverse, MASK, FORBIDDEN)
            centre = tl.where(seen, own - shift, 0.0)
            c1 += centre
            c2 += centre * centre
            own = tl.where(seen, own * scale, -1.0e30)
            # The entropy of the choice between the own key and the others, and that among these.
            margin = lse - own
            share = tl.where(margin >= 0.0, 1.0, tl.exp(tl.minimum(margin, 0.0))) / (1.0 + tl.exp(-tl.abs(margin)))
            alone = tl.where(margin >= 0.0, tl.exp(-tl.maximum(margin, 0.0)), 1.0) / (1.0 + tl.exp(-tl.abs(margin)))
            entropy = share * (entropy + softplus(-margin)) + alone * softplus(margin)
            distance, on_text = distance * share, on_text * share
            if TEXT:
                on_text += tl.where((position >= first) & (position < last), alone, 0.0)
            top, lse = tl.maximum(top, own), tl.maximum(lse, own) + softplus(-tl.abs(margin))
            own_square = tl.load(square_at + position, mask=inside, other=0.0)
            squares = own_square + lengths / tl.where(weight == 0.0, 1.0, weight) - 2 * tl.sum(own_v * mixed, 1)
            unit = tl.load(unit_at + group)
            tl.store(out_at + 6 * ROWS, share * unit * tl.maximum(squares, 0.0) * unit, mask=inside)
        count = tl.load(count_at + b.to(tl.int64) * cb + h * ch + i * ct, mask=inside, other=1.0)
        spread = tl.maximum(c2 - c1 * c1 / tl.maximum(count, 1.0), 0.0)
        tl.store(out_at, top, mask=inside)
        tl.store(out_at + ROWS, entropy, mask=inside)
        tl.store(out_at + 2 * ROWS, tl.exp(top - lse), mask=inside)
        tl.store(out_at + 3 * ROWS, distance, mask=inside)
        tl.store(out_at + 4 * ROWS, scale * tl.sqrt(spread), mask=inside)
        tl.store(out_at + 5 * ROWS, on_text, mask=inside)
        tl.store(out_at + 7 * ROWS, lse, mask=inside)


@triton.jit
def columns_kernel(
    q_at, k_at, mask_at, position_at, lse_at, valid_at, column_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, pb, ob, oh, ot,
    H, G, T, N, factor, inverse,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, ORDERED: tl.constexpr, FORBIDDEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the mean over valid queries of the weights of one block of keys."""
    block, b, h = place(tl.cdiv(N, BN), H)
    key = block * BN
    k = tile(head_of(k_at, b, h // (H // G), kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
    q_at, mask_at = head_of(q_at, b, h, qb, qh), head_of(mask_at, b, h, mb, mh)
    lse_at += (b.to(tl.int64) * H + h) * T
    valid_at += b.to(tl.int64) * ob + h * oh
    total, count = tl.zeros([BN], tl.float32), tl.zeros([BT], tl.float32)
    start = 0
    if CAUSAL and ORDERED:
        # Query i is at position i: earlier ones see none of these keys.
        start = key // BT * BT
        for row in range(0, start, BT):
            count += tl.load(valid_at + (row + tl.arange(0, BT)) * ot)
    for row in range(start, T, BT):
        i = row + tl.arange(0, BT)
        valid = tl.load(valid_at + i * ot, mask=i < T, other=0.0)
        count += valid
        position = tl.load(position_at + b * pb + i, mask=i < T, other=0).to(tl.int32)
        # In units of log2.
        lse = tl.load(lse_at + i, mask=i < T, other=0.0) * 1.4426950408889634
        q = rows_at(q_at, position, i < T, qt, qd, D, BD, UPCAST)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, seen = seen_logits(s, mask_at, row, key, position, mt, mn, T, N, inverse, MASK, CAUSAL, FORBIDDEN, BT, BN)
        seen = seen & (valid[:, None] > 0.0)
        total += tl.sum(tl.where(seen, tl.exp2(s * factor - lse[:, None]), 0.0), 0)
    at = key + tl.arange(0, BN)
    mean = total / tl.maximum(tl.sum(count, 0), 1.0)
    tl.store(column_at + (b.to(tl.int64) * H + h) * N + at, mean, mask=at < N)


@dataclass(frozen=True)
class FigureRows:
    """The queries, keys and masks that the kernels read.

    Attributes:
        q, k: (B, H, T, D), (B, Hkv, N, D).
        mask: (B|1, H|1, R|1, N) of the queries that are read, bool, or added to the logits; a key at or below `MASKED`
            is forbidden. None for all.
        positions: (B|1, R), the places of the queries that are read, among q and among the keys, ascending.
        counts: (B|1, 1|H, R) how many keys each of them may see.
        valid: (B, 1|H, R) 1 for a query that counts, else 0.
        causal: whether a query sees only the keys up to its position.
        scale: factor of the logits, above 0.
        ordered: whether all queries are read.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    positions: Tensor
    counts: Tensor
    valid: Tensor
    causal: bool
    scale: float
    ordered: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (B, H, R)."""
        return (*self.q.shape[:2], self.positions.shape[1])

    def arguments(self) -> tuple[Tensor, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
        """Return the mask, all strides, the sizes and factors, and the constants of a launch."""
        q, k = self.q, self.k
        mask, strides, kind = readable(self.mask, q[:, :, : self.shape[2]], k)
        step = self.positions.stride(0) if self.positions.shape[0] > 1 else 0
        sizes = (q.shape[1], k.shape[1], self.shape[2], k.shape[2], self.scale * 1.4426950408889634)
        constants = {"D": q.shape[-1], "MASK": kind, "CAUSAL": self.causal, "FORBIDDEN": MASKED, **precision(q.dtype)}
        return mask, (*q.stride(), *k.stride(), *strides, step), sizes, constants


def settings(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return block sizes whose tiles fit the shared memory of sm_80 (163 KiB)."""
    if dtype == torch.float32:
        rows, keys = (32, 32) if size <= 64 else (16, 16)
        return {"BT": rows, "BN": keys, "num_warps": 4, "num_stages": 2 if size <= 128 else 1}
    if size <= 64:
        return {"BT": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    keys, warps, stages = (64, 8, 2) if size <= 128 else (32, 4, 1)
    return {"BT": 64, "BN": keys, "num_warps": warps, "num_stages": stages}


def _middles(rows: FigureRows, v: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean key of each head (B, Hkv, D); with `v`, its values about their mean (B, Hkv, N, Dv) in their unit
    (B, Hkv), rounded as products take them, and their squared lengths (B, Hkv, N)."""
    k = rows.k
    values = k if v is None else v
    middle = torch.empty(*k.shape[:2], k.shape[3], device=k.device, dtype=torch.float32)
    # fp16 has more digits than bf16, and these values are of size 1.
    dtype = torch.float32 if k.dtype == torch.float32 else torch.float16
    rounded = middle if v is None else torch.empty(v.shape, dtype=dtype, device=k.device)
    lengths = middle if v is None else torch.empty(v.shape[:3], device=k.device, dtype=torch.float32)
    unit = middle if v is None else torch.empty(v.shape[:2], device=k.device, dtype=torch.float32)
    counted = k if real is None else real.view(torch.uint8)
    middles_kernel[(k.shape[0] * k.shape[1],)](
        k, values, counted, middle, rounded, lengths, unit,
        *k.stride(), *values.stride(), *(counted.stride()[:2] if real is not None else (0, 0)), k.shape[1], k.shape[2],
        D=k.shape[3], DV=values.shape[3], VALUES=v is not None, REAL=real is not None,
        BN=64, BD=padded(k.shape[3]), BDV=padded(values.shape[3]), num_warps=8,
    )  # fmt: skip
    return middle, rounded, lengths, unit


def figures(
    rows: FigureRows, v: Tensor | None, real: Tensor | None, text: slice | None, *, centred: bool, descent: bool
) -> Tensor:
    """Return the figures `WRITTEN` of each row, (9, B, H, R) in fp32; those that were not asked for hold anything.

    Args:
        v: the values (B, Hkv, N, Dv) of self attention, for "roughness" and "descent", or None.
        real: which keys are real tokens, bool (B, N); None for all.
        text: the keys of a text, for "on_text".
    """
    q, k = rows.q, rows.k
    mask, strides, (heads, groups, queries, keys, factor), constants = rows.arguments()
    out = torch.empty(len(WRITTEN), *rows.shape, device=q.device, dtype=torch.float32)
    own = v is not None
    size_v = 16 if v is None else v.shape[-1]
    mixed = torch.empty(*rows.shape, size_v, device=q.device, dtype=torch.float32) if descent else out
    counts = rows.counts.expand(rows.shape)
    chosen = settings(q.dtype, max(q.shape[-1], size_v))
    grid = blocks_of(out[0][..., None], chosen["BT"])
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        middle = rounded = lengths = unit = out
        if own or centred:
            middle, rounded, lengths, unit = _middles(rows, v, real)
        for by_keys in (False, True) if descent else (False,):
            rows_kernel[grid](
                q, k, rounded, lengths, unit, mask, rows.positions, middle, counts, mixed, out,
                *strides, *counts.stride(), heads, groups, queries, keys, factor, rows.scale, 1 / rows.scale,
                0 if text is None else text.start, 0 if text is None else text.stop, out[0].numel(),
                DV=size_v, OWN=own, KEYS=by_keys, MIXED=descent and not by_keys, SPREAD=centred and not by_keys,
                TEXT=text is not None and not by_keys,
                BD=padded(q.shape[-1]), BDV=padded(size_v), **constants, **chosen,
            )  # fmt: skip
    return out


def columns(rows: FigureRows, lse: Tensor) -> Tensor:
    """Return the mean over valid queries of the weights of each key, (B, H, N) in fp32, from `lse` (B, H, R)."""
    q, k = rows.q, rows.k
    mask, strides, (heads, groups, queries, keys, factor), constants = rows.arguments()
    out = torch.empty(*q.shape[:2], keys, device=q.device, dtype=torch.float32)
    valid = rows.valid.expand(rows.shape)
    chosen = settings(q.dtype, q.shape[-1])
    with torch.cuda.device_of(q):
        columns_kernel[(triton.cdiv(keys, chosen["BN"]) * q.shape[0] * q.shape[1],)](
            q, k, mask, rows.positions, lse, valid, out, *strides, *valid.stride(),
            heads, groups, queries, keys, factor, 1 / rows.scale,
            ORDERED=rows.ordered, BD=padded(q.shape[-1]), **constants, **chosen,
        )  # fmt: skip
    return out
