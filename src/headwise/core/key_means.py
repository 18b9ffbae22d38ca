"""Means of values over the keys that each query may see."""

from __future__ import annotations

import torch
from torch import Tensor

# Queries whose running means one triangular product makes. A smaller one makes more sums between chunks, a larger one more
# products with the zeros above the diagonal.
CHUNK = 128


def mean_over_all(v: Tensor, keys: int) -> Tensor:
    """Give the mean of v (B, H, N, D) over all keys, (B, H, 1, D)."""
    # A sum's gradient is a view as large as v, a mean's a copy; fp32 keeps a long sum of half precision in range.
    total = v.sum(dim=2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
    return (total / keys).to(v.dtype)


def mean_over_earlier(v: Tensor, queries: int) -> Tensor:
    """Give the running mean of v (B, H, N, D) over keys 0..i, (B, H, T, D).

    Within chunks a triangular product makes it, between chunks their sums: a running sum alone would be one long chain, and
    the whole product T x T.
    """
    keys = v.shape[2]
    v = v[:, :, :queries]
    counts = torch.arange(1, queries + 1, device=v.device).clamp(max=keys).to(v.dtype)[:, None]
    if queries > keys:
        raise ValueError(f"a causal call has {queries} queries and only {keys} keys")
    size = min(CHUNK, queries)
    short = -queries % size
    chunks = torch.nn.functional.pad(v, (0, 0, 0, short)).unflatten(2, (-1, size))
    triangle = torch.ones(size, size, dtype=v.dtype, device=v.device).tril()
    within = triangle @ chunks
    before = within[:, :, :, -1:].cumsum(2) - within[:, :, :, -1:]
    return (within + before).flatten(2, 3)[:, :, :queries] / counts


def mean_over_allowed(v: Tensor, allowed: Tensor, entries: int) -> Tensor:
    """Give the mean of v (B, H, N, D) over allowed keys (B|1, H|1, T|1, N), (B, H, T|1, D); blocks where it has many entries."""
    if allowed.shape[2] == 1 or entries <= 1 << 20:
        return _mean(allowed, v)
    return torch.cat([_mean(part, v) for part in allowed.split(CHUNK * 8, dim=2)], dim=2)


def _mean(allowed: Tensor, v: Tensor) -> Tensor:
    weights = allowed.to(v.dtype)
    # A query without any key gets 0, and no division by 0.
    counts = allowed.sum(-1, keepdim=True).clamp(min=1).to(v.dtype)
    return (weights.expand(*v.shape[:2], *weights.shape[2:]) @ v) / counts
