"""Softpick."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, LogitEdit, Method


class Softpick(Method):
    """Replaces the softmax by relu(exp(s) - 1) over the sum of |exp(s) - 1|.

    Zuhri et al. 2025, arXiv 2504.20966.

    On the logits with all masks and edits, in training and evaluation, with `eps` added to the sum. Keys with a
    negative logit get no weight but take part in the sum, so that a row may sum to less than 1 or be zero: no key has
    to serve as a sink. For models trained from scratch. A kernel computes it on CUDA; elsewhere, and with the host's
    dropout or a penalty on the weights, it needs the matrix. Sinks are refused. A watch reads the softmax of the same
    logits.
    """

    eps: float = 1e-8

    no_neutral = "its rows sum to less than those of a softmax at any eps"
    acts = "both"
    rowwise = True

    def check(self) -> None:
        self.require(0 < self.eps < float("inf"), f"eps must be positive and finite, got {self.eps}")

    def logits(self, s: Tensor, call: Call) -> Tensor:
        return s

    def normalize(self, s: Tensor, call: Call) -> Tensor:
        self._check_call(call)
        allowed = call.allowed()
        # Hosts also mask with the lowest finite number, for which |exp(s) - 1| is 1.
        masked = torch.isneginf(s) if allowed is None else torch.isneginf(s) | ~allowed
        s = s.masked_fill(masked, 0.0)
        largest = s.detach().amax(-1, keepdim=True).clamp(min=0.0)
        # |exp(s) - 1| / exp(largest), which keeps all digits of small logits.
        size = -torch.expm1(-s.abs()) * (s.clamp(min=0.0) - largest).exp()
        return size.masked_fill(s <= 0, 0.0) / (size.sum(-1, keepdim=True) + self.eps * (-largest).exp())

    def edit(self, call: Call) -> LogitEdit:
        self._check_call(call)
        return LogitEdit("pick", torch.tensor(self.eps, dtype=torch.float32))

    def _check_call(self, call: Call) -> None:
        if call.sinks is not None:
            raise ValueError(
                f"Softpick: {call.site.name} has sinks, which need a softmax; leave the method or the sinks out there "
                "with where="
            )
