"""RelaxedAttention."""

from __future__ import annotations

from torch import Tensor

from headwise.attend.attention.means import towards_mean
from headwise.attend.core import Attend, Call, Method


class RelaxedAttention(Method):
    """Mixes the uniform distribution into the attention weights.

    Lohrenz et al. 2021, arXiv 2107.01275; 2022, arXiv 2209.09735.

    A' = (1 - gamma)·A + gamma / (number of allowed keys), after the softmax and before the host's attention dropout,
    while training. With `fuzziness`, gamma is drawn from a normal distribution of this standard deviation once per
    layer and pass, and clipped to [0, 1]. `matched_inference=True` also applies gamma in evaluation. `support="all"`
    spreads over all keys including padding and future ones, as in the authors' code. Matrix-free as
    (1 - gamma)·A·V + gamma·mean(V), exact if the host drops no weights.
    """

    gamma: float = 0.1
    fuzziness: float = 0.0
    matched_inference: bool = False
    support: str = "allowed"

    neutral = {"gamma": 0.0}
    strong = {"gamma": 0.9}
    live = ("gamma",)
    rowwise = True

    def check(self) -> None:
        self.require(0 <= self.gamma <= 1, f"gamma must lie in [0, 1], got {self.gamma}")
        self.require(self.fuzziness >= 0, f"fuzziness must be at least 0, got {self.fuzziness}")
        self.choose("support", "allowed", "all")

    def acts_in(self, training: bool) -> bool:
        return training or self.matched_inference

    def draws(self) -> bool:
        return self.fuzziness > 0

    def weights(self, a: Tensor, call: Call) -> Tensor:
        gamma = self._gamma(call)
        uniform = call.uniform() if self.support == "allowed" else self._has_keys(call) / call.keys
        return (1 - gamma) * a + (gamma * uniform).to(a.dtype)

    def attend(self, attend: Attend, call: Call) -> Attend:
        gamma = self._gamma(call)
        if self.support == "allowed":
            return towards_mean(attend, gamma, call)
        return lambda v: (1 - gamma) * attend(v) + gamma * self._mean_of_all(v, call)

    def _gamma(self, call: Call) -> Tensor:
        gamma = call.value(self, "gamma")
        if self.fuzziness and call.training:
            return (gamma + self.fuzziness * call.normal_draw(self, ())).clamp(0, 1)
        return gamma

    def _mean_of_all(self, v: Tensor, call: Call) -> Tensor:
        return v.mean(2, keepdim=True) * self._has_keys(call).to(v.dtype)

    def _has_keys(self, call: Call) -> Tensor:
        # 1 for queries with an allowed key, else 0: rows without one stay 0 with either support.
        allowed = call.allowed() if call.mask is not None else None
        return call.q.new_ones(1, 1, 1, 1).float() if allowed is None else allowed.any(-1, keepdim=True).float()
