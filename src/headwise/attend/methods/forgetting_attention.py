"""ForgettingAttention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.attend.core import Call, LogitEdit, Method, MethodState, Site
from headwise.attend.methods.layer_input import JOINT, tokens_of_queries
from headwise.attend.methods.real_tokens import whole_of
from headwise.numerics.precision import at_least_fp32

# An fp32 number (24 bits) is the sum of this many bf16 numbers (8 bits).
TERMS = 3


class ForgettingAttention(Method):
    """Lowers the logits of past tokens by the learned forget gates of the tokens since.

    Lin et al. 2025, arXiv 2503.02130 (Forgetting Transformer).

    s_ij + c_i - c_j in training and evaluation, with c the running sum of log f, and f = σ(w·x + b) a gate per token
    and head computed from the layer's input x. w starts at 0 (the authors draw it) and b at `bias`, 0 as in the paper:
    every gate is ½, and attention reaches a few tokens back. For a trained model use 6 or more, where a gate is 0.998.
    The host keeps its positions; the paper trains with and without them. On CUDA a kernel adds the difference of sums
    to the logits. Elsewhere, and beside methods that edit or read the weights, causal calls need no matrix: queries get
    the additional coordinates c_i and 1, keys 1 and -c_j. The sums are kept in fp32, in bf16 as three coordinates that
    add up to them; fp16, whose range ends at 65,504, has no such form. Layers that are not causal forget in both
    directions by -|c_i - c_j|, which is not in the paper, as do masks if the host does not declare itself causal;
    without the kernel, and with the host's dropout or a penalty, these and fp16 need the matrix. Caches do not hold the
    gates of past tokens: generate with use_cache=False.
    """

    bias: float = 0.0

    neutral = {"bias": 40.0}
    acts = "both"
    learns = True
    self_only = True
    rowwise = True
    shapes = ("heads", "hidden")

    def refuse(self, site: Site) -> str | None:
        if site.pooled:
            return "counts the tokens between a query and a key, and this layer pools one of them"
        if site.windowed:
            return "counts the tokens between a query and a key, and this layer sees windows"
        return JOINT if site.joint else None

    def build(self, site: Site, state: MethodState) -> None:
        assert site.heads and site.hidden  # the plan refuses sites without what `shapes` names
        state.parameter("weight", torch.zeros(site.heads, site.hidden, dtype=torch.float32))
        state.parameter("bias", torch.full((site.heads,), self.bias, dtype=torch.float32))

    def logits(self, s: Tensor, call: Call) -> Tensor:
        sums = self._sums(call)
        own = sums if call.query_block is None else sums[..., call.query_block]
        between = own[..., :, None] - sums[..., None, :]
        return s + (between if _one_way(call) else -between.abs()).to(s.dtype)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
        if not _one_way(call) or q.dtype == torch.float16:
            return None
        # c_i cancels in the softmax, but sinks and readers of the logits depend on it.
        sums = self._sums(call) / call.scale
        own, past = _terms(sums, q.dtype), _terms(-sums, k.dtype)
        ones = torch.ones_like(own)
        # Padding to the next multiple of 8, which fast kernels require.
        spare = (0, -(q.shape[-1] + 2 * own.shape[-1]) % 8)
        return torch.cat([q, F.pad(torch.cat([own, ones], -1), spare)], -1), torch.cat(
            [k, F.pad(torch.cat([ones, past], -1), spare)], -1
        )

    def edit(self, call: Call) -> LogitEdit:
        return LogitEdit("past" if _one_way(call) else "between", self._sums(call).transpose(1, 2).contiguous())

    def _sums(self, call: Call) -> Tensor:
        """Return the running sums of the gates' logarithms, (B, H, N) in fp32 or wider."""
        whole = whole_of(call)
        if whole.queries != whole.keys:
            raise ValueError(
                f"ForgettingAttention needs the gates of all keys at {call.site.name}, got {whole.queries} tokens and "
                f"{whole.keys} keys; run it without a cache (use_cache=False) and without extra keys"
            )
        state, x = call.state(self), tokens_of_queries(self, whole)
        gates = F.linear(x, state.tensor("weight").to(x.dtype), state.tensor("bias").to(x.dtype))
        return F.logsigmoid(at_least_fp32(gates)).cumsum(1).transpose(1, 2)


def _terms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of a dtype (..., 1 or TERMS) that add up to x in fp32."""
    if torch.finfo(dtype).bits >= 32:
        return x[..., None].to(dtype)
    terms = []
    for _ in range(TERMS):
        terms.append(x.to(dtype))
        x = x - terms[-1]
    return torch.stack(terms, dim=-1)


def _one_way(call: Call) -> bool:
    """Return whether no query sees later keys."""
    return call.causal or bool(call.site.causal)
