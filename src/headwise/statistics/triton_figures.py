"""The figures of the rows of attention as Triton kernels: one pass over the keys, and one over the queries for columns.

Per query, over the keys but the query's own (`OWN`), with x = s - m, e = exp(x) and the running maximum m: z = Σe,
u = Σe·x, Σe·|i - j|, Σe over a text; with e rounded as v is, Σe, Σe·‖v_j‖² and Σe·v_j; and Σc, Σc² of the logits about
a given number of each row. A new maximum m' multiplies sums of e by a = exp(m - m') and turns u into
a·(u + (m - m')·z). The own key, and the figures themselves, follow in a few operations on whole rows. Columns are sums
over queries of exp(s - L), with L from the rows.
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

from headwise.attention.triton_tiles import (
    blocks_of,
    head_of,
    mask_tile,
    padded,
    place,
    plain,
    precision,
    readable,
    tile,
)
from headwise.core.masked import MASKED

# The largest logit of a row without keys: finite, so that differences stay numbers.
NONE = -1.0e30
# What `rows` writes for each query, in this order.
SUMS = ("top", "total", "fall", "distance", "sum", "squares", "lengths", "text", "weight")


@triton.jit
def _seen(
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
def _add_tile(
    m, z, u, far, c1, c2, lengths, text, weight, mixed,
    q, shift, k_at, v_at, square_at, mask_at, row, key, position, kn, kd, mt, mn, T, N, factor, inverse, first, last,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    SPREAD: tl.constexpr, TEXT: tl.constexpr, WHOLE: tl.constexpr, FORBIDDEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Return the sums with one tile of keys added; `factor` is the logits' factor times log2(e)."""
    k = tile(k_at, key, kn, kd, N, D, BN, BD, WHOLE, UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    at = key + tl.arange(0, BN)
    if not WHOLE:
        s, seen = _seen(s, mask_at, row, key, position, mt, mn, T, N, inverse, MASK, CAUSAL, FORBIDDEN, BT, BN)
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
        square = tl.load(square_at + at, mask=at < N, other=0.0)
        lengths = a * lengths + tl.sum(e * square[None, :], 1)
        weight = a * weight + tl.sum(e, 1)
        mixed = mixed * a[:, None] + tl.dot(rounded, v, input_precision=PRECISION)
    return top, z, u, far, c1, c2, lengths, text, weight, mixed


@triton.jit
def rows_kernel(
    q_at, k_at, v_at, square_at, mask_at, position_at, shift_at, sums_at, mixed_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, pb,
    H, G, T, N, factor, inverse, first, last, ROWS,
    D: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    SPREAD: tl.constexpr, TEXT: tl.constexpr, FORBIDDEN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Write the sums of one block of queries of one head."""
    blocks = tl.cdiv(T, BT)
    block, b, h = place(blocks, H)
    if CAUSAL:
        # The longest rows first, so that none is left at the end.
        block = blocks - 1 - block
    row = block * BT
    i = row + tl.arange(0, BT)
    inside = i < T
    position = tl.load(position_at + b * pb + i, mask=inside, other=0)
    q = tile(head_of(q_at, b, h, qb, qh), row, qt, qd, T, D, BT, BD, False, UPCAST)
    group = b.to(tl.int64) * (H // G) + h // G
    k_at, mask_at = head_of(k_at, b, h // G, kb, kh), head_of(mask_at, b, h, mb, mh)
    v_at, square_at = v_at + group * N * DV, square_at + group * N
    at = (b.to(tl.int64) * H + h) * T + i
    shift = tl.load(shift_at + at, mask=inside, other=0.0)
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
    for key in range(0, whole, BN):
        m, z, u, far, c1, c2, lengths, text, weight, mixed = _add_tile(
            m, z, u, far, c1, c2, lengths, text, weight, mixed,
            q, shift, k_at, v_at, square_at, mask_at, row, key, position, kn, kd, mt, mn, T, N, factor, inverse,
            first, last, D, DV, MASK, CAUSAL, OWN, SPREAD, TEXT, True, FORBIDDEN, PRECISION, UPCAST, BT, BN, BD, BDV,
        )  # fmt: skip
    for key in range(whole, end, BN):
        m, z, u, far, c1, c2, lengths, text, weight, mixed = _add_tile(
            m, z, u, far, c1, c2, lengths, text, weight, mixed,
            q, shift, k_at, v_at, square_at, mask_at, row, key, position, kn, kd, mt, mn, T, N, factor, inverse,
            first, last, D, DV, MASK, CAUSAL, OWN, SPREAD, TEXT, False, FORBIDDEN, PRECISION, UPCAST, BT, BN, BD, BDV,
        )  # fmt: skip
    at = sums_at + at
    tl.store(at, m, mask=inside)
    tl.store(at + ROWS, z, mask=inside)
    tl.store(at + 2 * ROWS, u, mask=inside)
    tl.store(at + 3 * ROWS, far, mask=inside)
    tl.store(at + 4 * ROWS, c1, mask=inside)
    tl.store(at + 5 * ROWS, c2, mask=inside)
    tl.store(at + 6 * ROWS, lengths, mask=inside)
    tl.store(at + 7 * ROWS, text, mask=inside)
    tl.store(at + 8 * ROWS, weight, mask=inside)
    if OWN:
        d = tl.arange(0, BDV)
        at = mixed_at + ((b.to(tl.int64) * H + h) * T + i)[:, None] * DV + d[None, :]
        tl.store(at, mixed / tl.where(weight == 0.0, 1.0, weight)[:, None], mask=inside[:, None] & (d[None, :] < DV))


@triton.jit
def columns_kernel(
    q_at, k_at, mask_at, position_at, lse_at, column_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, pb,
    H, G, T, N, factor, inverse,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, ORDERED: tl.constexpr, FORBIDDEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the sums over queries of the weights of one block of keys; a query whose log-sum-exp is inf has none."""
    block, b, h = place(tl.cdiv(N, BN), H)
    key = block * BN
    k = tile(head_of(k_at, b, h // G, kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
    q_at, mask_at = head_of(q_at, b, h, qb, qh), head_of(mask_at, b, h, mb, mh)
    lse_at += (b.to(tl.int64) * H + h) * T
    total = tl.zeros([BN], tl.float32)
    start = 0
    if CAUSAL and ORDERED:
        # Query i is at position i: earlier ones see none of these keys.
        start = key // BT * BT
    for row in range(start, T, BT):
        i = row + tl.arange(0, BT)
        position = tl.load(position_at + b * pb + i, mask=i < T, other=0)
        # In units of log2.
        lse = tl.load(lse_at + i, mask=i < T, other=float("inf")) * 1.4426950408889634
        q = tile(q_at, row, qt, qd, T, D, BT, BD, False, UPCAST)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, seen = _seen(s, mask_at, row, key, position, mt, mn, T, N, inverse, MASK, CAUSAL, FORBIDDEN, BT, BN)
        seen = seen & (lse[:, None] != float("inf"))
        total += tl.sum(tl.where(seen, tl.exp2(s * factor - lse[:, None]), 0.0), 0)
    at = key + tl.arange(0, BN)
    tl.store(column_at + (b.to(tl.int64) * H + h) * N + at, total, mask=at < N)


@dataclass(frozen=True)
class Rows:
    """The queries, keys and masks that the kernels read.

    Attributes:
        q, k: (B, H, R, D), (B, Hkv, N, D).
        mask: (B|1, H|1, R|1, N) bool, or added to the logits; a key at or below `MASKED` is forbidden. None for all.
        positions: (B|1, R) int32, the position of each query among the keys, ascending.
        causal: whether a query sees only the keys up to its position.
        scale: factor of the logits, above 0.
        ordered: whether the query of row i is at position i.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    positions: Tensor
    causal: bool
    scale: float
    ordered: bool

    def arguments(self) -> tuple[Tensor, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
        """Return the mask, all strides, the sizes and factors, and the constants of a launch."""
        q, k = self.q, self.k
        mask, strides, kind = readable(self.mask, q, k)
        heads, step = q.shape[1], self.positions.stride(0) if self.positions.shape[0] > 1 else 0
        sizes = (heads, heads // k.shape[1], q.shape[2], k.shape[2], self.scale * 1.4426950408889634, 1 / self.scale)
        constants = {"D": q.shape[-1], "MASK": kind, "CAUSAL": self.causal, "FORBIDDEN": MASKED, **precision(q.dtype)}
        return mask, (*q.stride(), *k.stride(), *strides, step), sizes, constants


def supports(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return whether the kernels read these queries, keys and values."""
    return plain(q, k, v) and scale > 0


def settings(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return block sizes whose tiles fit the shared memory of sm_80 (163 KiB)."""
    if dtype == torch.float32:
        rows, keys = (32, 32) if size <= 64 else (16, 16)
    else:
        rows, keys = (64, 64) if size <= 64 else (64, 32)
    return {"BT": rows, "BN": keys, "num_warps": 4, "num_stages": 2 if size <= 128 else 1}


def sums(
    rows: Rows, values: Tensor | None, lengths: Tensor | None, shift: Tensor | None, text: slice | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the sums of each row, (B, H, R) in fp32 by name, and Σe·v_j / Σe, (B, H, R, Dv), where values are given.

    Args:
        rows: the queries and keys.
        values: (B, Hkv, N, Dv) in the dtype of the product; then the sums leave out each query's own key.
        lengths: ‖v_j‖², (B, Hkv, N) in fp32, with `values`.
        shift: (B, H, R) in fp32, a logit of each row before the factor, about which "sum" and "squares" are taken.
        text: the keys of a text.
    """
    q, k = rows.q, rows.k
    shape = q.shape[:3]
    mask, strides, sizes, constants = rows.arguments()
    out = torch.empty(len(SUMS), *shape, device=q.device)
    own = values is not None
    size_v = 16 if values is None else values.shape[-1]
    mixed = torch.empty(*shape, size_v, device=q.device) if own else out
    chosen = settings(q.dtype, max(q.shape[-1], size_v))
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        rows_kernel[blocks_of(q, chosen["BT"])](
            q, k, values if own else q, lengths if own else out, mask, rows.positions,
            out if shift is None else shift, out, mixed,
            *strides, *sizes, 0 if text is None else text.start, 0 if text is None else text.stop, out[0].numel(),
            DV=size_v, OWN=own, SPREAD=shift is not None, TEXT=text is not None,
            BD=padded(q.shape[-1]), BDV=padded(size_v), **constants, **chosen,
        )  # fmt: skip
    return dict(zip(SUMS, out, strict=True)), mixed if own else None


def columns(rows: Rows, lse: Tensor) -> Tensor:
    """Return the sums over queries of the weights of each key, (B, H, N) in fp32.

    `lse` (B, H, R) is the log-sum-exp of each row, and inf for a query that does not count.
    """
    q, k = rows.q, rows.k
    mask, strides, sizes, constants = rows.arguments()
    out = torch.empty(*q.shape[:2], k.shape[2], device=q.device)
    chosen = settings(q.dtype, q.shape[-1])
    with torch.cuda.device_of(q):
        columns_kernel[(triton.cdiv(k.shape[2], chosen["BN"]) * q.shape[0] * q.shape[1],)](
            q, k, mask, rows.positions, lse, out, *strides, *sizes,
            ORDERED=rows.ordered, BD=padded(q.shape[-1]), **constants, **chosen,
        )  # fmt: skip
    return out
