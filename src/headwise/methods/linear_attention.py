"""LinearAttention."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.call import Call
from headwise.core.masked import visible
from headwise.core.method import Attend, Method
from headwise.core.precision import at_least_fp32

# Queries per block of a causal call. Each block computes its matrix, so memory is this many numbers per token.
BLOCK = 64


class LinearAttention(Method):
    """Weighs keys by φ(q)·φ(k) with φ(x) = elu(x) + 1 instead of exp(q·k): linear in the number of tokens.

    Katharopoulos et al. 2020, arXiv 2006.16236.

    A_ij = φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j) over the allowed keys, in training and evaluation; the host's scale is not
    used. It is the softmax of the logits log φ(q)·φ(k), which penalties and statistics read. Matrix-free as
    φ(q)·(Σ_j φ(k_j) v_jᵀ), under causality in blocks of 64 queries: exact, and linear in time and memory, for causal
    calls and masks of keys (padding). Other masks, and biases that differ between queries, need the matrix; an additive
    bias multiplies the kernel by its exponential. Methods that edit the logits must come after it. Soft-caps and sinks,
    which are defined for a softmax, are refused in the call.
    """

    no_neutral = "it is another attention than the host's"
    acts = "both"
    replaces_logits = True
    rowwise = True

    def logits(self, s: Tensor, call: Call) -> Tensor:
        _refuse(call)
        kernel = (_features(call.q) @ _features(call.k).mT).log()
        if call.mask is not None and call.mask.dtype != torch.bool:
            kernel = kernel + call.mask
        allowed = call.allowed()
        # Keys that an earlier method dropped stay dropped.
        forbidden = torch.isneginf(s) if allowed is None else torch.isneginf(s) | ~allowed
        return kernel.to(s.dtype).masked_fill(forbidden, float("-inf"))

    def attend(self, attend: Attend, call: Call) -> Attend | None:
        _refuse(call)
        mask, causal = call.mask, call.causal
        if (mask is not None and mask.shape[-2] != 1) or (causal and call.queries != call.keys):
            return None
        q, k = _features(call.q), _features(call.k)
        if mask is not None:
            shares = visible(mask).to(k.dtype)
            if mask.dtype != torch.bool:
                # A hidden key may have -inf, whose product with 0 is nan.
                shares = shares * at_least_fp32(mask).masked_fill(~visible(mask), 0.0).exp()
            k = k * shares.mT
        return lambda v: _mapped(q, k, v, causal)


def _features(x: Tensor) -> Tensor:
    """Return elu(x) + 1 in fp32 or wider, computed as exp(x) below 0, where adding 1 would round small values away."""
    x = at_least_fp32(x)
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _mapped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the normalised map of v (B, H, N, Dv) for features q (B, H, T, D) and k (B, H, N, D).

    The result is 0 for queries without allowed keys.
    """
    # A column of ones computes the sum of the weights along with the values.
    one = torch.ones_like(v[..., :1], dtype=k.dtype)
    wide = torch.cat([v.to(k.dtype), one], dim=-1)
    out = _earlier(q, k, wide) if causal else q @ (k.mT @ wide)
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


def _refuse(call: Call) -> None:
    for setting, reason in ((call.softcap, "caps its logits"), (call.sinks, "has sinks among its logits")):
        if setting is not None:
            raise ValueError(
                f"LinearAttention has no softmax, and {call.site.name} {reason}; leave this layer out with where="
            )
