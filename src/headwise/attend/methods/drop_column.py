"""DropColumn."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Attend, Call, Method


class DropColumn(Method):
    """Sets randomly chosen key columns of the attention weights to zero.

    Meindl 2023, "Regularization Techniques for Attention Layers in Transformer Models" (a blog, after Zehui et al.
    2019).

    Drawn per sample, head and key while training. The remaining weights are not scaled up, and a query may lose all its
    weight. As A·diag(m)·V = A·(m⊙V), it costs one elementwise product with the values and keeps the fused kernel.
    """

    p: float = 0.2

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True
    # Both multiply single weights, in either order.
    commutes_with_dropout = True
    rowwise = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")

    def weights(self, a: Tensor, call: Call) -> Tensor:
        return a * self._kept(call).to(a.dtype)

    def attend(self, attend: Attend, call: Call) -> Attend:
        kept = self._kept(call).mT
        return lambda v: attend(v * kept)

    def _kept(self, call: Call) -> Tensor:
        return call.per_sample(call.kept_draw(self, (call.samples, call.heads, 1, call.keys), call.value(self, "p")))
