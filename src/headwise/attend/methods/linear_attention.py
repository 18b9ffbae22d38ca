"""LinearAttention."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.attention.linear import features, linear_attention
from headwise.attend.core import Attend, Call, Method
from headwise.numerics.masked import visible
from headwise.numerics.precision import at_least_fp32


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
        kernel = (features(call.q) @ features(call.k).mT).log()
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
        share = None
        if mask is not None:
            share = at_least_fp32(visible(mask).to(call.k.dtype))
            if mask.dtype != torch.bool:
                # A hidden key may have -inf, whose product with 0 is nan.
                share = share * at_least_fp32(mask).masked_fill(~visible(mask), 0.0).exp()
            share = share[..., 0, :]
        return lambda v: linear_attention(call.q, call.k, v, share, causal)


def _refuse(call: Call) -> None:
    for setting, reason in ((call.softcap, "caps its logits"), (call.sinks, "has sinks among its logits")):
        if setting is not None:
            raise ValueError(
                f"LinearAttention has no softmax, and {call.site.name} {reason}; leave this layer out with where="
            )
