"""The operator of `linear` as Triton kernels: one pass over the tokens in forward, two in backward.

With φ(x) = elu(x) + 1, a = φ(q) and b = share·φ(k): out_i = Σ_j (a_i·b_j) v_j / z_i with z_i = Σ_j a_i·b_j, over all
keys j, or causally j ≤ i. A program walks over the tokens of one head and holds the sum of b vᵀ so far, (D, DV) in
fp32; a chunk's own keys are added by their weights. With n = dO / z and c = -(dO·O) / z the gradients are
da_i = Σ_j (n_i·v_j + c_i) b_j, db_j = Σ_i (n_i·v_j + c_i) a_i and dv_j = Σ_i (a_i·b_j) n_i: a pass from the start for
the queries, and one from the end for the keys and values.
Source: Katharopoulos et al. 2020, arXiv 2006.16236; in chunks as Hua et al. 2022, arXiv 2202.10447.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.triton_head_rows import read_rows, rows, strides, write_rows
from headwise.numerics.triton_tiles import padded


@triton.jit
def _features(x, first, T, SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return φ of rows, zeros outside."""
    inside = (first + tl.arange(0, BT)[:, None] < T) & (tl.arange(0, BD)[None, :] < SIZE)
    return tl.where(inside, tl.where(x > 0.0, x + 1.0, tl.exp(tl.minimum(x, 0.0))), 0.0)


@triton.jit
def _slope(x):
    """Return φ'."""
    return tl.where(x > 0.0, 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED: tl.constexpr, BT: tl.constexpr):
    """Return the factors of keys, (BT, 1)."""
    key = first + tl.arange(0, BT)
    share = tl.full([BT], 1.0, tl.float32)
    if SHARED:
        share = tl.load(share_at + b * mb + h * mh + key * mn, mask=key < N, other=0.0).to(tl.float32)
    return share[:, None]


@triton.jit
def _earlier(weights, BT: tl.constexpr):
    """Return the weights of a chunk's own keys up to each query."""
    i = tl.arange(0, BT)
    return tl.where(i[:, None] >= i[None, :], weights, 0.0)


@triton.jit
def _later(weights, BT: tl.constexpr):
    """Return the weights, keys first, of a chunk's own queries from each key on."""
    i = tl.arange(0, BT)
    return tl.where(i[:, None] <= i[None, :], weights, 0.0)


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, share_at, out_at, z_at,
    qb, qh, qt, kb, kh, kn, vb, vh, vn, mb, mh, mn, ob, oh, ot, H, T, N,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the output and the sums z of one head of one sample."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    state = tl.zeros([BD, BDV], tl.float32)
    total = tl.zeros([BD], tl.float32)
    if not CAUSAL:
        for first in tl.range(0, N, BT):
            k = _features(read_rows(k_at, b, h, first, kb, kh, kn, N, D, BT, BD), first, N, D, BT, BD)
            k = k * _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED, BT)
            v = read_rows(v_at, b, h, first, vb, vh, vn, N, DV, BT, BDV)
            state += tl.dot(tl.trans(k), v, input_precision=PRECISION)
            total += tl.sum(k, 0)
    for first in tl.range(0, T, BT):
        q = _features(read_rows(q_at, b, h, first, qb, qh, qt, T, D, BT, BD), first, T, D, BT, BD)
        out = tl.dot(q, state, input_precision=PRECISION)
        z = tl.sum(q * total[None, :], 1)
        if CAUSAL:
            k = _features(read_rows(k_at, b, h, first, kb, kh, kn, N, D, BT, BD), first, N, D, BT, BD)
            k = k * _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED, BT)
            v = read_rows(v_at, b, h, first, vb, vh, vn, N, DV, BT, BDV)
            own = _earlier(tl.dot(q, tl.trans(k), input_precision=PRECISION), BT)
            out += tl.dot(own, v, input_precision=PRECISION)
            z += tl.sum(own, 1)
            state += tl.dot(tl.trans(k), v, input_precision=PRECISION)
            total += tl.sum(k, 0)
        # A query without keys has the output 0.
        z = tl.where(z > 0.0, z, 1.0)
        write_rows(out_at, out / z[:, None], b, h, first, ob, oh, ot, T, DV, BT, BDV)
        row = first + tl.arange(0, BT)
        tl.store(z_at + tl.program_id(0).to(tl.int64) * T + row, z, mask=row < T)


@triton.jit
def _slopes(
    g_at, out_at, z_at, b, h, first, gb, gh, gt, ob, oh, ot, T, DV: tl.constexpr, BT: tl.constexpr, BDV: tl.constexpr
):
    """Return n = dO / z, (BT, BDV), and c = -(dO·O) / z, (BT,)."""
    row = first + tl.arange(0, BT)
    z = tl.load(z_at + tl.program_id(0).to(tl.int64) * T + row, mask=row < T, other=1.0)
    n = read_rows(g_at, b, h, first, gb, gh, gt, T, DV, BT, BDV) / z[:, None]
    c = -tl.sum(n * read_rows(out_at, b, h, first, ob, oh, ot, T, DV, BT, BDV), 1)
    return n, c


@triton.jit
def queries_kernel(
    q_at, k_at, v_at, share_at, out_at, z_at, g_at, dq_at,
    qb, qh, qt, kb, kh, kn, vb, vh, vn, mb, mh, mn, ob, oh, ot, gb, gh, gt, db, dh, dt, H, T, N,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries of one head of one sample."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    state = tl.zeros([BD, BDV], tl.float32)
    total = tl.zeros([BD], tl.float32)
    if not CAUSAL:
        for first in tl.range(0, N, BT):
            k = _features(read_rows(k_at, b, h, first, kb, kh, kn, N, D, BT, BD), first, N, D, BT, BD)
            k = k * _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED, BT)
            v = read_rows(v_at, b, h, first, vb, vh, vn, N, DV, BT, BDV)
            state += tl.dot(tl.trans(k), v, input_precision=PRECISION)
            total += tl.sum(k, 0)
    for first in tl.range(0, T, BT):
        n, c = _slopes(g_at, out_at, z_at, b, h, first, gb, gh, gt, ob, oh, ot, T, DV, BT, BDV)
        dq = tl.dot(n, tl.trans(state), input_precision=PRECISION) + c[:, None] * total[None, :]
        if CAUSAL:
            k = _features(read_rows(k_at, b, h, first, kb, kh, kn, N, D, BT, BD), first, N, D, BT, BD)
            k = k * _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED, BT)
            v = read_rows(v_at, b, h, first, vb, vh, vn, N, DV, BT, BDV)
            own = _earlier(tl.dot(n, tl.trans(v), input_precision=PRECISION) + c[:, None], BT)
            dq += tl.dot(own, k, input_precision=PRECISION)
            state += tl.dot(tl.trans(k), v, input_precision=PRECISION)
            total += tl.sum(k, 0)
        dq = dq * _slope(read_rows(q_at, b, h, first, qb, qh, qt, T, D, BT, BD))
        write_rows(dq_at, dq, b, h, first, db, dh, dt, T, D, BT, BD)


@triton.jit
def keys_kernel(
    q_at, k_at, v_at, share_at, out_at, z_at, g_at, dk_at, dv_at,
    qb, qh, qt, kb, kh, kn, vb, vh, vn, mb, mh, mn, ob, oh, ot, gb, gh, gt, db, dh, dt, eb, eh, et, H, T, N,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys and values of one head of one sample, from the last token to the first."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    # Σ q̂ nᵀ and Σ c q̂ over the later queries
    state = tl.zeros([BD, BDV], tl.float32)
    total = tl.zeros([BD], tl.float32)
    if not CAUSAL:
        for first in tl.range(0, T, BT):
            q = _features(read_rows(q_at, b, h, first, qb, qh, qt, T, D, BT, BD), first, T, D, BT, BD)
            n, c = _slopes(g_at, out_at, z_at, b, h, first, gb, gh, gt, ob, oh, ot, T, DV, BT, BDV)
            state += tl.dot(tl.trans(q), n, input_precision=PRECISION)
            total += tl.sum(q * c[:, None], 0)
    for step in tl.range(0, N, BT):
        first = (tl.cdiv(N, BT) - 1) * BT - step
        raw = read_rows(k_at, b, h, first, kb, kh, kn, N, D, BT, BD)
        share = _share_of(share_at, b, h, first, mb, mh, mn, N, SHARED, BT)
        k = _features(raw, first, N, D, BT, BD) * share
        v = read_rows(v_at, b, h, first, vb, vh, vn, N, DV, BT, BDV)
        dk = tl.dot(v, tl.trans(state), input_precision=PRECISION) + total[None, :]
        dv = tl.dot(k, state, input_precision=PRECISION)
        if CAUSAL:
            q = _features(read_rows(q_at, b, h, first, qb, qh, qt, T, D, BT, BD), first, T, D, BT, BD)
            n, c = _slopes(g_at, out_at, z_at, b, h, first, gb, gh, gt, ob, oh, ot, T, DV, BT, BDV)
            # Keys first, in the layout in which the next products take them.
            own = _later(tl.dot(v, tl.trans(n), input_precision=PRECISION) + c[None, :], BT)
            dk += tl.dot(own, q, input_precision=PRECISION)
            own = _later(tl.dot(k, tl.trans(q), input_precision=PRECISION), BT)
            dv += tl.dot(own, n, input_precision=PRECISION)
            state += tl.dot(tl.trans(q), n, input_precision=PRECISION)
            total += tl.sum(q * c[:, None], 0)
        write_rows(dk_at, dk * share * _slope(raw), b, h, first, db, dh, dt, N, D, BT, BD)
        write_rows(dv_at, dv, b, h, first, eb, eh, et, N, DV, BT, BDV)


def attend_linear(
    q: Tensor, k: Tensor, v: Tensor, share: Tensor | None, causal: bool, made: tuple[Tensor, Tensor]
) -> None:
    """Fill `made`, the output (B, H, T, DV) and the sums of weights (B, H, T) in fp32.

    The share of each key is broadcastable to (B, H, N).
    """
    q, k, v = rows(q), rows(k), rows(v)
    tensors, steps, tail, constants = _common(q, k, v, share, causal)
    with torch.cuda.device_of(q):
        forward_kernel[(q.shape[0] * q.shape[1],)](*tensors, *made, *steps, *strides(made[0]), *tail, **constants)


def attend_linear_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    share: Tensor | None,
    out: Tensor,
    z: Tensor,
    causal: bool,
    made: list[Tensor],
) -> None:
    """Fill `made`, the gradients of q, k and v."""
    g, q, k, v = rows(g), rows(q), rows(k), rows(v)
    tensors, steps, tail, constants = _common(q, k, v, share, causal)
    grid = (q.shape[0] * q.shape[1],)
    with torch.cuda.device_of(q):
        for kernel, of in ((queries_kernel, made[:1]), (keys_kernel, made[1:])):
            kernel[grid](*tensors, out, z, g, *of, *steps, *strides(out, g, *of), *tail, **constants)


def _common(
    q: Tensor, k: Tensor, v: Tensor, share: Tensor | None, causal: bool
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Return the tensors, strides, sizes and constants that all three kernels take."""
    seen = q if share is None else share.expand(*k.shape[:3])
    steps = (*strides(q, k, v), *((0, 0, 0) if share is None else seen.stride()))
    # Features of half precision are rounded less by TF32 than by their own dtype.
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    # Longer chunks spill the sums to memory (compiled for sm_80 and sm_90); on sm_80 heads of 128 do so anyway.
    small = max(q.shape[3], v.shape[3]) <= 64 and q.dtype != torch.float32
    constants = {
        "CAUSAL": causal,
        "SHARED": share is not None,
        "PRECISION": "ieee" if exact else "tf32",
        "D": q.shape[3],
        "DV": v.shape[3],
        "BT": 32 if small else 16,
        "BD": padded(q.shape[3]),
        "BDV": padded(v.shape[3]),
        "num_warps": 8,
        "num_stages": 2,
    }
    return (q, k, v, seen), steps, (q.shape[1], q.shape[2], k.shape[2]), constants
