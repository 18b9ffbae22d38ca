"""SoftCap."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.core import Call, LogitEdit, Method


class SoftCap(Method):
    """Bends the logits into (-cap, cap) by cap·tanh(s / cap).

    Gemma 2, arXiv 2408.00118.

    In training and evaluation, on the scaled logits with additive biases; masked keys stay masked. It bounds the logits
    and does not prevent entropy collapse: two logits may still differ by 2·cap. A kernel applies it on CUDA; elsewhere,
    and with the host's dropout or a penalty on the weights, it needs the matrix.
    """

    cap: float = 50.0

    neutral = {"cap": 1e5}
    strong = {"cap": 0.1}
    live = ("cap",)
    acts = "both"
    rowwise = True

    def check(self) -> None:
        self.require(0 < self.cap < float("inf"), f"cap must be positive and finite, got {self.cap}")

    def logits(self, s: Tensor, call: Call) -> Tensor:
        cap = call.value(self, "cap")
        allowed = call.allowed()
        # Hosts also mask with the lowest finite number, which tanh would turn into -cap.
        masked = torch.isneginf(s) if allowed is None else torch.isneginf(s) | ~allowed
        return (cap * torch.tanh(s.masked_fill(masked, 0.0) / cap)).masked_fill(masked, float("-inf"))

    def edit(self, call: Call) -> LogitEdit:
        return LogitEdit("cap", call.value(self, "cap"))
