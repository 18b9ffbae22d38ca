"""The inner products of the attention maps of all heads as a Triton kernel, without a map in memory.

A program takes blocks of queries. For each block of keys it recomputes the weights of every head, exp(s - L) with L
from the rows, keeps these tiles in a small buffer of its own, which stays in the cache, and multiplies them head by
head on tensor cores. Weights in half precision are kept times 2^15, so that what is below 2^-29 alone loses digits.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.health.statistics.triton_figures import FigureRows, rows_at, seen_logits
from headwise.numerics.triton_tiles import head_of, padded, tile

# Programs: about three for each multiprocessor of a large GPU, each with tiles of its own.
PROGRAMS = 396


@triton.jit
def _store_weights(
    tiles_at, first, q_at, k_at, mask_at, lse_at, valid_at, b, row, key, position, inside,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, ob, oh, ot, H, G, T, N, factor, inverse,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FORBIDDEN: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write a tile of the weights of each head of a layer behind that of head `first`."""
    i, j = tl.arange(0, BT), tl.arange(0, BN)
    for at_head in range(H):
        h = tl.cast(at_head, tl.int32)
        q = rows_at(head_of(q_at, b, h, qb, qh), position, inside, qt, qd, D, BD, UPCAST)
        k = tile(head_of(k_at, b, h // (H // G), kb, kh), key, kn, kd, N, D, BN, BD, False, UPCAST)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        mask_here = head_of(mask_at, b, h, mb, mh)
        s, seen = seen_logits(s, mask_here, row, key, position, mt, mn, T, N, inverse, MASK, CAUSAL, FORBIDDEN, BT, BN)
        valid = tl.load(valid_at + b.to(tl.int64) * ob + h * oh + (row + i) * ot, mask=inside, other=0.0)
        lse = tl.load(lse_at + (b.to(tl.int64) * H + h) * T + row + i, mask=inside, other=0.0) * 1.4426950408889634
        seen = seen & (valid[:, None] > 0.0)
        weights = tl.where(seen, tl.exp2(s * factor - lse[:, None]), 0.0) * UNIT
        at = tiles_at + (first + h) * (BT * BN) + (i[:, None] * BN + j[None, :])
        tl.store(at, weights.to(tiles_at.dtype.element_ty))


@triton.jit
def products_kernel(
    q_at, k_at, mask_at, lse_at, valid_at, q2_at, k2_at, mask2_at, lse2_at, valid2_at,
    position_at, tiles_at, out_at,
    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, ob, oh, ot,
    qb2, qh2, qt2, qd2, kb2, kh2, kn2, kd2, mb2, mh2, mt2, mn2, ob2, oh2, ot2,
    pb, H, G, H2, G2, T, N, factor, inverse, factor2, inverse2, ITEMS, PARTS,
    D: tl.constexpr, MASK: tl.constexpr, MASK2: tl.constexpr, BEFORE: tl.constexpr, CAUSAL: tl.constexpr,
    FORBIDDEN: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the inner products of all pairs of heads (BH, BH), for one part of the queries of a sample at a time."""
    blocks = tl.cdiv(T, BT)
    head, entry = tl.arange(0, BH), tl.arange(0, BC)
    tiles_at += tl.program_id(0).to(tl.int64) * (BH * BT * BN)
    for item in range(tl.program_id(0), ITEMS, tl.num_programs(0)):
        b = tl.cast(item // PARTS, tl.int32)
        total = tl.zeros([BH, BH], tl.float32)
        # Every so many-th block, so that causal parts are about equally long.
        for block in range(item % PARTS, blocks, PARTS):
            row = block * BT
            i = row + tl.arange(0, BT)
            inside = i < T
            position = tl.load(position_at + b * pb + i, mask=inside, other=0).to(tl.int32)
            end = N
            if CAUSAL:
                end = tl.minimum(N, tl.max(position, 0) + 1)
            for key in range(0, end, BN):
                _store_weights(
                    tiles_at, 0, q_at, k_at, mask_at, lse_at, valid_at, b, row, key, position, inside,
                    qb, qh, qt, qd, kb, kh, kn, kd, mb, mh, mt, mn, ob, oh, ot, H, G, T, N, factor, inverse,
                    D, MASK, CAUSAL, FORBIDDEN, UNIT, PRECISION, UPCAST, BT, BN, BD,
                )  # fmt: skip
                if BEFORE:
                    _store_weights(
                        tiles_at, H, q2_at, k2_at, mask2_at, lse2_at, valid2_at, b, row, key, position, inside,
                        qb2, qh2, qt2, qd2, kb2, kh2, kn2, kd2, mb2, mh2, mt2, mn2, ob2, oh2, ot2,
                        H2, G2, T, N, factor2, inverse2,
                        D, MASK2, CAUSAL, FORBIDDEN, UNIT, PRECISION, UPCAST, BT, BN, BD,
                    )  # fmt: skip
                # What other threads of the program wrote.
                tl.debug_barrier()
                for start in range(0, BT * BN, BC):
                    at = tiles_at + head[:, None] * (BT * BN) + (start + entry)[None, :]
                    weights = tl.load(at, mask=head[:, None] < H + H2, other=0.0)
                    total += tl.dot(weights, tl.trans(weights), input_precision=PRECISION)
                tl.debug_barrier()
        out = out_at + tl.cast(item, tl.int64) * (BH * BH) + head[:, None] * BH + head[None, :]
        tl.store(out, total / (UNIT * UNIT))


def settings(dtype: torch.dtype, size: int) -> dict[str, int]:
    """Return block sizes whose tiles fit the shared memory of sm_80 (163 KiB)."""
    wide = padded(size) > 128
    rows, keys = (16, 32) if dtype == torch.float32 else (32, 32 if wide else 64)
    return {"BT": rows, "BN": keys, "BC": 128 if dtype == torch.float32 else 256, "num_warps": 4, "num_stages": 1}


def head_products(rows: FigureRows, lse: Tensor, before: FigureRows | None, lse_before: Tensor | None) -> Tensor:
    """Return the inner products of flattened maps over valid queries, (B, H + H', H + H') in fp32.

    `lse` are the log-sum-exps (B, H, R) of the rows. `before` and `lse_before` (B, H', R) are those of another layer at
    the same positions, with the same head size, or None.
    """
    q, k = rows.q, rows.k
    other, lse_other = (rows, lse) if before is None or lse_before is None else (before, lse_before)
    mask, strides, (heads, groups, queries, keys, factor), constants = rows.arguments()
    mask2, strides2, (heads2, groups2, _, _, factor2), constants2 = other.arguments()
    valid, valid2 = rows.valid.expand(rows.shape), other.valid.expand(other.shape)
    both = heads + (0 if before is None else heads2)
    width = max(16, triton.next_power_of_2(both))
    chosen = settings(q.dtype, q.shape[-1])
    parts = max(1, min(triton.cdiv(queries, chosen["BT"]), PROGRAMS // q.shape[0]))
    items = q.shape[0] * parts
    programs = min(items, PROGRAMS)
    half = q.dtype != torch.float32
    out = torch.empty(q.shape[0], parts, width, width, device=q.device, dtype=torch.float32)
    tiles = torch.empty(
        programs, width, chosen["BT"] * chosen["BN"], dtype=torch.float16 if half else torch.float32, device=q.device
    )
    with torch.cuda.device_of(q):
        products_kernel[(programs,)](
            q, k, mask, lse, valid, other.q, other.k, mask2, lse_other, valid2, rows.positions, tiles, out,
            *strides[:-1], *valid.stride(), *strides2[:-1], *valid2.stride(), strides[-1],
            heads, groups, 0 if before is None else heads2, groups2, queries, keys,
            factor, 1 / rows.scale, factor2, 1 / other.scale, items, parts,
            MASK2=constants2["MASK"], BEFORE=before is not None, UNIT=2.0**15 if half else 1.0,
            BD=padded(q.shape[-1]), BH=width, **constants, **chosen,
        )  # fmt: skip
    return out.sum(1)[:, :both, :both]
