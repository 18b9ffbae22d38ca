"""StableSoftmax."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.attend.attention.softmax import logits
from headwise.attend.core import Attend, Call, LogitEdit, Method
from headwise.numerics.precision import at_least_fp32

# Entries of the weights that are computed at once. Larger calls use blocks of queries, recomputed in backward.
WHOLE = 1 << 24


class StableSoftmax(Method):
    """Lowers the exponents of a row whose largest logit repeats, so that no weight is exactly 1 where values are added.

    Qiu and Yao 2025, arXiv 2510.04212.

    In half precision exp(s - m), with m the row's largest logit, is multiplied with the values before it is divided by
    the row's sum. If m repeats, several values are added with weight exactly 1, and the small contributions of the
    other keys decide all ties in rounding: values of one sign give errors of one sign, which can make training explode.
    Here m is replaced by beta·m if it repeats and is positive, and by 0 if it repeats and is negative. This is the same
    softmax with different rounding, in training only. As in the authors' code, m repeats if two weights would be
    rounded to 1. Two details are not in the paper: the sum is that of the rounded weights, and the exponents are
    lowered by at most half of the dtype's range (44 in bf16), beyond which weights would become 0.

    On CUDA a kernel computes it, with the largest two logits so far instead of those of the row; elsewhere, and with
    the host's dropout, blocks of queries do: slower than a fused kernel, and without its error. If attention is
    computed on the matrix anyway (for soft-caps, weights that a host needs, logits that another method edits), weights
    are divided by the sum first and nothing is shifted.
    """

    beta: float = 2.0

    no_neutral = "at any setting only rounding changes"
    only_rounding = True
    strong = {"beta": 8.0}
    commutes_with_dropout = True
    rowwise = True

    def check(self) -> None:
        self.require(self.beta > 1, f"beta must be above 1, got {self.beta}")

    def logits(self, s: Tensor, call: Call) -> Tensor:
        return s

    def edit(self, call: Call) -> LogitEdit:
        return LogitEdit("stable", torch.tensor(self.beta, dtype=torch.float32))

    def attend(self, attend: Attend, call: Call) -> Attend:
        return lambda v: self._mapped(v, call)

    def _mapped(self, v: Tensor, call: Call) -> Tensor:
        call.layer.ran.explicit = True
        step = max(1, WHOLE // (call.batch * call.heads * call.keys))
        if step >= call.queries:
            return self._rows(call, call.q, call.k, v)
        parts = [call.block(slice(start, start + step)) for start in range(0, call.queries, step)]
        outs = [checkpoint(self._rows, part, part.q, call.k, v, use_reentrant=False) for part in parts]
        return torch.cat(outs, dim=2)

    def _rows(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = logits(call, q, k)
        if call.sinks is not None:
            # A sink is a key without a value.
            s = torch.cat([s, call.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
        # The softmax cancels any shift, so shifts get no gradient.
        largest = s.detach().amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -math.inf, 0.0)
        repeats = ((s.detach() - largest).exp().to(v.dtype) == 1).sum(-1, keepdim=True) > 1
        lower = torch.where(largest > 0, (self.beta - 1) * largest, -largest)
        lower = lower.clamp(max=-math.log(torch.finfo(v.dtype).tiny) / 2)
        weights = (s - largest - torch.where(repeats, lower, 0.0)).exp().to(v.dtype)
        total = at_least_fp32(weights).sum(-1, keepdim=True)
        out = F.dropout(weights[..., : k.shape[2]], call.dropout) @ v
        return (at_least_fp32(out) / torch.where(total > 0, total, 1.0)).to(v.dtype)
