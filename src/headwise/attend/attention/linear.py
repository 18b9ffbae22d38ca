"""Linear attention: weights φ(q)·φ(k) with φ(x) = elu(x) + 1, in linear time and memory, by kernels on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.numerics.kernels import by_kernel, rows_by_kernel
from headwise.numerics.precision import at_least_fp32

# Queries per block of a causal call. Each block computes its matrix, so memory is this many numbers per token.
BLOCK = 64
# Largest head size of the kernels, which hold a matrix of its square.
LARGEST = 128


def linear_attention(q: Tensor, k: Tensor, v: Tensor, share: Tensor | None, causal: bool) -> Tensor:
    """Return the values v (B, H, N, Dv) weighted by φ(q)·φ(k) over the sum of these, (B, H, T, Dv).

    The result is 0 for queries without keys.

    Args:
        q, k: (B, H, T, D) and (B, H, N, D).
        share: a factor of each key's weight, at least 0, broadcastable to (B, H, N), or None.
        causal: whether query i sees keys 0..i only; then T = N.
    """
    shared = () if share is None else (share,)
    small = max(q.shape[-1], v.shape[-1]) <= LARGEST and not any(x.requires_grad for x in shared)
    if small and q.dtype == k.dtype == v.dtype and rows_by_kernel(q, k, v, *shared):
        found: Tensor = _by_kernel(q, k, v, share, causal)[0]
        return found
    return form(q, k, v, share, causal)


def features(x: Tensor) -> Tensor:
    """Return elu(x) + 1 in fp32 or wider, computed as exp(x) below 0, where adding 1 would round small values away."""
    x = at_least_fp32(x)
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def form(q: Tensor, k: Tensor, v: Tensor, share: Tensor | None, causal: bool) -> Tensor:
    """Return what `linear_attention` does, by operators of PyTorch."""
    q, k = features(q), features(k)
    if share is not None:
        k = k * share.unsqueeze(-1)
    # A column of ones computes the sum of the weights along with the values.
    one = torch.ones_like(v[..., :1], dtype=k.dtype)
    wide = torch.cat([v.to(k.dtype), one], dim=-1)
    if not causal:
        out = q @ (k.mT @ wide)
    else:
        out = (_earlier if q.device.type == "cpu" else _earlier_at_once)(q, k, wide)
    total = out[..., -1:]
    return (out[..., :-1] / torch.where(total > 0, total, 1)).to(v.dtype)


def _earlier(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the sum over the keys up to each query.

    Keys of earlier blocks are summed in one matrix (D, Dv), those of the query's own block by their weights.
    """
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    parts = []
    # Split, not sliced: the gradient of every slice is as long as the whole call, which takes quadratic time.
    for own_q, own_k, own_v in zip(*(x.split(BLOCK, dim=2) for x in (q, k, v)), strict=True):
        parts.append(own_q @ state + (own_q @ own_k.mT).tril() @ own_v)
        state = state + own_k.mT @ own_v
    return torch.cat(parts, dim=2)


def _earlier_at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same with the matrices of all blocks at once: few operators, more memory."""
    count = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -count % BLOCK)).unflatten(2, (-1, BLOCK)) for x in (q, k, v))
    states = k.mT @ v
    out = q @ (states.cumsum(2) - states) + (q @ k.mT).tril() @ v
    return out.flatten(2, 3)[:, :, :count]


def _results(q: Tensor, k: Tensor, v: Tensor, share: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Return an empty output and empty sums of each query's weights, (B, H, T) in fp32, which backward reads."""
    # In memory the heads of a token are adjacent, as torch's fused attention leaves them.
    out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


_by_kernel = by_kernel(
    "attend_linear(Tensor q, Tensor k, Tensor v, Tensor? share, bool causal) -> (Tensor, Tensor)",
    form,
    "headwise.attend.attention.triton_linear",
    learned=3,
    results=_results,
)
