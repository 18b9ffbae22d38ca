"""Attention with single weights dropped, without storing the matrix: drawn, used and forgotten block by block."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headwise.attend.attention.element_draw import Drawn
from headwise.attend.attention.row_statistics import blocks, masked
from headwise.attend.attention.second_derivatives import dropped_by_matrix, gradients
from headwise.numerics.kernels import kernels_run_on, plain
from headwise.numerics.masked import allowed_keys
from headwise.numerics.operators import AttentionOperator, rows_like, without_autocast
from headwise.numerics.precision import at_least_fp32


def attend_dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    key: Tensor,
    salt: int,
    p: Tensor,
    window: int,
    renormalize: bool,
    samples: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (A v, log-sum-exp, first key): (B, H, T, Dv), and (B, H, T) of each row in fp32 or wider and in int32.

    With M the keys that stay, 1 or 0 for each element, and P the softmax over all allowed keys, A is P M / (1 - p), or
    with `renormalize` P M / (sum of P M over the row), the softmax over the keys that stay. There a row that would lose
    all keys it may see gets the first of them back, whose number is the third result; it is -1 in all other rows. The
    log-sum-exp is that of the softmax over all or over the remaining keys; 0 in a row without keys.

    The gradient of the logits is P (M dP / (1 - p) - <dO, O> + g_L) with dP = dO v^T, or A (dP - <dO, O> + g_L).
    Backward draws M again; with `create_graph=True` it computes the whole matrix.

    Args:
        q, k, v: (B, H, T, D), (B, H, N, D), (B, H, N, Dv).
        mask: broadcastable to (B, H, T, N), bool (True: allowed) or added to the logits; it gets no gradient.
        causal: whether query i sees keys 0..i only, in addition to the mask.
        scale: factor of the logits.
        key, salt: of the draw, as in `random_draws`; the key is 0-d, in int64.
        p: probability that a window of dropped keys starts at an element, 0-d; without windows, that it is dropped.
        window: number of neighbouring keys that are dropped together.
        renormalize: whether the remaining weights of a row are divided by their sum instead of by 1 - p.
        samples: number of draws along B; B / samples consecutive entries share one.
    """
    found: tuple[Tensor, Tensor, Tensor] = _operator(
        q, k, v, mask, causal, scale, key, salt, p, window, renormalize, samples
    )
    return found


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    key: Tensor,
    salt: int,
    p: Tensor,
    window: int,
    renormalize: bool,
    samples: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels(q, k, v)
    drawn = Drawn(q, k, key, salt, p, window, samples)
    # Under autocast, products of fp32 would run in half precision, and backward would recompute different logits.
    with without_autocast(q.device):
        if kernels is not None:
            return kernels.forward(q, k, v, mask, causal, scale, drawn, renormalize)
        return _forward(q, k, v, mask, causal, scale, drawn, renormalize)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    q, k, v, mask, causal, scale, key, salt, p, *rest = inputs
    # Cloned: set() writes the next step's p into the same tensor, possibly before backward reads it.
    return (q, k, v, *output, key, p.clone()), (mask, causal, scale, salt, *rest)


def _gradients_of(
    grads: Sequence[Tensor | None],
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    salt: int,
    window: int,
    renormalize: bool,
    samples: int,
) -> tuple[Tensor, Tensor, Tensor]:
    (g_out, g_lse, _), (q, k, v, out, lse, first, key, p) = grads, saved
    kernels = _kernels(q, k, v)
    drawn = Drawn(q, k, key, salt, p, window, samples)
    with without_autocast(q.device):
        g_out = torch.zeros_like(out) if g_out is None else g_out
        # What the gradient of a row's logits, divided by the weights, has in common for all keys.
        level = -torch.linalg.vecdot(at_least_fp32(g_out), at_least_fp32(out))
        level = level if g_lse is None else level + g_lse
        if mask is not None and mask.dtype != torch.bool:
            # Rows that the lowest number of a dtype forbids as a whole, whose log-sum-exp has lost the logits, get no
            # gradient.
            lse = lse.masked_fill(lse < -1e6, float("inf"))
        if kernels is not None:
            return kernels.backward(g_out, level, q, k, v, lse, first, mask, causal, scale, drawn, renormalize)
        return _backward(g_out, level, q, k, v, lse, first, mask, causal, scale, drawn, renormalize)


def _kernels(q: Tensor, k: Tensor, v: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if it can compute this call, or None for the blocks in Python."""
    if not kernels_run_on(q.device) or not plain(q, k, v) or k.shape[1] != q.shape[1]:
        return None
    from headwise.attend.attention import triton_dropped

    return triton_dropped


def _again(
    grads: Sequence[Tensor | None],
    saved: list[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    salt: int,
    window: int,
    renormalize: bool,
    samples: int,
) -> list[Tensor | None]:
    q, k, v, _, _, first, key, p = saved
    drawn = Drawn(q, k, key, salt, p, window, samples)

    def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dropped_by_matrix(q, k, v, mask, causal, scale, drawn, renormalize, first)

    return gradients(form, (q, k, v), grads[:2])


def _like(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return *rows_like(q, v, 1), q.new_empty(q.shape[:3], dtype=torch.int32)


_operator = AttentionOperator(
    "attend_dropped(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, Tensor key, int salt, "
    "Tensor p, int window, bool renormalize, int samples) -> (Tensor, Tensor, Tensor)",
    _attend,
    _gradients_of,
    _again,
    like=_like,
    settings="Tensor? mask, bool causal, float scale, int salt, int window, bool renormalize, int samples",
    keep=_keep,
    frozen=2,
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, drawn: Drawn, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    first = torch.full(q.shape[:3], -1, dtype=torch.int32, device=q.device)
    for b, h, t in blocks(q, k):
        # Causal rows see no later keys.
        n = slice(0, min(t.stop, k.shape[2]) if causal else k.shape[2])
        part = _part(mask, b, h, n)
        s = _logits(q[b, h, t], k[b, h, n], part, causal, scale, t.start)
        kept = drawn.block(b, h, t, n.stop, s.dtype)
        e, top, z = _exponentials(s, kept if renormalize else None, mask is not None)
        if renormalize and bool((z < 1e-12).any()):
            # Rare, but for the first rows of causal calls: rows that lost all keys, or all that have weight.
            first[b, h, t] = _give_back(kept, part, causal, t)
            s = _logits(q[b, h, t], k[b, h, n], part, causal, scale, t.start)
            e, top, z = _exponentials(torch.where(kept != 0, s, float("-inf")), None, True)
        lse[b, h, t] = z.masked_fill(z == 0, 1.0).log().add_(top.squeeze(-1))
        if not renormalize:
            e = e.mul_(kept)
            z = z * (1.0 - float(drawn.p))
        values = at_least_fp32(v[b, h, n]) if v.dtype == torch.float16 else v[b, h, n]
        out[b, h, t] = torch.matmul(e.to(values.dtype), values).div_(z.masked_fill(z == 0, 1.0).unsqueeze(-1))
    return out, lse, first


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, start: int) -> Tensor:
    # Scaling q (t, D) is cheaper than scaling the logits (t, N).
    return masked(torch.matmul(at_least_fp32(q) * scale, at_least_fp32(k).transpose(-1, -2)), mask, causal, start)


def _exponentials(s: Tensor, kept: Tensor | None, empty: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(s - top) of the kept elements, computed in place, the maximum of each row, and the row's sum."""
    top = s.amax(-1, keepdim=True)
    if empty:
        top.masked_fill_(top == float("-inf"), 0.0)
    e = s.sub_(top).exp_()
    if kept is not None:
        e.mul_(kept)
    return e, top, e.sum(-1)


def _give_back(kept: Tensor, mask: Tensor | None, causal: bool, t: slice) -> Tensor:
    """Set the first allowed key of rows that lost all of them in `kept` (b, h, t, keys); return it, or -1, in int32."""
    mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., t, :]
    allowed = allowed_keys(mask, causal, t, kept.shape[-1], kept.device)
    if allowed is None:
        lost, first = ~(kept != 0).any(-1), torch.zeros(kept.shape[:3], dtype=torch.int64, device=kept.device)
    else:
        allowed = allowed.expand(kept.shape)
        lost = allowed.any(-1) & ~((kept != 0) & allowed).any(-1)
        first = allowed.to(torch.uint8).argmax(-1)
    back = torch.where(lost, first, -1)
    _set_back(kept, back)
    return back.to(torch.int32)


def _set_back(kept: Tensor, first: Tensor) -> None:
    """Set the first key of rows where `first` (b, h, t) is no -1 in `kept` (b, h, t, keys)."""
    at = first.clamp(min=0).long().unsqueeze(-1)
    kept.scatter_(-1, at, torch.maximum(kept.gather(-1, at), (first >= 0).unsqueeze(-1).to(kept.dtype)))


def _backward(
    g_out: Tensor,
    level: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    first: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    drawn: Drawn,
    renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Summed over blocks of queries in fp32 and rounded once at the end.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=k.device) for x in (k, v))
    for b, h, t in blocks(q, k):
        n = slice(0, min(t.stop, k.shape[2]) if causal else k.shape[2])
        qb, gb = at_least_fp32(q[b, h, t]) * scale, at_least_fp32(g_out[b, h, t])
        kb, vb = at_least_fp32(k[b, h, n]), at_least_fp32(v[b, h, n])
        s = masked(torch.matmul(qb, kb.transpose(-1, -2)), _part(mask, b, h, n), causal, t.start)
        p = s.sub_(lse[b, h, t, None]).exp_()
        kept = drawn.block(b, h, t, n.stop, p.dtype)
        slope = torch.matmul(gb, vb.transpose(-1, -2))
        if renormalize:
            if bool((first[b, h, t] >= 0).any()):
                _set_back(kept, first[b, h, t])
            a = p = _times(p, kept)
        else:
            kept.mul_(drawn.scale())
            slope.mul_(kept)
            a = kept.mul_(p)
        _accumulate(dv[b, h, n], a, gb)
        ds = slope.add_(level[b, h, t, None]).mul_(p)
        dq[b, h, t] = torch.matmul(ds, kb).mul_(scale)
        _accumulate(dk[b, h, n], ds, qb)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _times(p: Tensor, kept: Tensor) -> Tensor:
    """Return p of the kept elements; dropped ones may lie so far above the log-sum-exp of the others that p is inf."""
    return torch.nan_to_num_(p.mul_(kept), 0.0, 0.0, 0.0) if not bool(p.amax() < torch.inf) else p.mul_(kept)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b in place to total (b, h, N, D), a view."""
    for sample, rows, columns in zip(total, a, b, strict=True):
        sample.baddbmm_(rows.transpose(-1, -2), columns)


def _part(mask: Tensor | None, samples: slice, heads: slice, keys: slice) -> Tensor | None:
    if mask is None:
        return None
    return mask[samples if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None), :, keys]
