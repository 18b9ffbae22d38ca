"""Row statistics of attention weights without keeping the matrix, differentiable in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 22


def logits_block(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, start: int) -> Tensor:
    """Give the masked logits (B, H, t, N) in fp32 of the queries that begin at row `start`."""
    s = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        rows = mask if mask.shape[-2] == 1 else mask[..., start : start + q.shape[2], :]
        if rows.dtype == torch.bool:
            s.masked_fill_(~rows, float("-inf"))
        else:
            s += rows.float()
    if causal:
        query = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
        s.masked_fill_(torch.arange(k.shape[2], device=q.device) > query, float("-inf"))
    return s


def spans(q: Tensor, k: Tensor, limit: int = BLOCK) -> list[slice]:
    """Cut the queries so that a block of logits has at most `limit` entries."""
    size = max(1, limit // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(i, min(i + size, q.shape[2])) for i in range(0, q.shape[2], size)]


class RowStatistics(torch.autograd.Function):
    """(log-sum-exp, entropy, sum of squares) of each row of A, each (B, H, T) in fp32.

    With D = s - max(s), e = exp(D), Z = sum(e): L = max + log Z, H = log Z - sum(e D)/Z, sum of squares = sum(e^2)/Z^2.
    The gradients are ds = p (g_L - g_H (log p + H) + 2 g_S (p - S)); the logits are computed again, block by block.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, ...]:
        parts = []
        for rows in spans(q, k):
            d, top = _shift(logits_block(q[:, :, rows], k, mask, causal, scale, rows.start))
            e = d.exp()
            z = e.sum(-1)
            square = torch.linalg.vecdot(e, e) / z.square()
            entropy = z.log() - torch.linalg.vecdot(e, d.clamp_(min=-1e30)) / z
            parts.append((top.squeeze(-1) + z.log(), entropy, square))
        lse, entropy, square = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, lse, entropy, square)
        ctx.mask, ctx.causal, ctx.scale = mask, causal, scale
        return lse, entropy, square

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor, g_entropy: Tensor, g_square: Tensor) -> tuple[Any, ...]:
        q, k, lse, entropy, square = ctx.saved_tensors
        dq, dk = torch.empty_like(q), torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        for rows in spans(q, k):
            logp = logits_block(q[:, :, rows], k, ctx.mask, ctx.causal, ctx.scale, rows.start)
            logp -= lse[:, :, rows, None]
            p = logp.exp()
            h, s = entropy[:, :, rows, None], square[:, :, rows, None]
            slope = logp.clamp_(min=-1e30).add_(h).mul_(-g_entropy[:, :, rows, None]).add_(g_lse[:, :, rows, None])
            slope += (p - s).mul_(2.0 * g_square[:, :, rows, None])
            ds = slope.mul_(p).mul_(ctx.scale)
            dq[:, :, rows] = (ds @ k.float()).to(q.dtype)
            dk += ds.transpose(-1, -2) @ q[:, :, rows].float()
        return dq, dk.to(k.dtype), None, None, None


def _shift(s: Tensor) -> tuple[Tensor, Tensor]:
    top = s.amax(-1, keepdim=True)
    # A row without any key: entropy 0 and sums of 0, never NaN.
    top = top.masked_fill(top == float("-inf"), 0.0)
    d = s.sub_(top)
    empty = (d == float("-inf")).all(-1, keepdim=True)
    return d.masked_fill_(empty, 0.0) if bool(empty.any()) else d, top
