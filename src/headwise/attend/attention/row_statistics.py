"""Attention and its row statistics in one pass without storing the matrix, with closed-form gradients.

For methods; `statistics/row_figures.py` computes more figures, without gradients, for statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from headwise.attend.attention.second_derivatives import gradients, rows_by_matrix
from headwise.numerics.kernels import kernels_run_on
from headwise.numerics.masked import allowed_keys, masked_logits
from headwise.numerics.operators import AttentionOperator, rows_like, without_autocast
from headwise.numerics.precision import at_least_fp32, entropy_of

# Entries of logits in one block: small enough for a core's cache, large enough for efficient products. Calls with few
# queries and heads use smaller blocks, so that these need no more memory than the call's tensors.
BLOCK, LEAST = 1 << 19, 1 << 18
# Queries of one block: with fewer, the sums over queries are written too often; with more, causal blocks compute too
# many masked entries.
ROWS = 256


def masked(s: Tensor, mask: Tensor | None, causal: bool, start: int) -> Tensor:
    """Return the logits s (..., t, N) of the queries from row `start` on, masked in place."""
    queries = slice(start, start + s.shape[-2])
    rows = mask if mask is None or mask.shape[-2] == 1 else mask[..., queries, :]
    bool_rows = rows if rows is not None and rows.dtype == torch.bool else None
    return masked_logits(s, rows, allowed_keys(bool_rows, causal, queries, s.shape[-1], s.device))


def blocks(q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice]]:
    """Return slices (samples, heads, queries) of (B, H, T) queries whose blocks of logits fit a CPU's cache.

    Other devices use blocks 64 times as large. Blocks prefer many queries to many heads, so that sums over queries are
    written rarely.
    """
    (batch, heads, rows), keys = q.shape[:3], k.shape[2]
    limit = min(BLOCK, max(LEAST, q.numel() // 2)) * (1 if q.device.type == "cpu" else 64)
    queries = min(rows, ROWS, max(16, limit // keys))
    group = min(heads, max(1, limit // (queries * keys)))
    group = -(-heads // -(-heads // group))
    whole = group == heads and queries == rows
    samples = max(1, limit // (heads * queries * keys)) if whole else 1
    return [
        (slice(b, min(b + samples, batch)), slice(h, min(h + group, heads)), slice(t, min(t + queries, rows)))
        for b in range(0, batch, samples)
        for h in range(0, heads, group)
        for t in range(0, rows, queries)
    ]


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (A v, log-sum-exp, entropy, sum of squares): (B, H, T, Dv), and each row's (B, H, T) in fp32 or wider.

    With D = s - max(s), e = exp(D), Z = sum(e): L = max + log Z, H = log Z - sum(e D)/Z, S = sum(e^2)/Z^2. The gradient
    of the logits is p (dP - <dO, O> + g_L - g_H (log p + H) + 2 g_S (p - S)); backward recomputes the logits block by
    block. As one operator it is a single node of a compiled graph. A gradient with
    `create_graph=True` is that of the whole matrix.

    Args:
        q, k, v: (B, H, T, D), (B, H, N, D), (B, H, N, Dv).
        mask: broadcastable to (B, H, T, N), bool (True: allowed) or added to the logits; it gets no gradient.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the logits.
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _operator(q, k, v, mask, causal, scale)
    return found


def attend_whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `attend_rows` without a graph."""
    kernels = _kernels(q, k, v)
    # Under autocast, products of fp32 would run in half precision, and backward would recompute different logits.
    with without_autocast(q.device):
        if kernels is not None:
            return kernels.forward(q, k, v, mask, causal, scale)
        return _forward(q, k, v, mask, causal, scale)


def gradients_of(
    gradients: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `saved` is q, k, v and the four outputs of `attend_rows`.

    The gradient of an output is None if that output is unused.
    """
    kernels = _kernels(*saved[:3])
    with without_autocast(saved[0].device):
        if kernels is not None:
            return kernels.backward(gradients, levels(gradients, saved), saved, mask, causal, scale)
        return _backward(gradients, saved, mask, causal, scale)


def _kernels(q: Tensor, k: Tensor, v: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if it can compute this call, or None for the blocks in Python."""
    if not kernels_run_on(q.device):
        return None
    from headwise.attend.attention import triton_rows

    return triton_rows if triton_rows.supports(q, k, v) else None


def _again(
    grads: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> list[Tensor | None]:
    return gradients(lambda q, k, v: rows_by_matrix(q, k, v, mask, causal, scale), saved[:3], grads)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    out = torch.empty(*shape, v.shape[-1], dtype=v.dtype, device=v.device)
    lse, entropy, square = (torch.empty(shape, dtype=_wide(q), device=q.device) for _ in range(3))
    for b, h, t in blocks(q, k):
        # Causal rows see no later keys.
        n = slice(0, t.stop if causal else k.shape[2])
        # Scaling q (t, D) is cheaper than scaling the logits (t, N).
        e = torch.matmul(at_least_fp32(q[b, h, t]) * scale, at_least_fp32(k[b, h, n]).transpose(-1, -2))
        e = masked(e, part_of_mask(mask, b, h, n), causal, t.start)
        top = e.amax(-1, keepdim=True)
        if mask is not None:
            top.masked_fill_(top == float("-inf"), 0.0)
        # Relative to the maximum, so that exp does not overflow.
        d = e.sub_(top)
        e = d.exp()
        if mask is not None or causal:
            # A masked key has e = 0 and d = -inf, whose product in the entropy would be nan.
            d.clamp_(min=-1e30)
        z = e.sum(-1)
        if mask is not None:
            # In a row without allowed keys all sums are 0; this keeps their quotients 0.
            z.masked_fill_(z == 0, 1.0)
        logz = z.log()
        lse[b, h, t] = top.squeeze(-1).add_(logz)
        entropy[b, h, t] = entropy_of(logz, torch.linalg.vecdot(e, d), z)
        square[b, h, t] = torch.linalg.vecdot(e, e).div_(z.square())
        # Sums of many values may overflow in fp16 before the division by z.
        values = at_least_fp32(v[b, h, n]) if v.dtype == torch.float16 else v[b, h, n]
        out[b, h, t] = torch.matmul(e.to(values.dtype), values).div_(z.unsqueeze(-1))
    return out, lse, entropy, square


def _backward(
    gradients: Sequence[Tensor | None], saved: list[Tensor], mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    g_out, _, g_entropy, g_square = gradients
    q, k, v, out, lse = saved[:5]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Summed over blocks of queries in fp32 and rounded once at the end.
    dk, dv = (torch.zeros(x.shape, dtype=_wide(x), device=k.device) for x in (k, v))
    level = levels(gradients, saved)
    g_out = torch.zeros_like(out) if g_out is None else g_out
    for b, h, t in blocks(q, k):
        n = slice(0, t.stop if causal else k.shape[2])
        qb, gb = at_least_fp32(q[b, h, t]) * scale, at_least_fp32(g_out[b, h, t])
        kb, vb = at_least_fp32(k[b, h, n]), at_least_fp32(v[b, h, n])
        logp = masked(_add_product(-lse[b, h, t, None], qb, kb), part_of_mask(mask, b, h, n), causal, t.start)
        slope = _add_product(level[b, h, t, None], gb, vb)
        if g_entropy is None:
            p = logp.exp_()
        else:
            p = logp.exp()
            if mask is not None or causal:
                logp.clamp_(min=-1e30)
            slope.addcmul_(logp, g_entropy[b, h, t, None], value=-1.0)
        if g_square is not None:
            slope.addcmul_(p, g_square[b, h, t, None], value=2.0)
        _accumulate(dv[b, h, n], p, gb)
        ds = slope.mul_(p)
        dq[b, h, t] = torch.matmul(ds, kb).mul_(scale)
        _accumulate(dk[b, h, n], ds, qb)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def levels(gradients: Sequence[Tensor | None], saved: list[Tensor]) -> Tensor:
    """Return the terms of (gradient of the logits) / p that are constant along each row, (B, H, T) in fp32 or wider."""
    g_out, g_lse, g_entropy, g_square = gradients
    out, lse, entropy, square = saved[3:]
    level = torch.zeros_like(lse)
    if g_out is not None:
        level = -torch.linalg.vecdot(at_least_fp32(g_out), at_least_fp32(out))
    for gradient, factor in ((g_lse, 1.0), (g_entropy, -entropy), (g_square, -2.0 * square)):
        if gradient is not None:
            level = level + gradient * factor
    return level


def _add_product(row: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return row + a b^T for row (b, h, t, 1), a (b, h, t, D), b (b, h, n, D)."""
    total = row.expand(*a.shape[:3], b.shape[2]).flatten(0, 1)
    return torch.baddbmm(total, a.flatten(0, 1), b.flatten(0, 1).transpose(-1, -2)).unflatten(0, a.shape[:2])


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b in place to total (b, h, N, D), a view."""
    for sample, rows, columns in zip(total, a, b, strict=True):
        sample.baddbmm_(rows.transpose(-1, -2), columns)


def part_of_mask(mask: Tensor | None, samples: slice, heads: slice, keys: slice) -> Tensor | None:
    """Return the rows of all queries of a mask (B|1, H|1, T|1, N) for a block of samples, heads and keys."""
    if mask is None:
        return None
    return mask[samples if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None), :, keys]


_operator = AttentionOperator(
    "attend_rows(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    attend_whole,
    gradients_of,
    _again,
    like=lambda q, k, v, *_: rows_like(q, v, 3),
)
registered_rows, attend_rows_backward = _operator.registered, _operator.backward
