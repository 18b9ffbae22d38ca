"""Masks and soft-caps of the logits, and means over the keys that a query may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Queries per triangular product. Smaller chunks need more sums between chunks, larger ones multiply more of the zeros
# above the diagonal.
CHUNK = 128


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of x (B, H, T, D) at `positions` (B, n), as (B, H, n, D)."""
    return x.gather(2, positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def mask_at(mask: Tensor | None, causal: bool, positions: Tensor, keys: int) -> Tensor | None:
    """Return the mask of the queries at `positions` (B, n), (B, H|1, n, N), with causality in it; None for all keys."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.shape[2] > 1:
            mask = rows_at(mask.expand(len(positions), *mask.shape[1:]), positions)
    if not causal:
        return mask
    seen = torch.arange(keys, device=positions.device) <= positions[:, None, :, None]
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def mean_over_all(v: Tensor, keys: int) -> Tensor:
    """Return the mean of v (B, H, N, D) over all keys, (B, H, 1, D)."""
    # The gradient of a sum is an expanded view, that of a mean a copy. A long sum may overflow in half precision.
    total = v.sum(dim=2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
    return (total / keys).to(v.dtype)


def mean_over_earlier(v: Tensor, queries: int) -> Tensor:
    """Return the running mean of v (B, H, N, D) over keys 0..i, (B, H, T, D)."""
    keys = v.shape[2]
    if queries > keys:
        raise ValueError(f"a causal call has {queries} queries and only {keys} keys")
    v = v[:, :, :queries]
    # A running sum may overflow in half precision.
    wide = torch.promote_types(v.dtype, torch.float32)
    counts = torch.arange(1, queries + 1, device=v.device).to(wide)[:, None]
    return ((v.cumsum(2, dtype=wide) if v.device.type == "cpu" else _running_sum(v.to(wide))) / counts).to(v.dtype)


def _running_sum(v: Tensor) -> Tensor:
    """Return the running sum over keys by parallel products; one sequential sum is fast on a CPU only.

    A triangular product sums within each chunk, and the totals of earlier chunks are added: one product over all keys
    would be T x T.
    """
    queries = v.shape[2]
    size = min(CHUNK, queries)
    chunks = torch.nn.functional.pad(v, (0, 0, 0, -queries % size)).unflatten(2, (-1, size))
    within = torch.ones(size, size, dtype=v.dtype, device=v.device).tril() @ chunks
    before = within[:, :, :, -1:].cumsum(2) - within[:, :, :, -1:]
    return (within + before).flatten(2, 3)[:, :, :queries]


class TowardsEarlier(torch.autograd.Function):
    """(1 - share)·out + share·(running mean of v) in one allocation, which on a CPU costs more than the sums.

    out and v are (B, H, T, D); share is 0-d and gets no gradient. `backward` is differentiable.
    """

    @staticmethod
    def forward(out: Tensor, v: Tensor, share: Tensor) -> Tensor:  # type: ignore[override]  # setup_context takes ctx
        return v.cumsum(2).div_(_counts(v)).lerp_(out, 1 - share)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # one gradient comes in
        (share,) = ctx.saved_tensors
        grad_v = grad * (share / _counts(grad))
        earlier = grad_v.cumsum(2)
        # Value i is part of the means of query i and all later ones: a sum from i to the end.
        return grad * (1 - share), grad_v.sub_(earlier).add_(earlier[:, :, -1:]), None


def _counts(v: Tensor) -> Tensor:
    return torch.arange(1, v.shape[2] + 1, device=v.device).to(v.dtype)[:, None]


def mean_over_allowed(v: Tensor, allowed: Tensor, entries: int) -> Tensor:
    """Return the mean of v (B, H, N, D) over allowed keys (B|1, H|1, T|1, N), (B, H, T|1, D).

    With many `entries` (T·N) it is computed in blocks of queries.
    """
    if allowed.shape[2] == 1 or entries <= 1 << 20:
        return _mean(allowed, v)
    return torch.cat([_mean(part, v) for part in allowed.split(CHUNK * 8, dim=2)], dim=2)


def _mean(allowed: Tensor, v: Tensor) -> Tensor:
    weights = allowed.to(v.dtype)
    # A query without allowed keys gets 0 instead of 0 / 0.
    counts = allowed.sum(-1, keepdim=True).clamp(min=1).to(v.dtype)
    return (weights.expand(*v.shape[:2], *weights.shape[2:]) @ v) / counts


# Float masks forbid a key with -1e4, -1e9, the lowest number of a dtype or -inf; every value up to this one forbids.
# Position biases stay above it: ALiBi, at most one nat per token, gets here after 9000 tokens, where the weight has
# long been 0.
MASKED = -9.0e3

# Swin separates the regions of a shifted window by -100 instead. This holds for such hosts only: elsewhere -100 may be
# a bias. Half of it leaves room for the position bias in the same mask.
APART = -50.0


def hide_other_regions(mask: Tensor) -> Tensor:
    """Return the additive mask of a shifted window with -inf between different regions."""
    return mask.masked_fill(mask < APART, float("-inf"))


def visible(mask: Tensor) -> Tensor:
    """Return which keys a mask, bool or additive, allows: bool, of the mask's shape."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def allowed_keys(mask: Tensor | None, causal: bool, queries: slice, keys: int, device: torch.device) -> Tensor | None:
    """Return which keys each query of a slice may see, bool (B|1, H|1, T|1, N), or None where all see all keys."""
    allowed = None
    if mask is not None:
        allowed = visible(mask)
        while allowed.dim() < 4:
            allowed = allowed.unsqueeze(0)
    if not causal:
        return allowed
    # The slice counts queries from the start of the call, as keys are counted.
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    order = (torch.arange(keys, device=device) <= query)[None, None]
    return order if allowed is None else allowed & order


def masked_logits(
    products: Tensor,
    mask: Tensor | None = None,
    allowed: Tensor | None = None,
    *,
    softcap: float | None = None,
    forbidden: float = float("-inf"),
) -> Tensor:
    """Return the logits (B, H, t, N): scaled products of queries and keys, capped and masked in place.

    Args:
        products: the scaled products, differentiable or not; their memory is reused.
        mask: added to the logits if it is additive; a bool mask is ignored, being part of `allowed`.
        allowed: which keys each query may see, bool, broadcastable to the products; None where all are allowed.
        softcap: the host's c of c * tanh(s / c).
        forbidden: the logit of a forbidden key.
    """
    s = products
    # Capped before the mask, as in Gemma 2: tanh would make -inf finite.
    if softcap is not None:
        # The gradient of tanh needs its result unchanged.
        s = softcap * torch.tanh(s / softcap) if s.requires_grad else s.div_(softcap).tanh_().mul_(softcap)
    if mask is not None and mask.dtype != torch.bool:
        s = s.add_(mask.to(s.dtype))
    return s if allowed is None else s.masked_fill_(~allowed, forbidden)
