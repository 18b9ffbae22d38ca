"""Attention and its row statistics in one pass, without keeping the matrix; differentiable in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Entries of logits in one block: small enough for a core's cache, large enough for a product worth its call.
BLOCK = 1 << 18


def logits_block(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, start: int) -> Tensor:
    """Give the masked logits (..., t, N) in fp32 of the queries that begin at row `start`."""
    s = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        rows = mask if mask.shape[-2] == 1 else mask[..., start : start + q.shape[-2], :]
        if rows.dtype == torch.bool:
            s.masked_fill_(~rows, float("-inf"))
        else:
            s += rows.float()
    if causal:
        query = torch.arange(start, start + q.shape[-2], device=q.device)[:, None]
        s.masked_fill_(torch.arange(k.shape[-2], device=q.device) > query, float("-inf"))
    return s


def spans(q: Tensor, k: Tensor, limit: int = 1 << 22) -> list[slice]:
    """Cut the queries so that a block of logits (B, H, t, N) has at most `limit` entries."""
    size = max(1, limit // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(i, min(i + size, q.shape[2])) for i in range(0, q.shape[2], size)]


def blocks(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Cut (B, H, T) queries into (samples, queries) so that a block fits a cache (on other devices: one sample at least)."""
    limit = BLOCK if q.device.type == "cpu" else BLOCK * 64
    per_sample = q.shape[1] * q.shape[2] * k.shape[2]
    samples = max(1, limit // max(1, per_sample))
    queries = q.shape[2] if per_sample <= limit else max(16, limit // (q.shape[1] * k.shape[2]))
    return [
        (slice(b, min(b + samples, q.shape[0])), slice(t, min(t + queries, q.shape[2])))
        for b in range(0, q.shape[0], samples)
        for t in range(0, q.shape[2], queries)
    ]


class AttendRows(torch.autograd.Function):
    """(A v, log-sum-exp, entropy, sum of squares): (B, H, T, Dv) and each row's (B, H, T) in fp32.

    With D = s - max(s), e = exp(D), Z = sum(e): L = max + log Z, H = log Z - sum(e D)/Z, S = sum(e^2)/Z^2. The gradient of
    the logits is p (dP - <dO, O> + g_L - g_H (log p + H) + 2 g_S (p - S)); the logits are computed again, block by block.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, ...]:
        shape = q.shape[:3]
        out = torch.empty(*shape, v.shape[-1], dtype=v.dtype, device=v.device)
        lse, entropy, square = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(3))
        for b, t in blocks(q, k):
            e = logits_block(q[b, :, t], k[b], _part(mask, b), causal, scale, t.start)
            top = e.amax(-1, keepdim=True)
            if mask is not None:
                top.masked_fill_(top == float("-inf"), 0.0)
            d = e.sub_(top)
            e = d.exp()
            if mask is not None or causal:
                d.clamp_(min=-1e30)
            z = e.sum(-1)
            if mask is not None:
                z.masked_fill_(z == 0, 1.0)
            logz = z.log()
            lse[b, :, t] = top.squeeze(-1).add_(logz)
            entropy[b, :, t] = logz.sub_(torch.linalg.vecdot(e, d).div_(z))
            square[b, :, t] = torch.linalg.vecdot(e, e).div_(z.square())
            out[b, :, t] = torch.matmul(e.to(v.dtype), v[b]).div_(z.unsqueeze(-1))
        ctx.save_for_backward(q, k, v, out, lse, entropy, square)
        ctx.mask, ctx.causal, ctx.scale = mask, causal, scale
        ctx.set_materialize_grads(False)
        return out, lse, entropy, square

    @staticmethod
    def backward(ctx: Any, g_out: Any, g_lse: Any, g_entropy: Any, g_square: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, entropy, square = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=k.device) for x in (k, v))
        for b, t in blocks(q, k):
            qb, kb = q[b, :, t].float(), k[b].float()
            logp = logits_block(qb, kb, _part(ctx.mask, b), ctx.causal, ctx.scale, t.start).sub_(lse[b, :, t, None])
            p = logp.exp()
            if g_entropy is not None:
                if ctx.mask is not None or ctx.causal:
                    logp.clamp_(min=-1e30)
                slope = logp.add_(entropy[b, :, t, None]).mul_(-g_entropy[b, :, t, None])
            else:
                slope = torch.zeros_like(p) if g_lse is not None or g_square is not None else logp.zero_()
            if g_square is not None:
                twice = 2.0 * g_square[b, :, t, None]
                slope.addcmul_(p, twice).sub_(twice * square[b, :, t, None])
            if g_lse is not None:
                slope.add_(g_lse[b, :, t, None])
            if g_out is not None:
                gb = g_out[b, :, t].float()
                slope.add_(torch.matmul(gb, v[b].float().transpose(-1, -2)))
                slope.sub_(torch.linalg.vecdot(gb, out[b, :, t].float()).unsqueeze(-1))
                dv[b] += torch.matmul(p.transpose(-1, -2), gb)
            ds = slope.mul_(p).mul_(ctx.scale)
            dq[b, :, t] = torch.matmul(ds, kb)
            dk[b] += torch.matmul(ds.transpose(-1, -2), qb)
        return dq, dk.to(k.dtype), dv.to(v.dtype) if g_out is not None else None, None, None, None


def _part(mask: Tensor | None, samples: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[0] == 1 else mask[samples]
