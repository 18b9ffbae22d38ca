"""Means of values over the keys that each query may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Queries whose running means one triangular product makes. A smaller one makes more sums between chunks, a larger one
# more products with the zeros above the diagonal.
CHUNK = 128


def mean_over_all(v: Tensor, keys: int) -> Tensor:
    """Return the mean of v (B, H, N, D) over all keys, (B, H, 1, D)."""
    # A sum's gradient is a view as large as v, a mean's a copy; fp32 keeps a long sum of half precision in range.
    total = v.sum(dim=2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
    return (total / keys).to(v.dtype)


def mean_over_earlier(v: Tensor, queries: int) -> Tensor:
    """Return the running mean of v (B, H, N, D) over keys 0..i, (B, H, T, D)."""
    keys = v.shape[2]
    if queries > keys:
        raise ValueError(f"a causal call has {queries} queries and only {keys} keys")
    v = v[:, :, :queries]
    # A running sum of half precision would leave its range.
    wide = torch.promote_types(v.dtype, torch.float32)
    counts = torch.arange(1, queries + 1, device=v.device).to(wide)[:, None]
    return ((v.cumsum(2, dtype=wide) if v.device.type == "cpu" else _running_sum(v.to(wide))) / counts).to(v.dtype)


def _running_sum(v: Tensor) -> Tensor:
    """Return the running sum over keys where many threads share it: one chain along the keys is quick on a CPU alone.

    Within chunks a triangular product makes it, between chunks their sums: the whole product would be T x T.
    """
    queries = v.shape[2]
    size = min(CHUNK, queries)
    chunks = torch.nn.functional.pad(v, (0, 0, 0, -queries % size)).unflatten(2, (-1, size))
    within = torch.ones(size, size, dtype=v.dtype, device=v.device).tril() @ chunks
    before = within[:, :, :, -1:].cumsum(2) - within[:, :, :, -1:]
    return (within + before).flatten(2, 3)[:, :, :queries]


class TowardsEarlier(torch.autograd.Function):
    """(1 - share)·out + share·(running mean of v) in one allocation: on a CPU, fresh memory costs more than the sums.

    out and v are (B, H, T, D), share is 0-d and has no gradient. Second derivatives are those of the operations in
    `backward`.
    """

    @staticmethod
    def forward(out: Tensor, v: Tensor, share: Tensor) -> Tensor:  # type: ignore[override]  # setup_context takes ctx
        return v.cumsum(2).div_(_places(v)).lerp_(out, 1 - share)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keep the share alone."""
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # one gradient comes in
        (share,) = ctx.saved_tensors
        given = grad * (share / _places(grad))
        earlier = given.cumsum(2)
        # A value counts for its own query and all later ones.
        return grad * (1 - share), given.sub_(earlier).add_(earlier[:, :, -1:]), None


def _places(v: Tensor) -> Tensor:
    return torch.arange(1, v.shape[2] + 1, device=v.device).to(v.dtype)[:, None]


def mean_over_allowed(v: Tensor, allowed: Tensor, entries: int) -> Tensor:
    """Return the mean of v (B, H, N, D) over allowed keys (B|1, H|1, T|1, N), (B, H, T|1, D); blocks where it has many
    entries."""
    if allowed.shape[2] == 1 or entries <= 1 << 20:
        return _mean(allowed, v)
    return torch.cat([_mean(part, v) for part in allowed.split(CHUNK * 8, dim=2)], dim=2)


def _mean(allowed: Tensor, v: Tensor) -> Tensor:
    weights = allowed.to(v.dtype)
    # A query without any key gets 0, and no division by 0.
    counts = allowed.sum(-1, keepdim=True).clamp(min=1).to(v.dtype)
    return (weights.expand(*v.shape[:2], *weights.shape[2:]) @ v) / counts
