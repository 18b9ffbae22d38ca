"""AttentionDropout."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Dropping, Method
from headwise.attend.methods.real_tokens import whole_of


class AttentionDropout(Method):
    """Sets single attention weights to zero and scales the rest up by 1 / (1 - p): the control of every comparison.

    Vaswani et al. 2017, arXiv 1706.03762 (plain attention dropout, as hosts offer it).

    Drawn per sample, head, query and key while training. All rows have the same scale, so they no longer sum to 1. It
    runs without the matrix: one operator draws the elements of a block, uses them, and draws them again in backward.
    """

    p: float = 0.1

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True
    rowwise = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")

    def drop(self, call: Call) -> Dropping:
        return call.dropping(self, call.value(self, "p"), renormalize=False)

    def weights(self, a: Tensor, call: Call) -> Tensor:
        p = call.value(self, "p")
        draw = call.uniform_draw(self, (call.samples, call.heads, whole_of(call).queries, call.keys), query_dim=2)
        return a * ((call.per_sample(draw) >= p) / (1 - p)).to(a.dtype)
