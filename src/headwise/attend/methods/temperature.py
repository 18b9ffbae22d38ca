"""Temperature."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method


class Temperature(Method):
    """Divides the logits by a temperature.

    Zhai et al. 2023, arXiv 2303.06296 (the intervention that provokes entropy collapse).

    In training and evaluation; a value below 1 sharpens the weights, above 1 it flattens them. Matrix-free by dividing
    the queries. An additive mask is part of the logits and is divided too, which needs the matrix.
    """

    value: float = 1.0

    neutral = {"value": 1.0}
    strong = {"value": 0.2}
    live = ("value",)
    acts = "both"
    rowwise = True

    def check(self) -> None:
        self.require(0 < self.value < float("inf"), f"value must be positive and finite, got {self.value}")

    def logits(self, s: Tensor, call: Call) -> Tensor:
        return s / call.value(self, "value")

    def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
        if call.mask is not None and call.mask.is_floating_point():
            return None
        return q / call.value(self, "value"), k
