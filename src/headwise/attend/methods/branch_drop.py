"""BranchDrop."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.core import Call, Method


class BranchDrop(Method):
    """Leaves out the whole attention branch of a sample, and scales the branches that stay up by 1 / (1 - p).

    Huang et al. 2016, arXiv 1603.09382 (stochastic depth), on the attention branch alone.

    Drawn per sample while training, where the branch enters the residual. A control, as it drops all heads at once.
    """

    p: float = 0.1

    neutral = {"p": 0.0}
    strong = {"p": 0.7}
    live = ("p",)
    random = True

    def check(self) -> None:
        self.require(0 <= self.p < 1, f"p must lie in [0, 1), got {self.p}")

    def branch(self, y: Tensor, call: Call) -> Tensor:
        factor = call.factor_draw(self, (call.samples,), call.value(self, "p"))
        return y * call.per_sample(factor).view(-1, *[1] * (y.dim() - 1)).to(y.dtype)
