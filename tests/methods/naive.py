"""Attention written out, and ways to see what a method does to it."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core.method import Method
from headwise.testing.calls import attend_with


def qkv(
    b: int = 2, h: int = 3, t: int = 6, n: int | None = None, d: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Make random q (b, h, t, d), k and v (b, h, n, d)."""
    g = torch.Generator().manual_seed(seed)
    n = t if n is None else n
    return (
        torch.randn(b, h, t, d, generator=g),
        torch.randn(b, h, n, d, generator=g),
        torch.randn(b, h, n, d, generator=g),
    )


def logits(q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Write out the masked logits."""
    s = torch.einsum("bhtd,bhnd->bhtn", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return s


def weights(q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Write out the attention weights."""
    return logits(q, k, mask, causal).softmax(-1)


def seen_weights(method: Method, q: Tensor, k: Tensor, **settings) -> Tensor:
    """See the weights (B, H, T, N) that a method leaves: what it does to values that are the identity."""
    values = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    return attend_with([method], q, k, values, **settings)[0]


def penalty(method: Method, q: Tensor, k: Tensor, v: Tensor, **settings) -> Tensor:
    """Return the penalty of one call."""
    return attend_with([method], q, k, v, **settings)[1]


def logits_of(a: Tensor) -> tuple[Tensor, Tensor]:
    """Make q and k (B, H, T, N) whose attention weights are `a` (rows that sum to 1, entries above 0 or tiny)."""
    n = a.shape[-1]
    q = a.clamp(min=1e-30).log() * n**0.5
    return q, torch.eye(n).expand(*a.shape[:2], n, n)


PADDING = (torch.arange(6) < torch.tensor([6, 4])[:, None])[:, None, None, :]
