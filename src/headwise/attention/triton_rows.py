"""The row statistics' operator as Triton kernels: one pass over the keys in forward, two in backward, O(T) memory.

The formulas are those of `row_statistics`. Forward keeps, per query, the running maximum m and the sums z of
e = exp(s - m), u of e (s - m) and w of e^2. A new maximum m' turns z into a z with a = exp(m - m'), w into a^2 w, and u
into a (u + (m - m') z). Backward recomputes the weights from the log-sum-exp: one kernel computes the gradient of the
queries, another those of the keys and values.
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
HEAD_SIZES = (16, 32, 64, 128, 256)


@triton.jit
def _logits(
    q, k, mask_at, query, key, T, N, scale, sm0, sm1, MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the masked logits of a block of queries and keys, -inf for forbidden keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    inside = (query[:, None] < T) & (key[None, :] < N)
    if MASK != 0:
        entries = tl.load(
            mask_at + query[:, None].to(tl.int64) * sm0 + key[None, :].to(tl.int64) * sm1, mask=inside, other=0
        )
        if MASK == 1:
            inside = inside & (entries != 0)
        else:
            s += entries.to(tl.float32)
    if CAUSAL:
        inside = inside & (key[None, :] <= query[:, None])
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _rows_of(at, row, column, s0, s1, ROWS, COLUMNS, UPCAST: tl.constexpr):
    """Return rows of a (ROWS, COLUMNS) matrix, with zeros outside of it."""
    inside = (row[:, None] < ROWS) & (column[None, :] < COLUMNS)
    x = tl.load(at + row[:, None].to(tl.int64) * s0 + column[None, :].to(tl.int64) * s1, mask=inside, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _place(blocks, heads):
    """Return the block of rows, the sample and the head of this program; blocks of the same head are adjacent."""
    place = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, place // heads, place % heads


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, mask_at, out_at, lse_at, entropy_at, square_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, ob, oh, ot, od,
    H, G, T, N, D, DV, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute A v and the three statistics of each row, for one block of queries of one head."""
    block, b, h = _place(tl.cdiv(T, BT), H)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // G).to(tl.int64)
    query = block * BT + tl.arange(0, BT)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    q = _rows_of(q_at + b64 * qb + h64 * qh, query, d, qt, qd, T, D, UPCAST)
    k_at += b64 * kb + g64 * kh
    v_at += b64 * vb + g64 * vh
    mask_at += b64 * mb + h64 * mh
    m = tl.full([BT], float("-inf"), tl.float32)
    z, u, w = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, BDV], tl.float32)
    last = N
    if CAUSAL:
        last = tl.minimum(N, (block + 1) * BT)
    for start in range(0, last, BN):
        key = start + tl.arange(0, BN)
        k = _rows_of(k_at, key, d, kn, kd, N, D, UPCAST)
        v = _rows_of(v_at, key, dv, vn, vd, N, DV, UPCAST)
        s = _logits(q, k, mask_at, query, key, T, N, scale, mt, mn, MASK, CAUSAL, PRECISION)
        top = tl.maximum(m, tl.max(s, 1))
        # Rows without an allowed key so far have m = -inf; avoid -inf - (-inf).
        seen = tl.where(top == float("-inf"), 0.0, top)
        step = tl.where(m == float("-inf"), 0.0, m - seen)
        a = tl.where(m == float("-inf"), 0.0, tl.exp(step))
        e = tl.exp(s - seen[:, None])
        away = tl.where(e > 0.0, s - seen[:, None], 0.0)
        u = a * (u + step * z) + tl.sum(e * away, 1)
        z = a * z + tl.sum(e, 1)
        w = a * a * w + tl.sum(e * e, 1)
        acc = acc * a[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
        m = top
    full = tl.where(z == 0.0, 1.0, z)
    row = (b64 * H + h64) * T + query
    inside = query < T
    tl.store(lse_at + row, tl.where(z == 0.0, 0.0, m + tl.log(full)), mask=inside)
    tl.store(entropy_at + row, tl.log(full) - u / full, mask=inside)
    tl.store(square_at + row, w / (full * full), mask=inside)
    at = out_at + b64 * ob + h64 * oh + query[:, None].to(tl.int64) * ot + dv[None, :] * od
    tl.store(at, (acc / full[:, None]).to(out_at.dtype.element_ty), mask=inside[:, None] & (dv[None, :] < DV))


@triton.jit
def _slope(q, k, v, g, level, lse, g_entropy, g_square, mask_at, query, key, T, N, scale, sm0, sm1,
           MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the weights p and the gradient of the logits of one block."""
    s = _logits(q, k, mask_at, query, key, T, N, scale, sm0, sm1, MASK, CAUSAL, PRECISION)
    logp = s - lse[:, None]
    p = tl.exp(logp)
    logp = tl.where(p > 0.0, logp, 0.0)
    along = tl.dot(g, tl.trans(v), input_precision=PRECISION) + level[:, None]
    return p, p * (along - g_entropy[:, None] * logp + 2.0 * g_square[:, None] * p)


@triton.jit
def queries_kernel(
    q_at, k_at, v_at, mask_at, g_at, level_at, lse_at, entropy_at, square_at, dq_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, G, T, N, D, DV, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries, a sum over the keys.

    `entropy_at` and `square_at` point to the gradients of these statistics.
    """
    block, b, h = _place(tl.cdiv(T, BT), H)
    b64, h64, g64 = b.to(tl.int64), h.to(tl.int64), (h // G).to(tl.int64)
    query = block * BT + tl.arange(0, BT)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    q = _rows_of(q_at + b64 * qb + h64 * qh, query, d, qt, qd, T, D, UPCAST)
    g = _rows_of(g_at + b64 * gb + h64 * gh, query, dv, gt, gd, T, DV, UPCAST)
    k_at += b64 * kb + g64 * kh
    v_at += b64 * vb + g64 * vh
    mask_at += b64 * mb + h64 * mh
    row, inside = (b64 * H + h64) * T + query, query < T
    level, lse = tl.load(level_at + row, mask=inside, other=0.0), tl.load(lse_at + row, mask=inside, other=0.0)
    g_entropy = tl.load(entropy_at + row, mask=inside, other=0.0)
    g_square = tl.load(square_at + row, mask=inside, other=0.0)
    dq = tl.zeros([BT, BD], tl.float32)
    last = N
    if CAUSAL:
        last = tl.minimum(N, (block + 1) * BT)
    for start in range(0, last, BN):
        key = start + tl.arange(0, BN)
        k = _rows_of(k_at, key, d, kn, kd, N, D, UPCAST)
        v = _rows_of(v_at, key, dv, vn, vd, N, DV, UPCAST)
        _, ds = _slope(q, k, v, g, level, lse, g_entropy, g_square, mask_at, query, key, T, N, scale, mt, mn,
                       MASK, CAUSAL, PRECISION)  # fmt: skip
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    at = dq_at + row[:, None] * D + d[None, :]
    tl.store(at, (dq * scale).to(dq_at.dtype.element_ty), mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def keys_kernel(
    q_at, k_at, v_at, mask_at, g_at, level_at, lse_at, entropy_at, square_at, dk_at, dv_at,
    qb, qh, qt, qd, kb, kh, kn, kd, vb, vh, vn, vd, mb, mh, mt, mn, gb, gh, gt, gd,
    H, G, T, N, D, DV, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values, sums over the queries of all heads that share them."""
    groups = H // G
    block, b, group = _place(tl.cdiv(N, BN), groups)
    b64, g64 = b.to(tl.int64), group.to(tl.int64)
    key = block * BN + tl.arange(0, BN)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    k = _rows_of(k_at + b64 * kb + g64 * kh, key, d, kn, kd, N, D, UPCAST)
    v = _rows_of(v_at + b64 * vb + g64 * vh, key, dv, vn, vd, N, DV, UPCAST)
    dk, dvalue = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    first = 0
    if CAUSAL:
        first = (block * BN // BT) * BT
    for member in range(G):
        h64 = g64 * G + member
        for start in range(first, T, BT):
            query = start + tl.arange(0, BT)
            row, inside = (b64 * H + h64) * T + query, query < T
            q = _rows_of(q_at + b64 * qb + h64 * qh, query, d, qt, qd, T, D, UPCAST)
            g = _rows_of(g_at + b64 * gb + h64 * gh, query, dv, gt, gd, T, DV, UPCAST)
            level, lse = tl.load(level_at + row, mask=inside, other=0.0), tl.load(lse_at + row, mask=inside, other=0.0)
            g_entropy = tl.load(entropy_at + row, mask=inside, other=0.0)
            g_square = tl.load(square_at + row, mask=inside, other=0.0)
            p, ds = _slope(q, k, v, g, level, lse, g_entropy, g_square, mask_at + b64 * mb + h64 * mh, query, key, T, N,
                           scale, mt, mn, MASK, CAUSAL, PRECISION)  # fmt: skip
            dvalue += tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    row, inside = (b64 * groups + g64) * N + key, key < N
    at = dk_at + row[:, None] * D + d[None, :]
    tl.store(at, (dk * scale).to(dk_at.dtype.element_ty), mask=inside[:, None] & (d[None, :] < D))
    at = dv_at + row[:, None] * DV + dv[None, :]
    tl.store(at, dvalue.to(dv_at.dtype.element_ty), mask=inside[:, None] & (dv[None, :] < DV))


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels support this call.

    They need one dtype of fp32, fp16 and bf16, head sizes up to 256, and a number of key heads that divides that of the
    query heads.
    """
    kinds = {q.dtype, k.dtype, v.dtype}
    plain = len(kinds) == 1 and kinds <= {torch.float32, torch.float16, torch.bfloat16}
    return (
        plain
        and max(q.shape[-1], v.shape[-1]) <= HEAD_SIZES[-1]
        and q.shape[1] % k.shape[1] == 0
        and q.numel() > 0 < k.numel()
    )


def settings(dtype: torch.dtype, size: int, size_v: int, backward: bool) -> dict[str, Any]:
    """Return block sizes whose tiles fit the shared memory of sm_80 (163 KiB) and sm_90."""
    wide = padded(max(size, size_v))
    heavy = wide >= 128 or dtype == torch.float32
    if backward:
        bt, bn = (32, 32) if heavy else (64, 64)
        if wide == 256 and dtype == torch.float32:
            bt, bn = 16, 16
    else:
        bt, bn = (64, 32) if heavy else (128, 64)
        if wide == 256:
            bt, bn = 32, 32
    return {
        "BT": bt,
        "BN": bn,
        "BD": padded(size),
        "BDV": padded(size_v),
        "num_warps": 4 if bt <= 64 else 8,
        # A second pipeline stage doubles the tiles in shared memory.
        "num_stages": 1 if wide == 256 else 2,
    }


def padded(size: int) -> int:
    """Return the head size of the tiles: a power of two and at least 16, as Triton's matrix product requires."""
    return max(16, triton.next_power_of_2(size))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `row_statistics.attend_rows` for a call that `supports` accepts."""
    (batch, heads, queries), size = q.shape[:3], v.shape[-1]
    out = torch.empty(batch, heads, queries, size, dtype=v.dtype, device=v.device)
    lse, entropy, square = (torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device) for _ in range(3))
    blocks = settings(q.dtype, q.shape[-1], size, backward=False)
    mask, strides, constants = _common(q, k, v, mask, causal)
    arguments = (q, k, v, mask, out, lse, entropy, square, *strides, *out.stride(), *_sizes(q, k, v), scale)
    # Triton launches on the current device, which differs from q's in a model spread over several devices.
    with torch.cuda.device_of(q):
        forward_kernel[_grid(q, blocks["BT"])](*arguments, **constants, **blocks)
    return out, lse, entropy, square


def backward(
    gradients: tuple[Tensor | None, ...],
    level: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        gradients: of the output, the log-sum-exp, the entropy and the sum of squares; None for unused ones.
        level: the result of `row_statistics.levels`, (B, H, T) in fp32.
        saved: q, k, v and the outputs of `forward`.
        mask, causal, scale: as in `forward`.
    """
    q, k, v, out, lse = saved[:5]
    g_out, _, g_entropy, g_square = gradients
    g_out = torch.zeros_like(out) if g_out is None else g_out.to(out.dtype)
    g_entropy, g_square = (torch.zeros_like(lse) if g is None else g.contiguous() for g in (g_entropy, g_square))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    blocks = settings(q.dtype, q.shape[-1], v.shape[-1], backward=True)
    mask, strides, constants = _common(q, k, v, mask, causal)
    tensors = (q, k, v, mask, g_out, level.contiguous(), lse, g_entropy, g_square)
    tail = (*strides, *g_out.stride(), *_sizes(q, k, v), scale)
    with torch.cuda.device_of(q):
        queries_kernel[_grid(q, blocks["BT"])](*tensors, dq, *tail, **constants, **blocks)
        keys_kernel[_grid(k, blocks["BN"])](*tensors, dk, dv, *tail, **constants, **blocks)
    return dq, dk, dv


def _grid(x: Tensor, rows: int) -> tuple[int]:
    """Return one program for each block of rows of each head and sample of x (B, H, T, D)."""
    # On the first axis, where CUDA allows 2^31 - 1 programs: windowed models have more windows than the 65,535 of the
    # others.
    return (triton.cdiv(x.shape[2], rows) * x.shape[0] * x.shape[1],)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    heads = q.shape[1]
    return heads, heads // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _common(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, tuple[int, ...], dict[str, Any]]:
    """Return the mask in the form the kernels read, the strides of q, k, v and the mask, and the compile constants."""
    kind = NO_MASK if mask is None else ALLOWED if mask.dtype == torch.bool else ADDED
    # Without a mask the address is never read.
    readable = q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    strides = (0, 0, 0, 0) if mask is None else readable.expand(*q.shape[:3], k.shape[2]).stride()
    interpreted = bool(knobs.runtime.interpret)
    constants = {
        "MASK": kind,
        "CAUSAL": causal,
        # Tensor cores round fp32 to TF32; allowed only if the user allows it for matrix products.
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        # Triton's interpreter computes bf16 products incorrectly.
        "UPCAST": interpreted and q.dtype == torch.bfloat16,
    }
    return readable, (*q.stride(), *k.stride(), *v.stride(), *strides), constants
